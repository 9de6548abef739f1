"""Supervised fine-tuning: random masks, one block after the other, traces, next tokens.

    python examples/arithmetic/make.py
    python -m dllm_jax.train --config=configs/sft.py

makes the bundled arithmetic model from a blank one. Each answer token is masked by a coin
of its own inside its block, the blocks before it are clean (dLLM-RL's semi-AR SFT).

Lines of the data hold a question and a response, `messages`, or `prompt` and `response` as
text that needs no template (dLLM-RL's format). The noise is drawn anew whenever an example
comes up: noise.kind is semi_ar, bernoulli (with objective.aggregate="elbo" weighed by 1/p),
trace, or ar for models that predict the next token. A trace is the `step_map` of a line:

    python -m dllm_jax.generate --model=examples/arithmetic/model \
        --prompts=examples/arithmetic/train.jsonl --out=runs/arithmetic/traces.jsonl
    python -m dllm_jax.train --config=configs/sft.py:trace

Presets: arithmetic (default), full, sudoku, sums, countdown, functions, pictures, codes, scenes, questions, smollm2, trace,
adapt; for released models, with data of your own, sdar-1.7b, sdar-4b, sdar-8b, trado-4b, trado-8b, dream-7b,
diffucoder-7b, llada-8b, llada-1.5-8b, mmada-8b, and about images llada-v-8b, mmada-8b-images; and vrpo,
which learns from pairs of answers (dpo: on the bundled model, with data.train of your own):

    python -m dllm_jax.train --config=configs/sft.py:vrpo --config.model.path=DIR \
        --config.data.train=FILE.jsonl

VRPO (LLaDA 1.5, arXiv 2505.19223): lines of prompt, chosen, rejected; evidence bounds of 8
noise draws, the same for the policy and the reference.

Result to expect. arithmetic: the bundled model, which is right about 60 % of the time at
temperature 1 (0.605 over twelve answers to each of 256 problems). smollm2: from 0 to 33 % in
120 steps (64 problems, one seed; 11 minutes on two CPU cores; docs/smollm2.md). pictures: 75 % at
temperature 1, 79 % at 0 (500 problems, one seed; five minutes of a CPU core; docs/tiny_images.md). codes: 75 % at
temperature 1, 81 % at 0, where the questions alone tell 66 % (500 problems, one seed; about ten minutes of a
CPU core; docs/tiny_images.md). scenes:
23 % of the drawings of 12 held-out captions are right after 300 steps (576 drawings, one seed).
questions, from there: 16 % at temperature 1 (256 questions, one seed; under a minute). In the
comparison of docs/methods.md, 60 updates each from 0.605 on: trace, on own right answers,
0.764 ± 0.007; dpo, on own pairs, 0.603 ± 0.006: nothing is learned. functions: 41 % of
128 problems solved after 200 updates, from half of wrong programs (one seed; docs/code.md).
sudoku: 55 % after 250 steps (one answer to each of 128 puzzles, one seed). sums: 8 % after 400
steps, and 30 % after another 400 that begin there (128 problems, one seed; the commands are in
examples/puzzles/sums/model/README.md). full: 57 %
after 400 steps (four answers to each of 256 problems, one seed; five minutes of a core that other work
shared), all of them told at once. countdown: 14 and 6 % after 350 and 400 steps (128 problems, one
seed; six minutes of such a core). The others are unrun.
"""

from configs import released, tracerl
from dllm_jax import config
from dllm_jax.rl.config import NoiseConfig


def arithmetic(c):
    """Trains the model of the default run, and stops while it still makes mistakes."""
    c.model.path = "runs/arithmetic/blank"
    c.model.dtype = "float32"
    c.data.train = "examples/arithmetic/train.jsonl"
    c.data.heldout = "examples/arithmetic/heldout.jsonl"
    c.sampler.update(max_prompt=16, max_new=32, rows=128)
    c.batch.update(rows=16, tokens=256)
    c.sft.update(steps=600, examples=128)
    c.noise.upper = 1.0
    c.policy_optim.update(lr=2e-3, schedule="cosine", final=0.1, warmup=20)
    c.policy_optim.horizon = 700  # stops at 600, while there is something left to learn
    c.eval.update(every=100, temperature=1.0)
    c.run.update(folder="runs/arithmetic/sft", save_every=100)


