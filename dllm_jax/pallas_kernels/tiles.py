"""Which tiles of the score matrix have anything to compute, from the mask's ranges.

Letters: t queries of one tile, s keys of it, i tiles of queries, j tiles of keys.
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
