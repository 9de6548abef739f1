"""The head's kernels, interpreted, against the specification; the noise inside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dllm_jax import pallas_kernels, sharding
from dllm_jax.pallas_kernels import (
    choice,
    cpu_products,
    noise,
    reference,
    tiled_head,
)
from dllm_jax.pallas_kernels import head as heads
from dllm_jax.pallas_kernels.gpu import token_logprob as gpu_token_logprob
from dllm_jax.pallas_kernels.tpu import token_logprob as tpu_token_logprob
from dllm_jax.sampling import logits
from dllm_jax.sampling.config import SamplerConfig

B, U, D, V, FORBIDDEN = 4, 9, 32, 300, 5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in each direction, the last ones ragged."""
    monkeypatch.setattr(tpu_token_logprob, "TILE_R", 16)
    monkeypatch.setattr(tpu_token_logprob, "TILE_V", 128)
    monkeypatch.setitem(gpu_token_logprob.TUNED, "token_logprob", (128, 128, True))
    monkeypatch.setattr(gpu_token_logprob, "GRADIENT_BYTES", 0)
    monkeypatch.setattr(gpu_token_logprob, "BLOCKS", 2)  # parts of the vocabulary
    monkeypatch.setattr(gpu_token_logprob, "FEW", 0)
    monkeypatch.setattr(tiled_head, "TILE", 16)


def normal(*shape, seed=0, dtype=np.float32):
    """Returns standard normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def inputs(vocabulary=V):
    """Returns (x_BUD, head_DV, token_BU), no token being the forbidden one."""
    token = np.random.default_rng(7).integers(FORBIDDEN + 1, vocabulary, (B, U))
    head_DV = normal(D, vocabulary, seed=1) * 0.5
    return normal(B, U, D), head_DV, jnp.asarray(token, jnp.int32)


def with_gradients(f, x, head, token, weights):
    """Returns ((logp, entropy), (dx, dhead))."""
    out, pull = jax.vjp(lambda x, head: f(x, head, token), x, head)
    return out, pull(weights)


def specified(x, head, token):
    """Returns the specification's answer for rows of positions."""
    flat = x.reshape(-1, x.shape[2]), head, token.reshape(-1)
    out = reference.token_logprob(*flat, FORBIDDEN)
    return tuple(y.reshape(token.shape) for y in out)


SPECIFIED = jax.jit(functools.partial(with_gradients, specified))


def kernel(op, implementation):
    """Returns the interpreted kernel."""
    return functools.partial(
        op, forbidden=FORBIDDEN, implementation=implementation, interpret=True
    )


def mesh(sizes):
    """Returns a mesh of eight devices, or of one."""
    return sharding.make_mesh(**sizes, devices=jax.devices()[: 8 if sizes else 1])


MESHES = [{}, {"data": 2, "fsdp": 2, "model": 2}, {"fsdp": 1, "model": 8}]
# The interpreter of GPU kernels has one device.
KINDS = *(("tpu", sizes) for sizes in MESHES), ("gpu", {})


# Of whole tiles, the second one.
@pytest.mark.parametrize(
    "vocabulary, implementation, sizes",
    [*((V, *kind) for kind in KINDS), (256, *KINDS[0]), (256, *KINDS[-1])],
)
def test_logprob_and_gradient_are_the_specification(vocabulary, implementation, sizes):
    weights = normal(B, U, seed=2), normal(B, U, seed=3)
    args = *inputs(vocabulary), weights
    want = SPECIFIED(*args)
    f = kernel(pallas_kernels.token_logprob, implementation)
    with jax.set_mesh(mesh(sizes)):
        found = jax.jit(functools.partial(with_gradients, f))(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)


def done(op):
    """Returns a function for `with_gradients` of seats taken, and behind borders."""
    rng = np.random.default_rng(4)
    border = rng.choice([np.inf, -3.0, -6.0, -9.0, 1e-5, -80.0], (B, U))

    def f(x, head, token):
        return op(x, head, token, jnp.asarray(border, jnp.float32))

    return f


