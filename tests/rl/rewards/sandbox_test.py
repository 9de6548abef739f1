"""The jail: what programs say and take, and what hostile ones do not get."""

import ctypes
import json
import os
import pathlib
import platform
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest

from dllm_jax.rl.rewards import jail, sandbox
from tests.rl.rewards import attacks, escapes

HERE = pathlib.Path(__file__).parent
SYSTEM = "/usr/bin/python3"
# How an attack ends that is not simply refused.
ENDS = {
    "foreign calls": "error",  # killed at the call
    "x32 calls": "error",
    "crash": "error",
    "other end": "error",
    "memory": "memory",
    "output": "output",
    "spin": "timeout",
    "sleep": "timeout",
    "ignored signals": "timeout",
    "large power": "timeout",
}


@pytest.fixture(scope="module", autouse=True)
def close_jails():
    yield
    sandbox.close()


def run(program, stdin=b"", seconds=2.0, memory_mb=256):
    return sandbox.run(program, stdin, seconds=seconds, memory_mb=memory_mb)


# ---- What honest programs need -------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "stdin", "stdout"),
    [
        ("print(input()[::-1])", b"abc\n", b"cba\n"),
        (
            "import sys\nfor x in sys.stdin: print(x.strip() + '!')",
            b"a\nb",
            b"a!\nb!\n",
        ),
        (
            "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())",
            *[b"\xff\0"] * 2,
        ),
        ("import os; print(os.read(0, 9))", b"q", b"b'q'\n"),
        ("print(open(0).read())", b"x", b"x\n"),
        ("if __name__ == '__main__': print(1)", b"", b"1\n"),
        ("import atexit; atexit.register(print, 'bye')", b"", b"bye\n"),
        ("print('é', '\\ud800'.encode('utf-8', 'replace'))", b"", "é b'?'\n".encode()),
        ("print(1); exit()", b"", b"1\n"),
        ("print({'b', 'a', 'c'} == {'c', 'b', 'a'})", b"", b"True\n"),
        (
            (
                "import sys, threading\nsys.setrecursionlimit(10**6)\n"
                "threading.stack_size(2**27)\ndef f(n): return n and 1 + f(n - 1)\n"
                "threading.Thread(target=lambda: print(f(20000))).start()"
            ),
            b"",
            b"20000\n",
        ),
        (
            (
                "import heapq, bisect, decimal, sqlite3, hashlib, zoneinfo, lzma, numbers\n"
                "import html.parser, wave, colorsys\n"
                "print(sqlite3.connect(':memory:').execute('select 6*7').fetchone()[0])"
            ),
            b"",
            b"42\n",
        ),
        ("open('/dev/null', 'w').write('x'); print('ok')", b"", b"ok\n"),
        (
            (
                "import pathlib\nout = open('/dev/stdout', 'w')\n"
                "with open('/dev/stdin') as lines: print(next(lines), end='', file=out)\n"
                "out.flush(); print(pathlib.Path('/dev/stdin').read_text())"
            ),
            b"1\n",
            b"1\n\n",
        ),
        (
            "import time; time.sleep(0.01); print(time.process_time() < 1)",
            b"",
            b"True\n",
        ),
    ],
)
def test_an_honest_program_runs(program, stdin, stdout):
    result = run(program, stdin)
    assert (result.status, result.stdout) == ("ok", stdout)
    assert 0 <= result.seconds < 60


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("1/0", "error"),
        ("print(1", "error"),
        ("\ud800", "error"),
        ("a\0", "error"),
        ("raise SystemExit(3)", "error"),
        ("raise SystemExit('no')", "error"),
        ("import sys; sys.exit(0)", "ok"),
        ("import os; os._exit(81)", "error"),
        ("import os; os.abort()", "error"),
        ("x = 'a' * 2**30", "memory"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(99)", "timeout"),
        ("print('x' * (2**20 - 1))", "ok"),
        ("print('x' * 2**20)", "output"),
        ("while True: print('x' * 99)", "output"),
        ("import site, pytest", "error"),
        ("", "ok"),
    ],
)
def test_how_a_program_ends(program, status):
    result = run(program, seconds=0.3)
    assert result.status == status
    assert len(result.stdout) <= sandbox.OUTPUT


