"""From what was sampled, or is given, to the batches of a step's updates: host side.

A trajectory has `copies` rows of noise, one after the other, and an [n, T] array here
has a row for each. The batches of an RL step are made in stages, each a function:

    teaching    which rollouts there is something to learn from
    deal        these, shuffled and dealt out to the step's updates, and packed
    scored      log-probs and values of the weights with which the step starts
    advantages  what rewards and values say of every token, or the factors of a bound
    attached    a batch with the arrays that its objective asks for, by name

Examples are packed as they are; pairs of them are scored and attach one array.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import sharding
from dllm_jax.rl import advantage, bounds, noise, rollout
from dllm_jax.rl.config import NETWORKS, NoiseConfig, ObjectiveConfig, RLConfig
from dllm_jax.rl.noise import Noise
from dllm_jax.rl.objectives import OBJECTIVES
from dllm_jax.rl.ridge import Ridge
from dllm_jax.rl.rollout import Rollouts
from dllm_jax.rl.views import Source, TrainBatch
from dllm_jax.sampling.state import Trace

# The optional fields of a TrainBatch that RL attaches, and that DPO does.
RL_FIELDS = ("adv_BU", "old_logp_BU", "ref_logp_BU", "ret_BU", "old_value_BU")
PAIR_FIELDS = ("adv_BU",)


def of_rollouts(
    rollouts: Rollouts,
    rng: np.random.Generator,
    *,
    rl: RLConfig,
    objective: ObjectiveConfig,
    noised: Noise,
    as_sampled: bool,
    params: dict,
    pack: Callable,
    score: Callable,
    mesh,
    note: Callable | None = None,
    critic: Ridge | None = None,
    longest: int = 0,
) -> tuple[dict[str, float], list[TrainBatch]]:
    """Returns (metrics, one complete TrainBatch on the mesh per update) of an RL step.

    rng: shuffles the rollouts; noised: noise.noised of all of them.
    as_sampled: the noise is the trace itself. Only then are tokens scored in the
    context in which they were sampled, and the metrics tell how far the sampler was
    off.
    params: of the networks by name: "policy", and as configured "value", "reference".
    pack: views.pack, bound but for trace, noise and group_n.
    score: learner.score, bound but for params and batch.
    note: told, for people to look at, (keep_n [n], advantages and values [n, T]): those of
    a trajectory's first row of noise.
    critic: with rl.value="trace"; it judges these rollouts, and then learns from them.
    longest: tokens that an answer may have, for rl.truncated="soft".
    There are no batches where rl.filter finds no group that teaches something.
    """
    keep_n = teaching(rollouts, rl)
    metrics = {"groups_kept": len(np.unique(rollouts.group_n[keep_n]))}
    if not keep_n.any():
        return metrics, []
    # Before anything is dealt out: a group's rollouts may end up in several updates.
    relative_n = relative_rewards(rollouts, keep_n, rl, longest)

    # From here on every array has a place for each row of noise.
    copies = len(noised.step_nT) // len(keep_n)
    trajectory_n = np.repeat(np.arange(len(keep_n)), copies)
    trace, group_n = take((rollouts.trace, rollouts.group_n), trajectory_n)
    size = rl.answers_per_update
    rows = dealt_rows(keep_n, rng, updates=rl.updates, copies=copies, size=size)
    deals = [deal(row_n, trace, noised, group_n, pack) for row_n in rows]
    scores = scored(
        deals, noised.step_nT.shape, rl=rl, params=params, score=score, mesh=mesh
    )
    answer_nT = noise.answers(trace) & keep_n[trajectory_n][:, None]
    if critic is not None:
        scores = dataclasses.replace(scores, value_nT=critic.judge(trace, noised))
    adv_nT, ret_nT, adv_metrics = advantages(
        relative_n[trajectory_n], answer_nT, noised, scores.value_nT, rl
    )
    if critic is not None:
        critic.learn(answer_nT & (noised.share_nT > 0), ret_nT)
    if note is not None:
        note((keep_n, adv_nT[::copies], scores.value_nT[::copies]))
    factor_nT = factors(
        adv_nT, scores.logp_nT, answer_nT, noised, objective, draws=copies
    )
    fields = fields_of(scores, ret_nT, factor_nT)
    metrics["packed_fill"] = float(np.mean([dealt.batch.fill for dealt in deals]))
    metrics |= gap_metrics(scores, rl, as_sampled=as_sampled) | adv_metrics
    return metrics, [attached(dealt, fields, mesh) for dealt in deals]


def of_dropped(
    rollouts: Rollouts,
    rng: np.random.Generator,
    *,
    rl: RLConfig,
    noised: Noise,
    params: dict,
    pack: Callable,
    score: Callable,
    mesh,
    longest: int = 0,
) -> list[TrainBatch]:
    """Returns batches of what rl.filter drops, from which a value network alone learns.

    The arguments are those of `of_rollouts`; a trajectory has one row of noise, the trace.
    """
    keep_n = teaching(rollouts, rl)
    rest_n = ~keep_n & ~rollouts.late_n & (rollouts.trace.len_B > 0)
    if not rest_n.any():
        return []
    relative_n = relative_rewards(rollouts, keep_n, rl, longest)
    hands = -(-int(rest_n.sum()) // rl.largest_update)
    deals = [
        deal(row_n, rollouts.trace, noised, rollouts.group_n, pack)
        for row_n in dealt_rows(rest_n, rng, updates=hands, copies=1)
    ]
    value_nT = np.zeros(noised.step_nT.shape, np.float32)
    for dealt in deals:
        placed = sharding.place_rows(dealt.batch, mesh, axis=1)
        told = network_outputs(params, score, "value", placed)
        value_nT[dealt.row_n] = dealt.scatter(told["value"], value_nT.shape[1])
    answer_nT = noise.answers(rollouts.trace) & rest_n[:, None]
    adv_nT, ret_nT, _ = advantages(relative_n, answer_nT, noised, value_nT, rl)
    blank_nT = np.zeros_like(value_nT)
    scores = Scores(blank_nT, value_nT, blank_nT, [], np.array([]))
    fields = fields_of(scores, ret_nT, adv_nT)
    return [attached(dealt, fields, mesh) for dealt in deals]


# ---- The stages ----------------------------------------------------------------------


def teaching(rollouts: Rollouts, rl: RLConfig) -> np.ndarray:
    """Returns which rollouts [n] have an answer, in a group that passes rl.filter.

    An answer that was not judged teaches nothing, and its group is the others. Of the
    groups that pass, the first rl.prompts count: rl.max_prompts may ask for more.
    """
    judged_n = ~rollouts.late_n
    keep_n = np.zeros(len(judged_n), bool)
    keep_n[judged_n] = advantage.kept(
        rollouts.reward_n[judged_n],
        rollout.speed(rollouts.trace)[judged_n],
        rollouts.group_n[judged_n],
        rl.filter,
        rl.min_solved,
        rl.max_solved,
    )
    keep_n &= rollouts.trace.len_B > 0
    return keep_n & np.isin(
        rollouts.group_n, np.unique(rollouts.group_n[keep_n])[: rl.prompts]
    )


def relative_rewards(
    rollouts: Rollouts, keep_n, rl: RLConfig, longest: int = 0
) -> np.ndarray:
    """Returns each rollout's reward [n], relative to those of its group that were judged.

    0 for the others. longest: tokens that an answer may have, for rl.truncated="soft".
    """
    judged_n = ~rollouts.late_n
    reward_n = rollouts.reward_n[judged_n]
    if rl.truncated == "soft":
        reward_n = reward_n - advantage.overlong(
            rollouts.trace.len_B[judged_n],
            longest,
            rl.truncated_tail or -(-longest // 5),
        )
    out_n = np.zeros(len(judged_n), np.float32)
    out_n[judged_n] = advantage.combined(
        reward_n,
        rollout.speed(rollouts.trace)[judged_n],
        rollouts.group_n[judged_n],
        keep_n[judged_n],
        rl.advantage,
        speed=rl.speed,
    )
    return out_n


def dealt_rows(
    keep_n, rng: np.random.Generator, *, updates: int, copies: int, size: int = 0
) -> list[np.ndarray]:
    """Returns the rows of noise of each update: the kept trajectories, shuffled.

    There are fewer than `updates` where fewer trajectories are kept. size: of each update,
    as many as there are of it; what is left over is not used, unless it is all there is.
    0: `updates` decides.
    """
    trajectory_n = rng.permutation(np.flatnonzero(keep_n))
    if size:
        updates = max(len(trajectory_n) // size, 1)
        trajectory_n = trajectory_n[: updates * size]
    hands = np.array_split(trajectory_n, updates)
    return [rows_of(hand_n, copies) for hand_n in hands if len(hand_n)]


@dataclasses.dataclass(frozen=True)
class Deal:
    """What one update is dealt: rows of noise, packed."""

    row_n: np.ndarray  # which rows
    batch: TrainBatch  # on the host, without RL_FIELDS
    source: Source  # where its tokens come from: rows are counted within the deal
    recorded_mBU: np.ndarray  # log-probs of the tokens when they were sampled, nats

    def gap(self, logp_mBU, microbatches: int | None = None) -> np.ndarray:
        """Returns |log-prob - recorded| of each token of the first microbatches."""
        real_mBU = self.source.row_mBU[:microbatches] >= 0
        return np.abs(logp_mBU - self.recorded_mBU)[:microbatches][real_mBU]

    def scatter(self, x_mBU, T: int) -> np.ndarray:
        """Returns the batch's values in their places, [rows of the deal, T]."""
        return self.source.scatter(x_mBU, (len(self.row_n), T))


