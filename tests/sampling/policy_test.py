"""Cache policies and shifts against a loop over one row that has no cache."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import mask, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import answers, denoise, logits, policy
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.state import GIVEN
from tests.sampling.common import end_of, padded, row_keys

KEY = jax.random.key(3)
CFG = SamplerConfig(
    block=4, steps_per_block=2, threshold=0.5, max_prompt=8, max_new=12, stop_ids=(1, 5)
)
PROMPTS = [[20, 30, 40], [11, 12, 13, 14, 15, 16, 17, 18], [25], [31, 32, 33, 34, 35]]
NEW = [12, 9, 11, 4]
KINDS = {  # attention, shift, block
    "LLaDA": ("full", 0, 4),
    "Dream": ("full", 1, 4),
    "SDAR": ("block", 0, 4),
    "Fast-dLLM v2": ("block", 1, 4),
    "autoregressive": ("causal", 1, 1),
}


def family(tiny, kind):
    """Returns (ModelConfig, params, SamplerConfig) of a family's shape."""
    attention, shift, block = KINDS[kind]
    model = dataclasses.replace(tiny[0], attention=attention, shift=shift)
    steps = min(block, CFG.steps_per_block)
    return model, tiny[1], dataclasses.replace(CFG, block=block, steps_per_block=steps)


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def look(params, tokens_1T, length_1, *, model, cfg):
    """Returns the logits that answer for every position of a canvas: [T, V]."""
    pos_1T = jnp.arange(cfg.slots)[None]
    seen = mask.clean(model.attention, pos_1T, length_1, cfg.block)
    x = transformer.embed(params, tokens_1T, model)
    x, *_ = transformer.trunk(params, x, pos_1T, seen, model)
    return jnp.roll(transformer.logits(params, x, model)[0], model.shift, axis=0)


draw = jax.jit(logits.draw, static_argnames="cfg")


