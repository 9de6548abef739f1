"""Products as a CPU makes them fast: XLA has one fast way there, and does not find it alone.

Of few slots, weights lie transposed. For a product x W, XLA first copies all of W into tiles
of its own. A transpose on the left of a product is not copied. Two cores that read 10 GB/s
read weights of 512 x 3,072 so at 10 GB/s, for products of 4 slots, and at 4.5 as they lie; of 16
slots it is 7 and 3.3, of 32 it is 4.5 and 2.4, of 64 it is 2.6 and 2.4, from 128 on both take as
long. Two others, which read 25, do it at 17 and 14, 12 and 9, 9 and 6. Such a product is made of
tiles of 16 slots, up to four side by side, and a tile's end takes longer than a whole one: two
cores that read 42 GB/s take 2.8 ms for the layers of 30M parameters with 4 slots, 3.9 with 8,
5.4 with 12 and 4.7 with 16, 13.8 with 60 and 10.4 with 64. The head is a transpose, as a tied
one is the embedding.

Written as a sum of products, such a product takes 0.9 to 0.95 of its time as `dot_general` where
512 numbers are contracted, and XLA hands both to its library (YNNPACK), which finds the same
numbers, to the last bit. Two other cores, which read 33 GB/s, take 0.95 to 1.1 of that time with
512, 0.8 to 1 with 192 or 384, 0.95 to 1.4 with 576, and 1.28 from 1,024 on (the median of 36
shapes, 1.03 to 1.5): what 16 slots have of 512 numbers fills a first cache of 32 KB. With weights
of one operand as one matrix, the layers of 30M take 3.9 ms with 8 slots where they took 4.7, and
3.2 where they took 3.6 with 4.

Of many slots, the gradient of a weight is a product whose operands are both contracted over
their first dimension, as autodiff writes it. That is left to another library, and XLA folds a
transpose into it. Where the transpose is an array of its own, which the barrier makes it, products
with 1,152 slots are made at 400 to 450 GFLOP/s and not at 290 to 420, by two cores that make the
others at 490; a tile of attention's in 39 and not in 66 microseconds.

Letters: r slots that fill tiles.
"""

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from dllm_jax.pallas_kernels import choice

FEW_LEFT = 128  # slots of which a product by a transpose on the left is the fastest
TILE, BESIDE = 16, 4  # slots of a tile, and how many tiles at most are side by side
COLUMNS = 64  # of a tile of Tiled
SHALLOW = 768  # numbers contracted, at most, where weights are Tiled
SUMMED = 512  # numbers of a sum, at most, that the library makes as a product


@flax.struct.dataclass
class Transposed:
    """A weight [*contracted, *other dimensions] with those that are contracted behind."""

    w: jax.Array
    contracted: int = flax.struct.field(pytree_node=False, default=1)  # how many


@flax.struct.dataclass
class Tiled:
    """A weight [*contracted, *other dimensions] as tiles [b, K, n], see `in_tiles`."""

    w: jax.Array
    contracted: int = flax.struct.field(pytree_node=False)  # how many
    others: tuple[int, ...] = flax.struct.field(pytree_node=False)  # sizes


def transposed(w, contracted: int):
    """Returns `Transposed.w` of a weight."""
    return jnp.moveaxis(w, range(contracted), range(-contracted, 0))


def lies_tiled(contracted: int, others: int, dtype, devices: int) -> bool:
    """Returns whether a weight of these numbers is Tiled, not Transposed, for few slots.

    devices: how many have parts of it; of several XLA would have to split the tiles.
    """
    fits = contracted <= SHALLOW and contracted % parts_of(contracted) == 0
    fits = fits and others % COLUMNS == 0 and jnp.dtype(dtype) == jnp.float32
    return fits and devices <= 1 and library_sums()


