"""TraceRL with a diffusion value model (arXiv 2509.06949).

    python -m dllm_jax.train --config=configs/tracerl.py

trains the bundled arithmetic model on a CPU in a few minutes. Presets for real models
follow the published recipe; they want accelerators, a checkpoint and a dataset:

    python -m dllm_jax.train --config=configs/tracerl.py:trado-4b \
        --config.model.path=DIR --config.data.train=MATH_train.json \
        --config.data.heldout=MATH500.json

on files as dLLM-RL has them; `python -m dllm_jax.data get math_train` downloads the same
records with other fields, and says by which keys they are read.

Presets: arithmetic (default), full, sudoku, sums, countdown, process, code, pictures, codes, scenes, questions, smollm2, sdar-1.7b,
sdar-4b, sdar-8b, trado-4b, trado-8b, and with full attention dream-7b, diffucoder-7b, llada-8b, llada-1.5-8b,
mmada-8b, and on questions about images llada-v-8b and mmada-8b-images (docs/multimodal.md).
configs/coupled.py and configs/random_masking.py take the same ones. Those with full
attention sample with stale keys, as published; with --config.noise.shrink=1 the gap to training
is logged, and

    --config.sampler.cache=none --config.sampler.horizon=0

closes it at the price of a forward of the whole canvas at every step.

process runs on the bundled model, too, with a judge of the sums' steps (docs/judges.md). code
runs on a bundled model that writes functions, whose programs are tested in the sandbox.

Result to expect. process: 0.766 ± 0.048 after 24 steps of 16 problems, and without its judge
0.773 ± 0.035 (three seeds): no difference. code: held-out problems solved go from 36 to 48 % to
80 to 81 % in 40 steps (128 problems, three seeds; little more than a minute of a core).
arithmetic: held-out accuracy at temperature 1 goes from 54 to 61 % to 84 to 89 %, tokens per
forward from 2.3 to 2.9 (256 problems, three seeds; about two minutes on two CPU cores).
smollm2: from 41, 41, 44 to 55, 52, 41 % in 20 of its 40 steps, and asked in words that it was not
taught from 26, 20, 29 to 38, 48, 38 % (128 problems, three seeds; docs/smollm2.md).
sudoku: accuracy stays at 57 % in 40 steps, with 3.6 forwards an answer instead of 4.2 (256
problems, three seeds); in five steps it rises from 29 to 37 % (six seeds; docs/paper.md). sums:
from 30 to 37 % in 30 steps, at 9.3 forwards an answer before and after (256 problems, four
answers to each: +0.065, 95 % 0.032 to 0.101; one seed; eight minutes of a core that other work
shared); a pilot with half of the problems a step, at a rate of 1e-4, went from 31 to 22 % in
ten. full: nothing is learned in 30 steps, 57.7 to 56.1 % (256 problems, four answers to each; three
seeds; a minute of a CPU core; docs/paper.md), and at four times the rate 20 steps took 55 to
21 % (two answers to each). countdown: from 9.4 to 20.9 % in 30 steps (the same; docs/paper.md).
pictures: from 75 to 79 %, and at temperature 0 from 78.6 to 79.1 % (500 problems, three seeds;
about a minute of a CPU core; docs/tiny_images.md). codes: from 75 to 80 %, and at temperature 0
from 80.8 to 81.2 %, where the questions alone tell 66 % (500 problems, one seed; a minute of a
CPU core; docs/tiny_images.md). scenes: right drawings of 12 held-out captions go from 23 to 25 % to
between 32 and 59 % in 100 steps (576 drawings, six runs; three minutes of a CPU core;
docs/tiny_images.md). questions: right answers to 256 held-out ones from 19 % to between 73
and 75 % at temperature 1, from 36 to 75 % at 0, in 40 steps (three seeds; about two minutes of a CPU
core; docs/tiny_images.md). The presets of released models are unrun.
"""

from configs import released
from dllm_jax import config, data
from dllm_jax.rl.config import RLConfig
from dllm_jax.sampling.config import DRAWING

# A filter of no solve rate: the arithmetic recipe's range goes back to the defaults.
VARIED = {"filter": "varied"} | {
    name: getattr(RLConfig, name) for name in ("min_solved", "max_solved")
}


