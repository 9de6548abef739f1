"""What a run takes: sums of parts, the compiler's figure, no second compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compile_8b
from dllm_jax import memory, sharding
from dllm_jax.models import transformer
from dllm_jax.rl import learner, networks
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig
from dllm_jax.sampling import answers
from dllm_jax.sampling.config import SamplerConfig

GIB = 2**30
PARTS = {"parameters": GIB, "optimizer": 2 * GIB, "frozen": 0}
PHASES = {"update": {"gradients": GIB, "activations": GIB // 2}}


def test_what_is_held_is_a_devices_part():
    mesh = sharding.make_mesh(fsdp=4, model=2)
    placed = sharding.place_rows({"x": np.zeros((8, 16), np.float32)}, mesh)
    whole = sharding.place(np.zeros(3, np.int32), jax.sharding.PartitionSpec(), mesh)
    assert memory.held((placed, whole)) == 8 * 16 * 4 // 4 + 12


def test_what_a_program_needs_beside_its_arguments():
    def f(x, y):  # a donated x, two products that are alive together
        a, b = x @ y, y @ x
        return x + jnp.sort(a @ b, axis=0), a

    x = jnp.ones((256, 256))
    needs = memory.working(jax.jit(f, donate_argnums=0).lower(x, x), "update")
    assert 2 * x.nbytes <= needs <= 4 * x.nbytes


def near(lowered, phase, *arguments):
    """Asserts that what is told of a program is the compiler's figure, within 10 %."""
    told = memory.held(arguments) + memory.working(lowered, phase)
    plan = lowered.compile().memory_analysis()
    fresh = plan.output_size_in_bytes - plan.alias_size_in_bytes
    planned = plan.argument_size_in_bytes + plan.temp_size_in_bytes + fresh
    assert 0.9 < told / planned < 1.1


@pytest.mark.parametrize("value", ["own", "head"])
def test_the_update_is_what_the_compiler_plans(tiny, monkeypatch, value):
    monkeypatch.setattr(compile_8b, "TOKENS", 64)
    model, mesh = tiny[0], sharding.make_mesh(fsdp=4, devices=jax.devices()[:4])
    plans = networks.plans("policy", value, OptimConfig(), OptimConfig(), updates=9)
    how = {"model": model, "plans": plans, "cfg": ObjectiveConfig()}
    with jax.set_mesh(mesh):
        states = {name: networks.abstract(model, plans[name], mesh) for name in plans}
        batch = compile_8b.batch(mesh, 4)
        update = jax.jit(functools.partial(learner.update, **how), donate_argnums=0)
        near(update.lower(states, batch, None), "update", states, batch)


@pytest.mark.parametrize("cache", ["auto", "none"])
@pytest.mark.parametrize("fsdp", [1, 4])
def test_a_run_finds_its_program_compiled(tiny, caplog, cache, fsdp):
    model, params = tiny
    cfg = SamplerConfig(max_prompt=4, max_new=4, rows=4, page=4, prefill=4, cache=cache)
    mesh = sharding.make_mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    with jax.set_mesh(mesh), jax.log_compiles():
        shapes = transformer.abstract(model, mesh, jnp.float32)
        answerer = answers.answerer(model=model, cfg=cfg, mesh=mesh)
        lowered, rows = answerer.lower(shapes, jax.random.key(0))
        assert not rows or answerer.rows is None  # nothing is there yet
        near(lowered, "rollout", shapes, rows)
        params = jax.tree.map(
            lambda x, shape: jax.device_put(x, shape.sharding), params, shapes
        )
        prompts, key = [[5, 6]] * 5, jax.random.key(1)
        trace = answers.collect(answerer.stream(params, prompts, key, temperature=1.0))
    assert (trace.len_B > 0).all()
    program = "advance" if cache == "auto" else "generate"
    compiled = f"Finished XLA compilation of jit({program})"
    assert sum(compiled in line for line in caplog.messages) == 1
    if cache == "auto":
        assert memory.held(rows) > memory.held(rows.s.cache) > 0


def test_what_is_told():
    assert memory.table(PARTS, PHASES).splitlines() == [
        "memory of a device, GiB:",
        "  always      3.000  parameters 1.000, optimizer 2.000",
        "  +update     1.500  gradients 1.000, activations 0.500",
    ]


def test_a_cpu_device_has_a_part_of_the_host():
    assert 2**20 < memory.limit() < 2**50


def test_what_does_not_fit_is_refused_with_the_settings_to_change():
    memory.check(PARTS, PHASES, None)
    memory.check(PARTS, PHASES, 4.5 * GIB)
    words = r"update needs 4.50 GiB of a device's 4.00; set model.remat='full'"
    with pytest.raises(ValueError, match=words):
        memory.check(PARTS, PHASES, 4 * GIB)


def test_what_the_compiler_refuses_says_what_to_change():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: hbm")

    with pytest.raises(ValueError, match="rollout does not fit.*lower sampler.rows"):
        memory.working(Lowered(), "rollout")
