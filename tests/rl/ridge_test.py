"""The critic of the trace: against normal equations, and blind to what comes later."""

import json

import numpy as np
import pytest

from dllm_jax.models.mask import FAR
from dllm_jax.rl import batches, noise, ridge
from dllm_jax.rl.config import NoiseConfig, ObjectiveConfig, RLConfig
from dllm_jax.sampling.state import GIVEN
from tests.rl import common, dllm_rl

LONGEST = 8


def sampled(seed=0, n=6, T=14):
    """Returns the trace of n prompts of 3 tokens, with 1 to 3 tokens a step behind them.

    The last two positions stay masked.
    """
    rng = np.random.default_rng(seed)
    step_nT = np.full((n, T), FAR)
    step_nT[:, :3] = GIVEN
    for i in range(n):
        order = 3 + rng.permutation(T - 5)
        step_nT[i, order] = 1 + np.cumsum(rng.random(T - 5) < 0.6)
    trace = dllm_rl.trace(np.zeros((n, T)), step_nT, np.full(n, 3), np.full(n, 7))
    return trace.replace(logp_BT=-rng.exponential(0.5, (n, T)).astype(np.float32))


def by_hand(trace, i: int, t: int) -> np.ndarray:
    """Returns the features of one token, from their words."""
    step_T = trace.step_BT[i]
    before_T = (step_T != GIVEN) & (step_T < step_T[t])
    logp = np.float64(trace.logp_BT[i][before_T])
    p, count = np.exp(logp), before_T.sum()
    found = {
        "one": 1,
        "any": count > 0,
        "count": count / LONGEST,
        "count squared": (count / LONGEST) ** 2,
        "reach": (max(np.flatnonzero(before_T), default=2) - 2) / LONGEST,
        "steps": len(set(step_T[before_T])) / LONGEST,
        "log-prob": logp.sum(),
        "log-prob, mean": logp.mean() if count else 0,
        "log-prob, least": logp.min(initial=0),
        "log-prob, squares": (logp**2).sum(),
        "likelihood": p.prod(),
        "probability, least": p.min(initial=1),
        "doubt": (1 - p).sum(),
        "log-doubt, mean": np.log(1 - p).mean() if count else 0,
        "entropy": -(p * logp + (1 - p) * np.log(1 - p)).sum(),
        "below 0.5": (p < 0.5).sum(),
        "below 0.9": (p < 0.9).sum(),
    }
    return np.array([found[name] for name in ridge.FEATURES], float)


def test_features_say_what_their_names_say():
    trace = sampled()
    x_nTk = ridge.features(trace, trace.step_BT, LONGEST)
    unmasked = noise.unmasked(trace.step_BT)
    for i, t in zip(*np.nonzero(unmasked), strict=True):
        np.testing.assert_allclose(x_nTk[i, t], by_hand(trace, i, t), atol=1e-9)
    assert not x_nTk[~unmasked].any()


def test_a_value_sees_earlier_steps_alone():
    """Whatever is sampled at a step or after it: the step's values are the same."""
    trace, other = sampled(), sampled(1)
    critic = ridge.Ridge(LONGEST)
    critic.add(
        np.random.default_rng(2).normal(size=(50, len(ridge.FEATURES))), np.ones(50)
    )
    value_nT = critic.judge(trace, noise.of_steps(trace.step_BT))
    changed = 0
    for step in range(
        1, trace.step_BT[0].max(where=trace.step_BT[0] != FAR, initial=0)
    ):
        late_nT = (trace.step_BT >= step) & (trace.step_BT != FAR)
        later = trace.replace(
            logp_BT=np.where(late_nT, other.logp_BT, trace.logp_BT),
            tokens_BT=np.where(late_nT, 7, trace.tokens_BT),
            len_B=trace.len_B + 1,
        )
        # What comes after the step comes in another order, too.
        after_nT = late_nT & (trace.step_BT > step)
        later = later.replace(step_BT=np.where(after_nT, step + 1, trace.step_BT))
        found_nT = critic.judge(later, noise.of_steps(later.step_BT))
        upto_nT = noise.unmasked(trace.step_BT) & (trace.step_BT <= step)
        np.testing.assert_array_equal(found_nT[upto_nT], value_nT[upto_nT])
        changed += (found_nT != value_nT).any()
    assert changed  # it does see what is earlier


