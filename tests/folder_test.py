"""A run's folder: one command at a time, what it says of itself, and answers as they end."""

import contextlib
import errno
import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from dllm_jax import checks, exits, folder, processes, sharding


@pytest.fixture
def other():
    """The pid of another process that lives."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def lock(path, **owner):
    """Writes a lock as another command does."""
    known = {"host": "elsewhere", "pid": 17, "start": "2026-01-02T03:04:05+00:00"}
    known["pids"] = folder.numbering()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known | owner))


def age(path, seconds: float):
    """Makes a file look as if it had last been touched so long ago."""
    touched = path.stat().st_mtime - seconds
    os.utime(path, (touched, touched))


@contextlib.contextmanager
def touched(path):
    """Gives a file signs of life meanwhile, the first a moment later."""
    ended = threading.Event()

    def beat():
        while not ended.wait(0.1):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()


def attempts(path) -> list[dict]:
    """Returns the records of run.json."""
    return json.loads((path / "run.json").read_text())["attempts"]


def enter(path, **config):
    """Returns a folder whose attempt has begun."""
    run = folder.Folder(path)
    run.begin({"seed": 0} | config, {"seed": 0}, sharding.make_mesh())
    return run


# ---- One at a time -------------------------------------------------------------------


def test_a_folder_in_use_is_refused_with_host_pid_and_age(tmp_path, other):
    path = tmp_path / "run"
    lock(path / "lock", host=socket.gethostname(), pid=other)
    age(path / "lock", 20)
    with pytest.raises(ValueError) as refused:
        folder.Folder(path)
    named = (
        f"{path} is in use by pid {other} on {socket.gethostname()}, started 2026-01"
    )
    assert str(refused.value).startswith(named)
    assert ", 20 s ago still alive: " in str(refused.value)
    assert [entry.name for entry in path.iterdir()] == ["lock"]
    assert json.loads((path / "lock").read_text())["pid"] == other


def test_a_lock_without_a_sign_of_life_is_taken_over_and_this_is_said(
    tmp_path, other, capsys
):
    lock(tmp_path / "lock", host=socket.gethostname(), pid=other)
    age(tmp_path / "lock", 61)
    with enter(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert f"taken over from pid {other} on" in capsys.readouterr().err
    assert not (tmp_path / "lock").exists()


DAMAGED = [b"", b"\0\0", b"\xff", b"null", b'{"pid": []}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_lock_counts_by_its_age(tmp_path, monkeypatch, text):
    (tmp_path / "lock").write_bytes(text)
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    with touched(tmp_path / "lock"), pytest.raises(ValueError, match="not say which"):
        folder.Folder(tmp_path)
    assert (tmp_path / "lock").read_bytes() == text
    age(tmp_path / "lock", 61)
    folder.Folder(tmp_path).__exit__(None, None, None)


def test_the_lock_of_a_dead_process_of_this_machine_is_stale_at_once(tmp_path, capsys):
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock(tmp_path / "lock", host=socket.gethostname(), pid=ended.pid)
    folder.Folder(tmp_path).__exit__(None, None, None)
    assert "that process is gone" in capsys.readouterr().err


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize(
    "owner",
    [{"host": socket.gethostname(), "pids": "another's"}, {"host": "elsewhere"}],
)
def test_whom_nobody_sees_here_is_believed_by_a_sign_of_life(
    tmp_path, monkeypatch, owner, lives, capsys
):
    """In a container of the same name, or on another host, whose run comes here anew."""
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    monkeypatch.setattr(folder, "STALE_S", 60.0 if lives else 1.0)
    ended = subprocess.Popen(["true"])
    ended.wait()  # its number is that of another's there
    there = tmp_path / "run"
    lock(there / "lock", pid=ended.pid, **owner)
    if not lives:
        folder.Folder(there).__exit__(None, None, None)
        told = capsys.readouterr().err
        assert "s for a sign of life of pid" in told
        assert "taken over from" in told and "no sign of life for" in told
        return
    refused = pytest.raises(ValueError, match="in use by pid .*, 0 s ago still alive")
    with touched(there / "lock"), refused:
        folder.Folder(there)


def test_the_lock_is_kept_fresh_until_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    mine = folder.Lock(tmp_path / "lock", of=tmp_path)
    os.utime(mine.path, (1000, 1000))
    while mine.path.stat().st_mtime == 1000:
        assert mine.path.exists()
    mine.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_is_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    mine = folder.Lock(pathlib.Path("lock"), of=tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")  # as a user's function may
    (tmp_path / "lock").unlink()
    while not (tmp_path / "lock").exists():
        assert mine.beating.is_alive()
    mine.close()
    assert not (tmp_path / "lock").exists()
    told = capsys.readouterr().err
    assert told.startswith(f"warning: {tmp_path / 'lock'} was removed: it is there")


def test_a_folder_that_is_moved_while_it_is_in_use_is_told_of(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    home = tmp_path / "run"
    home.mkdir()
    mine = folder.Lock(home / "lock", of=home)
    home.rename(tmp_path / "moved")
    told = ""
    while "put it back" not in told:
        assert mine.beating.is_alive()
        told += capsys.readouterr().err
    home.mkdir()  # as a checkpoint makes it
    while not (home / "lock").exists():
        assert mine.beating.is_alive()
    mine.close()
    told += capsys.readouterr().err
    assert told.count(f"warning: {home} was moved or removed") == 1


def test_a_run_does_not_begin_in_the_folder_of_an_evaluation(tmp_path):
    home = folder.Folder(tmp_path, writes=False)
    home.refuse_evaluated()
    (tmp_path / "eval.job.json").write_text("{}")
    with pytest.raises(
        ValueError, match="an evaluation's, by its eval.job.json: name an"
    ):
        home.refuse_evaluated()
    (tmp_path / "metrics.jsonl").touch()  # a run's, with an evaluation beside it
    home.refuse_evaluated()


def test_who_slept_while_another_may_have_come_and_ended_does_not_go_on(tmp_path):
    mine = folder.Lock(tmp_path / "lock", of=tmp_path)
    assert mine.mine(late=True)
    mine.path.unlink()
    assert not mine.mine(late=True)
    mine.path.write_text("another's")
    assert not mine.mine(late=False)
    mine.close()
    assert mine.path.read_text() == "another's"


def test_a_clock_that_was_set_back_makes_nobody_wait_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    monkeypatch.setattr(folder, "STALE_S", 0.2)
    lock(tmp_path / "lock")
    age(tmp_path / "lock", -3600)
    began = time.monotonic()
    folder.Folder(tmp_path).__exit__(None, None, None)
    assert time.monotonic() - began < 60


SLEEPER = """
import pathlib, sys, time
from dllm_jax import folder
folder.BEAT_S = 0.01
folder.Lock(pathlib.Path(sys.argv[1]), of="it")
print("mine", flush=True)
time.sleep(600)
"""


def test_who_wakes_up_in_a_folder_that_is_anothers_by_now_ends_and_leaves_it(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", SLEEPER, str(path)]
    pipe = subprocess.PIPE
    sleeper = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        assert sleeper.stdout.readline() == "mine\n"
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        age(path, 61)
        mine = folder.Lock(path, of=path)
        sleeper.send_signal(signal.SIGCONT)
        said = sleeper.communicate(timeout=60)[1]
    finally:
        sleeper.kill()
    assert sleeper.returncode == exits.STUCK
    assert "another command has taken it over" in said
    assert path.read_text() == mine.text
    mine.close()


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/run", "x" * 999])
def test_a_folder_that_cannot_be_one_is_refused_and_nothing_is_left(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        ValueError, match="cannot be written to: .*; name another folder"
    ):
        folder.Folder(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_refused_before_it_begins_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="bad"), folder.Folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / "lock").exists()
        raise ValueError("bad")
    assert not list(tmp_path.iterdir())


def test_all_processes_refuse_together(tmp_path, other, monkeypatch):
    lock(tmp_path / "run" / "lock", host=socket.gethostname(), pid=other)
    with pytest.raises(ValueError, match="in use by"):
        folder.Folder(tmp_path / "run", agreed=lambda fact: fact)
    for kind in (ValueError, exits.CannotGoOn):
        first = json.dumps({kind.__name__: "as process 0 was"})
        monkeypatch.setattr(processes, "of_first", lambda text, first=first: first)
        with pytest.raises(kind, match="as process 0 was"):
            folder.Folder(tmp_path / "run", writes=False, agreed=lambda fact: True)
    with folder.Folder(tmp_path / "none", writes=False) as run:
        run.begin({}, {}, sharding.make_mesh())
        assert not run.made  # nor has it asked for any: NFS would keep the answer
    assert not (tmp_path / "none").exists()


# ---- What it says of itself ----------------------------------------------------------


def test_every_attempt_is_told_with_its_configuration_and_its_end(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-not-for-any-file")
    with enter(tmp_path, steps=1):
        pass
    for error in (
        ValueError("no such file"),
        exits.CannotGoOn("disk full"),
        exits.Stopped("by a signal"),
        exits.StoppedAtOnce(exits.STOPPED),
        KeyError("step"),
        MemoryError("14 GiB"),
    ):
        with pytest.raises(type(error)), enter(tmp_path, steps=2):
            raise error
    told = attempts(tmp_path)
    assert [attempt["ended"] for attempt in told] == [
        *("done", "refused: no such file", "cannot go on: disk full"),
        *("stopped: by a signal", f"stopped: {exits.TWICE}", "defect: 'step'"),
        "cannot go on: no memory left: 14 GiB",
    ]
    assert [attempt["config"]["steps"] for attempt in told] == [1] + [2] * 6
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 0, "steps": 2}
    first = told[0]
    assert first["start"] <= first["end"]
    assert first["command"][1:] == sys.orig_argv[1:]
    assert first["host"] == socket.gethostname()
    assert (first["device"], first["devices"]) == ("cpu", jax.device_count())
    assert first["versions"]["jax"] == jax.__version__
    assert {"python", "jaxlib", "numpy"} < first["versions"].keys()
    for file in tmp_path.iterdir():
        assert "sk-not-for-any-file" not in file.read_text()


@pytest.mark.parametrize(
    "error, code, told",
    [
        (checks.Refused("rows", "=0: must be >= 1"), 2, "refused: rows=0: must"),
        (exits.NotFinite(), 2, "refused: the model's first forward is not finite"),
        (ValueError("INTERNAL: a kernel"), 1, "defect: INTERNAL: a kernel"),
        (SystemExit(exits.REFUSED), 2, "refused: 2"),
    ],
)
def test_an_attempt_ends_as_its_command_does(tmp_path, error, code, told):
    with pytest.raises(type(error)) as raised, enter(tmp_path):
        raise error
    assert exits.code_of(raised.value) == code
    assert attempts(tmp_path)[0]["ended"].startswith(told)


BROKEN = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_what_ended_a_run_of_many_stands_there_and_not_its_effect(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(processes, "group", object())
    with pytest.raises(kind), enter(tmp_path):
        raise kind(BROKEN)
    assert attempts(tmp_path)[0]["ended"] == "running"
    (cut,) = exits.at_end
    cut(exits.STOPPED, "error: process 1 on b is lost")
    cut(exits.REFUSED, "error: too late")
    assert attempts(tmp_path)[0]["ended"] == "stopped: process 1 on b is lost"
    assert (tmp_path / "run.log").read_text().endswith("process 1 on b is lost\n")
    assert not (tmp_path / "lock").exists() and not exits.at_end


def test_an_attempt_that_was_killed_says_so_once_the_next_begins(tmp_path):
    enter(tmp_path).lock.close()  # and no more of it
    exits.at_end.clear()
    assert attempts(tmp_path)[0]["ended"] == "running"
    with enter(tmp_path):
        assert [x["ended"] for x in attempts(tmp_path)] == [
            "killed, or its machine was lost",
            "running",
        ]


@pytest.mark.parametrize("text", ["", "[]", "null", '{"attempts": [1]}', "{"])
def test_a_damaged_run_json_begins_anew(tmp_path, text, capsys):
    (tmp_path / "run.json").write_text(text)
    with enter(tmp_path):
        assert len(attempts(tmp_path)) == 1
    assert "run.json is damaged" in capsys.readouterr().err


def test_a_run_json_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "run.json").mkdir()
    unread = pytest.raises(exits.CannotGoOn, match="run.json cannot be read: Is a dir")
    with folder.Folder(tmp_path) as run, unread:
        run.defaults()


def test_the_commit_is_that_of_the_checkout(monkeypatch, tmp_path):
    said = folder.commit()
    assert said is None or len(said.removesuffix("+changes")) == 40
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "site" / "folder.py"))
    assert folder.commit() is None


def test_the_log_has_what_was_said_but_for_the_bar(tmp_path, capsys):
    with pytest.raises(KeyError), folder.Folder(tmp_path) as run:
        print("before it began")
        run.begin({}, {}, sharding.make_mesh())
        print("step 1")
        sys.stderr.write("\r 10%|█   | 1/10\r 20%|██  | 2/10")
        sys.stderr.write("\r            \rwarning: kl\n")
        sys.stderr.write("\r100%|████| 10/10\n")
        raise KeyError("lost")
    with enter(tmp_path):
        print("again")
    said = (tmp_path / "run.log").read_text().splitlines()
    words = [line.partition(" ")[2] for line in said]
    assert words[:4] == ["before it began", "step 1", "warning: kl", "defect: 'lost'"]
    assert words[-1] == "again"
    assert "Traceback (most recent call last):" in words
    assert "%|" not in "".join(words)
    captured = capsys.readouterr()
    assert "before it began\nstep 1\n" in captured.out
    assert sys.stdout.write("") == 0


def test_a_run_whose_terminal_is_gone_goes_on(tmp_path, monkeypatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with enter(tmp_path):
            print("step 1", flush=True)
            os.close(read)
            print("step 2", flush=True)
            print("step 3" * 10_000)  # more than is kept before it is written
    said = (tmp_path / "run.log").read_text()
    assert "step 2\n" in said and "step 3\n" in said
    assert attempts(tmp_path)[-1]["ended"] == "done"


# ---- Answers as they end -------------------------------------------------------------


def grown(path, job, *lines, overwrite=False):
    """Returns the lines that were there, after these are added."""
    sink = folder.Answers(path, job, overwrite=overwrite)
    sink.begin(9)
    for line in lines:
        sink.add(line)
    return sink.lines


def test_answers_go_on_behind_the_last(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    assert grown(path, {"seed": 1}, {"n": 1}, {"n": 2}) == []
    assert capsys.readouterr().err == ""
    assert grown(path, {"seed": 1}, {"n": 3}) == [{"n": 1}, {"n": 2}]
    assert "2 of 9 answers are there, and stay" in capsys.readouterr().err
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n{"n": 3}\n'
    assert grown(path, {"seed": 2}, {"n": 4}, overwrite=True) == []
    assert path.read_text() == '{"n": 4}\n'


def test_what_overwrites_goes_on_with_itself_until_all_is_answered(tmp_path):
    path, job = tmp_path / "out.jsonl", {"seed": 1}
    grown(path, job, {"n": 1})
    assert grown(path, job, {"n": 2}, overwrite=True) == []
    assert grown(path, job, {"n": 3}, overwrite=True) == [{"n": 2}]
    assert grown(path, job, overwrite=False) == [{"n": 2}, {"n": 3}]
    assert grown(path, job, {"n": 4}, overwrite=True) == []
    assert grown(path, {"seed": 2}, {"n": 5}, overwrite=True) == []
    sink = folder.Answers(path, {"seed": 2}, overwrite=True)
    sink.begin(1)
    sink.done()
    assert sink.lines == [{"n": 5}]
    assert grown(path, {"seed": 2}, overwrite=True) == []
    assert path.read_text() == ""


def test_what_overwrites_drops_what_is_not_its_own(tmp_path, capsys):
    """Or was not judged, and what follows: it goes on behind what is left."""
    path, lines = tmp_path / "out.jsonl", [{"n": 1}, {"n": 2}, {"n": 3}]

    def wrong(number, line):
        return "" if line["n"] == number else "it is another"

    def left(*said) -> list:
        grown(path, {"seed": len(said)}, overwrite=True)
        grown(path, {"seed": len(said)}, *said, overwrite=True)
        sink = folder.Answers(path, {"seed": len(said)}, overwrite=True)
        sink.check(wrong)
        sink.begin(9)
        sink.add({"n": 9})
        written = [json.loads(x) for x in path.read_text().splitlines()]
        assert written == [*sink.lines, {"n": 9}]
        return sink.lines

    assert left(*lines) == lines
    assert left(*lines[:2]) == lines[:2]
    assert left(lines[0], lines[2], lines[1], lines[0]) == lines[:1]
    assert left(lines[0], lines[1] | {"graded": False}, *lines, {}) == lines[:1]
    assert "damaged" not in capsys.readouterr().err
    sink = folder.Answers(path, {"seed": 6}, overwrite=False)
    with pytest.raises(ValueError, match="line 2: it is another; name another file"):
        sink.check(wrong)


@pytest.mark.parametrize(
    "torn", [b'{"n": ', b"\0\0\0", b'{"n": 2}', b"\xff\xfe", b"[1]\n{}\n"]
)
def test_what_is_damaged_is_dropped_and_this_is_said(tmp_path, torn, capsys):
    path = tmp_path / "out.jsonl"
    grown(path, {}, {"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    folder.Answers(path, {}, overwrite=False)
    assert path.read_bytes() == whole + torn  # reading changes nothing
    assert grown(path, {}) == [{"n": 1}]
    assert path.read_bytes() == whole
    assert "what follows line 1 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("replaced", [False, True])
def test_answers_whose_file_is_removed_are_not_said_to_be_there(
    tmp_path, replaced, monkeypatch
):
    """All were written to nowhere, and the command ended well."""
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("out.jsonl")
    sink = folder.Answers(path, {}, overwrite=False)
    sink.begin(3)
    sink.add({"n": 1})
    monkeypatch.chdir("/")  # as a reward may
    sink.add({"n": 2})
    path = tmp_path / path
    path.unlink()
    if replaced:
        path.touch()
    with pytest.raises(exits.CannotGoOn, match="out.jsonl: it was removed, or another"):
        sink.add({"n": 3})


def test_nothing_of_a_file_stays_whose_writing_fails(tmp_path):
    path = tmp_path / "report.html"
    folder.write(path, "old")
    with pytest.raises(exits.CannotGoOn, match="no room"), exits.whole(path) as partial:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_another_job_is_refused_with_the_difference(tmp_path):
    path = tmp_path / "out.jsonl"
    grown(path, {"seed": 1, "stop": (1, 2)}, {"n": 1})
    grown(path, {"seed": 1, "stop": (1, 2)})
    with pytest.raises(
        ValueError, match="seed was 1, is now 2; .*--out.*run.folder.*--over"
    ):
        folder.Answers(path, {"seed": 2, "stop": (1, 2)}, overwrite=False)
    moved = {"seed": 2, "stop": (1, 2), "data.image_root": "elsewhere"}  # no reason
    with pytest.raises(ValueError, match="another job: seed was 1, is now 2"):
        folder.Answers(path, moved, overwrite=False)
    assert path.read_text() == '{"n": 1}\n'


def test_each_file_has_a_job_of_its_own(tmp_path):
    for name in ("x-1.0", "x-1.5", "x-1.5.jsonl.gz", "y.jsonl"):
        grown(tmp_path / name, {"out": name}, {"n": 1})
    for name in ("x-1.0", "x-1.5", "x-1.5.jsonl.gz", "y.jsonl"):
        assert grown(tmp_path / name, {"out": name}) == [{"n": 1}]
    assert (tmp_path / "y.job.json").is_file()


@pytest.mark.parametrize("text", ["notes\n", "notes", '{"a": 1}\n'])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(
        ValueError, match="is there, and no notes.txt.job.json that says"
    ):
        folder.Answers(path, {}, overwrite=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
    assert path.read_text() == text


def test_a_line_without_an_end_is_logged_in_pieces():
    lines, stream = [], io.StringIO()
    tee = folder.Tee(stream, lines.append)
    for _ in range(10_000):
        tee.write(".")
    assert len(tee.line) <= folder.LONGEST
    tee.write("\n")
    assert "".join(lines) == "." * 10_000 and stream.getvalue() == "." * 10_000 + "\n"
    lines.clear()
    for percent in range(100):
        tee.write(f"\r{percent:3}%|{'█' * 200}| of all")
    assert not lines


@pytest.mark.parametrize("name", ["out.jsonl", "out.job.json"])
def test_what_cannot_be_read_is_told(tmp_path, name, monkeypatch):
    grown(tmp_path / "out.jsonl", {}, {"n": 1})
    plain = pathlib.Path.read_bytes

    def read_bytes(path):
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
    with pytest.raises(exits.CannotGoOn, match=f"{name} cannot be read: Input/output"):
        folder.Answers(tmp_path / "out.jsonl", {}, overwrite=False)


# ---- No room -------------------------------------------------------------------------


def test_a_full_disk_is_one_line_with_folder_and_bytes(tmp_path, monkeypatch):
    for error in (
        OSError(28, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: writing: No space left on device"),
    ):
        with pytest.raises(exits.CannotGoOn) as stuck, exits.room(tmp_path, 4096):
            raise error
        said = str(stuck.value)
        assert said.startswith(f"{tmp_path}: no room: 4096 bytes are wanted, ")
        assert "\n" not in said
    broken = pytest.raises(exits.CannotGoOn, match="cannot be written to: Input/output")
    with broken, exits.room(tmp_path / "not" / "there"):
        raise OSError(5, "Input/output error")
    for file, told in ((tmp_path, ";"), (tmp_path / "x", f" ({tmp_path / 'x'});")):
        said = re.escape(f"{tmp_path}: cannot be written to: Input/output error{told}")
        named = pytest.raises(exits.CannotGoOn, match=said)
        with named, exits.room(tmp_path):
            raise OSError(5, "in another language", str(file))
    read_only = pytest.raises(exits.CannotGoOn, match="cannot be written to: Read-only")
    with read_only, exits.room(tmp_path):  # as TensorStore tells it
        raise ValueError("PERMISSION_DENIED: Error writing [os_error_code='30']")
    for number, hint in (
        (errno.EFBIG, "free, but a file may not grow so large here, see `ulimit -f`;"),
        (
            errno.EDQUOT,
            "free, but the quota of who writes here is used up, see `quota`;",
        ),
        (errno.ENOSPC, "free, but perhaps no further file may be made, see `df -i`;"),
    ):
        told = pytest.raises(exits.CannotGoOn, match=hint)
        with told, exits.room(tmp_path, 4096):
            raise OSError(number, "in another language")
    with (
        pytest.raises(exits.CannotGoOn, match="free, but the quota of"),
        exits.room(tmp_path, 2**62),
    ):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    full = pytest.raises(exits.CannotGoOn, match="free; what was whole is whole")
    with full, exits.room(tmp_path, 2**62):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(exits, "free", lambda folder: 4096)
    with full, exits.room(tmp_path):  # a file of how many bytes nobody said
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    in_the_way = pytest.raises(
        exits.CannotGoOn, match=rf"Is a directory \({tmp_path}/a\)"
    )
    (tmp_path / "a").mkdir()
    with in_the_way:
        folder.write(tmp_path / "a", "text")
    with pytest.raises(ValueError, match="^a defect$"), exits.room(tmp_path):
        raise ValueError("a defect")


def test_answers_that_find_no_room_are_one_line_and_what_was_whole_stays(tmp_path):
    sink = folder.Answers(tmp_path / "out.jsonl", {}, overwrite=False)
    sink.begin(2)
    sink.add({"n": 1})
    sink.file.close()
    full = pytest.raises(exits.CannotGoOn, match="no room: 9 bytes are wanted")
    with full, open("/dev/full", "a", encoding="utf-8") as file:  # closes with a buffer
        sink.file = file
        sink.add({"n": 2})
    assert (tmp_path / "out.jsonl").read_text() == '{"n": 1}\n'


def test_what_evaluates_stays_out_of_a_training_run(tmp_path):
    with folder.Folder(tmp_path / "run") as run:
        run.refuse_trained()
        (tmp_path / "run" / "metrics.jsonl").touch()
        with pytest.raises(ValueError, match="is a training run's: name another"):
            run.refuse_trained()
