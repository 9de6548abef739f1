"""Weights in int8, for sampling alone: half the bytes that a forward reads of a layer.

A few rows' forward waits for its weights to come from memory, and not for its products. So
what the layers multiply with (their weights named w..) may be kept as whole numbers, with
one scale for each output channel (symmetric, absolute maximum; arXiv 2208.07339, section 2):

    scale_o = max_i |W_io| / 127    q_io = round(W_io / scale_o)    x W ~ (x q) scale

q is exact in bfloat16, so that a product is one of bfloat16 that reads bytes: the compiler
converts inside of it, and no other copy of the weight is ever made. What stays as it is:
norms and biases, which are small; the embedding and the head, whose log-probs are learned
from; adapters, which are added to what a rounded weight gives.

The policy that samples is then another one than that which learns, by as much as the metrics
logprob_gap_* say. Old log-probs are scored with the weights that learn.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax.models import lora
from dllm_jax.models.config import ModelConfig

GREATEST = 127  # the whole numbers are -127 to 127: symmetric


@flax.struct.dataclass
class Int8:
    """A weight, stacked over layers or of one layer: w times scale."""

    w: jax.Array  # int8
    scale: jax.Array  # in the computing dtype: w's dimensions that are not contracted


def is_int8(x) -> bool:
    """Returns whether x is such a weight: for trees of which it is one leaf."""
    return isinstance(x, Int8)


def check(model: ModelConfig):
    """Raises ValueError for a tower whose layers are not read by plain products."""
    if model.experts:
        raise ValueError(
            f"sampler.int8=True: a layer's {model.experts} experts are multiplied by kernels "
            "that take no int8; set it to False"
        )


def spec(weight) -> Int8:
    """Returns the Int8 of Specs of a stack's Spec."""
    layer, dims = weight.dims[0], weight.dims[1:]
    outer = dims[len(lora.contracted(dims)) :]
    return Int8(weight, dataclasses.replace(weight, dims=layer + outer))


def quantized(w, inner: int, dtype) -> Int8:
    """Returns w [inner dimensions, outer ones] as Int8; the scale has the outer ones.

    The scale is rounded to `dtype` first, so that nothing is lost by that. A channel that
    is not finite gets a scale that is not: garbage is not to look sound.
    """
    w32 = w.astype(jnp.float32)
    largest = jnp.abs(w32).max(axis=tuple(range(inner)))
    scale = (largest / GREATEST).astype(dtype)
    scale = jnp.where(scale == 0, 1, scale)
    scale32 = scale.astype(jnp.float32).reshape((1,) * inner + scale.shape)
    whole = jnp.clip(jnp.round(w32 / scale32), -GREATEST, GREATEST)
    return Int8(whole.astype(jnp.int8), scale)


@functools.cache
def quantizer(place: Int8):
    """Returns a program that makes a weight, or a layer of a stack, what `place` says.

    place: an Int8 of shapes with shardings. The program takes the weights of a stack and
    the number of a layer, or None for all of them.
    """
    inner = place.w.ndim - place.scale.ndim
    one = functools.partial(quantized, inner=inner, dtype=place.scale.dtype)

    def quantize(x, number):
        return jax.vmap(one)(x) if number is None else one(x[number])

    return jax.jit(quantize, out_shardings=Int8(place.w.sharding, place.scale.sharding))
