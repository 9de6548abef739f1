"""SDAR-8B fits: the programs of a real run, compiled for chips that are not here."""

import pytest

from benchmarks import compile_8b, topologies


@pytest.mark.parametrize("topology", compile_8b.TARGETS)
def test_rollout_and_update_fit_a_device(topology):
    try:
        rows = list(compile_8b.report(topology))
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    plain = ["rollout step", "TraceRL update"]
    kernels = [f"{program}, kernels" for program in plain]
    trusted = topology.startswith("v")
    assert [row[0] for row in rows] == plain + (not trusted) * kernels
    for program, used, seconds in rows:
        print(f"{topology} {program}: {used / 2**30:.2f} GiB a device, {seconds:.0f} s")
        assert 0 < used < topologies.hbm_bytes(topology)
