"""Objectives against numbers worked out by hand, and against bad numbers in filling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.rl import objectives
from dllm_jax.rl.config import ObjectiveConfig
from dllm_jax.rl.views import TrainBatch


def batch(weight, **fields):
    """Returns a TrainBatch of one row with what an objective reads."""
    slots = dict.fromkeys(
        ("tokens_BT", "pos_BT", "begin_BT", "end_BT", "group_BT", "where_BU")
    )
    given = {k: jnp.asarray([v], jnp.float32) for k, v in fields.items()}
    return TrainBatch(
        used=1,
        target_BU=None,
        weight_BU=jnp.asarray([weight], jnp.float32),
        **slots,
        **given,
    )


def out(**fields):
    """Returns a network's outputs, one row."""
    given = {k: jnp.asarray([v], jnp.float32) for k, v in fields.items()}
    return {"entropy": jnp.zeros_like(next(iter(given.values()))), **given}


@pytest.mark.parametrize(
    ("delta", "k3"),
    [(-1, 0.718282), (-0.1, 0.005171), (0, 0), (0.1, 0.004837), (1, 0.367879)],
)
def test_kl_estimators(delta, k3):
    assert float(objectives.kl(jnp.float32(delta), "k3")) == pytest.approx(k3, abs=1e-6)
    assert float(objectives.kl(jnp.float32(delta), "k1")) == pytest.approx(delta)


@pytest.mark.parametrize("delta", [-1e-4, 1e-4, 2e-5])
def test_k3_of_near_policies_is_more_than_rounding(delta):
    told = float(objectives.kl(jnp.float32(delta), "k3"))
    assert told == pytest.approx(delta**2 / 2, rel=0.05)


def test_k3_clamps_its_exponent():
    far = jnp.array([-50.0, 50.0])
    np.testing.assert_allclose(
        objectives.kl(far, "k3"), [np.exp(10) - 51, np.exp(-10) + 49], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("ratio", "adv", "surrogate", "slope"),
    [
        # min(rho A, clip(rho, .8, 1.2) A), and its derivative by log pi: rho A or 0
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),
        (1.5, 2.0, 2.4, 0.0),  # too far up already
        (0.5, 2.0, 1.0, 1.0),  # pulled back up
        (1.5, -2.0, -3.0, -3.0),  # pushed back down
        (0.5, -2.0, -1.6, 0.0),
        (0.9, -2.0, -1.8, -1.8),
    ],
)
def test_clipped_surrogate(ratio, adv, surrogate, slope):
    cfg = ObjectiveConfig(clip=0.2, beta=0.0)
    b = batch([0.5], adv_BU=[adv], old_logp_BU=[-3.0])

    def loss(logp):
        return objectives.policy(out(logp=[logp]), b, cfg)

    logp = -3.0 + np.log(ratio)
    (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(logp))
    assert float(value) == pytest.approx(-0.5 * surrogate, rel=1e-5)
    assert float(grad) == pytest.approx(-0.5 * slope, rel=1e-5, abs=1e-6)
    assert float(sums["clip_fraction"]) == (slope == 0)
    assert float(sums["policy_loss"]) == pytest.approx(-0.5 * surrogate, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "adv", "surrogate"),
    [(1.25, 2.0, 2.5), (1.5, 2.0, 2.6), (0.5, -2.0, -1.6), (1.5, -2.0, -3.0)],
)
def test_clip_higher_moves_the_upper_bound_alone(ratio, adv, surrogate):
    cfg = ObjectiveConfig(clip=0.2, clip_high=0.3, beta=0.0)
    b = batch([0.5], adv_BU=[adv], old_logp_BU=[-3.0])
    loss, _ = objectives.policy(out(logp=[-3.0 + np.log(ratio)]), b, cfg)
    assert float(loss) == pytest.approx(-0.5 * surrogate, rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_linear_is_the_policy_gradient(kind):
    """-w A grad log pi, whatever policy sampled and however far it has moved since."""
    cfg = ObjectiveConfig(beta=0.5, reference_beta=0.3, kl=kind)
    logp, ref = np.array([-1.0, -5.0, -2.0]), np.array([-1.5, -3.0, -2.0])
    w, adv = np.array([0.5, 0.25, 1.0]), np.array([2.0, -3.0, 0.5])
    b = batch(w, adv_BU=adv, old_logp_BU=[-9.0, -0.1, -2.0], ref_logp_BU=ref)

    def loss(logp):
        return objectives.linear(out(logp=logp), b, cfg)

    (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logp))
    delta = logp - ref
    kl = delta if kind == "k1" else np.exp(-delta) - 1 + delta
    slope = 1 if kind == "k1" else 1 - np.exp(-delta)
    np.testing.assert_allclose(value, w @ (-adv + 0.3 * kl), rtol=1e-6)
    np.testing.assert_allclose(grad, w * (-adv + 0.3 * slope), rtol=1e-6)
    assert not {"kl", "clip_fraction"} & set(sums)  # to itself: always 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_to_both_anchors(kind):
    cfg = ObjectiveConfig(beta=0.1, reference_beta=0.3, kl=kind)
    b = batch(
        [0.5, 0.25], adv_BU=[0, 0], old_logp_BU=[-2.0, -1.0], ref_logp_BU=[-1.5, -3.0]
    )
    logp = np.array([-1.0, -1.25])
    loss, sums = objectives.policy(out(logp=logp), b, cfg)

    def estimate(delta):
        return delta if kind == "k1" else np.exp(-delta) - 1 + delta

    to_old, to_ref = estimate(logp - [-2, -1]), estimate(logp - [-1.5, -3])
    expected = np.array([0.5, 0.25]) @ (0.1 * to_old + 0.3 * to_ref)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(sums["reference_kl"]) == pytest.approx(to_ref.sum(), rel=1e-5)
    # The logged KL is k3 whatever the loss uses.
    delta = logp - [-2, -1]
    assert float(sums["kl"]) == pytest.approx((np.exp(-delta) - 1 + delta).sum(), 1e-5)


