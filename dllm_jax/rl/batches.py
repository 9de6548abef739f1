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

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import sharding
from dllm_jax.rl import advantage, bounds, noise, rollout
from dllm_jax.rl.config import NETWORKS, NoiseConfig, ObjectiveConfig, RLConfig
from dllm_jax.rl.noise import Noise
from dllm_jax.rl.objectives import LIMIT, OBJECTIVES
from dllm_jax.rl.rewards import process
from dllm_jax.rl.ridge import Ridge
from dllm_jax.rl.rollout import Notes, Rollouts
from dllm_jax.rl.views import Source, TrainBatch
from dllm_jax.sampling.state import Trace

# The optional fields of a TrainBatch that RL attaches, at least, and that DPO does.
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
    critic: Ridge | None = None,
    longest: int = 0,
) -> tuple[dict[str, float], list[TrainBatch], Notes | None]:
    """Returns (metrics, one complete TrainBatch on the mesh per update, Notes) of an RL step.

    rng: shuffles the rollouts; noised: noise.noised of all of them.
    as_sampled: the noise is the trace itself, step by step. Only then are tokens scored in
    the context in which they were sampled, and the metrics tell how far the sampler was off.
    params: of the networks by name: "policy", and as configured "value", "reference".
    pack: views.pack, bound but for trace, noise and group_n.
    score: learner.score, bound but for params and batch.
    critic: with rl.value="trace"; it judges these rollouts, and then learns from them.
    longest: tokens that an answer may have, for rl.truncated="soft".
    There are no batches, and no Notes, where rl.filter finds no group that teaches
    something; nor is there a batch of which noise masks nothing.
    """
    keep_n = teaching(rollouts, rl)
    metrics = {"groups_kept": len(np.unique(rollouts.group_n[keep_n]))}
    if not keep_n.any():
        return metrics, [], None
    earned = earnings(rollouts, keep_n, rl, longest)

    # From here on every array has a place for each row of noise.
    copies = len(noised.step_nT) // len(keep_n)
    trajectory_n = np.repeat(np.arange(len(keep_n)), copies)
    trace, group_n = take((rollouts.trace, rollouts.group_n), trajectory_n)
    how = {"updates": rl.updates, "size": rl.answers_per_update}
    rows = dealt_rows(keep_n, rng, copies=copies, **how)
    how = {"rl": rl, "params": params, "score": score, "mesh": mesh}
    pack = functools.partial(deal, trace, noised, group_n, pack)
    deals, scores = packed_and_scored(pack, rows, noised.step_nT.shape, **how)
    # What rl.answers_per_update leaves over was neither scored nor learned from.
    keep_n = np.isin(np.arange(len(keep_n)), trajectory_n[np.concatenate(rows)])
    answer_nT = noise.taught(trace, objective.likelihood == "selection")
    answer_nT &= keep_n[trajectory_n][:, None]
    scores = judged_by(critic, scores, trace, noised)
    adv_nT, ret_nT, told = advantages(
        take(earned, trajectory_n), answer_nT, noised, scores.value_nT, rl
    )
    if critic is not None:
        critic.learn(answer_nT & (noised.share_nT > 0), ret_nT)
    solved_n = rollouts.solved_n[trajectory_n]
    learned = Learned(trace, noised, answer_nT, solved_n, rows, copies)
    fields, capped = fields_of(adv_nT, ret_nT, scores, learned, objective)
    metrics |= told | capped | told_of(deals, scores, noised, rl, as_sampled=as_sampled)
    made = [
        attached(dealt, fields, mesh, ahead)
        for dealt, ahead in zip(deals, scores.ahead, strict=True)
        if dealt.batch.used  # without a gradient AdamW would move by the last ones
    ]
    return metrics, made, Notes(keep_n, adv_nT[::copies], scores.value_nT[::copies])


