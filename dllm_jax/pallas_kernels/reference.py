"""The specification of every op in plain jnp: no tiling for speed, no tricks.

Kernels are tested against these; these are tested against independent formulas.

Letters: f queries that share one key head, folded into one dimension.
"""

import jax
import jax.numpy as jnp

NEVER = -1e30  # finite, so that a query that sees nothing gives a mean and not NaN


def attention(q_BTNH, k_BSKH, v_BSKH, mask, *, cached=None):
    """Returns the grouped-query attention of q over k, v: [B, T, N, H] in q's dtype.

    A query sees a key iff `q_begin <= k_pos < q_end or k_group == q_group`; head n reads
    key head n // (N / K). `cached = (k, v)` are keys and values that come before `k`, `v`
    in the mask's key order; they are read where they are, not copied together.
    Softmax in f32, scale 1 / sqrt(H).
    """
    k_pos_B1S = mask.k_pos_BS[:, None]
    sees_BTS = (k_pos_B1S >= mask.q_begin_BT[..., None]) & (
        k_pos_B1S < mask.q_end_BT[..., None]
    )
    sees_BTS |= mask.k_group_BS[:, None] == mask.q_group_BT[..., None]
    fresh = k_BSKH, v_BSKH
    pairs = [fresh] if cached is None else [cached, fresh]
    return attend(q_BTNH, pairs, sees_BTS)


