"""Prompts as dLLM-RL writes them, and what of a record goes into them."""

import pathlib

import pytest

from configs import eval as evaluation
from configs import released
from dllm_jax import config, data
from dllm_jax.data import sets
from dllm_jax.data.templates import FRAMES, TASKS, TEMPLATES
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from tests.viewer.common import write

MODEL = pathlib.Path(__file__).parents[2] / "examples/arithmetic/model"

EXACT = {
    (
        "block",
        "math",
    ): "<|im_start|>user\n{question}\nPlease reason step by step, and put "
    "your final answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n",
    (
        "think",
        "math",
    ): "<|im_start|>user\nYou need to put your final answer in \\boxed{}. "
    "This is the problem:\n{question}<|im_end|>\n<|im_start|>assistant<think>\n",
    (
        "block",
        "function",
    ): "<|im_start|>user\n{question}\nPlace your code within a single "
    "Python code block ```python ```. Do not include more than one code block. <|im_end|>\n"
    "<|im_start|>assistant\n{prefix}",
    (
        "think",
        "stdio",
    ): "<|im_start|>user\nThis is the problem:\n{question}\nYou should put "
    "your code in ```python ```. Use input() to read input and print() to produce output in "
    "your script. <|im_end|>\n<|im_start|>assistant<think>\n",
    ("dream", "math"): "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nYou need to put your final answer in \\boxed{}. This is the problem:\n"
    "{question}<|im_end|>\n<|im_start|>assistant\n",
    ("dream", "choice"): "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nThis is the problem:\n{question}\nYou need to think step by step and "
    "put the final option (A, B, C, or D only—no other character) in \\boxed{}. <|im_end|>\n"
    "<|im_start|>assistant\n",
    (
        "llada",
        "math",
    ): "<|startoftext|><|start_header_id|>user<|end_header_id|>You need to "
    "put your final answer in \\boxed{}. This is the problem:\n{question}<|eot_id|>"
    "<|startoftext|><|start_header_id|>assistant<|end_header_id|>\n",
    (
        "llada",
        "stdio",
    ): "<|startoftext|><|start_header_id|>user<|end_header_id|>This is the "
    "problem:\n{question}\n You should put your code in ```python ```. Use input() to read "
    "input and print() to produce output in your script. <|eot_id|><|startoftext|>"
    "<|start_header_id|>assistant<|end_header_id|>\n",
}


@pytest.mark.parametrize("key", EXACT, ids="/".join)
def test_the_strings_of_the_reference(key):
    assert TEMPLATES[key] == EXACT[key]


def test_the_table_is_whole_and_functions_are_written_without_thinking():
    assert TEMPLATES.keys() == {(x, y) for x in FRAMES for y in TASKS}
    assert TEMPLATES["think", "function"] == TEMPLATES["block", "function"]
    for key, template in TEMPLATES.items():
        assert template.count("{question}") == 1
        assert ("{prefix}" in template) == (key[1] == "function")


@pytest.fixture(scope="module")
def tok():
    """The bundled tokenizer: of characters, so that ids say the text."""
    return data.tokenizer(str(MODEL))


def text_of(tok, prompt: list[int]) -> str:
    """Returns the text of ids."""
    return tok.decode(prompt)


def test_a_raw_template_is_the_prompt_and_fields_are_text(tok, tmp_path):
    cfg = data.DataConfig(template=TEMPLATES["block", "function"], raw=True)
    rows = [{"question": "a {prefix} {{b}}", "prefix": "def f(x): {question}\n"}]
    rows[0]["test_list"] = ["assert f(1) == 2"]
    path = write(tmp_path / "x.jsonl", rows)
    grader = rewards.grader("code", RewardConfig())
    (problem,) = data.problems(str(path), tok, cfg, grader)
    assert text_of(tok, problem.prompt_ids) == TEMPLATES["block", "function"].replace(
        "{question}", "a [p] {{b}}"
    ).replace("{prefix}", "def f(x): {question}\n").replace("[p]", "{prefix}")
    assert problem.begun == "def f(x): {question}\n"
    rows[0]["Prefix"] = rows[0].pop("prefix")  # as its documents have the field
    written = write(tmp_path / "y.jsonl", rows)
    (like,) = data.problems(str(written), tok, cfg, grader)
    assert (like.prompt_ids, like.begun) == (problem.prompt_ids, problem.begun)
    plain = data.DataConfig(template=data.MATH)
    (other,) = data.problems(str(path), tok, plain, grader)
    assert other.begun == ""
    assert text_of(tok, other.prompt_ids) == TEMPLATES["block", "math"].replace(
        "{question}", rows[0]["question"]
    )


