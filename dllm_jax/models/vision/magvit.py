"""MAGVIT-v2: an image becomes a grid of codes, and codes become an image.

A convolutional autoencoder with a lookup-free quantiser (arXiv 2310.05737, section 3.1), in
the form whose weights Show-o (arXiv 2408.12528) and MMaDA (arXiv 2505.15809) use. The encoder
halves the image once for each of its levels but the last. Of each cell's channels the sign
is kept: a channel is a bit, the first one the most significant, and the number is the code.

The parameters are a tree with the names of the checkpoint's tensors, cut at their dots, and
the tensors' own layout: convolutions are [out, in, h, w]. The tree tells the number of levels,
blocks and bits, so that `encode` and `decode` need nothing else.

Letters: w columns of an image, g groups of channels, r bits of a code.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dllm_jax import checks

GROUPS, EPSILON = 32, 1e-6  # of a norm; they are in no config.json
KIND = "MAGVITv2"  # _class_name of config.json
IGNORED = ("quantize.",)  # tensors that follow from the number of bits


@dataclasses.dataclass(frozen=True)
class Tower:
    """The sizes of an encoder, or of a decoder."""

    ch: int = 128  # channels, which each level multiplies
    ch_mult: tuple[int, ...] = ()  # by these; the first level is the image's
    num_res_blocks: tuple[int, ...] = ()  # of each level
    z_channels: int = 13  # bits of a code
    in_ch: int = 3
    out_ch: int = 3
    resolution: int = 256
    attn_resolutions: tuple[int, ...] = (5,)

    def __post_init__(self):
        sizes = ("ch", "ch_mult", "num_res_blocks", "z_channels", "resolution")
        checks.fields(self, **dict.fromkeys(sizes, ">= 1, <= 65536"))
        if not self.ch_mult or len(self.ch_mult) != len(self.num_res_blocks):
            raise checks.Refused(
                "num_res_blocks",
                f"={self.num_res_blocks}: a number for each of ch_mult",
            )
        if self.z_channels > 24:
            raise checks.Refused("z_channels", f"={self.z_channels}: at most 24 bits")
        if (self.in_ch, self.out_ch) != (3, 3):
            raise checks.Refused("in_ch", ", out_ch: images have 3 channels")
        odd = [ch for ch in (self.ch, *self.widths) if ch % GROUPS]
        if odd:
            raise checks.Refused("ch", f": {odd[0]} channels, no multiple of {GROUPS}")
        met = {self.resolution // 2**level for level in range(len(self.ch_mult))}
        if met & {*self.attn_resolutions}:
            raise checks.Refused(
                "attn_resolutions", f"={self.attn_resolutions} is not supported"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level."""
        return tuple(self.ch * times for times in self.ch_mult)


# What the released checkpoint is, whose config.json says no sizes.
ENCODER = Tower(ch_mult=(1, 2, 2, 4, 4), num_res_blocks=(4, 3, 4, 3, 4))
DECODER = Tower(ch_mult=(1, 1, 2, 2, 4), num_res_blocks=(4, 4, 3, 4, 3))


@dataclasses.dataclass(frozen=True)
class MagvitConfig:
    """A MAGVIT-v2 checkpoint."""

    encoder: Tower = ENCODER
    decoder: Tower = DECODER
    told_size: int = 0  # pixels a side that config.json tells of; 0: it does not

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.encoder.z_channels

    @property
    def factor(self) -> int:
        """Pixels a side of what one code stands for."""
        return 2 ** (len(self.encoder.ch_mult) - 1)


