"""What a run takes: the compiler's figures, no second compilation, what is refused."""

import dataclasses
import functools
import math
import re
import types

import jax
import numpy as np
import pytest

from dllm_jax import begin, config, memory, sharding
from dllm_jax.models import acting
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import budget, learner, networks, views
from dllm_jax.rl.config import BatchConfig, ObjectiveConfig, OptimConfig
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig

GIB = 2**30
NEEDS = budget.Budget(
    always={"parameters": GIB, "optimizer": 2 * GIB, "frozen": 0},
    phases={"update": {"gradients": GIB, "activations": GIB // 2}},
)


FIELDS = ("tokens_BT", "pos_BT", "begin_BT", "end_BT", "group_BT", "where_BU")
FIELDS += ("target_BU", "weight_BU", "adv_BU", "old_logp_BU", "ref_logp_BU", "ret_BU")
FIELDS += ("old_value_BU",)  # of RL on tokens


def blank(mesh) -> views.TrainBatch:
    """Returns the shapes of eight microbatches of four rows of 64 slots."""
    floats = ("weight", "adv", "old", "ref", "ret")
    zeros = {
        field.name: np.zeros(
            (8, 4, {"T": 64, "U": 32}[field.name[-1]]),
            np.float32 if field.name.startswith(floats) else np.int32,
        )
        for field in dataclasses.fields(views.TrainBatch)
        if field.name in FIELDS
    }
    batch = views.TrainBatch(used=np.int32(0), **zeros)
    return sharding.shapes_of_rows(batch, mesh, axis=1)


def near(lowered, phase, *arguments):
    """Asserts that what we say of a program is the compiler's figure, within 10 %."""
    ours = memory.array_bytes(arguments) + budget.program_bytes(lowered, phase)
    plan = lowered.compile().memory_analysis()
    fresh = plan.output_size_in_bytes - plan.alias_size_in_bytes
    planned = plan.argument_size_in_bytes + plan.temp_size_in_bytes + fresh
    assert 0.9 < ours / planned < 1.1


@pytest.mark.parametrize("value", ["own", "head"])
def test_the_update_is_what_the_compiler_plans(tiny, value):
    model, mesh = tiny[0], sharding.make_mesh(fsdp=4, devices=jax.devices()[:4])
    plans = networks.plans("policy", value, OptimConfig(), OptimConfig(), updates=9)
    update = functools.partial(
        learner.update, model=model, plans=plans, cfg=ObjectiveConfig()
    )
    with jax.set_mesh(mesh):
        states = {name: networks.abstract(model, plans[name], mesh) for name in plans}
        batch = blank(mesh)
        jitted = jax.jit(update, donate_argnums=0)
        limits = dict.fromkeys(states, 0.0)
        near(jitted.lower(states, batch, None, limits), "update", states, batch)


@pytest.mark.parametrize("cache", ["auto", "none"])
@pytest.mark.parametrize("fsdp", [1, 4])
def test_a_run_finds_its_program_compiled(tiny, caplog, cache, fsdp):
    model, params = tiny
    cfg = SamplerConfig(max_prompt=4, max_new=4, rows=4, page=4, prefill=4, cache=cache)
    mesh = sharding.make_mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    with jax.set_mesh(mesh), jax.log_compiles():
        shapes = acting.abstract(model, mesh)
        answerer = answers.answerer(model=model, cfg=cfg, mesh=mesh)
        lowered, rows = answerer.lower(shapes)
        assert cache == "none" or answerer.rows is None  # nothing is there yet
        near(lowered, "rollout", shapes, rows)
        params = acting.laid_out(params, shapes)
        prompts, key = [[5, 6]] * 5, jax.random.key(1)
        stream = answerer.stream(params, prompts, key, temperature=1.0)
        trace = answers.collect(stream, len(prompts))
    assert (trace.len_B > 0).all()
    compiled = "Finished XLA compilation of jit(advance)"
    assert sum(compiled in line for line in caplog.messages) == 1
    if cache == "auto":
        assert memory.array_bytes(rows) > memory.array_bytes(rows.s.cache) > 0


@pytest.mark.parametrize("reference", [False, True])
def test_a_budget_has_what_stays_and_what_each_phase_adds(tiny, reference):
    model, mesh = tiny[0], sharding.make_mesh(fsdp=4, devices=jax.devices()[:4])
    plans = networks.plans("policy", "own", OptimConfig(), OptimConfig(), updates=9)
    update = functools.partial(
        learner.update, model=model, plans=plans, cfg=ObjectiveConfig()
    )
    cfg = SamplerConfig(max_prompt=4, max_new=4, rows=4, page=4, prefill=4)
    with jax.set_mesh(mesh):
        states = {name: networks.abstract(model, plans[name], mesh) for name in plans}
        source = types.SimpleNamespace(
            blank=lambda: blank(mesh), updates=2, reference=reference
        )
        plan = functools.partial(
            budget.plan,
            source,
            states=states,
            model=model,
            mesh=mesh,
            update=jax.jit(update, donate_argnums=0),
        )
        sampling = placement.place(model=model, cfg=cfg, mesh=mesh)
        sampled = plan(sampling=sampling)
        given = plan(sampling=None)
        guest = memory.Claim({"judge": 5 * GIB}, {"judge": GIB})
        judged = plan(sampling=sampling, guest=guest)
    assert list(sampled.phases) == ["rollout", "update"]
    assert list(given.phases) == ["update"]
    assert given.phases["update"] == sampled.phases["update"]
    params = [state.params for state in states.values()]
    assert given.always == {
        "parameters": memory.array_bytes(params),
        "optimizer": memory.array_bytes([state.opt_state for state in states.values()]),
        "frozen": memory.array_bytes(params[0]) if reference else 0,
    }
    weights = memory.array_bytes(sampling.weights)
    assert judged.always == sampled.always | guest.always
    assert sampled.always == given.always
    pages = memory.array_bytes(sampling.answerer.lower(sampling.weights)[1])
    held = {"rows and pages": pages, "weights": weights}
    assert judged.phases["reward"] == held | {"judge": GIB}
    with pytest.raises(
        ValueError, match="reward needs 6.00 GiB of .* a smaller reward"
    ):
        budget.check(judged, int(5.5 * GIB))
    assert sampled.phases["rollout"].items() > held.items()
    assert weights > memory.array_bytes(params[0])  # which fsdp splits


def test_the_table_sums_what_it_lists():
    assert budget.table(NEEDS).splitlines() == [
        "memory of a device, GiB:",
        "  always      3.000  parameters 1.000, optimizer 2.000",
        "  +update     1.500  gradients 1.000, activations 0.500",
    ]


def test_what_does_not_fit_is_refused_with_the_settings_to_change():
    budget.check(NEEDS, None)
    budget.check(NEEDS, 4.5 * GIB)
    words = r"update needs 4.50 GiB of a device's 4.00; set model.remat='full'"
    with pytest.raises(ValueError, match=words):
        budget.check(NEEDS, 4 * GIB)


def test_every_phase_that_does_not_fit_is_told():
    phases = {"rollout": {"weights": 2 * GIB}, "update": {"gradients": 3 * GIB}}
    with pytest.raises(ValueError, match="rollout needs 5.00") as refused:
        budget.check(budget.Budget(NEEDS.always, phases), 4 * GIB)
    first, second, *table = str(refused.value).splitlines()
    assert first.startswith("rollout needs") and second.startswith("update needs 6.00")
    assert table[0] == "memory of a device, GiB:"


def test_what_stays_and_has_no_room_is_not_blamed_on_a_phase():
    """It was told to lower sampler.rows, by which nothing of it goes."""
    judges = {"judge": 2 * GIB}
    budget.check_least(NEEDS.always, judges, None, "train less")
    budget.check_least(NEEDS.always, judges, 5 * GIB, "train less")
    words = "what stays takes 5.00 GiB of a device's "
    with pytest.raises(ValueError, match=f"{words}4.00, .*; take a smaller reward.mod"):
        budget.check_least(NEEDS.always, judges, 4 * GIB, "train less")
    with pytest.raises(
        ValueError, match=f"{words}2.00, before .*; train less\n  always"
    ):
        budget.check_least(NEEDS.always, judges, 2 * GIB, "train less")


LARGE = ModelConfig(
    d_model=4096, layers=36, heads=28, kv_heads=4, vocab=2**17, ffw=12288
)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((1, 6, 1), "mesh.fsdp=6 does not divide the model's width 4,096"),
        ((1, 1, 8), "mesh.model=8 does not divide the model's heads 28, key heads 4"),
        (
            (1, 1, 5),
            "mesh.model=5 does not divide the model's heads 28, key heads 4, ffw",
        ),
        ((6, 1, 1), ""),
        ((1, 8, 1), ""),
        ((1, 2, 4), ""),
    ],
)
def test_an_axis_that_divides_nothing_is_told(sizes, words):
    """Six devices had what one has, each of them, and nothing said so."""
    axes = "data", "fsdp", "model"
    mesh = jax.sharding.AbstractMesh(sizes, axes)
    told = "".join(budget.unsplit(LARGE, mesh))
    assert bool(told) == bool(words) and words in told
    mesh_of = r" ([\d.]+) with mesh.data=(\d), mesh.fsdp=(\d) and mesh.model=(\d)"
    named = re.search(mesh_of, told)
    assert bool(named) == (sizes in ((1, 6, 1), (1, 1, 8)))  # 5 divides nothing
    if named:
        less, *others = named.groups()
        others = tuple(map(int, others))
        assert math.prod(others) == math.prod(sizes)
        assert f"{budget.bytes_of(LARGE, others) / GIB:.1f}" == less
    small = dataclasses.replace(LARGE, d_model=64, layers=1, ffw=64, vocab=64)
    assert budget.unsplit(small, mesh) == []  # nothing to speak of


