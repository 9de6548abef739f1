"""Graders: what an answer is worth, by the kind of its problem.

Host only: texts, problems and traces in, numbers out.

`rl.reward` names one, several with weights, or one's own:

    math                       the shipped one
    math:1,length:0.1          weighed and added; each is a metric, the first is accuracy
    math:0,reward_model        a weight of 0: told, and not earned
    mine:brevity               function `brevity` of the importable module `mine`
    math,mine:brevity:0.5      all of it

One's own is a function of (texts, problems, trace), as `Grader.grade` is, that returns n
numbers or Grades. It may have attributes: `check`, a function of a problem, and `aside`, True
where it judges each answer for itself and may be called beside sampling, with some of the
answers at a time. What may take for ever or crash belongs into a `Worker`, a program into the `sandbox`.
"""

import contextlib
import dataclasses
import functools
import math as numbers
import pickle
from collections.abc import Callable
from types import ModuleType

import numpy as np

from dllm_jax import memory
from dllm_jax.data import BadGold, Problem
from dllm_jax.models import repository
from dllm_jax.models.vision.prompts import pictures_of
from dllm_jax.rl.rewards import (
    choice,
    code,
    judge,
    math,
    ocr,
    own,
    process,
    puzzles,
    ranking,
    scenes,
    short,
)


@dataclasses.dataclass(frozen=True)
class Grades:
    """What n answers are worth."""

    reward_n: np.ndarray  # 1 is right, 0 wrong; NaN: not found out
    # Of tokens, by position on the canvas, beside; None: of the answer alone. NaN: the
    # answer was not judged.
    reward_nT: np.ndarray | None = None
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
    told: whether it is told what stands there, if anything does.
    vote(texts): a number for what each answer to one problem says, the same where they say
        the same, -1 where nothing; None: nothing to vote on.
    begin(): starts what it needs before the first answer; returns lines to be said. Raises
        ValueError where it cannot judge here.
    claim(beside, slots): what it takes of a device, a memory.Claim, known before anything
        of size is loaded; called once, after `begin`. beside: bytes of a device that others
        have; slots: positions of a canvas.
    steps(texts, problems, trace, right_n): what is said of the chunks of answers that are
        learned from, a process.Chunks; None where nobody splits them. right_n: which
        answers are right, as `grade` found.
    aside: whether `grade` may be called in a thread beside sampling, with the answers of
        some groups at a time. Otherwise it is called once, with all of them, and in an
        evaluation with some of them.
    """

    grade: Callable[[list[str], list[Problem], object], Grades]
    check: Callable[[Problem], None]
    gold: bool = True
    told: bool = False
    vote: Callable[[list[str]], list[int]] | None = None
    begin: Callable[[], list[str]] = list
    claim: Callable[[int, int], memory.Claim] = lambda beside, slots: memory.NOTHING
    steps: Callable | None = None
    aside: bool = True
    judges: tuple[str, ...] = ("text",)  # values of SamplerConfig.answers
    # Whom it asks; `begin` and `claim` are then its, too.
    asked: judge.Judge | None = None


def by_gold(module: ModuleType, judges: tuple[str, ...] = ("text",)) -> Grader:
    """Returns a module's Grader that compares texts, or images, with gold answers.

    It has grade(texts, golds) and check(gold), and where answers may be voted on
    extract(text) and equal(answer, another).
    """

    def check(problem: Problem) -> None:
        try:
            module.check(problem.answer)
        except ValueError as error:
            raise BadGold(str(error)) from None

    def grade(texts, problems, trace) -> Grades:
        golds = [problem.answer for problem in problems]
        return Grades(np.array(module.grade(texts, golds), np.float32))

    votes = hasattr(module, "extract") and hasattr(module, "equal")
    vote = functools.partial(voted, module) if votes else None
    return Grader(grade, check, judges=judges, vote=vote)


def voted(module: ModuleType, texts: list[str]) -> list[int]:
    """Returns which of the different answers each text gives, from 0; -1: none."""
    different, numbers_n = [], []
    for text in texts:
        answer = module.extract(text)
        if answer is None:
            numbers_n.append(-1)
            continue
        known = (i for i, x in enumerate(different) if alike(module, answer, x))
        number = next(known, len(different))
        different += [answer] * (number == len(different))
        numbers_n.append(number)
    return numbers_n


def alike(module: ModuleType, answer: str, another: str) -> bool:
    """Returns whether two extracted answers are equal; one that is no gold is its text."""
    try:
        return answer == another or bool(module.equal(answer, another))
    except ValueError:
        return False


def by_tests(cfg) -> Grader:
    """Returns the Grader of programs. cfg: rl.config.RewardConfig."""

    def grade(texts, problems, trace) -> Grades:
        pairs = zip(problems, texts, strict=True)
        whole = [problem.begun + text for problem, text in pairs]
        return Grades(np.array(code.grade(whole, problems, cfg), np.float32))

    return Grader(
        grade,
        lambda problem: code.check(problem.record),
        gold=False,
        begin=functools.partial(code.begin, cfg),
    )


def by_rules(name: str) -> Grader:
    """Returns the Grader of a puzzle, a key of puzzles.PUZZLES."""

    def grade(texts, problems, trace) -> Grades:
        return Grades(np.array(puzzles.grade(name, texts, problems), np.float32))

    return Grader(
        grade, lambda problem: puzzles.check(name, problem.record), gold=False
    )


def by_room(room: int) -> Grader:
    """Returns the Grader of the share of its room that each answer leaves free.

    1 for no token at all. room: tokens that an answer may have; 0: what its canvas has.
    """

    def grade(texts, problems, trace) -> Grades:
        room_n = room or trace.tokens_BT.shape[1] - trace.prompt_len_B
        return Grades((1 - trace.len_B / np.maximum(room_n, 1)).astype(np.float32))

    return Grader(grade, anything, gold=False, judges=("text", "image"))


def form(texts, problems, trace) -> Grades:
    r"""Returns 1 where an answer's last `\boxed{}` or `<answer>`, or code block, is closed."""
    found = (math.extract(x) is not None or code.extract(x) is not None for x in texts)
    return Grades(np.array([*found], np.float32))