def read(raw: dict) -> MagvitConfig:
    """Returns what a config.json says; what it leaves out is the released checkpoint's.

    Raises ValueError naming a size that makes no model.
    """
    towers = {}
    for name, assumed in (("encoder", ENCODER), ("decoder", DECODER)):
        told = raw.get(name, {})
        if type(told) is not dict:
            raise ValueError(f"{name}={checks.shown(told)}: needs its sizes")
        if told.get("double_z"):
            raise ValueError(f"{name}.double_z=True is not supported")
        known = {field.name for field in dataclasses.fields(Tower)} & told.keys()
        sizes = {
            key: tuple(told[key]) if isinstance(told[key], list) else told[key]
            for key in known
        }
        try:
            towers[name] = dataclasses.replace(assumed, **sizes)
        except checks.Refused as error:
            raise ValueError(f"{name}.{error}") from None
    told = "resolution" in raw.get("encoder", {})
    cfg = MagvitConfig(**towers, told_size=towers["encoder"].resolution * told)
    quantiser = raw.get("quantize", {})
    told = quantiser.get("codebook_dim", cfg.bits) if isinstance(quantiser, dict) else 0
    if not told == cfg.bits == cfg.decoder.z_channels:
        raise ValueError(
            f"encoder.z_channels={cfg.bits}, decoder.z_channels={cfg.decoder.z_channels} and "
            f"quantize.codebook_dim={checks.shown(told)} are not the same number of bits"
        )
    if len(cfg.encoder.ch_mult) != len(cfg.decoder.ch_mult):
        raise ValueError("encoder.ch_mult and decoder.ch_mult have other lengths")
    return cfg


# ---- Which tensors there are ---------------------------------------------------------


def shapes(cfg: MagvitConfig) -> dict[str, tuple[int, ...]]:
    """Returns {tensor name: shape} of a checkpoint."""
    return encoder_shapes(cfg.encoder) | decoder_shapes(cfg.decoder)


def abstract(cfg: MagvitConfig, place) -> dict:
    """Returns the parameters of a checkpoint as shapes, of f32 with the sharding `place`."""
    flat = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for name, shape in shapes(cfg).items()
    }
    return traverse_util.unflatten_dict(flat, sep=".")


def conv_shapes(name: str, inner: int, outer: int, size: int = 3) -> dict:
    """Returns the shapes of a convolution, size x size, from inner to outer channels."""
    return {f"{name}.weight": (outer, inner, size, size), f"{name}.bias": (outer,)}


def norm_shapes(name: str, width: int) -> dict:
    """Returns the shapes of a norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def block_shapes(name: str, inner: int, outer: int) -> dict:
    """Returns the shapes of a residual block."""
    out = norm_shapes(f"{name}.norm1", inner) | norm_shapes(f"{name}.norm2", outer)
    out |= conv_shapes(f"{name}.conv1", inner, outer)
    out |= conv_shapes(f"{name}.conv2", outer, outer)
    if inner != outer:
        out |= conv_shapes(f"{name}.nin_shortcut", inner, outer, 1)
    return out


def middle_shapes(name: str, width: int) -> dict:
    """Returns the shapes of what stands between the levels and the codes."""
    out = norm_shapes(f"{name}.attn_1.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        out |= conv_shapes(f"{name}.attn_1.{part}", width, width, 1)
    for part in ("block_1", "block_2"):
        out |= block_shapes(f"{name}.{part}", width, width)
    return out


def encoder_shapes(tower: Tower) -> dict:
    """Returns the shapes of an encoder's tensors."""
    width, last = tower.ch, len(tower.widths) - 1
    out = conv_shapes("encoder.conv_in", tower.in_ch, width)
    for level, outer in enumerate(tower.widths):
        name = f"encoder.down.{level}"
        for number in range(tower.num_res_blocks[level]):
            out |= block_shapes(f"{name}.block.{number}", width, outer)
            width = outer
        if level < last:
            out |= conv_shapes(f"{name}.downsample.conv", width, width)
    out |= middle_shapes("encoder.mid", width) | norm_shapes("encoder.norm_out", width)
    bits = tower.z_channels
    out |= conv_shapes("encoder.conv_out", width, bits)
    return out | conv_shapes("encoder.quant_conv", bits, bits, 1)


def decoder_shapes(tower: Tower) -> dict:
    """Returns the shapes of a decoder's tensors."""
    bits, width = tower.z_channels, tower.widths[-1]
    out = conv_shapes("decoder.post_quant_conv", bits, bits, 1)
    out |= conv_shapes("decoder.conv_in", bits, width)
    out |= middle_shapes("decoder.mid", width)
    for level in reversed(range(len(tower.widths))):
        name, outer = f"decoder.up.{level}", tower.widths[level]
        for number in range(tower.num_res_blocks[level]):
            out |= block_shapes(f"{name}.block.{number}", width, outer)
            width = outer
        if level:
            out |= conv_shapes(f"{name}.upsample.conv", width, width)
    out |= norm_shapes("decoder.norm_out", width)
    return out | conv_shapes("decoder.conv_out", width, tower.out_ch)


