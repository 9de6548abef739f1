"""Weights as a CPU multiplies few slots by them: in tiles of columns, or transposed.

For a product x W, XLA on a CPU first copies all of W into tiles of its own. Of W in tiles of 64
columns, [F / 64, R, 64], it copies one after the other, within the cache. Two cores that read
25 GB/s at most read weights of 512 x 3,072 at 24 GB/s so, for products of 4 slots; as they lie
at 14, and at 17 where the transpose is on the left of a product, which is not copied. Of 16
slots it is 14, 9 and 12 GB/s, of 32 it is 9, 6 and 9, from 72 on all take as long. The slots are
repeated for each tile: of 512 the weight put together again is multiplied faster.

The head is a transpose, as a tied one is the embedding.

Letters: i tiles, f columns of one.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp

TILE = 64  # columns
# Slots of which a product by tiles, and one by a transpose on the left, is the fastest.
FEW, FEW_LEFT = 256, 128


@flax.struct.dataclass
class Tiled:
    """A weight [*inner, *outer dimensions] in tiles [i, R, TILE] of its columns."""

    w: jax.Array
    # How many dimensions are contracted, and the sizes of those that are not.
    inner: int = flax.struct.field(pytree_node=False)
    outer: tuple[int, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Transposed:
    """A head [D, V] as its transpose."""

    w: jax.Array


def tiles(w, inner: int):
    """Returns `Tiled.w` of a weight; all columns are whole tiles."""
    size = math.prod(w.shape[:inner])
    return w.reshape(size, -1, TILE).swapaxes(0, 1)


def by_tiles(x_RD, w_iDf):
    """Returns x W [R, F], of W's tiles."""
    tiles_of_w, D, _ = w_iDf.shape
    R = len(x_RD)
    if R > FEW:
        return x_RD @ w_iDf.swapaxes(0, 1).reshape(D, -1)
    x_RD = jax.lax.optimization_barrier(x_RD)  # or computed for each tile
    x_iRD = jnp.broadcast_to(x_RD[None], (tiles_of_w, R, D))
    return jnp.matmul(x_iRD, w_iDf).swapaxes(0, 1).reshape(R, -1)


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
