"""A step's batches: what is scored, what the sampler's record may stand for, the fill."""

import dataclasses
import functools
import itertools
import threading

import numpy as np
import pytest

from dllm_jax import config
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import batches, bounds, noise, objectives, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    RLConfig,
)
from dllm_jax.sampling.config import SamplerConfig
from tests.rl.common import LAYOUT, one_device, packed, rollouts

RL = RLConfig(prompts=2, group=4, value="own", updates=2)


def made(off, rl=RL, as_sampled=True, packing=lambda: None, scoring=lambda: None):
    """Returns (metrics, batches, what was scored of whom) where the policy is off so far.

    off: nats, of all tokens or, [m, 1, 1], of each microbatch. packing, scoring: called
    where a deal is packed, or scored.
    """
    sampled, asked = rollouts(), []
    noised = noise.noised(sampled.trace, NoiseConfig(), LAYOUT)
    sources = {}

    def pack(trace, noised, group_n):
        packing()
        batch, source = packed(trace, noised)
        sources[batch.target_BU.tobytes()] = source, trace.logp_BT
        return batch, source

    def score(params, batch):
        ((name, _),) = params.items()
        scoring()
        asked.append((name, int(batch.used)))
        source, logp = sources[np.asarray(batch.target_BU).tobytes()]
        logp_mBU = source.gather(logp) + np.asarray(off, np.float32)
        logp_mBU[int(batch.used) :] = 0
        zeros = np.zeros_like(logp_mBU)
        return {name: {"logp": logp_mBU, "entropy": zeros, "value": zeros}}

    metrics, out, _ = batches.of_rollouts(
        sampled,
        np.random.default_rng(0),
        rl=rl,
        noised=noised,
        as_sampled=as_sampled,
        objective=ObjectiveConfig(),
        params={"policy": None, "value": None},
        pack=pack,
        score=score,
        mesh=one_device(),
    )
    recorded = [
        sources[np.asarray(batch.target_BU).tobytes()][0].gather(logp)
        for batch, (_, logp) in zip(out, sources.values(), strict=True)
    ]
    return metrics, out, recorded, asked


