"""Checkpoints of autoencoders, which have no language model."""

import pathlib

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dllm_jax.models.repository import Tensors, refuse
from dllm_jax.models.special import read_json
from dllm_jax.models.vision import magvit

# By _class_name of config.json. A module has
#   read(raw) -> its config, of what config.json says
#   shapes(cfg) -> {tensor name: shape}
#   IGNORED: how the names of tensors begin that it does not need
MODULES = {magvit.KIND: magvit}


def module_of(folder: pathlib.Path):
    """Returns the module of MODULES that a folder is of, or None."""
    file = folder / "config.json"
    raw = read_json(file) if file.is_file() else {}
    kind = raw.get("_class_name")
    return MODULES.get(kind) if isinstance(kind, str) else None


def read(folder: pathlib.Path, module):
    """Returns what the config.json of a folder of MODULES says."""
    file = folder / "config.json"
    try:
        return module.read(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def load(folder: pathlib.Path, module, dtype=None):
    """Returns (its config, params) of a folder of MODULES, on the default device.

    params: the tensors by name, cut at the dots. Raises ValueError as `hf.load` does.
    """
    cfg = read(folder, module)
    tensors, shapes = Tensors(folder), module.shapes(cfg)
    faults = [f"missing {name}" for name in shapes if name not in tensors.file_of]
    for name in tensors.file_of:
        if name not in shapes:
            faults += [] if name.startswith(module.IGNORED) else [f"unknown {name}"]
        elif tensors.shape(name) != shapes[name]:
            found = tensors.shape(name)
            faults.append(f"{name} has shape {found}, expected {shapes[name]}")
    refuse(folder, faults)
    params = {}
    for name in shapes:
        x = tensors.slice(name)[:].astype(dtype or tensors.dtype(name))
        if not np.isfinite(x).all():
            faults.append(f"{name} is not finite")
        params[name] = jnp.asarray(x)
    refuse(folder, faults)
    return cfg, traverse_util.unflatten_dict(params, sep=".")
