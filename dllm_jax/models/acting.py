"""The weights that sample: a copy of those that learn, laid out for sampling.

Training splits every weight over `fsdp` too and gathers it for each use, which thousands
of slots share. A forward of the sampler has a few for each row: to gather the weights
would take far longer than to use them. So once a step they are copied, in the dtype of
computation but for routers, to where sampling wants them:

*   whole on every device, but for what `model` splits (the table sharding.ACT). Where
    that is too large, on a *folded* mesh: the same devices in the same order, of which
    neighbours along `fsdp` stand along `model`, and split heads and inner widths.
*   on a CPU layer by layer: a tuple of each layer's own arrays stands for a stack of
    them. There a scan copies a layer's weights out of the stack before it multiplies by
    them. A TPU reads them where they are, and so does a GPU by `denoise.ON_GPU`.
    The head is Tiled there, or Transposed (if tied it is the embedding then), and so is what
    layers multiply with where `few` says so.
*   on a GPU the gate and up projections as one matrix, their columns by turns, so that
    `model` splits both alike, and so are those to queries, keys and values, by key heads:
    a layer has three products less, and the others are as wide as two and three. So it is on
    a CPU where `few` says so.
*   with `sampler.int8` those that layers multiply with as Int8, half the bytes. On
    a GPU layer by layer then, too: no product reads a part of a stack and converts it.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from dllm_jax.models import int8, lora, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.transformer import Params
from dllm_jax.models.vision import soft
from dllm_jax.pallas_kernels import cpu_products
from dllm_jax.pallas_kernels.cpu_products import Tiled, Transposed
from dllm_jax.sharding import ACT, AXES, MODEL, named, pspec

# Platforms on which each layer's weights are arrays of their own.
APART = ("cpu",)
APART_INT8 = ("cpu", "gpu")
JOINED_ON = ("gpu",)  # on which several are one
HEAVY = 2**26  # bytes of a tower that no CPU's cache holds
FEW = 32  # slots, see `few`
SLAB, ALIGNED = 2**25, 64  # bytes: of a Slab, and of what XLA reads where it lies
# What is one there, and what of.
JOINED = {"w_gate_up": ("w_gate", "w_up"), "wqkv": ("wq", "wk", "wv")}
JOINED |= {"bqkv": ("bq", "bk", "bv")}


# ---- Where they lie ------------------------------------------------------------------


def folded(mesh: Mesh, count: int) -> Mesh:
    """Returns the mesh with `count` neighbours along `fsdp` standing along `model`.

    The devices keep their order, so that a program moves arrays between the two meshes.
    """
    data, fsdp, model = mesh.devices.shape
    grid = mesh.devices.reshape(data, fsdp // count, count * model)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def folds(model: ModelConfig, mesh: Mesh) -> list[int]:
    """Returns the counts by which the mesh can be folded for a model, 1 first.

    Beyond 1, `model` then splits every weight that it should, but perhaps the vocabulary.
    """
    fsdp = mesh.shape["fsdp"]
    counts = [count for count in range(2, fsdp + 1) if fsdp % count == 0]
    return [1, *(c for c in counts if splits_all(model, folded(mesh, c)))]


def splits_all(model: ModelConfig, mesh: Mesh) -> bool:
    """Returns whether the mesh's `model` divides heads, inner widths and experts."""
    letters = MODEL.keys() - {"V"}
    return all(
        "model" in pspec(spec.dims, transformer.shape(spec, model), ACT, mesh)
        for spec in jax.tree.leaves(specs(model))
        if letters & set(spec.dims)
    )


def specs(model: ModelConfig) -> Params:
    """Returns the Specs of all that samples, stacked: with adapters, beside their weights."""
    whole = transformer.specs(dataclasses.replace(model, lora=None))
    tree = lora.join(whole, transformer.specs(model), model.lora)
    # Of images it reads rows that are made of these.
    return {name: spec for name, spec in tree.items() if name not in soft.PARAMETERS}


