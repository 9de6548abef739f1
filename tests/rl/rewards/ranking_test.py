"""Reward models: the loss of pairs, and scores that are those of training."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import memory, sharding
from dllm_jax.data import Problem
from dllm_jax.models import hf, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.models.vision.prompts import Picture, Prompt
from dllm_jax.rl import bounds, learner, noise, objectives, rewards, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
)
from dllm_jax.rl.rewards import ranking
from dllm_jax.sampling import state
from examples.arithmetic import pairs
from tests.goldens import reader
from tests.rl import lent

PLAN = learner.Plan(("ranking",), OptimConfig(), 1)
END = NoiseConfig(kind="end")


def test_the_end_of_an_answer_is_masked_alone():
    step_T = np.array([0, 0, 5, 2, 2, 7, FAR])
    answer_T = np.array([0, 0, 1, 1, 1, 0, 0], bool)
    ((out_T, share_T),) = noise.end(step_T, answer_T, None, None, None, END)
    assert out_T.tolist() == [0, 0, 0, 0, 1, FAR, FAR]
    assert share_T.tolist() == [0, 0, 0, 0, 1, 0, 0]
    ((_, share_T),) = noise.end(step_T, answer_T & False, None, None, None, END)
    assert not share_T.any()


def test_factors_are_the_gradient_of_bradley_and_terrys_loss():
    rng = np.random.default_rng(0)
    score_i = rng.normal(size=6).astype(np.float32)
    share_nT = np.zeros((6, 5))
    share_nT[np.arange(6), rng.integers(0, 5, 6)] = 1
    score_nT = np.where(share_nT > 0, score_i[:, None], np.nan)
    metrics, factor_nT = bounds.ranking_factors(score_nT, share_nT)

    def loss(score_i):
        return jnp.mean(-jax.nn.log_sigmoid(score_i[0::2] - score_i[1::2]))

    told, slope = jax.value_and_grad(loss)(score_i)
    assert metrics["preference_loss"] == pytest.approx(float(told), rel=1e-5)
    better = (score_i[0::2] > score_i[1::2]).mean()
    assert metrics["preference_accuracy"] == pytest.approx(better)
    # Through the objective, whose weights divide by all answers.
    batch = types_of(weight_BU=np.full((1, 6), 1 / 6), adv_BU=factor_nT[None, :, 0])
    own = jax.grad(
        lambda x: objectives.OBJECTIVES["ranking"]({"value": x[None]}, batch, None)[0]
    )(score_i)
    np.testing.assert_allclose(own, slope, rtol=1e-5)


def types_of(**fields):
    """Returns a batch that has these fields alone."""
    blank = dict.fromkeys(x.name for x in dataclasses.fields(views.TrainBatch))
    return views.TrainBatch(**(blank | fields))


def test_a_reward_model_has_a_value_head_alone():
    assert PLAN.heads == ("value",)
    assert learner.Plan(("policy", "value"), OptimConfig(), 1).heads == ("lm", "value")
    assert learner.Plan(("policy",), OptimConfig(), 1).heads == ("lm",)


def trace(model):
    """Returns four answers on 16 slots, one of which was cut and one of which is none."""
    rng, rows = np.random.default_rng(0), []
    for prompt, length in ((3, 5), (4, 7), (5, 1), (3, 0)):
        end = prompt + length
        tokens_T = np.zeros(16, np.int32)
        tokens_T[:end] = rng.integers(1, model.vocab - 4, end)
        step_T = np.full(16, FAR)
        step_T[:prompt], step_T[prompt:end] = 0, 1 + np.arange(length)
        row = state.no_answer(16)._replace(tokens_T=tokens_T, step_T=step_T)
        row = row._replace(prompt_len=np.int32(prompt), len=np.int32(length))
        rows.append(row._replace(stopped=np.bool_(True)))
    return state.stacked(rows)


@functools.cache
def network(family: str):
    """Returns (ModelConfig, parameters with a value head that says something)."""
    model, params = hf.load(reader.checkpoint(family), heads=("value",))
    model = dataclasses.replace(model, dtype="float32")
    value = 0.1 * jax.random.normal(jax.random.key(1), params["value"].shape)
    return model, params | {"value": value}


@pytest.mark.parametrize(
    ("family", "attention"), [("sdar", "block"), ("dream", "full"), ("sdar", "causal")]
)
def test_a_score_is_that_of_training(family, attention):
    model, params = network(family)
    if attention == "causal":
        model = dataclasses.replace(model, attention="causal", shift=1, block=1)
    assert model.attention == attention
    given = trace(model)
    layout = layouts.Layout(attention, model.shift, max(model.block, 4), longest=1)
    model = dataclasses.replace(model, block=layout.block)
    noised = noise.noised(given, END, layout)
    batch, source = views.pack(
        given,
        noised,
        mask_id=model.mask_id,
        layout=layout,
        cfg=BatchConfig(rows=2, tokens=32),
        most=3,
        aggregate="token",
    )
    assert (batch.weight_BU > 0).sum() == 3
    np.testing.assert_allclose(batch.weight_BU[batch.weight_BU > 0], 1 / 3)
    batch = jax.tree.map(jnp.asarray, batch)
    scored = learner.score(
        {"policy": params}, batch, model=model, plans={"policy": PLAN}
    )
    trained_nT = source.scatter(scored["policy"]["value"], given.tokens_BT.shape)
    last_n = given.prompt_len_B + given.len_B - 1
    trained_n = trained_nT[np.arange(4), last_n]

    ranker = ranking.Ranker("", None)
    ranker.model, ranker.params = model, params
    ranker.mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    ranker.score = jax.jit(functools.partial(ranking.scores, model=model))
    score_n = ranker.grade(given)
    assert np.isnan(score_n[3])
    np.testing.assert_allclose(score_n[:3], trained_n[:3], atol=2e-5)
    assert len(np.unique(score_n[:3].round(4))) == 3
    # Cut behind all but its end token, an answer has the same score.
    cut = given.replace(len_B=given.len_B - 1, stopped_B=given.stopped_B & False)
    np.testing.assert_allclose(ranker.grade(cut)[:2], score_n[:2], atol=1e-6)


def test_a_model_without_scores_or_with_another_tokenizer_is_refused():
    folder = str(lent.ARITHMETIC / "model")
    with pytest.raises(ValueError, match="needs reward.model, a checkpoint's folder"):
        rewards.grader("reward_model", RewardConfig())
    grader = rewards.grader("reward_model", RewardConfig(model=folder), lent.TOK)
    with pytest.raises(ValueError, match="has no value head: it is no reward model"):
        grader.begin()
    other = type("Tokenizer", (), {"get_vocab": lambda self: {"a": 0}})()
    grader = rewards.grader("reward_model", RewardConfig(model=folder), other)
    with pytest.raises(ValueError, match="has another tokenizer than the policy"):
        grader.begin()
    grader = rewards.grader("reward_model", RewardConfig(model="/nowhere"), lent.TOK)
    with pytest.raises(ValueError, match="'/nowhere' is not a folder"):
        grader.begin()


def test_a_trained_models_export_grades(tmp_path):
    folder = lent.ARITHMETIC / "model"
    model, params = hf.load(folder, heads=("value",))
    rng = np.random.default_rng(0)
    params["value"] = jnp.asarray(rng.normal(size=params["value"].shape), jnp.float32)
    hf.save(tmp_path / "export", model, params, like=folder)
    cfg = RewardConfig(model=str(tmp_path / "export"))
    grader = rewards.grader("reward_model", cfg, lent.TOK)
    (line,) = grader.begin()
    assert line.startswith("reward model: ") and not grader.aside and not grader.gold
    claim = grader.claim(0, slots=16)
    assert "head" not in params  # nobody asks it for a token
    assert claim.always == {"reward model": memory.array_bytes(params)}
    assert claim.always["reward model"] > 4 * 500_000
    assert claim.working["reward model"] > 0
    grades = grader.grade([""] * 4, [None] * 4, trace(model))
    assert np.isfinite(grades.reward_n[:3]).all() and np.ptp(grades.reward_n[:3]) > 0.01


def test_problems_about_images_that_it_cannot_see_are_refused():
    grader = rewards.grader("reward_model", RewardConfig(model="some"), lent.TOK)

    def shown(rows):
        picture = Picture("a.png", "mark", (1, 1), rows=rows)
        return Problem(Prompt([1, 2], (picture,)), "what?", "")

    grader.check(Problem([1, 2], "what?", ""))
    grader.check(shown(rows=0))  # its codes are in the prompt
    with pytest.raises(ValueError, match="reward.model='some' is shown no images"):
        grader.check(shown(rows=3))


def test_pairs_are_of_a_right_and_a_wrong_answer():
    rows = [
        (0, 1, "2"),
        (0, 0, "3"),
        (0, 0, "4"),
        (1, 1, "5"),
        (2, 0, "6"),
        (3, 1, "7"),
    ]
    rows += [(3, 0, " ")]
    records = [
        {"group": group, "reward": reward, "text": text, "question": f"q{group}"}
        for group, reward, text in rows
    ]
    assert pairs.pairs(records) == [{"prompt": "q0", "chosen": "2", "rejected": "3"}]
    assert json.dumps(pairs.pairs([])) == "[]"


def test_objectives_name_their_heads():
    assert ObjectiveConfig().loss in objectives.OBJECTIVES
    heads = {name for name, row in objectives.OBJECTIVES.items() if row.head == "value"}
    assert heads == {"value", "ranking"}
    assert not heads & set(objectives.RL_LOSSES)
    assert transformer.specs(network("sdar")[0], ("value",)).keys() >= {"value"}
