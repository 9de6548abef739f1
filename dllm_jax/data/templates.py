"""Prompts by family and task, with the strings of dLLM-RL: values for `data.template`.

They are all of a prompt, chat tokens too, so that they go with `data.raw=True`. There the
function header that begins an answer (`{prefix}`) becomes part of a Jinja2 template, which
executes what it holds; here it is text. Jinja2 also drops the line break that ends a template,
so that dLLM-RL's prompts of all tasks but functions end before the last one written here.
"""

from dllm_jax.data import BOXED, MATH

FUNCTION = (
    "{question}\nPlace your code within a single Python code block ```python ```. "
    "Do not include more than one code block. "
)
STDIO = (
    "This is the problem:\n{question}\nYou should put your code in ```python ```. "
    "Use input() to read input and print() to produce output in your script. "
)
CHOICE = (
    "This is the problem:\n{question}\nYou need to think step by step and put the final "
    "option (A, B, C, or D only\N{EM DASH}no other character) in \\boxed{}. "
)
TURNS = "<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant"
# What surrounds the user's turn.
FRAMES = {
    "block": f"{TURNS}\n",  # SDAR, TraDo
    "think": f"{TURNS}<think>\n",  # TraDo-Thinking
    "dream": f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{TURNS}\n",
    "llada": "<|startoftext|><|start_header_id|>user<|end_header_id|>{turn}<|eot_id|>"
    "<|startoftext|><|start_header_id|>assistant<|end_header_id|>\n",
}
# The user's turn by task, and by family where one has another.
TASKS = {"math": BOXED, "function": FUNCTION, "stdio": STDIO, "choice": CHOICE}
OWN = {
    ("block", "math"): MATH,
    ("llada", "stdio"): STDIO.replace("\nYou should", "\n You should"),
}


def template(family: str, task: str) -> str:
    """Returns the prompt of a family, a key of FRAMES, and a task, a key of TASKS."""
    if task == "function":  # functions are written without thinking before
        family = "block" if family == "think" else family
        return FRAMES[family].replace("{turn}", TASKS[task]) + "{prefix}"
    return FRAMES[family].replace("{turn}", OWN.get((family, task), TASKS[task]))


TEMPLATES = {
    (family, task): template(family, task) for family in FRAMES for task in TASKS
}
