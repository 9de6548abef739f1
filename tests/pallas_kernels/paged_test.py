"""The kernels of pages, interpreted, against the specification."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import mask
from dllm_jax.pallas_kernels import held_pages, reference
from dllm_jax.pallas_kernels.gpu import paged_attention as gpu_paged_attention
from dllm_jax.pallas_kernels.tpu import paged_attention as tpu_paged_attention

L, O, A = 2, 8, 5
START = np.array([0, 5, 16, 40, 99, 17, 24, 1], np.int32)  # 99: beyond all pages
# Copies end when they are waited for, memory begins as NaN, two cores share what is parallel,
# and races are printed.
CAREFUL = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="on_wait", num_cores_or_threads=2
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A row's pages come in several chunks of two, and no width is spared."""
    monkeypatch.setattr(held_pages, "FEW", O)
    monkeypatch.setattr(tpu_paged_attention, "CHUNK", 2 * O * 128 * 2 * 4)
    monkeypatch.setattr(gpu_paged_attention, "TILE", 2 * O)


def normal(*shape, seed=0, dtype=jnp.float32):
    """Returns standard normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def case(B, W, N, K, H, dtype=jnp.float32):
    """Returns the arguments of paged_attention: every row has pages of its own."""
    P = B * A + 3
    pages = tuple(normal(L, P, O, K, H, seed=seed, dtype=dtype) for seed in (1, 2))
    table_BA = np.random.default_rng(3).permutation(P)[: B * A].reshape(B, A)
    q = normal(B, W, N, H, dtype=dtype)
    k, v = (normal(B, W, K, H, seed=seed, dtype=dtype) for seed in (4, 5))
    return q, pages, jnp.int32(1), jnp.array(table_BA), jnp.array(START[:B]), k, v


def spoiled(pages, layer, table_BA, start_B):
    """Returns the pages with NaN wherever no key lies that a row may read."""
    held = np.arange(A)[None] * O < start_B[:, None]
    read = np.zeros(pages[0].shape[:2], bool)
    read[layer, np.asarray(table_BA)[held]] = True
    return tuple(jnp.where(read[..., None, None, None], x, jnp.nan) for x in pages)


def widened(x):
    """Returns numbers of 16 bits as f32, and all else as it is."""
    return x.astype(jnp.float32) if jnp.result_type(x) == jnp.bfloat16 else x


SPECIFIED = jax.jit(reference.paged_attention)
OF_ANY = jax.jit(
    functools.partial(pallas_kernels.paged_attention, implementation="any")
)
OF_CHUNKS = jax.jit(pallas_kernels.chunk_attention)


# One block computes with one warpgroup; with two, in two tiles of its queries.
@pytest.mark.parametrize(
    "implementation, B, W, N, K, H",
    [
        ("tpu", 8, 4, 8, 2, 128),
        ("tpu", 7, 3, 6, 1, 64),
        ("tpu", 4, 32, 4, 4, 64),
        ("gpu", 7, 3, 4, 2, 64),
        ("gpu", 4, 33, 4, 1, 128),
    ],
)
def test_paged_attention_is_the_specification(implementation, B, W, N, K, H, capfd):
    q, pages, *at, k, v = case(B, W, N, K, H)
    want = SPECIFIED(q, pages, *at, k, v)
    found = pallas_kernels.paged_attention(
        q, spoiled(pages, *at), *at, k, v, implementation=implementation, interpret=True
    )
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_a_row_that_is_not_finite_spoils_no_other(implementation):
    """A device's buffers keep what an earlier row had there."""
    q, (k_pool, v_pool), layer, table_BA, start_B, k, v = case(8, 4, 4, 2, 64)
    want = SPECIFIED(q, (k_pool, v_pool), layer, table_BA, start_B, k, v)
    ill = np.asarray(start_B) == 99  # whose pages are all read, before those of 17
    of_ill = np.asarray(table_BA)[ill]
    pages = tuple(pool.at[:, of_ill].set(jnp.nan) for pool in (k_pool, v_pool))
    found = pallas_kernels.paged_attention(
        *(q, pages, layer, table_BA, start_B, k, v),
        implementation=implementation,
        interpret=True,
    )
    assert np.isnan(found[ill]).all()
    np.testing.assert_allclose(found[~ill], want[~ill], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scalars, calls", [(5 * (A + 4), 1), (4 * (A + 4), 2), (1, 5)])
def test_tables_are_halved_where_scalars_are_short(monkeypatch, scalars, calls):
    """A call for so many rows as fit, one at the least; the numbers are the same.

    The second row has no pages: while the first is read those of the third are on their way.
    """
    q, pages, *at, k, v = case(5, 3, 4, 2, 64)
    at[2] = at[2][jnp.array([1, 0, 2, 3, 4])]
    monkeypatch.setattr(tpu_paged_attention, "SCALARS", scalars)
    attend = functools.partial(tpu_paged_attention.attend, interpret=True)
    told = str(jax.make_jaxpr(attend)(q, pages, *at, k, v))
    assert told.count("pallas_call[") == calls
    found = attend(q, spoiled(pages, *at), *at, k, v)
    want = SPECIFIED(q, pages, *at, k, v)
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)