def full(c):
    """The bundled model learns to attend to its whole canvas, as Dream and LLaDA do.

    Its weights go on, as Dream's did from next-token prediction. Masks are LLaDA's: a rate
    for the whole answer, of which each example shows one canvas.
    """
    arithmetic(c)
    c.model.update(path="examples/arithmetic/model", attention="full")
    c.data.post_num = 8  # an answer may end anywhere in its block
    c.sampler.update(block=8, cache="none")
    c.batch.update(rows=16, tokens=192)  # four canvases of 48 in a row
    c.noise.update(rate="scope", lower=0.05)
    c.sft.steps = 400
    c.policy_optim.update(lr=1e-3, horizon=400)
    c.eval.update(every=50, problems=128)
    c.run.update(folder="runs/arithmetic/full/sft", save_every=50)


def sudoku(c):
    """A blank model of 0.2M parameters learns 4 x 4 sudoku; see examples/puzzles."""
    arithmetic(c)
    c.model.path = "runs/sudoku/blank"
    c.data.update(
        question="puzzle",
        train="examples/puzzles/sudoku/train.jsonl",
        heldout="examples/puzzles/sudoku/heldout.jsonl",
    )
    c.rl.reward = "sudoku"
    c.sampler.update(block=20, max_prompt=20, max_new=20, rows=128)
    c.batch.update(rows=16, tokens=240)
    c.noise.update(rate="scope", lower=0.05)  # a rate for a block: empty ones, too
    c.sft.update(steps=250, examples=128)
    c.policy_optim.update(lr=3e-3, horizon=400)  # stops at 250, as above
    c.eval.update(every=50, problems=128)
    c.run.update(folder="runs/sudoku/sft", save_every=50)


def sums(c):
    """The bundled arithmetic model goes on with worked sums below 10,000, in blocks of 16."""
    arithmetic(c)
    c.model.path = "examples/arithmetic/model"
    c.data.train = "examples/puzzles/sums/train.jsonl"
    c.data.heldout = "examples/puzzles/sums/heldout.jsonl"
    c.sampler.update(block=16, max_prompt=20, max_new=48)
    c.batch.tokens = 224  # two examples in a row
    c.noise.update(rate="scope", lower=0.05)  # a rate for a block: empty ones, too
    c.sft.update(steps=400, examples=64)
    c.policy_optim.update(lr=1e-3, horizon=400)
    c.eval.update(every=40, problems=128)
    c.run.update(folder="runs/sums/sft", save_every=40)


def countdown(c):
    """The bundled arithmetic model learns countdowns of three numbers, in blocks of 8."""
    arithmetic(c)
    c.model.path = "examples/arithmetic/model"
    c.data.train = "examples/puzzles/countdown/train.jsonl"
    c.data.heldout = "examples/puzzles/countdown/heldout.jsonl"
    c.rl.reward = "countdown"
    c.sampler.update(block=8, max_prompt=20, max_new=32)
    c.batch.tokens = 192  # two examples in a row
    c.noise.update(rate="scope", lower=0.05)  # a rate for a block: empty ones, too
    c.sft.update(steps=400, examples=64)
    c.policy_optim.update(lr=1e-3, horizon=400)
    c.eval.update(every=50, problems=128)
    c.run.update(folder="runs/countdown/sft", save_every=50)


def functions(c):
    """A blank model learns to write functions of twenty families; see examples/functions."""
    arithmetic(c)
    c.model.path = "runs/functions/blank"
    c.data.train = "examples/functions/train.jsonl"
    c.data.heldout = "examples/functions/heldout.jsonl"
    c.sampler.update(max_prompt=32, max_new=16, rows=128)
    c.batch.update(rows=16, tokens=256)
    c.sft.update(steps=200, examples=128)
    c.policy_optim.horizon = 200
    c.rl.reward = "code"
    c.eval.every = 100
    c.run.update(folder="runs/functions/sft", save_every=100)


