"""Which module computes an op, and that the modules of two chips are called alike."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import pallas_kernels
from dllm_jax.models import mask
from dllm_jax.pallas_kernels import choice, reference

B, T, N, H = 2, 16, 4, 64
FUNCTIONS = {  # of the contract
    "attention": ["forward", "backward"],
    "cache_update": ["update"],
    "grouped_matmul": ["multiply"],
    "paged_attention": ["attend"],
    "selection": ["pick", "behind", "pick_gradient"],
    "token_draw": ["draw"],
    "token_logprob": ["pick", "pick_gradient"],
}


def normal(*shape, dtype=jnp.float32):
    """Returns standard normal numbers."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def attention_inputs(B, T, N, H, dtype=jnp.float32):
    """Returns (q, k, v, mask) of causal attention."""
    x = normal(B, T, N, H, dtype=dtype)
    return x, x, x, mask.causal(jnp.broadcast_to(jnp.arange(T), (B, T)))


def page_inputs(B, W, K, H, O=8):
    """Returns (pages, layer, table, start) and (k, v), as paged_attention takes them."""
    pages = normal(2, 5 * B, O, K, H), normal(2, 5 * B, O, K, H)
    table_BA = jnp.arange(5 * B).reshape(B, 5)
    fresh = normal(B, W, K, H), normal(B, W, K, H)
    return (pages, jnp.int32(1), table_BA, jnp.arange(B)), fresh


def test_modules_of_an_op_are_called_alike():
    assert set(FUNCTIONS) == {op for op, _ in choice.KERNELS}
    for op, names in FUNCTIONS.items():
        modules = [choice.module(*key) for key in choice.KERNELS if key[0] == op]
        for name in names:
            ways = {str(inspect.signature(getattr(m, name))) for m in modules}
            assert len(ways) == 1, (op, name, ways)


def test_auto_is_the_specification_where_there_is_no_kernel():
    inputs = attention_inputs(B, 12, N, 8)
    jaxpr = str(jax.make_jaxpr(pallas_kernels.attention)(*inputs))
    assert jaxpr == str(jax.make_jaxpr(reference.attention)(*inputs))


LONG = 4096  # slots: more than two tiles anywhere


@pytest.mark.parametrize(
    "op, implementation, platform, size, slots, name",
    [
        ("attention", "auto", "tpu", H, 280, "tpu.attention"),
        ("attention", "auto", "tpu", 8, LONG, "tiled_attention"),
        ("attention", "auto", "gpu", H, LONG, "tiled_attention"),
        ("attention", "auto", "gpu", H, 280, None),
        ("attention", "platform", "gpu", H, 280, "gpu.attention"),
        ("attention", "platform", "gpu", 8, 280, None),
        ("attention", "auto", "cpu", H, 280, "tiled_attention"),
        ("attention", "platform", "cpu", 8, 280, "tiled_attention"),
        ("attention", "auto", "cpu", H, 128, None),
        ("attention", "any", "cpu", 8, 4, "tiled_attention"),
        ("attention", "reference", "tpu", H, LONG, None),
        ("attention", "reference", "cpu", H, LONG, None),
        ("cache_update", "auto", "cpu", H, None, None),
        ("grouped_matmul", "auto", "cpu", None, None, "tiled_matmul"),
        ("grouped_matmul", "auto", "gpu", None, None, "tiled_matmul"),
        ("grouped_matmul", "platform", "gpu", None, None, "gpu.grouped_matmul"),
        ("grouped_matmul", "platform", "tpu", None, None, "tpu.grouped_matmul"),
        ("paged_attention", "auto", "cpu", H, None, "held_pages"),
        ("paged_attention", "auto", "tpu", 8, None, "held_pages"),
        ("paged_attention", "auto", "tpu", H, None, "tpu.paged_attention"),
        ("token_draw", "auto", "cpu", None, None, "tiled_head"),
        ("token_draw", "auto", "tpu", None, None, "tpu.token_logprob"),
        ("token_logprob", "auto", "gpu", None, None, None),
        ("token_logprob", "platform", "gpu", None, None, "gpu.token_logprob"),
    ],
)
def test_which_module_is_taken(
    monkeypatch, op, implementation, platform, size, slots, name
):
    monkeypatch.setattr(choice, "platform", lambda: platform)
    taken = choice.kernel(op, implementation, size, slots)
    assert (taken and taken.__name__) == (name and f"dllm_jax.pallas_kernels.{name}")


