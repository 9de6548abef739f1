"""The engine's device half: rows over a pool of pages, and the loop over forwards.

A forward runs a window of Q positions for every row, its present block, and beside
these some *clean* windows: blocks whose tokens are known and whose keys are not in the
pages yet, be it the block that a row has just filled or a part of a prompt. Clean keys
are written before anything of the same layer looks, so a row commits a block and
denoises the next in one forward: a block costs its denoising steps and nothing else,
and prompts are prefilled beside rows that decode. Blocks just filled come first: no
prompt delays a row.

Rows are split over the mesh in *shards*, one for each device of its data and fsdp axes,
with the pages of that device. The rows of a shard are neighbours; clean windows are
dealt out, and rows and pages are counted, within it.

`denoise.step` is the definition: the same ids and steps, log-probs up to rounding.

Letters: d shards, b rows of a shard, c clean windows of a shard, w all its windows (the
clean ones first, then a block for each row), a the windows of all shards (d times w).
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.models import cache as kv
from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import denoise, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import SamplingState


@flax.struct.dataclass
class Rows:
    """Rows in flight over a pool of pages."""

    s: SamplingState  # its cache is a PagedKVCache
    table_BA: jax.Array  # the row's pages, in their order, counted on its shard
    filled_B: jax.Array  # positions whose keys are in the pages
    room_B: jax.Array  # positions that the row's pages hold
    last_BD: jax.Array  # hidden state before the present block, for models with a shift
    forwards: jax.Array  # how many there were
    clean: jax.Array  # clean windows that were run, for their keys


@flax.struct.dataclass
class Changes:
    """What the host tells the device between forwards; it fills in numpy arrays."""

    # Rows that leave: cancelled, sent back to the queue, or ended and harvested.
    gone_B: jax.Array
    # Rows that begin, where `here`; the next six count there alone.
    here_B: jax.Array
    prompt_BT: jax.Array
    prompt_len_B: jax.Array
    limit_B: jax.Array  # first position that the answer may not reach
    temperature_B: jax.Array
    index_B: jax.Array  # with the run's key, what the row's random draws depend on
    filled_B: jax.Array  # positions whose keys are in its pages, those copied included
    # Where a new row goes on in a page that others hold, this is copied first.
    source_B: jax.Array
    target_B: jax.Array  # past the last page: nothing is copied
    # Of all rows: those that were there may have got more pages.
    table_BA: jax.Array
    room_B: jax.Array


# ---- A forward -----------------------------------------------------------------------


class Deal(NamedTuple):
    """The clean windows of a forward and the rows that they go to."""

    take_db: jax.Array  # how many each row gets
    row_dc: jax.Array  # the row of each window, counted on its shard
    nth_dc: jax.Array  # which of the row's windows it is, from 0
    real_dc: jax.Array  # whether it is one at all: there may be more than are due


class Windows(NamedTuple):
    """All windows of a forward: a shard's clean ones, then a block for each row."""

    row_dw: jax.Array  # whose it is, counted on its shard
    pos_dwW: jax.Array
    clean_dw: jax.Array  # its keys are written
    used_dw: jax.Array  # it is really one, or the block of a row that denoises now


def step(
    params,
    rows: Rows,
    *,
    clean_count: int,
    shards: int,
    model: ModelConfig,
    cfg: SamplerConfig,
) -> Rows:
    """Returns the rows after one forward with `clean_count` clean windows a shard."""
    s, Q = rows.s, cfg.block
    due_B = windows_due(rows, Q)
    dealt = deal_on_shards(due_B, shards, clean_count)
    take_B = joined(dealt.take_db)
    # A row denoises if this forward leaves no key before its block unwritten, and if
    # its pages have room for the block.
    now_B = s.live_B & (take_B == due_B) & (s.start_B + Q <= rows.room_B)
    windows = windows_of(rows, dealt, now_B, Q)
    x_dwWD, cache = run_windows(params, rows, windows, model)

    x_BWD = joined(x_dwWD[:, clean_count:])
    pos_BW = joined(windows.pos_dwW[:, clean_count:])
    last_BD = rows.last_BD
    if model.shift:  # i - 1 answers for i: for a block's first, what lies before it
        last_BD = ends_of_clean(last_BD, dealt, x_dwWD[:, :clean_count, -1])
        x_BWD = jnp.concatenate([last_BD[:, None], x_BWD[:, :-1]], axis=1)

    s = denoise.unmask(params, s, x_BWD, pos_BW, now_B, model=model, cfg=cfg)
    # A block that is clean now is committed by a clean window of a later forward.
    clean_B = ~denoise.open_positions(s, pos_BW, model).any(axis=1)
    s = denoise.move(s, now_B & s.live_B & clean_B, Q)
    return rows.replace(
        s=s.replace(cache=cache),
        filled_B=rows.filled_B + Q * take_B,
        last_BD=last_BD,
        forwards=rows.forwards + 1,
        clean=rows.clean + take_B.sum(),
    )


