"""benchmarks/budget.json: what it holds, what is worse than it, and the page made of it."""

import json

import pytest

from benchmarks import budget, scaling_page

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
