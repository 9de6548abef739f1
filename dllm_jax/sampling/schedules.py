"""How many positions of a block each step unmasks.

Even shares, or as many as leave the masks that a function of time says: MaskGIT (arXiv
2202.04200, section 3.3) draws images so, few codes at first and most of them at the end.
Shares are f32, as where MMaDA computes them: cos(pi / 3) is a little less than a half there,
which is a position more at two thirds.
"""

import math
import re
from collections.abc import Callable

import numpy as np

START, END = -3.0, 3.0  # what of the sigmoid's curve is taken


def sigmoid(time: np.float32) -> np.float32:
    """Returns the share of masks, along a logistic curve from START to END."""

    def curve(x) -> np.float32:
        return 1 / (1 + np.exp(np.float32(-x)))

    at = curve(time * (END - START) + START)
    return (curve(END) - at) / (curve(END) - curve(START))


# `sampler.unmasking` names a row, "even", or pow<k>, whose share is 1 - t^k. A function of
# the share of the steps that are done, 0 .. 1, which returns the share of the positions that
# are masked then: 1 at first, 0 at the end.
MASKED: dict[str, Callable[[np.float32], np.float32]] = {
    "cosine": lambda time: np.cos(time * np.float32(math.pi) * np.float32(0.5)),
    "linear": lambda time: 1 - time,
    "sigmoid": sigmoid,
}
EVEN = "even"
POWER = re.compile(r"pow([0-9]+(?:\.[0-9]+)?)")


def masked(name: str) -> Callable[[np.float32], np.float32] | None:
    """Returns the function that a name stands for, or None for "even".

    Raises ValueError with the known names.
    """
    if name in MASKED or name == EVEN:
        return MASKED.get(name)
    power = POWER.fullmatch(name)
    exponent = float(power[1]) if power else 0.0
    if not 0 < exponent <= 100:
        known = ", ".join((EVEN, *MASKED))
        raise ValueError(
            f"={name!r}: choose from {known}, or pow2, pow3 ... for 1 - t^k"
        )
    return lambda time: 1 - time ** np.float32(exponent)


def counts(name: str, block: int, steps: int) -> tuple[int, ...]:
    """Returns how many positions each step unmasks at least: their sum is the block.

    "even" gives the first steps the position more. By a function of time as many stay masked
    after step t of T as floor(block x function(t / T)) says, but one position at least is
    unmasked, and one is left to each step that follows while there is one for it.
    """
    share = masked(name)
    if share is None:
        each, more = divmod(block, steps)
        return (each + 1,) * more + (each,) * (steps - more)
    out, left = [], block
    for step in range(1, steps + 1):
        stay = math.floor(np.float32(block) * share(np.float32(step / steps)))
        stay = 0 if step == steps else max(min(stay, left - 1), 1)
        # Where a single one is left before the last step, it is not kept waiting: nothing
        # would change meanwhile.
        stay = 0 if left <= 1 else stay
        out.append(left - stay)
        left = stay
    return tuple(out)


def cooled(temperature: float, steps: int) -> tuple[float, ...]:
    """Returns the temperature of ranks at each step: times 1 - t / T, over and over.

    A product over the steps so far, as Show-o (arXiv 2408.12528) and MMaDA have it: it cools
    sooner than MaskGIT's own, and the last step has none.
    """
    out = []
    for step in range(1, steps + 1):
        temperature *= 1 - step / steps
        out.append(temperature)
    return tuple(out)
