"""A folder that one command writes to: its lock, its log, its attempts, its answers.

    lock       host, pid and start of the command that writes, touched while it lives
    run.json   what each attempt was started with, on what it ran, and how it ended
    run.log    what was said on the terminal, but for the progress bar

One process of a run writes it.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax

from dllm_jax import processes
from dllm_jax.exits import (
    KINDS,
    STUCK,
    CannotGoOn,
    at_end,
    code_of,
    exhausted,
    read,
    room,
    unheard,
    warn,
    whole,
)

LONGEST = 4096  # characters without an end that are logged as a line of their own
BEAT_S, STALE_S = 10.0, 60.0  # a lock is touched that often; it is dead after so long
PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint", "optax", "transformers")
RUNNING = "running"
EVALUATED = ("eval.job.json", "sweep.json", "lm_eval.json")  # of an evaluation's folder
OVERWRITE = (  # of --help
    "answer all anew, until all is; default: what is there stays and is gone on with"
)
OVERWRITING = {"--overwrite": "has begun"}  # in a job's note, until all is answered
# Of images answers have the marks, wherever they lie by now; of pages older notes tell.
UNCOMPARED = {"data.image_root", "sampler.page", "sampler.prefill", *OVERWRITING}
OTHER = "name another file (--out) or folder (--config.run.folder), or add --overwrite"


def now() -> str:
    """Returns the time in UTC, as ISO 8601 writes it, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file, which is never seen half-written."""
    with whole(path, len(text)) as partial:
        # A name that is no UTF-8 may stand in the text: its odd bytes are replaced.
        partial.write_text(text, encoding="utf-8", errors="replace")


# ---- One at a time -----------------------------------------------------------------------


class Lock:
    """A file that says who writes beside it; touched while its process lives."""

    def __init__(self, path: pathlib.Path, of):
        """Makes the file. Raises ValueError where a command that lives has it.

        of: what is locked, for messages. A lock without a sign of life is taken over, which
        is said.
        """
        # Absolute: a function that a user gave may change the working directory.
        self.path, self.of, self.ended = path.absolute(), of, threading.Event()
        self.moved = False  # whether it was said that its folder is gone
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "start": now()}
        self.text = json.dumps(owner | {"pids": numbering()})
        while not self.made():
            self.clear()
        self.beating = threading.Thread(target=self.beat, daemon=True)
        self.beating.start()

    def made(self) -> bool:
        """Returns whether the file is made; it is not where there is one."""
        try:
            with self.path.open("x") as file:
                file.write(self.text)
        except FileExistsError:
            return False
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return True

    def clear(self) -> None:
        """Takes another's lock away; raises ValueError where that one lives."""
        grave = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            text, touched = content(self.path), self.path.stat().st_mtime
            grave.touch()  # its time is by the same clock as the lock's
            age = grave.stat().st_mtime - touched
            reason = self.gone(text, age)
            os.replace(self.path, grave)
            if content(grave) != text:  # another was quicker, and this is its lock
                os.replace(grave, self.path)
                return
            warn(f"{self.of}: taken over from {told(text)}: {reason}")
        except FileNotFoundError:
            pass  # it has ended meanwhile
        finally:
            grave.unlink(missing_ok=True)

    def gone(self, text: str, age: float) -> str:
        """Returns why the owner of a lock is known to have ended.

        text: of the lock. age: seconds since it was touched. Raises ValueError where it
        lives.
        """
        if age <= STALE_S:
            lives = seen_alive(text)
            if lives is None:
                age = self.watched(text, age)
            elif not lives:
                return "that process is gone"
        if age > STALE_S:
            return f"no sign of life for {age:.0f} s"
        raise ValueError(
            f"{self.of} is in use by {told(text)}, {max(age, 0):.0f} s ago still alive: wait "
            "for its end, or name another"
        )

    def watched(self, text: str, age: float) -> float:
        """Returns the age of a lock once it is stale, or the owner has touched it.

        A process of another host or container cannot be asked for. Launchers begin a run
        anew, and elsewhere, where its host has failed: refusing would end what has only to
        wait.
        """
        warn(f"{self.of}: waiting {STALE_S:.0f} s for a sign of life of {told(text)}")
        age = max(age, 0.0)  # the clock was set back meanwhile
        touched = self.path.stat().st_mtime
        while age <= STALE_S:
            time.sleep(BEAT_S / 10)
            age += BEAT_S / 10
            content(self.path)  # of what is opened, NFS asks its server for the time
            if self.path.stat().st_mtime != touched:
                return 0.0
        return age

    def beat(self) -> None:
        """Touches the file until the end; ends the process where another has the lock.

        Two that write to one folder would leave a mixture, so nothing is saved.
        """
        last = time.monotonic()
        while not self.ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self.mine(late=time.monotonic() - last > STALE_S):
                    os.utime(self.path)
                    last = time.monotonic()
                elif not self.ended.is_set():
                    self.yield_to_it()

    def yield_to_it(self) -> None:
        """Ends the process, and with it all others of its run, as it cannot go on."""
        reason = f"{self.of}: another command has taken it over, or removed it"
        if processes.group is not None:
            processes.fail(CannotGoOn(reason))
            time.sleep(2 * BEAT_S)  # they end meanwhile, and this one with them
        print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(STUCK)

    def mine(self, *, late: bool) -> bool:
        """Returns whether the file is this lock's; it is made again where it was removed.

        late: it was not touched for so long that another may have come and have ended.
        """
        if self.path.exists():
            return content(self.path) == self.text
        if not (self.path.parent.is_dir() or self.moved):
            self.moved = True
            warn(
                f"{self.of} was moved or removed while it is in use: put it back, or the "
                "command ends at what it writes next"
            )
        if late or not self.made():
            return False
        warn(f"{self.path} was removed: it is there again, as the folder is in use")
        return True

    def close(self) -> None:
        """Takes the file away."""
        self.ended.set()
        self.beating.join(BEAT_S)  # it must not make it again
        with contextlib.suppress(OSError):
            if content(self.path) == self.text:
                self.path.unlink()