def compact(pictures, problems, trace) -> Grades:
    """Returns how few bytes each picture's JPEG has: see scenes.compactness."""
    return Grades(np.array([scenes.compactness(x) for x in pictures], np.float32))


def by_judge(cfg, *, looks: bool) -> Grader:
    """Returns the Grader that asks a judge whether an answer is right.

    The reward is the share of its votes that say so, of those that say anything. cfg:
    rl.config.RewardConfig. looks: whether problems may be about images. Raises ValueError
    where no judge is named.
    """
    if not cfg.judge.at:
        raise ValueError(
            "rl.reward='judge' needs reward.judge.at: a URL, a module:function or a "
            "checkpoint's folder"
        )
    asked = judge.judge(cfg.judge, looks=looks)

    def grade(texts, problems, trace) -> Grades:
        pairs = zip(texts, problems, strict=True)
        questions = [
            judge.Question(p.text, p.answer, text, images=judge.images_of(p))
            for text, p in pairs
        ]
        every = [
            [x for x in votes if x or (x == 0 and not asked.boxed)]
            for votes in asked.votes(questions)
        ]
        shares = [np.mean([x > 0 for x in v]) if v else np.nan for v in every]
        return Grades(np.array(shares, np.float32))

    return Grader(
        grade,
        anything,
        gold=False,
        begin=asked.begin,
        claim=asked.claim,
        aside=asked.aside,
        asked=asked,
    )


def by_model(cfg, tok) -> Grader:
    """Returns the Grader whose rewards are the scores of a reward model.

    cfg: rl.config.RewardConfig; tok: the policy's tokenizer, None where none is to be
    compared with the model's own. Raises ValueError where no model is named.
    """
    if not cfg.model:
        raise ValueError(
            "rl.reward='reward_model' needs reward.model, a checkpoint's folder"
        )
    ranker = ranking.Ranker(cfg.model, tok)

    def grade(texts, problems, trace) -> Grades:
        return Grades(ranker.grade(trace))

    def check(problem: Problem) -> None:
        if any(picture.rows for picture in pictures_of(problem.prompt_ids)):
            raise ValueError(
                f"reward.model={cfg.model!r} is shown no images, and a problem has one that "
                "the policy looks at; a judge can see it (rl.reward=judge)"
            )

    return Grader(
        grade,
        check,
        gold=False,
        begin=ranker.begin,
        claim=ranker.claim,
        aside=False,
    )


def anything(problem: Problem) -> None:
    """Lets every problem pass."""


