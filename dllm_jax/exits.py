"""How a command ends: its exit codes, the errors that lead to them, and signals.

    0   done, or nobody reads any more what it prints: `| head` has what it wanted
    1   a defect of the program: a traceback
    2   refused: what the user gave is wrong, and the last line says what would be right
    3   cannot go on: it diverged, the disk or a device's memory is full, no checkpoint is
        whole, the weights that it began with are others by now. The same command would end
        the same way
    75  stopped, by a signal, since another process is lost, or by a kernel's first run: the
        same command goes on

A launcher starts a command again after 75 and after nothing else. ValueError is the
error that refuses, where this package or a file of the user's raises it (`refuses`).
"""

import contextlib
import errno
import functools
import os
import pathlib
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable

import jax

REFUSED, STUCK, STOPPED = 2, 3, 75
KINDS = {REFUSED: "refused", STUCK: "cannot go on", STOPPED: "stopped"}
PACKAGE = pathlib.Path(__file__).parent
STANDARD = ("stdlib", "platstdlib")  # of sysconfig
INSTALLED = {"site-packages", "dist-packages"}
LISTENED = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 20.0  # that threads get, once there is nothing left but to end
received = []  # the signals that came and were noted, by their numbers
at_end = []  # called with the exit code and the last line, where `end` ends the program
TWICE = "it was told to stop a second time"


class NotFinite(ValueError):
    """What a model computes is no number; where a run has made it so, it cannot go on."""

    def __init__(self, where: str = ""):
        """where: the answers that told, such as " in all of 8 answers"."""
        super().__init__(
            f"the model's first forward is not finite{where}: are its weights of an "
            "absurd scale?"
        )


class CannotGoOn(Exception):
    """What starting again does not mend; the message says what would."""


class Stopped(Exception):
    """The command was told to stop; the message, behind "stopped", says by what."""


class StoppedAtOnce(SystemExit):
    """A second signal: no function that a user gave has raised this one."""

    def __str__(self):
        return TWICE


def warn(text: str) -> None:
    """Tells the terminal, once for all processes."""
    if jax.process_index() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)


# What the errors of JAX's runtime begin with.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|"
    "INVALID_ARGUMENT|RESOURCE_EXHAUSTED|UNAVAILABLE|UNIMPLEMENTED|UNKNOWN): "
)


def of_runtime(error: BaseException | None) -> bool:
    """Returns whether an error is of JAX's runtime, and no ValueError that refuses.

    A program that ran before raises the same as a bare ValueError.
    """
    bare = type(error) is ValueError and STATUS.match(str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(bare)


def exhausted(error: BaseException) -> bool:
    """Returns whether an error says that a device, or the host, has no memory left."""
    words = "RESOURCE_EXHAUSTED", "Out of memory"
    return isinstance(error, MemoryError) or (
        of_runtime(error) and any(x in str(error) for x in words)
    )


def refuses(error: BaseException) -> bool:
    """Returns whether an error says that what the user gave is wrong.

    A ValueError does that this package raises, or a file of the user's. What a library raises
    is a defect, and so is what Python does under a line that raises nothing: zip, of unequal
    lengths.
    """
    if not isinstance(error, ValueError) or of_runtime(error):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = pathlib.Path(last.filename)
    library = any(pathlib.Path(sysconfig.get_path(x)) in file.parents for x in STANDARD)
    library |= file.suffix != ".py" or bool(INSTALLED & set(file.parts))
    # Of a file whose source is not there no line is known.
    raises = re.search(r"\braise\b", last.line or "raise")
    return bool(raises) and (PACKAGE in file.parents or not library)


def code_of(error: BaseException) -> int:
    """Returns the exit code of a command that an error ends."""
    if isinstance(error, SystemExit) and error.code in KINDS:  # StoppedAtOnce, too
        return error.code
    if isinstance(error, CannotGoOn) or exhausted(error):
        return STUCK
    if isinstance(error, Stopped | KeyboardInterrupt):
        return STOPPED
    return REFUSED if refuses(error) else 1


# The numbers of a full disk's errors, and why it is full where bytes are free.
FULL = {
    errno.ENOSPC: "perhaps no further file may be made, see `df -i`",
    errno.EDQUOT: "the quota of who writes here is used up, see `quota`",
    errno.EFBIG: "a file may not grow so large here, see `ulimit -f`",
}


@contextlib.contextmanager
def room(folder, wanted: int = 0, *, first: bool = False):
    """Raises CannotGoOn where what is inside finds no room on a disk, or no disk.

    folder: where it writes. wanted: the bytes of all that it writes, 0 for little. first:
    nothing was written there before; but for a full disk, it is a ValueError that the
    folder does not take it.
    """
    try:
        yield
    except Exception as error:
        number = number_of(error)
        if number in FULL:
            left = free(folder)
            reason = f"no room: {wanted or 'some'} bytes are wanted, {left} free"
            if number != errno.ENOSPC or left > max(wanted, 2**20):
                reason += f", but {FULL[number]}"
        elif number is None:
            raise
        elif first:
            raise ValueError(
                f"run.folder={folder}: it cannot be written to: {os.strerror(number)}; "
                "name another folder"
            ) from None
        else:
            reason = f"cannot be written to: {os.strerror(number)}"
            file = getattr(error, "filename2", None) or getattr(error, "filename", None)
            reason += f" ({file})" if file and str(file) != str(folder) else ""
        raise CannotGoOn(
            f"{folder}: {reason}; what was whole is whole: mend that, and start the same "
            "command again"
        ) from None


@contextlib.contextmanager
def whole(path: pathlib.Path, wanted: int = 0, own: str = "partial"):
    """Gives a file to write, which has the name `path` once what is inside is done.

    So nobody sees it half-written, and nothing of it stays where that fails. own: tells its
    file from those of other processes, where these write `path`, too. Raises as `room`.
    """
    partial = path.with_name(f".{path.name}.{own}")
    with room(path.parent, wanted):
        try:
            yield partial
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):  # of a folder that is gone
                partial.unlink()


