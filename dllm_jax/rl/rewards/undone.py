r"""Calculations left undone: what of a parsed answer is still to be computed.

Where the question is for a number, `6*7` is not the answer 42, nor is `\ln(e^{20} e^{22})`; one
function, root, power or fraction is. math.py loads this file in its worker, which has no
package: nothing of it is imported here.
"""

import math
import re


def unworked(match: re.Match) -> str:
    """Returns what stands for a function: another, which is not evaluated.

    match: of WORKED in math.py. The number itself where it is one of those written in it, or
    1; and what it is of where that is to be computed.
    """
    n, k, name, of = match.groups()
    parts = [x.strip() for x in (of.split(",") if name else (n[1:-1], k[1:-1]))]
    if not all(x.isdecimal() and len(x) < 10 for x in parts):
        return "({})".format(")(".join(parts))
    numbers = [*map(int, parts)]
    if name:
        value = getattr(math, name)(*numbers)
    else:
        value = {0: 1, 1: numbers[0]}.get(min(numbers[1], numbers[0] - numbers[1]))
    return f"({value})" if value in (1, *numbers) else "(e!)"


def undone(pair: list) -> bool:
    """Whether what was parsed holds a sum or a product of numbers, left to be computed."""
    import sympy

    for part in sympy.preorder_traversal(pair):
        terms = []
        if isinstance(part, sympy.MatAdd):
            return True
        if isinstance(part, sympy.Add):
            terms = [x for x in part.args if is_plain(x) and x.doit() != 0]
            terms = terms if len(terms) > 1 else multiples(part.args)
        elif isinstance(part, sympy.Mul):
            terms = [x for x in factors(part) if is_plain(x) and abs(x.doit()) != 1]
        elif isinstance(part, sympy.Pow | sympy.exp | sympy.log):
            terms = drawn_in(part)
        if len(terms) > 1:
            return True
    return False


def multiples(terms) -> list:
    r"""Returns the ratios of a sum's irrational terms to the first, as far as rational.

    800\pi + 565\pi: whatever divides by \pi later, the sum of numbers is left to be computed.
    """
    import sympy

    rational, stand_in = sympy.Rational | sympy.Float, sympy.factorial(sympy.E)
    # What `unworked` writes says nothing of a value.
    values = [x.doit() for x in terms if not x.has(stand_in)]
    others = [x for x in values if not isinstance(x, rational)]
    ratios = [x / others[0] for x in others]
    return [x for x in ratios if isinstance(x, rational)]


def drawn_in(part) -> list:
    r"""Returns the numbers that a logarithm sums up in other words, or a power multiplies.

    \ln(e^8 e^3) is 8 + 3, e^{\ln 4 + \ln 3} is 4 * 3, and so is (\sqrt4 \sqrt3)^2.
    """
    import sympy

    product, number = sympy.Mul, sympy.Rational
    if isinstance(part, sympy.log):
        inner, *base = part.args
        parts = inner.args if isinstance(inner, product) else ()
        flat = [y for x in parts for y in (x.args if isinstance(x, product) else (x,))]
        found = [(sympy.expand_log(sympy.log(x, *base), force=True), x) for x in flat]
        # One of what is no power yet, as of 9 to the base 3, has to be found.
        return [
            value
            for value, x in found
            if isinstance(value, number)
            and value != 0
            and (abs(value) == 1 or {value, -value} & x.atoms(sympy.Number))
        ]
    base, exponent = part.as_base_exp()
    if isinstance(exponent, sympy.Add):
        found = [sympy.simplify(base**x) for x in exponent.args]
        return [x for x in found if isinstance(x, number) and abs(x) != 1]
    if isinstance(base, product) and exponent != -1:
        found = [sympy.Pow(x, exponent, evaluate=False) for x in factors(base)]
        return [x for x in found if is_plain(x) and abs(x.doit()) != 1]
    return []


def factors(product):
    """Yields a product's factors but those that it is divided by, and powers of ten."""
    import sympy

    for part in product.args:
        if isinstance(part, sympy.Mul):
            yield from factors(part)
        elif not (
            isinstance(part, sympy.Pow) and (part.exp.is_negative or part.base == 10)
        ):
            yield part


def is_plain(term) -> bool:
    """Whether a term is a rational number, written without a function or a root.

    Functions that leave a number as it is do not count: `800\\cos 0`, `\\sqrt{800^2}`, 1.
    """
    import sympy

    value = term.doit()
    if not isinstance(value, sympy.Rational | sympy.Float):
        return False
    if term.has(sympy.UnevaluatedExpr):  # was worked out as it was parsed
        return False
    return not works(term)


def works(term) -> bool:
    """Whether a function or a root in a term makes another number of what it is given."""
    import sympy

    value = term.doit()
    if abs(value) == 1 or {value, -value} & term.atoms(sympy.Number):
        return False
    rounds = isinstance(term, sympy.Abs | sympy.floor | sympy.ceiling)
    root = isinstance(term, sympy.Pow) and not term.exp.is_integer
    if root or (isinstance(term, sympy.Function) and not rounds):
        return True
    return any(works(x) for x in term.args if isinstance(x, sympy.Expr))
