"""The jail: a process that forks a confined child for every program it is told to run.

`sandbox.py` starts this file as a script, in a clean environment, and talks to it over a
Unix socket. It imports the standard library once, gives up all that it can, and waits: a
program then costs a fork and no start of an interpreter. It never sees a program, a test
or an answer: those travel in descriptors that it hands on, so that its memory, of which
every child is a copy, holds nothing worth stealing.

What confines, in the order of its coming:

    namespaces   where `unshare` works: no network, no other process, a root that holds the
                 standard library and nothing else. A container mostly refuses them
    capabilities none, and none to be had
    Landlock     the standard library, without site-packages, may be read; nothing may be
                 written, connected to, or signalled outside
    rlimits      memory, processor time, descriptors, no file, no core
    seccomp      the calls of ALLOWED and no others: no fork, no exec, no socket, no kill

The first three are the process's own and inherited, the others every child's, which also
enters a Landlock domain of its own: two children cannot look at each other.

This file imports nothing of the package.
"""

import array
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import math
import os
import pathlib
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time


def numbers(table: str) -> dict[str, tuple]:
    """Returns name: (its number on x86-64, on aarch64); None for a call that is not there.

    A test compares them with the kernel's headers.
    """
    rows = (row.split() for row in table.split(","))
    return {name: tuple(None if x == "-" else int(x) for x in n) for name, *n in rows}


ALLOWED = numbers("""
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68,
close 3 57, lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
readlinkat 267 78, getdents64 217 61, getcwd 79 17, mmap 9 222, munmap 11 215,
mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, sigaltstack 131 132, futex 202 98, set_robust_list 273 99,
rseq 334 293, set_tid_address 218 96, exit 60 93, exit_group 231 94, gettid 186 178,
getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
getpgrp 111 -, getpgid 121 155, getsid 124 156, clock_getres 229 114,
clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -,
times 100 153, getrusage 98 165, sched_yield 24 124, sched_getaffinity 204 123,
getcpu 309 168, getrandom 318 278, uname 63 160, sysinfo 99 179, poll 7 -,
ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, pipe 22 -, pipe2 293 59, dup 32 23, dup2 33 -,
dup3 292 24, eventfd2 290 19, getrlimit 97 163, setitimer 38 103, getitimer 36 102,
alarm 37 -, pause 34 -, restart_syscall 219 128, membarrier 324 283,
fadvise64 221 223, umask 95 166, statfs 137 43, fstatfs 138 44
""")
# Allowed with some arguments only: see `filtered`.
ASKED = numbers("""
openat 257 56, clone 56 220, clone3 435 435, tgkill 234 131,
prlimit64 302 261, fcntl 72 25, ioctl 16 29, clock_gettime 228 113
""")
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, audit arch
THREAD = 0x10100  # CLONE_THREAD | CLONE_VM: what is none is a process
THREADS = 0x7D0F00  # ... and all that a C library asks for beside them
TRUNCATE = 0x200  # O_TRUNC, which the first two versions of Landlock do not know
FCNTLS = 0, 1, 2, 3, 4, 1030  # duplicates and flags; never F_SETOWN, which signals
IOCTLS = 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451  # is it a terminal, how large
CLOCKS = 11  # beyond are those of other processes

# What programs use, and what needs a shared library: from then on none need be readable.
STDLIB = """
abc array ast asyncio base64 bisect builtins bz2 calendar cmath collections
collections.abc contextlib copy csv ctypes dataclasses datetime decimal difflib enum
fractions functools gzip hashlib heapq hmac html inspect io itertools json keyword locale
lzma math numbers operator os pprint queue random re secrets shlex sqlite3 ssl statistics
string struct sys tempfile textwrap threading time timeit traceback types typing
unicodedata uuid warnings weakref xml.etree.ElementTree zlib zoneinfo
"""

ERROR, MEMORY = 81, 82  # exit codes of a child whose program raised
TICK_MS = 20  # how often a running program's clock is read
FILES = 64  # descriptors of a child
READY_S = 20.0  # what confining a child may take on a busy machine
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long


