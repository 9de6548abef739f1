"""Attention of a window over its row's pages and its own keys, for Hopper GPUs.

The W·G queries of a key head share a block: one warpgroup, or two, computes, 64 of them
each, and another copies the keys, first the window's own, then the row's pages, several
of which make a tile of `attention`. Pages at or beyond `start` are never touched. Where
the window has fewer keys than queries only the last queries see them.

A chunk of a prompt has its keys in the pages, and each of its queries has an end,
before which it sees. Where a block does not take all queries of a key head, each block
reads the pages before the greatest end of those that it takes.

Where rows and key heads are too few to occupy the chip, several blocks share a row's pages
out (Flash-Decoding's split of the keys): each gives the attention of its part and the log of
its sum, and `joined` weighs the parts by these. The first of them has the window's own keys.

Letters: f queries of one key head (W·G), r those of one warpgroup, c keys of one tile,
i tiles of queries, e ends of a row's queries (W, or one for all), s parts of a row's
pages, p parts of all rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.pallas_kernels import tiles
from dllm_jax.pallas_kernels.gpu import attention
from dllm_jax.pallas_kernels.gpu.attention import BUFFERS, ROWS, TILE, shared

BLOCKS = 132  # that run at once: one on each processor of an H100 or H200


def cut(queries: int) -> tuple[int, int]:
    """Returns (warpgroups that compute, tiles) of the queries of a key head."""
    wgs = 1 if queries <= ROWS else 2
    return wgs, -(-queries // (wgs * ROWS))


def parts_of(blocks: int, positions: int) -> int:
    """Returns how many blocks share a row's pages out, where there are `blocks` without.

    positions: of the longest row; no part is of less than a tile of them.
    """
    return max(min(BLOCKS // blocks, -(-positions // TILE)), 1)


def attend(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H]."""
    window = k_BQKH, v_BQKH
    end_B1 = start_B[:, None]
    return launch(q_BWNH, pages, layer, table_BA, end_B1, window, interpret)


def attend_chunk(q_BWNH, pages, layer, table_BA, end_BW, *, interpret=False):
    """Returns the attention of queries over pages before their `end`, [B, W, N, H]."""
    return launch(q_BWNH, pages, layer, table_BA, end_BW, (), interpret)