def test_log_ratios_are_clamped_before_exp():
    cfg = ObjectiveConfig(beta=0.0)
    b = batch([1.0], adv_BU=[-1.0], old_logp_BU=[-200.0])
    loss, _ = objectives.policy(out(logp=[-1.0]), b, cfg)
    assert float(loss) == pytest.approx(np.exp(10.0), rel=1e-5)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        # old 1, clip .2, return R: 1/2 max((V - R)^2, (clip(V, .8, 1.2) - R)^2)
        (1.1, 2.0, 0.5 * 0.81, -0.9),
        (1.5, 2.0, 0.5 * 0.64, 0.0),  # too far towards the return: the clipped one
        (0.5, 2.0, 0.5 * 2.25, -1.5),  # moved away from it: the free one
        (3.5, 2.0, 0.5 * 2.25, 1.5),
        (0.5, 0.0, 0.5 * 0.64, 0.0),  # too far down towards it
    ],
)
def test_clipped_value(value, target, loss, slope):
    b = batch([0.5], ret_BU=[target], old_value_BU=[1.0])

    def run(value):
        return objectives.value(out(value=[value]), b, ObjectiveConfig(clip=0.2))

    (found, sums), grad = jax.value_and_grad(run, has_aux=True)(jnp.float32(value))
    assert float(found) == pytest.approx(0.5 * loss, rel=1e-5)
    assert float(sums["value_loss"]) == pytest.approx(0.5 * loss, rel=1e-5)
    assert float(grad) == pytest.approx(0.5 * slope, rel=1e-5, abs=1e-6)


def test_nll_is_weighed():
    b = batch([0.5, 0.25, 0.0])
    loss, sums = objectives.nll(
        out(logp=[-2.0, -4.0, -np.inf], entropy=[1.0, 2.0, np.nan]),
        b,
        ObjectiveConfig(),
    )
    assert float(loss) == float(sums["loss"]) == 2.0
    assert float(sums["entropy"]) == 3.0


