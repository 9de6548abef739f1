"""Products of slots with weights as a CPU has them, against those with the weights."""

import jax
import numpy as np
import pytest

from dllm_jax.pallas_kernels import few_slots

FEW, FEW_LEFT, TILE = few_slots.FEW, few_slots.FEW_LEFT, few_slots.TILE


def operands(slots: int):
    """Returns slots [R, 24] and a weight of heads [24, 3, TILE]."""
    keys = jax.random.split(jax.random.key(slots))
    x_RD = jax.random.normal(keys[0], (slots, 24))
    return x_RD, jax.random.normal(keys[1], (24, 3, TILE))


@pytest.mark.parametrize("slots", [1, 4, FEW, FEW + 1])
def test_tiles_are_the_weight_cut_by_columns(slots):
    x_RD, w_DNH = operands(slots)
    w_iDf = few_slots.tiles(w_DNH, 1)
    np.testing.assert_array_equal(w_iDf[1], w_DNH[:, 1])
    found = jax.jit(few_slots.by_tiles)(x_RD, w_iDf)
    want = np.asarray(x_RD) @ np.asarray(w_DNH).reshape(24, -1)
    np.testing.assert_allclose(found, want, atol=1e-5, rtol=1e-5)


def test_of_what_is_contracted_all_dimensions_are_one():
    w_NHD = operands(1)[1].reshape(8, 3, 3 * TILE)
    w_iRf = few_slots.tiles(w_NHD, 2)
    want = np.asarray(w_NHD).reshape(24, -1)[:, TILE : 2 * TILE]
    np.testing.assert_array_equal(w_iRf[1], want)


@pytest.mark.parametrize("slots", [1, FEW_LEFT, FEW_LEFT + 1])
def test_a_transpose_on_either_side_is_the_product(slots):
    x_RD, w_DNH = operands(slots)
    w_DF = np.asarray(w_DNH).reshape(24, -1)
    found = jax.jit(few_slots.by_transpose)(x_RD, w_DF.T)
    np.testing.assert_allclose(found, np.asarray(x_RD) @ w_DF, atol=1e-5, rtol=1e-5)
