"""The benchmarks run, on next to nothing, and what they print makes a table."""

import json
import sys

import numpy as np
import pytest

from benchmarks import against, decode, kernels, report, unbiased

CALLS = {
    "decode": (
        decode,
        "--model=tiny --rows 2 --prompt 16 --new 8 --repeats 1 --waves 2 --group 2",
    ),
    "kernels": (kernels, "--small --repeats 1 --only cache_update grouped_matmul"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_benchmark_prints_its_rows(name, monkeypatch, capsys):
    module, flags = CALLS[name]
    monkeypatch.setattr(sys, "argv", [name, *flags.split()])
    module.main()
    text = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in text if line.startswith("{")]
    assert {line["command"] for line in lines} == {
        f"python -m benchmarks.{name} {flags}"
    }
    if name == "decode":
        (line,) = lines
        assert line["requests"] == 4
        # Both ways gave the same ids, and the engine wastes no forward on a full block.
        assert line["engine_forwards"] < line["batches_forwards"]
        assert 0 < line["busy_rows"] <= 2
    else:
        assert [line["op"] for line in lines] == ["cache_update", "grouped_matmul"]
        assert not [key for line in lines for key in line if key.endswith("_failed")]
    table = report.tables(lines)
    assert f"## {name}, cpu" in table and "Not measured on a GPU" in table


def test_two_checkouts_are_compared_line_by_line():
    def lines(seconds, rate):
        return [
            {"model": "tiny", "rows": 4, "seconds": seconds, "tokens_per_second": rate}
        ]

    rounds = [
        (lines(1.0, 30.0), lines(2.0, 10.0)),
        (lines(2.0, 20.0), lines(8.0, 10.0)),
    ]
    seconds, rate = against.compared(rounds)
    assert seconds["line"] == "tiny 4" and seconds["times faster"] == "3.00"
    assert (seconds["here"], seconds["there"]) == ("1 / 1.5 / 2", "2 / 5 / 8")
    assert rate["times faster"] == "2.50"


@pytest.mark.parametrize(("shift", "held"), [(0.0, True), (0.4, False)])
def test_the_square_of_a_mean_is_estimated_without_a_bias(shift, held):
    """Of gradients of 8 numbers, 60 problems; the mean's own square would be 8 / 60 more."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        g_pw = rng.normal(size=(60, 8)) + shift
        found.append(unbiased.squared_mean(g_pw @ g_pw.T, np.ones(60)))
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - 8 * shift**2) < 4 * error < 0.1
    mean, low, high = unbiased.interval(g_pw @ g_pw.T, 200, rng)
    assert low < mean < high and (low < 0 < high) == held
