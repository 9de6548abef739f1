"""Hugging Face folders in and out: a family's name table, read in two directions.

Linear weights are stored there as (out, in) and here input-first with heads apart, so a
tensor is reshaped and transposed on its way; a layer is one slice of a stacked leaf.
"""

import collections
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
from dllm_jax.models.families import FAMILIES, changes, read_config, read_json

DERIVED = "rotary_emb.inv_freq"  # stored in some checkpoints, never read
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
    """Yields (path, Spec, tensor name) of every parameter, in the order of the names.

    Each {} in a name stands for one leading dimension of the parameter: a layer, then an
    expert.
    """
    flat = jax.tree_util.tree_leaves_with_path(transformer.specs(cfg, heads))
    known = {".".join(p.key for p in path): (path, spec) for path, spec in flat}
    names = FAMILIES[cfg.family].names
    assert known.keys() <= names.keys(), known.keys() - names.keys()
    for key, name in names.items():
        if key in known:
            yield *known[key], name


@dataclasses.dataclass(frozen=True)
class Home:
    """Where one tensor's worth of a parameter lies: a tensor, from some row on."""

    name: str
    row: int


def homes(cfg: ModelConfig, heads):
    """Yields (path, Spec, {index: Home}) of every parameter, by its leading dimensions.

    Parameters that share a name (q, k and v in one) follow each other in that tensor.
    """
    rows = collections.Counter()
    for path, spec, name in leaves(cfg, heads):
        found = {}
        for index in np.ndindex(transformer.shape(spec, cfg)[: name.count("{}")]):
            late = cfg.dense_layers if spec.dims[0] == "L" else 0
            layer = tuple(i + late * (n == 0) for n, i in enumerate(index))
            one = name.format(*layer)
            found[index] = Home(one, rows[one])
            rows[one] += stored(spec, cfg, len(index))[0]
        yield path, spec, found


def groups(dims: str, spec) -> tuple[str, ...]:
    """Returns the letters that each dimension of a tensor spans; ours are `dims`."""
    if dims == "D" and spec.init == "zeros":
        return "", "D"  # the value head: a matrix of one row
    if len(dims) == 1 or "D" not in dims:
        return (dims,)  # norms and biases
    if dims == "VD":
        return "V", "D"
    if dims[0] == "E":
        return "E", *groups(dims[1:], spec)
    return (dims[1:], "D") if dims[0] == "D" else ("D", dims[:-1])


def stored(spec, cfg: ModelConfig, lead: int) -> tuple[int, ...]:
    """Returns the shape of a parameter's tensor; `lead` dimensions number the tensors."""
    spans = groups(spec.dims[lead:], spec)
    return tuple(math.prod(cfg.sizes[x] for x in span) for span in spans)


def ours(handle, row: int, spec, cfg: ModelConfig, index) -> np.ndarray:
    """Reads the part `index` of a parameter in one tensor, in our layout."""
    dims = spec.dims[len(spec.dims) - len(index) :]
    parts = {x: range(cfg.sizes[x])[i] for x, i in zip(dims, index, strict=True)}
    spans = groups(dims, spec)

    def part(span, first):  # contiguous: only its first dimension is ever split
        inner = math.prod(cfg.sizes[x] for x in span[1:])
        one = parts[span[0]] if span else range(1)
        return slice(first + one.start * inner, first + one.stop * inner)

    x = handle[tuple(part(span, 0 if n else row) for n, span in enumerate(spans))]
    x = x if "".join(spans) == dims else x.swapaxes(-1, -2)
    return x.reshape([len(parts[letter]) for letter in dims])


def theirs(x: np.ndarray, spec, cfg: ModelConfig) -> np.ndarray:
    """Returns one tensor's worth in the checkpoint's layout: the inverse of `ours`."""
    lead = len(spec.dims) - x.ndim
    shape = stored(spec, cfg, lead)
    if "".join(groups(spec.dims[lead:], spec)) != spec.dims[lead:]:
        x = x.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
    return np.ascontiguousarray(x.reshape(shape))


