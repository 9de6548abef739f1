"""Runs of several processes: as one process does, resumed by others, ended together."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import huggingface_hub.constants
import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml
from jax._src import distributed

from dllm_jax import command_line, config, exits, metrics, processes
from tests import served

DEVICES = 8
PATIENCE_S = 300


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Returns a function that starts a run on 8 devices; runs share what is compiled."""
    cache = tmp_path_factory.getbasetemp() / "compiled"

    def start(folder, count: int, *overrides, own=()) -> list[served.Run]:
        """count: processes. own: {process: further overrides}."""
        keys = [
            f"run.folder={folder}",
            f"run.compile_cache={cache}",
            "data.heldout=",
            "data.train=examples/arithmetic/heldout.jsonl",  # few, so soon read
            "rl.steps=2",
            "rl.updates=1",
            "sampler.page=64",  # a row's: for each width of pages more is compiled
            # A gradient that is nothing but rounding moves no weight by a whole step.
            "policy_optim.eps=1e-3",
            "value_optim.eps=1e-3",
            *overrides,
        ]
        arguments = [
            ["--config=configs/smoke.py"]
            + [f"--config.{key}" for key in (*keys, *dict(own).get(index, ()))]
            for index in range(count)
        ]
        return served.group(
            "dllm_jax.train",
            arguments,
            devices=DEVICES // count,
            jax_compilation_cache_dir=None,  # run.compile_cache is
        )

    return start


def end(runs: list[served.Run], *codes: int) -> list[str]:
    """Returns what the processes printed, once they have ended as they should.

    codes: of each; one for all; none for 0.
    """
    codes = codes or (0,)
    try:
        told = [run.communicate(timeout=PATIENCE_S)[0] for run in runs]
    finally:
        for run in runs:
            if run.poll() is None:
                run.kill()
    got = [run.returncode for run in runs]
    assert got == list(codes * len(runs))[: len(runs)], "\n".join(told)
    return told


def last(told: str) -> str:
    """Returns the last line."""
    return told.strip().split("\n")[-1]


def until(runs: list[served.Run], path: pathlib.Path):
    """Waits for the runs to write a file, and not just to open it."""
    while not (path.exists() and path.stat().st_size):
        if any(run.poll() is not None for run in runs):
            pytest.fail("\n".join(run.communicate()[0] for run in runs))
        time.sleep(0.01)


def wait_for(run: served.Run):
    """Waits for a process to end."""
    until = time.monotonic() + PATIENCE_S
    while run.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


def rows(folder) -> list[dict]:
    """Returns the metrics, without those that a clock decides."""
    clock = ("seconds/", "tokens_per_second/")
    return [
        {k: x for k, x in json.loads(line).items() if not k.startswith(clock)}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def samples(folder) -> list[dict]:
    """Returns the rollouts of all steps, which are decisions but for their log-probs."""
    inexact = ("logprobs", "confidence", "entropy")
    return [
        {k: x for k, x in json.loads(line).items() if k not in inexact}
        for path in sorted((folder / "samples").iterdir())
        for line in path.read_text().splitlines()
    ]


def how_it_ended(folder) -> str:
    """Returns what run.json says of the last attempt."""
    return json.loads((folder / "run.json").read_text())["attempts"][-1]["ended"]


def weights(folder) -> dict:
    """Returns the exported parameters."""
    return safetensors.numpy.load_file(folder / "export" / "model.safetensors")


def near(folder, other, tolerance: float = 1e-5):
    """Asserts that two runs decided the same and have parameters that are near."""
    assert samples(folder) == samples(other)
    assert len(rows(folder)) == len(rows(other))
    for row, want in zip(rows(folder), rows(other)):
        for name in ("step", "reward", "accuracy", "response_length", "truncated"):
            assert row[name] == want[name], name
        assert row == pytest.approx(want, rel=1e-3, abs=1e-4)
    got, want = weights(folder), weights(other)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    end(command(folder, 1, "run.samples=16"))
    return folder


@pytest.mark.soak
def test_two_processes_do_what_one_does(command, alone, tmp_path):
    told = end(command(tmp_path / "run", 2, "run.samples=16", "mesh.rollout=model"))
    assert "sampling has 4 x all weights" in told[0]
    near(tmp_path / "run", alone)


@pytest.mark.soak
def test_a_signal_to_one_of_four_stops_all_and_fewer_go_on(command, alone, tmp_path):
    folder = tmp_path / "run"
    runs = command(folder, 4, "run.samples=16")
    until(runs, folder / "samples" / "step_000002.jsonl")
    runs[1].send_signal(signal.SIGTERM)
    wait_for(runs[1])
    runs[0].send_signal(signal.SIGTERM)  # as srun does
    for told in end(runs, exits.STOPPED):
        assert "Traceback" not in told
        assert last(told).startswith("stopped: SIGTERM came to process 1 on ")
    assert len(rows(folder)) in (1, 2)
    for count in (2, 1):
        resumed = shutil.copytree(folder, tmp_path / f"by_{count}")
        for told in end(command(resumed, count, "run.samples=16"))[:1]:
            assert f"resuming {resumed} after step" in told
        near(resumed, alone)


@pytest.mark.soak
@pytest.mark.parametrize(
    "victim, number",
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP)],
)
def test_a_killed_process_ends_the_other_with_its_name(
    command, tmp_path, victim, number
):
    folder = tmp_path / "run"
    runs = command(folder, 2, "run.samples=16")
    until(runs, folder / "samples" / "step_000001.jsonl")
    runs[victim].send_signal(number)
    wait_for(runs[1 - victim])
    runs[victim].kill()
    codes = [exits.STOPPED, exits.STOPPED]
    codes[victim] = -signal.SIGKILL
    told = end(runs, *codes)
    line = last(told[1 - victim])
    assert line.startswith(f"error: process {victim} on ")
    assert " is lost" in line and "in step " in line
    if victim == 1:  # process 0 writes it
        assert how_it_ended(folder) == line.replace("error", "stopped", 1)


