"""What every configuration refuses values with."""

import dataclasses
import numbers
import operator
import typing

OPERATORS = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
# 0 takes the arg-max. Divided by the least, a hidden token's logit (reference.NEVER) is finite;
# by the largest it is still below all others.
TEMPERATURE = "== 0 or >= 1e-6, <= 1e6"
KINDS = {
    bool: "True or False",
    int: "a whole number of 32 bits",
    float: "a number (0, or 1e-30 to 1e30 in size)",  # what f32 holds, with some room
    str: "a text",
}


class Refused(ValueError):
    """A field has no value that it can have.

    It begins with the field's name in its own dataclass; who knows its place puts that
    before it.
    """

    def __init__(self, field: str, text: str):
        """text: what follows the field's name."""
        super().__init__(field + text)
        self.field, self.text = field, text


def one_of(field: str, value, choices):
    """Raises Refused when a field is none of its choices."""
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise Refused(field, f"={shown(value)}: choose from {known}")


def fields(cfg, **limits):
    """Raises Refused for the first field of a dataclass that has no sane value.

    A value is of its field's kind, numbers are finite and neither absurdly large nor small,
    and whole ones have 32 bits. limits: by field, what else is asked of it: its choices, or
    a text such as ">= 0, < 1" or "== 0 or > 1" of what a number is compared with.
    """
    for field in dataclasses.fields(cfg):
        value, limit = getattr(cfg, field.name), limits.get(field.name, "")
        args = typing.get_args(field.type)  # of tuple[int, ...]
        kind, values = (args[0], value) if args else (field.type, (value,))
        if kind not in KINDS:
            continue
        if not isinstance(limit, str):
            one_of(field.name, value, limit)
            continue
        asked = [limit.replace(", ", " and ").replace("== ", "")] if limit else []
        if type(values) is not tuple or not all(suits(x, kind) for x in values):
            asked = [KINDS[kind], *asked]
        elif all(within(x, limit) for x in values):
            continue
        words = "must each be" if args else "must be"
        raise Refused(field.name, f"={shown(value)}: {words} {', '.join(asked)}")


def suits(value, kind: type) -> bool:
    """Returns whether a value is of a kind, a key of KINDS, and a sane one."""
    if kind is str:
        return isinstance(value, str) and "\0" not in value and encodes(value)
    if kind is bool or isinstance(value, bool):
        return isinstance(value, kind) and kind is bool
    if kind is int:
        return isinstance(value, numbers.Integral) and abs(value) < 2**31
    return isinstance(value, numbers.Real) and (
        value == 0 or 1e-30 <= abs(value) <= 1e30
    )


def within(value, limit: str) -> bool:
    """Returns whether a number is what its limit asks for: see `fields`."""
    choices = [map(str.split, choice.split(",")) for choice in limit.split(" or ")]
    return not limit or any(
        all(OPERATORS[sign](value, float(bound)) for sign, bound in choice)
        for choice in choices
    )


def encodes(text: str) -> bool:
    """Returns whether a text is one: half of a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value) -> str:
    """Returns a value for a message: its beginning, in one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, too deep
        text = f"a {type(value).__name__} without end"
    text = " ".join(text.encode(errors="backslashreplace").decode().split())
    return text if len(text) <= 80 else f"{text[:77]}..."
