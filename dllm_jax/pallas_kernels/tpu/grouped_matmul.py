"""The grouped matmul for TPU: the library's, which skips nothing and wastes nothing."""

import jax


def multiply(x_RD, w_EDF, sizes_E):
    """Returns [R, F]: each row of x times the matrix of its group.

    XLA turns jax.lax.ragged_dot into a kernel on TPU, and only there.
    """
    return jax.lax.ragged_dot(x_RD, w_EDF, sizes_E)
