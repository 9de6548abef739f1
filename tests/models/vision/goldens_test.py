"""LLaDA-V's images against the reference's values: tiles, features, projection, rows.

These fixtures are too large for the repository: DLLM_GOLDENS names the folder that has them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import images
from dllm_jax.models import hf, mask, transformer
from dllm_jax.models.vision import siglip, soft
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
    assert len(plan) <= soft.most_rows(len(pixels), cfg.vision)
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
        logits = transformer.project(x, transformer.head(params, cfg), "DV")
        real = key_BT[..., None]
        gap = np.where(real, logits - golden[name], 0)
        assert np.abs(gap).max() < 1e-4, name