def windows_due(rows: Rows, Q: int):
    """Returns how many clean windows each row waits for: [B]."""
    return jnp.where(rows.s.live_B, (rows.s.start_B - rows.filled_B) // Q, 0)


def deal_on_shards(due_B, shards: int, clean_count: int) -> Deal:
    """Returns the Deal of `clean_count` clean windows on each shard."""
    on_shard = functools.partial(deal, clean_count=clean_count)
    return Deal(*jax.vmap(on_shard)(by_shard(due_B, shards)))


def deal(due_b, clean_count: int):
    """Deals clean windows out to a shard's rows, to those that wait for least first.

    A row that has just filled a block waits for one window, a new prompt for many: so
    no prompt delays a row that decodes. Returns the fields of a Deal, of one shard.
    """
    order_b = jnp.argsort(jnp.where(due_b > 0, due_b, FAR))
    sorted_b = due_b[order_b]
    taken_b = jnp.clip(clean_count - jnp.cumsum(sorted_b) + sorted_b, 0, sorted_b)
    ends_b = jnp.cumsum(taken_b)
    slot_c = jnp.arange(clean_count)
    rank_c = jnp.searchsorted(ends_b, slot_c, side="right")
    rank_c = jnp.minimum(rank_c, len(due_b) - 1)
    take_b = jnp.zeros_like(due_b).at[order_b].set(taken_b)
    nth_c = slot_c - (ends_b - taken_b)[rank_c]
    return take_b, order_b[rank_c], nth_c, slot_c < ends_b[-1]


def windows_of(rows: Rows, dealt: Deal, now_B, Q: int) -> Windows:
    """Returns the windows of a forward; `now_B`: the rows that denoise in it."""
    shards = dealt.row_dc.shape[0]
    own_db = jnp.broadcast_to(
        jnp.arange(dealt.take_db.shape[1])[None], dealt.take_db.shape
    )
    row_dw = jnp.concatenate([dealt.row_dc, own_db], axis=1)
    filled_dc = of_rows(by_shard(rows.filled_B, shards), dealt.row_dc)
    first_dc = filled_dc + dealt.nth_dc * Q
    start_dw = jnp.concatenate([first_dc, by_shard(rows.s.start_B, shards)], axis=1)
    return Windows(
        row_dw=row_dw,
        pos_dwW=start_dw[..., None] + jnp.arange(Q)[None, None],
        clean_dw=jnp.concatenate([dealt.real_dc, jnp.zeros_like(own_db, bool)], axis=1),
        used_dw=jnp.concatenate([dealt.real_dc, by_shard(now_B, shards)], axis=1),
    )


def run_windows(params, rows: Rows, windows: Windows, model: ModelConfig):
    """Returns (hidden states x_dwWD, the PagedKVCache with the clean windows' keys)."""
    s, shards = rows.s, windows.row_dw.shape[0]
    start_dw = windows.pos_dwW[..., 0]
    seen = kv.Window(
        table_BA=joined(of_rows(by_shard(rows.table_BA, shards), windows.row_dw)),
        # A window of no use sees no page: its result is dropped.
        start_B=joined(jnp.where(windows.used_dw, start_dw, 0)),
        keep_B=joined(windows.clean_dw),
    )

    def canvas_at(x_BT):
        at_windows = of_positions(
            by_shard(x_BT, shards), windows.row_dw, windows.pos_dwW
        )
        return joined(at_windows)

    tokens_aW, masked_aW = canvas_at(s.tokens_BT), canvas_at(s.step_BT) == FAR
    shown_aW = jnp.where(masked_aW, model.mask_id, tokens_aW)
    x_aWD = transformer.embed(params, shown_aW, model)
    pos_aW = joined(windows.pos_dwW)
    x_aWD, cache, _ = transformer.trunk(params, x_aWD, pos_aW, seen, model, s.cache)
    return by_shard(x_aWD, shards), cache


def ends_of_clean(last_BD, dealt: Deal, end_dcD):
    """Returns `last_BD` with the ends of those rows whose clean windows were run.

    end_dcD: the hidden states at each clean window's last position. Of a row's windows
    its final one counts: it ends where the present block begins.
    """
    shards, rows = dealt.take_db.shape
    final_dc = dealt.nth_dc == of_rows(dealt.take_db, dealt.row_dc) - 1
    target_dc = jnp.where(dealt.real_dc & final_dc, dealt.row_dc, rows)  # past: dropped
    put = jax.vmap(lambda old, row, new: old.at[row].set(new, mode="drop"))
    return joined(put(by_shard(last_BD, shards), target_dc, end_dcD))


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


# ---- The loop ------------------------------------------------------------------------


@functools.partial(
    jax.jit, static_argnames=("shards", "model", "cfg"), donate_argnames="rows"
)
def advance(
    params,
    rows: Rows,
    steps,
    enough,
    *,
    shards: int,
    model: ModelConfig,
    cfg: SamplerConfig,
) -> Rows:
    """Runs forwards: at most `steps`, until `enough` rows have ended or none can go on.

    A row that is out of room waits for the host, which alone can give it pages.
    """
    alive = rows.s.live_B.sum()
    # Few programs of fixed shape, each forward by the smallest that holds what is due.
    sizes = cfg.clean_windows(len(rows.s.live_B) // shards)
    branches = [
        functools.partial(
            step, params, clean_count=size, shards=shards, model=model, cfg=cfg
        )
        for size in sizes
    ]

    def goes_on(carry):
        n, rows = carry
        s = rows.s
        fits_B = s.start_B + cfg.block <= rows.room_B
        able_B = s.live_B & (fits_B | (windows_due(rows, cfg.block) > 0))
        return (n < steps) & able_B.any() & (alive - s.live_B.sum() < enough)

    def body(carry):
        n, rows = carry
        due_d = by_shard(windows_due(rows, cfg.block), shards).sum(axis=1)
        branch = jnp.searchsorted(jnp.asarray(sizes[:-1]), due_d.max())
        return n + 1, constrained(jax.lax.switch(branch, branches, rows))

    return jax.lax.while_loop(goes_on, body, (0, rows))[1]


# ---- What the host changes -----------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("model", "cfg", "pages"))
def empty(changes: Changes, key, *, model, cfg, pages: int) -> Rows:
    """Returns rows of which none lives, over `pages` zeroed pages in all.

    changes: nothing; they tell the shapes, and where on the mesh rows are.
    """
    rows = new_rows(changes, key, model=model, cfg=cfg)
    pool = kv.pool(model, pages, cfg.page_slots)
    return constrained(rows.replace(s=rows.s.replace(cache=pool)))


@functools.partial(jax.jit, static_argnames=("model", "cfg"), donate_argnames="rows")
def admit(rows: Rows, changes: Changes, key, *, model, cfg) -> Rows:
    """Returns the rows with `changes`; key: the run's, a typed random key."""

    def copied(pool, source_B, target_B):
        return tuple(x.at[:, target_B].set(x[:, source_B], mode="drop") for x in pool)

    def merged(old, new):
        if new.ndim == 0:  # counters go on
            return old
        return jnp.where(changes.here_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    dims = ("LPOKH", "LPOKH")
    pool = sharding.per_device(
        copied,
        (dims, "B", "B"),
        dims,
        (rows.s.cache.k_LPOKH, rows.s.cache.v_LPOKH),
        changes.source_B,
        changes.target_B,
    )
    live_B = rows.s.live_B & ~changes.gone_B
    old = rows.replace(s=rows.s.replace(cache=None, live_B=live_B))
    new = new_rows(changes, key, model=model, cfg=cfg)
    rows = jax.tree.map(merged, old, new)
    return constrained(
        rows.replace(
            s=rows.s.replace(cache=kv.PagedKVCache(*pool)),
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
    )
    return Rows(
        s=s.replace(start_B=s.prompt_len_B // cfg.block * cfg.block),
        table_BA=changes.table_BA,
        filled_B=changes.filled_B,
        room_B=changes.room_B,
        last_BD=jnp.zeros((len(key_B), model.d_model), model.dtype),
        forwards=jnp.int32(0),
        clean=jnp.int32(0),
    )


def constrained(rows: Rows) -> Rows:
    """Returns the rows split over the mesh, as every function here takes them."""
    pool = jax.tree.map(lambda x: sharding.constrain(x, "LPOKH"), rows.s.cache)
    rows = sharding.constrain_rows(rows.replace(s=rows.s.replace(cache=None)))
    return rows.replace(s=rows.s.replace(cache=pool))


traces = jax.jit(state.trace, static_argnames="stop_ids")
