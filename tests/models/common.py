"""Small towers with experts, and how the tests of models compile."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig

SOFTMAX = ModelConfig(
    vocab=37,
    d_model=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffw=28,
    experts=8,
    experts_per_token=3,
    expert_ffw=12,
    mask_id=36,
    dtype="float32",
)
SIGMOID = dataclasses.replace(
    SOFTMAX,
    router="sigmoid",
    router_bias=True,
    router_scale=2.5,
    router_groups=4,
    router_best_groups=2,
    shared_experts=2,
    dense_layers=1,
    rotary=0.5,
)
STEPPED = dataclasses.replace(SOFTMAX, layers=5, sparse_step=2)  # d e d e d


@functools.cache
def weights(cfg: ModelConfig) -> dict:
    """Returns random parameters, in which biases are not zero either."""
    rng = np.random.default_rng(0)

    def weight(spec):
        noise = rng.normal(size=transformer.shape(spec, cfg))
        return jnp.asarray(1 + 0.2 * noise if spec.init == "ones" else 0.4 * noise)

    return jax.tree.map(weight, transformer.specs(cfg))


def primitives(jaxpr, inside=()):
    """Yields (name, names around it) of all that a program computes."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, inside
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner, (*inside, name))