@pytest.mark.parametrize("filling", [-np.inf, np.inf, np.nan, 1e30, -1e30])
def test_filling_contributes_nothing(filling):
    """Neither to the loss, its gradient, nor a metric, whatever log-probs stand there."""
    cfg = ObjectiveConfig(reference_beta=0.5)
    clean = batch(
        [0.5, 0.0], adv_BU=[1.5, 0.0], old_logp_BU=[-2.0, 0.0], ref_logp_BU=[-2.5, 0.0]
    )
    dirty = clean.replace(
        old_logp_BU=clean.old_logp_BU.at[0, 1].set(filling),
        ref_logp_BU=clean.ref_logp_BU.at[0, 1].set(filling),
    )

    def run(logp, b):
        return objectives.policy({"logp": logp, "entropy": logp}, b, cfg)

    logp = jnp.array([[-1.0, -7.0]])
    (one, one_sums), one_grad = jax.value_and_grad(run, has_aux=True)(logp, clean)
    (two, two_sums), two_grad = jax.value_and_grad(run, has_aux=True)(logp, dirty)
    assert float(one) == float(two) != 0
    assert jax.tree.map(float, one_sums) == jax.tree.map(float, two_sums)
    np.testing.assert_array_equal(one_grad, two_grad)
    assert one_grad[0, 0] != 0 and one_grad[0, 1] == 0
    alone = batch([0.5], adv_BU=[1.5], old_logp_BU=[-2.0], ref_logp_BU=[-2.5])
    loss, sums = run(logp[:, :1], alone)
    assert float(loss) == pytest.approx(float(two))
    assert jax.tree.map(float, sums) == pytest.approx(jax.tree.map(float, two_sums))


def test_which_losses_rl_may_name_and_which_have_factors():
    plain, answers = {"policy", "dipo", "spg"}, {"sequence", "stable"}
    assert set(objectives.RL_LOSSES) == plain | answers
    rows = objectives.OBJECTIVES.items()
    assert {name for name, row in rows if row.bounds} == {"spg", "dpo", "stable"}
    assert {name for name, row in rows if row.answers} == answers


@pytest.mark.parametrize("kind", ["dpo", "sequence", "stable"])
def test_a_sum_over_factors_of_answers_is_no_metric(kind):
    given = batch([0.5, 0.5], adv_BU=[3.0, -3.0])
    told = out(logp=[-1.0, -2.0], entropy=[0.5, 0.25])
    _, sums = objectives.OBJECTIVES[kind](told, given, ObjectiveConfig())
    assert jax.tree.map(float, sums) == {"entropy": 0.75}


@pytest.mark.parametrize(
    ("eps", "want"),
    [
        (-1.0, (2.0 - 0.2) ** 2 / 2),  # objective.clip's 0.2
        (0.5, (2.0 - 0.5) ** 2 / 2),
        (0.0, (2.0 - 1.5) ** 2 / 2),  # off: the plain square
    ],
)
def test_the_value_has_a_clip_of_its_own(eps, want):
    given = batch([1.0], old_value_BU=[0.0], ret_BU=[2.0])
    loss, _ = objectives.value(out(value=[1.5]), given, ObjectiveConfig(value_clip=eps))
    assert float(loss) == pytest.approx(want)


@pytest.mark.parametrize("kind", ["policy", "dipo"])
def test_an_entropy_bonus_raises_the_weighed_entropy_alone(kind):
    given = batch([0.5, 0.25, 0.0], adv_BU=[0, 0, 0], old_logp_BU=[-1, -1, -1])
    entropy_BU = jnp.asarray([[0.3, 0.7, np.inf]])  # the last is filling

    def loss(entropy_BU, bonus):
        cfg = ObjectiveConfig(entropy_bonus=bonus, beta=0.0)
        told = out(logp=[-1, -1, 0]) | {"entropy": entropy_BU}
        return objectives.OBJECTIVES[kind](told, given, cfg)[0]

    found = jax.grad(loss)(entropy_BU, 0.1)
    np.testing.assert_allclose(found, [[-0.05, -0.025, 0]], atol=1e-7)
    assert float(loss(entropy_BU, 0.1)) == pytest.approx(-0.1 * (0.15 + 0.175))
    assert not np.asarray(jax.grad(loss)(entropy_BU, 0.0)).any()


def test_a_scheduled_anchor_takes_the_place_of_the_fixed_one():
    told = {"adv_BU": [1.0], "old_logp_BU": [-1.0], "ref_logp_BU": [-2.0]}
    given, logp = batch([1.0], **told), out(logp=[-1.0])

    def loss(given, beta):
        cfg = ObjectiveConfig(reference_beta=beta)
        return float(objectives.policy(logp, given, cfg)[0])

    scheduled = given.replace(reference_beta=jnp.float32(0.3))
    assert loss(scheduled, 0.9) == pytest.approx(loss(given, 0.3))
    assert loss(given, 0.9) != pytest.approx(loss(given, 0.3))
