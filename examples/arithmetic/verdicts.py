r"""A judge of worked sums: is each digit's step the right one?

    --config.reward.split=marks --config.reward.mark=, \
        --config.reward.judge.at=examples.arithmetic.verdicts:verdicts

It needs no model and no server. A step is right if it is that of its place in the sum, such as
`4+3=7,` at the start of 904+263; the piece with the answer is right if the answer is.
"""

from dllm_jax.rl.rewards import math


def digits(a: int, b: int) -> list[str]:
    """Returns the steps that work out a + b, digit by digit from the right."""
    steps, carry = [], 0
    while a or b or not steps:
        x, y = a % 10, b % 10
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total},")
        a, b, carry = a // 10, b // 10, total // 10
    return steps


def verdicts(questions) -> list[float]:
    """Returns 1 for each Question whose piece is right, and -1 for the others."""
    return [1.0 if right(question) else -1.0 for question in questions]


def right(question) -> bool:
    """Returns whether a piece says what belongs there. question: judge.Question."""
    a, b = map(int, question.problem.split("+"))
    if not question.part.endswith(","):
        return math.extract(question.part) == str(a + b)
    steps = digits(a, b)
    place = question.excerpt.count(",") - 1
    return place < len(steps) and question.part == steps[place]