PICTURES = ("scene", "jpeg", "ocr")  # keys of GRADERS that judge images alone
# name: the Grader that a RewardConfig, the policy's tokenizer, whether its problems may be
# about images, and how many tokens an answer may have make of it.
GRADERS: dict[str, Callable[[object, object, bool, int], Grader]] = {
    "math": lambda cfg, tok, looks, room: by_gold(math),
    "choice": lambda cfg, tok, looks, room: by_gold(choice),
    "short": lambda cfg, tok, looks, room: by_gold(short),
    "code": lambda cfg, tok, looks, room: by_tests(cfg),
    "judge": lambda cfg, tok, looks, room: by_judge(cfg, looks=looks),
    "reward_model": lambda cfg, tok, looks, room: by_model(cfg, tok),
    "countdown": lambda cfg, tok, looks, room: by_rules("countdown"),
    "sudoku": lambda cfg, tok, looks, room: by_rules("sudoku"),
    "length": lambda cfg, tok, looks, room: by_room(room),
    "scene": lambda cfg, tok, looks, room: by_gold(scenes, judges=("image",)),
    "ocr": lambda cfg, tok, looks, room: dataclasses.replace(
        by_gold(ocr, judges=("image",)), begin=ocr.begin
    ),
    "jpeg": lambda cfg, tok, looks, room: Grader(
        compact, anything, gold=False, judges=("image",)
    ),
    "format": lambda cfg, tok, looks, room: Grader(form, anything, gold=False),
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
    if not any(found.values()):
        raise ValueError(f"{spec!r}: one weight at least is not 0")
    return found


def weight(entry: str, given: list[str]) -> float:
    """Returns the weight that an entry ends in, 1 for none; raises ValueError for others."""
    try:
        (number,) = map(float, given or ["1"])
    except ValueError:
        number = numbers.nan
    if not numbers.isfinite(number):
        raise ValueError(f"{entry!r}: a weight is one finite number")
    return number


def grader(
    spec: str,
    cfg,
    tok=None,
    answers: str = "text",
    *,
    looks: bool = False,
    room: int = 0,
) -> Grader:
    """Returns the one Grader that `rl.reward` and `reward.split` say.

    cfg: rl.config.RewardConfig; tok: the policy's tokenizer; without it no answer is
    split. answers: what they are, SamplerConfig.answers; "": there are none to judge.
    looks: whether problems may be about images. room: tokens that an answer may have,
    SamplerConfig.max_new; 0: what its canvas has. Raises ValueError for what `weights`
    refuses, for a function that is not there, and for a judge of something else.
    """
    outcome = of_outcomes(spec, cfg, tok, answers, looks=looks, room=room)
    if answers == "image":  # devices decode pictures: not in a thread beside sampling
        outcome = dataclasses.replace(outcome, aside=False)
    if cfg.split == "none" or tok is None:
        return outcome
    if outcome.asked:  # of whole answers and of their chunks: one judge, loaded once
        return dataclasses.replace(
            outcome, steps=process.steps(cfg, outcome.asked, tok)
        )
    asked = judge.judge(cfg.judge, looks=looks)
    return dataclasses.replace(
        outcome,
        told=True,  # the judge of chunks
        begin=lambda: [*outcome.begin(), *asked.begin()],
        claim=together(outcome.claim, asked.claim),
        steps=process.steps(cfg, asked, tok),
    )


def of_outcomes(spec: str, cfg, tok, answers: str, *, looks: bool, room: int) -> Grader:
    """Returns the Grader of whole answers that `rl.reward` says: see `grader`."""
    weighed = weights(spec)
    made = {
        x: GRADERS[x](cfg, tok, looks, room) if x in GRADERS else loaded(x)
        for x in weighed
    }
    for name, one in made.items():
        if answers and answers not in one.judges:
            fit = [x for x in GRADERS if x not in PICTURES]
            fit = (*PICTURES, "length") if answers == "image" else fit
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
        told=any(one.told for one in made.values()),
        vote=next(iter(made.values())).vote,  # the first says what is right
        begin=lambda: [line for one in made.values() for line in one.begin()],
        claim=together(*(one.claim for one in made.values())),
        aside=all(one.aside for one in made.values()),
        asked=next((one.asked for one in made.values() if one.asked), None),
    )


def together(*claims: Callable) -> Callable[[int, int], memory.Claim]:
    """Returns the `claim` of a Grader that asks others, of theirs."""

    def claim(beside: int, slots: int) -> memory.Claim:
        guests = [functools.partial(one, slots=slots) for one in claims]
        return memory.claimed(guests, beside)

    return claim


def added(every: dict[str, Grades], weighed: dict[str, float]) -> Grades:
    """Returns the weighed sum of Grades; NaN where one of them is that has a weight."""
    earned = [(weighed[x], grades) for x, grades in every.items() if weighed[x]]
    reward_n = sum(share * grades.reward_n for share, grades in earned)
    tokens = [share * g.reward_nT for share, g in earned if g.reward_nT is not None]
    parts = {}
    for x, name in part_names([*every]).items():
        own = every[x].parts  # of one's own function: its first says what is right
        parts |= {f"{name}/{part}": rewards for part, rewards in own.items()}
        parts[name] = every[x].reward_n
    return Grades(reward_n, sum(tokens) if tokens else None, parts)