def called(number: int, *args) -> int:
    """Returns what a system call returns; raises OSError where it fails."""
    got = LIBC.syscall(ctypes.c_long(number), *args)
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got


def prctl(option: int, *args: int) -> int:
    """Returns prctl's result, -1 where it fails."""
    words = [ctypes.c_ulong(x) for x in (*args, 0, 0, 0, 0)[:4]]
    return LIBC.prctl(ctypes.c_int(option), *words)


# ---- Namespaces ----------------------------------------------------------------------

NEW = 0x10000000 | 0x40000000 | 0x20000 | 0x8000000 | 0x4000000 | 0x20000000
NOBODY = 65534
RDONLY, NOSUID, NODEV, REMOUNT = 1, 2, 4, 32  # of mount
BIND, REC, PRIVATE = 4096, 16384, 1 << 18
KEPT = 2 | 4 | 8 | 1024 | 2048 | 1 << 21  # flags of a mount that binding may not drop
ROOT = "/proc"  # where the new root is built: nothing that is needed lies below it


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mounts; raises OSError where the kernel refuses."""
    texts = [os.fsencode(x) for x in (source, target, kind, data)]
    if LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]):
        raise OSError(ctypes.get_errno(), f"mount of {target}")


def bound(path: str) -> None:
    """Shows a file or folder below the new root, to be read only."""
    target = ROOT + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "w").close()
    flags = os.statvfs(path).f_flag & KEPT
    mount(path, target, "", BIND)
    mount("", target, "", flags | REMOUNT | BIND | RDONLY)


def unshared() -> bool:
    """Enters namespaces of its own; returns False where the kernel refuses to make them.

    What returns is the first process of a new process namespace. Raises OSError where they
    were made and cannot be furnished.
    """
    ids = os.getuid(), os.getgid()
    if platform.machine() not in MACHINES or LIBC.unshare(NEW):
        return False
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {ids[0]} 1"),
        ("gid_map", f"{NOBODY} {ids[1]} 1"),
    ):
        pathlib.Path(f"/proc/self/{name}").write_text(text)
    inner = os.fork()
    if inner:  # stays outside of the new process namespace, and waits
        os.waitpid(inner, 0)
        os._exit(0)
    prctl(1, signal.SIGKILL)
    mount("", "/", "", REC | PRIVATE)
    mount("tmpfs", ROOT, "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=1000,mode=755")
    for path in (*(str(x) for x in libraries()), *DEVICES):
        bound(path)
    for folder in libraries():  # where Landlock is missing, nothing else hides them
        for name in UNREAD:
            if (folder / name).is_dir():
                mount("tmpfs", f"{ROOT}{folder}/{name}", "tmpfs", NOSUID | RDONLY)
    os.chdir(ROOT)
    called({"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b".")  # pivot_root
    if LIBC.umount2(b".", 2):
        raise OSError(ctypes.get_errno(), "the old root stays")
    os.chdir("/")
    mount("", "/", "", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    return True


# ---- Capabilities --------------------------------------------------------------------


def drop_capabilities() -> None:
    """Gives up every capability, for good; raises PermissionError where one is left.

    Some steps need a capability: who has none is refused them, and needs none of them.
    """
    prctl(47, 4)  # ambient
    prctl(28, 0x2F)  # root is a number like another, for whatever is started
    for number in range(64):
        prctl(24, number)  # the bounding set
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    none = ctypes.create_string_buffer(24)
    LIBC.capset(header, none)
    held = ctypes.create_string_buffer(24)
    LIBC.capget(header, held)
    if any(held.raw):
        raise PermissionError("capabilities that cannot be dropped")


# ---- Landlock ------------------------------------------------------------------------

CREATE, ADD, RESTRICT = 444, 445, 446
READ_FILE, READ_DIR, WRITE_FILE, EXECUTE = 4, 8, 2, 1
DEVICES = "/dev/null", "/dev/urandom"
UNREAD = "site-packages", "dist-packages"


def landlock() -> int:
    """Returns the version of Landlock, 0 where the kernel has none."""
    got = LIBC.syscall(
        ctypes.c_long(CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1)
    )
    return max(got, 0)


def ruleset(version: int, files: int) -> int:
    """Returns a new ruleset's descriptor. files: the bits of access that it handles."""
    net, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attr = struct.pack("QQQ", files, net, scoped)[:size]
    return called(CREATE, attr, ctypes.c_size_t(size), ctypes.c_uint(0))


