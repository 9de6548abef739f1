"""Every kernel compiles for the chips that it is for: it lowers, and it fits."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import topologies
from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import selfcheck
from dllm_jax.models.mask import Mask, ranged
from dllm_jax.pallas_kernels import choice

TPUS = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1")
# H100 and H200 are one target, sm_90a; the smaller one is taken here, and compile_test
# takes the other.
CHIPS = *((chip, "tpu") for chip in TPUS), ("h100:1", "gpu")


def arrays(dtype, *shapes):
    """Returns what stands for arrays."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def compiled(topology, f, *args, ours=True, **options):
    """Returns f compiled for one device of a topology; `ours`: with a kernel in it."""
    try:
        device = topologies.devices(topology)[0]
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    mesh = sharding.make_mesh(devices=[device])
    place = NamedSharding(mesh, PartitionSpec())
    structs = jax.tree.map(lambda x: x.update(sharding=place), args)
    with jax.set_mesh(mesh):
        program = jax.jit(f, **options).lower(*structs).compile()
    assert not ours or "custom-call" in program.as_text()
    return program


@pytest.mark.parametrize("topology, implementation", CHIPS)
@pytest.mark.parametrize(
    "heads, kv_heads, size", [(16, 8, 128), (32, 8, 128), (14, 2, 64)]
)
def test_attention_and_its_gradient(topology, implementation, heads, kv_heads, size):
    B, T = 1, 8192
    attention = functools.partial(
        pallas_kernels.attention, implementation=implementation
    )

    def gradient(q, k, v, mask, dout):
        _, pull = jax.vjp(lambda *qkv: attention(*qkv, mask), q, k, v)
        return pull(dout)

    q, k = arrays(jnp.bfloat16, (B, T, heads, size), (B, T, kv_heads, size))
    compiled(topology, gradient, q, k, k, Mask(*arrays(jnp.int32, *[(B, T)] * 5)), q)


# compile_test's update and rollout have a v5p's.
@pytest.mark.parametrize(
    "topology, implementation", [chip for chip in CHIPS if chip[0] != "v5p:2x2x1"]
)
def test_the_head(topology, implementation):
    B, U, D, V = 2, 4096, 4096, 151936
    logprob, draw = (
        functools.partial(op, forbidden=7, implementation=implementation)
        for op in (pallas_kernels.token_logprob, pallas_kernels.token_draw)
    )

    def gradient(x, head, token, weight):
        _, pull = jax.vjp(lambda *xh: logprob(*xh, token), x, head)
        return pull((weight, weight))

    def gradient_of_selection(x, head, token, border):
        def done(x, head):
            return pallas_kernels.selection(
                x,
                head,
                token,
                border,
                rule=pallas_kernels.Rule(threshold=0.9),
                forbidden=7,
                implementation=implementation,
            )

        _, pull = jax.vjp(done, x, head)
        return pull((border, border, border))

    x, few, head = arrays(jnp.bfloat16, (B, U, D), (128, 4, D), (D, V))
    token, weight = *arrays(jnp.int32, (B, U)), *arrays(jnp.float32, (B, U))
    compiled(topology, gradient, x, head, token, weight)
    compiled(topology, gradient_of_selection, x, head, token, weight)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 128))
    compiled(topology, draw, few, head, key, *arrays(jnp.float32, (128,)))


@pytest.mark.parametrize("D, dtype", [(2560, jnp.float32), (8192, jnp.bfloat16)])
def test_the_head_of_a_wide_model(D, dtype):
    """A tile of 512 rows and columns has no room in a v5p's fast memory: float32's is exact."""

    def gradient(x, head, token, weight):
        def logprob(x, head):
            return pallas_kernels.token_logprob(
                x, head, token, forbidden=7, implementation="tpu"
            )

        _, pull = jax.vjp(logprob, x, head)
        return pull((weight, weight))

    x, head = arrays(dtype, (2, 500, D), (D, 32768))
    token, weight = *arrays(jnp.int32, (2, 500)), *arrays(jnp.float32, (2, 500))
    exact = "highest" if dtype == jnp.float32 else None  # compiler.keep_exact
    with jax.default_matmul_precision(exact):
        compiled("v5p:2x2x1", gradient, x, head, token, weight)


