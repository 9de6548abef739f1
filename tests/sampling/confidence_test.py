"""Scores: by hand, from which distribution, and as padding and chance change them."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.sampling import confidence, logits
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.strategy import STRATEGIES
from tests.goldens import reader

CFG = SamplerConfig(block=3, steps_per_block=3)
P_V = np.array([0.5, 0.2, 0.2, 0.1])
LOGITS_BWV = np.log(np.tile(P_V, (1, 3, 1))).astype(np.float32)
KEY_B = jax.random.split(jax.random.key(0), 1)
ONE_B = np.ones(1, np.float32)
draw = jax.jit(logits.draw, static_argnames="cfg")


def scored(temperature=1.0, **changes):
    """Returns the draw from P, of token 0 at temperature 0, under a changed config."""
    cfg = dataclasses.replace(CFG, **changes)
    return draw(KEY_B, LOGITS_BWV, ONE_B * np.float32(temperature), cfg)


@pytest.mark.parametrize(
    "target, score",
    [
        ("confidence", 0.5),
        ("margin", 0.3),
        ("neg_entropy", float(np.sum(P_V * np.log(P_V)))),
    ],
)
def test_scores_by_hand(target, score):
    drawn = scored(0, target=target, strategy="static")
    np.testing.assert_allclose(drawn.score_BW, np.full((1, 3), score), rtol=1e-5)
    np.testing.assert_allclose(drawn.sure_BW, drawn.score_BW, rtol=1e-6)
    # Two tokens are left, of which the filter makes 5/7 and 2/7.
    left = np.array([5, 2]) / 7
    cut = {
        "confidence": left[0],
        "margin": left[0] - left[1],
        "neg_entropy": np.sum(left * np.log(left)),
    }[target]
    drawn = scored(0, target=target, strategy="static", top_p=0.6)
    np.testing.assert_allclose(drawn.score_BW, np.full((1, 3), cut), rtol=1e-5)
    np.testing.assert_allclose(drawn.sure_BW, np.full((1, 3), score), rtol=1e-5)


def test_a_cold_threshold_lets_everything_pass_and_the_default_does_not():
    masked_BW = np.ones((1, 3), bool)
    take = STRATEGIES["dynamic"].take
    default = scored(0.1)
    assert (default.score_BW > 0.99).all() and (default.conf_BW > 0.99).all()
    np.testing.assert_allclose(default.sure_BW, np.full((1, 3), 0.5), rtol=1e-5)
    assert take(default, masked_BW, np.array([1]), CFG).sum() == 1
    reference = scored(0.1, tempered_threshold=True)
    np.testing.assert_array_equal(reference.sure_BW, reference.score_BW)
    assert take(reference, masked_BW, np.array([1]), CFG).sum() == 3


def test_ranks_may_be_of_the_models_own_distribution_as_llada_s_are():
    """p = (.50, .49, .01) and (.45, .275, .275), cold: the second looks surer than it is."""
    logits_BWV = np.log([[[0.50, 0.49, 0.01], [0.45, 0.275, 0.275]]]).astype(np.float32)
    cfg = dataclasses.replace(CFG, strategy="static")
    masked_BW, one_B, key_B = np.ones((1, 2), bool), np.array([1]), []
    for seed in range(200):  # of which some draw the first token at both
        key_B = jax.random.split(jax.random.key(seed), 1)
        drawn = draw(key_B, logits_BWV, 0.1 * ONE_B, cfg)
        if not drawn.token_BW.any():
            break
    own = draw(
        key_B, logits_BWV, 0.1 * ONE_B, dataclasses.replace(cfg, untempered_ranks=True)
    )
    np.testing.assert_allclose(own.score_BW, [[0.50, 0.45]], rtol=1e-5)
    take = STRATEGIES["static"].take
    np.testing.assert_array_equal(take(drawn, masked_BW, one_B, cfg), [[False, True]])
    np.testing.assert_array_equal(take(own, masked_BW, one_B, cfg), [[True, False]])


def test_random_scores_belong_to_the_row_and_change_no_token():
    key_B = jax.random.split(jax.random.key(1), 4)
    many = np.tile(LOGITS_BWV, (4, 1, 1))
    cfg = dataclasses.replace(CFG, target="random", strategy="static")
    drawn = draw(key_B, many, np.tile(ONE_B, 4), cfg)
    alone = draw(key_B[2:3], many[:1], ONE_B, cfg)
    np.testing.assert_array_equal(drawn.score_BW[2], alone.score_BW[0])
    assert len(np.unique(drawn.score_BW)) == 12
    plain = draw(key_B, many, np.tile(ONE_B, 4), CFG)
    np.testing.assert_array_equal(drawn.token_BW, plain.token_BW)


def test_padding_is_less_sure_whatever_the_sign():
    cfg = dataclasses.replace(CFG, pad_penalty=2.0)
    score_BW = jnp.array([[0.6, 0.6, -0.6]])
    drawn = scored().replace(
        token_BW=jnp.array([[0, 3, 3]]), score_BW=score_BW, sure_BW=2 * score_BW
    )
    out = confidence.weigh(drawn, KEY_B, jnp.zeros(1, int), 3, cfg)
    np.testing.assert_allclose(out.score_BW, [[0.6, 0.3, -1.2]])
    np.testing.assert_allclose(out.sure_BW, [[1.2, 0.6, -2.4]])


def test_ranks_are_drawn_from_their_softmax():
    n, cfg = 4096, dataclasses.replace(CFG, rank_temperature=0.5)
    score_BW = jnp.tile(jnp.array([[0.2, 0.9, 0.5]]), (n, 1))
    drawn = jax.tree.map(lambda x: jnp.tile(x, (n, 1)), scored())
    drawn = drawn.replace(score_BW=score_BW)
    keys, step_B = jax.random.split(jax.random.key(2), n), jnp.zeros(n, int)
    out = confidence.weigh(drawn, keys, step_B, 99, cfg)
    first = np.bincount(np.argmax(out.score_BW, axis=1), minlength=3) / n
    np.testing.assert_allclose(first, jax.nn.softmax(score_BW[0] / 0.5), atol=0.03)
    np.testing.assert_array_equal(out.sure_BW, drawn.sure_BW)


def test_transfers_of_the_reference():
    names = {"margin_confidence": "margin"}
    cases = reader.read("sampling/llada_transfer_index.json")["cases"]
    for case in cases:
        target = names.get(case["target"], case["target"])
        dynamic = case["threshold"] is not None
        cfg = SamplerConfig(strategy="static", target=target)
        x = np.array(case["logits"], np.float32)
        B = len(x)
        key_B = jax.random.split(jax.random.key(0), B)
        drawn = draw(key_B, x, np.zeros(B, np.float32), cfg)
        masked = np.array(case["mask"], bool)
        if target == "neg_entropy":  # the reference prefers what it is least sure of
            drawn = drawn.replace(score_BW=-drawn.score_BW, sure_BW=-drawn.sure_BW)
        quota = np.ones(B, "i") if dynamic else np.array(case["num_transfer"], "i")
        rule = types.SimpleNamespace(threshold=case["threshold"])
        strategy = STRATEGIES["dynamic" if dynamic else "static"]
        take = strategy.take(drawn, masked, quota, rule)
        np.testing.assert_array_equal(take, np.array(case["transfer"], bool))
        tokens = np.where(masked, drawn.token_BW, case["x"])
        np.testing.assert_array_equal(tokens, case["x0"])
    assert {case["threshold"] is None for case in cases} == {True, False}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"target": "entropy"}, "'entropy': choose from"),
        ({"target": "random"}, "random needs strategy='static'"),
        ({"target": "neg_entropy"}, "needs one below 0"),
        ({"pad_penalty": 0.5}, "pad_penalty=0.5: must be >= 1"),
        ({"rank_temperature": -1.0}, "rank_temperature=-1.0: must be >= 0"),
    ],
)
def test_a_config_that_says_nothing(changes, words):
    with pytest.raises(ValueError, match=words):
        SamplerConfig(**changes)
