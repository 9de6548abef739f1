"""Trackers: what they are told, and that none of them can end a run."""

import importlib.util
import json
import math
import pathlib
import resource
import sqlite3
import sys
import time
import types

import pytest

from dllm_jax import metrics, trackers


def run_of(folder) -> trackers.Run:
    """Returns a run that goes on after step 2."""
    config = {"seed": 1, "model.path": "x" * 900}
    return trackers.Run(pathlib.Path(folder), 3, config, "2026-01-01T00:00:00+00:00")


class Fake(types.ModuleType):
    """A package that keeps its calls, and returns itself."""

    def __init__(self, name: str, calls: list):
        super().__init__(name)
        self.__spec__ = object()
        self.calls = calls

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def __iter__(self):  # of what is found: nothing
        return iter(())


@pytest.fixture
def calls(monkeypatch) -> list:
    """What the fake packages were called with."""
    made = []
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, Fake(name, made))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_each_is_told_the_run_and_its_steps(calls, tmp_path):
    names = trackers.named("wandb, trackio,mlflow,wandb")
    assert names == ["wandb", "trackio", "mlflow"]
    told = trackers.Trackers(names, run_of(tmp_path))
    told.log(3, {"reward": 0.5, "pass@1": 1.0, "kl": math.nan})
    told.close()
    by_name = {name: (args, kwargs) for name, args, kwargs in calls}
    assert by_name["set_tracking_uri"][0] == (f"sqlite:///{tmp_path}/mlflow.db",)
    assert by_name["log_metrics"] == (
        ({"reward": 0.5, "pass_1": 1.0},),
        {"step": 3},
    )
    assert len(by_name["log_params"][0][0]["model.path"]) == 500
    logged = [args[0] for name, args, _ in calls if name == "log"]
    assert logged == [{"reward": 0.5, "pass@1": 1.0}] * 2
    assert [name for name, *_ in calls][-3:] == ["finish", "finish", "end_run"]
    (wandb,) = [k for name, _, k in calls if name == "init" and "mode" in k]
    assert (wandb["mode"], wandb["dir"]) == ("offline", str(tmp_path))
    (trackio,) = [k for name, _, k in calls if name == "init" and "mode" not in k]
    assert trackio["name"] == f"{tmp_path.name}-{wandb['id']}"
    assert trackio["project"] == wandb["project"] == "dllm-jax"
    assert wandb["id"] == run_of(tmp_path).id != run_of(tmp_path / "x").id
    assert run_of("a name in Latin-1: \udce4").id  # as the system gives it


def test_a_run_in_the_place_of_one_that_was_removed_is_another(calls, tmp_path):
    """Else Trackio mixes the steps of both, and W&B drops those that it has."""
    for begun, step in (("monday", 0), ("monday", 3), ("tuesday", 0)):
        run = trackers.Run(tmp_path, step, {}, begun)
        trackers.Trackers(["wandb", "trackio"], run).close()
    told = [kwargs for name, _, kwargs in calls if name == "init"]
    for names in ([k["id"] for k in told[::2]], [k["name"] for k in told[1::2]]):
        first, goes_on, another = names
        assert first == goes_on != another


def of_mlflow(folder, calls) -> dict:
    """Returns what MLflow's database says of each step."""
    rows = sqlite3.connect(folder / "mlflow.db").execute(
        "select step, key, value from metrics"
    )
    kept = {}
    for step, key, value in rows:
        kept.setdefault(step, {})[key] = value
    return kept


def of_trackio(folder, calls) -> dict:
    """Returns what trackio's database says of each step."""
    (path,) = folder.glob("*.db")
    rows = sqlite3.connect(path).execute("select step, metrics from metrics")
    return {step: json.loads(values) for step, values in rows}