@pytest.mark.parametrize("topology, implementation", CHIPS)
@pytest.mark.parametrize("V", [40, 112, 50257])
def test_the_head_of_any_vocabulary(topology, implementation, V):
    """The bundled model's, smaller than a tile; one that no tile divides."""

    def draw_and_logprob(x, head, key, temperature):
        ops = {"forbidden": 7, "implementation": implementation}
        token = pallas_kernels.token_draw(x, head, key, temperature, **ops)[0]
        return pallas_kernels.token_logprob(x, head, token, **ops)

    x, head = arrays(jnp.bfloat16, (2, 96, 128), (128, V))
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    compiled(topology, draw_and_logprob, x, head, key, *arrays(jnp.float32, (2,)))


@pytest.mark.parametrize("topology, implementation", CHIPS)
def test_experts(topology, implementation):
    """SDAR-30B-A3B's; their gradients too."""
    R, E, D, F = 4096, 128, 2048, 768

    def gradient(x, w, sizes, dy):
        def product(x, w):
            return pallas_kernels.grouped_matmul(
                x, w, sizes, implementation=implementation
            )

        _, pull = jax.vjp(product, x, w)
        return pull(dy)

    x, w, dy = arrays(jnp.bfloat16, (R, D), (E, D, F), (R, F))
    sizes = arrays(jnp.int32, (E,))
    program = compiled(topology, gradient, x, w, *sizes, dy)
    dense = 2 * E * x.size  # bytes: the rows once for every expert
    assert program.memory_analysis().temp_size_in_bytes < dense


@pytest.mark.parametrize("topology, implementation", CHIPS)
def test_a_layer_of_experts_is_not_copied_out_of_its_stack(topology, implementation):
    L, R, E, D = 3, 256, 128, 1024

    def forward(x, w, sizes):
        def layer(x_RD, number):
            how = {"implementation": implementation}
            return pallas_kernels.grouped_matmul(x_RD, w, sizes, number, **how), None

        return jax.lax.scan(layer, x, jnp.arange(L))[0]

    x, w = arrays(jnp.bfloat16, (R, D), (L, E, D, D))
    program = compiled(topology, forward, x, w, *arrays(jnp.int32, (E,)))
    assert program.memory_analysis().temp_size_in_bytes < w.size * 2 / L / 4


@pytest.mark.parametrize("topology, implementation", CHIPS)
def test_pages_of_many_long_rows(topology, implementation):
    """256 rows of 32,768 positions: their tables have a MiB, all of a TPU's scalar memory."""
    rows, Q, A, O, heads, kv_heads, size = 256, 4, 1024, 32, 32, 8, 128

    def step(*args):
        return pallas_kernels.paged_attention(*args, implementation=implementation)

    pool, q, k = arrays(
        jnp.bfloat16,
        (2, 4 * A, O, kv_heads, size),
        (rows, 2 * Q, heads, size),
        (rows, Q, kv_heads, size),
    )
    layer, table, start = arrays(jnp.int32, (), (rows, A), (rows,))
    compiled(topology, step, q, (pool, pool), layer, table, start, k, k)


@pytest.mark.parametrize("topology, implementation", CHIPS)
def test_pages_of_many_queries(topology, implementation):
    """16 heads to one of keys, as a part of 64 to 4 on four devices, and wide windows."""
    rows, W, A, O, heads, size = 64, 64, 87, 32, 16, 128

    def step(*args):
        return pallas_kernels.paged_attention(*args, implementation=implementation)

    pool, q, k = arrays(
        jnp.bfloat16, (2, 4 * A, O, 1, size), (rows, W, heads, size), (rows, W, 1, size)
    )
    layer, table, start = arrays(jnp.int32, (), (rows, A), (rows,))
    compiled(topology, step, q, (pool, pool), layer, table, start, k, k)