def test_memory_is_the_programs_own():
    assert run("x = bytearray(20 * 2**20); print(1)", memory_mb=32).status == "ok"
    assert run("x = bytearray(40 * 2**20); print(1)", memory_mb=32).status == "memory"


def test_programs_leave_nothing_to_each_other():
    assert run("import json, builtins; json.dumps = builtins.len = 3").status == "ok"
    assert run("import json; print(json.dumps(len('ab')))").stdout == b"2\n"
    # The same hash seed and the same random numbers, so that a verdict can be repeated.
    source = "import random; print(random.random(), list({'a', 'b', 'c'}))"
    assert run(source).stdout == run(source).stdout != b""


def test_many_threads_share_the_jails():
    results = {}

    def work(i):
        results[i] = run(f"print({i} * int(input()))", b"7").stdout

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: b"%d\n" % (7 * i) for i in range(8)}


# ---- What is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"seconds": "1"}, "seconds='1'"),
        ({"memory_mb": 1}, "memory_mb=1: must be whole, 16 to"),
        ({"memory_mb": 99.5}, "memory_mb=99.5"),
        ({"memory_mb": True}, "memory_mb=True"),
    ],
)
def test_bad_limits_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        run("print(1)", **limits)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError):
        run(b"print(1)")
    with pytest.raises(TypeError):
        run("print(1)", "text")


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (("landlock", "namespaces"), "no Landlock and no namespaces"),
        (("seccomp",), "no seccomp"),
    ],
)
def test_nothing_runs_where_nothing_confines(without, reason):
    with pytest.raises(RuntimeError, match=f"{reason}; it takes Linux 5.13 or newer"):
        sandbox.Jail(without)
    jail = sandbox.Jail(without, unsafe=True)
    assert jail.words.startswith("no landlock" if "landlock" in without else "landlock")
    jail.close()


REFUSED = """
import ctypes, struct
from dllm_jax.rl.rewards import jail, sandbox
rows = [jail.line(jail.LOAD, 0)]
for number, option in {calls}:
    rows += [jail.line(jail.EQUAL, number, 0, 3), jail.word(0)]
    rows += [jail.line(jail.EQUAL, option, 0, 1), jail.line(jail.RETURN, jail.REFUSE)]
    rows += [jail.line(jail.LOAD, 0)]
rows += [jail.line(jail.RETURN, jail.PASS)]
code = ctypes.create_string_buffer(b"".join(rows))
program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code))
held = ctypes.create_string_buffer(program)
jail.prctl(38, 1)
assert jail.prctl(22, 2, ctypes.addressof(held)) == 0
try:
    sandbox.available()
except RuntimeError as error:
    print(error)
"""


