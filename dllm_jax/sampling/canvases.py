"""A forward of the engine's rows where keys are not final: of canvases, else of blocks.

With full attention every key depends on the whole canvas. So a row's canvas, its prompt and
all of its answer, is run when a block begins (`policy.CachePolicy.canvas`: "block") or at
every step ("step"). Its hidden states answer for the block once: they are kept until the
next forward of blocks. Where keys are cached they are written to the row's pages, and hold
until its next block begins.

A forward of *canvases* runs those that are due, whole and in batches of rows of about the
same length; no row decodes in it, and while one is due no forward is of blocks, so that
these are full. A forward of *blocks* runs a window for every row within a block: it writes
its keys over those that its positions had, and sees its pages up to where the policy says.
Rows whose blocks begin have no window: their canvas has answered.

So every row is at its own block, and nobody waits for the slowest. `denoise.step` is the
definition: the same ids and steps, log-probs up to rounding.

Letters: d shards, b rows of a shard, w windows of a shard, c canvases of a shard.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dllm_jax.models import cache as kv
from dllm_jax.models import mask
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import policy
from dllm_jax.sampling import shards as of_shards
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.rows import Rows
from dllm_jax.sampling.shards import Ran, by_shard, joined, of_many, of_rows
from dllm_jax.sharding import constrain


def due(rows: Rows, Q: int):
    """Returns which rows' canvases are to be run before they go on."""
    return rows.s.live_B & (rows.filled_B != rows.s.start_B + Q)


# ---- Of canvases ---------------------------------------------------------------------


def programs(
    params, rows: Rows, *, shards: int, model: ModelConfig, cfg: SamplerConfig
):
    """Returns (which program will do, the programs: of few canvases, and of many).

    A program takes the rows and runs canvases that are due: of a width the smallest that
    holds one of them, and of that width all it can.
    """
    needed_B = jnp.where(due(rows, cfg.block), rows.s.limit_B, FAR)
    least, before = needed_B.min(), 0
    which, branches = 0, []
    for width in cfg.canvas_widths:
        due_db = by_shard(needed_B <= width, shards)
        counts = cfg.canvas_counts(due_db.shape[1], width)
        here = len(branches) + of_many(due_db, counts)
        which, before = jnp.where(least > before, here, which), width
        branches += [
            functools.partial(
                run_canvases,
                params,
                due_db=due_db,
                count=count,
                width=width,
                model=model,
                cfg=cfg,
            )
            for count in counts
        ]
    return which, branches


def run_canvases(
    params, rows: Rows, *, due_db, count: int, width: int, model, cfg: SamplerConfig
) -> Ran:
    """Runs the first `count` canvases of each shard that are due, `width` positions each.

    What it leaves for present blocks is what these canvases say of them, and of the other
    rows what was there.
    """
    shards = len(due_db)
    row_dc = jnp.argsort(~due_db, axis=1, stable=True)[:, :count]
    real_dc = of_rows(due_db, row_dc)

    def of(x_B):
        return of_rows(by_shard(x_B, shards), row_dc)

    pos_dcW = jnp.broadcast_to(jnp.arange(width)[None, None], (*row_dc.shape, width))
    shown_dcW = of_shards.shown(rows.s, row_dc, pos_dcW, model)
    end_B = joined(jnp.where(real_dc, of(rows.s.limit_B), 0))  # no canvas sees nothing
    seen = mask.clean(model.attention, joined(pos_dcW), end_B, cfg.block)
    if rows.s.cache is not None:
        seen = kv.canvas(joined(of(rows.table_BA)), seen, end_B, rows.s.cache)
    x_dcWD, cache = of_shards.run(params, rows, shown_dcW, pos_dcW, seen, model)
    start_dc = of(rows.s.start_B)
    seat_11W = jnp.arange(cfg.block)[None, None]
    answering_dcW = start_dc[..., None] - model.shift + seat_11W
    said_dcWD = jnp.take_along_axis(
        x_dcWD, answering_dcW[..., None], axis=2, mode="clip"
    )
    target_dc = jnp.where(real_dc, row_dc, due_db.shape[1])  # past: dropped
    put = jax.vmap(lambda old, row, new: old.at[row].set(new, mode="drop"))
    x_dbWD = put(by_shard(rows.entry_BWD, shards), target_dc, said_dcWD)
    filled_db = put(by_shard(rows.filled_B, shards), target_dc, start_dc + cfg.block)
    x_BWD = constrain(joined(x_dbWD), "BWD")
    kept = None if rows.s.cache is None else cache
    return Ran(x_BWD, rows.last_BD, joined(filled_db), kept)