def pictures(c):
    """A tiny LLaDA-V learns to look, from nothing; see examples/pictures."""
    arithmetic(c)
    c.model.update(path="runs/pictures/blank", tower=True, tiles=640)
    c.data.train = "runs/pictures/described.jsonl"
    c.data.heldout = "runs/pictures/heldout.jsonl"
    c.sampler.update(max_prompt=56, max_new=8, rows=128)
    c.batch.update(rows=32, tokens=144)
    c.sft.update(steps=400, examples=64)
    c.policy_optim.update(lr=3e-3, horizon=400)
    c.eval.update(every=100, problems=256)
    c.run.update(folder="runs/pictures/sft", save_every=50)


def codes(c):
    """A tiny MMaDA learns to read pictures as codes, from nothing; see examples/pictures/codes.py."""
    pictures(c)
    c.model.update(path="runs/pictures/codes/blank", tower=False, tiles=0)
    c.data.train = "runs/pictures/codes/train.jsonl"
    c.sampler.max_prompt = 88
    c.batch.update(rows=64, tokens=104)
    c.sft.update(steps=1200, examples=64)
    c.policy_optim.update(lr=3e-3, horizon=1200)
    c.eval.every = 300
    c.run.folder = "runs/pictures/codes/sft"


def scenes(c):
    """A blank model learns to draw scenes; see examples/scenes."""
    c.model.path = "runs/scenes/blank"
    c.model.dtype = "float32"
    c.data.train = "runs/scenes/sft.jsonl"
    c.data.heldout = "runs/scenes/heldout.jsonl"
    c.sampler.update(tracerl.SCENES)
    c.batch.update(rows=16, tokens=128)
    c.sft.update(steps=300, examples=64)
    c.noise.update(rate="scope", upper=1.0)
    c.rl.reward = "scene"
    c.policy_optim.update(lr=2e-3, schedule="cosine", final=0.1, warmup=20)
    c.policy_optim.horizon = 300
    c.eval.update(every=50, answers=16, temperature=1.0)
    c.run.update(folder="runs/scenes/sft", save_every=50)


def questions(c):
    """The model that draws scenes learns to answer questions about some; see examples/scenes."""
    scenes(c)
    c.model.path = "runs/scenes/sft/export"
    c.data.train = "runs/scenes/questions.jsonl"
    c.data.heldout = "runs/scenes/asked.jsonl"
    c.sampler.update(config.default().sampler.to_dict() | tracerl.QUESTIONS)
    c.batch.update(rows=16, tokens=136)
    c.sft.steps = 30
    c.rl.reward = "short"
    c.policy_optim.horizon = 200  # stops at 30, while there is something left to learn
    c.eval.update(every=6, answers=1)
    c.run.update(folder="runs/scenes/questions/sft", save_every=10)


def smollm2(c):
    """Turns SmolLM2-135M into a block-diffusion model; see examples/smollm2."""
    c.model.path = "runs/smollm2/base"
    c.model.dtype = "float32"
    c.data.train = "runs/smollm2/train.jsonl"
    c.data.heldout = "runs/smollm2/heldout.jsonl"
    c.sampler.update(block=4, max_prompt=32, max_new=16, rows=32)
    c.batch.update(rows=1, tokens=192)
    c.sft.update(steps=120, examples=8)
    c.noise.update(lower=0.3, upper=1.0)
    c.policy_optim.update(lr=1e-4, schedule="cosine", final=0.1, warmup=10)
    c.eval.update(every=20, problems=64, temperature=1.0)
    c.run.update(folder="runs/smollm2/sft", save_every=40)


def preferences(c):
    """VRPO: DPO on evidence bounds."""
    c.method = "dpo"
    c.noise.update(kind="subset", draws=8, upper=NoiseConfig.upper)
    c.objective.update(aggregate="elbo", reference_beta=0.2)


def dpo(c):
    """Preferences on the bundled model."""
    arithmetic(c)
    preferences(c)
    c.model.path = "examples/arithmetic/model"
    c.policy_optim.update(lr=1e-5, schedule="constant", horizon=0, final=0.0)
    c.run.folder = "runs/arithmetic/dpo"


