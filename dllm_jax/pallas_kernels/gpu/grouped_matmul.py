"""The grouped matmul for Hopper GPUs: jax's own kernel, also for the rows' gradient.

A tile of rows is multiplied by the matrices of the groups that it has rows of, which are
read where they lie. jax.lax.ragged_dot would multiply every row by every matrix on a GPU.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

from dllm_jax.pallas_kernels import tiled_matmul, tiles

ROWS, LINE = 64, 64  # rows of a tile; what a matrix's sides are multiples of
HOW = {"block_k": LINE, "max_concurrent_steps": 4, "grid_block_n": 1}


def multiply(x_RD, w_EDF, sizes_E, number=None):
    """Returns [R, F]: each row of x times the matrix of its group.

    number: w is a stack w_LEDF, of which this layer is copied out.

    By `tiled_matmul` where a matrix's sides are no multiples of 64, or of 4 bytes a number.
    """
    w_EDF = w_EDF if number is None else w_EDF[number]
    whole = not any(side % LINE for side in w_EDF.shape[1:])
    if not whole or w_EDF.dtype.itemsize != 2:
        return tiled_matmul.multiply(x_RD, w_EDF, sizes_E)
    y_RF = grouped(tiles.pad(x_RD, 0, ROWS), w_EDF, sizes_E.astype(jnp.int32))
    return y_RF[: len(x_RD)]


def block(size: int) -> int:
    """Returns how much of a side of a matrix a tile has."""
    return 2 * LINE if size % (2 * LINE) == 0 else LINE


def product(x_RD, w, sizes_E, transposed: bool):
    """Returns the rows times their matrices, which are [E, F, D] if `transposed`.

    Rows behind the last group's are 0: the kernel leaves them as they were in memory.
    """
    y_RF = ragged_dot_mgpu.ragged_dot(
        x_RD,
        w,
        group_sizes=sizes_E,
        block_m=ROWS,
        block_n=block(w.shape[1 if transposed else 2]),
        transpose_rhs=transposed,
        **HOW,
    )
    return jnp.where((jnp.arange(len(x_RD)) < sizes_E.sum())[:, None], y_RF, 0)


@jax.custom_vjp
def grouped(x_RD, w_EDF, sizes_E):
    """Returns `multiply` of whole tiles of rows."""
    return product(x_RD, w_EDF, sizes_E, transposed=False)


def grouped_forward(x_RD, w_EDF, sizes_E):
    return grouped(x_RD, w_EDF, sizes_E), (x_RD, w_EDF, sizes_E)


def grouped_backward(saved, dy_RF):
    x_RD, w_EDF, sizes_E = saved
    # jax's own kernel of this asks the machine for its GPU when it is traced: no program
    # could be compiled without one.
    _, pull = jax.vjp(lambda w: tiled_matmul.multiply(x_RD, w, sizes_E), w_EDF)
    return product(dy_RF, w_EDF, sizes_E, transposed=True), *pull(dy_RF), None


grouped.defvjp(grouped_forward, grouped_backward)
