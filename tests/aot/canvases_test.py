"""The engine's programs, of canvases and of few heads, for chips that are not here."""

import dataclasses
import functools

import jax
import pytest

from benchmarks import hlo, programs, roofline, topologies
from benchmarks.shapes import RELEASED
from dllm_jax import sharding
from dllm_jax.models import acting
from dllm_jax.models import cache as kv
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine

GIB = 2**30
CFG = SamplerConfig(block=32, max_prompt=512, max_new=512, rows=16)


@pytest.mark.parametrize(
    ("topology", "how"),
    [
        ("h200:1", {"cache": "dual"}),
        ("v5p:2x2x1", {"cache": "prefix", "horizon": 128}),
        ("v5p:2x2x1", {"cache": "none"}),
    ],
)
def test_canvases_and_windows_compile_and_copy_no_pages(topology, how, capsys):
    try:
        mesh = topologies.mesh(topology)
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    model = dataclasses.replace(RELEASED["llada-v-8b"], layers=2)
    cfg = dataclasses.replace(CFG, **how)
    with jax.set_mesh(mesh), programs.trusted(model.dtype):
        made = Engine(model=model, cfg=cfg, mesh=mesh)
        lowered, rows = made.lower(acting.abstract(model, mesh))
        compiled = lowered.compile()
    with capsys.disabled():
        size = topologies.peak_bytes(compiled) / GIB
        print(f"\n{topology} {how}: {size:.2f} GiB at its peak")
    program = hlo.parsed(compiled.as_text())
    (body,) = hlo.loops(program, program.entry)
    lines = list(hlo.all_lines(program, body))
    kernels = {hlo.kernel_name(line) for line in lines}
    assert kernels & {"attention", "forward_kernel"}  # GPU's, or TPU's
    if rows.s.cache is None:
        return
    assert ("paged_attention" in kernels) == (cfg.window <= kv.PAGED)
    pool = (model.layers, made.page_count // made.shards, cfg.page_slots)
    pool += (model.kv_heads, model.head_dim)
    for line in lines:
        copies = line.opcode.startswith("copy")
        assert not (copies and pool in [x.dims for x in line.arrays]), line.name


@pytest.mark.parametrize("parts, heads", [(1, 16), (4, 28)])
def test_prompts_and_blocks_copy_no_pages(parts, heads, monkeypatch):
    """Of few key heads on a TPU, and of one that is alone; not in a program, nor at its ends."""
    try:
        devices = topologies.devices("v6e:2x4")[:parts]
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    for name in ("window_counts", "chunk_counts"):  # of each the largest program
        counts = getattr(SamplerConfig, name)
        largest = functools.partialmethod(lambda *args, of: of(*args)[-1:], of=counts)
        monkeypatch.setattr(SamplerConfig, name, largest)
    mesh = sharding.make_mesh(fsdp=1, model=parts, devices=list(devices))
    sizes = {"heads": heads, "kv_heads": 4, "layers": 2, "vocab": 8192}
    model = dataclasses.replace(RELEASED["sdar-1.7b"], **sizes)
    cfg = dataclasses.replace(CFG, block=4, rows=128)  # whose pages fill no fast memory
    with jax.set_mesh(mesh), programs.trusted(model.dtype):
        made = Engine(model=model, cfg=cfg, mesh=mesh)
        lowered, rows = made.lower(acting.abstract(model, mesh))
        program = hlo.parsed(lowered.compile().as_text())
    pool = rows.s.cache.k_LPOKH.shape[:3]
    for line in hlo.all_lines(program, program.entry):
        copies = line.opcode.startswith("copy")
        assert not (copies and pool in [x.dims[:3] for x in line.arrays]), line.name
    kernels = {hlo.kernel_name(line) for line in hlo.all_lines(program, program.entry)}
    assert kernels >= {"gathered", "paged_attention", "cache_update"}
    assert kernels - {None} <= roofline.KERNELS.keys()
