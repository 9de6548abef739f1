"""Graders: what an answer is worth, by the kind of its problem.

Host only: texts, problems and traces in, numbers out.

`rl.reward` names one, several with weights, or one's own:

    math                       the shipped one
    math:1,length:0.1          weighed and added; each is a metric, the first is accuracy
    mine:brevity               function `brevity` of the importable module `mine`
    math,mine:brevity:0.5      all of it

One's own is a function of (texts, problems, trace), as `Grader.grade` is, that returns n
numbers or Grades. It may have an attribute `check`, a function of a problem. What may take
for ever or crash belongs into a `Worker`, a program into the `sandbox`.
"""

import dataclasses
import functools
import importlib
import math as numbers
from collections.abc import Callable
from types import ModuleType

import numpy as np

from dllm_jax.data import BadGold, Problem
from dllm_jax.rl.rewards import choice, code, math, scenes


@dataclasses.dataclass(frozen=True)
class Grades:
    """What n answers are worth."""

    reward_n: np.ndarray  # 1 is right, 0 wrong; NaN: not found out
    reward_nT: np.ndarray | None = None  # of tokens, beside; None: of the answer alone
    # What it is made of, by name, before weights; the first says what is right.
    parts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Grader:
    """How answers to one kind of problem are judged.

    grade(texts, problems, trace): n answers as texts, the data.Problem of each with its
        record, and their Trace. Returns Grades: 1.0 for right and 0.0 for wrong, NaN where
        nothing was found out in time or the judge itself failed; what is between 0 and 1 is
        partly right. The same for the same text and problem, but for time-outs. A text that
        makes no sense is wrong: that is the model's fault, never an error.
    check(problem): raises ValueError for a problem that nobody can judge by: that is the
        data's fault. Called for every problem of a file before a run starts, so it must be
        cheap; what it lets through, `grade` does not refuse.
    gold: whether it needs the field that data.answer names.
    begin(): starts what it needs before the first answer; returns lines to be said. Raises
        ValueError where it cannot judge here.
    """

    grade: Callable[[list[str], list[Problem], object], Grades]
    check: Callable[[Problem], None]
    gold: bool = True
    begin: Callable[[], list[str]] = list
    judges: tuple[str, ...] = ("text",)  # values of SamplerConfig.answers


def by_gold(module: ModuleType, judges: tuple[str, ...] = ("text",)) -> Grader:
    """Returns a module's Grader that compares texts, or images, with gold answers.

    It has grade(texts, golds) and check(gold).
    """

    def check(problem: Problem) -> None:
        try:
            module.check(problem.answer)
        except ValueError as error:
            raise BadGold(str(error)) from None

    def grade(texts, problems, trace) -> Grades:
        golds = [problem.answer for problem in problems]
        return Grades(np.array(module.grade(texts, golds), np.float32))

    return Grader(grade, check, judges=judges)


def by_tests(cfg) -> Grader:
    """Returns the Grader of programs. cfg: rl.config.RewardConfig."""

    def grade(texts, problems, trace) -> Grades:
        return Grades(np.array(code.grade(texts, problems, cfg), np.float32))

    return Grader(
        grade,
        lambda problem: code.check(problem.record),
        gold=False,
        begin=functools.partial(code.begin, cfg),
    )


def shortness(texts, problems, trace) -> Grades:
    """Returns the share of its room that each answer leaves free: 1 for no token at all."""
    room_n = trace.tokens_BT.shape[1] - trace.prompt_len_B
    return Grades((1 - trace.len_B / np.maximum(room_n, 1)).astype(np.float32))


def form(texts, problems, trace) -> Grades:
    r"""Returns 1 where an answer ends in a closed `\boxed{}`, `<answer>` or code block."""
    found = (math.extract(x) is not None or code.extract(x) is not None for x in texts)
    return Grades(np.array([*found], np.float32))


def compact(pictures, problems, trace) -> Grades:
    """Returns how few bytes each picture's JPEG has: see scenes.compactness."""
    return Grades(np.array([scenes.compactness(x) for x in pictures], np.float32))


def anything(problem: Problem) -> None:
    """Lets every problem pass."""


# name: the Grader that a RewardConfig makes of it.
GRADERS: dict[str, Callable[[object], Grader]] = {
    "math": lambda cfg: by_gold(math),
    "choice": lambda cfg: by_gold(choice),
    "code": by_tests,
    "length": lambda cfg: Grader(
        shortness, anything, gold=False, judges=("text", "image")
    ),
    "scene": lambda cfg: by_gold(scenes, judges=("image",)),
    "jpeg": lambda cfg: Grader(compact, anything, gold=False, judges=("image",)),
    "format": lambda cfg: Grader(form, anything, gold=False),
}


