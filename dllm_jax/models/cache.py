"""The key/value cache, of rows or of pages: a value that is replaced, never mutated."""

import jax
import jax.numpy as jnp

from dllm_jax import struct
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import Mask, ranged
from dllm_jax.sharding import constrain, per_device


@struct.dataclass
class KVCache:
    """Keys (rotated) and values of committed positions; slot = absolute position."""

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array


def empty(cfg: ModelConfig, rows: int, slots: int) -> KVCache:
    """Returns a zeroed cache of `slots` positions for each of `rows` rows."""
    shape = (cfg.layers, rows, slots, cfg.kv_heads, cfg.head_dim)
    zeros = constrain(jnp.zeros(shape, cfg.dtype), "LBSKH")
    return KVCache(k_LBSKH=zeros, v_LBSKH=zeros)


def write(cache: KVCache, fresh: KVCache, start_B, keep_B) -> KVCache:
    """Returns the cache with `fresh` (W positions) from `start` on, in rows where `keep`."""

    # A row that keeps nothing writes behind the last slot, where an update is dropped.
    slots = cache.k_LBSKH.shape[2]
    first_B = jnp.where(keep_B, start_B, slots)

    def write_row(old_LSKH, new_LWKH, first):
        slot_W = first + jnp.arange(new_LWKH.shape[1])
        return old_LSKH.at[:, slot_W].set(new_LWKH, mode="drop")

    # By vmap, row by row: of a scatter whose indices also name the row XLA cannot know
    # that each row writes to itself, and rows that a mesh has apart would be gathered.
    write_rows = jax.vmap(write_row, in_axes=(1, 1, 0), out_axes=1)

    def write_all(old_LBSKH, new_LBWKH):
        return constrain(write_rows(old_LBSKH, new_LBWKH, first_B), "LBSKH")

    return jax.tree.map(write_all, cache, fresh)


@struct.dataclass
class PagedKVCache:
    """Keys (rotated) and values in pages of O positions; a Window's table says whose."""

    k_LPOKH: jax.Array
    v_LPOKH: jax.Array


@struct.dataclass
class Window:
    """Who sees whom where the cache is paged: in the place of a Mask.

    Row b is a window of W positions from `start` on. It sees the positions before
    `start` in its pages, those written in this very layer too, and all of itself.
    """

    table_BA: (
        jax.Array
    )  # position s is in page table[s // O], counted on its own device
    start_B: jax.Array  # the window's first position
    keep_B: jax.Array  # whether its keys are written to the pages: its tokens are known


@struct.dataclass
class Chunk:
    """Who sees whom in parts of prompts, where the cache is paged.

    Row b is a run of J whole blocks from `start` on. The keys of those that are kept are
    written to its pages before anything of the same layer looks; it sees nothing else.
    """

    table_BA: jax.Array  # as a Window's
    start_B: jax.Array
    keep_BJ: jax.Array
    mask: Mask  # its keys are the positions of the row's pages
    pages: jax.Array  # how many of each row hold all that is seen


def chunk(table_BA, pos_BW, end_B, Q: int, cache: PagedKVCache) -> Chunk:
    """Returns the Chunk of positions `pos`, whole blocks of Q, of which those before `end`
    are kept.
    """
    size = cache.k_LPOKH.shape[2]
    slots = table_BA.shape[1] * size
    slots_BS = jnp.broadcast_to(jnp.arange(slots)[None], (len(end_B), slots))
    q_end_BW = jnp.minimum(pos_BW // Q * Q + Q, end_B[:, None])
    return Chunk(
        table_BA=table_BA,
        start_B=pos_BW[:, 0],
        keep_BJ=pos_BW[:, ::Q] < end_B[:, None],
        mask=ranged(q_end_BW, slots_BS),
        pages=-(-end_B.max() // size),
    )


def read(cache_pages, layer, table_BA):
    """Returns the keys and values of pages, in their order: each [B, S, K, H].

    cache_pages: pools (k, v), each [L, P, O, K, H]. On a mesh a table names pages of its
    own device.
    """

    def of_table(pools, layer, table_BA):
        return tuple(x_LPOKH[layer, table_BA] for x_LPOKH in pools)

    dims_in, dims_out = (("LPOKH", "LPOKH"), "", "BA"), ("BAOKH", "BAOKH")
    found = per_device(of_table, dims_in, dims_out, cache_pages, layer, table_BA)
    return tuple(x.reshape(len(x), -1, *x.shape[3:]) for x in found)


def pool(cfg: ModelConfig, pages: int, size: int) -> PagedKVCache:
    """Returns zeroed pages of `size` positions; `pages` over all devices."""
    shape = (cfg.layers, pages, size, cfg.kv_heads, cfg.head_dim)
    zeros = constrain(jnp.zeros(shape, cfg.dtype), "LPOKH")
    return PagedKVCache(k_LPOKH=zeros, v_LPOKH=zeros)
