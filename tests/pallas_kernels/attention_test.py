"""The attention kernels, interpreted, against the specification; the tiles they visit."""

import functools
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import mask
from dllm_jax.models.mask import FAR, Mask
from dllm_jax.pallas_kernels import choice, reference, tiles
from dllm_jax.pallas_kernels.gpu import attention as gpu_attention
from dllm_jax.pallas_kernels.tpu import attention as tpu_attention

B, T, N, H = 2, 200, 4, 64
POS = jnp.broadcast_to(jnp.arange(T), (B, T))
LEN = jnp.array([T, 37])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in each direction, the last ones partly padding."""
    monkeypatch.setattr(tpu_attention, "TILE_T", 128)
    monkeypatch.setattr(tpu_attention, "TILE_S", 256)
    monkeypatch.setattr(tpu_attention, "PART", 128)
    monkeypatch.setattr(choice, "CHUNK_TILE", 128)


def normal(*shape, seed=0, dtype=np.float32):
    """Returns standard normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def packed_row(block: int, prompts, rng):
    """Returns (begin, end, group) of trajectories with noised copies of some blocks."""
    begin, end, group, at = [], [], [], 0
    for length in prompts:
        pos = np.arange(length)
        begin += [at] * length
        end += list(np.minimum(at + (pos // block + 1) * block, at + length))
        group += [-1] * length
        for j in sorted(rng.choice(-(-length // block), 4, replace=False)):
            begin += [at] * block
            end += [at + j * block] * block
            group += [len(begin)] * block
        at = len(begin)
    pad = T - len(begin)
    assert pad > 0
    full = begin + [0] * pad, end + [0] * pad, group + [-1] * pad
    return [np.array(x, np.int32) for x in full]


def packed() -> Mask:
    """Returns two packed rows of several trajectories, each with padding behind."""
    rng = np.random.default_rng(3)
    rows = [packed_row(4, (60, 31, 50), rng), packed_row(8, (70, 50), rng)]
    return mask.packed(*(jnp.array(x) for x in zip(*rows, strict=True)))


MASKS = {
    "causal": mask.causal(POS),
    "block": mask.block(POS, 4),
    "full, ragged": mask.full(POS, LEN),
    "packed": packed(),
}


def dense(seen: Mask):
    """Returns who sees whom as [B, T, S] booleans."""
    pos, group = seen.k_pos_BS[:, None], seen.k_group_BS[:, None]
    inside = (pos >= seen.q_begin_BT[..., None]) & (pos < seen.q_end_BT[..., None])
    return np.asarray(inside | (group == seen.q_group_BT[..., None]))


def with_gradients(f, q, k, v, seen, dout):
    """Returns (output, dq, dk, dv)."""
    out, pull = jax.vjp(lambda *qkv: f(*qkv, seen), q, k, v)
    return out, *pull(dout)


SPECIFIED = jax.jit(functools.partial(with_gradients, reference.attention))
SPECIFIED_ALONE = jax.jit(reference.attention)


# The interpreters are slow: few heads; of GPU kernels two that share a key head.
KINDS = [
    *(("any", N, 1, H), ("any", N, 2, 24), ("any", 2, 2, H)),
    *(("tpu", 2, 1, H), ("tpu", N, 2, 2 * H)),
    *(("gpu", 2, 1, H), ("gpu", 2, 1, 2 * H)),
]


@pytest.mark.parametrize("implementation, N, K, H", KINDS[:-1])
def test_the_kernel_is_the_specification_under_every_mask(
    implementation, N, K, H, capfd, monkeypatch
):
    if H == 64:  # a TPU's keys in two tiles, and not in two parts of one
        monkeypatch.setattr(tpu_attention, "TILE_S", 128)
    if H > 64:  # its gradients in two shares of the queries, and not in one
        monkeypatch.setattr(tpu_attention, "GRADIENT", 1)
        assert len(tpu_attention.plan(MASKS["packed"], N // K, H)[1]) == 2
    kernel = functools.partial(
        pallas_kernels.attention, implementation=implementation, interpret=True
    )
    found = jax.jit(functools.partial(with_gradients, kernel))
    q, dout = normal(B, T, N, H), normal(B, T, N, H, seed=1)
    k, v = normal(B, T, K, H, seed=2), normal(B, T, K, H, seed=3)
    # Ragged rows under the GPU's kernel are test_few_queries_over_cached_keys'.
    names = ["packed"] if implementation == "gpu" else MASKS
    for name in names:
        seen = MASKS[name]
        # What sees nothing gets 0 and gives no gradient, where the specification has a mean.
        blind_BT11 = ~dense(seen).any(axis=2)[..., None, None]
        args = q, k, v, seen
        want, *gradients = SPECIFIED(*args, jnp.where(blind_BT11, 0, dout))
        want = jnp.where(blind_BT11, 0, want), *gradients
        for x, y in zip(found(*args, dout), want, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4, err_msg=name)
    assert "RACE" not in capfd.readouterr().out


def test_each_query_head_of_a_gpu_has_its_key_head():
    kernel = functools.partial(
        pallas_kernels.attention, implementation="gpu", interpret=True
    )
    q, dout = normal(1, 100, N, H), normal(1, 100, N, H, seed=1)
    k, v = normal(1, 100, 2, H, seed=2), normal(1, 100, 2, H, seed=3)
    args = q, k, v, mask.causal(POS[:1, :100]), dout
    found = jax.jit(functools.partial(with_gradients, kernel))(*args)
    for x, y in zip(found, SPECIFIED(*args), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation, N, K, H", KINDS)
def test_few_queries_over_cached_keys(implementation, N, K, H):
    W, S, start = 4, 150, jnp.array([96, 0])
    q, k, v = normal(B, W, N, H), normal(B, W, K, H, seed=1), normal(B, W, K, H, seed=2)
    cached = normal(B, S, K, H, seed=3), normal(B, S, K, H, seed=4)
    own = mask.full(start[:, None] + jnp.arange(W)[None], start + W)
    seen = mask.beside(own, jnp.arange(S)[None] < start[:, None])
    kernel = functools.partial(
        pallas_kernels.attention, implementation=implementation, interpret=True
    )
    found = jax.jit(kernel)(q, k, v, seen, cached=cached)
    want = SPECIFIED_ALONE(q, k, v, seen, cached=cached)
    np.testing.assert_allclose(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["any", "tpu", "gpu"])
def test_bfloat16_is_accumulated_in_f32(implementation):
    q, k, v = (normal(1, T, 2, H, seed=n, dtype=jnp.bfloat16) for n in range(3))
    seen = mask.block(POS[:1], 4)
    kernel = functools.partial(
        pallas_kernels.attention, implementation=implementation, interpret=True
    )
    found = jax.jit(kernel)(q, k, v, seen)
    exact = SPECIFIED_ALONE(*(x.astype(jnp.float32) for x in (q, k, v)), seen)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.03)


def test_warpgroups_that_take_turns_compute_the_same(monkeypatch, capfd):
    """Some tiles of queries see three of keys, some none; bit for bit."""
    T = 300
    q, k, v = (normal(1, T, n, H, seed=n) for n in (2, 1, 1))
    pos = jnp.arange(T)[None]
    seen = mask.full(pos, jnp.array([T]))
    seen = seen.replace(q_end_BT=jnp.where(pos < 128, 0, seen.q_end_BT))
    found = []
    for turns in (True, False):
        monkeypatch.setattr(gpu_attention, "IN_TURN", turns)
        found.append(gpu_attention.forward(q, k, v, seen, interpret=True))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
    want = SPECIFIED_ALONE(q, k, v, seen)
    np.testing.assert_allclose(found[0][0][:, 128:], want[:, 128:], atol=2e-5)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("implementation", ["any", "tpu"])
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "model": 2}, {"model": 4}])
def test_on_a_mesh(implementation, sizes):
    heads, rows = 2, sizes.get("data", 1) * sizes.get("fsdp", 1)
    devices = jax.devices()[: rows * sizes["model"]]
    mesh = sharding.make_mesh(**{"fsdp": 1, **sizes}, devices=devices)
    q, k, v = (normal(rows, T, n, H, seed=n) for n in (2 * heads, heads, heads))
    seen = mask.block(jnp.broadcast_to(jnp.arange(T), (rows, T)), 4)
    kernel = functools.partial(
        pallas_kernels.attention, implementation=implementation, interpret=True
    )
    want = SPECIFIED(q, k, v, seen, q)
    planned = pallas_kernels.planned(seen, 2, H, implementation)
    assert planned.tiles is not None
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(with_gradients, kernel))(q, k, v, planned, q)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)
    # Heads that do not divide the axis are computed everywhere.
    assert ("model" in found[0].sharding.spec) == (heads % mesh.shape["model"] == 0)


def test_gpu_kernels_are_split_over_a_mesh():
    """Their interpreter has one device, so this is traced only."""
    q, k = (jax.ShapeDtypeStruct((4, T, n, H), jnp.bfloat16) for n in (4, 2))
    seen = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, T), x.dtype), packed())
    kernel = functools.partial(pallas_kernels.attention, implementation="gpu")
    plan = functools.partial(pallas_kernels.planned, G=2, H=H, implementation="gpu")
    seen = jax.eval_shape(plan, seen)
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, model=2)):
        run = functools.partial(with_gradients, kernel)
        found = jax.eval_shape(run, q, k, k, seen, q)
    assert [x.shape for x in found] == [q.shape, q.shape, k.shape, k.shape]