def deal(row_n, trace: Trace, noised: Noise, group_n, pack: Callable) -> Deal:
    """Returns these rows of noise, packed."""
    dealt_trace, dealt_noise = take((trace, noised), row_n)
    batch, source = pack(dealt_trace, dealt_noise, group_n=group_n[row_n])
    return Deal(row_n, batch, source, source.gather(dealt_trace.logp_BT))


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the networks say of the dealt tokens, and how far the sampler was off.

    0 where nothing is supervised, and where there is no such network.
    """

    logp_nT: np.ndarray  # of the policy, nats
    value_nT: np.ndarray
    ref_nT: np.ndarray  # log-probs of the reference, nats
    gaps: list[np.ndarray]  # |policy - recorded| of tokens, nats: see old_log_probs
    trusted_n: np.ndarray  # of each deal: the record stands for the policy


def scored(
    deals: list[Deal],
    shape: tuple[int, int],
    *,
    rl: RLConfig,
    params: dict,
    score: Callable,
    mesh,
) -> Scores:
    """Returns the Scores of all deals, as arrays of this shape: [rows of noise, T].

    All updates of a step are scored before the first of them changes the weights.
    params, score: see of_rollouts.
    """
    logp_nT, value_nT, ref_nT = (np.zeros(shape, np.float32) for _ in range(3))
    gaps, trusted = [], []
    outputs = functools.partial(network_outputs, params, score)
    for dealt in deals:
        # One batch at a time lies on the mesh beside the networks.
        placed = sharding.place_rows(dealt.batch, mesh, axis=1)
        policy, gap, stands = old_log_probs(dealt, placed, outputs, rl.trusted_gap)
        gaps.append(gap)
        trusted.append(stands)
        logp_nT[dealt.row_n] = dealt.scatter(policy["logp"], shape[1])
        if rl.value in NETWORKS:
            network = policy if rl.value == "head" else outputs("value", placed)
            value_nT[dealt.row_n] = dealt.scatter(network["value"], shape[1])
        if "reference" in params:
            reference = outputs("reference", placed)
            ref_nT[dealt.row_n] = dealt.scatter(reference["logp"], shape[1])
    return Scores(logp_nT, value_nT, ref_nT, gaps, np.array(trusted))


def network_outputs(params: dict, score: Callable, name: str, batch: TrainBatch):
    """Returns a network's outputs on a placed batch, on the host: name -> [m, B, U]."""
    return sharding.fetch(score({name: params[name]}, batch))[name]