def every_access(version: int) -> int:
    """Returns the bits of all access to files that a version of Landlock handles."""
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    return (1 << bits) - 1


def libraries() -> list[pathlib.Path]:
    """Returns the folders of the standard library."""
    found = {pathlib.Path(os.__file__).parent}
    spec = importlib.util.find_spec("_ctypes")
    if spec and (spec.origin or "").startswith("/"):
        found.add(pathlib.Path(spec.origin).parent)
    found.add(pathlib.Path("/usr/share/zoneinfo"))
    return sorted(x for x in found if x.is_dir())


def allow(rules: int, path, access: int) -> None:
    """Adds to a ruleset what may be done at and below a path; a missing one is none."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    attr = struct.pack("=Qi", access, place)
    called(ADD, ctypes.c_int(rules), ctypes.c_int(1), attr, ctypes.c_uint(0))
    os.close(place)


def restrict(rules: int) -> None:
    """Enters a domain for good, and closes the ruleset."""
    called(RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def enter_landlock(version: int) -> None:
    """Leaves the standard library to be read, but for what is installed beside it."""
    rules = ruleset(version, every_access(version))
    for folder in libraries():
        allow(rules, folder, READ_DIR)
        for entry in folder.iterdir():
            if entry.name not in UNREAD:
                both = READ_FILE | (READ_DIR if entry.is_dir() else 0)
                allow(rules, entry, both)
    for device in DEVICES:
        allow(rules, device, READ_FILE | WRITE_FILE)
    restrict(rules)


# ---- seccomp -------------------------------------------------------------------------

LOAD, EQUAL, ABOVE, AT_LEAST = 0x20, 0x15, 0x25, 0x35
ANY_BIT, AND, RETURN = 0x45, 0x54, 0x06
PASS, KILL, REFUSE, MISSING = 0x7FFF0000, 0x80000000, 0x50001, 0x50000 | 38


def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Returns an instruction; yes, no: how many to skip where a test holds, or not."""
    return struct.pack("HBBI", code, yes, no, value)


def word(argument: int, high: bool = False) -> bytes:
    """Returns the instruction that loads half of a call's argument."""
    return line(LOAD, 16 + 8 * argument + 4 * high)


def one_of(argument: int, values) -> list[bytes]:
    """Returns a block that lets a call pass whose argument is one of the values."""
    tests = [line(EQUAL, x, len(values) - i) for i, x in enumerate(values)]
    return [word(argument), *tests, line(RETURN, REFUSE), line(RETURN, PASS)]


def filtered(pid: int, version: int) -> dict[str, list[bytes]]:
    """Returns for each call of ASKED the block that decides by its arguments.

    pid: the process's own; version: of Landlock.
    """
    decide = [line(RETURN, REFUSE), line(RETURN, PASS)]
    opened = [word(2), line(ANY_BIT, TRUNCATE, 0, 1), *decide]
    foreign = 0xFFFFFFFF ^ THREADS
    return {
        "openat": [line(RETURN, PASS)] if version >= 3 else opened,
        "clone": [
            word(0),
            line(ANY_BIT, foreign, 2, 0),
            line(AND, THREAD),
            line(EQUAL, THREAD, 1, 0),
            *decide,
        ],
        "clone3": [line(RETURN, MISSING)],  # its arguments cannot be seen: use clone
        "tgkill": one_of(0, [pid]),
        "prlimit64": [
            word(2),
            line(EQUAL, 0, 0, 2),
            word(2, high=True),
            line(EQUAL, 0, 1, 0),
            *decide,
        ],
        "fcntl": one_of(1, FCNTLS),
        "ioctl": one_of(1, IOCTLS),
        "clock_gettime": [word(0), line(ABOVE, CLOCKS, 0, 1), *decide],
    }


