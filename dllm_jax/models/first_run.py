"""A kernel's first run on a chip, which may hang, or break the device for all that follows.

No process gets over either, nor over a compiler that aborts. So a file says which kernel is
being compiled or run for the first time, and goes when that has come back. One that a later
start finds, of a process that is gone, tells which kernel to do without.
"""

import contextlib
import fcntl
import os
import pathlib
import threading
import time

import jax
import numpy as np

from dllm_jax import exits, processes, sharding

LONGEST_S = 120.0  # that a compiled kernel gets for small arrays: it takes milliseconds


def lost(file: pathlib.Path | None) -> bool:
    """Returns whether a process that is gone has left a file of `tried`."""
    if file is None:
        return False
    try:
        with file.open("rb") as held:  # it may be another user's
            # Shared, for another process may ask at the same moment.
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # The one that had it may have come back just now, and have removed it.
            return os.path.samestat(os.fstat(held.fileno()), file.stat())
    except (
        OSError
    ):  # there is none, somebody has it who lives, or the disk has no locks
        return False


@contextlib.contextmanager
def tried(file: pathlib.Path | None, who: str):
    """Is there, as `file`, while what is inside is run.

    file: None where nothing is kept. who: the kernel. Ends the process where the run does not
    come back in LONGEST_S. Raises exits.Stopped, and leaves the file, where it raises and the
    device is broken by then; exits.CannotGoOn where there is no file to tell of it.
    """
    alarm = threading.Timer(LONGEST_S, give_up, [file, who])
    alarm.daemon = True
    with marked(file, compiles=False):
        alarm.start()
        try:
            yield
        except Exception as error:
            if exits.exhausted(error) or answers():
                raise
            reason = " ".join(str(error).split())[:200]
            raise told(file, f"{who} has broken the device ({reason})") from error
        finally:
            alarm.cancel()


@contextlib.contextmanager
def marked(file: pathlib.Path | None, *, compiles: bool = True):
    """Makes the file, locked, and removes it, but not where exits.Stopped is raised.

    It does neither where another process has made it, or the folder takes no file. compiles:
    what is inside may take a minute: it goes, too, where a second signal, or the end of
    another process, ends this one, for which no kernel is to blame.
    """
    if file is None:
        yield
        return

    def forget(*_):
        file.unlink(missing_ok=True)

    own = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.ExitStack() as stack:
        made = False
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(own.open("w"))
            stack.callback(own.unlink, missing_ok=True)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(own, file)  # locked from the first moment that others see it
            made = True
            if compiles:
                exits.at_end.append(forget)
                stack.callback(exits.at_end.remove, forget)
            own.unlink()
        try:
            yield
        except exits.Stopped:
            made = False
            raise
        finally:
            if made:
                file.unlink(missing_ok=True)


def answers() -> bool:
    """Returns whether the first local device computes."""
    device = jax.local_devices()[0]
    alone = sharding.make_mesh(fsdp=1, devices=[device])  # whatever mesh is in force
    try:
        with jax.set_mesh(alone):
            jax.device_get(jax.device_put(np.ones(8), device) + 1)
    except Exception:  # noqa: BLE001 (whatever a driver raises)
        return False
    return True


def give_up(file: pathlib.Path | None, who: str) -> None:
    """Ends the process, and with it all others of its run: a kernel hangs."""
    error = told(file, f"{who} has not come back in {LONGEST_S:.0f} s")
    if processes.group is not None:
        time.sleep(10)  # all end meanwhile, by what was told
    prefix = "stopped" if isinstance(error, exits.Stopped) else "error:"
    processes.end(exits.code_of(error), f"{prefix} {error}")


def told(file: pathlib.Path | None, fact: str) -> Exception:
    """Returns the error that a fact leads to; the other processes have heard of it."""
    if file is not None and os.access(file, os.R_OK):  # the next start can ask for it
        words = "the same command goes on without it, but for model.kernels='platform'"
        error = exits.Stopped(f"as {fact}: {words}")
    else:
        error = exits.CannotGoOn(f"{fact}: set model.kernels='reference'")
    processes.fail(error)
    return error