def test_many_queries_have_smaller_chunks(monkeypatch):
    """Their scores of a chunk lie in fast memory; the numbers are the same.

    The largest of one chunk is far from another's: no exponential has room for that.
    """
    q, pages, *at, k, v = case(4, 3, 4, 2, 64)
    q = 100 * q
    want = SPECIFIED(q, pages, *at, k, v)
    assert tpu_paged_attention.pages_of_chunk(O, 2, 64, "float32", 6) == 2
    monkeypatch.setattr(tpu_paged_attention, "SCORES", 2 * 6 * O)
    assert tpu_paged_attention.pages_of_chunk(O, 2, 64, "float32", 6) == 1
    assert tpu_paged_attention.pages_of_chunk(O, 2, 64, "float32", 999) == 1
    found = tpu_paged_attention.attend(
        q, spoiled(pages, *at), *at, k, v, interpret=True
    )
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)


def test_few_rows_share_the_chip_out():
    """132 processors; parts of a tile (here 16 positions) and more; never none."""
    parts_of = gpu_paged_attention.parts_of
    assert [parts_of(16, 16 * tiles) for tiles in (0, 1, 5, 99)] == [1, 1, 5, 8]
    assert [parts_of(blocks, 999) for blocks in (8, 66, 67, 512)] == [16, 2, 1, 1]


@pytest.mark.parametrize("parts", [1, 2])
def test_however_many_blocks_share_a_rows_pages(monkeypatch, parts, capfd):
    q, pages, *at, k, v = case(4, 3, 4, 2, 64)
    monkeypatch.setattr(gpu_paged_attention, "BLOCKS", 8 * parts)
    want = SPECIFIED(q, pages, *at, k, v)
    found = pallas_kernels.paged_attention(
        q, spoiled(pages, *at), *at, k, v, implementation="gpu", interpret=True
    )
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)
    assert "RACE" not in capfd.readouterr().out


