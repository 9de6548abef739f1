"""Rows in flight over a pool of pages: what they are, and what the host changes of them.

A forward of them, and the loop over forwards, is in `forwards.py`. The host tells the
device by `Changes` who leaves, who begins, and whose pages are whose.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.models import cache as kv
from dllm_jax.models.config import ModelConfig
from dllm_jax.sampling import policy, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import SamplingState


@flax.struct.dataclass
class Rows:
    """Rows in flight over a pool of pages."""

    s: SamplingState  # its cache is a PagedKVCache
    # The row's pages, in their order, counted on its shard; behind the last its first again.
    table_BA: jax.Array
    # Positions whose keys are in the pages, where these are final; otherwise where the
    # block ends for which the row's canvas was run, 0 for none.
    filled_B: jax.Array
    room_B: jax.Array  # positions that the row's pages hold
    last_BD: jax.Array  # hidden state before the present block, for models with a shift
    # Hidden states that answer for the present block as the canvas was when last run; None
    # where keys are final.
    entry_BWD: jax.Array | None
    forwards: jax.Array  # how many there were
    # Blocks whose keys were written; where these are not final, canvases that were run.
    clean: jax.Array


@flax.struct.dataclass
class Changes:
    """What the host tells the device between forwards; it fills in numpy arrays."""

    # Rows that leave: cancelled, sent back to the queue, or ended and harvested.
    gone_B: jax.Array
    # Rows that begin, where `here`; the next eight count there alone.
    here_B: jax.Array
    prompt_BT: jax.Array
    prompt_len_B: jax.Array
    limit_B: jax.Array  # first position that the answer may not reach
    temperature_B: jax.Array
    threshold_B: jax.Array
    entropy_bound_B: jax.Array
    index_B: jax.Array  # with the run's key, what the row's random draws depend on
    filled_B: jax.Array  # positions whose keys are in its pages, those copied included
    # Where a new row goes on in a page that others hold, this is copied first.
    source_B: jax.Array
    target_B: jax.Array  # past the last page: nothing is copied
    # Of all rows: those that were there may have got more pages.
    table_BA: jax.Array
    room_B: jax.Array


# ---- What the host changes -----------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("model", "cfg", "pages"))
def empty(changes: Changes, key, *, model, cfg, pages: int) -> Rows:
    """Returns rows of which none lives, over `pages` zeroed pages in all.

    changes: nothing; they tell the shapes, and where on the mesh rows are.
    """
    rows = new_rows(changes, key, model=model, cfg=cfg)
    cached = policy.choose(cfg, model.attention).cached
    pool = kv.pool(model, pages, cfg.page_slots) if cached else None
    return constrained(rows.replace(s=rows.s.replace(cache=pool)))


@functools.partial(jax.jit, donate_argnames="rows")
def copy_pages(rows: Rows, changes: Changes) -> Rows:
    """Returns the rows with the pages copied on which new rows go on: rarely is there one."""

    def copied(pool, source_B, target_B):
        return tuple(x.at[:, target_B].set(x[:, source_B], mode="drop") for x in pool)

    pool, dims = rows.s.cache, ("LPOKH", "LPOKH")
    arrays = (pool.k_LPOKH, pool.v_LPOKH), changes.source_B, changes.target_B
    pool = kv.PagedKVCache(
        *sharding.per_device(copied, (dims, "B", "B"), dims, *arrays)
    )
    return constrained(rows.replace(s=rows.s.replace(cache=pool)))


@jax.jit
def not_finite(rows: Rows, left_B):
    """Returns whether pages of the rows `left` hold what is not finite: [B, K]."""

    def met(pool, table_BA, left_B):
        def in_pages(table_A):
            finite = [jnp.isfinite(x[:, table_A]).all((0, 1, 2, 4)) for x in pool]
            return ~(finite[0] & finite[1])

        def in_row(row):
            table_A, left = row
            none_K = jnp.zeros(pool[0].shape[3], bool)
            return jax.lax.cond(left, in_pages, lambda _: none_K, table_A)

        return jax.lax.map(in_row, (table_BA, left_B))

    pool, dims = rows.s.cache, ("LPOKH", "LPOKH")
    arrays = (pool.k_LPOKH, pool.v_LPOKH), rows.table_BA, left_B
    return sharding.per_device(met, (dims, "BA", "B"), "BK", *arrays)


@functools.partial(jax.jit, static_argnames=("model", "cfg"), donate_argnames="rows")
def admit(rows: Rows, changes: Changes, key, *, model, cfg) -> Rows:
    """Returns the rows with `changes` but for pages; key: the run's, a typed random key."""

    def merged(old, new):
        if new.ndim == 0:  # counters go on
            return old
        return jnp.where(changes.here_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    pool = rows.s.cache
    live_B = rows.s.live_B & ~changes.gone_B
    old = rows.replace(s=rows.s.replace(cache=None, live_B=live_B))
    new = new_rows(changes, key, model=model, cfg=cfg)
    rows = jax.tree.map(merged, old, new)
    return constrained(
        rows.replace(
            s=rows.s.replace(cache=pool),
            table_BA=changes.table_BA,
            room_B=changes.room_B,
        )
    )


def new_rows(changes: Changes, key, *, model: ModelConfig, cfg: SamplerConfig) -> Rows:
    """Returns rows that begin, without a cache."""
    key_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, changes.index_B)
    s = state.begin(
        changes.prompt_BT,
        changes.prompt_len_B,
        changes.limit_B,
        changes.temperature_B,
        key_B,
        None,
        cfg.slots,
        threshold_B=changes.threshold_B,
        entropy_bound_B=changes.entropy_bound_B,
    )
    final = policy.choose(cfg, model.attention).final
    entry_BWD = jnp.zeros((len(key_B), cfg.block, model.d_model), model.dtype)
    start_B = policy.first_block(s.prompt_len_B, model.attention, cfg.block)
    return Rows(
        s=s.replace(start_B=start_B),
        table_BA=changes.table_BA,
        filled_B=changes.filled_B,
        room_B=changes.room_B,
        last_BD=jnp.zeros((len(key_B), model.d_model), model.dtype),
        entry_BWD=None if final else entry_BWD,
        forwards=jnp.int32(0),
        clean=jnp.int32(0),
    )


def constrained(rows: Rows) -> Rows:
    """Returns the rows split over the mesh, as every function here takes them."""
    pool = jax.tree.map(lambda x: sharding.constrain(x, "LPOKH"), rows.s.cache)
    rows = sharding.constrain_rows(rows.replace(s=rows.s.replace(cache=None)))
    return rows.replace(s=rows.s.replace(cache=pool))


traces = jax.jit(state.trace, static_argnames=("stop_ids", "whole"))


@functools.partial(jax.jit, static_argnames="stop_ids")
def some_traces(s: SamplingState, row_n, stop_ids: tuple[int, ...]) -> state.Trace:
    """Returns what some rows hand up."""
    return jax.tree.map(lambda x: x[row_n], state.trace(s, stop_ids))
