r"""Judges: what is asked of them, what their answers say, and the votes they give.

`reward.judge.at` says who judges:

    http://host:8000/v1     an endpoint of OpenAI's chat completions (endpoint.py)
    module:function         a function of Questions that returns a number for each, or None
    DIR                     a checkpoint, sampled by the engine (lent.py)

A model is asked `reward.judge.votes` times and answers `\boxed{1}` or `\boxed{-1}`; a text
without either is a vote of 0, an endpoint that says nothing is a vote of None. No model ends
a run: what it cannot say is counted, and said in a line when its reason is new. A function
that raises does, with its place.
"""

import collections
import dataclasses
import math as numbers
from collections.abc import Callable, Iterable

from dllm_jax import exits, memory
from dllm_jax.data import Problem
from dllm_jax.images import MARK
from dllm_jax.rl.rewards import endpoint, lent, math, own
from dllm_jax.sampling import answers

SYSTEM = (
    "You check solutions of problems. You reason briefly, and end every answer with "
    r"\boxed{1} or \boxed{-1}."
)
STEP = r"""Problem:
{problem}
{reference}
A complete solution, whose final answer is {outcome}:
{solution}

The excerpt to judge, which ends where the solution was cut into pieces, perhaps in the middle of a line:
{excerpt}

Judge the excerpt alone: is what it says right, and does it lead to a right answer? That it breaks off is no error. End with \boxed{{1}} if it is good and \boxed{{-1}} if it is not."""
WHOLE = r"""Problem:
{problem}
{reference}
An answer to it:
{solution}

Is the answer right and complete? End with \boxed{{1}} if it is and \boxed{{-1}} if it is not."""
MUTE = (
    r"neither \boxed{1} nor \boxed{-1}: votes of 0; reward.judge.tokens may cut them, or it "
    "does not do as it is asked"
)
VOTES = {"1": 1.0, "+1": 1.0, "-1": -1.0, "−1": -1.0}


@dataclasses.dataclass(frozen=True)
class Question:
    """What a judge is asked: of a chunk of an answer, or of all of it."""

    problem: str
    gold: str  # the reference answer; "" where there is none
    solution: str  # the whole answer
    right: bool | None = None  # its outcome; None: it is what the judge is asked
    excerpt: str = ""  # what is there when the chunk ends, and
    part: str = ""  # ... what the chunk adds
    # Of the images that the problem is about, their files and the marks of their pixels.
    images: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict]:
        """The question as a conversation."""
        form = WHOLE if self.right is None else STEP
        reference = f"\nIts reference answer: {self.gold}\n" if self.gold else ""
        outcome = "correct" if self.right else "incorrect"
        given = {"reference": reference, "outcome": outcome}
        text = form.format(**dataclasses.asdict(self), **given)
        if self.images:  # which come first, wherever the problem has their marks
            text = text.replace(MARK, "")
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": text},
        ]


