"""The public ops: arrays in, arrays out; nothing here knows a config or parameters."""

import jax
import jax.numpy as jnp

from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.reference import attention

__all__ = ["attention", "token_logprob"]

HEAD_TILE = 512  # positions of a row whose logits are alive at once


def token_logprob(x_BUD, head_DV, token_BU, *, forbidden: int):
    """Returns (log-prob of `token`, entropy), each [B, U], nats, f32.

    Walks over tiles of U, forward and backward, so that the logits alive at any time are
    [B, tile, V]; the column `forbidden` (the mask id) has probability zero.
    """
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
