"""Attention masks as ranges and groups, never as a [T, S] array.

A query sees a key iff `q_begin <= k_pos < q_end` or `k_group == q_group`. `k_pos` is a
place in the row (a slot), not the rotary position: several trajectories share a row and
`q_begin`, the slot at which the query's own begins, keeps them apart. A key that only its
group may see, and padding, has `k_pos = FAR`; queries without a group have -1, keys
without one -2, so that the two never meet.

Three masks; a query is a line, `x` a key that it sees:

block, of size 2: own block and those before it

    position  0 1 2 3 4 5    q_end
           0  x x . . . .        2
           1  x x . . . .        2
           2  x x x x . .        4
           3  x x x x . .        4
           4  x x x x x x        6
           5  x x x x x x        6

packed: a clean copy of four tokens, two noised copies of its second block, padding

    slot      0 1 2 3 4 5 6 7 8    q_begin  q_end  q_group    k_pos  k_group
    0 clean   x x . . . . . . .          0      2       -1        0       -2
    1 clean   x x . . . . . . .          0      2       -1        1       -2
    2 clean   x x x x . . . . .          0      4       -1        2       -2
    3 clean   x x x x . . . . .          0      4       -1        3       -2
    4 noised  x x . . x x . . .          0      2        0      FAR        0
    5 noised  x x . . x x . . .          0      2        0      FAR        0
    6 noised  x x . . . . x x .          0      2        1      FAR        1
    7 noised  x x . . . . x x .          0      2        1      FAR        1
    8 padding . . . . . . . . .          8      8       -1        8       -2

beside, a window at positions 4 and 5: first six slots of a cache, of which four are kept

    key       slots 0   1   2   3   4   5   window 4 5
    k_pos           0   1   2   3 FAR FAR          4 5    q_end
    4               x   x   x   x   .   .          x x        6
    5               x   x   x   x   .   .          x x        6
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

FAR = 2**30  # beyond every position and every step


@flax.struct.dataclass
class Mask:
    """Who sees whom: T queries, S keys (the cached ones first, then the T own)."""

    q_begin_BT: jax.Array  # the first place that a query sees
    q_end_BT: jax.Array  # the place before which it sees
    q_group_BT: jax.Array  # besides, it sees the keys of this group; -1: none
    k_pos_BS: jax.Array  # the place of a key; FAR: outside every range
    k_group_BS: jax.Array  # the group that sees it wherever it is; -2: none
    tiles: Any = None  # what `pallas_kernels.planned` found of the ranges


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
    if kind == "block":
        return block(pos_BT, size)
    return causal(pos_BT)


def starting(mask: Mask, first_B) -> Mask:
    """Returns a mask of rows in which nobody sees the positions before `first`."""
    begin_BT = jnp.maximum(mask.q_begin_BT, first_B[:, None])
    return mask.replace(q_begin_BT=begin_BT)


def beside(window: Mask, kept_BS) -> Mask:
    """Returns a window's mask with cache slots before its own keys: those `kept`.

    window: without groups; kept_BS: one for each slot of the cache.
    """
    slots_BS = jnp.broadcast_to(jnp.arange(kept_BS.shape[1])[None], kept_BS.shape)
    cached_BS = jnp.where(kept_BS, slots_BS, FAR)
    k_pos_BS = jnp.concatenate([cached_BS, window.k_pos_BS], axis=1)
    return ranged(window.q_end_BT, k_pos_BS)


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
