"""Trains a tiny MAGVIT-v2 on scenes: 32 x 32 pixels become 4 x 4 codes of 4 bits, and back.

What a code stands for is told, not found: code k is the k-th of a cell's 13 contents. So the
encoder learns bits, by their cross-entropy, and beside it the decoder pixels, by their squared
error; those that are not white, one in ten, count five times. Codes that both find together
by a straight-through gradient took a circle and a square for one in as many steps.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

from dllm_jax import images
from dllm_jax.models.vision import codes, magvit
from dllm_jax.rl.rewards import scenes
from examples.scenes import drawer

BITS = 4
CONFIG = {
    "_class_name": "MAGVITv2",
    "encoder": {"ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": [1, 1, 1, 1]},
    "decoder": {"ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": [1, 1, 1, 1]},
    "quantize": {"codebook_dim": BITS},
}
for tower in ("encoder", "decoder"):
    CONFIG[tower] |= {"z_channels": BITS, "resolution": drawer.SIDE}
BATCH, RATE = 8, 2e-3


def tree(flat: dict) -> dict:
    """Returns {"a": {"b": x}} of {"a.b": x}."""
    out = {}
    for name, x in flat.items():
        *path, last = name.split(".")
        node = out
        for key in path:
            node = node.setdefault(key, {})
        node[last] = x
    return out


def initial(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random tensors by name: norms 1, biases 0, convolutions of unit gain."""
    out = {}
    for name, shape in magvit.shapes(magvit.read(CONFIG)).items():
        x = np.zeros(shape) if name.endswith(".bias") else np.ones(shape)
        if len(shape) > 1:
            x = rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        out[name] = x.astype(np.float32)
    return out


def loss(params, pixels_BChw, codes_BN):
    """Returns the encoder's loss of bits and the decoder's of pixels, in sum."""
    channels_Bhwr = magvit.channels_of(params, pixels_BChw)
    shift_r = jnp.arange(BITS)[::-1]
    bit_BNr = (codes_BN[..., None] >> shift_r[None, None]) & 1
    signs_Bhwr = (2.0 * bit_BNr - 1).reshape(channels_Bhwr.shape)
    made_BChw = magvit.image_of_signs(params, signs_Bhwr)
    drawn = jnp.any(pixels_BChw < 0.99, axis=1, keepdims=True)
    wrong = jnp.mean((1 + 4 * drawn) * jnp.square(made_BChw - pixels_BChw))
    return wrong - jnp.mean(jax.nn.log_sigmoid(signs_Bhwr * channels_Bhwr))


def trained(steps: int, seed: int, say) -> dict[str, np.ndarray]:
    """Returns tensors by name after so many steps of Adam, half of the pictures scenes."""
    rng = np.random.default_rng(seed)
    params = tree(initial(rng))
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, 20, steps, RATE / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, pixels_BChw, codes_BN):
        found, grads = jax.value_and_grad(loss)(params, pixels_BChw, codes_BN)
        changes, state = optimizer.update(grads, state)
        return optax.apply_updates(params, changes), state, found

    every = list(scenes.ALL.values())
    for number in range(steps):
        chosen = rng.integers(0, len(every), BATCH // 2)
        cells = [drawer.placed(every[i], rng) for i in chosen]
        cells += [drawer.crowd(rng) for _ in range(BATCH - len(cells))]
        drawn = pixels([drawer.filled(cells_N) for cells_N in cells])
        params, state, found = step(params, state, drawn, np.stack(cells))
        if number % 50 == 49:
            say(f"step {number + 1} of {steps}: loss {float(found):.4f}")
    named = jax.tree_util.tree_leaves_with_path(params)
    return {".".join(p.key for p in path): np.asarray(x) for path, x in named}


def pixels(pictures) -> np.ndarray:
    """Returns pictures [h, w, 3], uint8, as [B, 3, h, w], f32 in [-1, 1]."""
    return np.stack([np.moveaxis(images.normalized(rgb), 2, 0) for rgb in pictures])


def faithful(params, rng: np.random.Generator, count: int) -> float:
    """Returns the share of drawn scenes whose reconstruction the checker accepts."""
    names, right = list(scenes.ALL), 0
    for _ in range(count // BATCH):
        golds = [names[i] for i in rng.integers(0, len(names), BATCH)]
        drawn = pixels([drawer.draw(scenes.ALL[gold], rng) for gold in golds])
        made = magvit.decode(params, magvit.encode(params, drawn))
        right += sum(scenes.grade(list(codes.shown(np.asarray(made))), golds))
    return right / (count // BATCH * BATCH)


def write(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a MAGVIT-v2 folder, as dllm_jax.models.hf.load reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
