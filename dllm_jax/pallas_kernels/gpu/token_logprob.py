"""The head and what is asked of it, in tiles of the vocabulary, for Hopper GPUs.

Logits x @ head exist a tile at a time, [r, v], in the registers of the two warpgroups that
compute, 64 rows each, while a third copies what they multiply. Running maxima and sums
make of them the softmax's statistics. A block walks over a part of the vocabulary, and the
parts are joined after. `offset`, see `tpu.token_logprob`, whose names these are.

Letters: r rows of one tile, v columns of it, p parts of the vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.pallas_kernels import noise, tiled_head, tiles
from dllm_jax.pallas_kernels.gpu import attention
from dllm_jax.pallas_kernels.gpu.attention import ALONG, RESIDENT, ROWS, filled, wide
from dllm_jax.pallas_kernels.reference import BELOW_NEVER, NEVER

TILE_D = 64
TILE_V = 64  # columns of 128 bytes, of which a copy takes all
# A tile of V, its columns that are looked at together, and whether logarithms may be
# approximate. Noise is 200 instructions a number: unrolled for a whole tile they are more
# than a processor's cache of them holds, and each tile waited for its program. That which
# wins is the logarithm of what is almost 1.
TUNED = {"token_logprob": (256, 256, True), "token_draw": (128, 32, False)}
BUFFERS = 4
# Rows of a draw whose logits XLA makes whole: of 4 it takes 0.57 of the kernel's time, which
# multiplies 64 (an H200, a head of 2,048 x 151,936: benchmarks.kernels' `kernel_of_few`).
FEW = 64
BLOCKS = 4 * 132  # about as many as make full use of a chip, a few to each processor
GRADIENT_BYTES = 2**27  # of a tile of the logits' gradient


def faded(score_rv, max_r):
    """Returns (the running maximum with a tile, the tile's exponentials, the older's fading)."""
    new_r = jnp.maximum(max_r, score_rv.max(axis=1))
    prob_rv = jnp.exp(score_rv - wide(new_r, 0, score_rv))
    return new_r, prob_rv, jnp.exp(max_r - new_r)


def sum_update(score_rv, stats):
    """Returns running (maximum, sum) with a tile added."""
    max_r, sum_r = stats
    new_r, prob_rv, fade_r = faded(score_rv, max_r)
    return new_r, sum_r * fade_r + prob_rv.sum(axis=1)


def softmax_update(score_rv, stats):
    """Returns running (maximum, sum, sum of p · score) with a tile added."""
    max_r, sum_r, moment_r = stats
    new_r, prob_rv, fade_r = faded(score_rv, max_r)
    sum_r = sum_r * fade_r + prob_rv.sum(axis=1)
    return new_r, sum_r, moment_r * fade_r + (prob_rv * score_rv).sum(axis=1)


def pick_step(carry, score_rv, id_rv, counts_rv, token_r):
    """Adds a tile to the statistics and to the logit of `token`."""
    token_score_rv = jnp.where(id_rv == wide(token_r, 0, id_rv), score_rv, 0.0)
    return *softmax_update(score_rv, carry[:3]), carry[3] + token_score_rv.sum(axis=1)


def softmax_result(stats):
    """Returns (log of the sum of exponentials, mean score)."""
    max_r, sum_r, moment_r = stats
    return max_r + jnp.log(sum_r), moment_r / sum_r


def pick_end(carry):
    """Returns (log of the sum, mean score, logit of `token`)."""
    return *softmax_result(carry[:3]), carry[3]


def behind_step(carry, score_rv, id_rv, counts_rv, limit_r):
    """Adds a tile to what lies behind the limit, and to the number of those before it."""
    max_r, sum_r, ahead_r = carry
    behind_rv = counts_rv & (score_rv <= wide(limit_r, 0, score_rv))
    ahead_rv = jnp.where(counts_rv, 1.0, 0.0) - jnp.where(behind_rv, 1.0, 0.0)
    score_rv = jnp.where(behind_rv, score_rv, BELOW_NEVER)
    new_r = jnp.maximum(max_r, score_rv.max(axis=1))
    prob_rv = jnp.exp(score_rv - wide(new_r, 0, score_rv))
    prob_rv = jnp.where(behind_rv, prob_rv, 0.0)
    sum_r = sum_r * jnp.exp(max_r - new_r) + prob_rv.sum(axis=1)
    return new_r, sum_r, ahead_r + ahead_rv.sum(axis=1)


def behind_end(carry):
    """Returns (log of the sum behind the limit, tokens before it)."""
    max_r, sum_r, ahead_r = carry
    return max_r + jnp.log(jnp.where(sum_r > 0, sum_r, 1.0)), ahead_r


def draw_step(
    carry,
    score_rv,
    id_rv,
    counts_rv,
    first_r,
    second_r,
    slot_r,
    scale_r,
    warm_r,
    *,
    width: int,
):
    """Adds a tile to both distributions' statistics and to the best of the noisy scores.

    first, second, slot: as `words` of `draw`; scale: 1 / temperature; warm: 1, or 0 for
    rows that draw without noise.
    """
    across = functools.partial(wide, axis=0, like=score_rv)
    tempered_rv = jnp.where(counts_rv, score_rv * across(scale_r), NEVER)
    at_rv = across(slot_r * width) + id_rv
    noise_rv = noise.gumbel(across(first_r), across(second_r), at_rv)
    noisy_rv = tempered_rv + noise_rv * across(warm_r)
    old_token_r, old_best_r, old_logit_r = carry[5:]
    best_r = noisy_rv.max(axis=1)
    token_r = jnp.where(noisy_rv == across(best_r), id_rv, tiles.NOWHERE).min(axis=1)
    logit_r = jnp.where(id_rv == across(token_r), score_rv, 0.0).sum(axis=1)
    better_r = best_r > old_best_r
    return (
        *sum_update(score_rv, carry[:2]),
        *softmax_update(tempered_rv, carry[2:5]),
        jnp.where(better_r, token_r, old_token_r),
        jnp.where(better_r, best_r, old_best_r),
        jnp.where(better_r, logit_r, old_logit_r),
    )


def draw_end(carry):
    """Returns (token, its noisy score, its logit, lse, tempered lse, tempered mean)."""
    max_r, sum_r = carry[:2]
    return *carry[5:], max_r + jnp.log(sum_r), *softmax_result(carry[2:5])


def share_of(name: str, R: int, V: int) -> int:
    """Returns over how many tiles of the vocabulary a block walks; the last one over fewer."""
    blocks = pl.cdiv(BLOCKS, pl.cdiv(R, RESIDENT))  # of a tile of rows
    return pl.cdiv(pl.cdiv(V, TUNED[name][0]), blocks)


def launch(
    name: str,
    step,
    end,
    start,
    rows,
    x_RD,
    head_DV,
    offset,
    *,
    forbidden: int,
    interpret,
    used=None,
):
    """Runs step(carry, logits, ids, which count, *rows) over tiles of the vocabulary.

    start: the carry's values, of which each row has its own; rows: arrays [R]; used: how
    many rows, the first ones, need be right, None: all. Returns what `end` returns of each
    part's last carry, [parts, R].
    """
    tile, strip, approximate = TUNED[name]
    R, V = len(x_RD), head_DV.shape[1]
    used_1 = jnp.asarray(R if used is None else used, jnp.int32)[None]
    x_RD = tiles.pad(tiles.pad(x_RD, 0, RESIDENT), 1, TILE_D)
    head_DV = tiles.pad(tiles.pad(head_DV, 0, TILE_D), 1, TILE_V)
    (padded, D), tiles_of_V = x_RD.shape, pl.cdiv(V, tile)
    share = share_of(name, R, V)
    parts, depth = pl.cdiv(tiles_of_V, share), D // TILE_D
    padded_rows = tuple(tiles.pad(x_R, 0, RESIDENT) for x_R in rows)

    def body(
        x_ref,
        head_ref,
        offset_ref,
        used_ref,
        row_refs,
        out_refs,
        x_smem,
        head_smem,
        strips_smem,
        ready,
        free,
    ):
        i, part, wg = (lax.axis_index(axis) for axis in ("rows", "part", "warpgroup"))
        first, used = part * share, used_ref[0]
        count = jnp.minimum(share, tiles_of_V - first)
        count = jnp.where(i * RESIDENT < used, count, 0)

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            row = i * RESIDENT + wg * ROWS
            place = pl.ds(row, ROWS)
            load = functools.partial(plgpu.load, layout=ALONG[0], optimized=False)
            rows_r = [load(ref.at[place]) for ref in row_refs]

            def factors(slot):
                x = x_smem.at[slot, pl.ds(wg * ROWS, ROWS)]
                return x, head_smem.at[slot]

            def look(score_rv, begin, carry):
                at_rv = begin + attention.columns(score_rv)
                id_rv = jnp.where(at_rv < V, at_rv + offset_ref[0], -1)
                counts_rv = (id_rv >= 0) & (id_rv != forbidden)
                score_rv = jnp.where(counts_rv, score_rv, NEVER)
                return step(carry, score_rv, id_rv, counts_rv, *rows_r)

            def compute(j, carry):
                at = (ROWS, tile), j * depth, depth
                score_rv = attention.streamed(factors, *at, ready, free, BUFFERS)
                begin = (first + j) * tile
                if strip == tile:
                    return look(score_rv, begin, carry)
                strips_smem[0][wg] = score_rv
                plgpu.commit_smem()

                def look_at_strip(n, carry):
                    columns = pl.ds(n * strip, strip)
                    score_rv = plgpu.load(
                        strips_smem[0].at[wg, :, columns], layout=plgpu.Layout.WGMMA
                    )
                    return look(score_rv, begin + n * strip, carry)

                strips = jnp.where(row < used, tile // strip, 0)
                return lax.fori_loop(0, strips, look_at_strip, carry)

            carry = tuple(filled(value, ROWS) for value in start)
            results = end(lax.fori_loop(0, count, compute, carry))
            for out_ref, x_r in zip(out_refs, results, strict=True):
                out_ref[part, place] = x_r

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def fetch(n, slot):
                at_d = pl.ds(lax.rem(n, jnp.int32(depth)) * TILE_D, TILE_D)
                j = first + lax.div(n, jnp.int32(depth))
                x = x_ref.at[pl.ds(i * RESIDENT, RESIDENT), at_d]
                head = head_ref.at[at_d, pl.ds(j * tile, tile)]
                for source, buffer in ((x, x_smem), (head, head_smem)):
                    plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready.at[slot])

            attention.feed(fetch, count * depth, free, BUFFERS)

    dtypes = (x.dtype for x in jax.eval_shape(end, start))
    out_type = [jax.ShapeDtypeStruct((parts, padded), dtype) for dtype in dtypes]
    scratch = [
        attention.shared(x_RD.dtype, BUFFERS, RESIDENT, TILE_D),
        attention.shared(x_RD.dtype, BUFFERS, TILE_D, tile),
        [attention.shared(jnp.dtype("float32"), 2, ROWS, tile)] * (strip < tile),
        plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
        plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
    ]
    kernel = attention.run(
        body,
        x_RD.dtype,
        out_type,
        {"rows": padded // RESIDENT, "part": parts},
        scratch,
        name,
        interpret=interpret,
        approximate=approximate,
    )
    offset_1 = jnp.asarray(offset, jnp.int32)[None]
    results = kernel(x_RD, head_DV, offset_1, used_1, padded_rows)
    return [x_pR[:, :R] for x_pR in results]


def joined(lse_pR, mean_pR):
    """Returns (log of the sum, mean) over the parts of the vocabulary."""
    lse_R = jax.nn.logsumexp(lse_pR, axis=0)
    return lse_R, jnp.sum(jnp.exp(lse_pR - lse_R[None]) * mean_pR, axis=0)


def pick(x_RD, head_DV, token_R, offset, *, forbidden: int, interpret=False):
    """Returns (log of the sum of exponentials, mean logit, logit of `token`), [R] f32."""
    lse_pR, mean_pR, logit_pR = launch(
        "token_logprob",
        pick_step,
        pick_end,
        (BELOW_NEVER, 0.0, 0.0, 0.0),
        (token_R,),
        x_RD,
        head_DV,
        offset,
        forbidden=forbidden,
        interpret=interpret,
    )
    return *joined(lse_pR, mean_pR), logit_pR.sum(axis=0)


def behind(x_RD, head_DV, limit_R, offset, *, forbidden: int, interpret=False):
    """Returns (log of the sum of exponentials behind the limit, tokens before it), [R]."""
    lse_pR, ahead_pR = launch(
        "token_logprob",
        behind_step,
        behind_end,
        (BELOW_NEVER, 0.0, 0.0),
        (limit_R,),
        x_RD,
        head_DV,
        offset,
        forbidden=forbidden,
        interpret=interpret,
    )
    return jax.nn.logsumexp(lse_pR, axis=0), ahead_pR.sum(axis=0)


def pick_gradient(
    x_RD, head_DV, token_R, offset, saved, *, forbidden: int, interpret=False
):
    """Returns (dx, dhead) of this part of the head, a tile of the vocabulary at a time.

    saved: as in `tpu.token_logprob.logit_gradient`. A sum of [r, D] over
    the vocabulary fits no registers, so that a tile of the logits' gradient is stored in any
    case; then the library's three products a tile leave a kernel little to gain.
    """
    del interpret
    (R, _), V = x_RD.shape, head_DV.shape[1]
    lse_R1, mean_R1, dlogp_R1, dentropy_R1, *limits = (x_R[:, None] for x_R in saved)
    tile = min(V, max(128, GRADIENT_BYTES // (2 * R) // 128 * 128))

    def add_tile(j, gradients):
        dx_RD, dhead_DV = gradients
        begin = jnp.minimum(j * tile, V - tile)  # the last overlaps the one before it
        head_Dv = lax.dynamic_slice_in_dim(head_DV, begin, tile, axis=1)
        at_1v = begin + jnp.arange(tile)[None]
        score_Rv = jnp.dot(x_RD, head_Dv, preferred_element_type=jnp.float32)
        prob_Rv = jnp.exp(score_Rv - lse_R1)
        is_token_Rv = at_1v + offset == token_R[:, None]
        grad_Rv = dlogp_R1 * (is_token_Rv - prob_Rv)
        grad_Rv -= dentropy_R1 * prob_Rv * (score_Rv - mean_R1)
        if limits:
            limit_R1, behind_R1 = limits
            behind_Rv = jnp.where(
                score_Rv <= limit_R1, score_Rv - behind_R1, BELOW_NEVER
            )
            grad_Rv += dlogp_R1 * jnp.exp(behind_Rv)
        counts_1v = (at_1v >= j * tile) & (at_1v + offset != forbidden)
        grad_Rv = jnp.where(counts_1v, grad_Rv, 0).astype(x_RD.dtype)
        dx_RD += jnp.dot(grad_Rv, head_Dv.T, preferred_element_type=jnp.float32)
        added_Dv = jnp.dot(x_RD.T, grad_Rv, preferred_element_type=jnp.float32)
        old_Dv = lax.dynamic_slice_in_dim(dhead_DV, begin, tile, axis=1)
        new_Dv = (old_Dv + added_Dv).astype(dhead_DV.dtype)
        return dx_RD, lax.dynamic_update_slice_in_dim(dhead_DV, new_Dv, begin, axis=1)

    start = jnp.zeros(x_RD.shape, jnp.float32), jnp.zeros_like(head_DV)
    dx_RD, dhead_DV = lax.fori_loop(0, pl.cdiv(V, tile), add_tile, start)
    return dx_RD.astype(x_RD.dtype), dhead_DV


def best(token_pR, noisy_pR, logit_pR):
    """Returns (token, its noisy score, its logit): the best of the parts, the first of equals."""
    best_R = noisy_pR.max(axis=0)
    token_R = jnp.where(noisy_pR == best_R[None], token_pR, tiles.NOWHERE).min(axis=0)
    logit_R = jnp.where(token_pR == token_R[None], logit_pR, 0).sum(axis=0)
    return token_R, best_R, logit_R


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

    words: the key's two and the row's place in its draw, whose rows are `width` wide. Rows
    that are wanted go first: a tile of others is not computed.
    """
    if len(x_RD) <= FEW:
        return tiled_head.draw(
            x_RD,
            head_DV,
            words_R3,
            temperature_R,
            offset,
            wanted_R=wanted_R,
            width=width,
            forbidden=forbidden,
        )
    order_R = jnp.argsort(~wanted_R, stable=True)
    x_RD, words_R3, temperature_R = (
        y_R[order_R] for y_R in (x_RD, words_R3, temperature_R)
    )
    greedy_R = temperature_R == 0
    scale_R = 1 / jnp.where(greedy_R, 1, temperature_R)
    rows = *words_R3.T, scale_R, 1.0 - greedy_R
    token_pR, noisy_pR, logit_pR, lse_pR, tempered_pR, mean_pR = launch(
        "token_draw",
        functools.partial(draw_step, width=width),
        draw_end,
        # Columns beyond the last win of no row, and of one that is no number nothing does.
        (BELOW_NEVER, 0.0, BELOW_NEVER, 0.0, 0.0, 0, NEVER, 0.0),
        rows,
        x_RD,
        head_DV,
        offset,
        forbidden=forbidden,
        interpret=interpret,
        used=wanted_R.sum(),
    )
    lse_R, _ = joined(lse_pR, mean_pR)
    drawn_R = best(token_pR, noisy_pR, logit_pR)
    found = *drawn_R, lse_R, *joined(tempered_pR, mean_pR)
    place_R = jnp.argsort(order_R)
    return tuple(jnp.where(wanted_R, y_R[place_R], 0) for y_R in found)
