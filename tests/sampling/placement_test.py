"""Where a run samples: the same ids everywhere, the first layout that fits, what is refused."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from dllm_jax import memory, sharding
from dllm_jax.models import acting, selfcheck, transformer
from dllm_jax.pallas_kernels.cpu_products import Tiled, Transposed
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig

GIB = 2**30
CFG = SamplerConfig(max_prompt=8, max_new=8, rows=8, page=8, prefill=8)
RNG = np.random.default_rng(0)
# As many as the most rows; half of the answers are drawn, half are the arg-max.
PROMPTS = [RNG.integers(2, 60, RNG.integers(1, 9)).tolist() for _ in range(32)]
ORDERS = {rows: np.random.default_rng(rows).permutation(32) for rows in (1, 8, 32)}


def mesh_of(data, fsdp, model):
    """Returns a mesh of as many devices as it takes."""
    devices = jax.devices()[: data * fsdp * model]
    return sharding.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)


def placed(model, params, mesh):
    """Returns parameters as training has them on a mesh."""
    shapes = transformer.abstract(model, mesh, np.float32)
    return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), params, shapes)


def sampled(where, weights, order=range(32)):
    """Returns the Trace of the answers to PROMPTS, which are asked for in an order."""
    made = where.answerer
    for i in order:
        made.submit(PROMPTS[i], index=int(i), temperature=i % 2, new=CFG.max_new)
    run = made.run(weights, jax.random.key(3))
    stream = ((request.index, answer) for request, answer in run)
    return answers.collect(stream, len(PROMPTS))


def same(found, want):
    """Asserts ids and steps equal, log-probs up to rounding."""
    for name in ("tokens_BT", "step_BT", "len_B", "forwards_B"):
        np.testing.assert_array_equal(
            getattr(found, name), getattr(want, name), err_msg=name
        )
    for name in ("logp_BT", "conf_BT"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(want, name), atol=2e-5, err_msg=name
        )


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 4, 1)])
def test_rows_that_devices_do_not_divide_are_told(tiny, shape):
    cfg = dataclasses.replace(CFG, rows=9)
    note = placement.place(model=tiny[0], cfg=cfg, mesh=mesh_of(*shape)).note
    each, shards = (5, 2) if shape[1] == 1 else (2, 8)
    assert f"sampler.rows=9 become {each * shards}, {each} on each of {shards}" in note


@pytest.mark.parametrize(
    ("change", "shape", "few"),
    [
        ({"rows": 8}, (1, 1, 1), True),
        ({"rows": 9}, (1, 1, 1), False),
        ({"rows": 9}, (2, 1, 1), True),
        ({"rows": 2}, (1, 1, 2), True),
        ({"rows": 2, "cache": "none"}, (1, 1, 1), True),  # whole canvases of 16
        ({"rows": 3, "cache": "none"}, (1, 1, 1), False),
        ({"rows": 1, "int8": True}, (1, 1, 1), False),
    ],
)
def test_weights_of_few_slots_on_a_device_are_laid_out_for_that(
    tiny, monkeypatch, change, shape, few
):
    monkeypatch.setattr(acting, "HEAVY", 0)
    cfg = dataclasses.replace(CFG, block=4, **change)
    weights = placement.weights(tiny[0], cfg, mesh_of(*shape))
    assert isinstance(weights["layers"][0]["wo"], (Tiled, Transposed)) == few


@pytest.fixture(scope="module")
def alone(tiny):
    """Returns the Trace that one device samples in 8 rows."""
    model, params = tiny
    where = placement.place(model=model, cfg=CFG, mesh=mesh_of(1, 1, 1))
    assert not where.note
    trace = sampled(where, acting.laid_out(params, where.weights))
    assert (trace.len_B > 0).all() and trace.logp_BT.any()
    return trace


LAYOUTS = (
    ((1, 1, 1), "auto"),
    ((8, 1, 1), "auto"),
    ((1, 8, 1), "replicated"),
    ((1, 8, 1), "model"),
    ((2, 2, 2), "replicated"),
    ((2, 2, 2), "model"),
    ((1, 1, 8), "auto"),
)
# `make test` has all three splits, another order of prompts, and one row of a device.
SOON = {((1, 8, 1), "replicated"): 8, ((2, 2, 2), "model"): 32, ((1, 1, 8), "auto"): 1}


@pytest.mark.parametrize(
    ("shape", "rollout", "rows"),
    [
        pytest.param(
            *layout,
            rows,
            marks=() if SOON.get(layout) == rows else pytest.mark.soak,
            id=f"{'x'.join(map(str, layout[0]))}-{layout[1]}-{rows}",
        )
        for layout in LAYOUTS
        for rows in ORDERS
    ],
)
def test_the_same_traces_on_every_mesh_and_layout(
    tiny, alone, one_width, monkeypatch, shape, rollout, rows
):
    if rows == 1:
        monkeypatch.setattr(acting, "HEAVY", 0)  # as of more: transposed, of few slots
    model, params = tiny
    mesh, cfg = mesh_of(*shape), dataclasses.replace(CFG, rows=rows)
    with jax.set_mesh(mesh):
        where = placement.place(model=model, cfg=cfg, mesh=mesh, rollout=rollout)
        weights = acting.laid_out(placed(model, params, mesh), where.weights)
        same(sampled(where, weights, ORDERS[rows]), alone)
        lowered, _ = where.answerer.lower(where.weights)
    data, fsdp, parts = shape
    if rollout == "replicated" and parts == 1:  # a forward moves nothing but counters
        assert "all-gather" not in lowered.compile().as_text()
    folds = fsdp if rollout == "model" else 1
    wo, copies = weights["layers"][0]["wo"], data * fsdp // folds
    assert isinstance(wo, (Tiled, Transposed)) == (rows == 1)
    wo = getattr(wo, "w", wo)
    assert wo.addressable_shards[0].data.size * mesh.size == wo.size * copies
    assert (f"{copies} x all weights" in where.note) == (fsdp > 1)
    assert ("sampler.rows" in where.note) == bool(rows % copies)
    pages = jax.tree.leaves(where.answerer.rows.s.cache)[0]
    assert pages.addressable_shards[0].data.size * mesh.size == pages.size


def test_a_lone_device_samples_the_same_of_weights_in_tiles(
    tiny, one_width, monkeypatch
):
    model = dataclasses.replace(tiny[0], vocab=128, d_model=64)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda spec: 0.4 * rng.normal(size=transformer.shape(spec, model)),
        transformer.specs(model),
    )
    found, mesh = [], mesh_of(1, 1, 1)
    for heavy in (acting.HEAVY, 0):
        monkeypatch.setattr(acting, "HEAVY", heavy)
        where = placement.place(model=model, cfg=CFG, mesh=mesh)
        weights = acting.laid_out(placed(model, params, mesh), where.weights)
        for x in (weights["layers"][0]["w_down"], weights["layers"][1]["wo"]):
            assert isinstance(x, Tiled) == (heavy == 0)
        assert isinstance(weights["head"], Tiled)
        found.append(sampled(where, weights))
    same(*found)
    assert (found[0].len_B > 0).all() and found[0].logp_BT.any()


def test_rows_without_a_cache_have_the_same_ids_too(tiny):
    model, params = tiny
    cfg = dataclasses.replace(CFG, cache="none", rows=3)
    found = []
    for shape, rollout in (((1, 1, 1), "auto"), ((2, 2, 2), "model")):
        mesh = mesh_of(*shape)
        with jax.set_mesh(mesh):
            where = placement.place(model=model, cfg=cfg, mesh=mesh, rollout=rollout)
            weights = acting.laid_out(placed(model, params, mesh), where.weights)
            asked = [[], *PROMPTS[:4], [9] * 9]  # of which two have no answer
            stream = where.answerer.stream(
                weights, asked, jax.random.key(3), temperature=1.0
            )
            found.append(answers.collect(stream, len(asked)))
    same(*found)
    assert ((found[0].len_B > 0) == [False, True, True, True, True, False]).all()


def test_batches_are_lowered_on_their_own_mesh_whichever_is_in_force(tiny):
    """As the plan of a run does while the mesh of training is."""
    model = dataclasses.replace(tiny[0], attention="full")
    cfg = dataclasses.replace(CFG, cache="none", guidance=1.5, blank=(7, 8))
    mesh = mesh_of(1, 4, 1)
    where = placement.place(model=model, cfg=cfg, mesh=mesh, rollout="model")
    assert where.answerer.mesh.shape["model"] == 4
    texts = [where.answerer.lower(where.weights)[0].as_text()]
    for other in (mesh, where.answerer.mesh):
        with jax.set_mesh(other):
            texts.append(where.answerer.lower(where.weights)[0].as_text())
    assert texts[0] == texts[1] == texts[2]


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


def test_kernels_are_checked_in_the_widths_of_each_layout(tiny, monkeypatch, capsys):
    """A judge's model, and devices that share heads, have others than training's policy."""
    model, asked = tiny[0], []

    def check(kernels, wide, folder):
        asked.append((wide.kv_heads, wide.page))
        assert folder == (jax.config.jax_compilation_cache_dir or "")
        return [f"warning: not used is one for {wide.kv_heads}"]

    monkeypatch.setattr(selfcheck, "check", check)
    mesh = mesh_of(1, 8, 1)
    with jax.set_mesh(mesh):  # that of training, whichever it is
        placement.place(model=model, cfg=CFG, mesh=mesh, rollout="model")
        placement.place(model=model, cfg=CFG, mesh=mesh_of(1, 1, 2))
    assert asked == [(model.kv_heads // 8, 8), (model.kv_heads // 2, 8)]
    assert capsys.readouterr().err == (
        "warning: not used is one for 1\nwarning: not used is one for 4\n"
    )


def test_what_a_layout_takes_is_weights_pages_and_the_program(tiny, one_width):
    where = placement.placed(tiny[0], CFG, mesh_of(1, 2, 1))
    weights = memory.array_bytes(where.weights)
    lowered, rows = where.answerer.lower(where.weights)
    rows = memory.array_bytes(rows)
    program = memory.program_bytes(lowered.compile())
    total = 7 + weights + rows + program
    assert placement.bytes_of(where, 7, 10**12) == total
    placement.check(where, 7, total)
    placement.check(where, 7, None)
    with pytest.raises(ValueError, match=r"sampling needs .* \(.*, activations "):
        placement.check(where, 7, total - 1)
    # Sooner, where a part of it is too much already.
    assert placement.bytes_of(where, 7, weights) == 7 + weights
    assert placement.bytes_of(where, 7, 7 + weights) == 7 + weights + rows


def test_rows_that_no_device_could_hold_are_refused_at_once(tiny):
    """Their pages are not counted first: of 10^9 rows few hosts could."""
    cfg = dataclasses.replace(CFG, rows=10**9)
    words = rf"sampler.rows={10**9}: .* of 125000000 rows of 16 .*; lower sampler.rows"
    with pytest.raises(ValueError, match=words):
        placement.place(model=tiny[0], cfg=cfg, mesh=mesh_of(1, 8, 1), limit=GIB)


def test_pages_are_fewer_where_all_do_not_fit(tiny, one_width, monkeypatch):
    """Half of those that rows can fill at the least; a number that is set stays as it is."""
    model, mesh = tiny[0], mesh_of(1, 2, 1)
    cfg = dataclasses.replace(CFG, max_new=56)  # 4 rows of 8 pages on each device
    where = placement.placed(model, cfg, mesh)
    pool = memory.array_bytes(where.answerer.lower(where.weights)[1].s.cache)
    need = placement.bytes_of(where, 7, 10**12)
    how = {"model": model, "mesh": mesh, "rollout": "replicated", "beside": 7}

    def pages(limit):
        found = placement.place(cfg=cfg, limit=limit, **how)
        scheduler = found.answerer.scheduler
        told = f"sampler.pages={scheduler.pages_per_shard}, of 32 that rows could fill"
        assert (told in found.note) == scheduler.overbooked == (limit < need)
        placement.check(found, 7, limit)
        return scheduler.pages_per_shard

    monkeypatch.setattr(placement, "SPARED", 0)
    assert pages(need) == 32
    assert 20 <= pages(need - pool // 4) < 24
    assert 16 <= pages(need - 3 * pool // 10) < 23
    few = dataclasses.replace(cfg, pages=31)
    found = placement.place(cfg=few, limit=need - pool // 4, **how)
    assert found.answerer.scheduler.pages_per_shard == 31
    for limit in (need - 3 * pool // 4, 5_000):
        found = placement.place(cfg=cfg, limit=limit, **how)
        assert found.answerer.scheduler.pages_per_shard == 32
        with pytest.raises(ValueError, match="sampling needs"):
            placement.check(found, 7, limit)


def test_another_sampler_has_as_many_positions(tiny):
    """Those of a set number, and all where all were placed."""
    model, mesh = tiny[0], mesh_of(1, 1, 1)
    cfg = dataclasses.replace(CFG, max_new=56)  # 8 rows of 8 pages of 8 positions

    def pages(placed, **change):
        first = placement.placed(model, dataclasses.replace(cfg, pages=placed), mesh)
        other = dataclasses.replace(cfg, **change)
        made = placement.another(first.answerer, model, other)
        assert made.mesh is first.answerer.mesh
        return (
            made.scheduler.pages_per_shard if other.cache != "none" else made.cfg.pages
        )

    assert pages(20) == pages(20, strategy="static") == 20
    assert pages(0) == pages(100) == 64
    assert pages(20, pages=31) == 31
    assert pages(20, page=16) == 10 and pages(8, max_new=120) == 16  # a row's
    assert pages(20, cache="none") == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache": "dual"}, "sampler.cache='dual' does not serve a model with block"),
        ({"cache": "none", "pages": 20}, "sampler.pages=20: there are none"),
    ],
)
def test_other_samplers_are_all_made_or_the_first_that_does_not_fit_is_named(
    tiny, change, reason
):
    first = placement.placed(tiny[0], CFG, mesh_of(1, 1, 1)).answerer
    good, bad = dataclasses.replace(CFG, block=8), dataclasses.replace(CFG, **change)
    (made,) = placement.others(first, tiny[0], {"wide": good}).values()
    assert made.model.block == made.cfg.block == 8
    with pytest.raises(ValueError, match=f"^eval.samplers: bad: {re.escape(reason)}"):
        placement.others(first, tiny[0], {"wide": good, "bad": bad})


def test_pages_are_half_where_the_compiler_refuses_all(tiny, monkeypatch):
    model, mesh = tiny[0], mesh_of(1, 1, 1)

    def pages(fit):
        """Returns how many there are where the compiler takes no more than `fit`."""

        def sizes(where, beside, limit):
            held = where.answerer.scheduler.pages_per_shard
            return {"weights": 1, "activations": 0 if held <= fit else math.inf}

        monkeypatch.setattr(placement, "sizes_of", sizes)
        cfg = dataclasses.replace(CFG, max_new=56)  # 8 rows of 8 pages
        found = placement.place(model=model, cfg=cfg, mesh=mesh, limit=10_000)
        return found.answerer.scheduler.pages_per_shard

    assert [pages(fit) for fit in (64, 63, 32)] == [64, 32, 32]
    assert pages(31) == 64  # for `check` to refuse


def test_what_no_device_can_hold_is_refused_with_the_keys_that_help(
    tiny, one_width, monkeypatch, tmp_path
):
    model, mesh = tiny[0], mesh_of(1, 2, 1)
    where = placement.placed(model, CFG, acting.folded(mesh, 2))
    beside, weights = 5 * GIB, memory.array_bytes(where.weights)
    sizes = placement.sizes_of(where, beside, beside + weights)
    assert [*sizes] == ["what lies beside", "weights", "rows and pages"]
    monkeypatch.setattr(placement, "gib", str)
    for most, keys in ((2, placement.OF_WEIGHTS), (3, placement.REMEDY)):
        known = [*sizes.items()][:most]
        need = sum(size for _, size in known)
        parts = ", ".join(f"{name} {size}" for name, size in known)
        words = (
            f"sampling needs {need} GiB of a device's {need - 1}, 1 too many ({parts})"
        )
        monkeypatch.setattr(memory, "device_bytes", lambda need=need: need - 1)
        with pytest.raises(ValueError, match=re.escape(f"{words}; {keys}")):
            # Nothing is read before: there is no such folder.
            placement.loaded(
                tmp_path / "none",
                model=model,
                cfg=CFG,
                mesh=mesh,
                rollout="auto",
                say=print,
                beside=beside,
            )


def test_weights_that_are_loaded_are_shared_as_the_key_says(tiny, tmp_path):
    how = {"model": tiny[0], "cfg": CFG, "mesh": mesh_of(1, 1, 1), "say": print}
    with pytest.raises(ValueError, match="mesh.rollout='model': mesh.fsdp is 1"):
        placement.loaded(tmp_path / "none", rollout="model", **how)


def test_whole_batches_have_no_pages_to_leave_out(tiny):
    model = dataclasses.replace(tiny[0], attention="full")
    rows = dataclasses.replace(CFG, cache="none")
    batches = dataclasses.replace(rows, tail=(5,))
    kinds = {rows: answers.Engine, batches: answers.Batches}
    for cfg, kind in kinds.items():
        made = placement.place(
            model=model, cfg=cfg, mesh=mesh_of(1, 1, 1), limit=2**40
        ).answerer
        assert isinstance(made, kind)
        for other, its in kinds.items():
            assert isinstance(placement.another(made, model, other), its)
    uneven = dataclasses.replace(batches, rows=3)
    made = placement.place(model=model, cfg=uneven, mesh=mesh_of(1, 2, 1)).answerer
    assert made.cfg.rows == 4


def test_what_the_compiler_refuses_is_refused(tiny, monkeypatch):
    where = placement.placed(tiny[0], CFG, mesh_of(1, 1, 1))
    sizes = {"what lies beside": 0, "weights": GIB, "activations": math.inf}
    monkeypatch.setattr(placement, "sizes_of", lambda *_: sizes)
    words = "does not fit a device's 2.00 GiB (weights 1.00, activations inf); lower"
    with pytest.raises(ValueError, match=re.escape(words)):
        placement.check(where, 0, 2 * GIB)


def test_what_fits_here_and_not_in_another_process_is_refused(tiny, monkeypatch):
    where = placement.placed(tiny[0], CFG, mesh_of(1, 1, 1))
    monkeypatch.setattr(placement, "sizes_of", lambda *_: {"weights": GIB})
    placement.check(where, 0, 2 * GIB)
    monkeypatch.setattr(sharding, "anywhere", lambda fact: True)
    words = "does not fit a device of another process, but 2.00 GiB here (weights 1.00)"
    with pytest.raises(ValueError, match=re.escape(words)):
        placement.check(where, 0, 2 * GIB)


def test_what_cannot_be_shared_is_refused(tiny):
    few = dataclasses.replace(tiny[0], kv_heads=1)
    for model, shape, words in (
        (tiny[0], (8, 1, 1), "mesh.fsdp is 1, so no device has a neighbour"),
        (few, (1, 8, 1), "mesh.fsdp=8, times mesh.model=1, divides .* 1 key heads"),
    ):
        with pytest.raises(ValueError, match=f"mesh.rollout='model': .*{words}"):
            placement.place(model=model, cfg=CFG, mesh=mesh_of(*shape), rollout="model")