def multiplied(tree: Params, of) -> Params:
    """Returns a tower's Specs with of(Spec) for what layers multiply with: their w..

    Not for what is dispatched to experts, nor for adapters.
    """

    def visit(name, spec):
        if isinstance(spec, lora.Adapted):
            return spec.replace(w=visit(name, spec.w))
        return of(spec) if name.startswith("w") else spec

    stacks = {name: tree[name] for name in ("first", "layers") if name in tree}
    return tree | {
        stack: {name: visit(name, spec) for name, spec in node.items()}
        for stack, node in stacks.items()
    }


def turned(spec, model: ModelConfig, mesh: Mesh):
    """Returns a Spec of a stack, or of the head, as Tiled or Transposed."""
    stack = "" if spec.dims == "DV" else spec.dims[0]
    dims = spec.dims.removeprefix(stack)
    inner = lora.contracted(dims)
    others = dims.removeprefix(inner)
    sizes = [tuple(model.sizes[x] for x in letters) for letters in (inner, others)]
    whole = stack or not model.drawn  # of some ids alone the head's columns are cut
    if whole and cpu_products.lies_tiled(
        *map(math.prod, sizes), model.dtype, mesh.size
    ):
        return Tiled(spec, len(inner), sizes[1])
    dims = stack + others + inner
    return Transposed(dataclasses.replace(spec, dims=dims), len(inner))


def heavy(model: ModelConfig) -> bool:
    """Returns whether a forward's time on a CPU is that of reading layers' weights."""
    layers = jax.tree.leaves(transformer.specs(model)["layers"])
    numbers = sum(math.prod(transformer.shape(spec, model)) for spec in layers)
    return numbers * jnp.dtype(model.dtype).itemsize >= HEAVY


def few(model: ModelConfig, slots: float) -> bool:
    """Returns whether a CPU has what layers multiply with Tiled or Transposed: for few slots.

    slots: how many of present blocks a forward has on a device. On two cores that read 35 GB/s
    1 row of 30M is answered 1.37 times as fast then, 2 rows 1.24, 4 rows 1.08, 8 rows 1.03 and
    32 rows 0.98 times; of 135M 1 row 1.28, 4 rows 1.07, 8 rows 1.03, 12 rows 1.00, 32 rows 0.93.
    """
    return slots <= FEW and heavy(model)


def joined(tree: Params, names, of) -> Params:
    """Returns a tower with of(its parts) under each of `names`, of JOINED, that it has."""

    def join(layer):
        layer = dict(layer)
        for name in names:
            if JOINED[name][0] in layer:
                layer[name] = of(tuple(layer.pop(part) for part in JOINED[name]))
        return layer

    stacks = [name for name in ("first", "layers") if name in tree]
    return tree | {name: join(tree[name]) for name in stacks}


def joined_spec(parts) -> transformer.Spec:
    """Returns the Spec of gate and up, or of what makes queries, keys and values, as one."""
    if len(parts) == 2:
        return dataclasses.replace(parts[0], dims=parts[0].dims + "2")
    return dataclasses.replace(parts[1], dims=parts[1].dims.replace("K", "KJ"))


def as_one(parts, number=None):
    """Returns the array that `joined_spec` describes; number: of a layer, None: the stack.

    Of an embedding alone the head's.
    """
    if tied(parts):
        return parts[0].T
    if number is not None:
        parts = [x[number] for x in parts]
    if len(parts) == 2:
        return jnp.stack(parts, axis=-1)
    q_NH, *rest = parts
    K, H = rest[0].shape[-2:]
    q_KGH = q_NH.reshape(*q_NH.shape[:-2], K, -1, H)
    return jnp.concatenate([q_KGH, *(x_KH[..., None, :] for x_KH in rest)], axis=-2)