def old_log_probs(
    dealt: Deal, placed: TrainBatch, outputs: Callable, trusted_gap: float
) -> tuple[dict[str, np.ndarray], np.ndarray, bool]:
    """Returns (the policy's outputs, its gaps to the record, whether the record stands).

    outputs: network_outputs, bound. With a trusted gap the first microbatch is scored;
    if none of its tokens is off by more, what the sampler recorded stands for the
    policy's log-probs, which are then not scored.
    """
    if trusted_gap > 0:
        first = placed.replace(used=jnp.minimum(placed.used, 1))
        gap = dealt.gap(outputs("policy", first)["logp"], microbatches=1)
        if gap.max() <= trusted_gap:
            return {"logp": dealt.recorded_mBU}, gap, True
    policy = outputs("policy", placed)
    return policy, dealt.gap(policy["logp"]), False


def gap_metrics(scores: Scores, rl: RLConfig, *, as_sampled: bool) -> dict[str, float]:
    """Returns how far the sampler's log-probs are from those that training sees."""
    metrics = {}
    if as_sampled:
        gap = np.concatenate(scores.gaps)
        metrics["logprob_gap_mean"] = float(gap.mean())
        metrics["logprob_gap_max"] = float(gap.max())
    if rl.trusted_gap > 0:
        metrics["updates_trusted"] = float(scores.trusted_n.mean())
    return metrics


def advantages(reward_n, answer_nT, noised: Noise, value_nT, rl: RLConfig):
    """Returns (adv_nT, ret_nT, metrics) of relative rewards.

    reward_n, value_nT: of each row of noise; answer_nT: the kept rollouts' answers.
    Without a value model the advantage of a token is its answer's reward; with one it
    follows from GAE over the steps of the noise.
    """
    seen_nT = answer_nT & (noised.share_nT > 0)
    metrics = {}
    if rl.value == "none":
        ret_nT = adv_nT = np.where(answer_nT, reward_n[:, None], 0.0)
    else:
        ret_nT, adv_nT = advantage.gae(
            advantage.outcome(reward_n, noised.step_nT, seen_nT),
            value_nT,
            noised.step_nT,
            seen_nT,
            gamma=rl.gamma,
            lam=rl.lam,
        )
        explained = advantage.explained_variance(value_nT, ret_nT, seen_nT)
        metrics["explained_variance"] = explained
        metrics |= advantage.by_thirds(value_nT, ret_nT, seen_nT)
    metrics["advantage_std"] = float(adv_nT[seen_nT].std())
    if rl.whiten:
        adv_nT = advantage.whitened(adv_nT, seen_nT)
    return adv_nT, ret_nT, metrics


