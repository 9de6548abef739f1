"""Hugging Face folders in and out: one name table per family, read in two directions.

A table maps our parameter to the checkpoint's tensor name, `{}` standing for the layer.
Linear weights are stored there as (out, in) and here input-first with heads apart, so a
tensor is reshaped and transposed on its way; a layer is one slice of a stacked leaf.
"""

import json
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
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def find(path: str) -> pathlib.Path:
    """Returns the folder of a checkpoint: a local one, or a hub repository's snapshot.

    Raises ValueError when it is neither.
    """
    folder = pathlib.Path(path)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.count("/") != 1:
        raise ValueError(
            f"{path!r} is not a folder, nor a hub repository like org/name"
        )
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(path))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ValueError(
            f"{path!r} is not a folder, and the hub did not give it: {error}"
        ) from None


def mask_id(folder: pathlib.Path, raw: dict) -> int:
    """Returns the mask token's id, from config.json or the tokenizer's files."""
    if raw.get("mask_token_id") is not None:
        return int(raw["mask_token_id"])
    added = folder / "added_tokens.json"
    known = json.loads(added.read_text()) if added.is_file() else {}
    table = folder / "tokenizer.json"
    if table.is_file():
        for token in json.loads(table.read_text()).get("added_tokens", []):
            known[token["content"]] = token["id"]
    named = folder / "tokenizer_config.json"
    name = json.loads(named.read_text()).get("mask_token") if named.is_file() else None
    name = name["content"] if isinstance(name, dict) else name
    for token in (name, "<|MASK|>", "<|mask|>", "[MASK]"):
        if token in known:
            return int(known[token])
    raise ValueError(
        f"{folder}: no mask token; config.json needs mask_token_id, or the tokenizer a "
        "mask_token"
    )


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Returns the ModelConfig of a folder's config.json.

    Raises ValueError naming what is missing or not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    raw = json.loads(file.read_text())
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type {family!r} is not supported; supported are "
            + ", ".join(sorted(FAMILIES))
        )
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "rope_scaling": bool(scaling),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
    }
    for name, bad in refused.items():
        if bad:
            raise ValueError(f"{file}: {name}={raw.get(name)!r} is not supported")
    if family != "sdar" and "block_size" not in raw:
        raise ValueError(
            f"{folder}: a plain autoregressive {family} model; a block-diffusion one has "
            "block_size and mask_token_id in its config.json"
        )
    try:
        heads, width = raw["num_attention_heads"], raw["hidden_size"]
        eos = first(raw.get("eos_token_id"), 0)
        return ModelConfig(
            family=family,
            vocab=raw["vocab_size"],
            d_model=width,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads", heads),
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


def first(value, default: int) -> int:
    """Returns an id that may be given as a list, or not at all."""
    value = value[0] if isinstance(value, list) and value else value
    return default if value is None or value == [] else int(value)


class Tensors:
    """The tensors of a folder by name; nothing is read before it is asked for."""

    def __init__(self, folder: pathlib.Path):
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            self.file_of = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            with safetensors.safe_open(single, "np") as file:
                self.file_of = dict.fromkeys(file.keys(), single.name)
        else:
            raise ValueError(
                f"{folder} is not a checkpoint: it has neither model.safetensors nor "
                "model.safetensors.index.json"
            )
        self.open = {}
        for name in sorted(set(self.file_of.values())):
            try:
                self.open[name] = safetensors.safe_open(folder / name, "np")
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(f"{folder / name}: cannot be read: {error}") from None

    def slice(self, name: str):
        """Returns a handle that reads only the part it is indexed with."""
        return self.open[self.file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's dtype."""
        kind = self.slice(name).get_dtype()
        names = {
            "BF16": "bfloat16",
            "F16": "float16",
            "F32": "float32",
            "F64": "float64",
        }
        if kind not in names:
            raise ValueError(f"tensor {name!r}: dtype {kind} is not supported")
        return jnp.dtype(names[kind])


def leaves(cfg: ModelConfig, heads):
    """Yields (path, Spec, tensor name with {} for the layer) of every parameter."""
    names, _ = FAMILIES[cfg.family]
    for path, spec in jax.tree_util.tree_leaves_with_path(
        transformer.specs(cfg, heads)
    ):
        key = ".".join(p.key for p in path)
        yield path, spec, names[key]


def stored(spec: transformer.Spec, cfg: ModelConfig) -> tuple[int, ...]:
    """Returns the shape that one layer's tensor has in the checkpoint."""
    sizes = transformer.shape(spec, cfg)[spec.dims.startswith("L") :]
    dims = spec.dims.lstrip("L")
    if dims == "VD":
        return sizes
    if spec.init == "zeros" and dims == "D":  # the value head: one row
        return (1, *sizes)
    if dims.endswith("D") and len(dims) > 1:  # NHD, FD: (D, inputs)
        return (sizes[-1], int(np.prod(sizes[:-1])))
    if len(dims) > 1 and dims[0] == "D":  # DNH, DF, DV: (outputs, D)
        return (int(np.prod(sizes[1:])), sizes[0])
    return (int(np.prod(sizes)),)  # norms and biases


def ours(handle, spec, cfg: ModelConfig, index: tuple[slice, ...]) -> np.ndarray:
    """Reads the part `index` of one layer's parameter, in our layout."""
    sizes = transformer.shape(spec, cfg)[spec.dims.startswith("L") :]
    dims = spec.dims.lstrip("L")
    bounds = [part.indices(size)[:2] for part, size in zip(index, sizes, strict=True)]
    shape = tuple(stop - start for start, stop in bounds)

    def flat(which):  # the rows that a run of dimensions spans: only the first is split
        inner = int(np.prod([sizes[i] for i in which[1:]]))
        return slice(bounds[which[0]][0] * inner, bounds[which[0]][1] * inner)

    every = list(range(len(dims)))
    if dims == "VD":
        return handle[flat([0]), flat([1])]
    if spec.init == "zeros" and dims == "D":
        return handle[:, flat([0])].reshape(shape)
    if dims.endswith("D") and len(dims) > 1:
        return handle[flat([every[-1]]), flat(every[:-1])].T.reshape(shape)
    if len(dims) > 1 and dims[0] == "D":
        return handle[flat(every[1:]), flat([0])].T.reshape(shape)
    return handle[flat(every)].reshape(shape)


def check(tensors: Tensors, cfg: ModelConfig, folder):
    """Raises ValueError naming every missing, extra and mis-shaped tensor."""
    wrong, known = [], set()
    for path, spec, name in leaves(cfg, ("lm", "value")):
        layers = range(cfg.layers) if spec.dims.startswith("L") else [0]
        for layer in layers:
            one = name.format(layer)
            known.add(one)
            if one not in tensors.file_of:
                if path[0].key != "value":
                    wrong.append(f"missing {one}")
            elif tensors.shape(one) != stored(spec, cfg):
                wrong.append(
                    f"{one} has shape {tensors.shape(one)}, expected {stored(spec, cfg)}"
                )
    # A tied checkpoint may store its head twice; rotary tables are derived.
    extra = set(tensors.file_of) - known - {"lm_head.weight"}
    wrong += [
        f"unknown {name}" for name in sorted(extra) if not name.endswith("inv_freq")
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{folder}: " + "; ".join(wrong[:8]) + more)


def load(path: str, *, mesh=None, dtype=None, heads=None):
    """Returns (ModelConfig, params) of a Hugging Face folder or hub repository.

    Every tensor is read slice by slice straight to where `mesh` places it (without a mesh:
    the default device), so a host never holds a whole copy. dtype: None keeps the stored
    one; heads: ("lm",), ("value",) or both, None for what is stored; a value head that is
    not stored starts at zero. The config computes in f32 where the weights are f32.

    Raises ValueError for anything that is not a supported checkpoint, naming it.
    """
    folder = find(path)
    cfg = read_config(folder)
    tensors = Tensors(folder)
    check(tensors, cfg, folder)
    if heads is None:
        heads = ("lm", "value") if "value_head.weight" in tensors.file_of else ("lm",)
    mesh = mesh or sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    out = {}
    for path_, spec, name in leaves(cfg, heads):
        shape = transformer.shape(spec, cfg)
        stacked = spec.dims.startswith("L")
        known = name.format(0) in tensors.file_of
        kind = jnp.dtype(
            dtype or (tensors.dtype(name.format(0)) if known else "float32")
        )

        def read(index, spec=spec, name=name, stacked=stacked, shape=shape, kind=kind):
            if name.format(0) not in tensors.file_of:
                return np.zeros([len(range(n)[i]) for n, i in zip(shape, index)], kind)
            if not stacked:
                return ours(tensors.slice(name), spec, cfg, index).astype(kind)
            part = [
                ours(tensors.slice(name.format(layer)), spec, cfg, index[1:])
                for layer in range(cfg.layers)[index[0]]
            ]
            return np.stack(part).astype(kind)

        placed = sharding.named(spec.dims, shape, sharding.PARAM, mesh)
        node = out
        for step in path_[:-1]:
            node = node.setdefault(step.key, {})
        node[path_[-1].key] = jax.make_array_from_callback(shape, placed, read)
    bad = [
        name
        for (_, _, name), finite in zip(
            leaves(cfg, heads), jax.tree.leaves(all_finite(out)), strict=True
        )
        if not finite
    ]
    if bad:
        raise ValueError(f"{folder}: not finite: {', '.join(bad)}")
    return cfg, out


@jax.jit
def all_finite(params):
    """Returns per leaf whether every number is finite."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)


def save(path: str, cfg: ModelConfig, params, *, like: str) -> None:
    """Writes `params` as a Hugging Face folder that loads where `like` did.

    Names, dtypes, division into files and every other file (config, tokenizer, remote
    code) are those of `like`; a value head that it lacks is added. Files are written one
    at a time into a temporary folder which then takes the name `path`, so a crash never
    leaves half a checkpoint. Every process must call it; process 0 writes.
    """
    target, origin = pathlib.Path(path), find(like)
    if target.resolve() == origin.resolve():
        raise ValueError(f"cannot export over the original {like!r}")
    tensors = Tensors(origin)
    heads = ("value",) * ("value" in params) + ("lm",)
    source = {}  # tensor name -> (leaf, Spec, layer)
    for path_, spec, name in leaves(cfg, heads):
        leaf = params
        for step in path_:
            leaf = leaf[step.key]
        for layer in range(cfg.layers) if spec.dims.startswith("L") else [None]:
            source[name.format(layer)] = (leaf, spec, layer)
    if cfg.tied and "lm_head.weight" in tensors.file_of:
        source["lm_head.weight"] = source[DECODER["embed"]]
    files = {}
    for name in source:
        default = next(iter(tensors.open))
        files.setdefault(tensors.file_of.get(name, default), []).append(name)

    writing = jax.process_index() == 0
    partial = target.with_name(f".{target.name}.partial")
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for item in origin.iterdir():
            if item.is_file() and not item.name.endswith(WEIGHTS):
                shutil.copy2(item, partial / item.name)
    for file, names in files.items():
        part = {}
        for name in names:
            leaf, spec, layer = source[name]
            x = sharding.fetch(leaf if layer is None else leaf[layer])
            kind = tensors.dtype(name) if name in tensors.file_of else x.dtype
            part[name] = theirs(np.asarray(x), spec, cfg).astype(kind)
        if writing:
            safetensors.numpy.save_file(part, partial / file, metadata={"format": "pt"})
    if not writing:
        return
    index = origin / "model.safetensors.index.json"
    if index.is_file():
        told = json.loads(index.read_text())
        told["weight_map"] = {name: f for f, names in files.items() for name in names}
        (partial / index.name).write_text(json.dumps(told, indent=2) + "\n")
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
        os.replace(partial, target)
        shutil.rmtree(old)
    else:
        os.replace(partial, target)


def theirs(x: np.ndarray, spec, cfg: ModelConfig) -> np.ndarray:
    """Returns one layer's parameter in the checkpoint's layout: the inverse of `ours`."""
    dims, shape = spec.dims.lstrip("L"), stored(spec, cfg)
    if dims != "VD" and len(dims) > 1 and "D" in dims:
        # Ours is (inputs, outputs) whichever side D is on; theirs the transpose.
        x = x.reshape(shape[1], shape[0]).T
    return np.ascontiguousarray(x.reshape(shape))
