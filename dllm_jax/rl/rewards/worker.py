"""A killable subprocess in which a reward judges what it does not trust.

Some judgements never end, take all memory or crash the interpreter: symbolic algebra on
what a policy wrote, for example. They are made in a process of their own, with a memory
limit, that is killed when one takes too long.

The subprocess is `python -P worker.py FILE`, where FILE is the reward's module. It imports
neither JAX nor the package, so FILE must not import the package at its top, and nothing ever
forks the parent. FILE has

    warm_up()         pays for slow imports before the first request
    reply(*args)      returns what the parent's `ask(*args)` returns: anything but null

The two talk in lines of JSON: a list of arguments there, a reply back.
"""

import importlib.util
import json
import os
import pathlib
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time

MEMORY_BYTES = 2**30  # of the subprocess
START_S = 120.0  # sympy's import is slow on a busy machine
TRIES = 3  # of a start, and of a question in which the machine is at fault
IDLE = 0.1  # of the time: who has thought less was stopped, or starved
ORPHAN_S = 60  # a worker whose parent was killed stops thinking after so long


class Worker:
    """The parent's side: started when first asked, and again after a kill.

    file: the reward's module. limit_s: what a reply may take of a processor.
    """

    def __init__(self, file: str, limit_s: float):
        self.file = file
        self.limit_s = limit_s
        self.process = None
        self.ready = False
        self.lock = threading.Lock()

    def ask(self, *args):
        """Returns the file's reply to the arguments, None if it dies of them again and again.

        A worker that is killed, stopped or starved meanwhile is replaced, and asked again.
        Raises TimeoutError if it thinks for `limit_s`, waits for a processor for three times
        as long and a second, or never comes to think;
        exits.CannotGoOn if it cannot start.
        """
        with self.lock:
            for _ in range(TRIES):  # it may have died of something else than this
                reply, thought = self._reply(json.dumps(args) + "\n")
                if reply:
                    return json.loads(reply)
                self._stop()
                if reply is None and thought > IDLE * self.limit_s:
                    self._start()  # imports while the caller goes on
                    raise TimeoutError
            if reply is None:
                raise TimeoutError
            return None

    def close(self) -> None:
        """Kills the subprocess; the next question starts another."""
        with self.lock:
            self._stop()

    def _reply(self, request: str) -> tuple[str | None, float]:
        """Returns (a line, the seconds that it took of a processor).

        The line is "" if the worker has died, None if it takes too long.
        """
        self._ready()
        before = self._seconds()
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except BrokenPipeError:
            return "", 0.0
        began, line = time.monotonic(), self._line(self.limit_s)
        thought = self._seconds() - before
        # A busy machine holds it up: then it may wait as long as a program in the sandbox.
        while line is None and IDLE * self.limit_s < thought < self.limit_s:
            if time.monotonic() - began > 3 * self.limit_s + 1:
                break
            line = self._line(max(self.limit_s - thought, 0.02))
            thought = self._seconds() - before
        return line, thought

    def _ready(self) -> None:
        """Starts the subprocess unless it is ready, again where it dies or is too slow."""
        for _ in range(TRIES):
            if self.process is None:
                self._start()
            self.ready = self.ready or self._line(START_S) == "ready\n"
            if self.ready:
                return
            self._stop()
        # Not at the top: the subprocess runs this file, too.
        from dllm_jax.exits import CannotGoOn

        raise CannotGoOn(
            f"the grader's worker does not start: python -P {__file__} {self.file}"
        )

    def _seconds(self) -> float:
        """Returns the seconds of a processor that the subprocess has used so far.

        Where the system does not tell, it is taken to think all the time.
        """
        try:
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return time.monotonic()
        ticks = stat.rpartition(")")[2].split()[11:13]  # in user code, and for it
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def _line(self, seconds: float) -> str | None:
        """Returns the worker's next line, "" at its end, None where none comes in time."""
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        return self.process.stdout.readline() if poller.poll(1000 * seconds) else None

    def _start(self) -> None:
        # -P: this file's folder on sys.path would shadow the standard library's `math`.
        # No preexec_fn: Popen would run it in a fork of this process.
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, self.file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the run is not for the worker
            text=True,
        )

    def _stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process, self.ready = None, False


class Workers:
    """Several of them, which threads share; each is started when it is first needed."""

    def __init__(self, count: int, *args):
        """args: a Worker's."""
        self.every = [Worker(*args) for _ in range(count)]
        self.idle = queue.LifoQueue()
        for worker in reversed(self.every):  # the first is the first to be asked
            self.idle.put(worker)

    def ask(self, *args):
        """Returns what one of them says, of whom none is asked twice at once: see Worker."""
        worker = self.idle.get()
        try:
            return worker.ask(*args)
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """Kills them all; the next question starts another."""
        for worker in self.every:
            worker.close()


# ---- the subprocess's side


def load(file: str):
    """Returns a file as a module, without its package."""
    spec = importlib.util.spec_from_file_location("reward", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(file: str) -> None:
    """Answers each line of stdin with the file's reply on stdout.

    It ends with its input, and where memory is used up: what is still held then would fail
    the next replies too.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr  # what the file prints is no reply
    reward = load(file)
    reward.warm_up()
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        signal.alarm(ORPHAN_S)
        try:
            reply = reward.reply(*json.loads(line))
        except MemoryError:
            return
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
