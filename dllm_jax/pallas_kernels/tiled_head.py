"""The head that draws, of XLA's operations: a few positions' logits at a time.

For platforms without a kernel of it. The specification makes arrays of all positions by the
vocabulary, one after the other: of noise, of two softmaxes and of what is summed. On CPU
these leave the cache, and of 128 positions and 32,768 ids they took a dozen times as long
as the product that they are about. Here the product of a tile of positions is followed by
what is asked of it, row by row; and rows that want no draw, because their token is known or
their answer has ended, cost nothing.

Letters: r positions of one step.
"""

import functools

import jax
import jax.numpy as jnp

from dllm_jax.pallas_kernels import choice, cpu_products, noise, tiles
from dllm_jax.pallas_kernels.reference import NEVER, logits

TILE, STEP = 64, 4  # positions: of a product, and of what is asked of it at once


def draw(
    x_RD,
    head_DV,
    words_R3,
    temperature_R,
    offset,
    *,
    wanted_R,
    width: int,
    forbidden: int,
    interpret=False,
):
    """Returns (token, its noisy score, its logit, lse, tempered lse, tempered mean), [R].

    See choice.py. Of rows that are not wanted all may be 0.
    """
    del interpret  # nothing is to be

    def ask(logits_rV, rows_r):
        of_rows = words_R3[rows_r], temperature_R[rows_r]
        return drawn(logits_rV, *of_rows, offset, width=width, forbidden=forbidden)

    R = len(x_RD)
    if choice.platform() != "cpu":  # a step of a loop costs launches
        return ask(logits(x_RD, head_DV), jnp.arange(R))
    if isinstance(head_DV, cpu_products.Tiled):
        multiply, head = cpu_products.by_tiles, head_DV.w
    else:  # what samples has it so: outside of loops the two cancel out
        multiply = functools.partial(cpu_products.by_transpose, dtype=jnp.float32)
        head = head_DV.T
    tile = min(-(-R // STEP) * STEP, TILE)
    order_R = jnp.argsort(~wanted_R, stable=True)  # those wanted come first
    filled_R, count = tiles.pad(order_R, 0, tile), wanted_R.sum()

    # Of the last tile half may do.
    sizes = (TILE // 2, TILE) if tile == TILE else (tile,)

    def product(rows_R, size):
        return tiles.pad(multiply(x_RD[rows_R[:size]], head), 0, tile)

    def walk_tile(number, out):
        first = number * tile
        rows_R = jax.lax.dynamic_slice(filled_R, (first,), (tile,))
        many = (count - first > sizes[0]).astype(int)
        products = [functools.partial(product, size=size) for size in sizes]
        logits_RV = jax.lax.switch(many, products, rows_R)
        return walk(ask, logits_RV, rows_R, count - first, out)

    out = jnp.zeros(R, jnp.int32), *[jnp.zeros(R, jnp.float32)] * 5
    return jax.lax.fori_loop(0, -(-count // tile), walk_tile, out)


def walk(ask, logits_RV, rows_R, count, out):
    """Returns `out` with what is asked of a tile, of its first `count` rows if it has more."""

    def walk_few(number, out):
        logits_rV, rows_r = (
            jax.lax.dynamic_slice_in_dim(x, number * STEP, STEP)
            for x in (logits_RV, rows_R)
        )
        found = ask(logits_rV, rows_r)
        return tuple(
            x_R.at[rows_r].set(x_r) for x_R, x_r in zip(out, found, strict=True)
        )

    steps = -(-jnp.minimum(count, len(rows_R)) // STEP)
    return jax.lax.fori_loop(0, steps, walk_few, out)


def drawn(logits_rV, words_r3, temperature_r, offset, *, width: int, forbidden: int):
    """Returns what `draw` does, of logits."""
    column_rV = jax.lax.broadcasted_iota(jnp.int32, logits_rV.shape, 1)
    id_rV = column_rV + offset
    logits_rV = jnp.where(id_rV == forbidden, NEVER, logits_rV)
    warm_r1 = (temperature_r != 0)[:, None]
    scale_r1 = jnp.where(warm_r1, temperature_r[:, None], 1)
    tempered_rV = logits_rV / scale_r1
    if choice.platform() == "cpu":
        # Or XLA would divide anew for each use, and round otherwise, which by 1e-6 is nats.
        tempered_rV = jax.lax.optimization_barrier(tempered_rV)
    tempered_lse_r, tempered_mean_r = statistics(tempered_rV)
    lse_r = jax.lax.cond(
        (scale_r1 == 1).all(),
        lambda logits_rV: tempered_lse_r,
        lambda logits_rV: statistics(logits_rV)[0],
        logits_rV,
    )
    first_r1, second_r1, slot_r1 = (words_r3[:, n : n + 1] for n in range(3))
    noise_rV = noise.gumbel(first_r1, second_r1, slot_r1 * width + id_rV)
    noisy_rV = tempered_rV + jnp.where(warm_r1, noise_rV, 0)
    best_r1 = noisy_rV.max(axis=1, keepdims=True)
    # Not arg-max: XLA's is several times as long on CPU. Of NaN it is the last column.
    last = logits_rV.shape[1] - 1
    column_r = jnp.where(noisy_rV == best_r1, column_rV, last).min(axis=1)
    logit_r = jnp.take_along_axis(logits_rV, column_r[:, None], axis=1)[:, 0]
    best_r = best_r1[:, 0]
    return column_r + offset, best_r, logit_r, lse_r, tempered_lse_r, tempered_mean_r


def statistics(logits_rV):
    """Returns (log of the sum of exponentials, mean under the softmax), each [r].

    The barrier is there because XLA would sum products as it makes matrix products: a CPU took
    18 times as long for 4 x 8,192 of them.
    """
    max_r1 = logits_rV.max(axis=1, keepdims=True)
    prob_rV = jnp.exp(logits_rV - max_r1)
    sum_r = prob_rV.sum(axis=1)
    weighed_rV = jax.lax.optimization_barrier(prob_rV * logits_rV)
    return max_r1[:, 0] + jnp.log(sum_r), weighed_rV.sum(axis=1) / sum_r
