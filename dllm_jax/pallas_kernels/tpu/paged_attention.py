"""Attention of a window over its row's pages and its own keys, for TPU.

The pools stay in memory, whole. A step of the grid is a row; it reads its pages in
chunks, the next chunk, of this row or the next that has any, on its way while one is in
use, and folds them into a running softmax (arXiv 2205.14135, algorithm 1) that begins
with the window's own keys, which only the last queries see where these are fewer. Pages at
or beyond `start` are never touched. The W·G queries of a key head fill a tile together. Chips
with two cores halve the rows.

Letters: f queries of one key head (W·G), s keys, c cores, b rows of one core, e b + 1.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.reference import NEVER
from dllm_jax.pallas_kernels.tpu.attention import dot

CHUNK = 2**19  # bytes of keys that are fetched together
AT_ONCE = 64  # pages of which copies are begun together by `gathered`
SCORES = 2**20  # f32, of a chunk and all queries, for which fast memory has room
SCALARS = 3 * 2**16  # numbers of tables: 768 KiB of the MiB that a core has for scalars


def scores(q_KfH, k_sKH):
    """Returns each head's scores [K, f, s], f32."""
    dims = ((2,), (2,)), ((0,), (0,))
    k_KsH = jnp.swapaxes(k_sKH, 0, 1)
    return dot(q_KfH, k_KsH, dims)


def weighted(prob_Kfs, v_sKH):
    """Returns each head's values summed by their probabilities, [K, f, H], f32."""
    dims = ((2,), (1,)), ((0,), (0,))
    prob_Kfs = prob_Kfs.astype(v_sKH.dtype)
    v_KsH = jnp.swapaxes(v_sKH, 0, 1)
    return dot(prob_Kfs, v_KsH, dims)


def kernel(
    layer_ref,
    table_ref,
    start_ref,
    chunks_ref,
    turn_ref,
    ahead_ref,
    q_ref,
    k_ref,
    v_ref,
    k_pool,
    v_pool,
    out_ref,
    k_buffer,
    v_buffer,
    arrived,
    *,
    chunk_pages: int,
    blind: int,
):
    """Computes a row's attention; `plan` made chunks, turn and ahead.

    blind: how many queries of a head see none of the window's keys, the first ones.
    """
    i, rows = pl.program_id(1), pl.num_programs(1)
    b, B, O = pl.program_id(0) * rows + i, start_ref.shape[0], k_pool.shape[2]
    A, positions = table_ref.shape[0] // B, chunk_pages * O
    ahead = pl.program_id(0) * (rows + 1) + i  # this row's place in `ahead`

    def copies(act, b, chunk, slot):
        """Does `act` with the copy of every page of a row's chunk."""

        def copy_page(j, _):
            page = table_ref[b * A + chunk * chunk_pages + j]
            target = pl.ds(pl.multiple_of(j * O, O), O)
            for pool, buffer in ((k_pool, k_buffer), (v_pool, v_buffer)):
                act(
                    pltpu.make_async_copy(
                        pool.at[layer_ref[0], page],
                        buffer.at[slot, target],
                        arrived.at[slot],
                    )
                )

        pages_left = (start_ref[b] + O - 1) // O - chunk * chunk_pages
        jax.lax.fori_loop(0, jnp.minimum(pages_left, chunk_pages), copy_page, None)

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

    q_KfH = q_ref[0]

    def fold(carry, k_sKH, v_sKH, sees):
        """Returns (maximum, sum, weighted values) with the keys added that queries see."""
        max_Kf1, sum_Kf1, acc_KfH = carry
        score_Kfs = scores(q_KfH, k_sKH)
        if sees is not None:
            score_Kfs = jnp.where(sees, score_Kfs, NEVER)
        top_Kf1 = jnp.maximum(max_Kf1, score_Kfs.max(axis=2, keepdims=True))
        prob_Kfs = jnp.exp(score_Kfs - top_Kf1)
        fade_Kf1 = jnp.exp(max_Kf1 - top_Kf1)
        sum_Kf1 = sum_Kf1 * fade_Kf1 + prob_Kfs.sum(axis=2, keepdims=True)
        added_KfH = weighted(prob_Kfs, v_sKH)
        return top_Kf1, sum_Kf1, acc_KfH * fade_Kf1 + added_KfH

    def body(n, carry):
        slot = (turn_ref[b] + n) % 2
        last = n == chunks_ref[b] - 1
        fetch(
            jnp.where(last, ahead_ref[ahead + 1], b),
            jnp.where(last, 0, n + 1),
            1 - slot,
        )
        copies(lambda copy: copy.wait(), b, n, slot)
        left = start_ref[b] - n * positions  # keys of the row, from this chunk on

        @pl.when(last)
        def _():
            # Behind them lies what an earlier row had there: zero times its NaN is NaN.
            at_s11 = jax.lax.broadcasted_iota(jnp.int32, (positions, 1, 1), 0)
            v_buffer[slot] = jnp.where(at_s11 < left, v_buffer[slot], 0)

        at_11s = jax.lax.broadcasted_iota(jnp.int32, (1, 1, positions), 2)
        seen_11s = at_11s < left
        return fold(carry, k_buffer[slot], v_buffer[slot], seen_11s)

    zero_KfH = jnp.zeros(q_KfH.shape, jnp.float32)
    zero_Kf1 = zero_KfH[..., :1]
    own_1fs = None
    if blind:
        shape = 1, q_KfH.shape[1], k_ref.shape[1]
        own_1fs = jax.lax.broadcasted_iota(jnp.int32, shape, 1) >= blind
    carry = fold((zero_Kf1 + NEVER, zero_Kf1, zero_KfH), k_ref[0], v_ref[0], own_1fs)
    _, sum_Kf1, acc_KfH = jax.lax.fori_loop(0, chunks_ref[b], body, carry)
    out_ref[0] = (acc_KfH / sum_Kf1).astype(out_ref.dtype)


