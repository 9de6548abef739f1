"""A forward of the engine's rows: of prompts where some are due, else of blocks.

This is of keys that are final once their block is; of others `canvases.py` has the
programs. The choice among them, and the loop, are here.

A forward of *blocks* runs windows of Q positions: the present block of every row that
goes on, and beside these the blocks that rows have just filled and whose keys are not in
the pages yet. Such clean keys are written before anything of the same layer looks, so a
row commits a block and denoises the next in one forward: a block costs its denoising
steps and nothing else. Rows that have ended have no window.

A forward of *prompts* runs chunks: runs of whole blocks, wide enough that a row's pages
are gathered once for many positions. No row decodes in it, and while a prompt of two
blocks or more is due no forward is of blocks: prompts come first, so that later forwards
are full. What is left of one block rides beside decoding rows, as if just filled.

Where prompts *ride* (`rides`) all of them do, each of their blocks a window; what the program
that is run does not hold is for the next forward (`room_of`). One of prompts alone would read
all weights once more: 32 rows of 30M parameters, refilled twice, took 78 forwards and take 42.

Elsewhere the two windows that a row may have are *paired*: attention reads the row's pages
once for both. What lies before the second is what the first sees, itself included, as its
keys are in the pages by then.

How many windows and chunks there are is known on the device alone, while shapes are
fixed: there are few programs, each forward by the smallest that holds what it is to run.

Rows are split over the mesh in shards (`shards.py`); windows and chunks are dealt out
within one.

`denoise.step` is the definition: the same ids and steps, log-probs up to rounding.

Letters: d shards, b rows of a shard, r the same in another order, and some, w windows of a
shard, c chunks of a shard.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.models import acting
from dllm_jax.models import cache as kv
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.pallas_kernels import choice
from dllm_jax.sampling import canvases, denoise, policy
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.rows import Rows, constrained
from dllm_jax.sampling.shards import (
    Ran,
    by_shard,
    first,
    joined,
    of_many,
    of_rows,
    run,
    shown,
)
from dllm_jax.sampling.state import SamplingState
from dllm_jax.sharding import constrain

RIDING_ON = ("cpu",)  # platforms on which prompts may ride with blocks
SHORT = 64  # positions of a prompt
# Slots of which XLA's products there take whole multiples: others it pads, four times a layer.
WHOLE = {"gpu": 8}


def rides(platform: str, model: ModelConfig, cfg: SamplerConfig) -> bool:
    """Returns whether prompts ride with blocks: short ones, beside heavy weights, on a CPU.

    Where a chunk reads a row's pages once, riding blocks read them one by one. On two cores
    8 and 32 rows of 30M parameters are answered 1.06 times as fast with prompts of 64 tokens,
    32 rows 1.12 times with 32; with 128 it would be 0.98 and 0.96 times, and 16 rows of a
    model that the cache holds, 0.95.
    """
    short = cfg.max_prompt <= SHORT
    return platform in RIDING_ON and short and acting.heavy(model)


def window_counts(
    platform: str, cfg: SamplerConfig, rows: int, rides: bool = False
) -> tuple[int, ...]:
    """Returns the numbers of windows that there are programs for: see SamplerConfig's."""
    whole = WHOLE.get(platform, 1)
    whole //= math.gcd(whole, cfg.block)
    counts = cfg.window_counts(rows, rides)
    return tuple(sorted({-(-count // whole) * whole for count in counts}))


def forward(
    params,
    rows: Rows,
    *,
    shards: int,
    model: ModelConfig,
    cfg: SamplerConfig,
    rides: bool,
) -> Rows:
    """Returns the rows after one forward; rides: whether prompts do.

    All programs are branches of one choice, from which the pages come straight: from a
    choice within a choice XLA would copy them, all of them, in every forward.
    """
    static = {"shards": shards, "model": model, "cfg": cfg}
    cache_policy = policy.choose(cfg, model.attention)
    if cache_policy.final:
        shard = len(rows.filled_B) // shards
        counts = window_counts(choice.platform(), cfg, shard, rides)
        places = places_of(rows, shards, cfg.block, counts if rides else None)
        now_B = joined(places.now_db)
        fits, branches = decoders(params, rows, places, counts, rides, model, cfg)
        prompts = (places.due_db > 1).any()
        prefilled, fill = not rides and cfg.has_chunks, prefillers
    else:
        now_B = able(rows.s, rows.room_B, cfg.block)
        fits, branches = canvases.decoders(params, rows, **static)
        prompts = canvases.due(rows, cfg.block).any()
        prefilled, fill = True, canvases.programs
    if prefilled:
        which, prefills = fill(params, rows, **static)
        fits = jnp.where(prompts, len(branches) + which, fits)
        branches += prefills
    ran = jax.lax.switch(fits, branches, rows)
    more_B = ran.filled_B - rows.filled_B
    final = cache_policy.final
    written = more_B.sum() // cfg.block if final else (more_B > 0).sum()
    denoised = functools.partial(denoise_blocks, params, model=model, cfg=cfg)
    s = rows.s.replace(cache=None)
    if prefilled:
        s = jax.lax.cond(prompts, lambda s, *_: s, denoised, s, ran.x_BWD, now_B)
    else:
        s = denoised(s, ran.x_BWD, now_B)
    return rows.replace(
        s=s.replace(cache=ran.cache),
        filled_B=ran.filled_B,
        last_BD=ran.last_BD,
        entry_BWD=None if final else ran.x_BWD,
        forwards=rows.forwards + 1,
        clean=rows.clean + written,
    )


def blocks_due(rows: Rows, Q: int):
    """Returns of how many blocks before its present one each row has no keys: [B].

    More than one are of its prompt.
    """
    return jnp.where(rows.s.live_B, (rows.s.start_B - rows.filled_B) // Q, 0)


# ---- Of blocks -----------------------------------------------------------------------


class Windows(NamedTuple):
    """The windows of a forward, of a shard first those that are used."""

    row_dw: jax.Array  # whose it is, counted on its shard
    pos_dwW: jax.Array
    shown_dwW: jax.Array  # its tokens, where they are known
    keep_dw: jax.Array  # its keys are written
    # Of each row the window of its last full block, and that of its present one; whatever
    # for rows without.
    window_d2b: jax.Array
    used_d2b: jax.Array  # whether there is one


def able(s: SamplingState, room_B, Q: int):
    """Returns which rows denoise: their pages have room for the block."""
    return s.live_B & (s.start_B + Q <= room_B)


class Places(NamedTuple):
    """What rows have windows for, by shard."""

    due_db: jax.Array  # for how many blocks before its present one, without keys as yet
    now_db: jax.Array  # whether for its present one
    windows_d: jax.Array  # how many that are in all


def places_of(
    rows: Rows, shards: int, Q: int, counts: tuple[int, ...] | None
) -> Places:
    """Returns the Places of rows.

    counts: windows of a shard that there are programs for, where one of these has room for
    what is due, and the rest waits, a row's present block for those before it. None: all have
    a window.
    """
    due_db = by_shard(blocks_due(rows, Q), shards)
    now_db = by_shard(able(rows.s, rows.room_B, Q), shards)
    if counts is not None:
        room = room_of(due_db, now_db, counts)

        def held(all_b):
            row_w, _, real_w = deal(all_b, counts[-1])
            real_w &= jnp.arange(counts[-1]) < room
            return jnp.zeros_like(all_b).at[row_w].add(real_w)

        held_db = jax.vmap(held)(due_db + now_db)
        now_db &= held_db > due_db
        due_db = jnp.minimum(held_db, due_db)
    return Places(due_db, now_db, due_db.sum(axis=1) + now_db.sum(axis=1))


def room_of(due_db, now_db, counts: tuple[int, ...]):
    """Returns how many windows of a shard a forward runs at most, one of `counts`.

    As many as the smallest program that holds all has, or the largest. Where it would not be
    full the next smaller one is run, if it has room for at least half of the windows of rows
    with prompts, beside those of all others: no prompt waits for long. On two cores 2 to 32
    rows of 30M parameters are answered 1.04 to 1.06 times as fast so, with prompts of 32 or 64.
    """
    all_db, sizes = due_db + now_db, jnp.asarray(counts)
    most = all_db.sum(axis=1).max()
    others = jnp.where(due_db > 1, 0, all_db).sum(axis=1).max()
    place = smallest(counts, most)
    less, more = sizes[jnp.maximum(place - 1, 0)], sizes[place]
    fills = (most < more) & (2 * (less - others) >= most - others)
    return jnp.where(fills, less, more)


def smallest(counts: tuple[int, ...], most):
    """Returns which of `counts` is the smallest of at least `most`, or the last."""
    return jnp.searchsorted(jnp.asarray(counts[:-1], jnp.int32), most)


def decoders(
    params,
    rows: Rows,
    places: Places,
    counts: tuple[int, ...],
    rides: bool,
    model: ModelConfig,
    cfg: SamplerConfig,
):
    """Returns (which program holds all windows of `places`, the programs, by `counts`).

    A program takes the rows, all of whose windows it holds: it is a forward of blocks for
    so many windows.
    """
    due_B, heads = joined(places.due_db), (model.heads, model.kv_heads)

    def decode(rows, count: int):
        windows = windows_of(rows, places, counts[-1], model, cfg.block)
        paired = count > 1 and not rides and kv.pairs_fit(*heads, cfg.block)
        x_BWD, last_BD, cache = run_windows(
            params, rows, windows, count=count, paired=paired, model=model
        )
        if model.shift:  # i - 1 answers for i: for a block's first, what lies before it
            last_BD = jnp.where(due_B[:, None] > 0, last_BD, rows.last_BD)
            x_BWD = jnp.concatenate([last_BD[:, None], x_BWD[:, :-1]], axis=1)
        return Ran(x_BWD, last_BD, rows.filled_B + cfg.block * due_B, cache)

    fits = smallest(counts, places.windows_d.max())
    return fits, [functools.partial(decode, count=count) for count in counts]


def denoise_blocks(
    params, s: SamplingState, x_BWD, now_B, *, model: ModelConfig, cfg: SamplerConfig
) -> SamplingState:
    """Returns the state after a forward of blocks; x_BWD: what it says of those `now`."""
    Q = cfg.block
    pos_BW = s.start_B[:, None] + jnp.arange(Q)[None]
    cache_policy = policy.choose(cfg, model.attention)
    must_BW = denoise.owed(s, pos_BW, cache_policy, model)
    static = {"model": model, "cfg": cfg}
    s = denoise.unmask(params, s, x_BWD, pos_BW, now_B, must_BW=must_BW, **static)
    # A block that is clean now is committed by a window of a later forward.
    clean_B = ~denoise.open_positions(s, pos_BW, model).any(axis=1)
    return denoise.move(s, now_B & s.live_B & clean_B, Q)


def windows_of(
    rows: Rows, places: Places, count: int, model: ModelConfig, Q: int
) -> Windows:
    """Returns `count` windows: of blocks that are due, then of present ones, then fillers."""
    (shards, b), at_w = places.due_db.shape, jnp.arange(count)
    fulls_d1 = places.due_db.sum(axis=1, keepdims=True)
    # Not `windows_d`: of one row a program for one window would not need `now_db`, and from
    # programs that do not all need the same XLA copies the pages.
    used_dw = at_w[None] < fulls_d1 + places.now_db.sum(axis=1, keepdims=True)
    full_dw = at_w[None] < fulls_d1
    full_row_dw, nth_dw, _ = jax.vmap(functools.partial(deal, count=count))(
        places.due_db
    )
    order_db, rank_db = first(places.now_db)
    now_row_dw = of_rows(order_db, jnp.clip(at_w[None] - fulls_d1, 0, b - 1))
    row_dw = jnp.where(full_dw, full_row_dw, now_row_dw)

    def of(x_B):
        return of_rows(by_shard(x_B, shards), row_dw)

    start_dw = jnp.where(full_dw, of(rows.filled_B) + Q * nth_dw, of(rows.s.start_B))
    # A window of no use sees no page: its result is dropped.
    start_dw = jnp.where(used_dw, start_dw, 0)
    pos_dwW = start_dw[..., None] + jnp.arange(Q)[None, None]
    shown_dwW = shown(rows.s, row_dw, pos_dwW, model)
    # A row's full blocks follow each other, so that the greatest is its last.
    last_db = jax.vmap(lambda row_w, w_w: jnp.zeros(b, int).at[row_w].max(w_w))(
        row_dw, jnp.where(full_dw, at_w[None], 0)
    )
    window_d2b = jnp.stack([last_db, fulls_d1 + rank_db], axis=1)
    used_d2b = jnp.stack([places.due_db > 0, places.now_db], axis=1)
    return Windows(row_dw, pos_dwW, shown_dwW, full_dw, window_d2b, used_d2b)


def pairs_of(rows: Rows, windows: Windows, count: int) -> kv.Pairs:
    """Returns the pairs of the first `count` windows of each shard: see kv.Pairs.

    Rows with a window come first, the longest before all: a kernel deals them out by length.
    Of those behind them no page is read.
    """
    shards, used_d2b = len(windows.row_dw), windows.used_d2b
    # Of a row with one window it is both: none is of another, whatever comes of that.
    window_d2b = jnp.where(used_d2b, windows.window_d2b, windows.window_d2b[:, ::-1])
    window_db2 = jnp.minimum(jnp.swapaxes(window_d2b, 1, 2), count - 1)
    here_db = used_d2b.any(axis=1)
    start_db = jnp.where(here_db, by_shard(rows.s.start_B, shards), 0)
    row_dr = jnp.argsort(jnp.where(here_db, -start_db, 1), axis=1)
    nth_db = jnp.argsort(row_dr, axis=1)
    row_dr = row_dr[:, :count]  # no more rows than windows
    second_dw = ~windows.keep_dw  # also of those of no use, whose results are dropped
    place_dw = 2 * of_rows(nth_db, windows.row_dw) + second_dw
    return kv.Pairs(
        table_BA=joined(of_rows(by_shard(rows.table_BA, shards), row_dr)),
        start_B=joined(of_rows(start_db, row_dr)),
        window_B2=joined(of_rows(window_db2, row_dr)),
        place_R=joined(jnp.minimum(place_dw[:, :count], 2 * row_dr.shape[1] - 1)),
    )


def run_windows(
    params,
    rows: Rows,
    windows: Windows,
    *,
    count: int,
    paired: bool,
    model: ModelConfig,
):
    """Runs the first `count` windows of each shard; paired: those of a row are.

    Returns (hidden states of the rows' present blocks x_BWD, those that end their full
    ones last_BD if a shift reads them, the PagedKVCache with the full ones' keys). Of a row
    without such a window they are another's.
    """
    shards, _, b = windows.used_d2b.shape
    row_dw, pos_dwW, shown_dwW, keep_dw = (x[:, :count] for x in windows[:4])
    last_db, now_db = jnp.moveaxis(jnp.minimum(windows.window_d2b, count - 1), 1, 0)
    some = count > b and not model.shift  # of the full ones nothing but keys is read
    seen = kv.Window(
        table_BA=joined(of_rows(by_shard(rows.table_BA, shards), row_dw)),
        start_B=joined(pos_dwW[..., 0]),
        keep_BJ=joined(keep_dw)[:, None],
        pairs=pairs_of(rows, windows, count) if paired else None,
        asked_da=now_db if some else None,
    )
    x_dwWD, cache = run(params, rows, shown_dwW, pos_dwW, seen, model)
    if some:
        return joined(x_dwWD), rows.last_BD, cache
    x_BWD = joined(of_rows(x_dwWD, now_db))
    return x_BWD, joined(of_rows(x_dwWD[:, :, -1], last_db)), cache


# ---- Of prompts ----------------------------------------------------------------------


class Chunks(NamedTuple):
    """Chunks of prompts, of each shard those that wait for least first."""

    row_dc: jax.Array  # whose it is, counted on its shard
    pos_dcW: jax.Array
    shown_dcW: jax.Array  # its tokens
    end_dc: jax.Array  # its keys before this position are written


def prefillers(
    params,
    rows: Rows,
    *,
    shards: int,
    model: ModelConfig,
    cfg: SamplerConfig,
):
    """Returns (which program will do, the programs: of few chunks, and of more if many).

    A program takes the rows and runs chunks of those that wait for two blocks or more.
    """
    due_B = blocks_due(rows, cfg.block)
    due_B = jnp.where(due_B > 1, -(-due_B * cfg.block // cfg.chunk), 0)
    due_db = by_shard(due_B, shards)
    counts = cfg.chunk_counts(due_db.shape[1])

    def prefill(rows, count: int):
        chunks = chunks_of(rows, due_db, count, model, cfg)
        last_BD, cache = run_chunks(params, rows, chunks, model=model, cfg=cfg)
        # A row's chunks follow each other, so that the greatest end is the last one's.
        greatest = jax.vmap(lambda old_b, row_c, end_c: old_b.at[row_c].max(end_c))
        filled_db = by_shard(rows.filled_B, shards)
        filled_B = joined(greatest(filled_db, chunks.row_dc, chunks.end_dc))
        x_BWD = jnp.zeros((len(due_B), cfg.block, model.d_model), model.dtype)
        return Ran(constrain(x_BWD, "BWD"), last_BD, filled_B, cache)

    return of_many(due_db, counts), [
        functools.partial(prefill, count=count) for count in counts
    ]


def chunks_of(rows: Rows, due_db, count: int, model, cfg: SamplerConfig) -> Chunks:
    """Returns `count` chunks of each shard; due_db: for how many each row waits."""
    (shards, b), width = due_db.shape, cfg.chunk
    # Of one row they follow each other: as one of them they have its pages gathered once, in
    # 0.98 of the time of a prompt of 2,048 on two cores.
    if b == 1 and choice.platform() == "cpu":
        count, width = 1, count * width
    row_dc, nth_dc, real_dc = jax.vmap(functools.partial(deal, count=count))(due_db)
    begin_dc = of_rows(by_shard(rows.filled_B, shards), row_dc)
    start_dc = jnp.where(real_dc, begin_dc + nth_dc * width, 0)
    # What is behind the prompt's last whole block is run and dropped.
    end_dc = jnp.minimum(
        start_dc + width, of_rows(by_shard(rows.s.start_B, shards), row_dc)
    )
    pos_dcW = start_dc[..., None] + jnp.arange(width)[None, None]
    shown_dcW = shown(rows.s, row_dc, pos_dcW, model)
    return Chunks(row_dc, pos_dcW, shown_dcW, jnp.where(real_dc, end_dc, 0))


def run_chunks(
    params, rows: Rows, chunks: Chunks, *, model: ModelConfig, cfg: SamplerConfig
):
    """Runs chunks of prompts.

    Returns (last_BD with what ends these chunks, the PagedKVCache with their keys).
    """
    shards = len(chunks.row_dc)
    # No wider than prompts: each width of a table is a program to compile.
    table_BA = rows.table_BA[:, : -(-cfg.max_prompt // cfg.page_slots)]
    seen = kv.chunk(
        joined(of_rows(by_shard(table_BA, shards), chunks.row_dc)),
        joined(chunks.pos_dcW),
        joined(chunks.end_dc),
        cfg.block,
        rows.s.cache,
    )
    x_dcWD, cache = run(params, rows, chunks.shown_dcW, chunks.pos_dcW, seen, model)
    if not model.shift:
        return rows.last_BD, cache
    return ends_of_prompts(rows, chunks, x_dcWD), cache


def ends_of_prompts(rows: Rows, chunks: Chunks, x_dcWD):
    """Returns `last_BD` with the ends of what lies before rows' present blocks.

    x_dcWD: the chunks' hidden states.
    """
    shards, row_dc = len(x_dcWD), chunks.row_dc
    start_db, last_dbD = (by_shard(x, shards) for x in (rows.s.start_B, rows.last_BD))
    final_dc = (chunks.end_dc > 0) & (chunks.end_dc == of_rows(start_db, row_dc))
    target_dc = jnp.where(final_dc, row_dc, start_db.shape[1])  # past: dropped
    last_dc = jnp.maximum(chunks.end_dc - 1 - chunks.pos_dcW[..., 0], 0)
    end_dcD = jax.vmap(of_rows)(x_dcWD, last_dc[..., None])[:, :, 0]
    put = jax.vmap(lambda old, row, new: old.at[row].set(new, mode="drop"))
    return joined(put(last_dbD, target_dc, end_dcD))


def deal(due_b, count: int):
    """Deals chunks out to a shard's rows, to those that wait for least first.

    So the rows of short prompts decode soon. Returns (row_c, nth_c: which of the row's
    chunks it is, from 0; real_c: whether it is one at all). Fewer are the same, cut.
    """
    order_b = jnp.argsort(jnp.where(due_b > 0, due_b, FAR))
    due_b = due_b[order_b]
    ends_b = jnp.cumsum(due_b)
    slot_c = jnp.arange(count)
    # Not by bisection: on a GPU each of its steps is several kernels.
    rank_c = jnp.searchsorted(ends_b, slot_c, side="right", method="compare_all")
    rank_c = jnp.minimum(rank_c, len(due_b) - 1)
    return order_b[rank_c], slot_c - (ends_b - due_b)[rank_c], slot_c < ends_b[-1]


# ---- The loop ------------------------------------------------------------------------


jitted = functools.partial(
    jax.jit,
    static_argnames=("shards", "model", "cfg", "rides"),
    donate_argnames="rows",
)


@jitted
def advance(
    params,
    rows: Rows,
    steps,
    enough,
    *,
    shards: int,
    model: ModelConfig,
    cfg: SamplerConfig,
    rides: bool,
) -> Rows:
    """Runs forwards: at most `steps`, until `enough` rows have ended or none can go on.

    Who asks for one asks for one that unmasks: those of canvases before it do not count. (Where
    prompts ride, a forward may be of prompts alone, and counts.)
    A row that is out of room waits for the host, which alone can give it pages.
    """
    alive = rows.s.live_B.sum()

    def goes_on(carry):
        n, rows = carry
        s = rows.s
        fits_B = s.start_B + cfg.block <= rows.room_B
        able_B = s.live_B & (fits_B | (blocks_due(rows, cfg.block) > 0))
        return (n < steps) & able_B.any() & (alive - s.live_B.sum() < enough)

    def body(carry):
        n, rows = carry
        count = 1
        if not policy.choose(cfg, model.attention).final:
            count -= (steps == 1) & canvases.due(rows, cfg.block).any()
        rows = forward(params, rows, shards=shards, model=model, cfg=cfg, rides=rides)
        return n + count, constrained(rows)

    return jax.lax.while_loop(goes_on, body, (0, rows))[1]


# All layers of a forward are one CUDA graph, as a GPU waits for the next kernel otherwise: one
# row of 8B makes 350 tokens/s so on an H200, and 326 with a graph of each layer; 128 rows of 4B
# 1.02 times as many. Choices, which are XLA's default, are none: what is around a forward stays
# out of the graph.
GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
}
advance_on_gpu = jitted(advance.__wrapped__, compiler_options=denoise.ON_GPU | GRAPH)
