"""A tiny MMaDA folder with random weights and its tokenizer of images inside."""

import json
import pathlib

import numpy as np
import safetensors.numpy
import transformers

from dllm_jax.models import families, hf
from dllm_jax.models.vision import magvit
from tests.models.vision import common
from tests.models.vision.common import CHARS, SPECIAL

RESERVED = [f"<|reserved_token_{i}|>" for i in range(7)]
BITS, SIDE = 5, 8  # of a code; pixels of an image, 2 x 2 of which are one code
LENGTH = len(SPECIAL) + len(RESERVED) + len(CHARS)
CONFIG = {
    "model_type": "llada",  # as MMaDA-8B-Base and -MixCoT say
    "embedding_size": LENGTH + 2**BITS + 3,
    "codebook_size": 2**BITS,
    "d_model": 32,
    "mlp_hidden_size": 48,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "mask_token_id": 2,
    "weight_tying": False,
    "max_sequence_length": 256,
}
VQ = {
    "_class_name": "MAGVITv2",
    "encoder": {"ch": 32, "ch_mult": [1, 2], "num_res_blocks": [1, 2]},
    "decoder": {"ch": 32, "ch_mult": [2, 1], "num_res_blocks": [2, 1]},
    "quantize": {"codebook_dim": BITS},
}
for tower in ("encoder", "decoder"):
    VQ[tower] |= {"z_channels": BITS, "resolution": SIDE}


def tokenizer(reserved=RESERVED) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of single characters whose special tokens make images."""
    return common.tokenizer(reserved, bos=SPECIAL[1])


def vq_tensors(raw: dict) -> dict[str, np.ndarray]:
    """Returns random tensors of a MAGVIT-v2, in which biases are not zero either."""
    rng, out = np.random.default_rng(3), {}
    for name, shape in magvit.shapes(magvit.read(raw)).items():
        x = rng.normal(size=shape) * (
            2 / np.sqrt(np.prod(shape[1:])) if shape[1:] else 0.1
        )
        scales = len(shape) == 1 and name.endswith(".weight")  # of a norm
        out[name] = (x + scales).astype(np.float32)
    return out


def vq_folder(
    folder: pathlib.Path, raw: dict, stored: dict, name: str = "model"
) -> pathlib.Path:
    """Writes a MAGVIT-v2 folder; returns it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    safetensors.numpy.save_file(stored, folder / f"{name}.safetensors")
    return folder


def folder(path: pathlib.Path, vq: bool = True, tok=None, **changes) -> pathlib.Path:
    """Writes a checkpoint that is sure of some answers; returns its folder.

    vq: with its tokenizer of images inside; changes: of CONFIG.
    """
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (tok or tokenizer()).save_pretrained(path)
    cfg, rng = families.read_config(path), np.random.default_rng(0)
    weights = {}
    for _, spec, stored in hf.parameters(cfg, ("lm",)):
        for index, place in stored.items():
            x = 0.3 * rng.normal(size=hf.tensor_shape(spec, cfg, len(index)))
            x = 1 + 0.2 * x if spec.init == "ones" else x
            weights[place.name] = x.astype(np.float32)
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    if vq:
        vq_folder(path / "vq", VQ, vq_tensors(VQ))
    return path