def by_hand(params, prompt, new, index, temperature, *, model, cfg):
    """Answers one prompt, looking at the whole canvas at every step."""
    first, limit, Q = len(prompt), len(prompt) + new, cfg.block
    tokens_T, step_T = np.zeros(cfg.slots, np.int32), np.full(cfg.slots, FAR)
    tokens_T[:first], step_T[:first], step = prompt, GIVEN, 0
    full, key = model.attention == "full", jax.random.fold_in(KEY, index)
    for start in range(first if full else first // Q * Q, limit, Q):
        span = np.arange(start, min(start + Q, limit) if full else start + Q)
        for quota in itertools.chain(cfg.schedule, itertools.repeat(cfg.schedule[-1])):
            masked = span[step_T[span] == FAR]
            if not len(masked):
                break
            shown_1T = np.where(step_T == FAR, model.mask_id, tokens_T)[None]
            out_TV = look(params, shown_1T, np.array([limit]), model=model, cfg=cfg)
            window = np.clip(np.arange(start, start + Q), 0, cfg.slots - 1)
            drawn = draw(
                jax.random.fold_in(key, step)[None],
                out_TV[window][None],
                jnp.array([temperature]),
                cfg=cfg,
            )
            step += 1
            conf = np.asarray(drawn.conf_BW[0])[masked - start]
            best = np.argsort(-conf, kind="stable")[:quota]
            take = masked[sorted({*best, *np.flatnonzero(conf > cfg.threshold)})]
            tokens_T[take] = np.asarray(drawn.token_BW[0])[take - start]
            step_T[take] = step
            end = end_of(tokens_T, step_T, first, limit, cfg.stop_ids)
            if end is not None:
                return tokens_T[:end].tolist(), step_T[:end].tolist()
    raise AssertionError("no end")


def sampled(tiny, kind, temperature, cache="auto", horizon=0):
    """Returns the sampler's Trace of all prompts."""
    model, params, cfg = family(tiny, kind)
    cfg = dataclasses.replace(cfg, cache=cache, horizon=horizon)
    prompt_BT, len_B = padded(PROMPTS, cfg.max_prompt)
    trace = denoise.generate(
        params,
        prompt_BT,
        len_B,
        len_B + np.array(NEW, np.int32),
        np.full(len(len_B), temperature, np.float32),
        row_keys(KEY, np.arange(len(len_B))),
        model=model,
        cfg=cfg,
    )
    return jax.device_get(trace)


def rows(trace):
    """Returns (ids, steps) of every row up to its end."""
    ends = trace.prompt_len_B + trace.len_B
    return [
        (tokens[:end].tolist(), steps[:end].tolist())
        for tokens, steps, end in zip(trace.tokens_BT, trace.step_BT, ends)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_exact_policy_is_the_loop(tiny, kind, temperature):
    model, params, cfg = family(tiny, kind)
    got = rows(sampled(tiny, kind, temperature))
    for i, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        want = by_hand(params, prompt, new, i, temperature, model=model, cfg=cfg)
        assert got[i] == want, i


@pytest.mark.parametrize("kind", ["SDAR", "Fast-dLLM v2"])
def test_a_block_family_without_a_cache(tiny, kind):
    assert rows(sampled(tiny, kind, 1.0, "none")) == rows(sampled(tiny, kind, 1.0))


@pytest.mark.parametrize("kind", ["Fast-dLLM v2", "autoregressive"])
def test_the_engine_knows_shifts(tiny, one_width, kind):
    model, params, cfg = family(tiny, kind)
    cfg = dataclasses.replace(cfg, rows=2, page=4, prefill=4)
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    made = Engine(model=model, cfg=cfg, mesh=mesh)
    asked = [*zip(PROMPTS, NEW), (PROMPTS[1], NEW[1])]  # one shares a prompt's pages
    for i, (prompt, new) in enumerate(asked):
        made.submit(prompt, index=i, temperature=1.0, new=new)
    answers = {r.index: row for r, row in made.run(params, KEY)}
    for i, (tokens, steps) in enumerate(rows(sampled(tiny, kind, 1.0))):
        end = len(tokens)
        assert answers[i].tokens_T[:end].tolist() == tokens
        assert answers[i].step_T[:end].tolist() == steps
        assert answers[i].len == end - len(PROMPTS[i])
    assert answers[4].len > 0


@pytest.mark.parametrize("kind", ["LLaDA", "Dream"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_stale_caches_answer_and_differ(tiny, kind, cache):
    exact, stale = sampled(tiny, kind, 0.0), sampled(tiny, kind, 0.0, cache)
    for trace in (exact, stale):
        steps = [steps for _, steps in rows(trace)]
        assert all(FAR not in row for row in steps)
    # The first step of a row looks at the whole canvas under every policy.
    first = exact.step_BT == 1
    np.testing.assert_array_equal(first, stale.step_BT == 1)
    np.testing.assert_array_equal(exact.tokens_BT[first], stale.tokens_BT[first])
    np.testing.assert_allclose(exact.logp_BT[first], stale.logp_BT[first], atol=1e-5)
    later = (exact.step_BT == 2) & (stale.step_BT == 2)
    assert np.abs(exact.logp_BT[later] - stale.logp_BT[later]).max() > 1e-3


@pytest.mark.parametrize(("cache", "horizon"), [("prefix", 12), ("dual", 0)])
def test_with_one_layer_no_key_is_stale(tiny, cache, horizon, kind="LLaDA"):
    """Its keys depend on no other token: those remembered are those of now."""
    model, params = tiny
    params = params | {"layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    shallow = dataclasses.replace(model, layers=1), params
    exact = sampled(shallow, kind, 1.0)
    cached = sampled(shallow, kind, 1.0, cache, horizon)
    assert rows(cached) == rows(exact)


@pytest.mark.parametrize(
    ("cache", "attention"), [("block", "full"), ("prefix", "block"), ("dual", "causal")]
)
def test_a_policy_that_does_not_serve_the_family_is_refused(cache, attention):
    with pytest.raises(ValueError, match=f"sampler.cache='{cache}' .*choose from auto"):
        policy.choose(SamplerConfig(cache=cache, block=1, steps_per_block=1), attention)


def test_a_causal_model_answers_token_by_token():
    with pytest.raises(ValueError, match="sampler.block=4: .* causal .*block=1 and"):
        policy.choose(SamplerConfig(), "causal")


@pytest.mark.parametrize("cache", ["auto", "dual"])
def test_a_horizon_belongs_to_prefix(cache):
    with pytest.raises(ValueError, match="sampler.horizon=4: .*'prefix'"):
        SamplerConfig(cache=cache, horizon=4)


def test_an_unknown_policy_lists_the_known():
    with pytest.raises(ValueError, match="cache='all': choose from auto, none"):
        SamplerConfig(cache="all")


@pytest.mark.parametrize("cache", ["auto", "none"])
def test_pages_where_there_are_none_are_refused(cache):
    cfg = dataclasses.replace(CFG, cache=cache, pages=20)
    model = types.SimpleNamespace(attention="full")
    with pytest.raises(
        ValueError, match="pages=20: there are none with .*='none'; set"
    ):
        answers.answerer(model=model, cfg=cfg, mesh=None)
