"""Runs programs that nobody has read: what a model wrote, or what a data set brings.

    available()                                      "landlock 7 + seccomp, namespaces yes"
    run(program, stdin, seconds=4, memory_mb=512)    Result(status, stdout, seconds)

jail.py says how a program is confined: it reads the standard library, its input and the
clock, and it writes its output. No privilege, daemon or package is needed: Linux 5.13 or
newer on x86-64 or aarch64. Where the kernel has neither Landlock nor namespaces, nothing
runs and RuntimeError says so, unless `configure(allow_unsafe=True)`.

What it does NOT protect from:

    - a defect of the kernel, or of the processor: who fears a determined attacker runs
      the whole training in a virtual machine
    - the machine being slower meanwhile: a program may use a core for its seconds, its
      memory, and as many threads as fit into that (without namespaces, or as root, no
      limit counts them; threads of 32 KiB are 10,000 in 512 MiB)
    - being seen: without namespaces a program can ask whether a file exists and how large
      it is, never what it holds; it always learns the kernel's version, the machine's name
      and load, and how long things take
    - side channels between two programs that run at once
    - what a program prints: whoever shows or parses it must expect anything

Its states: ok; error: it raised, crashed or exited with another code than 0; timeout;
memory; output: it printed more than OUTPUT bytes, of which those are kept; sandbox: it
could not be confined or its jail was killed, again and again, which is no fault of its.

A time limit is one of a processor's seconds. Since other work may hold up the machine, a
program may wait, too: it is stopped after 3 x seconds + 1 s. Starting costs it nothing.
"""

import array
import atexit
import contextlib
import fcntl
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

OUTPUT = 2**20  # bytes
START_S = 120.0  # until a jail stands, on a busy machine
SLACK_S = 30.0  # beyond its limits, until a jail is taken for dead
TRIES = 3  # of a job whose jail dies
JAIL = pathlib.Path(__file__).with_name("jail.py")
LEAST_MB = 16  # of a program's memory


class Result(NamedTuple):
    """How a program ended, what it printed, and the seconds that passed meanwhile."""

    status: str
    stdout: bytes
    seconds: float


class Lost(Exception):
    """A jail died or cannot confine."""


class Jail:
    """The other side of jail.py: a process that runs one job after another."""

    def __init__(self, without: tuple[str, ...] = (), unsafe: bool = False):
        """Starts it and waits until it stands.

        without: what is taken as missing, of namespaces, landlock and seccomp. Raises
        RuntimeError where too little confines.
        """
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"control": theirs.fileno(), "without": without, "unsafe": unsafe}
        # No preexec_fn, which would fork this process and its threads. The hash seed is
        # fixed: a set's order is the same in every program that prints one.
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", str(JAIL), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            cwd="/",
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt of the run is not for the jail
        )
        theirs.close()
        told = {}
        with contextlib.suppress(Lost):
            told = self.heard(time.monotonic() + START_S)
        self.words = told.get("ready", "")
        if not self.words:
            self.close()
            raise RuntimeError(
                f"programs cannot be run safely here: {told.get('refused', 'no jail')}; "
                "it takes Linux 5.13 or newer with Landlock and seccomp, on x86-64 or "
                "aarch64; or set "
                "reward.allow_unsafe=True where the whole machine may be lost"
            )

    def heard(self, end: float) -> dict:
        """Returns the next message; raises Lost where none comes until `end`."""
        left = max(end - time.monotonic(), 0)
        if not select.select([self.control], [], [], left)[0]:
            raise Lost
        try:
            text = self.control.recv(2**20)
        except OSError:
            raise Lost from None
        if not text:
            raise Lost
        return json.loads(text)

    def send(self, message: dict, files: list[int]) -> None:
        """Sends a message with descriptors; raises Lost where nobody listens."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        try:
            self.control.sendmsg(
                [json.dumps(message).encode()], rights if files else []
            )
        except OSError:
            raise Lost from None

    def run(self, program: int, given: int, seconds: float, memory_mb: int) -> Result:
        """Returns what `run` returns. program, given: files. Raises Lost."""
        out, theirs = os.pipe()
        try:
            job = {"job": "run", "seconds": seconds, "memory_mb": memory_mb}
            try:
                self.send(job, [program, given, theirs])
            finally:
                os.close(theirs)
            end = time.monotonic() + 3 * seconds + 1 + SLACK_S
            data, flood = self.printed(out, end)
            if flood:
                self.send({"kill": True}, [])
            told = self.heard(end)
        finally:
            os.close(out)
        if told["status"] == "sandbox":
            raise Lost
        return Result("output" if flood else told["status"], data, told["seconds"])

    def printed(self, out: int, end: float) -> tuple[bytes, bool]:
        """Returns (what a program prints until it ends, whether it was cut)."""
        parts, size = [], 0
        while size <= OUTPUT:
            left = max(end - time.monotonic(), 0)
            if not select.select([out], [], [], left)[0]:
                raise Lost
            part = os.read(out, 2**16)
            if not part:
                return b"".join(parts), False
            parts.append(part)
            size += len(part)
        return b"".join(parts)[:OUTPUT], True

    def trial(self, program: int, tests: int, limits: dict) -> str | None:
        """Returns a judge's verdict: "0" or "1" for each test, None where it broke.

        program, tests: files, see `trial.py`. Raises Lost.
        """
        self.send({"job": "trial"} | limits, [program, tests])
        told = self.heard(time.monotonic() + 3 * limits["judge_seconds"] + 1 + SLACK_S)
        if told["status"] == "sandbox":
            raise Lost
        return told.get("verdict")

    def close(self) -> None:
        """Kills it, and with it what it runs."""
        self.process.kill()
        self.process.wait()
        self.control.close()


def spare_cores() -> int:
    """Returns one less than there are cores for this process, and one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(cores - 1, 1)


