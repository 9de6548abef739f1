"""LLaDA-V's images against the reference's values: tiles, features, projection, rows.

These fixtures are too large for the repository: DLLM_GOLDENS names the folder that has them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import images, sharding
from dllm_jax.models import hf, layer, mask, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.models.vision import siglip, soft
from dllm_jax.rl import learner, views
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig
from dllm_jax.sampling import answers
from dllm_jax.sampling.config import SamplerConfig
from tests.goldens import reader

FAMILY = "lladav"


@functools.cache
def checkpoint():
    """Returns (ModelConfig, params) of the golden checkpoint, in f32."""
    cfg, params = hf.load(reader.checkpoint(FAMILY))
    return dataclasses.replace(cfg, dtype="float32"), params


@functools.cache
def features():
    """Returns siglip.features, compiled."""
    return jax.jit(siglip.features, static_argnames="cfg")


def test_features_and_their_projection():
    cfg, params = checkpoint()
    golden = reader.tensors(f"{FAMILY}/vision/goldens.safetensors")
    found = features()(params["vision"], golden["pixel_values"], cfg=cfg)
    np.testing.assert_allclose(found, golden["vision_features"], atol=1e-4)
    projected = soft.project(params["projector"], golden["vision_features"])
    np.testing.assert_allclose(projected, golden["projected"], atol=1e-4)


CASES = reader.read(f"{FAMILY}/vision/case.json")


def seen_of(cfg, params, pixels, plan):
    """Returns the Seen of one image."""
    return soft.Seen(
        features()(params["vision"], pixels, cfg=cfg),
        None,
        plan.source_Mk,
        plan.weight_Mk,
        plan.newline_M,
    )


# One is of a tile without parts, which any resolution never leaves.
MERGED = [case for case in CASES["merge_cases"] if "image_size_wh" in case]


@pytest.mark.parametrize("case", MERGED, ids=lambda case: case["prefix"])
def test_an_image_between_words(case):
    cfg, params = checkpoint()
    golden = reader.tensors(f"{FAMILY}/vision/goldens.safetensors")
    size, prefix = tuple(case["image_size_wh"]), case["prefix"]
    plan = soft.arrangement(size, cfg.vision)
    pixels = golden[prefix + "pixel_values"]
    assert len(pixels) == soft.tile_count(size, cfg.vision)
    assert len(plan) <= dataclasses.replace(cfg, tiles=len(pixels)).soft
    table = soft.rows(params, seen_of(cfg, params, pixels, plan), cfg)
    ids = []
    for token in case["input_ids"]:
        image = token == CASES["image_token_index"]
        ids += [cfg.vocab + i for i in range(len(plan))] if image else [token]
    assert len(ids) == case["length"]
    x_BTD = transformer.embed(params | {"soft": table}, jnp.array([ids]), cfg)
    np.testing.assert_allclose(x_BTD, golden[prefix + "inputs_embeds"], atol=1e-4)


def test_tiles_are_those_of_the_reference():
    case = reader.read(f"{FAMILY}/preprocess/case.json")
    golden = reader.tensors(f"{FAMILY}/preprocess/goldens.safetensors")
    canvases = tuple(map(tuple, case["image_grid_pinpoints"]))
    side = case["tile_size"]
    cfg = soft.VisionConfig(
        side=side, patch=side, width=1, heads=1, canvases=canvases, cap=4
    )
    for one in case["cases"]:
        size = tuple(one["size_wh"])
        assert soft.canvas_of(size, cfg) == tuple(one["best_resolution_wh"])
        assert soft.tile_count(size, cfg) == one["tiles"]
        rgb = golden[one["prefix"] + "image"]
        found = images.normalized(images.tiles(rgb, soft.canvas_of(size, cfg), side))
        assert np.abs(found - golden[one["prefix"] + "pixel_values"]).max() <= 1 / 127.5


def test_logits_of_what_is_embedded():
    cfg, params = checkpoint()
    golden = reader.tensors(f"{FAMILY}/forward/goldens.safetensors")
    x_BTD = golden["inputs_embeds"]
    B, T, D = x_BTD.shape
    ids_BT = cfg.vocab + jnp.arange(B * T).reshape(B, T)
    shown = transformer.embed(params | {"soft": x_BTD.reshape(-1, D)}, ids_BT, cfg)
    np.testing.assert_array_equal(shown, x_BTD)
    pos_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    for name, key_BT in (
        ("logits_full", np.ones((B, T), bool)),
        ("logits_masked", golden["attention_mask"].astype(bool)),
    ):
        len_B = jnp.asarray(key_BT.sum(axis=1))
        first_B = jnp.asarray(key_BT.argmax(axis=1))
        begin_BT = jnp.broadcast_to(first_B[:, None], (B, T))
        seen = mask.packed(begin_BT, begin_BT + len_B[:, None], jnp.full((B, T), -1))
        x, _, _ = transformer.trunk(params, shown, pos_BT, seen, cfg)
        logits = layer.project(x, transformer.head(params, cfg)[0], "DV")
        real = key_BT[..., None]
        gap = np.where(real, logits - golden[name], 0)
        assert np.abs(gap).max() < 1e-4, name


# ---- Losses, and the sampler ---------------------------------------------------------


def batch_of(golden, masked_BT, weight_BT, shown_BT, end_BT=None):
    """Returns a TrainBatch of rows whose `masked` positions are supervised."""
    B, T = masked_BT.shape
    key_BT = golden["attention_mask"].astype(bool)
    begin_BT = np.repeat(key_BT.argmax(axis=1)[:, None], T, axis=1)
    all_BT = np.broadcast_to(np.arange(T), (B, T))
    whole_BT = begin_BT + key_BT.sum(axis=1)[:, None]
    return views.TrainBatch(
        used=np.int32(1),
        tokens_BT=shown_BT.astype(np.int32),
        pos_BT=all_BT,
        begin_BT=begin_BT.astype(np.int32),
        end_BT=(whole_BT if end_BT is None else end_BT).astype(np.int32),
        group_BT=np.full((B, T), -1, np.int32),
        where_BU=all_BT,
        target_BU=np.maximum(golden["labels"], 0).astype(np.int32),
        weight_BU=np.where(masked_BT, weight_BT, 0).astype(np.float32),
    )


def check_loss(name, batch, golden, term):
    """Asserts a case's loss, and the gradients that it tells in full."""
    cfg, params = checkpoint()
    told = reader.read(f"{FAMILY}/{name}/case.json")
    D = golden["inputs_embeds"].shape[-1]
    table_MD = jnp.asarray(golden["inputs_embeds"].reshape(-1, D))
    plan = learner.Plan((term,), OptimConfig(), 1)
    objective = ObjectiveConfig(**told.get("objective", {}))
    model = dataclasses.replace(cfg, mask_id=cfg.vocab)  # the reference forbids none

    def loss(params):
        return learner.loss(
            params, batch, {"soft": table_MD}, model=model, plan=plan, cfg=objective
        )[0]

    found, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert float(found) == pytest.approx(told["loss"], rel=1e-4, abs=1e-5)
    ours = {}
    for path, spec, tensor in hf.leaves(cfg, ("lm", "vision")):
        leaf = functools.reduce(lambda node, key: node[key.key], path, grads)
        for i, one in enumerate(leaf if "{}" in tensor else [leaf]):
            ours[tensor.format(i)] = hf.to_file(np.asarray(one), spec, cfg)
    for tensor, stats in told["grads"].items():
        if stats is None:
            # Ours reaches the embedding of masks, which the reference takes as given.
            if tensor in ours and "embed_tokens" not in tensor:
                assert not ours[tensor].any(), tensor
            continue
        near = 2e-4 * stats["absmax"]
        assert np.abs(ours[tensor]).max() == pytest.approx(stats["absmax"], abs=near)
        full = golden.get(f"grad.{tensor}")
        if full is not None:
            np.testing.assert_allclose(ours[tensor], full, atol=near, err_msg=tensor)


