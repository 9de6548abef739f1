"""Two checkpoints on the same prompts: which answers belong together, and who won.

A difference's interval is the paired bootstrap's: problems are drawn with replacement, and
of each its difference, the mean over its answers (arXiv 2411.00640 calls this paired and
clustered).
"""

import collections

import numpy as np

from dllm_jax import records, statistics

# What is compared: its name, and its value in a record, None where it has none.
MEASURES = {
    "reward": records.reward,
    "right": records.right,
    "tokens per forward": lambda row: (
        len(row["response_ids"]) / row["forwards"] if row.get("forwards") else None
    ),
    "tokens": lambda row: len(row["response_ids"]),
}


def key_of(row: dict):
    """Returns what two answers to one prompt have in common: its ids, and its images'."""
    ids, shown = row.get("prompt_ids"), row.get("images") or ()
    marks = tuple(str(x.get("mark")) for x in shown if isinstance(x, dict))
    return (tuple(ids), marks) if ids else (row.get("id"), row.get("question"))


def groups(rows: list[dict]) -> dict:
    """Returns the numbers of the answers to each prompt, by what they have in common."""
    numbers = collections.defaultdict(list)
    for i, row in enumerate(rows):
        numbers[key_of(row)].append(i)
    return {key: ids for key, ids in numbers.items() if key != (None, None)}


def common(first: list[dict], second: list[dict]) -> list[tuple[list, list]]:
    """Returns the numbers of the answers to each prompt that both files have."""
    there = groups(second)
    return [(ids, there[key]) for key, ids in groups(first).items() if key in there]


def pairs(shared: list[tuple[list, list]]) -> list[tuple[int, int]]:
    """Returns pairs of answers: the k-th to a prompt in one file, and in the other."""
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
