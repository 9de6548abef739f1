"""The weights that sample: a copy of those that learn, laid out for sampling.

Training splits every weight over `fsdp` too and gathers it for each use, which thousands
of slots share. A forward of the sampler has a few for each row: to gather the weights
would take far longer than to use them. So once a step they are copied, in the dtype of
computation, to where sampling wants them:

*   whole on every device, but for what `model` splits (the table sharding.ACT). Where
    that is too large, on a *folded* mesh: the same devices in the same order, of which
    neighbours along `fsdp` stand along `model`, and split heads and inner widths.
*   on a CPU layer by layer: a tuple of each layer's own arrays stands for a stack of
    them. There a scan copies a layer's weights out of the stack before it multiplies by
    them. A TPU reads them where they are, and so does a GPU by `forwards.advance_on_gpu`.
    The head is Transposed there (a tied one: it is the embedding), and what layers multiply
    with is where `transposes` says so.
*   on a GPU the gate and up projections as one matrix, their columns by turns, so that
    `model` splits both alike: a layer is one product less, as wide as two.
*   with `sampler.int8` those that layers multiply with as Int8, half the bytes. On
    a GPU layer by layer then, too: no product reads a part of a stack and converts it.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from dllm_jax.models import int8, lora, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.transformer import Params
from dllm_jax.models.vision import soft
from dllm_jax.pallas_kernels.transposed import Transposed, transpose
from dllm_jax.sharding import ACT, AXES, MODEL, named, pspec

# Platforms on which each layer's weights are arrays of their own.
APART = ("cpu",)
APART_INT8 = ("cpu", "gpu")
PAIRED_ON = ("gpu",)  # on which gate and up are one
HEAVY = 2**26  # bytes of a tower that no CPU's cache holds
FEW = 32  # slots, see `transposes`
PAIRED = -1  # no layer's number
WHOLE = {None: jnp.asarray, PAIRED: functools.partial(jnp.stack, axis=-1)}


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


def transposed(spec, stacked: bool) -> Transposed:
    """Returns the Transposed of a Spec."""
    layer, dims = spec.dims[:stacked], spec.dims[stacked:]
    inner = len(lora.contracted(dims))
    dims = layer + dims[inner:] + dims[:inner]
    return Transposed(dataclasses.replace(spec, dims=dims), inner)


def heavy(model: ModelConfig) -> bool:
    """Returns whether a forward's time on a CPU is that of reading layers' weights."""
    layers = jax.tree.leaves(transformer.specs(model)["layers"])
    numbers = sum(math.prod(transformer.shape(spec, model)) for spec in layers)
    return numbers * jnp.dtype(model.dtype).itemsize >= HEAVY


def transposes(model: ModelConfig, slots: float) -> bool:
    """Returns whether a CPU has what layers multiply with Transposed.

    slots: how many of present blocks a forward has on a device. On two cores one row of 135M
    or of 30M is answered 1.1 times as fast then, 8 rows of 30M as fast, 16 rows 0.94 times, and
    1 or 8 rows of a model that the cache holds 0.95 times.
    """
    return slots <= FEW and heavy(model)


def paired(tree: Params, of) -> Params:
    """Returns a tower with w_gate_up = of((gate, up)) in the place of the two, if it has."""

    def pair(layer):
        layer = dict(layer)
        if "w_gate" in layer:
            layer["w_gate_up"] = of((layer.pop("w_gate"), layer.pop("w_up")))
        return layer

    stacks = [name for name in ("first", "layers") if name in tree]
    return tree | {name: pair(tree[name]) for name in stacks}


def abstract(
    model: ModelConfig, mesh: Mesh, *, in_int8: bool = False, slots: float = math.inf
) -> Params:
    """Returns the weights that sample on a mesh, as shapes with shardings.

    in_int8: sampler.int8; slots: of a device's forward, see `transposes`. Raises ValueError
    for a model that cannot be in int8.
    """

    def struct(spec, dtype=model.dtype):
        if int8.is_int8(spec):
            return int8.Int8(struct(spec.w, jnp.int8), struct(spec.scale))
        shape = transformer.shape(spec, model)
        place = named(spec.dims, shape, ACT, mesh)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    def without_first(spec):
        return dataclasses.replace(spec, dims=spec.dims[1:])

    tree = specs(model)
    if model.soft:  # made anew for each table of images
        tree["soft"] = transformer.Spec("MD")
    if in_int8:
        int8.check(model)
        tree = multiplied(tree, int8.spec)
    platform = mesh.devices.flat[0].platform
    # Not where an adapter belongs to one of the two: beside adapters the weights that learn
    # serve as they are.
    if platform in PAIRED_ON and not (in_int8 or model.lora):
        tree = paired(
            tree, lambda two: dataclasses.replace(two[0], dims=two[0].dims + "2")
        )
    if platform in APART:
        tree["head"] = transposed(transformer.Spec("DV"), stacked=False)
        if transposes(model, slots) and not in_int8:
            tree = multiplied(tree, functools.partial(transposed, stacked=True))
    if platform in (APART_INT8 if in_int8 else APART):
        for name, letter in (("first", "Y"), ("layers", "L")):
            if name in tree:
                layer = jax.tree.map(without_first, tree[name])
                tree[name] = (layer,) * model.sizes[letter]
    return jax.tree.map(struct, tree, is_leaf=int8.is_int8)


# ---- How they get there --------------------------------------------------------------


def laid_out(params: Params, like: Params) -> Params:
    """Returns weights as `like`, of `abstract`, says; params: stacked, with all of them.

    What is there already, in the same dtype, is not copied: nobody may donate it meanwhile.
    """
    return walked(params, like, copied)


def taken(params: Params, like: Params) -> Params:
    """Does what `laid_out` does, and frees each of `params` when it is copied."""

    def moved(x, number, place):
        made = copied(x, number, place)
        if made is not x and (number in (None, PAIRED) or number + 1 == len(x)):
            for old in jax.tree.leaves(x):
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

    x: that of `params`; number: which of the stack x is meant, None for all of x, or PAIRED
    for the two of x as one. An Int8 is one leaf, and so is a Transposed.
    """
    out = {}
    if any(isinstance(x, dict) and "w_gate_up" in x for x in like.values()):
        params = paired(params, tuple)
    tied = "head" in like and "head" not in params
    for name, places in like.items():
        # Whoever looks at images adds `soft`.
        if name == "soft" or (tied and name == "head"):
            continue
        if isinstance(places, tuple):
            stack, tree = jax.tree.flatten(params[name])
            columns = zip(*map(tree.flatten_up_to, places), strict=True)
            columns = [
                [get(x, number, place) for number, place in enumerate(column)]
                for x, column in zip(stack, columns, strict=True)
            ]
            out[name] = tuple(map(tree.unflatten, zip(*columns, strict=True)))
        else:
            out[name] = jax.tree.map(
                lambda x, place: get(x, PAIRED if is_pair(x) else None, place),
                params[name],
                places,
                is_leaf=is_pair,
            )
    if tied:
        out["head"] = like["head"].replace(w=out["embed"])
    return out


