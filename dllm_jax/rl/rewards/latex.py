r"""What math-verify is to read otherwise than it does by itself.

math.py loads this file in its worker, which has no package: nothing of it is imported here.
"""

import dataclasses
import functools
import re

# math-verify adds a fraction to the number before it, and what is behind multiplies it alone.
MIXED = re.compile(
    r"(?<![0-9.])([0-9]+) ?\\[dt]?frac ?(?:\{([0-9]+)\} ?\{([0-9]+)\}|([0-9])([0-9]))"
    r"( ?(?:\\pi|\\sqrt|[A-Za-z]))?"
)
# 5 > x > 0 is 0 < x < 5, which math-verify does not see.
FALLS = re.compile(r"(>|\\(?:geq|gt)(?![A-Za-z]))")
RISES = {">": "<", r"\geq": r"\leq", r"\gt": "<"}


@functools.cache
def reader():
    """Returns math_verify, which takes r and R for two letters from now on."""
    import math_verify.parser
    from latex2sympy2_extended import latex2sympy2

    apart = latex2sympy2.ConversionConfig(lowercase_symbols=False)
    math_verify.parser.latex2sympy = functools.partial(
        latex2sympy2.latex2sympy, conversion_config=apart
    )
    return math_verify


def read(text: str) -> list:
    """Returns what math-verify reads in a text, in a list; [] if that is nothing.

    Of inequalities with `or` between them one is made.
    """
    import sympy

    if len(parts := text.split(" or ")) > 1:
        found = [x for part in parts for x in read(part)]
        ordered = all(isinstance(x, sympy.Rel | sympy.And) for x in found)
        return [sympy.Or(*found)] if ordered and len(found) == len(parts) else []
    math_verify = reader()
    config = math_verify.LatexExtractionConfig(boxed_match_priority=-1)
    # 3m is not 3.
    normal = dataclasses.replace(config.normalization_config, units=False)
    config = dataclasses.replace(config, normalization_config=normal)
    text = f"${spelled(text)}$"
    return math_verify.parse(
        text, [config], "no_fallback", "first_match", parsing_timeout=None
    )


def spelled(text: str) -> str:
    """Returns a text in which 2(3) and 5e^0 are products, and mixed numbers with factors sums.

    And chains of inequalities rise.
    """
    chain, rising = FALLS.split(text), re.search(r"[<=]|\\l(?:eq|t)\b", text)
    if len(chain) > 3 and not rising:
        text = " ".join(RISES.get(part, part) for part in reversed(chain))
    text = re.sub(r"(?<=[0-9]) ?(?=\(|e ?\^)", r" \\cdot ", text)
    return MIXED.sub(of_mixed, text)


def of_mixed(found: re.Match) -> str:
    """Returns a number with a fraction behind it: a product, where it is no mixed one.

    A mixed one is in brackets where it has a factor.
    """
    whole, *parts = filter(None, found.groups()[:-1])
    top, bottom = map(int, parts)
    fraction, factor = rf"\frac{{{top}}}{{{bottom}}}", found[6]
    if top >= bottom:
        return rf"{whole} \cdot {fraction}{factor or ''}"
    return f"({whole}+{fraction}){factor}" if factor else found[0]


def is_no_set(texts: tuple[str, str], pair: list, ordered: list[bool]) -> bool:
    """Whether one of two is an inequality without a letter, or one the ends of the other.

    Or the first, the answer, is still to be solved, which the second is not.
    pair: what the texts were read as; ordered: which are inequalities. To math-verify 1 < 2 is
    as empty as no solution, and 1 < x < 2 as good as 1, 2.
    """
    import sympy

    # The question, in place of an answer.
    if to_solve(pair[0]) and not to_solve(pair[1]):
        return True
    for n in (0, 1):
        if ordered[n] and not getattr(pair[n], "free_symbols", 1):
            return True
    other = ordered[0]  # the number of the one that is none
    ends = isinstance(pair[other], sympy.FiniteSet | sympy.Tuple)
    return ordered[0] != ordered[1] and ends and texts[other][0] not in "(["


def to_solve(x) -> bool:
    """Whether an inequality has no letter by itself, or its size, on one side: 2x + 1 > 7."""
    import sympy

    def solved(relation) -> bool:
        sides = (relation.lhs, relation.rhs), (relation.rhs, relation.lhs)
        return any(
            isinstance(y.args[0] if isinstance(y, sympy.Abs) else y, sympy.Symbol)
            and not z.free_symbols
            for y, z in sides
        )

    found = x.atoms(sympy.Rel) if isinstance(x, sympy.Basic) else ()
    return not all(solved(y) for y in found if not isinstance(y, sympy.Eq))
