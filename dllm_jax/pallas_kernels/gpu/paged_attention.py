"""Attention of a window over its row's pages and its own keys, for Hopper GPUs.

The W·G queries of a key head share a block: one warpgroup, or two, computes, 64 of them
each, and another copies the keys, first the window's own, then the row's pages, a chunk
of which makes a tile of `attention`. Pages at or beyond `start` are never touched. Where the
window has fewer keys than queries only the last queries see them.

Letters: f queries of one key head (W·G), r those of one warpgroup, c keys of one tile.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.pallas_kernels import tiles
from dllm_jax.pallas_kernels.gpu import attention
from dllm_jax.pallas_kernels.gpu.attention import BUFFERS, ROWS, TILE, shared


def attend(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H].

    Raises ValueError for pages that no whole number of makes a tile.
    """
    B, W, N, H = q_BWNH.shape
    _, _, O, K, _ = pages[0].shape
    if TILE % O or O % 8:
        raise ValueError(
            f"pallas_kernels.paged_attention: implementation='gpu' takes pages of 8, 16, "
            f"32, 64 or {TILE} positions, not {O}; use 'reference'"
        )
    q_BKWGH = jnp.swapaxes(q_BWNH.reshape(B, W, K, N // K, H), 1, 2)
    q_BKfH = q_BKWGH.reshape(B, K, -1, H)
    queries = q_BKfH.shape[2]
    wgs = 1 if queries <= ROWS else 2
    own = k_BQKH.shape[1]
    blind = (W - own) * (N // K)  # queries that see none of the window's keys
    window_tile = -(-own // ROWS) * ROWS
    q_BKfH = tiles.pad(q_BKfH, 2, 8)  # copies are of whole tiles of 8
    window = tuple(tiles.pad(x_BQKH, 1, 8) for x_BQKH in (k_BQKH, v_BQKH))

    def body(
        scalars,
        q_ref,
        window,
        pools,
        out_ref,
        q_smem,
        window_smem,
        pages_smem,
        q_arrived,
        window_arrived,
        ready,
        free,
    ):
        layer_ref, table_ref, start_ref = scalars
        b, h, i, wg = (lax.axis_index(x) for x in ("row", "head", "tile", "warpgroup"))
        start = start_ref[b]
        steps = lax.div(start + (TILE - 1), jnp.int32(TILE))

        @pl.when(wg < wgs)
        def _():
            if wgs == 2:
                plgpu.set_max_registers(232, action="increase")
            place = (b, h, pl.ds((i * wgs + wg) * ROWS, ROWS))
            q_rH = q_smem.at[wg]
            plgpu.copy_gmem_to_smem(q_ref.at[place], q_rH, q_arrived.at[wg])
            plgpu.barrier_wait(q_arrived.at[wg])

            def fold(carry, kv, seen, blind=0):
                def mask(score_rc):
                    seen_rc = attention.columns(score_rc) < seen
                    if blind:
                        first = (i * wgs + wg) * ROWS
                        seen_rc &= attention.rows(score_rc) >= blind - first
                    return jnp.where(seen_rc, score_rc, attention.NEVER)

                return attention.forward_step(
                    carry, [q_rH], kv, mask, None, H**-0.5, interpret
                )

            def compute(n, carry):
                slot = lax.rem(n, jnp.int32(BUFFERS))
                plgpu.barrier_wait(ready.at[slot])
                carry = fold(carry, [x.at[slot] for x in pages_smem], start - n * TILE)
                plgpu.barrier_arrive(free.at[slot])
                return carry

            plgpu.barrier_wait(window_arrived)
            carry = fold(attention.forward_start(H), window_smem, own, blind)
            carry = lax.fori_loop(0, steps, compute, carry)
            out_rH, _ = attention.forward_end(carry)
            q_rH[...] = out_rH.astype(q_rH.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_rH, out_ref.at[place])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _():
            if wgs == 2:
                plgpu.set_max_registers(40, action="decrease")
            # Past the window's end, and past the queries', copies read zeros and write
            # nothing.
            padded = pl.ds((wg - wgs) * ROWS, window_tile)
            for x_ref, buffer in zip(window, window_smem, strict=True):
                plgpu.copy_gmem_to_smem(x_ref.at[b, padded, h], buffer, window_arrived)
            last = lax.div(start - 1, jnp.int32(O))

            def fetch(n, slot):
                for c in range(TILE // O):
                    # Past the last page it is copied again: finite, and hidden.
                    page = table_ref[b, jnp.minimum(n * (TILE // O) + c, last)]
                    for pool, buffer in zip(pools, pages_smem, strict=True):
                        plgpu.copy_gmem_to_smem(
                            pool.at[layer_ref[0], page, :, h],
                            buffer.at[slot, pl.ds(c * O, O)],
                            ready.at[slot],
                        )

            attention.feed(fetch, steps, free, BUFFERS)

    dtype = pages[0].dtype
    scratch = [
        shared(dtype, wgs, ROWS, H),
        [shared(dtype, window_tile, H) for _ in pages],
        [shared(dtype, BUFFERS, TILE, H) for _ in pages],
        plgpu.Barrier(num_barriers=wgs),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2 * TILE // O, num_barriers=BUFFERS),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=BUFFERS),
    ]
    kernel = attention.run(
        body,
        dtype,
        jax.ShapeDtypeStruct(q_BKfH.shape, dtype),
        {"head": K, "tile": pl.cdiv(queries, wgs * ROWS), "row": B},
        scratch,
        "paged_attention",
        interpret=interpret,
        wgs=wgs,
    )
    start_B = jnp.minimum(start_B, table_BA.shape[1] * O)  # as many as there are pages
    scalars = jnp.reshape(layer, 1).astype(jnp.int32), table_BA, start_B
    out_BKfH = kernel(scalars, q_BKfH, window, tuple(pages))
    out_BKWGH = out_BKfH[:, :, :queries].reshape(B, K, W, N // K, H)
    return jnp.swapaxes(out_BKWGH, 1, 2).reshape(q_BWNH.shape)
