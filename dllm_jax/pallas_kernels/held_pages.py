"""Attention over pages, of XLA's operations: no wider than the rows hold.

For platforms without a kernel of it. The specification gathers a row's whole table, so
that a short answer pays for the longest that may be asked for. Here a table is cut to the
pages that the longest of the rows holds, rounded up to a power of two: each such width is
compiled, and one of them runs.
"""

import jax
import jax.numpy as jnp

from dllm_jax.pallas_kernels import reference


def widths(A: int) -> list[int]:
    """Returns the widths that a table of A pages is cut to: 1, 2, 4, ... and A.

    Each is a program to compile, so one that is hardly narrower than A is left out.
    """
    powers = [1 << n for n in range((A - 1).bit_length())]
    return [width for width in powers if 4 * width <= 3 * A] + [A]


def over_held(run, needed, table_BA, *arrays):
    """Returns run(table_BA, *arrays), the table cut to the least width of `needed` pages."""

    def over(width):
        return lambda table_BA, *arrays: run(table_BA[:, :width], *arrays)

    ways = widths(table_BA.shape[1])
    narrower = jnp.sum(jnp.array(ways[:-1], jnp.int32) < needed, dtype=jnp.int32)
    return jax.lax.switch(narrower, [over(width) for width in ways], table_BA, *arrays)


def attend(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H] in q's dtype."""
    del interpret  # nothing is to be

    def run(table_BA, q_BWNH, pages, layer, *own):
        return reference.paged_attention(q_BWNH, pages, layer, table_BA, *own)

    needed = -(-jnp.max(start_B) // pages[0].shape[2])
    arrays = q_BWNH, pages, layer, start_B, k_BQKH, v_BQKH
    return over_held(run, needed, table_BA, *arrays)
