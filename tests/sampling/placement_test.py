"""Where a run samples: the same ids everywhere, the first layout that fits, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from dllm_jax import memory, sharding
from dllm_jax.models import acting, transformer
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig

CFG = SamplerConfig(max_prompt=8, max_new=8, rows=8, page=8, prefill=8)
PROMPTS = [[5, 6, 7], [9] * 7, [11, 3], [8] * 8, [], [4]]


def mesh_of(data, fsdp, model):
    """Returns a mesh of as many devices as it takes."""
    devices = jax.devices()[: data * fsdp * model]
    return sharding.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)


def placed(model, params, mesh):
    """Returns parameters as training has them on a mesh."""
    shapes = transformer.abstract(model, mesh, np.float32)
    return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), params, shapes)


def ids(where, weights):
    """Returns the ids of the answers to PROMPTS, some drawn and some the arg-max."""
    found = []
    for temperature in (0.0, 1.0):
        stream = where.answerer.stream(
            weights, PROMPTS, jax.random.key(3), temperature=temperature
        )
        found.append(answers.collect(stream, len(PROMPTS)).tokens_BT)
    return np.concatenate(found)


@pytest.fixture(scope="module")
def alone(tiny):
    """Returns the ids that one device samples."""
    model, params = tiny
    where = placement.place(model=model, cfg=CFG, mesh=mesh_of(1, 1, 1))
    assert not where.note
    return ids(where, acting.laid_out(params, where.weights))


SOAK = {"marks": pytest.mark.soak}  # `make test` has each shape and each layout once


@pytest.mark.parametrize(
    ("shape", "rollout"),
    [
        ((1, 8, 1), "replicated"),
        ((2, 2, 2), "model"),
        pytest.param((1, 8, 1), "model", **SOAK),
        pytest.param((2, 2, 2), "replicated", **SOAK),
    ],
    ids=str,
)
def test_the_same_ids_on_every_mesh_and_layout(tiny, alone, one_width, shape, rollout):
    model, params = tiny
    mesh = mesh_of(*shape)
    with jax.set_mesh(mesh):
        where = placement.place(model=model, cfg=CFG, mesh=mesh, rollout=rollout)
        weights = acting.laid_out(placed(model, params, mesh), where.weights)
        np.testing.assert_array_equal(ids(where, weights), alone)
        lowered, _ = where.answerer.lower(where.weights)
    data, fsdp, parts = shape
    if rollout == "replicated" and parts == 1:  # a forward moves nothing but counters
        assert "all-gather" not in lowered.compile().as_text()
    folds = fsdp if rollout == "model" else 1
    wq, copies = weights["layers"][0]["wq"], data * fsdp // folds
    assert wq.addressable_shards[0].data.size * 8 == wq.size * copies
    assert f"{copies} x all weights" in where.note
    pages = where.answerer.rows.s.cache.k_LPOKH
    assert pages.addressable_shards[0].data.size * 8 == pages.size


def test_rows_without_a_cache_have_the_same_ids_too(tiny):
    model, params = tiny
    cfg = dataclasses.replace(CFG, cache="none", rows=3)
    found = []
    for shape, rollout in (((1, 1, 1), "auto"), ((2, 2, 2), "model")):
        mesh = mesh_of(*shape)
        with jax.set_mesh(mesh):
            where = placement.place(model=model, cfg=cfg, mesh=mesh, rollout=rollout)
            weights = acting.laid_out(placed(model, params, mesh), where.weights)
            found.append(ids(where, weights))
    np.testing.assert_array_equal(*found)


def test_auto_takes_the_fewest_neighbours_that_can_hold_the_weights(tiny, monkeypatch):
    model, mesh = tiny[0], mesh_of(1, 8, 1)
    needs = {}
    for count in (1, 2, 4, 8):
        where = placement.placed(model, CFG, acting.folded(mesh, count))
        needs[count] = memory.array_bytes(where.weights) + count
    # As if rows, pages and the program took a byte for each fold.
    monkeypatch.setattr(
        placement,
        "bytes_of",
        lambda where, beside, limit: (
            beside
            + memory.array_bytes(where.weights)
            + where.answerer.mesh.shape["model"]
        ),
    )
    for limit, count in (
        (None, 1),
        (100 + needs[1], 1),
        (100 + needs[1] - 1, 2),
        (100 + needs[4], 4),
        (100 + needs[8] - 1, 8),  # it does not fit: the plan of memory will say so
    ):
        where = placement.place(
            model=model, cfg=CFG, mesh=mesh, beside=100, limit=limit
        )
        assert where.answerer.mesh.shape["model"] == count
        assert ("; they fit into" in where.note) == (limit == 100 + needs[1])
        assert ("do not fit into" in where.note) == (count > 1)


def test_what_a_layout_takes_is_weights_pages_and_the_program(tiny, one_width):
    where = placement.placed(tiny[0], CFG, mesh_of(1, 2, 1))
    weights = memory.array_bytes(where.weights)
    lowered, rows = where.answerer.lower(where.weights)
    rows = memory.array_bytes(rows)
    program = memory.program_bytes(lowered.compile())
    assert placement.bytes_of(where, 7, 10**12) == 7 + weights + rows + program
    # Sooner, where a part of it is too much already.
    assert placement.bytes_of(where, 7, weights) == 7 + weights
    assert placement.bytes_of(where, 7, 7 + weights) == 7 + weights + rows


def test_what_cannot_be_shared_is_refused(tiny):
    few = dataclasses.replace(tiny[0], kv_heads=1)
    for model, shape, words in (
        (tiny[0], (8, 1, 1), "mesh.fsdp is 1, so no device has a neighbour"),
        (few, (1, 8, 1), "mesh.fsdp=8, times mesh.model=1, divides .* 1 key heads"),
    ):
        with pytest.raises(ValueError, match=f"mesh.rollout='model': .*{words}"):
            placement.place(model=model, cfg=CFG, mesh=mesh_of(*shape), rollout="model")
