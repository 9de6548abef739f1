"""Checkpoints: round trips over meshes, and every way in which one can be broken."""

import logging
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax import checkpoint, exits, sharding
from dllm_jax.checkpoint import SUMS, Checkpoints
from dllm_jax.rl import optim
from dllm_jax.rl.config import OptimConfig

# Large enough that Orbax's own checksums do not cover it: those of small arrays do.
SHAPE = (512, 256)
SPECS = {"w": PartitionSpec("fsdp", "model"), "step": PartitionSpec()}


def tree(number: int, **sizes) -> dict:
    """Returns arrays that tell steps apart, laid out on a mesh of 8 devices."""
    mesh = sharding.make_mesh(**(sizes or {"fsdp": 8}))
    w = np.random.default_rng(number).normal(size=SHAPE).astype(np.float32)
    arrays = {"w": w, "step": np.int32(number)}
    return {k: sharding.place(x, SPECS[k], mesh) for k, x in arrays.items()}


def target(like: dict) -> dict:
    """Returns what to restore: shapes, dtypes and places."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )


def fill(folder, steps, **kept) -> Checkpoints:
    """Returns checkpoints of some steps, written and closed, opened again."""
    checkpoints = Checkpoints(folder, **kept)
    for step in steps:
        checkpoints.save(step, tree(step), {"taken": 10 * step})
    checkpoints.close()
    return Checkpoints(folder, **kept)


def largest(folder) -> pathlib.Path:
    """Returns the largest file below a folder."""
    files = [f for f in pathlib.Path(folder).rglob("*") if f.is_file()]
    return max(files, key=lambda f: f.stat().st_size)


@pytest.mark.parametrize(("there", "times"), [(0, 3), (1, 2), (2, 1)])
def test_a_disk_too_small_for_what_is_to_stay_is_told_at_the_start(
    tmp_path, monkeypatch, there, times
):
    """Two that stay and one in the making, less those that are there."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    shapes = {"a": jax.ShapeDtypeStruct((2**20, 64), jnp.float32)}  # 0.25 GiB
    for step in range(there):
        (tmp_path / str(step)).mkdir()
    monkeypatch.setattr(checkpoint, "free", lambda folder: times * 2**28)
    assert checkpoints.scarce(shapes) == []
    monkeypatch.setattr(checkpoint, "free", lambda folder: times * 2**28 - 1)
    (line,) = checkpoints.scarce(shapes)
    assert f"0.25 GiB each may want {times / 4:.2f} more" in line and "\n" not in line
    checkpoints.close()


def test_a_step_that_is_to_go_leaves_room_for_the_next(tmp_path, monkeypatch):
    """One is written while there is one more than stay; some stay for good."""
    shapes = {"a": jax.ShapeDtypeStruct((2**20, 64), jnp.float32)}
    for step in (2, 3, 5):
        (tmp_path / str(step)).mkdir()
    monkeypatch.setattr(checkpoint, "free", lambda folder: 0)
    for keep_every, warned in ((None, 0), (2, 1), (3, 0)):
        checkpoints = Checkpoints(tmp_path, keep=2, keep_every=keep_every)
        assert len(checkpoints.scarce(shapes)) == warned, keep_every
        checkpoints.close()


def test_restore_lays_arrays_out_on_another_mesh(tmp_path):
    checkpoints = fill(tmp_path, [3])
    like = tree(0, data=2, fsdp=2, model=2)
    got, meta, step = checkpoints.restore(target(like))
    assert (step, meta) == (3, {"taken": 30})
    for name, x in tree(3).items():
        np.testing.assert_array_equal(got[name], x)
        assert got[name].dtype == x.dtype
        assert got[name].sharding == like[name].sharding
    assert got["w"].addressable_shards[0].data.shape == (256, 128)


def test_restore_without_a_target_gives_what_is_there(tmp_path):
    got, _, _ = fill(tmp_path, [1]).restore(None)
    np.testing.assert_array_equal(got["w"], tree(1)["w"])


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.1)])
def test_a_run_that_goes_on_may_decay_weights_from_then_on_or_no_more(
    tmp_path, before, after
):
    def state(decay):
        params = {"w": tree(1)["w"]}
        adamw = optim.optimizer(OptimConfig(weight_decay=decay), 1)
        return {"policy": {"params": params, "opt_state": adamw.init(params)}}

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(before), {})
    got, _, _ = checkpoints.restore(target(state(after)))
    assert jax.tree.structure(got) == jax.tree.structure(state(after))
    np.testing.assert_array_equal(got["policy"]["params"]["w"], tree(1)["w"])


