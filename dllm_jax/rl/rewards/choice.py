r"""Multiple choice: the letter in the last `\boxed{}` or `<answer>` of an answer."""

import re

from dllm_jax.rl.rewards import math

FONT = r"\\(?:text|math)(?:rm|bf|sf|it|tt|normal|bb|cal)?\s*\{"
# A letter alone, in brackets, or before the option's own words: "C", "(c)", "C. Paris".
LETTER = re.compile(
    rf"(?:{FONT}\s*)*(?:(?:option|choice)\s+)?(?:{FONT}\s*)*[(\[]?\s*([A-Za-z])"
    r"\s*(?:(?:[]).:}]|\s[-–—]\s)((?:.|\n)*))?",
    re.IGNORECASE,
)
# Other options behind it, and no words of its own: "(B) or (C)", "A. B. C. D.".
OTHERS = re.compile(
    r"(?:[\s,;/&.]*(?:or|and)?[\s,;/&]*\(?\s*[a-z]\s*[).:])+(?:[\s,;/&]*\(?[a-z])?"
    r"|[\s).:]*(?:\b(?:or|and)\b|[,;/&])\s*\(?[a-z]\b.?",
    re.IGNORECASE,
)
ANOTHER = re.compile(r"\b(?:or|and)\s+\(?[A-Z][.):]\s")  # behind an option's own words
MARKS = re.compile(r"[*_`$\"“”]|\\[()[\]]")  # of Markdown, mathematics and speech


def letter(text: str) -> str | None:
    """Returns the letter of an option in capitals; None where a text names none, or several."""
    match = LETTER.fullmatch(MARKS.sub("", text).strip())
    said = ((match and match[2]) or "").strip()
    if match is None or OTHERS.fullmatch(said) or ANOTHER.search(said):
        return None
    return match[1].upper()


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
