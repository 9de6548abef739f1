"""Hugging Face folders in and out: one name table per family, read in two directions.

A table maps our parameter to the checkpoint's tensor name, `{}` standing for the layer.
Linear weights are stored there as (out, in) and here input-first with heads apart, so a
tensor is reshaped and transposed on its way; a layer is one slice of a stacked leaf.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches numpy and safetensors about bfloat16)
import numpy as np
import safetensors
import safetensors.numpy

from dllm_jax import sharding
from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig

DECODER = {
    "embed": "model.embed_tokens.weight",
    "layers.attn_norm": "model.layers.{}.input_layernorm.weight",
    "layers.wq": "model.layers.{}.self_attn.q_proj.weight",
    "layers.wk": "model.layers.{}.self_attn.k_proj.weight",
    "layers.wv": "model.layers.{}.self_attn.v_proj.weight",
    "layers.wo": "model.layers.{}.self_attn.o_proj.weight",
    "layers.bq": "model.layers.{}.self_attn.q_proj.bias",
    "layers.bk": "model.layers.{}.self_attn.k_proj.bias",
    "layers.bv": "model.layers.{}.self_attn.v_proj.bias",
    "layers.q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "layers.ffw_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.w_gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers.w_up": "model.layers.{}.mlp.up_proj.weight",
    "layers.w_down": "model.layers.{}.mlp.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "value": "value_head.weight",
}
# model_type -> (name table, fields that the family fixes)
FAMILIES = {
    "sdar": (DECODER, {"qk_norm": True}),
    "qwen3": (DECODER, {"qk_norm": True}),
    "llama": (DECODER, {"qk_norm": False}),
}
# Stored in some checkpoints, and ours without being read: a tied head, rotary tables.
DERIVED = ("lm_head.weight", "rotary_emb.inv_freq")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def find(path) -> pathlib.Path:
    """Returns the folder of a checkpoint: a local one, or a hub repository's snapshot.

    Raises ValueError when it is neither.
    """
    folder = pathlib.Path(path)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(path).count("/") != 1:
        raise ValueError(
            f"{str(path)!r} is not a folder, nor a hub repository like org/name"
        )
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(str(path)))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ValueError(
            f"{str(path)!r} is not a folder, and the hub did not give it: {error}"
        ) from None


def read_json(file: pathlib.Path) -> dict:
    """Returns what a JSON file holds; raises ValueError naming a file that is broken."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None


