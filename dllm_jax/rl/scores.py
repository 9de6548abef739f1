"""What an evaluation found: scores with their intervals, a card, a row of a table.

Letters: s answers to a problem.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import NamedTuple

import numpy as np

from dllm_jax import data, folder, statistics
from dllm_jax.records import right
from dllm_jax.rl import rollout
from dllm_jax.sampling.config import IDLE, SamplerConfig
from dllm_jax.statistics import Score

HEAD = ("checkpoint", "problems", "n x s", "sampler", "seed")
# What a row of a table shows, as far as it is known: its unit, and how it is written.
COLUMNS = {
    "accuracy": ("%", 100, 1),
    "pass@": ("%", 100, 1),
    "maj@": ("%", 100, 1),
    "truncated": ("%", 100, 1),
    "skipped": ("%", 100, 1),
    "unjudged": ("%", 100, 1),
    "response_length": ("", 1, 1),
    "forwards": ("", 1, 1),
    "tokens_per_forward": ("", 1, 2),
}
LOST = ("skipped", "unjudged")  # told of a card where there are any
NO = {"value": 0.0, "low": None}  # of what a card does not tell as there is none
# Of the sampler's fields, not among a card's words: they are told first, or ids.
TOLD = ("strategy", "threshold", "entropy_bound", "block", "temperature", "max_new")
TOLD += ("max_prompt", "stop_ids", "blank", "tail")


def of_records(records: list[dict], each: int, vote=None) -> dict[str, Score]:
    """Returns the scores of all answers, `each` of them to a problem, by name.

    vote: of a Grader; without it there is no maj@k. Answers that nobody could judge count
    in no accuracy, which is pass@1; in pass@k of more and in maj@k they are wrong, where any
    answer was judged. What was
    skipped, as its prompt was too long, is wrong everywhere, and counts in no other score.
    The shares of both are told where there are any.
    """
    trace = rollout.of_records(records).trace
    right_ns = right_of(records, each)
    tokens_n = by_problem(trace.len_B, each).sum(axis=1)
    forwards_n = by_problem(trace.forwards_B, each).sum(axis=1)
    given_ns = by_problem(trace.len_B > 0, each)
    cut_ns = given_ns & ~by_problem(trace.stopped_B, each)
    class_ns = classes_of(records, each, vote) if vote else None
    accuracy = of_shares(shares(right_ns), each)
    found = {"accuracy": accuracy, "pass@1": accuracy}
    of_several = of_sets(right_ns == 1, class_ns)
    if np.isnan(right_ns).all():
        of_several = dict.fromkeys(of_several, accuracy)
    found |= of_several
    skipped_ns = ~given_ns & ~by_problem(trace.bad_B, each)
    for name, lost_ns in zip(LOST, (skipped_ns, np.isnan(right_ns)), strict=True):
        if lost_ns.any():
            found[name] = statistics.share(lost_ns.mean(axis=1), each)
    return found | {
        "truncated": of_shares(shares(np.where(given_ns, cut_ns, np.nan)), each),
        "response_length": statistics.ratio(tokens_n, given_ns.sum(axis=1)),
        "forwards": statistics.ratio(forwards_n, given_ns.sum(axis=1)),
        "tokens_per_forward": statistics.ratio(tokens_n, forwards_n),
    }


def by_problem(x_n, each: int):
    """Returns what is known of answers, [n, s]: those to a problem follow each other."""
    return np.asarray(x_n).reshape(-1, each)


def right_of(records: list[dict], each: int):
    """Returns 1 for a right answer, 0 for a wrong one, nan where nobody judged it: [n, s]."""
    return by_problem(np.array([right(record) for record in records], float), each)


def shares(right_ns):
    """Returns the share of 1 among what is known, not nan, of each problem; nan: of none."""
    with np.errstate(invalid="ignore"):
        return (right_ns == 1).sum(axis=1) / (~np.isnan(right_ns)).sum(axis=1)


def of_shares(share_n, each: int) -> Score:
    """Returns the share over the problems that have one; where none has, it is 0."""
    known_n = share_n[~np.isnan(share_n)]
    if not len(known_n):
        return Score(0.0, None, None, statistics.OF_NONE)
    return statistics.share(known_n, each)


def of_sets(right_ns, class_ns) -> dict[str, Score]:
    """Returns pass@k for k = 2, 4 ... and s, and maj@k from three answers on.

    class_ns: what the answers say (statistics.majority_at), or None.
    """
    each = right_ns.shape[1]
    found = {}
    for k in rollout.sizes(each)[1:]:
        value_n = statistics.pass_at(right_ns, k)
        # That of all answers is a share of the problems.
        found[f"pass@{k}"] = statistics.share(value_n, 1 if k == each else each)
    for k in rollout.sizes(each) if class_ns is not None else ():
        if k > 2:
            voted_n = statistics.majority_at(class_ns, right_ns, k)
            found[f"maj@{k}"] = statistics.share(voted_n, each)
    return found


def classes_of(records: list[dict], each: int, vote):
    """Returns numbers of what the answers say, [n, s]: see `Grader.vote`."""
    texts = [record["text"] for record in records]
    rows = [vote(texts[i : i + each]) for i in range(0, len(texts), each)]
    return np.array(rows)


# ---- A card, and a row -------------------------------------------------------------------


class Asked(NamedTuple):
    """What an evaluation asks."""

    problems: list[data.Problem]  # of each answer
    sha256: str  # of the file that they were read from


def card(cfg, records: list[dict], asked: Asked, scores: dict, marks: dict) -> dict:
    """Returns what an evaluation found, and all that its numbers depend on; JSON-able.

    cfg: the configuration, completed. asked: the problem of each record. scores: of
    `of_records`. marks: repository.marks of the checkpoint's files.
    """
    each, by = cfg.eval.answers, cfg.eval.by
    fields = dataclasses.asdict(cfg.sampler)
    told = {name: x for name, x in fields.items() if name not in IDLE}
    return {
        "checkpoint": {"path": cfg.model.path, "hash": digest(marks)},
        "data": {
            "path": cfg.data.heldout,
            "sha256": asked.sha256,
            "template": cfg.data.template,
            "raw": cfg.data.raw,
            "question": cfg.data.question,
            "answer": cfg.data.answer,
        },
        "problems": len(records) // each,
        "answers": each,
        "seed": cfg.seed,
        "temperature": cfg.eval.temperature,
        "sampler": told,
        "reward": cfg.rl.reward,
        "truncated_wrong": cfg.rl.truncated_wrong,  # all that is read of rl.truncated
        "dtype": cfg.model.dtype,
        "scores": {name: x._asdict() for name, x in scores.items()},
        "by": by,
        "groups": groups(records, asked.problems, each, by) if by else {},
        "versions": folder.versions(),
        "commit": folder.commit(),
    }


def groups(records: list[dict], asked: list, each: int, by: str) -> dict[str, dict]:
    """Returns the accuracy of the problems with each value of a field."""
    members = {}
    for i in range(0, len(records), each):
        value = data.text(asked[i].record, by)
        members.setdefault(value, []).extend(records[i : i + each])
    return {
        value: {
            "problems": len(rows) // each,
            "accuracy": of_records(rows, each)["accuracy"]._asdict(),
        }
        for value, rows in sorted(members.items())
    }


def table_of_groups(made: dict) -> str:
    """Returns a card's groups as a Markdown table."""
    lines = [line([made["by"], "problems", "accuracy"]), line(["---"] * 3)]
    for value, group in made["groups"].items():
        cell = written("accuracy", group["accuracy"])
        lines.append(line([value, str(group["problems"]), cell]))
    return "\n".join(lines)


