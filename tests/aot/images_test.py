"""LLaDA-V's programs, with its tower and a step's images, for chips that are not here."""

import pytest

from benchmarks import programs, topologies

GIB = 2**30


@pytest.mark.parametrize("topology", ["h200:8", "v5p:2x2x1"])
def test_a_model_that_looks_fits_with_all_that_a_run_keeps(topology, capsys):
    try:
        run = programs.Run("llada-v-8b", topology)
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    resident = sum(run.resident.values())
    assert run.resident["images"] > 0
    place = run.sampling
    needs = {
        "tower": topologies.peak_bytes(run.tower()) + resident,
        "rollout": topologies.peak_bytes(run.rollout(place)) + resident,
        "update": topologies.peak_bytes(run.update()),
    }
    with capsys.disabled():
        sizes = {name: f"{size / GIB:.2f} GiB" for name, size in needs.items()}
        print(f"\nllada-v-8b {topology}: {sizes} of {run.limit / GIB:.2f}")
    for name, size in needs.items():
        assert resident < size <= run.limit, name
