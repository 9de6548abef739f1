"""Products of slots with weights as a CPU has them, against those with the weights."""

import jax
import numpy as np
import pytest

from dllm_jax.pallas_kernels import few_slots

FEW_LEFT = few_slots.FEW_LEFT


def operands(slots: int):
    """Returns slots [R, 24] and a weight of heads [24, 3, 8]."""
    keys = jax.random.split(jax.random.key(slots))
    x_RD = jax.random.normal(keys[0], (slots, 24))
    return x_RD, jax.random.normal(keys[1], (24, 3, 8))


@pytest.mark.parametrize("contracted", [1, 2])
def test_what_is_contracted_comes_last(contracted):
    w_DNH = np.asarray(operands(1)[1])
    rows = 24 * 3 ** (contracted - 1)
    found = few_slots.transposed(w_DNH, contracted).reshape(-1, rows)
    np.testing.assert_array_equal(found, w_DNH.reshape(rows, -1).T)


@pytest.mark.parametrize("slots", [1, FEW_LEFT, FEW_LEFT + 1])
def test_a_transpose_on_either_side_is_the_product(slots):
    x_RD, w_DNH = operands(slots)
    w_DF = np.asarray(w_DNH).reshape(24, -1)
    found = jax.jit(few_slots.by_transpose)(x_RD, w_DF.T)
    np.testing.assert_allclose(found, np.asarray(x_RD) @ w_DF, atol=1e-5, rtol=1e-5)
