"""Graders: what an answer is worth, by the kind of its problem.

Host only: strings in, floats out, no JAX.

To add one: a module of this folder with the two functions of `Grader`, and its row in
GRADERS; `rl.reward` names the row. What may take for ever or crash belongs into a `Worker`.
"""

import dataclasses
from collections.abc import Callable

from dllm_jax.rl.rewards import math


@dataclasses.dataclass(frozen=True)
class Grader:
    """How answers to one kind of problem are judged.

    grade(texts, golds): the texts of n answers and, for each, what its problem's record
        gives to judge it by (for math: the gold answer). Returns n floats, 1.0 for right
        and 0.0 for wrong, NaN where nothing was found out in time; what is between 0 and 1
        is partly right. The same for the same text and gold, but for time-outs. A text that
        makes no sense is wrong: that is the model's fault, never an error.
    check(gold): raises ValueError for a gold that nobody can judge by: that is the data's
        fault. Called for every problem of a file before a run starts, so it must be cheap;
        what it lets through, `grade` does not refuse.
    """

    grade: Callable[[list[str], list[str]], list[float]]
    check: Callable[[str], None]


GRADERS: dict[str, Grader] = {"math": Grader(grade=math.grade, check=math.check)}