def test_the_policy_loss():
    golden = reader.tensors(f"{FAMILY}/policy/goldens.safetensors")
    masked_BT = golden["p_mask"].astype(bool) & golden["attention_mask"].astype(bool)
    B, T = masked_BT.shape
    cfg, _ = checkpoint()
    weight_BT = 1 / masked_BT.sum(axis=1, keepdims=True) / B * np.ones((1, T))
    shown_BT = cfg.vocab + np.arange(B * T).reshape(B, T)
    batch = batch_of(golden, masked_BT, weight_BT, shown_BT)
    old_BT = np.where(masked_BT, golden["old_logp"], 0).astype(np.float32)
    batch = batch.replace(adv_BU=golden["adv"], old_logp_BU=old_BT)
    check_loss("policy", batch, golden, "policy")


def test_the_sft_loss():
    golden = reader.tensors(f"{FAMILY}/sft/goldens.safetensors")
    answer_BT = golden["labels"] != -100
    share_B1 = ((1 - 1e-3) * golden["u_t"] + 1e-3)[:, None]
    masked_BT = answer_BT & (golden["u"] < share_B1)
    B, T = masked_BT.shape
    cfg, _ = checkpoint()
    soft_BT = cfg.vocab + np.arange(B * T).reshape(B, T)
    shown_BT = np.where(masked_BT, cfg.mask_id, soft_BT)
    weight_BT = 1 / share_B1 / answer_BT.sum(axis=1, keepdims=True) / B
    turn_BT, key_BT = golden["conversation_ids"], golden["attention_mask"].astype(bool)
    sees_BTS = (turn_BT[:, None] <= turn_BT[:, :, None]) & key_BT[:, None]
    end_BT = np.where(sees_BTS, np.arange(T)[None, None], -1).max(axis=2) + 1
    batch = batch_of(golden, masked_BT, weight_BT * np.ones((1, T)), shown_BT, end_BT)
    check_loss("sft", batch, golden, "nll")


