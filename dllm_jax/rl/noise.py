"""Noise: which tokens are masked together, and which of them are supervised.

Every kind says it with one array, a step map: in the round of step t all that was
unmasked at t or later is masked, what came earlier is shown, and the tokens of t are
supervised. The trace of sampling is one itself; random masks are maps of few steps.
Host numpy.

`cfg` is a NoiseConfig throughout; rl/config.py imports this module for the names of the
kinds.

Letters: o tokens of an answer, p steps of its scopes.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import numpy as np

from dllm_jax.models.mask import FAR
from dllm_jax.rl import selection
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling.state import GIVEN


@flax.struct.dataclass
class Noise:
    """Step maps of n rows, and what is supervised in each."""

    step_nT: np.ndarray
    # How many tokens each one stands for: 1 / the probability that it is masked. 0: it
    # is not supervised.
    share_nT: np.ndarray
    # Where some rounds were picked: what their tokens' losses are multiplied with.
    weight_nT: np.ndarray | None = None
    # Of the trace as it is, where what a step threw away counts: selection.borders.
    border_nT: np.ndarray | None = None
    place_nT: np.ndarray | None = None


class StepMap(NamedTuple):
    """One row of noise."""

    step_T: np.ndarray
    share_T: np.ndarray


def unmasked(step) -> np.ndarray:
    """Returns where some step unmasked a token: neither given nor masked for good."""
    return (step != GIVEN) & (step != FAR)


def of_steps(step_nT) -> Noise:
    """Returns the step maps as they are: everything that some step unmasked counts."""
    return Noise(step_nT=step_nT, share_nT=unmasked(step_nT).astype(np.float32))


def as_it_is(step_T) -> StepMap:
    """Returns one step map as it is: everything that some step unmasked counts."""
    return StepMap(step_T, unmasked(step_T).astype(np.float32))


# ---- The kinds -----------------------------------------------------------------------


def shrink(step_T, scope_T, size: int):
    """Merges the neighbouring steps of a scope, `size` at a time, into the largest.

    What was never unmasked is no step: a token merged with it would be lost.
    """
    open_T = unmasked(step_T)
    step_o = step_T[open_T].astype(np.int64)
    turns = step_o.max(initial=0) + 1
    # The steps of all scopes, a scope after the other.
    pair_p, which_o = np.unique(scope_T[open_T] * turns + step_o, return_inverse=True)
    scope_p, step_p = np.divmod(pair_p, turns)
    first_p = np.searchsorted(scope_p, scope_p)
    end_p = np.searchsorted(scope_p, scope_p, side="right")
    place_p = np.arange(len(pair_p)) - first_p
    last_p = np.minimum(first_p + (place_p // size + 1) * size, end_p) - 1
    out_T = step_T.copy()
    out_T[open_T] = step_p[last_p][which_o]
    return out_T


def traced(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """The steps of sampling (TraceRL, arXiv 2509.06949, section 4.1), shrunk."""
    step_T = shrink(step_T, scope_T, cfg.shrink) if cfg.shrink > 1 else step_T
    return [as_it_is(step_T)]


def coins(step_T, scope_T, rng: np.random.Generator, cfg):
    """Returns (masked_T, rate_T): each token is masked with probability `rate`.

    Each token's rate is its own, or a scope's tokens share one (NoiseConfig.rate).
    """
    if cfg.rate == "token":
        rate_T = rng.uniform(cfg.lower, cfg.upper, step_T.shape)
    else:
        rate_T = rng.uniform(cfg.lower, cfg.upper, scope_T.max() + 1)[scope_T]
    return rng.random(step_T.shape) < rate_T, rate_T


def one_round(step_T, masked_T, rate_T) -> StepMap:
    """Returns one round with these tokens masked, beside what was never unmasked."""
    open_T = unmasked(step_T)
    on_T = masked_T & open_T
    return StepMap(
        step_T=np.where(open_T, on_T, step_T).astype(step_T.dtype),
        share_T=(on_T / np.where(on_T, rate_T, 1)).astype(np.float32),
    )


def bernoulli(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """Masks at random what is not given (LLaDA, arXiv 2502.09992, Eq. 3)."""
    return [one_round(step_T, *coins(step_T, scope_T, rng, cfg))]


def complement(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """A mask, and all that it leaves: coupled-GRPO (arXiv 2506.20639, section 4)."""
    masked_T, rate_T = coins(step_T, scope_T, rng, cfg)
    return [
        one_round(step_T, masked_T, rate_T),
        one_round(step_T, ~masked_T, 1 - rate_T),
    ]


def semi_ar(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """Masks at random in one block after the other, with all later blocks masked.

    Where the layout hides later blocks anyway, this is `bernoulli`.
    """
    drawn = one_round(step_T, *coins(step_T, block_T, rng, cfg))
    # Of block j what is shown has step 2j + 1 and what is masked 2j + 2: its round
    # masks the later blocks, whose steps are later.
    turn_T = 2 * block_T + np.where(drawn.share_T > 0, 2, 1)
    step_T = np.where(unmasked(step_T), turn_T, step_T).astype(np.int32)
    return [StepMap(step_T, drawn.share_T)]


def subset(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """Masks l of the n answer tokens of each scope, l uniform in 1 .. n, as step 1.

    With weight n / l for each (objective.aggregate "elbo") the log-probs sum to an
    unbiased estimate of the evidence lower bound (LLaDA, arXiv 2502.09992, Eq. 6), a
    scope after the other. What follows the answer stays masked.
    """
    return [
        masked_of_scopes(
            step_T,
            answer_T,
            scope_T,
            rng,
            lambda size: (int(rng.integers(size)) + 1, 1.0),
        )
    ]


def quadrature(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """As `subset`, but l follows from the draw's node of a quadrature over the mask rate.

    Gauss-Legendre's of `cfg.draws` points on (0, 1): GDPO's deterministic levels (arXiv
    2510.08554), whose estimate has the variance of the masks alone. A node t masks
    l = n t tokens, rounded at random so that its mean is n t (and 1 at least); they weigh
    m w n / l, with m points and t's weight w.
    """
    nodes, weights = np.polynomial.legendre.leggauss(cfg.draws)
    level, weight = (nodes[draw] + 1) / 2, weights[draw] / 2 * cfg.draws

    def chosen(size: int):
        count = int(np.floor(level * size + rng.random()))
        return min(max(count, 1), size), weight

    return [masked_of_scopes(step_T, answer_T, scope_T, rng, chosen)]


def masked_of_scopes(step_T, answer_T, scope_T, rng, chosen) -> StepMap:
    """Returns one round that masks, of each scope's n answer tokens, l at random.

    chosen: n -> (l, weight); each stands for weight x n / l tokens.
    """
    out_T = np.where(answer_T | (step_T == GIVEN), GIVEN, FAR).astype(step_T.dtype)
    share_T = np.zeros(step_T.shape, np.float32)
    pos_o = np.flatnonzero(answer_T)
    pos_o = pos_o[np.argsort(scope_T[pos_o], kind="stable")]
    ends = np.flatnonzero(np.diff(scope_T[pos_o])) + 1
    for scope in np.split(pos_o, ends) if len(pos_o) else ():
        inside = rng.permutation(scope)
        count, weight = chosen(len(inside))
        out_T[inside[:count]], share_T[inside[:count]] = 1, weight * len(inside) / count
    return StepMap(out_T, share_T)


def next_token(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """Nothing is masked, all is supervised: next-token prediction."""
    return [as_it_is(step_T)]


def end(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """Masks an answer's last token, and shows all before it: what a reward model judges."""
    out_T = np.where(answer_T | (step_T == GIVEN), GIVEN, FAR).astype(step_T.dtype)
    share_T = np.zeros(step_T.shape, np.float32)
    last = np.flatnonzero(answer_T)[-1:]  # none, where there is no answer
    out_T[last], share_T[last] = 1, 1.0
    return [StepMap(out_T, share_T)]


