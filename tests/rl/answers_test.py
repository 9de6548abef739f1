"""Losses of whole answers, and what is added to RL's, against plain losses' gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.rl import batches, bounds, learner, noise, objectives, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import BatchConfig, NoiseConfig, ObjectiveConfig, OptimConfig
from tests.rl import dllm_rl

N, NEW, DRAWS = 3, 9, 2
LAYOUT = layouts.Layout(block=4, longest=NEW)
SUBSET = NoiseConfig(kind="subset", draws=DRAWS)
RARE = NoiseConfig(kind="bernoulli", lower=0.1, upper=0.2)
LEVELS = NoiseConfig(kind="quadrature", draws=DRAWS)
PLAN = learner.Plan(("policy",), OptimConfig(), 1)
score_at = jax.jit(
    lambda params, batch, model: scored(params, batch, model), static_argnums=2
)
differentiated = jax.jit(learner.gradients, static_argnames=("model", "plan", "cfg"))


def trajectories():
    """Returns a host trace of three answers of different lengths."""
    rng = np.random.default_rng(1)
    len_n, step_nT = np.array([9, 4, 7]), np.zeros((N, 16), int)
    for i, length in enumerate(len_n):
        step_nT[i, 4 : 4 + length] = 1 + np.arange(length) // 2
    tokens_nT = rng.integers(1, 60, step_nT.shape)
    return dllm_rl.trace(tokens_nT, step_nT, np.full(N, 4), len_n)


def packed(kind: NoiseConfig, aggregate: str):
    """Returns (TrainBatch, Source, Noise, trace) with a row for each row of noise."""
    trace = batches.take(trajectories(), np.repeat(np.arange(N), kind.copies))
    drawn = noise.noised(trajectories(), kind, LAYOUT, np.random.default_rng(2))
    batch, source = views.pack(
        trace,
        drawn,
        mask_id=66,
        layout=LAYOUT,
        cfg=BatchConfig(rows=1, tokens=48),
        most=8,
        aggregate=aggregate,
        copies=kind.copies,
        draws=kind.draws,
    )
    return batch, source, drawn, trace


def scored(params, batch, model):
    """Returns the tokens' log-probs, [m, B, U], differentiable."""

    def of_microbatch(micro):
        return learner.outputs(params, micro, model, ("lm",))["logp"]

    return jax.lax.map(of_microbatch, batch.replace(used=None, answers=None))


def complete(kind, aggregate, params, model, objective):
    """Returns (a batch with all that an objective asks for, its Source, c_mBU, answers).

    c_mBU: what the papers multiply a token's log-prob with in an answer's sum; answers: of
    each seat. The weights that sampled, and the reference's, are others than the present.
    """
    batch, source, drawn, trace = packed(kind, aggregate)
    batch = jax.tree.map(jnp.asarray, batch)
    rng, shape = np.random.default_rng(4), drawn.step_nT.shape
    old, reference = (
        np.asarray(
            score_at(jax.tree.map(lambda x, by=by: x * by, params), batch, model)
        )
        for by in (1.01, 0.99)
    )
    adv_nT = np.repeat(rng.normal(size=(N, 1)), kind.copies, 0) * np.ones(shape)
    if objective.loss == "stable":
        adv_nT = bounds.sandwich(
            adv_nT,
            source.scatter(old, shape),
            drawn.share_nT,
            noise.answers(trace),
            draws=kind.draws,
            weight=0.5,
            power=1.5,
        )
    answer_nT = np.repeat(np.arange(N), kind.copies)[:, None] * np.ones(shape)
    batch = batch.replace(
        adv_BU=source.gather(adv_nT),
        old_logp_BU=old,
        ref_logp_BU=reference,
        right_BU=source.gather(answer_nT == 1),
        answer_BU=source.gather(answer_nT),
    )
    batch = jax.tree.map(jnp.asarray, batch)
    c_nT = drawn.share_nT / kind.draws
    if aggregate == "sequence":  # what is masked counts, whatever it stands for
        c_nT = (drawn.share_nT > 0) / kind.draws
    if aggregate in ("sequence", "elbo_sequence"):
        c_nT = c_nT / trace.len_B[:, None]
    answer = np.where(source.row_mBU >= 0, source.gather(answer_nT), N).astype(int)
    return batch, c_nT, source, answer


