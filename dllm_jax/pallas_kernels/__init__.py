"""The public ops: arrays in, arrays out; nothing here knows a config or parameters.

Each op has a specification in `reference`, and may have a kernel for TPU and one for GPU.
`implementation` names one, or "platform": the kernel of the platform that is compiled for,
where KERNELS has one for such heads, else the specification; or "auto": the same where
TRUSTED has the platform. A kernel that is named and missing raises ValueError, as does one
for other numbers or pages. `interpret=True` runs a kernel anywhere, slowly, for tests.
"""

import functools

import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.pallas_kernels import noise, reference
from dllm_jax.pallas_kernels.gpu import attention as gpu_attention
from dllm_jax.pallas_kernels.gpu import paged_attention as gpu_paged_attention
from dllm_jax.pallas_kernels.gpu import token_logprob as gpu_token_logprob
from dllm_jax.pallas_kernels.tpu import attention as tpu_attention
from dllm_jax.pallas_kernels.tpu import cache_update as tpu_cache_update
from dllm_jax.pallas_kernels.tpu import paged_attention as tpu_paged_attention
from dllm_jax.pallas_kernels.tpu import token_logprob as tpu_token_logprob

__all__ = [
    "attention",
    "cache_update",
    "grouped_matmul",
    "paged_attention",
    "token_draw",
    "token_logprob",
]

KERNELS = {
    ("attention", "gpu"): gpu_attention,
    ("attention", "tpu"): tpu_attention,
    ("cache_update", "tpu"): tpu_cache_update,
    ("paged_attention", "gpu"): gpu_paged_attention,
    ("paged_attention", "tpu"): tpu_paged_attention,
    ("token_draw", "gpu"): gpu_token_logprob,
    ("token_draw", "tpu"): tpu_token_logprob,
    ("token_logprob", "gpu"): gpu_token_logprob,
    ("token_logprob", "tpu"): tpu_token_logprob,
}
# Whose kernels "auto" takes. Those for GPU compile, and are right when interpreted, but
# have not been run on one: they are to be asked for.
TRUSTED = ("tpu",)
CHOICES = ("auto", "reference", "platform")  # of a whole run
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
    if implementation in CHOICES:
        wanted = implementation == "platform" or platform() in TRUSTED
        return KERNELS.get((op, platform())) if takes and wanted else None
    found = KERNELS.get((op, implementation))
    if found is None:
        have = [name for other, name in KERNELS if other == op]
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} does not exist; "
            f"choose from {[*CHOICES, *have]}"
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


def paged_attention(
    q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH,
    *, implementation="auto", interpret=False,
):  # fmt: skip
    """Returns each row's window attention; see `reference.paged_attention`.

    On a mesh, rows and pages are split alike: a table names pages of its own device.
    """
    run = reference.paged_attention
    if found := kernel("paged_attention", implementation, q_BWNH.shape[3]):
        run = functools.partial(found.attend, interpret=interpret)
    q, pool, k, table = paged_dims(q_BWNH, k_BWKH)
    args = q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH
    return sharding.per_device(run, (q, pool, "", table, "B", k, k), q, *args)


def cache_update(
    pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH,
    *, implementation="auto", interpret=False,
):  # fmt: skip
    """Returns `pages` with the kept windows written; see `reference.cache_update`.

    The kernel writes in place: no copy is made of pages that nobody else holds. On GPU
    the specification does so too, as XLA scatters into what is donated.
    """
    run = reference.cache_update
    if found := kernel("cache_update", implementation, k_BWKH.shape[3]):
        run = functools.partial(found.update, interpret=interpret)
    _, pool, k, table = paged_dims(k_BWKH, k_BWKH)
    args = pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH
    return sharding.per_device(run, (pool, "", table, "B", "B", k, k), pool, *args)


def token_logprob(
    x_BUD, head_DV, token_BU, *, forbidden: int, implementation="auto", interpret=False
):
    """Returns (log-prob of `token`, entropy), each [B, U], nats, f32.

    No more than a tile of logits is alive, forward and backward: [B, tile, V] of the
    specification, which walks over U, and less in a kernel, which also walks over V. The
    column `forbidden` (the mask id) has probability zero. Differentiable in x and head;
    split over rows and the vocabulary of the mesh.
    """
    found = kernel("token_logprob", implementation)
    if found is None:
        return tiled_logprob(x_BUD, head_DV, token_BU, forbidden)
    return fused_logprob(found, forbidden, interpret, x_BUD, head_DV, token_BU)


def tiled_logprob(x_BUD, head_DV, token_BU, forbidden: int):
    """Returns the specification's answer, a tile of U at a time."""
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


def parts(head_DV, V: int):
    """Returns (mesh axis that splits the vocabulary or None, first id of this part)."""
    if head_DV.shape[1] == V:
        return None, 0
    return "model", jax.lax.axis_index("model") * head_DV.shape[1]


def join(lse_R, mean_R, axis):
    """Returns (log of the sum, mean) over all parts of the vocabulary."""
    if axis is None:
        return lse_R, mean_R
    top_R = jax.lax.pmax(lse_R, axis)
    weight_R = jnp.exp(lse_R - top_R)
    total_R = jax.lax.psum(weight_R, axis)
    return top_R + jnp.log(total_R), jax.lax.psum(weight_R * mean_R, axis) / total_R


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def fused_logprob(found, forbidden, interpret, x_BUD, head_DV, token_BU):
    """Returns (log-prob, entropy) as the module `found` computes them."""
    return fused_forward(found, forbidden, interpret, x_BUD, head_DV, token_BU)[0]


