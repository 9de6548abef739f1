"""Soft tokens: what a model of LLaDA-V's kind reads of an image, as rows of a table.

An image is a tile of all of it, and tiles of its parts ("any resolution", LLaVA-NeXT, as
LLaDA-V has it, arXiv 2505.16933). The tower's features of every patch go through the
projector; those of the parts, put together, are cut to what the image covers of its canvas
and shrunk, bilinearly, to a cap; each of their rows ends in the `newline`. All of that is
linear behind the projector: a row of the table is a sum of at most four patches, or the
newline. So where rows come from is decided on the host, by `arrangement`, and a gradient
reaches projector, newline and tower through one product.

The table of a step's images, of a fixed size, is params["soft"] [M, D], and its rows are
the token ids from the vocabulary's end on (transformer.embed).

Letters: w pixels of a row, p patches, e the tower's width, o the projector's inner width, k
the patches that a row is a sum of.
"""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models.vision import siglip
from dllm_jax.models.vision.config import VisionConfig
from dllm_jax.sharding import constrain

# Parameters: name -> (letters of ModelConfig.sizes, what a fresh one is).
PARAMETERS = {
    "projector": {
        "w_in": ("eo", "normal"),
        "b_in": ("o", "zeros"),
        "w_out": ("oD", "normal"),
        "b_out": ("o", "zeros"),
    },
    "newline": ("D", "normal"),
}
TAPS = 4  # of bilinear interpolation


# ---- Where rows come from: host side -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Of each row of an image the patches that it is a sum of, and their weights."""

    source_Mk: np.ndarray  # counted through all tiles of the image
    weight_Mk: np.ndarray
    newline_M: np.ndarray  # 1: the row is the newline, and no patch has a weight

    def __len__(self):
        return len(self.newline_M)


def canvas_of(size: tuple[int, int], cfg: VisionConfig) -> tuple[int, int]:
    """Returns the canvas (width, height) on which an image of (width, height) is cut.

    The one on which it keeps most of its pixels; among equals the one that wastes fewest.
    """
    best, found = (-1, 0), cfg.canvases[0]
    for canvas in cfg.canvases:
        scale = min(canvas[0] / size[0], canvas[1] / size[1])
        down = int(size[0] * scale) * int(size[1] * scale)
        kept = min(down, size[0] * size[1])
        score = kept, kept - canvas[0] * canvas[1]  # of which the second is the waste
        if score > best:
            best, found = score, canvas
    return found


