"""Attention masks as ranges and groups, never as a [T, S] array.

A query sees a key iff `q_begin <= k_pos < q_end` or `k_group == q_group`. `k_pos` is a
place in the row (a slot), not the rotary position: several trajectories share a row and
`q_begin`, the slot at which the query's own begins, keeps them apart. A key that only its
group may see, and padding, has `k_pos = FAR`; queries without a group have -1, keys
without one -2, so that the two never meet.
"""

import flax.struct
import jax
import jax.numpy as jnp

FAR = 2**30  # beyond every position and every step


@flax.struct.dataclass
class Mask:
    """Who sees whom: T queries, S keys (the cached ones first, then the T own)."""

    q_begin_BT: jax.Array
    q_end_BT: jax.Array
    q_group_BT: jax.Array
    k_pos_BS: jax.Array
    k_group_BS: jax.Array


def ranged(q_end_BT, k_pos_BS) -> Mask:
    """Returns a mask without groups over rows that hold one sequence each."""
    zero_BT = jnp.zeros_like(q_end_BT)
    return Mask(
        q_begin_BT=zero_BT,
        q_end_BT=q_end_BT,
        q_group_BT=zero_BT - 1,
        k_pos_BS=k_pos_BS,
        k_group_BS=jnp.zeros_like(k_pos_BS) - 2,
    )


def block(pos_BT, size: int) -> Mask:
    """Each position sees its own block of `size` positions and the blocks before it."""
    return ranged((pos_BT // size + 1) * size, pos_BT)


def full(pos_BT, len_B) -> Mask:
    """Each position sees the first `len` positions of its row."""
    return ranged(jnp.broadcast_to(len_B[:, None], pos_BT.shape), pos_BT)


def causal(pos_BT) -> Mask:
    """Each position sees itself and those before it."""
    return ranged(pos_BT + 1, pos_BT)


def clean(kind: str, pos_BT, len_B, size: int) -> Mask:
    """Who sees whom in a clean canvas of `len` tokens: ModelConfig.attention's meaning."""
    if kind == "full":
        return full(pos_BT, len_B)
    return block(pos_BT, size) if kind == "block" else causal(pos_BT)


def beside(own: Mask, kept_BS) -> Mask:
    """Returns the mask with cache slots before the own keys: those that are `kept`."""
    slots_BS = jnp.broadcast_to(jnp.arange(kept_BS.shape[1])[None], kept_BS.shape)
    cached_BS = jnp.where(kept_BS, slots_BS, FAR)
    return ranged(own.q_end_BT, jnp.concatenate([cached_BS, own.k_pos_BS], axis=1))


def packed(begin_BT, end_BT, group_BT) -> Mask:
    """The packed training layout: clean copies and noised blocks share a row.

    `begin` is the slot where a token's trajectory starts, `end` the slot before which it
    sees clean tokens, `group` the id of its (block, round), or -1 in a clean copy.
    Padding has `end = begin` and group -1, so it sees nothing and, being after every
    `end`, is seen by nothing.
    """
    slots_BT = jnp.broadcast_to(jnp.arange(begin_BT.shape[1])[None], begin_BT.shape)
    noised_BT = group_BT >= 0
    return Mask(
        q_begin_BT=begin_BT,
        q_end_BT=end_BT,
        q_group_BT=group_BT,
        k_pos_BS=jnp.where(noised_BT, FAR, slots_BT),
        k_group_BS=jnp.where(noised_BT, group_BT, -2),
    )
