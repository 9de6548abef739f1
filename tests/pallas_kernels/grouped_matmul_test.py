"""The grouped matmul: rows of ragged groups, forward and backward."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dllm_jax import pallas_kernels
from dllm_jax.pallas_kernels import reference

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
    with pytest.raises(ValueError, match="implementation='gpu' does not exist"):
        pallas_kernels.grouped_matmul(X, W, jnp.ones(E, int), implementation="gpu")
