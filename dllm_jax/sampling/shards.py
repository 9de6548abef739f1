"""Rows by shard: what the programs of the engine's forwards share.

Rows are split over the mesh in *shards*, one for each device of its data and fsdp axes,
with the pages of that device. The rows of a shard are neighbours; windows of them are
dealt out within it.

Letters: d shards, b rows of a shard, w windows of a shard, k places for windows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.models import cache as kv
from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.pallas_kernels.choice import platform
from dllm_jax.sampling.rows import Rows
from dllm_jax.sampling.state import SamplingState

# So many of the many are run by few after few, each of which reads all weights: where slots
# cost more than these, more of them. On two cores a prompt of 2,048 takes 1.02, 8 rows with
# prompts of 512 take 1.04 times as short.
BY_FEW = {"cpu": 3 / 4}


class Ran(NamedTuple):
    """What a program leaves: of prompts, x_BWD is zeros."""

    x_BWD: jax.Array  # hidden states that answer for rows' present blocks
    last_BD: jax.Array
    filled_B: jax.Array
    cache: kv.PagedKVCache


def shown(s: SamplingState, row_dw, pos_dwW, model: ModelConfig):
    """Returns the tokens at positions of rows, masked ones masked: [d, w, W]."""
    shards = len(row_dw)
    tokens_dwW, step_dwW = (
        of_positions(by_shard(x_BT, shards), row_dw, pos_dwW)
        for x_BT in (s.tokens_BT, s.step_BT)
    )
    return jnp.where(step_dwW == FAR, model.mask_id, tokens_dwW)


def run(params, rows: Rows, shown_dwW, pos_dwW, seen: kv.Window, model):
    """Returns (hidden states x_dwWD, the PagedKVCache with the keys that are kept)."""
    x_BWD = transformer.embed(params, joined(shown_dwW), model)
    x_BWD, cache, _ = transformer.trunk(
        params, x_BWD, joined(pos_dwW), seen, model, rows.s.cache
    )
    return by_shard(x_BWD, len(shown_dwW)), cache


def of_many(due_db, counts: tuple[int, ...]):
    """Returns which of a program for few and one for many is to run, by `counts`.

    due_db: for how many each row waits.
    """
    few_do = due_db.sum(axis=1).max() <= BY_FEW.get(platform(), 1 / 2) * counts[-1]
    return jnp.where(few_do, 0, len(counts) - 1)


def first(used_dk):
    """Returns the places in a new order, those used first, and each used one's rank.

    (place_dw, as many as there are; nth_dk, whatever for those that are not used).
    """
    end_dk = jnp.cumsum(used_dk, axis=1)
    unused_dk = end_dk[:, -1:] + jnp.cumsum(~used_dk, axis=1)
    nth_dk = jnp.where(used_dk, end_dk, unused_dk) - 1

    def inverse(nth_k):
        return jnp.zeros_like(nth_k).at[nth_k].set(jnp.arange(len(nth_k)))

    return jax.vmap(inverse)(nth_dk), nth_dk


def by_shard(x, shards: int):
    """Returns x, [d * n, ...], as [d, n, ...]: rows of one shard are neighbours."""
    return x.reshape(shards, -1, *x.shape[1:])


def joined(x):
    """Returns x, [d, n, ...], as [d * n, ...]."""
    return x.reshape(-1, *x.shape[2:])


@jax.vmap
def of_rows(x, row_w):
    """Returns what x, [d, b, ...], has for the rows of windows: [d, w, ...]."""
    return x[row_w]


@jax.vmap
def of_positions(x_bT, row_w, pos_wW):
    """Returns what x, [d, b, T], has at the positions of windows: [d, w, W]."""
    return x_bT.at[row_w[:, None], pos_wW].get(mode="clip")