def abstract(
    model: ModelConfig, mesh: Mesh, *, in_int8: bool = False, slots: float = math.inf
) -> Params:
    """Returns the weights that sample on a mesh, as shapes with shardings.

    in_int8: sampler.int8; slots: of a device's forward, see `few`. Raises ValueError
    for a model that cannot be in int8.
    """

    def without_first(spec):
        return dataclasses.replace(spec, dims=spec.dims[1:])

    tree = specs(model)
    if model.soft:  # made anew for each table of images
        tree["soft"] = transformer.Spec("MD")
    if in_int8:
        int8.check(model)
        tree = multiplied(tree, int8.spec)
    platform = mesh.devices.flat[0].platform
    few_slots = platform in APART and few(model, slots) and not in_int8
    # Not where an adapter belongs to one of them: beside adapters the weights that learn
    # serve as they are.
    if (few_slots or platform in JOINED_ON) and not (in_int8 or model.lora):
        by_head = model.kv_heads % mesh.shape["model"] == 0
        names = JOINED if by_head else ("w_gate_up",)
        tree = joined(tree, names, joined_spec)
    turn = functools.partial(turned, model=model, mesh=mesh)
    if platform in APART:
        tree["head"] = turn(transformer.Spec("DV"))
    if few_slots:
        tree = multiplied(tree, turn)
    if platform in (APART_INT8 if in_int8 else APART):
        for name, letter in (("first", "Y"), ("layers", "L")):
            if name in tree:
                layer = jax.tree.map(without_first, tree[name])
                tree[name] = (layer,) * model.sizes[letter]

    def place(path, spec):
        return struct(spec, model, mesh, transformer.dtype_of(path, model.dtype))

    made = jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_other)
    if model.tied and isinstance(made.get("head"), Transposed):
        # The very array, as `walked` has it.
        made["head"] = made["head"].replace(w=made["embed"])
    return made


def is_other(x) -> bool:
    """Returns whether x is a Spec's that is not laid out as this says: one leaf of a tree."""
    return int8.is_int8(x) or isinstance(x, Tiled)


def struct(spec, model: ModelConfig, mesh: Mesh, dtype):
    """Returns the shape and place of a weight of some Spec, or of what it lies as."""
    of = functools.partial(struct, model=model, mesh=mesh)
    if isinstance(spec, int8.Int8):
        return int8.Int8(
            of(spec.w, dtype=jnp.dtype("int8")), of(spec.scale, dtype=dtype)
        )
    if isinstance(spec, Tiled):
        lay = functools.partial(cpu_products.in_tiles, contracted=spec.contracted)
        shape = jax.eval_shape(lay, of(spec.w, dtype=dtype)).shape
        place = named("", (), ACT, mesh)  # whole, on its one device
        return spec.replace(w=jax.ShapeDtypeStruct(shape, dtype, sharding=place))
    shape = transformer.shape(spec, model)
    place = named(spec.dims, shape, ACT, mesh)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


# ---- How they get there --------------------------------------------------------------


def laid_out(params: Params, like: Params) -> Params:
    """Returns weights as `like`, of `abstract`, says; params: stacked, with all of them.

    What is there already, in the same dtype, is not copied: nobody may donate it meanwhile.
    """
    return walked(params, like, copying(like))


def taken(params: Params, like: Params) -> Params:
    """Does what `laid_out` does, and frees each of `params` when it is copied."""
    copy = copying(like)

    def moved(x, number, place):
        made, parts = copy(x, number, place), jax.tree.leaves(x)
        if tied(x) or made is x:
            return made
        if number is None or number + 1 == len(parts[0]):
            for old in parts:
                old.delete()
        return made

    return walked(params, like, moved)


def fresh(params: Params, like: Params) -> Params:
    """Returns the shapes of what `laid_out` copies, None elsewhere; params: shapes too."""

    def shape(x, number, place):
        return None if is_there(x, number, place) else place

    return walked(params, like, shape)


def walked(params: Params, like: Params, get) -> Params:
    """Returns the tree `like` with get(x, number, place) for each of its leaves, `place`.

    But for the rows of images, which are no weights.

    x: that of `params`, or a tuple of those that are to be one; number: which of the stack x
    is meant, None for all of x. An Int8 is one leaf, and so are Transposed and Tiled.
    """
    out, towers = {}, [like[name] for name in ("first", "layers") if name in like]
    towers = [x[0] if isinstance(x, tuple) else x for x in towers]
    names = [name for name in JOINED if any(name in tower for tower in towers)]
    params = joined(params, names, tuple)
    head = like["head"] if "head" not in params and "head" in like else None
    if isinstance(head, Tiled):
        out["head"] = get((params["embed"],), None, head)
    for name, places in like.items():
        # Whoever looks at images adds `soft`.
        if name == "soft" or (head is not None and name == "head"):
            continue
        if isinstance(places, tuple):
            stack, tree = jax.tree.flatten(params[name], is_leaf=several)
            columns = zip(*map(tree.flatten_up_to, places), strict=True)
            columns = [
                [get(x, number, place) for number, place in enumerate(column)]
                for x, column in zip(stack, columns, strict=True)
            ]
            out[name] = tuple(map(tree.unflatten, zip(*columns, strict=True)))
        else:
            out[name] = jax.tree.map(
                lambda x, place: get(x, None, place),
                params[name],
                places,
                is_leaf=several,
            )
    if isinstance(head, Transposed):
        out["head"] = head.replace(w=out["embed"])
    return out