def parts_of(contracted: int) -> int:
    """Returns in how many sums a sum of so many numbers is made."""
    return -(-contracted // SUMMED)


def in_tiles(w, contracted: int = 1):
    """Returns `Tiled.w` of a weight: of `COLUMNS` neighbours all, then of the next ones."""
    K = math.prod(w.shape[:contracted])
    return w.reshape(K, -1, COLUMNS).swapaxes(0, 1)


def columns(w_bKn):
    """Returns the matrix [K, F] of tiles."""
    return w_bKn.swapaxes(0, 1).reshape(w_bKn.shape[1], -1)


def filled(slots: int) -> int:
    """Returns of how many slots, no fewer, a product takes the least time."""
    whole = -(-slots // TILE) * TILE
    ends = slots % TILE > TILE // 2 or whole % (BESIDE * TILE) == 0
    return whole if ends and slots > TILE // 2 else slots


def by_transpose(x_RD, w_FD, dtype=None):
    """Returns x W [R, F], of W's transpose, in `dtype` or that of x.

    With the slots on the right while these are few; the barrier is there because XLA would
    write the product the other way round. Not of narrower numbers than the result's: where W
    is not stored as its transpose, XLA has no such product of them, and it is no faster.
    """
    R, dims = len(x_RD), (((1,), (1,)), ((), ()))
    if R > FEW_LEFT or dtype not in (None, x_RD.dtype):
        return jax.lax.dot_general(x_RD, w_FD, dims, preferred_element_type=dtype)
    x_rD = jnp.pad(x_RD, ((0, filled(R) - R), (0, 0)))
    y_Fr = jax.lax.dot_general(w_FD, x_rD, dims)
    return jax.lax.optimization_barrier(y_Fr).T[:R]


def by_tiles(x_RK, w_bKn):
    """Returns x W [R, F], of tiles of W; both f32.

    Written as sums, since `dot_general` would want the slots once for each tile.
    """
    b, K, n = w_bKn.shape
    parts = parts_of(K)
    y_Rbpn = as_sums(x_RK.reshape(-1, parts, K // parts), w_bKn.reshape(b, parts, -1, n))
    return y_Rbpn.sum(axis=2).reshape(-1, b * n)


def as_sums(x_Rpk, w_bpkn):
    """Returns products of parts of slots with the same parts of tiles [R, b, p, n], as sums.

    The barriers are there because XLA would make what x comes from anew for each sum, and would
    make one sum of the parts'.
    """
    x_Rpk, w_bpkn = jax.lax.optimization_barrier((x_Rpk, w_bpkn))
    y_Rbpn = jnp.sum(w_bpkn[None] * x_Rpk[:, None, ..., None], axis=3)
    return jax.lax.optimization_barrier(y_Rbpn)


@functools.cache
def library_sums() -> bool:
    """Returns whether XLA hands such sums to its library here; a loop of its own is slow."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 1, 64), (2, 1, 64, 64))]
    return "__ynn_fusion" in jax.jit(as_sums).lower(*shapes).compile().as_text()


def turned(x):
    """Returns x with its last two dimensions swapped, on a CPU as an array of its own."""
    if choice.platform() != "cpu":
        return x.swapaxes(-1, -2)
    x = jax.lax.optimization_barrier(x).swapaxes(-1, -2)
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def product(x_RD, w_DF):
    """Returns x W [R, F]."""
    return differentiated(x_RD, w_DF) if choice.platform() == "cpu" else x_RD @ w_DF


@jax.custom_vjp
def differentiated(x_RD, w_DF):
    """Returns x W [R, F], of whose gradients none contracts two first dimensions."""
    return x_RD @ w_DF


def forward(x_RD, w_DF):
    return x_RD @ w_DF, (x_RD, w_DF)  # a policy of `transformer.REMAT` sees it


def backward(operands, dy_RF):
    x_RD, w_DF = operands
    if x_RD.shape[1] <= dy_RF.shape[1]:  # the smaller one is turned
        dw_DF = turned(x_RD) @ dy_RF
    else:
        dw_DF = jax.lax.optimization_barrier(turned(dy_RF) @ x_RD).T
    return dy_RF @ w_DF.T, dw_DF


differentiated.defvjp(forward, backward)
