"""What tests of the sampler share."""

import functools

import jax
import numpy as np

from dllm_jax import sharding
from dllm_jax.models.mask import FAR
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine

row_keys = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
ONE = functools.cache(lambda: sharding.make_mesh(fsdp=1, devices=jax.devices()[:1]))


CODES, DRAWN_WIDTH = 9, 8  # of an image; the longest of these prompts for one
DRAWN = [[7, 8, 5, 9, 6], [7, 8, 9, 6], [7, 8, 3, 4, 5, 2, 9, 6], [7, 3, 9, 6]]
DRAWING = SamplerConfig(
    block=CODES,
    max_new=CODES,
    max_prompt=DRAWN_WIDTH,
    steps_per_block=4,
    unmasking="cosine",
    strategy="static",
    target="log_confidence",
    rank_temperature=1.5,
    rank_cooling=True,
    guidance=1.5,
    blank=(7, 9, 6),
    tail=(12,),
    cache="none",
)


def padded(prompts, width: int, rows: int | None = None):
    """Returns (prompt_BT, prompt_len_B); rows beyond the prompts are fillers."""
    rows = len(prompts) if rows is None else rows
    prompt_BT, len_B = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        prompt_BT[row, : len(prompt)], len_B[row] = prompt, len(prompt)
    return prompt_BT, len_B


def end_of(tokens_T, step_T, first: int, limit: int, stop_ids) -> int | None:
    """Returns where an answer that begins at `first` ends; None: it is not done."""
    for end in range(first + 1, limit + 1):
        if step_T[end - 1] == FAR:
            return None
        if end == limit or tokens_T[end - 1] in stop_ids:
            return end
    return None


def ask(made: Engine, asked):
    """Queues (index, prompt, temperature, new)."""
    for index, prompt, temperature, new in asked:
        made.submit(prompt, index=index, temperature=temperature, new=new)


def empty_again(made: Engine):
    """Asserts that an engine without requests holds no page."""
    assert not made.busy
    for pool in made.scheduler.pools:
        assert not any(pool.holders)
        assert pool.available == len(pool.holders)


def as_on_tpu(op):
    """Returns an op of `pallas_kernels` that runs the TPU's kernel."""

    def run(*args, implementation):
        return op(*args, implementation="tpu")

    return run
