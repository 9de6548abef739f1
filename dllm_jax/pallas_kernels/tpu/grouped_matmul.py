"""The grouped matmul for TPU: the library's, but for rows of no group.

Letters: c groups of all layers.
"""

import jax
import jax.numpy as jnp


def multiply(x_RD, w_EDF, sizes_E, number=None):
    """Returns [R, F]: each row of x times the matrix of its group.

    number: w is a stack w_LEDF, and this layer of it is meant. XLA turns jax.lax.ragged_dot
    into a kernel on TPU, and only there. It takes an array of its own: a layer's part of a
    stack would be copied. So the groups of all layers are its groups, and those of the
    others are empty.

    That kernel visits no tile behind the last group's, and of that one writes the group's
    rows alone, the same for their gradient: what is left is what the memory held.
    """
    real_R1 = (jnp.arange(len(x_RD)) < sizes_E.sum())[:, None]
    x_RD = jnp.where(real_R1, x_RD, 0)  # for the gradient, which this makes 0, too
    sizes_c = sizes_E
    if number is not None:
        w_EDF = w_EDF.reshape(-1, *w_EDF.shape[2:])
        sizes_c = jnp.zeros(len(w_EDF), jnp.int32)
        begin = (number * len(sizes_E),)
        sizes_c = jax.lax.dynamic_update_slice(sizes_c, sizes_E, begin)
    return jnp.where(real_R1, jax.lax.ragged_dot(x_RD, w_EDF, sizes_c), 0)
