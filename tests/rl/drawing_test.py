"""TraceRL for text-to-image: what is trained is what was drawn, with guidance too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models.mask import FAR
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig, OptimConfig
from dllm_jax.sampling import denoise
from tests.rl import common
from tests.sampling.common import CODES as N
from tests.sampling.common import DRAWING as CFG
from tests.sampling.common import DRAWN as PROMPTS
from tests.sampling.common import DRAWN_WIDTH as WIDTH
from tests.sampling.common import padded, row_keys

BATCH = BatchConfig(rows=8, tokens=64)
PLANS = common.Plans(policy=learner.Plan(("policy",), OptimConfig(), 1))


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def generate(params, *inputs, model, cfg):
    """Returns a Trace."""
    return denoise.generate(params, *inputs, model=model, cfg=cfg)


@pytest.fixture(scope="module")
def drawn(tiny):
    """Returns a function of (guidance, shift): (model, params, sampler, host trace)."""
    cfg, params = tiny

    @functools.cache
    def draw(guidance: float, shift: int = 0):
        model = dataclasses.replace(cfg, attention="full", drawn=(40, 57), shift=shift)
        sampler = dataclasses.replace(CFG, guidance=guidance)
        prompt_BT, len_B = padded(PROMPTS, WIDTH)
        keys = row_keys(jax.random.key(5), np.arange(len(PROMPTS)))
        inputs = prompt_BT, len_B, len_B + N, np.ones(len(PROMPTS)), keys
        trace = generate(params, *inputs, model=model, cfg=sampler)
        return model, params, sampler, jax.device_get(trace)

    return draw


def packed(model, sampler, trace, kind: NoiseConfig, batch: BatchConfig = BATCH):
    """Returns (TrainBatch, Source, Layout) as a run packs them."""
    layout = layouts.of(model, sampler, kind)
    noised = noise.noised(trace, kind, layout, np.random.default_rng(0))
    most = layouts.microbatches(
        trajectories=len(PROMPTS),
        slots=sampler.slots,
        answer=N,
        rounds=noise.rounds(kind, layout, N, sampler.steps),
        copies=kind.copies,
        layout=layout,
        cfg=batch,
    )
    many = jax.tree.map(lambda x: np.repeat(x, kind.copies, axis=0), trace)
    made = views.pack(
        many,
        noised,
        mask_id=model.mask_id,
        layout=layout,
        cfg=batch,
        most=most,
        aggregate="token",
        copies=kind.copies,
        draws=kind.draws,
    )
    return *made, layout


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("guidance", [0.0, 1.5])
def test_log_probs_are_those_recorded_in_drawing(drawn, guidance, shift):
    model, params, sampler, trace = drawn(guidance, shift)
    batch, source, _ = packed(model, sampler, trace, NoiseConfig())
    assert (batch.guidance is None) == (guidance == 0)
    out = common.score({"policy": params}, batch, model=model, plans=PLANS)["policy"]
    logp_nT = source.scatter(out["logp"], trace.step_BT.shape)
    answer_nT = noise.answers(trace)
    taught_nT = source.scatter(np.ones_like(out["logp"]), trace.step_BT.shape)
    np.testing.assert_array_equal(taught_nT, answer_nT)
    assert (trace.len_B == N).all() and (trace.steps_B == sampler.steps).all()
    np.testing.assert_allclose(
        logp_nT[answer_nT], trace.logp_BT[answer_nT], atol=1e-4, rtol=0
    )
    assert np.exp(trace.logp_BT[answer_nT]).max() < 0.999  # not all of it is certain


def test_without_guidance_the_loss_is_of_the_prompts_branch(drawn):
    model, params, sampler, trace = drawn(1.5)
    kind = NoiseConfig(guided=False)
    batch, source, layout = packed(model, sampler, trace, kind)
    assert batch.guidance is None and batch.beside_BU is None
    assert layout.beside == 0
    out = common.score({"policy": params}, batch, model=model, plans=PLANS)["policy"]
    logp_nT = source.scatter(out["logp"], trace.step_BT.shape)
    gap_nT = np.abs(logp_nT - trace.logp_BT)[noise.answers(trace)]
    assert gap_nT.max() > 0.1


@pytest.mark.parametrize("kind", ["trace", "bernoulli", "complement", "subset"])
def test_a_packed_canvas_and_the_one_beside_it_show_the_same_answer(drawn, kind):
    model, _, sampler, trace = drawn(1.5)
    batch, source, layout = packed(model, sampler, trace, NoiseConfig(kind=kind))
    seen = 0
    for b in range(batch.used):
        for r in range(batch.tokens_BT.shape[1]):
            held = np.flatnonzero(source.row_mBU[b, r] >= 0)
            for u in held:
                own, other = batch.where_BU[b, r, u], batch.beside_BU[b, r, u]
                at = batch.pos_BT[b, r]
                assert at[own] == at[other] == source.pos_mBU[b, r, u]
                begin, end = batch.begin_BT[b, r, other], batch.end_BT[b, r, other]
                assert batch.begin_BT[b, r, own] < batch.end_BT[b, r, own] == begin
                tokens = batch.tokens_BT[b, r, begin:end]
                assert tuple(tokens[:3]) == sampler.blank
                assert tokens[-1] == sampler.tail[0]
                answer = batch.tokens_BT[b, r, begin - N - 1 : begin]
                np.testing.assert_array_equal(tokens[3:], answer)
                assert tokens[other - begin] == model.mask_id
                assert end - begin <= layout.beside
                seen += 1
    assert seen >= len(PROMPTS)


def test_the_gradient_reaches_both_branches(drawn):
    model, params, sampler, trace = drawn(1.5)
    batch, _, _ = packed(model, sampler, trace, NoiseConfig())
    micro = common.flat(jax.tree.map(lambda x: x[:, :1] if np.ndim(x) else x, batch))
    zeros = jnp.zeros(micro.where_BU.shape)
    weights = {"logp": jnp.asarray(micro.weight_BU), "entropy": zeros}

    @functools.partial(jax.jit, static_argnames="model")
    def pull(params, micro, *, model):
        return jax.grad(
            lambda p: sum(
                jnp.sum(weights[key] * x)
                for key, x in learner.outputs(p, micro, model, ("lm",)).items()
            )
        )(params)

    grads = pull(params, micro, model=model)["embed"]
    alone = pull(params, micro.replace(guidance=np.float32(0)), model=model)["embed"]
    assert np.abs(grads - alone).max() > 1e-3


def test_a_row_too_narrow_for_both_canvases_is_refused(drawn):
    model, _, sampler, trace = drawn(1.5)
    with pytest.raises(ValueError, match="of its blank prompt's"):
        packed(model, sampler, trace, NoiseConfig(), BatchConfig(rows=8, tokens=20))


def test_what_lies_behind_the_tail_is_masked_for_good(drawn):
    *_, trace = drawn(1.5)
    for row, prompt in enumerate(PROMPTS):
        end = len(prompt) + N
        assert trace.step_BT[row, end] == 0
        assert (trace.step_BT[row, end + 1 :] == FAR).all()
