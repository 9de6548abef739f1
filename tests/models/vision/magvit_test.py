"""MAGVIT-v2: the original's codes and images, a definition in numpy, and bad folders."""

import functools

import jax
import numpy as np
import pytest

from dllm_jax.models import hf
from dllm_jax.models.vision import magvit
from tests.goldens import reader
from tests.models.vision import drawers

RAW, tensors = drawers.VQ, drawers.vq_tensors
write = drawers.vq_folder


# ---- A definition: one image, in numpy, tensor by tensor -----------------------------


def conv(x_Chw, stored, name, stride=1, corner=False):
    """Returns the convolution of one image, zeros around it, or below and to the right."""
    weight = stored[f"{name}.weight"].astype(np.float64)
    size = weight.shape[2]
    pad = (0, 1) if corner else (size // 2, size // 2)
    x_Chw = np.pad(x_Chw, ((0, 0), pad, pad))
    rows, columns = ((n - size) // stride + 1 for n in x_Chw.shape[1:])
    out = np.zeros((len(weight), rows, columns))
    for i in range(rows):
        for j in range(columns):
            patch = x_Chw[:, i * stride :, j * stride :][:, :size, :size]
            out[:, i, j] = np.tensordot(weight, patch, 3)
    return out + stored[f"{name}.bias"][:, None, None]


def norm(x_Chw, stored, name):
    """Returns 32 groups of channels, each of mean 0 and variance 1, scaled."""
    groups = x_Chw.reshape(32, -1)
    mean, variance = groups.mean(1, keepdims=True), groups.var(1, keepdims=True)
    x_Chw = ((groups - mean) / np.sqrt(variance + 1e-6)).reshape(x_Chw.shape)
    scale, shift = stored[f"{name}.weight"], stored[f"{name}.bias"]
    return x_Chw * scale[:, None, None] + shift[:, None, None]


def swish(x):
    """Returns x sigmoid(x)."""
    return x / (1 + np.exp(-x))


def block(x, stored, name):
    """Returns a residual block's output."""
    y = conv(swish(norm(x, stored, f"{name}.norm1")), stored, f"{name}.conv1")
    y = conv(swish(norm(y, stored, f"{name}.norm2")), stored, f"{name}.conv2")
    if f"{name}.nin_shortcut.weight" in stored:
        x = conv(x, stored, f"{name}.nin_shortcut")
    return x + y


def attention(x_Chw, stored, name):
    """Returns x plus one head's attention of its pixels."""
    y = norm(x_Chw, stored, f"{name}.norm")
    q, k, v = (conv(y, stored, f"{name}.{part}").reshape(len(y), -1) for part in "qkv")
    score = np.exp(q.T @ k / np.sqrt(len(y)))
    out = v @ (score / score.sum(1, keepdims=True)).T
    return x_Chw + conv(out.reshape(x_Chw.shape), stored, f"{name}.proj_out")


def middle(x, stored, name):
    """Returns the part between the levels and the codes."""
    x = attention(block(x, stored, f"{name}.block_1"), stored, f"{name}.attn_1")
    return block(x, stored, f"{name}.block_2")


def encoded(x, stored, raw):
    """Returns (the grid's channels, the codes) of one image."""
    x = conv(x, stored, "encoder.conv_in")
    counts = raw["encoder"]["num_res_blocks"]
    for level, count in enumerate(counts):
        for number in range(count):
            x = block(x, stored, f"encoder.down.{level}.block.{number}")
        if level < len(counts) - 1:
            x = conv(x, stored, f"encoder.down.{level}.downsample.conv", 2, corner=True)
    x = swish(norm(middle(x, stored, "encoder.mid"), stored, "encoder.norm_out"))
    x = conv(conv(x, stored, "encoder.conv_out"), stored, "encoder.quant_conv")
    codes = [
        int("".join("1" if z > 0 else "0" for z in x[:, i, j]), 2)
        for i in range(x.shape[1])
        for j in range(x.shape[2])
    ]
    return x, codes


def decoded(codes, rows, stored, raw):
    """Returns the image of one grid of codes."""
    bits = raw["quantize"]["codebook_dim"]
    columns = [[1.0 if bit == "1" else -1.0 for bit in f"{c:0{bits}b}"] for c in codes]
    x = np.array(columns).T.reshape(bits, rows, -1)
    x = conv(conv(x, stored, "decoder.post_quant_conv"), stored, "decoder.conv_in")
    x = middle(x, stored, "decoder.mid")
    for level, count in reversed([*enumerate(raw["decoder"]["num_res_blocks"])]):
        for number in range(count):
            x = block(x, stored, f"decoder.up.{level}.block.{number}")
        if level:
            x = x.repeat(2, 1).repeat(2, 2)
            x = conv(x, stored, f"decoder.up.{level}.upsample.conv")
    return conv(swish(norm(x, stored, "decoder.norm_out")), stored, "decoder.conv_out")


# ---- Tests ---------------------------------------------------------------------------


@functools.cache
def goldens():
    """Returns the original's arrays."""
    if not (reader.FOLDER / "magvitv2").is_dir():
        pytest.skip(f"{reader.FOLDER} has no magvitv2: DLLM_GOLDENS names another")
    return reader.tensors("magvitv2/codes/goldens.safetensors")


def test_codes_and_images_are_the_originals():
    golden = goldens()
    _, params = hf.load(reader.checkpoint("magvitv2"))
    codes_BN = magvit.encode(params, golden["pixel_values"])
    assert codes_BN.dtype == np.int32
    np.testing.assert_array_equal(codes_BN, golden["codes"])
    image = magvit.decode(params, golden["codes"])
    np.testing.assert_allclose(image, golden["reconstruction"], atol=1e-3)
    shape = tuple(golden["reconstruction_rect"].shape[2:])
    factor = magvit.factor_of(params)
    shape = shape[0] // factor, shape[1] // factor
    image = magvit.decode(params, golden["codes_rect"], shape)
    np.testing.assert_allclose(image, golden["reconstruction_rect"], atol=1e-3)


@pytest.mark.parametrize("name", ["model", "pytorch_model"])
def test_codes_and_images_are_those_of_the_definition(tmp_path, name):
    stored = tensors(RAW)
    extra = {"quantize.power_vals": 2 ** np.arange(5)}  # of whole numbers, and not read
    folder = write(tmp_path / "vq", RAW, stored | extra, name)
    cfg, params = hf.load(folder)
    assert (cfg.bits, cfg.factor) == (5, 2)
    pixels_BChw = (
        np.random.default_rng(0).uniform(-1, 1, (2, 3, 8, 8)).astype(np.float32)
    )
    codes_BN = np.asarray(magvit.encode(params, pixels_BChw))
    images = np.asarray(magvit.decode(params, codes_BN))
    for i, pixels in enumerate(pixels_BChw):
        x, codes = encoded(pixels, stored, RAW)
        assert np.abs(x).min() > 1e-4  # no sign hangs on rounding
        assert codes_BN[i].tolist() == codes
        np.testing.assert_allclose(images[i], decoded(codes, 4, stored, RAW), atol=1e-4)
    assert len(np.unique(codes_BN)) > 4
    wide = magvit.decode(params, codes_BN[:, :6], (2, 3))
    np.testing.assert_allclose(
        wide[1], decoded(codes_BN[1, :6].tolist(), 2, stored, RAW), atol=1e-4
    )


def test_the_first_channel_is_the_most_significant_bit_and_zero_is_none():
    shapes = magvit.shapes(magvit.read(RAW))
    params = {}
    for name, shape in shapes.items():
        node = params
        for key in name.split(".")[:-1]:
            node = node.setdefault(key, {})
        node[name.split(".")[-1]] = np.zeros(shape, np.float32)
    bias = params["encoder"]["quant_conv"]["bias"]
    pixels = np.ones((1, 3, 4, 4), np.float32)
    for positive, code in (((), 0), ((4,), 1), ((0,), 16), (range(5), 31)):
        bias[:] = 0
        bias[[*positive]] = 1
        assert magvit.encode(params, pixels).tolist() == [[code] * 4]


def test_the_released_checkpoint_has_sizes_that_its_config_leaves_out():
    cfg = magvit.read({"_class_name": "MAGVITv2", "_diffusers_version": "0.30.1"})
    sizes = {name: int(np.prod(shape)) for name, shape in magvit.shapes(cfg).items()}
    assert len(sizes) == 380  # and two buffers
    for prefix, total in (("encoder", 55_439_171), ("decoder", 39_947_833)):
        assert total == sum(n for name, n in sizes.items() if name.startswith(prefix))
    assert (cfg.bits, cfg.factor) == (13, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder": {"ch": 33}}, "encoder.ch: 33 channels"),
        ({"encoder": {"attn_resolutions": [4]}}, "attn_resolutions=(4,)"),
        (
            {"encoder": {"num_res_blocks": [1]}},
            "num_res_blocks=(1,): a number for each",
        ),
        ({"encoder": {"double_z": True}}, "double_z"),
        ({"encoder": {"z_channels": 4}}, "not the same number of bits"),
        ({"encoder": {"z_channels": "a"}}, "z_channels='a'"),
        ({"encoder": {"in_ch": 1}}, "images have 3 channels"),
        ({"quantize": {"codebook_dim": 9}}, "codebook_dim=9"),
        ({"decoder": "x"}, "decoder='x'"),
    ],
)
def test_sizes_that_make_no_model_are_named(tmp_path, change, words):
    raw = {
        key: value | change.get(key, {})
        if isinstance(value, dict) and isinstance(change.get(key, {}), dict)
        else change.get(key, value)
        for key, value in RAW.items()
    }
    folder = write(tmp_path / "vq", raw, {})
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        hf.load(folder)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_that_lack_or_are_too_many_are_named(tmp_path):
    stored = tensors(RAW)
    lost = stored.pop("encoder.conv_in.bias")
    stored["encoder.odd"] = lost
    stored["decoder.conv_in.bias"] = lost[:3]
    stored["quantize.embedding"] = np.zeros((32, 5), np.float32)
    with pytest.raises(ValueError, match="missing") as error:
        hf.load(write(tmp_path / "vq", RAW, stored))
    for words in (
        "missing encoder.conv_in.bias",
        "unknown encoder.odd",
        "decoder.conv_in.bias has shape (3,), expected (32,)",
    ):
        assert words in str(error.value)
    assert "quantize" not in str(error.value)
    stored = tensors(RAW)
    stored["encoder.conv_in.bias"][0] = np.nan
    with pytest.raises(ValueError, match=r"encoder\.conv_in\.bias is not finite"):
        hf.load(write(tmp_path / "nan", RAW, stored))


def test_other_sizes_and_numbers_are_refused():
    params = {"encoder": {"down": {"0": {"downsample": 0}, "1": {}}}}
    params["decoder"] = {"post_quant_conv": {"weight": np.zeros((5, 5, 1, 1))}}
    for shape in ((1, 3, 5, 4), (3, 4, 4), (1, 1, 4, 4), (1, 3, 4, 0)):
        with pytest.raises(ValueError, match="multiples of 2|height, width"):
            magvit.encode(params, np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="a square"):
        magvit.decode(params, np.zeros((1, 5), int))
    with pytest.raises(ValueError, match="a grid of 2 x 3"):
        magvit.decode(params, np.zeros((1, 5), int), (2, 3))
    for odd in (-1, 32):
        with pytest.raises(ValueError, match=f"{odd} is no code: they are 0..31"):
            magvit.decode(params, np.full((1, 4), odd))


def test_both_directions_run_inside_jit(tmp_path):
    _, params = hf.load(write(tmp_path / "vq", RAW, tensors(RAW)))
    pixels = np.zeros((1, 3, 4, 4), np.float32)
    once = jax.eval_shape(
        lambda x: magvit.decode(params, magvit.encode(params, x)), pixels
    )
    assert once.shape == pixels.shape