def test_old_log_probs_are_scored():
    metrics, out, recorded, asked = made(0.01)
    # A trajectory is 8 clean tokens and 8 rounds of 4: one of 40 to a row of 48.
    assert asked == [("policy", 2), ("value", 2)] * 2
    for batch, logp in zip(out, recorded, strict=True):
        real = np.asarray(batch.weight_BU) > 0
        np.testing.assert_allclose(
            batch.old_logp_BU[real], logp[real] + 0.01, rtol=1e-5
        )
    assert metrics["logprob_gap_max"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["packed_fill"] == pytest.approx(40 / 48)
    assert "updates_trusted" not in metrics
    assert "logprob_gap_max" not in made(0.01, as_sampled=False)[0]


def test_a_deal_is_packed_while_the_one_before_it_is_scored():
    begun, number = threading.Event(), itertools.count()

    def packing():
        assert next(number) == 0 or begun.wait(10)

    made(0.0, packing=packing, scoring=begun.set)
    assert next(number) == RL.updates


def test_the_samplers_record_stands_while_it_is_near():
    rl = dataclasses.replace(RL, trusted_gap=0.02)
    metrics, out, recorded, asked = made(0.01, rl)
    assert asked == [("policy", 1), ("value", 2)] * 2
    for batch, logp in zip(out, recorded, strict=True):
        np.testing.assert_array_equal(batch.old_logp_BU, logp)
    assert metrics["logprob_gap_max"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["updates_trusted"] == 1
    metrics, out, recorded, asked = made(0.03, rl)
    assert asked == [("policy", 1), ("policy", 2), ("value", 2)] * 2
    assert metrics["updates_trusted"] == 0


def test_without_a_gap_to_trust_the_record_never_stands():
    asked = made(0.0, dataclasses.replace(RL, trusted_gap=0.0))[-1]
    assert asked == [("policy", 2), ("value", 2)] * 2


def test_every_gap_counts_once_where_the_record_does_not_stand():
    rl = dataclasses.replace(RL, trusted_gap=0.02)
    off_m11 = np.array([0.05, 0.01, 0, 0])[:, None, None]
    metrics, out, recorded, _ = made(off_m11, rl)
    gaps = [
        np.abs(batch.old_logp_BU - logp)[np.asarray(batch.weight_BU) > 0]
        for batch, logp in zip(out, recorded, strict=True)
    ]
    mean = np.concatenate(gaps).mean()
    assert metrics["updates_trusted"] == 0
    assert metrics["logprob_gap_mean"] == pytest.approx(mean, rel=1e-3)
    assert metrics["logprob_gap_max"] == pytest.approx(0.05, rel=1e-3)


def test_tokens_that_were_picked_tell_no_bias():
    noised = noise.noised(rollouts().trace, NoiseConfig(), LAYOUT)
    gaps = [[np.array([0.1, 0.3]), np.array([0.5, 0.7])]]
    scores = batches.Scores(None, None, None, gaps, np.array([False]), [None])
    told = batches.told_of([], scores, noised, RL, as_sampled=True)
    assert told["selection_bias"] == pytest.approx(0.6)
    picked = noised.replace(weight_nT=np.ones_like(noised.share_nT))
    of_picked = batches.told_of([], scores, picked, RL, as_sampled=True)
    assert of_picked == {x: told[x] for x in told if x != "selection_bias"}


def test_what_teaches_is_dealt_once_with_its_rows_side_by_side():
    keep_n = np.arange(9) % 4 != 1
    hands = batches.dealt_rows(keep_n, np.random.default_rng(3), updates=3, copies=2)
    assert [len(row_n) for row_n in hands] == [6, 4, 4]  # of 7 trajectories
    pairs = np.concatenate(hands).reshape(-1, 2)
    np.testing.assert_array_equal(pairs[:, 1], pairs[:, 0] + 1)
    dealt_n = pairs[:, 0] // 2
    assert sorted(dealt_n) == list(np.flatnonzero(keep_n)) != list(dealt_n)
    few = batches.dealt_rows(
        np.arange(9) == 4, np.random.default_rng(3), updates=3, copies=1
    )
    np.testing.assert_array_equal(few, [[4]])


@pytest.mark.parametrize("likelihood", ["tokens", "selection"])
def test_what_is_dropped_teaches_a_value_of_all_that_counts(likelihood):
    """Where steps count these are draws behind the stop token, too: in them it earns."""
    sampled = rollouts()
    short = sampled.trace.replace(len_B=np.full(8, 6, np.int32))
    sampled = dataclasses.replace(sampled, trace=short)
    objective = ObjectiveConfig(likelihood=likelihood)
    model = ModelConfig(block=4, mask_id=99)
    sampler = SamplerConfig(block=4, max_prompt=4, max_new=12)
    layout = layouts.of(model, sampler, NoiseConfig(), objective)
    blank = np.zeros((16, 1, layout.seats(BatchConfig(tokens=48))), np.float32)
    (made,) = batches.of_dropped(
        sampled,
        np.random.default_rng(0),
        rl=dataclasses.replace(RL, advantage="none", min_solved=0.5, updates=1),
        noised=noise.noised(short, NoiseConfig(), layout),
        params={"value": None},
        pack=functools.partial(
            views.pack,
            mask_id=99,
            layout=layout,
            cfg=BatchConfig(rows=1, tokens=48),
            most=16,
            aggregate="token",
        ),
        score=lambda params, batch: {"value": {"value": blank}},
        mesh=one_device(),
        objective=objective,
    )
    real = np.asarray(made.weight_BU) > 0
    each = 6 if likelihood == "tokens" else 8
    assert real.sum() == 4 * each  # the first group is solved too seldom
    assert (np.asarray(made.ret_BU)[real] == 1).sum() == each  # of its one right answer


def test_a_batch_gets_arrays_by_their_names():
    """Whatever their order, each token gets its own number of each."""
    metrics, out, _, _ = made(0.0)
    assert metrics["groups_kept"] == 2
    for batch in out:
        assert all(getattr(batch, name) is not None for name in batches.RL_FIELDS)
    row_n, T = np.array([2, 0]), 16
    trace = batches.take(rollouts().trace, row_n)
    noised = noise.noised(trace, NoiseConfig(), LAYOUT)
    batch, source = packed(trace, noised)
    dealt = batches.Deal(row_n, batch, source, source.gather(trace.logp_BT))
    adv_nT = np.arange(8 * T, dtype=np.float32).reshape(8, T)
    fields = {"ret_BU": 1000 + adv_nT, "adv_BU": adv_nT}
    complete = batches.attached(dealt, fields, one_device())
    np.testing.assert_array_equal(
        source.scatter(complete.adv_BU, (2, T))[:, 4:12], adv_nT[row_n, 4:12]
    )
    real_mBU = source.row_mBU >= 0
    np.testing.assert_array_equal(
        complete.ret_BU, np.where(real_mBU, complete.adv_BU + 1000, 0)
    )
    assert complete.old_logp_BU is None


def test_pairs_get_the_factors_of_what_was_scored():
    """Two pairs, each answer with two rows of noise; the numbers go by token."""
    examples = batches.take(rollouts().trace, np.arange(4))
    cfg = NoiseConfig(kind="subset", draws=2)
    rng = np.random.default_rng(1)
    noised = noise.noised(examples, cfg, LAYOUT, rng)
    policy_nT, reference_nT = -rng.random((2, *noised.step_nT.shape), np.float32)
    sources = []

    def pack(trace, noised):
        batch, source = packed(trace, noised, copies=2)
        sources.append(source)
        return batch, source

    def score(batch):
        scored = {"policy": policy_nT, "reference": reference_nT}
        return {name: {"logp": sources[0].gather(x)} for name, x in scored.items()}

    metrics, (batch,) = batches.of_examples(
        examples,
        noised=noised,
        copies=2,
        pack=pack,
        mesh=one_device(),
        score=score,
        compare=lambda outputs, share_nT, len_n: bounds.preference_factors(
            outputs["policy"]["logp"],
            outputs["reference"]["logp"],
            share_nT,
            len_n,
            draws=2,
            beta=0.3,
        ),
    )
    expected, factor_nT = bounds.preference_factors(
        policy_nT, reference_nT, noised.share_nT, np.full(8, 8), draws=2, beta=0.3
    )
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(number, rel=1e-5)
    assert len(np.unique(factor_nT)) == 4  # of each answer, whatever the draw
    np.testing.assert_allclose(batch.adv_BU, sources[0].gather(factor_nT), rtol=1e-5)
    assert batches.PAIR_FIELDS == ("adv_BU",) and batch.old_logp_BU is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rl.trusted_gap": -0.5}, "trusted_gap=-0.5: nats, 0 or more; or -1"),
        ({"rl.trusted_gap": 0.1, "rl.value": "head"}, "rl.value='head'"),
        (
            {"rl.trusted_gap": 0.1, "noise.kind": "bernoulli"},
            "'trace', not 'bernoulli'",
        ),
    ],
)
def test_what_cannot_be_trusted_is_refused(changes, words):
    tree = config.default()
    tree.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=words):
        config.freeze(tree)