def check(tensors: Tensors, cfg: ModelConfig, heads, folder):
    """Raises ValueError naming every missing, unknown and mis-shaped tensor."""
    shapes, needed = {}, set()
    for path, spec, found in homes(cfg, ("lm", "value")):
        for index, home in found.items():
            rows, *rest = stored(spec, cfg, len(index))
            shapes[home.name] = (home.row + rows, *rest)
            if path[0].key not in ("head", "value") or (
                path[0].key == "head" and "lm" in heads
            ):
                needed.add(home.name)
    wrong = []
    for name, shape in shapes.items():
        if name not in tensors.file_of:
            wrong += [f"missing {name}"] * (name in needed)
        elif tensors.shape(name) != shape:
            wrong.append(f"{name} has shape {tensors.shape(name)}, expected {shape}")
    known = shapes.keys() | {FAMILIES[cfg.family].names["head"]}  # tied, and stored too
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
        valued = FAMILIES[cfg.family].names["value"] in tensors.file_of
        heads = ("lm", "value") if valued else ("lm",)
    check(tensors, cfg, heads, folder)
    mesh = mesh or sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    params, named = {}, []
    for keys, spec, found in homes(cfg, heads):
        node = params
        for step in keys[:-1]:
            node = node.setdefault(step.key, {})
        node[keys[-1].key] = leaf = read(tensors, cfg, spec, found, mesh, dtype)
        sums = np.asarray(sharding.fetch(total(leaf, len(next(iter(found))))))
        named += [(found[i].name, sums[i], spec) for i in np.ndindex(sums.shape)]
    wrong = [
        f"{name} is not finite" for name, size, _ in named if not np.isfinite(size)
    ]
    wrong += [
        f"{name} is all zero"
        for name, size, spec in named
        if size == 0 and spec.init != "zeros"
    ]
    refuse(folder, wrong)
    return dataclasses.replace(cfg, dtype=params["embed"].dtype.name), params


def read(tensors: Tensors, cfg: ModelConfig, spec, found: dict, mesh, dtype):
    """Returns one parameter on the mesh."""
    shape, lead = transformer.shape(spec, cfg), len(next(iter(found)))
    kinds = {tensors.dtype(h.name) for h in found.values() if h.name in tensors.file_of}
    kind = jnp.dtype(dtype or functools.reduce(jnp.promote_types, kinds or ["float32"]))

    @functools.cache  # a part that several devices hold is read once
    def part(index):
        out = np.zeros([len(range(n)[i]) for n, i in zip(shape, index)], kind)
        first = [range(n)[i].start for n, i in zip(shape, index[:lead])]
        for place in np.ndindex(out.shape[:lead]) if kinds else ():
            home = found[tuple(map(sum, zip(place, first)))]
            out[place] = ours(
                tensors.slice(home.name), home.row, spec, cfg, index[lead:]
            )
        return out

    placed = sharding.named(spec.dims, shape, sharding.PARAM, mesh)
    return jax.make_array_from_callback(shape, placed, part)


@functools.partial(jax.jit, static_argnums=1)
def total(x, lead: int):
    """Returns the sum of magnitudes in each tensor of a parameter, f32.

    Zero and not finite tell on a sum; a maximum may drop a NaN on its way.
    """
    return jnp.abs(x).sum(tuple(range(lead, x.ndim)), dtype=jnp.float32)


# ---- Out -------------------------------------------------------------------------------


def save(path, cfg: ModelConfig, params, *, like) -> None:
    """Writes `params` as a Hugging Face folder that loads where `like` did.

    Names, dtypes, division into files and every other file (config, tokenizer, remote
    code) are those of `like`, and config.json says what `adapt` has changed. A tensor that
    `params` lacks is taken from there; a value head that it lacks is added. Files are
    written one at a time into a temporary folder which then takes the name `path`, so a
    crash never leaves half a checkpoint. Every process must call it; process 0 writes.

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
    source = collections.defaultdict(list)  # tensor name -> [(leaf, Spec, index)]
    for keys, spec, found in homes(cfg, ("lm", "value")):
        if keys[0].key in params:
            leaf = functools.reduce(lambda node, key: node[key.key], keys, params)
            for index, home in found.items():
                source[home.name].append((leaf, spec, index))
    called = FAMILIES[cfg.family].names
    if cfg.tied and called["head"] in tensors.file_of:
        source[called["head"]] = source[called["embed"]]
    added = [name for name in source if name not in tensors.file_of]

    writing = jax.process_index() == 0
    partial = target.with_name(f".{target.name}.partial")
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_others(origin, partial)
        if more := changes(cfg, read_config(origin)):
            told = json.dumps(read_json(origin / "config.json") | more, indent=2)
            (partial / "config.json").write_text(told + "\n")

    def tensor(name):
        if name not in source:
            return tensors.slice(name)[:]
        parts = []
        for leaf, spec, index in source[name]:
            x = np.asarray(sharding.fetch(pick(leaf, index) if index else leaf))
            parts.append(theirs(x, spec, cfg))
        x = np.concatenate(parts)
        return x if name in added else x.astype(tensors.dtype(name))

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
def pick(leaf, index):
    """Returns one tensor's worth of a parameter."""
    return leaf[index]


def copy_others(origin: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what is not weights: tokenizer, configs, remote code, model card."""
    for item in origin.rglob("*"):
        name = item.relative_to(origin)
        hidden = any(part.startswith(".") for part in name.parts[:-1])
        if item.is_file() and not hidden and not any(map(item.match, WEIGHTS)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item, target / name)