# ---- Of blocks -----------------------------------------------------------------------


def decoders(
    params, rows: Rows, *, shards: int, model: ModelConfig, cfg: SamplerConfig
):
    """Returns (which program holds all windows that are due, the programs).

    A program takes the rows, of none of which the canvas is due.
    """
    within_B = rows.s.live_B & (rows.s.block_steps_B > 0)
    cache_policy = policy.choose(cfg, model.attention)
    used_db = by_shard(within_B, shards)
    sizes = cfg.present_counts(used_db.shape[1]) if cache_policy.cached else (0,)

    def decode(rows, count: int):
        if not cache_policy.cached:  # nor is anything kept for the next step
            return Ran(rows.entry_BWD, rows.last_BD, 0 * rows.filled_B, None)
        if not count:
            return Ran(rows.entry_BWD, rows.last_BD, rows.filled_B, rows.s.cache)
        x_BWD, cache = run_windows(
            params, rows, used_db, cache_policy, count=count, model=model, cfg=cfg
        )
        x_BWD = jnp.where(within_B[:, None, None], x_BWD, rows.entry_BWD)
        return Ran(constrain(x_BWD, "BWD"), rows.last_BD, rows.filled_B, cache)

    # The smallest that holds all.
    smaller = jnp.asarray(sizes[:-1], jnp.int32)
    fits = jnp.searchsorted(smaller, used_db.sum(axis=1).max())
    return fits, [functools.partial(decode, count=size) for size in sizes]


def run_windows(
    params,
    rows: Rows,
    used_db,
    cache_policy: policy.CachePolicy,
    *,
    count: int,
    model: ModelConfig,
    cfg: SamplerConfig,
):
    """Runs the windows of the rows that are `used`, at most `count` of each shard.

    Returns (hidden states x_BWD that answer for these rows' present blocks, the
    PagedKVCache with the windows' keys). Of the other rows they are another's. With a shift
    nothing answers for a block's first position: zeros.
    """
    shards, width = len(used_db), cfg.window
    # As in which it is written: none is longer than a page.
    pieces = width // math.gcd(width, cfg.block)
    row_db, nth_db = of_shards.first(used_db)
    row_dw = row_db[:, :count]
    used_dw = of_rows(used_db, row_dw)

    def of(x_B):
        return of_rows(by_shard(x_B, shards), row_dw)

    # A window of no use keeps nothing, and its result is dropped.
    start_dw = jnp.where(used_dw, of(rows.s.start_B), 0)
    limit_dw = jnp.where(used_dw, of(rows.s.limit_B), width)
    behind = FAR if cache_policy.suffix else width
    end_dw = jnp.minimum(start_dw + behind, limit_dw)
    pos_dwW = start_dw[..., None] + jnp.arange(width)[None, None]
    seen = kv.within(
        joined(of(rows.table_BA)),
        joined(pos_dwW),
        joined(end_dw),
        jnp.repeat(joined(used_dw)[:, None], pieces, axis=1),
        rows.s.cache,
    )
    shown_dwW = of_shards.shown(rows.s, row_dw, pos_dwW, model)
    x_dwWD, cache = of_shards.run(params, rows, shown_dwW, pos_dwW, seen, model)
    x_dwWD = jnp.pad(x_dwWD, ((0, 0), (0, 0), (model.shift, 0), (0, 0)))
    x_dbWD = of_rows(x_dwWD[:, :, : cfg.block], jnp.minimum(nth_db, count - 1))
    return joined(x_dbWD), cache
