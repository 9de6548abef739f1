"""Commands run in processes forked from one that has imported what they import.

Imports take longer than most of these commands. The server imports everything but the
entries themselves and starts no backend, so that each command chooses its devices, and ends
as a process of its own: with an exit code, by a signal, with what it wrote.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
# XLA's flags for programs that run a few times: compiling them is what takes the time. The
# emitters of fusions through MLIR take two thirds of it, splitting a module another tenth.
HASTY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
)
PRELOAD = [
    *("dllm_jax.checkpoint", "dllm_jax.curves", "dllm_jax.command_line"),
    *("dllm_jax.rl.budget", "dllm_jax.rl.heldout", "dllm_jax.rl.sources"),
    *("matplotlib.pyplot", "orbax.checkpoint", "transformers", "tests.served"),
    *("transformers.models.auto.tokenization_auto", "jaxlib.mlir.dialects.mhlo"),
    *("dllm_jax.rl.best", "dllm_jax.rl.guard", "dllm_jax.rl.rewards.worker"),
    *("dllm_jax.trackers", "dllm_jax.viewer.leave", "tensorboardX"),
]
# As data.tokenizer has it, which imports transformers only when it is called.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOAD)


# Looking for garbage among what tracing makes took a fourteenth of some tests' time.
RARELY = (50_000, 20, 20)


class Run:
    """A command under way; its methods are those of subprocess.Popen."""

    def __init__(
        self, module: str, arguments: list[str], *, env, options, joined: bool
    ):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [pathlib.Path(self.folder.name, name) for name in ("out", "err")]
        self.process = SERVER.Process(
            target=command,
            args=(module, arguments, env, options, *map(str, self.files), joined),
        )
        self.process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, or None."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what it has written, once it has ended: (out, err)."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout)
        return tuple(file.read_text() if file.exists() else "" for file in self.files)

    def send_signal(self, number: int):
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self):
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def start(module: str, arguments: list[str], env=None, joined=True, **options) -> Run:
    """Returns `python -m module arguments...` under way.

    env: changes to the environment, read when JAX starts its backend. options: of
    jax.config, which is past reading the environment. joined: errors go where output goes.
    """
    return Run(module, arguments, env=env or {}, options=options, joined=joined)


def run(module: str, arguments: list[str], env=None) -> subprocess.CompletedProcess:
    """Returns the ended command, as subprocess.run does: returncode, stdout, stderr."""
    ran = start(module, arguments, env, joined=False)
    out, err = ran.communicate()
    return subprocess.CompletedProcess(arguments, ran.returncode, out, err)


def command(module, arguments, env, options, out: str, err: str, joined: bool):
    """Runs the command in this process, as if the interpreter had begun with it."""
    import jax

    # Who looks for garbage among what the server imported copies it all, page by page.
    gc.freeze()
    gc.set_threshold(*RARELY)
    for number, path in ((1, out), (2, out if joined else err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(ROOT)
    os.environ.update(env)
    for name, value in options.items():
        jax.config.update(name, value)
    sys.path.insert(0, str(ROOT))
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # what is imported and run is warned about
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()  # a fork ends without them


def free_port() -> int:
    """Returns the number of a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def split(devices: int) -> dict[str, str]:
    """Returns the environment that makes so many fake devices of the CPU.

    NPROC is conftest's, for the tests' own devices: a command has to know by itself.
    """
    flags = f"{HASTY} --xla_force_host_platform_device_count={devices}"
    return {"XLA_FLAGS": flags, "NPROC": ""}


def group(
    module: str, arguments: list[list[str]], devices: int, **options
) -> list[Run]:
    """Returns processes of one run under way, on fake devices, `devices` in each.

    arguments: those of each process, which also get the flags that join them.
    """
    env, port = split(devices), free_port()
    joined = [f"--coordinator=localhost:{port}", f"--processes={len(arguments)}"]
    return [
        start(module, [*own, *joined, f"--process={index}"], env=env, **options)
        for index, own in enumerate(arguments)
    ]