def test_the_fastest_recomputation_that_fits_is_taken():
    sizes = {"none": None, "attention": 4.5 * GIB, "full": 3.5 * GIB}  # None: refused
    seen = []

    def planned(remat):
        seen.append(remat)
        if sizes[remat] is None:
            raise ValueError("update does not fit a device")
        return f"update {remat}", budget.Budget(
            {"parameters": int(sizes[remat])}, {"update": {}}
        )

    def taken(limit):
        seen.clear()
        return budget.first_that_fits(tuple(sizes), planned, limit)[:2]

    assert taken(5 * GIB) == ("attention", "update attention")
    assert taken(4 * GIB) == ("full", "update full")
    assert seen == ["none", "attention", "full"]
    with pytest.raises(ValueError, match=r"update needs 3\.50 GiB"):
        taken(GIB)


def test_what_fits_here_and_not_in_another_process_is_not_taken(monkeypatch):
    """All processes run the same program, or they wait for each other for ever."""
    lacks = iter([False, True, True, False])  # here or elsewhere
    monkeypatch.setattr(sharding, "anywhere", lambda fact: next(lacks) or fact)

    def taken(limit):
        planned = lambda remat: (remat, NEEDS)
        return budget.first_that_fits(("dots", "full"), planned, limit)[0]

    assert taken(5 * GIB) == "dots"
    with pytest.raises(ValueError, match="another process; set model.remat='full'"):
        taken(5 * GIB)
    with pytest.raises(ValueError, match="update needs 4.50 GiB"):
        lacks = iter([False] * 2)
        taken(GIB)
    mesh = types.SimpleNamespace(shape={"data": 1, "fsdp": 1, "model": 1})
    batch = BatchConfig(rows=1, tokens=64)
    lacks = iter([True])
    tried = budget.remats(ModelConfig(), batch, mesh, math.inf)
    assert tried == ("attention", "full")


