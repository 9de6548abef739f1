"""Trajectories of the reference's samplers for full attention, at temperature 0."""

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
from tests.sampling.common import padded

DIFFERENT = {  # and why
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


@functools.partial(jax.jit, static_argnames=("model", "cfg", "lead"))
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
    """Returns how many tokens the steps of Dream's static rule take, if any.

    Of what is left at the time grid's point i it takes a share 1 - t_(i + 1) / t_i.
    """
    grid, counts, left = np.linspace(1, 1e-3, steps + 1), [1], block - 1
    for i in range(1, steps):
        share = 1 - grid[i + 1] / grid[i]
        n = left if i == steps - 1 else int(left * share)
        if n > 0:
            counts.append(n)
        left -= n
    return counts


def order(steps):
    """Returns steps numbered without gaps, which steps that took nothing leave."""
    return np.unique(steps, return_inverse=True)[1].tolist()


@dataclasses.dataclass(frozen=True)
class Shape:
    """The one that all cases of a family run in: rows, longest prompt and answer."""

    rows: int
    width: int
    new: int


def shape_of(cases) -> Shape:
    """Returns the least Shape that has room for every case."""
    prompts = [row for case in cases for row in case["input_ids"]]
    return Shape(
        rows=max(len(case["input_ids"]) for case in cases),
        width=max(map(len, prompts)),
        new=max(length(case["args"]) for case in cases),
    )


def length(a) -> int:
    """Returns how many tokens a case generates, by its arguments."""
    return a.get("max_gen_length") or a["max_new_tokens"]


def counts_of(a, cfg, dream: bool) -> list[int]:
    """Returns how many tokens each step of a block takes; later ones as the last."""
    steps = a["steps"] * cfg.block // length(a)
    if a.get("unmask_threshold") is not None or steps < 2:
        return [1]
    if dream:
        return dream_counts(cfg.block, steps)
    share, remainder = divmod(cfg.block, steps)
    return [share + 1] * remainder + [share] * (steps - remainder)


def prompts_of(case, pad_id: int, dream: bool) -> list[list[int]]:
    """Returns a case's prompts. LLaDA's and MMaDA's pads are seen, Dream's are not."""
    rows = case["input_ids"]
    if not dream:
        return rows
    return [[token for token in row if token != pad_id] for row in rows]


def config_of(case, shape: Shape, dream: bool) -> SamplerConfig:
    """Returns the config of a case, whose schedule and threshold are data."""
    a = case["args"]
    stop = a.get("eot_token")
    if case["name"] == "all_pad_block_stops":
        stop = a["pad_token_id"]
    cached, horizon = a.get("use_cache", False), a.get("further_horizon")
    # None: all that follows.
    horizon = shape.new if horizon is None else min(horizon, shape.new)
    return SamplerConfig(
        block=a.get("block_size") or a["block_length"],
        cache="prefix" if cached else "none",
        horizon=horizon if cached else 0,
        target=a.get("target", "confidence").removesuffix("_confidence"),
        strategy="static",
        top_k=a.get("top_k") or 0,
        top_p=a.get("top_p") or 1.0,
        top_p_first=dream and bool(a.get("top_k") and a.get("top_p")),
        tempered_threshold=dream,
        pad_penalty=a.get("pad_target_penalty", 1.0),
        max_prompt=shape.width,
        max_new=shape.new,
        steps_per_block=1,
        stop_ids=() if stop is None else (stop,),
    )


def answered(model, params, case, shape: Shape):
    """Returns (host state, prompts) of a case."""
    a, dream = case["args"], model.shift == 1
    cfg = config_of(case, shape, dream)
    prompts = prompts_of(case, model.pad_id, dream)
    counts, threshold = counts_of(a, cfg, dream), a.get("unmask_threshold")
    prompt_BT, len_B = padded(prompts, shape.width, shape.rows)
    model = dataclasses.replace(model, pad_id=a.get("pad_token_id", model.pad_id))
    s = denoise.start(
        params,
        prompt_BT,
        len_B,
        np.where(len_B > 0, len_B + length(a), 0).astype(np.int32),
        np.zeros(shape.rows, np.float32),
        jax.random.split(jax.random.key(0), shape.rows),
        model=model,
        cfg=cfg,
    )
    s = finish(
        params,
        s,
        np.array(([*counts] + [counts[-1]] * shape.new)[: shape.new], np.int32),
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
    shape = shape_of(cases)
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