def adapt(c):
    """Turns an autoregressive Qwen3 into a model that fills blocks; data.train is yours.

    SDAR's recipe (arXiv 2510.06303): the weights go on from next-token prediction, and
    the first unused row of the vocabulary becomes the mask token. For one that fills the
    whole canvas, as Dream does: model.attention = "full" and model.shift = 1.
    """
    c.model.update(
        path="Qwen/Qwen3-0.6B",
        attention="block",
        shift=0,
        mask_id=151669,
    )
    c.sampler.update(block=4, max_prompt=1024, max_new=1024, rows=32)
    c.batch.update(rows=1, tokens=8192)
    c.sft.update(steps=2000, examples=64)
    c.noise.upper = 1.0
    c.policy_optim.update(lr=1e-5, schedule="cosine", final=0.1, warmup=100)
    c.run.update(folder="runs/adapt", save_every=200)


def trace(c):
    """The bundled model on answers of its own, in the order in which it gave them."""
    arithmetic(c)
    c.model.path = "examples/arithmetic/model"
    c.data.train = "runs/arithmetic/traces.jsonl"
    c.noise.update(kind="trace", upper=NoiseConfig.upper)
    c.policy_optim.update(lr=1e-4, schedule="constant", horizon=0, final=0.0)
    c.run.folder = "runs/arithmetic/trace"


def published(c):
    """dLLM-RL's settings for SDAR and TraDo: blocks of 4, pads are not learned."""
    c.data.update(train="data/sft.json", post_num=0)
    c.sampler.update(block=4, max_prompt=784, max_new=2000)
    c.batch.update(rows=8, tokens=8192)
    c.sft.update(steps=1000, examples=128)
    c.noise.kind = "semi_ar"
    c.policy_optim.update(lr=1e-5, schedule="cosine")
    c.run.save_every = 100


def dream(c):
    """Its settings for Dream: groups of 16 tokens, one after the other."""
    published(c)
    c.sampler.update(block=16, steps_per_block=16, max_new=1024)


def llada(c):
    """Its settings for LLaDA and MMaDA: one random mask of the whole answer."""
    dream(c)
    c.noise.update(kind="bernoulli", rate="scope")


def vrpo(c):
    """Preferences on LLaDA, unless another model is named; data.train is yours."""
    published(c)
    preferences(c)
    c.model.path = "GSAI-ML/LLaDA-8B-Instruct"
    c.data.train = "data/pairs.jsonl"
    c.sampler.update(block=0, max_new=1024)  # the block of any model
    c.sft.examples = 64
    c.policy_optim.lr = 5e-7
    c.run.folder = "runs/vrpo"


def images(c):
    """What its settings for LLaDA-V and MMaDA on images have in common."""
    llada(c)
    c.data.update(train="data/sft_test_v.json", image_root="data/images", heldout="")
    c.batch.tokens = 0


def lladav(c):
    """LLaDA-V on answers of up to 512 tokens, and the end of each."""
    images(c)
    c.sampler.update(max_prompt=4608, max_new=512, before_stop=True)
    c.model.tiles = 128  # of 16 images, eight each
    c.sft.examples = 16


def mmada(c):
    """MMaDA on images as codes."""
    images(c)
    c.model.update(vq="showlab/magvitv2", image_size=512)
    c.sampler.update(max_prompt=1808, max_new=1024)
    c.sft.examples = 32


PRESETS = {
    "arithmetic": arithmetic,
    "full": full,
    "sudoku": sudoku,
    "sums": sums,
    "countdown": countdown,
    "functions": functions,
    "pictures": pictures,
    "codes": codes,
    "scenes": scenes,
    "questions": questions,
    "smollm2": smollm2,
    "trace": trace,
    "adapt": adapt,
    "dpo": dpo,
    "vrpo": vrpo,
    **released.presets("sft", block=published, dream=dream, llada=llada),
    **released.looking("sft", lladav=lladav, mmada=mmada),
}


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of a preset."""
    c = config.default()
    c.method = "sft"
    c.noise.kind = "bernoulli"
    return config.preset(PRESETS, preset, c)
