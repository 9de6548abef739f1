"""Checkpoints: round trips over meshes, and every way in which one can be broken."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax import sharding
from dllm_jax.checkpoint import SUMS, Checkpoints

SPECS = {"w": PartitionSpec("fsdp", "model"), "step": PartitionSpec()}


def tree(number: int, **sizes) -> dict:
    """Returns arrays that tell steps apart, laid out on a mesh of 8 devices."""
    mesh = sharding.make_mesh(**(sizes or {"fsdp": 8}))
    w = np.random.default_rng(number).normal(size=(64, 32)).astype(np.float32)
    arrays = {"w": w, "step": np.int32(number)}
    return {k: sharding.place(x, SPECS[k], mesh) for k, x in arrays.items()}


def target(like: dict) -> dict:
    """Returns what to restore: shapes, dtypes and places."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )


def fill(folder, steps, keep=2) -> Checkpoints:
    """Returns checkpoints of some steps, written and closed, opened again."""
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, tree(step), {"taken": 10 * step})
    checkpoints.close()
    return Checkpoints(folder, keep=keep)


def largest(folder) -> pathlib.Path:
    """Returns the largest file below a folder."""
    files = [f for f in pathlib.Path(folder).rglob("*") if f.is_file()]
    return max(files, key=lambda f: f.stat().st_size)


def test_restore_lays_arrays_out_on_another_mesh(tmp_path):
    checkpoints = fill(tmp_path, [3])
    like = tree(0, data=2, fsdp=2, model=2)
    got, meta, step = checkpoints.restore(target(like))
    assert (step, meta) == (3, {"taken": 30})
    for name, x in tree(3).items():
        np.testing.assert_array_equal(got[name], x)
        assert got[name].dtype == x.dtype
        assert got[name].sharding == like[name].sharding
    assert got["w"].addressable_shards[0].data.shape == (32, 16)


def test_restore_without_a_target_gives_what_is_there(tmp_path):
    got, _, _ = fill(tmp_path, [1]).restore(None)
    np.testing.assert_array_equal(got["w"], tree(1)["w"])


def test_keeps_the_newest(tmp_path):
    checkpoints = fill(tmp_path, [1, 2, 3, 4])
    assert checkpoints.steps() == [3, 4]
    assert fill(tmp_path / "all", [1, 2, 3], keep=None).steps() == [1, 2, 3]


def test_a_step_can_be_named(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    assert checkpoints.restore(target(tree(0)), step=1)[2] == 1
    with pytest.raises(ValueError, match=r"no step 7; it has \[1, 2\]"):
        checkpoints.restore(target(tree(0)), step=7)


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "new").restore(target(tree(0))) is None


KILLED = """
import os, pathlib, signal, sys, time
import numpy as np
from dllm_jax.checkpoint import Checkpoints

folder = pathlib.Path(sys.argv[1])
checkpoints = Checkpoints(folder)
noise = np.random.default_rng(0).integers(0, 2**32, 2**25, np.uint32)
checkpoints.save(1, {"w": noise[:1000]}, {"taken": 1})
checkpoints.wait()
checkpoints.save(2, {"w": noise}, {"taken": 2})
while not [p for p in folder.rglob("*") if p.is_file() and "tmp" in str(p)]:
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_that_is_killed_costs_only_itself(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert run.returncode == -signal.SIGKILL
    assert [p for p in folder.rglob("*") if "tmp" in p.name]  # killed half-way indeed

    checkpoints = Checkpoints(folder)
    assert checkpoints.steps() == [1]
    want = {"w": jax.ShapeDtypeStruct((1000,), jnp.uint32)}
    _, meta, step = checkpoints.restore(want)
    assert (step, meta) == (1, {"taken": 1})
    assert "damaged" not in capsys.readouterr().err

    checkpoints.save(2, {"w": np.arange(1000, dtype=np.uint32)}, {"taken": 2})
    checkpoints.close()
    got, _, step = Checkpoints(folder).restore(want)
    assert step == 2
    np.testing.assert_array_equal(got["w"], np.arange(1000))


def delete(file: pathlib.Path):
    """Loses a file."""
    file.unlink()


def truncate(file: pathlib.Path):
    """Loses the second half of a file."""
    os.truncate(file, file.stat().st_size // 2)


def flip(file: pathlib.Path):
    """Changes the byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [delete, truncate, flip])
