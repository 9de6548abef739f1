"""Somebody else's program gets an end, and what follows it does not."""

import resource
import signal
import sys
import threading

import pytest

from dllm_jax import limits


def test_what_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="0.05 seconds"), limits.bounded():
        while True:
            pass
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="its limit of memory is not kept")
def test_what_takes_all_memory_is_ended():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), limits.bounded():
        bytearray(2 * limits.BYTES)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_thread_has_no_alarm():
    ended = []

    def work():
        with limits.bounded():
            ended.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="its limit of memory is not kept")
def test_two_threads_leave_the_limit_as_it_was():
    before = resource.getrlimit(resource.RLIMIT_AS)
    first, second, left = (threading.Event() for _ in range(3))

    def one():
        with limits.bounded():
            first.set()
            second.wait(0.2)
        left.set()

    def other():
        first.wait(60)
        with limits.bounded():
            second.set()
            left.wait(60)

    threads = [threading.Thread(target=work) for work in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
