"""Who sees whom, drawn: a line is a query, a column a key, x where it is seen."""

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import mask
from dllm_jax.models.mask import FAR, Mask

POS = jnp.arange(5)[None]
STAIRS = "x.... xx... xxx.. xxxx. xxxxx"
BLOCKS = "xx... xx... xxxx. xxxx. xxxxx"  # the sixth position lies beyond
HEAD = "xxx.. xxx.. xxx.. xxx.. xxx.."


def drawn(seen: Mask, row: int = 0) -> str:
    """Returns a row's mask as a picture."""
    begin, end, q_group, k_pos, k_group = (
        np.asarray(x)[row]
        for x in (
            seen.q_begin_BT,
            seen.q_end_BT,
            seen.q_group_BT,
            seen.k_pos_BS,
            seen.k_group_BS,
        )
    )
    return " ".join(
        "".join(
            ".x"[bool(begin[t] <= key < end[t] or group == q_group[t])]
            for key, group in zip(k_pos, k_group, strict=True)
        )
        for t in range(len(end))
    )


def test_a_position_sees_its_block_and_those_before():
    assert drawn(mask.block(POS, 2)) == BLOCKS
    assert drawn(mask.block(POS, 1)) == STAIRS == drawn(mask.causal(POS))
    late = mask.block(POS + 3, 4)  # positions 3 to 7: the end of a block, and the next
    assert drawn(late) == "x.... xxxxx xxxxx xxxxx xxxxx"


def test_a_full_canvas_sees_its_length():
    seen = mask.full(jnp.broadcast_to(POS, (2, 5)), jnp.array([3, 5]))
    assert drawn(seen) == HEAD
    assert drawn(seen, 1) == "xxxxx xxxxx xxxxx xxxxx xxxxx"


@pytest.mark.parametrize(
    ("kind", "picture"), [("full", HEAD), ("block", BLOCKS), ("causal", STAIRS)]
)
def test_a_clean_canvas_is_seen_as_the_model_says(kind, picture):
    assert drawn(mask.clean(kind, POS, jnp.array([3]), 2)) == picture


def test_kept_slots_of_a_cache_stand_before_the_own_keys():
    own = mask.block(POS[:, 2:4], 2)  # a window of positions 2 and 3
    kept = jnp.array([[True, False, False]])
    assert drawn(mask.beside(own, kept)) == "x..xx x..xx"
    # A slot is a position: one beyond what a query sees is hidden, kept or not.
    ahead = mask.beside(mask.block(POS[:, :2], 2), jnp.ones((1, 4), bool))
    assert drawn(ahead) == "xx..xx xx..xx"


def test_packed_trajectories_see_themselves_and_noised_blocks_their_own_copy():
    # A clean copy of two blocks of 2, its second block noised; one of 1, noised; a pad.
    begin = jnp.array([[0, 0, 0, 0, 0, 0, 6, 6, 8]])
    end = jnp.array([[2, 2, 4, 4, 2, 2, 7, 6, 8]])
    group = jnp.array([[-1, -1, -1, -1, 4, 4, -1, 7, -1]])
    assert drawn(mask.packed(begin, end, group)).split() == [
        "xx.......",
        "xx.......",
        "xxxx.....",
        "xxxx.....",
        "xx..xx...",
        "xx..xx...",
        "......x..",
        ".......x.",
        ".........",
    ]


def test_a_group_may_have_any_number_from_0():
    zero = jnp.zeros((1, 2), jnp.int32)
    assert drawn(mask.packed(zero, zero, zero)) == "xx xx"
    assert drawn(mask.packed(zero, zero, zero - 1)) == ".. .."


@pytest.mark.parametrize("number", range(5))
def test_a_clean_token_is_in_no_group(number):
    zero = jnp.zeros((1, 2), jnp.int32)
    ends, groups = jnp.array([[1, 0]]), jnp.array([[-1, number]])
    assert drawn(mask.packed(zero, ends, groups)) == "x. .x"


def test_masks_of_one_sequence_have_no_groups_and_nobody_sees_what_is_far():
    seen = mask.ranged(jnp.array([[FAR, FAR]]), jnp.array([[0, FAR]]))
    assert drawn(seen) == "x. x."
    assert set(np.ravel(seen.q_group_BT)).isdisjoint(np.ravel(seen.k_group_BS))