def specified_selection(x, head, token, border):
    """Returns the specification's answer for rows of positions."""
    flat = x.reshape(-1, x.shape[2]), head, token.reshape(-1), border.reshape(-1)
    out = reference.selection(*flat, RULE, FORBIDDEN)
    return tuple(y.reshape(token.shape) for y in out)


RULE = reference.Rule(threshold=0.02)
SELECTIONS = *KINDS[:2], KINDS[-1], ("auto", {})  # the second has the vocabulary split


@pytest.mark.parametrize("implementation, sizes", SELECTIONS)
def test_selection_and_gradient_are_the_specification(implementation, sizes):
    """Also where nothing lies behind a border, which has no gradient."""
    weights = normal(B, U, seed=2), normal(B, U, seed=3), jnp.zeros((B, U))
    args = *inputs(), weights
    want = jax.jit(functools.partial(with_gradients, done(specified_selection)))(*args)
    f = functools.partial(kernel(pallas_kernels.selection, implementation), rule=RULE)
    with jax.set_mesh(mesh(sizes)):
        found = jax.jit(functools.partial(with_gradients, done(f)))(*args)
    assert (want[0][0] == reference.LEAST).any() and len(np.unique(want[0][2])) > 3
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)


def of_seats(op: str, implementation: str):
    """Returns with_gradients of an op of 4 x 80 seats; a border hides every other token."""
    f = kernel(getattr(pallas_kernels, op), implementation)
    if op == "token_logprob":
        return jax.jit(functools.partial(with_gradients, f))
    border = jnp.where(jnp.arange(320).reshape(4, 80) % 2, jnp.inf, -3.0)

    def selected(x, head, token):
        return f(x, head, token, border, rule=RULE)[:2]

    return jax.jit(functools.partial(with_gradients, selected))


@pytest.mark.parametrize("implementation, sizes", [KINDS[0], KINDS[1], KINDS[-1]])
@pytest.mark.parametrize("op", ["token_logprob", "selection"])
def test_empty_seats_tell_and_teach_nothing(monkeypatch, op, implementation, sizes):
    """By the program for 256 of 320 rows, and by the one for all of them."""
    monkeypatch.setattr(heads, "MANY", 64)
    rng = np.random.default_rng(8)
    x, head = normal(4, 80, D), inputs()[1]
    token = jnp.asarray(rng.integers(FORBIDDEN + 1, V, (4, 80)), jnp.int32)
    weights = normal(4, 80, seed=2), normal(4, 80, seed=3)
    specified, run = of_seats(op, "reference"), of_seats(op, implementation)
    for count in (0, 100, 319):
        asked = jnp.asarray(rng.permutation(320).reshape(4, 80) < count)
        real = tuple(jnp.where(asked, w, 0) for w in weights)
        want, gradients = specified(x, head, token, real)
        want = [jnp.where(asked, y, 0) for y in want]
        # Of what is not asked the exponentials are infinite.
        loud = jnp.where(asked[..., None], x, 100 * x)
        with jax.set_mesh(mesh(sizes)):
            found = run(loud, head, jnp.where(asked, token, -1), weights)
        for y, z in zip(jax.tree.leaves(found), (*want, *gradients), strict=True):
            np.testing.assert_allclose(y, z, atol=1e-4, rtol=1e-4)


def test_tiles_of_wide_models_are_smaller(monkeypatch):
    """D is 32 here, of which fast memory has room for whole tiles."""
    args = *inputs(), (normal(B, U, seed=2), normal(B, U, seed=3))
    monkeypatch.setattr(tpu_token_logprob, "TILE_R", 512)
    monkeypatch.setattr(tpu_token_logprob, "TILE_V", 512)
    sizes = tpu_token_logprob.tile_sizes
    assert sizes(4096, 5120, 151936, 2) == sizes(4096, 2048, 151936, 4) == (512, 512)
    assert sizes(4096, 2560, 151936, 4) == (256, 512)
    assert sizes(36, 8192, 300, 2) == (48, 384)
    monkeypatch.setattr(tpu_token_logprob, "ROOM", 0)
    assert sizes(4096, 4096, 151936, 2) == (128, 128)
    with jax.set_mesh(mesh({})):
        f = kernel(pallas_kernels.token_logprob, "tpu")
        found = jax.jit(functools.partial(with_gradients, f))(*args)
    want = SPECIFIED(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)


