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
    """Returns the widths that a table of A pages is cut to: 1, 2, 4, ... and A."""
    return [1 << n for n in range((A - 1).bit_length())] + [A]


def attend(q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH, *, interpret=False):
    """Returns the attention of each row's window, [B, W, N, H] in q's dtype."""
    del interpret  # nothing is to be

    def over(width):
        return lambda q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH: (
            reference.paged_attention(
                q_BWNH, pages, layer, table_BA[:, :width], start_B, k_BWKH, v_BWKH
            )
        )

    O = pages[0].shape[2]
    ways = widths(table_BA.shape[1])
    needed = -(-jnp.max(start_B) // O)
    narrower = jnp.sum(jnp.array(ways[:-1], jnp.int32) < needed, dtype=jnp.int32)
    return jax.lax.switch(
        narrower,
        [over(width) for width in ways],
        *(q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH),
    )