def attend(q_BTNH, pairs, sees_BTS):
    """Returns attention over the keys and values of all `pairs`, in their order.

    pairs: (k, v), each [B, some of S, K, H]; sees_BTS: whether a query sees a key. Heads
    go first, and the queries that share one go together: otherwise XLA transposes the
    scores, 1.2 to 1.7 times the time on CPU.
    """
    B, T, N, H = q_BTNH.shape
    K = pairs[0][0].shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
    q_BKfH = jnp.moveaxis(q_BTKGH, 1, 3).reshape(B, K, -1, H)
    pairs = [[jnp.moveaxis(x_BSKH, 1, 2) for x_BSKH in pair] for pair in pairs]
    score_BKfS = jnp.concatenate(
        [
            jnp.einsum(
                "BKfH,BKSH->BKfS", q_BKfH, k_BKSH, preferred_element_type=jnp.float32
            )
            for k_BKSH, _ in pairs
        ],
        axis=-1,
    )
    score_BKGTS = score_BKfS.reshape(B, K, N // K, *sees_BTS.shape[1:])
    score_BKGTS = jnp.where(sees_BTS[:, None, None], score_BKGTS, NEVER)
    prob_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(pairs[0][1].dtype)
    prob_BKfS = prob_BKGTS.reshape(score_BKfS.shape)
    out_BKfH, begin = 0, 0
    for _, v_BKSH in pairs:
        end = begin + v_BKSH.shape[2]
        out_BKfH += jnp.einsum("BKfS,BKSH->BKfH", prob_BKfS[..., begin:end], v_BKSH)
        begin = end
    out_BKGTH = out_BKfH.reshape(B, K, N // K, T, H)
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(B, T, N, H)


def paged_attention(q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH):
    """Returns the attention of each row's window: [B, W, N, H] in q's dtype.

    A query sees the positions before `start` in its row's pages, and all of the window's
    own keys `k`, `v`. pages: (k, v), each [L, P, O, K, H]; position s of row b is slot
    s % O of page table[b, s // O] in `layer`.
    """
    B, W = q_BWNH.shape[:2]
    cached = gathered(pages, layer, table_BA)
    before_BS = jnp.arange(cached[0].shape[1])[None] < start_B[:, None]
    sees_BS = jnp.concatenate([before_BS, jnp.ones((B, W), bool)], axis=1)
    sees_BWS = jnp.broadcast_to(sees_BS[:, None], (B, W, sees_BS.shape[1]))
    return attend(q_BWNH, [cached, (k_BWKH, v_BWKH)], sees_BWS)


def gathered(pages, layer, table_BA):
    """Returns the keys and values of rows' pages, in their order: (k_BSKH, v_BSKH)."""
    B = len(table_BA)
    return tuple(
        x_LPOKH[layer, table_BA].reshape(B, -1, *x_LPOKH.shape[3:]) for x_LPOKH in pages
    )


def cache_update(pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH):
    """Returns `pages` with the windows' keys and values at `start`, in rows where `keep`.

    Two rows that keep never hold the same page at the same positions.
    """
    P, O = pages[0].shape[1:3]
    pos_BW = start_B[:, None] + jnp.arange(k_BWKH.shape[1])[None]
    page_BW = jnp.take_along_axis(table_BA, pos_BW // O, axis=1, mode="clip")
    page_BW = jnp.where(keep_B[:, None], page_BW, P)  # past the end: dropped
    return tuple(
        x_LPOKH.at[layer, page_BW, pos_BW % O].set(
            new_BWKH.astype(x_LPOKH.dtype), mode="drop"
        )
        for x_LPOKH, new_BWKH in zip(pages, (k_BWKH, v_BWKH), strict=True)
    )


def token_logprob(x_RD, head_DV, token_R, forbidden: int):
    """Returns (log-prob of `token`, entropy), each [R], nats, f32.

    Logits are x @ head without the column `forbidden`, which has probability zero.
    """
    logits_RV = jnp.einsum("RD,DV->RV", x_RD, head_DV).astype(jnp.float32)
    logits_RV = logits_RV.at[:, forbidden].set(NEVER)
    logp_RV = jax.nn.log_softmax(logits_RV, axis=-1)
    logp_R = jnp.take_along_axis(logp_RV, token_R[:, None], axis=-1)[:, 0]
    return logp_R, -jnp.sum(jnp.exp(logp_RV) * logp_RV, axis=-1)


def token_draw(x_BWD, head_DV, key_B, temperature_B, forbidden: int):
    """Draws a token for every position; each row by its own key and temperature.

    Returns (token, its log-prob at temperature 1, its probability in the distribution
    drawn from, that distribution's entropy), each [B, W], nats, f32. Temperature 0 takes
    the arg-max, and its distribution is that of temperature 1. A row's noise is
    `jax.random.gumbel(key, [W, V])`.
    """
    logits_BWV = jnp.einsum("BWD,DV->BWV", x_BWD, head_DV).astype(jnp.float32)
    logits_BWV = logits_BWV.at[..., forbidden].set(NEVER)
    greedy_B11 = (temperature_B == 0)[:, None, None]
    scale_B11 = jnp.where(greedy_B11, 1.0, temperature_B[:, None, None])
    tempered_BWV = jax.nn.log_softmax(logits_BWV / scale_B11, axis=-1)
    noise_BWV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BWV.shape[1:]))(
        key_B
    )
    token_BW = jnp.argmax(tempered_BWV + jnp.where(greedy_B11, 0, noise_BWV), axis=-1)
    logp_BW, tempered_BW = (
        jnp.take_along_axis(logp_BWV, token_BW[..., None], axis=-1)[..., 0]
        for logp_BWV in (jax.nn.log_softmax(logits_BWV, axis=-1), tempered_BWV)
    )
    entropy_BW = -jnp.sum(jnp.exp(tempered_BWV) * tempered_BWV, axis=-1)
    return token_BW, logp_BW, jnp.exp(tempered_BW), entropy_BW


def grouped_matmul(x_RD, w_EDF, sizes_E):
    """Returns [R, F]: each row of x times the matrix of its group.

    The first `sizes[0]` rows are of group 0, and so on; rows after the last group get 0.
    """
    end_E = jnp.cumsum(sizes_E)
    group_R = jnp.searchsorted(end_E, jnp.arange(len(x_RD)), side="right")
    y_RF = jnp.einsum("RD,RDF->RF", x_RD, w_EDF[group_R])
    return jnp.where((group_R < len(w_EDF))[:, None], y_RF, 0)
