"""Factors of evidence bounds against automatic differentiation and by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.rl import bounds, noise, views
from dllm_jax.rl.config import BatchConfig
from dllm_jax.rl.layout import Layout
from tests.rl import dllm_rl


def test_the_upper_bounds_factors_by_hand():
    # One answer of 3 tokens, two draws: tokens {0, 1} of 3, then {1} of 3; power 2.
    share = np.array([[1.5, 1.5, 0], [0, 3.0, 0]])
    p = np.array([[0.5, 0.2, 1], [1, 0.4, 1]])
    adv = np.full((2, 3), -2.0)
    found = bounds.sandwich(
        adv, np.log(p), share, np.ones((2, 3), bool), draws=2, weight=1.0, power=2.0
    )
    # token 0: p^2 / mean(share p^2) = 0.25 / (0.375 / 2); token 1: mean is
    # (1.5 x 0.04 + 3 x 0.16) / 2 = 0.27; two of three tokens are covered: x 3/2
    expected = np.array([[4 / 3, 0.04 / 0.27, 0], [0, 0.16 / 0.27, 0]]) * 1.5 * -2
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_factors_are_the_gradient_of_the_bounds(weight):
    """sum of share x factor x grad log p is the gradient of A x bound, for each sign."""
    rng, draws, n, T, power = np.random.default_rng(0), 3, 5, 6, 1.5
    logp = -rng.exponential(2.0, (n, draws, T))
    share = np.where(rng.random((n, draws, T)) < 0.7, rng.uniform(1, 4, logp.shape), 0)
    share[0, :, 2] = 0  # no draw masks it
    adv_n = np.array([-1.0, 2.0, -0.5, 0.0, 0.3])

    def objective(logp):
        low = (share * logp).sum(axis=2).mean(axis=1)
        inner = (share * jnp.exp(power * logp)).mean(axis=1)
        covered = (share > 0).any(axis=1)
        up = jnp.where(covered, jnp.log(jnp.where(covered, inner, 1)) / power, 0)
        up = up.sum(axis=1) * T / covered.sum(axis=1)
        bound = jnp.where(adv_n < 0, weight * up + (1 - weight) * low, low)
        return (adv_n * bound).sum()

    adv_nT = np.repeat(adv_n, draws)[:, None] * np.ones(T)
    flat = logp.reshape(-1, T), share.reshape(-1, T)
    factor_nT = bounds.sandwich(
        adv_nT,
        *flat,
        np.ones_like(adv_nT, bool),
        draws=draws,
        weight=weight,
        power=power,
    )
    expected = jax.grad(objective)(jnp.asarray(logp)).reshape(-1, T)
    np.testing.assert_allclose(factor_nT * flat[1] / draws, expected, rtol=2e-5)


def test_improbable_tokens_do_not_underflow():
    logp = np.array([[-800.0], [-801.0]])
    found = bounds.sandwich(
        np.full((2, 1), -1.0),
        logp,
        np.ones((2, 1)),
        np.ones((2, 1), bool),
        draws=2,
        weight=1.0,
        power=1.0,
    )
    odds = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(found, [[-2 * odds], [-2 * (1 - odds)]], rtol=1e-6)


def test_the_lower_bound_is_unbiased():
    """Its mean over all subsets, as often as they are drawn, is that over all orders."""
    rng, n = np.random.default_rng(1), 3
    logp = {
        subset: np.where([i in subset for i in range(n)], -rng.exponential(1, n), 0)
        for size in range(1, n + 1)
        for subset in itertools.combinations(range(n), size)
    }
    orders = [
        sum(logp[tuple(sorted(order[k:]))][order[k]] for k in range(n))
        for order in itertools.permutations(range(n))
    ]
    total = 0.0
    for subset, logp_T in logp.items():
        share_T = np.where(logp_T != 0, n / len(subset), 0)
        chance = 1 / n / len([s for s in logp if len(s) == len(subset)])
        total += chance * bounds.lower_bound(logp_T[None], share_T[None], 1)[0]
    np.testing.assert_allclose(total, np.mean(orders), rtol=1e-6)


def test_preference_by_hand():
    policy, reference = np.array([-2.0, -5, -1, -1]), np.array([-3.0, -4, -1, -1])
    loss, factor, margin = bounds.preference(policy, reference, beta=0.5)
    np.testing.assert_allclose(margin, [1.0, 0.0])
    assert loss == pytest.approx((np.log(1 + np.exp(-1)) + np.log(2)) / 2)
    push = [0.25 / (1 + np.e), 0.125]  # beta / pairs x sigmoid(-margin)
    np.testing.assert_allclose(factor, [push[0], -push[0], push[1], -push[1]])


@pytest.mark.filterwarnings("error")  # exp of such a margin leaves the range of f32
def test_the_largest_margins_push_by_nothing_or_all():
    far = np.array([500, -500, -500, 500], np.float32)
    _, factor, margin = bounds.preference(far, np.zeros_like(far), beta=1.0)
    np.testing.assert_allclose(margin, [1000, -1000])
    np.testing.assert_allclose(factor, [0, 0, 0.5, -0.5])


def test_the_packed_gradient_is_that_of_the_preference_loss():
    """Through packing, draws and weights: as if the loss saw whole answers."""
    draws, T, block = 2, 8, 4
    lens = np.repeat([6, 3], draws)
    step = np.full((2 * draws, T), 0)
    step[0, [2, 3, 7]] = step[1, [3, 5, 6]] = step[2, [2, 4]] = step[3, [3, 4]] = 1
    trace = dllm_rl.trace(np.ones((4, T), int), step, np.full(4, 2), lens)
    # of 2 answer tokens in block 0; of 4 and of 1 in block 1
    share = np.where(step > 0, 1.0, 0)
    share[0, 2:4], share[0, 7] = 2 / 2, 4
    share[1, 3], share[1, 5:7] = 2, 4 / 2
    share[2, 2], share[3, 3] = 2, 2
    batch, source = views.pack(
        trace,
        noise.of_steps(step).replace(share_nT=share),
        mask_id=9,
        layout=Layout(block=block),
        cfg=BatchConfig(rows=1, tokens=16),
        most=4,
        aggregate="elbo",
    )
    assert batch.used > 1
    rng = np.random.default_rng(2)
    logp, ref = -rng.exponential(2, (2, 4, T))

    def loss(logp):
        def bound(x):
            return (share * x).sum(axis=1).reshape(2, draws).mean(axis=1)

        gain = 0.3 * (bound(logp) - bound(ref))
        return -jax.nn.log_sigmoid(gain[0] - gain[1])

    metrics, factor_nT = bounds.preference_factors(
        logp, ref, share, lens, draws=draws, beta=0.3
    )
    value, expected = jax.value_and_grad(loss)(jnp.asarray(logp))
    assert metrics["preference_loss"] == pytest.approx(float(value), rel=1e-5)
    got = source.scatter(-batch.weight_BU * source.gather(factor_nT), (4, T))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-8)
