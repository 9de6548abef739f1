"""The killable subprocess, with a reward that does what it is told."""

import signal
import sys
import threading
import time

import pytest

from dllm_jax.exits import CannotGoOn
from dllm_jax.rl.rewards.worker import Worker

REWARD = """
import os
import time

def warm_up():
    print("slow imports talk")

def reply(told, value):
    if told == "sleep":
        time.sleep(value)
    if told == "think":
        with open(value, "a") as file:
            file.write("1")
        while True:
            pass
    if told == "die":
        os._exit(1)
    if told == "memory":
        bytearray(2**31)
    if told == "once" and not os.path.exists(value):
        open(value, "w").close()
        os._exit(1)
    print("no reply")
    return [told, value]
"""


@pytest.fixture
def worker(tmp_path):
    """A worker that is given a second for each reply."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    worker = Worker(str(file), limit_s=1.0)
    yield worker
    worker.close()


def test_it_starts_when_it_is_first_asked_and_stays(worker):
    assert worker.process is None
    assert worker.ask("say", "a\nb\u2028c") == ["say", "a\nb\u2028c"]
    first = worker.process
    assert worker.ask("say", None) == ["say", None]
    assert worker.process is first


def test_what_takes_too_long_is_killed_and_the_next_is_answered(worker):
    assert worker.ask("say", 1) == ["say", 1]
    first = worker.process
    with pytest.raises(TimeoutError):
        worker.ask("sleep", 60)
    assert first.poll() is not None
    assert worker.ask("say", 2) == ["say", 2]


@pytest.mark.parametrize("how", ["die", "memory"])
def test_what_kills_it_again_and_again_has_no_reply(worker, how):
    assert worker.ask(how, 0) is None
    assert worker.ask("say", 3) == ["say", 3]


def test_what_it_survives_at_the_second_try_is_answered(worker, tmp_path):
    mark = str(tmp_path / "mark")
    assert worker.ask("once", mark) == ["once", mark]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_one_that_is_stopped_or_killed_is_replaced_and_asked_again(worker, number):
    assert worker.ask("say", 1) == ["say", 1]
    first = worker.process
    first.send_signal(number)
    assert worker.ask("say", 2) == ["say", 2]
    assert first.poll() is not None


def test_one_that_is_killed_as_it_answers_is_replaced(worker):
    worker.ask("say", 0)
    first, replies = worker.process, []
    thread = threading.Thread(target=lambda: replies.append(worker.ask("sleep", 0.5)))
    thread.start()
    first.kill()
    thread.join()
    assert replies == [["sleep", 0.5]]


def test_one_that_dies_as_it_starts_is_started_again(worker, monkeypatch):
    started = []
    start = worker._start

    def die():
        start()
        started.append(worker.process)
        if len(started) < 3:
            worker.process.kill()

    monkeypatch.setattr(worker, "_start", die)
    assert worker.ask("say", 1) == ["say", 1]
    assert len(started) == 3


def test_one_that_starts_too_slowly_is_started_again(worker, monkeypatch):
    monkeypatch.setattr("dllm_jax.rl.rewards.worker.START_S", 1.0)
    worker._start()
    slow = worker.process
    slow.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(worker, "_line", slowly(worker._line, slow))
    assert worker.ask("say", 1) == ["say", 1]
    assert slow.poll() is not None


def slowly(line, slow):
    """Returns a worker's `_line` that has all the time but for the slow process."""
    return lambda seconds: line(60.0 if slow.poll() is not None else seconds)


def test_what_thinks_too_long_is_asked_once(worker, tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(TimeoutError):
        worker.ask("think", str(mark))
    assert mark.read_text() == "1"


@pytest.mark.parametrize("speed", [0.3, 0.15])
def test_a_busy_machine_gives_it_longer_but_not_for_ever(worker, monkeypatch, speed):
    """It has so much of a processor; what takes two seconds then is in time, or is not."""
    worker.ask("say", 0)
    monkeypatch.setattr(worker, "_seconds", lambda: speed * time.monotonic())
    assert worker.ask("sleep", 2) == ["sleep", 2]
    with pytest.raises(TimeoutError):
        worker.ask("sleep", 60)


def test_after_close_it_starts_again(worker):
    worker.ask("say", 4)
    worker.close()
    assert worker.process is None
    assert worker.ask("say", 5) == ["say", 5]


def test_threads_share_it(worker):
    replies = {}

    def ask(i):
        replies[i] = worker.ask("say", i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {i: ["say", i] for i in range(8)}


def test_one_that_cannot_start_says_how_it_is_started(worker, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CannotGoOn, match="does not start: python -P .*reward.py$"):
        worker.ask("say", 6)
    assert worker.process is None
