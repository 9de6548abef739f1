"""Weights as a CPU multiplies few slots by them: transposed.

For a product x W, XLA on a CPU first copies all of W into tiles of its own. A transpose on the
left of a product is not copied. Two cores that read 10 GB/s read weights of 512 x 3,072 so at 10
GB/s, for products of 4 slots, and at 4.5 as they lie; of 16 slots it is 7 and 3.3, of 32 it is
4.5 and 2.4, of 64 it is 2.6 and 2.4, from 128 on both take as long. Two others, which read 25,
do it at 17 and 14, 12 and 9, 9 and 6.

The head is a transpose, as a tied one is the embedding.
"""

import flax.struct
import jax
import jax.numpy as jnp

FEW_LEFT = 128  # slots of which a product by a transpose on the left is the fastest


@flax.struct.dataclass
class Transposed:
    """A weight [*contracted, *other dimensions] with those that are contracted behind."""

    w: jax.Array
    contracted: int = flax.struct.field(pytree_node=False, default=1)  # how many


def transposed(w, contracted: int):
    """Returns `Transposed.w` of a weight."""
    return jnp.moveaxis(w, range(contracted), range(-contracted, 0))


def by_transpose(x_RD, w_FD, dtype=None):
    """Returns x W [R, F], of W's transpose, in `dtype` or that of x.

    With the slots on the right while these are few; the barrier is there because XLA would write
    the product the other way round.
    """
    few = len(x_RD) <= FEW_LEFT
    two = (w_FD, x_RD) if few else (x_RD, w_FD)
    dims = ((1,), (1,)), ((), ())
    y = jax.lax.dot_general(*two, dims, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y).T if few else y