def arrangement(size: tuple[int, int], cfg: VisionConfig) -> Arrangement:
    """Returns where the rows of an image of (width, height) pixels come from."""
    n, canvas = cfg.across, canvas_of(size, cfg)
    columns, rows = (length // cfg.side for length in canvas)
    # The patches of the parts, as they lie on the canvas.
    tile_hw = 1 + np.arange(rows)[:, None] * columns + np.arange(columns)[None]
    patch_hw = np.arange(n * n).reshape(n, n)
    map_hw = tile_hw[:, None, :, None] * n * n + patch_hw[None, :, None, :]
    map_hw = map_hw.reshape(rows * n, columns * n)
    map_hw = unpadded(map_hw, size)
    height, width = map_hw.shape
    times = math.sqrt(height * width / (cfg.cap * n * n)) if cfg.cap else 1.0
    if times > 1.1:
        height, width = max(int(height // times), 1), max(int(width // times), 1)
    row_hk, part_hk = taps(map_hw.shape[0], height)
    column_wk, share_wk = taps(map_hw.shape[1], width)
    source = map_hw[row_hk[:, None, :, None], column_wk[None, :, None, :]]
    weight = part_hk[:, None, :, None] * share_wk[None, :, None, :]
    source = source.reshape(height, width, TAPS)
    weight = weight.reshape(height, width, TAPS)
    # A newline behind each row of the map; the tile of all of it comes before.
    source = np.pad(source, ((0, 0), (0, 1), (0, 0))).reshape(-1, TAPS)
    weight = np.pad(weight, ((0, 0), (0, 1), (0, 0))).reshape(-1, TAPS)
    one_Mk = np.eye(1, TAPS).repeat(n * n, 0)
    base_Mk = one_Mk * np.arange(n * n)[:, None]
    newline_M = np.arange(height * (width + 1)) % (width + 1) == width
    return Arrangement(
        source_Mk=np.concatenate([base_Mk, source]).astype(np.int32),
        weight_Mk=np.concatenate([one_Mk, weight]).astype(np.float32),
        newline_M=np.concatenate([np.zeros(n * n), newline_M]).astype(np.float32),
    )


def unpadded(map_hw: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns the part of a canvas's patches that an image of (width, height) covers."""
    (width, height), (rows, columns) = size, map_hw.shape
    if width / height > columns / rows:
        pad = (rows - int(height * (columns / width))) // 2
        return map_hw[pad : rows - pad]
    pad = (columns - int(width * (rows / height))) // 2
    return map_hw[:, pad : columns - pad]


def taps(size: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the two places, their shares) of each of `wanted` points on `size` others.

    Bilinear interpolation with half-pixel centres, along one axis: PyTorch's with
    align_corners off.
    """
    step = size / max(wanted, 1)  # of a line of pixels no patch may remain
    place = np.maximum((np.arange(wanted) + 0.5) * step - 0.5, 0)
    low = np.minimum(place.astype(int), size - 1)
    share = place - low
    both = np.stack([low, np.minimum(low + 1, size - 1)], axis=1)
    return both, np.stack([1 - share, share], axis=1)


def tile_count(size: tuple[int, int], cfg: VisionConfig) -> int:
    """Returns how many tiles an image of (width, height) is cut into."""
    width, height = canvas_of(size, cfg)
    return 1 + (width // cfg.side) * (height // cfg.side)


# ---- The table: device side ----------------------------------------------------------


@flax.struct.dataclass
class Seen:
    """A step's images on the mesh: their tiles, or these tiles' features, and the rows."""

    features_Bpe: jax.Array | None  # None where the tower is trained
    pixels_BChw: jax.Array | None  # only there
    source_Mk: jax.Array  # patches, counted through all tiles
    weight_Mk: jax.Array
    newline_M: jax.Array


def project(p, x):
    """Returns the projector's output of features [..., e]: [..., D]; GELU by erf."""
    x_Ro = x.reshape(-1, x.shape[-1]) @ p["w_in"] + p["b_in"][None]
    x_RD = jax.nn.gelu(x_Ro, approximate=False) @ p["w_out"] + p["b_out"][None]
    return x_RD.reshape(*x.shape[:-1], -1)


@jax.named_scope("soft_tokens")
def rows(params, seen: Seen, cfg):
    """Returns the table of a step's images [M, D] in the computing dtype.

    params: with "projector" and "newline", and "vision" where its pixels are seen. cfg: a
    ModelConfig.
    """
    cast = jax.tree.map(
        lambda x: x.astype(cfg.dtype), {k: params[k] for k in ("projector", "newline")}
    )
    features_Bpe = seen.features_Bpe
    if features_Bpe is None:
        tower = jax.tree.map(lambda x: x.astype(cfg.dtype), params["vision"])
        features_Bpe = siglip.features(tower, seen.pixels_BChw, cfg)
    features_Bpe = constrain(features_Bpe.astype(cfg.dtype), "Bpe")
    patch_RD = project(
        cast["projector"], features_Bpe.reshape(-1, features_Bpe.shape[-1])
    )
    # In f32: a sum of four, of weights that bfloat16 would round.
    part_MkD = patch_RD[seen.source_Mk].astype(jnp.float32)
    soft_MD = (part_MkD * seen.weight_Mk[:, :, None]).sum(axis=1)
    line_1D = cast["newline"].astype(jnp.float32)[None]
    return (soft_MD + seen.newline_M[:, None] * line_1D).astype(cfg.dtype)


def attach(params, cfg):
    """Returns parameters with the table of params["seen"], a Seen, if it is there."""
    if "seen" not in params:
        return params
    plain = {name: x for name, x in params.items() if name != "seen"}
    return plain | {"soft": rows(params, params["seen"], cfg)}