@pytest.mark.soak
def test_an_error_in_one_is_the_last_line_of_both(command, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "samples").write_text("a file in the way of what process 0 writes\n")
    runs = command(folder, 2, "run.samples=16")
    told = [run.communicate(timeout=PATIENCE_S)[0] for run in runs]
    assert runs[0].returncode == runs[1].returncode != 0
    assert "samples" in last(told[0])
    assert last(told[1]).startswith("error: process 0 on ")
    assert "samples" in last(told[1]) and "samples" in how_it_ended(folder)


@pytest.mark.parametrize(
    "override, difference",
    [
        ("rl.group=8", "config.rl.group is 4 in process 0 and 8 in process 1"),
        ("data.train=examples/arithmetic/train.jsonl", "data.train's content is "),
    ],
)
def test_processes_that_differ_are_refused(command, tmp_path, override, difference):
    runs = command(tmp_path / "run", 2, own={1: [override]})
    wait_for(runs[1])
    runs[0].send_signal(signal.SIGTERM)  # as srun does while process 0 leaves
    for told in end(runs, exits.REFUSED):
        assert last(told).startswith(f"error: the processes differ: {difference}")
        assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("entry", ["train", "eval"])
def test_a_folder_that_is_another_on_each_host_is_refused(tmp_path, entry):
    runs, port = [], served.free_port()
    for index in (0, 1):
        home = tmp_path / f"host_{index}"
        home.mkdir()
        (home / "examples").symlink_to(served.ROOT / "examples")
        command = [
            *(sys.executable, "-m", f"dllm_jax.{entry}"),
            f"--config={served.ROOT / 'configs' / 'smoke.py'}",
            "--config.run.folder=run",
            f"--coordinator=localhost:{port}",
            *("--processes=2", f"--process={index}"),
        ]
        runs.append(
            subprocess.Popen(
                command,
                cwd=home,
                env=os.environ | served.split(1) | {"PYTHONPATH": str(served.ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for told in end(runs, exits.REFUSED):
        assert last(told).startswith(
            f"error: run.folder=run: {tmp_path}/host_1/run of process 1 on "
        )
        assert f" is another folder than {tmp_path}/host_0/run of process 0" in told
    for index in (0, 1):
        left = [path.name for path in (tmp_path / f"host_{index}").iterdir()]
        assert left == ["examples"]


class Told:
    """A Group of process 1 of two, whose process 0 has told these texts, by kind."""

    index = 1

    def __init__(self, **texts):
        self.texts = texts

    def name(self, index: int) -> str:
        """Returns as Group.name does."""
        return f"process {index} on host{index}"

    def shared(self, kind: str, text: str) -> dict[int, str]:
        """Returns as Group.shared does."""
        return {0: self.texts[kind], 1: text}


@pytest.mark.parametrize("text", ["mark", "of another run", None])
def test_a_file_that_a_network_shows_late_is_waited_for(monkeypatch, tmp_path, text):
    said = {"first": "mark", "seen": "1", "folder": "/there"}
    monkeypatch.setattr(processes, "group", Told(**said))
    monkeypatch.setattr(processes, "SEE_S", 60.0 if text == "mark" else 0.3)
    late = threading.Timer(0.2, (tmp_path / "lock").write_text, [text])
    if text:
        late.start()
    if text == "mark":
        processes.see(tmp_path / "lock")
        return
    with pytest.raises(
        ValueError, match=f"{tmp_path} of process 1 on host1 is another"
    ):
        processes.see(tmp_path / "lock")


def checkpoint(folder, name: str, number: float) -> str:
    """Returns a folder with a checkpoint of one number."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    arrays = {"x": np.full(3, number, np.float32)}
    safetensors.numpy.save_file(arrays, path / "model.safetensors")
    return str(path)


def test_of_many_files_contents_and_weights_must_be_alike(tmp_path):
    for name, text in {"a": "1", "b": "2", "like_a": "1"}.items():
        (tmp_path / name).write_text(text)

    def facts(**keys):
        tree = config.default()
        for key, value in keys.items():
            tree[key.partition("__")[0]][key.partition("__")[2]] = value
        found = command_line.facts(config.freeze(tree))
        return {name: x for name, x in found.items() if not name.startswith("config.")}

    def files(*names, key="data__train"):
        return facts(**{key: ",".join(f"{tmp_path}/{name}" for name in names)})

    assert files("a:3", "b:1") == files("like_a:3", "b:1")
    for other in (("a:3", "like_a:1"), ("b:3", "a:1"), ("a:1", "b:3")):
        assert files("a:3", "b:1") != files(*other)
    heldout = "data__heldout"
    assert files("a", "b", key=heldout) == files("like_a", "b", key=heldout)
    assert files("a", "b", key=heldout) != files("a", "like_a", key=heldout)
    one, same, other = (
        checkpoint(tmp_path, name, x) for name, x in {"x": 1, "y": 1, "z": 2}.items()
    )
    for key in ("model__path", "model__vq", "rl__value_path", "reward__model"):
        assert facts(**{key: one}) == facts(**{key: same}) != facts(**{key: other})


def test_a_name_of_the_hub_is_its_snapshot(tmp_path, monkeypatch):
    """As one host has it in the hub's cache, and another on a disk of its own."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "models--org--one"
    (stored / "snapshots").mkdir(parents=True)
    folder = checkpoint(stored / "snapshots", commit, 1)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def facts(path: str) -> dict:
        tree = config.default()
        tree.model.path = path
        found = command_line.facts(config.freeze(tree))
        return {name: x for name, x in found.items() if name.startswith("model.path")}

    assert facts("org/one") == facts(folder) and len(facts(folder)) > 2
    assert facts("org/none") == {"model.path": "'org/none'"} != facts("org/other")


def slurm(index: int, number: int) -> dict[str, str]:
    """Returns what SLURM's job `number` tells process `index` of two."""
    return {
        "SLURM_JOB_ID": str(number),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def open_mpi(index: int, number: int) -> dict[str, str]:
    """Returns what Open MPI 4's mpirun tells process `index` of two."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{number << 16}.0;tcp://127.0.0.1:40000",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }


def test_programs_in_flight_never_wait_for_a_thread():
    runs = served.group("tests.crowded", [[], []], devices=2)
    for told in end(runs):
        assert float(last(told)) == pytest.approx(2.0)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_processes_find_each_other_by_their_launcher(launcher):
    number, runs = served.free_port(), []
    for index in (0, 1):
        env = served.split(2) | launcher(index, number)
        runs.append(served.start("tests.crowded", [], env))
    for told in end(runs):
        assert float(last(told)) == pytest.approx(2.0)


def numbered(folder, port: int, count: int, index: int) -> served.Run:
    """Returns process `index` of `count` under way, in a run that lasts."""
    arguments = [f"--coordinator=localhost:{port}", f"--processes={count}"]
    arguments += ["--config=configs/smoke.py", f"--config.run.folder={folder}"]
    arguments += [f"--process={index}", "--config.rl.steps=99"]
    return served.start("dllm_jax.train", arguments, served.split(1))


def test_a_folder_that_another_takes_over_ends_all_with_one_code(tmp_path):
    """The others ended as where one is lost: SLURM queued them again, into that folder."""
    folder, port = tmp_path / "run", served.free_port()
    runs = [numbered(folder, port, 2, index) for index in (0, 1)]
    until(runs, folder / "lock")
    (folder / "lock").write_text("another's")
    for told in end(runs, exits.STUCK):
        assert "another command has taken it over" in last(told)
        assert told.count("taken it over") == 1
    assert (folder / "lock").read_text() == "another's"


class Store:
    """A client of a coordinator that says one thing, or nothing."""

    def __init__(self, said: str | None):
        self.said = said

    def key_value_try_get(self, key: str) -> str:
        """Returns as the store does, or raises as it."""
        if self.said is None:
            threading.Event().wait()
        if self.said:
            raise jax.errors.JaxRuntimeError(self.said)
        return "{}"


@pytest.mark.parametrize(
    "said, answers",
    [
        ("", True),
        ("NOT_FOUND: Config key cause not found.", True),
        ("UNAVAILABLE: failed to connect to all addresses", False),
        (None, False),  # as where it is frozen, which takes connections still
    ],
)
def test_a_coordinator_is_there_if_it_answers(said, answers):
    made = processes.Group(Store(said), "localhost:1", 1, 2)
    assert made.answers() == answers


def test_a_number_that_comes_again_ends_all_as_a_loss_does(tmp_path):
    """As Kubernetes starts a pod again before it is missed: a defect ended the Job."""
    folder, port = tmp_path / "run", served.free_port()
    runs = [numbered(folder, port, 2, index) for index in (0, 1)]
    until(runs, folder / "lock")
    runs[1].kill()
    runs.append(numbered(folder, port, 2, 1))
    told = end(runs, exits.STOPPED, -signal.SIGKILL, exits.STOPPED)
    for line in (last(told[0]), last(told[2])):
        assert line.startswith("error: a second process 1 has come, ")


class Counted:
    """A client of a coordinator, told who lives each time that it is asked."""

    def __init__(self, *alive):
        self.alive, self.group, self.causes = iter(alive), None, []

    def get_live_nodes(self, everyone: list[int]) -> dict[int, int]:
        """Returns the number of each one's start."""
        return next(self.alive)

    def key_value_set(self, kind: str, text: str):
        """Notes a cause, with which the group ends."""
        self.causes.append(json.loads(text)["text"])
        self.group.conclusion = exits.STOPPED, text


@pytest.mark.parametrize(
    "then, cause",
    [
        ({0: 17, 1: 20}, "a second process 1 has come, beside process 1 on "),
        ({0: 17}, "process 1 on an unknown host is lost: not heard of for 20 seconds"),
        ({}, "none was heard of for 20 seconds by the clock of process 0 on "),
    ],
)
def test_what_is_no_loss_is_not_called_one(monkeypatch, then, cause):
    """A program of somebody else's that took a number; a clock that was set by an hour."""
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    client = Counted({0: 17, 1: 19}, {1: 19, 0: 17}, then)
    client.group = processes.Group(client, "localhost:1", 0, 2)
    client.group.look()
    assert client.causes[0].startswith(cause)


class Waiting:
    """A client that a second signal finds at a barrier."""

    def __init__(self):
        self.told = {}

    def wait_at_barrier(self, name: str, milliseconds: int):
        """Ends as the handler of signals lets it."""
        raise exits.StoppedAtOnce(exits.STOPPED)

    def key_value_set(self, kind: str, text: str):
        """Notes what is told."""
        self.told[kind] = json.loads(text)


@pytest.mark.parametrize("first", [None, exits.Stopped("by a signal")])
def test_a_second_signal_ends_who_waits_for_the_others(monkeypatch, first):
    """Python came to its own end there, under threads of C++: a segmentation fault."""
    ends, group = [], processes.Group(Waiting(), "localhost:1", 1, 2)
    monkeypatch.setattr(processes, "end", lambda *told: ends.append(told))
    monkeypatch.setattr(processes, "deaf", lambda: None)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    error = None
    if first is not None:  # as the command's entry raises it
        error = SystemExit(exits.STOPPED)
        error.__context__ = first
    group.leave(error)
    assert ends == [(exits.STOPPED,)]
    cause = group.client.told["cause"]
    assert cause["text"].endswith(f"ended: {exits.TWICE}")
    assert cause["code"] == exits.STOPPED


class Stored:
    """A client of a store that others do not write to; what it does not have is gone."""

    def __init__(self):
        self.told, self.done, self.slept = {}, [], []

    def key_value_set(self, key: str, text: str):
        """Keeps the first text of a key, as the store does."""
        if key in self.told:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: Config key")
        self.told[key] = text

    def key_value_try_get(self, key: str) -> str:
        """Returns as the store does, or raises as it."""
        if key not in self.told:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: Config key")
        return self.told[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """Returns as the store does, or raises as where the coordinator has ended."""
        if key not in self.told:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
        return self.told[key]

    def wait_at_barrier(self, name: str, milliseconds: int):
        """Notes where it waited."""
        self.done.append(name)

    def cause(self) -> dict:
        """Returns what was told to end all."""
        return json.loads(self.told["cause"])


class Ended(Exception):
    """A process has ended with (exit code, last line)."""


@pytest.fixture
def one_of_two(monkeypatch):
    """A Group of process 1 of two, alone; what ends it raises Ended."""

    def end(code: int, line: str = ""):
        raise Ended(code, line)

    client = Stored()
    monkeypatch.setattr(processes, "end", end)
    monkeypatch.setattr(processes, "deaf", lambda: client.done.append("deaf"))
    monkeypatch.setattr(processes.time, "sleep", client.slept.append)
    return processes.Group(client, "localhost:1", 1, 2)


@pytest.mark.parametrize(
    "code, own, line",
    [
        (exits.STOPPED, None, "error: why"),
        (exits.REFUSED, "another", "error: why"),
        (exits.REFUSED, "the same", ""),  # which this process has said itself
        (exits.STOPPED, "the same", "error: why"),
    ],
)
def test_who_listens_ends_by_the_cause_that_another_told(one_of_two, code, own, line):
    cause = {"text": "why", "error": "the same", "code": code}
    one_of_two.client.told["cause"] = json.dumps(cause)
    one_of_two.error_text = own
    with pytest.raises(Ended) as ended:
        one_of_two.listen()
    assert ended.value.args == (code, line)
    assert one_of_two.conclusion == (code, "error: why")
    assert one_of_two.client.done == ["deaf", "cause_read"]


def test_without_its_coordinator_a_process_ends_by_what_it_knows(one_of_two):
    one_of_two.where = lambda: "; in step 3"
    lost = "error: process 0 on an unknown host is lost, the coordinator at localhost:1"
    for act in (one_of_two.listen, one_of_two.aborted):
        with pytest.raises(Ended) as ended:
            act()
        assert ended.value.args == (exits.STOPPED, f"{lost}; in step 3")
    with socket.create_server(("localhost", 0)) as server:
        one_of_two.coordinator = f"localhost:{server.getsockname()[1]}"
        one_of_two.aborted()  # for another reason: the abort goes on
        one_of_two.client = Store("UNAVAILABLE: failed to connect")
        with pytest.raises(Ended):
            one_of_two.aborted()
        one_of_two.client, one_of_two.conclusion = Stored(), (exits.STUCK, "known")
        with pytest.raises(Ended) as ended:
            one_of_two.aborted()
    assert ended.value.args == (exits.STUCK, "known")


def by_exit(code: int, context: BaseException) -> SystemExit:
    """Returns what the entry of a command raises for an error."""
    error = SystemExit(code)
    error.__context__ = context
    return error


BROKEN = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: reset")


@pytest.mark.parametrize(
    "error, code, text, printed",
    [
        (KeyError("why"), 1, "KeyError: 'why'", "KeyError: 'why'\n"),
        (by_exit(exits.REFUSED, ValueError("why")), exits.REFUSED, "why", ""),
        (BROKEN, exits.STOPPED, f"{type(BROKEN).__name__}: {BROKEN}", ""),
    ],
)
def test_who_cannot_go_on_tells_the_others_why(
    one_of_two, capsys, error, code, text, printed
):
    with pytest.raises(Ended) as ended:
        one_of_two.leave(error)
    assert ended.value.args == (code, "")
    told = f"process 1 on {socket.gethostname()} ended: {text}"
    assert one_of_two.client.cause() == {"text": told, "error": text, "code": code}
    assert capsys.readouterr().err == printed  # the command's entry has told the others
    assert one_of_two.client.done == ["deaf"]
    waited = one_of_two.client.slept[0] == processes.PATIENCE_S  # for the first cause
    assert waited == (error is BROKEN)


@pytest.mark.parametrize("before", [None, "stopped: SIGINT came to process 0 on x"])
def test_all_leave_together_with_the_signal_that_came_first(
    one_of_two, monkeypatch, before
):
    monkeypatch.setattr(exits, "received", [signal.SIGTERM])
    with pytest.raises(Ended) as ended:
        one_of_two.leave(None)
    assert ended.value.args == (0, "")
    if before:
        one_of_two.client.told["signal"] = json.dumps({"text": before})
    with pytest.raises(Ended) as ended:
        one_of_two.leave(by_exit(exits.STOPPED, exits.Stopped("by a signal")))
    own = f"stopped: SIGTERM came to process 1 on {socket.gethostname()}"
    assert ended.value.args == one_of_two.conclusion == (exits.STOPPED, before or own)
    assert one_of_two.client.done == ["left", "deaf", "left", "deaf"]


@pytest.mark.parametrize(
    "error, text, code",
    [
        (exits.CannotGoOn("the disk is full"), "the disk is full", exits.STUCK),
        (exits.Stopped("by a kernel"), "stopped by a kernel", exits.STOPPED),
        (KeyError("why"), "KeyError: 'why'", 1),
    ],
)
def test_an_error_beside_the_main_thread_ends_all(
    one_of_two, monkeypatch, error, text, code
):
    processes.fail(error)  # of one process alone: the caller ends it
    monkeypatch.setattr(processes, "group", one_of_two)
    processes.fail(error)
    told = f"process 1 on {socket.gethostname()} ended: {text}"
    assert one_of_two.client.cause() == {"text": told, "error": text, "code": code}


@pytest.mark.parametrize("line", ["the last line", ""])
def test_an_end_has_its_last_line_behind_all_others(monkeypatch, capfd, line):
    ended = []
    monkeypatch.setattr(processes, "ending_lock", threading.Lock())
    monkeypatch.setattr(processes.exits, "end", lambda *told: ended.append(told))
    processes.end(exits.STUCK, line)
    ((code, told, write),) = ended
    assert (code, told) == (exits.STUCK, line)
    print("said before", file=sys.stderr)
    write()
    assert capfd.readouterr().err == "said before\n" + (line and f"{line}\n")
    assert processes.ending_lock.locked()  # nobody else has a last word


def test_who_is_who_is_told_by_flags_before_the_environment(monkeypatch):
    asked = []

    def connect(*given):
        asked.append(given)
        raise InterruptedError

    monkeypatch.setattr(processes, "connect", connect)
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    given = [(None, None, None), ("here:1", 2, 0)]
    for values in given:
        with pytest.raises(InterruptedError):
            processes.join(*values)
    for name, value in zip(names, ("there:65535", "3", "0"), strict=True):
        monkeypatch.setenv(name, value)
    for values in given:
        with pytest.raises(InterruptedError):
            processes.join(*values, seconds=7)
    wait = processes.JOIN_S
    assert asked == [
        (None, None, None, wait),
        ("here:1", 2, 0, wait),
        ("there:65535", 3, 0, 7),
        ("here:1", 2, 0, 7),
    ]


def test_processes_that_were_told_other_numbers_of_them_are_refused(tmp_path):
    folder, port = tmp_path / "run", served.free_port()
    runs = [numbered(folder, port, count, count - 2) for count in (2, 3)]
    for told in end(runs, exits.REFUSED):
        assert last(told) == (
            "error: the processes differ: --processes is 2 in process 0 and 3 in process 1"
        )
    assert not folder.exists()


def test_who_is_told_of_more_processes_than_the_coordinator_is_told_so(tmp_path):
    """JAX aborts there at once; the last line was of having waited for all the time."""
    folder, port = tmp_path / "run", served.free_port()
    runs = [numbered(folder, port, *given) for given in ((2, 0), (3, 2))]
    wait_for(runs[1])
    runs[0].kill()
    told = end(runs, -signal.SIGKILL, exits.STOPPED)
    assert last(told[1]) == (
        f"error: process 2 of 3: the coordinator, localhost:{port}, does not take it: was it "
        "told of fewer processes, has another one this number, or has it ended?"
    )


def test_who_waits_in_vain_names_the_coordinator(command, tmp_path):
    arguments = ["--config=configs/smoke.py", "--join_within=1"]
    arguments += ["--coordinator=localhost:1", "--processes=2", "--process=1"]
    (told,) = end([served.start("dllm_jax.train", arguments)], exits.STOPPED)
    assert last(told) == (
        "error: process 1 of 2 waited 1 seconds at the coordinator, localhost:1, and not "
        "all came; is it the address of process 0, and were all started, each told that "
        "they are 2, and a number of its own?"
    )
    assert "stack trace" not in told


def test_who_is_told_to_end_while_it_waits_ends_by_the_signal():
    port = served.free_port()
    arguments = ["--config=configs/smoke.py", f"--coordinator=localhost:{port}"]
    run = served.start("dllm_jax.train", [*arguments, "--processes=2", "--process=0"])
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection(("localhost", port), 2).close()
            break
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    end([run], -signal.SIGTERM)


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"
        arguments = ["--config=configs/smoke.py", f"--coordinator={address}"]
        arguments += ["--processes=2", "--process=0"]
        (told,) = end([served.start("dllm_jax.train", arguments)], exits.STOPPED)
    assert last(told) == processes.no_way(address, "another program has the port here")


@pytest.mark.parametrize(
    "given, named",
    [
        (["--processes=2", "--process=0"], "--processes and --process"),
        (["--join_within=300"], "--join_within"),
    ],
)
def test_flags_that_join_nothing_alone_are_refused(given, named):
    done = served.run("dllm_jax.train", ["--config=configs/smoke.py", *given])
    assert done.returncode == exits.REFUSED
    assert last(done.stderr) == (
        f"error: {named}: no other process is joined by that alone; add "
        "--coordinator=HOST:PORT of process 0, or --distributed, which finds it out"
    )


def test_where_nothing_moves_is_told(capfd):
    timer = metrics.Timer()
    told = ""
    with timer("rollout"):
        timer.step = 7
        processes.watch(timer, 0.05)
        while "\n" not in told:
            time.sleep(0.01)
            told += capfd.readouterr().err
    timer.moved = float("inf")  # it moves from now on
    assert told.startswith("warning: process 0 on ")
    assert re.search(
        "is in step 7, phase rollout: nothing has moved for [0-9]+ s", told
    )


@pytest.mark.parametrize(
    "error, effect",
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: reset"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("connection"), False),
        # As a program raises it that ran before.
        (ValueError("UNKNOWN: Gloo AllGather failed: reset"), True),
    ],
)
def test_a_broken_connection_is_no_first_cause(error, effect):
    assert processes.broken(error) == effect
    outer = KeyError("saving")
    outer.__cause__ = error
    assert processes.broken(outer) == effect
    outer.__cause__, outer.__context__ = None, error
    assert processes.broken(outer) == effect
    refused = SystemExit(exits.REFUSED)
    refused.__context__ = error
    assert processes.broken(refused) == effect


def test_an_end_without_words_is_told_by_its_kind():
    """Of Ctrl-C, before a run listens, the others told: process 1 on HOST ended: ."""
    interrupted = SystemExit(exits.STOPPED)
    interrupted.__context__ = KeyboardInterrupt()
    assert processes.ending(interrupted) == ("KeyboardInterrupt", exits.STOPPED)


def test_a_job_of_kubernetes_goes_on_after_the_codes_that_say_so():
    text = (served.ROOT / "launch" / "kubernetes.yaml").read_text()
    (job,) = [part for part in yaml.safe_load_all(text) if part["kind"] == "Job"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    assert codes == {
        "FailJob": [1, exits.REFUSED, exits.STUCK],
        "Ignore": [exits.STOPPED],
    }
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][1:] == ["-m", "dllm_jax.train", "--distributed"]


COMMAND = """#!/bin/bash
echo "${0##*/}" "$@" >> "$CALLS"
if [[ ${0##*/} == srun ]]; then exit "$CODE"; fi
"""


def job_of_slurm(folder: pathlib.Path, code: int, restarts: int, *flags) -> list[str]:
    """Returns what a job has called in the folder so far; it ends with the code of srun."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(COMMAND)
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "CODE": str(code),
        "SLURM_JOB_ID": "17",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_SUBMIT_DIR": str(folder),
    }
    script = served.ROOT / "launch" / "slurm.sbatch"
    done = subprocess.run(["bash", str(script), *flags], env=env, check=False)
    assert done.returncode == code
    return calls.read_text().splitlines()


@pytest.mark.parametrize(
    "code, restarts, again",
    [
        *((0, 0, False), (1, 0, False), (exits.REFUSED, 0, False)),
        *((exits.STUCK, 0, False), (exits.STOPPED, 999, True)),
        *((137, 99, True), (137, 100, False)),
        *((143, 2, True), (143, 3, False), (134, 2, True), (139, 3, False)),
    ],
)
def test_a_job_of_slurm_is_queued_again_after_the_codes_that_say_so(
    tmp_path, code, restarts, again
):
    srun, *others = job_of_slurm(tmp_path, code, restarts, "--resume=must")
    assert srun.endswith("--distributed --config=configs/tracerl.py --resume=must")
    # What one has refused the others have time to say, too.
    assert " --kill-on-bad-exit=0 --wait=60 " in srun
    assert others == ["scontrol requeue 17"] * again
    assert (tmp_path / "slurm-17.stops").exists() == (code == exits.STOPPED)


def test_restarts_after_time_limits_are_none_of_those_after_signals(tmp_path):
    for restarts, code in enumerate([75, 143, 75, 75, 75, 134, 139, 143]):
        calls = job_of_slurm(tmp_path, code, restarts)
    assert (
        calls.count("scontrol requeue 17") == 7
    )  # the fourth signal's code is the end
    assert not (tmp_path / "slurm-17.stops").exists()


DISTRIBUTED = ["-m", "dllm_jax.train", "--distributed"]
GCLOUD = """#!/bin/bash
for word in "$@"; do
    case $word in
    /*) cp "$word" "$WORKER/dllm_jax.tar.gz" ;;
    --command=*) cd "$WORKER" && bash -c "${word#--command=}" ;;
    esac
done
"""


def test_a_tpu_worker_has_the_files_of_the_commit_and_no_others(tmp_path):
    tools, repository, worker = (tmp_path / name for name in ("bin", "repo", "worker"))
    python = worker / "dllm_jax" / ".venv" / "bin" / "python"
    for script, text in (
        (tools / "gcloud", GCLOUD),
        (tools / "make", "#!/bin/bash\n"),
        (python, '#!/bin/bash\nprintf "%s\\n" "$@"\n'),
        (repository / "launch" / "tpu_pod.sh", ""),
    ):
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        script.chmod(0o755)
    launcher = repository / "launch" / "tpu_pod.sh"
    launcher.write_bytes((served.ROOT / "launch" / "tpu_pod.sh").read_bytes())
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "WORKER": str(worker)}

    def bring(*flags) -> subprocess.CompletedProcess:
        """Returns what the launcher told."""
        command = ["bash", str(launcher), "tpu", "zone", *flags]
        return subprocess.run(
            command, env=env, check=True, capture_output=True, text=True
        )

    def launch(*flags) -> list[str]:
        """Returns what a worker's Python is given, by the commit of all there is."""
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            subprocess.run([*git, *words], cwd=repository, check=True)
        done = bring(*flags)
        assert done.stderr == ""
        return done.stdout.splitlines()

    (repository / "old.py").write_text("")
    path = "--config.model.path=a b'c$d"
    told = launch("configs/a.py:x", path)
    assert told == [*DISTRIBUTED, "--config=configs/a.py:x", path]
    assert (worker / "dllm_jax" / "old.py").exists()
    (repository / "old.py").unlink()
    (repository / "new.py").write_text("")
    (worker / "dllm_jax" / "mine").write_text("")
    told = launch("--resume=must")
    assert told == [*DISTRIBUTED, "--config=configs/tracerl.py", "--resume=must"]
    left = {path.name for path in (worker / "dllm_jax").iterdir()}
    assert left == {".brought", ".venv", "launch", "mine", "new.py"}
    (repository / "newer.py").write_text("")
    assert "without the changes since" in bring().stderr
    assert not (worker / "dllm_jax" / "newer.py").exists()


def test_the_difference_names_who_has_what():
    everyone = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "3"}, 2: {"a": "1"}}
    assert processes.difference("a", everyone) == ""
    want = "b is 2 in process 0 and 3 in process 1 and unknown in process 2"
    assert processes.difference("b", everyone) == want


@pytest.mark.parametrize("count, more", [(3, ""), (4, r" \(and 1 more\)")])
def test_of_what_differs_three_are_named(monkeypatch, count, more):
    own = {"alike": "0"} | {f"fact{i}": "1" for i in range(count)}
    other = own | {f"fact{i}": "2" for i in range(count)}
    differing = Told(digest="another", facts=json.dumps(other))
    monkeypatch.setattr(processes, "group", differing)
    said = "; ".join(f"fact{i} is 2 in process 0 and 1 in process 1" for i in range(3))
    with pytest.raises(ValueError, match=f"^the processes differ: {said}{more}$"):
        processes.agree(own)
    monkeypatch.setattr(differing, "shared", lambda kind, text: {0: text, 1: text})
    processes.agree(own)


def test_a_number_of_the_environment_is_one(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID=one: a number is needed"):
        processes.join("localhost:1", 2, None)


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", "localhost:http", "localhost:65536"]
)
def test_a_coordinator_is_a_host_and_a_port(address):
    with pytest.raises(ValueError, match=f"'{address}': it must be HOST:PORT"):
        processes.join(address, 2, 0)


def test_where_nothing_tells_the_coordinator_its_flag_is_named():
    line = processes.nobody_came(distributed.State(), 7)
    assert "nothing told within 7 seconds" in line and "--coordinator=" in line


def unknown(text: str, cause: Exception) -> RuntimeError:
    """Returns the error by which a launcher does not tell who is who."""
    error = RuntimeError(text)
    error.__cause__ = cause
    return error


NAMELESS = socket.gaierror(-2, "Name or service not known")


def test_a_launcher_is_asked_again_while_its_answer_may_yet_come(monkeypatch):
    """As Kubernetes is for a pod that waits for a node: not to know it ended the Job."""
    answers = [
        unknown("Retry failed with all attempts exhausted", NAMELESS),
        unknown("Kubernetes API Error: 503 - Service Unavailable", OSError()),
        unknown("of a client", ConnectionRefusedError("refused")),
        None,
    ]

    def ask(*given, **how):
        if answer := answers.pop(0):
            raise answer

    monkeypatch.setattr(processes.jax.distributed, "initialize", ask)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    reasons = []
    processes.initialize((None, None, None), {}, reasons)
    assert answers == []
    assert reasons[0] == "[Errno -2] Name or service not known"
    line = processes.nobody_came(distributed.State(), 7, reasons[-1])
    assert "who the coordinator is (refused); give --coordinator=" in line
    for wrong in (
        unknown("Kubernetes API Error: 403 - Forbidden", OSError()),
        jax.errors.JaxRuntimeError("Failed to start RPC server"),
    ):
        answers[:] = [wrong]
        with pytest.raises(type(wrong)):
            processes.initialize((None, None, None), {}, reasons)