def content(lock: pathlib.Path) -> str:
    """Returns what a lock says, be it damaged."""
    return lock.read_text(errors="replace")


def numbering() -> str:
    """Returns what processes share whose numbers mean the same: a boot, and a namespace."""
    with contextlib.suppress(OSError):  # there is no /proc
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def seen_alive(text: str) -> bool | None:
    """Returns whether the process that a lock names lives; None: it cannot be seen here."""
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged lock
        owner = json.loads(text)
        here = socket.gethostname(), numbering()
        if (owner["host"], owner["pids"]) == here:
            return alive(owner["pid"])
    return None


def alive(pid: int) -> bool:
    """Returns whether another process has the number; see `numbering`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()  # a container's processes have the same numbers again


def told(text: str) -> str:
    """Returns whom a lock names."""
    try:
        owner = json.loads(text)
        return f"pid {owner['pid']} on {owner['host']}, started {owner['start']}"
    except (ValueError, TypeError, KeyError):
        return "a command that does not say which"


# ---- What is said ------------------------------------------------------------------------


class Tee:
    """A stream of the terminal whose whole lines go to a log, too.

    Where the terminal is gone, or a pipe has no reader, the log alone goes on.
    """

    def __init__(self, stream, log):
        """log: called with each line that is no progress bar's."""
        self.stream, self.log, self.line = stream, log, ""

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes to the terminal; what a carriage return has overwritten is not logged."""
        *lines, self.line = (self.line + text).split("\n")
        self.line = self.line.rpartition("\r")[2]
        if len(self.line) > LONGEST:  # else each further character would copy it
            lines, self.line = [*lines, self.line], ""
        for line in lines:
            line = line.rpartition("\r")[2]
            if line.strip() and not re.match(r"\s*\d+%\|", line):
                self.log(line)
        try:
            return self.stream.write(text)
        except OSError:
            unheard(self.stream)
            return len(text)

    def flush(self) -> None:
        """Flushes the terminal's stream."""
        try:
            self.stream.flush()
        except OSError:
            unheard(self.stream)


