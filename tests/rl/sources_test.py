"""Sources: every method keeps the contract that the loop of train.py relies on."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import networks, sources
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RLConfig,
)
from tests.rl import lent

ELBO = ObjectiveConfig(aggregate="elbo", reference_beta=0.2)


def settings(method: str, folder) -> sources.Settings:
    """Returns settings that fit a method."""
    given = lent.settings()
    if method == "sft":
        return dataclasses.replace(
            given,
            noise=NoiseConfig(kind="semi_ar"),
            data=dataclasses.replace(given.data, response="answer"),
        )
    if method == "reward":
        path = lent.write_pairs(folder / "pairs.jsonl")
        return dataclasses.replace(
            given,
            noise=NoiseConfig(kind="end"),
            data=dataclasses.replace(given.data, train=path),
        )
    if method == "dpo":
        path = lent.write_pairs(folder / "pairs.jsonl")
        return dataclasses.replace(
            given,
            noise=NoiseConfig(kind="subset", draws=2),
            objective=ELBO,
            data=dataclasses.replace(given.data, train=path),
        )
    return given


@pytest.fixture(params=sources.SOURCES)
def source(request, tmp_path):
    """A source of each method."""
    chosen = settings(request.param, tmp_path)
    return sources.SOURCES[request.param](chosen, lent.tools(chosen, tmp_path))


def fetched(made: sources.StepBatches):
    """Returns a step's batches on the host."""
    return jax.device_get(made.batches)


def check_equal(ours, others):
    """Asserts that batches hold the same."""
    jax.tree.map(np.testing.assert_array_equal, ours, others)


def test_a_source_says_how_far_its_run_goes(source):
    rl = isinstance(source, sources.RL)
    assert source.steps == (7 if rl else 9)
    assert source.taken_per_step == (4 if rl else 6)
    assert source.updates == (2 if rl else 1)
    assert source.samples == rl
    plans = source.plans(source.settings)
    assert plans.keys() == ({"policy", "value"} if rl else {"policy"})
    assert plans["policy"].updates == source.steps * source.updates


def test_every_batch_has_the_shape_of_the_blank_one(source):
    blank = source.blank()
    assert blank.used.shape == ()
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert 0 < len(made.batches) <= source.updates
    for batch in made.batches:
        assert batch.used > 0
        jax.tree.map(
            lambda x, y: np.testing.assert_equal(x.shape, y.shape), batch, blank
        )
        jax.tree.map(
            lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), batch, blank
        )
        assert jax.tree.map(lambda x: x.sharding, batch) == jax.tree.map(
            lambda x: x.sharding, blank
        )
    assert all(np.isfinite(float(x)) for x in made.metrics.values())


def test_a_step_is_a_function_of_its_number_its_place_and_the_weights(source):
    def step(*args):
        return source.batches(*args, lent.score)

    once, again = (step(2, 8, lent.Weights()) for _ in range(2))
    assert once.metrics == again.metrics
    check_equal(fetched(once), fetched(again))
    further = fetched(step(2, 8 + source.taken_per_step, lent.Weights()))
    assert (fetched(once)[0].tokens_BT != further[0].tokens_BT).any()


def test_the_data_come_round_again(source):
    assert source.batches(1, 10**6 + 1, lent.Weights(), lent.score).batches


def test_only_what_compares_models_asks_for_the_reference(tmp_path):
    chosen = settings("rl", tmp_path)
    for beta in (0.0, 0.1):
        changed = dataclasses.replace(
            chosen, objective=ObjectiveConfig(reference_beta=beta)
        )
        source = sources.RL(changed, lent.tools(changed, tmp_path))
        assert source.reference == (beta > 0)
        assert source.objective.reference_beta == beta
    pairs = settings("dpo", tmp_path)
    source = sources.DPO(pairs, lent.tools(pairs, tmp_path))
    assert source.reference
    assert source.objective.reference_beta == 0  # it is in the factors of the gradient
    assert not sources.SFT.reference


def test_rl_tells_the_rates_of_what_was_done(tmp_path):
    chosen = settings("rl", tmp_path)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path))
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert made.sampled == 16 * lent.ANSWER
    seconds = {"rollout": 2.0, "reward": 4.0, "score": 8.0}
    rates = made.rates(seconds)
    assert rates["tokens_per_second/rollout"] == made.sampled / 2
    assert len(rates) == 3
    idle = made._replace(batches=[])
    assert idle.rates(seconds).keys() == rates.keys() - {"tokens_per_second/score"}
    assert made._replace(sampled=None).rates(seconds) == {}


def test_rl_leaves_as_many_samples_as_it_is_asked_for(tmp_path):
    chosen = settings("rl", tmp_path)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path, samples=3))
    source.batches(5, 0, lent.Weights(), lent.score)
    lines = (tmp_path / "samples" / "step_000005.jsonl").read_text().splitlines()
    assert [json.loads(line)["group"] for line in lines] == [
        0,
        1,
        2,
    ]  # spread over the groups