def told_of(deals, scores, noised: Noise, rl: RLConfig, *, as_sampled: bool) -> dict:
    """Returns the metrics of a step's batches: how full they are, and gaps."""
    told = gap_metrics(scores, rl, as_sampled=as_sampled)
    if noised.weight_nT is not None:  # picked tokens are no mean of all
        told.pop("selection_bias", None)
    told["packed_slots"] = sum(x.batch.held for x in deals)
    fills = [x.batch.fill for x in deals if x.batch.used]
    return told | {"packed_fill": float(np.mean(fills or [0.0]))}


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
    objective: ObjectiveConfig,
    longest: int = 0,
) -> list[TrainBatch]:
    """Returns batches of what rl.filter drops, from which a value network alone learns.

    The arguments are those of `of_rollouts`; a trajectory has one row of noise, the trace.
    """
    keep_n = teaching(rollouts, rl)
    rest_n = ~keep_n & ~rollouts.late_n & (rollouts.trace.len_B > 0)
    if not rest_n.any():
        return []
    earned = earnings(rollouts, keep_n, rl, longest)
    hands = -(-int(rest_n.sum()) // rl.largest_update)
    rows = dealt_rows(rest_n, rng, updates=hands, copies=1)
    trace = rollouts.trace
    deals = [deal(trace, noised, rollouts.group_n, pack, row_n) for row_n in rows]
    value_nT = np.zeros(noised.step_nT.shape, np.float32)
    for dealt in deals:
        placed = sharding.place_rows(dealt.batch, mesh, axis=1)
        told = network_outputs(params, score, "value", placed)
        value_nT[dealt.row_n] = dealt.scatter(told["value"], value_nT.shape[1])
    answer_nT = noise.taught(trace, objective.likelihood == "selection")
    answer_nT &= rest_n[:, None]
    adv_nT, ret_nT, _ = advantages(earned, answer_nT, noised, value_nT, rl)
    # What the policy's loss would read; there is none.
    blank_nT = np.zeros_like(value_nT)
    scores = Scores(blank_nT, value_nT, blank_nT, [], np.array([]), [])
    learned = Learned(trace, noised, answer_nT, rollouts.solved_n, rows, 1)
    fields, _ = fields_of(adv_nT, ret_nT, scores, learned, objective)
    return [attached(dealt, fields, mesh) for dealt in deals]


# ---- The stages ----------------------------------------------------------------------


def teaching(rollouts: Rollouts, rl: RLConfig) -> np.ndarray:
    """Returns which rollouts [n] have an answer, in a group that passes rl.filter.

    An answer that was not judged teaches nothing, and its group is the others; one of
    which nobody knows whether it is right has a reward and is in no solve rate. Of the
    groups that pass, the first rl.prompts count: rl.max_prompts may ask for more.
    """
    judged_n = ~rollouts.late_n
    right_n = np.where(rollouts.judged_n, rollouts.solved_n, np.nan)
    keep_n = np.zeros(len(judged_n), bool)
    keep_n[judged_n] = advantage.kept(
        rollouts.reward_n[judged_n],
        right_n[judged_n],
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


@flax.struct.dataclass
class Earned:
    """What n answers earn, and their tokens."""

    reward_n: np.ndarray  # relative to their groups
    token_nT: np.ndarray | None  # by position; None: the answers alone earn
    step_nT: np.ndarray  # of sampling

    def by_token(self, step_nT, answer_nT, outcome: float):
        """Returns all of it as rewards [n, T] of tokens: an answer's is its last step's.

        outcome: the weight of these, where tokens earn, too.
        """
        last_nT = advantage.outcome(self.reward_n, step_nT, answer_nT)
        if self.token_nT is None:
            return last_nT
        return outcome * last_nT + np.where(answer_nT, self.token_nT, 0.0)


def earnings(rollouts: Rollouts, keep_n, rl: RLConfig, longest: int = 0) -> Earned:
    """Returns what rollouts earn; keep_n: which of them are learned from.

    Before anything is dealt out: a group's rollouts may end up in several updates.
    longest: tokens that an answer may have, for rl.truncated="soft".
    """
    return Earned(
        reward_n=relative_rewards(rollouts, keep_n, rl, longest),
        token_nT=token_rewards(rollouts, rl),
        step_nT=rollouts.trace.step_BT,
    )


def check_earned(rollouts: Rollouts, loss: str) -> None:
    """Raises ValueError where graders reward tokens, which a loss of answers does not do."""
    if rollouts.reward_nT is not None and OBJECTIVES[loss].by_answer:
        raise ValueError(
            f"rl.reward gives tokens rewards of their own, and objective.loss={loss!r} has one "
            "advantage for each answer; set it to 'policy' or 'dipo'"
        )


def token_rewards(rollouts: Rollouts, rl: RLConfig) -> np.ndarray | None:
    """Returns the rewards [n, T] of tokens, by position; None where only answers have some.

    Those that graders give count as they are, those of chunks relative to their group's.
    """
    tokens = [] if rollouts.reward_nT is None else [rollouts.reward_nT]
    if rollouts.chunks is not None:
        tokens.append(process.relative(rollouts.chunks, rollouts.group_n, rl.advantage))
    return sum(tokens) if tokens else None


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

    def told(self, policy: dict, microbatches: int | None = None) -> list[np.ndarray]:
        """Returns [|log-prob - recorded|, log-prob + entropy] of each token, in nats.

        policy: its outputs; microbatches: the first ones, of which it was asked.
        """
        real_mBU = self.source.row_mBU[:microbatches] >= 0
        logp_mBU = policy.get("token_logp", policy["logp"])
        entropy_mBU = policy.get("token_entropy", policy["entropy"])
        off_mBU, surplus_mBU = logp_mBU - self.recorded_mBU, logp_mBU + entropy_mBU
        return [x[:microbatches][real_mBU] for x in (np.abs(off_mBU), surplus_mBU)]

    def scatter(self, x_mBU, T: int) -> np.ndarray:
        """Returns the batch's values in their places, [rows of the deal, T]."""
        return self.source.scatter(x_mBU, (len(self.row_n), T))


def deal(trace: Trace, noised: Noise, group_n, pack: Callable, row_n) -> Deal:
    """Returns these rows of noise, packed."""
    dealt_trace, dealt_noise = take((trace, noised), row_n)
    batch, source = pack(dealt_trace, dealt_noise, group_n=group_n[row_n])
    # Steps are scored by what was drawn from, tokens by the model's own distribution.
    of_steps = batch.unit_BU is not None
    recorded_nT = drawn_logp(dealt_trace) if of_steps else dealt_trace.logp_BT
    return Deal(row_n, batch, source, source.gather(recorded_nT))


def drawn_logp(trace: Trace) -> np.ndarray:
    """Returns the log-probs [n, T] of tokens in the distribution they were drawn from."""
    return np.log(np.maximum(trace.conf_BT, np.finfo(np.float32).tiny))


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the networks say of the dealt tokens, and how far the sampler was off.

    0 where nothing is supervised, and where there is no such network.
    """

    logp_nT: np.ndarray  # of the policy, nats
    value_nT: np.ndarray
    ref_nT: np.ndarray  # log-probs of the reference, nats
    told: list[list[np.ndarray]]  # of each deal, of the tokens asked of: Deal.told
    trusted_n: np.ndarray  # of each deal: the record stands for the policy
    ahead: list[np.ndarray | None]  # of each deal, [m, B, U]: see reference.selection


def packed_and_scored(dealt: Callable, rows, shape, **how) -> tuple[list[Deal], Scores]:
    """Returns (dealt(row_n) of each of these rows, their Scores).

    The host packs in a thread: the next deal while devices score this one.
    shape, how: of `scored`.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "packing") as thread:
        deals = [thread.submit(dealt, row_n) for row_n in rows]
        scores = scored(deals, shape, **how)
    return [each.result() for each in deals], scores


def scored(
    deals: list[concurrent.futures.Future[Deal]],
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
    told, trusted, ahead = [], [], []
    outputs = functools.partial(network_outputs, params, score)
    for dealt in (future.result() for future in deals):
        # One batch at a time lies on the mesh beside the networks.
        placed = sharding.place_rows(dealt.batch, mesh, axis=1)
        policy, of_deal, stands = old_log_probs(dealt, placed, outputs, rl.trusted_gap)
        told.append(of_deal)
        trusted.append(stands)
        ahead.append(policy.get("ahead"))
        logp_nT[dealt.row_n] = dealt.scatter(policy["logp"], shape[1])
        if rl.value in NETWORKS:
            network = policy if rl.value == "head" else outputs("value", placed)
            value_nT[dealt.row_n] = dealt.scatter(network["value"], shape[1])
        if "reference" in params:
            reference = outputs("reference", placed)
            ref_nT[dealt.row_n] = dealt.scatter(reference["logp"], shape[1])
    return Scores(logp_nT, value_nT, ref_nT, told, np.array(trusted), ahead)


def judged_by(critic: Ridge | None, scores: Scores, trace, noised) -> Scores:
    """Returns the scores with the critic's values, if there is one."""
    if critic is None:
        return scores
    return dataclasses.replace(scores, value_nT=critic.judge(trace, noised))


def network_outputs(params: dict, score: Callable, name: str, batch: TrainBatch):
    """Returns a network's outputs on a placed batch, on the host: name -> [m, B, U]."""
    return sharding.fetch(score({name: params[name]}, batch))[name]


def old_log_probs(
    dealt: Deal, placed: TrainBatch, outputs: Callable, trusted_gap: float
) -> tuple[dict[str, np.ndarray], list[np.ndarray], bool]:
    """Returns (the policy's outputs, Deal.told of them, whether the record stands).

    outputs: network_outputs, bound. With a trusted gap the first microbatch is scored;
    if none of its tokens is off by more, what the sampler recorded stands for the
    policy's log-probs, which are then not scored.
    """
    if trusted_gap > 0:
        first = placed.replace(used=jnp.minimum(placed.used, 1))
        told = dealt.told(outputs("policy", first), microbatches=1)
        if told[0].max() <= trusted_gap:
            return {"logp": dealt.recorded_mBU}, told, True
    policy = outputs("policy", placed)
    return policy, dealt.told(policy), False


def gap_metrics(scores: Scores, rl: RLConfig, *, as_sampled: bool) -> dict[str, float]:
    """Returns how far the sampler's log-probs are from those that training sees.

    And from those of draws: selection_bias is the mean of log p + entropy over the tokens
    that were kept, whose expectation is 0 where they are draws of p. Where the record is
    trusted both are of an update's first microbatch alone, which has its longest rows.
    """
    metrics = {}
    if as_sampled:
        gap, surplus = (np.concatenate(x) for x in zip(*scores.told, strict=True))
        metrics["logprob_gap_mean"] = float(gap.mean())
        metrics["logprob_gap_max"] = float(gap.max())
        metrics["selection_bias"] = float(surplus.mean())
    if rl.trusted_gap > 0:
        metrics["updates_trusted"] = float(scores.trusted_n.mean())
    return metrics


def advantages(earned: Earned, answer_nT, noised: Noise, value_nT, rl: RLConfig):
    """Returns (adv_nT, ret_nT, metrics) of relative rewards.

    earned, value_nT: of each row of noise; answer_nT: the kept rollouts' answers.
    Without a value model the advantage of a token is its answer's reward, or where tokens
    have some what its step of sampling and later ones earn, by GAE with values of 0; with
    one it follows from GAE over the steps of the noise.
    """
    seen_nT = answer_nT & (noised.share_nT > 0)
    metrics = {}
    if rl.value == "none" and earned.token_nT is None:
        ret_nT = adv_nT = np.where(answer_nT, earned.reward_n[:, None], 0.0)
    else:
        # Without values nothing hangs on the noise: what it leaves out earns, too.
        over = noised.step_nT, seen_nT
        if rl.value == "none":
            over = earned.step_nT, answer_nT
        ret_nT, adv_nT = advantage.gae(
            earned.by_token(*over, rl.outcome),
            value_nT,
            *over,
            gamma=rl.gamma,
            lam=rl.lam,
        )
    if rl.value != "none":
        explained = advantage.explained_variance(value_nT, ret_nT, seen_nT)
        metrics["explained_variance"] = explained
        metrics |= advantage.by_thirds(value_nT, ret_nT, seen_nT)
    metrics["advantage_std"] = float(adv_nT[seen_nT].std()) if seen_nT.any() else 0.0
    if rl.whiten:
        adv_nT = advantage.whitened(adv_nT, seen_nT)
    return adv_nT, ret_nT, metrics


class Learned(NamedTuple):
    """A step's rows of noise, n in all."""

    trace: Trace
    noised: Noise
    answer_nT: np.ndarray  # what is supervised, where noise says so
    solved_n: np.ndarray  # of right answers
    rows: list[np.ndarray]  # those of each update
    copies: int  # of a trajectory, one after the other


def fields_of(
    adv_nT, ret_nT, scores: Scores, learned: Learned, objective: ObjectiveConfig
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns (the fields of `asked` of all rows of noise, metrics)."""
    drawn_nT, answer_nT = drawn_logp(learned.trace), learned.answer_nT
    seen_nT = answer_nT & (learned.noised.share_nT > 0)
    weight_nT, metrics = importance(
        scores.logp_nT, drawn_nT, seen_nT, objective.importance_cap
    )
    number_nT, right_nT = np.zeros((2, *adv_nT.shape), np.float32)
    for row_n in learned.rows:
        number_nT[row_n] = (np.arange(len(row_n)) // learned.copies)[:, None]
    right_nT[learned.solved_n] = 1
    fields = {
        "adv_BU": factors(
            weight_nT * adv_nT,
            scores.logp_nT,
            answer_nT,
            learned.noised,
            objective,
            draws=learned.copies,
        ),
        "old_logp_BU": scores.logp_nT,
        "ref_logp_BU": scores.ref_nT,
        "ret_BU": ret_nT,
        "old_value_BU": scores.value_nT,
        "right_BU": right_nT,
        "answer_BU": number_nT,
    }
    return {name: x for name, x in fields.items() if name in asked(objective)}, metrics


def asked(objective: ObjectiveConfig) -> tuple[str, ...]:
    """Returns the fields that an RL objective asks for, of tokens by their place."""
    more = {
        "right_BU": objective.nll_weight,
        "answer_BU": OBJECTIVES[objective.loss].answers,
    }
    return RL_FIELDS + tuple(name for name, wanted in more.items() if wanted)


def importance(logp_nT, drawn_nT, seen_nT, cap: float):
    """Returns (truncated importance weights [n, T], metrics) of supervised tokens.

    min(pi_old / q, cap), pi_old the policy as the trainer scores it and q what the token
    was drawn from: truncated importance sampling (Ionides 2008) between sampler and
    trainer. It is a factor of the token's advantage. cap 0: all are 1. Others were not
    scored, as those of rounds that noise.rounds leaves out.
    """
    if not (cap and seen_nT.any()):
        return 1.0, {}
    ratio_nT = np.exp(np.clip(logp_nT - drawn_nT, -LIMIT, LIMIT))
    metrics = {
        "importance": float(ratio_nT[seen_nT].mean()),
        "importance_capped": float((ratio_nT[seen_nT] > cap).mean()),
    }
    return np.where(seen_nT, np.minimum(ratio_nT, cap), 1.0), metrics


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


def attached(
    dealt: Deal, fields: dict[str, np.ndarray], mesh, ahead_mBU=None
) -> TrainBatch:
    """Returns a deal's batch on the mesh, with [n, T] arrays as fields by name."""
    gathered = {
        name: dealt.source.gather(x_nT[dealt.row_n]) for name, x_nT in fields.items()
    }
    batch = dealt.batch.replace(**gathered, ahead_BU=ahead_mBU)
    return sharding.place_rows(batch, mesh, axis=1)


# ---- Examples, and pairs of them -----------------------------------------------------


def of_examples(
    examples,
    *,
    noised: Noise,
    copies: int,
    pack: Callable,
    mesh,
    score: Callable | None = None,
    compare: Callable | None = None,
) -> tuple[dict[str, float], list[TrainBatch]]:
    """Returns (metrics, [their TrainBatch on the mesh]) of examples, or of pairs.

    There is no batch where noise masks nothing.

    examples: a host Trace, or data.Examples; row 2i is the better one of pair i.
    noised: noise.noised of them, `copies` rows of each.
    pack: views.pack, bound but for trace and noise.
    score: learner.score, bound but for the batch, for pairs, whose answers are compared:
    compare(outputs, share_nT, len_n) returns (metrics, factors [n, T]) of what the
    networks say, name -> {output: [n, T]}. None for examples.
    """
    trace = take(examples, np.repeat(np.arange(len(examples.len_B)), copies))
    batch, source = pack(trace, noised)
    metrics = {"packed_fill": batch.fill, "packed_slots": batch.held}
    if score is not None:
        # The same noise for all networks and both answers: see bounds.preference.
        outputs = sharding.fetch(score(sharding.place_rows(batch, mesh, axis=1)))
        outputs = jax.tree.map(
            lambda x_mBU: source.scatter(x_mBU, noised.step_nT.shape), outputs
        )
        told, factor_nT = compare(outputs, noised.share_nT, trace.len_B)
        metrics |= told
        batch = batch.replace(adv_BU=source.gather(factor_nT))
    if not batch.used:  # of short answers a random draw may mask nothing
        return metrics, []
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
    row_n, most = np.zeros(cfg.copies, int), pack.keywords["most"]
    # One microbatch, seen as many: all of them may be gigabytes of nothing.
    batch, _ = pack(take(trace, row_n), noised, group_n=row_n, most=1)
    batch = batch.replace(**dict.fromkeys(fields, np.zeros_like(batch.weight_BU)))
    batch = jax.tree.map(
        lambda x: np.broadcast_to(x, (most, *x.shape[1:])) if x.ndim else x, batch
    )
    return sharding.shapes_of_rows(batch, mesh, axis=1)


# ---- Rows of items that have several -------------------------------------------------


def rows_of(index_n, times: int) -> np.ndarray:
    """Returns the rows of items that have `times` rows each, one after the other."""
    return (index_n[:, None] * times + np.arange(times)).reshape(-1)


def take(tree, index_n):
    """Returns the rows `index_n` of every array."""
    return jax.tree.map(lambda x: x[index_n], tree)