def test_a_prefix_is_in_the_prompts_that_sft_and_pairs_are_about(tok, tmp_path):
    cfg = data.DataConfig(template="{question}|{prefix}", raw=True)
    form = {"end": 0, "pad": 0, "vocab": len(tok), "block": 4, "slots": 80}
    row = {"question": "a", "prompt": "a", "prefix": "b", "response": "c"}
    row |= {"chosen": "d", "rejected": "e"}
    for pairs in (False, True):
        path = str(write(tmp_path / "x.jsonl", [row]))
        found, _ = data.examples(path, tok, cfg, **form, pairs=pairs)
        assert {text_of(tok, list(x.prompt)) for x in found} == {"a|b"}
        path = str(write(tmp_path / "x.jsonl", [{**row, "prefix": None}]))
        with pytest.raises(ValueError, match="record 1: .*'prefix'"):
            data.examples(path, tok, cfg, **form, pairs=pairs)


def test_a_record_without_a_prefix_and_a_turn_with_one_are_refused(tok, tmp_path):
    cfg = data.DataConfig(template=TEMPLATES["block", "function"], raw=True)
    rows = [{"question": "a", "test_list": ["assert f(1) == 2"]}]
    path = write(tmp_path / "x.jsonl", rows)
    grader = rewards.grader("code", RewardConfig())
    with pytest.raises(ValueError, match="record 1: no field 'prefix', it has"):
        data.problems(str(path), tok, cfg, grader)
    with pytest.raises(ValueError, match="{prefix} needs data.raw=True"):
        data.DataConfig(template="{question}{prefix}")


def test_the_program_of_an_answer_begins_in_its_prompt():
    prefix = "Here is the completed code:\n```python\ndef twice(x):\n"
    record = {"test_list": ["assert twice(3) == 6"], "question": "?", "prefix": prefix}
    told = data.Problem([], "?", "", record, begun=prefix)
    grader = rewards.grader("code", RewardConfig())
    grader.begin()
    texts = ["    return 2 * x\n```", "    return x\n```", "    return 2 * x\n"]
    assert grader.grade(texts, [told] * 3, None).reward_n.tolist() == [1, 0, 0]


# ---- Benchmarks --------------------------------------------------------------------------


@pytest.mark.parametrize("name", evaluation.BENCHMARKS)
def test_every_benchmark_freezes_for_every_family(name, monkeypatch, tmp_path):
    monkeypatch.setenv(sets.CACHE, str(tmp_path))
    assert name in evaluation.__doc__
    for model in ("trado-4b", "trado-8b-thinking", "dream-7b", "llada-8b"):
        cfg = config.freeze(evaluation.get_config(f"{model}/{name}"))
        known, task = evaluation.BENCHMARKS[name]
        assert cfg.data.heldout == f"{tmp_path}/{known}.jsonl"
        assert cfg.rl.reward == sets.SETS[known].reward
        family = released.MODELS.get(model, ("", "think"))[1]
        assert cfg.data.template == TEMPLATES.get((family, task), "{question}")
        assert cfg.data.raw == bool(task) and cfg.run.folder.endswith(f"/{name}")
        thinks = model == "trado-8b-thinking"
        each = 20 if name == "aime24" else 1 if thinks else 3
        assert cfg.eval.answers == each
        assert (cfg.sampler.max_new == 30000) == thinks
    alone = config.freeze(evaluation.get_config(name))
    assert alone == config.freeze(evaluation.get_config(f"trado-4b/{name}"))


@pytest.mark.parametrize(
    "preset", ["math", "trado-4b/math", "nothing/math500", "/gsm8k"]
)
def test_an_unknown_preset_lists_the_known(preset):
    with pytest.raises(ValueError, match="choose from .*"):
        evaluation.get_config(preset)