def factors(
    adv_nT,
    logp_nT,
    answer_nT,
    noised: Noise,
    objective: ObjectiveConfig,
    *,
    draws: int,
) -> np.ndarray:
    """Returns what stands in the place of advantages, [n, T]: most often these.

    A loss of evidence bounds has factors of its own: see bounds.sandwich.
    """
    if not OBJECTIVES[objective.loss].bounds:
        return adv_nT
    return bounds.sandwich(
        adv_nT,
        logp_nT,
        noised.share_nT,
        answer_nT,
        draws=draws,
        weight=objective.upper_weight,
        power=objective.upper_power,
    )


def fields_of(scores: Scores, ret_nT, factor_nT) -> dict[str, np.ndarray]:
    """Returns the arrays [n, T] of RL_FIELDS, by name; factor_nT: see `factors`."""
    return {
        "adv_BU": factor_nT,
        "old_logp_BU": scores.logp_nT,
        "ref_logp_BU": scores.ref_nT,
        "ret_BU": ret_nT,
        "old_value_BU": scores.value_nT,
    }


def attached(dealt: Deal, fields: dict[str, np.ndarray], mesh) -> TrainBatch:
    """Returns a deal's batch on the mesh, with [n, T] arrays as fields by name."""
    gathered = {
        name: dealt.source.gather(x_nT[dealt.row_n]) for name, x_nT in fields.items()
    }
    return sharding.place_rows(dealt.batch.replace(**gathered), mesh, axis=1)


# ---- Examples, and pairs of them -----------------------------------------------------


def of_examples(
    examples,
    *,
    noised: Noise,
    copies: int,
    draws: int,
    beta: float,
    pack: Callable,
    score: Callable | None,
    mesh,
) -> tuple[dict[str, float], list[TrainBatch]]:
    """Returns (metrics, [their TrainBatch on the mesh]) of examples, or of pairs.

    examples: a host Trace, or data.Examples; row 2i is the better one of pair i.
    noised: noise.noised of them, `copies` rows of each, of `draws` draws.
    pack: views.pack, bound but for trace and noise.
    score: learner.score, bound but for the batch, for pairs, which are compared with a
    reference (VRPO, see bounds.preference, with `beta`); None for examples.
    """
    trace = take(examples, np.repeat(np.arange(len(examples.len_B)), copies))
    batch, source = pack(trace, noised)
    metrics = {"packed_fill": batch.fill}
    if score is not None:
        # The same noise for both models and both answers: see bounds.preference.
        outputs = sharding.fetch(score(sharding.place_rows(batch, mesh, axis=1)))
        policy_nT, reference_nT = (
            source.scatter(outputs[name]["logp"], noised.step_nT.shape)
            for name in ("policy", "reference")
        )
        preference_metrics, factor_nT = bounds.preference_factors(
            policy_nT,
            reference_nT,
            noised.share_nT,
            trace.len_B,
            draws=draws,
            beta=beta,
        )
        metrics |= preference_metrics
        batch = batch.replace(adv_BU=source.gather(factor_nT))
    return metrics, [sharding.place_rows(batch, mesh, axis=1)]


def blank(
    trace: Trace,
    cfg: NoiseConfig,
    layout,
    pack: Callable,
    mesh,
    fields: tuple[str, ...],
) -> TrainBatch:
    """Returns the shapes, on the mesh, of a TrainBatch: the same for all.

    trace: of one row without an answer; fields: the optional ones that the objective
    asks for, such as RL_FIELDS.
    """
    # Whatever noise it has: without an answer nothing is supervised, and nothing is
    # packed.
    noised = noise.noised(trace, cfg, layout, np.random.default_rng(0))
    row_n = np.zeros(cfg.copies, int)
    batch, _ = pack(take(trace, row_n), noised, group_n=row_n)
    batch = batch.replace(**dict.fromkeys(fields, np.zeros_like(batch.weight_BU)))
    return sharding.shapes_of_rows(batch, mesh, axis=1)


# ---- Rows of items that have several -------------------------------------------------


def rows_of(index_n, times: int) -> np.ndarray:
    """Returns the rows of items that have `times` rows each, one after the other."""
    return (index_n[:, None] * times + np.arange(times)).reshape(-1)


def take(tree, index_n):
    """Returns the rows `index_n` of every array."""
    return jax.tree.map(lambda x: x[index_n], tree)
