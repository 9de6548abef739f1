"""Images as parameters and rows: folders in and out, canvases, counts, interpolation."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from dllm_jax.models import families, hf
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import siglip, soft
from tests.models.vision import common


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny LLaDA-V folder."""
    return common.folder(tmp_path_factory.mktemp("model"))


def by_loops(params, pixels_BChw, cfg):
    """Returns the features of tiles by their definition, in f64: a patch at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    n, y = cfg.across, cfg.patch

    def norm(x, weight, bias):
        x = x - x.mean(-1, keepdims=True)
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * weight + bias
        )

    out = []
    for tile in pixels_BChw:
        x = [
            np.array([(tile[:, i : i + y, j : j + y] * w).sum() for w in p["patch"]])
            for i in range(0, n * y, y)
            for j in range(0, n * y, y)
        ]
        x = np.array(x) + p["b_patch"] + p["position"]
        for number in range(cfg.layers):
            w = {name: leaf[number] for name, leaf in p["layers"].items()}
            h = norm(x, w["attn_norm"], w["attn_norm_bias"])
            q, k, v = (h @ w[f"w{name}"] + w[f"b{name}"] for name in "qkv")
            heads = []
            for d in np.split(np.arange(cfg.width), cfg.heads):
                score = np.exp(q[:, d] @ k[:, d].T / math.sqrt(len(d)))
                heads.append(score / score.sum(-1, keepdims=True) @ v[:, d])
            x = x + np.concatenate(heads, axis=1) @ w["wo"] + w["bo"]
            h = norm(x, w["ffw_norm"], w["ffw_norm_bias"]) @ w["w_up"] + w["b_up"]
            h = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + h @ w["w_down"] + w["b_down"]
        out.append(x)
    return np.array(out)


# The dossier's table of LLaDA-V's own canvases: (width, height) -> tokens.
COUNTS = {
    (100, 100): 1485,
    (384, 384): 1485,
    (356, 127): 981,
    (390, 50): 1114,
    (341, 512): 1849,
    (512, 341): 1836,
    (512, 384): 1728,
    (512, 394): 3039,
    (512, 512): 3699,
    (640, 480): 2929,
    (735, 443): 2489,
    (1024, 768): 3627,
    (1920, 1080): 3649,
    (4000, 3000): 3627,
    (300, 2000): 3743,
    (2304, 2304): 3699,
}


def test_the_number_of_tokens_of_llada_v():
    sides = range(384, 6 * 384 + 1, 384)
    canvases = tuple((w, h) for w in sides for h in sides)
    cfg = soft.VisionConfig(canvases=canvases, cap=4)
    found = {size: len(soft.arrangement(size, cfg)) for size in COUNTS}
    assert found == COUNTS
    for size, count in found.items():
        tiles = soft.tile_count(size, cfg)
        assert count <= ModelConfig(vision=cfg, tiles=tiles).soft


def test_of_a_line_of_pixels_the_base_and_newlines_remain():
    """With an even number of patches across, the rule leaves nothing of the map itself."""
    sides = range(384, 3 * 384 + 1, 384)
    canvases = tuple((w, h) for w in sides for h in sides)
    cfg = soft.VisionConfig(canvases=canvases, cap=4, patch=16)
    wide, high = (soft.arrangement(size, cfg) for size in ((20_000, 1), (1, 20_000)))
    assert (len(wide), len(high)) == (24 * 24, 24 * 24 + 24)
    assert wide.newline_M.sum() == 0 and high.newline_M[-24:].all()
    assert (high.weight_Mk[-24:] == 0).all() and len(high.source_Mk) == len(high)


def test_interpolation_is_that_of_images_of_real_numbers():
    # Of a ramp, which bilinear interpolation reproduces but for the edges.
    place, share = soft.taps(40, 13)
    ramp = (place * share).sum(axis=1)
    np.testing.assert_allclose(ramp, (np.arange(13) + 0.5) * (40 / 13) - 0.5)
    same, whole = soft.taps(7, 7)
    np.testing.assert_array_equal((same * whole).sum(axis=1), np.arange(7))


def test_a_folder_survives_the_round_trip(tmp_path, source):
    cfg, params = hf.load(source)
    hf.save(tmp_path / "out", cfg, params, like=source)
    one, two = (
        safetensors.numpy.load_file(folder / "model.safetensors")
        for folder in (source, tmp_path / "out")
    )
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    raw = families.read_json(source / "config.json")
    assert families.read_json(tmp_path / "out" / "config.json") == raw


def siglip_folder(folder, source):
    """Writes the golden tower as a folder of its own, with a last layer that is not run."""
    told = common.CONFIG["vision_tower_config"]
    stored = safetensors.numpy.load_file(source / "model.safetensors")
    prefix = "model.vision_tower.vision_tower."
    tower = {
        name.removeprefix(prefix): x
        for name, x in stored.items()
        if name.startswith(prefix)
    }
    last = told["num_hidden_layers"] - 1
    tower |= {
        name.replace(".0.", f".{last}."): x
        for name, x in tower.items()
        if "layers.0." in name
    }
    tower["vision_model.head.probe"] = np.ones((1, 1, 4), np.float32)
    tower["logit_scale"] = np.ones(1, np.float32)
    folder.mkdir()
    safetensors.numpy.save_file(tower, folder / "model.safetensors")
    config = {"model_type": "siglip", "vision_config": told}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_siglip_folder_loads_by_itself(tmp_path, source):
    cfg, params = hf.load(siglip_folder(tmp_path / "siglip", source))
    whole, beside = hf.load(source)
    pixels_BChw = np.random.default_rng(0).uniform(-1, 1, (2, 3, 12, 12))
    found, same = (
        jax.jit(siglip.features, static_argnames="cfg")(p, pixels_BChw, cfg=c)
        for p, c in ((params, cfg), (beside["vision"], whole))
    )
    np.testing.assert_array_equal(found, same)
    np.testing.assert_allclose(found, by_loops(params, pixels_BChw, cfg), atol=1e-5)
    with pytest.raises(ValueError, match="no language model"):
        families.adapt(cfg)
    with pytest.raises(ValueError, match="tiles of shape"):
        siglip.features(params, pixels_BChw[:, :, 1:], cfg)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"image_aspect_ratio": "pad"}, "image_aspect_ratio='pad'"),
        ({"image_grid_pinpoints": [[29, 28]]}, "image_grid_pinpoints has"),
        ({"image_grid_pinpoints": "(1x1)"}, "a list of"),
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
        ({"mm_vision_tower": "clip", "vision_tower_config": None}, "mm_vision_tower"),
        ({"vision_tower_config": {"num_attention_heads": 7}}, "num_attention_heads=7"),
        ({"vision_tower_config": {"num_hidden_layers": 1}}, "last layer is not run"),
        ({"vision_tower_config": {"patch_size": 0}}, "patch_size=0"),
    ],
)
def test_what_makes_no_model_is_named(tmp_path, change, message):
    raw = common.CONFIG | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message) as caught:
        families.read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_its_tower_is_refused(tmp_path, source):
    stored = safetensors.numpy.load_file(source / "model.safetensors")
    name = "model.mm_projector.0.weight"
    del stored[name]
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(ValueError, match=f"missing {name}"):
        hf.load(tmp_path)