def arithmetic(c):
    """A 0.6M-parameter model on sums of two numbers below 1000."""
    c.model.path = "examples/arithmetic/model"
    c.model.dtype = "float32"
    c.data.train = "examples/arithmetic/train.jsonl"
    c.data.heldout = "examples/arithmetic/heldout.jsonl"
    c.sampler.update(max_prompt=16, max_new=32, rows=128)
    c.batch.update(rows=4, tokens=256)  # rows of the last one are seldom idle
    c.rl.update(
        steps=60,
        prompts=32,
        group=8,
        updates=2,
        min_solved=0.1,
        max_solved=0.95,
        value="trace",  # docs/critic.md: what a network costs is not earned here
    )
    c.policy_optim.lr = 3e-5
    c.value_optim.lr = 3e-4  # of rl.value=own
    c.eval.update(every=5, temperature=1.0)
    c.run.folder = "runs/arithmetic/tracerl"


def sudoku(c):
    """A 0.2M-parameter model on 4 x 4 sudoku: one block, whose order it chooses."""
    arithmetic(c)
    c.model.path = "examples/puzzles/sudoku/model"
    c.data.update(
        question="puzzle",
        train="examples/puzzles/sudoku/train.jsonl",
        heldout="examples/puzzles/sudoku/heldout.jsonl",
    )
    c.sampler.update(block=20, max_prompt=20, max_new=20, rows=128)
    c.noise.rate = "scope"  # random masks: a rate for the block, nearly empty ones, too
    c.rl.update(reward="sudoku", value="none", steps=40, prompts=16, updates=1)
    c.batch.update(rows=4, tokens=480)
    c.policy_optim.lr = 1e-4
    c.eval.every = 10
    c.run.folder = "runs/sudoku/tracerl"


def sums(c):
    """The 0.6M-parameter model on worked sums below 10,000, in blocks of 16: see sft.py."""
    arithmetic(c)
    c.model.path = "examples/puzzles/sums/model"
    c.data.train = "examples/puzzles/sums/train.jsonl"
    c.data.heldout = "examples/puzzles/sums/heldout.jsonl"
    c.sampler.update(block=16, max_prompt=20, max_new=48, rows=128)
    c.noise.rate = "scope"  # random masks, as in sudoku
    c.rl.update(value="none", steps=30, prompts=32, updates=1)
    c.batch.update(rows=4, tokens=480)
    c.eval.every = 10
    c.run.folder = "runs/sums/tracerl"


def countdown(c):
    """The 0.6M-parameter model on countdowns of three numbers, in blocks of 8: see sft.py."""
    arithmetic(c)
    c.model.path = "examples/puzzles/countdown/model"
    c.data.train = "examples/puzzles/countdown/train.jsonl"
    c.data.heldout = "examples/puzzles/countdown/heldout.jsonl"
    c.sampler.update(block=8, max_prompt=20, max_new=32)
    c.noise.rate = "scope"  # random masks, as in sudoku
    c.rl.update(reward="countdown", value="none", steps=30, prompts=16)
    c.batch.update(rows=4, tokens=384)
    c.policy_optim.lr = 5e-5
    c.eval.every = 10
    c.run.folder = "runs/countdown/tracerl"


def full(c):
    """The twin of the default run's model that attends to its whole canvas: see sft.py."""
    arithmetic(c)
    c.model.path = "examples/arithmetic/full"
    c.sampler.update(block=8, cache="none")
    c.noise.rate = "scope"  # random masks, as in sudoku
    c.rl.update(value="none", steps=30, prompts=16)
    c.batch.update(rows=16, tokens=192)  # four canvases of 48 in a row
    c.policy_optim.lr = 5e-5
    c.eval.every = 10
    c.run.folder = "runs/arithmetic/full/tracerl"


def process(c):
    """The same sums with a reward for each worked step, from a judge that needs no server."""
    arithmetic(c)
    c.reward.update(split="marks", mark=",")
    c.reward.judge.at = "examples.arithmetic.verdicts:verdicts"
    c.rl.value = "own"
    c.run.folder = "runs/arithmetic/process/tracerl"


