r"""Short answers, as questions about pictures have: a letter, yes or no, a number, some words.

An answer is what stands in its last `\boxed{}` or `<answer>`, and where it has neither all of
it, but for thoughts in `<think>`. The gold answer says of which kind it is: a single letter is
an option's. Words are the same whatever their case, articles, punctuation and LaTeX's `\text`;
a number is the same however it is written, zero to ten also as words. Where dLLM-RL's verdicts
differ is said in docs/rewards.md.
"""

import re
import string
import unicodedata

from dllm_jax.rl.rewards import choice, math

LONGEST = 200  # characters of what is short
TEX = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
ARTICLES = {"a", "an", "the"}
WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
NUMBERS = {word: str(number) for number, word in enumerate(WORDS)}
VERDICTS = "yes", "no"
# A point between digits is the number's.
PUNCTUATION = re.compile(
    rf"(?<!\d)\.|\.(?!\d)|[{re.escape(string.punctuation.replace('.', ''))}]"
)


def extract(text: str) -> str | None:
    """Returns what an answer says; None where that is nothing, or nothing short.

    So is a box that was cut off: an answer before it is not taken in its place.
    """
    said = math.extract(text)
    if said is None:
        if "\\boxed" in text or "<answer>" in text:
            return None
        said = text.rpartition("</think>")[2].strip()
    return said if 0 < len(said) <= LONGEST else None


def words(text: str) -> list[str]:
    """Returns a text's words, alike for texts that say the same."""
    plain = TEX.sub(r"\1", unicodedata.normalize("NFKC", text)).casefold()
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain)
    sign = "-" if re.match(r"\s*-\s*\.?\d", plain) else ""
    parts = (sign + PUNCTUATION.sub(" ", plain).lstrip()).split()
    return [NUMBERS.get(part, part) for part in parts if part not in ARTICLES]


def verdict(text: str) -> str | None:
    """Returns "yes" or "no" where a text begins with it, and does not say the other too."""
    said = words(text)
    found = set(VERDICTS) & set(said)
    return said[0] if found == {*said[:1]} else None


def equal(answer: str, gold: str) -> bool:
    """Returns whether an answer says what the gold answer does."""
    if len(gold.strip()) == 1 and choice.letter(gold):
        return choice.letter(answer) == choice.letter(gold)
    if words(gold) in ([x] for x in VERDICTS):
        return verdict(answer) == words(gold)[0]
    said, meant = words(answer), words(gold)
    if said == meant:
        return bool(meant)
    try:
        (said,), (meant,) = said, meant
        return float(said) == float(meant)
    except ValueError:  # of several words, or of one that is no number
        return False


def check(gold: str) -> None:
    """Raises ValueError for a gold that is no short answer."""
    said = words(gold) or choice.letter(gold)  # the letter A is an article, too
    if not said or len(gold) > LONGEST:
        raise ValueError(
            f"the gold answer {gold[:80]!r} is no short one: a letter, yes or no, a number "
            "or some words"
        )


def grade(texts: list[str], golds: list[str]) -> list[float]:
    """Returns 1.0 where an answer says what its gold does, else 0.0."""
    answers = [extract(text) for text in texts]
    return [
        float(answer is not None and equal(answer, gold))
        for answer, gold in zip(answers, golds, strict=True)
    ]
