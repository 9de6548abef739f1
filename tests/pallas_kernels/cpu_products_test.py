"""Products of slots with weights as a CPU has them, against those with the weights."""

import functools
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
@pytest.mark.parametrize(("sums", "most"), [(True, 24), (True, 23), (False, 24)])
def test_a_transpose_on_either_side_is_the_product(slots, sums, most, monkeypatch):
    monkeypatch.setattr(cpu_products, "library_sums", lambda: sums)
    monkeypatch.setattr(cpu_products, "SHALLOW", most)
    x_RD, w_DNH = operands(slots)
    w_DF = np.asarray(w_DNH).reshape(24, -1)
    traced_anew = functools.partial(cpu_products.by_transpose)
    found = jax.jit(traced_anew)(x_RD, w_DF.T)
    np.testing.assert_allclose(found, np.asarray(x_RD) @ w_DF, atol=1e-5, rtol=1e-5)


def test_few_slots_are_multiplied_by_the_library():
    """As a loop of XLA's own a sum of products takes ten times as long."""
    assert cpu_products.library_sums()
    x_RD, w_FD = (jnp.ones(shape) for shape in ((8, 24), (48, 24)))

    def beside_what_makes_x(x_RD, w_FD):
        return cpu_products.by_transpose(jnp.sin(x_RD), w_FD)

    text = jax.jit(beside_what_makes_x).lower(x_RD, w_FD).compile().as_text()
    computations = re.split(r"\n(?=(?:ENTRY )?%)", text)
    (sums,) = (x.split()[0] for x in computations if re.search(r"[^%]\breduce\(", x))
    (caller,) = (x for x in text.splitlines() if f"calls={sums}," in x)
    assert "__ynn_fusion" in caller


@pytest.mark.parametrize(("deep", "summed"), [(512, True), (513, False)])
def test_what_fits_no_first_cache_is_no_sum(deep, summed):
    shapes = [jax.ShapeDtypeStruct((size, deep), jnp.float32) for size in (4, 48)]
    anew = functools.partial(cpu_products.by_transpose)
    text = jax.jit(anew).lower(*shapes).as_text()
    assert ("stablehlo.reduce" in text, "stablehlo.dot" in text) == (summed, not summed)


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
