"""benchmarks/budget.json: what it holds, what is worse than it, and the page made of it."""

import json
import re
import types

import pytest

from benchmarks import budget, chips, hlo, programs, roofline, scaling_page
from benchmarks.shapes import RELEASED
from dllm_jax.pallas_kernels import held_pages
from dllm_jax.sampling.config import SamplerConfig

OLD = {
    "refused": "",
    "gib": 40.0,
    "tokens_per_second": 1000.0,
    "sent_mib": {"fsdp all-gather": 100.0},
    "kernels": {"attention": 36},
    "faults": [],
}


def test_the_page_is_made_of_the_file():
    known = budget.load()
    every = [cell.name for cell in budget.cells()]
    assert known.keys() <= set(every)
    assert scaling_page.PAGE.read_text() == scaling_page.text(known, every)


def test_what_a_chip_made_is_set_beside_the_cells_that_it_is_of(monkeypatch, tmp_path):
    line = {
        "command": "python -m benchmarks.decode --steady",
        "device": "NVIDIA H200",
        "model": "sdar-8b",
        "rows": 1,
        "busy_rows": 1.0,
        "context": 992,
        "sampler": "block 4, forced, temperature 1",
        "kernels": "platform",
        "engine_tokens_per_second": 282.0,
    }
    others = [
        {"rows": 7},
        {"device": "TPU v9"},
        {"sampler": "block 32, forced, temperature 1"},
        {"kernels": "reference"},
        {"command": "python -m benchmarks.decode --engine-only"},
    ]
    file = tmp_path / "lines.jsonl"
    lines = (json.dumps(line | more) + "\n" for more in ({}, *others))
    file.write_text("".join(lines))
    monkeypatch.setattr(scaling_page, "MEASURED", file)
    known = budget.load()
    ((found, where, most),) = scaling_page.steady(known)
    assert (found, where) == (line, "h200:1")
    assert scaling_page.percent(found, most) == "50"
    assert "An H200 reaches 50 to 50 %" in scaling_page.text(known, [])


def test_no_program_of_the_file_has_a_fault():
    assert {
        name: row["faults"] for name, row in budget.load().items() if row.get("faults")
    } == {}


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, []),
        ({"gib": 41.9, "tokens_per_second": 951.0}, []),
        ({"gib": 30.0, "tokens_per_second": 2000.0, "sent_mib": {}}, []),
        ({"gib": 42.1}, ["cell: gib was 40.0, is 42.1"]),
        (
            {"tokens_per_second": 940.0},
            ["cell: tokens_per_second was 1000.0, is 940.0"],
        ),
        ({"sent_mib": {"model all-reduce": 110.0}}, ["cell: sent_mib was 100, is 110"]),
        (
            {"kernels": {}},
            ["cell: the kernel attention is not in the program any more"],
        ),
        (
            {"faults": ["an array of scores: [8, 8]"]},
            ["cell: an array of scores: [8, 8]"],
        ),
        ({"percent_of_pages": 96.0}, []),
        (
            {"percent_of_pages": 60.0},
            ["cell: percent_of_pages was 100.0, is 60.0"],
        ),
    ],
)
def test_what_is_worse_by_a_twentieth_is_told(change, words):
    assert budget.worse("cell", OLD, OLD | change) == words


def test_a_forward_of_prompts_that_nobody_counts_any_more_is_told():
    assert budget.worse("cell", OLD | {"prompt": OLD}, OLD) == [
        "cell: the forward of prompts is not in the program any more"
    ]


def test_what_fits_again_is_not_worse_for_what_it_sends_and_holds():
    old = {"refused": "takes too much", "smallest": "h200:2: 90 of 98 GiB"}
    assert budget.worse("cell", old, OLD | {"percent_of_pages": 60.0}) == []


@pytest.mark.parametrize("name", budget.load())
def test_every_figure_of_the_file_that_gets_worse_by_more_is_told(name):
    row = budget.load()[name]
    for key in (*budget.MORE, *budget.LESS):
        if row.get(key):
            factor = 1.06 if key in budget.MORE else 0.94
            (line,) = budget.worse(name, row, row | {key: row[key] * factor})
            assert line.startswith(f"{name}: {key} was ")


