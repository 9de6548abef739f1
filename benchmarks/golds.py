"""How often the math grader errs on gold answers: against themselves, and perturbed ones.

    python -m benchmarks.golds GSM8K.jsonl MATH500.json [--perturbed=2000]

A false negative is a gold answer that does not equal itself, as another person would write
it; a false positive one that equals its perturbation, a neighbour that is another value:
one of its numbers is 1 or 10 more or has a digit more, or the sign is another. An answer
without a number has none. It takes some minutes on one core.
"""

import argparse
import collections
import random
import re

from benchmarks import report
from dllm_jax import command_line
from dllm_jax.records import records
from dllm_jax.rl.rewards import math


def golds(path: str) -> list[str]:
    """Returns a file's gold answers; raises ValueError where a record has none."""
    found = [row.get("answer") for row in records(path)]
    if None in found:
        raise ValueError(f"{path}: record {found.index(None) + 1} has no answer")
    return [str(answer).rsplit("####")[-1].strip() for answer in found]


def rewritten(gold: str) -> list[str]:
    """Returns other spellings of the same answer."""
    spaced = re.sub(r"([=+,])", r" \1 ", gold)
    return [
        gold,
        f"${gold}$",
        f"\\({gold}\\)",
        f" {gold}.",
        spaced,
        gold.replace("\\frac", "\\dfrac"),
    ]


def perturbed(gold: str, draw: random.Random) -> str | None:
    """Returns another value that looks alike; None where there is nothing to change."""
    numbers = [*re.finditer(r"\d+", gold)]
    if not numbers:
        return None
    place = draw.choice(numbers)
    old = place[0]
    if draw.random() < 0.2 and not gold.startswith("-"):
        return f"-{gold}" if re.search("[1-9]", gold) and len(numbers) == 1 else None
    kinds = [str(int(old) + 1), str(int(old) + 10), old + "7"]
    return gold[: place.start()] + draw.choice(kinds) + gold[place.end() :]


def main() -> None:
    """Prints a row for each file, and the pairs that are judged wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="records with an `answer`")
    parser.add_argument("--perturbed", type=int, default=2000, help="of each file")
    args = parser.parse_args()
    report.positive(parser, args, "perturbed")
    try:
        every = {path: golds(path) for path in args.files}
    except ValueError as error:
        parser.error(str(error))
    for path, found in every.items():
        draw, told = random.Random(0), collections.Counter()
        numbers = [gold for gold in found if re.search(r"\d", gold)]
        for gold in found:
            for text in dict.fromkeys(rewritten(gold)):
                told["spellings"] += 1
                if math.equal(text, gold) is not True:
                    told["false negatives"] += 1
                    print("negative", text, "|", gold)
        while numbers and told["perturbed"] < args.perturbed:
            gold = draw.choice(found)
            other = perturbed(gold, draw)
            if other is None or other == gold:
                continue
            told["perturbed"] += 1
            if math.equal(other, gold) is not False:
                told["false positives"] += 1
                print("positive", other, "|", gold)
        print(path, len(found), "golds", dict(told), flush=True)


if __name__ == "__main__":
    command_line.entry(main)
