"""Rows of full attention on the engine against their definition, in batches."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import acting
from dllm_jax.models import cache as kv
from dllm_jax.sampling import answers, denoise, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from tests.sampling.common import ONE, as_on_tpu, ask, empty_again, padded, row_keys

KEY = jax.random.key(7)
BASE = SamplerConfig(
    block=4,
    max_prompt=21,
    max_new=11,
    threshold=0.5,
    stop_ids=(3, 19, 20),
    rows=8,
    page=8,
    prefill=4,  # a canvas at a time; in a case that says so all eight rows' as well
)
CASES = {  # shift, what differs from BASE
    "prefix": (0, {"cache": "prefix", "prefill": 40}),
    "prefix, shift, horizon": (1, {"cache": "prefix", "horizon": 6}),
    "dual": (0, {"cache": "dual", "strategy": "entropy_bounded", "entropy_bound": 1.0}),
    "dual, shift": (1, {"cache": "dual", "strategy": "static", "steps_per_block": 2}),
    "none": (0, {"target": "margin", "pad_penalty": 3.0}),
    "none, blocks": (1, {"cache": "none"}),
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
    attention = "block" if "blocks" in name else "full"
    model = dataclasses.replace(tiny[0], attention=attention, shift=shift, pad_id=38)
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
            atol = 2e-5 if name in ("logp_T", "conf_T") else 0
            np.testing.assert_allclose(
                getattr(got[index], name), value, atol=atol, rtol=0, err_msg=name
            )


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
    # A canvas for each block that begins, or each step where no key is kept: no row runs
    # one because another does.
    due = sum(
        int(answer.steps)
        if cfg.cache in ("auto", "none")
        else -(-answer.len // cfg.block)
        for answer in want.values()
    )
    assert int(made.rows.clean) == 2 * due


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(1, (1, 1, 1), marks=pytest.mark.soak),
        (32, (1, 1, 1)),
        (3, (2, 2, 2)),
    ],
)
def test_whatever_the_rows_and_the_mesh(tiny, rows, sizes):
    model, params, cfg = case(tiny, "dual, shift", rows=rows, pages=12)
    requests = asked(9 if rows == 1 else 30, seed=1)
    want = defined(model, params, cfg, requests)
    mesh = sharding.make_mesh(
        **dict(zip(("data", "fsdp", "model"), sizes, strict=True)),
        devices=jax.devices()[: int(np.prod(sizes))],
    )
    shown = acting.laid_out(params, acting.abstract(model, mesh))
    made = Engine(model=model, cfg=cfg, mesh=mesh)
    ask(made, requests)
    same({r.index: answer for r, answer in made.run(shown, KEY)}, want)
    empty_again(made)


def test_a_forward_of_canvases_or_windows_copies_no_pages(tiny):
    model, params, cfg = case(tiny, "dual")
    layers = acting.laid_out(params, acting.abstract(model, ONE()))
    lowered, rows = Engine(model=model, cfg=cfg, mesh=ONE()).lower(layers)
    pool = ",".join(map(str, rows.s.cache.k_LPOKH.shape))
    text = lowered.compile().as_text()
    assert f"f32[{pool}]" in text
    assert not re.findall(rf"f32\[{pool}\]\S* copy\(", text)


def test_over_the_kernels_of_pages(tiny, monkeypatch):
    """By the interpreter; windows of more positions than some rows have keys."""
    model, params, cfg = case(tiny, "prefix, shift, horizon", rows=2, max_prompt=9)
    model = dataclasses.replace(model, layers=1)
    params = params | {"layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    requests = [(5, list(range(30, 39)), 1.0, 11), (7, [30], 1.0, 3)]
    want = defined(model, params, cfg, requests)
    monkeypatch.setattr(pallas_kernels.choice, "HEAD_SIZES", (model.head_dim,))
    for name in ("paged_attention", "cache_update"):
        op = functools.partial(getattr(pallas_kernels, name), interpret=True)
        monkeypatch.setattr(pallas_kernels, name, as_on_tpu(op))
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    ask(made, requests)
    same({r.index: answer for r, answer in made.run(params, KEY)}, want)


def test_windows_wider_than_kernels_of_pages_take(tiny, monkeypatch):
    model, params, cfg = case(tiny, "prefix, shift, horizon", rows=2, max_prompt=20)
    requests = [r for r in asked(9) if len(r[1]) <= cfg.max_prompt]
    want = defined(model, params, cfg, requests)
    monkeypatch.setattr(kv, "PAGED", cfg.window - 1)
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    ask(made, requests)
    same({r.index: answer for r, answer in made.run(params, KEY)}, want)


@pytest.mark.parametrize("cache", ["dual", "none"])
def test_a_row_that_meets_nan_ends_alone(tiny, cache):
    model, params, cfg = case(tiny, "prefix", rows=2)
    cfg = dataclasses.replace(cfg, cache=cache)
    bad = params | {"embed": params["embed"].at[41].set(np.nan)}
    asked = [[30, 31], [30, 41, 31], [33] * 9]
    how = {"key": KEY, "temperature": 1.0}
    made = answers.answerer(model=model, cfg=cfg, mesh=ONE())
    want = dict(made.stream(params, asked, **how))
    got = dict(made.stream(bad, asked, **how))
    assert got[1].bad and got[1].len == 0 and got[1].forwards == 1
    same({i: got[i] for i in (0, 2)}, {i: want[i] for i in (0, 2)})
    same(dict(made.stream(params, asked, **how)), want)  # no page keeps a NaN


def test_who_leaves_a_row_without_pages_leaves_nothing_there(tiny):
    model, params, cfg = case(tiny, "none")
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    ask(made, asked(6))
    got = made.turn(params, KEY, watch=lambda request, row: None)
    made.cancel(made.scheduler.active[0].index)
    assert made.scheduler.left
    assert len([*got, *made.run(params, KEY)]) == 5
    empty_again(made)


def test_an_answer_longer_than_a_canvas_is_refused(tiny):
    model, _, cfg = case(tiny, "prefix")
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    with pytest.raises(ValueError, match="does not fit sampler.max_prompt=21"):
        made.submit([30], index=0, temperature=1.0, new=cfg.max_new + 1)
    few = dataclasses.replace(cfg, pages=3)
    with pytest.raises(ValueError, match=r"sampler.pages=3 .* set it to 5 or more"):
        Engine(model=model, cfg=few, mesh=ONE())


def test_guided_rows_stay_together(tiny):
    model, _, cfg = case(tiny, "none")
    guided = dataclasses.replace(cfg, guidance=1.5, blank=(30,))
    kinds = {"guided": guided, "plain": cfg}
    made = {
        name: answers.answerer(model=model, cfg=own, mesh=ONE())
        for name, own in kinds.items()
    }
    assert isinstance(made["guided"], answers.Batches)
    assert isinstance(made["plain"], Engine)
