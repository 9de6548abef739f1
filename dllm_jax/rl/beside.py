"""Grading beside sampling: groups of answers are graded as they end, in a thread.

What it finds is what grading at the end would: a grader judges each answer for itself. Each
process grades its share of the answers, those of sharding.dealt.
"""

import collections
import concurrent.futures
import json
import threading

import jax
import numpy as np

from dllm_jax import sharding
from dllm_jax.rl.rewards import Grader, Grades
from dllm_jax.sampling import state

# One thread for the life of the process: what a grader starts dies with the thread that
# started it (PR_SET_PDEATHSIG), and graders are not asked twice at once.
THREAD = concurrent.futures.ThreadPoolExecutor(1, "grading")
POLL_S = 0.1  # between two questions whether what is waited for is graded


class Beside:
    """Grades the answers of a stream."""

    def __init__(
        self,
        grader: Grader,
        decode,
        problems: list,
        group_n: np.ndarray,
        *,
        done: int = 0,
        most: int | None = None,
    ):
        """decode: see rollout.answered; problems, group_n: what each answers, its group.

        done: how many of the first were there before; they are in no group. most: answers
        that are graded together, None: all that wait.
        """
        self.grader, self.decode, self.problems = grader, decode, problems
        self.most, self.found = most, []
        self.group_n = np.where(np.arange(len(group_n)) < done, -1, group_n)
        self.missing = collections.Counter(self.group_n.tolist())
        self.answers, self.texts, self.grades = {}, {}, {}
        self.lock, self.waiting, self.busy, self.jobs = threading.Lock(), [], False, []

    def watched(self, stream):
        """Yields a stream's (i, Answer i), and grades the groups that end meanwhile."""
        for i, answer in stream:
            group = self.group_n[i].item()
            if group >= 0:
                self.answers[i] = answer
                self.missing[group] -= 1
                if not self.missing[group]:
                    self.take(np.flatnonzero(self.group_n == group).tolist())
            yield i, answer

    def take(self, rows: list[int]):
        """Grades these answers as soon as those before them are, or when asked for."""
        with self.lock:
            self.waiting += rows
            if self.busy or not self.grader.aside:
                return
            self.busy = True
        self.jobs.append(THREAD.submit(self.work))

    def work(self):
        """Grades what waits, the first of it at once, until nothing does."""
        while True:
            with self.lock:
                waiting = sorted(self.waiting)
                count = self.most or len(waiting)
                rows, self.waiting = waiting[:count], waiting[count:]
                self.busy = bool(rows)
            if not rows:
                return
            self.grade(rows)

    def grade(self, rows: list[int]):
        """Decodes these answers, and grades this process's share of them."""
        trace = state.stacked([self.answers.pop(i) for i in rows])
        texts = self.decode(trace)
        share = sharding.dealt()
        own = [k for k, i in enumerate(rows) if i % share.step == share.start]
        if own:
            grades = self.grader.grade(
                [texts[k] for k in own],
                [self.problems[rows[k]] for k in own],
                jax.tree.map(lambda x: x[own], trace),
            )
            self.found = [*self.found, said(grades)][:2]
            check_alike(self.found)
            self.grades |= {rows[k]: one(grades, n) for n, k in enumerate(own)}
        self.texts |= zip(rows, texts, strict=True)  # these are graded now

    def give_up(self):
        """Forgets what waits; what is under way goes on."""
        with self.lock:
            self.waiting = []

    def ready(self, rows) -> bool:
        """Returns whether these answers are graded; raises what a grader raised."""
        self.jobs = [job for job in self.jobs if not job.done() or job.result()]
        return all(i in self.texts for i in rows)

    def result(self, rows) -> tuple[list[str], Grades]:
        """Returns (texts, the Grades of this process's share) of answers, and forgets them.

        Waits for their grading, or does it where no thread may. Raises what a grader raised.
        """
        while not self.ready(rows):
            if self.jobs:
                concurrent.futures.wait(self.jobs, POLL_S)
            else:
                assert self.waiting, "of these answers some were never taken"
                self.work()
        texts = [self.texts.pop(i) for i in rows]
        return texts, joined([self.grades.pop(i) for i in rows if i in self.grades])


def one(grades: Grades, n: int) -> Grades:
    """Returns the Grades of one answer of several."""
    tokens = grades.reward_nT
    return Grades(
        grades.reward_n[n],
        None if tokens is None else tokens[n],
        {name: x_n[n] for name, x_n in grades.parts.items()},
    )


def joined(every: list[Grades]) -> Grades:
    """Returns the Grades of `one` answer each, together."""
    if not every:  # there are fewer answers than processes
        return Grades(np.zeros(0, np.float32))
    check_alike([said(grades) for grades in every])
    first = every[0]
    return Grades(
        np.array([grades.reward_n for grades in every]),
        None if first.reward_nT is None else np.stack([g.reward_nT for g in every]),
        {name: np.array([g.parts[name] for g in every]) for name in first.parts},
    )


def said(graded) -> tuple[list[str], bool]:
    """Returns (the names of the parts, whether tokens have rewards) of Grades or Rollouts."""
    return [*graded.parts], graded.reward_nT is not None


def agreed(grades: Grades) -> tuple[list[str], bool]:
    """Returns what Grades `said`, the same in all processes; one may have no answers.

    Raises ValueError, in all of them, where graders of some said other things.
    """
    own = said(grades) if len(grades.reward_n) else None
    found = map(json.loads, sharding.told(json.dumps(own)))
    found = [x for x in found if x is not None] or [said(grades)]
    check_alike(found)
    return tuple(found[0])


def check_alike(found: list[tuple[list[str], bool]]) -> None:
    """Raises ValueError where graders `said` other things of some answers than of others."""
    if len({tokens for _, tokens in found}) > 1:
        raise ValueError("rl.reward: tokens have rewards in some answers, not in all")
    names = {tuple(parts) for parts, _ in found}
    if len(names) > 1:
        told = " and ".join(sorted(", ".join(parts) or "none" for parts in names))
        raise ValueError(f"rl.reward: answers have other parts than others: {told}")
