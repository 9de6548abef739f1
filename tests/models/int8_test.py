"""Weights in int8: what rounding costs, where they lie, and what the engine says with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import memory, sharding
from dllm_jax.models import acting, int8, layer, lora, mask, transformer
from dllm_jax.models.config import Lora
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig

CFG = SamplerConfig(max_prompt=8, max_new=8, rows=8, page=4, prefill=8, int8=True)
PROMPTS = [[5, 6, 7], [9] * 7, [11, 3], [8] * 8, [], [4]]
ADAPTED = {"lora": Lora(3, 6.0, ("wq", "w_down"))}


def mesh_of(data=1, fsdp=1, model=1):
    """Returns a mesh of as many devices as it takes."""
    devices = jax.devices()[: data * fsdp * model]
    return sharding.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)


def adapted(tiny):
    """Returns (ModelConfig, stacked weights), two of a layer's with adapters."""
    model = dataclasses.replace(tiny[0], **ADAPTED)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    specs = acting.specs(model)
    return model, jax.tree.map(
        lambda spec: jax.random.normal(next(keys), transformer.shape(spec, model)),
        specs,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dims, shape", [("DNH", (24, 3, 5)), ("NHD", (3, 8, 7))])
def test_each_output_has_a_scale_and_half_a_step_of_error(dims, shape, dtype):
    rng = np.random.default_rng(3)
    inner = len(lora.contracted(dims))
    outer = shape[inner:]
    w = rng.normal(size=shape) * np.exp(3 * rng.normal(size=outer))
    w[(..., *(0 for _ in outer))] = 0.0
    made = int8.quantized(jnp.asarray(w), inner, dtype)
    assert (made.w.dtype, made.scale.dtype) == (jnp.int8, jnp.dtype(dtype))
    scale = np.asarray(made.scale, np.float64)
    whole = np.asarray(made.w, np.float64)
    assert scale.shape == outer
    # A scale that was rounded down leaves the greatest a little beyond 127.
    slack = 0.5 + 127 * float(jnp.finfo(dtype).eps)
    assert (np.abs(whole * scale - w) <= slack * scale + 1e-6).all()
    assert np.abs(whole).max() == 127
    largest = np.abs(w).reshape(-1, *outer).max(axis=0)
    np.testing.assert_allclose(scale, np.where(largest, largest / 127, 1), rtol=0.01)
    assert not whole[(..., *(0 for _ in outer))].any()
    # The product, with a bias, is that of what the numbers stand for.
    x = jnp.asarray(rng.normal(size=(2, *shape[:inner])), jnp.float32)
    bias = jnp.asarray(rng.normal(size=outer), jnp.float32)
    found = layer.project(x, made, dims, bias)
    want = np.tensordot(np.asarray(x, np.float64), whole * scale, inner)
    want += np.asarray(bias)
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    w = jnp.ones((4, 3)).at[1, 2].set(bad)
    y_BD = layer.project(jnp.ones((1, 4)), int8.quantized(w, 1, "float32"), "DF")
    np.testing.assert_array_equal(np.isfinite(y_BD), [[True, True, False]])


def test_layers_are_rounded_alike_on_every_mesh_and_stacked(tiny, monkeypatch):
    model, params = adapted(tiny)
    model = dataclasses.replace(model, dtype="bfloat16")
    mesh = mesh_of(data=2, fsdp=4)
    split = jax.tree.map(
        lambda x, spec: jax.device_put(
            x, sharding.named(spec.dims, x.shape, sharding.PARAM, mesh)
        ),
        params,
        acting.specs(model),
    )
    alone = acting.laid_out(params, acting.abstract(model, mesh_of(), in_int8=True))
    like = acting.abstract(model, acting.folded(mesh, 4), in_int8=True)
    with jax.set_mesh(mesh):
        shared = acting.laid_out(split, like)
    jax.tree.map(np.testing.assert_array_equal, alone, shared)
    jax.tree.map(
        lambda x, place: x.sharding.is_equivalent_to(place.sharding, x.ndim) or 1 / 0,
        shared,
        like,
    )
    second = alone["layers"][1]
    of_weights = {name for name in second if name.startswith("w")}
    for name, x in second.items():
        x = x.w if isinstance(x, lora.Adapted) else x
        assert int8.is_int8(x) == (name in of_weights), name
    assert second["wq"].a.dtype == alone["embed"].dtype == jnp.bfloat16
    monkeypatch.setattr(acting, "APART_INT8", ())
    like = acting.abstract(model, mesh_of(), in_int8=True)
    stack = acting.laid_out(params, like)["layers"]
    jax.tree.map(
        lambda x, *rows: np.testing.assert_array_equal(x, np.stack(rows)),
        stack,
        *alone["layers"],
    )
    # As much as the weights that stay take, and half of the others, and scales.
    counts = [
        memory.array_bytes(acting.abstract(model, mesh_of(), in_int8=i)) for i in (0, 1)
    ]
    sizes = [x.size for x in jax.tree.leaves(stack) if x.dtype == jnp.int8]
    scales = [
        x.scale.size
        for x in jax.tree.leaves(stack, is_leaf=int8.is_int8)
        if int8.is_int8(x)
    ]
    assert counts[0] - counts[1] == sum(sizes) - 2 * sum(scales)
    made = jax.tree.leaves(acting.fresh(params, like))
    assert sum(x.dtype == jnp.int8 for x in made) == len(of_weights)


@functools.partial(jax.jit, static_argnames="model")
def log_probs(params, tokens_BT, model):
    """Returns the log-probs of all ids at all positions of clean canvases."""
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    seen = mask.clean("block", pos_BT, jnp.full(len(tokens_BT), 99), 4)
    x_BTD = transformer.embed(params, tokens_BT, model)
    x_BTD, _, _ = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    return jax.nn.log_softmax(transformer.logits(params, x_BTD, model))


def test_the_gap_is_small_and_most_answers_stay(tiny):
    model, params = tiny
    tokens_BT = jax.random.randint(jax.random.key(1), (8, 16), 0, 66)
    exact, rounded = (
        np.asarray(
            log_probs(
                acting.laid_out(params, acting.abstract(model, mesh_of(), in_int8=x)),
                tokens_BT,
                model,
            )
        )
        for x in (False, True)
    )
    best = exact.argmax(axis=-1)
    likely = exact > np.log(0.01)
    gap = np.abs(rounded - exact)[likely]
    assert 0 < gap.mean() < 0.05
    assert gap.max() < 0.5
    assert (rounded.argmax(axis=-1) == best).mean() > 0.95


def ids(where, weights, temperature):
    """Returns the ids of the answers to PROMPTS."""
    stream = where.answerer.stream(
        weights, PROMPTS, jax.random.key(3), temperature=temperature
    )
    return answers.collect(stream, len(PROMPTS)).tokens_BT


@pytest.mark.soak
def test_the_engine_says_the_same_on_every_mesh(tiny):
    """Without `make soak`: test_layers_are_rounded_alike_on_every_mesh_and_stacked."""
    model, params = tiny
    found, bytes_of = [], []
    for shape, rollout in (((1, 1, 1), "auto"), ((2, 2, 2), "model")):
        mesh = mesh_of(*shape)
        with jax.set_mesh(mesh):
            where = placement.place(model=model, cfg=CFG, mesh=mesh, rollout=rollout)
            weights = acting.laid_out(params, where.weights)
            found.append([ids(where, weights, heat) for heat in (0.0, 1.0)])
        assert int8.is_int8(where.weights["layers"][0]["wo"])
        bytes_of.append(memory.array_bytes(where.weights))
    np.testing.assert_array_equal(*found)
    exact = placement.place(
        model=model, cfg=dataclasses.replace(CFG, int8=False), mesh=mesh_of()
    )
    assert bytes_of[0] < memory.array_bytes(exact.weights)


def test_experts_are_refused_in_one_line(tiny):
    sparse = {"experts": 4, "experts_per_token": 2, "expert_ffw": 16}
    model = dataclasses.replace(tiny[0], **sparse)
    with pytest.raises(
        ValueError, match="sampler.int8=True: a layer's 4 experts .* Fal"
    ):
        placement.place(model=model, cfg=CFG, mesh=mesh_of())
