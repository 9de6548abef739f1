"""LoRA: a frozen weight W acts as W + alpha / rank A B, and only A and B are trained.

arXiv 2106.09685, section 4.1. A starts at random and B at zero, so that training starts
from W. Sampling and training use W, A and B as they are (layer.project); only an
export adds them up. So there are three trees: the base (the whole tower, frozen), what is
trained (pairs of A and B, and a value head), and the two joined, which the tower takes.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax.models.config import Lora


@flax.struct.dataclass
class Adapted:
    """A weight with its adapters, stacked over layers or of one layer."""

    w: jax.Array
    a: jax.Array  # w's contracted dimensions, then C, the rank
    b: jax.Array  # C, then the others
    scale: float = flax.struct.field(pytree_node=False)


def contracted(dims: str) -> str:
    """Returns the letters over which a weight is contracted: those it starts with.

    A weight that ends in the width D or the rank C contracts all letters before it ("NHD",
    "FD", "DC"), any other its first one ("DNH", "DV", "CNH").
    """
    return dims[:-1] if dims[-1] in "CD" else dims[0]


def specs(tree: dict, cfg: Lora) -> dict:
    """Returns the Specs of what is trained in a tower: adapters, and its value head.

    An expert's own weights (moe.DISPATCHED) have none. Raises ValueError naming a target
    that no layer has.
    """
    stacks = {name: tree[name] for name in ("first", "layers") if name in tree}
    weights = sorted(
        {name for node in stacks.values() for name in node if name.startswith("w")}
    )
    targets = cfg.targets or weights
    for target in targets:
        if target not in weights:
            raise ValueError(
                f"model.lora_targets: no weight {target!r}; choose from {weights}"
            )

    def pair(spec):
        layer, dims = spec.dims[0], spec.dims[1:]
        inner = contracted(dims)
        outer = dims[len(inner) :]
        return {
            "a": dataclasses.replace(spec, dims=f"{layer}{inner}C"),
            "b": dataclasses.replace(spec, dims=f"{layer}C{outer}", init="zeros"),
        }

    trained = {
        name: {target: pair(node[target]) for target in targets if target in node}
        for name, node in stacks.items()
    }
    return trained | {x: tree[x] for x in ("value", "record") if x in tree}


def join(base: dict | None, trained: dict, cfg: Lora | None) -> dict:
    """Returns the parameters of the whole tower, in which adapted weights are Adapted.

    Without adapters (cfg None) these are `trained`, beside what else the base has: images.
    """
    if cfg is None:
        return trained if base is None else base | trained
    joined = base | trained
    for name, pairs in trained.items():
        if isinstance(pairs, dict):
            joined[name] = base[name] | {
                target: Adapted(base[name][target], pair["a"], pair["b"], cfg.scale)
                for target, pair in pairs.items()
            }
    return joined


def merge(params: dict) -> dict:
    """Returns parameters with every adapter added to its weight; sums are f32."""

    def is_adapted(x):
        return isinstance(x, Adapted)

    return jax.tree.map(
        lambda x: merged(x) if is_adapted(x) else x, params, is_leaf=is_adapted
    )


@jax.jit
def merged(x: Adapted):
    """Returns W + scale A B of every layer, in the dtype of W."""
    delta = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(
        x.a.astype(jnp.float32), x.b.astype(jnp.float32)
    )
    return (x.w.astype(jnp.float32) + x.scale * delta).astype(x.w.dtype)