def pages_of_chunk(O: int, K: int, H: int, dtype, queries: int) -> int:
    """Returns how many pages [O, K, H] are fetched together, for `queries` of a key head."""
    bytes_of_a_page = O * K * max(H, 128) * jnp.dtype(dtype).itemsize
    return max(min(CHUNK // bytes_of_a_page, SCORES // (O * K * queries)), 1)


def plan(start_B, size: int, cores: int):
    """Returns [chunks, turn, ahead]: what each row fetches, `size` positions a chunk.

    turn: how many chunks its core fetches before it. ahead: for each row, and behind a
    core's last one, the first from there on that has a chunk; B for none.
    """
    B = len(start_B)
    chunks_cb = (-(-start_B // size)).reshape(cores, -1)
    turn_cb = jnp.cumsum(chunks_cb, axis=1) - chunks_cb
    row_cb = jnp.where(chunks_cb > 0, jnp.arange(B).reshape(cores, -1), B)
    row_ce = jnp.pad(row_cb, ((0, 0), (0, 1)), constant_values=B)
    ahead_ce = jax.lax.cummin(row_ce, axis=1, reverse=True)
    return [x.reshape(-1) for x in (chunks_cb, turn_cb, ahead_ce)]


def attend(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H].

    Of rows whose tables are too large for the memory of scalars, in halves.
    """
    B, A = table_BA.shape
    of_rows = q_BWNH, table_BA, start_B, k_BQKH, v_BQKH
    if B == 1 or B * (A + 4) <= SCALARS:
        return attend_at_once(pages, layer, *of_rows, interpret=interpret)
    each = []
    for half in (slice(B // 2), slice(B // 2, None)):
        q_bWNH, table_bA, start_b, *own = (x[half] for x in of_rows)
        at = pages, layer, table_bA, start_b
        each.append(attend(q_bWNH, *at, *own, interpret=interpret))
    return jnp.concatenate(each)


def attend_at_once(
    pages, layer, q_BWNH, table_BA, start_B, k_BQKH, v_BQKH, *, interpret
):
    """Returns `attend` of rows whose tables fit."""
    B, W, _, H = q_BWNH.shape
    _, _, O, K, _ = pages[0].shape
    q_BKWGH = jnp.swapaxes((q_BWNH * H**-0.5).reshape(B, W, K, -1, H), 1, 2)
    q_BKfH = q_BKWGH.reshape(B, K, -1, H)
    blind = (W - k_BQKH.shape[1]) * q_BKWGH.shape[3]
    A = table_BA.shape[1]
    of_chunk = pages_of_chunk(O, K, H, pages[0].dtype, q_BKfH.shape[2])
    chunk_pages = min(of_chunk, A)
    start_B = jnp.minimum(start_B, A * O)  # as many as there are pages
    cores = 2 if B % 2 == 0 else 1
    scalars = (
        jnp.reshape(layer, 1),
        table_BA.reshape(-1),
        start_B,
        *plan(start_B, chunk_pages * O, cores),
    )

    def row(x):
        def index_map(core, i, *_):
            return core * (B // cores) + i, 0, 0, 0

        return pl.BlockSpec((1, *x.shape[1:]), index_map)

    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, chunk_pages * O, K, H), pages[0].dtype)
    out_BKfH = pl.pallas_call(
        functools.partial(kernel, chunk_pages=chunk_pages, blind=blind),
        out_shape=jax.ShapeDtypeStruct(q_BKfH.shape, q_BWNH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, B // cores),
            in_specs=[row(q_BKfH), row(k_BQKH), row(v_BQKH), in_memory, in_memory],
            out_specs=row(q_BKfH),
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2,))],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # they are two thirds of issuing a page's copy
        ),
        interpret=interpret,
        name="paged_attention",
    )(*(x.astype(jnp.int32) for x in scalars), q_BKfH, k_BQKH, v_BQKH, *pages)
    return jnp.swapaxes(out_BKfH.reshape(B, K, W, -1, H), 1, 2).reshape(q_BWNH.shape)


def gather_kernel(layer_ref, table_ref, k_pool, v_pool, k_out, v_out, done):
    """Copies pages of the table, AT_ONCE a step; waits for those of the step before.

    The last step copies none.
    """
    i, pages = pl.program_id(0), table_ref.shape[0]

    def copies(act, step):
        """Does `act` with the copies of a step."""

        def copy_page(n, _):
            for pool, out in ((k_pool, k_out), (v_pool, v_out)):
                source = pool.at[layer_ref[0], table_ref[n]]
                act(pltpu.make_async_copy(source, out.at[n], done.at[step % 2]))

        first = step * AT_ONCE
        end = jnp.minimum(first + AT_ONCE, pages)
        jax.lax.fori_loop(first, end, copy_page, None)

    copies(lambda copy: copy.start(), i)

    @pl.when(i > 0)
    def _():
        copies(lambda copy: copy.wait(), i - 1)


def gathered(pages, layer, table_BA, *, interpret=False):
    """Returns the keys and values of rows' pages, in their order: (k_BSKH, v_BSKH).

    Page by page, from memory to memory. XLA's gather wants positions where a kernel has heads,
    unless these fill tiles: it would copy all pages of all layers, in each layer anew. Where
    they do it is the better one, as it writes heads where attention wants them.
    """
    (B, A), (K, H) = table_BA.shape, pages[0].shape[3:]
    if K % 8 == 0 and H % 128 == 0:
        return reference.gathered(pages, layer, table_BA)
    if B > 1 and B * A > SCALARS:
        halves = table_BA[: B // 2], table_BA[B // 2 :]
        each = [gathered(pages, layer, half, interpret=interpret) for half in halves]
        return tuple(jnp.concatenate(pair) for pair in zip(*each, strict=True))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    shape = B * A, *pages[0].shape[2:]
    out = pl.pallas_call(
        gather_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, pool.dtype) for pool in pages],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(-(-B * A // AT_ONCE) + 1,),
            in_specs=[in_memory] * 2,
            out_specs=[in_memory] * 2,
            scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="gathered",
    )(jnp.reshape(layer, 1).astype(jnp.int32), table_BA.reshape(-1), *pages)
    return tuple(x.reshape(B, -1, *x.shape[2:]) for x in out)
