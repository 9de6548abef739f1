"""The engine against its definition under random settings: each compiles its own programs.

`make test` has thousands of schedules without a model and some with one, but under one
setting; here blocks, pages, rows, shifts and shards are drawn, too.
"""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from dllm_jax import sharding
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from tests.properties import examples

COUNT = 10
settings = st.fixed_dictionaries(
    {
        "block": st.sampled_from([1, 2, 4, 8]),
        "page": st.sampled_from([1, 4, 8]),
        "prefill": st.sampled_from([1, 8, 64]),
        "rows": st.integers(1, 6),
        "max_prompt": st.integers(1, 20),
        "max_new": st.integers(1, 16),
        "strategy": st.sampled_from(
            ["dynamic", "entropy_bounded", "sequential", "static"]
        ),
        "temperature": st.sampled_from([0.0, 1.0]),
        "threshold": st.sampled_from([0.2, 0.6]),
        "top_k": st.sampled_from([0, 5]),
    }
)


def prompts(seed: int, longest: int) -> list[list[int]]:
    """Returns ragged prompts, of which every other begins like the one before."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(COUNT):
        new = rng.integers(10, 60, rng.integers(1, longest + 1)).tolist()
        keep = int(rng.integers(0, longest + 1))
        out.append((out[-1][:keep] + new)[:longest] if i % 2 else new)
    return out


def defined(params, asked, key, *, model, cfg):
    """Returns the definition's trace of these prompts."""
    prompt_BT = np.zeros((COUNT, cfg.max_prompt), np.int32)
    for row_T, prompt in zip(prompt_BT, asked, strict=True):
        row_T[: len(prompt)] = prompt
    len_B = np.array([len(prompt) for prompt in asked], np.int32)
    trace = denoise.generate(
        params,
        prompt_BT,
        len_B,
        len_B + cfg.max_new,
        np.full(COUNT, cfg.temperature, np.float32),
        jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, np.arange(COUNT)),
        model=model,
        cfg=cfg,
    )
    return jax.device_get(trace)


@examples(0.02)
@hypothesis.given(
    settings=settings,
    shift=st.integers(0, 1),
    shards=st.sampled_from([1, 2]),
    spare=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_engine_is_the_definition_under_any_settings(
    tiny, settings, shift, shards, spare, seed
):
    model, params = dataclasses.replace(tiny[0], shift=shift), tiny[1]
    cfg = SamplerConfig(**settings, steps_per_block=1, stop_ids=(1, 5, 9))
    cfg = dataclasses.replace(cfg, pages=-(-cfg.slots // cfg.page_slots) + spare)
    key, asked = jax.random.key(seed), prompts(seed, cfg.max_prompt)
    want = defined(params, asked, key, model=model, cfg=cfg)
    mesh = sharding.make_mesh(data=shards, fsdp=1, devices=jax.devices()[:shards])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        params = jax.device_put(params, whole)
        made = Engine(model=model, cfg=cfg, mesh=mesh)
        answers = dict(
            made.stream(params, asked, key, temperature=settings["temperature"])
        )
    assert answers.keys() == set(range(COUNT))
    for i, got in answers.items():
        end = want.prompt_len_B[i] + want.len_B[i]
        assert got.len == want.len_B[i]
        assert got.steps == want.steps_B[i]
        for ours_T, theirs_T in (
            (got.tokens_T, want.tokens_BT[i]),
            (got.step_T, want.step_BT[i]),
        ):
            np.testing.assert_array_equal(ours_T[:end], theirs_T[:end])
        np.testing.assert_allclose(got.logp_T[:end], want.logp_BT[i, :end], atol=2e-5)
    jax.clear_caches()  # of programs that no other settings use