# Of one warpgroup, and of two, whose window is several tiles of keys; the last turn has as
# many items as there are blocks, or fewer.
@pytest.mark.parametrize(
    "blocks, B, W, N, K, H",
    [(1, 3, 3, 2, 1, 64), (4, 7, 3, 4, 2, 64), (3, 4, 33, 4, 1, 64)],
)
def test_a_block_goes_from_row_to_row(monkeypatch, blocks, B, W, N, K, H, capfd):
    monkeypatch.setattr(gpu_paged_attention, "BLOCKS", blocks)
    q, pages, *at, k, v = case(B, 2 * W, N, K, H)
    own = k[:, :W], v[:, :W]
    want = SPECIFIED(q, pages, *at, *own)
    found = pallas_kernels.paged_attention(
        q, spoiled(pages, *at), *at, *own, implementation="gpu", interpret=True
    )
    for sees in (np.s_[0, W:], np.s_[1:]):  # row 0 has no pages
        np.testing.assert_allclose(found[sees], want[sees], atol=2e-5, rtol=1e-4)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "implementation, W, N, K, H",
    [("tpu", 4, 8, 2, 128), ("gpu", 4, 8, 2, 64)],
)
def test_more_queries_than_keys(implementation, W, N, K, H, capfd):
    """The first see pages alone, or nothing: then whatever is given for them is finite."""
    q, pages, *at, k, v = case(6, 2 * W, N, K, H)
    own = k[:, :W], v[:, :W]
    want = SPECIFIED(q, pages, *at, *own)
    how = {"implementation": implementation, "interpret": True}
    found = pallas_kernels.paged_attention(q, spoiled(pages, *at), *at, *own, **how)
    assert START[0] == 0 and np.isfinite(found[0, :W]).all()
    for sees in (np.s_[0, W:], np.s_[1:]):
        np.testing.assert_allclose(found[sees], want[sees], atol=2e-5, rtol=1e-4)
    assert "RACE" not in capfd.readouterr().out


# Windows of four rows of a device in the order in which they stand: (row, which of its two).
MIXED = ((2, 1), (0, 0), (3, 0), (0, 1), (2, 0), (1, 1))


@pytest.mark.parametrize("implementation", ["auto", "tpu"])
def test_windows_of_a_row_together_are_each_alone(implementation):
    """On a mesh whose devices have four rows each: two have both windows, two have one."""
    W, N, K, H, devices = 4, 4, 2, 64, 4
    mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
    pages = tuple(normal(L, devices * 4 * A, O, K, H, seed=seed) for seed in (1, 2))
    rng = np.random.default_rng(3)
    table = np.concatenate([rng.permutation(4 * A).reshape(4, A) for _ in range(4)])
    second = np.tile([8, 0, 12, 20], devices)  # where rows' second windows begin
    row, which = np.tile(np.array(MIXED).T, devices)
    device = np.repeat(np.arange(devices), len(MIXED))
    start = second[4 * device + row] - W * (1 - which)
    q, k, v = (
        normal(len(row), W, heads, H, seed=seed)
        for seed, heads in ((4, N), (5, K), (6, K))
    )
    windows = np.tile([[1, 3], [5, 5], [4, 0], [2, 2]], (devices, 1))
    of_windows = table[4 * device + row], start

    def alone(pages, table_RA, start_R):
        at = jnp.int32(1), table_RA, start_R
        pages = pallas_kernels.cache_update(pages, *at, which == 0, k, v)
        return pages, pallas_kernels.paged_attention(
            q, pages, *at, k, v, implementation="reference"
        )

    def together(pages):
        return pallas_kernels.paired_attention(
            *(q, pages, jnp.int32(1), table, second, k, v, windows, 2 * row + which),
            implementation=implementation,
            interpret=True,
        )

    with jax.set_mesh(mesh):
        written, want = jax.jit(alone)(pages, *of_windows)
        found = jax.jit(together)(written)
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)


def test_a_table_is_cut_to_few_widths():
    """Powers of two, but none of more than three quarters of the whole."""
    assert held_pages.widths(1) == [1]
    assert held_pages.widths(5) == [1, 2, 5]
    assert held_pages.widths(6) == [1, 2, 4, 6]
    assert held_pages.widths(18) == [1, 2, 4, 8, 18]
    assert held_pages.widths(64) == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("B, few, ways", [(1, 4, 2), (2, 4, 3), (4, 4, 4), (1, 64, 1)])
def test_few_rows_have_few_programs(monkeypatch, B, few, ways):
    """Of 9 pages: 4 and all for one row; from 2 on for two; 1, 2, 4 and all for four."""
    monkeypatch.setattr(held_pages, "FEW", few * O)
    table_BA, needed = jnp.zeros((B, 9), jnp.int32), jnp.int32(2)
    made = []

    def run(table_BA):
        made.append(table_BA.shape[1])
        return table_BA.sum(axis=1)

    jax.eval_shape(lambda: held_pages.over_held(run, needed, O, table_BA))
    assert made == [1, 2, 4, 9][-ways:]