def digest(marks: dict) -> str:
    """Returns one number for a checkpoint: SHA-256 of its files' sizes and CRCs."""
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()


def in_words(made: dict) -> str:
    """Returns a card's sampler in words: what is not named is the default, or in TOLD."""
    sampler, T = made["sampler"], made["temperature"]
    words = [sampler["strategy"]]
    if sampler["strategy"] == "dynamic":
        words.append(f"{sampler['threshold']:g}")
    if sampler["strategy"] == "entropy_bounded":
        words.append(f"{sampler['entropy_bound']:g} nats")
    changed = [
        f"{field.name}={sampler[field.name]}"
        for field in dataclasses.fields(SamplerConfig)
        if field.name not in (*IDLE, *TOLD)
        and sampler.get(field.name, field.default) != field.default
    ]
    words.append(f"block {sampler['block']}, T={T:g}, {sampler['max_new']} tokens")
    return ", ".join([" ".join(words), *changed])


def table(cards: list[dict]) -> str:
    """Returns cards as a Markdown table, a row each; scores with their intervals."""
    every = dict.fromkeys(name for made in cards for name in made["scores"])
    names = [
        name
        for kind in COLUMNS
        for name in every
        if (name.startswith(kind) if kind.endswith("@") else name == kind)
        and name != "pass@1"  # which is the accuracy
        and (name in LOST or all(name in made["scores"] for made in cards))
    ]
    lines = [line([*HEAD, *names]), line(["---"] * (len(HEAD) + len(names)))]
    for made in cards:
        size = f"{made['problems']} x {made['answers']}"
        model, data = made["checkpoint"], made["data"]
        first = f"{pathlib.Path(model['path']).name} {model['hash'][:8]}"
        facts = [first, pathlib.Path(data["path"]).name, size, in_words(made)]
        cells = [written(name, made["scores"].get(name, NO)) for name in names]
        lines.append(line([*facts, str(made["seed"]), *cells]))
    return "\n".join(lines)


def line(cells: list[str]) -> str:
    """Returns a line of a Markdown table."""
    return "| " + " | ".join(x.replace("|", "\\|") for x in cells) + " |"