# ---- A run's folder ----------------------------------------------------------------------


class Folder:
    """A run's folder, from before the first minute is spent to the last word.

    A context: on its way out it says in run.json how the attempt ended, and leaves nothing
    behind of one that was refused before `begin`.
    """

    def __init__(self, path, *, writes: bool = True, agreed=bool):
        """Makes the folder and its lock.

        writes: whether this process is the one that does. agreed: returns whether any
        process says so, such as `sharding.anywhere`. Raises ValueError in all of them where
        the folder cannot be written to, or another command is in it.
        """
        self.path, self.writes = pathlib.Path(path), writes
        self.lines, self.log, self.attempts, self.kept = [], None, [], {}
        self.streams, self.start, complaint = (sys.stdout, sys.stderr), now(), None
        self.ending, self.ended = threading.Lock(), False
        whole = self.path.absolute()
        places = (whole / "checkpoints", whole, *whole.parents) if writes else ()
        # By the writer alone: NFS lets others find for a while that what it made is missing.
        self.made = [place for place in places if not os.path.exists(place)]
        try:
            if writes:
                self.take()
                at_end.append(self.cut)
        except (ValueError, CannotGoOn) as error:
            self.leave()
            complaint = error
        if agreed(complaint is not None):
            known = {type(complaint).__name__: str(complaint)} if complaint else {}
            ((kind, text),) = json.loads(processes.of_first(json.dumps(known))).items()
            raise (CannotGoOn if kind == "CannotGoOn" else ValueError)(text)

    def take(self) -> None:
        """Makes the folder and its lock, and listens to what is said."""
        with room(self.path, first=True):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.path / "lock", of=self.path)
        sys.stdout, sys.stderr = (Tee(stream, self.note) for stream in self.streams)

    def __enter__(self):
        return self

    def note(self, line: str) -> None:
        """Logs a line; before `begin` it is kept, as the folder may have to go again."""
        line = f"{now()} {line}\n"
        if self.log is None:
            self.lines.append(line)
            return
        # A full disk is for the run itself to tell.
        with contextlib.suppress(OSError), opened(self.log) as log:
            log.write(line)

    def defaults(self) -> dict | None:
        """Returns the defaults of the keys when the run began; None where none are kept."""
        return self.read().get("defaults")

    @property
    def begun(self) -> str:
        """When the first attempt started; `begin` knows it."""
        return str(self.attempts[0].get("start"))

    def read(self) -> dict:
        """Returns run.json; {} where there is none.

        Raises exits.CannotGoOn where it cannot be read.
        """
        file = self.path / "run.json"
        if not file.exists():
            return {}
        run = object_of(read(file)) or {}
        attempts, defaults = run.get("attempts"), run.get("defaults")
        lists = isinstance(attempts, list) and isinstance(defaults, dict)
        if lists and all(isinstance(attempt, dict) for attempt in attempts):
            return run
        warn(f"{file} is damaged: it begins anew")
        return {}

    def refuse_trained(self) -> None:
        """Raises ValueError for a training run's, whose config.json `begin` would replace."""
        if (self.path / "metrics.jsonl").exists():
            raise ValueError(
                f"run.folder={self.path} is a training run's: name another folder for its "
                "evaluation"
            )

    def refuse_evaluated(self) -> None:
        """Raises ValueError for an evaluation's, which could not go on behind a run."""
        there = next((x for x in EVALUATED if (self.path / x).exists()), None)
        if there and not (self.path / "metrics.jsonl").exists():
            raise ValueError(
                f"run.folder={self.path} is an evaluation's, by its {there}: name another "
                "folder for a run"
            )

    def begin(self, config: dict, defaults: dict, mesh) -> None:
        """Writes config.json and the attempt, and lets the log begin.

        config, defaults: the keys of this attempt, and their defaults when the run began.
        """
        if not self.writes:
            return
        self.attempts = self.read().get("attempts", [])
        for attempt in self.attempts:
            if attempt.get("ended") == RUNNING:
                attempt["ended"] = "killed, or its machine was lost"
        self.attempts.append(
            {
                "command": [sys.executable, *sys.orig_argv[1:]],
                "start": self.start,
                "end": None,
                "ended": RUNNING,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "processes": jax.process_count(),
                "device": jax.devices()[0].device_kind,
                "devices": jax.device_count(),
                "mesh": dict(mesh.shape),
                "versions": versions(),
                "commit": commit(),
                "config": config,
            }
        )
        self.kept = defaults
        write(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        self.save()
        file = (self.path / "run.log").absolute()
        with room(self.path), opened(file) as log:
            log.write("".join(self.lines))
        self.log = file

    def save(self) -> None:
        """Writes run.json."""
        run = {"defaults": self.kept, "attempts": self.attempts}
        write(self.path / "run.json", json.dumps(run, indent=1) + "\n")

    def __exit__(self, kind, error, trace):
        if not self.writes:
            return
        sys.stdout, sys.stderr = self.streams
        many = processes.group is not None and error is not None
        if many and processes.broken(error):  # of the cause `cut` is told
            self.note("".join(traceback.format_exception(error)))
            return
        ending, told = ended(error), []
        if error is not None:
            told.append(ending)
        if ending.startswith("defect"):
            told.append("".join(traceback.format_exception(error)))
        self.end(ending, told)

    def cut(self, code: int, line: str) -> None:
        """Ends the attempt as `exits.end` ends the program, whatever the main thread is at."""
        reason = line.removeprefix("error: ").removeprefix("stopped: ")
        self.end(f"{KINDS.get(code, 'defect')}: {reason}", [line])

    def end(self, ending: str, told: list[str]) -> None:
        """Says in run.json how the attempt ended, once, and gives the folder free.

        told: lines for the log.
        """
        with self.ending:
            if self.ended:
                return
            self.ended = True
            if self.log is not None:
                for line in told:
                    self.note(line)
                self.attempts[-1] |= {"end": now(), "ended": ending}
                with contextlib.suppress(CannotGoOn):
                    self.save()
            at_end.remove(self.cut)
            self.lock.close()
            self.leave()

    def leave(self) -> None:
        """Removes the folders that were made for it, as far as they are empty."""
        for folder in self.made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def opened(log: pathlib.Path):
    """Returns a log to write to; each time anew, as another may stand there by now."""
    return log.open("a", encoding="utf-8", errors="backslashreplace")


# ---- Answers as they end -----------------------------------------------------------------


def note_of(path) -> pathlib.Path:
    """Returns the file that says what a file of answers depends on.

    NAME.job.json of NAME.jsonl; of another name all is kept, for a point may stand in it,
    unless an earlier version left a file without its last part, and none is there with it.
    """
    path = pathlib.Path(path)
    note = path.with_name(f"{path.name.removesuffix('.jsonl')}.job.json")
    older = path.with_suffix(".job.json")
    return older if older.is_file() and path.is_file() and not note.is_file() else note


class Answers:
    """A file of JSON lines that grows as answers end, and is gone on with.

    What they depend on, the job, stands beside it in NAME.job.json.
    """

    def __init__(self, path, job: dict, *, overwrite: bool):
        """Reads what is there, and changes nothing.

        job: flat, JSON-able. overwrite: what is there is not to stay, but for what an
        attempt that overwrote left behind before it was `done`: a command that is given
        again and again must come to an end. Raises ValueError for a file of another job, or
        of something else, and exits.CannotGoOn where it cannot be read.
        """
        self.path, self.job = pathlib.Path(path), json.loads(json.dumps(job))
        self.note = note_of(path)
        self.lines, self.ends, self.file = [], [0], None  # ends: of lines, in bytes
        self.overwrites = overwrite
        self.note_begun = self.job | OVERWRITING if overwrite else self.job
        known = object_of(read(self.note)) if self.note.is_file() else None
        if not self.path.is_file() or (overwrite and known != self.note_begun):
            return
        if data := read(self.path):
            self.compare(known)
        for line in data.split(b"\n")[:-1]:
            if (row := object_of(line)) is None:
                break
            self.lines.append(row)
            self.ends.append(self.ends[-1] + len(line) + 1)

    def compare(self, known: dict | None) -> None:
        """Raises ValueError where the file's job is another, naming a difference."""
        if known is None:
            raise ValueError(
                f"{self.path} is there, and no {self.note.name} that says what its answers "
                f"depend on; {OTHER}"
            )
        keys = sorted((known.keys() | self.job.keys()) - UNCOMPARED)
        # Older files do not tell them.
        keys = [x for x in keys if x in known or not x.startswith("the checkpoint of")]
        differ = [key for key in keys if known.get(key) != self.job.get(key)]
        if differ in ([], ["model.path"]):  # a copy of the checkpoint, file by file
            return
        before, after = known.get(differ[0]), self.job.get(differ[0])
        raise ValueError(
            f"{self.path} holds the answers of another job: {differ[0]} was {before!r}, is "
            f"now {after!r}; {OTHER}"
        )

    def check(self, wrong: Callable[[int, dict], str]) -> None:
        """Raises ValueError for a line that is not this job's.

        What overwrites drops that line and what follows; one that nobody judged, too. wrong:
        from a line's number and the line to what is wrong with it, or "".
        """
        for number, line in enumerate(self.lines, 1):
            reason = wrong(number, line)
            if reason and not self.overwrites:
                raise ValueError(f"{self.path}, line {number}: {reason}; {OTHER}")
            if reason or (self.overwrites and not line.get("graded", True)):
                self.lines = self.lines[: number - 1]
                return

    def begin(self, total: int) -> None:
        """Opens the file behind the lines that stay, and says how many of `total` do."""
        if self.lines:
            print(
                f"{self.path}: {len(self.lines)} of {total} answers are there, and stay",
                file=sys.stderr,
            )
        end = self.ends[len(self.lines)]
        with room(self.path.parent):
            if self.path.is_file() and self.path.stat().st_size > end:
                if end and not self.overwrites:
                    warn(
                        f"{self.path}: what follows line {len(self.lines)} is damaged: it "
                        "is answered again"
                    )
                os.truncate(self.path, end)
            write(self.note, json.dumps(self.note_begun, indent=1) + "\n")
            # Wherever a function of the user's goes meanwhile.
            self.file = self.path.absolute().open("a", encoding="utf-8")

    def done(self) -> None:
        """Closes the file, which has all answers."""
        self.file.close()
        if self.overwrites:
            write(self.note, json.dumps(self.job, indent=1) + "\n")

    def add(self, line: dict) -> None:
        """Appends an answer, which is in the file when this returns."""
        text = json.dumps(line, ensure_ascii=False) + "\n"
        with room(self.path.parent, len(text)):
            try:
                self.file.write(text)
                self.file.flush()
            except OSError:  # what closes it would try again, and fail in place of this
                unheard(self.file)
                raise
            name, number = self.file.name, self.file.fileno()
            still = os.path.exists(name) and os.path.samefile(name, number)
        if not still:
            raise CannotGoOn(
                f"{self.path}: it was removed, or another file put there, while answers were "
                "written to it: those are lost; start the same command again"
            )


def object_of(line: bytes) -> dict | None:
    """Returns the JSON object that a line holds, or None."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or much too deep
        return None
    return row if isinstance(row, dict) else None


# ---- What an attempt is ------------------------------------------------------------------


def ended(error: BaseException | None) -> str:
    """Returns how an attempt ended, in the words of exits.py."""
    if error is None:
        return "done"
    if exhausted(error):
        return f"cannot go on: no memory left: {str(error).strip()[:300]}"
    kind = KINDS.get(code_of(error), "defect")
    return f"{kind}: {str(error) or type(error).__name__}"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of what computes, by name."""
    found = {"python": platform.python_version()}
    for name in ("dllm-jax", *PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """Returns the git commit of the package's checkout, "+changes" behind it if there are.

    None where it is no checkout, or git is not there.
    """
    root = pathlib.Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    ask = ["git", "-C", str(root), "describe", "--always", "--abbrev=40"]
    try:
        said = subprocess.run(
            [*ask, "--dirty=+changes", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()