def test_two_cores_of_a_tpu_share_the_rows(capsys):
    """Each walks over the whole vocabulary."""
    x, head, token = inputs(256)
    ask = x.reshape(-1, D)[:32], head, token.reshape(-1)[:32], 0
    two = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    found, want = (
        tpu_token_logprob.pick(*ask, forbidden=FORBIDDEN, interpret=how)
        for how in (two, True)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, want)
    assert "RACE" not in capsys.readouterr().out


def test_many_rows_have_a_second_program():
    assert heads.row_counts(4096) == [2560, 4096]
    assert heads.row_counts(1000) == [1000]


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_bfloat16_is_accumulated_in_f32(implementation):
    x, head, token = inputs()
    weights = normal(B, U, seed=2), normal(B, U, seed=3)
    half = [y.astype(jnp.bfloat16) for y in (x, head)]
    f = kernel(pallas_kernels.token_logprob, implementation)
    found = jax.jit(functools.partial(with_gradients, f))(*half, token, weights)
    exact = [y.astype(jnp.float32) for y in half]
    want = SPECIFIED(*exact, token, weights)
    for y, z in zip(jax.tree.leaves(found[0]), want[0], strict=True):
        np.testing.assert_allclose(y, z, atol=1e-4)
    for y, z in zip(found[1], want[1], strict=True):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(y.astype(jnp.float32), z, atol=0.02, rtol=0.02)


DRAWS = *KINDS, *(("any", sizes) for sizes in MESHES)


@functools.cache
def drawn():
    """Returns the arguments of a draw, and what the specification draws."""
    x, head, _ = inputs()
    args = x, head, jax.random.split(jax.random.key(3), B), jnp.array([0, 0.7, 1, 2.0])
    return args, jax.jit(reference.token_draw, static_argnums=4)(*args, FORBIDDEN)


@pytest.mark.parametrize("implementation, sizes", DRAWS)
def test_draw_is_the_specification(implementation, sizes):
    args, want = drawn()
    f = jax.jit(kernel(pallas_kernels.token_draw, implementation))
    with jax.set_mesh(mesh(sizes)):
        found = f(*args)
    np.testing.assert_array_equal(found[0], want[0])
    assert not (found[0] == FORBIDDEN).any()
    for y, z in zip(found[1:], want[1:], strict=True):
        np.testing.assert_allclose(y, z, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation, sizes", [*DRAWS[:2], *DRAWS[3:6]])
def test_of_equal_scores_the_first_is_drawn(implementation, sizes):
    """All of them are far below zero; every tenth column is the same one."""
    (x, head, key, _), _ = drawn()
    x, head = x.at[..., 0].set(1), jnp.tile(head[:, :10], V // 10).at[0].set(-50)
    cold = jnp.zeros(B)
    want = reference.token_draw(x, head, key, cold, FORBIDDEN)
    with jax.set_mesh(mesh(sizes)):
        f = jax.jit(kernel(pallas_kernels.token_draw, implementation))
        found = f(x, head, key, cold)
    np.testing.assert_array_equal(found[0], want[0])
    for y, z in zip(found[1:], want[1:], strict=True):
        np.testing.assert_allclose(y, z, atol=1e-4, rtol=1e-4)


@functools.cache
def drawer(platform: str):
    """Returns XLA's draw as a platform has it, compiled once for all that is wanted."""
    return jax.jit(kernel(pallas_kernels.token_draw, "any"))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 13, 23, 36])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_draws_are_made_where_they_are_wanted(monkeypatch, platform, count):
    monkeypatch.setattr(choice, "platform", lambda: platform)
    args, want = drawn()
    wanted = np.random.default_rng(count).permutation(B * U).reshape(B, U) < count
    found = drawer(platform)(*args, wanted_BW=wanted)
    for y, z in zip(found, want, strict=True):
        np.testing.assert_allclose(y[wanted], z[wanted], atol=1e-5, rtol=1e-5)
        assert np.isfinite(y).all()
        rows = np.flatnonzero(~wanted.any(axis=1))  # of which nothing is computed
        assert platform == "gpu" or len(rows) < 2 or (y[rows] == y[rows[0], 0]).all()