def gradients(params, batch, model, objective):
    """Returns learner.gradients of a policy with one objective."""
    plan = dataclasses.replace(PLAN, terms=(objective.loss,))
    return differentiated(params, batch, None, model=model, plan=plan, cfg=objective)


def check(found, want):
    """Asserts two gradients equal, to 1e-5 of the largest entry of each tensor."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()),
        found,
        want,
    )


RATIOS = {
    "GSPO's, of the trace": (NoiseConfig(), "sequence"),
    "of random masks": (RARE, "sequence"),
    "ESPO": (SUBSET, "elbo_sequence"),
    "EBPO": (SUBSET, "elbo_answer"),
    "GDPO": (LEVELS, "elbo_sequence"),
}


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_of_answers_are_clipped_as_their_papers_say(tiny, name):
    """Some are clipped and some are not, in several microbatches; the KL is of them."""
    model, params = tiny
    kind, aggregate = RATIOS[name]
    objective = ObjectiveConfig(
        loss="sequence",
        clip=0.02,
        clip_high=0.05,
        beta=0.3,
        reference_beta=0.2,
        kl="k2",
    )
    batch, c_nT, source, answer = complete(kind, aggregate, params, model, objective)
    c, adv_nT = source.gather(c_nT), source.scatter(batch.adv_BU, c_nT.shape)
    A_n = adv_nT.reshape(N, -1)[np.arange(N), np.abs(adv_nT.reshape(N, -1)).argmax(1)]
    found, sums = gradients(params, batch, model, objective)
    want, policy_loss = plain_ratios(params, batch, c, answer, A_n, model=model)
    check(found, want)
    masked = (len(np.unique(answer)) - 1) / N  # the metric is a mean over these
    told = masked * float(sums["policy_loss"])
    assert told == pytest.approx(float(policy_loss), rel=1e-4)
    assert batch.used > 1 or kind == RARE
    assert (len(np.unique(answer)) == N + 1) == (kind != RARE)  # one is masked nowhere
    assert 0 <= sums["answer_clip_fraction"] <= 1
    clipped.append(float(sums["answer_clip_fraction"]))


def test_answers_are_clipped_on_both_sides_by_hand():
    """The fifth is no answer: it is in no mean."""
    ratio_n = np.array([0.9, 1.1, 0.9, 1.1, 7.0])
    adv_n, real_n = np.array([1.0, 1, -1, -1, 5]), np.arange(5) < 4
    answers = objectives.Answers(
        *map(jnp.asarray, (np.log(ratio_n), np.zeros(5), adv_n, real_n))
    )
    cfg = ObjectiveConfig(loss="sequence", clip=0.02, clip_high=0.05, beta=0.0)
    factor_n, _, told = objectives.clipped_answers(answers, cfg)
    np.testing.assert_allclose(factor_n[:4], [0.9, 0, 0, 1.1], rtol=1e-6)
    near_n = [0.9, 1.05, -0.98, -1.1]
    assert float(told["policy_loss"]) == pytest.approx(-np.mean(near_n), rel=1e-5)
    assert told["answer_clip_fraction"] == 0.5
    kl_n = 1 / ratio_n - 1 + np.log(ratio_n)
    assert float(told["answer_kl"]) == pytest.approx(kl_n[:4].mean(), rel=1e-4)


def test_ratios_beyond_their_clamp_push_no_further():
    """As `policy` has it of a token: a wrong answer that became e^12 times as likely."""
    delta_n = jnp.array([12.0, 9.0, -12.0, 0.0])
    answers = objectives.Answers(
        delta_n, jnp.zeros(4), jnp.array([-1.0, -1.0, 1.0, 1.0]), jnp.ones(4, bool)
    )
    cfg = ObjectiveConfig(loss="sequence", beta=0.0)
    factor_n, added_n, _ = objectives.clipped_answers(answers, cfg)
    np.testing.assert_allclose(factor_n, [0, np.exp(9), 0, 1], rtol=1e-5)
    assert not added_n.any()


def test_some_ratios_were_clipped_and_some_were_not():
    assert not clipped or 0 < np.mean(clipped) < 1


clipped = []


@functools.partial(jax.jit, static_argnames="model")
@functools.partial(jax.grad, has_aux=True)
def plain_ratios(params, batch, c, answer, A_n, *, model):
    """Differentiates the loss of `objectives.clipped_answers`, as papers write it."""
    logp = scored(params, batch, model)

    def summed(other):
        return jnp.zeros(N + 1).at[answer].add(c * (logp - other))[:N]

    delta_n, far_n = summed(batch.old_logp_BU), summed(batch.ref_logp_BU)
    ratio_n = jnp.exp(delta_n)
    near_n = jnp.minimum(ratio_n * A_n, jnp.clip(ratio_n, 0.98, 1.05) * A_n)
    pull_n = 0.3 * delta_n**2 / 2 + 0.2 * far_n**2 / 2
    return jnp.mean(-near_n + pull_n), -jnp.mean(near_n)


def test_an_answer_of_which_nothing_is_masked_counts_nowhere(tiny):
    """Whatever its number: 0 is that of the filling, too."""
    model, params = tiny
    objective = ObjectiveConfig(loss="stable", aggregate="elbo_answer")
    batch, _, _, answer = complete(RARE, "elbo_answer", params, model, objective)
    (missing,) = {*range(N)} - {*np.unique(answer).tolist()}
    other = batch.replace(
        answer_BU=jnp.where(batch.weight_BU > 0, (batch.answer_BU - missing) % N, 0)
    )
    of_all, sums = gradients(params, batch, model, objective)
    found, told = gradients(params, other, model, objective)
    check(found, of_all)
    assert told["answer_weight_max"] == pytest.approx(sums["answer_weight_max"])


def test_stable_weighs_bounds_by_a_softmax_over_answers(tiny):
    model, params = tiny
    objective = ObjectiveConfig(loss="stable", aggregate="elbo_answer")
    batch, c_nT, source, answer = complete(
        SUBSET, "elbo_answer", params, model, objective
    )
    c = source.gather(c_nT)

    def plain(params):
        logp = scored(params, batch, model)
        delta_n = jnp.zeros(N + 1).at[answer].add(c * (logp - batch.old_logp_BU))[:N]
        log_weight_n = jnp.minimum(delta_n, jnp.log(5.0))
        weight_n = jax.lax.stop_gradient(jax.nn.softmax(log_weight_n))
        bound_n = jnp.zeros(N + 1).at[answer].add(c * batch.adv_BU * logp)[:N]
        return -jnp.sum(weight_n * bound_n)

    found, sums = gradients(params, batch, model, objective)
    check(found, jax.jit(jax.grad(plain))(params))
    assert 1 + 1e-6 < sums["answer_weight_max"] < N


def test_stable_caps_a_ratio_at_five():
    delta_n, real_n = jnp.log(jnp.array([9.0, 5, 1, 0.5, 70])), jnp.arange(5) < 4
    answers = objectives.Answers(delta_n, jnp.zeros(5), jnp.ones(5), real_n)
    cfg = ObjectiveConfig(loss="stable")
    factor_n, added_n, told = objectives.self_normalised(answers, cfg)
    want_n = 4 * np.array([5, 5, 1, 0.5, 0]) / 11.5
    np.testing.assert_allclose(factor_n, want_n, rtol=1e-6)
    assert not added_n.any()
    assert float(told["answer_weight_max"]) == pytest.approx(20 / 11.5)


def test_right_answers_are_made_likelier_and_k2_is_a_square(tiny):
    model, params = tiny
    objective = ObjectiveConfig(nll_weight=0.7, kl="k2", beta=0.4, clip=0.1)
    batch, _, _, _ = complete(NoiseConfig(), "token", params, model, objective)

    def plain(params):
        logp = scored(params, batch, model)
        delta = jnp.where(batch.weight_BU > 0, logp - batch.old_logp_BU, 0)
        ratio = jnp.exp(delta)
        near = jnp.minimum(
            ratio * batch.adv_BU, jnp.clip(ratio, 0.9, 1.1) * batch.adv_BU
        )
        loss = -near + 0.4 * delta**2 / 2 - 0.7 * batch.right_BU * logp
        return jnp.sum(batch.weight_BU * loss)

    found, sums = gradients(params, batch, model, objective)
    check(found, jax.jit(jax.grad(plain))(params))
    assert sums["right_nll"] > 0


def test_a_quadrature_of_levels_is_the_bound_of_what_is_linear():
    """Where a token's log-prob depends on nothing the estimate is the sum of all."""
    trace, rng = trajectories(), np.random.default_rng(0)
    logp_nT = -rng.random(trace.step_BT.shape)
    whole = layouts.Layout(attention="full", block=4, longest=NEW)
    answer_nT = noise.answers(trace)
    cfg, estimates = NoiseConfig(kind="quadrature", draws=3), []
    for _ in range(300):
        share_nT = noise.noised(trace, cfg, whole, rng).share_nT
        estimates.append(bounds.lower_bound(np.repeat(logp_nT, 3, 0), share_nT, 3))
    want = np.where(answer_nT, logp_nT, 0).sum(axis=1)
    np.testing.assert_allclose(np.mean(estimates, axis=0), want, rtol=0.05)
    with pytest.raises(ValueError, match="draws=0"):
        NoiseConfig(kind="quadrature", draws=0)