def test_importance_is_of_supervised_tokens_alone():
    """By hand; where a round was left out nothing was scored, and logp says 0."""
    drawn_nT = np.log(np.array([[0.5, 0.5, 0.25, 0.1]]))
    logp_nT = np.log(np.array([[0.75, 0.25, 1.0, 1.0]]))
    seen_nT = np.array([[True, True, True, False]])
    weight_nT, told = batches.importance(logp_nT, drawn_nT, seen_nT, 2.0)
    np.testing.assert_allclose(weight_nT, [[1.5, 0.5, 2, 1]])
    assert told["importance"] == pytest.approx((1.5 + 0.5 + 4) / 3)
    assert told["importance_capped"] == pytest.approx(1 / 3)
    assert batches.importance(logp_nT, drawn_nT, seen_nT, 0.0) == (1.0, {})


def test_picked_rounds_have_the_importance_of_all():
    """A trainer that finds each token 1.25 times as likely as the sampler: at any round."""
    trace = rollouts().trace
    trace = trace.replace(conf_BT=np.exp(trace.logp_BT))
    noised = noise.noised(
        trace, NoiseConfig(rounds=1), LAYOUT, np.random.default_rng(0)
    )
    answer_nT, shape = noise.answers(trace), trace.logp_BT.shape
    seen_nT = answer_nT & (noised.share_nT > 0)
    assert 0 < seen_nT.sum() < answer_nT.sum()
    logp_nT = np.where(seen_nT, trace.logp_BT + np.log(np.float32(1.25)), 0)
    scores = batches.Scores(logp_nT, np.zeros(shape), np.zeros(shape), [], [], [])
    rows = [np.arange(8)]
    learned = batches.Learned(trace, noised, answer_nT, np.ones(8, bool), rows, 1)
    cfg = ObjectiveConfig(importance_cap=2.0)
    fields, told = batches.fields_of(np.ones(shape), logp_nT, scores, learned, cfg)
    assert told == {"importance": pytest.approx(1.25), "importance_capped": 0}
    np.testing.assert_allclose(fields["adv_BU"][seen_nT], 1.25, rtol=1e-5)


