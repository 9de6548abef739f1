"""Attention of a window over its row's pages and its own keys, for Hopper GPUs.

The W·G queries of a key head are an item of a block: one warpgroup, or two, computes, 64 of
them each, and another copies the keys, first the window's own, then the row's pages, several
of which make a tile of `attention`. Pages at or beyond `start` are never touched. Where
the window has fewer keys than queries only the last queries see them.

Of rows with two windows (`attend.paired_attention`), which come by length, there are no more
blocks than run at once. Each goes from item to item, there and back, so that all have about as
much to do, and the next one's first keys and queries are on their way while the last one's are
summed up: 128 rows of 992 positions take 137 us on an H200 and not 150, of 200 positions 41 and
not 52. Others have a block for each item, which begins when a processor is free: those of
chunks, whose products take longer than their keys, 71 us and in turn 79.

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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.pallas_kernels import tiles
from dllm_jax.pallas_kernels.gpu import attention
from dllm_jax.pallas_kernels.gpu.attention import ROWS, TILE, shared

BLOCKS = 132  # that run at once: one on each processor of an H100 or H200
BUFFERS = 3  # tiles of keys that are on their way or read


class Item(NamedTuple):
    """What a block does in one turn: some queries of a row over a part of its pages."""

    p: jax.Array  # the part, counted over all rows
    b: jax.Array
    h: jax.Array  # key head
    i: jax.Array  # tile of its queries
    farthest: jax.Array  # position before which it sees
    first: jax.Array  # tiles of the window's keys
    begin: jax.Array  # its first tile of pages
    steps: jax.Array  # how many


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
            f"32, 64 or {TILE} positions, not {O}: have a sampler.block that divides "
            "them, or use 'reference'"
        )
    q_BKWGH = jnp.swapaxes(q_BWNH.reshape(B, W, K, N // K, H), 1, 2)
    q_BKfH = q_BKWGH.reshape(B, K, -1, H)
    queries = q_BKfH.shape[2]
    wgs, tiles_of_queries = cut(queries)
    slots = 2 // wgs  # of queries, and of what becomes of them
    parts = parts_of(B * K * tiles_of_queries, A * O)
    items = B * parts * K * tiles_of_queries
    own = window[0].shape[1] if window else 0
    blind = (W - own) * (N // K)  # queries that see none of the window's keys
    blocks = min(BLOCKS, items) if 0 < own < W else items  # see above
    q_BKfH = tiles.pad(q_BKfH, 2, 8)  # copies are of whole tiles of 8
    window = tuple(tiles.pad(x_BQKH, 1, 8) for x_BQKH in window)
    rows_of_tile = wgs * ROWS
    if end_Be.shape[1] == 1:
        ends, farthest_Bi = (), jnp.broadcast_to(end_Be, (B, tiles_of_queries))
    else:
        # What fills the last tile of queries has 0, and sees nothing.
        end_Bf = tiles.pad(jnp.repeat(end_Be, N // K, axis=1), 1, rows_of_tile)
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
        keys_smem,
        q_arrived,
        ready,
        free,
        met,
    ):
        layer_ref, table_ref, farthest_ref = scalars
        block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
        room = A * O  # nothing lies beyond a row's pages

        def nth(turn):
            """Returns the number of the block's item: there, and the next time back."""
            back = lax.rem(turn, jnp.int32(2)) == 1
            return turn * blocks + jnp.where(back, blocks - 1 - block, block)

        whole = items // blocks
        count = whole + jnp.where(nth(jnp.int32(whole)) < items, 1, 0)

        def apart(n, size: int):
            return lax.rem(n, jnp.int32(size)), lax.div(n, jnp.int32(size))

        def item(turn):
            """Returns an item's Item; of none behind the last one."""
            h, rest = apart(nth(jnp.minimum(turn, count - 1)), K)
            i, p = apart(rest, tiles_of_queries)
            part, b = apart(p, parts)
            farthest = jnp.minimum(farthest_ref[b, i], room)
            held = lax.div(farthest + (TILE - 1), jnp.int32(TILE))
            begin, end = (lax.div(held * (part + x), jnp.int32(parts)) for x in (0, 1))
            first = jnp.where(part == 0, -(-own // TILE), 0)
            return Item(p, b, h, i, farthest, first, begin, end - begin)

        @pl.when(wg < wgs)
        def _():
            if wgs == 2:
                plgpu.set_max_registers(232, action="increase")

            def q_slot(turn):
                return lax.rem(turn, jnp.int32(slots)) * wgs + wg

            def ask(turn, its):
                """Copies an item's queries, if there is one, once its slot is read."""

                @pl.when(turn < count)
                def _():
                    rows = pl.ds(its.i * rows_of_tile + wg * ROWS, ROWS)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    source, slot = q_ref.at[its.b, its.h, rows], q_slot(turn)
                    plgpu.copy_gmem_to_smem(source, q_smem.at[slot], q_arrived.at[slot])

            def attend_item(turn, carry):
                done, its = carry
                following = item(turn + 1)  # read long before it is asked for
                first = its.i * rows_of_tile + wg * ROWS
                rows, q_rH = pl.ds(first, ROWS), q_smem.at[q_slot(turn)]
                limit = its.farthest
                if end_refs:
                    end_ref, layout = end_refs[0].at[its.b, rows], attention.ALONG[0]
                    limit = plgpu.load(end_ref, layout=layout, optimized=False)
                    limit = jnp.minimum(limit, room)
                plgpu.barrier_wait(q_arrived.at[q_slot(turn)])

                def fold(meet, n, carry, seen, blind=0):
                    """Adds the item's n-th tile of keys."""

                    def mask(score_rc):
                        each = jnp.ndim(seen)  # query sees as many of the tile's keys
                        end = attention.wide(seen, 0, score_rc) if each else seen
                        seen_rc = attention.columns(score_rc) < end
                        if blind:
                            seen_rc &= attention.rows(score_rc) >= blind - first
                        return jnp.where(seen_rc, score_rc, attention.NEVER)

                    slot = lax.rem(done + n, jnp.int32(BUFFERS))
                    plgpu.barrier_wait(ready.at[slot])
                    keys = [x.at[slot] for x in keys_smem]
                    carry = attention.forward_step(
                        carry, [q_rH], keys, mask, None, meet, H**-0.5, interpret
                    )
                    plgpu.barrier_arrive(free.at[slot])
                    return carry

                def walk(meet):
                    def of_window(n, carry):
                        return fold(meet, n, carry, own - n * TILE, blind)

                    def of_pages(n, carry):
                        seen = limit - (its.begin + n) * TILE
                        return fold(meet, its.first + n, carry, seen)

                    carry = attention.forward_start(H)
                    if window:
                        carry = lax.fori_loop(0, its.first, of_window, carry)
                    if slots > 1:
                        ask(turn + 1, following)
                    return lax.fori_loop(0, its.steps, of_pages, carry)

                out_rH, lse_r = attention.forward_end(attention.in_turn(wg, met, walk))
                place = its.p, its.h, rows
                if parts > 1:
                    # Of a query that sees nothing of a part, -NEVER: it is to weigh nothing.
                    sees_r = lse_r < -attention.NEVER / 2
                    out_refs[1][place] = jnp.where(sees_r, lse_r, attention.NEVER)
                q_rH[...] = out_rH.astype(q_rH.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_rH, out_refs[0].at[place])
                if slots == 1:
                    ask(turn + 1, following)
                return done + its.first + its.steps, following

            start = item(jnp.int32(0))
            ask(jnp.int32(0), start)
            lax.fori_loop(0, count, attend_item, (jnp.int32(0), start))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _():
            if wgs == 2:
                plgpu.set_max_registers(40, action="decrease")

            def send(done, pieces):
                """Copies a tile, once there is room; pieces: of it, of each array."""
                slot = lax.rem(done, jnp.int32(BUFFERS))
                pl.when(done >= BUFFERS)(lambda: plgpu.barrier_wait(free.at[slot]))
                for c, sources in enumerate(pieces):
                    for source, buffer in zip(sources, keys_smem, strict=True):
                        target = buffer.at[slot, pl.ds(c * O, O)]
                        plgpu.copy_gmem_to_smem(source, target, ready.at[slot])
                return done + 1

            def feed(turn, done):
                its = item(turn)

                def numbers(n):
                    return [n * (TILE // O) + c for c in range(TILE // O)]

                def of_window(n, done):
                    # Past the end copies read zeros, and past the last piece it again.
                    last = (own - 1) // O
                    at = [pl.ds(jnp.minimum(x, last) * O, O) for x in numbers(n)]
                    return send(
                        done, [[x.at[its.b, s, its.h] for x in window] for s in at]
                    )

                def of_pages(n, done):
                    # Past the last page it is copied again: finite, and hidden. Where they
                    # are is read before there is room.
                    last = lax.div(its.farthest - 1, jnp.int32(O))
                    at = [jnp.minimum(x, last) for x in numbers(its.begin + n)]
                    at = [(layer_ref[0], table_ref[its.b, x]) for x in at]
                    return send(done, [[x.at[*s, :, its.h] for x in pools] for s in at])

                if window:
                    done = lax.fori_loop(0, its.first, of_window, done)
                return lax.fori_loop(0, its.steps, of_pages, done)

            done = lax.fori_loop(0, count, feed, jnp.int32(0))

            @pl.loop(jnp.maximum(done - BUFFERS, 0), done)
            def _(n):
                plgpu.barrier_wait(free.at[lax.rem(n, jnp.int32(BUFFERS))])

    dtype = pages[0].dtype
    scratch = [
        shared(dtype, slots * wgs, ROWS, H),
        [shared(dtype, BUFFERS, TILE, H) for _ in pages],
        plgpu.Barrier(num_barriers=slots * wgs),
        plgpu.Barrier(num_arrivals=2 * TILE // O, num_barriers=BUFFERS),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=BUFFERS),
        attention.meeting(wgs),
    ]
    out_type = [jax.ShapeDtypeStruct((B * parts, *q_BKfH.shape[1:]), dtype)]
    if parts > 1:
        sums = B * parts, K, tiles_of_queries * rows_of_tile
        out_type.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    kernel = attention.run(
        body,
        dtype,
        out_type,
        {"block": blocks},
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
