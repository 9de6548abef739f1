"""Which items of one file, or of several with weights, come next: a function of the seed."""

import os

import numpy as np

from dllm_jax import checks


def order(size: int, start: int, count: int, *, seed: int, shuffle: bool):
    """Returns the indices of items start .. start + count of an endless stream.

    Every epoch is a permutation of its own; the stream is a function of the seed alone,
    so the number of items taken so far is all that a checkpoint has to remember.
    """
    out = []
    for epoch in range(start // size, (start + count - 1) // size + 1):
        rng = np.random.default_rng([seed, epoch])
        out.append(rng.permutation(size) if shuffle else np.arange(size))
    first = start % size
    return np.concatenate(out)[first : first + count]


def files(spec: str) -> list[str]:
    """Returns the files that data.heldout names, with commas between.

    A name that is a file as it stands is that one, commas and all, as in `mixture`.
    """
    if os.path.exists(spec):
        return [spec]
    return [path.strip() for path in spec.split(",")] if spec else []


def mixture(spec: str) -> dict[str, float]:
    """Returns the weights of the files that data.train names, which sum to 1.

    "a.jsonl:3,b.jsonl:1"; a weight that is not said is 1. A name that is a file as it
    stands is that one. Raises ValueError for no file, and for weights that are none, or sum
    to 0.
    """
    if not spec:
        raise ValueError("data.train is empty: name the file of records to train on")
    if os.path.exists(spec) or not {",", ":"} & set(spec):
        return {spec: 1.0}
    weights = {}
    for part in spec.split(","):
        path, colon, said = part.strip().rpartition(":")
        if not colon or os.path.exists(part.strip()):
            path, said = part.strip(), "1"
        try:
            weight = float(said)
        except ValueError:
            path, weight = part.strip(), 1.0
        if not (path and 0 <= weight < float("inf")):
            raise ValueError(
                f"data.train={checks.shown(spec)}: {checks.shown(part)} is no FILE:WEIGHT "
                "with a weight of 0 or more"
            )
        if path in weights:
            raise ValueError(f"data.train={checks.shown(spec)}: {path!r} stands twice")
        weights[path] = weight
    total = sum(weights.values())
    if not 0 < total < float("inf"):
        reason = "0; one must be above" if total == 0 else "more than a number holds"
        raise ValueError(
            f"data.train={checks.shown(spec)}: the weights sum to {reason}"
        )
    return {path: weight / total for path, weight in weights.items()}


def mixed(
    sizes: list[int], weights: list[float], start: int, count: int, *, seed, shuffle
) -> np.ndarray:
    """Returns the indices of items start .. start + count of a stream of several files.

    sizes: items of each, which follow each other; weights: sum to 1. Each place draws its
    file, and a file's items come in the order of its own stream: `order`. Like that, a
    function of the seed alone.
    """
    if len(sizes) == 1:
        return order(sizes[0], start, count, seed=seed, shuffle=shuffle)
    rng = np.random.default_rng([seed, 0, 1])
    file_n = rng.choice(len(sizes), start + count, p=weights)
    index_n = np.zeros(count, int)
    for number, size in enumerate(sizes):
        here_n = file_n[start:] == number
        if here_n.any():
            taken = int((file_n[:start] == number).sum())
            own = order(
                size, taken, int(here_n.sum()), seed=seed + number, shuffle=shuffle
            )
            index_n[here_n] = sum(sizes[:number]) + own
    return index_n