def code(c):
    """Functions of twenty families, run in the sandbox; see examples/functions/make.py."""
    arithmetic(c)
    c.model.path = "examples/functions/model"
    c.data.train = "examples/functions/train.jsonl"
    c.data.heldout = "examples/functions/heldout.jsonl"
    c.sampler.update(max_prompt=32, max_new=16, rows=128)
    c.batch.update(rows=4, tokens=256)
    c.rl.update(reward="code", prompts=16, steps=40, value="own", **VARIED)
    c.policy_optim.lr = 1e-4
    c.run.folder = "runs/functions/tracerl"


def pictures(c):
    """A tiny LLaDA-V on questions about pictures; see examples/pictures.

    Its tower stays as it is, so that each picture is looked at once in a run.
    """
    arithmetic(c)
    c.model.update(path="runs/pictures/sft/export", tiles=640)
    c.data.train = "runs/pictures/described.jsonl"
    c.data.heldout = "runs/pictures/heldout.jsonl"
    c.sampler.update(max_prompt=56, max_new=8)
    c.batch.update(rows=32, tokens=144)
    c.rl.update(steps=60, prompts=32, value="trace")
    c.policy_optim.lr = 2e-4
    c.eval.update(every=20, problems=256)
    c.run.update(folder="runs/pictures/tracerl", save_every=6)


def codes(c):
    """The same questions for a tiny MMaDA, which reads codes; see examples/pictures/codes.py."""
    pictures(c)
    c.model.update(path="runs/pictures/codes/sft/export", tiles=0)
    c.data.train = "runs/pictures/codes/train.jsonl"
    c.sampler.max_prompt = 88
    c.batch.update(rows=16, tokens=208)
    c.rl.steps = 40
    c.run.folder = "runs/pictures/codes/tracerl"


# How its scenes are drawn: by MMaDA's rule in few steps, without guidance.
SCENES = DRAWING | {"steps_per_block": 4, "guidance": 0.0, "max_prompt": 16, "rows": 64}


def scenes(c):
    """A tiny model that draws scenes, judged by a checker; see examples/scenes/make.py."""
    c.model.path = "runs/scenes/sft/export"
    c.model.dtype = "float32"
    c.data.train = "runs/scenes/train.jsonl"
    c.data.heldout = "runs/scenes/heldout.jsonl"
    c.sampler.update(SCENES)
    c.batch.update(rows=16, tokens=128)
    c.rl.update(
        steps=100,
        prompts=24,
        group=8,
        updates=2,
        reward="scene",
        value="none",
        filter="varied",
    )
    c.policy_optim.lr = 1e-3
    c.eval.update(every=20, answers=16, temperature=1.0)
    c.run.folder = "runs/scenes/tracerl"


# How questions about its scenes are answered: a word and the end.
QUESTIONS = {"block": 2, "max_prompt": 40, "max_new": 2, "rows": 128}


def questions(c):
    """A tiny model that answers from codes what scenes show; see examples/scenes/make.py."""
    scenes(c)
    c.model.path = "runs/scenes/questions/sft/export"
    c.data.train = "runs/scenes/questions.jsonl"
    c.data.heldout = "runs/scenes/asked.jsonl"
    c.sampler.update(config.default().sampler.to_dict() | QUESTIONS)
    c.batch.update(rows=32, tokens=136)
    c.rl.update(steps=40, prompts=32, reward="short")
    c.policy_optim.lr = 5e-4
    c.eval.update(every=10, answers=1)
    c.run.folder = "runs/scenes/questions/tracerl"


def smollm2(c):
    """SmolLM2-135M as a block-diffusion model, on one-digit arithmetic in chat form."""
    c.model.path = "runs/smollm2/sft/export"
    c.model.dtype = "float32"
    c.data.train = "runs/smollm2/train.jsonl"
    c.data.heldout = "runs/smollm2/heldout.jsonl"
    c.sampler.update(max_prompt=32, max_new=16, rows=64)
    c.batch.update(rows=2, tokens=256)
    c.rl.update(
        steps=40,
        prompts=8,
        group=8,
        min_solved=0.1,
        max_solved=0.95,
        value="trace",
    )
    c.policy_optim.lr = 2e-5
    c.eval.update(every=10, problems=128, temperature=1.0)
    c.run.update(folder="runs/smollm2/tracerl", save_every=10)