def number_of(error: Exception) -> int | None:
    """Returns the errno of an error; None: it has none.

    Of a library's error, too: TensorStore tells the number, others a full disk's words.
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if told := re.search(r"os_error_code='(\d+)'", str(error)):
        return int(told[1])
    return next((n for n in FULL if os.strerror(n) in str(error)), None)


def read(file: pathlib.Path) -> bytes:
    """Returns what a file holds; raises CannotGoOn where it is there and cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise CannotGoOn(
            f"{file} cannot be read: {error.strerror}; mend that, or take it away, and start "
            "the same command again"
        ) from None


def unheard(stream) -> None:
    """Lets what is written to a stream that nobody reads any more go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def free(folder) -> int:
    """Returns the bytes that are free where a folder is, or is to be."""
    place = pathlib.Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free


def leave() -> None:
    """Ends the program with STUCK, also where Orbax would wait for what has failed.

    Threads of a save whose folder could not be made wait for minutes, and Python for them.
    """
    if any(type(x).__module__.startswith("orbax") for x in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        cut_in_time(STUCK)
    sys.exit(STUCK)


def cut_in_time(code: int) -> None:
    """Lets the program end by itself, for which Python waits for threads, or else by `cut`."""
    threading.Thread(target=cut, args=[code], daemon=True).start()


def cut(code: int, line: str = "") -> None:
    """Ends the program with a code in GRACE_S, where its threads keep it until then."""
    time.sleep(GRACE_S)
    told = f"{line}\n".encode() if line else b""
    # No flush, for which a pipe that nobody reads would keep it.
    end(code, line, functools.partial(os.write, 2, told))


def end(code: int, line: str, *more: Callable) -> None:
    """Ends the program at once, but for `at_end` and `more`, each of which gets 5 seconds."""
    acts = *more, *(functools.partial(act, code, line) for act in at_end)
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    # RuntimeError: Python is at its own end, and starts no more.
    with contextlib.suppress(RuntimeError):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)  # a pipe that nobody reads takes for ever
    os._exit(code)


class StopSignal:
    """True once SIGTERM or SIGINT has come; every process learns it at the same call."""

    def __init__(self, agreed: Callable[[bool], bool] = bool):
        """agreed: returns whether any process says so, such as `sharding.anywhere`."""
        self.seen, self.agreed = False, agreed
        # The handler of Python waits for the main thread, which may be in C for ever, as in
        # a collective operation with a process that hangs: what C notes is heeded beside it.
        signals, noted = os.pipe()
        os.set_blocking(noted, False)
        signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
        threading.Thread(target=self.heed, args=[signals], daemon=True).start()
        for number in LISTENED:
            signal.signal(number, self.note)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its terminal may go

    def note(self, number: int = signal.SIGTERM, _=None):
        """Remembers the signal; a second one ends what the main thread is at."""
        received.append(number)
        if self.seen:
            raise StoppedAtOnce(STOPPED)
        self.seen = True

    def heed(self, signals: int):
        """Says that a signal has come; a second one ends the program.

        What the main thread and others are at, such as a grader that asks a judge, gets
        GRACE_S. signals: a pipe's end, with the number of each.
        """
        came = []
        while len(came) < 2:
            came += [number for number in os.read(signals, 64) if number in LISTENED]
            if len(came) == 1:
                name = signal.Signals(came[0]).name
                told = f"\n{name}: stops when what it is at is whole; another one stops"
                with contextlib.suppress(OSError):  # of a terminal that is gone
                    os.write(2, f"{told} it at once\n".encode())
        cut(STOPPED, f"stopped: {TWICE}")

    def __call__(self) -> bool:
        """Returns whether to stop now."""
        return self.agreed(self.seen)
