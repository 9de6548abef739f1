"""Products of slots with weights as a CPU has them, against those with the weights."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.pallas_kernels import cpu_products

FEW_LEFT = cpu_products.FEW_LEFT


def operands(slots: int):
    """Returns slots [R, 24] and a weight of heads [24, 3, 8]."""
    keys = jax.random.split(jax.random.key(slots))
    x_RD = jax.random.normal(keys[0], (slots, 24))
    return x_RD, jax.random.normal(keys[1], (24, 3, 8))


@pytest.mark.parametrize("contracted", [1, 2])
def test_what_is_contracted_comes_last(contracted):
    w_DNH = np.asarray(operands(1)[1])
    rows = 24 * 3 ** (contracted - 1)
    found = cpu_products.transposed(w_DNH, contracted).reshape(-1, rows)
    np.testing.assert_array_equal(found, w_DNH.reshape(rows, -1).T)


@pytest.mark.parametrize("slots", [1, 8, 12, 20, 52, FEW_LEFT, FEW_LEFT + 1])
def test_a_transpose_on_either_side_is_the_product(slots):
    x_RD, w_DNH = operands(slots)
    w_DF = np.asarray(w_DNH).reshape(24, -1)
    found = jax.jit(cpu_products.by_transpose)(x_RD, w_DF.T)
    np.testing.assert_allclose(found, np.asarray(x_RD) @ w_DF, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("contracted", [1, 2])
def test_tiles_hold_the_weight_and_its_product(contracted, monkeypatch):
    monkeypatch.setattr(cpu_products, "SUMMED", 10)  # of 6 numbers one sum, of 18 two
    w_DNH = jax.random.normal(jax.random.key(0), (6, 3, 128))
    outer = w_DNH.shape[contracted:]
    tiles = cpu_products.in_tiles(w_DNH, contracted)
    matrix_DF = np.asarray(w_DNH).reshape(-1, math.prod(outer))
    D, F = matrix_DF.shape
    assert tiles.shape == (F // 64, D, 64)
    lies = cpu_products.Tiled(tiles, contracted, outer)
    assert lies.shape == (D, F)
    np.testing.assert_array_equal(lies.matrix(), matrix_DF)
    x_RD = jax.random.normal(jax.random.key(1), (5, D))
    traced_anew = functools.partial(cpu_products.by_tiles)
    found = jax.jit(traced_anew)(x_RD, tiles)
    np.testing.assert_allclose(found, x_RD @ matrix_DF, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "tiled"),
    [
        ({}, True),
        ({"contracted": 512}, True),
        ({"contracted": 513}, False),  # no two sums of as many
        ({"contracted": 576}, True),
        ({"contracted": 770}, False),  # whose transpose is as fast
        ({"others": 96}, False),
        ({"dtype": "bfloat16"}, False),  # each product would be rounded
        ({"devices": 2}, False),
    ],
)
def test_which_weights_lie_in_tiles(change, tiled):
    plain = {"contracted": 24, "others": 192, "dtype": "float32", "devices": 1}
    assert cpu_products.lies_tiled(**plain | change) == tiled


def test_what_the_library_has_no_sums_for_lies_in_no_tiles(monkeypatch):
    monkeypatch.setattr(cpu_products, "library_sums", lambda: False)
    assert not cpu_products.lies_tiled(24, 192, "float32", 1)


@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize("deep", [512, 576])
def test_tiles_are_multiplied_by_the_library(deep, slots):
    """As a loop of XLA's own a sum of products takes ten times as long."""
    assert cpu_products.library_sums()

    def beside_what_makes_x(x_RD, w_bDn):
        return cpu_products.by_tiles(jnp.sin(x_RD), w_bDn)

    shapes = (slots, deep), (3, deep, 64)
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(beside_what_makes_x).lower(*structs).compile().as_text()
    computations = re.split(r"\n(?=(?:ENTRY )?%)", text)
    sums = [x for x in computations if re.search(r"[^%]\breduce\(", x)]
    each = 512 if deep == 512 else 288
    (sums,) = (x for x in sums if f",{each},64]" in x)
    (caller,) = (x for x in text.splitlines() if f"calls={sums.split()[0]}," in x)
    assert "__ynn_fusion" in caller


def test_a_tile_is_filled_where_its_end_would_take_longer():
    filled = {
        R: cpu_products.filled(R) for R in (4, 8, 12, 16, 20, 28, 52, 60, 68, 116)
    }
    assert filled == {4: 4, 8: 8, 12: 16, 16: 16, 20: 20, 28: 32} | {
        52: 64,
        60: 64,
        68: 68,
        116: 128,
    }


@pytest.mark.parametrize("columns", [8, 64])
def test_a_weights_gradient_contracts_no_two_first_dimensions(columns):
    x_RD = operands(40)[0]
    w_DF = jax.random.normal(jax.random.key(1), (24, columns))

    def loss(multiply, x_RD, w_DF):
        return jnp.sin(multiply(x_RD, w_DF)).sum()

    def gradient(multiply):
        return jax.jit(jax.grad(lambda *xs: loss(multiply, *xs), argnums=(0, 1)))

    found, plain = (gradient(of) for of in (cpu_products.product, jnp.matmul))
    for one, other in zip(found(x_RD, w_DF), plain(x_RD, w_DF), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-5)

    def both_first(of):
        text = of.lower(x_RD, w_DF).compile().as_text()
        return re.findall(
            r"lhs_contracting_dims=\{0\}, rhs_contracting_dims=\{0\}", text
        )

    assert both_first(plain) and not both_first(found)
