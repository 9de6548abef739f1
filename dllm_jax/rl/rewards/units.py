"""Quantities: what their units measure, and whether two of them are equal.

    2 m = 200 cm    60 mph = 60 miles per hour    $5 = 500 cents    5 euros is not $5

A question names the unit that it wants, so one that the answer or the gold leaves out is not
looked at.
"""

import re
from fractions import Fraction

from dllm_jax.rl.rewards.math import TEXT, clean, number

# unit: (what it measures, how many of the least it is)
METRES = {"mm": 1, "cm": 10, "m": 1_000, "km": 1_000_000}
INCHES = {"in": 1, "inch": 1, "inches": 1, "ft": 12, "foot": 12, "feet": 12}
INCHES |= {"yd": 36, "yard": 36, "yards": 36, "mi": 63_360, "mile": 63_360}
METRES |= {"millimeter": 1, "centimeter": 10, "meter": 1_000, "kilometer": 1_000_000}
SECONDS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "min": 60,
    "minute": 60,
    "h": 3_600,
    "hr": 3_600,
}
SECONDS |= {"hour": 3_600, "day": 86_400, "week": 604_800}
MONTHS = {"month": 1, "year": 12, "yr": 12}
GRAMS = {"mg": 1, "g": 1_000, "gram": 1_000, "kg": 1_000_000, "kilogram": 1_000_000}
OUNCES = {"oz": 1, "ounce": 1, "lb": 16, "pound": 16}
LITRES = {"ml": 1, "mL": 1, "l": 1_000, "L": 1_000, "milliliter": 1, "liter": 1_000}
MONEY = {"cent": 1, "dollar": 100}
UNITS = {
    name: (kind, size)
    for kind, table in enumerate(
        (METRES, INCHES, SECONDS, MONTHS, GRAMS, OUNCES, LITRES, MONEY)
    )
    for name, size in table.items()
}
OPEN = rf"(?:{TEXT}\{{ *)?"
MEASURED = re.compile(
    r"(?P<money>\\?\$)?(?P<value>.*?(?:[0-9}\)]|\\pi))(?:\\[,; ]|~| )*"
    rf"(?:{OPEN}(?P<unit>(?:square |cubic )?[A-Za-z]+) *\}}?)?"
    rf"(?: *(?:/|per ) *{OPEN}(?P<over>[A-Za-z]+) *\}}?)?"
    r"(?(unit)(?: ?\^ ?\{?(?P<power>[23])\}?)?)[.$ ]*"
)
RATES = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}
RATE = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(RATES)})(?![A-Za-z])")

# Before noon or after it.
HALF = re.compile(rf"[0-9](?:\\[,; ]|~| )*{OPEN}([ap])\.? ?m(?![a-z])", re.IGNORECASE)
# A time of day, and nothing else.
CLOCK = re.compile(
    rf"\$?([0-9]{{1,2}})(?::([0-9]{{2}}))?(?:\\[,; ]|~| )*{OPEN}([ap])\.? ?m\.? *\}}?[.$ ]*"
)
CURRENCY = re.compile(r"(?<=\\)\$|[€£¥]")


def measured(text: str) -> tuple[str, tuple[int, ...], Fraction] | None:
    """Returns (value, what is measured and its powers, the size of its unit).

    None where no unit of UNITS is named. Of a rate two things are measured.
    """
    text = RATE.sub(lambda rate: RATES[rate[0]], " ".join(text.split()))
    # What has one dollar sign is money, what stands between two mathematics.
    text = text if text.count("$") == 1 else text.strip("$")
    match = MEASURED.fullmatch(text)
    if match is None:
        return None
    *shape, name = (match["unit"] or (match["money"] and "dollar") or "").split(" ")
    first, over = of_unit(name), match["over"]
    if first is None:
        return None
    power = int(match["power"] or 1)
    shaped = {"square": 2, "cubic": 3}.get("".join(shape), 1)
    if over is None:
        power = power if match["power"] else shaped
        return match["value"], (first[0], power), Fraction(first[1] ** power)
    second = of_unit(over)
    return second and (
        match["value"],
        (first[0], shaped, second[0], power),
        Fraction(first[1] ** shaped, second[1] ** power),
    )


def of_unit(name: str) -> tuple[int, int] | None:
    """Returns (what a unit measures, its size), None for one that UNITS has not."""
    return UNITS.get(name) or UNITS.get(name.removesuffix("s"))


def by_units(answer: str, gold: str) -> bool | None:
    """Whether quantities with different units are equal; None where these say nothing.

    A unit that only one of them names is the question's own, and so is the `per hour` of
    a rate.
    """
    signs = set(CURRENCY.findall(answer)), set(CURRENCY.findall(gold))
    if all(signs) and not signs[0] & signs[1]:
        return False
    times = [CLOCK.fullmatch(x.casefold()) for x in (answer, gold)]
    if all(times):  # 6PM is 6:00 p.m.
        one, other = (
            (int(h), int(m or 0), half) for h, m, half in map(re.Match.groups, times)
        )
        return one == other
    # Of a product, 2am(m+1), they are letters, and there may be more or fewer.
    halves = [{*HALF.findall(x.casefold())} for x in (answer, gold)]
    if all(halves) and halves[0] != halves[1]:
        return False
    a, g = measured(answer), measured(gold)
    if a is None or g is None or a[1:] == g[1:] or len(a[1]) != len(g[1]):
        return None
    if not both_single(a, g):
        return None
    values = number(clean(a[0])), number(clean(g[0]))
    if a[1] != g[1] or None in values:
        return False
    return values[0][0] * a[2] == values[1][0] * g[2]


SUM = re.compile(r"[-+,;=<>]|(?<![\\A-Za-z])[A-Za-z]|\\(?:pm|[lg]eq?)(?![A-Za-z])")


def unitless(answer: str, gold: str) -> tuple[str, str]:
    """Returns both without the unit that both name, however each writes it."""
    a, g = measured(answer), measured(gold)
    if a is None or g is None or a[1:] != g[1:]:
        return answer, gold
    return (a[0], g[0]) if both_single(a, g) else (answer, gold)


def both_single(*quantities: tuple) -> bool:
    """Whether each of what `measured` found is one term.

    In 2 + 3 m the unit may be a variable, and is not of the 2.
    """
    return all(number(clean(x[0])) or not SUM.search(x[0]) for x in quantities)