def part_names(graders: list[str]) -> dict[str, str]:
    """Returns what each grader's part is called: a function's name, without its module.

    With it where another grader would be called the same, or the verdicts on chunks are.
    """
    short = {x: x.split(":")[-1] for x in graders}
    taken = [*short.values(), "verdict"]
    return {x: x if taken.count(name) > 1 else name for x, name in short.items()}


def loaded(name: str) -> Grader:
    """Returns the Grader of a `module:function`; raises ValueError where there is none."""
    function = own.function("rl.reward", name)

    def grade(texts, problems, trace) -> Grades:
        # Lists and records of its own: what it changes are not those of other graders.
        mine = {id(problem): own_copy(problem) for problem in problems}
        arguments = list(texts), [mine[id(problem)] for problem in problems], trace
        given = own.said("rl.reward", name, function, *arguments)
        grades = arrays(name, given if isinstance(given, Grades) else Grades(given))
        for rewards in (grades.reward_n, *grades.parts.values()):
            if rewards.shape != (len(texts),):
                raise ValueError(
                    f"rl.reward={name!r} returned grades of shape {rewards.shape} for "
                    f"{len(texts)} answers"
                )
        tokens = grades.reward_nT
        if tokens is not None and tokens.shape != trace.tokens_BT.shape:
            raise ValueError(
                f"rl.reward={name!r} returned rewards of tokens of shape {tokens.shape}; the "
                f"canvases are {trace.tokens_BT.shape}"
            )
        return grades

    def check(problem: Problem) -> None:
        try:
            with own.staying("rl.reward", name):
                function.check(problem)
        except ValueError:  # its word on the record
            raise
        except Exception as error:
            told = own.raised(f"rl.reward={name!r}: its check", error)
            raise ValueError(told) from error

    judges = "text", "image"
    return Grader(
        grade,
        check if hasattr(function, "check") else anything,
        gold=False,
        told=True,
        aside=bool(getattr(function, "aside", False)),
        judges=judges,
    )


def own_copy(problem: Problem) -> Problem:
    """Returns a problem with a record of its own, where one can be made.

    Its `check` may have put into it what cannot be copied.
    """
    try:  # a seventh of the time of copy.deepcopy
        record = pickle.loads(pickle.dumps(problem.record))
    except Exception:  # noqa: BLE001 (it may be anything)
        return problem
    return dataclasses.replace(problem, record=record)


def sources(spec: str, cfg, *, chunks: bool = True) -> dict[str, str]:
    """Returns a hash of each function of one's own and checkpoint that judges, by its name.

    The arguments are those of `grader`; which raises ValueError for the same functions. Of
    folders that cannot be read whoever reads them tells. chunks: whether reward.split is
    asked for, too.
    """
    weighed = weights(spec)
    functions = [("rl.reward", name) for name in weighed if name not in GRADERS]
    asks = "judge" in weighed or (chunks and cfg.split != "none")
    if asks and own.names_function(cfg.judge.at):
        functions.append(("reward.judge.at", cfg.judge.at))
    folders = {"reward.model": cfg.model} if "reward_model" in weighed else {}
    if asks and judge.names_folder(cfg.judge.at):
        folders["reward.judge.at"] = cfg.judge.at
    told = {f"the source of {name}": own.source(key, name) for key, name in functions}
    for key, folder in folders.items():
        with contextlib.suppress(ValueError, OSError):
            marks = repository.marks(repository.find(folder))
            told[f"the checkpoint of {key}"] = str(marks)
    return told


def arrays(name: str, grades: Grades) -> Grades:
    """Returns what a function has found, lists or other arrays, as arrays: see `array`."""
    tokens = grades.reward_nT
    return Grades(
        array(name, grades.reward_n),
        None if tokens is None else array(name, tokens),
        {part: array(name, rewards) for part, rewards in grades.parts.items()},
    )


def array(name: str, given) -> np.ndarray:
    """Returns numbers as an array; raises ValueError where they are none.

    And for one that is infinite; NaN is "nobody can tell".
    """
    try:
        with np.errstate(over="ignore"):  # what is infinite then is refused
            rewards = np.array(given, np.float32)
        made = np.asarray(given)
        if made.dtype.kind in "USO" and any(isinstance(x, str) for x in made.flat):
            raise TypeError("texts")
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"rl.reward={name!r} returned what is no list of numbers"
        ) from None
    infinite = np.isinf(rewards)
    if infinite.any():
        raise ValueError(
            f"rl.reward={name!r} returned {rewards[infinite][0]}: a reward is a finite "
            "number, or NaN where nobody can tell"
        )
    return rewards
