"""The key/value cache, of rows or of pages: a value that is replaced, never mutated."""

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import Mask, ranged
from dllm_jax.pallas_kernels.choice import platform
from dllm_jax.sharding import constrain

# Queries of a key head that a kernel takes together, so that their pages are read once.
TILE = 64
PAGED = 64  # positions of a window, at most, for which kernels of pages have room


@flax.struct.dataclass
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


@flax.struct.dataclass
class PagedKVCache:
    """Keys (rotated) and values in pages of O positions; a Window's table says whose."""

    k_LPOKH: jax.Array
    v_LPOKH: jax.Array


@flax.struct.dataclass
class Pairs:
    """The windows of a batch by the rows whose they are, a row's pages being read once.

    Rows are in an order of their own. Of a row's two windows the second begins where the
    first, which is kept, ends. What is what: `pallas_kernels.paired_attention`.
    """

    table_BA: jax.Array
    start_B: jax.Array  # where a row's second window begins
    window_B2: jax.Array  # the first and the second, or its only one twice
    place_R: jax.Array  # of each window, among those of all rows


@flax.struct.dataclass
class Window:
    """Who sees whom where the cache is paged: in the place of a Mask.

    Row b is a window of J whole blocks from `start` on. The keys of those that are kept
    are written to its pages before anything of the same layer looks. Without a mask a
    window sees the positions before `start` in its pages, and all of itself.
    """

    table_BA: jax.Array  # position s is in page table[s // O] of its own device
    start_B: jax.Array  # the window's first position
    keep_BJ: jax.Array  # whether a block's keys are written: its tokens are known
    # Of a part of a prompt, or a wide window: `ranged`, its keys the positions of the
    # row's pages in their order. Those before `q_end` are seen, and nothing else is.
    mask: Mask | None = None
    pairs: Pairs | None = None  # of windows that may be two of one row
    # Of a canvas: its keys are its own positions, and it sees nothing else.
    own: Mask | None = None
    # Of a window that is kept, and sees the positions before `end`: see `within`.
    end_B: jax.Array | None = None
    # The windows of each shard whose hidden states somebody reads; None: all.
    asked_da: jax.Array | None = None


def pairs_fit(heads: int, kv_heads: int, Q: int) -> bool:
    """Returns whether a kernel takes the queries of a row's two windows together."""
    return 2 * Q * (heads // kv_heads) <= TILE


def asked(x, asked_da):
    """Returns what x, of all windows of d shards, has for those asked, or x if that is None."""
    if asked_da is None:
        return x
    x_dw = x.reshape(len(asked_da), -1, *x.shape[1:])
    x_da = jax.vmap(lambda x_w, asked_a: x_w[asked_a])(x_dw, asked_da)
    return x_da.reshape(-1, *x.shape[1:])


def chunk(table_BA, pos_BW, end_B, Q: int, cache: PagedKVCache) -> Window:
    """Returns the Window of positions `pos` of prompts, whole blocks of Q, of which those
    before `end` are kept.
    """
    slots = table_BA.shape[1] * cache.k_LPOKH.shape[2]
    slots_BS = jnp.broadcast_to(jnp.arange(slots)[None], (len(end_B), slots))
    q_end_BW = jnp.minimum(pos_BW // Q * Q + Q, end_B[:, None])
    return Window(
        table_BA=table_BA,
        start_B=pos_BW[:, 0],
        keep_BJ=pos_BW[:, ::Q] < end_B[:, None],
        mask=ranged(q_end_BW, slots_BS),
    )


def canvas(table_BA, own: Mask, end_B, cache: PagedKVCache) -> Window:
    """Returns the Window of canvases, of whole pages; own: who sees whom in them.

    The pages that hold their positions before `end` are kept.
    """
    begin_J = jnp.arange(0, own.k_pos_BS.shape[1], cache.k_LPOKH.shape[2])
    return Window(
        table_BA=table_BA,
        start_B=jnp.zeros_like(end_B),
        keep_BJ=begin_J[None] < end_B[:, None],
        own=own,
    )


def within(table_BA, pos_BW, end_B, keep_BJ, cache: PagedKVCache) -> Window:
    """Returns the Window of positions `pos`, which follow each other, of rows' canvases.

    Each sees the positions before `end` in its row's pages: its own, which are kept before,
    those before it and maybe others behind it.
    """
    seen = Window(table_BA=table_BA, start_B=pos_BW[:, 0], keep_BJ=keep_BJ)
    if pos_BW.shape[1] <= PAGED:
        return seen.replace(end_B=end_B)
    slots = table_BA.shape[1] * cache.k_LPOKH.shape[2]
    slots_BS = jnp.broadcast_to(jnp.arange(slots)[None], (len(end_B), slots))
    q_end_BW = jnp.broadcast_to(end_B[:, None], pos_BW.shape)
    return seen.replace(mask=ranged(q_end_BW, slots_BS))


def cut(end_B, width: int):
    """Returns (start_B, pos_BW): the positions before `end` as those before `start`, and W.

    Attention does not ask for the order of keys, nor how often they are given if that is
    equally often: where there are fewer than W, these go round.
    """
    start_B = jnp.mod(-width, end_B)
    pos_BW = start_B[:, None] + jnp.arange(width)[None]
    return start_B, jnp.mod(pos_BW, end_B[:, None])


def pool(cfg: ModelConfig, pages: int, size: int) -> PagedKVCache:
    """Returns zeroed pages of `size` positions; `pages` over all devices."""
    shape = (cfg.layers, pages, size, held_heads(cfg), cfg.head_dim)
    zeros = constrain(jnp.zeros(shape, cfg.dtype), "LPOKH")
    return PagedKVCache(k_LPOKH=zeros, v_LPOKH=zeros)


def held_heads(cfg: ModelConfig) -> int:
    """Returns how many key heads pages have: the model's, or each of them twice.

    On a TPU a head that is alone on its device has itself for a neighbour, and half of the
    queries each (`layer.dealt`). There a tile of 16-bit numbers has two rows at the least, so
    that a kernel's pages of one head are as large; but XLA has other pages then, and would
    copy all of them at the begin and at the end of each program.
    """
    parts = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    narrow = jnp.dtype(cfg.dtype).itemsize < 4
    twice = platform() == "tpu" and cfg.kv_heads == parts and narrow
    return 2 * cfg.kv_heads if twice else cfg.kv_heads
