"""From logits to a token: filters, the draw, and what is recorded of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.reference import NEVER
from dllm_jax.sampling import logits
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.strategy import STRATEGIES, Strategy
from tests.goldens import reader

draw = jax.jit(logits.draw, static_argnames="cfg")
keep = jax.jit(logits.keep, static_argnames=("top_k", "top_p", "top_p_first"))
FREE = SamplerConfig()
FILTERED = SamplerConfig(top_k=4, top_p=0.8)
TOP_P_FIRST = SamplerConfig(top_k=3, top_p=0.9, top_p_first=True)
SAMPLERS = {"free": FREE, "filtered": FILTERED, "top_p_first": TOP_P_FIRST}

B, W, V = 6, 3, 9
MANY = 4096
RNG = np.random.default_rng(0)
LOGITS_BWV = RNG.normal(size=(B, W, V), scale=2).astype(np.float32)
KEY_B = jax.random.split(jax.random.key(0), B)
TEMPERATURE_B = np.array([0, 0.3, 0.7, 1, 1.5, 0], np.float32)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def distribution(x_V, temperature, cfg):
    """Returns the probabilities drawn from, token by token, in f64."""
    p_V = softmax(np.asarray(x_V, np.float64) / temperature)
    order = sorted(range(len(p_V)), key=lambda i: (-p_V[i], i))
    order = order if cfg.top_p_first else order[: cfg.top_k or None]
    kept, total = [], sum(p_V[order])
    for i in order:
        if sum(p_V[kept]) / total >= cfg.top_p:
            break
        kept.append(i)
    kept = kept[: cfg.top_k or None]
    out_V = np.zeros_like(p_V)
    out_V[kept] = p_V[kept] / sum(p_V[kept])
    return out_V


def test_filters_of_the_reference():
    cases = reader.read("sampling/filters.json")["cases"]
    for case in cases:
        x_WV = jnp.asarray(case["logits"])
        kept_WV = keep(x_WV, top_k=case["top_k"], top_p=case["top_p"])
        expected_WV = np.array(case["kept_block_sampler"], bool)
        assert (np.isfinite(kept_WV) == expected_WV).all(), case
        assert (np.asarray(kept_WV)[expected_WV] == x_WV[expected_WV]).all()
    assert {True, False} == {case["top_k"] > 0 for case in cases}


@pytest.mark.parametrize(
    "top_k, top_p, expected",
    [
        (0, 1.0, "111111"),
        (2, 1.0, "111000"),  # the tie with the second stays
        (99, 1.0, "111111"),
        (0, 0.45, "100000"),
        (0, 0.6, "110000"),  # of the tie, the left one is enough
        (0, 0.8, "111000"),
        (3, 0.9, "111000"),  # renormalised: 5/9, 2/9, 2/9
        (3, 0.7, "110000"),
        (0, 1e-9, "100000"),  # never none
    ],
)
def test_filters_by_hand(top_k, top_p, expected):
    x_V = jnp.log(jnp.asarray([0.5, 0.2, 0.2, 0.06, 0.04 - 1e-6, 1e-6]))
    got_V = np.isfinite(logits.keep(x_V[None], top_k=top_k, top_p=top_p)[0])
    assert "".join("01"[int(x)] for x in got_V) == expected


@pytest.mark.parametrize(
    "top_k, top_p, expected",
    [
        (3, 0.75, "111000"),  # of all: 0.5, 0.2, 0.2; renormalised two would be enough
        (1, 0.75, "100000"),
        (2, 0.75, "111000"),  # the tie with the second stays
        (2, 0.6, "110000"),  # if top_p has left it
        (5, 0.6, "110000"),  # fewer than k are left
        (2, 0.99, "111000"),  # what k leaves does not reach p
    ],
)
def test_top_p_first_by_hand(top_k, top_p, expected):
    x_V = jnp.log(jnp.asarray([0.5, 0.2, 0.2, 0.06, 0.04 - 1e-6, 1e-6]))
    how = {"top_k": top_k, "top_p": top_p, "top_p_first": True}
    got_V = np.isfinite(logits.keep(x_V[None], **how)[0])
    assert "".join("01"[int(x)] for x in got_V) == expected


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("top_p", [0.05, 0.62, 0.987])
def test_filters_of_many_tokens(top_k, top_p):
    """Of which some tie, and no two sums are p to rounding."""
    x_RV = RNG.normal(size=(40, 301), scale=3).astype(np.float32)
    x_RV[::2] = x_RV[::2].round()  # ties, of both zeros too
    x_RV[:, :9] = -np.inf
    got_RV = np.isfinite(keep(x_RV, top_k=top_k, top_p=top_p))
    for x_V, got_V in zip(x_RV, got_RV, strict=True):
        kth = np.sort(x_V)[-top_k] if top_k else -np.inf
        p_V = softmax(np.where(x_V >= kth, x_V, -np.inf).astype(np.float64))
        order_V = np.argsort(-p_V, kind="stable")
        before_V = np.cumsum(p_V[order_V]) - p_V[order_V]
        assert set(np.flatnonzero(got_V)) == set(order_V[before_V < top_p])


@pytest.mark.parametrize("top_k", [1, 7, 60])
@pytest.mark.parametrize("top_p", [0.05, 0.62, 0.987])
def test_top_p_of_many_tokens_before_top_k(top_k, top_p):
    """As Dream's own code: those that top_p leaves of all, and of these the k largest."""
    x_RV = RNG.normal(size=(40, 301), scale=3).astype(np.float32)
    x_RV[::2] = x_RV[::2].round()  # ties
    x_RV[:, :9] = -np.inf
    got_RV = np.isfinite(keep(x_RV, top_k=top_k, top_p=top_p, top_p_first=True))
    for x_V, got_V in zip(x_RV, got_RV, strict=True):
        p_V = softmax(x_V.astype(np.float64))
        order_V = np.argsort(-p_V, kind="stable")
        before_V = np.cumsum(p_V[order_V]) - p_V[order_V]
        left_V = order_V[before_V < top_p]
        least = np.sort(x_V[left_V])[-min(top_k, len(left_V))]
        assert set(np.flatnonzero(got_V)) == set(left_V[x_V[left_V] >= least])


