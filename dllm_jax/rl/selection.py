"""The likelihood of what was sampled, where draws were thrown away.

A step draws a token for every masked position and takes the surest of them, S. Where it is
the draw that makes a position sure, unlikely draws are filtered out: those that stay are
no draws of q, the distribution drawn from, and their log-probs do not add up to the
log-likelihood of anything. The step's probability is

    prod of q_i(x_i) for i in S  x  prod of F_j(b) for all other masked j,

F_j(b) the mass of the tokens that j may have drawn and was left with: those not surer than
the threshold, whose score ranks behind the border b, the n-th best score of S, n the share
of the schedule. (Let N be the n best of all that was drawn. N lies in S, so they are the n
best of S; and that they are follows from S's draws and from each other draw ranking behind
the last of them. So the draws of S and of the others are independent, given S.) Scores that
tie rank from the left. Nothing else is known of what was thrown away: its F_j is a sum over
the vocabulary, and the border is in the trace.

The probability is piecewise smooth: a token that crosses a border moves its whole mass. At
the weights that sampled its derivative is exact almost everywhere, and has the mean zero;
after further updates on the same rollouts it is a surrogate, with the recorded borders.

A *unit* is a step: its seats are those of the taken tokens and of what was thrown away, and
its *lead* is the seat of its first taken token, where its log-prob stands.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.pallas_kernels.reference import TIE, Rule
from dllm_jax.sampling import policy
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import GIVEN
from dllm_jax.sampling.strategy import STRATEGIES


@dataclasses.dataclass(frozen=True)
class Selection:
    """Facts of a sampler that decide the probability of its steps; hashable."""

    rule: Rule
    skips: bool  # what was thrown away counts: SamplerConfig.filters_draws
    schedule: tuple[int, ...]  # SamplerConfig.schedule


def of(sampler: SamplerConfig, model: ModelConfig) -> Selection:
    """Returns the Selection of a sampler, whose block is known, and a model."""
    sure = STRATEGIES[sampler.strategy].reads_sure and sampler.filters_draws
    rule = Rule(
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        top_p_first=sampler.top_p_first,
        pad_id=model.pad_id if sampler.pad_penalty > 1 else -1,
        pad_penalty=sampler.pad_penalty,
    )
    if sure:
        bound, in_nats = sampler.threshold, sampler.target == "log_confidence"
        rule = dataclasses.replace(
            rule,
            threshold=math.exp(bound) if in_nats else bound,
            tempered=sampler.tempered_threshold,
        )
    return Selection(rule, sampler.filters_draws, sampler.schedule)


def refused(sampler: SamplerConfig, attention: str) -> str:
    """Returns why a sampler's steps have no probability that can be told; "": they have.

    attention: ModelConfig.attention.
    """
    unseen = sampler.pad_penalty > 1 and sampler.target != "confidence"
    stale = policy.choose(sampler, attention).stale
    reasons = {
        "sampler.answers='image' takes a code's rank for its draw: leave it 'text'": (
            sampler.answers == "image"
        ),
        f"sampler.cache={sampler.cache!r} has stale keys: set it to 'none'": stale,
        "sampler.int8=True rounds what ranks are of: set it to False": sampler.int8,
        "sampler.temperature=0 has no density: set it above 0": sampler.temperature
        == 0,
        "sampler.untempered_ranks=True ranks by what the trace does not tell: set it to "
        "False": sampler.untempered_ranks and sampler.filters_draws,
        f"sampler.rank_temperature={sampler.rank_temperature} has no closed form: set it "
        "to 0": sampler.rank_temperature > 0,
        "sampler.before_stop=True leaves out places that the trace does not tell: set it to "
        "False": sampler.before_stop and sampler.filters_draws,
        f"with sampler.target={sampler.target!r} and sampler.pad_penalty > 1 nothing "
        "records the border: set sampler.pad_penalty=1": unseen
        and sampler.filters_draws,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# ---- On the host ---------------------------------------------------------------------


def borders(trace, layout) -> tuple[np.ndarray, np.ndarray]:
    """Returns (border_nT, place_nT): of each unmasked token its step's border, and where.

    The border is the log of a score; its place is the position that has it.
    trace: a host Trace; layout: a Layout with a Selection.
    """
    border_nT = np.zeros(trace.step_BT.shape, np.float32)
    place_nT = np.zeros(trace.step_BT.shape, np.int32)
    rule, schedule = layout.selection.rule, np.asarray(layout.selection.schedule)
    for i, step_T in enumerate(trace.step_BT):
        pos = np.flatnonzero((step_T != GIVEN) & (step_T != FAR))
        conf = np.maximum(trace.conf_BT[i, pos], np.finfo(np.float32).tiny)
        score = np.log(conf)
        is_pad = trace.tokens_BT[i, pos] == rule.pad_id
        score = np.where(is_pad, score - np.log(rule.pad_penalty), score)
        order = np.lexsort((pos, -score, step_T[pos]))  # by step, the best first
        _, first, counts = np.unique(
            step_T[pos][order], return_index=True, return_counts=True
        )
        block = layout.turns(len(step_T), int(trace.prompt_len_B[i]))[pos[order[first]]]
        rank = np.arange(len(block)) - np.searchsorted(block, block)
        share = schedule[np.minimum(rank, len(schedule) - 1)]
        nth = order[first + np.minimum(share, counts) - 1]
        border_nT[i, pos[order]] = np.repeat(score[nth], counts)
        place_nT[i, pos[order]] = np.repeat(pos[nth], counts)
    return border_nT, place_nT


def limits(border, place, pos) -> np.ndarray:
    """Returns the largest log-score with which positions rank behind a border.

    Who ties with it ranks before it on its left, and behind it on its right.
    """
    return np.where(pos > place, border + TIE, border - TIE).astype(np.float32)


# ---- On the device -------------------------------------------------------------------


def at_lead(x_BU, unit_BU):
    """Returns the sums of each unit's seats at its lead, and 0 elsewhere.

    unit_BU: the seat of each seat's lead; -1: of none. Both may have more leading axes.
    """
    U = unit_BU.shape[-1]
    real_BU = unit_BU >= 0

    def in_row(x_U, lead_U):
        return jnp.zeros(U, x_U.dtype).at[lead_U].add(x_U, mode="drop")

    # Row by row: indices that also name the row would tie the rows of a mesh together.
    for _ in range(unit_BU.ndim - 1):
        in_row = jax.vmap(in_row)
    return in_row(jnp.where(real_BU, x_BU, 0), jnp.where(real_BU, unit_BU, U))


def outputs(logp_BU, entropy_BU, ahead_BU, unit_BU, border_BU) -> dict:
    """Returns what `learner.outputs` tells of units and of their seats, all [B, U].

    logp: of steps, at their leads; entropy: the mean of a step's taken tokens, there;
    token_logp, token_entropy: of seats; ahead: see reference.selection.
    """
    taken_BU = jnp.isinf(border_BU) & (unit_BU >= 0)
    tokens_BU = at_lead(taken_BU.astype(jnp.float32), unit_BU)
    total_BU = at_lead(jnp.where(taken_BU, entropy_BU, 0.0), unit_BU)
    return {
        "logp": at_lead(logp_BU, unit_BU),
        "entropy": total_BU / jnp.maximum(tokens_BU, 1),
        "token_logp": logp_BU,
        "token_entropy": entropy_BU,
        "ahead": ahead_BU,
    }


def by_unit(batch):
    """Returns a TrainBatch whose losses are of steps: all stands at the leads.

    A step's advantage is the weighted mean of its tokens': that of step-level GAE.
    """
    weight_BU = at_lead(batch.weight_BU, batch.unit_BU)
    adv_BU = at_lead(batch.weight_BU * batch.adv_BU, batch.unit_BU)
    return batch.replace(
        weight_BU=weight_BU, adv_BU=adv_BU / jnp.where(weight_BU > 0, weight_BU, 1)
    )


def crossed(out: dict, batch):
    """Returns in how many units a token has crossed a border since it was scored.

    Told by how many tokens lie before it: of two that cross in opposite directions nothing
    is seen.
    """
    if batch.ahead_BU is None:
        return jnp.zeros(())
    moved_BU = (out["ahead"] != batch.ahead_BU).astype(jnp.float32)
    return jnp.sum(at_lead(moved_BU, batch.unit_BU) > 0).astype(jnp.float32)
