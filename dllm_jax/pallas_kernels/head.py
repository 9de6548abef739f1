"""The head and what is asked of it: a token's log-prob and entropy, or a draw."""

import functools

import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.pallas_kernels import noise, reference
from dllm_jax.pallas_kernels.choice import kernel

HEAD_TILE = 512  # positions of a row whose logits are alive at once


def token_logprob(
    x_BUD, head_DV, token_BU, *, forbidden: int, implementation="auto", interpret=False
):
    """Returns (log-prob of `token`, entropy), each [B, U], nats, f32.

    No more than a tile of logits is alive, forward and backward: [B, tile, V] of the
    specification, which walks over U, and less in a kernel, which also walks over V. The
    column `forbidden` (the mask id) has probability zero. Differentiable in x and head;
    split over rows and the vocabulary of the mesh.
    """
    found = kernel("token_logprob", implementation)
    if found is None:
        return tiled_logprob(x_BUD, head_DV, token_BU, forbidden)
    return fused_logprob(found, forbidden, interpret, x_BUD, head_DV, token_BU)


def tiled_logprob(x_BUD, head_DV, token_BU, forbidden: int):
    """Returns the specification's answer, a tile of U at a time."""
    B, U, D = x_BUD.shape
    tile = min(HEAD_TILE, U)
    pad = -U % tile
    x_BUD = jnp.pad(x_BUD, ((0, 0), (0, pad), (0, 0)))
    token_BU = jnp.pad(token_BU, ((0, 0), (0, pad)))

    @jax.checkpoint
    def one(_, tile_inputs):
        x_BCD, token_BC = tile_inputs
        logp_R, entropy_R = reference.token_logprob(
            x_BCD.reshape(-1, D), head_DV, token_BC.reshape(-1), forbidden
        )
        return None, (logp_R.reshape(B, -1), entropy_R.reshape(B, -1))

    def tiles(x):  # [B, U, ...] -> [U / tile, B, tile, ...]: rows stay where they are
        return jnp.moveaxis(x.reshape(B, -1, tile, *x.shape[2:]), 1, 0)

    _, out = jax.lax.scan(one, None, (tiles(x_BUD), tiles(token_BU)))
    return tuple(jnp.moveaxis(y, 0, 1).reshape(B, -1)[:, :U] for y in out)


def parts(head_DV, V: int):
    """Returns (mesh axis that splits the vocabulary or None, first id of this part)."""
    if head_DV.shape[1] == V:
        return None, 0
    return "model", jax.lax.axis_index("model") * head_DV.shape[1]


def join(lse_R, mean_R, axis):
    """Returns (log of the sum, mean) over all parts of the vocabulary."""
    if axis is None:
        return lse_R, mean_R
    top_R = jax.lax.pmax(lse_R, axis)
    weight_R = jnp.exp(lse_R - top_R)
    total_R = jax.lax.psum(weight_R, axis)
    return top_R + jnp.log(total_R), jax.lax.psum(weight_R * mean_R, axis) / total_R


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def fused_logprob(found, forbidden, interpret, x_BUD, head_DV, token_BU):
    """Returns (log-prob, entropy) as the module `found` computes them."""
    return fused_forward(found, forbidden, interpret, x_BUD, head_DV, token_BU)[0]


def fused_forward(found, forbidden, interpret, *args):
    V = args[1].shape[1]

    def run(x_BUD, head_DV, token_BU):
        axis, offset = parts(head_DV, V)
        lse_R, mean_R, own_R = found.pick(
            x_BUD.reshape(-1, x_BUD.shape[2]),
            head_DV,
            token_BU.reshape(-1),
            offset,
            forbidden=forbidden,
            interpret=interpret,
        )
        lse_R, mean_R = join(lse_R, mean_R, axis)
        own_R = own_R if axis is None else jax.lax.psum(own_R, axis)
        out = own_R - lse_R, lse_R - mean_R, lse_R, mean_R
        return tuple(y.reshape(token_BU.shape) for y in out)

    dims = "BUD", "DV", "BU"
    logp, entropy, lse, mean = sharding.per_device(run, dims, ("BU",) * 4, *args)
    return (logp, entropy), (*args, lse, mean)


def fused_backward(found, forbidden, interpret, saved, grads):
    x_BUD, head_DV, _, _, _ = saved
    B, V = x_BUD.shape[0], head_DV.shape[1]

    def run(x_BUD, head_DV, token_BU, *saved_BU):
        axis, offset = parts(head_DV, V)
        dx_RD, dhead_DV = found.pick_gradient(
            x_BUD.reshape(-1, x_BUD.shape[2]),
            head_DV,
            token_BU.reshape(-1),
            offset,
            [y.reshape(-1) for y in saved_BU],
            forbidden=forbidden,
            interpret=interpret,
        )
        if axis is not None:
            dx_RD = jax.lax.psum(dx_RD, axis)
        if x_BUD.shape[0] < B:
            dhead_DV = jax.lax.psum(dhead_DV, sharding.ACT["B"])
        return dx_RD.reshape(x_BUD.shape), dhead_DV

    dims = ("BUD", "DV", *["BU"] * 5)
    out = sharding.per_device(run, dims, ("BUD", "DV"), *saved, *grads)
    return *out, None


fused_logprob.defvjp(fused_forward, fused_backward)


def token_draw(
    x_BWD, head_DV, key_B, temperature_B,
    *, forbidden: int, implementation="auto", interpret=False,
):  # fmt: skip
    """Draws a token for every position; see `reference.token_draw`.

    The noise is that of the specification, number for number, on every platform: kernels
    compute the same generator. Top-k and top-p need the sorted vocabulary and are not
    here: a caller that filters takes the logits. Split as `token_logprob` is.
    """
    found = kernel("token_draw", implementation)
    if found is None:
        return reference.token_draw(x_BWD, head_DV, key_B, temperature_B, forbidden)
    V = head_DV.shape[1]

    def run(x_BWD, head_DV, words_B2, temperature_B):
        B, W, D = x_BWD.shape
        axis, offset = parts(head_DV, V)
        slot_BW = jnp.broadcast_to(jnp.arange(W)[None], (B, W))
        token_R, best_R, own_R, lse_R, tempered_R, mean_R = found.draw(
            x_BWD.reshape(-1, D),
            head_DV,
            jnp.column_stack([words_B2.repeat(W, axis=0), slot_BW.reshape(-1)]),
            temperature_B.repeat(W),
            offset,
            width=V,
            forbidden=forbidden,
            interpret=interpret,
        )
        lse_R, _ = join(lse_R, mean_R, axis)
        tempered_R, mean_R = join(tempered_R, mean_R, axis)
        if axis is not None:
            wins_R = best_R == jax.lax.pmax(best_R, axis)
            token_R = jnp.where(wins_R, token_R, V)
            first_R = jax.lax.pmin(token_R, axis)
            own_R = jax.lax.psum(jnp.where(token_R == first_R, own_R, 0), axis)
            token_R = first_R
        scale_R = jnp.where(temperature_B == 0, 1, temperature_B).repeat(W)
        conf_R = jnp.exp(own_R / scale_R - tempered_R)
        out = token_R, own_R - lse_R, conf_R, tempered_R - mean_R
        return tuple(y.reshape(B, W) for y in out)

    args = x_BWD, head_DV, noise.words(key_B), temperature_B
    return sharding.per_device(run, ("BWD", "DV", "B2", "B"), ("BW",) * 4, *args)
