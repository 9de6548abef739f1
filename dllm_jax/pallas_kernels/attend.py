"""Attention over keys and values, in rows and in pages, and the update of pages.

Each op runs on every device's part of its arrays: rows are split, and heads where the
mesh's `model` divides them. What one part computes is a module of `choice.KERNELS`, or
the specification.

Letters: f queries that share one key head, folded into one dimension.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dllm_jax import sharding
from dllm_jax.pallas_kernels import held_pages, reference
from dllm_jax.pallas_kernels.choice import kernel, platform

SAVED = "attention"  # names what of it a rematerialised layer may keep
FEW = 64  # queries below which a key head's queries fill a tile together


def attention(
    q_BTNH, k_BSKH, v_BSKH, mask, *, cached=None, implementation="auto", interpret=False
):
    """Returns the grouped-query attention of q over k, v: [B, T, N, H] in q's dtype.

    mask: `models.mask.Mask`, whose ranges and groups say who sees whom. cached: (k, v) of
    earlier positions, each [B, S', K, H], to which the mask's first keys belong. Who gets
    what: `reference.attention`; a query that sees nothing gets zero of the kernels.
    Differentiable in q, k and v, and split over rows and key heads of the mesh.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    # A chunk of a prompt has few queries and many keys, of which it sees those before it;
    # a window over `cached` ones sees nearly all, and they would be copied together first.
    slots = T if cached is not None else max(T, k_BSKH.shape[1])
    module = kernel("attention", implementation, H, slots)
    if module is None:
        return reference.attention(q_BTNH, k_BSKH, v_BSKH, mask, cached=cached)
    if cached is not None:
        pairs = zip(cached, (k_BSKH, v_BSKH), strict=True)
        k_BSKH, v_BSKH = (jnp.concatenate(pair, axis=1) for pair in pairs)
    if T > FEW:
        return flash(module, interpret, q_BTNH, k_BSKH, v_BSKH, mask)
    return flash_few(module, interpret, q_BTNH, k_BSKH, v_BSKH, mask)


def planned(mask, G: int, H: int, implementation="auto"):
    """Returns the mask with what a kernel of `attention` has to know of its ranges.

    Found once, for the attention of many layers without cached keys, whose heads are of
    size H, G of queries to one of keys: inside a loop over layers it would be found again in
    each.
    """
    T, S = mask.q_end_BT.shape[1], mask.k_pos_BS.shape[1]
    module = kernel("attention", implementation, H, max(T, S)) if T > FEW else None
    return mask if module is None else mask.replace(tiles=module.plan(mask, G, H))


def flash_few(module, interpret, q_BTNH, k_BSKH, v_BSKH, mask):
    """Returns `flash`, a key head's G query heads having become queries of one head.

    Few queries leave a tile of queries half empty; G times as many fill it.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BGTKH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 3, 1)
    folds = 1, N // K
    folded = mask.replace(
        q_begin_BT=jnp.tile(mask.q_begin_BT, folds),
        q_end_BT=jnp.tile(mask.q_end_BT, folds),
        q_group_BT=jnp.tile(mask.q_group_BT, folds),
    )
    q_BfKH = q_BGTKH.reshape(B, -1, K, H)
    out_BfKH = flash(module, interpret, q_BfKH, k_BSKH, v_BSKH, folded)
    return jnp.moveaxis(out_BfKH.reshape(q_BGTKH.shape), 1, 3).reshape(B, T, N, H)


def head_letters(heads: int, kv_heads: int) -> str:
    """Returns the letters of query and key heads: "NK", or "nk" where they stay whole.

    Where `model` divides only one of the two, the parts' heads would not belong together:
    no rule of `sharding.ACT` splits small letters.
    """
    parts = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    return "NK" if heads % parts == 0 and kv_heads % parts == 0 else "nk"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def flash(module, interpret, q_BTNH, k_BSKH, v_BSKH, mask):
    """Returns the attention that a module of KERNELS computes, [B, T, N, H]."""
    return flash_forward(module, interpret, q_BTNH, k_BSKH, v_BSKH, mask)[0]


def flash_dims(q_BTNH, k_BSKH, mask):
    """Returns the letters of q, of k and v, of the mask and of the queries' sums."""
    N, K = head_letters(q_BTNH.shape[2], k_BSKH.shape[2])
    mask_dims = mask.replace(
        q_begin_BT="BT",
        q_end_BT="BT",
        q_group_BT="BT",
        k_pos_BS="BS",
        k_group_BS="BS",
        tiles=jax.tree.map(lambda x: "B" + "." * (x.ndim - 1), mask.tiles),
    )
    return f"BT{N}H", f"BS{K}H", mask_dims, f"B{N}T"


def flash_forward(module, interpret, q_BTNH, k_BSKH, v_BSKH, mask):
    q_dims, k_dims, mask_dims, lse_dims = flash_dims(q_BTNH, k_BSKH, mask)
    run = functools.partial(module.forward, interpret=interpret)
    dims_in, dims_out = (q_dims, k_dims, k_dims, mask_dims), (q_dims, lse_dims)
    out_BTNH, lse_BNT = sharding.per_device(
        run, dims_in, dims_out, q_BTNH, k_BSKH, v_BSKH, mask
    )
    if platform() == "gpu":
        # Without it XLA fuses a second call of the kernel with the write into the stack of
        # all layers' outputs: every forward pass of a gradient computed attention twice.
        out_BTNH, lse_BNT = jax.lax.optimization_barrier((out_BTNH, lse_BNT))
    out_BTNH, lse_BNT = (checkpoint_name(x, SAVED) for x in (out_BTNH, lse_BNT))
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, mask, out_BTNH, lse_BNT)


