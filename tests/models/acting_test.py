"""The weights that sample: each layer's own arrays, on every mesh, and what they compute."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import acting, lora, mask, transformer
from dllm_jax.models import cache as kv
from dllm_jax.models.config import Lora
from dllm_jax.pallas_kernels import cpu_products
from dllm_jax.pallas_kernels.cpu_products import Tiled, Transposed

SPARSE = {"experts": 4, "experts_per_token": 2, "expert_ffw": 16}
KINDS = {
    "dense": {},
    "first": SPARSE | {"layers": 3, "dense_layers": 1, "shared_experts": 1},
    "between": SPARSE | {"layers": 5, "sparse_step": 2},
    "scored": SPARSE | {"router": "sigmoid", "router_bias": True},
    "adapters": {"lora": Lora(3, 6.0, ("wq", "w_down"))},
    "biased": {"qkv_bias": True, "qk_norm": False},
}


def made(tiny, kind):
    """Returns (ModelConfig, stacked weights) of a kind of tower."""
    model = dataclasses.replace(tiny[0], **KINDS[kind])
    specs = acting.specs(model)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(specs))))

    def weight(spec):
        return 0.3 * jax.random.normal(next(keys), transformer.shape(spec, model))

    return model, jax.tree.map(weight, specs)


def mesh_of(data=1, fsdp=1, model=1):
    """Returns a mesh of as many devices as it takes."""
    devices = jax.devices()[: data * fsdp * model]
    return sharding.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)


@functools.partial(jax.jit, static_argnames="model")
def run(params, tokens_BT, model):
    """Returns hidden states and keys without a cache, and beside those keys."""
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    seen = mask.clean("block", pos_BT, jnp.full(len(tokens_BT), 99), 4)
    x_BTD = transformer.embed(params, tokens_BT, model)
    alone, cache, load = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    beside = mask.beside(seen, jnp.ones(tokens_BT.shape, bool))
    again, fresh, _ = transformer.trunk(params, x_BTD, pos_BT, beside, model, cache)
    return alone, again, cache, fresh, load


@functools.partial(jax.jit, static_argnames=("model", "asked"))
def run_paged(params, tokens_BT, model, asked=None):
    """Returns hidden states of two windows, or those asked, and the pages that both wrote."""
    pool = kv.pool(model, 4, 8)
    window = kv.Window(
        table_BA=jnp.array([[2, 0], [1, 3]]),
        start_B=jnp.array([0, 4]),
        keep_BJ=jnp.array([[True], [True]]),
        asked_da=None if asked is None else jnp.array(asked),
    )
    pos_BT = window.start_B[:, None] + jnp.arange(4)[None]
    x_BTD = transformer.embed(params, tokens_BT[:, :4], model)
    return transformer.trunk(params, x_BTD, pos_BT, window, model, pool)[:2]


@pytest.mark.parametrize(
    ("program", "kind", "slots"),
    [
        *((run, kind, slots) for kind in KINDS for slots in (1, 99)),
        (run_paged, "dense", 1),
        (run_paged, "between", 99),
    ],
)
def test_layers_of_their_own_compute_what_the_stack_does(
    tiny, kind, slots, program, monkeypatch
):
    monkeypatch.setattr(acting, "HEAVY", 0)
    model, params = made(tiny, kind)
    like = acting.abstract(model, mesh_of(), slots=slots)
    last = like["layers"][-1]
    joins = slots == 1 and kind != "adapters"
    assert ("wqkv" in last) == joins and ("wk" in last) != joins
    assert ("w_gate_up" in last) == (joins and "w_gate" in params["layers"])
    # Of 256 and of 64 columns, of 32 otherwise.
    kinds = {name: type(x) for name, x in last.items() if name.startswith("w")}
    both = (Tiled, Transposed) if slots == 1 else (jax.ShapeDtypeStruct,) * 2
    assert (kinds["wqkv" if joins else "wk"], kinds["wo"]) == both
    if slots == 1:
        *contracted, width = params["layers"]["wo"].shape[1:]
        assert last["wo"].w.shape == (width, *contracted)
    layers = acting.laid_out(params, like)
    for name in ("first", "layers"):
        assert (name in params) == (name in layers)
        assert isinstance(layers.get(name, ()), tuple)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 8), 0, 66)
    want, found = (program(x, tokens_BT, model) for x in (params, layers))
    assert jax.tree.structure(want) == jax.tree.structure(found)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-5), want, found
    )


@pytest.mark.parametrize(("size", "together"), [(2**25, True), (2**12, False)])
def test_weights_of_few_slots_lie_side_by_side(tiny, size, together, monkeypatch):
    monkeypatch.setattr(acting, "HEAVY", 0)
    monkeypatch.setattr(acting, "SLAB", size)
    model, params = made(tiny, "dense")
    weights = acting.laid_out(params, acting.abstract(model, mesh_of(), slots=1))
    laid = [
        x.w
        for layer in weights["layers"]
        for x in layer.values()
        if isinstance(x, (Tiled, Transposed))
    ]
    assert len(laid) == 4 * model.layers
    starts = {x.unsafe_buffer_pointer(): x.nbytes for x in laid}
    assert all(start % acting.ALIGNED == 0 for start in starts)
    reach = max(start + more for start, more in starts.items()) - min(starts)
    assert (reach == sum(starts.values())) == together


@pytest.mark.parametrize("kind", ["dense", "first", "between", "scored"])
def test_what_samples_is_what_learns_in_bfloat16_too(tiny, kind):
    """Its f32 masters are rounded alike: otherwise other experts would be chosen."""
    model, params = made((dataclasses.replace(tiny[0], dtype="bfloat16"),), kind)
    layers = acting.laid_out(params, acting.abstract(model, mesh_of()))
    tokens_BT = jax.random.randint(jax.random.key(1), (8, 64), 0, 66)
    learning = transformer.rounded(params, model)
    want, found = (run(x, tokens_BT, model) for x in (learning, layers))
    if load := want[-1]:
        np.testing.assert_array_equal(load.count_E, found[-1].count_E)
    assert np.abs(np.float32(want[0]) - np.float32(found[0])).mean() < 1e-3


@pytest.mark.parametrize("kind", ["dense", "first", "between"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_tower_answers_for_the_windows_that_are_asked(tiny, kind, shards):
    model, params = made(tiny, kind)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 8), 0, 66)
    asked = (
        ((1,),) if shards == 1 else ((0,), (0,))
    )  # of each shard's windows, by place
    layers = acting.laid_out(params, acting.abstract(model, mesh_of()))
    for weights in (params, layers):
        all_BWD, pages = run_paged(weights, tokens_BT, model)
        some_BWD, same = run_paged(weights, tokens_BT, model, asked)
        np.testing.assert_allclose(some_BWD, all_BWD[2 - len(some_BWD) :], atol=2e-5)
        jax.tree.map(np.testing.assert_array_equal, pages, same)
    every, some = (
        run_paged.lower(layers, tokens_BT, model, x).cost_analysis()["flops"]
        for x in (None, asked)
    )
    # In the last of layers of their own the others' queries have no feed-forward.
    assert some < every or shards > 1


@pytest.mark.parametrize("kind", ["first", "adapters"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_copy_is_whole_on_each_device_but_for_what_model_splits(
    tiny, kind, count, monkeypatch
):
    monkeypatch.setattr(acting, "HEAVY", 0)
    model, params = made(tiny, kind)
    mesh = mesh_of(data=2, fsdp=4)
    where = acting.folded(mesh, count)
    assert dict(where.shape) == {"data": 2, "fsdp": 4 // count, "model": count}
    assert list(where.devices.flat) == list(mesh.devices.flat)
    split = jax.tree.map(
        lambda x, spec: jax.device_put(
            x, sharding.named(spec.dims, x.shape, sharding.PARAM, mesh)
        ),
        params,
        acting.specs(model),
    )
    bf16 = dataclasses.replace(model, dtype="bfloat16")
    like = acting.abstract(bf16, where, slots=1)
    with jax.set_mesh(mesh):
        copy = acting.laid_out(split, like)
    assert jax.tree.structure(copy) == jax.tree.structure(like)
    for x, place in zip(jax.tree.leaves(copy), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (place.shape, place.dtype)
        assert x.sharding.is_equivalent_to(place.sharding, x.ndim)
    other = [x.shape for x in jax.tree.leaves(copy) if x.dtype != jnp.bfloat16]
    routers = [p["router"].shape for p in copy["layers"] if "router" in p]
    assert other == routers  # which choose in f32 where they learn
    last, part = copy["layers"][-1]["wo"], 1 / count
    want = params["layers"]["wo"][-1].astype(jnp.bfloat16)
    want, last = cpu_products.transposed(want, 2), last.w
    np.testing.assert_array_equal(last, want)
    assert last.addressable_shards[0].data.size == part * last.size
    assert not split["embed"].is_deleted()


def test_what_is_there_is_not_copied_and_what_was_taken_is_freed(tiny, monkeypatch):
    model, params = made(tiny, "dense")
    mesh = mesh_of()
    shapes = transformer.abstract(model, mesh, jnp.float32)
    params = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), params, shapes)
    like = acting.abstract(model, mesh)
    fresh = jax.tree.leaves(acting.fresh(params, like))
    layers = len(jax.tree.leaves(like["layers"]))
    assert len(fresh) == layers + 1  # the head, Transposed
    kept, stack = params["embed"], params["layers"]["wq"]
    want = np.array(stack)
    weights = acting.taken(params, like)
    assert weights["embed"] is kept
    assert stack.is_deleted()
    found = np.stack([layer["wq"] for layer in weights["layers"]])
    np.testing.assert_array_equal(found, want)
    monkeypatch.setattr(acting, "APART", ())
    like = acting.abstract(model, mesh)
    params = made(tiny, "dense")[1]
    params = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), params, shapes)
    same = jax.tree.map(lambda x, y: x is y, acting.laid_out(params, like), params)
    assert all(jax.tree.leaves(same))
    assert not jax.tree.leaves(acting.fresh(params, like))


@pytest.mark.parametrize("kind", ["dense", "first", "biased"])
def test_one_matrix_computes_what_several_do(tiny, kind, monkeypatch):
    monkeypatch.setattr(acting, "APART", ())
    monkeypatch.setattr(acting, "JOINED_ON", ("cpu",))
    model, params = made(tiny, kind)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 8), 0, 66)
    want = run(params, tokens_BT, model=model)
    layers = params["layers"]
    gate_LDF, up_LDF, wq_LDNH = (layers[name] for name in ("w_gate", "w_up", "wq"))
    for mesh in (mesh_of(), mesh_of(model=2)):
        like = acting.abstract(model, mesh)
        assert acting.fresh(params, like)["layers"]["w_gate_up"] is not None
        weights = acting.laid_out(params, like)
        found = weights["layers"]
        assert not {"w_gate", "w_up", "wq", "wk", "wv", "bq"} & found.keys()
        both = np.stack([gate_LDF, up_LDF], axis=-1)
        np.testing.assert_array_equal(found["w_gate_up"], both)
        # A key head's two queries, its key and its value.
        of_head = np.asarray(found["wqkv"])[:, :, 3]
        np.testing.assert_array_equal(of_head[:, :, :2], wq_LDNH[:, :, 6:8])
        np.testing.assert_array_equal(of_head[:, :, 2], layers["wk"][:, :, 3])
        np.testing.assert_array_equal(of_head[:, :, 3], layers["wv"][:, :, 3])
        for name in ("w_gate_up", "wqkv"):  # of each part a device has the same heads
            whole, shard = found[name].shape, found[name].addressable_shards[0].data
            assert shard.shape[2] == whole[2] // mesh.shape["model"]
        with jax.set_mesh(mesh):
            told = run(weights, tokens_BT, model=model)
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
        jax.tree.map(close, told, want)
    acting.taken(params, like)
    for x in (gate_LDF, up_LDF, wq_LDNH):
        assert x.is_deleted()


def test_heads_that_model_does_not_divide_stay_apart(tiny, monkeypatch):
    monkeypatch.setattr(acting, "JOINED_ON", ("cpu",))
    model = dataclasses.replace(tiny[0], kv_heads=1)
    layer = acting.abstract(model, mesh_of(model=2))["layers"][0]
    assert {"wq", "wk", "wv", "w_gate_up"} <= layer.keys()


def test_beside_adapters_and_in_int8_they_stay_apart(tiny, monkeypatch):
    monkeypatch.setattr(acting, "JOINED_ON", ("cpu",))
    for kind, in_int8 in (("adapters", False), ("dense", True)):
        model = made(tiny, kind)[0]
        layer = acting.abstract(model, mesh_of(), in_int8=in_int8)["layers"][0]
        assert {"w_gate", "w_up", "wq", "wk"} <= layer.keys()


@pytest.mark.parametrize(
    ("dtype", "devices", "drawn", "tiled"),
    [
        ("float32", 1, (), True),
        ("bfloat16", 1, (), False),
        ("float32", 2, (), False),
        ("float32", 1, (2, 66), False),  # which no tiles begin with
    ],
)
@pytest.mark.parametrize("way", ["laid_out", "taken"])
def test_a_tied_head_is_another_array_where_it_is_tiled(
    tiny, way, dtype, devices, drawn, tiled
):
    model = dataclasses.replace(tiny[0], vocab=128)
    params = made((model,), "dense")[1]
    model = dataclasses.replace(model, tied=True, dtype=dtype, drawn=drawn)
    del params["head"]
    want = np.array(params["embed"].astype(dtype))
    like = acting.abstract(model, mesh_of(data=devices))
    assert isinstance(like["head"], Tiled) == tiled
    assert (acting.fresh(params, like)["head"] is like["head"]) == tiled
    weights = getattr(acting, way)(params, like)
    np.testing.assert_array_equal(weights["embed"], want)
    assert jax.tree.structure(weights["head"]) == jax.tree.structure(like["head"])
    assert weights["head"].w.shape == like["head"].w.shape
    if tiled:
        assert weights["head"].w.sharding == like["head"].w.sharding
        np.testing.assert_array_equal(weights["head"].matrix(), want.T)
    else:
        assert weights["head"].w is weights["embed"]


@pytest.mark.parametrize("way", ["laid_out", "taken"])
def test_a_tied_head_is_the_embedding_as_it_lies(tiny, way):
    model, params = made(tiny, "dense")
    model = dataclasses.replace(model, tied=True)
    del params["head"]
    want = np.array(params["embed"])
    like = acting.abstract(model, mesh_of(model=2))
    weights = getattr(acting, way)(params, like)
    assert weights["head"].w is weights["embed"]
    np.testing.assert_array_equal(weights["embed"], want)
    assert weights["embed"].sharding == like["head"].w.sharding
    assert "head" not in acting.specs(model)  # of what learns


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("vocab", "drawn"), [(66, (2, 60)), (128, ()), (128, (2, 66))])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_draws_are_those_of_the_head_that_learns(
    tiny, tied, vocab, drawn, kernels
):
    model = dataclasses.replace(tiny[0], vocab=vocab)
    params = made((model,), "dense")[1]
    model = dataclasses.replace(model, tied=tied, drawn=drawn, kernels=kernels)
    if tied:
        del params["head"]
    weights = acting.laid_out(params, acting.abstract(model, mesh_of()))
    assert isinstance(weights["head"], Tiled) == (vocab == 128 and not drawn)
    x_BWD = jax.random.normal(jax.random.key(1), (2, 3, model.d_model))
    keys = jax.random.split(jax.random.key(2), 2)
    for ask in (
        lambda p: transformer.logits(p, x_BWD, model),
        lambda p: transformer.token_draw(p, x_BWD, keys, jnp.ones(2), model),
        lambda p: transformer.token_logprob(p, x_BWD, jnp.full((2, 3), 5), model),
    ):
        want, found = (jax.jit(ask)(p) for p in (params, weights))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, found, want)


@pytest.mark.parametrize(
    ("layers", "slots", "few"),
    [(8, 4, True), (8, 32, True), (8, 33, False), (8, math.inf, False), (4, 4, False)],
)
def test_heavy_weights_of_few_slots_are_laid_out_for_that(tiny, layers, slots, few):
    sizes = {"d_model": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffw": 1536}
    model = dataclasses.replace(tiny[0], layers=layers, **sizes)  # 12.6 MB a layer
    assert acting.few(model, slots) == few


def test_a_mesh_is_folded_as_far_as_heads_and_widths_divide(tiny):
    model = tiny[0]  # 16 heads, 8 key heads, a width of 64
    assert acting.folds(model, mesh_of(fsdp=8)) == [1, 2, 4, 8]
    assert acting.folds(model, mesh_of(data=2, fsdp=2, model=2)) == [1, 2]
    few = dataclasses.replace(model, kv_heads=2)
    assert acting.folds(few, mesh_of(fsdp=8)) == [1, 2]
    assert acting.folds(few, mesh_of(fsdp=4, model=2)) == [1]
    narrow = dataclasses.replace(model, ffw=60)
    assert acting.folds(narrow, mesh_of(fsdp=8)) == [1, 2, 4]
    assert acting.folds(model, mesh_of(fsdp=6)) == [1, 2]
    sparse = dataclasses.replace(model, **SPARSE)  # 4 experts, each 16 wide
    assert acting.folds(sparse, mesh_of(fsdp=8)) == [1, 2, 4]


def test_all_that_is_adapted_has_its_adapters(tiny):
    model, _ = made(tiny, "adapters")
    layer = acting.abstract(model, mesh_of())["layers"][0]
    adapted = {name for name, x in layer.items() if isinstance(x, lora.Adapted)}
    assert adapted == {"wq", "w_down"}
