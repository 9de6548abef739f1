r"""Multiple choice: the letter in the last `\boxed{}` or `<answer>` of an answer."""

import re

from dllm_jax.rl.rewards import math

FONT = r"\\(?:text|math)(?:rm|bf|sf|it)?\s*\{"
# A letter alone, in brackets, or before the option's own words: "C", "(c)", "C. Paris".
LETTER = re.compile(rf"(?:{FONT})?\s*\(?\s*([A-Za-z])\s*(?:[).:}}](?:.|\n)*)?")
MARKS = re.compile(r"[*_`$]")  # of Markdown and mathematics, as in **B.** and $B$


def letter(text: str) -> str | None:
    """Returns the letter of an option in capitals; None where a text names none."""
    match = LETTER.fullmatch(MARKS.sub("", text).strip())
    return match[1].upper() if match else None


def extract(text: str) -> str | None:
    """Returns the letter that an answer gives; None where it gives none."""
    return letter(math.extract(text) or "")


def equal(answer: str, gold: str) -> bool:
    """Returns whether two letters are the same."""
    return answer == gold


def check(gold: str) -> None:
    """Raises ValueError for a gold that is no letter."""
    if letter(gold) is None:
        raise ValueError(
            f"the gold answer {gold!r} is no letter of an option, such as 'B'"
        )


def grade(texts: list[str], golds: list[str]) -> list[float]:
    """Returns 1.0 where an answer's letter is the gold's, else 0.0."""
    answers = [extract(text) for text in texts]
    return [float(a == letter(g)) for a, g in zip(answers, golds, strict=True)]