# ---- What a tree of parameters says --------------------------------------------------


def bits_of(params) -> int:
    """Returns the bits of a code."""
    return params["decoder"]["post_quant_conv"]["weight"].shape[1]


def factor_of(params) -> int:
    """Returns the pixels a side of what one code stands for."""
    return 2 ** sum(
        "downsample" in level for level in params["encoder"]["down"].values()
    )


# ---- Images to codes, and back -------------------------------------------------------


def encode(params, pixels_BChw):
    """Returns the codes [B, N] of images, int32, row after row of the grid.

    params: what `hf.load` returns. pixels: float32 in [-1, 1], red, green, blue. Raises
    ValueError for images whose sides are not whole cells.
    """
    factor = factor_of(params)
    shape = jnp.shape(pixels_BChw)
    if len(shape) != 4 or shape[1] != 3 or 0 in shape:
        raise ValueError(f"images are [B, 3, height, width], not {list(shape)}")
    if shape[2] % factor or shape[3] % factor:
        raise ValueError(
            f"an image of {shape[3]} x {shape[2]} pixels: both sides must be multiples of "
            f"{factor}"
        )
    return codes_of(params, jnp.asarray(pixels_BChw, jnp.float32))


def decode(params, codes_BN, shape: tuple[int, int] | None = None):
    """Returns the images [B, 3, height, width] of codes, float32, about [-1, 1].

    shape: rows and columns of the grid; None: as many of both. Raises ValueError where the
    codes are not so many, or, where they are known, none of the codebook's.
    """
    count = jnp.shape(codes_BN)[-1] if jnp.ndim(codes_BN) == 2 else 0
    rows, columns = shape or (math.isqrt(count),) * 2
    if not count or rows * columns != count:
        raise ValueError(
            f"codes of shape {list(jnp.shape(codes_BN))} are no [B, N] with the N codes of "
            + (f"a grid of {rows} x {columns}" if shape else "a square")
        )
    if not isinstance(codes_BN, jax.core.Tracer):
        check_codes(np.asarray(codes_BN), bits_of(params))
    return image_of(params, jnp.asarray(codes_BN, jnp.int32), rows, columns)


def check_codes(codes, bits: int) -> None:
    """Raises ValueError naming a number that is no code of so many bits."""
    odd = codes[(codes < 0) | (codes >= 2**bits)]
    if odd.size:
        raise ValueError(f"{odd[0]} is no code: they are 0..{2**bits - 1}")


@jax.jit
def codes_of(params, pixels_BChw):
    """Returns the codes of images: see `encode`."""
    x_Bhwr = channels_of(params, pixels_BChw)
    weight_r = 2 ** jnp.arange(x_Bhwr.shape[-1])[::-1]
    codes_Bhw = jnp.sum((x_Bhwr > 0) * weight_r[None, None, None], axis=-1)
    return codes_Bhw.reshape(len(codes_Bhw), -1).astype(jnp.int32)


def channels_of(params, pixels_BChw):
    """Returns what the quantiser takes the signs of, f32 [B, h, w, bits]."""
    p = params["encoder"]
    x_BhwC = conv(jnp.moveaxis(pixels_BChw, 1, 3), p["conv_in"])
    for level in numbered(p["down"]):
        for block in numbered(level["block"]):
            x_BhwC = residual(x_BhwC, block)
        if "downsample" in level:
            x_BhwC = conv(
                x_BhwC, level["downsample"]["conv"], stride=2, pad=((0, 1), (0, 1))
            )
    x_BhwC = conv(swish(norm(middle(x_BhwC, p["mid"]), p["norm_out"])), p["conv_out"])
    return conv(x_BhwC, p["quant_conv"])