def test_a_rule_of_training_filters_as_the_sampler_does():
    x_RV = LOGITS_BWV.reshape(-1, V)
    x_RV = np.where(np.arange(V) == V - 1, NEVER, x_RV)  # the forbidden column
    token_R = x_RV.argmax(axis=-1)
    taken_R = np.full(len(x_RV), np.inf, np.float32)
    for first in (False, True):
        filters = {"top_k": 3, "top_p": 0.6, "top_p_first": first}
        logp_R, *_ = reference.selection(
            x_RV, np.eye(V), token_R, taken_R, reference.Rule(**filters), V - 1
        )
        cfg = SamplerConfig(**filters)
        want_R = [
            np.log(distribution(x_V, 1, cfg)[token])
            for x_V, token in zip(x_RV, token_R, strict=True)
        ]
        np.testing.assert_allclose(logp_R, want_R, atol=1e-5)


@pytest.mark.parametrize("cfg", SAMPLERS.values(), ids=SAMPLERS)
def test_what_is_recorded(cfg):
    drawn = jax.device_get(draw(KEY_B, LOGITS_BWV, TEMPERATURE_B, cfg))
    for b in range(B):
        for w in range(W):
            token, x_V = drawn.token_BW[b, w], LOGITS_BWV[b, w]
            p_V = distribution(x_V, TEMPERATURE_B[b] or 1, cfg)
            if TEMPERATURE_B[b] == 0:
                assert token == x_V.argmax()
            own = np.log(softmax(x_V))[token]  # whatever the filters and temperature
            np.testing.assert_allclose(drawn.logp_BW[b, w], own, atol=1e-5)
            np.testing.assert_allclose(drawn.conf_BW[b, w], p_V[token], atol=1e-5)
            entropy = -sum(p * np.log(p) for p in p_V if p > 0)
            np.testing.assert_allclose(drawn.entropy_BW[b, w], entropy, atol=1e-5)
            assert p_V[token] > 0


def test_one_token_left_is_certain():
    cfg = SamplerConfig(top_k=1)
    drawn = draw(KEY_B, LOGITS_BWV, TEMPERATURE_B, cfg)
    assert (drawn.token_BW == LOGITS_BWV.argmax(axis=-1)).all()
    assert (drawn.conf_BW == 1).all() and (drawn.entropy_BW == 0).all()
    assert (drawn.logp_BW < 0).all()


@pytest.mark.parametrize("cfg", SAMPLERS.values(), ids=SAMPLERS)
def test_frequencies_are_the_probabilities(cfg):
    temperature = np.resize(np.array([0.5, 1.0, 1.7], np.float32), MANY)
    x_BWV = np.broadcast_to(LOGITS_BWV[0], (MANY, W, V))
    drawn = draw(jax.random.split(jax.random.key(1), MANY), x_BWV, temperature, cfg)
    for t in np.unique(temperature):
        for w in range(W):
            tokens = np.asarray(drawn.token_BW)[temperature == t, w]
            p_V = distribution(LOGITS_BWV[0, w], t, cfg)
            seen_V = np.bincount(tokens, minlength=V)
            assert (seen_V[p_V == 0] == 0).all()
            # Five standard deviations, and one draw for what is rarer than that.
            bound_V = 5 * np.sqrt(len(tokens) * p_V * (1 - p_V)) + 1
            assert (abs(seen_V - len(tokens) * p_V) <= bound_V).all()