class Pool:
    """Jails that threads share; each is started when it is first needed."""

    def __init__(self, workers: int = 0, unsafe: bool = False):
        """workers: the most at once; 0: `spare_cores`."""
        self.workers = workers or spare_cores()
        self.unsafe, self.without = unsafe, ()
        self.free = threading.Semaphore(self.workers)
        self.idle: list[Jail] = []

    def started(self) -> Jail:
        """Returns a new jail; without namespaces where they cannot be furnished."""
        if not sys.platform.startswith("linux"):
            raise RuntimeError(
                f"programs cannot be run safely on {sys.platform}: it takes Linux 5.13 or "
                "newer"
            )
        try:
            return Jail(self.without, self.unsafe)
        except RuntimeError:
            if self.without:
                raise
            jail = Jail(("namespaces",), self.unsafe)
            self.without = ("namespaces",)
            return jail

    def do(self, job):
        """Returns job(jail) of an idle jail; one that dies of it is replaced.

        Raises Lost where they die again and again.
        """
        with self.free:
            for left in reversed(range(TRIES)):
                try:
                    jail = self.idle.pop()
                except IndexError:
                    jail = self.started()
                try:
                    done = job(jail)
                except BaseException as error:
                    jail.close()
                    if isinstance(error, Lost) and left:
                        continue
                    raise
                self.idle.append(jail)
                return done

    def close(self) -> None:
        """Kills the idle jails; the next job starts another."""
        while self.idle:
            self.idle.pop().close()


pool = Pool()


def configure(workers: int = 0, allow_unsafe: bool = False) -> None:
    """Sets how many programs run at once, and whether also where nothing confines them."""
    global pool
    if (workers or pool.workers, allow_unsafe) != (pool.workers, pool.unsafe):
        pool.close()
        pool = Pool(workers, allow_unsafe)


def close() -> None:
    """Kills the jails; the next program starts another."""
    pool.close()


atexit.register(close)


def available() -> str:
    """Returns what confines programs here; raises RuntimeError where nothing does."""
    return pool.do(lambda jail: jail.words)


@contextlib.contextmanager
def files(*contents: bytes):
    """Lends descriptors of files in memory, which nobody can change."""
    opened = []
    try:
        for content in contents:
            file = os.memfd_create("", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.append(file)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file, rest) :]
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        yield opened
    finally:
        for file in opened:
            os.close(file)


def check_limits(seconds: float, memory_mb: int) -> None:
    """Raises ValueError for limits that none can keep."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= 3600):
        raise ValueError(f"seconds={seconds!r}: must be a number above 0, at most 3600")
    whole = isinstance(memory_mb, int) and not isinstance(memory_mb, bool)
    if not (whole and LEAST_MB <= memory_mb <= 2**20):
        raise ValueError(
            f"memory_mb={memory_mb!r}: must be whole, {LEAST_MB} to {2**20}"
        )


def run(program: str, stdin: bytes = b"", *, seconds: float, memory_mb: int) -> Result:
    """Runs a Python program as a script.

    stdin: what it can read. seconds: of a processor; see above. memory_mb: MiB that it may
    take beside the interpreter's own. Raises ValueError for bad limits, TypeError for what
    is no text or no bytes, RuntimeError where programs cannot be confined.
    """
    result = ended(program, stdin, seconds=seconds, memory_mb=memory_mb)
    return result._replace(status="error") if result.status == "exit" else result


def ended(program: str, stdin: bytes, *, seconds: float, memory_mb: int) -> Result:
    """Returns what `run` does, but "exit" of a program that chose its exit code."""
    if not isinstance(program, str) or not isinstance(stdin, (bytes, bytearray)):
        raise TypeError("a program is a str, its stdin bytes")
    check_limits(seconds, memory_mb)

    def job(jail: Jail) -> Result:
        os.lseek(given, 0, os.SEEK_SET)
        return jail.run(file, given, seconds, memory_mb)

    with files(program.encode("utf-8", "surrogatepass"), stdin) as (file, given):
        try:
            return pool.do(job)
        except Lost:
            return Result("sandbox", b"", 0.0)


def judge_seconds(seconds: float) -> float:
    """Returns what a judge may take; it waits for some tests that are not answered."""
    return 10 + 8 * seconds


def tried(
    candidate: dict, tests: dict, *, seconds: float, memory_mb: int, all_cases: bool
) -> str | None:
    """Returns "0" or "1" for each test that a judge made of a candidate.

    candidate, tests: see trial.py. It ends with the first "0" unless all_cases. "" where the
    judge broke, which is the tests' fault; None where it is the sandbox's.
    """
    check_limits(seconds, memory_mb)
    limits = {
        "seconds": seconds,
        "memory_mb": memory_mb,
        "judge_seconds": judge_seconds(seconds),
        "all_cases": all_cases,
    }
    texts = (json.dumps(x).encode() for x in (candidate, tests))
    with files(*texts) as (program, given):
        try:
            return pool.do(lambda jail: jail.trial(program, given, limits)) or ""
        except Lost:
            return None
