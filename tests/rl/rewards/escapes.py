"""Runs every attack in the jail as one kind of user, and prints what came of it as JSON.

    python escapes.py SANDBOX.PY USER

USER: plain, as who starts this. alone: without namespaces. bare: without Landlock. nobody:
uid 65534. docker: without the capabilities and calls that Docker's default takes away.
docker-nobody: both. It imports nothing of the package, so that any Python can run it.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import pathlib
import shutil
import site
import socket
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
DOCKER = 0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31  # its capabilities
REFUSED = 272, 165, 166, 308, 155, 430, 429, 428, 321, 298, 250, 323, 425  # x86-64
NEW = 0x7E020000  # flags of clone that make namespaces


def load(file: pathlib.Path):
    """Returns a file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def as_docker(jail) -> None:
    """Takes away what Docker's default takes away. jail: the module, for its words."""
    refuse = jail.line(jail.RETURN, jail.REFUSE)
    rows = [jail.line(jail.LOAD, 0)]
    for number in REFUSED:
        rows += [jail.line(jail.EQUAL, number, 0, 1), refuse]
    rows += [
        jail.line(jail.EQUAL, 435, 0, 1),
        jail.line(jail.RETURN, jail.MISSING),
        jail.line(jail.EQUAL, 56, 0, 3),
        jail.word(0),
        jail.line(jail.ANY_BIT, NEW, 0, 1),
        refuse,
        jail.line(jail.RETURN, jail.PASS),
    ]
    code = ctypes.create_string_buffer(b"".join(rows))
    program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code))
    held = ctypes.create_string_buffer(program)
    if os.getuid():
        jail.prctl(38, 1)
    assert jail.prctl(22, 2, ctypes.addressof(held)) == 0
    mask = sum(1 << x for x in DOCKER) if os.getuid() == 0 else 0
    for number in range(41):
        if number not in DOCKER:
            jail.prctl(24, number)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    data = struct.pack("6I", mask, mask, 0, 0, 0, 0)
    assert jail.LIBC.capset(header, ctypes.create_string_buffer(data)) == 0


class World:
    """What an attacker could reach, and whether it was reached."""

    def __init__(self):
        self.token = "token-" + os.urandom(8).hex()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        os.chmod(self.folder, 0o777)
        self.secret = self.folder / "secret"
        self.secret.write_text(self.token)
        os.chmod(self.secret, 0o666)
        os.environ["SECRET"] = self.token
        os.set_inheritable(os.open(self.secret, os.O_RDONLY), True)
        self.sockets = []
        name, unix = f"abstract-{self.token}", str(self.folder / "unix")
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, unix),
            (socket.AF_UNIX, socket.SOCK_STREAM, "\0" + name),
        ):
            opened = socket.socket(family, kind)
            opened.bind(address)
            if kind == socket.SOCK_STREAM:
                opened.listen()
            opened.setblocking(False)
            self.sockets.append(opened)
        os.chmod(unix, 0o777)
        self.victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.before = self.listed()
        self.facts = {
            "secret": str(self.secret),
            "folder": str(self.folder),
            "source": str(HERE / "escapes.py"),
            "sites": site.getsitepackages(),
            "token": self.token,
            "tcp": self.sockets[0].getsockname()[1],
            "udp": self.sockets[1].getsockname()[1],
            "unix": unix,
            "abstract": name,
            "victim": self.victim.pid,
            "driver": os.getpid(),
        }

    def listed(self) -> list:
        """Returns what lies where everybody may write."""
        folders = [self.folder, *map(pathlib.Path, ("/dev/shm", "/var/tmp"))]
        names = ("new", "l", "node", "0")
        seen = [sorted(os.listdir(x)) for x in folders[:1]]
        return seen + [
            (x / n).exists() for x in (*folders, pathlib.Path("/tmp")) for n in names
        ]

    def harm(self) -> list[str]:
        """Returns what happened to the world."""
        found = []
        if self.secret.read_text() != self.token or self.secret.stat().st_mode & 0o4000:
            found.append("the secret was changed")
        if self.listed() != self.before:
            found.append("files were written")
        if self.victim.poll() is not None:
            found.append("the victim is dead")
        for number, opened in enumerate(self.sockets):
            with contextlib.suppress(BlockingIOError):
                opened.recv(1) if number == 1 else opened.accept()
                found.append(f"socket {number} was reached")
        return found

    def end(self) -> None:
        """Removes it."""
        self.victim.kill()
        self.victim.wait()
        shutil.rmtree(self.folder)


def survivors() -> list[int]:
    """Returns the processes left that this one, or an heir of it, started."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)
        except ChildProcessError:
            return []
    task = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(x) for x in task.read_text().split()]


def main(file: str, user: str) -> None:
    """Runs all attacks, one after another."""
    jail = load(pathlib.Path(file).with_name("jail.py"))
    if "nobody" in user and os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    jail.prctl(36, 1)  # orphans become this process's children
    world = World()
    if "docker" in user:
        as_docker(jail)
    sandbox = load(pathlib.Path(file))
    attacks = load(HERE / "attacks.py")
    without = {"alone": ("namespaces",), "bare": ("landlock",)}.get(user, ())
    sandbox.pool.without = without
    told = {"words": sandbox.available(), "attacks": {}}
    facts = (json.dumps(world.facts) + "\n").encode()
    for name, attack in attacks.ATTACKS.items():
        result = sandbox.run(attacks.BEFORE + attack, facts, seconds=0.3, memory_mb=96)
        leaks = [x for x in result.stdout[:9999].decode().splitlines() if "LEAK" in x]
        told["attacks"][name] = [
            result.status,
            len(result.stdout),
            leaks + world.harm(),
        ]
    honest = sandbox.run(
        attacks.BEFORE + attacks.HONEST, facts + b"1 2\n39\n", seconds=2, memory_mb=256
    )
    told["honest"] = [honest.status, honest.stdout.decode()]
    sandbox.close()
    world.victim.kill()
    world.victim.wait()
    told["survivors"] = survivors()
    world.end()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