# ---- Names, weights, one's own -------------------------------------------------------


def weights(spec: str) -> dict[str, float]:
    """Returns the graders that `rl.reward` names, each with its weight.

    A name is a key of GRADERS or a `module:function`. Raises ValueError for others.
    """
    found = {}
    for entry in spec.split(","):
        name, *rest = entry.strip().split(":")
        if name not in GRADERS:
            if not rest or not all(
                x.isidentifier() for x in (*name.split("."), rest[0])
            ):
                which = "" if entry == spec else f"{entry!r} is no grader: "
                raise ValueError(
                    f"{which}choose from {', '.join(GRADERS)}, or name your own as "
                    "module:function; a weight follows a colon, as in 'math:1,length:0.1'"
                )
            name, rest = f"{name}:{rest[0]}", rest[1:]
        if name in found:
            raise ValueError(f"{name!r} is named twice")
        found[name] = weight(entry, rest)
    return found


def weight(entry: str, given: list[str]) -> float:
    """Returns the weight that an entry ends in, 1 for none; raises ValueError for others."""
    try:
        (number,) = map(float, given or ["1"])
    except ValueError:
        number = numbers.nan
    if not (numbers.isfinite(number) and number):
        raise ValueError(f"{entry!r}: a weight is one finite number, and not 0")
    return number


def grader(spec: str, cfg, answers: str = "text") -> Grader:
    """Returns the one Grader that `rl.reward` says. cfg: rl.config.RewardConfig.

    answers: what they are, SamplerConfig.answers. Raises ValueError for what `weights`
    refuses, for a function that is not there, and for a judge of something else.
    """
    weighed = weights(spec)
    made = {x: GRADERS[x](cfg) if x in GRADERS else loaded(x) for x in weighed}
    for name, one in made.items():
        if answers not in one.judges:
            fit = [x for x, row in GRADERS.items() if answers in row(cfg).judges]
            raise ValueError(
                f"rl.reward={name!r} judges no {answers}, which answers are "
                f"(sampler.answers); choose from {', '.join(fit)}, or your own"
            )
    if len(made) == 1 and [*weighed.values()] == [1.0]:
        return next(iter(made.values()))

    def check(problem: Problem) -> None:
        for one in made.values():
            one.check(problem)

    def grade(texts, problems, trace) -> Grades:
        every = {x: one.grade(texts, problems, trace) for x, one in made.items()}
        return added(every, weighed)

    return Grader(
        grade,
        check,
        gold=any(one.gold for one in made.values()),
        begin=lambda: [line for one in made.values() for line in one.begin()],
    )


def added(every: dict[str, Grades], weighed: dict[str, float]) -> Grades:
    """Returns the weighed sum of Grades; NaN where one of them is."""
    reward_n = sum(weighed[x] * grades.reward_n for x, grades in every.items())
    tokens = [
        weighed[x] * grades.reward_nT
        for x, grades in every.items()
        if grades.reward_nT is not None
    ]
    parts = {x.split(":")[-1]: grades.reward_n for x, grades in every.items()}
    return Grades(reward_n, sum(tokens) if tokens else None, parts)


def loaded(name: str) -> Grader:
    """Returns the Grader of a `module:function`; raises ValueError where there is none."""
    module, _, function = name.partition(":")
    try:
        own = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ValueError(
            f"rl.reward={name!r}: {error}; its folder must be the one the command is "
            "started in, or on PYTHONPATH"
        ) from None
    except AttributeError:
        raise ValueError(f"rl.reward={name!r}: {module} has no {function}") from None
    called = callable(own)
    if not called:
        raise ValueError(f"rl.reward={name!r}: {function} is no function")

    def grade(texts, problems, trace) -> Grades:
        given = own(texts, problems, trace)
        grades = given if isinstance(given, Grades) else Grades(array(name, given))
        if np.shape(grades.reward_n) != (len(texts),):
            raise ValueError(
                f"rl.reward={name!r} returned grades of shape {np.shape(grades.reward_n)} "
                f"for {len(texts)} answers"
            )
        return grades

    check = getattr(own, "check", anything)
    return Grader(grade, check, gold=False, judges=("text", "image"))


def array(name: str, given) -> np.ndarray:
    """Returns numbers as an array; raises ValueError where they are none."""
    try:
        return np.array(given, np.float32)
    except (TypeError, ValueError):
        raise ValueError(
            f"rl.reward={name!r} returned what is no list of numbers"
        ) from None