def test_keeps_the_newest(tmp_path):
    checkpoints = fill(tmp_path, [1, 2, 3, 4])
    assert checkpoints.steps() == [3, 4]
    assert fill(tmp_path / "all", [1, 2, 3], keep=None).steps() == [1, 2, 3]
    some = fill(tmp_path / "some", [1, 2, 3, 4, 5], keep=1, keep_every=2)
    assert some.steps() == [2, 4, 5]


def test_a_step_can_be_named(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    assert checkpoints.restore(target(tree(0)), step=1)[2] == 1
    with pytest.raises(ValueError, match=r"no step 7; it has \[1, 2\]"):
        checkpoints.restore(target(tree(0)), step=7)


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "new").restore(target(tree(0))) is None


def test_whether_a_run_goes_on_is_what_process_0_sees(tmp_path, monkeypatch):
    """Others, who may not see yet what it wrote, would go on otherwise."""
    monkeypatch.setattr(checkpoint.jax, "process_index", lambda: 1)
    for seen in (True, False):
        monkeypatch.setattr(
            checkpoint.multihost_utils,
            "broadcast_one_to_all",
            lambda own, seen=seen: np.bool_(seen),
        )
        for resume in ("auto", "must"):
            assert checkpoint.check_resume(tmp_path / "none", resume) is seen


def test_a_folder_is_refused_that_is_not_what_resume_asks_for(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for resume in ("auto", "never"):
        checkpoint.check_resume(folder, resume)
    with pytest.raises(ValueError, match="--resume=must, but .*/run has no checkpoint"):
        checkpoint.check_resume(folder, "must")
    assert not folder.parent.exists()

    (folder / "3").mkdir(parents=True)
    for resume in ("auto", "must"):
        checkpoint.check_resume(folder, resume)
    with pytest.raises(ValueError, match="--resume=never, but .*/run already holds"):
        checkpoint.check_resume(folder, "never")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="file is no folder"):
        checkpoint.check_resume(file, "auto")


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    state = tree(1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    negate = jax.jit(lambda t: jax.tree.map(jnp.negative, t), donate_argnums=0)
    for _ in range(3):
        state = jax.block_until_ready(negate(state))
    got, _, _ = checkpoints.restore(target(tree(0)))
    np.testing.assert_array_equal(got["w"], tree(1)["w"])


def test_restore_sees_what_is_being_saved(tmp_path, monkeypatch):
    def slowly(files):
        time.sleep(0.5)
        return [checkpoint.crc32(file) for file in files]

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint, "crc32s", slowly)
    checkpoints.save(1, tree(1), {})
    assert not (tmp_path / "1").exists()  # `save` does not wait
    assert checkpoints.restore(target(tree(0)))[2] == 1


def test_a_clock_that_jumps_while_it_saves_ends_nothing(tmp_path, monkeypatch):
    """As after a machine has slept: Orbax took 20 minutes for too long."""
    checkpoints, now, asked = Checkpoints(tmp_path), time.time, []

    def jumps():
        if sys._getframe(1).f_code.co_name == "get_remaining_time":
            asked.append(now())
        return now() + 3600 * (len(asked) > 1)

    monkeypatch.setattr(time, "time", jumps)
    checkpoints.save(1, tree(1), {})
    checkpoints.wait()
    assert checkpoints.steps() == [1] and len(asked) > 1


