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
import contextlib
import dataclasses
import functools
import importlib
import inspect
import math as numbers
import os
import sys
import traceback
from collections.abc import Callable, Iterable

from dllm_jax import exits, memory, processes
from dllm_jax.data import Problem
from dllm_jax.images import MARK
from dllm_jax.rl.rewards import endpoint, lent, math
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
# With what functions of one's own are called, by the key that names them.
GIVEN = {
    "rl.reward": ("texts", "problems", "trace"),
    "reward.judge.at": ("questions",),
}
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
        given = said("reward.judge.at", name, lambda: listed(function(questions)))
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


def function(key: str, name: str) -> Callable:
    """Returns the function that a `module:function` names.

    key: where it stands. Raises ValueError where there is none, where it takes something else
    than what is `GIVEN`, and with the place where its module raised.
    """
    module, _, wanted = name.partition(":")
    try:
        with staying(key, name):
            there = importlib.import_module(module)
    except ModuleNotFoundError as error:
        own = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        hint = (
            "; its folder must be the one the command is started in, or on PYTHONPATH"
        )
        raise ValueError(f"{key}={name!r}: {error}{hint if own else ''}") from None
    except (Exception, SystemExit) as error:  # whatever its author wrote
        told = raised(f"{key}={name!r}: its module", error)
        raise ValueError(told) from error
    own = getattr(there, wanted, None)
    if own is None:
        raise ValueError(f"{key}={name!r}: {module} has no {wanted}")
    called = callable(own)
    if not called:
        raise ValueError(f"{key}={name!r}: {wanted} is no function")
    try:
        takes = inspect.signature(own)
    except ValueError:  # of some that are written in C nobody knows it
        return own
    try:
        takes.bind(*GIVEN[key])
    except TypeError:
        wants = f"it is called with ({', '.join(GIVEN[key])}), and takes {takes}"
        raise ValueError(f"{key}={name!r}: {wants}") from None
    return own


def source(key: str, name: str) -> str:
    """Returns a hash of the file in which the function of a `module:function` stands.

    key: where it stands itself. "": its module is no file. Raises ValueError as `function`.
    """
    function(key, name)
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    if file is None or not os.path.isfile(file):
        return ""
    return processes.content(file)


def said(key: str, name: str, function: Callable, *arguments):
    """Returns what a `module:function` returns.

    key: where it stands. Raises ValueError with the place where the function raised.
    """
    try:
        with staying(key, name):
            return function(*arguments)
    except exits.StoppedAtOnce:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(raised(f"{key}={name!r}", error)) from error


def raised(who: str, error: BaseException) -> str:
    """Returns a line of who raised an error, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text, file, line = worded(error), frame.filename, frame.lineno
    if isinstance(error, SyntaxError) and error.filename:  # no frame is of its file
        text, file, line = error.msg, error.filename, error.lineno
    text = " ".join(text.split())[:300]
    return f"{who} raised {type(error).__name__}: {text} ({file}, line {line})"


def worded(error: BaseException) -> str:
    """Returns an error's words; "" where it has none that can be told."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (it is somebody's own class)
        return ""


@contextlib.contextmanager
def staying(key: str, name: str):
    """Puts the working directory back where what is inside changes it, and says so once.

    Relative paths, such as the run's folder, are named from it. A child that is forked inside
    ends here: it would go on as a second run. key, name: of the function.
    """
    own, code = os.getpid(), 0
    try:
        place = os.getcwd()
    except OSError:  # somebody has removed it
        place = None
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if os.getpid() != own and not isinstance(error, SystemExit):
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != own:
            os._exit(code if isinstance(code, int) else int(code is not None))
        if place and not (os.path.isdir(".") and os.path.samefile(".", place)):
            os.chdir(place)
            warn_moved(key, name)


@functools.cache
def warn_moved(key: str, name: str) -> None:
    """Says that a function has changed the working directory."""
    exits.warn(
        f"{key}={name!r} changes the working directory, from which the run's paths are named: "
        "it is put back after each call"
    )


def names_function(at: str) -> bool:
    """Returns whether a judge is a `module:function`."""
    module, _, wanted = at.partition(":")
    return all(x.isidentifier() for x in (*module.split("."), wanted))


def names_folder(at: str) -> bool:
    """Returns whether a judge is a checkpoint."""
    return bool(at) and "://" not in at and not names_function(at)


def judge(cfg, *, looks: bool = False) -> Judge:
    """Returns the Judge that `reward.judge.at` names. cfg: rl.config.JudgeConfig.

    looks: whether what is judged may be about images. Raises ValueError for a function that
    is not there.
    """
    if "://" in cfg.at:
        return at_endpoint(cfg, looks=looks)
    if names_function(cfg.at):
        return of_function(cfg.at, function("reward.judge.at", cfg.at))
    lender = lent.Lent(cfg, looks=looks)
    return of_texts(cfg, lender.answers, lender.begin, aside=False, claim=lender.claim)


def at_endpoint(cfg, *, looks: bool) -> Judge:
    """Returns the Judge behind a URL."""
    asked = endpoint.Endpoint(cfg, looks=looks)
    return of_texts(cfg, asked.answers, asked.begin)