def flash_backward(module, interpret, saved, dout_BTNH):
    q_BTNH, k_BSKH, _, mask, _, _ = saved
    q_dims, k_dims, mask_dims, lse_dims = flash_dims(q_BTNH, k_BSKH, mask)
    run = functools.partial(module.backward, interpret=interpret)
    dims_in = q_dims, k_dims, k_dims, mask_dims, q_dims, lse_dims, q_dims
    gradients = sharding.per_device(
        run, dims_in, (q_dims, k_dims, k_dims), *saved, dout_BTNH
    )
    return *gradients, None  # a mask has none


flash.defvjp(flash_forward, flash_backward)


def paged_attention(
    q_BWNH,
    pages,
    layer,
    table_BA,
    start_B,
    k_BQKH,
    v_BQKH,
    *,
    implementation="auto",
    interpret=False,
):
    """Returns the attention of each row's window: [B, W, N, H] in q's dtype.

    q_BWNH, k_BQKH, v_BQKH: the windows' queries and own keys and values, all of which the
    window sees, or of more queries than keys the last ones; pages: pools (k, v), each
    [L, P, O, K, H]; layer: a scalar; table_BA: the pages of each row, in order; start_B: the
    positions before the window, all seen. See `reference.paged_attention`. On a mesh, rows
    and pages are split alike: a table names pages of its own device.
    """
    run = reference.paged_attention
    if module := kernel("paged_attention", implementation, q_BWNH.shape[3]):
        run = functools.partial(module.attend, interpret=interpret)
    N, K = head_letters(q_BWNH.shape[2], k_BQKH.shape[2])
    q_dims, k_dims, pool_dims = f"BW{N}H", f"BQ{K}H", f"LPO{K}H"
    dims_in = q_dims, (pool_dims, pool_dims), "", "BA", "B", k_dims, k_dims
    return sharding.per_device(
        run, dims_in, q_dims, q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH
    )


def paired_attention(
    q_RWNH, pages, layer, table_BA, start_B, k_RWKH, v_RWKH, window_B2, place_R, **how
):
    """Returns the attention of rows' windows, of which each row has one or two.

    It is `paged_attention` of both windows of a row together, which reads its pages once.
    Of two, the first ends and the second begins at `start`, and the first's keys are in the
    pages by now. R is of all windows, in any order: window_B2 are the first and the second of
    each row, or the one that it has twice; place_R is the window's own place among those of
    all rows, the first and the second of row 0, then of row 1. Both count on a device. how:
    implementation and interpret.
    """

    def run(
        q_RWNH, pages, layer, table_BA, start_B, k_RWKH, v_RWKH, window_B2, place_R
    ):
        B, W = len(window_B2), q_RWNH.shape[1]
        q_BWNH = q_RWNH[window_B2].reshape(B, 2 * W, *q_RWNH.shape[2:])
        own = (x_RWKH[window_B2[:, 1]] for x_RWKH in (k_RWKH, v_RWKH))
        out_BWNH = paged_attention(q_BWNH, pages, layer, table_BA, start_B, *own, **how)
        return out_BWNH.reshape(2 * B, *q_RWNH.shape[1:])[place_R]

    N, K = head_letters(q_RWNH.shape[2], k_RWKH.shape[2])
    q_dims, k_dims, pool_dims = f"RW{N}H", f"RW{K}H", f"LPO{K}H"
    pools = pool_dims, pool_dims
    dims_in = q_dims, pools, "", "BA", "B", k_dims, k_dims, "B2", "R"
    arrays = q_RWNH, pages, layer, table_BA, start_B, k_RWKH, v_RWKH, window_B2, place_R
    return sharding.per_device(run, dims_in, q_dims, *arrays)