def several(x) -> bool:
    """Returns whether x are weights that are to be one."""
    return isinstance(x, tuple)


def tied(x) -> bool:
    """Returns whether x is an embedding of which a head is to be made."""
    return several(x) and len(x) == 1


def is_laid(x) -> bool:
    """Returns whether x is a weight laid out for products on a CPU."""
    return isinstance(x, (Transposed, Tiled))


def is_there(x, number, place) -> bool:
    """Returns whether x, all of it, is as `place` says."""
    if several(x) or int8.is_int8(place) or is_laid(place):
        return False
    return number is None and (x.dtype, x.sharding) == (place.dtype, place.sharding)


def copied(x, number, place):
    """Returns x, x[number] or several as one, as `place` says; x where that is so.

    Layer by layer, so that no device holds more than one of them twice; but of several the
    stacks are copied whole.
    """
    if is_there(x, number, place):
        return x
    if int8.is_int8(place):
        return int8.quantizer(place)(x, number)
    part, lies, to = jnp.asarray if number is None else operator.getitem, (), place
    if several(x):
        part = as_one
    if is_laid(place):
        lies, to = (type(place), place.contracted), place.w
    copy = copier(to.dtype, to.sharding, part, *lies)
    made = copy(x) if number is None else copy(x, number)
    return made if to is place else place.replace(w=made)


def copying(like: Params):
    """Returns what copies weights as `like` says: for few slots into a Slab."""
    few_slots = any(map(is_laid, jax.tree.leaves(like["layers"], is_leaf=is_laid)))
    return Slab().copied if few_slots else copied


class Slab:
    """Memory for weights that a lone CPU reads whole for few slots, in pages of 2 MB.

    NumPy asks the system for such pages, of which a core remembers all addresses, where
    something takes 4 MB or more; XLA never does. On two cores one row of 30M is answered 1.07
    times as fast so, of 135M 1.06 times.
    """

    def __init__(self):
        self.left = np.empty(0, np.uint8)

    def copied(self, x, number, place):
        """Returns what `copied` does, in here if it is laid out for that.

        For a moment it is there twice, beside x.
        """
        made = copied(x, number, place)
        return made.replace(w=self.placed(made.w)) if is_laid(place) else made

    def placed(self, x):
        """Returns a copy of x in here, or x where it is not on a lone device."""
        if len(x.sharding.device_set) > 1:
            return x
        size = -(-x.nbytes // ALIGNED) * ALIGNED
        if size > len(self.left):
            slab = np.empty(max(size, SLAB) + ALIGNED, np.uint8)
            self.left = slab[-slab.ctypes.data % ALIGNED :]
        own, self.left = self.left[: x.nbytes], self.left[size:]
        own = own.view(x.dtype).reshape(x.shape)
        own[...] = x
        return jax.device_put(own, x.sharding, may_alias=True)


@functools.cache
def copier(dtype, place, part, kind=None, contracted=0):
    """Returns a program that copies part(x, ...), such as one array of a stack.

    kind: Transposed or Tiled, which the copy is to be of. What else `part` takes, a layer's
    number, is data.
    """
    lay = {Transposed: cpu_products.transposed, Tiled: cpu_products.in_tiles}

    def copy(x, *number):
        made = part(x, *number).astype(dtype)
        return lay[kind](made, contracted) if kind else made

    return jax.jit(copy, out_shardings=place)
