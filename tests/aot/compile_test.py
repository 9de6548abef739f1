"""SDAR-8B fits: the programs of a real run, compiled for chips that are not here."""

import pytest

from benchmarks import compile_8b, topologies


@pytest.mark.parametrize("topology", compile_8b.TARGETS)
def test_rollout_and_update_fit_a_device(topology):
    try:
        rows = list(compile_8b.report(topology))
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    assert [program for program, _, _ in rows] == ["rollout step", "TraceRL update"]
    for program, used, seconds in rows:
        print(f"{topology} {program}: {used / 2**30:.2f} GiB a device, {seconds:.0f} s")
        assert 0 < used < topologies.hbm_bytes(topology)