# ---- Some of a trajectory's rounds -----------------------------------------------------


def weights(kind: NoiseConfig, aggregate: str, seed: int):
    """Returns each token's weight [n, T], and how many were picked."""
    trace = trajectories()
    trace = trace.replace(logp_BT=-np.random.default_rng(3).random(trace.step_BT.shape))
    batch, source = views.pack(
        trace,
        noise.noised(trace, kind, LAYOUT, np.random.default_rng(seed)),
        mask_id=66,
        layout=LAYOUT,
        cfg=BatchConfig(rows=1, tokens=48),
        most=8,
        aggregate=aggregate,
    )
    shape = trace.step_BT.shape
    picked_nT = source.scatter(np.ones(batch.weight_BU.shape), shape)
    return source.scatter(batch.weight_BU, shape), picked_nT


@pytest.mark.parametrize("pick", noise.PICKS)
@pytest.mark.parametrize("aggregate", ["token", "sequence", "step", "constant"])
def test_picked_rounds_stand_for_all_on_average(aggregate, pick):
    want_nT, all_nT = weights(NoiseConfig(), aggregate, 0)
    kind = NoiseConfig(rounds=2, pick=pick)
    drawn = [weights(kind, aggregate, seed) for seed in range(300)]
    weight = np.array([weight_nT for weight_nT, _ in drawn])
    error = weight.std(axis=0) / np.sqrt(len(drawn))
    assert (np.abs(weight.mean(axis=0) - want_nT) <= 4.5 * error + 1e-6).all()
    assert max(picked_nT.sum() for _, picked_nT in drawn) <= 3 * 2 * 2 < all_nT.sum()
    every = weights(NoiseConfig(rounds=5, pick=pick), aggregate, 0)
    np.testing.assert_array_equal(every, (want_nT, all_nT))