def written(name: str, score: dict) -> str:
    """Returns a score as a table has it: 62.1 % [58.0, 66.1]; a dash for a share of none."""
    if score.get("method") == statistics.OF_NONE:
        return "–"
    kind = next(x for x in COLUMNS if name.startswith(x))
    unit, scale, digits = COLUMNS[kind]
    value = f"{scale * score['value']:.{digits}f}{' ' * bool(unit)}{unit}"
    if score["low"] is None:
        return value
    low, high = (f"{scale * score[end]:.{digits}f}" for end in ("low", "high"))
    return f"{value} [{low}, {high}]"


# ---- A sweep -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a sweep's AUP asks of one of its settings."""

    value: float  # of the key that is swept
    right_n: np.ndarray  # each problem's share of right answers; nan: none was judged
    tokens_n: np.ndarray
    forwards_n: np.ndarray


def setting(value: float, records: list[dict], each: int) -> Setting:
    """Returns a Setting of the records of its answers."""
    trace = rollout.of_records(records).trace
    return Setting(
        value,
        shares(right_of(records, each)),
        by_problem(trace.len_B, each).sum(axis=1),
        by_problem(trace.forwards_B, each).sum(axis=1),
    )


def sweep(key: str, settings: list[Setting], best: float) -> dict:
    """Returns the points of a sweep and AUP with its interval, JSON-able.

    best: the best accuracy of any other method compared, in %: a better one of this sweep
    takes its place. AUP is None, and "why" says why, where it is refused (statistics.aup),
    and where nothing is right.
    """
    x_nc = np.concatenate([columns(s) for s in settings], axis=1)

    def points(mean_c) -> list[tuple[float, float]]:
        return [
            (tokens / max(n, 1e-9), 100 * solved / max(judged, 1e-9))
            for solved, judged, tokens, n in mean_c.reshape(-1, 4).tolist()
        ]

    def areas(mean_dc):
        sorted_d = (sorted(points(mean_c)) for mean_c in mean_dc)
        return np.array([statistics.area(x, max(best, top(x))) for x in sorted_d])

    measured = points(x_nc.mean(axis=0))
    told = {
        "key": key,
        "points": [
            {"value": s.value, "tokens_per_forward": rho, "accuracy": y}
            for s, (rho, y) in zip(settings, measured, strict=True)
        ],
        "best": max(best, *(y for _, y in measured)),
    }
    if not told["best"]:
        return told | {"aup": None, "why": "AUP: nothing is right, by any setting"}
    try:
        value = statistics.aup(measured, told["best"])
    except ValueError as error:
        return told | {"aup": None, "why": str(error)}
    low, high = statistics.bootstrap(areas, x_nc)
    return told | {"aup": {"value": value, "low": low, "high": high}}


def columns(setting: Setting):
    """Returns what a sweep averages of a setting's problems: [n, 4].

    Where none of a problem's answers was judged, it counts in no accuracy.
    """
    judged_n = ~np.isnan(setting.right_n)
    solved_n = np.where(judged_n, setting.right_n, 0)
    parts = solved_n, judged_n, setting.tokens_n, setting.forwards_n
    return np.stack(parts, axis=1).astype(float)


def top(points: list[tuple[float, float]]) -> float:
    """Returns the best accuracy of points, in %; 1, to divide by, where nothing is right."""
    return max(y for _, y in points) or 1.0


def sentence(told: dict) -> str:
    """Returns a sweep's AUP in a line, with what it must not be compared without."""
    if told["aup"] is None:
        return told["why"]
    aup, ends = told["aup"], ""
    if aup["low"] is not None:
        ends = f" [{aup['low']:.1f}, {aup['high']:.1f}]"
    return (
        f"AUP {aup['value']:.1f}{ends}, with {told['best']:.2f} % as the best accuracy"
    )


def arms(made: dict) -> tuple[float, float]:
    """Returns how far a card's accuracy may be lower and higher, in %; 0: not known."""
    value, low, high = (made["scores"]["accuracy"][x] for x in ("value", "low", "high"))
    if low is None:
        return 0.0, 0.0
    return 100 * max(value - low, 0), 100 * max(high - value, 0)


def picture(told: dict, cards: list[dict], file: pathlib.Path) -> None:
    """Draws a sweep's accuracy over tokens per forward, with its 95 % intervals.

    cards: of the points, in their order.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs = zip(told["points"], cards, strict=True)
    rows = [
        (point["tokens_per_forward"], point["accuracy"], *arms(card), point["value"])
        for point, card in pairs
    ]
    rho, y, below, above, values = zip(*sorted(rows), strict=True)
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    axis.errorbar(rho, y, yerr=(below, above), marker="o", capsize=3)
    axis.margins(x=0.15, y=0.15)  # else a label leaves the frame
    for x, height, value in zip(rho, y, values, strict=True):
        near = {"xytext": (5, 5), "textcoords": "offset points"}
        axis.annotate(f"{value:g}", (x, height), **near)
    axis.set(xlabel="tokens per forward", ylabel="accuracy, %", title=told["key"])
    figure.savefig(file, dpi=120)
    plt.close(figure)