def enter_seccomp(version: int) -> None:
    """Leaves the calls of ALLOWED and ASKED, for good; raises OSError where it cannot."""
    column, arch = MACHINES[platform.machine()]
    rows = [
        line(LOAD, 4),
        line(EQUAL, arch, 1, 0),
        line(RETURN, KILL),
        line(LOAD, 0),
        line(AT_LEAST, 0x40000000, 0, 1),  # x86's third set of calls
        line(RETURN, KILL),
    ]
    for name, block in filtered(os.getpid(), version).items():
        rows += [line(EQUAL, ASKED[name][column], 0, len(block)), *block]
    for numbers in ALLOWED.values():
        if numbers[column] is not None:
            rows += [line(EQUAL, numbers[column], 0, 1), line(RETURN, PASS)]
    rows.append(line(RETURN, REFUSE))
    code = ctypes.create_string_buffer(b"".join(rows))
    program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code))
    held = ctypes.create_string_buffer(program)
    if prctl(22, 2, ctypes.addressof(held)):
        raise OSError(ctypes.get_errno(), "seccomp")


def filters(version: int) -> bool:
    """Returns whether a process can filter its calls: some containers refuse that."""
    if platform.machine() not in MACHINES:
        return False
    child = os.fork()
    if not child:
        try:
            prctl(38, 1)
            enter_seccomp(version)
            os._exit(0)
        finally:
            os._exit(ERROR)
    return os.waitpid(child, 0)[1] == 0


# ---- A child -------------------------------------------------------------------------


class Confined:
    """What all children are confined by, as far as this machine has it."""

    def __init__(self, namespaces: bool, version: int, seccomp: bool):
        """version: of Landlock, 0 for none."""
        self.namespaces, self.version, self.seccomp = namespaces, version, seccomp
        # A program is given memory beyond the interpreter's own.
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        self.own_bytes = pages * resource.getpagesize()

    def limit(self, seconds: float, memory_mb: int) -> None:
        """Sets the limits of a child."""
        memory = self.own_bytes + memory_mb * 2**20
        # The clock that `Life` reads comes first: this is for when nobody reads it.
        limits = [
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, FILES),
            (resource.RLIMIT_STACK, 64 * 2**20),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ]
        if self.namespaces:  # elsewhere it counts all threads of the user
            limits.append((resource.RLIMIT_NPROC, 64))
        for kind, most in limits:
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))

    def enter(self, parent: int, seconds: float, memory_mb: int) -> None:
        """Confines this process. parent: who forked it; it dies with that one."""
        os.setsid()
        prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        self.limit(seconds, memory_mb)
        if self.version:
            restrict(ruleset(self.version, EXECUTE))
        if self.seccomp:
            enter_seccomp(self.version)


class Unready(Exception):
    """A child could not be confined: the machine's fault, never the program's."""


