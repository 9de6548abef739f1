"""Attention over pages, of XLA's operations: no wider than the rows hold.

For platforms without a kernel of it. The specification gathers a row's whole table, so
that a short answer pays for the longest that may be asked for. Here a table is cut to the
pages that the longest of the rows holds, rounded up to a power of two: each such width is
compiled, and one of them runs.
"""

import jax
import jax.numpy as jnp

from dllm_jax.pallas_kernels import reference

# Positions of all rows together: to read fewer gains less than their program costs.
FEW = 128


def widths(A: int, least: int = 1) -> list[int]:
    """Returns the widths that a table of A pages is cut to: powers of two, and A.

    Each is a program to compile, so those below `least` pages are left out, and one that
    is hardly narrower than A.
    """
    powers = [1 << n for n in range((A - 1).bit_length())]
    return [width for width in powers if least <= width <= 3 * A / 4] + [A]


def over_held(run, needed, size: int, table_BA, *arrays):
    """Returns run(table_BA, *arrays), the table cut to the least width of `needed` pages.

    size: positions of a page.
    """

    def over(width):
        return lambda table_BA, *arrays: run(table_BA[:, :width], *arrays)

    B, A = table_BA.shape
    ways = widths(A, least=FEW // (B * size))
    narrower = jnp.sum(jnp.array(ways[:-1], jnp.int32) < needed, dtype=jnp.int32)
    return jax.lax.switch(narrower, [over(width) for width in ways], table_BA, *arrays)


def attend(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H] in q's dtype."""
    del interpret  # nothing is to be

    def run(table_BA, q_BWNH, pages, layer, *own):
        return reference.paged_attention(q_BWNH, pages, layer, table_BA, *own)

    size = pages[0].shape[2]
    arrays = q_BWNH, pages, layer, start_B, k_BQKH, v_BQKH
    return over_held(run, -(-jnp.max(start_B) // size), size, table_BA, *arrays)