@pytest.mark.parametrize(
    "count, sizes",
    [(0, []), (8, [8]), (9, [16]), (24, [16, 8]), (25, [16, 16]), (36, [16, 16, 8])],
)
def test_half_of_the_last_tile_is_multiplied_where_it_holds_all(
    monkeypatch, count, sizes
):
    ran, product = [], cpu_products.by_transpose

    def watched(x_RD, head_VD, dtype):
        jax.debug.callback(lambda: ran.append(len(x_RD)), ordered=True)
        return product(x_RD, head_VD, dtype)

    monkeypatch.setattr(cpu_products, "by_transpose", watched)
    args, _ = drawn()
    wanted = np.arange(B * U).reshape(B, U) < count
    jax.jit(kernel(pallas_kernels.token_draw, "any"))(*args, wanted_BW=wanted)
    jax.effects_barrier()
    assert ran == sizes


@pytest.mark.parametrize("rows, width", [(1, 1), (2, 4)])
def test_a_cpu_draws_few_rows_of_bfloat16(rows, width):
    """Of a head as it lies where weights learn, whose transpose XLA folds into the product."""
    x, head = normal(rows, width, D, dtype="bfloat16"), normal(D, V, dtype="bfloat16")
    f = jax.jit(kernel(pallas_kernels.token_draw, "any"))
    found, *_ = f(x, head, jax.random.split(jax.random.key(0), rows), jnp.zeros(rows))
    logits = x.astype(jnp.float32) @ head.astype(jnp.float32)
    assert (found == logits.at[..., FORBIDDEN].set(-np.inf).argmax(axis=-1)).all()


@pytest.mark.parametrize("implementation", ["any", "tpu"])
@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4])
def test_a_probability_is_at_most_1(implementation, temperature):
    """Of logits by a small temperature a rounding is more than what is left to 1."""
    (x, head, keys, _), _ = drawn()
    f = jax.jit(kernel(pallas_kernels.token_draw, implementation))
    _, _, conf, entropy = f(5 * x, head, keys, jnp.full(B, temperature))
    assert (conf <= 1).all() and (entropy >= 0).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-6])
def test_what_is_all_but_certain_is_told_so(temperature):
    """A quotient that is rounded here and there otherwise was off by nats."""
    (x, head, keys, _), _ = drawn()
    found = (
        jax.jit(kernel(pallas_kernels.token_draw, name))(
            5 * x, head, keys, jnp.full(B, temperature)
        )
        for name in ("any", "reference")
    )
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize(
    "implementation, sizes", [("any", MESHES[0]), ("any", MESHES[1]), *KINDS[::3]]
)
def test_a_draw_of_what_is_no_number_is_none(implementation, sizes):
    x, head, _ = inputs()
    key, cold = jax.random.split(jax.random.key(3), B), jnp.zeros(B)
    f = jax.jit(kernel(pallas_kernels.token_draw, implementation))
    with jax.set_mesh(mesh(sizes)):
        token, *told = f(x.at[1, 2, 0].set(jnp.nan), head, key, cold)
    bad = np.arange(B * U).reshape(B, U) == U + 2
    for y in told:
        np.testing.assert_array_equal(np.isnan(y), bad)
    assert ((token >= 0) & (token < V)).all()


