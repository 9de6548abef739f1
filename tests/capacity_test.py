"""What fits the memory of which chips: the least change, and how changes are ordered."""

import pytest

from benchmarks import capacity
from benchmarks.performance_model import Cell


@pytest.mark.parametrize(
    "fits, words",
    [
        (lambda cell: cell.rows in (32, 64), "sampler.rows=64: 30 of 31 GiB"),
        (lambda cell: cell.topology == "v6e:4x8", "v6e:4x8: 30 of 31 GiB"),
        (lambda cell: False, ""),
    ],
)
def test_what_does_not_fit_names_the_least_change(monkeypatch, fits, words):
    def tried(cell):
        refused = "" if fits(cell) else "no"
        return {"refused": refused, "gib": 30, "gib_there": 31}

    monkeypatch.setattr(capacity, "tried", tried)
    cell = Cell("sdar-8b", "v6e:2x4", "rollout")
    assert capacity.smallest(cell) == words


def test_answers_keep_their_rows_and_their_weights_on_a_larger_slice():
    cell = Cell("sdar-8b", "h200:4", "answers", rows=64, int8=True)
    assert list(capacity.remedies(cell)) == [
        (x, cell._replace(topology=x)) for x in ("h200:8", "h200:2x8", "h200:4x8")
    ]


def test_changes_are_ordered_by_what_they_take():
    least_first = ["sampler.rows=64: 30 of 31 GiB", "sampler.rows=32: 30 of 31 GiB"]
    least_first += ["v6e:4x4: 30 of 31 GiB", "v6e:4x8: 30 of 31 GiB", ""]
    sizes = [capacity.size_of(x) for x in least_first]
    assert sizes == sorted(sizes) and len(set(sizes)) == 5