def test_a_container_that_refuses_filters_is_found_before_the_first_program():
    """Else every answer would be no verdict, in a run that says seccomp confines it."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    source = REFUSED.replace("{calls}", "[(157, 22)]")
    done = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True
    )
    assert "cannot be run safely here: no seccomp; it takes" in done.stdout


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="cannot be run safely on darwin"):
        sandbox.Pool().started()


# ---- Jails that die ------------------------------------------------------------------


def test_a_jail_that_is_killed_is_replaced():
    assert run("print(1)").status == "ok"
    for idle in sandbox.pool.idle:
        idle.process.kill()
        idle.process.wait()
    assert run("print(2)").stdout == b"2\n"


def test_a_jail_that_is_killed_in_the_middle_changes_no_result(monkeypatch):
    monkeypatch.setattr(sandbox, "pool", sandbox.Pool(1))
    jail = sandbox.pool.started()
    sandbox.pool.idle.append(jail)
    killer = threading.Timer(0.2, jail.process.kill)
    killer.start()
    result = run("import time; time.sleep(0.8); print(3)", seconds=5)
    killer.join()
    assert jail.process.poll() == -signal.SIGKILL
    assert (result.status, result.stdout) == ("ok", b"3\n")
    sandbox.pool.close()


def test_jails_that_always_die_are_the_sandboxs_fault(monkeypatch):
    class Dying(sandbox.Jail):
        def run(self, *args):
            raise sandbox.Lost

        trial = run

    monkeypatch.setattr(sandbox, "Jail", Dying)
    monkeypatch.setattr(sandbox, "pool", sandbox.Pool(1))
    assert run("print(1)") == sandbox.Result("sandbox", b"", 0.0)
    assert sandbox.tried({}, {}, seconds=1, memory_mb=64, all_cases=True) is None


def test_a_jail_ends_with_who_started_it():
    source = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); import sandbox\n"
        "print(sandbox.Jail(('namespaces',)).process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    folder = str(pathlib.Path(sandbox.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-P", "-c", source, folder],
        check=False,
        capture_output=True,
        text=True,
    )
    pid = int(done.stdout)
    end = time.monotonic() + 60
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        state = (
            pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        )
        if state == "Z":  # dead, and waits for a parent that may not look
            break
        time.sleep(0.02)
    else:
        assert not pathlib.Path(f"/proc/{pid}").exists()


# ---- What confines -------------------------------------------------------------------


def interpreter(user: str) -> str:
    """Returns a Python that the user can start; skips where none is."""
    if "nobody" not in user or os.getuid():
        return sys.executable
    for python in (sys.executable, SYSTEM):
        words = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if (
                subprocess.run(
                    words, check=False, user=65534, stderr=subprocess.DEVNULL
                ).returncode
                == 0
            ):
                return python
        except OSError:
            continue
    pytest.skip("no Python that uid 65534 can start")


@pytest.mark.parametrize(
    "user",
    [
        *("plain", "bare", "nobody", "docker"),
        *(pytest.param(x, marks=pytest.mark.soak) for x in ("alone", "docker-nobody")),
    ],
)
def test_no_attack_escapes(user):
    """As whoever runs the tests, as an ordinary user, and as in a container of Docker's."""
    words = [interpreter(user), str(HERE / "escapes.py"), sandbox.__file__, user]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if user == "bare" and "no Landlock and no namespaces" in done.stderr:
        pytest.skip("no namespaces can be made here")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert ("namespaces no" in told["words"]) >= (user == "alone" or "docker" in user)
    assert len(told["attacks"]) >= 43
    escaped = {name: row[2] for name, row in told["attacks"].items() if row[2]}
    assert not escaped
    ends = {name: row[0] for name, row in told["attacks"].items()}
    assert ends.pop("recursion") in ("error", "timeout")  # by Python's version
    assert ends == dict.fromkeys(ends, "ok") | ENDS  # an attack that fails is none
    assert all(size <= sandbox.OUTPUT for _, size, _ in told["attacks"].values())
    assert told["honest"] == ["ok", "42\n"]
    assert told["survivors"] == []


REAL = (
    "shadow",
    "secret",
    "this repository",
    "inherited environment",
    "environment in memory",
    "the secret",
    "tcp",
    "udp",
    "listening",
    "unix path",
    "unix abstract",
    "socket pair",
    "memory file",
    "fork",
    "exec",
    "subprocess",
    "clocks of others",
    "descriptors of others",
    "memory of others",
    "kill",
)


@pytest.mark.parametrize("name", REAL)
def test_attacks_are_real(name):
    """Without a jail they get what they want: those that do no harm, at least."""
    world = escapes.World()
    attack = attacks.ATTACKS[name].replace("(9, 15, 0)", "(0,)").replace("0, -1,", "")
    done = subprocess.run(
        [sys.executable, "-c", attacks.BEFORE + attack],
        check=False,
        input=json.dumps(world.facts).encode() + b"\n",
        capture_output=True,
        start_new_session=True,
        timeout=60,
    )
    world.end()
    assert b"LEAK" in done.stdout, done.stderr