class Life:
    """A confined child, from its first instruction of foreign code to its end."""

    def __init__(self, confined: Confined, work, files, seconds: float, memory_mb: int):
        """Forks. work: what the child does, given nothing; it never returns.

        files: descriptors that are 0, 1, 2 ... there; seconds: of a processor. Raises
        Unready.
        """
        ready, told = os.pipe()
        parent = os.getpid()
        self.seconds = seconds
        self.pid = os.fork()
        if not self.pid:
            try:
                files = inherited([*files, told])
                confined.enter(parent, seconds, memory_mb)
                os.write(files[-1], b"R")
                os.close(files[-1])
                work()
            finally:
                os._exit(ERROR)
        os.close(told)
        heard = select.select([ready], [], [], READY_S)[0] and os.read(ready, 1)
        os.close(ready)
        if heard != b"R":
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise Unready
        self.handle = os.pidfd_open(self.pid)
        # Which clock is a process's: see clock_getcpuclockid.
        self.clock = (~self.pid << 3) | 2
        self.began, self.before = time.monotonic(), time.clock_gettime(self.clock)

    def late(self) -> bool:
        """Returns whether it has used up its time; waiting counts a third, at first."""
        used = time.clock_gettime(self.clock) - self.before
        waited = time.monotonic() - self.began
        return used > self.seconds or waited > 3 * self.seconds + 1

    def end(self) -> int:
        """Kills it, unless it has ended, and returns its wait status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, code = os.waitpid(self.pid, 0)
        os.close(self.handle)
        return code


def inherited(files: list[int]) -> range:
    """Makes the files this process's descriptors from 0 on, and closes all others."""
    import fcntl

    high = [fcntl.fcntl(x, fcntl.F_DUPFD, 128) for x in files]
    for number, file in enumerate(high):
        os.dup2(file, number)
    os.closerange(len(high), 2**20)
    return range(len(high))


# ---- The jobs ------------------------------------------------------------------------


class Jail:
    """Serves jobs, one at a time, over a socket to the process that gave it one."""

    def __init__(self, control: socket.socket, confined: Confined, inside):
        """inside: the module trial.py, what children do."""
        self.control, self.confined, self.inside = control, confined, inside
        self.null = os.open("/dev/null", os.O_RDWR)

    def serve(self) -> None:
        """Does jobs until the other side is gone."""
        while True:
            message, files = self.heard()
            if "job" not in message:  # a kill that came too late
                continue
            try:
                if message["job"] == "run":
                    reply = self.run(files, message["seconds"], message["memory_mb"])
                else:
                    reply = self.trial(files, message)
            except Unready:
                reply = {"status": "sandbox"}
            finally:
                for file in files:
                    os.close(file)
            self.control.send(json.dumps(reply).encode())

    def heard(self) -> tuple[dict, list[int]]:
        """Returns the next message and the descriptors with it; ends with the parent."""
        fds = array.array("i")
        room = socket.CMSG_SPACE(4 * fds.itemsize)
        text, extra, _, _ = self.control.recvmsg(2**16, room)
        if not text:
            os._exit(0)  # children die with this process
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return json.loads(text), list(fds)

    def run(self, files, seconds: float, memory_mb: int) -> dict:
        """Runs a program. files: the program, its input, and where its output goes."""
        program, given, out = files
        life = Life(
            self.confined,
            self.inside.run_program,
            [given, out, self.null, program],
            seconds,
            memory_mb,
        )
        poller = select.poll()
        poller.register(life.handle, select.POLLIN)
        poller.register(self.control.fileno(), select.POLLIN)
        status = ""
        while not status:
            events = dict(poller.poll(TICK_MS))
            if life.handle in events:
                break
            if self.control.fileno() in events:
                self.heard()
                status = "output"
            elif life.late():
                status = "timeout"
        took = time.monotonic() - life.began
        code = life.end()
        return {"status": status or status_of(code), "seconds": took}

    def trial(self, files, message: dict) -> dict:
        """Lets a judge ask a candidate. files: the program and the tests.

        The judge, in a jail of its own, says on a pipe of its own when it wants a new
        candidate ("new") and what it found ("end 101": each test passed or not).
        """
        program, tests = files
        seconds, memory_mb = message["seconds"], message["memory_mb"]
        asked, ask = os.pipe()
        replies, reply = os.pipe()
        words, say = os.pipe()
        pipes = [asked, ask, replies, reply, words, say]
        nulls = [self.null] * 3
        lives: list[Life] = []

        def candidate() -> Life:
            work = functools.partial(self.inside.candidate, len(lives))
            files = [*nulls, program, asked, reply]
            return Life(self.confined, work, files, seconds, memory_mb)

        judge = Life(
            self.confined,
            lambda: self.inside.judge(seconds, message["all_cases"]),
            [*nulls, tests, ask, replies, say],
            message["judge_seconds"],
            memory_mb,
        )
        try:
            return {"status": "ok"} | self.heeded(judge, words, reply, lives, candidate)
        finally:
            for life in (judge, *lives[-1:]):
                if life:
                    life.end()
            for pipe in pipes:
                os.close(pipe)

    def heeded(self, judge: Life, words: int, reply: int, lives, candidate) -> dict:
        """Returns the judge's verdict, {} where it came to none. lives: is filled.

        The last of them is None where it has ended.
        """
        text = b""
        while not judge.late():
            handles = [judge.handle, words, self.control.fileno()]
            alive = lives[-1] if lives else None
            watched = [*handles, *([alive.handle] if alive else [])]
            ready = select.select(watched, [], [], TICK_MS / 1000)[0]
            if self.control.fileno() in ready:
                self.heard()
            if words in ready:
                text += os.read(words, 2**16)
                *lines, text = text.split(b"\n")
                for row in lines:
                    if row.startswith(b"end "):
                        return {"verdict": row[4:].decode()}
                    if alive:
                        alive.end()
                        lives[-1] = None
                    lives.append(candidate())
                    alive = lives[-1]
            elif judge.handle in ready:
                break
            over = alive and (alive.handle in ready or alive.late())
            # A full pipe is emptied by the judge; then this finds room.
            if over and select.select([], [reply], [], 0)[1]:
                alive.end()
                lives[-1] = None
                dead = {"dead": len(lives) - 1}
                os.write(reply, b"\n" + json.dumps(dead).encode() + b"\n")
        return {}


