"""How XLA is set up before it starts: threads, haste, exactness, and what is kept of programs."""

import builtins
import functools
import glob
import os
import pathlib
import re
import warnings
from importlib import metadata, util

import jax

from dllm_jax import exits

THREADS_PER_DEVICE = 4  # of a CPU that is split: see `spare_threads`
HASTE = (
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
DEVICES_FLAG = r"--xla_force_host_platform_device_count=(\d+)"


def spare_threads() -> None:
    """Lets XLA's pool on a CPU that is split into devices have threads to spare.

    A collective operation holds a thread of each device until all have come to it, and the
    start of a further program may wait in another. The pool's default, a thread for each
    device or core, runs out of them while a device has not begun the operation that the
    others wait for, and all wait for ever. XLA reads the pool's size from NPROC when the
    backend starts; what is set there stays.
    """
    flag = re.search(DEVICES_FLAG, os.environ.get("XLA_FLAGS", ""))
    devices = max(jax.config.jax_num_cpu_devices, int(flag[1]) if flag else 1)
    if devices > 1 and not os.environ.get("NPROC"):
        threads = max(os.cpu_count() or 1, THREADS_PER_DEVICE * devices)
        os.environ["NPROC"] = str(threads)


def hasten() -> None:
    """Lets XLA compile in haste for CPUs, where nothing but these is installed.

    For programs that run a few hundred times, before the backend starts: that of an
    answer of the bundled model is there in a third of the time. What is no product is then far
    slower, such as the noise of a draw, 70 ns for each id. Flags that are set come after.
    """
    flags = f"{HASTE} {os.environ.get('XLA_FLAGS', '')}".split()
    if not (metadata.entry_points(group="jax_plugins") or util.find_spec("libtpu")):
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))


def keep_compiled(folder: str):
    """Lets compiled programs outlive the process in `folder`; "": they do not.

    A folder that JAX_COMPILATION_CACHE_DIR names comes first. Of one that cannot be made a
    line warns, and they do not.
    """
    if not folder or jax.config.jax_compilation_cache_dir:
        return
    folder = os.path.expanduser(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        exits.warn(f"run.compile_cache={folder}: {error.strerror}; no program is kept")
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.showwarning = functools.partial(
        forget_damaged, pathlib.Path(folder), warnings.showwarning
    )


def forget_damaged(folder: pathlib.Path, show, message, *place, **more):
    """Shows a warning; where it is JAX's of a damaged program in `folder`, takes that away.

    It is damaged by a kill while it was written, and JAX leaves what is there: without this
    each start would compile it anew. All of its name go, as the warning tells no more.

    show: warnings.showwarning, as it was; the others are its arguments.
    """
    told = re.search(r"reading persistent .* for '([^'/]+)': (\w+)", str(message))
    error = told and getattr(builtins, told[2], Exception)
    if not told or issubclass(error, OSError):  # what cannot be reached may be whole
        show(message, *place, **more)
        return
    try:
        for file in folder.glob(f"{glob.escape(told[1])}-*-cache"):
            file.unlink(missing_ok=True)
    except OSError:
        show(message, *place, **more)
    else:
        exits.warn(
            f"run.compile_cache={folder}: {told[1]} was damaged: it is made anew"
        )


def keep_exact(dtype: str):
    """Lets products of float32 be of float32 where a model computes in it.

    GPUs round what they multiply to TF32 and TPUs to bfloat16 unless told otherwise: the
    log-probs of an answer that was sampled and of the same scored anew were 0.01 nats apart
    on an H200, and 0.00003 on a CPU. Not where JAX_DEFAULT_MATMUL_PRECISION says how.
    """
    rounds = dtype == "float32" and jax.default_backend() != "cpu"
    if rounds and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")
