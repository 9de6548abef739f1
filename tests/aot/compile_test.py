"""Programs of real runs, compiled for chips that are not here, against their budget."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import budget, topologies

CELLS = {
    cell.name: cell
    for cell in budget.cells()
    if cell.name
    in (
        "sdar-8b h200:1 answers rows=64",
        "sdar-8b h200:1 answers rows=1",
        "sdar-8b h200:8 rollout",
        "sdar-8b h200:8 update",
        "tiny v5p:2x2x1 rollout",
        "tiny v5p:2x2x1 update",
        "sdar-8b v5p:2x2x1 update",
    )
}

# With every program of the engine, those too that no figure counts: a GPU's and a TPU's.
WHOLE = "sdar-8b h200:1 answers rows=64", "tiny v5p:2x2x1 rollout"


@pytest.mark.parametrize("name", CELLS)
def test_a_program_is_no_worse_than_its_budget(name):
    try:
        row = budget.figures(CELLS[name], whole=name in WHOLE)
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    print(f"{name}: {row}")
    assert not row["refused"]
    assert budget.worse(name, budget.load()[name], row) == []


def test_a_cube_of_v5p_gathers_what_is_split_over_all_of_it():
    try:
        mesh = topologies.mesh("v5p:4x4x4")
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    split, whole = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["fsdp"], [])
    )
    w_DF = jax.ShapeDtypeStruct((4096, 1024), "bfloat16", sharding=split)
    gathered = jax.jit(lambda w_DF: w_DF + 1, out_shardings=whole)
    text = gathered.lower(w_DF).compile().as_text()
    assert " all-gather(" in text and " all-reduce(" not in text


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