@pytest.mark.parametrize("loss", objectives.RL_LOSSES)
def test_losses_of_bounds_have_factors_for_advantages(loss):
    trace, cfg = rollouts().trace, NoiseConfig(kind="subset", draws=2)
    noised = noise.noised(trace, cfg, LAYOUT, np.random.default_rng(0))
    trace = batches.take(trace, np.repeat(np.arange(8), 2))
    answer_nT = noise.answers(trace)
    adv_nT = np.where(answer_nT, -1.0, 0.0)
    objective = ObjectiveConfig(loss=loss, upper_weight=0.25, upper_power=2.0)
    given = adv_nT, trace.logp_BT, answer_nT, noised, objective
    want = adv_nT
    if loss in ("spg", "stable"):
        scored = adv_nT, trace.logp_BT, noised.share_nT, answer_nT
        want = bounds.sandwich(*scored, draws=2, weight=0.25, power=2.0)
        assert (want != adv_nT).any()
    np.testing.assert_array_equal(batches.factors(*given, draws=2), want)


@pytest.mark.parametrize("loss", ["policy", "sequence"])
def test_answers_are_numbered_within_their_update(loss):
    """All rows of noise of one have its number; a loss of tokens asks for none."""
    trace = rollouts().trace
    noised = noise.noised(trace, NoiseConfig(), LAYOUT)
    zeros_nT = np.zeros(trace.logp_BT.shape, np.float32)
    scores = batches.Scores(zeros_nT, zeros_nT, zeros_nT, [], np.array([]), [])
    rows = [np.array([6, 7, 0, 1]), np.array([2, 3]), np.array([4, 5])]
    answer_nT, right_n = noise.answers(trace), np.arange(8) < 2
    learned = batches.Learned(trace, noised, answer_nT, right_n, rows, 2)
    cfg = ObjectiveConfig(loss=loss, nll_weight=0.5)
    fields, _ = batches.fields_of(zeros_nT, zeros_nT, scores, learned, cfg)
    np.testing.assert_array_equal(fields["right_BU"].all(axis=1), right_n)
    assert ("answer_BU" in fields) == (loss == "sequence")
    if loss == "sequence":
        want_n1 = np.array([1, 1, 0, 0, 0, 0, 0, 0])[:, None]
        np.testing.assert_array_equal(fields["answer_BU"], want_n1 + zeros_nT)


@pytest.mark.parametrize(
    ("masked", "fill"), [((), 0), ((0,), 40 / 96), (range(8), 40 / 48)]
)
def test_an_update_whose_noise_masks_nothing_is_none(masked, fill):
    """Answers of which the noise masks some: those of an update may all be shown."""
    given = rollouts()
    noised = noise.noised(given.trace, NoiseConfig(), LAYOUT)
    share_nT = np.where(np.isin(np.arange(8), masked)[:, None], noised.share_nT, 0)
    noised = noised.replace(share_nT=share_nT.astype(np.float32))
    rl = dataclasses.replace(RL, value="none", updates=4, whiten=True)

    def score(params, batch):
        zeros = np.zeros(batch.where_BU.shape, np.float32)
        return {"policy": {"logp": zeros, "entropy": zeros}}

    metrics, made_batches, _ = batches.of_rollouts(
        given,
        np.random.default_rng(0),
        rl=rl,
        noised=noised,
        as_sampled=False,
        objective=ObjectiveConfig(),
        params={"policy": None},
        pack=lambda trace, noised, group_n: packed(trace, noised),
        score=score,
        mesh=one_device(),
    )
    assert len(made_batches) == min(len(masked), 4)
    assert all((np.asarray(batch.weight_BU) > 0).any() for batch in made_batches)
    assert all(np.isfinite(x) for x in metrics.values())
    assert metrics["packed_fill"] == pytest.approx(fill)


@pytest.mark.parametrize("masked", [True, False])
def test_examples_of_which_noise_masks_nothing_are_no_update(masked):
    examples = batches.take(rollouts().trace, np.arange(2))
    noised = noise.noised(examples, NoiseConfig(), LAYOUT)
    share_nT = noised.share_nT if masked else np.zeros_like(noised.share_nT)
    metrics, found = batches.of_examples(
        examples,
        noised=noised.replace(share_nT=share_nT),
        copies=1,
        pack=packed,
        mesh=one_device(),
    )
    assert len(found) == masked and metrics["packed_slots"] == masked * 80