def images_of(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Returns a problem's images as Question.images; codes without a file are none."""
    prompt = getattr(problem, "prompt_ids", ())  # a stand-in may have none
    found = answers.images_of(prompt).get("images", [])
    return tuple((image["file"], image["mark"]) for image in found)


def about_image(problem: Problem) -> bool:
    """Returns whether a problem shows an image, be it one that no judge can be shown."""
    record = getattr(problem, "record", {})  # a stand-in may have none
    return bool(images_of(problem)) or record.get("image_token_ids") is not None


def vote(text: str | None) -> float | None:
    """Returns what a judge's answer says: 1, -1, or 0 for neither; None stays None.

    Thoughts say nothing, nor does an answer that was cut in them.
    """
    if text is None:
        return None
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return 0.0
    return VOTES.get((math.extract(text) or "").replace(" ", ""), 0.0)


@dataclasses.dataclass(frozen=True)
class Judge:
    """Who judges, made by `judge`.

    votes(questions): the votes on each: numbers, most often 1, 0 and -1, or None for none.
    begin(), claim(beside, slots): as the Grader's.
    aside: whether it may be asked in a thread beside sampling.
    boxed: whether its votes are what texts have in boxes, and 0 is none; else numbers are meant.
    """

    votes: Callable[[list[Question]], list[list[float | None]]]
    begin: Callable[[], list[str]] = list
    aside: bool = True
    claim: Callable[[int, int], memory.Claim] = lambda beside, slots: memory.NOTHING
    boxed: bool = True


def of_texts(cfg, told: Callable, begin: Callable, **others) -> Judge:
    """Returns the Judge of a model. others: further fields of the Judge.

    told(conversations, the images of each) returns (a text or None for each, a Counter of
    the reasons for None).
    """
    said = set()

    def votes(questions) -> list[list[float | None]]:
        asked = [x for x in questions for _ in range(cfg.votes)]
        texts, reasons = told([x.messages for x in asked], [x.images for x in asked])
        tell(reasons, len(texts), said)
        every = [vote(text) for text in texts]
        tell_mute(every, said)
        return [every[i : i + cfg.votes] for i in range(0, len(every), cfg.votes)]

    return Judge(votes, begin, **others)


def tell(reasons: collections.Counter, count: int, said: set[str]) -> None:
    """Says in a line for which reasons a judge said nothing, those that are new."""
    if new := [reason for reason in reasons if reason not in said]:
        said.update(new)
        exits.warn(
            f"the judge: {sum(reasons.values())} of {count} questions got no answer "
            f"({'; '.join(new)}); the run goes on, and counts them"
        )


def tell_mute(every: list[float | None], said: set[str]) -> None:
    """Says once where half of a judge's answers or more are votes of 0."""
    told, mute = sum(x is not None for x in every), every.count(0)
    if mute and 2 * mute >= told and MUTE not in said:
        said.add(MUTE)
        exits.warn(f"the judge: {mute} of {told} answers have {MUTE}")


def of_function(name: str, function: Callable) -> Judge:
    """Returns the Judge of a function of Questions that returns a number for each."""

    def votes(questions) -> list[list[float | None]]:
        if not questions:  # nothing is kept of a step, or of a process's share
            return []
        given = own.said("reward.judge.at", name, lambda: listed(function(questions)))
        if len(given) != len(questions) or not all(map(is_vote, given)):
            raise ValueError(
                f"reward.judge.at={name!r} returned no list of {len(questions)} finite "
                "numbers (None: it cannot tell)"
            )
        return [[None if x is None else float(x)] for x in given]

    return Judge(votes, boxed=False)


def listed(given) -> list:
    """Returns a function's verdicts in their order; [] for what has none."""
    ordered = isinstance(given, Iterable) and not isinstance(
        given, dict | set | frozenset
    )
    return list(given) if ordered and getattr(given, "ndim", 1) else []


def is_vote(given) -> bool:
    """Returns whether a function's verdict is one: a finite number, or None."""
    try:
        return given is None or numbers.isfinite(given)
    except (TypeError, OverflowError):
        return False


def names_folder(at: str) -> bool:
    """Returns whether a judge is a checkpoint."""
    return bool(at) and "://" not in at and not own.names_function(at)


def judge(cfg, *, looks: bool = False) -> Judge:
    """Returns the Judge that `reward.judge.at` names. cfg: rl.config.JudgeConfig.

    looks: whether what is judged may be about images. Raises ValueError for a function that
    is not there.
    """
    if "://" in cfg.at:
        return at_endpoint(cfg, looks=looks)
    if own.names_function(cfg.at):
        function = own.function("reward.judge.at", cfg.at)
        return of_function(cfg.at, function)
    lender = lent.Lent(cfg, looks=looks)
    return of_texts(cfg, lender.answers, lender.begin, aside=False, claim=lender.claim)


def at_endpoint(cfg, *, looks: bool) -> Judge:
    """Returns the Judge behind a URL."""
    asked = endpoint.Endpoint(cfg, looks=looks)
    return of_texts(cfg, asked.answers, asked.begin)