KILLED = """
import os, pathlib, signal, sys, time
import numpy as np
from dllm_jax.checkpoint import Checkpoints

folder, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
checkpoints = Checkpoints(folder)
noise = np.random.default_rng(0).integers(0, 2**32, 2**25, np.uint32)
checkpoints.save(1, {"w": noise[:1000]}, {"taken": 1})
checkpoints.wait()
checkpoints.save(2, {"w": noise}, {"taken": 2})
reached = {
    "halfway": lambda: [p for p in folder.glob("2.*/**/*") if p.is_file()],
    "committed": (folder / "2").exists,
}
while not reached[moment]():
    time.sleep(0.0001)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill(folder, moment: str):
    """Runs a process that saves step 1, and is killed at a moment of saving step 2."""
    command = [sys.executable, "-c", KILLED, str(folder), moment]
    run = subprocess.run(command, check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL


def test_a_save_that_is_killed_costs_only_itself(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    kill(folder, "halfway")
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


def test_what_a_killed_save_leaves_takes_no_room_for_good(tmp_path):
    """Nor of a step that is not saved again: one at which a signal had come."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, tree(5), {})
    checkpoints.close()
    shutil.copytree(tmp_path / "5", tmp_path / "7.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [5]
    checkpoints.save(10, tree(10), {})
    checkpoints.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {"5", "10"}


@pytest.mark.parametrize(
    ("harmed", "there"), [(None, [2, 5]), (1, [2, 5]), (5, [1, 2, 3, 5])]
)
def test_a_run_killed_before_it_removed_a_step_has_no_more_of_them_at_once(
    tmp_path, monkeypatch, harmed, there
):
    """Its disk had room for those that stay and one more; what is damaged replaces none."""
    fill(tmp_path, [1, 2, 3, 5], keep=None)
    if harmed:
        flip(largest(tmp_path / str(harmed)))
    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=2)
    seen, save = [], checkpoints.manager.save
    monkeypatch.setattr(
        checkpoints.manager,
        "save",
        lambda *args, **kwargs: (
            seen.append(checkpoints.steps()) or save(*args, **kwargs)
        ),
    )
    checkpoints.save(7, tree(7), {})
    checkpoints.close()
    assert seen == [there]
    assert Checkpoints(tmp_path).steps() == [2, 7]


def test_what_is_committed_has_its_checksums(tmp_path):
    folder = tmp_path / "checkpoints"
    kill(folder, "committed")
    assert (folder / "2" / SUMS).exists()
    assert Checkpoints(folder).restore(None)[2] == 2


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


@pytest.mark.parametrize("harm", [delete, truncate, flip])
def test_damaged_checksums_fall_back(tmp_path, capsys, harm):
    checkpoints = fill(tmp_path, [1, 2])
    harm(tmp_path / "2" / SUMS)
    assert checkpoints.restore(target(tree(0)))[2] == 1
    assert f"{SUMS} cannot be read" in capsys.readouterr().err


def test_damage_to_any_file_falls_back_or_harms_nothing(tmp_path):
    fill(tmp_path / "whole", [1, 2]).close()
    files = [f for f in (tmp_path / "whole" / "2").rglob("*") if f.is_file()]
    passed = set()
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        flip(folder / file.relative_to(tmp_path / "whole"))
        got, meta, step = Checkpoints(folder).restore(target(tree(0)))
        np.testing.assert_array_equal(got["w"], tree(step)["w"])
        assert meta == {"taken": 10 * step}
        if step == 2:
            passed.add(file.name)
    assert len(files) > 8
    assert passed == {"_CHECKPOINT_METADATA", "commit_success.txt"}


