"""The grouped matmul in jnp, for platforms that have no kernel of it.

XLA turns jax.lax.ragged_dot into a dense product there: every row with every matrix, E
times the work and memory. Here rows are padded to tiles of one group each, and a tile
multiplies a copy of its group's matrix.

Letters: t tiles, r rows of one tile.
"""

import jax.numpy as jnp


def multiply(x_RD, w_EDF, sizes_E, number=None):
    """Returns [R, F]: each row of x times the matrix of its group.

    Rows are padded to at most R + E tiles' worth.
    """
    w_EDF = w_EDF if number is None else w_EDF[number]
    R, E = len(x_RD), len(w_EDF)
    size = min(128, max(16, 1 << (R // E).bit_length()))  # about a group's rows
    end_E = jnp.cumsum(sizes_E)
    tiles_E = -(-sizes_E // size)
    last_E = jnp.cumsum(tiles_E)
    tile_t = jnp.arange(R // size + E)
    group_t = jnp.searchsorted(last_E, tile_t, side="right")
    within_t = tile_t - (last_E - tiles_E).at[group_t].get(mode="clip")
    begin_t = (end_E - sizes_E).at[group_t].get(mode="clip") + within_t * size
    row_tr = begin_t[:, None] + jnp.arange(size)[None]
    end_t = end_E.at[group_t].get(mode="clip")
    real_tr = (row_tr < end_t[:, None]) & (group_t < E)[:, None]
    x_trD = jnp.where(real_tr[..., None], x_RD.at[row_tr].get(mode="clip"), 0)
    y_trF = jnp.einsum("trD,tDF->trF", x_trD, w_EDF.at[group_t].get(mode="clip"))
    # Back to where the rows came from; what is not real goes past the end and is dropped.
    target_R = jnp.where(real_tr, row_tr, R).reshape(-1)
    y_RF = jnp.zeros((R, y_trF.shape[-1]), y_trF.dtype)
    return y_RF.at[target_R].set(y_trF.reshape(len(target_R), -1), mode="drop")
