"""Writes kept windows into their pages, in place, for TPU.

The pools stay where they are: every kept window is one copy from memory to memory, all
of them under way together. A position's [K, H] are whole tiles, so that a window may lie
anywhere in a page; one that crosses a page's end goes position by position.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def kernel(
    layer_ref,
    table_ref,
    start_ref,
    row_ref,
    count_ref,
    k_window,
    v_window,
    k_pool_before,
    v_pool_before,
    k_pool,
    v_pool,
    done,
):
    """Copies the `count` windows that are kept, of the rows in `row`.

    The pools are inputs and outputs, and one memory; `done` is a semaphore.
    """
    del k_pool_before, v_pool_before
    W, O = k_window.shape[1], k_pool.shape[2]
    A = table_ref.shape[0] // start_ref.shape[0]

    def copies(b, w, size):
        """Returns the copies of `size` of a row's positions from `w` on."""
        s = start_ref[b] + w
        page, slot = table_ref[b * A + s // O], s % O
        return [
            pltpu.make_async_copy(
                window.at[b, pl.ds(w, size)],
                pool.at[layer_ref[0], page, pl.ds(slot, size)],
                done,
            )
            for window, pool in ((k_window, k_pool), (v_window, v_pool))
        ]

    def begin(i, _):
        b = row_ref[i]
        in_one_page = start_ref[b] % O + W <= O

        @pl.when(in_one_page)
        def _():
            for copy in copies(b, 0, W):
                copy.start()

        @pl.when(~in_one_page)
        def _():
            for w in range(W):
                for copy in copies(b, w, 1):
                    copy.start()

    def end(i, _):  # a wait counts bytes, whichever copies brought them
        for copy in copies(row_ref[i], 0, W):
            copy.wait()

    jax.lax.fori_loop(0, count_ref[0], begin, None)
    jax.lax.fori_loop(0, count_ref[0], end, None)


def update(pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH, *, interpret=False):
    """Returns `pages`, the same memory, with the kept windows written."""
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    windows = [x_BWKH.astype(pages[0].dtype) for x_BWKH in (k_BWKH, v_BWKH)]
    B = len(start_B)
    scalars = (
        jnp.reshape(layer, 1),
        table_BA.reshape(-1),
        start_B,
        jnp.flatnonzero(keep_B, size=B),
        keep_B.sum()[None],
    )
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pages],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[in_memory] * 4,
            out_specs=[in_memory] * 2,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={len(scalars) + 2: 0, len(scalars) + 3: 1},
        interpret=interpret,
        name="cache_update",
    )(*(x.astype(jnp.int32) for x in scalars), *windows, *pages)
