"""Graders: what a completion is worth, by the data type of its problem.

A grader takes the completions and, one for each, what the problem's row gives to judge
them by (for math the gold answer). It returns one float per completion, 1.0 for right
and 0.0 for wrong, NaN where it found out nothing in time, and raises ValueError where the
row itself is bad: a wrong answer is the model's fault, a bad gold is the data's. Host only:
strings in, floats out, no JAX.
"""

from collections.abc import Callable

from dllm_jax.rl.rewards import math

Grader = Callable[[list[str], list[str]], list[float]]

GRADERS: dict[str, Grader] = {"math": math.grade}