@pytest.mark.parametrize("width", range(A + 1))
def test_no_more_pages_are_read_than_rows_hold(width):
    """Behind them, from the next of a few widths on, may be NaN; nothing else differs."""
    q, pages, layer, table_BA, start_B, k, v = case(4, 3, 4, 2, 24)
    at = layer, table_BA, jnp.minimum(start_B, width * O).at[2].set(width * O)
    want = SPECIFIED(q, pages, *at, k, v)
    cut = min(x for x in held_pages.widths(A) if x >= width)
    behind_BA = jnp.arange(A)[None] >= cut
    page = jnp.where(behind_BA, table_BA, len(pages[0][0]))
    spoilt = tuple(x.at[:, page].set(jnp.nan, mode="drop") for x in pages)
    found = OF_ANY(q, spoilt, *at, k, v)
    np.testing.assert_allclose(found, want, atol=1e-6)  # summed in another order


@pytest.mark.parametrize("reach", [1, 2, 5])
def test_chunks_read_no_more_pages_than_they_see(reach):
    """Behind them, up to a power of two, may be NaN; the mask says who sees what."""
    q, pages, layer, table_BA, *_ = case(4, 6, 4, 2, 24)
    end_BW = jnp.minimum(2 + jnp.arange(24).reshape(4, 6), reach * O)
    slots_BS = jnp.broadcast_to(jnp.arange(A * O)[None], (4, A * O))
    seen = mask.ranged(end_BW.at[3].set(reach * O), slots_BS)
    k_BSKH, v_BSKH = reference.gathered(pages, layer, table_BA)
    want = reference.attention(q, k_BSKH, v_BSKH, seen)
    behind_BA = jnp.arange(A)[None] >= 1 << (reach - 1).bit_length()
    page = jnp.where(behind_BA, table_BA, len(pages[0][0]))
    spoilt = tuple(x.at[:, page].set(jnp.nan, mode="drop") for x in pages)
    found = OF_CHUNKS(q, spoilt, layer, table_BA, seen)
    np.testing.assert_allclose(found, want, atol=1e-6)  # summed in another order