def test_none_whole_is_an_error(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    for step in (1, 2):
        flip(largest(tmp_path / str(step)))
    way_out = "put a copy of one back, or begin again with --resume=never and another"
    with pytest.raises(
        exits.CannotGoOn, match=rf"no checkpoint of \[2, 1\] is whole; {way_out}"
    ):
        checkpoints.restore(target(tree(0)))


def test_a_newer_format_is_refused_by_its_number(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
        fill(tmp_path, [1]).close()
    with pytest.raises(ValueError, match=r"/1 is of format 2, which a newer dllm_jax"):
        Checkpoints(tmp_path).restore(target(tree(0)))


def test_what_older_formats_lack_is_made_up_step_by_step(tmp_path, monkeypatch):
    fill(tmp_path, [1]).close()
    now = checkpoint.FORMAT
    more = {
        now: lambda meta: meta | {"new": meta["taken"], "format": now + 1},
        now + 1: lambda meta: meta | {"new": 2 * meta["new"], "format": now + 2},
    }
    monkeypatch.setattr(checkpoint, "MIGRATIONS", checkpoint.MIGRATIONS | more)
    monkeypatch.setattr(checkpoint, "FORMAT", now + 2)
    assert Checkpoints(tmp_path).restore(None)[1] == {"taken": 10, "new": 20}


def test_rows_are_those_of_the_steps_that_are_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=2)
    for step in (1, 2, 3, 5):
        meta = {"row": {"reward": step / 4}} if step != 3 else {}
        checkpoints.save(step, tree(step), meta)
    checkpoints.wait()
    assert checkpoints.rows(5) == {2: {"reward": 0.5}, 5: {"reward": 1.25}}
    assert checkpoints.rows(4) == {2: {"reward": 0.5}}


FULL = """
import pathlib, resource, sys
import numpy as np
from dllm_jax import exits
from dllm_jax.checkpoint import Checkpoints

# A file larger than this is refused, as a disk is that has no room left.
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
checkpoints = Checkpoints(sys.argv[1])
noise = np.random.default_rng(0).integers(0, 2**32, 2**20, np.uint32)
checkpoints.save(1, {"w": noise[:1000]}, {})
checkpoints.wait()
try:
    checkpoints.save(2, {str(i): noise for i in range(16)}, {})
    checkpoints.close()
except exits.CannotGoOn as error:
    print(error)
"""


def test_a_save_without_room_is_one_line_and_what_was_whole_stays(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    assert line.startswith(f"{tmp_path}: no room: {64 * 2**20} bytes are wanted, ")
    assert run.stderr == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    assert Checkpoints(tmp_path).restore(None)[2] == 1


def test_a_step_that_cannot_be_removed_costs_none_that_is_whole(tmp_path, monkeypatch):
    """It was told as if the folder took nothing, by the bare name of a file in it."""
    checkpoints = fill(tmp_path, [1], keep=1)
    remove = shutil.rmtree

    def refused(path, *args, **kwargs):
        if pathlib.Path(path).name == "1":
            raise PermissionError(1, "Operation not permitted", "_METADATA")
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(
        exits.CannotGoOn, match="^step 2 is whole, and one before it can"
    ):
        checkpoints.save(2, tree(2), {})
        checkpoints.wait()
    assert Checkpoints(tmp_path).restore(target(tree(0)))[2] == 2


def test_a_damaged_step_that_was_asked_for_is_an_error(tmp_path):
    checkpoints = fill(tmp_path, [1, 2])
    flip(largest(tmp_path / "2"))
    with pytest.raises(exits.CannotGoOn, match=r"no checkpoint of \[2\] is whole"):
        checkpoints.restore(target(tree(0)), step=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t | {"w": shaped((64, 16))},
            r"w is \(512, 256\), expected \(64, 16\)",
        ),
        (
            lambda t: t | {"extra": {"b": shaped((2,))}},
            r"extra.b is missing, expected \(2,\)",
        ),
        (lambda t: {"w": t["w"]}, r"step is \(\), expected no such array"),
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


PROCESSES = """
import sys
import time
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from dllm_jax import checkpoint, sharding

port, me, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=me)
place = NamedSharding(sharding.make_mesh(fsdp=16), PartitionSpec("fsdp"))


def tree(number):
    x = np.random.default_rng(number).normal(size=(512, 256)).astype(np.float32)
    return {"w": jax.make_array_from_callback(x.shape, place, lambda index: x[index])}


checkpoints = checkpoint.Checkpoints(folder)
want = {"w": jax.ShapeDtypeStruct((512, 256), np.float32, sharding=place)}
assert checkpoints.restore(want) is None
checkpoints.save(1, tree(1), {})
checkpoints.save(2, tree(2), {})
checkpoints.wait()
if me == 1:
    # Damage that one process sees and the other does not: process 0 decides.
    checkpoint.damage = lambda folder: "seen by process 1"
assert checkpoints.restore(want)[2] == 2
multihost_utils.sync_global_devices("whole")
if me == 0:
    files = [f for f in (checkpoints.folder / "2").rglob("*") if f.is_file()]
    file = max((f for f in files if "process_1" in str(f)), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
else:
    checkpoint.damage = lambda folder: None
multihost_utils.sync_global_devices("hurt")
got, _, step = checkpoints.restore(want)
for held, wanted in zip(got["w"].addressable_shards, tree(1)["w"].addressable_shards):
    np.testing.assert_array_equal(held.data, wanted.data)
assert step == 1
# Process 0 deletes the damaged step; a process that lists the folder late misses it.
if me == 1:
    reload = checkpoints.manager.reload
    checkpoints.manager.reload = lambda: (time.sleep(0.5), reload())
checkpoints.save(2, tree(3), {})
checkpoints.close()
"""


def two(script: str, *args: str) -> tuple[list[int], list[str]]:
    """Returns (exit codes, what they said) of a script run as two processes of a group.

    args: of the script, behind the port of the coordinator and the process's number.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, port, str(me), *args],
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    try:
        told = [run.communicate(timeout=120)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [run.returncode for run in runs], told


def test_two_processes_share_a_folder_and_agree(tmp_path):
    codes, told = two(PROCESSES, str(tmp_path))
    assert codes == [0, 0], told
    assert f"{tmp_path / '2'} is damaged" in told[0]
    assert "warning: checkpoint" not in told[1]  # one voice is enough

    got, _, step = Checkpoints(tmp_path).restore(target({"w": tree(0)["w"]}))
    assert step == 2
    np.testing.assert_array_equal(got["w"], tree(3)["w"])


ONE_WITHOUT_ROOM = """
import resource, sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dllm_jax import checkpoint, processes, sharding

port, me, folder, victim = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
with processes.together():
    processes.join(f"localhost:{port}", 2, me)
    place = NamedSharding(sharding.make_mesh(fsdp=16), PartitionSpec("fsdp"))
    x = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
    w = jax.make_array_from_callback(x.shape, place, lambda index: x[index])
    checkpoints = checkpoint.Checkpoints(folder)
    checkpoints.save(1, {"w": w}, {})
    checkpoints.wait()
    if me == int(victim):  # of 16 shards one has 32 KB, and a slow save files of a few
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    checkpoints.save(2, {"w": w}, {})
    checkpoints.wait()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_without_room_ends_the_other_that_waits_for_it(tmp_path, victim):
    codes, told = two(ONE_WITHOUT_ROOM, str(tmp_path), str(victim))
    assert codes == [exits.STUCK] * 2, told
    for text in told:
        line = text.strip().splitlines()[-1]
        assert line.startswith(f"error: process {victim} on ")
        assert f" ended: {tmp_path}: no room: {512 * 256 * 4} bytes are wanted" in line
        assert "see `ulimit -f`" in line
    # The other may still write its part, which the next save removes.
    steps = [entry.name for entry in tmp_path.iterdir() if entry.name.isdigit()]
    assert steps == ["1"]
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(target({"w": tree(0)["w"]}))[2] == 1
    checkpoints.save(2, {"w": tree(0)["w"]}, {})
    checkpoints.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {"1", "2"}


def test_a_process_that_others_have_lost_removes_nothing_that_they_write(tmp_path):
    """Its save fails for want of the others, which may have begun again without it."""
    checkpoints, theirs = fill(tmp_path, [1]), tmp_path / "2.orbax-checkpoint-tmp"
    theirs.mkdir()
    for error, kept in (
        (jax.errors.JaxRuntimeError("UNAVAILABLE: no coordinator"), True),
        (OSError(28, "No space left on device"), False),
    ):
        told = type(error), error, None
        record = logging.LogRecord("absl", logging.ERROR, "", 1, "failed", (), told)
        record.threadName = "async_save"
        checkpoints.hear(record)
        assert theirs.exists() == kept


@pytest.mark.parametrize("sums", ["null", "3", "{}", "[]", "[" * 100_000])
def test_checksums_that_are_none_fall_back(tmp_path, capsys, sums):
    checkpoints = fill(tmp_path, [1, 2])
    (tmp_path / "2" / SUMS).write_text(sums)
    assert checkpoints.restore(target(tree(0)))[2] == 1
    assert f"{tmp_path / '2'} is damaged: {SUMS} " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lr[1]", "a*", "a?", "a\\b"])
def test_a_path_that_orbax_reads_as_another_is_refused(tmp_path, name):
    folder = tmp_path / name / "checkpoints"
    for made in (Checkpoints, lambda x: checkpoint.check_resume(x, "auto")):
        with pytest.raises(ValueError, match="would not be found again in a folder"):
            made(folder)
    assert not list(tmp_path.iterdir())


def test_other_names_are_found_again(tmp_path):
    folder = tmp_path / "ü a=b#1%20{x}'\"~\n日本:|&$" / "checkpoints"
    fill(folder, [1]).close()
    assert Checkpoints(folder).restore(target(tree(0)))[2] == 1


def test_a_save_whose_files_are_removed_meanwhile_is_one_line(tmp_path, monkeypatch):
    checkpoints = fill(tmp_path, [1])
    checkpoints.saving = 2

    def waits():
        raise ValueError(said)

    monkeypatch.setattr(checkpoints.manager, "wait_until_finished", waits)
    for said in ("NOT_FOUND: Error", "No ArrayMetadata found for process_index=0"):
        with pytest.raises(exits.CannotGoOn, match="files of step 2 were removed"):
            checkpoints.wait()
    said = "something else"
    with pytest.raises(ValueError, match="something else"):
        checkpoints.wait()