def of_wandb(folder, calls) -> dict:
    """Returns the metrics whose names stand in the last offline run: its file is binary."""
    (path,) = (folder / "wandb" / "latest-run").glob("run-*.wandb")
    names = [x for x in ("reward", "pass@1", "kl") if x.encode() in path.read_bytes()]
    return {4: {name: {"reward": 0.5, "pass@1": 1.0}[name] for name in names}}


def of_calls(folder, calls) -> dict:
    """Returns what a package that stands in was told."""
    steps = [x for x in calls if x[0] in ("log", "log_metrics")]
    return {kwargs["step"]: args[0] for _, args, kwargs in steps}


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_what_is_told_can_be_read_again(name, request, tmp_path, monkeypatch, capsys):
    """Of the package itself where it is installed, else of one that stands in for it."""
    read, told = (
        {"wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}[name],
        [],
    )
    if importlib.util.find_spec(name) is None:
        read, told = of_calls, request.getfixturevalue("calls")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    many = {f"a.key{i}": i for i in range(150)} | {"empty": "", "tuple": (1, 2)}
    for first in (3, 4):  # a run, and the same one when it goes on
        run = trackers.Run(tmp_path, first, many, "2026")
        live = trackers.Trackers([name], run)
        live.log(first, {"reward": 0.5, "pass@1": 1.0, "kl": math.nan})
        assert [*live.live] == [name]
        live.close()
        assert [*live.live] == [name]
    kept = read(tmp_path, told)
    spelled = "pass_1" if name == "mlflow" else "pass@1"
    assert kept[4] == {"reward": 0.5, spelled: 1.0}
    assert set(kept) <= {3, 4}
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stopped", "wandb", "mlflow"), [(False, 0, "FINISHED"), (True, 75, "KILLED")]
)
def test_a_run_that_a_signal_stops_has_not_finished(
    stopped, wandb, mlflow, calls, tmp_path, monkeypatch
):
    """To any of its processes: the one that tells may have received none."""
    monkeypatch.setattr(trackers.exits, "received", [])
    trackers.Trackers(["wandb", "mlflow"], run_of(tmp_path)).close(stopped)
    assert calls[-2:] == [
        ("finish", (), {"exit_code": wandb}),
        ("end_run", (mlflow,), {}),
    ]


def test_mlflow_is_told_of_runs_that_nobody_closed(calls, tmp_path, monkeypatch):
    """One that fails, as the program ends; one that was killed, as the next begins."""
    ends, package = [], sys.modules["mlflow"]
    monkeypatch.setattr(trackers.atexit, "register", lambda *call: ends.append(call))
    info = types.SimpleNamespace(run_id="earlier")
    monkeypatch.setattr(
        package,
        "search_runs",
        lambda of, found: calls.append(found) or [types.SimpleNamespace(info=info)],
        raising=False,
    )
    run = run_of(tmp_path)
    trackers.Trackers(["mlflow"], run)
    ((call, *said),) = ends
    for signals, status in (([15, 15], "KILLED"), ([], "FAILED")):  # or two signals
        monkeypatch.setattr(trackers.exits, "received", signals)
        call(*said)
        assert calls[-1] == ("end_run", (status,), {})
    place = calls.index(("set_terminated", ("earlier", "KILLED"), {}))
    assert f"= '{run.id}'" in calls[place - 1] and "RUNNING" in calls[place - 1]
    (started,) = [call for call in calls if call[0] == "start_run"]
    assert started[2]["tags"] == {trackers.Mlflow.tag: run.id}


