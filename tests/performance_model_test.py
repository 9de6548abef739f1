"""The performance model: which programs it is of, their faults, and a slice's links."""

import re
import types

import pytest

from benchmarks import chips, hlo, performance_model, programs, roofline
from benchmarks.shapes import RELEASED
from dllm_jax.pallas_kernels import held_pages
from dllm_jax.sampling.config import SamplerConfig


def test_of_the_engines_programs_those_that_count_remain():
    cfg = SamplerConfig(max_prompt=784, max_new=2000, prefill=512)
    whole = cfg.window_counts(64), cfg.chunk_counts(64), held_pages.widths(87)
    with programs.widest():
        kept = cfg.window_counts(64), cfg.chunk_counts(64), held_pages.widths(87)
    assert kept == (whole[0][-2:], whole[1][-1:], whole[2][-1:])
    assert kept[0][0] >= 64 * (1 + 1 / roofline.STEPS) > whole[0][-3]
    assert whole == (cfg.window_counts(64), cfg.chunk_counts(64), held_pages.widths(87))


# Of 64 rows of 2,784 positions, which are 87 pages, with prompts of 784; a device has 2 of
# the 8 key heads. `x` stands for what a case puts there.
LOOP = """HloModule rollout

%fused (p: bf16[128,2,16,2784]) -> f32[128,2,16] {
  %p = bf16[128,2,16,2784]{3,2,1,0} parameter(0)
  ROOT %r = f32[128,2,16]{2,1,0} reduce(%p)
}

ENTRY %body (s: bf16[36,5568,32,2,128]) -> bf16[36,5568,32,2,128] {
  %s = bf16[36,5568,32,2,128]{4,3,2,1,0} parameter(0)
  %mask = pred[128,4,2784]{2,1,0} custom-call(%s), custom_call_target="mosaic_gpu_v2"
  %keys = bf16[10,2,784,128]{3,2,1,0} custom-call(%s), custom_call_target="mosaic_gpu_v2"
  %x = WHAT custom-call(%s), custom_call_target="mosaic_gpu_v2"
  ROOT %out = bf16[36,5568,32,2,128]{4,3,2,1,0} add(%s, %s)
}
"""


def faults_with(line: str, share: int) -> list[str]:
    """Returns the faults of a loop over forwards with a line, of 8B on a `model` axis."""
    program = hlo.parsed(re.sub("WHAT .*", lambda _: line, LOOP))
    sampler = SamplerConfig(max_prompt=784, max_new=2000, rows=64, prefill=512)
    model = RELEASED["sdar-8b"]
    run = types.SimpleNamespace(cfg=types.SimpleNamespace(sampler=sampler), model=model)
    answerer = types.SimpleNamespace(
        page_count=5568,
        shards=1,
        mesh=types.SimpleNamespace(shape={"model": share}),
        scheduler=types.SimpleNamespace(rows_per_shard=64, pages_per_row=87),
    )
    place = types.SimpleNamespace(answerer=answerer)
    loop = performance_model.Loop(program, "body", place, run)
    return performance_model.rollout_faults(loop)


@pytest.mark.parametrize(
    "line, fault",
    [
        ("f32[128,2,16,2784]{3,2,1,0} copy(%s)", "of scores: [128, 2, 16, 2784]"),
        ("f32[128,2,4,4,2784]{4,3,2,1,0} dot(%s)", "of scores: [128, 2, 4, 4, 2784]"),
        ("(f32[10,8,49,800]{3,2,1,0}, s32[]) call(%s)", "of scores: [10, 8, 49, 800]"),
        ("f32[128,2] fusion(%s), calls=%fused", "of scores: [128, 2, 16, 2784]"),
        ("s32[128,2784]{1,0} copy(%s)", ""),  # tokens
        ("s32[64,8,2784]{2,1,0} copy(%s)", ""),  # a mask of pairs
        ("bf16[10,2,128,800]{3,2,1,0} copy(%s)", ""),  # keys of prompts
        ("bf16[10,256,800]{2,1,0} copy(%s)", ""),
        (
            "bf16[36,5568,32,2,128]{4,3,2,1,0} copy(%s)",
            "the pool of pages is copied: x",
        ),
        ("bf16[4096,3072]{1,0} all-gather(%s)", "all-gather of 24 MiB: x"),
        ("bf16[64,3072]{1,0} all-gather(%s)", ""),
    ],
)
def test_what_the_loop_over_forwards_must_not_do(line, fault):
    assert faults_with(line, share=4) == (
        [f"an array {fault}" if "scores" in fault else fault] * bool(fault)
    )


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_a_pool_that_is_copied_is_known_whatever_heads_a_device_has(heads):
    line = f"bf16[36,5568,32,{heads},128]{{4,3,2,1,0}} copy(%s)"
    assert faults_with(line, share=16) == ["the pool of pages is copied: x"]


@pytest.mark.parametrize(
    "topology, rings, links",
    [
        ("v5p:2x2x1", (False, False, False), 2),
        ("v5p:4x4x4", (True, True, True), 6),
        ("v5p:4x4x8", (True, True, True), 6),
        ("v5p:2x2x4", (False, False, False), 3),  # less than a cube
        ("v5p:2x4x4", (False, False, False), 3),
        ("v6e:2x4", (False, False), 2),
        ("v6e:8x16", (False, True), 3),
    ],
)
def test_a_slice_has_two_links_where_an_axis_is_a_ring(topology, rings, links):
    assert chips.rings(topology) == rings
    assert chips.link_bytes(topology) == links * chips.chip(topology).link
