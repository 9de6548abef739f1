"""What a program of somebody else's may take: a chat template is one.

jinja2's sandbox keeps it from files and from Python; this gives it an end.
"""

import contextlib
import pathlib
import resource
import signal
import threading

SECONDS, BYTES, CHARACTERS = 10, 2**30, 10**7
# One at a time: memory is limited for the whole process, and what a second one found as its
# limit would be put back behind it.
ALONE = threading.RLock()


@contextlib.contextmanager
def bounded():
    """Ends what is inside by MemoryError, and in the main thread by TimeoutError."""
    with ALONE, limited():
        yield


@contextlib.contextmanager
def limited():
    """Does what `bounded` says, while nobody else does."""

    def late(*_):
        raise TimeoutError(f"it has not ended after {SECONDS} seconds")

    timed = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    status = pathlib.Path("/proc/self/statm")
    if status.exists() and soft == resource.RLIM_INFINITY:
        pages = int(status.read_text().split()[0])
        most = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    before = signal.signal(signal.SIGALRM, late) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