def test_only_a_key_takes_wandb_to_the_network(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    trackers.Trackers(["wandb"], run_of(tmp_path))
    assert calls[0][2]["mode"] == "online"


@pytest.mark.parametrize(
    "where, error, reason",
    [
        ("init", RuntimeError("no\nnetwork"), "no network"),
        ("log", KeyError(), "KeyError"),
        ("finish", OSError("none"), "none"),
    ],
)
def test_one_that_fails_is_left_out_and_the_others_go_on(
    where, error, reason, calls, tmp_path, monkeypatch, capsys
):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(sys.modules["wandb"], where, fails, raising=False)
    told = trackers.Trackers(["wandb", "trackio"], run_of(tmp_path))
    told.log(3, {"reward": 0.5})
    told.log(4, {"reward": 0.5})
    told.close()
    line = f"warning: run.trackers: wandb is left out from here on: {reason}\n"
    assert capsys.readouterr().err == line
    trackio = [name for name, _, kwargs in calls if "mode" not in kwargs]
    assert trackio.count("log") == (4 if where == "finish" else 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wandbb", "'wandbb' is none of tensorboard, wandb, trackio, mlflow"),
        ("tensorboard;wandb", "is none of"),
    ],
)
def test_an_unknown_tracker_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        trackers.named(text)


def test_one_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        trackers.named("wandb")
    assert trackers.named("") == []


def test_no_package_is_imported_before_its_tracker_is_asked_for():
    source = pathlib.Path(trackers.__file__).read_text()
    top = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert not any(name in line for line in top for name in trackers.TRACKERS)


def test_the_writer_tells_them_every_row(tmp_path):
    told = []

    class Kept:
        def log(self, step, values):
            told.append((step, values))

        def close(self, stopped):
            told.append(f"closed, stopped: {stopped}")

    writer = metrics.Writer(
        tmp_path, 10, 2, trackers=lambda first: told.append(first) or Kept()
    )
    writer.write(3, {"reward": 1.0})
    writer.close(stopped=True)
    assert told == [3, (3, {"reward": 1.0}), "closed, stopped: True"]


def events_of(folder) -> list:
    """Returns all events that TensorBoard finds in a run's folder, in its order."""
    from tensorboardX.proto import event_pb2

    events = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # size, its checksum, an event, its checksum
            size = int.from_bytes(data[:8], "little")
            events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return events


def shown(folder) -> list[tuple]:
    """Returns (step, value) of all that TensorBoard shows: no steps from a start on."""
    rows = []
    for event in events_of(folder):
        if event.session_log.status:
            rows = [row for row in rows if row[0] < event.step]
        rows += [(event.step, value.simple_value) for value in event.summary.value]
    return rows


def test_tensorboard_leaves_events_in_the_folder(tmp_path):
    told = trackers.Trackers(["tensorboard"], run_of(tmp_path))
    told.log(3, {"reward": 0.5, "pass@1": 1.0})
    version, start, step = events_of(tmp_path)  # on the disk, if it is killed now
    told.close()
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (3, 1)
    assert abs(step.wall_time - time.time()) < 100
    assert [x.tag for x in step.summary.value] == ["reward", "pass_1"]


def test_tensorboard_shows_the_last_word_on_each_step(tmp_path, monkeypatch):
    """An attempt killed after step 4, one whose last step is evaluated again, one more."""

    def made(first):
        return trackers.Trackers(["tensorboard"], trackers.Run(tmp_path, first, {}, ""))

    attempts = [(0, False, [1, 2, 3, 4]), (2, False, [3, 4]), (4, True, [4, 5])]
    for number, (done, pending, steps) in enumerate(attempts):
        clock = types.SimpleNamespace(time=lambda now=1e9 - number: now)  # set back
        monkeypatch.setattr(trackers, "time", clock)
        writer = metrics.Writer(tmp_path, 9, done, pending=pending, trackers=made)
        for step in steps:
            writer.write(step, {"reward": step + number / 4})
        writer.close()
    assert shown(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.5), (5, 5.5)]


def test_tensorboard_without_room_is_left_out_and_nobody_waits(tmp_path, capsys):
    full = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = trackers.Trackers(["tensorboard"], run_of(tmp_path))
    told.log(3, {"reward": 0.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, full[1]))
    try:
        for step in (4, 5):
            told.log(step, {f"metric_{i}": 1.0 for i in range(100)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
    told.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: run.trackers: tensorboard is left out from here on"
    )
    assert [event.step for event in events_of(tmp_path)] == [0, 3, 3]
