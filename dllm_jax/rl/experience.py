"""From what was sampled, or is given, to the batches of a step's updates: host side."""

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import sharding
from dllm_jax.rl import advantage, bounds, noise, rollout
from dllm_jax.rl.config import NoiseConfig, ObjectiveConfig, RLConfig
from dllm_jax.rl.rollout import Rollouts

FIELDS = ("adv_BU", "old_logp_BU", "ref_logp_BU", "ret_BU", "old_value_BU")  # of RL


def of_rollouts(
    rollouts: Rollouts, rng: np.random.Generator,
    *, rl: RLConfig, objective: ObjectiveConfig, noised, as_sampled: bool,
    params: dict, pack, score, mesh,
):  # fmt: skip
    """Returns (metrics, one complete TrainBatch on the mesh per update) of an RL step.

    noised: noise.noised of all rollouts; pack: views.pack, bound; score: learner.score.
    Old log-probs and values are scored by `params`, with which the step starts. Where the
    noise is the trace (as_sampled), the gap to what the sampler recorded is told: random
    masks show another context. There are no batches where rl.filter finds no group that
    teaches something.
    """
    speed_n = rollout.speed(rollouts.trace)
    keep = advantage.kept(
        rollouts.reward_n,
        speed_n,
        rollouts.group_n,
        rl.filter,
        rl.min_solved,
        rl.max_solved,
    )
    keep &= rollouts.trace.len_B > 0
    told = {"groups_kept": len(np.unique(rollouts.group_n[keep]))}
    if not keep.any():
        return told, []
    copies = len(noised.step_nT) // len(keep)  # rows of a trajectory, neighbours
    index = rng.permutation(np.flatnonzero(keep))
    deals = [rows_of(d, copies) for d in np.array_split(index, rl.updates) if len(d)]
    every = np.repeat(np.arange(len(keep)), copies)
    trace, keep, group_n = take((rollouts.trace, keep, rollouts.group_n), every)
    shape = trace.step_BT.shape
    packed = [
        pack(*take((trace, noised), deal), group_n=group_n[deal]) for deal in deals
    ]

    logp_nT, value_nT, ref_nT = (np.zeros(shape, np.float32) for _ in range(3))
    gaps, trusted = [], 0
    for deal, (batch, source) in zip(deals, packed, strict=True):
        placed = sharding.place_rows(batch, mesh, axis=1)
        recorded_mBU = source.gather(trace.logp_BT[deal])

        def scored(name, batch=placed):
            return sharding.fetch(score({name: params[name]}, batch))[name]

        def gap(out, count, source=source, recorded_mBU=recorded_mBU):
            held = source.row_mBU[:count] >= 0
            return np.abs(out["logp"] - recorded_mBU)[:count][held]

        def whole(x_mBU, source=source, deal=deal):
            return source.scatter(x_mBU, (len(deal), shape[1]))

        policy = {"logp": recorded_mBU}
        if rl.trusted_gap:
            first = placed.replace(used=jnp.minimum(placed.used, 1))
            gaps.append(gap(scored("policy", first), 1))
        if rl.trusted_gap and gaps[-1].max() <= rl.trusted_gap:
            trusted += 1
        else:
            policy = scored("policy")
            gaps.append(gap(policy, None))
        logp_nT[deal] = whole(policy["logp"])
        if rl.value != "none":
            value = policy if rl.value == "head" else scored("value")
            value_nT[deal] = whole(value["value"])
        if "reference" in params:
            ref_nT[deal] = whole(scored("reference")["logp"])

    answer_nT = noise.answers(trace) & keep[:, None]
    seen_nT = answer_nT & (noised.share_nT > 0)
    reward_n = advantage.combined(
        rollouts.reward_n,
        speed_n,
        rollouts.group_n,
        keep[::copies],
        rl.advantage,
        speed=rl.speed,
    )[every]
    told["packed_fill"] = float(np.mean([batch.fill for batch, _ in packed]))
    if as_sampled:
        gap = np.concatenate(gaps)
        told["logprob_gap_mean"] = float(gap.mean())
        told["logprob_gap_max"] = float(gap.max())
    if rl.trusted_gap:
        told["updates_trusted"] = trusted / len(packed)
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
        told["explained_variance"] = advantage.explained_variance(
            value_nT, ret_nT, seen_nT
        )
    told["advantage_std"] = float(adv_nT[seen_nT].std())
    if objective.loss == "spg":
        adv_nT = bounds.sandwich(
            adv_nT,
            logp_nT,
            noised.share_nT,
            answer_nT,
            draws=copies,
            weight=objective.upper_weight,
            power=objective.upper_power,
        )

    batches = []
    for deal, (batch, source) in zip(deals, packed, strict=True):
        told_nT = (adv_nT, logp_nT, ref_nT, ret_nT, value_nT)
        gathered = (source.gather(x_nT[deal]) for x_nT in told_nT)
        batch = batch.replace(**dict(zip(FIELDS, gathered, strict=True)))
        batches.append(sharding.place_rows(batch, mesh, axis=1))
    return told, batches


def of_examples(part, *, noised, copies, draws, beta, pack, score, mesh):
    """Returns (metrics, [its TrainBatch on the mesh]) of examples, or of pairs of them.

    score: learner.score, bound, for pairs (row 2i is the better one of pair i) that are
    compared with a reference (VRPO, see bounds.compared); None for examples.
    """
    part = take(part, np.repeat(np.arange(len(part.len_B)), copies))
    batch, where = pack(part, noised)
    told = {"packed_fill": batch.fill}
    if score is not None:
        out = sharding.fetch(score(sharding.place_rows(batch, mesh, axis=1)))
        more, batch = bounds.compared(
            out, part.len_B, noised.share_nT, batch, where, draws=draws, beta=beta
        )
        told |= more
    return told, [sharding.place_rows(batch, mesh, axis=1)]


def blank(trace, cfg: NoiseConfig, layout, pack, mesh, fields: tuple[str, ...]):
    """Returns a TrainBatch on the mesh that holds nothing, of the shape of all others.

    trace: of one row without an answer; fields: the optional ones that the objective asks for.
    """
    noised = noise.noised(trace, cfg, layout, np.random.default_rng(0))
    index = np.zeros(cfg.copies, int)
    batch, _ = pack(take(trace, index), noised, group_n=index)
    batch = batch.replace(**dict.fromkeys(fields, np.zeros_like(batch.weight_BU)))
    return sharding.place_rows(batch, mesh, axis=1)


def rows_of(index, times: int):
    """Returns the rows of items that have `times` rows each, one after the other."""
    return (index[:, None] * times + np.arange(times)).reshape(-1)


def take(tree, index):
    """Returns the rows `index` of every array."""
    return jax.tree.map(lambda x: x[index], tree)