# By neg_entropy the reference prefers what it knows least.
TARGETS = {"confidence": "confidence", "margin_confidence": "margin"}
SAMPLES = [
    case
    for case in reader.read(f"{FAMILY}/sample/case.json")["cases"]
    if case["args"]["target"] in TARGETS
]


@pytest.mark.parametrize("case", SAMPLES, ids=lambda case: case["prefix"])
def test_the_sampler(case):
    cfg, params = checkpoint()
    told, count = case["args"], case["L0"]
    name = case["prefix"] + "inputs_embeds"
    golden = reader.tensors(f"{FAMILY}/sample/goldens.safetensors")
    # The last case is the first one with another token that ends.
    table_1TD = golden.get(name, golden["s0.inputs_embeds"])
    block, length = told["block_length"], told["gen_length"]
    threshold = told["unmask_threshold"]
    sampler = SamplerConfig(
        block=block,
        steps_per_block=told["steps"] * block // length,
        strategy="static" if threshold is None else "dynamic",
        threshold=threshold or 0.9,
        target=TARGETS[told["target"]],
        before_stop=True,
        max_prompt=count,
        max_new=length,
        stop_ids=(told["eot_id"],),
    )
    model = dataclasses.replace(cfg, block=block, tiles=9)
    answerer = answers.Batches(
        model=model,
        cfg=dataclasses.replace(sampler, rows=1),
        mesh=sharding.make_mesh(devices=jax.devices()[:1]),
    )
    stream = answerer.stream(
        params | {"soft": jnp.asarray(table_1TD[0])},
        [[cfg.vocab + i for i in range(count)]],
        jax.random.key(0),
        temperature=0.0,
    )
    ((_, answer),) = stream
    tokens = answer.tokens_T[count : count + length]
    steps = answer.step_T[count : count + length]
    real = steps != FAR
    expected = np.array(case["sequences"][count:])
    np.testing.assert_array_equal(np.where(real, tokens, told["mask_id"]), expected)
    # The reference also counts forwards in which nothing was left to unmask.
    order = np.unique(np.array(case["step_map"])[real], return_inverse=True)[1] + 1
    np.testing.assert_array_equal(steps[real], order)
