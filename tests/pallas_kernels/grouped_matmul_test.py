"""The grouped matmul: rows of ragged groups, forward and backward."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax import pallas_kernels
from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.gpu.grouped_matmul import visits

R, E = 48, 5
rng = np.random.default_rng(0)
X, W, OUT = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((R, 8), (E, 8, 12), (R, 12))
)


def pull(implementation):
    """Returns a function of sizes: (output, its gradients in x and w)."""

    @jax.jit
    def run(sizes_E):
        def product(x_RD, w_EDF):
            return pallas_kernels.grouped_matmul(
                x_RD, w_EDF, sizes_E, implementation=implementation
            )

        out, back = jax.vjp(product, X, W)
        return out, *back(OUT)

    return run


RUNS = {name: pull(name) for name in ("reference", "any", "tpu")}


@pytest.mark.parametrize("implementation", ["any", "tpu"])
@hypothesis.given(st.lists(st.integers(0, R), min_size=E, max_size=E))
@hypothesis.example([0, 0, 0, 0, 0])
@hypothesis.example([R, 0, 0, 0, 0])
@hypothesis.example([0, 17, 16, 15, 0])
def test_ragged_groups(implementation, sizes):
    end = np.minimum(np.cumsum(sizes), R)  # what does not fit is cut off
    sizes_E = jnp.asarray(np.diff(end, prepend=0), jnp.int32)
    pairs = zip(RUNS[implementation](sizes_E), RUNS["reference"](sizes_E), strict=True)
    for found, want in pairs:
        np.testing.assert_allclose(found, want, atol=1e-4)


@pytest.mark.parametrize("number", [None, 1])
def test_what_a_tpu_leaves_behind_the_last_group_is_0(monkeypatch, number):
    """Its kernel writes no row of no group, nor such a row's gradient (jaxlib 0.11.2)."""
    plain, sizes_E = jax.lax.ragged_dot, jnp.array([3, 0, 20, 1, 9])

    def left(x_RF, sizes_c):
        written_R1 = (jnp.arange(R) < sizes_c.sum())[:, None]
        return jnp.where(written_R1, x_RF, jnp.nan)

    @jax.custom_vjp
    def kernel(x_RD, w_cDF, sizes_c):
        return left(plain(x_RD, w_cDF, sizes_c), sizes_c)

    def forward(x_RD, w_cDF, sizes_c):
        return kernel(x_RD, w_cDF, sizes_c), (x_RD, w_cDF, sizes_c)

    def backward(saved, dy_RF):
        x_RD, w_cDF, sizes_c = saved
        _, back = jax.vjp(lambda x, w: plain(x, w, sizes_c), x_RD, w_cDF)
        dx_RD, dw_cDF = back(dy_RF)
        return left(dx_RD, sizes_c), dw_cDF, None

    kernel.defvjp(forward, backward)
    monkeypatch.setattr(jax.lax, "ragged_dot", kernel)

    def product(x_RD, w_EDF):
        w = w_EDF if number is None else jnp.stack([-w_EDF, w_EDF])
        how = {"implementation": "tpu"}
        return pallas_kernels.grouped_matmul(x_RD, w, sizes_E, number, **how)

    out, back = jax.vjp(product, X, W)
    wanted = RUNS["reference"](sizes_E)
    for found, want in zip((out, *back(OUT)), wanted, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-4)


@pytest.mark.parametrize("number", [None, 1])
@pytest.mark.parametrize("sizes", [[70, 0, 41], [0, 0, 0], [1, 118, 1]])
def test_the_gpu_kernel_interpreted(sizes, number, capfd):
    """Tiles of 64 rows: of one group, of three, of none, and rows behind the last group.

    The matrices are of more steps than there are buffers, and of more parts than one.
    """
    rng = np.random.default_rng(1)
    stack = (2, 3, 320, 192)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((120, 320), stack if number else stack[1:], (120, 192))
    )
    how = functools.partial(
        pallas_kernels.grouped_matmul, sizes_E=jnp.array(sizes), number=number
    )
    watched = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(watched):
        out, pull = jax.vjp(functools.partial(how, implementation="gpu"), x, w)
        found = out, *pull(dy)
    assert "RACE" not in capfd.readouterr().out
    exact = [z.astype(jnp.float32) for z in (x, w, dy)]
    out, pull = jax.vjp(functools.partial(how, implementation="reference"), *exact[:2])
    for z, want in zip(found, (out, *pull(exact[2])), strict=True):
        assert z.dtype == jnp.bfloat16
        np.testing.assert_allclose(z.astype(jnp.float32), want, atol=0.2, rtol=0.02)


@pytest.mark.parametrize("dtype, width", [("bfloat16", 96), ("float32", 128)])
def test_a_matrix_that_the_gpu_kernel_cannot_take_goes_by_tiles(dtype, width):
    x, w, s = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((8, 64), dtype), ((2, 64, width), dtype), ((2,), "int32"))
    )
    run = functools.partial(pallas_kernels.grouped_matmul, implementation="gpu")
    assert "wgmma" not in str(jax.make_jaxpr(run)(x, w, s))
    whole = w.update(shape=(2, 64, 128), dtype="bfloat16")
    assert "wgmma" in str(jax.make_jaxpr(run)(x.update(dtype="bfloat16"), whole, s))


def test_groups_without_rows_are_not_visited():
    table = visits(jnp.array([0, 70, 0, 0, 41, 1, 0]), 120)
    group, tile, begin, end = (x.tolist() for x in table)
    assert len(group) == 2 + 7 - 1  # as many as any seven sizes of 120 rows can need
    real = [row for row in zip(group, tile, begin, end, strict=True) if row[2] < row[3]]
    assert real == [(1, 0, 0, 64), (1, 1, 64, 70), (4, 1, 70, 111), (5, 1, 111, 112)]
    few = [x.tolist() for x in visits(jnp.array([0, 1, 0, 0, 1, 0, 1, 0]), 3)]
    assert few == [
        [1, 4, 6],
        [0] * 3,
        [0, 1, 2],
        [1, 2, 3],
    ]  # no more than there are rows


def test_the_specification_by_hand():
    sizes = [3, 0, 20, 1, 9]
    found = reference.grouped_matmul(X, W, jnp.asarray(sizes))
    want, row = np.zeros((R, 12)), 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            want[row] = np.asarray(X[row]) @ np.asarray(W[group])
            row += 1
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "any", "tpu"])
def test_a_layer_of_a_stack_is_named_by_its_number(implementation):
    stack_LEDF, sizes_E = jnp.stack([-W, W, 2 * W]), jnp.array([3, 0, 20, 1, 9])
    how = {"implementation": implementation}
    run = jax.jit(
        lambda n: pallas_kernels.grouped_matmul(X, stack_LEDF, sizes_E, n, **how)
    )
    want = reference.grouped_matmul(X, W, sizes_E)
    for number, times in enumerate((-1, 1, 2)):
        np.testing.assert_allclose(run(number), times * want, atol=1e-4)


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation='cuda' does not exist"):
        pallas_kernels.grouped_matmul(X, W, jnp.ones(E, int), implementation="cuda")