def left_to_right(step_T, answer_T, scope_T, block_T, rng, cfg, draw=0):
    """One token a round, from left to right: JustGRPO's order (arXiv 2601.15165).

    Each is predicted with those before it shown and those behind it masked. The log-probs
    of all rounds add up to the log-likelihood of the answer sampled in this order.
    """
    out_T = np.where(answer_T | (step_T == GIVEN), GIVEN, FAR).astype(step_T.dtype)
    out_T[answer_T] = 1 + np.arange(np.count_nonzero(answer_T))
    return [StepMap(out_T, answer_T.astype(np.float32))]


# ---- How many rounds a scope has at most, in all rows of noise: see `rounds` ---------


def rounds_of_steps(cfg, layout: Layout, answer: int, steps: int) -> int:
    """A round for `shrink` neighbouring steps, of which a token has but one.

    Tokens behind the stop have steps of their own among which the answer's may lie, so
    an answer of few steps can reach into every round of its scope.
    """
    rounds = -(-min(layout.most_steps(answer), steps) // cfg.shrink)
    return min(layout.largest_scope(answer), rounds)


def round_of_token(cfg, layout: Layout, answer: int, steps: int) -> int:
    """One for each token of the scope."""
    return min(layout.largest_scope(answer), answer)


def round_of_row(cfg, layout: Layout, answer: int, steps: int) -> int:
    """One in every row of noise."""
    return cfg.copies


def rounds_of_blocks(cfg, layout: Layout, answer: int, steps: int) -> int:
    """One for every block of the scope, in every row of noise."""
    if layout.facts.by_block:
        return cfg.copies
    return -(-answer // layout.block) * cfg.copies


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of KINDS: how it draws its step maps, and facts that others read."""

    # maps(step_T, answer_T, scope_T, block_T, rng, cfg, draw) -> a draw: `rows` StepMaps.
    #   step_T: of a canvas: GIVEN, the step that unmasked a token, FAR where none did
    #   answer_T: where its answer is; shares count there alone
    #   scope_T, block_T: Layout.scope, Layout.numbers
    #   rng: a numpy Generator, if `random`; draw: which one it is, from 0
    maps: Callable
    rounds: Callable  # (cfg, layout, answer, steps) -> int: see the function `rounds`
    rows: int = 1  # StepMaps of a draw
    random: bool = True  # draws differ, so that a trajectory may have several
    masks: bool = True  # False: it hides nothing; only causal attention learns then
    whole: bool = False  # the answer's length is no secret: its canvas ends with it
    ordered: bool = False  # its rounds are an order, of which some may be picked
    coins: bool = False  # a probability between cfg.lower and cfg.upper masks
    bounds: bool = False  # its shares make log-probs an estimate of the evidence bound


KINDS = {
    "trace": Kind(traced, rounds_of_steps, random=False, ordered=True),
    "left_to_right": Kind(left_to_right, round_of_token, random=False, ordered=True),
    "bernoulli": Kind(bernoulli, round_of_row, coins=True),
    "complement": Kind(complement, round_of_row, rows=2, coins=True),
    "semi_ar": Kind(semi_ar, rounds_of_blocks, coins=True),
    "subset": Kind(subset, round_of_row, bounds=True),
    "quadrature": Kind(quadrature, round_of_row, bounds=True),
    "end": Kind(end, round_of_row, random=False, whole=True),
    "ar": Kind(next_token, round_of_row, random=False, masks=False),
}


# ---- For whole traces ----------------------------------------------------------------


def answers(trace) -> np.ndarray:
    """Returns where [n, T] each trajectory's answer is: the tokens to supervise."""
    pos_1T = np.arange(trace.tokens_BT.shape[1])[None]
    first_n1 = trace.prompt_len_B[:, None]
    return (pos_1T >= first_n1) & (pos_1T < first_n1 + trace.len_B[:, None])


def taught(trace, whole: bool) -> np.ndarray:
    """Returns which tokens [n, T] noise may supervise: the answers'.

    whole: or all that was unmasked, also behind the stop token, in rows with an answer.
    """
    if not whole:
        return answers(trace)
    return unmasked(trace.step_BT) & (trace.len_B > 0)[:, None]


def noised(trace, cfg, layout: Layout, rng=None) -> Noise:
    """Returns the noise of a host trace: `cfg.copies` rows of each trajectory in turn.

    rng: a numpy Generator, for random kinds.
    """
    maps, T = [], trace.tokens_BT.shape[1]
    kind, answer_nT = KINDS[cfg.kind], answers(trace)
    for i, prompt_len in enumerate(trace.prompt_len_B):
        # What follows an answer is masked, unless a sampler says when it was unmasked; a
        # tail is given.
        step_T, answer_T = trace.step_BT[i], answer_nT[i]
        after_T = (np.arange(T) >= prompt_len) & ~answer_T & (step_T == GIVEN)
        first = prompt_len + layout.longest
        after_T[first : first + layout.tail] = False
        step_T = np.where(after_T, FAR, step_T)
        scope_T, block_T = layout.scope(T, prompt_len), layout.numbers(T, prompt_len)
        for draw in range(cfg.draws):
            maps += kind.maps(step_T, answer_T, scope_T, block_T, rng, cfg, draw)
    noise = Noise(
        step_nT=np.stack([drawn.step_T for drawn in maps]),
        share_nT=np.stack([drawn.share_T for drawn in maps]),
    )
    if cfg.rounds:
        noise = picked(noise, trace, answer_nT, cfg, layout, rng)
    if layout.selection is None:
        return noise
    border_nT, place_nT = selection.borders(trace, layout)
    return noise.replace(border_nT=border_nT, place_nT=place_nT)


def picked(noise: Noise, trace, answer_nT, cfg, layout: Layout, rng) -> Noise:
    """Returns the noise with `cfg.rounds` rounds of each row left, whose weights make up.

    uniform: k of R rounds, each with weight R / k: AGRPO (arXiv 2510.04019). surprise: k
    draws with replacement, a round's probability p being its share of the mean surprisal
    -log p of its tokens, whose expectation is their entropy, with weight c / (k p) for c
    draws: EGSPO's preference (arXiv 2603.12554), without its bias. A row of no more than
    k rounds keeps them all. trace: with the tokens' log-probs, where they are asked for.
    """
    share_nT, weight_nT = noise.share_nT.copy(), np.zeros_like(noise.share_nT)
    for i, step_T in enumerate(noise.step_nT):
        scope_T = layout.scope(len(step_T), int(trace.prompt_len_B[i]))
        pos = np.flatnonzero(answer_nT[i] & (share_nT[i] > 0))
        places = np.stack([scope_T[pos], step_T[pos]])
        found, round_of = np.unique(places, axis=1, return_inverse=True)
        count, round_of = found.shape[1], round_of.reshape(-1)
        weight = np.ones(count)
        if count > cfg.rounds:
            surprisal = np.zeros(count)
            if cfg.pick == "surprise":
                np.add.at(surprisal, round_of, -trace.logp_BT[i, pos])
                surprisal /= np.bincount(round_of)
            weight = PICKS[cfg.pick](surprisal, cfg.rounds, rng)
        weight_nT[i, pos] = weight[round_of]
    return noise.replace(
        share_nT=np.where(weight_nT > 0, share_nT, 0), weight_nT=weight_nT
    )


def uniformly(surprisal, k: int, rng) -> np.ndarray:
    """Returns the weights of rounds, of which k are picked, none twice."""
    weight = np.zeros(len(surprisal))
    weight[rng.choice(len(weight), k, replace=False)] = len(weight) / k
    return weight


def by_surprise(surprisal, k: int, rng) -> np.ndarray:
    """Returns the weights of rounds, of which k are drawn by how much they surprise."""
    likely = surprisal + 0.1 * surprisal.mean() + 1e-6  # no weight becomes very large
    likely = likely / likely.sum()
    return rng.multinomial(k, likely) / (k * likely)


PICKS = {"uniform": uniformly, "surprise": by_surprise}


def rounds(cfg, layout: Layout, answer: int, steps: int = FAR) -> int:
    """Returns the most rounds that a scope with `answer` tokens can have, of all draws.

    steps: the most that a trajectory has, where its trace is given.
    """
    return KINDS[cfg.kind].rounds(cfg, layout, answer, steps)


def check(cfg, layout: Layout):
    """Raises ValueError for noise that a model cannot learn from."""
    kind = KINDS[cfg.kind]
    if cfg.block and not layout.facts.by_block:
        raise ValueError(
            f"noise.block={cfg.block}: a model with attention={layout.attention!r} is "
            "trained on whole answers, not on blocks; set it to 0"
        )
    if kind.ordered and cfg.kind != "trace" and not layout.facts.masks:
        raise ValueError(
            f"noise.kind={cfg.kind!r} masks tokens, but the model's attention is causal; "
            "set noise.kind='ar'"
        )
    if layout.facts.masks and not kind.masks:
        raise ValueError(
            f"noise.kind={cfg.kind!r} trains causal attention, but the export would "
            f"sample with attention={layout.attention!r}; set model.attention='causal' "
            "and model.shift=1"
        )
    if not layout.facts.masks:
        if kind.random:
            raise ValueError(
                f"noise.kind={cfg.kind!r} masks tokens, but the model's attention is "
                "causal; set noise.kind='ar', or adapt the model: configs/sft.py:adapt"
            )
        if layout.shift < 1:
            raise ValueError(
                "noise.kind='ar' predicts the next token, but the model's shift is 0: "
                "a token would be predicted from itself; set model.shift=1"
            )