# ---- config.json -> ModelConfig --------------------------------------------------------


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Returns the ModelConfig of a folder's config.json.

    Raises ValueError naming what is missing or not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    raw = read_json(file)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type {family!r} is not supported; supported are "
            + ", ".join(sorted(FAMILIES))
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    sliding = raw.get("use_sliding_window") and raw.get("sliding_window")
    refused = {  # field: (its value, whether we compute something else)
        "hidden_act": (raw.get("hidden_act"), raw.get("hidden_act", "silu") != "silu"),
        "rope_scaling": (rope, kind != "default"),
        "sliding_window": (raw.get("sliding_window"), sliding),
        "attention_bias": (True, raw.get("attention_bias")),
        "mlp_bias": (True, raw.get("mlp_bias")),
    }
    for name, (value, bad) in refused.items():
        if bad:
            raise ValueError(f"{file}: {name}={value!r} is not supported")
    if family != "sdar" and "block_size" not in raw:
        raise ValueError(
            f"{folder}: a plain autoregressive {family} model; a block-diffusion one has "
            "block_size and mask_token_id in its config.json"
        )
    try:
        heads, width = raw["num_attention_heads"], raw["hidden_size"]
        eos = first(raw.get("eos_token_id"), 0)
        cfg = ModelConfig(
            family=family,
            vocab=raw["vocab_size"],
            d_model=width,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or width // heads,
            ffw=raw["intermediate_size"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            tied=raw.get("tie_word_embeddings", False),
            block=raw.get("block_size", 4),
            mask_id=mask_id(folder, raw),
            eos_id=eos,
            pad_id=first(raw.get("pad_token_id"), eos),
            **FAMILIES[family][1],
        )
    except KeyError as error:
        raise ValueError(f"{file}: no field {error}") from None
    if not 0 <= cfg.mask_id < cfg.vocab:
        raise ValueError(
            f"{folder}: mask token {cfg.mask_id} is outside the vocabulary of {cfg.vocab}"
        )
    return cfg


def first(value, default: int) -> int:
    """Returns an id that may be given as a list, or not at all."""
    value = value[0] if isinstance(value, list) and value else value
    return default if value is None or value == [] else int(value)


def mask_id(folder: pathlib.Path, raw: dict) -> int:
    """Returns the mask token's id, from config.json or the tokenizer's files."""
    if raw.get("mask_token_id") is not None:
        return int(raw["mask_token_id"])
    added = folder / "added_tokens.json"
    known = read_json(added) if added.is_file() else {}
    table = folder / "tokenizer.json"
    if table.is_file():
        for token in read_json(table).get("added_tokens", []):
            known[token["content"]] = token["id"]
    named = folder / "tokenizer_config.json"
    name = read_json(named).get("mask_token") if named.is_file() else None
    name = name["content"] if isinstance(name, dict) else name
    for token in (name, "<|MASK|>", "<|mask|>", "[MASK]"):
        if token in known:
            return int(known[token])
    raise ValueError(
        f"{folder}: tokenizer without mask token; config.json needs mask_token_id, or the "
        "tokenizer a mask_token"
    )


# ---- Tensors: theirs in files, ours in leaves ------------------------------------------


class Tensors:
    """The tensors of a folder by name; nothing is read before it is asked for."""

    def __init__(self, folder: pathlib.Path):
        if (folder / SINGLE).is_file():
            files = [SINGLE]
        elif (folder / INDEX).is_file():
            files = sorted(
                set(read_json(folder / INDEX).get("weight_map", {}).values())
            )
        else:
            raise ValueError(
                f"{folder} is not a checkpoint: it has neither {SINGLE} nor {INDEX}"
            )
        self.open, self.file_of = {}, {}
        for file in files:
            try:
                self.open[file] = safetensors.safe_open(folder / file, "np")
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(f"{folder / file}: cannot be read: {error}") from None
            self.file_of |= dict.fromkeys(self.open[file].keys(), file)

    def slice(self, name: str):
        """Returns a handle that reads only the part it is indexed with."""
        return self.open[self.file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's dtype."""
        kind = self.slice(name).get_dtype()
        if kind not in DTYPES:
            raise ValueError(f"tensor {name!r}: dtype {kind} is not supported")
        return jnp.dtype(DTYPES[kind])


def leaves(cfg: ModelConfig, heads):
    """Yields (path, Spec, tensor name with {} for the layer) of every parameter."""
    names, _ = FAMILIES[cfg.family]
    for path, spec in jax.tree_util.tree_leaves_with_path(
        transformer.specs(cfg, heads)
    ):
        yield path, spec, names[".".join(p.key for p in path)]


def each(name: str, spec, cfg: ModelConfig) -> list[str]:
    """Returns the tensors of one parameter: one, or one per layer."""
    return [name.format(i) for i in range(cfg.layers if spec.dims[0] == "L" else 1)]


def groups(spec) -> tuple[str, ...]:
    """Returns the letters that each dimension of a stored tensor spans."""
    dims = spec.dims.removeprefix("L")
    if dims == "D" and spec.init == "zeros":
        return "", "D"  # the value head: a matrix of one row
    if len(dims) == 1 or "D" not in dims:
        return (dims,)  # norms and biases
    if dims == "VD":
        return "V", "D"
    return (dims[1:], "D") if dims[0] == "D" else ("D", dims[:-1])


def stored(spec, cfg: ModelConfig) -> tuple[int, ...]:
    """Returns the shape that one layer's tensor has in the checkpoint."""
    return tuple(math.prod(cfg.sizes[x] for x in group) for group in groups(spec))


def ours(handle, spec, cfg: ModelConfig, index: tuple[slice, ...]) -> np.ndarray:
    """Reads the part `index` of one layer's parameter, in our layout."""
    dims = spec.dims.removeprefix("L")
    parts = {x: range(cfg.sizes[x])[i] for x, i in zip(dims, index, strict=True)}

    def span(group):  # contiguous: only the first dimension of a group is ever split
        inner = math.prod(cfg.sizes[x] for x in group[1:])
        part = parts[group[0]] if group else range(1)
        return slice(part.start * inner, part.stop * inner)

    x = handle[tuple(span(group) for group in groups(spec))]
    x = x if "".join(groups(spec)) == dims else x.T
    return x.reshape([len(parts[letter]) for letter in dims])


def theirs(x: np.ndarray, spec, cfg: ModelConfig) -> np.ndarray:
    """Returns one layer's parameter in the checkpoint's layout: the inverse of `ours`."""
    shape = stored(spec, cfg)
    if "".join(groups(spec)) != spec.dims.removeprefix("L"):
        x = x.reshape(shape[::-1]).T
    return np.ascontiguousarray(x.reshape(shape))


def check(tensors: Tensors, cfg: ModelConfig, heads, folder):
    """Raises ValueError naming every missing, unknown and mis-shaped tensor."""
    wrong, known = [], set()
    for path, spec, name in leaves(cfg, ("lm", "value")):
        needed = path[0].key == "head" and "lm" in heads
        needed |= path[0].key not in ("head", "value")
        for one in each(name, spec, cfg):
            known.add(one)
            if one not in tensors.file_of:
                wrong += [f"missing {one}"] * needed
            elif tensors.shape(one) != stored(spec, cfg):
                wrong.append(
                    f"{one} has shape {tensors.shape(one)}, expected {stored(spec, cfg)}"
                )
    extra = sorted(set(tensors.file_of) - known)
    wrong += [f"unknown {name}" for name in extra if not name.endswith(DERIVED)]
    refuse(folder, wrong)


def refuse(folder, wrong: list[str]):
    """Raises ValueError with the first of what is wrong, if anything is."""
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{folder}: " + "; ".join(wrong[:8]) + more)


# ---- In --------------------------------------------------------------------------------


def load(path, *, mesh=None, dtype=None, heads=None):
    """Returns (ModelConfig, params) of a Hugging Face folder or hub repository.

    Every tensor is read slice by slice straight to where `mesh` places it (without a mesh:
    the default device), so a host never holds a whole copy. dtype: None keeps the stored
    one, and the config computes in it; heads: ("lm",), ("value",) or both, None for what
    is stored; a value head that is not stored starts at zero.

    Raises ValueError for anything that is not a supported checkpoint, naming it.
    """
    folder = find(path)
    cfg = read_config(folder)
    tensors = Tensors(folder)
    if heads is None:
        heads = ("lm", "value") if "value_head.weight" in tensors.file_of else ("lm",)
    check(tensors, cfg, heads, folder)
    mesh = mesh or sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    params = {}
    for keys, spec, name in leaves(cfg, heads):
        node = params
        for step in keys[:-1]:
            node = node.setdefault(step.key, {})
        node[keys[-1].key] = read(tensors, cfg, spec, name, mesh, dtype)
    found = jax.tree.leaves(sharding.fetch(total(params)))
    wrong = []
    for (_, spec, name), sums in zip(leaves(cfg, heads), found, strict=True):
        for one, size in zip(each(name, spec, cfg), sums, strict=True):
            if not np.isfinite(size):
                wrong.append(f"{one} is not finite")
            elif size == 0 and spec.init != "zeros":
                wrong.append(f"{one} is all zero")
    refuse(folder, wrong)
    return dataclasses.replace(cfg, dtype=params["embed"].dtype.name), params


def read(tensors: Tensors, cfg: ModelConfig, spec, name: str, mesh, dtype):
    """Returns one parameter on the mesh."""
    shape, names = transformer.shape(spec, cfg), each(name, spec, cfg)
    kinds = [tensors.dtype(one) for one in names if one in tensors.file_of]
    kind = jnp.dtype(dtype or functools.reduce(jnp.promote_types, kinds or ["float32"]))

    @functools.cache  # a part that several devices hold is read once
    def part(index):
        out = np.zeros([len(range(n)[i]) for n, i in zip(shape, index)], kind)
        layered = spec.dims[0] == "L"
        rows = out if layered else out[None]
        for row, one in zip(rows, names[index[0]] if layered else names, strict=True):
            if kinds:
                row[...] = ours(tensors.slice(one), spec, cfg, index[layered:])
        return out

    placed = sharding.named(spec.dims, shape, sharding.PARAM, mesh)
    return jax.make_array_from_callback(shape, placed, part)


@jax.jit
def total(params):
    """Returns the sum of magnitudes in each layer of each leaf, f32.

    Zero and not finite tell on a sum; a maximum may drop a NaN on its way.
    """

    def one(path, x):
        axes = range(path[0].key == "layers", x.ndim)
        return jnp.atleast_1d(jnp.abs(x).sum(tuple(axes), dtype=jnp.float32))

    return jax.tree_util.tree_map_with_path(one, params)


# ---- Out -------------------------------------------------------------------------------


def save(path, cfg: ModelConfig, params, *, like) -> None:
    """Writes `params` as a Hugging Face folder that loads where `like` did.

    Names, dtypes, division into files and every other file (config, tokenizer, remote
    code) are those of `like`. A tensor that `params` lacks is taken from there; a value
    head that it lacks is added. Files are written one at a time into a temporary folder
    which then takes the name `path`, so a crash never leaves half a checkpoint. Every
    process must call it; process 0 writes.

    Raises ValueError when `like` is another model, and when `path` is in its way or holds
    something else than a checkpoint.
    """
    target, origin = pathlib.Path(path).resolve(), find(like).resolve()
    if target == origin or target in origin.parents or origin in target.parents:
        raise ValueError(f"cannot export to {path}: the original {like} is there")
    held = [target] if target.is_file() else list(target.glob("*"))
    if held and not any((target / name).is_file() for name in (SINGLE, INDEX)):
        raise ValueError(f"cannot export to {path}: it is there and not an export")
    tensors = Tensors(origin)
    check(tensors, cfg, (), origin)
    source = {}  # tensor name -> (leaf, Spec, layer or None)
    for keys, spec, name in leaves(cfg, ("lm", "value")):
        if keys[0].key in params:
            leaf = functools.reduce(lambda node, key: node[key.key], keys, params)
            for i, one in enumerate(each(name, spec, cfg)):
                source[one] = (leaf, spec, i if spec.dims[0] == "L" else None)
    if cfg.tied and "lm_head.weight" in tensors.file_of:
        source["lm_head.weight"] = source[DECODER["embed"]]
    added = [name for name in source if name not in tensors.file_of]

    writing = jax.process_index() == 0
    partial = target.with_name(f".{target.name}.partial")
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_others(origin, partial)

    def tensor(name):
        if name not in source:
            return tensors.slice(name)[:]
        leaf, spec, layer = source[name]
        x = np.asarray(sharding.fetch(leaf if layer is None else pick(leaf, layer)))
        kind = x.dtype if name in added else tensors.dtype(name)
        return theirs(x, spec, cfg).astype(kind)

    for file in tensors.open:
        names = [name for name, home in tensors.file_of.items() if home == file]
        if file == list(tensors.open)[-1]:
            names += added
        part = {}
        for name in names:
            x = tensor(name)
            if writing:
                part[name] = x
        if writing:
            safetensors.numpy.save_file(part, partial / file, metadata={"format": "pt"})
    if not writing:
        return
    if added and (partial / INDEX).is_file():
        told = read_json(partial / INDEX)
        told["weight_map"] |= dict.fromkeys(added, file)
        size = told.get("metadata", {}).get("total_size", 0)
        size += sum(part[name].nbytes for name in added)
        told["metadata"] = told.get("metadata", {}) | {"total_size": size}
        (partial / INDEX).write_text(json.dumps(told, indent=2) + "\n")
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
        os.replace(partial, target)
        shutil.rmtree(old)
    else:
        os.replace(partial, target)


@jax.jit
def pick(leaf, layer):
    """Returns one layer of a stacked leaf."""
    return leaf[layer]


def copy_others(origin: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what is not weights: tokenizer, configs, remote code, model card."""
    for item in origin.rglob("*"):
        name = item.relative_to(origin)
        hidden = any(part.startswith(".") for part in name.parts[:-1])
        if item.is_file() and not hidden and not any(map(item.match, WEIGHTS)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item, target / name)
