"""The likelihood of steps: enumerated, against one row per round, and its gradient."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models.mask import FAR
from dllm_jax.pallas_kernels import reference
from dllm_jax.rl import selection
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling import confidence, logits
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.strategy import STRATEGIES

PAD, FORBIDDEN = 1, 6
Q, V = 3, 6  # positions of a block, tokens beside the forbidden one
scored = jax.jit(reference.selection, static_argnames=("rule", "forbidden"))

# ---- Every outcome of one step -------------------------------------------------------


def every_draw(logits_QV, cfg: SamplerConfig):
    """Returns (tokens [n, Q], their probabilities [n], the Draw of each [n, Q])."""
    temper = jax.nn.log_softmax(
        logits.keep(logits_QV / cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    )
    own = jax.nn.log_softmax(logits_QV)
    compared = temper if cfg.tempered_threshold else own
    token_nQ = jnp.asarray(list(itertools.product(range(V), repeat=Q)))
    n = len(token_nQ)

    def wide(x_QV):
        return jnp.broadcast_to(x_QV[None], (n, *x_QV.shape))

    def told(target, x_QV):
        key_n = jax.random.split(jax.random.key(3), n)
        return confidence.TARGETS[target].score(wide(x_QV), token_nQ, key_n)

    logp_nQ = jnp.log(told("confidence", temper))
    drawn = logits.Draw(
        token_BW=token_nQ,
        logp_BW=jnp.log(told("confidence", own)),
        conf_BW=jnp.exp(logp_nQ),
        entropy_BW=-told("neg_entropy", temper),
        score_BW=told(cfg.target, temper),
        sure_BW=told(cfg.target, compared),
    )
    drawn = confidence.weigh(drawn, jax.random.split(jax.random.key(0), n), PAD, cfg)
    return np.asarray(token_nQ), np.exp(logp_nQ.sum(axis=1)), drawn


def outcomes(logits_QV, cfg: SamplerConfig, quota: int):
    """Returns {(taken positions, their tokens): probability}, and what was drawn there."""
    token_nQ, p_n, drawn = every_draw(logits_QV, cfg)
    quota_n = jnp.full(len(p_n), quota)
    masked = jnp.ones(token_nQ.shape, bool)
    take_nQ = np.asarray(STRATEGIES[cfg.strategy].take(drawn, masked, quota_n, cfg))
    found, conf = {}, {}
    for token_Q, p, take_Q, conf_Q in zip(
        token_nQ, p_n, take_nQ, np.asarray(drawn.conf_BW), strict=True
    ):
        if p > 0:
            key = tuple(np.flatnonzero(take_Q)), tuple(token_Q[take_Q])
            found[key], conf[key] = found.get(key, 0) + p, conf_Q
    return found, conf


def told_by_the_trace(logits_QV, cfg: SamplerConfig, quota: int, found, conf):
    """Returns what the trainer says of each outcome, from its trace alone."""
    model = types.SimpleNamespace(pad_id=PAD)
    exact = selection.of(dataclasses.replace(cfg, block=Q), model)
    exact = dataclasses.replace(exact, schedule=(quota,) * Q)
    layout = Layout(block=Q, selection=exact)
    tokens, step, confs = np.zeros((3, len(found), Q))
    for i, (positions, drawn) in enumerate(found):
        at = list(positions)
        tokens[i, at], step[i], step[i, at] = drawn, FAR, 1
        confs[i, at] = conf[positions, drawn][at]
    trace = types.SimpleNamespace(
        tokens_BT=tokens.astype(int),
        step_BT=step.astype(int),
        conf_BT=confs.astype(np.float32),
        prompt_len_B=np.zeros(len(found), int),
    )
    border, place = selection.borders(trace, layout)
    taken = step == 1
    lead = np.arange(len(found))[:, None], taken.argmax(axis=1)[:, None]
    limit = selection.limits(border[lead], place[lead], np.arange(Q)[None])
    limit = np.where(taken, np.inf, limit)
    head = jnp.concatenate([logits_QV, jnp.full((Q, 1), 50.0)], axis=1)  # the forbidden
    logp, _, _ = scored(
        jnp.tile(jnp.eye(Q), (len(found), 1)),
        head,
        jnp.asarray(tokens.reshape(-1), jnp.int32),
        jnp.asarray(limit.reshape(-1), jnp.float32),
        rule=exact.rule,
        forbidden=FORBIDDEN,
    )
    logp = np.asarray(logp).reshape(len(found), Q)
    return np.exp(np.where(taken | exact.skips, logp, 0).sum(axis=1))


def ties():
    """Returns logits of which two positions are alike, and two tokens of each."""
    x = np.random.default_rng(5).normal(size=(Q, V)).astype(np.float32)
    x[2], x[:, 4] = x[0], x[:, 3]
    return x


RULES = {
    "sequential": {"strategy": "sequential"},
    "static": {"strategy": "static"},
    "dynamic": {"threshold": 0.35},
    "no_border": {"threshold": 0.99},
    "all": {"threshold": 0.0},
    "entropy_bounded": {"strategy": "entropy_bounded", "entropy_bound": 2.6},
    "margin": {"target": "margin", "threshold": 0.2},
    "top": {"target": "top", "threshold": 0.4},
    "neg_entropy": {"target": "neg_entropy", "threshold": -1.4},
    "static_margin": {"strategy": "static", "target": "margin"},
    "warm": {"threshold": 0.35, "temperature": 1.7},
    "cold": {"threshold": 0.35, "temperature": 0.6, "tempered_threshold": True},
    "cold_own": {"threshold": 0.3, "temperature": 0.5},
    "top_k": {"threshold": 0.35, "top_k": 3},
    "top_p": {"threshold": 0.35, "top_p": 0.7, "temperature": 0.8},
    "both": {"strategy": "static", "top_k": 4, "top_p": 0.8},
    "pads": {"threshold": 0.3, "pad_penalty": 3.0},
    "static_pads": {"strategy": "static", "pad_penalty": 2.0, "temperature": 0.7},
}


@pytest.mark.parametrize("quota", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_every_outcome_has_its_probability(name, quota):
    """Of all that may be drawn in a block: also with ties, from the left."""
    cfg = SamplerConfig(block=Q, **RULES[name])
    assert not selection.refused(cfg, "block")
    free = np.random.default_rng(2).normal(size=(Q, V), scale=1.5).astype(np.float32)
    selected = set()
    for logits_QV in (free, ties()):
        found, conf = outcomes(jnp.asarray(logits_QV), cfg, quota)
        told = told_by_the_trace(jnp.asarray(logits_QV), cfg, quota, found, conf)
        np.testing.assert_allclose(told, list(found.values()), rtol=2e-4, atol=1e-7)
        assert told.sum() == pytest.approx(1, abs=1e-5)
        selected |= {positions for positions, _ in found}
    assert len(selected) > 2 or not cfg.filters_draws or name == "all"


def test_a_score_at_random_leaves_its_order_a_constant():
    cfg = SamplerConfig(block=Q, strategy="static", target="random")
    assert not cfg.filters_draws
    assert SamplerConfig().filters_draws