def fused_forward(found, forbidden, interpret, *args):
    V = args[1].shape[1]

    def run(x_BUD, head_DV, token_BU):
        axis, offset = parts(head_DV, V)
        lse_R, mean_R, own_R = found.pick(
            x_BUD.reshape(-1, x_BUD.shape[2]),
            head_DV,
            token_BU.reshape(-1),
            offset,
            forbidden=forbidden,
            interpret=interpret,
        )
        lse_R, mean_R = join(lse_R, mean_R, axis)
        own_R = own_R if axis is None else jax.lax.psum(own_R, axis)
        out = own_R - lse_R, lse_R - mean_R, lse_R, mean_R
        return tuple(y.reshape(token_BU.shape) for y in out)

    dims = "BUD", "DV", "BU"
    logp, entropy, lse, mean = sharding.per_device(run, dims, ("BU",) * 4, *args)
    return (logp, entropy), (*args, lse, mean)


def fused_backward(found, forbidden, interpret, saved, grads):
    x_BUD, head_DV, _, _, _ = saved
    B, V = x_BUD.shape[0], head_DV.shape[1]

    def run(x_BUD, head_DV, token_BU, *saved_BU):
        axis, offset = parts(head_DV, V)
        dx_RD, dhead_DV = found.pick_gradient(
            x_BUD.reshape(-1, x_BUD.shape[2]),
            head_DV,
            token_BU.reshape(-1),
            offset,
            [y.reshape(-1) for y in saved_BU],
            forbidden=forbidden,
            interpret=interpret,
        )
        if axis is not None:
            dx_RD = jax.lax.psum(dx_RD, axis)
        if x_BUD.shape[0] < B:
            dhead_DV = jax.lax.psum(dhead_DV, sharding.ACT["B"])
        return dx_RD.reshape(x_BUD.shape), dhead_DV

    dims = ("BUD", "DV", *["BU"] * 5)
    out = sharding.per_device(run, dims, ("BUD", "DV"), *saved, *grads)
    return *out, None


fused_logprob.defvjp(fused_forward, fused_backward)


def token_draw(
    x_BWD, head_DV, key_B, temperature_B,
    *, forbidden: int, implementation="auto", interpret=False,
):  # fmt: skip
    """Draws a token for every position; see `reference.token_draw`.

    The noise is that of the specification, number for number, on every platform: kernels
    compute the same generator. Top-k and top-p need the sorted vocabulary and are not
    here: a caller that filters takes the logits. Split as `token_logprob` is.
    """
    found = kernel("token_draw", implementation)
    if found is None:
        return reference.token_draw(x_BWD, head_DV, key_B, temperature_B, forbidden)
    V = head_DV.shape[1]

    def run(x_BWD, head_DV, words_B2, temperature_B):
        B, W, D = x_BWD.shape
        axis, offset = parts(head_DV, V)
        slot_BW = jnp.broadcast_to(jnp.arange(W)[None], (B, W))
        token_R, best_R, own_R, lse_R, tempered_R, mean_R = found.draw(
            x_BWD.reshape(-1, D),
            head_DV,
            jnp.column_stack([words_B2.repeat(W, axis=0), slot_BW.reshape(-1)]),
            temperature_B.repeat(W),
            offset,
            width=V,
            forbidden=forbidden,
            interpret=interpret,
        )
        lse_R, _ = join(lse_R, mean_R, axis)
        tempered_R, mean_R = join(tempered_R, mean_R, axis)
        if axis is not None:
            wins_R = best_R == jax.lax.pmax(best_R, axis)
            token_R = jnp.where(wins_R, token_R, V)
            first_R = jax.lax.pmin(token_R, axis)
            own_R = jax.lax.psum(jnp.where(token_R == first_R, own_R, 0), axis)
            token_R = first_R
        scale_R = jnp.where(temperature_B == 0, 1, temperature_B).repeat(W)
        conf_R = jnp.exp(own_R / scale_R - tempered_R)
        out = token_R, own_R - lse_R, conf_R, tempered_R - mean_R
        return tuple(y.reshape(B, W) for y in out)

    args = x_BWD, head_DV, noise.words(key_B), temperature_B
    return sharding.per_device(run, ("BWD", "DV", "B2", "B"), ("BW",) * 4, *args)


def grouped_matmul(x_MD, w_EDF, sizes_E, *, implementation="auto"):
    """Returns each row of x times the matrix of its group; see `reference`.

    TPU: jax.lax.ragged_dot, which XLA turns into a kernel that skips nothing and wastes
    nothing. Elsewhere XLA makes it dense, E times the work and memory; so there rows are
    padded to tiles of one group each, and tiles multiply copies of their group's matrix.
    """
    if implementation in ("auto", "platform"):
        implementation = "tpu" if platform() == "tpu" else "tiles"
    if implementation not in GROUPED:
        raise ValueError(
            f"pallas_kernels.grouped_matmul: implementation={implementation!r} does not "
            f"exist; choose from {['auto', 'platform', *GROUPED]}"
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
