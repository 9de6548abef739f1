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


class Beside:
    """Grades the answers of a stream."""

    def __init__(self, grader: Grader, decode, problems: list, group_n: np.ndarray):
        """decode: see rollout.answered; problems, group_n: what each answers, its group."""
        self.grader, self.decode, self.problems = grader, decode, problems
        self.group_n = np.asarray(group_n)
        self.missing = collections.Counter(self.group_n.tolist())
        self.answers, self.texts, self.grades = {}, {}, []
        self.lock, self.waiting, self.busy, self.jobs = threading.Lock(), [], False, []

    def watched(self, stream):
        """Yields a stream's (i, Answer i), and grades the groups that end meanwhile."""
        for i, answer in stream:
            self.answers[i] = answer
            group = self.group_n[i].item()
            self.missing[group] -= 1
            if not self.missing[group]:
                self.take(np.flatnonzero(self.group_n == group).tolist())
            yield i, answer

    def take(self, rows: list[int]):
        """Grades these answers as soon as those before them are, or at the end."""
        with self.lock:
            self.waiting += rows
            if self.busy or not self.grader.aside:
                return
            self.busy = True
        self.jobs.append(THREAD.submit(self.work))

    def work(self):
        """Grades what waits, all of it at once, until nothing does."""
        while True:
            with self.lock:
                rows, self.waiting = self.waiting, []
                self.busy = bool(rows)
            if not rows:
                return
            self.grade(sorted(rows))

    def grade(self, rows: list[int]):
        """Decodes these answers, and grades this process's share of them."""
        trace = state.stacked([self.answers[i] for i in rows])
        texts = self.decode(trace)
        self.texts |= zip(rows, texts, strict=True)
        share = sharding.dealt()
        own = [k for k, i in enumerate(rows) if i % share.step == share.start]
        if own:
            grades = self.grader.grade(
                [texts[k] for k in own],
                [self.problems[rows[k]] for k in own],
                jax.tree.map(lambda x: x[own], trace),
            )
            self.grades.append(([rows[k] for k in own], grades))

    def give_up(self):
        """Forgets what waits."""
        with self.lock:
            self.waiting = []

    def result(self, trace: state.Trace) -> tuple[list[str], Grades]:
        """Returns (all texts, the Grades of this process's share), in order.

        trace: of all answers. Raises what a grader raised.
        """
        for job in self.jobs:
            job.result()
        self.work()
        if not self.grades:  # there are fewer answers than processes
            nothing = self.grader.grade([], [], jax.tree.map(lambda x: x[:0], trace))
            self.grades.append(([], nothing))
        return [self.texts[i] for i in range(len(self.problems))], joined(self.grades)


def joined(found: list[tuple[list[int], Grades]]) -> Grades:
    """Returns the Grades of several calls as one, by the numbers of their answers."""
    order = np.argsort([i for rows, _ in found for i in rows], kind="stable")

    def together(arrays) -> np.ndarray:
        return np.concatenate(arrays)[order.astype(int)]

    every = [grades for _, grades in found]
    check_alike([said(grades) for grades in every])
    tokens = [grades.reward_nT for grades in every if grades.reward_nT is not None]
    return Grades(
        together([grades.reward_n for grades in every]),
        together(tokens) if tokens else None,
        {name: together([g.parts[name] for g in every]) for name in every[0].parts},
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
