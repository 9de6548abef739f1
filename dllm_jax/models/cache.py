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

    def put(old_LBSKH, new_LBWKH):
        # Rows that keep nothing write past the end, where a scatter drops its update.
        slots = old_LBSKH.shape[2]
        at_B = jnp.where(keep_B, start_B, slots)
        at_BW = at_B[:, None] + jnp.arange(new_LBWKH.shape[2])[None]
        rows_BW = jnp.broadcast_to(jnp.arange(at_B.shape[0])[:, None], at_BW.shape)
        kept_LBSKH = old_LBSKH.at[:, rows_BW, at_BW].set(new_LBWKH, mode="drop")
        return constrain(kept_LBSKH, "LBSKH")

    return jax.tree.map(put, cache, fresh)
