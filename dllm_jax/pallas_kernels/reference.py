"""The specification of every op in plain jnp: no tiling for speed, no tricks.

Kernels are tested against these; these are tested against independent formulas.

Letters: f queries that share one key head, folded into one dimension; k the most probable
tokens.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

NEVER = -1e30  # finite, so that a query that sees nothing gives a mean and not NaN
BELOW_NEVER = 2 * NEVER  # below every logit, even a forbidden one
ABOVE_NEVER = NEVER / 2  # above a masked score, below every other: exp(NEVER - it) = 0
TIE = 1e-5  # of a score's logarithm: nearer ones are taken for equal, as rounding hides it
LEAST = -87.0  # the log of the smallest probability that is told: that of f32's numbers


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


def paged_attention(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH):
    """Returns the attention of each row's window: [B, W, N, H] in q's dtype.

    A query sees the positions before `start` in its row's pages, and all of the window's
    own keys `k`, `v`. Where there are fewer of these than queries they belong to the last
    queries; those before them see the pages alone. pages: (k, v), each [L, P, O, K, H];
    position s of row b is slot s % O of page table[b, s // O] in `layer`.
    """
    B, W = q_BWNH.shape[:2]
    cached, own = gathered(pages, layer, table_BA), k_BQKH.shape[1]
    before_BS = jnp.arange(cached[0].shape[1])[None] < start_B[:, None]
    before_BWS = jnp.broadcast_to(before_BS[:, None], (B, W, before_BS.shape[1]))
    last_W = jnp.arange(W) >= W - own
    own_BWS = jnp.broadcast_to(last_W[None, :, None], (B, W, own))
    sees_BWS = jnp.concatenate([before_BWS, own_BWS], axis=2)
    return attend(q_BWNH, [cached, (k_BQKH, v_BQKH)], sees_BWS)


def gathered(pages, layer, table_BA):
    """Returns the keys and values of rows' pages, in their order: (k_BSKH, v_BSKH)."""
    B = len(table_BA)
    return tuple(
        x_LPOKH[layer, table_BA].reshape(B, -1, *x_LPOKH.shape[3:]) for x_LPOKH in pages
    )


def cached_at(pages, layer, table_BA, pos_BW):
    """Returns the keys and values of rows' positions in their pages: [B, W, K, H] each.

    pages, layer, table_BA: as of `paged_attention`.
    """
    O = pages[0].shape[2]
    page_BW = jnp.take_along_axis(table_BA, pos_BW // O, axis=1, mode="clip")
    return tuple(x_LPOKH[layer, page_BW, pos_BW % O] for x_LPOKH in pages)


def cache_update(pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH):
    """Returns `pages` with the windows' keys and values at `start`, in rows where `keep`.

    Two rows that keep never hold the same page at the same positions.
    """
    P, O = pages[0].shape[1:3]
    pos_BW = start_B[:, None] + jnp.arange(k_BWKH.shape[1])[None]
    page_BW = jnp.take_along_axis(table_BA, pos_BW // O, axis=1, mode="clip")
    # Past the end, where all is dropped, each row at a page of its own: of places that are
    # all different a GPU writes several numbers at once.
    page_BW = jnp.where(keep_B[:, None], page_BW, P + jnp.arange(len(keep_B))[:, None])
    return tuple(
        x_LPOKH.at[layer, page_BW, pos_BW % O].set(
            new_BWKH.astype(x_LPOKH.dtype), mode="drop", unique_indices=True
        )
        for x_LPOKH, new_BWKH in zip(pages, (k_BWKH, v_BWKH), strict=True)
    )


@jax.custom_vjp
def logits(x_RD, head_DV):
    """Returns x @ head [..., V], f32 also where operands are bf16.

    Rounded to bf16, a logit between 16 and 32 would be wrong by up to 0.06. Gradients are
    products in the operands' type, as those of all other weights are.
    """
    kept = {"preferred_element_type": jnp.float32}
    return jnp.einsum("...D,DV->...V", x_RD, head_DV, **kept)


def logits_forward(x_RD, head_DV):
    return logits(x_RD, head_DV), (x_RD, head_DV)


def logits_backward(operands, dlogits_RV):
    x_RD, head_DV = operands
    dlogits_RV = dlogits_RV.astype(x_RD.dtype)
    dx_RD = jnp.einsum("...V,DV->...D", dlogits_RV, head_DV)
    return dx_RD, jnp.einsum("...D,...V->DV", x_RD, dlogits_RV)


logits.defvjp(logits_forward, logits_backward)


def token_logprob(x_RD, head_DV, token_R, forbidden: int):
    """Returns (log-prob of `token`, entropy), each [R], nats, f32.

    Logits are x @ head without the column `forbidden`, which has probability zero.
    """
    logits_RV = logits(x_RD, head_DV)
    logits_RV = logits_RV.at[:, forbidden].set(NEVER)
    logp_RV = jax.nn.log_softmax(logits_RV, axis=-1)
    logp_R = jnp.take_along_axis(logp_RV, token_R[:, None], axis=-1)[:, 0]
    return logp_R, -jnp.sum(jnp.exp(logp_RV) * logp_RV, axis=-1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a sampler draws from, and which draws it throws away; hashable.

    A draw x has a score, its probability in the distribution drawn from, and a sureness,
    its probability in the model's own distribution, or where `tempered` the score. Those
    of `pad_id` are divided by `pad_penalty`.
    """

    temperature: float = 1.0
    top_k: int = 0  # as in `keep`
    top_p: float = 1.0
    top_p_first: bool = False
    threshold: float = math.inf  # what is surer is taken; inf: no sureness is enough
    tempered: bool = False
    pad_id: int = -1
    pad_penalty: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether it draws from the model's own distribution and weighs all tokens alike."""
        filters = (self.temperature, self.top_k, self.top_p, self.pad_penalty)
        return filters == (1.0, 0, 1.0, 1.0)

    @property
    def log_threshold(self) -> float:
        """The log of the largest sureness that is not enough."""
        return math.log(self.threshold) + TIE if self.threshold > 0 else -math.inf


def selection(x_RD, head_DV, token_R, border_R, rule: Rule, forbidden: int):
    """Returns (log-prob of what was done, entropy, tokens ahead), each [R], f32, nats.

    A row is a masked position of which a token was drawn. Where it was taken, border is
    inf, and done was this token. Where it was thrown away, it was one of those that are
    not sure enough and whose score's log is at most `border`, whichever: done was one of
    them, and the probability is their sum. Of probabilities below exp(LEAST) that is told,
    without a gradient.

    The entropy is that of the distribution drawn from. Ahead is the number of tokens that
    would have been taken, or of a taken one whether it is sure enough: where it changes,
    a token has crossed the border.
    """
    logits_RV = logits(x_RD, head_DV)
    logits_RV = logits_RV.at[:, forbidden].set(NEVER)
    kept_RV = keep(
        logits_RV / rule.temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        top_p_first=rule.top_p_first,
    )
    kept_RV = jax.nn.log_softmax(kept_RV, axis=-1)
    own_RV = kept_RV if rule.tempered else jax.nn.log_softmax(logits_RV, axis=-1)
    is_pad_1V = (jnp.arange(logits_RV.shape[1]) == rule.pad_id)[None]
    lower_1V = jnp.where(is_pad_1V, math.log(rule.pad_penalty), 0.0)
    sure_RV = own_RV - lower_1V > rule.log_threshold
    behind_RV = ~sure_RV & (kept_RV - lower_1V <= border_R[:, None])
    prob_RV = jnp.exp(kept_RV)
    mass_R = jnp.sum(jnp.where(behind_RV, prob_RV, 0.0), axis=-1)
    mass_R = jnp.log(jnp.maximum(mass_R, math.exp(LEAST)))

    taken_R, token_R1 = jnp.isinf(border_R), token_R[:, None]
    token_logp_R = jnp.take_along_axis(kept_RV, token_R1, axis=-1)[:, 0]
    logp_R = jnp.where(taken_R, jnp.maximum(token_logp_R, LEAST), mass_R)
    sure_R = jnp.take_along_axis(sure_RV, token_R1, axis=-1)[:, 0]
    ahead_R = jnp.where(taken_R, sure_R, jnp.sum(~behind_RV, axis=-1))
    held_RV = jnp.where(prob_RV > 0, kept_RV, 0.0)  # what was cut adds nothing
    return logp_R, -jnp.sum(prob_RV * held_RV, axis=-1), ahead_R.astype(jnp.float32)


def keep(logits_V, *, top_k: int, top_p: float, top_p_first: bool = False):
    """Returns logits, in their last dimension, with all but the kept tokens at -inf.

    top_k keeps the k largest (0: all); top_p then keeps the fewest most probable tokens
    whose renormalised probabilities reach p (1: all). With top_p_first their probabilities
    among all tokens are to reach p, and of these the k largest are kept. Tokens that tie
    with the k-th stay in; of those that tie at the border of p, the fewest do, from the
    left.
    """
    every_V = jax.lax.stop_gradient(logits_V)
    best_k, share_k = every_V, 1.0  # where no k is set, of all
    if top_k:
        best_k, _ = jax.lax.top_k(best_k, min(top_k, logits_V.shape[-1]))
        kth_1 = best_k[..., -1:]
        share_k = jnp.where(  # of all that tie with the k-th, which may be more
            best_k == kth_1,
            jnp.sum(logits_V == kth_1, axis=-1, keepdims=True)
            / jnp.sum(best_k == kth_1, axis=-1, keepdims=True),
            1.0,
        )
        logits_V = jnp.where(logits_V >= kth_1, logits_V, -jnp.inf)
    if top_p < 1:
        largest_1 = jnp.max(best_k, axis=-1, keepdims=True)
        mass_k = share_k * jnp.exp(best_k - largest_1)
        # Where top_p comes first, all that top_k leaves may not be enough: then all stay.
        whole_V = jnp.exp(every_V - largest_1) if top_p_first else mass_k
        enough_1 = top_p * jnp.sum(whole_V, axis=-1, keepdims=True)
        least_1 = least(best_k, mass_k, enough_1)
        above_V, tied_V = logits_V > least_1, logits_V == least_1
        # A token stays while the mass before it has not reached p: never none.
        lacks_1 = enough_1 - jnp.sum(
            jnp.where(best_k > least_1, mass_k, 0.0), axis=-1, keepdims=True
        )
        room_1 = jnp.ceil(lacks_1 / jnp.exp(least_1 - largest_1))
        kept_V = above_V | (tied_V & (jnp.cumsum(tied_V, axis=-1) <= room_1))
        logits_V = jnp.where(kept_V, logits_V, -jnp.inf)
    return logits_V


def least(value_V, mass_V, enough_1):
    """Returns the least value of which all that are larger have less mass than enough.

    Two binary digits at a time, of numbers that are ordered as values are: nothing is
    sorted.
    """
    bits_V = jax.lax.bitcast_convert_type(value_V, jnp.uint32)
    order_V = jnp.where(bits_V >> 31, ~bits_V, bits_V | jnp.uint32(2**31))

    def digit(i, known_1):
        place = 30 - 2 * i.astype(jnp.uint32)
        enough = 0
        for x in (1, 2, 3):
            others_V = order_V >= known_1 + (jnp.uint32(x) << place)
            mass_1 = jnp.sum(jnp.where(others_V, mass_V, 0.0), axis=-1, keepdims=True)
            enough += (mass_1 >= enough_1).astype(jnp.uint32)
        return known_1 + (enough << place)

    found_1 = jax.lax.fori_loop(0, 16, digit, jnp.zeros_like(order_V[..., :1]))
    found_V = jnp.where(order_V == found_1, value_V, -jnp.inf)
    return jnp.max(found_V, axis=-1, keepdims=True)


def token_draw(x_BWD, head_DV, key_B, temperature_B, forbidden: int):
    """Draws a token for every position; each row by its own key and temperature.

    Returns (token, its log-prob at temperature 1, its probability in the distribution
    drawn from, that distribution's entropy), each [B, W], nats, f32. Temperature 0 takes
    the arg-max, and its distribution is that of temperature 1. A row's noise is
    `jax.random.gumbel(key, [W, V])`.
    """
    logits_BWV = logits(x_BWD, head_DV)
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
