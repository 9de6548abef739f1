"""Whole trajectories of the reference's samplers for full attention, at temperature 0."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import hf
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.strategy import STRATEGIES, Strategy
from tests.goldens import reader

HASTY = {"xla_backend_optimization_level": 0}
DIFFERENT = {  # and why
    ("dream", "top_p_dynamic"): "it applies top_p before top_k",
    ("llada", "neg_entropy"): "its sign is wrong: it prefers what it is least sure of",
    ("llada", "neg_entropy_dynamic"): "its sign is wrong",
    ("llada", "static_uneven_steps"): "its first block has a step more than the others",
    ("mmada", "3_mmu_generate"): "classifier-free guidance",
    ("mmada", "t2i_0"): "an image, by another schedule",
    ("mmada", "t2i_1"): "an image, by another schedule",
}


def either(drawn, masked_BW, quota_B, cfg):
    """Takes what static or dynamic would, as traced data says.

    Dream's first step of a block takes the block's first token, and nothing else.
    """
    pick_BW = jnp.where(
        cfg.dynamic,
        STRATEGIES["dynamic"].take(drawn, masked_BW, quota_B, cfg),
        STRATEGIES["static"].take(drawn, masked_BW, quota_B, cfg),
    )
    first_BW = masked_BW & (jnp.arange(masked_BW.shape[1])[None] == 0)
    entry_B1 = masked_BW.all(axis=1, keepdims=True) & cfg.lead
    return jnp.where(entry_B1, first_BW, pick_BW)


@functools.partial(
    jax.jit, static_argnames=("model", "cfg", "lead"), compiler_options=HASTY
)
def finish(params, s, counts, threshold, dynamic, *, model, cfg, lead):
    """Returns the state at its end, under a schedule and a threshold that are data."""
    fields = dataclasses.asdict(cfg) | {
        "strategy": "either",
        "threshold": threshold,
        "steps_per_block": len(counts),
    }
    facts = types.SimpleNamespace(
        **fields, schedule=counts, slots=cfg.slots, dynamic=dynamic, lead=lead
    )
    return jax.lax.while_loop(
        lambda s: s.live_B.any(),
        lambda s: denoise.step(params, s, model=model, cfg=facts),
        s,
    )


def dream_counts(block, steps):
    """Returns how many tokens each step of Dream's static rule takes, where it takes any.

    Of what is left at the time grid's point i it takes a share 1 - t_(i + 1) / t_i.
    """
    grid, out, left = np.linspace(1, 1e-3, steps + 1), [1], block - 1
    for i in range(1, steps):
        share = 1 - grid[i + 1] / grid[i]
        n = left if i == steps - 1 else int(left * share)
        out, left = out + [n] * (n > 0), left - n
    return out


def order(steps):
    """Returns steps numbered without gaps: those that took nothing, or another row's."""
    return np.unique(steps, return_inverse=True)[1].tolist()


def length(case) -> int:
    """Returns how many tokens a case generates."""
    return case["args"].get("max_gen_length") or case["args"]["max_new_tokens"]


def answered(model, params, case, shape):
    """Returns (host state, prompts) of a case; shape: (rows, prompt, answer) of all."""
    a, new, (rows, width, longest) = case["args"], length(case), shape
    block = a.get("block_size") or a["block_length"]
    threshold, horizon = a.get("unmask_threshold"), a.get("further_horizon")
    dream, steps = model.shift == 1, a["steps"] * block // new
    if threshold is not None or steps < 2:
        counts = [1]
    elif dream:
        counts = dream_counts(block, steps)
    else:
        counts = [block // steps + (t < block % steps) for t in range(steps)]
    pads = np.array(case["input_ids"]) == model.pad_id
    keep = ~pads if dream else np.ones_like(pads)  # LLaDA's and MMaDA's pads are seen
    prompts = [
        np.array(row)[k].tolist()
        for row, k in zip(case["input_ids"], keep, strict=True)
    ]
    stop = a.get("eot_token")
    if case["name"] == "all_pad_block_stops":
        stop = a["pad_token_id"]
    cached = a.get("use_cache", False)
    horizon = (
        longest if horizon is None else min(horizon, longest)
    )  # None: all that follows
    cfg = SamplerConfig(
        block=block,
        cache="prefix" if cached else "none",
        horizon=horizon if cached else 0,
        target=a.get("target", "confidence").removesuffix("_confidence"),
        strategy="static",
        top_k=a.get("top_k") or 0,
        top_p=a.get("top_p") or 1.0,
        tempered_threshold=dream,
        pad_penalty=a.get("pad_target_penalty", 1.0),
        max_prompt=width,
        max_new=longest,
        steps_per_block=1,
        stop_ids=() if stop is None else (stop,),
    )
    prompt_BT = np.zeros((rows, width), np.int32)
    len_B = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        prompt_BT[row, : len(prompt)], len_B[row] = prompt, len(prompt)
    model = dataclasses.replace(model, pad_id=a.get("pad_token_id", model.pad_id))
    s = denoise.start(
        params,
        prompt_BT,
        len_B,
        np.where(len_B > 0, len_B + new, 0).astype(np.int32),
        np.zeros(rows, np.float32),
        jax.random.split(jax.random.key(0), rows),
        model=model,
        cfg=cfg,
    )
    s = finish(
        params,
        s,
        np.array(([*counts] + [counts[-1]] * longest)[:longest], np.int32),
        np.float32(9 if threshold is None else threshold),
        np.bool_(threshold is not None),
        model=model,
        cfg=cfg,
        lead=dream,
    )
    return jax.device_get(s), prompts


@pytest.mark.parametrize("family", ["dream", "llada", "mmada"])
def test_trajectories_of_the_reference(family, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "either", Strategy(either, reads_sure=True))
    model, params = hf.load(reader.checkpoint(family))
    model = dataclasses.replace(model, dtype="float32")
    cases = reader.read(f"{family}/sample.json")["cases"]
    cases = [
        case
        for case in cases
        if "raises" not in case and (family, case["name"]) not in DIFFERENT
    ]
    assert cases
    rows = [row for case in cases for row in case["input_ids"]]
    shape = (
        max(len(case["input_ids"]) for case in cases),
        max(map(len, rows)),
        max(map(length, cases)),
    )
    for case in cases:
        name = case["name"]
        s, prompts = answered(model, params, case, shape)
        for row, prompt in enumerate(prompts):
            first, n = len(prompt), s.len_B[row]
            ids = s.tokens_BT[row, first : first + n].tolist()
            steps = s.step_BT[row, first : first + n].tolist()
            if "generated" in case:
                assert ids == case["generated"][row][:n], name
            else:
                skip = len(case["input_ids"][row])
                assert ids == case["sequences"][row][skip:][:n], name
                assert order(steps) == order(case["step_maps"][row][:n]), name