def status_of(code: int) -> str:
    """Returns how a program ended, by its wait status."""
    if os.WIFSIGNALED(code):
        return "timeout" if os.WTERMSIG(code) == signal.SIGXCPU else "error"
    kinds = {0: "ok", ERROR: "error", MEMORY: "memory"}
    return kinds.get(os.WEXITSTATUS(code), "exit")


# ---- Start ---------------------------------------------------------------------------


def load(file: str):
    """Returns a file beside this one as a module."""
    place = pathlib.Path(__file__).with_name(file)
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module
    spec.loader.exec_module(module)
    return module


def confined(without: list[str], unsafe: bool) -> Confined:
    """Gives up what this process can give up.

    without: what is to be taken as missing. unsafe: go on where too little is left. Raises
    PermissionError where that is so.
    """
    version = 0 if "landlock" in without else landlock()
    seccomp = "seccomp" not in without and filters(version)
    with contextlib.suppress(OSError):
        os.setgroups([])
    first = Confined(False, version, seccomp)  # /proc is there still
    first.namespaces = "namespaces" not in without and unshared()
    lacks = [] if version or first.namespaces else ["no Landlock and no namespaces"]
    lacks += [] if seccomp else ["no seccomp"]
    if lacks and not unsafe:
        raise PermissionError(" and ".join(lacks))
    drop_capabilities()
    prctl(4, 0)  # not dumpable: nobody looks into /proc/PID
    if prctl(38, 1):
        raise PermissionError("no_new_privs")
    if version:
        enter_landlock(version)
    return first


def main(settings: dict) -> None:
    """Confines this process, says by what, and serves."""
    control = socket.socket(fileno=settings["control"])
    for name in STDLIB.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # threads that end look for it
    inside = load("trial.py")
    try:
        kept = confined(settings["without"], settings["unsafe"])
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    parts = [f"landlock {kept.version}" if kept.version else "no landlock"]
    parts += ["seccomp" if kept.seccomp else "no seccomp"]
    words = " + ".join(parts) + f", namespaces {'yes' if kept.namespaces else 'no'}"
    jail = Jail(control, kept, inside)
    sys.argv, settings = [""], None
    control.send(json.dumps({"ready": words}).encode())
    gc.collect()
    gc.freeze()
    jail.serve()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