def test_a_damaged_newest_falls_back(tmp_path, capsys, harm):
    checkpoints = fill(tmp_path, [1, 2])
    harm(largest(tmp_path / "2"))
    got, meta, step = checkpoints.restore(target(tree(0)))
    assert (step, meta) == (1, {"taken": 10})
    np.testing.assert_array_equal(got["w"], tree(1)["w"])
    assert f"{tmp_path / '2'} is damaged" in capsys.readouterr().err

    # The run goes on from there, and its own step 2 replaces the damaged one.
    checkpoints.save(2, tree(22), {"taken": 22})
    checkpoints.close()
    got, meta, step = Checkpoints(tmp_path).restore(target(tree(0)))
    assert (step, meta) == (2, {"taken": 22})
    np.testing.assert_array_equal(got["w"], tree(22)["w"])


def test_saving_goes_on_below_a_damaged_step(tmp_path):
    checkpoints = fill(tmp_path, [1, 2, 3], keep=3)
    flip(largest(tmp_path / "2"))
    flip(largest(tmp_path / "3"))
    assert checkpoints.restore(target(tree(0)))[2] == 1
    checkpoints.save(2, tree(2), {})
    checkpoints.close()
    assert Checkpoints(tmp_path).restore(target(tree(0)))[2] == 2


def test_damaged_checksums_fall_back(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    truncate(tmp_path / "2" / SUMS)
    assert checkpoints.restore(target(tree(0)))[2] == 1


def test_none_whole_is_an_error(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    for step in (1, 2):
        flip(largest(tmp_path / str(step)))
    with pytest.raises(ValueError, match=r"no checkpoint of \[2, 1\] can be read"):
        checkpoints.restore(target(tree(0)))


def test_a_damaged_step_that_was_asked_for_is_an_error(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    flip(largest(tmp_path / "2"))
    with pytest.raises(ValueError, match=r"no checkpoint of \[2\] can be read"):
        checkpoints.restore(target(tree(0)), step=2)


def test_without_checksums_a_step_is_trusted(tmp_path, capsys):
    checkpoints = fill(tmp_path, [1, 2])
    (tmp_path / "2" / SUMS).unlink()
    assert checkpoints.restore(target(tree(0)))[2] == 2
    assert not capsys.readouterr().err
    checkpoints.wait()  # and gets them
    assert json.loads((tmp_path / "2" / SUMS).read_text())


def test_a_truncated_step_without_checksums_falls_back(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    truncate(largest(tmp_path / "2"))
    (tmp_path / "2" / SUMS).unlink()
    assert checkpoints.restore(target(tree(0)))[2] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t | {"w": shaped((64, 16))},
            r"w is \(64, 32\), expected \(64, 16\)",
        ),
        (lambda t: t | {"extra": {"b": shaped((2,))}}, "it has no extra.b"),
        (lambda t: {"w": t["w"]}, "it has an unexpected step"),
    ],
)
def test_another_configuration_is_no_damage(tmp_path, capsys, change, message):
    checkpoints = fill(tmp_path, [1, 2])
    with pytest.raises(ValueError, match=f"does not fit this configuration: {message}"):
        checkpoints.restore(change(target(tree(0))))
    assert "damaged" not in capsys.readouterr().err


def shaped(shape) -> jax.ShapeDtypeStruct:
    """Returns a replicated float array's description."""
    where = NamedSharding(sharding.make_mesh(), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
