"""The grouped matmul, by which experts multiply their rows."""

import jax
import jax.numpy as jnp

from dllm_jax.pallas_kernels import choice, reference


def grouped_matmul(x_MD, w_EDF, sizes_E, *, implementation="auto"):
    """Returns each row of x times the matrix of its group; see `reference`.

    TPU: jax.lax.ragged_dot, which XLA turns into a kernel that skips nothing and wastes
    nothing. Elsewhere XLA makes it dense, E times the work and memory; so there rows are
    padded to tiles of one group each, and tiles multiply copies of their group's matrix.
    """
    if implementation in ("auto", "platform"):
        implementation = "tpu" if choice.platform() == "tpu" else "tiles"
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