def chunk_case(W, N, K, H, O):
    """Returns (arguments of chunk_attention, NaN behind every row's ends; the answer).

    Four rows of 96 positions: chunks that begin them, lie in their middle and end them,
    and one of which nothing is real. Blocks of 4 see themselves and what lies before,
    but nothing behind a row's end.
    """
    slots, B = 96, 4
    table_BA = np.random.default_rng(3).permutation(B * slots // O + 3)
    table_BA = table_BA[: B * slots // O].reshape(B, -1)
    shape = L, B * slots // O + 3, O, K, H
    pages = tuple(normal(*shape, seed=seed) for seed in (1, 2))
    q, layer = normal(B, W, N, H), jnp.int32(1)
    start_B1 = np.array([0, 28, slots - W, 0])[:, None].clip(0)
    end_B1 = np.array([W, 28 + W - 3, slots, 0])[:, None].clip(0, slots)
    end_BW = np.minimum((start_B1 + np.arange(W)[None]) // 4 * 4 + 4, end_B1)
    slots_BS = jnp.broadcast_to(jnp.arange(slots)[None], (B, slots))
    seen = mask.ranged(jnp.asarray(end_BW, "int32"), slots_BS)
    k_BSKH, v_BSKH = reference.gathered(pages, layer, table_BA)
    want = reference.attention(q, k_BSKH, v_BSKH, seen)
    held = np.arange(slots // O)[None] * O < end_B1
    read = np.zeros(shape[:2], bool)
    read[1, table_BA[held]] = True
    pages = tuple(jnp.where(read[..., None, None, None], x, jnp.nan) for x in pages)
    want = jnp.where(end_BW[..., None, None] > 0, want, 0.0)
    return (q, pages, layer, jnp.array(table_BA), seen), want


# One warpgroup computes, or two, in one tile of queries or in several, of which the
# first reads less than the last. Several blocks share a row's pages, or one has all.
@pytest.mark.parametrize(
    "W, N, K, H, O, tile, parts",
    [
        (8, 4, 2, 64, 8, 16, 5),
        (32, 4, 2, 64, 8, 16, 1),
        (40, 4, 2, 128, 8, 16, 1),
        (40, 4, 1, 64, 8, 16, 2),
        (72, 7, 1, 64, 32, 64, 1),
        (40, 2, 2, 64, 16, 16, 1),
    ],
)
def test_chunks_of_prompts(monkeypatch, W, N, K, H, O, tile, parts, capfd):
    args, want = chunk_case(W, N, K, H, O)
    _, tiles_of_queries = gpu_paged_attention.cut(W * N // K)
    monkeypatch.setattr(gpu_paged_attention, "TILE", tile)
    monkeypatch.setattr(gpu_paged_attention, "BLOCKS", parts * 4 * K * tiles_of_queries)
    found = pallas_kernels.chunk_attention(*args, implementation="gpu", interpret=True)
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "B, A, K, scalars", [(3, 5, 2, 999), (4, 40, 1, 999), (5, 33, 4, 50)]
)
def test_pages_are_gathered_in_their_order(monkeypatch, B, A, K, scalars):
    """As many as two steps of a kernel take, fewer and more; tables in one piece and several."""
    monkeypatch.setattr(tpu_paged_attention, "SCALARS", scalars)
    rng = np.random.default_rng(0)
    pages = tuple(normal(L, 170, 8, K, 64, seed=seed) for seed in (1, 2))
    table_BA = jnp.asarray(rng.integers(0, 170, (B, A)), jnp.int32)
    found = tpu_paged_attention.gathered(pages, 1, table_BA, interpret=True)
    want = reference.gathered(pages, 1, table_BA)
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_chunks_over_pages_that_a_kernel_gathers(monkeypatch):
    (q, pages, layer, table_BA, seen), want = chunk_case(24, 4, 2, 64, 8)
    pages = tuple(
        jnp.nan_to_num(x) for x in pages
    )  # all that is gathered is multiplied
    gathered = []
    plain = tpu_paged_attention.gathered
    monkeypatch.setattr(
        tpu_paged_attention,
        "gathered",
        lambda *args, **how: gathered.append(1) or plain(*args, **how),
    )
    found = pallas_kernels.chunk_attention(
        q, pages, layer, table_BA, seen, implementation="tpu", interpret=True
    )
    assert gathered
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
@pytest.mark.parametrize("K", [1, 2])
def test_chunks_are_split_over_a_mesh(implementation, K):
    """Traced only: the GPU's interpreter has one device. Its kernel gathers nothing."""
    q, (table_BA, end_BW), layer = (
        jax.ShapeDtypeStruct((8, 72, 2, 64), jnp.bfloat16),
        (jax.ShapeDtypeStruct((8, width), jnp.int32) for width in (A, 72)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    pools = (jax.ShapeDtypeStruct((L, 40, O, K, 64), jnp.bfloat16),) * 2

    def run(q, pools, layer, table_BA, end_BW):
        slots_BS = jnp.broadcast_to(jnp.arange(A * O)[None], (8, A * O))
        seen = mask.ranged(end_BW, slots_BS)
        how = {"implementation": implementation}
        return pallas_kernels.chunk_attention(q, pools, layer, table_BA, seen, **how)

    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, model=2)):
        told, out = jax.make_jaxpr(run, return_shape=True)(
            q, pools, layer, table_BA, end_BW
        )
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert "shard_map[" in str(told)
    assert ("gather[" in str(told)) == (implementation == "tpu")


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_bfloat16_is_accumulated_in_f32(implementation):
    args = case(4, 4, 8, 2, 128, jnp.bfloat16)
    found = pallas_kernels.paged_attention(
        *args, implementation=implementation, interpret=True
    )
    exact = SPECIFIED(*jax.tree.map(widened, args))
    assert found.dtype == jnp.bfloat16
    error = np.abs(found.astype(jnp.float32) - exact)
    assert error.max() < 0.012 and error.mean() < 8.5e-4  # rounding at the end: 4.7e-4


def test_copies_of_tpu_kernels_do_not_race(monkeypatch, capsys):
    inputs = case(4, 2, 2, 1, 64)
    found = pallas_kernels.paged_attention(
        *inputs, implementation="tpu", interpret=CAREFUL
    )
    np.testing.assert_allclose(found, SPECIFIED(*inputs), atol=2e-5, rtol=1e-4)
    _, pages, layer, table_BA, _, k, v = inputs
    keep_B = jnp.array([True, True, False, True])
    start_B = jnp.array([0, O - 1, 16, O * A - 2])  # the second crosses a page's end
    inputs = pages, layer, table_BA, start_B, keep_B, k, v
    found = pallas_kernels.cache_update(
        *inputs, implementation="tpu", interpret=CAREFUL
    )
    same(found, reference.cache_update(*inputs))
    monkeypatch.setattr(tpu_paged_attention, "AT_ONCE", 8)  # of 20 pages
    found = tpu_paged_attention.gathered(pages, layer, table_BA, interpret=CAREFUL)
    same(found, reference.gathered(pages, layer, table_BA))
    assert "RACE" not in capsys.readouterr().out


def same(found, want):
    """Asserts that pools are equal bit for bit."""
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))


@pytest.mark.parametrize("implementation", ["tpu"])
@pytest.mark.parametrize(
    "dtype, W, K, H", [("float32", 4, 2, 128), ("bfloat16", 3, 1, 64)]
)
def test_cache_update_is_the_specification(implementation, dtype, W, K, H):
    # Windows that fill a page's end, cross it, begin the row and end it.
    start_B = jnp.array([0, 4, 5, 7, 16, O * A - W, 12, 6])
    _, pages, layer, table_BA, _, k, v = case(8, W, K, K, H, jnp.dtype(dtype))
    run = jax.jit(
        lambda keep_B: pallas_kernels.cache_update(
            *(pages, layer, table_BA, start_B, keep_B, k, v),
            implementation=implementation,
            interpret=True,
        )
    )
    for pattern in (0b11111111, 0, 0b00010110, 0b10000000, 0b01111111):
        keep_B = (pattern >> jnp.arange(8)) % 2 == 1
        want = reference.cache_update(pages, layer, table_BA, start_B, keep_B, k, v)
        same(run(keep_B), want)


@pytest.mark.parametrize("implementation", ["auto", "tpu"])
@pytest.mark.parametrize("K", [1, 2])
def test_on_a_mesh(implementation, K):
    """Rows, pages and, where they divide, heads are split; tables are of one device."""
    B, W, N, H = 8, 2, 4, 64
    mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
    q, _, layer, _, start_B, k, v = case(B, W, N, K, H)
    pages = tuple(normal(L, 4 * 10, O, K, H, seed=seed) for seed in (1, 2))
    rng = np.random.default_rng(3)
    local_BA = np.concatenate([rng.permutation(10).reshape(2, A) for _ in range(4)])
    keep_B, start_B = start_B % 2 == 0, start_B % (O * A - W)

    def both(table_BA, implementation):
        update, attend = (
            functools.partial(op, implementation=implementation, interpret=True)
            for op in (pallas_kernels.cache_update, pallas_kernels.paged_attention)
        )
        at = layer, table_BA, start_B
        written = update(pages, *at, keep_B, k, v)
        return written, attend(q, written, *at, k, v)

    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(both, implementation=implementation))
        found = run(local_BA)
    first_B1 = np.arange(B)[:, None] // 2 * 10  # page of all: the device's first
    want = both(jnp.array(local_BA + first_B1), "reference")
    same(found[0], want[0])
    np.testing.assert_allclose(found[1], want[1], atol=2e-5, rtol=1e-4)
    assert ("model" in found[1].sharding.spec) == (K == 2)