@pytest.mark.parametrize(
    "platform, most", [("cpu", ("none", "dots")), ("gpu", ("dots",))]
)
@pytest.mark.parametrize("experts", [0, 128])
def test_what_cannot_fit_is_not_tried(experts, platform, most):
    """Of 36 layers and 8,192 slots, bf16: half of heads and of inner arrays on a device."""
    model = ModelConfig(experts=experts, experts_per_token=8, expert_ffw=768)
    mesh = types.SimpleNamespace(
        shape={"data": 2, "fsdp": 2, "model": 2},
        devices=np.array([types.SimpleNamespace(platform=platform)]),
    )
    batch = BatchConfig(rows=8, tokens=4096)
    split = (8 * 768 if experts else 9728) + 40 * 128
    kept, least = 36 * 8192 * 2 * (2 * 2560 + split), ("attention", "full")
    assert budget.remats(model, batch, mesh, kept - 1) == least
    assert budget.remats(model, batch, mesh, kept) == (*most, *least)
    assert budget.remats(model, batch, mesh, math.inf) == (*most, *least)


@pytest.mark.parametrize("rows", [2, 8])
def test_rows_that_would_let_a_layer_keep_more_are_told(monkeypatch, rows):
    """On two devices, where what is kept of two rows or more is no place for."""
    said, model = [], ModelConfig()
    batch = BatchConfig(rows=rows, tokens=4096)
    mesh = types.SimpleNamespace(
        shape={"data": 1, "fsdp": 2, "model": 1},
        devices=np.array([types.SimpleNamespace(platform="gpu")]),
    )
    here = types.SimpleNamespace(
        cfg=config.Config(model=config.ModelArgs(path="any")),
        model=model,
        mesh=mesh,
        say=said.append,
        plans={},
        shapes={},
        settings=types.SimpleNamespace(batch=batch),
    )
    one = 36 * 4096 * 2 * (2 * 2560 + 2 * 9728 + 2 * 40 * 128)
    monkeypatch.setattr(memory, "device_bytes", lambda: one + (rows < 8) * -1)
    first = lambda names, planned, limit: (names[0], None, NEEDS)
    monkeypatch.setattr(budget, "first_that_fits", first)
    source = types.SimpleNamespace(reference=False)
    begin.programs(here, source, None, None, memory.NOTHING)
    (words,) = [line for line in said if "model.remat" in line]
    assert words.startswith("model.remat='attention': what keeps more does not fit")
    assert words.endswith("; it may with batch.rows=2, a row on each") == (rows == 8)


def test_what_the_compiler_refuses_says_what_to_change():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: hbm")

    with pytest.raises(ValueError, match="rollout does not fit.*lower sampler.rows"):
        budget.program_bytes(Lowered(), "rollout")
