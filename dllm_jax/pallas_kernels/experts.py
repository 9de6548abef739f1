"""The grouped matmul, by which experts multiply the rows that chose them."""

from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.choice import kernel


def grouped_matmul(x_RD, w_EDF, sizes_E, number=None, *, implementation="auto"):
    """Returns [R, F]: each row of x times the matrix of its group.

    x_RD: rows sorted by group; w_EDF: a matrix for each group; sizes_E: the rows of each,
    the first `sizes[0]` rows being of group 0, and so on. Rows after the last group give 0.
    Differentiable in x and w. "auto" and "platform": the kernel of a TPU or a GPU there,
    and elsewhere tiles in jnp, also named "any"; the specification copies a matrix for every
    row. number: w is a stack of layers, w_LEDF, and this one of them is meant.
    """
    if module := kernel("grouped_matmul", implementation):
        return module.multiply(x_RD, w_EDF, sizes_E, number)
    w_EDF = w_EDF if number is None else w_EDF[number]
    return reference.grouped_matmul(x_RD, w_EDF, sizes_E)
