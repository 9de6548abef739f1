"""Flash attention under the range-or-group mask, of XLA's operations.

For platforms without a kernel of it. What `tpu/attention.py` does per step of its grid is
done per step of a loop: the scores of one tile are alive at a time, and a tile of queries
walks over those tiles of keys alone that `tiles.schedule` names. Arrays have their heads
first, so that every product is one of matrices; a step of the backward pass has five.

Letters: t queries of one tile, s keys of it, i the tiles of queries of all rows, j those
of keys, v the visits of a tile of queries, f its queries that share a key head, G x t.
"""

import jax
import jax.numpy as jnp

from dllm_jax.pallas_kernels import choice, tiles
from dllm_jax.pallas_kernels.cpu_products import turned
from dllm_jax.pallas_kernels.reference import ABOVE_NEVER, NEVER


def product(dims: str, x, y):
    """Returns the einsum of two tiles, accumulated in f32."""
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)


def at(x, index):
    """Returns x[index], an index in the array: a slice, without a gather's checks."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def added(x, index, y):
    """Returns x with y added to x[index], an index in the array."""
    return jax.lax.dynamic_update_index_in_dim(x, at(x, index) + y, index, 0)


def cut(x_BTNH, K: int, t: int):
    """Returns [i, K, f, H]: tiles of t queries, the N / K heads of a key head together."""
    x_BTNH = tiles.pad(x_BTNH, 1, t)
    B, T, N, H = x_BTNH.shape
    x = x_BTNH.reshape(B, T // t, t, K, N // K, H)
    return jnp.transpose(x, (0, 1, 3, 4, 2, 5)).reshape(-1, K, N // K * t, H)


def joined(x_iKfH, like_BTNH, t: int):
    """Returns `x`, as `cut` made it, in the shape and dtype of the array that it cut."""
    B, T, N, H = like_BTNH.shape
    K, f = x_iKfH.shape[1:3]
    x = x_iKfH.reshape(B, -1, K, f // t, t, H)
    x_BTNH = jnp.transpose(x, (0, 1, 4, 2, 3, 5)).reshape(B, -1, N, H)
    return x_BTNH[:, :T].astype(like_BTNH.dtype)


def plan(mask, _, head_dim: int):
    """Returns `tiles.schedule` of the mask: the tiles of keys that each of queries visits."""
    t = choice.tile(head_dim)
    return scheduled(*tiles.mask_arrays(mask, t, t), t, t)


def scheduled(q_arrays, k_arrays, t: int, s: int):
    """Returns `plan` of the `tiles.mask_arrays` of a mask, in tiles of t by s."""
    return tiles.schedule(tiles.kinds(q_arrays, k_arrays, t, s))


def arranged(q_BTNH, k_BSKH, v_BSKH, mask):
    """Returns ((t, s), of queries: (scaled q, mask, visits, count), of keys: (k, v, mask)).

    Each in its tiles: q_iKfH, mask_i3t, visit_iv (2·j, plus 1 where all of a tile is seen),
    count_i; k_jKsH, v_jKsH, mask_j2s.
    """
    t = s = choice.tile(q_BTNH.shape[3], chunk=mask.tiles is None)
    if mask.tiles is None:  # a chunk, which may be narrower than what it sees
        t = tiles.fit(t, q_BTNH.shape[1], 64)
    K = k_BSKH.shape[2]
    q_arrays, k_arrays = tiles.mask_arrays(mask, t, s)
    visit_Biv, count_Bi = mask.tiles or scheduled(q_arrays, k_arrays, t, s)
    B, _, tiles_of_row = visit_Biv.shape
    first_B11 = tiles_of_row * jnp.arange(B)[:, None, None]
    visit_Biv = 2 * first_B11 + visit_Biv

    def tiled(arrays, size):
        return jnp.stack([x.reshape(-1, size) for x in arrays], axis=1)

    visits = visit_Biv.reshape(-1, tiles_of_row), count_Bi.reshape(-1)
    q_iKfH = cut(q_BTNH * q_BTNH.shape[3] ** -0.5, K, t)
    keys = cut(k_BSKH, K, s), cut(v_BSKH, K, s), tiled(k_arrays, s)
    return (t, s), (q_iKfH, tiled(q_arrays, t), *visits), keys


def scores(x_KfH, y_KsH, shape, masks, places, whole):
    """Returns the products of a tile's queries and keys, f32; NEVER or less where unseen.

    shape: of what is returned, [K, f, s] in four dimensions; places: the dimensions of it that
    are queries and keys, whose masks are (q_mask_3t, k_mask_2s). whole: whether all is seen.
    """

    def seen():
        return product("KfH,KsH->Kfs", x_KfH, y_KsH).reshape(shape)

    def partly_seen():
        (begin, end, group), (pos, of_key) = (
            jnp.expand_dims(mask, [1 + n for n in range(4) if n != place])
            for mask, place in zip(masks, places, strict=True)
        )
        sees = ((pos >= begin) & (pos < end)) | (of_key == group)
        # Left to itself, XLA compares again for every head, in every loop that reads a
        # score: six times the whole forward pass on CPU.
        return seen() + jax.lax.optimization_barrier(jnp.where(sees, 0.0, NEVER))

    return jax.lax.cond(whole, seen, partly_seen)


def forward(q_BTNH, k_BSKH, v_BSKH, mask, *, interpret=False):
    """Returns (attention [B, T, N, H], the log of each query's sum [B, N, T], f32)."""
    del interpret  # nothing is to be
    (t, s), of_queries, keys = arranged(q_BTNH, k_BSKH, v_BSKH, mask)
    k_jKsH, v_jKsH, k_mask_j2s = keys
    B, T, N, _ = q_BTNH.shape

    def attend(tile):
        q_KfH, q_mask_3t, visit_v, count = tile

        def visit(number, sums):
            acc_KfH, max_KGt, sum_KGt = sums
            code = at(visit_v, number)
            j, whole = code // 2, code % 2 == 1
            k_KsH, v_KsH, k_mask_2s = at(k_jKsH, j), at(v_jKsH, j), at(k_mask_j2s, j)
            shape, masks = (len(q_KfH), -1, t, s), (q_mask_3t, k_mask_2s)
            score_KGts = scores(q_KfH, k_KsH, shape, masks, (2, 3), whole)
            new_max_KGt = jnp.maximum(max_KGt, score_KGts.max(axis=-1))
            prob_KGts = jnp.exp(score_KGts - new_max_KGt[..., None])
            fade_KGt = jnp.exp(max_KGt - new_max_KGt)
            prob_Kfs = prob_KGts.reshape(*q_KfH.shape[:2], s).astype(v_KsH.dtype)
            acc_KfH = acc_KfH * fade_KGt.reshape(*q_KfH.shape[:2], 1)
            acc_KfH += product("Kfs,KsH->KfH", prob_Kfs, v_KsH)
            return acc_KfH, new_max_KGt, sum_KGt * fade_KGt + prob_KGts.sum(axis=-1)

        acc_KfH = jnp.zeros(q_KfH.shape, jnp.float32)
        zero_KGt = jnp.zeros((len(q_KfH), q_KfH.shape[1] // t, t), jnp.float32)
        sums = acc_KfH, zero_KGt + ABOVE_NEVER, zero_KGt
        acc_KfH, max_KGt, sum_KGt = jax.lax.fori_loop(0, count, visit, sums)
        # A query that sees nothing: zero, and -NEVER keeps its gradient zero.
        lse_KGt = jnp.where(sum_KGt > 0, max_KGt + jnp.log(sum_KGt), -NEVER)
        share_KGt = 1 / jnp.where(sum_KGt > 0, sum_KGt, 1)
        return acc_KfH * share_KGt.reshape(*q_KfH.shape[:2], 1), lse_KGt

    out_iKfH, lse_iKGt = jax.lax.map(attend, of_queries)
    lse_BiNt = lse_iKGt.reshape(B, -1, N, t)
    lse_BNT = jnp.moveaxis(lse_BiNt, 2, 1).reshape(B, N, -1)[..., :T]
    return joined(out_iKfH, q_BTNH, t), lse_BNT


def backward(
    q_BTNH, k_BSKH, v_BSKH, mask, out_BTNH, lse_BNT, dout_BTNH, *, interpret=False
):
    """Returns the gradients (dq, dk, dv), each in its input's shape and dtype."""
    del interpret
    (t, s), of_queries, keys = arranged(q_BTNH, k_BSKH, v_BSKH, mask)
    k_jKsH, v_jKsH, k_mask_j2s = keys
    K, H = k_BSKH.shape[2:]
    delta_BTN = jnp.sum(dout_BTNH.astype(jnp.float32) * out_BTNH, axis=3)
    # What padding adds has no gradient, whatever its sum.
    lse_iKf1, delta_iKf1 = (
        cut(x_BTN[..., None], K, t) for x_BTN in (lse_BNT.swapaxes(1, 2), delta_BTN)
    )

    def attend(gradients, tile):
        (q_KfH, q_mask_3t, visit_v, count), dout_KfH, *sums = tile
        lse_K1f, delta_K1f = (x_Kf1.swapaxes(1, 2) for x_Kf1 in sums)

        def visit(number, gradients):
            dq_KfH, dk_jKsH, dv_jKsH = gradients
            code = at(visit_v, number)
            j, whole = code // 2, code % 2 == 1
            k_KsH, v_KsH, k_mask_2s = at(k_jKsH, j), at(v_jKsH, j), at(k_mask_j2s, j)
            shape, masks = (K, s, -1, t), (q_mask_3t, k_mask_2s)
            score_KsGt = scores(k_KsH, q_KfH, shape, masks, (3, 1), whole)
            prob_Ksf = jnp.exp(score_KsGt.reshape(K, s, -1) - lse_K1f)
            dprob_Ksf = product("KsH,KfH->Ksf", v_KsH, dout_KfH)
            dscore_Ksf = (prob_Ksf * (dprob_Ksf - delta_K1f)).astype(q_KfH.dtype)
            prob_Ksf = prob_Ksf.astype(q_KfH.dtype)
            return (
                dq_KfH + product("Kfs,KsH->KfH", turned(dscore_Ksf), k_KsH),
                added(dk_jKsH, j, product("Ksf,KfH->KsH", dscore_Ksf, q_KfH)),
                added(dv_jKsH, j, product("Ksf,KfH->KsH", prob_Ksf, dout_KfH)),
            )

        begin = jnp.zeros(q_KfH.shape, jnp.float32), *gradients
        dq_KfH, *gradients = jax.lax.fori_loop(0, count, visit, begin)
        return tuple(gradients), dq_KfH

    zeros = tuple(jnp.zeros(x_jKsH.shape, jnp.float32) for x_jKsH in (k_jKsH, v_jKsH))
    tiled = of_queries, cut(dout_BTNH, K, t), lse_iKf1, delta_iKf1
    (dk_jKsH, dv_jKsH), dq_iKfH = jax.lax.scan(attend, zeros, tiled)
    dq_BTNH = joined(dq_iKfH * H**-0.5, q_BTNH, t)
    return dq_BTNH, joined(dk_jKsH, k_BSKH, s), joined(dv_jKsH, v_BSKH, s)
