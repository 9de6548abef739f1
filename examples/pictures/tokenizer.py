"""Trains a tiny MAGVIT-v2 on easy-VQA's pictures, which become 8 x 8 codes.

The objective is MAGVIT-v2's (arXiv 2310.05737, section 3.1) less what its discriminator and its
perceptual loss add. A code's bit is the sign of a channel. A sign has no gradient: that of the
decoder goes to the channel as if there were none (straight through). The commitment draws
channels to their signs. The entropy term makes each bit sure and the codebook used: the mean
entropy of a cell's code less the entropy of the codes of all cells.

Letters: w columns, r bits of a code, e codes of the codebook.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from PIL import Image

from dllm_jax import images
from dllm_jax.models import hf
from dllm_jax.models.vision import codes, magvit

SIDE, BITS = 32, 8  # pixels of a picture, and bits of a code
TOWER = {
    "ch": 32,
    "ch_mult": [1, 1, 2],
    "num_res_blocks": [1, 1, 1],
    "z_channels": BITS,
    "resolution": SIDE,
}
CONFIG = {"_class_name": magvit.KIND, "encoder": TOWER, "decoder": TOWER}
ERROR, COMMITMENT, ENTROPY = 10.0, 0.25, 0.02  # weights of the loss's terms


def blank(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Writes a MAGVIT-v2 of random weights, of variance 1 / (the inputs of a product)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    weights = {}
    for name, shape in magvit.shapes(magvit.read(CONFIG)).items():
        if len(shape) > 1:
            x = rng.normal(0, np.prod(shape[1:]) ** -0.5, shape)
        else:
            x = np.full(shape, float("norm" in name and name.endswith("weight")))
        weights[name] = x.astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def entropy(p, axis):
    """Returns the entropy of distributions along an axis, nats."""
    return -jnp.sum(p * jnp.log(p + 1e-9), axis=axis)


def quantised(z_Bhwr):
    """Returns (signs [B, h, w, r] with a gradient, the commitment, the entropy term).

    A code's probability is the product of its bits', and a bit's that of being 1 rather than
    -1 if both had a cost of their squared distance: sigmoid(4 z).
    """
    sign_Bhwr = jnp.where(z_Bhwr > 0, 1.0, -1.0)
    commitment = jnp.square(z_Bhwr - sign_Bhwr).mean()
    p_Bhwr = jax.nn.sigmoid(4 * z_Bhwr)
    p_Bhwe = jnp.ones((*p_Bhwr.shape[:3], 1))
    for i in range(p_Bhwr.shape[3]):  # the codebook doubles with each bit
        p_Bhw1 = p_Bhwr[..., i : i + 1]
        p_Bhwe = jnp.concatenate([p_Bhwe * (1 - p_Bhw1), p_Bhwe * p_Bhw1], axis=3)
    of_cells = entropy(p_Bhwe, 3).mean()
    of_all = entropy(p_Bhwe.mean(axis=(0, 1, 2)), 0)
    straight = z_Bhwr + jax.lax.stop_gradient(sign_Bhwr - z_Bhwr)
    return straight, commitment, of_cells - of_all


def objective(params, pixels_BChw):
    """Returns (loss, (squared error, commitment, entropy term)) of pictures in [-1, 1]."""
    z_Bhwr = magvit.channels_of(params, pixels_BChw)
    signs_Bhwr, commitment, term = quantised(z_Bhwr)
    made_BChw = magvit.image_of_signs(params, signs_Bhwr)
    error = jnp.square(made_BChw - pixels_BChw).mean()
    loss = ERROR * error + COMMITMENT * commitment + ENTROPY * term
    return loss, (error, commitment, term)


def trained(folder: pathlib.Path, pixels_nChw: np.ndarray, steps: int, batch: int, rng):
    """Returns the parameters after so many steps of Adam, and writes them to a folder."""
    blank(folder, rng)
    _, params = hf.load(folder)
    schedule = optax.warmup_cosine_decay_schedule(0, 2e-3, steps // 20, steps, 1e-4)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, pixels_BChw):
        gradient, terms = jax.grad(objective, has_aux=True)(params, pixels_BChw)
        changes, state = adam.update(gradient, state)
        return optax.apply_updates(params, changes), state, terms

    state = adam.init(params)
    for step in range(1, steps + 1):
        some = rng.choice(len(pixels_nChw), batch, replace=False)
        params, state, terms = update(params, state, pixels_nChw[some])
        if step % 50 == 0 or step == steps:
            error, commitment, term = map(float, terms)
            print(
                f"{step:5} error {error:.4f} commitment {commitment:.3f} entropy {term:.2f}",
                flush=True,
            )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {".".join(key.key for key in path): np.asarray(x) for path, x in leaves}
    safetensors.numpy.save_file(named, folder / "model.safetensors")
    return params


def pictures(folder: pathlib.Path, rows: list[dict]) -> np.ndarray:
    """Returns the different pictures [n, 3, SIDE, SIDE] of records, in [-1, 1]."""
    names = dict.fromkeys(row["image"] for row in rows)
    rgb = [images.read(name, root=folder) for name in names]
    return np.stack([codes.prepared(one, SIDE, "pad") for one in rgb])


def encoded(params, pixels_nChw: np.ndarray) -> np.ndarray:
    """Returns the codes [n, N] of pictures."""
    return np.concatenate(
        [
            np.asarray(
                magvit.encode(params, pixels_nChw[first : first + codes.TOGETHER])
            )
            for first in range(0, len(pixels_nChw), codes.TOGETHER)
        ]
    )


def rebuilt(params, pixels_nChw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (codes [n, N], pictures [n, 3, SIDE, SIDE] in [-1, 1]) that pictures become."""
    found, made = encoded(params, pixels_nChw), []
    for first in range(0, len(found), codes.TOGETHER):
        some = magvit.decode(params, found[first : first + codes.TOGETHER])
        made.append(np.asarray(some).clip(-1, 1))
    return found, np.concatenate(made)


def sheet(*rows: np.ndarray) -> Image.Image:
    """Returns pictures [n, h, w, 3], uint8, one row below the other."""
    return Image.fromarray(np.concatenate([np.concatenate(x, axis=1) for x in rows]))