@pytest.mark.parametrize("topology, implementation", CHIPS)
@pytest.mark.parametrize("rows, Q", [(256, 4), (64, 32)])
@pytest.mark.parametrize(
    "heads, kv_heads, size", [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 2, 128)]
)
def test_pages(topology, implementation, rows, Q, heads, kv_heads, size):
    """SDAR-1.7B, 4B and 8B, heads of 64, and a part of 8B on four devices.

    Blocks of 4 are read two of a row together, as the engine's forwards do.
    """
    windows, A, O = 2 * rows + 512 // Q, 87, 32  # 2,784 positions

    def step(pages, layer, table, start, keep, q, k, v, two, place):
        pages = pallas_kernels.cache_update(pages, layer, table, start, keep, k, v)
        if Q > 4:
            return pages, pallas_kernels.paged_attention(
                q, pages, layer, table, start, k, v, implementation=implementation
            )
        return pages, pallas_kernels.paired_attention(
            *(q, pages, layer, table[:rows], start[:rows], k, v, two, place),
            implementation=implementation,
        )

    pool, q, k = arrays(
        jnp.bfloat16,
        (2, 16 * A, O, kv_heads, size),
        (windows, Q, heads, size),
        (windows, Q, kv_heads, size),
    )
    table, start, layer = arrays(jnp.int32, (windows, A), (windows,), ())
    keep, two = start.update(dtype=bool), start.update(shape=(rows, 2))
    args = (pool, pool), layer, table, start, keep, q, k, k, two, start
    program = compiled(topology, step, *args, donate_argnums=0)
    # Pools are written where they are: what is made is windows, and no pool. XLA's own
    # arrays of heads of 64 lie otherwise: those are copied, at a program's ends.
    if size == 128:
        assert program.memory_analysis().temp_size_in_bytes < pool.size


@pytest.mark.parametrize("rows, W", [(64, 64), (16, 256)])
@pytest.mark.parametrize(
    "heads, kv_heads, size", [(16, 8, 128), (32, 8, 128), (14, 2, 64), (32, 32, 128)]
)
def test_chunks_of_prompts(rows, W, heads, kv_heads, size):
    """SDAR-1.7B and 8B, heads of 64, LLaDA-8B: on a GPU no row's pages are gathered."""
    A, O = 32, 32  # 1,024 positions

    def attend(q, pages, layer, table, end):
        slots = jnp.broadcast_to(jnp.arange(A * O)[None], (rows, A * O))
        return pallas_kernels.chunk_attention(
            q, pages, layer, table, ranged(end, slots), implementation="gpu"
        )

    pool, q = arrays(
        jnp.bfloat16, (2, rows * A, O, kv_heads, size), (rows, W, heads, size)
    )
    layer, table, end = arrays(jnp.int32, (), (rows, A), (rows, W))
    program = compiled("h100:1", attend, q, (pool, pool), layer, table, end)
    # Queries in the order of key heads, and no keys.
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * q.size * 2


@pytest.mark.parametrize("topology, implementation", CHIPS[-2:])
def test_numbers_of_16_bits_where_float32_is_to_be_exact(topology, implementation):
    """As JAX_DEFAULT_MATMUL_PRECISION=highest asks of all products."""
    with jax.default_matmul_precision("highest"):
        test_attention_and_its_gradient(topology, implementation, 14, 2, 64)
        test_the_head_of_any_vocabulary(topology, implementation, 112)
        test_pages_of_many_queries(topology, implementation)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5p:2x2x1"])
def test_a_start_asks_for_no_more_than_a_run(topology, block):
    """Of two blocks of 64 the check had no room: all pages were read without a kernel then."""
    sizes = {"heads": 32, "kv_heads": 8, "held_heads": 8, "head_dim": 128}
    sizes |= {"d_model": 4096, "vocab": 8192, "experts": 0, "expert_ffw": 0}
    wide = selfcheck.Widths(**sizes, dtype="bfloat16", block=block, page=max(block, 32))
    with mock.patch.object(choice, "platform", lambda: "tpu"):
        run, arrays = selfcheck.paged_attention(wide, np.random.default_rng(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    compiled(topology, functools.partial(run, "tpu"), *shapes)