def test_xlas_tiles_keep_no_row_of_scores():
    """Neither forward nor backward has an array of as many numbers as T x T."""
    q = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
    seen = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 2048), x.dtype), packed())
    kernel = functools.partial(pallas_kernels.attention, implementation="any")
    run = functools.partial(with_gradients, kernel)
    shapes = re.findall(r"\w+\[([\d,]+)\]", str(jax.make_jaxpr(run)(q, q, q, seen, q)))
    assert 2048 * 8 <= max(math.prod(map(int, x.split(","))) for x in shapes) < 2048**2


# ---- Tiles ---------------------------------------------------------------------------


FEW = st.sampled_from((4, 11))  # sizes: each pair of them is compiled


@st.composite
def masks(draw):
    """Returns a mask of small numbers: holes, groups, empty ranges and padding."""
    t, s = draw(FEW), draw(FEW)

    def ints(size, low, high):
        numbers = st.lists(st.integers(low, high), min_size=size, max_size=size)
        return np.array([draw(numbers)], np.int32)

    pos = ints(s, 0, 12)
    return Mask(
        q_begin_BT=ints(t, 0, 12),
        q_end_BT=ints(t, 0, 12),
        q_group_BT=ints(t, -1, 4),
        k_pos_BS=np.where(pos > 9, np.int32(FAR), pos),
        k_group_BS=np.where((group := ints(s, -2, 4)) < 0, np.int32(-2), group),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def tiled(seen, t, s):
    """Returns tiles.mask_arrays, and the kinds of its tiles."""
    arrays = tiles.mask_arrays(seen, t, s)
    return arrays, tiles.kinds(*arrays, t, s)


@hypothesis.given(masks(), st.sampled_from((1, 3)), st.sampled_from((2, 5)))
def test_no_tile_is_skipped_that_holds_a_seen_key(seen, t, s):
    (q_arrays, k_arrays), kinds = tiled(seen, t, s)
    kinds = np.asarray(kinds)[0]
    sees = dense(Mask(*q_arrays, *k_arrays))[0]
    for (i, j), kind in np.ndenumerate(kinds):
        tile = sees[i * t : (i + 1) * t, j * s : (j + 1) * s]
        assert kind > 0 or not tile.any()
        assert kind < 2 or tile.all()


def test_the_packed_layout_is_mostly_skipped():
    q_arrays, k_arrays = tiles.mask_arrays(MASKS["packed"], 16, 16)
    kinds = np.asarray(tiles.kinds(q_arrays, k_arrays, 16, 16))
    sees = dense(Mask(*q_arrays, *k_arrays)).reshape(B, 13, 16, 13, 16)
    needed = sees.any(axis=(2, 4))
    assert (kinds > 0).sum() <= 1.2 * needed.sum() < 0.5 * kinds.size


def test_a_schedule_visits_each_live_tile_once():
    kinds = jnp.array([[[0, 2, 0, 1], [0, 0, 0, 0], [1, 1, 1, 2]]])
    visit, count = tiles.schedule(kinds)
    assert count.tolist() == [[2, 0, 4]]
    assert visit[0, 0].tolist() == [3, 6, 6, 6]
    assert visit[0, 2].tolist() == [0, 2, 4, 7]


def test_a_walk_is_one_line_of_visits():
    """Of a row with seven steps, and of one with three tiles that visit nothing."""
    some = [[0, 2, 0, 1], [0, 0, 0, 0], [1, 1, 1, 2]]
    none = [[0] * 4] * 3
    step, count = tiles.walk(jnp.array([some, none]))
    assert count.tolist() == [7, 3] and step.shape == (2, 12)
    begins, ends = tiles.BEGINS, tiles.ENDS
    steps = [
        [
            (*map(int, tiles.place(x)), *divmod(int(x) % (1 << tiles.J_BIT), 4))
            for x in row
        ]
        for row in step
    ]
    assert steps[0][:3] == [
        (0, 1, 2, begins),
        (0, 3, 1, ends),
        (1, 0, 0, begins | ends),
    ]
    assert steps[0][3:7] == [
        *((2, 0, 1, begins), (2, 1, 1, 0), (2, 2, 1, 0), (2, 3, 2, ends))
    ]
    assert (
        steps[0][7:] == [(2, 3, 0, 0)] * 5
    )  # the last one's tiles: nothing is fetched
    assert steps[1] == [(i, 0, 0, begins | ends) for i in range(3)] + [(2, 0, 0, 0)] * 9


def test_a_walk_through_too_many_tiles_is_refused():
    kinds = jax.ShapeDtypeStruct((1, 2, 1 << 11), jnp.int32)
    with pytest.raises(ValueError, match="2 x 2048 tiles: shorter rows"):
        jax.eval_shape(tiles.walk, kinds)


def test_the_grid_has_a_step_for_each_visit_and_no_more(monkeypatch):
    """A causal mask visits half of the tiles: so many steps there are, not all tiles'."""
    pos_1T = jnp.arange(8 * tpu_attention.TILE_T)[None]
    seen = mask.ranged(pos_1T + 1, pos_1T)
    (_, of_queries), ((_, of_keys),) = tpu_attention.plan(seen, 2, H)
    assert of_queries.tolist() == of_keys.tolist() == [2 * (1 + 2 + 3 + 4)]
    # Half of a row's gradients have room: its second half of keys sees nothing of the first.
    monkeypatch.setattr(tpu_attention, "GRADIENT", 4 * 2 * H * pos_1T.size // 2)
    _, shares = tpu_attention.plan(seen, 2, H)
    assert [count.tolist() for _, count in shares] == [[4 + 2 + 1 + 1], [4 + 4 + 4 + 2]]


def test_a_tile_of_keys_is_whole_parts(monkeypatch):
    """Of 300 keys two parts of 256: what is behind the last whole one is not visited."""
    monkeypatch.setattr(tpu_attention, "TILE_S", 1024)
    monkeypatch.setattr(tpu_attention, "PART", 256)
    assert tpu_attention.tile_sizes(mask.causal(jnp.arange(300)[None])) == (128, 512)


def test_what_is_computed_is_the_seen_parts_of_what_is_fetched():
    """Under a causal mask the last tile of a line has a part that nobody sees, or one cut."""
    pos_1T = jnp.arange(2 * tpu_attention.TILE_T)[None]
    (step_1v, _), _ = tpu_attention.plan(mask.ranged(pos_1T + 1, pos_1T), 2, H)
    kinds = (step_1v[0] >> tiles.KIND_BIT) & 0xFF
    assert kinds.tolist() == [1, 2 + (1 << 2)]
