"""The grouped matmul for Hopper GPUs: tiles of rows, each by the matrix of its group.

A block multiplies the rows of one tile that are of one group by a part of that group's
columns: one warpgroup computes, another copies what it multiplies. Matrices are read where
they lie, also in a stack of layers, and those of groups without rows are not read.
jax.lax.ragged_dot would multiply every row by every matrix on a GPU; JAX's own kernel
(`ragged_dot_mgpu`) takes no stack and reads the matrices of empty groups too.

Letters: c groups of all layers, s visits of a tile by a group.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.pallas_kernels import tiled_matmul, tiles
from dllm_jax.pallas_kernels.gpu import attention
from dllm_jax.pallas_kernels.gpu.attention import ROWS, shared

LINE = 64  # what a matrix's sides are multiples of; a step multiplies so much of one
BUFFERS = 4


def multiply(x_RD, w_EDF, sizes_E, number=None):
    """Returns [R, F]: each row of x times the matrix of its group.

    number: w is a stack w_LEDF, and this layer of it is meant.

    By `tiled_matmul` where a matrix's sides are no multiples of 64, or of 4 bytes a number.
    """
    whole = not any(side % LINE for side in w_EDF.shape[-2:])
    if not whole or w_EDF.dtype.itemsize != 2:
        return tiled_matmul.multiply(x_RD, w_EDF, sizes_E, number)
    w_cDF = w_EDF.reshape(-1, *w_EDF.shape[-2:])
    first = 0 if number is None else number * len(sizes_E)
    return grouped(x_RD, w_cDF, sizes_E.astype(jnp.int32), jnp.int32(first))


@jax.custom_vjp
def grouped(x_RD, w_cDF, sizes_E, first):
    """Returns `multiply` by the matrices first, first + 1, ... of w."""
    return product(x_RD, w_cDF, sizes_E, first, transposed=False)


def grouped_forward(x_RD, w_cDF, sizes_E, first):
    return grouped(x_RD, w_cDF, sizes_E, first), (x_RD, w_cDF, sizes_E, first)


def grouped_backward(saved, dy_RF):
    x_RD, w_cDF, sizes_E, first = saved

    def by_tiles(w_cDF):
        w_EDF = lax.dynamic_slice_in_dim(w_cDF, first, len(sizes_E))
        return tiled_matmul.multiply(x_RD, w_EDF, sizes_E)

    _, pull = jax.vjp(by_tiles, w_cDF)
    dx_RD = product(dy_RF, w_cDF, sizes_E, first, transposed=True)
    return dx_RD, *pull(dy_RF), None, None


grouped.defvjp(grouped_forward, grouped_backward)


def visits(sizes_E, rows: int):
    """Returns (group, tile, begin, end), each [s]: the rows that each visit multiplies.

    A tile is visited by every group that has rows in it. There are as many visits as any
    sizes can need, and the last have no rows: their begin is their end.
    """
    E = len(sizes_E)
    end_E = jnp.cumsum(sizes_E)
    begin_E = end_E - sizes_E
    tile_E = begin_E // ROWS
    many_E = jnp.where(sizes_E > 0, -(-end_E // ROWS) - tile_E, 0)
    until_E = jnp.cumsum(many_E)
    nth_s = jnp.arange(min(-(-rows // ROWS) + E - 1, rows), dtype=jnp.int32)
    group_s = jnp.searchsorted(until_E, nth_s, side="right", method="compare_all")
    group_s = jnp.minimum(group_s, E - 1).astype(jnp.int32)
    tile_s = tile_E[group_s] + nth_s - (until_E - many_E)[group_s]
    tile_s = jnp.where(nth_s < until_E[-1], tile_s, 0)
    begin_s = jnp.maximum(begin_E[group_s], tile_s * ROWS)
    end_s = jnp.minimum(end_E[group_s], (tile_s + 1) * ROWS)
    end_s = jnp.where(nth_s < until_E[-1], end_s, begin_s)
    return group_s, tile_s, begin_s, end_s


def product(x_RD, w_cDF, sizes_E, first, *, transposed: bool):
    """Returns the rows times their matrices, which are [c, F, D] if `transposed`.

    Rows behind the last group's are 0: no visit writes them.
    """
    R, F = len(x_RD), w_cDF.shape[1 if transposed else 2]
    x_RD, dtype = tiles.pad(x_RD, 0, ROWS), x_RD.dtype
    tile = 2 * LINE if F % (2 * LINE) == 0 else LINE
    tables = visits(sizes_E, R)
    scratch = [
        shared(dtype, BUFFERS, ROWS, LINE),
        shared(dtype, BUFFERS, *((tile, LINE) if transposed else (LINE, tile))),
        plgpu.SMEM((ROWS, tile), dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
        plgpu.Barrier(num_arrivals=1, num_barriers=BUFFERS),
    ]
    kernel = attention.run(
        functools.partial(visit, depth=x_RD.shape[1] // LINE, transposed=transposed),
        dtype,
        jax.ShapeDtypeStruct((len(x_RD), F), dtype),
        {"visit": len(tables[0]), "column": F // tile},
        scratch,
        "grouped_matmul",
        interpret=False,  # a caller's force_gpu_interpret_mode decides
        wgs=1,
    )
    y_RF = kernel(first[None], tables, x_RD, w_cDF)[:R]
    return jnp.where((jnp.arange(R) < sizes_E.sum())[:, None], y_RF, 0)


def visit(
    first_ref,
    tables,
    x_ref,
    w_ref,
    y_ref,
    x_smem,
    w_smem,
    y_smem,
    ready,
    free,
    *,
    depth: int,
    transposed: bool,
):
    """The kernel: writes what a visit's rows are times a part of their matrix."""
    s, column, wg = (lax.axis_index(x) for x in ("visit", "column", "warpgroup"))
    group, tile, begin, end = (ref[s] for ref in tables)
    top, width = tile * ROWS, y_smem.shape[1]
    columns = pl.ds(column * width, width)

    @pl.when((wg == 0) & (begin < end))
    def _():
        def factors(slot):
            w = w_smem.at[slot]
            return x_smem.at[slot], w.transpose((1, 0)) if transposed else w

        shape = y_smem.shape
        y = attention.streamed(factors, shape, 0, depth, ready, free, BUFFERS)
        y_smem[...] = y.astype(y_smem.dtype)
        plgpu.commit_smem()
        write(y_smem, y_ref.at[pl.ds(top, ROWS), columns], begin - top, end - begin)

    @pl.when(wg == 1)
    def _():
        def fetch(n, slot):
            along = pl.ds(n * LINE, LINE)
            part = (columns, along) if transposed else (along, columns)
            x = x_ref.at[pl.ds(top, ROWS), along]
            w = w_ref.at[(first_ref[0] + group, *part)]
            for source, buffer in ((x, x_smem), (w, w_smem)):
                plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready.at[slot])

        attention.feed(fetch, jnp.where(begin < end, depth, 0), free, BUFFERS)


def write(y_smem, y_ref, at, count):
    """Copies `count` of a tile's rows to the device's memory, from row `at` on.

    A copy's size is static: they go in powers of two, as many as there are.
    """
    for size in (1 << n for n in reversed(range(ROWS.bit_length()))):

        @pl.when((count & size) != 0)
        def _(at=at, size=size):
            rows = pl.ds(at, size)
            plgpu.copy_smem_to_gmem(y_smem.at[rows], y_ref.at[rows])

        at += count & size
    plgpu.wait_smem_to_gmem(0)
