r"""Math answers: strict extraction, exact comparison, math-verify in a killable worker.

`grade` takes the last `\boxed{}` or `<answer>` of a completion, never a number that
merely occurs in it, and compares it with the gold answer in three stages:

1. the same string, once the spelling of LaTeX, units and currency are normalised;
2. the same number: integers, decimals, fractions, thousands and percent, as exact
   `Fraction`s (0.333 is not 1/3, and 12,34 is a list);
3. element by element for lists, sets, tuples and intervals, symbolically for the rest.

Stage 3 runs math-verify, which can think for ever (`9^{9^{9^9}}`) and misreads what a
policy could learn to write (`1=5` passes for 5). So it lives in a subprocess (worker.py),
killed when an answer takes too long, and sees nothing that it is known to misread. The
subprocess imports this file, which therefore imports nothing of the package at its top.
"""

import atexit
import concurrent.futures
import functools
import importlib.util
import pathlib
import re
from collections.abc import Callable
from fractions import Fraction

LIMIT_S = 3.0  # that an answer may take
MOST = 8  # workers: each holds 80 MB and more
DIGITS_READ = 4_300  # of a number: Python's own limit, which keeps it fast
MAX_CHARS = 512  # an answer this much longer than the gold is wrong, whatever it says
DEPTH = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)  # what a bracket adds to it


