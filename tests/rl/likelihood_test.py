"""Likelihoods against what the sampler records, which is exact token by token."""

import dataclasses

import jax
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.rl.config import BatchConfig
from dllm_jax.rl.likelihood import Likelihood
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from tests.sampling.common import padded, row_keys

PROMPTS = [[11, 12, 13, 14, 15], [20, 21, 22]]


def made(model, params, cfg, draws: int) -> Likelihood:
    """Returns a Likelihood on one device."""
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    return Likelihood(
        params,
        model=model,
        cfg=cfg,
        batch=BatchConfig(rows=2),
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


def test_a_bound_is_the_mean_over_all_masks(tiny):
    """Of two tokens under full attention there are three masks, of chances 1/4, 1/4, 1/2."""
    model, params = tiny
    model = dataclasses.replace(model, attention="full", block=4)
    cfg = SamplerConfig(block=4, cache="none", max_prompt=8, max_new=4)
    scorer = made(model, params, cfg, draws=400)
    prompt, answer = PROMPTS[0], [30, 31]

    def logp(shown: list[int]):
        """Returns the log-probs at the answer's places where these tokens are shown."""
        from dllm_jax.models import mask, transformer

        pos_BT = np.arange(7)[None]
        seen = mask.clean("full", pos_BT, np.array([7]), 4)
        x = transformer.embed(params, np.array([prompt + shown]), model)
        x, *_ = transformer.trunk(params, x, pos_BT, seen, model)
        return jax.nn.log_softmax(transformer.logits(params, x, model))[0, 5:]

    masked = model.mask_id
    both = logp([masked, masked])
    first, second = logp([masked, 31])[0, 30], logp([30, masked])[1, 31]
    exact = 0.5 * (both[0, 30] + both[1, 31]) + 0.25 * (2 * first + 2 * second)
    values = [scorer.of(prompt, answer), scorer.of(prompt, answer)]
    assert values[0] == values[1]
    assert values[0] == pytest.approx(float(exact), abs=0.25)


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