def test_positions_and_steps_draw_apart():
    """Equal distributions at different positions or keys do not give equal draws."""
    flat_BWV = np.zeros((MANY, W, V), np.float32)
    key_B = jax.random.split(jax.random.key(2), MANY)
    drawn = np.asarray(draw(key_B, flat_BWV, np.ones(MANY, np.float32), FREE).token_BW)
    for a, b in [(drawn[:, 0], drawn[:, 1]), (drawn[:-1, 0], drawn[1:, 0])]:
        assert abs((a == b).mean() - 1 / V) < 0.03


def test_a_draw_depends_on_its_own_row_alone():
    one = draw(KEY_B, LOGITS_BWV, TEMPERATURE_B, FREE)
    order = np.array([3, 1, 5, 0, 2, 4])
    other = draw(KEY_B[order], LOGITS_BWV[order], TEMPERATURE_B[order], FREE)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a[order], b)
    # Its neighbours' logits, keys and temperatures do not matter; its own key does.
    mine = np.arange(B) == 3
    logits_BWV = np.where(mine[:, None, None], LOGITS_BWV, 0)
    key_B = jax.random.split(jax.random.key(5), B).at[3].set(KEY_B[3])
    changed = draw(key_B, logits_BWV, np.where(mine, TEMPERATURE_B, 0.1), FREE)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(a[3], b[3])
    redrawn = [
        draw(jax.random.split(jax.random.key(s), B), LOGITS_BWV, TEMPERATURE_B, FREE)
        for s in range(6)
    ]
    assert len({tuple(np.asarray(d.token_BW)[3]) for d in redrawn}) > 1


@pytest.mark.parametrize("cfg", [FREE, FILTERED], ids=["free", "filtered"])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.1, 1.0, 100.0])
def test_a_forbidden_token_is_never_drawn(cfg, temperature):
    x_BWV = np.broadcast_to(LOGITS_BWV[1], (MANY, W, V)).copy()
    x_BWV[..., 4] = NEVER
    drawn = draw(
        jax.random.split(jax.random.key(3), MANY),
        x_BWV,
        np.full(MANY, temperature, np.float32),
        cfg,
    )
    assert (drawn.token_BW != 4).all()
    for x in jax.tree.leaves(drawn):
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    "fused, changes",
    [
        (True, {}),
        (True, {"tempered_threshold": True}),
        (True, {"untempered_ranks": True}),
        (
            False,
            {"target": "neg_entropy", "strategy": "static", "untempered_ranks": True},
        ),
        (True, {"target": "neg_entropy", "strategy": "static"}),
        (False, {"target": "neg_entropy", "threshold": -1.0}),
        (
            True,
            {"target": "neg_entropy", "threshold": -1.0, "tempered_threshold": True},
        ),
        (False, {"target": "margin"}),
        (False, {"target": "random", "strategy": "static"}),
        (True, {"target": "margin", "strategy": "sequential"}),
        (True, {"target": "top", "strategy": "entropy_bounded"}),
        (False, {"top_k": 4}),
        (False, {"top_p": 0.8}),
    ],
)
def test_where_no_logits_are_needed_none_are_made(tiny, monkeypatch, fused, changes):
    model, params = tiny
    cfg = SamplerConfig(**changes)
    x_BWD = RNG.normal(size=(B, W, model.d_model)).astype(np.float32)
    logits_BWV = logits.transformer.logits(params, x_BWD, model)
    if fused:  # by the head that draws
        monkeypatch.setattr(logits.transformer, "logits", None)
    got = logits.candidates(params, x_BWD, KEY_B, TEMPERATURE_B, model=model, cfg=cfg)
    want = draw(KEY_B, logits_BWV, TEMPERATURE_B, cfg)
    np.testing.assert_array_equal(got.token_BW, want.token_BW)
    reads = STRATEGIES[cfg.strategy]
    if not reads.reads_sure:  # nothing is compared
        got = got.replace(sure_BW=want.sure_BW)
    if not reads.ranks:
        got = got.replace(score_BW=want.score_BW)
    # The fused head's entropy is a difference of two numbers as large as its logits.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("reads_sure", [False, True])
def test_a_new_strategy_says_what_it_reads(monkeypatch, reads_sure):
    """The fused head knows no entropy of the model's own distribution."""
    row = Strategy(STRATEGIES["dynamic"].take, reads_sure)
    monkeypatch.setitem(STRATEGIES, "new", row)
    cfg = SamplerConfig(strategy="new", target="neg_entropy", threshold=-1.0)
    assert logits.fused(cfg) == (not reads_sure)