def test_the_shapes_of_a_batch_are_known_without_its_arrays():
    cfg = BatchConfig(rows=2, tokens=48)
    shapes = batches.blank(
        batches.take(rollouts().trace, np.arange(1)),
        cfg=NoiseConfig(),
        layout=LAYOUT,
        pack=functools.partial(
            views.pack,
            mask_id=99,
            layout=LAYOUT,
            cfg=cfg,
            most=2**40,
            aggregate="token",
        ),
        mesh=one_device(),
        fields=("adv_BU",),
    )
    assert shapes.used.shape == ()
    assert shapes.tokens_BT.shape == (2**40, 2, 48)
    assert shapes.adv_BU.shape == shapes.weight_BU.shape


# ---- What is left out, and how many are dealt ----------------------------------------


def test_updates_of_one_size():
    keep_n = np.arange(12) < 11
    hands = batches.dealt_rows(
        keep_n, np.random.default_rng(0), updates=1, copies=1, size=4
    )
    assert [len(hand) for hand in hands] == [4, 4]  # three are left over
    assert len(set(np.concatenate(hands))) == 8
    few = batches.dealt_rows(
        keep_n, np.random.default_rng(0), updates=1, copies=1, size=40
    )
    assert [len(hand) for hand in few] == [11]


def with_cut(rewards, stopped, late=()):
    """Returns rollouts of two groups of four whose answers have these rewards."""
    made = rollouts()
    late_n = np.isin(np.arange(8), late)
    return dataclasses.replace(
        made,
        reward_n=np.array(rewards, np.float32),
        trace=made.trace.replace(stopped_B=np.array(stopped, bool)),
        late_n=late_n,
    )


def test_what_is_not_judged_leaves_its_group():
    given = with_cut([0, 1, 0, 1, 1, 0, 0, 0], [1] * 8, late=[0, 5])
    keep_n = batches.teaching(given, RL)
    assert list(np.flatnonzero(keep_n)) == [1, 2, 3, 4, 6, 7]
    found_n = batches.relative_rewards(given, keep_n, RL)
    one = np.array([1, 0, 1.0])
    np.testing.assert_allclose(found_n[1:4], (one - one.mean()) / one.std(), rtol=1e-5)
    other = np.array([1, 0, 0.0])
    want = (other - other.mean()) / other.std()
    np.testing.assert_allclose(found_n[[4, 6, 7]], want, rtol=1e-5)
    assert not found_n[[0, 5]].any()


def test_a_prompt_that_was_skipped_teaches_neither_network():
    given = rollouts()
    len_B = np.where(np.arange(8) == 5, 0, 8)
    given = dataclasses.replace(given, trace=given.trace.replace(len_B=len_B))
    assert list(np.flatnonzero(~batches.teaching(given, RL))) == [5]
    nobody = dict.fromkeys(("noised", "params", "pack", "score", "mesh", "objective"))
    rng = np.random.default_rng(0)
    assert batches.of_dropped(given, rng, rl=RL, **nobody) == []


def test_of_which_nobody_knows_is_in_no_solve_rate():
    """A first grader of no weight could not tell of two: 1 of 4 is right, and 1 of 2."""
    right_n = np.array([1, 0, 0, 0, 1, np.nan, np.nan, 0], np.float32)
    given = with_cut(np.arange(8), [1] * 8)
    given = dataclasses.replace(given, parts={"math": right_n})
    rl = dataclasses.replace(RL, min_solved=0.3, max_solved=0.7)
    assert list(np.flatnonzero(batches.teaching(given, rl))) == [4, 5, 6, 7]


def test_a_long_answer_costs_what_its_tail_says():
    rl = dataclasses.replace(RL, advantage="none", truncated="soft", truncated_tail=4)
    given = with_cut([1, 1, 0, 0, 1, 0, 1, 0], [1] * 8)
    len_B = np.array([2, 6, 7, 8, 2, 3, 4, 5])
    given = dataclasses.replace(given, trace=given.trace.replace(len_B=len_B))
    found_n = batches.relative_rewards(given, np.ones(8, bool), rl, longest=8)
    np.testing.assert_allclose(found_n, [1, 0.5, -0.75, -1, 1, 0, 1, -0.25], rtol=1e-6)
    # Without a tail of one's own it is a fifth of the longest answer: two tokens of 8.
    short = dataclasses.replace(rl, truncated_tail=0)
    found_n = batches.relative_rewards(given, np.ones(8, bool), short, longest=8)
    np.testing.assert_allclose(found_n, [1, 1, -0.5, -1, 1, 0, 1, 0], rtol=1e-6)
    # How often a group is solved does not hang on it.
    assert batches.teaching(given, rl).all()