def published(c):
    """The recipe of the paper's section 5 and appendix: 128 problems x 32 answers."""
    c.data.update(
        answer="ground_truth_answer",
        template=data.MATH,
        train="data/MATH_train.json",
        heldout="data/MATH500.json",
    )
    c.sampler.update(
        block=4,
        steps_per_block=4,
        threshold=0.9,
        max_prompt=784,
        max_new=2000,
        rows=256,  # over all devices: 32 on each of 8
    )
    c.batch.update(rows=8, tokens=8192)  # 1 on each of 8 devices, and of more
    c.rl.update(
        steps=80,
        prompts=128,
        group=32,
        updates=16,
        gamma=1.0,
        lam=1.0,
        min_solved=0.2,
        max_solved=0.8,
    )
    c.objective.update(clip=0.2, beta=0.01, kl="k3")
    c.policy_optim.lr = 1e-6
    c.value_optim.lr = 5e-6
    c.eval.update(every=10, temperature=1.0)


def dream(c):
    """dLLM-RL's settings for Dream: static unmasking of 1,024 tokens, 8 steps a round."""
    published(c)
    c.data.template = data.BOXED
    c.sampler.update(
        block=32,
        steps_per_block=32,
        strategy="static",
        threshold=0.95,
        cache="prefix",
        horizon=32,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        top_p_first=True,
        max_prompt=512,
        max_new=1024,
        rows=64,
    )
    c.noise.update(shrink=8, rate="scope")
    c.objective.aggregate = "step"
    c.rl.update(steps=50, prompts=32, group=8, updates=4, value="none")
    c.eval.temperature = 0.1


def llada(c):
    """Its settings for LLaDA and MMaDA: canvases of 512 tokens, nothing cut off."""
    dream(c)
    c.sampler.update(max_new=512, horizon=128, untempered_ranks=True)
    c.sampler.update(top_k=0, top_p=1.0, top_p_first=False)


def images(c):
    """What dLLM-RL's settings for questions about images have in common."""
    c.data.update(
        template="{question}",
        train="data/SEEDBench_IMG_32.json",
        heldout="data/SEEDBench_IMG_32.json",
        image_root="data/images",
    )
    c.sampler.update(strategy="dynamic", threshold=0.95)
    c.rl.update(reward="short", min_solved=0.05, max_solved=0.95, value="own")
    c.rl.truncated = "graded"  # reward.strict_len_check is off in all of its files
    c.eval.temperature = 0.1


def lladav(c):
    """LLaDA-V with a value network: 32 questions, answers of 512 tokens in a box."""
    llada(c)
    images(c)
    c.data.template = data.BOXED
    c.model.tiles = 256  # of 32 images: eight of each, which is one of 1024 x 768
    c.sampler.update(
        block=64, steps_per_block=64, cache="none", horizon=0, before_stop=True
    )
    c.sampler.update(max_prompt=4608, rows=32)
    c.batch.update(rows=8, tokens=0)
    c.noise.shrink = 48
    c.rl.update(reward="choice", steps=50, prompts=32, group=8, updates=1)


def mmada(c):
    """MMaDA on images as codes, with a value network: answers of 128 tokens."""
    llada(c)
    images(c)
    c.model.update(vq="showlab/magvitv2", image_size=512)
    c.sampler.update(block=64, steps_per_block=64, max_new=128, max_prompt=1600)
    c.batch.update(rows=8, tokens=0)
    c.rl.update(steps=100, prompts=256, group=12, updates=4)


PRESETS = {
    "arithmetic": arithmetic,
    "sudoku": sudoku,
    "sums": sums,
    "countdown": countdown,
    "full": full,
    "process": process,
    "code": code,
    "pictures": pictures,
    "codes": codes,
    "scenes": scenes,
    "questions": questions,
    "smollm2": smollm2,
    **released.presets("tracerl", block=published, dream=dream, llada=llada),
    **released.looking("tracerl", lladav=lladav, mmada=mmada),
}
# Draws of a mask whose rate is that of a scope: dLLM-RL's of full attention, where nothing
# else is said.
DRAWS, MANY = {"sudoku": 4, "sums": 4, "countdown": 4}, 35


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of a preset."""
    return config.preset(PRESETS, preset)