def chunk_attention(
    q_BWNH, pages, layer, table_BA, mask, *, implementation="auto", interpret=False
):
    """Returns the attention of runs of rows' positions over their pages: [B, W, N, H].

    pages, layer, table_BA: as of `paged_attention`; what the runs see of their own is in
    the pages, too. mask: of `models.mask.ranged`, its keys the positions of a row's
    pages in their order, so that `q_end_BT` says all: a query sees the positions before
    its end. A module of `paged_attention` that has `attend_chunk` reads them where they
    lie; without one it is `attention` over what is gathered.
    """
    module = kernel("paged_attention", implementation, q_BWNH.shape[3])
    if not hasattr(module, "attend_chunk"):
        how = {"implementation": implementation, "interpret": interpret}
        gather = reference.gathered
        if hasattr(module, "gathered"):
            gather = functools.partial(module.gathered, interpret=interpret)
        return gathered_attention(q_BWNH, pages, layer, table_BA, mask, gather, **how)
    run = functools.partial(module.attend_chunk, interpret=interpret)
    N, K = head_letters(q_BWNH.shape[2], pages[0].shape[3])
    q_dims, pool_dims = f"BW{N}H", f"LPO{K}H"
    dims_in = q_dims, (pool_dims, pool_dims), "", "BA", "BW"
    return sharding.per_device(
        run, dims_in, q_dims, q_BWNH, pages, layer, table_BA, mask.q_end_BT
    )


def gathered_attention(q_BWNH, pages, layer, table_BA, mask, gather, **how):
    """Returns `attention` over the pages of rows, gathered: [B, W, N, H].

    Of the pages no more are gathered than the farthest query sees, rounded up as
    `held_pages.over_held` does. gather: `reference.gathered`, or what does the same. how:
    implementation and interpret.
    """
    pool_dims = "LPOKH", "LPOKH"

    def run(table_BA, q_BWNH, pages, layer, mask):
        k_BSKH, v_BSKH = sharding.per_device(
            gather,
            (pool_dims, "", "BA"),
            ("BAKH", "BAKH"),  # of A pages the positions
            *(pages, layer, table_BA),
        )
        S = k_BSKH.shape[1]
        seen = mask.replace(
            k_pos_BS=mask.k_pos_BS[:, :S], k_group_BS=mask.k_group_BS[:, :S]
        )
        return attention(q_BWNH, k_BSKH, v_BSKH, seen, **how)

    size = pages[0].shape[2]
    needed = -(-jnp.max(mask.q_end_BT) // size)
    arrays = q_BWNH, pages, layer, mask
    return held_pages.over_held(run, needed, size, table_BA, *arrays)


def cached_at(pages, layer, table_BA, pos_BW):
    """Returns what pages hold of some positions of rows: see `reference.cached_at`.

    On a mesh, rows and pages are split alike.
    """
    _, K = head_letters(pages[0].shape[3], pages[0].shape[3])
    pool_dims, k_dims = f"LPO{K}H", f"BW{K}H"
    dims_in, dims_out = ((pool_dims, pool_dims), "", "BA", "BW"), (k_dims, k_dims)
    return sharding.per_device(
        reference.cached_at, dims_in, dims_out, pages, layer, table_BA, pos_BW
    )


def cache_update(
    pages,
    layer,
    table_BA,
    start_B,
    keep_B,
    k_BWKH,
    v_BWKH,
    *,
    implementation="auto",
    interpret=False,
):
    """Returns `pages` with the windows of the rows that `keep` written at `start`.

    pages: pools (k, v), each [L, P, O, K, H]; layer: a scalar; table_BA: the pages of each
    row, in order; k_BWKH, v_BWKH: the windows. See `reference.cache_update`. The kernel
    writes in place: no copy is made of pages that nobody else holds. On GPU the
    specification does so too, as XLA scatters into what is donated. On a mesh, rows and
    pages are split alike.
    """
    run = reference.cache_update
    if module := kernel("cache_update", implementation, k_BWKH.shape[3]):
        run = functools.partial(module.update, interpret=interpret)
    _, K = head_letters(k_BWKH.shape[2], k_BWKH.shape[2])
    k_dims, pool_dims = f"BW{K}H", f"LPO{K}H"
    pair_dims = pool_dims, pool_dims
    dims_in = pair_dims, "", "BA", "B", "B", k_dims, k_dims
    return sharding.per_device(
        run, dims_in, pair_dims, pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH
    )
