"""Full attention under every policy against a loop over one row without a cache."""

import dataclasses

import jax
import numpy as np
import pytest

from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from tests.sampling import loop
from tests.sampling.common import padded

BASE = SamplerConfig(
    block=4, max_prompt=7, max_new=11, threshold=0.5, stop_ids=(3, 19, 20, 14, 0)
)
CASES = {  # shift, what differs from BASE
    "prefix": (0, {"cache": "prefix"}),
    "prefix, shift": (1, {"cache": "prefix", "horizon": 6}),
    "prefix, horizon, random": (
        0,
        {"cache": "prefix", "horizon": 3, "target": "random", "strategy": "static"},
    ),
    "dual": (0, {"cache": "dual", "strategy": "entropy_bounded", "entropy_bound": 1}),
    "dual, shift": (
        1,
        {"cache": "dual", "strategy": "static", "steps_per_block": 2},
    ),
    "none, margin, pads": (0, {"cache": "none", "target": "margin", "pad_penalty": 3}),
    "none, shift, entropy, ranks": (
        1,
        {"cache": "none", "target": "neg_entropy", "threshold": -1}
        | {"tempered_threshold": True, "rank_temperature": 0.5},
    ),
}
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(30, 66, n).tolist() for n in (3, 4, 6, 1, 7, 5)]
PROMPTS[2][-1] = 3  # a stop id that is given ends nothing
PROMPTS[4][2] = PROMPTS[4][-1] = 66  # mask ids that are text
NEW = [11, 8, 5, 9, 11, 1]  # limits inside blocks, at their ends, at the last slot
TEMPERATURES = [0, 1, 0, 1, 0.7, 1]


def case(tiny, name):
    """Returns (model, params, cfg, the arguments of `generate`) of a case."""
    shift, changes = CASES[name]
    # The pad is a token that is drawn often.
    model = dataclasses.replace(tiny[0], attention="full", shift=shift, pad_id=38)
    prompt_BT, len_B = padded([*PROMPTS, []], BASE.max_prompt)  # the last is a filler
    arrays = {
        "prompt_BT": prompt_BT,
        "prompt_len_B": len_B,
        "limit_B": len_B + np.array([*NEW, 0], np.int32),
        "temperature_B": np.array([*TEMPERATURES, 0], np.float32),
        "key_B": jax.random.split(jax.random.key(5), len(len_B)),
    }
    return model, tiny[1], dataclasses.replace(BASE, **changes), arrays


@pytest.mark.parametrize("name", CASES)
def test_generate_is_what_it_means(tiny, name):
    model, params, cfg, arrays = case(tiny, name)
    lowered = denoise.generate.lower(params, **arrays, model=model, cfg=cfg)
    sample = lowered.compile()
    trace = jax.device_get(sample(params, **arrays))
    for row, prompt in enumerate(PROMPTS):
        tokens_T, step_T, logp_T, length, count = loop.define(
            params,
            prompt,
            int(arrays["limit_B"][row]),
            TEMPERATURES[row],
            arrays["key_B"][row],
            model=model,
            cfg=cfg,
        )
        np.testing.assert_array_equal(trace.tokens_BT[row], tokens_T)
        np.testing.assert_array_equal(trace.step_BT[row], step_T)
        np.testing.assert_allclose(trace.logp_BT[row], logp_T, atol=1e-4)
        assert (trace.len_B[row], trace.steps_B[row]) == (length, count)
        last = tokens_T[len(prompt) + length - 1]
        assert trace.stopped_B[row] == (last in cfg.stop_ids)
        assert trace.forwards_B[row] == count
    assert trace.len_B[-1] == trace.forwards_B[-1] == 0
    assert trace.stopped_B.any() and not trace.stopped_B[:-1].all()