def test_no_more_groups_teach_than_a_step_has_prompts():
    one = dataclasses.replace(RL, prompts=1)
    assert list(np.flatnonzero(batches.teaching(rollouts(), one))) == [0, 1, 2, 3]


def test_without_a_value_model_tokens_have_the_reward_of_their_answer():
    noised = noise.noised(rollouts().trace, NoiseConfig(), LAYOUT)
    answer_nT = noise.answers(rollouts().trace)
    reward_n = np.array([0.5, -2, 0, 1, 1, 0, -0.25, 3])
    earned = batches.Earned(reward_n, None, noised.step_nT)
    rl = dataclasses.replace(RL, value="none")
    adv_nT, ret_nT, told = batches.advantages(earned, answer_nT, noised, None, rl)
    np.testing.assert_array_equal(adv_nT, answer_nT * reward_n[:, None])
    np.testing.assert_array_equal(adv_nT, ret_nT)
    assert told == {"advantage_std": pytest.approx(reward_n.std())}
    some_nT = noised.share_nT * (np.arange(8) < 3)[:, None]  # the others are shown
    whiten = dataclasses.replace(rl, whiten=True)
    adv_nT, ret_nT, told = batches.advantages(
        earned, answer_nT, noised.replace(share_nT=some_nT), None, whiten
    )
    assert told == {"advantage_std": pytest.approx(reward_n[:3].std())}
    white_n = (reward_n[:3] - reward_n[:3].mean()) / reward_n[:3].std()
    np.testing.assert_allclose(adv_nT[:3, 4], white_n, rtol=1e-6)
    assert not adv_nT[3:].any() and ret_nT[3:].any()
    nothing = noised.replace(share_nT=np.zeros_like(noised.share_nT))
    told = batches.advantages(earned, answer_nT, nothing, None, rl)[2]
    assert told == {"advantage_std": 0.0}


def test_without_a_value_model_tokens_earn_by_steps_of_sampling():
    """Also those that the noise shows, and of which nothing is learned."""
    noised = noise.Noise(
        step_nT=np.array([[0, 0, 1, 1, 1, 1]]),
        share_nT=np.array([[0, 0, 1, 1, 0, 0]], np.float32),
    )
    answer_nT = np.arange(6)[None] >= 2
    token_nT, step_nT = np.array([[9.0, 9, 1, 2, 4, 8]]), np.array([[0, 0, 1, 1, 2, 3]])
    earned = batches.Earned(np.array([16.0]), token_nT, step_nT)
    rl = dataclasses.replace(RL, value="none", gamma=1.0, lam=1.0, outcome=0.5)
    adv_nT, ret_nT, told = batches.advantages(
        earned, answer_nT, noised, np.zeros((1, 6)), rl
    )
    # Behind the last step 0, before it 8 + 16 / 2, and 4 more before the second.
    np.testing.assert_allclose(adv_nT, [[0, 0, 21, 22, 20, 16]])
    np.testing.assert_array_equal(adv_nT, ret_nT)
    assert told == {"advantage_std": 0.5}


def test_advantages_are_whitened_and_returns_are_not():
    rl = dataclasses.replace(RL, advantage="center")
    plain, whitened = (
        made(0.0, dataclasses.replace(rl, whiten=white)) for white in (False, True)
    )
    adv, ret = [], []
    for one, other in zip(plain[1], whitened[1], strict=True):
        real = np.asarray(one.weight_BU) > 0
        np.testing.assert_array_equal(one.ret_BU, other.ret_BU)
        adv.append(np.asarray(other.adv_BU)[real])
        ret.append(np.asarray(one.adv_BU)[real])
    adv, ret = np.concatenate(adv), np.concatenate(ret)
    assert adv.mean() == pytest.approx(0, abs=1e-6)
    assert adv.std() == pytest.approx(1, abs=1e-5)
    assert not np.allclose(adv, ret)
