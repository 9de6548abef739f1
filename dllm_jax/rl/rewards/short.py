r"""Short answers, as questions about pictures have: a letter, yes or no, a number, some words.

An answer is what stands in its last `\boxed{}` or `<answer>`, and where it has neither all of
it, but for thoughts in `<think>`. The gold answer says of which kind it is: a single letter is
an option's. Words are the same whatever their case, articles, punctuation and LaTeX's `\text`;
a number is the same however it is written, zero to twelve also as words. Two formulas are compared
as mathematics: there signs and brackets are no punctuation. Where dLLM-RL's verdicts differ is
said in docs/rewards.md.
"""

import re
import string
import unicodedata

from dllm_jax.rl.rewards import choice, math

LONGEST = 200  # characters of what is short
TEX = re.compile(choice.FONT + r"([^{}]*)\}")
ARTICLES = {"a", "an", "the"}
NUMBERS = {word: str(number) for number, word in enumerate(math.WORDS)}
VERDICTS = "yes", "no"
# A point between digits is the number's, and so is a minus right before it.
PUNCTUATION = re.compile(
    r"(?<!\d)\.|\.(?!\d)|(?<=[\w)\]}])-|-(?!\d)"
    rf"|[{re.escape(re.sub('[.-]', '', string.punctuation))}]"
)
AROUND = "*_`\"'“”=#!?~,;: \n"  # a formula these say nothing
COMMAND = re.compile(r"\\[A-Za-z]+")
OPERATOR = re.compile(r"[-+*/^<>=]|" + COMMAND.pattern)
# Without the minus: F-16 is F 16.
INFIX = re.compile(r"[\w)\]}]\s*[+*/^<>=]")

# A score, years, a date or a time: no calculation, though 3-2 is 1.
NOTED = re.compile(r"\d+(?:\s*-\s*\d+)+|\d+(?:\s*:\s*[0-5]\d)+|\d+(?:\s*/\s*\d+){2,}")


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
    plain = unicodedata.normalize("NFKC", TEX.sub(r"\1", text)).casefold()
    plain = re.sub(r"[−–]", "-", re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain))
    plain = re.sub(r"(?<![\w.])\.(?=\d)", "0.", plain)
    plain = PUNCTUATION.sub(" ", re.sub(r"^\s*-\s*(?=\d)", "-", plain))
    return [NUMBERS.get(part, part) for part in plain.split() if part not in ARTICLES]


def formula(text: str) -> str | None:
    """Returns a text of mathematics, without what stands around it; None for another.

    It has no words: numbers, or single letters with operators.
    """
    bare = math.typed(TEX.sub(r"\1", text))
    bare = re.sub(r"\\?\$", "", unicodedata.normalize("NFKC", bare)).strip(AROUND)
    if bracketed := re.fullmatch(r"[(\[{]([^()\[\]{},;]*)[)\]}]", bare):
        bare = bracketed[1].strip()
    left = COMMAND.sub(" ", bare)
    lettered = re.search(r"[^\W\d_]", left)
    if re.search(r"[^\W\d_]{2}", left) or not re.search(r"[^\W_]", left):
        return None
    return None if lettered and not OPERATOR.search(bare) else bare


def noted(text: str) -> list:
    """Returns the numbers of a text and what stands between them."""
    parts = re.findall(r"\d+|[^\d\s]", math.clean(text))
    return [int(x) if x.isdecimal() else x for x in parts]


def verdict(text: str) -> str | None:
    """Returns "yes" or "no" where a text begins with it, and does not say the other too."""
    said = words(text)
    found = set(VERDICTS) & set(said)
    return said[0] if said and found == {said[0]} else None


def money(text: str) -> set[str]:
    """Returns the signs of money in a text; two dollars are mathematics."""
    return {*re.findall("[€£¥]", text), *"$" * (text.count("$") == 1)}


def equal(answer: str, gold: str) -> bool | None:
    """Returns whether an answer says what the gold answer does, None if that took too long."""
    if choice.letter(gold) and (len(gold.strip()) == 1 or not words(gold)):  # (A)
        return choice.letter(answer.strip(AROUND)) == choice.letter(gold)
    if words(gold) in ([x] for x in VERDICTS):
        return verdict(answer) == words(gold)[0]
    signs = money(answer), money(gold)
    if all(signs) and not signs[0] & signs[1]:
        return False
    formulas = formula(answer), formula(gold)
    if all(formulas) and NOTED.fullmatch(re.sub("[−–]", "-", formulas[1])):
        return noted(formulas[0]) == noted(formulas[1])
    if all(formulas):
        alike = formulas[0].casefold() == formulas[1].casefold()  # n/a is N/A
        return alike or math.equal(*formulas)
    # Words would drop the operator that tells a formula from another.
    if any(INFIX.search(x or "") for x in formulas):
        return False
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
    # The letter A is an article, too.
    said = words(gold) or choice.letter(gold) or formula(gold)
    if not said or len(gold) > LONGEST:
        raise ValueError(
            f"the gold answer {gold[:80]!r} is no short one: a letter, yes or no, a number "
            "or some words"
        )


def grade(texts: list[str], golds: list[str]) -> list[float]:
    """Returns 1.0 where an answer says what its gold does, else 0.0; NaN: it took too long."""
    pairs = [*zip(map(extract, texts), golds, strict=True)]
    said = [pair for pair in pairs if pair[0] is not None]
    verdicts = dict(zip(said, math.judged(equal, said, math.MOST), strict=True))
    return [verdicts.get(pair, 0.0) for pair in pairs]
