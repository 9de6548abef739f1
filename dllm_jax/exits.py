"""How a command ends: its exit codes, the errors that lead to them, and signals.

    0   done
    1   a defect of the program: a traceback
    2   refused: what the user gave is wrong, and the last line says what would be right
    3   cannot go on: it diverged, the disk is full, no checkpoint is whole. The same
        command would end the same way
    75  stopped, by a signal or since another process is lost: the same command goes on

A launcher starts a command again after 75 and after nothing else. ValueError is the
error that refuses, where this package raises it (config.entry).
"""

import signal
import sys
from collections.abc import Callable

REFUSED, STUCK, STOPPED = 2, 3, 75
received = []  # the signals that came and were noted, by their numbers


class CannotGoOn(Exception):
    """What starting again does not mend; the message says what would."""


class Stopped(Exception):
    """The command was told to stop; the message says how it goes on."""


class StopSignal:
    """True once SIGTERM or SIGINT has come; every process learns it at the same call."""

    def __init__(self, agreed: Callable[[bool], bool] = bool):
        """agreed: returns whether any process says so, such as `sharding.anywhere`."""
        self.seen, self.agreed = False, agreed
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number: int = signal.SIGTERM, _=None):
        """Remembers the signal; a second one ends the program at once."""
        received.append(number)
        if self.seen:
            sys.exit(STOPPED)
        self.seen = True

    def __call__(self) -> bool:
        """Returns whether to stop now."""
        return self.agreed(self.seen)
