"""Two checkpoints on the same problems: which answers belong together, and who won.

A difference's interval is the paired bootstrap's: problems are drawn with replacement, and
of each its difference, the mean over its answers (arXiv 2411.00640 calls this paired and
clustered).
"""

import collections
import json
import re

import numpy as np

from dllm_jax import records, statistics

# What is compared: its name, and its value in a record, None where it has none.
MEASURES = {
    "reward": records.reward,
    "right": records.right,
    "tokens per forward": lambda row: (
        len(row["response_ids"]) / row["forwards"] if row.get("forwards") else None
    ),
    # Nobody gave an answer to a prompt that was skipped: it has no length, of 0 or another.
    "tokens": lambda row: (
        None if row.get("finished") == "skipped" else len(row["response_ids"])
    ),
}
# `problem` as eval writes it; a data set's own field of this name may be any text.
HASH = re.compile(r"[0-9a-f]{16}")


def marks_of(row: dict) -> tuple[str, ...]:
    """Returns what tells the images of a prompt from others."""
    shown = row.get("images") or ()
    return tuple(str(x.get("mark")) for x in shown if isinstance(x, dict))


def by_record(row: dict):
    """Returns the hash of the record that was asked; None where the line has none."""
    told = row.get("problem")
    return told if type(told) is str and HASH.fullmatch(told) else None


def by_question(row: dict):
    """Returns the question, its gold answer and its images; None where it is not told."""
    told = row.get("question")
    return (told, row.get("answer"), marks_of(row)) if told else None


def by_ids(row: dict):
    """Returns the prompt's ids and its images, or else its number; None: it has neither."""
    if ids := row.get("prompt_ids"):
        return tuple(ids), marks_of(row)
    named = row.get("id"), row.get("question")
    # As text: an id may be any JSON, and a list is no key.
    return None if named == (None, None) else json.dumps(named)


def groups(rows: list[dict], key_of) -> dict:
    """Returns the numbers of the answers to each problem, by what `key_of` says of them."""
    numbers = collections.defaultdict(list)
    for i, row in enumerate(rows):
        numbers[key_of(row)].append(i)
    return {key: ids for key, ids in numbers.items() if key is not None}


def common(first: list[dict], second: list[dict]) -> list[tuple[list, list]]:
    """Returns the numbers of the answers to each problem that both files have.

    Ids are compared where nothing better is told: another tokenizer, or chat template, has
    others for the same problem.
    """
    key_of = key_for(first, second)
    there = groups(second, key_of)
    ours = groups(first, key_of)
    return [(ids, there[key]) for key, ids in ours.items() if key in there]


def key_for(first: list[dict], second: list[dict]):
    """Returns the best of the functions above that tells a problem of every line.

    But for prompts that were skipped, of which a line tells nothing.
    """
    rows = [row for row in first + second if row.get("finished") != "skipped"]
    told = (key for key in (by_record, by_question) if all(map(key, rows)))
    return next(told, by_ids)


def check_common(first, second) -> list[tuple[list, list]]:
    """Returns `common` of two traces.File; raises ValueError, with the reason, for []."""
    shared = common(first.rows, second.rows)
    if not shared:
        raise ValueError(
            f"{first.path} and {second.path} have no problem in common: nothing to compare; "
            + why_apart(first.rows, second.rows)
        )
    return shared


def why_apart(first: list[dict], second: list[dict]) -> str:
    """Returns why two files without a common problem have none, as far as lines tell."""
    key_of = key_for(first, second)
    if key_of is by_record and (same := both(by_question, first, second)):
        return (
            f"{same}: they have the same gold answer and images, and other fields of their "
            "records differ, whose hash is compared (`problem`)"
        )
    same = both(lambda row: row.get("question"), first, second)
    if key_of is by_ids:
        found = same and f"{same}; but "
        return (
            f"{found}lines without a question are known by their prompt_ids, which all "
            "differ: other prompts, another tokenizer or another chat template"
        )
    if same:
        return f"{same}, with other gold answers or images, or none"
    return "no question of the one stands in the other"


def both(key_of, first: list[dict], second: list[dict]) -> str:
    """Returns how many problems stand in both by a weaker key, for a message; "": none."""
    count = len(groups(first, key_of).keys() & groups(second, key_of).keys())
    what = "1 question stands" if count == 1 else f"{count} questions stand"
    return f"{what} in both" if count else ""


def pairs(shared: list[tuple[list, list]]) -> list[tuple[int, int]]:
    """Returns pairs of answers: the k-th to a problem in one file, and in the other."""
    return [pair for both in shared for pair in zip(*both, strict=False)]


def summary(first: list[dict], second: list[dict], shared) -> dict:
    """Returns what the second file's answers have ahead of the first's, problem by problem.

    shared: of `common`. measures: name, both means, difference, its 95 % interval (None
    where it is not known); wins: problems that each has the higher reward on, and those
    with the same.
    """
    measures, wins = {}, None
    for name, measure in MEASURES.items():
        means_2n = means_of(measure, first, second, shared)
        if not means_2n.size:
            continue
        gain_n = means_2n[1] - means_2n[0]
        if name == "reward":
            # Means of other numbers of the same rewards differ by rounding.
            gain_n[np.abs(gain_n) < statistics.ALIKE] = 0
            wins = [int((np.sign(gain_n) == sign).sum()) for sign in (-1, 1, 0)]
        gain = statistics.paired(*means_2n)
        measures[name] = [name, *means_2n.mean(axis=1).tolist(), *gain[:3]]
    if wins and measures["reward"][1:3] == measures.get("right", [])[1:3]:
        del measures["reward"]  # of 0 and 1: their mean is the share of right answers
    return {"problems": len(shared), "wins": wins, "measures": list(measures.values())}


def means_of(measure, first: list[dict], second: list[dict], shared):
    """Returns each problem's mean in both files, [2, n].

    Answers without a value are left out, and problems with none in one of the files.
    """
    means = []
    for ours, theirs in shared:
        sides = [measure(first[i]) for i in ours], [measure(second[i]) for i in theirs]
        known = [[x for x in side if x is not None] for side in sides]
        if all(known):
            means.append([float(np.mean(side)) for side in known])
    return np.array(means).T
