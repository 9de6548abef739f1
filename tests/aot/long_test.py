"""Answers of 32,000 tokens: what samples and trains on them compiles for every chip."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo, performance_model, programs, topologies
from benchmarks.shapes import RELEASED
from dllm_jax import memory, pallas_kernels, sharding
from dllm_jax.models import acting
from dllm_jax.models.mask import Mask
from dllm_jax.sampling import placement
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine

GIB = 2**30
TPUS = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1")
ROWS, SLOTS = 256, 32784
# A row's table has 1,025 pages; all rows together have 16 that are whole.
CFG = SamplerConfig(max_prompt=784, max_new=32000, rows=ROWS, pages=16 * 1025)


def one_device(topology: str):
    """Returns the mesh of a topology's first device: it has all rows."""
    try:
        device = topologies.devices(topology)[0]
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    return sharding.make_mesh(devices=[device])


NARROW = {"d_model": 1024, "ffw": 2048}


@pytest.mark.parametrize("topology", TPUS)
def test_the_loop_over_forwards_of_many_long_rows(topology, monkeypatch, capsys):
    """Of two layers of SDAR-8B's heads; the widest programs of blocks and of prompts.

    What does not depend on a row's length is cut, for half of the time is its: the vocabulary,
    and the widths but for one chip.
    """
    counts = SamplerConfig.window_counts
    mesh = one_device(topology)
    cut = {} if topology == TPUS[0] else NARROW
    model = dataclasses.replace(RELEASED["sdar-8b"], layers=2, vocab=8192, **cut)
    weights = acting.abstract(model, mesh)
    with jax.set_mesh(mesh), programs.trusted(model.dtype), programs.widest():
        monkeypatch.setattr(
            SamplerConfig, "window_counts", lambda *args: counts(*args)[-1:]
        )
        made = Engine(model=model, cfg=CFG, mesh=mesh)
        lowered, rows = made.lower(weights)
        compiled = lowered.compile()
    assert rows.s.tokens_BT.shape == (ROWS, SLOTS)
    with capsys.disabled():
        size = memory.program_bytes(compiled) / GIB
        print(
            f"\n{topology}: {size:.2f} GiB beside {memory.array_bytes(rows) / GIB:.2f}"
        )
    program = hlo.parsed(compiled.as_text())
    (body,) = hlo.loops(program, program.entry)
    kernels = {hlo.kernel_name(line) for line in hlo.all_lines(program, body)}
    assert kernels >= {"paged_attention", "cache_update"}
    run = types.SimpleNamespace(cfg=types.SimpleNamespace(sampler=CFG), model=model)
    place = placement.Placement(made, weights, "")
    loop = performance_model.Loop(program, body, place, run)
    assert performance_model.rollout_faults(loop) == []


@pytest.mark.parametrize("topology", [*TPUS, "h200:1"])
def test_attention_over_a_long_row_and_its_gradient(topology, capsys):
    """Of SDAR-8B's heads."""
    B, T, N, K, H = 1, 32768, 32, 8, 128
    implementation = "gpu" if topology.startswith("h") else "tpu"

    def gradient(q, k, v, mask, dout):
        attention = functools.partial(
            pallas_kernels.attention, mask=mask, implementation=implementation
        )
        _, pull = jax.vjp(attention, q, k, v)
        return pull(dout)

    mesh = one_device(topology)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=place)
    q, k = (array((B, T, heads, H), jnp.bfloat16) for heads in (N, K))
    mask = Mask(*[array((B, T), jnp.int32)] * 5)
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient).lower(q, k, k, mask, q).compile()
    assert "custom-call" in compiled.as_text()
    size = memory.program_bytes(compiled)
    with capsys.disabled():
        print(f"\n{topology}: {size / GIB:.2f} GiB for {T:,} positions")
    assert size < 4 * T * T  # bytes: not even a head's scores are there


def test_an_update_of_long_answers_fits(capsys):
    """SDAR-8B's, whole, with the remat that its memory plan comes to after `dots`."""
    try:
        run = programs.Run("sdar-8b", "h200:8", 49152, max_new=CFG.max_new)
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    tokens = run.settings.batch.tokens
    assert tokens > run.cfg.sampler.slots == SLOTS
    compiled = run.update_with("attention")
    size = topologies.peak_bytes(compiled)
    with capsys.disabled():
        print(f"\nh200:8: {size / GIB:.2f} GiB, rows of {tokens:,} slots")
    assert size < run.limit
    program = hlo.parsed(compiled.as_text())
    assert performance_model.update_faults(program, run.model, tokens) == []
