"""SDAR-8B fits: the programs of a real run, compiled for chips that are not here."""

import os
import pathlib
import shutil
import subprocess
import sys

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


@pytest.mark.parametrize("word, code", [("", 0), ("1", 1)])
def test_a_skip_fails_where_the_compilers_are_installed(tmp_path, word, code):
    shutil.copy(pathlib.Path(__file__).with_name("conftest.py"), tmp_path)
    body = "import pytest\n\n\ndef test_it():\n    pytest.skip('no ptxas')\n"
    (tmp_path / "it_test.py").write_text(body)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "it_test.py"],
        cwd=tmp_path,
        env=os.environ | {"DLLM_NO_SKIP": word},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stdout
    assert ("skipped: no ptxas" in run.stdout) == bool(code)


def test_a_gpu_program_may_use_what_jax_takes():
    assert topologies.hbm_bytes("h200:8") == 105_750_000_000
