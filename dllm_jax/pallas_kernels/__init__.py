"""The public ops: arrays in, arrays out; nothing here knows a config or parameters.

Each op has a specification in `reference`, and may have a kernel for TPU and one for GPU.
`implementation` names one, or "auto": the kernel of the platform that is compiled for,
where KERNELS has one that takes these shapes, else the specification. A kernel that is
named and missing raises ValueError. `interpret=True` runs a kernel on any platform,
slowly, for tests.
"""

import functools

import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.tpu import attention as tpu_attention

__all__ = [
    "attention",
    "cache_update",
    "grouped_matmul",
    "paged_attention",
    "token_logprob",
]

KERNELS = {("attention", "tpu"): tpu_attention}
HEAD_SIZES = (64, 128)  # of the kernels that have heads
HEAD_TILE = 512  # positions of a row whose logits are alive at once
FEW = 64  # queries below which a key head's queries fill a tile together


def platform() -> str:
    """Returns the platform that is compiled for: the mesh's in force, or the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def kernel(op: str, implementation: str, head_size: int | None = None):
    """Returns the module that implements `op`, or None for the specification.

    Raises ValueError for an implementation that the op, or its head size, does not have.
    """
    if implementation == "reference":
        return None
    takes = head_size is None or head_size in HEAD_SIZES
    if implementation == "auto":
        return KERNELS.get((op, platform())) if takes else None
    found = KERNELS.get((op, implementation))
    if found is None:
        have = [name for other, name in KERNELS if other == op]
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} does not exist; "
            f"choose from {['auto', 'reference', *have]}"
        )
    if not takes:
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} takes heads of "
            f"size {HEAD_SIZES}, not {head_size}; use 'reference'"
        )
    return found


def attention(
    q_BTNH, k_BSKH, v_BSKH, mask, *, cached=None, implementation="auto", interpret=False
):
    """Returns the grouped-query attention of q over k, v under a range-or-group mask.

    See `reference.attention`. The kernels differ in what a query that sees nothing gets:
    zero. Differentiable in q, k and v, and split over rows and key heads of the mesh.
    """
    found = kernel("attention", implementation, q_BTNH.shape[3])
    if found is None:
        return reference.attention(q_BTNH, k_BSKH, v_BSKH, mask, cached=cached)
    if cached is not None:
        pairs = zip(cached, (k_BSKH, v_BSKH), strict=True)
        k_BSKH, v_BSKH = (jnp.concatenate(pair, axis=1) for pair in pairs)
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if T > FEW:
        return flash(found, interpret, q_BTNH, k_BSKH, v_BSKH, mask)
    # Few queries leave a tile half empty: a key head's G heads become queries of one.
    q_BGTKH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 3, 1)
    folded = mask.replace(
        **{
            name: jnp.tile(getattr(mask, name), (1, N // K))
            for name in ("q_begin_BT", "q_end_BT", "q_group_BT")
        }
    )
    q_BTKH = q_BGTKH.reshape(B, -1, K, H)
    out_BTKH = flash(found, interpret, q_BTKH, k_BSKH, v_BSKH, folded)
    return jnp.moveaxis(out_BTKH.reshape(q_BGTKH.shape), 1, 3).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def flash(found, interpret, q_BTNH, k_BSKH, v_BSKH, mask):
    """Returns the attention that the module `found` computes."""
    return flash_forward(found, interpret, q_BTNH, k_BSKH, v_BSKH, mask)[0]


def flash_dims(q_BTNH, k_BSKH, mask):
    """Returns the letters of q, k and the mask, without heads that cannot be split alike."""
    mesh = jax.sharding.get_abstract_mesh()
    split = mesh.shape.get("model", 1)
    keep = q_BTNH.shape[2] % split == 0 and k_BSKH.shape[2] % split == 0
    q, k = ("BTNH", "BSKH") if keep else ("BTnH", "BSkH")
    return q, k, type(mask)("BT", "BT", "BT", "BS", "BS")


def flash_forward(found, interpret, *args):
    q, k, mask = flash_dims(args[0], args[1], args[3])
    run = functools.partial(found.forward, interpret=interpret)
    lse = "B" + q[2] + "T"
    out, lse_BNT = sharding.per_device(run, (q, k, k, mask), (q, lse), *args)
    return out, (*args, out, lse_BNT)


def flash_backward(found, interpret, saved, dout_BTNH):
    q, k, mask = flash_dims(saved[0], saved[1], saved[3])
    run = functools.partial(found.backward, interpret=interpret)
    dims = (q, k, k, mask, q, "B" + q[2] + "T", q)
    return *sharding.per_device(run, dims, (q, k, k), *saved, dout_BTNH), None


flash.defvjp(flash_forward, flash_backward)


def paged_dims(q_BWNH, k_BWKH):
    """Returns the letters of q, of the pages, of fresh keys and of the table."""
    split = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    keep = q_BWNH.shape[2] % split == 0 and k_BWKH.shape[2] % split == 0
    N, K = "NK" if keep else "nk"
    pool = f"LPO{K}H"
    return f"BW{N}H", (pool, pool), f"BW{K}H", "BA"


def paged_attention(q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH):
    """Returns each row's window attention; see `reference.paged_attention`.

    On a mesh, rows and pages are split alike: a table names pages of its own device.
    """
    q, pool, k, table = paged_dims(q_BWNH, k_BWKH)
    return sharding.per_device(
        reference.paged_attention,
        (q, pool, "", table, "B", k, k),
        q,
        *(q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH),
    )


def cache_update(pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH):
    """Returns `pages` with the kept windows written; see `reference.cache_update`."""
    _, pool, k, table = paged_dims(k_BWKH, k_BWKH)
    return sharding.per_device(
        reference.cache_update,
        (pool, "", table, "B", "B", k, k),
        pool,
        *(pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH),
    )


def token_logprob(x_BUD, head_DV, token_BU, *, forbidden: int):
    """Returns (log-prob of `token`, entropy), each [B, U], nats, f32.

    Walks over tiles of U, forward and backward, so that the logits alive at any time are
    [B, tile, V]; the column `forbidden` (the mask id) has probability zero.
    """
    B, U, D = x_BUD.shape
    tile = min(HEAD_TILE, U)
    pad = -U % tile
    x_BUD = jnp.pad(x_BUD, ((0, 0), (0, pad), (0, 0)))
    token_BU = jnp.pad(token_BU, ((0, 0), (0, pad)))

    @jax.checkpoint
    def one(_, tile_inputs):
        x_BCD, token_BC = tile_inputs
        logp_R, entropy_R = reference.token_logprob(
            x_BCD.reshape(-1, D), head_DV, token_BC.reshape(-1), forbidden
        )
        return None, (logp_R.reshape(B, -1), entropy_R.reshape(B, -1))

    def tiles(x):  # [B, U, ...] -> [U / tile, B, tile, ...]: rows stay where they are
        return jnp.moveaxis(x.reshape(B, -1, tile, *x.shape[2:]), 1, 0)

    _, out = jax.lax.scan(one, None, (tiles(x_BUD), tiles(token_BU)))
    return tuple(jnp.moveaxis(y, 0, 1).reshape(B, -1)[:, :U] for y in out)


def grouped_matmul(x_MD, w_EDF, sizes_E, *, implementation="auto"):
    """Returns each row of x times the matrix of its group; see `reference`.

    TPU: jax.lax.ragged_dot, which XLA turns into a kernel that skips nothing and wastes
    nothing. Elsewhere XLA makes it dense, E times the work and memory; so there rows are
    padded to tiles of one group each, and tiles multiply copies of their group's matrix.
    """
    if implementation == "auto":
        implementation = "tpu" if platform() == "tpu" else "tiles"
    if implementation not in GROUPED:
        raise ValueError(
            f"pallas_kernels.grouped_matmul: implementation={implementation!r} does not "
            f"exist; choose from {['auto', *GROUPED]}"
        )
    return GROUPED[implementation](x_MD, w_EDF, sizes_E)


def tiled_matmul(x_MD, w_EDF, sizes_E):
    """The grouped matmul by tiles: rows are padded to at most M + E tiles' worth."""
    M, E = len(x_MD), len(w_EDF)
    size = min(128, max(16, 1 << (M // E).bit_length()))  # about a group's rows
    end_E = jnp.cumsum(sizes_E)
    tiles_E = -(-sizes_E // size)
    last_E = jnp.cumsum(tiles_E)
    tile_J = jnp.arange(M // size + E)
    group_J = jnp.searchsorted(last_E, tile_J, side="right")
    within_J = tile_J - (last_E - tiles_E).at[group_J].get(mode="clip")
    begin_J = (end_E - sizes_E).at[group_J].get(mode="clip") + within_J * size
    row_Jt = begin_J[:, None] + jnp.arange(size)[None]
    real_Jt = (row_Jt < end_E.at[group_J].get(mode="clip")[:, None]) & (group_J < E)[
        :, None
    ]
    x_JtD = jnp.where(real_Jt[..., None], x_MD.at[row_Jt].get(mode="clip"), 0)
    y_JtF = jnp.einsum("JtD,JDF->JtF", x_JtD, w_EDF.at[group_J].get(mode="clip"))
    # Back to where the rows came from; what is not real goes past the end and is dropped.
    row_Jt = jnp.where(real_Jt, row_Jt, M).reshape(-1)
    y_MF = jnp.zeros((M, y_JtF.shape[-1]), y_JtF.dtype)
    return y_MF.at[row_Jt].set(y_JtF.reshape(len(row_Jt), -1), mode="drop")


GROUPED = {
    "tpu": jax.lax.ragged_dot,
    "tiles": tiled_matmul,
    "reference": reference.grouped_matmul,
}