def test_tokens_of_a_step_share_a_value_and_tails_of_certainty_are_finite():
    trace = sampled()
    trace = trace.replace(logp_BT=np.where(trace.step_BT % 2, 0.0, -np.float32(500)))
    x_nTk = ridge.features(trace, trace.step_BT, LONGEST)
    assert np.isfinite(x_nTk).all()
    for i, step_T in enumerate(trace.step_BT):
        for step in set(step_T[noise.unmasked(step_T)]):
            assert len(np.unique(x_nTk[i, step_T == step], axis=0)) == 1


def test_the_regression_is_the_closed_form():
    rng, size = np.random.default_rng(4), len(ridge.FEATURES)
    parts = [(rng.normal(size=(n, size)), rng.normal(size=n)) for n in (40, 70, 9)]
    for x_uk, _ in parts:
        x_uk[:, 3] = 0  # a feature that never varied
    critic = ridge.Ridge(LONGEST)
    assert not critic.weights().any()
    for part in parts:
        critic.add(*part)
    # As least squares: rows weighed by age, and a row for each feature's penalty.
    age = [ridge.KEPT ** (len(parts) - 1 - i) for i in range(len(parts))]
    x = np.concatenate([np.sqrt(a) * x for a, (x, _) in zip(age, parts, strict=True)])
    y = np.concatenate([np.sqrt(a) * y for a, (_, y) in zip(age, parts, strict=True)])
    count = sum(a * len(y) for a, (_, y) in zip(age, parts, strict=True))
    square_k = (x**2).sum(axis=0) / count
    square_k[3] = 1
    x = np.concatenate([x, np.diag(np.sqrt(ridge.PENALTY * square_k))])
    want, *_ = np.linalg.lstsq(x, np.append(y, np.zeros(size)), rcond=None)
    np.testing.assert_allclose(critic.weights(), want, rtol=1e-5, atol=1e-7)


def test_what_it_remembers_is_all_there_is_to_it():
    rng, size = np.random.default_rng(5), len(ridge.FEATURES)
    critic = ridge.Ridge(LONGEST)
    critic.add(rng.normal(size=(30, size)), rng.normal(size=30))
    again = ridge.Ridge(LONGEST, json.loads(json.dumps(critic.memory)))
    for one in (critic, again):
        one.add(rng.normal(size=(1, size)) * 0 + 0.1, np.ones(1))
    assert critic.memory == again.memory
    assert critic.weights().tobytes() == again.weights().tobytes()
    with pytest.raises(ValueError, match="has 2 features, this version's"):
        ridge.Ridge(LONGEST, {"gram": np.eye(2), "moment": [0, 0], "tokens": 1})


def step(critic, rl):
    """Returns (metrics, batches) of a step of batches.of_rollouts with a critic."""
    sampled = common.rollouts()
    asked = []

    def score(params, batch):
        asked.extend(params)
        zeros = np.zeros(batch.where_BU.shape, np.float32)
        return {"policy": {"logp": zeros, "entropy": zeros}}

    metrics, made, _ = batches.of_rollouts(
        sampled,
        np.random.default_rng(0),
        rl=rl,
        objective=ObjectiveConfig(),
        noised=noise.noised(sampled.trace, NoiseConfig(), common.LAYOUT),
        as_sampled=True,
        params={"policy": None},
        pack=lambda trace, noised, group_n: common.packed(trace, noised),
        score=score,
        mesh=common.one_device(),
        critic=critic,
    )
    assert set(asked) == {"policy"}  # there is no network to score
    return metrics, made


def test_a_step_is_judged_before_it_is_learned_from():
    rl = RLConfig(prompts=2, group=4, value="trace")
    critic = ridge.Ridge(12)
    before = critic.memory
    first, made = step(critic, rl)
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert not any(np.asarray(batch.old_value_BU).any() for batch in made)
    assert critic.memory != before
    again, made = step(critic, rl)  # the same answers: it has seen their rewards
    assert again["explained_variance"] > 0.03
    assert {"explained_variance_first", "explained_variance_last"} <= again.keys()
    (batch,) = made
    real = np.asarray(batch.weight_BU) > 0
    gain = np.asarray(batch.ret_BU - batch.old_value_BU)[real]
    np.testing.assert_allclose(np.asarray(batch.adv_BU)[real], gain, atol=1e-5)