@pytest.mark.parametrize("T, S, tiled", [(128, 128, 0), (136, 136, 1), (8, 136, 1)])
def test_attention_tells_how_many_queries_and_keys_it_has(T, S, tiled):
    q, (_, k, v, seen) = normal(1, T, 2, 8), attention_inputs(1, S, 2, 8)
    seen = mask.ranged(seen.q_end_BT[:, :T], seen.k_pos_BS)
    jaxpr = jax.make_jaxpr(pallas_kernels.attention)(q, k, v, seen)
    assert ("flash_forward" in str(jaxpr)) == tiled
    # Cached keys are read where they are.
    jaxpr = jax.make_jaxpr(pallas_kernels.attention)(
        q[:, :8],
        k[:, :8],
        v[:, :8],
        mask.ranged(seen.q_end_BT[:, :8], jnp.arange(S + 8)[None]),
        cached=(k, v),
    )
    assert "flash_forward" not in str(jaxpr)


def test_the_package_imports_no_kernel():
    code = "import sys; import dllm_jax.pallas_kernels; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=-1, check=True)
    loaded = done.stdout.decode().split()
    assert "dllm_jax.pallas_kernels.reference" in loaded
    assert not [name for name in loaded if "pallas_kernels.gpu" in name]
    assert not [name for name in loaded if "experimental.pallas" in name]


def test_auto_is_the_kernel_of_the_mesh_where_it_takes_the_heads(monkeypatch):
    monkeypatch.setattr(choice, "platform", lambda: "tpu")
    for size, kernel in ((64, True), (8, False)):
        (pages, *at), fresh = page_inputs(2, 4, 1, size)
        q, keep_B = normal(2, 4, 2, size), at[2] > 0
        read = jax.make_jaxpr(pallas_kernels.paged_attention)(q, pages, *at, *fresh)
        write = jax.make_jaxpr(pallas_kernels.cache_update)(pages, *at, keep_B, *fresh)
        assert ("pallas_call" in str(read)) == ("pallas_call" in str(write)) == kernel


def test_what_does_not_exist_is_said():
    (pages, *at), fresh = page_inputs(1, 4, 1, 8)
    inputs = {
        "attention": attention_inputs(1, 4, 2, 8),
        "paged_attention": (normal(1, 4, 2, 8), pages, *at, *fresh),
        "cache_update": (pages, *at, at[2] > 0, *fresh),
    }
    for op, args in inputs.items():
        run = getattr(pallas_kernels, op)
        missing = f"{op}: implementation='triton'.*'reference'.*'tpu'"
        with pytest.raises(ValueError, match=missing):
            run(*args, implementation="triton")
        with pytest.raises(ValueError, match=f"{op}.*heads of size.*not 8"):
            run(*args, implementation="tpu")


def test_numbers_and_pages_that_gpus_do_not_take_are_said():
    with pytest.raises(ValueError, match="bfloat16.*not float32"):
        pallas_kernels.attention(*attention_inputs(1, 4, 2, H), implementation="gpu")
    for O, message in ((8, "bfloat16.*not float32"), (6, "pages of 8.*not 6")):
        at, fresh = page_inputs(1, 4, 1, H, O)
        with pytest.raises(ValueError, match=message):
            pallas_kernels.paged_attention(
                normal(1, 4, 2, H), *at, *fresh, implementation="gpu"
            )


@pytest.mark.parametrize("begun, traces", [("choice.begin('tpu')", 1), ("", 2)])
def test_what_is_traced_after_the_beginning_is_traced_once(begun, traces):
    program = f"""
import jax
from dllm_jax.pallas_kernels import choice
{begun}
seen = []
traced = jax.jit(lambda x: seen.append(x) or x)
traced(1.0)
choice.module("attention", "tpu")
traced(1.0)
assert len(seen) == {traces}, seen
"""
    subprocess.run([sys.executable, "-c", program], check=True)
