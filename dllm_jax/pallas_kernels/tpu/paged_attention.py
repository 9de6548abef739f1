"""Attention of a window over its row's pages and its own keys, for TPU.

The pools stay in memory, whole. A step of the grid is a row; it reads its pages in chunks
of C, the next chunk, of this row or the next that has any, on its way while one is in
use, and folds them into a running softmax (arXiv 2205.14135, algorithm 1) that begins
with the window's own keys. Pages at or beyond `start` are never touched. The W·G queries
of a key head (R) fill a tile together. Chips with two cores halve the rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dllm_jax.pallas_kernels.reference import NEVER

CHUNK = 2**19  # bytes of keys that are fetched together


def heads(x_SKH, y_KRH, over: int):
    """Returns each head's product in f32: of y with x, summed over x's S (0) or H (2)."""
    dims = ((2,), (1 if over == 0 else 2,)), ((0,), (0,))
    x_KSH = jnp.swapaxes(x_SKH, 0, 1)
    return jax.lax.dot_general(y_KRH, x_KSH, dims, preferred_element_type=jnp.float32)


def kernel(
    layer_ref, table_ref, start_ref, chunks_ref, turn_ref, ahead_ref,
    q_ref, k_ref, v_ref, k_pool, v_pool, out_ref, k_buffer, v_buffer, arrived,
    *, pages: int,
):  # fmt: skip
    i, rows = pl.program_id(1), pl.num_programs(1)
    b, B, O = pl.program_id(0) * rows + i, start_ref.shape[0], k_pool.shape[2]
    A, S = table_ref.shape[0] // B, pages * O
    ahead = pl.program_id(0) * (rows + 1) + i  # this row's place in `ahead`

    def copies(act, b, chunk, slot):
        """Does `act` with the copy of every page of a row's chunk."""

        def page(j, _):
            own = table_ref[b * A + chunk * pages + j]
            to = pl.ds(pl.multiple_of(j * O, O), O)
            for pool, buffer in ((k_pool, k_buffer), (v_pool, v_buffer)):
                act(
                    pltpu.make_async_copy(
                        pool.at[layer_ref[0], own],
                        buffer.at[slot, to],
                        arrived.at[slot],
                    )
                )

        held = (start_ref[b] + O - 1) // O - chunk * pages
        jax.lax.fori_loop(0, jnp.minimum(held, pages), page, None)

    def fetch(b, chunk, slot):
        @pl.when(b < B)
        def _():
            copies(lambda copy: copy.start(), b, chunk, slot)

    @pl.when(i == 0)
    def _():
        # What no page has filled yet must be finite: its probability is zero.
        k_buffer[...], v_buffer[...] = (
            jnp.zeros_like(k_buffer),
            jnp.zeros_like(v_buffer),
        )
        fetch(ahead_ref[ahead], 0, 0)

    q_KRH = q_ref[0]

    def fold(carry, k_SKH, v_SKH, seen=None):
        """Returns (maximum, sum, weighted values) with more keys in them."""
        max_KR1, sum_KR1, acc_KRH = carry
        score_KRS = heads(k_SKH, q_KRH, 2)
        if seen is not None:
            at_11S = jax.lax.broadcasted_iota(jnp.int32, (1, 1, S), 2)
            score_KRS = jnp.where(at_11S < seen, score_KRS, NEVER)
        top_KR1 = jnp.maximum(max_KR1, score_KRS.max(axis=2, keepdims=True))
        prob_KRS = jnp.exp(score_KRS - top_KR1)
        fade_KR1 = jnp.exp(max_KR1 - top_KR1)
        sum_KR1 = sum_KR1 * fade_KR1 + prob_KRS.sum(axis=2, keepdims=True)
        more_KRH = heads(v_SKH, prob_KRS.astype(v_SKH.dtype), 0)
        return top_KR1, sum_KR1, acc_KRH * fade_KR1 + more_KRH

    def body(n, carry):
        slot = (turn_ref[b] + n) % 2
        last = n == chunks_ref[b] - 1
        fetch(
            jnp.where(last, ahead_ref[ahead + 1], b),
            jnp.where(last, 0, n + 1),
            1 - slot,
        )
        copies(lambda copy: copy.wait(), b, n, slot)
        return fold(carry, k_buffer[slot], v_buffer[slot], start_ref[b] - n * S)

    zero_KRH = jnp.zeros(q_KRH.shape, jnp.float32)
    zero_KR1 = zero_KRH[..., :1]
    carry = fold((zero_KR1 + NEVER, zero_KR1, zero_KRH), k_ref[0], v_ref[0])
    _, sum_KR1, acc_KRH = jax.lax.fori_loop(0, chunks_ref[b], body, carry)
    out_ref[0] = (acc_KRH / sum_KR1).astype(out_ref.dtype)


def plan(start_B, size: int, cores: int):
    """Returns (chunks, turn, ahead): what each row fetches, `size` positions a chunk.

    turn: how many chunks its core fetches before it. ahead: for each row, and behind a
    core's last one, the first from there on that has a chunk; B for none.
    """
    B = len(start_B)
    chunks_CB = (-(-start_B // size)).reshape(cores, -1)
    turn_CB = jnp.cumsum(chunks_CB, axis=1) - chunks_CB
    row_CB = jnp.where(chunks_CB > 0, jnp.arange(B).reshape(cores, -1), B)
    row_CB = jnp.pad(row_CB, ((0, 0), (0, 1)), constant_values=B)
    ahead_CB = jax.lax.cummin(row_CB, axis=1, reverse=True)
    return [x.reshape(-1) for x in (chunks_CB, turn_CB, ahead_CB)]


def attend(q_BWNH, pools, layer, table_BA, start_B, k_BWKH, v_BWKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H]."""
    B, W, _, H = q_BWNH.shape
    _, _, O, K, _ = pools[0].shape
    q_BKRH = jnp.swapaxes((q_BWNH * H**-0.5).reshape(B, W, K, -1, H), 1, 2)
    q_BKRH = q_BKRH.reshape(B, K, -1, H)
    bytes_of_a_page = O * K * max(H, 128) * pools[0].dtype.itemsize
    A = table_BA.shape[1]
    pages = min(max(CHUNK // bytes_of_a_page, 1), A)
    start_B = jnp.minimum(start_B, A * O)  # as many as there are pages
    cores = 2 if B % 2 == 0 else 1
    scalars = (
        jnp.reshape(layer, 1),
        table_BA.reshape(-1),
        start_B,
        *plan(start_B, pages * O, cores),
    )

    def row(x):
        def at(c, i, *_):
            return c * (B // cores) + i, 0, 0, 0

        return pl.BlockSpec((1, *x.shape[1:]), at)

    here = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, pages * O, K, H), pools[0].dtype)
    out_BKRH = pl.pallas_call(
        functools.partial(kernel, pages=pages),
        out_shape=jax.ShapeDtypeStruct(q_BKRH.shape, q_BWNH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, B // cores),
            in_specs=[row(q_BKRH), row(k_BWKH), row(v_BWKH), here, here],
            out_specs=row(q_BKRH),
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2,))],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # they are two thirds of issuing a page's copy
        ),
        interpret=interpret,
        name="paged_attention",
    )(*(x.astype(jnp.int32) for x in scalars), q_BKRH, k_BWKH, v_BWKH, *pools)
    return jnp.swapaxes(out_BKRH.reshape(B, K, W, -1, H), 1, 2).reshape(q_BWNH.shape)