def launch(q_BWNH, pages, layer, table_BA, end_Be, window, interpret):
    """Returns the attention, [B, W, N, H], over pages before `end` and over a window.

    window: (k, v), each [B, Q, K, H], or () of none. Raises ValueError for pages that
    no whole number of makes a tile.
    """
    B, W, N, H = q_BWNH.shape
    (_, _, O, K, _), A = pages[0].shape, table_BA.shape[1]
    if TILE % O or O % 8:
        raise ValueError(
            f"pallas_kernels.paged_attention: implementation='gpu' takes pages of 8, 16, "
            f"32, 64 or {TILE} positions, not {O}; use 'reference'"
        )
    q_BKWGH = jnp.swapaxes(q_BWNH.reshape(B, W, K, N // K, H), 1, 2)
    q_BKfH = q_BKWGH.reshape(B, K, -1, H)
    queries = q_BKfH.shape[2]
    wgs, tiles_of_queries = cut(queries)
    parts = parts_of(B * K * tiles_of_queries, A * O)
    own = window[0].shape[1] if window else 0
    blind = (W - own) * (N // K)  # queries that see none of the window's keys
    window_tile = -(-own // ROWS) * ROWS
    q_BKfH = tiles.pad(q_BKfH, 2, 8)  # copies are of whole tiles of 8
    window = tuple(tiles.pad(x_BQKH, 1, 8) for x_BQKH in window)
    if end_Be.shape[1] == 1:
        ends, farthest_Bi = (), jnp.broadcast_to(end_Be, (B, tiles_of_queries))
    else:
        # What fills the last tile of queries has 0, and sees nothing.
        end_Bf = tiles.pad(jnp.repeat(end_Be, N // K, axis=1), 1, wgs * ROWS)
        farthest_Bi = end_Bf.reshape(B, tiles_of_queries, -1).max(axis=2)
        ends = (end_Bf,)

    def body(
        scalars,
        q_ref,
        end_refs,
        window,
        pools,
        out_refs,
        q_smem,
        window_smem,
        pages_smem,
        q_arrived,
        window_arrived,
        ready,
        free,
        met,
    ):
        layer_ref, table_ref, farthest_ref = scalars
        p, h, i, wg = (lax.axis_index(x) for x in ("row", "head", "tile", "warpgroup"))
        b, part = lax.div(p, jnp.int32(parts)), lax.rem(p, jnp.int32(parts))
        room = A * O  # nothing lies beyond a row's pages
        farthest = jnp.minimum(farthest_ref[b, i], room)
        tiles_held = lax.div(farthest + (TILE - 1), jnp.int32(TILE))
        begin, end = (
            lax.div(tiles_held * (part + x), jnp.int32(parts)) for x in (0, 1)
        )
        steps = end - begin

        @pl.when(wg < wgs)
        def _():
            if wgs == 2:
                plgpu.set_max_registers(232, action="increase")
            rows = pl.ds((i * wgs + wg) * ROWS, ROWS)
            q_rH = q_smem.at[wg]
            plgpu.copy_gmem_to_smem(q_ref.at[b, h, rows], q_rH, q_arrived.at[wg])
            limit = farthest
            if end_refs:
                end_ref = end_refs[0].at[b, rows]
                layout = attention.ALONG[0]
                limit = plgpu.load(end_ref, layout=layout, optimized=False)
                limit = jnp.minimum(limit, room)
            plgpu.barrier_wait(q_arrived.at[wg])

            def fold(turn, carry, kv, seen, blind=0):
                def mask(score_rc):
                    each = jnp.ndim(seen)  # query sees as many of the tile's keys
                    end = attention.wide(seen, 0, score_rc) if each else seen
                    seen_rc = attention.columns(score_rc) < end
                    if blind:
                        first = (i * wgs + wg) * ROWS
                        seen_rc &= attention.rows(score_rc) >= blind - first
                    return jnp.where(seen_rc, score_rc, attention.NEVER)

                return attention.forward_step(
                    carry, [q_rH], kv, mask, None, turn, H**-0.5, interpret
                )

            def compute(turn, n, carry):
                slot = lax.rem(n, jnp.int32(BUFFERS))
                plgpu.barrier_wait(ready.at[slot])
                seen = limit - (begin + n) * TILE
                carry = fold(turn, carry, [x.at[slot] for x in pages_smem], seen)
                plgpu.barrier_arrive(free.at[slot])
                return carry

            if window:
                plgpu.barrier_wait(window_arrived)

            def walk(turn):
                carry = attention.forward_start(H)
                if window:
                    seen = own if parts == 1 else jnp.where(part == 0, own, 0)
                    carry = fold(turn, carry, window_smem, seen, blind)
                step = functools.partial(compute, turn)
                return lax.fori_loop(0, steps, step, carry)

            out_rH, lse_r = attention.forward_end(attention.in_turn(wg, met, walk))
            if parts > 1:
                # Of a query that sees nothing of a part, -NEVER: it is to weigh nothing.
                sees_r = lse_r < -attention.NEVER / 2
                out_refs[1][p, h, rows] = jnp.where(sees_r, lse_r, attention.NEVER)
            q_rH[...] = out_rH.astype(q_rH.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_rH, out_refs[0].at[p, h, rows])
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
            last = lax.div(farthest - 1, jnp.int32(O))

            def fetch(n, slot):
                for c in range(TILE // O):
                    # Past the last page it is copied again: finite, and hidden.
                    nth = (begin + n) * (TILE // O) + c
                    page = table_ref[b, jnp.minimum(nth, last)]
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
        [shared(dtype, window_tile, H) for _ in window],
        [shared(dtype, BUFFERS, TILE, H) for _ in pages],
        plgpu.Barrier(num_barriers=wgs),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2 * TILE // O, num_barriers=BUFFERS),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=BUFFERS),
        attention.meeting(wgs),
    ]
    out_type = [jax.ShapeDtypeStruct((B * parts, *q_BKfH.shape[1:]), dtype)]
    if parts > 1:
        sums = B * parts, K, tiles_of_queries * wgs * ROWS
        out_type.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    kernel = attention.run(
        body,
        dtype,
        out_type,
        {"head": K, "tile": tiles_of_queries, "row": B * parts},
        scratch,
        "paged_attention",
        interpret=interpret,
        wgs=wgs,
    )
    scalars = jnp.reshape(layer, 1).astype(jnp.int32), table_BA, farthest_Bi
    out_pKfH, *lse_pKf = kernel(scalars, q_BKfH, ends, window, tuple(pages))
    out_pKfH = out_pKfH[:, :, :queries]
    out_BKfH = (
        joined(out_pKfH, lse_pKf[0][..., :queries], parts) if lse_pKf else out_pKfH
    )
    out_BKWGH = out_BKfH.reshape(B, K, W, N // K, H)
    return jnp.swapaxes(out_BKWGH, 1, 2).reshape(q_BWNH.shape)


def joined(out_pKfH, lse_pKf, parts: int):
    """Returns the attention [B, K, f, H] of rows from that of their `parts`, each one's lse.

    Part by part, as sums along an axis of parts would be launches of their own.
    """
    lse_pKf1 = lse_pKf[..., None]
    max_BKf1, sum_BKf1, out_BKfH = lse_pKf1[::parts], 1.0, out_pKfH[::parts]
    for part in range(1, parts):
        lse_BKf1, part_BKfH = lse_pKf1[part::parts], out_pKfH[part::parts]
        new_BKf1 = jnp.maximum(max_BKf1, lse_BKf1)
        fade_BKf1, weight_BKf1 = (jnp.exp(x - new_BKf1) for x in (max_BKf1, lse_BKf1))
        sum_BKf1 = sum_BKf1 * fade_BKf1 + weight_BKf1
        out_BKfH = out_BKfH * fade_BKf1 + part_BKfH * weight_BKf1
        max_BKf1 = new_BKf1
    return (out_BKfH / sum_BKf1).astype(out_pKfH.dtype)
