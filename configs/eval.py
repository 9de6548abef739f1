"""Evaluation: accuracy, pass@k and tokens per forward of a checkpoint, with intervals.

    python -m dllm_jax.eval --config=configs/eval.py
    python -m dllm_jax.data get math500
    python -m dllm_jax.eval --config=configs/eval.py:math500 --config.model.path=DIR
    python -m dllm_jax.eval --config=configs/eval.py:llada-8b/gsm8k

Models: arithmetic (default), full, sums, process, code, pictures, codes, scenes, questions, smollm2, sdar-1.7b, sdar-4b,
sdar-8b, trado-4b, trado-8b, trado-8b-thinking, dream-7b, diffucoder-7b, llada-8b, llada-1.5-8b,
mmada-8b, llada-v-8b, mmada-8b-images: three answers to
each problem, at the temperature, and by the sampler, with which dLLM-RL evaluates. An answer
that was cut at its limit is graded as any other. (The bundled models of sudoku and countdown have
a benchmark's name, and are evaluated with --config=configs/tracerl.py:sudoku, :countdown.)

Benchmarks: math500, gsm8k, aime24 (20 answers to each, as in the paper), humaneval, mbpp,
livecodebench, livebench, countdown, sudoku, seedbench: the set that `python -m dllm_jax.data get` keeps,
its grader, and the prompt that dLLM-RL gives the model's family. Alone they are asked of
trado-4b; MODEL/BENCHMARK names another. A code benchmark runs programs in the jail. seedbench is
of questions about images, data/SEEDBench_IMG_32.json of dLLM-RL, and asked of llada-v-8b.

Result to expect. arithmetic, in half a minute on a CPU: accuracy (pass@1) 0.621, pass@2
0.793, pass@3 0.875, 2.28 tokens per forward (256 problems, three answers to each; twelve to
each say 0.605). Those of scenes, questions, pictures and codes: docs/tiny_images.md. Presets of
published models are unrun.
"""

from configs import released, tracerl
from dllm_jax import checks, config
from dllm_jax.data import sets
from dllm_jax.data.templates import TEMPLATES


def thinking(c):
    """TraDo-8B-Thinking: a long answer to each problem."""
    tracerl.PRESETS["trado-8b"](c)
    c.model.path = "Gen-Verse/TraDo-8B-Thinking"
    c.data.update(template=TEMPLATES["think", "math"], raw=True)
    c.sampler.max_new = 30000
    c.run.folder = "runs/TraDo-8B-Thinking/tracerl"


PRESETS = tracerl.PRESETS | {"trado-8b-thinking": thinking}
# Name: (the set, its task of TEMPLATES; "" is the question alone as the user's turn).
BENCHMARKS = {
    "math500": ("math500", "math"),
    "gsm8k": ("gsm8k", "math"),
    "aime24": ("aime24", "math"),
    "humaneval": ("humaneval", "function"),
    "mbpp": ("mbpp", "function"),
    "livecodebench": ("livecodebench", "stdio"),
    "livebench": ("livebench", "stdio"),
    "countdown": ("countdown_d1", ""),
    "sudoku": ("sudoku_d1", ""),
}
PROMPTS = {"math": 784, "function": 1024, "stdio": 2048, "": 512}  # tokens, at most


# Questions about images, by name: the file, its folder of images, in dLLM-RL's own folder.
IMAGES = {"seedbench": ("data/SEEDBench_IMG_32.json", "data/images")}


ASKED = (*BENCHMARKS, *IMAGES)
CHOICES = (
    f"choose from models: {', '.join(x for x in PRESETS if x not in ASKED)}; "
    f"benchmarks: {', '.join(ASKED)}, as MODEL/BENCHMARK"
)


def about_images(c, model: str, name: str):
    """Sets a benchmark of images for a model that looks, both by name."""
    heldout, root = IMAGES[name]
    c.data.update(heldout=heldout, image_root=root, train="")
    # As their files for evaluation have it.
    answer = {"lladav": 128, "mmada": 512}[released.LOOKING[model][1]]
    threshold = {"lladav": 0.9, "mmada": 0.95}[released.LOOKING[model][1]]
    c.sampler.update(max_new=answer, block=32, steps_per_block=32, threshold=threshold)
    c.run.folder = f"{c.run.folder}/{name}"


def benchmark(c, model: str, name: str):
    """Sets a benchmark for a model, both by name."""
    known, task = BENCHMARKS[name]
    family = released.MODELS.get(model, ("", "block"))[1]
    family = "think" if model == "trado-8b-thinking" else family
    c.data.update(heldout=str(sets.place(known)), answer="answer", train="")
    c.data.update(template=TEMPLATES.get((family, task), "{question}"), raw=bool(task))
    c.rl.reward = sets.SETS[known].reward
    c.sampler.max_prompt = PROMPTS[task]
    if name == "aime24":
        c.eval.answers = 20
    c.run.folder = f"{c.run.folder}/{name}"


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of MODEL, BENCHMARK or MODEL/BENCHMARK."""
    model, _, name = preset.partition("/")
    if model in BENCHMARKS and not name:
        model, name = "trado-4b", model
    if model in IMAGES and not name:
        model, name = "llada-v-8b", model
    if model not in PRESETS:
        raise checks.Refused("preset", f"={checks.shown(preset)}: {CHOICES}")
    c = config.preset(PRESETS, model)
    c.eval.update(problems=0, answers=1 if model == "trado-8b-thinking" else 3)
    c.rl.truncated = "graded"
    c.batch.tokens = 0  # training alone reads it, and it would bound sampler.max_new
    if c.sampler.cache == "prefix" and model not in released.LOOKING:  # full attention
        c.sampler.update(max_new=1024, horizon=128)
        dream = {"top_k": 40, "top_p": 0.95}
        c.sampler.update(dream if c.sampler.top_k else {"strategy": "dynamic"})
    c.run.folder = c.run.folder.replace("tracerl", "eval")
    if name:
        looks = model in released.LOOKING
        checks.one_of("preset", name, tuple(IMAGES if looks else BENCHMARKS))
        (about_images if looks else benchmark)(c, model, name)
    return c
