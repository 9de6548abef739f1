"""Which tiles of the score matrix have anything to compute, from the mask's ranges.

I tiles of queries, J tiles of keys; a lower-case letter is a tile's share of a dimension.
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


def mask_arrays(mask, T: int, S: int):
    """Returns the mask's (begin, end, group) and (pos, group), filled up to whole tiles.

    T, S: what a tile is. What is added sees nothing and is seen by nothing.
    """
    q = [(mask.q_begin_BT, 0), (mask.q_end_BT, 0), (mask.q_group_BT, -1)]
    k = [(mask.k_pos_BS, NOWHERE), (mask.k_group_BS, -2)]
    return [pad(x, 1, T, fill) for x, fill in q], [pad(x, 1, S, fill) for x, fill in k]


def kinds(q_arrays, k_arrays, T: int, S: int):
    """Returns [B, I, J]: 0 nothing in the tile is seen, 1 some of it, 2 all of it.

    A tile is judged by its smallest and largest entries, so that 1 may be said of a tile
    of which nothing is seen, but never 0 of one of which something is.
    """

    def tiled(x, size):
        return x.reshape(x.shape[0], -1, size)

    begin, end, q_group = (tiled(x, T) for x in q_arrays)
    pos, k_group = (tiled(x, S) for x in k_arrays)

    def low(x, where=True):
        return jnp.min(x, axis=-1, where=where, initial=NOWHERE)

    def high(x, where=True):
        return jnp.max(x, axis=-1, where=where, initial=-1)

    def outer(compare, x_BI, y_BJ):
        return compare(x_BI[:, :, None], y_BJ[:, None, :])

    sees = end > begin
    seen = pos < jnp.max(end, axis=(1, 2), keepdims=True)
    some = outer(jnp.greater, high(end, sees), low(pos, seen))
    some &= outer(jnp.less_equal, low(begin, sees), high(pos, seen))
    grouped_q, grouped_k = q_group >= 0, k_group >= 0
    meets = outer(jnp.less_equal, low(q_group, grouped_q), high(k_group, grouped_k))
    meets &= outer(jnp.greater_equal, high(q_group, grouped_q), low(k_group, grouped_k))
    whole = outer(jnp.less_equal, high(begin), low(pos))
    whole &= outer(jnp.greater, low(end), high(pos))
    return jnp.where(whole, 2, (some | meets).astype(jnp.int32))


def schedule(kinds_BIJ):
    """Returns (visit_BIJ, count_BI): the tiles of each row of tiles that are not empty.

    `visit` holds 2·j, plus 1 where all of the tile is seen; its first `count` entries
    count, the rest repeat the last of them: a tile that is asked for again is not fetched.
    """
    J = kinds_BIJ.shape[2]
    order_BIJ = jnp.argsort(kinds_BIJ == 0, axis=-1, stable=True)
    count_BI = jnp.sum(kinds_BIJ > 0, axis=-1, dtype=jnp.int32)
    last_BIJ = jnp.minimum(jnp.arange(J)[None, None], count_BI[..., None] - 1)
    order_BIJ = jnp.take_along_axis(order_BIJ, jnp.maximum(last_BIJ, 0), axis=-1)
    whole_BIJ = jnp.take_along_axis(kinds_BIJ, order_BIJ, axis=-1) == 2
    return (2 * order_BIJ + whole_BIJ).astype(jnp.int32), count_BI
