"""Functions of one's own, named as `module:function`: found, called, and told of in errors.

Whatever their author wrote: what they raise is told with its place, and the working directory,
and the process, stay what they are.
"""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable

from dllm_jax import exits, processes

# With what functions of one's own are called, by the key that names them.
GIVEN = {
    "rl.reward": ("texts", "problems", "trace"),
    "reward.judge.at": ("questions",),
}


def function(key: str, name: str) -> Callable:
    """Returns the function that a `module:function` names.

    key: where it stands. Raises ValueError where there is none, where it takes something else
    than what is `GIVEN`, and with the place where its module raised.
    """
    module, _, wanted = name.partition(":")
    try:
        with staying(key, name):
            there = importlib.import_module(module)
    except ModuleNotFoundError as error:
        own = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        hint = (
            "; its folder must be the one the command is started in, or on PYTHONPATH"
        )
        raise ValueError(f"{key}={name!r}: {error}{hint if own else ''}") from None
    except (Exception, SystemExit) as error:  # whatever its author wrote
        told = raised(f"{key}={name!r}: its module", error)
        raise ValueError(told) from error
    own = getattr(there, wanted, None)
    if own is None:
        raise ValueError(f"{key}={name!r}: {module} has no {wanted}")
    called = callable(own)
    if not called:
        raise ValueError(f"{key}={name!r}: {wanted} is no function")
    try:
        takes = inspect.signature(own)
    except ValueError:  # of some that are written in C nobody knows it
        return own
    try:
        takes.bind(*GIVEN[key])
    except TypeError:
        wants = f"it is called with ({', '.join(GIVEN[key])}), and takes {takes}"
        raise ValueError(f"{key}={name!r}: {wants}") from None
    return own


def source(key: str, name: str) -> str:
    """Returns a hash of the file in which the function of a `module:function` stands.

    key: where it stands itself. "": its module is no file. Raises ValueError as `function`.
    """
    function(key, name)
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    if file is None or not os.path.isfile(file):
        return ""
    return processes.content(file)


def said(key: str, name: str, function: Callable, *arguments):
    """Returns what a `module:function` returns.

    key: where it stands. Raises ValueError with the place where the function raised.
    """
    try:
        with staying(key, name):
            return function(*arguments)
    except exits.StoppedAtOnce:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(raised(f"{key}={name!r}", error)) from error


def raised(who: str, error: BaseException) -> str:
    """Returns a line of who raised an error, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text, file, line = worded(error), frame.filename, frame.lineno
    if isinstance(error, SyntaxError) and error.filename:  # no frame is of its file
        text, file, line = error.msg, error.filename, error.lineno
    text = " ".join(text.split())[:300]
    return f"{who} raised {type(error).__name__}: {text} ({file}, line {line})"


def worded(error: BaseException) -> str:
    """Returns an error's words; "" where it has none that can be told."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (it is somebody's own class)
        return ""


@contextlib.contextmanager
def staying(key: str, name: str):
    """Puts the working directory back where what is inside changes it, and says so once.

    Relative paths, such as the run's folder, are named from it. A child that is forked inside
    ends here: it would go on as a second run. key, name: of the function.
    """
    own, code = os.getpid(), 0
    try:
        place = os.getcwd()
    except OSError:  # somebody has removed it
        place = None
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if os.getpid() != own and not isinstance(error, SystemExit):
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != own:
            os._exit(code if isinstance(code, int) else int(code is not None))
        if place and not (os.path.isdir(".") and os.path.samefile(".", place)):
            os.chdir(place)
            warn_moved(key, name)


@functools.cache
def warn_moved(key: str, name: str) -> None:
    """Says that a function has changed the working directory."""
    exits.warn(
        f"{key}={name!r} changes the working directory, from which the run's paths are named: "
        "it is put back after each call"
    )


def names_function(text: str) -> bool:
    """Returns whether a text names a `module:function`."""
    module, _, wanted = text.partition(":")
    return all(x.isidentifier() for x in (*module.split("."), wanted))
