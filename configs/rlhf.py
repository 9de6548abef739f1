"""RLHF: a reward model from pairs of answers, and a policy that learns from one or a judge.

    python -m dllm_jax.eval --config=configs/eval.py \
        --config.data.heldout=examples/arithmetic/train.jsonl --config.eval.problems=2000 \
        --config.run.folder=runs/arithmetic/answers
    python examples/arithmetic/pairs.py
    python -m dllm_jax.train --config=configs/rlhf.py:reward
    python -m dllm_jax.train --config=configs/rlhf.py

trains, on sums, a reward model on pairs of the bundled model's own answers, a right one and a
wrong one, and then the policy on its scores, never on what is right. With a judge instead of
a reward model, behind any endpoint of OpenAI's chat completions:

    python -m dllm_jax.train --config=configs/rlhf.py:judge \
        --config.reward.judge.at=http://HOST:8000/v1 --config.reward.judge.model=NAME

Presets: arithmetic (default), reward, judge; for released models dLLM-RL's process rewards,
whose judge and data are yours: sdar-1.7b, sdar-4b, sdar-8b, trado-4b, trado-8b, and, as the
same judge serves any family, dream-7b, diffucoder-7b, llada-8b, llada-1.5-8b, mmada-8b; and of
answers about images, by a judge who is shown them, llada-v-8b and mmada-8b-images.

Result to expect. reward: 0.83 of the pairs told apart in the last 20 of 150 updates, 0.66 of 132
from held-out problems (one seed). arithmetic: held-out accuracy goes from 62 to 64 to 71 % (256
problems, three answers to each; ten runs; two minutes of a CPU core that others used as well).
Without objective.reference_beta it is 16 and 2 % after 40 steps (two seeds), as the policy learns
what the reward model takes for right (docs/judges.md). The presets of released models are unrun.
"""

from configs import released, tracerl
from configs.dllm_rl_rows import THINK
from dllm_jax import config


def arithmetic(c):
    """The bundled model learns from the scores of the reward model; accuracy is told."""
    tracerl.arithmetic(c)
    c.rl.update(reward="math:0,reward_model", steps=40, value="own", **tracerl.VARIED)
    # Without a pull it soon learns what the reward model is wrong about.
    c.objective.reference_beta = 1.0
    c.reward.model = "runs/arithmetic/reward/export"
    c.run.folder = "runs/arithmetic/rlhf"


def reward(c):
    """A reward model of the bundled model's size, from which it starts."""
    tracerl.arithmetic(c)
    c.method = "reward"
    c.noise.kind = "end"
    c.data.train = "runs/arithmetic/pairs.jsonl"
    c.data.heldout = ""
    c.batch.update(rows=16, tokens=256)
    c.sft.update(steps=150, examples=64)
    c.policy_optim.update(lr=5e-4, schedule="cosine", warmup=10)
    c.run.update(folder="runs/arithmetic/reward", save_every=50)


def judge(c):
    """The bundled model on the word of a judge, which says whether an answer is right."""
    tracerl.arithmetic(c)
    c.rl.update(reward="judge", **tracerl.VARIED)
    c.reward.judge.at = "http://localhost:8000/v1"
    c.run.folder = "runs/arithmetic/judge"


def process(recipe):
    """Returns a recipe of configs/tracerl.py with dLLM-RL's process rewards."""

    def change(c):
        recipe(c)
        c.reward.update(split="tokens", chunk=200, tail=c.sampler.block)
        c.reward.judge.update(at="http://localhost:8000/v1", tokens=10_000)
        c.rl.update(outcome=0.0, gamma=0.99, steps=100, prompts=32, group=16)

    return change


def about_images(c):
    """What its two files with a judge of answers about images have in common."""
    c.reward.update(split="tokens", chunk=64)
    c.reward.judge.update(at="http://localhost:8000/v1", tokens=10_000)
    c.rl.update(outcome=0.0, prompts=32, group=8, truncated="graded")


def lladav(c):
    """LLaDA-V's answers of 192 tokens, in chunks that a judge who sees the image grades."""
    tracerl.lladav(c)
    about_images(c)
    c.sampler.update(max_new=192, threshold=0.9)
    c.noise.shrink = 16
    c.rl.update(steps=160, updates=8)


def mmada(c):
    """MMaDA's of 128 tokens, which begin with their reasons."""
    tracerl.mmada(c)
    c.data.template = THINK
    c.sampler.update(block=32, steps_per_block=32)
    about_images(c)
    c.rl.update(steps=40, updates=1)


PRESETS = {
    "arithmetic": arithmetic,
    "reward": reward,
    "judge": judge,
    **released.presets(
        "rlhf",
        block=process(tracerl.published),
        dream=process(tracerl.dream),
        llada=process(tracerl.llada),
    ),
    **released.looking("rlhf", lladav=lladav, mmada=mmada),
}


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of a preset."""
    return config.preset(PRESETS, preset)