def test_gpu_kernels_take_a_part_of_the_vocabulary():
    x, head, token = inputs()
    x, head, token = x.reshape(-1, D), head[:, 100:250], token.reshape(-1)
    words = jnp.tile(jnp.arange(9)[:, None], (4, 3))
    temperature = jnp.resize(jnp.array([0, 0.7, 2.0]), 36)
    bound = {"forbidden": FORBIDDEN + 100, "interpret": True}

    def picked(module):
        return module.pick(x, head, token, 100, **bound)

    def drawn(module):
        wanted = temperature >= 0
        return module.draw(
            x, head, words, temperature, 100, wanted_R=wanted, width=V, **bound
        )

    def behind(module):  # from rows of which nothing is to those of which all is
        return module.behind(x, head, jnp.linspace(-99, 99, 36), 100, **bound)

    def pulled(module):
        saved = 5 + normal(36), *(normal(36, seed=seed) for seed in (2, 3, 4))
        return module.pick_gradient(x, head, token, 100, saved, **bound)

    for f in (picked, drawn, behind, pulled):
        both = f(gpu_token_logprob), f(tpu_token_logprob)
        for y, z in zip(*both, strict=True):
            np.testing.assert_allclose(y, z, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [0, 60, 129])
def test_a_gpu_reads_no_tile_of_rows_that_are_not_wanted(count):
    R, rng = 200, np.random.default_rng(count)
    wanted = rng.permutation(R) < count
    x = normal(R, D).at[~wanted].set(jnp.nan)
    head, words = inputs()[1], jnp.asarray(rng.integers(0, 99, (R, 3)), jnp.int32)
    how = {"wanted_R": wanted, "width": V, "forbidden": FORBIDDEN, "interpret": True}
    ask = x, head, words, jnp.ones(R), 0
    found, want = gpu_token_logprob.draw(*ask, **how), tiled_head.draw(*ask, **how)
    for y, z in zip(found, want, strict=True):
        np.testing.assert_allclose(y[wanted], z[wanted], atol=2e-5, rtol=1e-5)
        assert (y[~wanted] == 0).all()


def test_few_rows_are_drawn_without_a_gpu_kernel(monkeypatch):
    monkeypatch.setattr(gpu_token_logprob, "FEW", B * U)
    monkeypatch.setattr(choice, "platform", lambda: "gpu")
    args, want = drawn()
    draw = functools.partial(kernel(pallas_kernels.token_draw, "gpu"), *args)
    assert "mosaic_gpu" not in str(jax.make_jaxpr(draw)())
    np.testing.assert_array_equal(draw()[0], want[0])


def test_the_specified_draw_is_the_samplers():
    x, head, _ = inputs()
    key, temperature = jax.random.split(jax.random.key(3), B), jnp.array([0, 0.7, 1, 2])
    logits_BWV = jnp.einsum("BWD,DV->BWV", x, head).at[..., FORBIDDEN].set(-1e30)
    want = logits.draw(key, logits_BWV, temperature, SamplerConfig())
    token, logp, conf, entropy = reference.token_draw(
        x, head, key, temperature, FORBIDDEN
    )
    np.testing.assert_array_equal(token, want.token_BW)
    np.testing.assert_allclose(logp, want.logp_BW, rtol=1e-5)
    np.testing.assert_allclose(conf, want.conf_BW, rtol=1e-5)
    np.testing.assert_allclose(entropy, want.entropy_BW, rtol=1e-5, atol=1e-5)


def test_the_noise_is_jax_random_gumbel():
    key = jax.random.split(jax.random.key(11), 2)
    words = noise.words(key)
    index = jnp.arange(3 * 1001, dtype=jnp.int32)[None]
    found = noise.gumbel(words[:, :1], words[:, 1:], index).reshape(2, 3, 1001)
    want = jax.vmap(lambda k: jax.random.gumbel(k, (3, 1001)))(key)
    np.testing.assert_array_equal(found, want)


def test_keys_of_another_generator_are_refused():
    x, head, _ = inputs()
    key = jax.random.split(jax.random.key(0, impl="rbg"), B)
    with pytest.raises(ValueError, match="threefry2x32.*not rbg"):
        kernel(pallas_kernels.token_draw, "tpu")(x, head, key, jnp.ones(B))
