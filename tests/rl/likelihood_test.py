"""Likelihoods against what the sampler records, which is exact token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import mask, transformer
from dllm_jax.rl.config import BatchConfig
from dllm_jax.rl.likelihood import Likelihood
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from tests.sampling.common import padded, row_keys

PROMPTS = [[11, 12, 13, 14, 15], [20, 21, 22]]


def made(model, params, cfg, draws: int, tokens: int = 0) -> Likelihood:
    """Returns a Likelihood on one device; tokens: of BatchConfig."""
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    return Likelihood(
        params,
        model=model,
        cfg=cfg,
        batch=BatchConfig(rows=2, tokens=tokens),
        draws=draws,
        seed=0,
        mesh=mesh,
    )


def sampled(model, params, cfg):
    """Yields (prompt, answer, the sum of its recorded log-probs)."""
    prompt_BT, len_B = padded(PROMPTS, cfg.max_prompt)
    trace = denoise.generate(
        params,
        prompt_BT,
        len_B,
        len_B + cfg.max_new,
        np.ones(2, np.float32),
        row_keys(jax.random.key(3), np.arange(2, dtype=np.uint32)),
        model=model,
        cfg=cfg,
    )
    trace = jax.tree.map(np.asarray, trace)
    for row, prompt in enumerate(PROMPTS):
        span = slice(len(prompt), len(prompt) + int(trace.len_B[row]))
        answer = trace.tokens_BT[row, span].tolist()
        yield prompt, answer, float(trace.logp_BT[row, span].sum())


@pytest.mark.parametrize("attention", ["block", "causal"])
def test_token_by_token_it_is_exact(tiny, attention):
    model, params = tiny
    shift = int(attention == "causal")
    model = dataclasses.replace(model, attention=attention, shift=shift, block=1)
    cfg = SamplerConfig(block=1, steps_per_block=1, max_prompt=8, max_new=6)
    scorer = made(model, params, cfg, draws=16)
    for prompt, answer, logp in sampled(model, params, cfg):
        assert len(answer) > 1
        assert scorer.of(prompt, answer) == pytest.approx(logp, abs=1e-4)


def test_a_draw_of_a_bound_is_one_of_all_masks(tiny):
    """Of two tokens under full attention there are three masks: both, the first, the second."""
    model, params = tiny
    model = dataclasses.replace(model, attention="full", block=4)
    cfg = SamplerConfig(block=4, cache="none", max_prompt=8, max_new=4)
    scorer = made(model, params, cfg, draws=1)
    prompt, answer = PROMPTS[0], [30, 31]

    @jax.jit
    def logp(tokens_BT):
        """Returns the log-probs at the answer's places where these tokens are shown."""
        pos_BT = jnp.broadcast_to(jnp.arange(7)[None], tokens_BT.shape)
        seen = mask.clean("full", pos_BT, jnp.full(len(tokens_BT), 7), 4)
        x_BTD = transformer.embed(params, tokens_BT, model)
        x_BTD = transformer.trunk(params, x_BTD, pos_BT, seen, model)[0]
        return jax.nn.log_softmax(transformer.logits(params, x_BTD, model))[:, 5:]

    hidden = model.mask_id
    shown = [[hidden, hidden], [hidden, 31], [30, hidden]]
    both, first, second = logp(jnp.array([prompt + x for x in shown]))
    masks = [both[0, 30] + both[1, 31], 2 * first[0, 30], 2 * second[1, 31]]
    seen = set()
    for seed in range(12):
        scorer.seed = seed
        value = scorer.of(prompt, answer)
        assert value == scorer.of(prompt, answer)
        gap = np.abs(np.array(masks) - value)
        assert gap.min() < 1e-4
        seen.add(int(gap.argmin()))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("attention", ["block", "full", "causal"])
@pytest.mark.parametrize("block", [1, 2])
def test_where_there_is_but_one_mask_one_draw_does(tiny, attention, block):
    model, params = tiny
    shift = int(attention == "causal")
    model = dataclasses.replace(model, attention=attention, shift=shift, block=block)
    cfg = SamplerConfig(block=block, cache="none", max_prompt=8, max_new=4)
    scorer = made(model, params, cfg, draws=3, tokens=384)
    one = attention == "causal" or (attention, block) == ("block", 1)
    assert scorer.noise.copies == (1 if one else 3)
    assert scorer.pack.keywords["cfg"].tokens == 384


def test_what_does_not_fit_is_refused(tiny):
    model, params = tiny
    cfg = SamplerConfig(block=4, max_prompt=8, max_new=4)
    scorer = made(model, params, cfg, draws=1)
    with pytest.raises(
        ValueError, match="answer of 5 does not fit sampler.max_prompt=8"
    ):
        scorer.of([1], [1] * 5)
    with pytest.raises(ValueError, match="needs a prompt and an answer"):
        scorer.of([], [1])
