"""Hugging Face folders in and out: a family's name table, read in two directions.

Linear weights are stored there as (out, in) and here input-first with heads apart, so a
tensor is reshaped and transposed on its way. There each layer (and often each expert) has
a tensor of its own; here these are one parameter, stacked: its leading dimensions number
the tensors, and an index over these says which tensor.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
import zlib

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches numpy and safetensors about bfloat16)
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from dllm_jax import exits, sharding
from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.families import changes, family_of, read_config
from dllm_jax.models.special import read_json
from dllm_jax.models.vision import magvit, siglip

HEADS = ("lm", "value", "record", "vision")  # all that a checkpoint may have
# Files of weights: the first are read, the others are neither fetched nor exported.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5")
WEIGHTS += ("*.msgpack", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.ot", "*.tflite")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TRAINED = b"""> dllm_jax has trained the weights beside this text further: it was written about
> others, and not all of it holds any more.

"""
# What else a file of all weights is called: the released MAGVIT-v2's, diffusers'.
OTHER_NAMES = ("pytorch_model.safetensors", "diffusion_pytorch_model.safetensors")
# Checkpoints without a language model, by _class_name of config.json. A module has
#   read(raw) -> its config, of what config.json says
#   shapes(cfg) -> {tensor name: shape}
#   IGNORED: how the names of tensors begin that it does not need
AUTOENCODERS = {magvit.KIND: magvit}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def find(path) -> pathlib.Path:
    """Returns the folder of a checkpoint: a local one, or a hub repository's snapshot.

    Raises ValueError when it is neither.
    """
    if not str(path):
        raise ValueError("model.path is empty: name a Hugging Face folder")
    folder = pathlib.Path(path)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(path).count("/") != 1:
        seen_from = "" if folder.is_absolute() else f"; looked for in {os.getcwd()}"
        raise ValueError(
            f"{str(path)!r} is not a folder, nor a hub repository like org/name{seen_from}"
        )
    try:
        return snapshot(str(path))
    except Exception as error:  # noqa: BLE001 (its HTTP client has errors of its own)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{str(path)!r} is not a folder, and the hub did not give it: {reason}"
        ) from None


@functools.cache
def snapshot(name: str) -> pathlib.Path:
    """Returns the folder of a hub repository, the same until the process ends.

    What a run began with is to be what its export is made with, days later, whatever the hub
    has by then.
    """
    others = [pattern for pattern in WEIGHTS if pattern != "*.safetensors"]
    return pathlib.Path(huggingface_hub.snapshot_download(name, ignore_patterns=others))


def marks(folder: pathlib.Path) -> dict[str, list[int]]:
    """Returns size and CRC-32 of a checkpoint's files of weights and config.

    Other weights by the same path have others. Of a large file the CRC is of 256 pieces.
    """
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    return {file.name: mark(file) for file in files}


def mark(file: pathlib.Path) -> list[int]:
    """Returns a file's size and CRC-32."""
    piece, size, crc = 2**14, file.stat().st_size, 0
    with file.open("rb") as data:
        for start in range(0, size, max(piece, size // 256)):
            data.seek(start)
            crc = zlib.crc32(data.read(piece), crc)
    return [size, crc]


# ---- Where a parameter is stored --------------------------------------------------------


class Tensors:
    """The tensors of a folder by name; nothing is read before it is asked for."""

    def __init__(self, folder: pathlib.Path):
        if (folder / SINGLE).is_file():
            files = [SINGLE]
        elif (folder / INDEX).is_file():
            files = files_of(folder / INDEX)
        elif there := [name for name in OTHER_NAMES if (folder / name).is_file()]:
            files = there[:1]
        else:
            raise ValueError(
                f"{folder} is not a checkpoint: it has neither {SINGLE} nor {INDEX}"
                + pickled(folder)
            )
        self.handle_of, self.file_of = {}, {}  # by file, by tensor name
        for file in files:
            try:
                self.handle_of[file] = safetensors.safe_open(folder / file, "np")
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(f"{folder / file}: cannot be read: {error}") from None
            names = self.handle_of[file].keys()
            if twice := sorted(self.file_of.keys() & names):
                # An index says which is meant, and transformers does not ask it.
                raise ValueError(
                    f"{folder}: tensor {twice[0]!r} is in two files, "
                    f"{self.file_of[twice[0]]} and {file}"
                )
            self.file_of |= dict.fromkeys(names, file)

    def slice(self, name: str):
        """Returns a handle that reads only the part it is indexed with."""
        return self.handle_of[self.file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's dtype."""
        kind = self.slice(name).get_dtype()
        if kind not in DTYPES:
            raise ValueError(
                f"{self.file_of[name]}: tensor {name!r}: dtype {kind} is not supported"
            )
        return jnp.dtype(DTYPES[kind])

    def size(self, name: str) -> int:
        """Returns the bytes of a tensor; 0 of a dtype that is copied alone, not read."""
        kind = DTYPES.get(self.slice(name).get_dtype())
        return math.prod(self.shape(name)) * jnp.dtype(kind).itemsize if kind else 0


def pickled(folder: pathlib.Path) -> str:
    """Returns what is to be said of weights that are not read; "": there are none."""
    files = sorted(file.name for file in folder.glob("*.bin"))
    way = "write the model anew with transformers' save_pretrained, which makes safetensors"
    if files:
        return f"; {files[0]} is not read, as a .bin file is a program: {way}"
    if folder.parent.name == "snapshots":
        return f"; of a hub repository no others are fetched: {way}"
    return ""


def files_of(index: pathlib.Path) -> list[str]:
    """Returns the names of an index's files.

    Raises ValueError where it names none, or anything but a file beside it: an export
    writes the same names.
    """
    names = read_json(index).get("weight_map")
    if not names or not isinstance(names, dict):
        raise ValueError(f"{index}: it has no weight_map of tensor names to file names")
    for tensor, name in names.items():
        plain = isinstance(name, str) and "\0" not in name
        if not plain or name in ("", ".", "..") or name != os.path.basename(name):
            raise ValueError(
                f"{index}: {tensor!r} is in {name!r}, which is not the name of a file in "
                "this folder"
            )
    return sorted(set(names.values()))


def leaves(cfg: ModelConfig, heads):
    """Yields (path, Spec, tensor name) of every parameter, in the order of the names.

    Each {} in a name stands for one leading dimension of the parameter: a layer, then an
    expert.
    """
    if isinstance(cfg, ModelConfig):
        tree = transformer.specs(cfg, heads)
    else:
        tree = transformer.declared(siglip.PARAMETERS)
    flat = jax.tree_util.tree_leaves_with_path(tree)
    declared = {".".join(p.key for p in path): (path, spec) for path, spec in flat}
    names = family_of(cfg).names
    assert declared.keys() <= names.keys(), declared.keys() - names.keys()
    for key, name in names.items():
        if key in declared:
            yield *declared[key], name


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor's worth of a parameter is: in a tensor, from some row on."""

    name: str
    row: int


def parameters(cfg: ModelConfig, heads):
    """Yields (path, Spec, {index: Stored}) of every parameter, by its leading dimensions.

    Parameters that share a name (q, k and v in one) follow each other in that tensor.
    """
    rows = collections.Counter()  # of each tensor, that parameters before have taken
    layer_numbers = cfg.layer_numbers
    for path, spec, name in leaves(cfg, heads):
        stored = {}
        for index in np.ndindex(transformer.shape(spec, cfg)[: name.count("{}")]):
            numbers = list(index)
            if numbers:
                numbers[0] = layer_numbers[spec.dims[0]][index[0]]
            tensor = name.format(*numbers)
            stored[index] = Stored(tensor, rows[tensor])
            rows[tensor] += tensor_shape(spec, cfg, len(index))[0]
        yield path, spec, stored


def lead_of(stored: dict) -> int:
    """Returns how many leading dimensions of a parameter number its tensors."""
    return len(next(iter(stored)))


AS_STORED = ("VD", "pe", "ecyx")  # tables, and patches' weights


def spans_of(dims: str, spec) -> tuple[str, ...]:
    """Returns the letters that each dimension of a tensor spans; ours are `dims`."""
    if dims == "D" and spec.init == "zeros":
        return "", "D"  # the value head and its record's: matrices of one row
    if dims in AS_STORED:
        return tuple(dims)
    if dims.islower() and len(dims) == 2:  # a vision tower's
        return dims[1], dims[0]
    if len(dims) == 1 or "D" not in dims:
        return (dims,)  # norms and biases
    if dims[0] == "E":
        return "E", *spans_of(dims[1:], spec)
    return (dims[1:], "D") if dims[0] == "D" else ("D", dims[:-1])


def tensor_shape(spec, cfg: ModelConfig, lead: int) -> tuple[int, ...]:
    """Returns the shape of a parameter's tensor; `lead` dimensions number the tensors."""
    spans = spans_of(spec.dims[lead:], spec)
    return tuple(math.prod(cfg.sizes[letter] for letter in span) for span in spans)


def from_file(handle, row: int, spec, cfg: ModelConfig, index) -> np.ndarray:
    """Reads a part of one tensor's worth of a parameter, in our layout.

    handle: of the tensor (Tensors.slice); row: where the parameter begins in it; index: a
    slice for each of the parameter's dimensions but those that number the tensors.
    """
    dims = spec.dims[len(spec.dims) - len(index) :]
    ranges = {
        letter: range(cfg.sizes[letter])[i]
        for letter, i in zip(dims, index, strict=True)
    }
    spans = spans_of(dims, spec)

    def cut(span, first):
        # Contiguous, because a mesh only ever splits the first letter of a span.
        inner = math.prod(cfg.sizes[letter] for letter in span[1:])
        outer = ranges[span[0]] if span else range(1)
        return slice(first + outer.start * inner, first + outer.stop * inner)

    x = handle[cut(spans[0], row), *(cut(span, 0) for span in spans[1:])]
    x = x if "".join(spans) == dims else x.swapaxes(-1, -2)
    return x.reshape([len(ranges[letter]) for letter in dims])


def to_file(x: np.ndarray, spec, cfg: ModelConfig) -> np.ndarray:
    """Returns one tensor's worth in the checkpoint's layout: `from_file` undone."""
    lead = len(spec.dims) - x.ndim
    shape = tensor_shape(spec, cfg, lead)
    if "".join(spans_of(spec.dims[lead:], spec)) != spec.dims[lead:]:
        x = x.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
    return np.ascontiguousarray(x.reshape(shape))


def check_tensors(tensors: Tensors, cfg: ModelConfig, heads, folder):
    """Raises ValueError naming every missing, unknown and mis-shaped tensor.

    A language head is needed where `heads` has "lm"; a value head never is.
    """
    optional = {"value", "record"} | (set() if "lm" in heads else {"head"})
    shapes, needed = {}, set()
    for path, spec, stored in parameters(cfg, HEADS):
        for index, place in stored.items():
            rows, *columns = tensor_shape(spec, cfg, len(index))
            # Of parameters that share a tensor the last one ends where the tensor does.
            shapes[place.name] = (place.row + rows, *columns)
            if path[0].key not in optional:
                needed.add(place.name)
    faults = []
    for name, shape in shapes.items():
        if name not in tensors.file_of:
            if name in needed:
                faults.append(f"missing {name}")
        elif tensors.shape(name) != shape:
            faults.append(f"{name} has shape {tensors.shape(name)}, expected {shape}")
    family = family_of(cfg)
    known = shapes.keys() | {family.names.get("head")}  # tied, and stored too
    extra = sorted(set(tensors.file_of) - known)
    faults += [f"unknown {x}" for x in extra if not re.search(family.unread, x)]
    refuse(folder, faults)


def check(folder: pathlib.Path, cfg: ModelConfig) -> None:
    """Raises ValueError where the weights' headers are not what its config.json says.

    cfg: of `read_config`.
    """
    check_tensors(Tensors(folder), cfg, ("lm",), folder)


def headers(folder: pathlib.Path) -> tuple[ModelConfig, bool]:
    """Returns (the ModelConfig that `load` returns, whether a value head is stored).

    It reads headers alone. Raises ValueError as `check` does.
    """
    cfg, tensors = read_config(folder), Tensors(folder)
    names = family_of(cfg).names
    check_tensors(tensors, cfg, ("value",), folder)
    dtype = tensors.dtype(names["embed"]).name
    return dataclasses.replace(cfg, dtype=dtype), names.get("value") in tensors.file_of


def refuse(folder, faults: list[str]):
    """Raises ValueError with the first of the faults, if there are any."""
    if faults:
        others = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"{folder}: " + "; ".join(faults[:8]) + others)


# ---- In --------------------------------------------------------------------------------


def load(path, *, mesh=None, dtype=None, heads=None, only=None):
    """Returns (ModelConfig, params) of a Hugging Face folder or hub repository.

    Of a vision tower's folder it is its VisionConfig; of a model that has one beside it,
    the tower is params["vision"].

    Every tensor is read slice by slice straight to where `mesh` places it (without a mesh:
    the default device), so a host never holds a whole copy. dtype: None keeps the stored
    one, and the config computes in it; heads: some of HEADS, None for what is stored; a
    value head that is not stored starts at zero. only: the parts to read, by their first
    key; None: all.

    Of an autoencoder's folder it is what its module reads.

    Raises ValueError for anything that is not a supported checkpoint, naming it.
    """
    folder = find(path)
    if module := autoencoder_of(folder):
        return load_autoencoder(folder, module, dtype)
    cfg = read_config(folder)
    tensors = Tensors(folder)
    if heads is None:
        names = family_of(cfg).names
        heads = ("lm", "vision")
        heads += tuple(
            x for x in ("value", "record") if names.get(x) in tensors.file_of
        )
    check_tensors(tensors, cfg, heads, folder)
    refuse_other_head(tensors, cfg, folder)
    mesh = mesh or sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    params, leaves = {}, []
    for keys, spec, stored in parameters(cfg, heads):
        if only is not None and keys[0].key not in only:
            continue
        node = params
        for key in keys[:-1]:
            node = node.setdefault(key.key, {})
        leaf = read_parameter(tensors, cfg, spec, stored, mesh, dtype)
        node[keys[-1].key] = leaf
        # What is on its way to a device the host holds, too: one parameter at a time.
        leaves.append((jax.block_until_ready(leaf), spec, stored))
    refuse_empty(folder, leaves)
    first = params["embed"] if "embed" in params else jax.tree.leaves(params)[0]
    return dataclasses.replace(cfg, dtype=first.dtype.name), params


def refuse_other_head(tensors: Tensors, cfg: ModelConfig, folder) -> None:
    """Raises ValueError where a tied model's head is stored, too, and is another matrix.

    Versions of transformers differ in whether they take it then or the embedding.
    """
    family, rows = family_of(cfg), 2**14
    names = family.names
    if names.get("head") not in tensors.file_of or not cfg.tied:
        return
    both = [names["head"], names["embed"]]
    same = tensors.shape(both[0]) == tensors.shape(both[1])
    for name in both:
        tensors.dtype(name)  # raises ValueError for one that is not read
    for row in range(0, cfg.vocab if same else 0, rows):  # a host holds no whole copy
        part = slice(row, min(row + rows, cfg.vocab))
        head, embed = (tensors.slice(name)[part] for name in both)
        same &= np.array_equal(head.astype(np.float32), embed.astype(np.float32))
    if not same:
        raise ValueError(
            f"{folder}: {both[0]} is not {both[1]}, and config.json ties them: set its "
            f"{family.fields['tied']} to false, or leave out {both[0]}"
        )


def refuse_empty(folder: pathlib.Path, leaves: list) -> None:
    """Raises ValueError for tensors that are not finite, or all zero where none is to be.

    leaves: of each parameter the array, its Spec, and its tensors by their index. One
    program looks at all of them: each more would take a tenth of a second to compile.
    """
    not_finite, all_zero = [], []
    leads = tuple(lead_of(stored) for _, _, stored in leaves)
    found = sharding.fetch(totals([leaf for leaf, _, _ in leaves], leads))
    for (_, spec, stored), sums in zip(leaves, found, strict=True):
        for index in np.ndindex(sums.shape):
            name = stored[index].name
            if not np.isfinite(sums[index]):
                not_finite.append(f"{name} is not finite")
            elif sums[index] == 0 and spec.init != "zeros":
                all_zero.append(f"{name} is all zero")
    refuse(folder, not_finite + all_zero)


def autoencoder_of(folder: pathlib.Path):
    """Returns the module of AUTOENCODERS that a folder is of, or None."""
    file = folder / "config.json"
    raw = read_json(file) if file.is_file() else {}
    kind = raw.get("_class_name")
    return AUTOENCODERS.get(kind) if isinstance(kind, str) else None


def read_autoencoder(folder: pathlib.Path, module):
    """Returns what the config.json of a folder of AUTOENCODERS says."""
    file = folder / "config.json"
    try:
        return module.read(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def load_autoencoder(folder: pathlib.Path, module, dtype=None):
    """Returns (its config, params) of a folder of AUTOENCODERS, on the default device.

    params: the tensors by name, cut at the dots. Raises ValueError as `load` does.
    """
    cfg = read_autoencoder(folder, module)
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


def read_parameter(
    tensors: Tensors, cfg: ModelConfig, spec, stored: dict, mesh, dtype
) -> jax.Array:
    """Returns one parameter on the mesh; zeros where none of its tensors is stored.

    stored: {index: Stored}, see `parameters`; dtype: None for the widest of its tensors'.
    """
    shape, lead = transformer.shape(spec, cfg), lead_of(stored)
    dtypes = {
        tensors.dtype(place.name)
        for place in stored.values()
        if place.name in tensors.file_of
    }
    missing = not dtypes
    dtype = jnp.dtype(
        dtype or functools.reduce(jnp.promote_types, dtypes or ["float32"])
    )

    @functools.cache  # a part that several devices hold is read once
    def values_at(index):
        ranges = [range(size)[i] for size, i in zip(shape, index, strict=True)]
        values = np.zeros([len(numbers) for numbers in ranges], dtype)
        if missing:
            return values
        for offset in np.ndindex(values.shape[:lead]):
            place = stored[
                tuple(r[i] for r, i in zip(ranges[:lead], offset, strict=True))
            ]
            values[offset] = from_file(
                tensors.slice(place.name), place.row, spec, cfg, index[lead:]
            )
        return values

    placed = sharding.named(spec.dims, shape, sharding.PARAM, mesh)
    return jax.make_array_from_callback(shape, placed, values_at)


@functools.partial(jax.jit, static_argnums=1)
def totals(leaves: list, leads: tuple[int, ...]) -> list:
    """Returns of each parameter the sum of magnitudes in each of its tensors, f32.

    leads: how many of its leading dimensions number its tensors. Zero and not finite tell
    on a sum; a maximum may drop a NaN on its way.
    """
    return [
        jnp.abs(x).sum(tuple(range(lead, x.ndim)), dtype=jnp.float32)
        for x, lead in zip(leaves, leads, strict=True)
    ]


# ---- Out -------------------------------------------------------------------------------


def save(path, cfg: ModelConfig, params, *, like, trained: bool = False) -> None:
    """Writes `params` as a Hugging Face folder that loads where `like` did.

    Names, dtypes, division into files and every other file (config, tokenizer, remote
    code) are those of `like`, and config.json says what `adapt` has changed; of weights that
    were `trained` the model card says so first. A tensor that
    `params` lacks is taken from there; a value head that it lacks is added. Files are
    written one at a time into a temporary folder which then takes the name `path`, so a
    crash never leaves half a checkpoint. Every process must call it; process 0 writes.

    Raises ValueError when `like` is another model, and as `check_target` does.
    """
    target, origin = check_target(path, like)
    tensors = Tensors(origin)
    check_tensors(tensors, cfg, (), origin)
    sources = sources_of(cfg, params, tensors)
    names_in = {file: [] for file in tensors.handle_of}
    for name, file in tensors.file_of.items():
        names_in[file].append(name)
    # The last file takes the tensors that the original lacks: a value head.
    last_file = list(names_in)[-1]
    added = [name for name in sources if name not in tensors.file_of]
    names_in[last_file] += added

    writing = jax.process_index() == 0
    partial = target.with_name(f".{target.name}.partial")
    sizes = {}  # bytes of each tensor
    with written(partial if writing else None, tensors):
        if writing:
            begin_export(partial, origin, cfg)
            if trained:
                begin_card(partial / "README.md")
        for file, names in names_in.items():
            sizes |= write_shard(
                partial / file if writing else None, names, sources, tensors, cfg
            )
        if writing:
            for file in names_in:  # safetensors' are for the owner alone
                shutil.copymode(partial / "config.json", partial / file)
            extend_index(partial, last_file, {name: sizes[name] for name in added})
            swap(partial, target)


def check_target(path, like) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the folders of an export and of its original, without symbolic links.

    Raises ValueError where the export would write over the original, or over files that
    the original's are links to, or over something else than a checkpoint.
    """
    target, origin = pathlib.Path(path).resolve(), find(like).resolve()
    homes = {origin} | {item.resolve().parent for item in origin.iterdir()}
    if origin in target.parents or any(
        target == home or target in home.parents for home in homes
    ):
        raise ValueError(f"cannot export to {path}: the original {like} is there")
    if not replaceable(target):
        raise ValueError(f"cannot export to {path}: it is there and not an export")
    return target, origin


@contextlib.contextmanager
def written(partial: pathlib.Path | None, tensors: Tensors):
    """Leaves no half-written folder behind where what is inside fails.

    partial: None in processes that write nothing. Raises exits.CannotGoOn where the disk
    is full.
    """
    if partial is None:
        yield
        return
    wanted = sum(map(tensors.size, tensors.file_of))
    try:
        with exits.room(partial.parent, wanted):
            yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replaceable(target: pathlib.Path) -> bool:
    """Returns whether an export may take this name: it is free, empty or a checkpoint's."""
    taken = [target] if target.is_file() else list(target.glob("*"))
    return not taken or any((target / name).is_file() for name in (SINGLE, INDEX))


def sources_of(cfg: ModelConfig, params, tensors: Tensors) -> dict[str, list[tuple]]:
    """Returns {tensor name: [(leaf, Spec, index), ...]}: which parameters make a tensor.

    Those that share one are in the order of its rows. What `params` lacks has no entry.
    """
    sources = collections.defaultdict(list)
    for keys, spec, stored in parameters(cfg, HEADS):
        if keys[0].key in params:
            leaf = functools.reduce(lambda node, key: node[key.key], keys, params)
            for index, place in stored.items():
                sources[place.name].append((leaf, spec, index))
    names = family_of(cfg).names
    if cfg.tied and names["head"] in tensors.file_of:  # tied, and stored too
        sources[names["head"]] = sources[names["embed"]]
    return dict(sources)


def begin_export(folder: pathlib.Path, origin: pathlib.Path, cfg: ModelConfig) -> None:
    """Makes the folder anew with all of the original but weights, and our config.json."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_others(origin, folder)
    if changed := changes(cfg, read_config(origin)):
        raw = read_json(origin / "config.json") | changed
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def begin_card(file: pathlib.Path) -> None:
    """Says in a model card, where there is one, that it is about other weights."""
    text = file.read_bytes() if file.exists() else TRAINED
    if TRAINED not in text:
        head = re.match(rb"---\n.*?\n---\n", text, re.DOTALL)  # for the hub's search
        end = head.end() if head else 0
        file.write_bytes(text[:end] + TRAINED + text[end:])


def write_shard(
    file: pathlib.Path | None,
    names: list[str],
    sources: dict[str, list[tuple]],
    tensors: Tensors,
    cfg: ModelConfig,
) -> dict[str, int]:
    """Writes the named tensors into one file; returns the bytes of each.

    file: None in processes that only help to fetch what is spread over them all.
    """
    shard, sizes = {}, {}
    for name in names:
        x = tensor_of(name, sources, tensors, cfg)
        sizes[name] = x.nbytes
        if file is not None:
            shard[name] = x
    if file is not None:
        safetensors.numpy.save_file(shard, file, metadata={"format": "pt"})
    return sizes


def tensor_of(name: str, sources, tensors: Tensors, cfg: ModelConfig) -> np.ndarray:
    """Returns a tensor of the export on the host, in every process.

    It has the original's dtype, and one that the original lacks its parameter's.
    """
    if name not in sources:
        return tensors.slice(name)[:]
    x = np.concatenate(
        [
            to_file(
                np.asarray(sharding.fetch(unstacked(leaf, index) if index else leaf)),
                spec,
                cfg,
            )
            for leaf, spec, index in sources[name]
        ]
    )
    return x.astype(tensors.dtype(name)) if name in tensors.file_of else x


@jax.jit
def unstacked(leaf, index):
    """Returns one tensor's worth of a parameter."""
    return leaf[index]


def extend_index(folder: pathlib.Path, file: str, added: dict[str, int]) -> None:
    """Adds tensors of `file` (name: bytes) to the folder's index, where it has one."""
    if not added or not (folder / INDEX).is_file():
        return
    index = read_json(folder / INDEX)
    index["weight_map"] |= dict.fromkeys(added, file)
    if size := (index.get("metadata") or {}).get("total_size"):
        index["metadata"]["total_size"] = size + sum(added.values())
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def swap(partial: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a finished folder its name; an older export there goes only then."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)  # also one that a killed swap has left


def copy_others(origin: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what is not weights: tokenizer, configs, remote code, model card.

    Those of a tokenizer of images, a folder inside, are copied too: no run changes them.

    A link that leads out of the folder is not followed, as what it leads to may be no part
    of the model. Two are: a hub snapshot's into its repository's blobs, and config.json,
    which was read as the model's.
    """
    homes = [origin]
    if origin.parent.name == "snapshots":
        homes.append(origin.parents[1] / "blobs")
    for item in origin.rglob("*"):
        name = item.relative_to(origin)
        hidden = any(folder.startswith(".") for folder in name.parts[:-1])
        weights = any(map(item.match, WEIGHTS)) and not (
            item.parent != origin and autoencoder_of(item.parent)
        )
        if not item.is_file() or hidden or weights:
            continue
        source = item.resolve()
        inside = any(home in source.parents for home in homes)
        if not inside and name != pathlib.Path("config.json"):
            exits.warn(
                f"{item} leads out of its folder, to {source}: it is not exported"
            )
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(item, target / name)
