"""Constructs a tiny MAGVIT-v2 for mosaics: a cell's code has a bit for each colour.

No weight is trained. Residual blocks and attention add nothing (their last convolutions are
0), convolutions read one pixel, and a norm changes no sign: each of its groups holds a number
and its opposite, whose mean is 0. Then swish(x) - swish(-x) = x makes the encoder linear, and a
colour is told from the other ones by a plane between them. The decoder's numbers are -1 or 1,
whose variance is 1, so that nothing is scaled; white less what its bits say is a code's colour.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

from dllm_jax.models.vision import magvit
from examples.scenes import drawer

BITS = len(drawer.PALETTE) - 1
WIDTH = 2 * magvit.GROUPS  # channels: two in a group of a norm
CONFIG = {
    "_class_name": "MAGVITv2",
    "encoder": {"ch": WIDTH, "ch_mult": [1, 1, 1], "num_res_blocks": [1, 1, 1]},
    "decoder": {"ch": WIDTH, "ch_mult": [1, 1, 1], "num_res_blocks": [1, 1, 1]},
    "quantize": {"codebook_dim": BITS},
}
for tower in ("encoder", "decoder"):
    CONFIG[tower] |= {"z_channels": BITS, "resolution": drawer.SIDE}
PAIRS = np.kron(np.eye(BITS), [[1], [-1]])  # of each bit, itself and its opposite


def padded(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns a matrix with zeros below it and on its right."""
    return np.pad(x, [(0, rows - x.shape[0]), (0, columns - x.shape[1])])


def planes() -> np.ndarray:
    """Returns [BITS, 4]: what of (red, green, blue, 1) is above 0 for one colour alone.

    Least squares: 1 for the colour of the bit, -1 for the others and white.
    """
    points = np.c_[drawer.PALETTE / 127.5 - 1, np.ones(len(drawer.PALETTE))]
    wanted = 2 * np.eye(BITS + 1)[:, 1:] - 1
    return np.linalg.lstsq(points, wanted, rcond=None)[0].T


def paints() -> tuple[np.ndarray, np.ndarray]:
    """Returns (weight [3, WIDTH], bias [3]) of the decoder's last convolution.

    Of a bit it sees swish(1) and swish(-1), or the other way round: their difference is 1
    where the bit is set, else -1.
    """
    colour = drawer.PALETTE / 127.5 - 1
    step = (colour[1:] - colour[0]).T / 2  # of a bit that goes from 0 to 1
    weight = padded(step @ PAIRS.T, 3, WIDTH)
    return weight, colour[0] + step.sum(axis=1)


def constructed() -> dict[str, np.ndarray]:
    """Returns tensors by name."""
    shapes = magvit.shapes(magvit.read(CONFIG))
    out = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name, x in out.items():
        if "norm" in name and name.endswith("weight"):
            x[:] = 1
        if "sample.conv.weight" in name:
            at = (
                0 if "down" in name else 1
            )  # stride 2 pads below and on the right alone
            x[:, :, at, at] = np.eye(WIDTH)
    signed = PAIRS @ planes()
    paint, base = paints()
    middle = {  # of 3 x 3, what is done to the pixel itself
        "encoder.conv_in": padded(signed[:, :3], WIDTH, 3),
        "encoder.conv_out": padded(PAIRS.T, BITS, WIDTH),
        "decoder.conv_in": padded(PAIRS, WIDTH, BITS),
        "decoder.conv_out": paint,
    }
    for name, matrix in middle.items():
        out[f"{name}.weight"][:, :, 1, 1] = matrix
    out["encoder.conv_in.bias"][: 2 * BITS] = signed[:, 3]
    out["decoder.conv_out.bias"][:] = base
    for name in ("encoder.quant_conv", "decoder.post_quant_conv"):
        out[f"{name}.weight"][:, :, 0, 0] = np.eye(BITS)
    return out


def write(folder: pathlib.Path) -> None:
    """Writes a MAGVIT-v2 folder, as dllm_jax.models.hf.load reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    safetensors.numpy.save_file(constructed(), folder / "model.safetensors")