def test_a_signal_ends_a_step_of_rl(tmp_path):
    chosen = settings("rl", tmp_path)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path, stop=lambda: True))
    assert source.batches(1, 0, lent.Weights(), lent.score) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"filter": "solvable", "min_solved": 0.9, "max_solved": 1.0},
            "no group is solvable in [0.9, 1.0]",
        ),
        ({"filter": "paced"}, "no group is paced"),
    ],
)
def test_rl_says_why_a_step_has_nothing_to_learn(tmp_path, change, reason):
    rl = RLConfig(prompts=4, group=4, **change)
    chosen, heard = dataclasses.replace(settings("rl", tmp_path), rl=rl), []
    source = sources.RL(chosen, lent.tools(chosen, tmp_path, say=heard.append))
    heard.clear()  # what is said at the start
    made = source.batches(4, 0, lent.Weights(), lent.score)
    assert made.batches == []
    assert made.metrics["groups_kept"] == 0
    assert heard == [f"step 4: {reason}, nothing to learn; the step is skipped"]


@pytest.mark.parametrize("value", ["own", "head"])
def test_keys_of_a_value_heads_optimizer_are_not_ignored_in_silence(tmp_path, value):
    chosen, heard = settings("rl", tmp_path), []
    chosen = dataclasses.replace(
        chosen,
        rl=dataclasses.replace(chosen.rl, value=value),
        value_optim=OptimConfig(lr=1e-3, b1=0.8, warmup=5),
    )
    sources.RL(chosen, lent.tools(chosen, tmp_path, say=heard.append))
    if value == "own":
        assert not [line for line in heard if line.startswith("value_optim")]
        return
    (line,) = heard
    assert line.startswith("value_optim.warmup, value_optim.b1: without effect")
    quiet = dataclasses.replace(chosen, value_optim=OptimConfig(lr=1e-3))
    sources.RL(quiet, lent.tools(quiet, tmp_path, say=heard.append))
    assert len(heard) == 1


def test_examples_say_how_many_are_left_out(tmp_path):
    chosen, heard = settings("sft", tmp_path), []
    sampler = dataclasses.replace(chosen.sampler, max_new=4)
    chosen = dataclasses.replace(chosen, sampler=sampler)
    source = sources.SFT(chosen, lent.tools(chosen, tmp_path, say=heard.append))
    left = len((lent.ARITHMETIC / "heldout.jsonl").read_text().splitlines())
    left -= len(source.examples.len_B)
    assert heard == [
        f"{len(source.examples.len_B)} examples, {left} empty or too long and left out"
    ]


def test_a_pair_is_two_rows_and_both_are_scored(tmp_path):
    chosen = settings("dpo", tmp_path)
    source = sources.DPO(chosen, lent.tools(chosen, tmp_path))
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert made.metrics["preference_loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert made.metrics["preference_margin"] == 0  # the policy is the reference still
    (batch,) = fetched(made)
    assert (batch.adv_BU > 0).any() and (batch.adv_BU < 0).any()


@pytest.mark.parametrize(("rows", "padding"), [(4, False), (512, True)])
def test_rl_says_what_a_value_network_costs_and_what_stays_padding(
    tmp_path, rows, padding
):
    said = []
    settings = lent.settings(batch=BatchConfig(rows=rows, tokens=64))
    sources.RL(settings, lent.tools(settings, tmp_path, say=said.append))
    cost = [line for line in said if line.startswith("rl.value='own': of the FLOPs")]
    share = networks.value_share(
        settings.model, settings.layout.seats(settings.batch), settings.batch
    )
    assert len(cost) == 1 and f" {share:.0%};" in cost[0]
    most = [line for line in said if "rows of a microbatch: the others are" in line]
    assert bool(most) == padding


def test_a_value_network_takes_half_but_for_the_language_head():
    sizes = {"vocab": 100, "d_model": 8, "heads": 2, "kv_heads": 1, "head_dim": 4}
    model = ModelConfig(layers=3, ffw=16, qk_norm=False, **sizes)
    layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8  # q and o; k and v; feed-forward; norms
    cfg = BatchConfig(rows=1, tokens=64)
    found = networks.value_share(model, 16, cfg)
    assert found == pytest.approx(3 * layer / (6 * layer + 800 / 4))
    # Of eight experts two are chosen: 2 x 3 x 8 x 8, and a router, for each token.
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffw": 8}
    sparse = dataclasses.replace(model, **experts)
    layer += 2 * 3 * 64 + 64 - 3 * 128
    found = networks.value_share(sparse, 16, cfg)
    assert found == pytest.approx(3 * layer / (6 * layer + 800 / 4))