@jax.jit(static_argnums=(2, 3))
def image_of(params, codes_BN, rows: int, columns: int):
    """Returns the images of a grid of codes: see `decode`."""
    shift_r = jnp.arange(bits_of(params))[::-1]
    bit_BNr = (codes_BN[..., None] >> shift_r[None, None]) & 1
    x_Bhwr = (2.0 * bit_BNr - 1).reshape(len(codes_BN), rows, columns, -1)
    return image_of_signs(params, x_Bhwr.astype(jnp.float32))


def image_of_signs(params, x_Bhwr):
    """Returns the images of codes that are told by their bits, -1 or 1."""
    p = params["decoder"]
    x_BhwC = conv(conv(x_Bhwr, p["post_quant_conv"]), p["conv_in"])
    x_BhwC = middle(x_BhwC, p["mid"])
    for level in reversed(numbered(p["up"])):
        for block in numbered(level["block"]):
            x_BhwC = residual(x_BhwC, block)
        if "upsample" in level:
            x_BhwC = x_BhwC.repeat(2, axis=1).repeat(2, axis=2)
            x_BhwC = conv(x_BhwC, level["upsample"]["conv"])
    x_BhwC = conv(swish(norm(x_BhwC, p["norm_out"])), p["conv_out"])
    return jnp.moveaxis(x_BhwC, 3, 1)


# ---- Layers --------------------------------------------------------------------------


def numbered(tree: dict) -> list:
    """Returns the parts of a tree whose keys are numbers, in their order."""
    return [tree[key] for key in sorted(tree, key=int)]


def swish(x):
    """Returns x sigmoid(x)."""
    return x * jax.nn.sigmoid(x)


def conv(x_BhwC, p, stride: int = 1, pad=None):
    """Returns a convolution; pad: rows and columns of zeros around, None: as many remain.

    A code is a sign, so nothing is rounded on any platform.
    """
    margin = p["weight"].shape[2] // 2
    y_BhwC = jax.lax.conv_general_dilated(
        x_BhwC,
        p["weight"].astype(x_BhwC.dtype),
        (stride, stride),
        ((margin, margin),) * 2 if pad is None else pad,
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
        precision=jax.lax.Precision.HIGHEST,
    )
    return y_BhwC + p["bias"][None, None, None]


def norm(x_BhwC, p):
    """Scales groups of channels, over all pixels, to mean 0 and variance 1."""
    B, h, w, C = x_BhwC.shape
    x_BRgC = x_BhwC.reshape(B, h * w, GROUPS, C // GROUPS)
    mean = x_BRgC.mean(axis=(1, 3), keepdims=True)
    variance = jnp.square(x_BRgC - mean).mean(axis=(1, 3), keepdims=True)
    x_BhwC = ((x_BRgC - mean) * jax.lax.rsqrt(variance + EPSILON)).reshape(B, h, w, C)
    return x_BhwC * p["weight"][None, None, None] + p["bias"][None, None, None]


def residual(x_BhwC, p):
    """Returns x plus two convolutions of it, each of a norm; x projected to their width."""
    y_BhwC = conv(swish(norm(x_BhwC, p["norm1"])), p["conv1"])
    y_BhwC = conv(swish(norm(y_BhwC, p["norm2"])), p["conv2"])
    if "nin_shortcut" in p:
        x_BhwC = conv(x_BhwC, p["nin_shortcut"])
    return x_BhwC + y_BhwC


def middle(x_BhwC, p):
    """Returns two residual blocks around attention of all pixels to all, in one head."""
    x_BhwC = residual(x_BhwC, p["block_1"])
    B, h, w, C = x_BhwC.shape
    p_attention = p["attn_1"]
    y_BhwC = norm(x_BhwC, p_attention["norm"])
    q_BRC, k_BRC, v_BRC = (
        conv(y_BhwC, p_attention[name]).reshape(B, h * w, C) for name in "qkv"
    )
    exactly = jax.lax.Precision.HIGHEST
    score = jnp.einsum("BRC,BSC->BRS", q_BRC, k_BRC, precision=exactly) * C**-0.5
    seen = jax.nn.softmax(score, axis=-1)
    out_BRC = jnp.einsum("BRS,BSC->BRC", seen, v_BRC, precision=exactly)
    out_BhwC = conv(out_BRC.reshape(B, h, w, C), p_attention["proj_out"])
    return residual(x_BhwC + out_BhwC, p["block_2"])
