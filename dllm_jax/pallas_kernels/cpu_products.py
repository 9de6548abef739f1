"""Products as a CPU makes them fast: XLA has fast ways there, and does not find them alone.

Of few slots the time is that of reading weights. For x W, XLA's library (YNNPACK) reads 64
columns of W at a time, down its rows, which lie far apart; a transpose, on the left of a
product, by several of its rows at once, which are long where the weight is deep. In tiles of 64
columns a weight is read from one end to the other. Microseconds, two cores that read 35 GB/s,
medians of 9 turns, without what it takes to turn the results of transposes back:

    slots                              4                 8                64
    weight                  W  transpose tiles   W  transpose tiles   W  transpose tiles
    512 x 3,072           347    362    269    406    448    313   1,302  1,284  1,178
    512 x 8,192           882    864    611  1,028  1,007    708   3,464  2,971  3,005
    576 x 3,072           387    367    285    435    423    354   1,597  1,262  1,508
    768 x 3,072                  481    426           569    577          1,836  2,210
    1,536 x 512           271    166    172    320    169    200     693    618    684
    2,048 x 3,072              1,030  1,144         1,198  1,302          4,336  7,057

So shallow weights lie in tiles, and deep ones transposed. Other cores differ: two that read 10
GB/s read transposes of 512 x 3,072 at all of that for 4 slots, tiles at 6 (as `dot_general`)
and W at 4.5. Products by tiles are sums of products: `dot_general` would want the slots copied
for each tile. With 64 slots sums of 1,536 numbers of 512 columns take 1,045 microseconds, three
sums of 512 each 643, and where the library adds these too 15,000.

Products by a transpose are made of tiles of 16 slots, up to four side by side, and a tile's end
takes longer than a whole one: two cores that read 42 GB/s take 2.8 ms for the layers of 30M
parameters with 4 slots, 3.9 with 8, 5.4 with 12 and 4.7 with 16, 13.8 with 60 and 10.4 with 64.

Of many slots, the gradient of a weight is a product whose operands are both contracted over
their first dimension, as autodiff writes it. That is left to another library, and XLA folds a
transpose into it. Where the transpose is an array of its own, which the barrier makes it, products
with 1,152 slots are made at 400 to 450 GFLOP/s and not at 290 to 420, by two cores that make the
others at 490; a tile of attention's in 39 and not in 66 microseconds.

Letters: r slots that fill tiles; b tiles of n columns of a weight, p parts of D, d of one.
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
    contracted: int = flax.struct.field(pytree_node=False)  # how many


@flax.struct.dataclass
class Tiled:
    """A weight [*contracted, *other dimensions] as tiles w_bDn, see `in_tiles`."""

    w: jax.Array
    contracted: int = flax.struct.field(pytree_node=False)  # how many
    others: tuple[int, ...] = flax.struct.field(pytree_node=False)  # sizes

    @property
    def shape(self) -> tuple[int, int]:
        """Of `matrix`."""
        return self.w.shape[1], math.prod(self.others)

    def matrix(self):
        """Returns the weight [D, F], which is a copy."""
        return self.w.swapaxes(0, 1).reshape(self.shape)


def transposed(w, contracted: int):
    """Returns `Transposed.w` of a weight."""
    return jnp.moveaxis(w, range(contracted), range(-contracted, 0))


def in_tiles(w, contracted: int):
    """Returns `Tiled.w` of a weight [*contracted, *other dimensions]."""
    D = math.prod(w.shape[:contracted])
    return w.reshape(D, -1, COLUMNS).swapaxes(0, 1)


def lies_tiled(contracted: int, others: int, dtype, devices: int) -> bool:
    """Returns whether a weight of so many numbers is Tiled, where it is turned at all.

    devices: how many have it, or parts of it. Of narrower numbers each product would be
    rounded.
    """
    whole = others % COLUMNS == 0 and contracted % sums(contracted) == 0
    alone = devices == 1 and jnp.dtype(dtype) == jnp.float32
    return whole and alone and contracted <= SHALLOW and library_sums()


def sums(contracted: int) -> int:
    """Returns of how many sums a sum of so many numbers is made."""
    return -(-contracted // SUMMED)


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


def by_tiles(x_RD, w_bDn):
    """Returns x W [R, F], of tiles of W; both f32.

    As sums of products: `dot_general` would take a copy of the slots for each tile. To be
    compiled: by itself it would make an array of all products.
    """
    b, D, n = w_bDn.shape
    p = sums(D)
    y_Rbpn = as_sums(x_RD.reshape(-1, p, D // p), w_bDn.reshape(b, p, -1, n))
    return y_Rbpn.sum(axis=2).reshape(-1, b * n)


def as_sums(x_Rpd, w_bpdn):
    """Returns the products' sums, of each part of D [R, b, p, n].

    The barriers are there because XLA would make what x comes from anew for each of them, and
    one sum of the parts'.
    """
    x_Rpd, w_bpdn = jax.lax.optimization_barrier((x_Rpd, w_bpdn))
    y_Rbpdn = w_bpdn[None] * x_Rpd[:, None, ..., None]
    return jax.lax.optimization_barrier(y_Rbpdn.sum(axis=3))


@functools.cache
def library_sums() -> bool:
    """Returns whether XLA hands such sums to its library here; a loop of its own is slow."""
    slots = jax.ShapeDtypeStruct((8, 1, 64), jnp.float32)
    tiles = jax.ShapeDtypeStruct((2, 1, 64, 64), jnp.float32)
    return "__ynn_fusion" in jax.jit(as_sums).lower(slots, tiles).compile().as_text()


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