def is_pair(x) -> bool:
    """Returns whether x is the two that `paired` put together."""
    return isinstance(x, tuple)


def is_there(x, number, place) -> bool:
    """Returns whether x, all of it, is as `place` says."""
    if isinstance(place, (int8.Int8, Transposed)):
        return False
    return number is None and (x.dtype, x.sharding) == (place.dtype, place.sharding)


def copied(x, number, place):
    """Returns x, x[number] or a pair stacked, as `place` says; x where that is so.

    Layer by layer, so that no device holds more than one of them twice; but a pair's stacks
    are copied whole.
    """
    if is_there(x, number, place):
        return x
    if int8.is_int8(place):
        return int8.quantizer(place)(x, number)
    to, inner = (place.w, place.inner) if isinstance(place, Transposed) else (place, 0)
    copy = copier(to.dtype, to.sharding, WHOLE.get(number, operator.getitem), inner)
    made = copy(x) if number in WHOLE else copy(x, number)
    return place.replace(w=made) if inner else made


@functools.cache
def copier(dtype, place, part, inner):
    """Returns a program that copies part(x, ...), such as one array of a stack, turned.

    What else `part` takes, a layer's number, is data.
    """

    def copy(x, *number):
        return transpose(part(x, *number), inner).astype(dtype)

    return jax.jit(copy, out_shardings=place)