def extract(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}` or `<answer>`, whichever opens last.

    None if there is neither, or if that last one is never closed: a truncated final
    answer is not replaced by an earlier one.
    """
    boxes = list(re.finditer(r"\\boxed\s*\{", text))
    tag = text.rfind("<answer>")
    if boxes and boxes[-1].start() > tag:
        start, depth = boxes[-1].end(), 1
        for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += DEPTH.get(brace[0], 0)  # an escaped brace is text
            if depth == 0:
                return text[start : start + brace.start()].strip()
        return None
    end = text.find("</answer>", tag)
    return text[tag + len("<answer>") : end].strip() if 0 <= tag < end else None


# ---- stage 1: the same string

VULGAR = "½12 ⅓13 ⅔23 ¼14 ¾34 ⅕15 ⅖25 ⅗35 ⅘45 ⅙16 ⅚56 ⅛18 ⅜38 ⅝58 ⅞78"
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi "}
    | {"∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "∪": r"\cup "}
    | {"°": r"^\circ ", "∅": r"\emptyset ", "±": r"\pm ", "，": ","}
    | {"≈": r"\approx ", "≡": r"\equiv ", "≠": r"\neq "}
    | {"⋅": r"\cdot ", "∗": "*", "⩽": r"\leq ", "⩾": r"\geq ", "⁄": "/"}
    | {char: f"\\frac{{{top}}}{{{bottom}}}" for char, top, bottom in VULGAR.split()}
    | dict(zip("０１２３４５６７８９", "0123456789", strict=True))
    | dict(zip(RAISED, "0123456789-", strict=True))
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")  # of no width
)
TEXT = (
    r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|boldsymbol|bm|[mh]box"
    r"|operatorname)\s*"
)
GREEK = r"\\(?:pi|theta)(?![A-Za-z])"
DEGREES = r" ?(?:\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degrees?(?![A-Za-z]))"
ANGLE = rf"([0-9.]+){DEGREES}"
ODD_ROOT = r"\\sqrt ?\[ ?\d*[13579] ?\] ?\{"
ARGUMENT = r"\{(?:[^{}]|\{[^{}]*\})*\}"
REWRITES = (
    (r"√ ?\(([^()]*)\)|√ ?([0-9]+(?:\.[0-9]+)?|[A-Za-z])", r"\\sqrt{\1\2}"),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])", ""),
    # Thousands, never a list: 10,\!080 and 10{,}080.
    (r"(?<=[0-9])(?: ?, ?\\! ?|\{,\})(?=[0-9]{3}(?![0-9]))", ""),
    (r" ?\\! ?", ""),
    (r"\{,\}", ","),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"^\\[(\[]|(?<!\\)\\[)\]]$|\\?[$€£¥]", ""),
    (r" ?\*\* ?", "^"),  # Python's power
    (r"^[a-z] ?\\in ?(?=\\(?:R|math(?:bb|bf) ?\{? ?R ?\}?)$)", ""),
    # Between intervals, of a keyboard.
    (r"(?:(?<=[)\]])|(?<=\\\})) ?U ?(?=[(\[]|\\\{)", r"\\cup "),
    (r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|exp)(?= ?\()", r"\\\1"),
    (
        rf"\\(sin|cos|tan|cot|sec|csc) ?(?:\( ?{ANGLE} ?\)|\{{ ?{ANGLE} ?\}}|{ANGLE})",
        r"\\\1(\\frac{\2\3\4\\pi}{180})",
    ),
    (rf"{DEGREES}(?: ?[CF]$)?", ""),
    (r"\\([lg])eqslant(?![A-Za-z])|\\([lg])e(?![A-Za-z])", r"\\\1\2eq"),
    (r"\\ne(?![A-Za-z])", r"\\neq"),
    (r"<=(?!>)", r"\\leq "),
    (r">=", r"\\geq "),
    (rf"{TEXT}\{{ ?i ?\}}", "i"),  # the imaginary unit, upright
    (r"(\\\\) ?\[[0-9.]+ ?(?:pt|e[mx]|[cm]m)\]", r"\1"),  # room between rows
    (rf"(?<=[0-9]) ?\^ ?\{{? ?(?:{TEXT}\{{ ?)?(?:st|nd|rd|th)(?![A-Za-z])[ }}]*$", ""),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\pmod ?([0-9]+)", r"\\pmod{\1}"),
    (r"\\ldots(?![A-Za-z])", r"\\dots"),
    (r"\\overline ?\{([A-Z]+)\}", r"\1"),  # a segment, not a repeating decimal
    (r"(?<![\\A-Za-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi"),
    # All x of which a relation holds are those that it says.
    (
        r"^\\?\{ ?([a-z]) ?(?:\\mid|:|\|) ?([^{}=]*(?:[<>]|\\[lg]eq)[^{}=]*)\\?\}$",
        r"\2",
    ),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\([dt]?binom)(?![A-Za-z])", r"\\binom"),
    (rf"\\(frac|sqrt|binom) ?([0-9A-Za-z]|{GREEK})", r"\\\1{\2}"),
    (r"(\\sqrt ?\[[^][]*\]) ?([0-9A-Za-z])", r"\1{\2}"),
    (r"\{ ?10 ?\} ?\^", "10^"),
    (rf"(\\(?:frac|binom) ?{ARGUMENT}) ?([0-9A-Za-z]|{GREEK})", r"\1{\2}"),
    # LaTeX raises one sign, and who writes 13^0.5 means more.
    (rf"\^ ?(-?[0-9]*\.[0-9]+|-(?:[0-9]+|[A-Za-z]|{GREEK}))", r"^{\1}"),
    (rf"\^ ?(\\frac ?{ARGUMENT} ?{ARGUMENT}|\\sqrt ?{ARGUMENT})", r"^{\1}"),
    (r"\^ ?\{ ?(-?)0?\.5 ?\}", r"^{\1\\frac{1}{2}}"),  # a root, and exactly
    (r"^\\boxed ", ""),
    # To sympy a root of a negative number is complex.
    (rf"({ODD_ROOT}) ?- ?((?:[\d.,/]+|\\frac(?: ?\{{\d+\}}){{2}}) ?\}})", r"(-\1\2)"),
)
WRAPPED = re.compile(
    rf" ?(?:{TEXT}\{{((?:[^{{}}]|{ARGUMENT})*)\}}|\*\*([^*]+)\*\*|\$((?:\\.|[^$\\])+)\$) ?"
)
# A unit follows a quantity; bare letters count only where they cannot be a product.
POWER = r"(?: ?\^ ?\{?[23]\}?)?"
UNIT = re.compile(
    r"(?:(?<=[0-9)}\]])|(?<=\\pi))"
    rf"(?: ?(?:{TEXT}\{{[^{{}}0-9]*\}}{POWER}[ /]*)+"
    r"| ?(?:[ckm]m|[km]g|m[lL]|ft|lbs?|oz|st|nd|rd|th)(?![A-Za-z])"
    r"| ?(?:[ck]?m|mi|ft) ?/ ?(?:s|h|hr|min)(?![A-Za-z])"
    r"|(?<=:[0-9]{2}) ?(?:[AaPp][Mm]|[ap]\.m)| (?:[AP]M|[ap]\.m)"  # of the clock
    r"|(?: (?:(?:per|of|a) ){0,2}"
    r"(?:[A-Za-z]{4,}|[ckm]m|[km]g|ft|lbs?|oz|in|min|sec|day|mph|hrs|yds?|cup|men|way"
    r"|box|bag|jar|car|egg|pie|pen|dog|cat|(?:(?<=[a-z]{4} )|(?<= of ))[a-z]{3})){1,4}|(?<=[0-9]) [hy]rs?(?! ?\^)"  # hr^2, 2\pi hr: products
    rf"){POWER}$"
)
# With a power, and mg after a fraction, these are products: \frac13 mL^2, \frac12 mg.
LETTERS = re.compile(r" ?m(?:g|[glL] ?(\^).*)")
FRACTIONAL = re.compile(r"(?<![0-9])(?<![0-9] )\\frac")  # 1\frac12 mg is no product
NOT_UNIT = re.compile(  # words that change the number before them
    r"(?<!\\)\b(?:(?:hundred|thousand|[a-z]{1,5}illion|dozen|ten)(?:th)?s?|percent|and|or"
    r"|not|less|more|than|plus|minus|times|over|squared|cubed|factorial|repeating|recurring"
    r"|hal(?:f|ves)|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|negative|below"
    r"|doubled|approx(?:imately)?|base|mod|choose|sin|cos|tan|cot|sec(?!$)|csc|log|ln|exp|sqrt"
    r"|inf|infinity|one|two|six)\b|(?-i:\{ *[abeijknpqruvwxyz] *\})"  # a letter that no unit has
    r"|\\(?:mathbf|boldsymbol|bm) ?\{ *[a-z] *\}",  # a vector, or a matrix
    re.IGNORECASE,
)


# Answers that are one thing in several words.
REALS = (r"\mathbb{R}", r"\mathbf{R}", r"\mathbb R", r"\R", "all real numbers")
WHOLE = dict.fromkeys((*REALS, "all reals"), r"(-\infty,\infty)")
WHOLE |= dict.fromkeys(
    ("no solution", "no solutions", "none", "no real solution", "no real solutions"),
    r"\emptyset",
)
WHOLE |= dict.fromkeys(("DNE", "dne", "undefined"), "does not exist")
WHOLE |= dict.fromkeys((r"\{\}", r"\{ \}"), r"\emptyset")
WHOLE |= dict.fromkeys(("infinity", r"+\infty"), r"\infty")
WHOLE |= dict.fromkeys(("-infinity", "negative infinity"), r"-\infty")
WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
WHOLE |= {word: str(value) for value, word in enumerate(WORDS)}


# A number in another base than ten is not its value: which base was the question. One letter
# is a name: a_{10}.
BASED = re.compile(
    r"(-?(?:[0-9]|[0-9A-Fa-f]{2})[0-9A-Fa-f]*) ?(?:_ ?[{( ]*(?:\\text\{)?[( ]*(?:base )?"
    r"|\(? ?base )([0-9]{1,2})[)} ]*"
)


def clean(text: str) -> str:
    """Returns the answer in one spelling of LaTeX, without currency, degrees and units."""
    text = without_unit(text)
    if based := BASED.fullmatch(text):
        digits, base = based.groups()
        return digits if base == "10" else f"{digits.upper()}_{{{base}}}"
    return WHOLE.get(text) or WHOLE.get(text.casefold(), text)


def typed(text: str) -> str:
    """Returns the answer with what LaTeX writes for signs that few keyboards have."""
    return re.sub(f"[{RAISED}]+", r"^{\g<0>}", text).translate(UNICODE)


def unwrapped(text: str) -> str:
    r"""Returns the answer without a font or dollars of all of it: of \mathbf{\frac12}, **5**."""
    while whole := WRAPPED.fullmatch(text):
        text = whole[whole.lastindex]
    return text


def without_unit(text: str) -> str:
    """Returns the answer in one spelling, still in its own words."""
    text = " ".join(typed(unwrapped(text)).split())
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    text = drop_unit(" ".join(text.split()).rstrip(" .,;:\\"))
    text = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    text = " ".join(re.sub(r" *(?:\\?%| percent\b)", r"\\%", text).split())
    return drop_unit(text.rstrip(" .,;:\\"))


def drop_unit(text: str) -> str:
    """Returns `text` without the unit of measure that ends it."""
    unit = UNIT.search(text)
    if unit is None or NOT_UNIT.search(unit[0]):
        return text
    value = text[: unit.start()]
    letters = LETTERS.fullmatch(unit[0])
    is_product = letters and (letters[1] or FRACTIONAL.search(value))
    return text if is_product else value


def spelling(text: str) -> str:
    """Returns a key: cleaned answers are the same string iff their keys are equal."""
    if re.fullmatch(r"[A-Za-z ]+", text):
        text = re.sub(r"^(?:an?|the) (?=[a-z]{2})", "", text)
        return text.casefold() if len(text) > 2 or not text.isupper() else text
    text = re.sub(r"([_^]) ?\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(?<![0-9]) | (?![0-9])", "", text)  # 1 1/2 is not 11/2
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # an option


# ---- stage 2: the same number

DIGITS = r"(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9])|[0-9]+)"
# Exponents end at three digits: nothing here may compute 10^999999999.
DECIMAL = rf"[+-]?(?:{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}})?"
FRACTION = re.compile(rf"\\frac ?\{{ ?({DECIMAL}) ?\}} ?\{{ ?({DECIMAL}) ?\}}")
MIXED = re.compile(r"([+-]?) ?([0-9]+) +([0-9]+) ?/ ?([0-9]+) ?(\\%)?")
NUMBER = re.compile(rf"([+-]?)() ?({DECIMAL})(?: ?/ ?({DECIMAL}))? ?(\\%)?")

REPEATING = re.compile(
    r"(-?)([0-9]{0,9})\.([0-9]{0,9})\\overline ?\{ ?([0-9]{1,9}) ?\}"
)

PLAIN = re.compile(r"(?:[0-9.+*/(){}^ -]|\\(?:cdot|times|div|frac)(?![a-z]))+")
OPERATOR = re.compile(r"[0-9)}] ?(?:[-+*(]|\\(?:cdot|times|div))")
SCIENTIFIC = re.compile(
    rf"({DECIMAL}) ?(?:\*|\\cdot|\\times) ?10 ?\^ ?(?:([0-9])|\{{ ?([+-]?[0-9]{{1,3}}) ?\}})"
)
TEN = re.compile(r"^([+-]?)(?=10 ?\^)")
THOUSANDS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALED = re.compile(rf"({DECIMAL}) ?({'|'.join(THOUSANDS)})")
GROUPED = re.compile(r"(?<![0-9.,(\[])(?<!\\\{)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")


def number(text: str) -> tuple[Fraction, bool] | None:
    """Returns (value, is a percentage) of a cleaned answer, None if it is no number."""
    if match := REPEATING.fullmatch(text):
        sign, whole, part, period = match.groups()
        nines = 10 ** len(part) * (10 ** len(period) - 1)
        value = Fraction(int(part + period) - int(part or "0"), nines)
        value += int(whole or "0")
        return (-value if sign else value), False
    if match := SCIENTIFIC.fullmatch(text) or SCALED.fullmatch(text):
        value, *powers = match.groups()
        power = THOUSANDS.get(powers[0]) or int(powers[0] or powers[1])
        return Fraction(re.sub("[ ,]", "", value)) * Fraction(10) ** power, False
    text = FRACTION.sub(r" \1/\2 ", text).strip()
    mixed = MIXED.fullmatch(text)
    if not (match := mixed or NUMBER.fullmatch(text)):
        return None
    sign, *digits, percent = match.groups()
    if max(map(len, filter(None, digits))) > DIGITS_READ:
        return None
    whole, top, bottom = (
        Fraction(re.sub("[ ,]", "", part) if part else default)
        for part, default in zip(digits, (0, 0, 1), strict=True)
    )
    if bottom == 0 or (mixed and top >= bottom):  # 1 100/3: thousands or a product?
        return None
    value = whole + top / bottom
    return (-value if sign == "-" else value), bool(percent)


def exact(answer: str, gold: str) -> bool | None:
    """Stages 1 and 2 on cleaned answers: a verdict, or None where they cannot tell."""
    keys = spelling(answer), spelling(gold)
    if keys[0].casefold() == keys[1].casefold():
        return keys[0] == keys[1]  # r is not R; math-verify would not mind
    if ("=" in answer) != ("=" in gold):  # 2+3=5 is a calculation, not the answer 5
        return False
    # 10^{-7}, beside a program's 1e-07.
    a, g = (number(TEN.sub(r"\g<1>1*", text)) for text in (answer, gold))
    if a is None or g is None:
        # The question copied into the box is not its answer.
        copied = PLAIN.fullmatch(answer) and OPERATOR.search(answer)
        copied = copied and not (SCIENTIFIC.fullmatch(answer) or TEN.match(gold))
        return False if a is None and g is not None and copied else None
    # 50% is 0.5, and is 50 where the question was "what percentage?".
    scale = {(True, False): Fraction(1, 100), (False, True): 100}.get((a[1], g[1]), 1)
    return a[0] == g[0] or a[0] * scale == g[0]


# ---- stage 3, in the worker: the same structure of equal expressions

LETTER = (
    r"(?:[A-Za-z]{1,2}|\\vec ?\{\w+\}|\\(?!not|pm|mp|approx|sim)[A-Za-z]+)"
    r"(?:_\w|_\{\w+\})?'*"
)
NAMES = (
    rf"{LETTER}(?: ?\((?:[A-Za-z]|-?[0-9]+)\))?",  # x, AB, f(x), f(2)
    rf"{LETTER} ?\^ ?\{{ ?-1 ?\}} ?\((?:[A-Za-z]|-?[0-9]+)\)",  # f^{-1}(x)
    rf"\|{LETTER}\|",
    rf"\({LETTER}(?: ?, ?{LETTER})+\)",  # (x, y)
    r"m? ?\\(?:angle|triangle) ?[A-Z]{1,4}",
    r"(?![A-Za-z ]*\b[Nn]ot\b)[A-Za-z]{4}[A-Za-z ]{0,40}",  # Total cost
)
NAME = re.compile(rf"^(?:{'|'.join(NAMES)}) ?(?:=|\\in(?![A-Za-z])) ?")
# One of several candidates, and the rest of a division.
CHOICE = re.compile(r"\\(?:max|min|mod)(?![A-Za-z])")
# What is its value once it is parsed.
INNER = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
WORKED = re.compile(rf"\\binom ?({ARGUMENT}) ?({ARGUMENT})|\\(gcd|lcm) ?\(({INNER})\)")
NATURAL = re.compile(rf"(?<![A-Za-z\\])e ?\^ ?\{{((?:[^{{}}]|{ARGUMENT})*)\}}")
INDEX = re.compile(r"_(\w|\{\w+\})")
# What says of which residue a number is one, and what it is said of.
MODULUS = re.compile(r" ?(?:\\pmod ?|\( ?\\?[bp]?mod ?)\{? ?[0-9]+ ?\}? ?\)?$")
CONGRUENT = re.compile(rf"^{LETTER} ?\\equiv(?![A-Za-z]) ?")
RELATIONS = re.compile("="), re.compile(r"\\in(?![A-Za-z])")
ORDER = re.compile(r"[<>]|\\(?:[lg]eq|[lg]t)(?![A-Za-z])")
# Words are products of their letters to math-verify, 5 6 a mixed number, 52_8 is 52,
# f' is f, 2^3^2 is 64, and what follows an approximation, or stands before a box, is
# ignored.
MISREAD = re.compile(
    r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{4,}"
    r"|[0-9] +[.0-9]|[0-9] ?\{|[0-9})] ?_|\\approx|\\sim|\\equiv(?!.*mod)"
    rf"|(?<![0-9])'|\\prime|\\boxed|\^ ?(?:\w|{ARGUMENT}) ?\^"
)


def unname(answer: str, gold: str) -> tuple[str, str]:
    r"""Returns both without the `x =` or `x \in` that only one has, or that is that of both.

    Nor has the answer a modulus behind it that the gold has not: 10 \pmod 7 is 10 then, not 3.
    """
    if MODULUS.search(answer) and "mod" not in gold:
        answer = CONGRUENT.sub("", MODULUS.sub("", answer))
    for relation in RELATIONS:
        if bool(relation.search(answer)) != bool(relation.search(gold)):
            answer, gold = unnamed(answer), unnamed(gold)
    names = [len(elements(x) or []) == 1 and NAME.match(x) for x in (answer, gold)]
    if all(names) and len({name[0].replace(" ", "") for name in names}) == 1:
        return unnamed(answer), unnamed(gold)
    lists = roots(answer), roots(gold)
    if all(lists) and lists[0][0] == lists[1][0] and not all(x[1] for x in lists):
        return lists[0][2], lists[1][2]
    return answer, gold


def roots(text: str) -> tuple[str, bool, str] | None:
    """Returns (a name, whether it has an index, values) of `x_1=2, x_2=3` or `x=2, 3`.

    None of what is no list of what one name may be.
    """
    parts = elements(text) or []
    names = [NAME.match(part) for part in parts]
    given = [name[0] for name in names if name]
    bare = {INDEX.sub("", name).replace(" ", "") for name in given}
    listed = len(given) == len(parts) or (len(given) == 1 and names[0])
    if len(parts) < 2 or len(bare) != 1 or not listed:
        return None
    values = ", ".join(NAME.sub("", part) for part in parts)
    return None if "=" in values else (*bare, any(map(INDEX.search, given)), values)


def links(text: str) -> list[str]:
    """Returns the sides of `x = 2+3 = 5`, a name's; [] of what is no such chain."""
    name = NAME.match(text)
    sides = [side.strip() for side in text.split("=")]
    if name is None or len(sides) < 3 or len(elements(text) or []) != 1:
        return []
    return sides if "=" in name[0] and all(sides) and not ORDER.search(text) else []


def quantity(text: str) -> str:
    r"""Returns a value with its unit, of what stands around it: `\(x = 2+3 = 5\) cm`."""
    signs = r"(?<!\\)\$"
    if len(re.findall(signs, text)) % 2 == 0:  # of mathematics, not of money
        text = re.sub(signs, "", text)
    text = re.sub(r"\\[][()]", "", text).strip()
    name, _, value = text.partition("=")
    # Of an equation, 7 = 500 cm or 2s = 3m, both sides count.
    named = NAME.fullmatch(f"{clean(name)} = ")
    return value.rpartition("=")[2].strip() if named else text


def unnamed(text: str) -> str:
    """Returns values without the name that stands before each: `x=1, x=2` is `1, 2`."""
    parts = elements(text) or []
    names = [NAME.match(part) for part in parts]
    of = {INDEX.sub("", name[0]).replace(" ", "") for name in names if name}
    if len(parts) > 1 and all(names) and len(of) == 1:
        return ", ".join(NAME.sub("", part) for part in parts)
    return NAME.sub("", text)


def elements(text: str) -> list[str] | None:
    """Returns what commas, `and`, `or` separate outside brackets; None if unbalanced."""
    parts, depth = [""], 0
    for token in re.split(r"([(\[{]|[)\]}]|[,;]| (?:and|or) )", text):
        depth += DEPTH.get(token, 0)
        if depth < 0:
            return None
        if depth == 0 and token in (",", ";", " and ", " or "):
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()] if depth == 0 else None


def split(text: str) -> tuple[str, list[str]]:
    r"""Returns (brackets, elements): `(1,2]` is ("(]", ["1", "2"]).

    Sets and bare lists have brackets "" and no order; there `a \pm b` is two elements.
    """
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    if re.fullmatch(r"[(\[{].*[)\]}]", text) and (inner := elements(text[1:-1])):
        brackets, parts = (text[0] + text[-1]).replace("{}", ""), inner
    else:
        brackets, parts = "", elements(text) or [text]
    if not brackets:
        parts = [
            part.replace(r"\pm", sign)
            for part in parts
            for sign in (("+", "-") if part.count(r"\pm") == 1 else (r"\pm",))
        ]
    return brackets, parts


def same(answer: str, gold: str) -> bool:
    """All stages on cleaned answers."""
    if (sides := links(answer)) and not links(gold):
        name, *before, last = sides
        right = same(f"{name} = {last}", gold)
        # Each says the same, or it is none of them.
        return right and all(agrees(side, last) for side in dict.fromkeys(before))
    answer, gold = unname(answer, gold)
    if (verdict := exact(answer, gold)) is not None:
        return verdict
    if ("," in answer) != ("," in gold):  # 1,234\pi is no list
        answer, gold = (
            GROUPED.sub(lambda x: x[0].replace(",", ""), x) for x in (answer, gold)
        )
    if bool(ORDER.search(answer)) != bool(ORDER.search(gold)):  # an interval, if at all
        return symbolic(answer, gold)
    (brackets, parts), (gold_brackets, gold_parts) = split(answer), split(gold)
    if len(parts) == len(gold_parts) == 1:
        return symbolic(answer, gold)
    if len(parts) != len(gold_parts) or brackets != gold_brackets:
        return False
    if brackets:
        return all(map(same, parts, gold_parts))
    for wanted in gold_parts:
        found = next((part for part in parts if same(part, wanted)), None)
        if found is None:
            return False
        parts.remove(found)
    return True


def parsed(text: str) -> list:
    """Returns what math-verify reads in a text, in a list; [] if that is nothing."""
    text = re.sub(r"([_^]) ?([0-9A-Za-z])(?![0-9.])", r"\1{\2}", text)
    return [] if MISREAD.search(text) else beside("latex").read(text)


def agrees(one: str, other: str) -> bool:
    """Whether two sides of a chain are equal, be one of them still to be computed."""
    import math_verify

    pair = parsed(one) + parsed(other)
    return len(pair) == 2 and math_verify.verify(*pair, 12, timeout_seconds=None)


def symbolic(answer: str, gold: str) -> bool:
    """Whether math-verify finds two single expressions, equations or sets equal."""
    import math_verify
    import sympy

    pair = parsed(answer) + parsed(gold)
    chosen = CHOICE.search(answer) and not CHOICE.search(gold)
    if len(pair) != 2 or chosen:
        return False
    a, g = pair
    ordered = [bool(ORDER.search(x)) for x in (answer, gold)]
    if beside("latex").is_no_set((answer, gold), pair, ordered):
        return False
    # Of alternatives math-verify makes no set.
    a, g = (x.as_set() if isinstance(x, sympy.Or) else x for x in pair)
    if isinstance(a, sympy.Eq) and isinstance(g, sympy.Eq):
        return same_equation(a, g)
    # Of what is a number, or a matrix of numbers, nothing may be left to be computed.
    is_number = number(gold) is not None or (
        isinstance(g, sympy.MatrixBase)
        and all(isinstance(x.doit(), sympy.Rational) for x in g)
    )
    free = {x.name for x in getattr(a, "free_symbols", ())} - {"i"}
    if is_number and free:
        return False
    if not is_number and all(
        isinstance(x, sympy.Basic | sympy.MatrixBase) for x in pair
    ):
        # An inequality of what is not real is an error.
        related = any(x.has(sympy.Rel, sympy.Contains) for x in pair)
        a, g = alike(a, g, imaginary=not related)
    if all(isinstance(x, sympy.Expr) and x.is_number for x in (a, g)) and apart(a, g):
        return False
    found = math_verify.verify(  # to 12 decimals: 3.14159 is not pi
        g, a, 12, allow_set_relation_comp=True, timeout_seconds=None
    )
    if not (found and is_number):
        return found
    # Of e to a power the exponent is worked out as it is parsed, and of \exp it is not.
    calculations = beside("undone")
    written = WORKED.sub(calculations.unworked, answer)
    written = parsed(NATURAL.sub(r"\\exp(\1)", written))
    return bool(written) and not calculations.undone(written)


@functools.cache
def beside(name: str):
    """Returns a file beside this one as a module: a worker has no package to import it from."""
    place = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def apart(a, g) -> bool:
    """Whether two numbers differ by more than 1e-11 of the second, or one is infinite.

    math-verify compares 12 decimals, of which 1e-20 has none, and takes a factor that is
    infinite for any other.
    """
    import sympy

    ends = sympy.oo, -sympy.oo, sympy.zoo, sympy.nan
    # What an integral or a limit runs to is no value.
    infinite = [x.has(*ends) and x.doit().has(*ends) for x in (a, g)]
    if any(infinite):
        return not all(infinite)
    if g.evalf() == 0:
        return False
    gap = abs(((a - g) / g).evalf())
    # Of two functions it may say nothing.
    return bool(gap.is_comparable and gap > 1e-11)


def same_equation(a, g) -> bool:
    """Whether two equations are multiples of each other.

    Not by their solutions: then all equations without one would be equal. And where the gold
    says what a symbol is, what is still to be solved is no answer.
    """
    import sympy

    def solves(x) -> bool:
        sides = (x.lhs, x.rhs), (x.rhs, x.lhs)
        return any(isinstance(y, sympy.Symbol) and not z.free_symbols for y, z in sides)

    if solves(g) and not solves(a):
        return False
    a, g = a.lhs - a.rhs, g.lhs - g.rhs
    # i = 3 is about an index.
    others = [{x.name for x in side.free_symbols} - {"i"} for side in (a, g)]
    a, g = alike(a, g, imaginary=all(others))
    ratio = sympy.simplify(a / g)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def alike(a, g, *, imaginary: bool) -> tuple:
    """Returns two expressions whose symbols are all real; imaginary: and `i` is no symbol.

    math-verify takes the symbols of a text for real ones or others by whether `i` stands
    alone in it.
    """
    import sympy

    found = a.atoms(sympy.Symbol) | g.atoms(sympy.Symbol)
    changed = {x: sympy.Symbol(x.name, real=True) for x in found if x.is_real is False}
    own = {x for x in found if x.name == "i"}
    if imaginary and own <= a.free_symbols | g.free_symbols:  # no sum counts by it
        changed |= dict.fromkeys(own, sympy.I)
    return (a.xreplace(changed), g.xreplace(changed)) if changed else (a, g)


def warm_up() -> None:
    """Pays for the imports and the first parse."""
    symbolic("x", "y")


def reply(answer: str, gold: str) -> bool:
    """Returns whether all stages together find two cleaned answers equal."""
    try:
        return same(answer, gold)
    except MemoryError:  # the worker's affair
        raise
    except Exception:  # noqa: BLE001 (sympy raises anything)
        return False


# ---- the parent's side


@functools.cache
def workers():
    """Returns this process's Workers; raises ImportError without math-verify."""
    # Not at the top: a worker itself imports this file, and must not import the package.
    from dllm_jax.rl.rewards.sandbox import spare_cores
    from dllm_jax.rl.rewards.worker import Workers

    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math rewards need math-verify: pip install math-verify")
    return Workers(min(spare_cores(), MOST), __file__, LIMIT_S)


@functools.lru_cache(maxsize=2**16)
def ask(answer: str, gold: str) -> bool:
    """Returns a worker's verdict, and remembers it: the answers of a group repeat.

    Of what kills a worker it is False. A time-out (TimeoutError) is not remembered: it
    may be the machine's fault.
    """
    return bool(workers().ask(answer, gold))


def reference(gold: str) -> str:
    """Returns what answers are compared with; `gold` may end in GSM8K's `#### N`.

    Raises ValueError if it is empty or no string, ImportError without math-verify.
    """
    workers()  # a missing package shows at the first answer, not at the first hard one
    cleaned = clean(gold.rsplit("####")[-1]) if isinstance(gold, str) else ""
    if not cleaned:
        raise ValueError(f"the gold answer {gold!r} is empty or not a string")
    if sum(map(str.isdigit, cleaned)) > DIGITS_READ:
        raise ValueError(f"the gold answer has more than {DIGITS_READ} digits")
    return cleaned


def check(gold: str) -> None:
    """Raises as `reference` does for a gold that nobody can judge by."""
    reference(gold)


def equal(answer: str, gold: str) -> bool | None:
    """Returns whether an extracted answer is right, None where that took too long.

    Raises as `reference` does.
    """
    # Not at the top, as in `workers`.
    from dllm_jax.rl.rewards import units

    target = reference(gold)
    if not answer or len(answer) > MAX_CHARS + len(target):
        return False
    answer, asked = unwrapped(answer), unwrapped(gold.rsplit("####")[-1])
    verdict = units.by_units(quantity(answer), quantity(asked))
    # Of two names, or sides of a chain, it has compared one.
    names = {clean(x.partition("=")[0]) for x in (answer, asked) if "=" in x}
    chained = max(answer.count("="), asked.count("=")) > 1
    if verdict is False or (verdict and len(names) < 2 and not chained):
        return verdict
    answer, target = map(clean, units.unitless(answer, asked))
    verdict = None
    if not links(answer) or links(target):
        answer, target = unname(answer, target)
        verdict = exact(answer, target)
    try:
        return ask(answer, target) if verdict is None else verdict
    except TimeoutError:
        return None


def grade(texts: list[str], golds: list[str]) -> list[float]:
    """Returns 1.0 or 0.0 for each text: whether the answer extracted from it is right.

    NaN where that took too long. Raises as `reference` does, also for texts without an
    answer.
    """
    answers = [extract(text) or "" for text in texts]
    pairs = list(zip(answers, golds, strict=True))
    return judged(equal, pairs, len(workers().every))


def judged(equal: Callable, pairs: list[tuple], count: int) -> list[float]:
    """Returns 1.0 or 0.0 for each pair of an answer and a gold, NaN where `equal` says None.

    Each is asked once, in so many threads: what takes too long does so once.
    """
    once = dict.fromkeys(pairs)
    threads = concurrent.futures.ThreadPoolExecutor(count)
    try:
        verdicts = dict(zip(once, threads.map(lambda pair: equal(*pair), once)))
    finally:  # of an interrupt, too: what nobody has begun is not waited for
        threads.shutdown(cancel_futures=True)
    found = (verdicts[pair] for pair in pairs)
    return [float("nan") if v is None else float(v) for v in found]


def close() -> None:
    """Stops the workers; the next call that needs one starts another."""
    if workers.cache_info().currsize:
        workers().close()


atexit.register(close)
