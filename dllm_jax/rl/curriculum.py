"""Which problems are asked next: those from which there is something to learn.

The data's stream decides the order; here a problem that comes up is asked or passed over,
by what its last answers were worth. A problem that nobody solves, or everybody, costs a
group of answers and gives no gradient. Host code; the same in every process.
"""

import dataclasses

import numpy as np

from dllm_jax.rl.config import RLConfig


@dataclasses.dataclass
class Seen:
    """What is known of a problem that was asked."""

    solved: float  # share of its last answers that were right
    streak: int = 0  # how often in a row all of them were
    rest: int = 0  # how often it is passed over before it is asked again


class Curriculum:
    """Passes over some problems of the stream; its `memory` goes into checkpoints."""

    def __init__(self, cfg: RLConfig, seed: int, memory: list | None = None):
        """memory: what another's `memory` was; None, or []: nothing was asked yet."""
        self.cfg, self.seed = cfg, seed
        self.seen = {row[0]: Seen(*row[1:]) for row in memory or ()}

    @property
    def memory(self) -> list:
        """All that it knows, as JSON has it: a row for each problem that was asked."""
        rows = sorted(self.seen.items())  # of each step: dataclasses.astuple is slow
        return [[i, seen.solved, seen.streak, seen.rest] for i, seen in rows]

    def asks(self, problem: int, place: int) -> bool:
        """Returns whether the problem that comes up at a place of the stream is asked.

        A resting one comes nearer to its end of rest.
        """
        seen = self.seen.get(problem)
        if seen is None:
            return True
        if seen.rest:
            seen.rest -= 1
            return False
        if not self.cfg.curriculum:
            return True
        worth = 4 * seen.solved * (1 - seen.solved)
        chance = 1 - self.cfg.curriculum * (1 - worth)
        return np.random.default_rng([self.seed, 3, place]).random() < chance

    def note(self, problem: int, solved_n: np.ndarray) -> None:
        """Remembers which of a problem's last answers were right."""
        cfg, before = self.cfg, self.seen.get(problem, Seen(0.0))
        # As if one more had been right and one wrong: no problem is given up for good.
        solved = float((solved_n.sum() + 1) / (len(solved_n) + 2))
        streak = before.streak + 1 if solved_n.all() else 0
        rests = cfg.rest_after and streak >= cfg.rest_after
        self.seen[problem] = Seen(solved, streak, cfg.rest_for if rests else 0)

    def drawn(self, stream, start: int, count: int, most: int) -> tuple[list[int], int]:
        """Returns (the next `count` problems to ask, how many places they used up).

        stream(start, count): the problems at these places. After `most` places all that
        comes up is asked: a run does not end for want of problems.
        """
        chosen, used = [], 0
        while len(chosen) < count:
            for problem in np.asarray(stream(start + used, count)).tolist():
                if used >= most or self.asks(problem, start + used):
                    chosen.append(problem)
                used += 1
                if len(chosen) == count:
                    break
        return chosen, used
