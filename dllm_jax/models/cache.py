"""The key/value cache of rows: a value that is replaced, never mutated."""

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax.models.config import ModelConfig
from dllm_jax.sharding import constrain


@flax.struct.dataclass
class KVCache:
    """Keys (rotated) and values of committed positions; slot = absolute position."""

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array


def empty(cfg: ModelConfig, rows: int, slots: int) -> KVCache:
    """Returns a zeroed cache of `slots` positions for each of `rows` rows."""
    shape = (cfg.layers, rows, slots, cfg.kv_heads, cfg.head_dim)
    zeros = constrain(jnp.zeros(shape, cfg.dtype), "LBSKH")
    return KVCache(k_LBSKH=zeros, v_LBSKH=zeros)


def write(cache: KVCache, fresh: KVCache, start_B, keep_B) -> KVCache:
    """Returns the cache with `fresh` (W positions) at `start`, in rows where `keep`."""

    # Rows that keep nothing write past the end, where an update is dropped. Row by row:
    # indices that also name the row would tie the rows of a mesh together.
    slots = cache.k_LBSKH.shape[2]
    at_B = jnp.where(keep_B, start_B, slots)

    def row(old_LSKH, new_LWKH, at):
        at_W = at + jnp.arange(new_LWKH.shape[1])
        return old_LSKH.at[:, at_W].set(new_LWKH, mode="drop")

    rows = jax.vmap(row, in_axes=(1, 1, 0), out_axes=1)

    def put(old_LBSKH, new_LBWKH):
        return constrain(rows(old_LBSKH, new_LBWKH, at_B), "LBSKH")

    return jax.tree.map(put, cache, fresh)