def test_what_fits_no_more_is_told():
    new = {"refused": "rollout takes 120.0 GiB of a device's 98.5", "smallest": ""}
    assert budget.worse("cell", OLD, new) == [
        f"cell: does not fit any more: {new['refused']}"
    ]


def test_a_cell_that_the_file_lacks_is_told():
    assert budget.worse("cell", {}, OLD | {"faults": ["a copy"]}) == [
        "cell: not in the file: --write puts it there",
        "cell: a copy",
    ]


@pytest.mark.parametrize(
    "before, now, told",
    [
        ("h200:4: 80 of 98 GiB", "h200:4: 81 of 98 GiB", False),
        ("h200:4: 80 of 98 GiB", "h200:2: 90 of 98 GiB", False),
        ("h200:4: 80 of 98 GiB", "h200:2x8: 60 of 98 GiB", True),
        ("h200:4: 80 of 98 GiB", "", True),
        ("sampler.rows=64: 30 of 31 GiB", "sampler.rows=32: 30 of 31 GiB", True),
        ("sampler.rows=64: 30 of 31 GiB", "v6e:4x4: 30 of 31 GiB", True),
        ("v6e:4x4: 30 of 31 GiB", "sampler.rows=64: 30 of 31 GiB", False),
        ("", "v6e:4x4: 30 of 31 GiB", False),
    ],
)
def test_more_that_a_refused_cell_needs_is_told(before, now, told):
    old, new = ({"refused": "no", "smallest": x} for x in (before, now))
    line = f"cell: fitted with {before}, fits with {now or 'nothing'}"
    assert budget.worse("cell", old, new) == [line] * told


def test_of_the_engines_programs_those_that_count_remain():
    cfg = SamplerConfig(max_prompt=784, max_new=2000, prefill=512)
    whole = cfg.window_counts(64), cfg.chunk_counts(64), held_pages.widths(87)
    with programs.widest():
        kept = cfg.window_counts(64), cfg.chunk_counts(64), held_pages.widths(87)
    assert kept == (whole[0][-2:], whole[1][-1:], whole[2][-1:])
    assert kept[0][0] >= 64 * (1 + 1 / roofline.STEPS) > whole[0][-3]
    assert whole == (cfg.window_counts(64), cfg.chunk_counts(64), held_pages.widths(87))


@pytest.mark.parametrize(
    "fits, words",
    [
        (lambda cell, rows: rows in (32, 64), "sampler.rows=64: 30 of 31 GiB"),
        (lambda cell, rows: cell.topology == "v6e:4x8", "v6e:4x8: 30 of 31 GiB"),
        (lambda cell, rows: False, ""),
    ],
)
def test_what_does_not_fit_names_the_least_change(monkeypatch, fits, words):
    def tried(cell, rows):
        refused = "" if fits(cell, rows) else "no"
        return {"refused": refused, "gib": 30, "gib_there": 31}

    monkeypatch.setattr(budget, "tried", tried)
    cell = budget.Cell("sdar-8b", "v6e:2x4", "rollout")
    assert budget.smallest(cell) == words


def test_devices_of_a_group_differ_along_its_axes():
    mesh = types.SimpleNamespace(shape={"data": 2, "fsdp": 2, "model": 2})
    assert budget.axes_of((0, 1), mesh) == "model"
    assert budget.axes_of((0, 2, 4, 6), mesh) == "data+fsdp"


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
    program = hlo.parsed(re.sub("WHAT .*", lambda _: line, LOOP))
    sampler = SamplerConfig(max_prompt=784, max_new=2000, rows=64, prefill=512)
    model = RELEASED["sdar-8b"]
    run = types.SimpleNamespace(cfg=types.SimpleNamespace(sampler=sampler), model=model)
    answerer = types.SimpleNamespace(
        page_count=5568,
        shards=1,
        mesh=types.SimpleNamespace(shape={"model": 4}),
        scheduler=types.SimpleNamespace(rows_per_shard=64, pages_per_row=87),
    )
    place = types.SimpleNamespace(answerer=answerer)
    found = budget.rollout_faults(program, "body", place, run)
    assert found == (
        [f"an array {fault}" if "scores" in fault else fault] * bool(fault)
    )


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