def test_a_round_surprises_by_the_mean_of_its_tokens(monkeypatch):
    """And not by their sum: else rounds of many tokens would be picked for their number."""
    trace, told = trajectories(), []
    trace = trace.replace(logp_BT=-np.random.default_rng(3).random(trace.step_BT.shape))

    def pick(surprisal, k, rng):
        told.append(surprisal)
        return np.ones(len(surprisal))

    monkeypatch.setitem(noise.PICKS, "surprise", pick)
    kind = NoiseConfig(rounds=1, pick="surprise")
    noise.noised(trace, kind, LAYOUT, np.random.default_rng(0))
    for i, found in enumerate(told):
        round_T = 100 * (np.arange(16) // 4) + trace.step_BT[i]  # a step of a block
        answer_T = noise.answers(trace)[i]
        mean_r = [
            -trace.logp_BT[i, answer_T & (round_T == x)].mean()
            for x in np.unique(round_T[answer_T])
        ]
        np.testing.assert_allclose(found, mean_r)
    assert len(told) == N


@pytest.mark.parametrize("pick", noise.PICKS)
def test_a_prompt_that_was_skipped_has_no_rounds(pick):
    trace = trajectories()
    trace = trace.replace(len_B=np.array([9, 0, 7]), logp_BT=-0.5 * trace.conf_BT)
    drawn = noise.noised(
        trace, NoiseConfig(rounds=2, pick=pick), LAYOUT, np.random.default_rng(0)
    )
    for x_nT in (drawn.share_nT, drawn.weight_nT):
        assert not x_nT[1].any() and x_nT[[0, 2]].any(axis=1).all()
