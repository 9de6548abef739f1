"""Training sees what sampling saw: full attention, shifts, next tokens; and stale keys.

Blocks without a shift are in learner_test.py.
"""

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
from dllm_jax.sampling.config import SamplerConfig
from tests.rl import common

N, NEW, STOPS = 8, 11, tuple(range(2, 66, 5))
BATCH = BatchConfig(rows=8, tokens=48)
PLANS = common.Plans(policy=learner.Plan(("policy",), OptimConfig(), 1))
CFG = SamplerConfig(max_prompt=9, max_new=NEW, threshold=0.4, stop_ids=STOPS)
STATIC = {"strategy": "static", "steps_per_block": 2}
EXACT = {  # attention, shift, what differs from CFG
    "LLaDA": ("full", 0, {}),
    "Dream": ("full", 1, {}),
    "Dream, static": ("full", 1, STATIC),
    "Fast-dLLM v2": ("block", 1, {}),
    "next tokens": ("causal", 1, {"block": 1, "steps_per_block": 1}),
}


def compared(tiny, attention, shift, changes):
    """Returns (host trace, its answers, log-probs as trained) through the product's path."""
    model, params = tiny
    model = dataclasses.replace(model, attention=attention, shift=shift)
    cfg = dataclasses.replace(CFG, **changes)
    generate = functools.partial(denoise.generate.__wrapped__, model=model, cfg=cfg)
    len_B = jnp.arange(N) % 9 + 1
    prompt_BT = jax.random.randint(jax.random.key(6), (N, 9), 7, 60)
    keys = jax.random.split(jax.random.key(7), N)
    trace = jax.device_get(
        jax.jit(generate)(params, prompt_BT, len_B, len_B + NEW, jnp.ones(N), keys)
    )
    layout = layouts.Layout(
        attention=attention, shift=shift, block=cfg.block, longest=NEW
    )
    kind = NoiseConfig()
    rounds = noise.rounds(kind, layout, NEW)
    batch, source = views.pack(
        trace,
        noise.noised(trace, kind, layout),
        mask_id=model.mask_id,
        layout=layout,
        cfg=BATCH,
        most=layouts.microbatches(
            trajectories=N,
            slots=cfg.slots,
            answer=NEW,
            rounds=rounds,
            copies=1,
            layout=layout,
            cfg=BATCH,
        ),
        aggregate="token",
    )
    out = common.score({"policy": params}, batch, model=model, plans=PLANS)["policy"]
    taught_nT = np.zeros(trace.step_BT.shape, int)
    held = source.row_mBU >= 0
    np.add.at(taught_nT, (source.row_mBU[held], source.pos_mBU[held]), 1)
    answer_nT = noise.answers(trace)
    np.testing.assert_array_equal(taught_nT, answer_nT)  # each token once
    return trace, answer_nT, source.scatter(out["logp"], trace.step_BT.shape)


@pytest.mark.parametrize("name", EXACT)
def test_log_probs_are_those_recorded_in_sampling(tiny, name):
    trace, answer_nT, logp_nT = compared(tiny, *EXACT[name])
    assert trace.stopped_B.any() and not trace.stopped_B.all()
    assert len(np.unique(trace.prompt_len_B)) == N
    if EXACT[name][0] != "causal":
        # Answers that stopped early leave masks, or tokens of their last block, behind,
        # and some step unmasked several tokens.
        end_n1 = (trace.prompt_len_B + trace.len_B)[:, None]
        after_nT = np.arange(answer_nT.shape[1])[None] >= end_n1
        assert (after_nT & (trace.step_BT != FAR)).any()
        assert trace.stopped_B[trace.len_B < NEW - 4].any()
        assert (trace.steps_B < trace.len_B).any()
    assert (trace.logp_BT[answer_nT] < 0).all()
    np.testing.assert_allclose(
        logp_nT[answer_nT], trace.logp_BT[answer_nT], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_stale_keys_leave_a_gap(tiny, cache, shift):
    trace, answer_nT, logp_nT = compared(tiny, "full", shift, {"cache": cache})
    gap_nT = np.abs(logp_nT - trace.logp_BT)
    first_nT = answer_nT & (trace.step_BT == 1)  # of the whole canvas
    assert gap_nT[first_nT].max() < 1e-4
    print(f"{cache}, shift {shift}: mean gap {gap_nT[answer_nT].mean():.3f} nats")
    assert gap_nT[answer_nT].max() > 1e-2
