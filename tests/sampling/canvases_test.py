"""Rows of full attention on the engine against their definition, in batches."""

import dataclasses

import jax
import numpy as np
import pytest

from dllm_jax.sampling import denoise, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from tests.sampling.common import padded, row_keys
from tests.sampling.engine_test import ONE, ask, empty_again

KEY = jax.random.key(7)
BASE = SamplerConfig(
    block=4,
    max_prompt=21,
    max_new=11,
    threshold=0.5,
    stop_ids=(3, 19, 20),
    rows=8,
    page=8,
    prefill=40,  # four canvases of the narrower width, one of the wider
)
CASES = {  # shift, what differs from BASE
    "prefix": (0, {"cache": "prefix"}),
    "prefix, shift, horizon": (1, {"cache": "prefix", "horizon": 6}),
    "dual": (0, {"cache": "dual", "strategy": "entropy_bounded", "entropy_bound": 1.0}),
    "dual, shift": (1, {"cache": "dual", "strategy": "static", "steps_per_block": 2}),
    "none": (0, {"target": "margin", "pad_penalty": 3.0}),
}


def asked(count: int, seed=0):
    """Returns ragged (index, prompt, temperature, new)."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, BASE.max_prompt + 1, count)
    return [
        (100 + i, rng.integers(21, 66, n).tolist(), [0.0, 1.0, 1.4][i % 3], new)
        for i, (n, new) in enumerate(zip(sizes, [11, 8, 11, 1, 11, 6] * count))
    ]


def case(tiny, name, **changes):
    """Returns (model, params, cfg) of a case."""
    shift, own = CASES[name]
    model = dataclasses.replace(tiny[0], attention="full", shift=shift, pad_id=38)
    return model, tiny[1], dataclasses.replace(BASE, **own, **changes)


def defined(model, params, cfg, requests):
    """Returns the answers of the definition, all in one batch."""
    prompt_BT, len_B = padded([prompt for _, prompt, *_ in requests], cfg.max_prompt)
    index_B, _, temperature_B, new_B = zip(*requests, strict=True)
    arrays = {
        "prompt_BT": prompt_BT,
        "prompt_len_B": len_B,
        "limit_B": len_B + np.array(new_B, np.int32),
        "temperature_B": np.array(temperature_B, np.float32),
        "key_B": row_keys(KEY, np.array(index_B, np.uint32)),
    }
    trace = jax.device_get(denoise.generate(params, **arrays, model=model, cfg=cfg))
    return {index: state.answer(trace, row) for row, index in enumerate(index_B)}


def same(got, want):
    """Asserts that answers are the same, with all that stands behind their ends."""
    assert got.keys() == want.keys()
    for index, answer in want.items():
        for name, value in answer._asdict().items():
            close = np.testing.assert_array_equal
            if name in ("logp_T", "conf_T"):
                close = lambda a, b, **_: np.testing.assert_allclose(a, b, atol=2e-5)
            close(getattr(got[index], name), value, err_msg=f"{index} {name}")


@pytest.mark.parametrize("name", CASES)
def test_rows_are_answered_as_in_a_batch(tiny, name):
    model, params, cfg = case(tiny, name)
    requests = asked(30)
    want = defined(model, params, cfg, requests)
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    for order in (requests, requests[::-1]):
        ask(made, order)
        same({r.index: answer for r, answer in made.run(params, KEY)}, want)
    empty_again(made)
