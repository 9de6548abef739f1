"""Which tiles of the score matrix have anything to compute, from the mask's ranges.

Letters: t queries of one tile, s keys of it, i tiles of queries, j tiles of keys, v visits of
a row.
"""

import jax.numpy as jnp

NOWHERE = jnp.iinfo(jnp.int32).max  # a key position that no range reaches


def pad(x, axis: int, multiple: int, fill=0):
    """Returns x with one axis filled up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=fill) if widths[axis][1] else x


def fit(tile: int, size: int, unit: int = 128) -> int:
    """Returns `tile`, or less for an array that is smaller; a multiple of `unit`."""
    return min(tile, -(-size // unit) * unit)


def mask_arrays(mask, t: int, s: int):
    """Returns the mask's ([begin, end, group], [pos, group]), filled up to whole tiles.

    The queries' three are [B, T], the keys' two [B, S]; a tile is t queries by s keys.
    What is added sees nothing and is seen by nothing.
    """
    of_queries = [(mask.q_begin_BT, 0), (mask.q_end_BT, 0), (mask.q_group_BT, -1)]
    of_keys = [(mask.k_pos_BS, NOWHERE), (mask.k_group_BS, -2)]
    return (
        [pad(x_BT, 1, t, fill) for x_BT, fill in of_queries],
        [pad(x_BS, 1, s, fill) for x_BS, fill in of_keys],
    )


def kinds(q_arrays, k_arrays, t: int, s: int):
    """Returns [B, i, j]: 0 nothing in the tile is seen, 1 some of it, 2 all of it.

    q_arrays, k_arrays: those of `mask_arrays`. A tile is judged by its smallest and
    largest entries, so that 1 may be said of a tile of which nothing is seen, but never 0
    of one of which something is.
    """

    def tiled(x, size):
        return x.reshape(x.shape[0], -1, size)

    begin_Bit, end_Bit, q_group_Bit = (tiled(x_BT, t) for x_BT in q_arrays)
    pos_Bjs, k_group_Bjs = (tiled(x_BS, s) for x_BS in k_arrays)

    def low(x, where=True):
        return jnp.min(x, axis=-1, where=where, initial=NOWHERE)

    def high(x, where=True):
        return jnp.max(x, axis=-1, where=where, initial=-1)

    def outer(compare, x_Bi, y_Bj):
        return compare(x_Bi[:, :, None], y_Bj[:, None, :])

    # Some of a tile is seen where the queries' ranges reach its keys ...
    sees_Bit = end_Bit > begin_Bit
    seen_Bjs = pos_Bjs < jnp.max(end_Bit, axis=(1, 2), keepdims=True)
    some_Bij = outer(jnp.greater, high(end_Bit, sees_Bit), low(pos_Bjs, seen_Bjs))
    some_Bij &= outer(jnp.less_equal, low(begin_Bit, sees_Bit), high(pos_Bjs, seen_Bjs))
    # ... or where their groups may meet; and all of it where every range holds every key.
    grouped_Bit, grouped_Bjs = q_group_Bit >= 0, k_group_Bjs >= 0
    meets_Bij = outer(
        jnp.less_equal, low(q_group_Bit, grouped_Bit), high(k_group_Bjs, grouped_Bjs)
    )
    meets_Bij &= outer(
        jnp.greater_equal, high(q_group_Bit, grouped_Bit), low(k_group_Bjs, grouped_Bjs)
    )
    all_Bij = outer(jnp.less_equal, high(begin_Bit), low(pos_Bjs))
    all_Bij &= outer(jnp.greater, low(end_Bit), high(pos_Bjs))
    return jnp.where(all_Bij, 2, (some_Bij | meets_Bij).astype(jnp.int32))


def schedule(kinds_Bij):
    """Returns (visit_Bij, count_Bi): for each tile of i, the tiles of j that it visits.

    `visit` holds 2·j, plus 1 where all of the tile is seen; its first `count` entries
    count, the rest repeat the last of them: a tile that is asked for again is not fetched.
    Kinds with the axes of queries and keys swapped schedule the other direction.
    """
    tiles_of_j = kinds_Bij.shape[2]
    order_Bij = jnp.argsort(kinds_Bij == 0, axis=-1, stable=True)
    count_Bi = jnp.sum(kinds_Bij > 0, axis=-1, dtype=jnp.int32)
    last_Bij = jnp.minimum(jnp.arange(tiles_of_j)[None, None], count_Bi[..., None] - 1)
    order_Bij = jnp.take_along_axis(order_Bij, jnp.maximum(last_Bij, 0), axis=-1)
    all_seen_Bij = jnp.take_along_axis(kinds_Bij, order_Bij, axis=-1) == 2
    return (2 * order_Bij + all_seen_Bij).astype(jnp.int32), count_Bi


# What is done at a step of `walk`, in its lowest bits; then its kind, tile j, and tile i.
BEGINS, ENDS = 1, 2
KIND_BIT, J_BIT, I_BIT = 2, 10, 20


def walk(kinds_Bij):
    """Returns (step_Bv, count_B): a row's visits in one line, those of a tile of i together.

    kinds_Bij: less than 256, and 0 where nothing is visited. A step is its tiles, its kind
    and bits: BEGINS and ENDS at the first and the last step of a tile of i. One that visits
    nothing has one step all the same. The first `count` steps count, the rest have the last
    one's tiles and no bit. Raises ValueError where a side has too many tiles.
    """
    B, tiles_of_i, tiles_of_j = kinds_Bij.shape
    if tiles_of_j > 1 << (I_BIT - J_BIT) or tiles_of_i > 1 << (31 - I_BIT):
        raise ValueError(
            f"attention over {tiles_of_i} x {tiles_of_j} tiles: shorter rows have fewer"
        )
    visits_Bij = kinds_Bij > 0
    first_Bij = jnp.arange(tiles_of_j)[None, None] == 0
    there_Bij = visits_Bij | (first_Bij & ~visits_Bij.any(axis=2, keepdims=True))
    rank_Bij = jnp.cumsum(there_Bij, axis=2)
    bits = (
        (rank_Bij == 1, BEGINS),
        (rank_Bij == rank_Bij[..., -1:], ENDS),
    )
    i_i1, j_1j = jnp.arange(tiles_of_i)[:, None], jnp.arange(tiles_of_j)[None]
    code_Bij = ((i_i1 << I_BIT) | (j_1j << J_BIT))[None] | (kinds_Bij << KIND_BIT)
    code_Bij = sum((jnp.where(is_Bij, bit, 0) for is_Bij, bit in bits), code_Bij)
    order_Bv = jnp.argsort(~there_Bij.reshape(B, -1), axis=1, stable=True)
    count_B = jnp.sum(there_Bij, axis=(1, 2), dtype=jnp.int32)
    number_1v = jnp.arange(order_Bv.shape[1])[None]
    last_B1 = count_B[:, None] - 1
    order_Bv = jnp.take_along_axis(order_Bv, jnp.minimum(number_1v, last_B1), axis=1)
    code_Bv = jnp.take_along_axis(code_Bij.reshape(B, -1), order_Bv, axis=1)
    idle_Bv = code_Bv >> J_BIT << J_BIT
    return jnp.where(number_1v <= last_B1, code_Bv, idle_Bv).astype(jnp.int32), count_B


def place(step):
    """Returns the tiles (i, j) of a step of `walk`."""
    return step >> I_BIT, (step >> J_BIT) & ((1 << (I_BIT - J_BIT)) - 1)
