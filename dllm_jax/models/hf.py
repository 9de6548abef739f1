"""Hugging Face folders in and out: a family's name table, read in two directions.

Linear weights are stored there as (out, in) and here input-first with heads apart, so a
tensor is reshaped and transposed on its way. There each layer (and often each expert) has
a tensor of its own; here these are one parameter, stacked: its leading dimensions number
the tensors, and an index over these says which tensor.
"""

import collections
import dataclasses
import functools
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dllm_jax import sharding
from dllm_jax.models import export, repository, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.families import family_of, read_config
from dllm_jax.models.repository import Tensors, refuse
from dllm_jax.models.vision import autoencoders, siglip

HEADS = ("lm", "value", "record", "vision")  # all that a checkpoint may have


# ---- Where a parameter is stored --------------------------------------------------------


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
    family = family_of(cfg)
    known = shapes.keys() | {family.names.get("head")}  # tied, and stored too
    extra = sorted(set(tensors.file_of) - known)
    faults = []
    for name, shape in shapes.items():
        if name not in tensors.file_of:
            if name in needed:
                # One is looked for: large models have tens of thousands.
                other = "" if faults else elsewhere(name, extra)
                faults.append(f"missing {name}{other}")
        elif tensors.shape(name) != shape:
            faults.append(f"{name} has shape {tensors.shape(name)}, expected {shape}")
    faults += [f"unknown {x}" for x in extra if not re.search(family.unread, x)]
    refuse(folder, faults)


def elsewhere(name: str, others: list[str]) -> str:
    """Returns what to say of a tensor that is stored with more before its name, or less."""
    for other in others:
        if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}"):
            return f", but has {other} (all names must be those of the released model)"
    return ""


def check(folder: Path, cfg: ModelConfig, heads=("lm",)) -> None:
    """Raises ValueError where the weights' headers are not what its config.json says.

    cfg: of `read_config`. heads: see `check_tensors`.
    """
    check_tensors(Tensors(folder), cfg, heads, folder)


def headers(folder: Path) -> tuple[ModelConfig, bool]:
    """Returns (the ModelConfig that `load` returns, whether a value head is stored).

    It reads headers alone. Raises ValueError as `check` does.
    """
    cfg, tensors = read_config(folder), Tensors(folder)
    check_tensors(tensors, cfg, ("value",), folder)
    dtype = tensors.dtype(family_of(cfg).names["embed"]).name
    return dataclasses.replace(cfg, dtype=dtype), holds(tensors, cfg, "value")


def holds(tensors: Tensors, cfg: ModelConfig, head: str) -> bool:
    """Returns whether a checkpoint stores one of HEADS."""
    return family_of(cfg).names.get(head) in tensors.file_of


# ---- In --------------------------------------------------------------------------------


def load(path, *, mesh=None, dtype=None, heads=None, only=None):
    """Returns (ModelConfig, params) of a Hugging Face folder or hub repository.

    Of a vision tower's folder it is its VisionConfig; of a model that has one beside it,
    the tower is params["vision"].

    Every tensor is read slice by slice straight to where `mesh` places it (without a mesh:
    the default device), so a host never holds a whole copy. dtype: None keeps the stored
    one, and the config computes in it; another is that of all but what computes in f32
    (`transformer.dtype_of`). heads: some of HEADS, None for what is stored; a
    value head that is not stored starts at zero. only: the parts to read, by their first
    key; None: all.

    Of an autoencoder's folder it is what its module reads.

    Raises ValueError for anything that is not a supported checkpoint, naming it.
    """
    folder = repository.find(path)
    if module := autoencoders.module_of(folder):
        return autoencoders.load(folder, module, dtype)
    cfg = read_config(folder)
    tensors = Tensors(folder)
    if heads is None:
        heads = ("lm", "vision")
        heads += tuple(x for x in ("value", "record") if holds(tensors, cfg, x))
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
        kind = dtype and transformer.dtype_of(keys, dtype)
        leaf = read_parameter(tensors, cfg, spec, stored, mesh, kind)
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


def refuse_empty(folder: Path, leaves: list) -> None:
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

    Raises ValueError when `like` is another model, and as `export.check_target` does.
    """
    target, origin = export.check_target(path, like)
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
    sizes = {}  # of each tensor, what it adds to the sums of an index
    wanted = sum(map(tensors.size, tensors.file_of))
    with export.whole(target, wanted, writes=writing) as partial:
        if writing:
            export.begin_export(partial, origin, cfg)
            if trained:
                export.begin_card(partial / "README.md")
        for file, names in names_in.items():
            sizes |= write_shard(
                partial / file if writing else None, names, sources, tensors, cfg
            )
        if writing:
            for file in names_in:  # safetensors' are for the owner alone
                shutil.copymode(partial / "config.json", partial / file)
            export.extend_index(
                partial, last_file, {name: sizes[name] for name in added}
            )


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


def write_shard(
    file: Path | None,
    names: list[str],
    sources: dict[str, list[tuple]],
    tensors: Tensors,
    cfg: ModelConfig,
) -> dict[str, dict[str, int]]:
    """Writes the named tensors into one file; returns what each adds to an index's sums.

    file: None in processes that only help to fetch what is spread over them all.
    """
    shard, sizes = {}, {}
    for name in names:
        x = tensor_of(name, sources, tensors, cfg)
        sizes[name] = {"total_size": x.nbytes, "total_parameters": x.size}
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
