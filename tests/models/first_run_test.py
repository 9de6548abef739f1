"""A kernel that hangs, or breaks the device or its compiler: a later start does without."""

import contextlib
import signal
import subprocess
import sys

import jax
import pytest

from dllm_jax import exits, sharding
from dllm_jax.models import first_run

# A check of a kernel that hangs, in a process that gives it a second, or of one at which the
# compiler aborts.
HANGS = """if True:
    import os, sys, time, types
    from unittest import mock
    import jax
    from dllm_jax.models import first_run, selfcheck
    from dllm_jax.pallas_kernels import choice, held_pages, reference

    def hangs(x):
        time.sleep(1000)
        return x

    def attend(*arrays, interpret):
        if sys.argv[2] == "aborts":
            os.kill(os.getpid(), 9)
        out = reference.paged_attention(*arrays)
        return jax.pure_callback(hangs, out, out)

    first_run.LONGEST_S = 1.0
    choice.KERNELS["paged_attention", "cpu"] = "nowhere"
    wide = selfcheck.Widths(
        heads=2, kv_heads=2, held_heads=2, head_dim=64, d_model=32, vocab=70, experts=0,
        expert_ffw=0, dtype="float32", block=4, page=8,
    )
    module = types.SimpleNamespace(attend=attend)
    with mock.patch.object(choice, "module", lambda op, name: module):
        print(*selfcheck.check("auto", wide, sys.argv[1]), sep="\\n")
"""


def check(folder: str, how: str = "hangs") -> subprocess.CompletedProcess:
    """Returns how HANGS ended, with what it said."""
    command = [sys.executable, "-c", HANGS, folder, how]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_start_after_one_that_hung_does_without_the_kernel(tmp_path):
    hung = check(str(tmp_path))
    who = "cpu's kernel of paged_attention has not come back in 1 s"
    told = f"stopped as {who}: the same command goes on without it, but for "
    told += "model.kernels='platform'"
    assert (hung.returncode, hung.stderr.splitlines()[-1]) == (exits.STOPPED, told)
    (file,) = tmp_path.iterdir()
    for _ in range(2):
        after = check(str(tmp_path))
        assert after.returncode == 0, after.stderr
        line = "warning: not used is cpu's kernel of paged_attention: an earlier start"
        assert line in after.stdout and f"remove {file} to" in after.stdout
    file.unlink()
    assert check(str(tmp_path)).returncode == exits.STOPPED
    # Where nothing is kept, the same would happen again.
    hung = check("")
    told = f"error: {who}: set model.kernels='reference'"
    assert (hung.returncode, hung.stderr.splitlines()[-1]) == (exits.STUCK, told)


def test_the_third_start_does_without_a_kernel_at_which_the_compiler_aborts(tmp_path):
    left = []
    for _ in range(2):
        assert check(str(tmp_path), "aborts").returncode == -signal.SIGKILL
        left.append(sorted(file.name.split(".")[1] for file in tmp_path.iterdir()))
    # The first is compiled beside others; the second time it is known which one it was.
    assert left == [["all"], ["all", "paged_attention"]]
    for _ in range(2):
        after = check(str(tmp_path), "aborts")
        assert after.returncode == 0, after.stderr
        (file,) = tmp_path.iterdir()
        assert f"not get over its check; remove {file} to have it" in after.stdout


def test_the_file_is_there_while_a_kernel_runs_and_tells_of_no_living_process(tmp_path):
    file = tmp_path / "new" / "kernel.tried"
    assert not first_run.lost(file)
    with first_run.tried(file, "a kernel"):
        assert file.exists() and not first_run.lost(file)
        with first_run.tried(file, "the same, by another"):  # which leaves it alone
            pass
        assert file.exists() and not first_run.lost(file)
    assert [*file.parent.iterdir()] == []
    with pytest.raises(ZeroDivisionError), first_run.tried(file, "a kernel"):
        raise ZeroDivisionError  # the device still computes
    assert not file.exists()
    file.touch()  # as a killed process leaves it
    assert first_run.lost(file)
    assert not first_run.lost(None)


def test_a_device_answers_whatever_mesh_is_in_force():
    with jax.set_mesh(sharding.make_mesh()):
        assert jax.device_count() > 1 and first_run.answers()


def test_a_folder_that_takes_no_file_changes_nothing(tmp_path):
    file = tmp_path / "file" / "kernel.tried"
    (tmp_path / "file").touch()
    with first_run.tried(file, "a kernel"):
        assert not file.exists()


@pytest.mark.parametrize("folder", [True, False])
def test_a_kernel_that_breaks_the_device_ends_the_start(folder, tmp_path, monkeypatch):
    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    file = tmp_path / "kernel.tried" if folder else None
    kind = exits.Stopped if folder else exits.CannotGoOn
    words = "a kernel has broken the device .INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS.: "
    words += "the same command goes on" if folder else "set model.kernels='reference'"
    with pytest.raises(kind, match=words), first_run.tried(file, "a kernel"):
        monkeypatch.setattr(jax, "device_get", broken)
        jax.device_get(0)
    assert first_run.lost(file) == folder
    monkeypatch.undo()
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    monkeypatch.setattr(first_run, "answers", lambda: False)
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "kernel.tried").unlink()
    with pytest.raises(jax.errors.JaxRuntimeError), first_run.tried(file, "a kernel"):
        raise full  # there is no room for its arrays: nothing is broken
    assert not first_run.lost(file)


def test_who_is_ended_while_a_kernel_is_compiled_blames_none(tmp_path):
    """As by a second signal; a kernel that is run may hang already."""
    file = tmp_path / "kernel.tried"
    cases = (first_run.marked(file), False), (first_run.tried(file, "k"), True)
    for made, stays in cases:
        with made:
            assert file.exists()
            for act in exits.at_end:
                act(exits.STOPPED, "")
            assert file.exists() == stays
    assert not file.exists()