def test_the_numbers_of_calls_are_the_kernels():
    # As `gcc -E -dM` reads asm/unistd.h of Debian's linux-libc-dev, amd64 and arm64.
    numbers = json.loads((HERE / "syscalls.json").read_text())
    for column, machine in enumerate(("x86_64", "aarch64")):
        kernel = numbers[machine]
        ours = {n: x[column] for n, x in (jail.ALLOWED | jail.ASKED).items()}
        assert {n: kernel.get(n) for n in ours} == ours
    # What makes a process, a socket or a mount is on no list.
    for name in (
        "fork",
        "execve",
        "socket",
        "mount",
        "ptrace",
        "kill",
        "unshare",
        "bpf",
    ):
        assert name not in jail.ALLOWED | jail.ASKED


def verdict(program: bytes, arch: int, number: int, *args: int) -> int:
    """Returns what a filter says of a call: the kernel's machine for it, in Python."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *[*args, 0, 0, 0, 0, 0, 0][:6])
    rows = [*struct.iter_unpack("HBBI", program)]
    at, held = 0, 0
    while True:
        code, yes, no, value = rows[at]
        at += 1
        if code == jail.RETURN:
            return value
        if code == jail.LOAD:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == jail.AND:
            held &= value
        else:
            holds = {
                jail.EQUAL: held == value,
                jail.ABOVE: held > value,
                jail.AT_LEAST: held >= value,
                jail.ANY_BIT: bool(held & value),
            }[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", jail.MACHINES)
def test_the_filter_decides_alike_on_both_machines(monkeypatch, machine):
    """Of aarch64, which runs nowhere here, this and the numbers are all that is shown."""
    programs = []

    def caught(option, mode, address, *rest):
        size, place = struct.unpack("HxxxxxxQ", ctypes.string_at(address, 16))
        programs.append(ctypes.string_at(place, 8 * size))
        return 0

    monkeypatch.setattr(jail, "prctl", caught)
    monkeypatch.setattr(jail.platform, "machine", lambda: machine)
    jail.enter_seccomp(2)
    jail.enter_seccomp(7)
    _, arch = jail.MACHINES[machine]
    numbers = json.loads((HERE / "syscalls.json").read_text())[machine]
    old, new = programs
    verdicts = {n: verdict(new, arch, x) for n, x in numbers.items()}
    passed = {name for name, said in verdicts.items() if said == jail.PASS}
    asked = {"openat", "prlimit64", "fcntl", "clock_gettime"}  # they pass with zeros
    assert passed == {*jail.ALLOWED} & {*numbers} | asked
    assert verdicts["clone3"] == jail.MISSING
    others = {*verdicts.values()} - {jail.PASS, jail.MISSING}
    assert others == {jail.REFUSE}
    assert verdict(new, arch ^ 1, 0) == verdict(new, arch, 0x40000001) == jail.KILL

    def passes(name, *args, program=new) -> bool:
        return verdict(program, arch, numbers[name], *args) == jail.PASS

    assert passes("clone", 0x3D0F00) and passes("clone", 0x7D0F00)
    for flags in (17, 0x10000, 0x100, 0x3D0F00 | 0x10000000, 0x4011, 0x20011):
        assert not passes("clone", flags)
    assert passes("tgkill", os.getpid()) and not passes("tgkill", os.getpid() + 1)
    assert passes("prlimit64", 0, 7, 0) and not passes("prlimit64", 0, 7, 8)
    assert not passes("prlimit64", 0, 7, 1 << 32)  # its lower half is 0
    assert passes("fcntl", 3, 1030) and not passes("fcntl", 3, 8)
    assert passes("ioctl", 0, 0x5401) and not passes("ioctl", 0, 0x5412)
    assert passes("clock_gettime", 2) and not passes("clock_gettime", 2**32 - 6)
    assert passes("openat", 0, 0, 0x200) and passes("openat", 0, 0, 1, program=old)
    assert not passes("openat", 0, 0, 0x200, program=old)


def test_old_versions_of_landlock_are_asked_what_they_know():
    assert [jail.every_access(x).bit_length() for x in range(1, 8)] == [
        *(13, 14, 15, 15, 16, 16, 16)
    ]
    openat = jail.filtered(1, 2)["openat"]
    assert len(openat) == 4 and len(jail.filtered(1, 3)["openat"]) == 1
