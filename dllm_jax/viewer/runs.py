"""What a run's folder tells of the run, for its report."""

import json
import os
import pathlib
import re

from dllm_jax import curves, data, metrics, records, statistics
from dllm_jax.exits import warn
from dllm_jax.viewer import traces

HAPPENED = re.compile(
    r"warning|skipp|resum|stays|taken over|stopped|cannot go on|error|refused|defect|Error"
)
LAST_EVENTS = 200
SUMS = {  # metrics of steps whose sum over the run says what went wrong
    "updates_skipped": "updates of the policy skipped",
    "value_updates_skipped": "updates of the value network skipped",
    "graded_timeouts": "answers that could not be judged",
    "nan_answers": "answers that met a number that is not finite",
}


def told(path: str) -> dict:
    """Returns what the report shows of a run, JSON-able; see web/report.js.

    Raises ValueError for a folder that holds none.
    """
    # With it ".." has a name, and links keep theirs.
    folder = pathlib.Path(os.path.abspath(path))
    rows = metrics.history(folder) if folder.is_dir() else []
    home = home_of(folder)
    run, cfg = object_in(home / "run.json"), object_in(home / "config.json")
    if not rows and not run:
        inside = sorted(x.parent for x in pathlib.Path(path).glob("*/run.json"))
        more = f"; name one that is in it, such as {inside[0]}" if inside else ""
        raise ValueError(
            f"{path}: no run's folder: neither metrics.jsonl nor run.json{more}"
        )
    if home != folder:
        cfg = overlaid(cfg, object_in(folder / "eval.job.json"))
    attempts = run.get("attempts")
    attempts = attempts if isinstance(attempts, list) else []
    attempts = [x for x in attempts if isinstance(x, dict)]
    return {
        "name": str(folder.relative_to(home.parent)),
        "facts": facts(rows, cfg, attempts),
        "panels": panels(rows),
        "phases": phases(rows),
        "evals": evals(rows, heldout_size(cfg), answers_each(cfg)),
        "scores": scores(folder),
        "settings": settings(folder),
        "attempts": [attempt_of(attempt) for attempt in attempts],
        "sums": sums(rows),
        "events": events(home),
        "config": flat(cfg),
        "defaults": flat(traces.group(run, "defaults")),
    }


def home_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns a run's folder: of one of eval.sweep or eval.samplers that of all of them."""
    part = (folder / "eval.json").is_file() and not (folder / "run.json").exists()
    return folder.parent if part and (folder.parent / "run.json").is_file() else folder


def parts_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of a run's eval.sweep and eval.samplers, as `place` says."""
    files = folder.glob("*/eval.json") if (folder / "run.json").is_file() else ()
    parts = [x.parent for x in files if not (x.parent / "run.json").exists()]
    return sorted(parts, key=lambda part: place(part.name))


def place(name: str) -> tuple[str, float, str]:
    """Returns by what settings are sorted: "threshold=0.9" by its key and its value."""
    key, _, value = name.partition("=")
    try:
        return key, float(value), name
    except ValueError:
        return key, 0.0, name


def settings(folder: pathlib.Path) -> list[list]:
    """Returns (name, the rest of a row of `evals`) of each setting; [] where there are none.

    What the folder itself holds beside `parts_of` is of the configuration's own sampler.
    """
    parts = {part.name: scores(part) for part in parts_of(folder)}
    if parts and (own := scores(folder)):
        parts = {"sampler": own} | parts
    rows = []
    for name, told in parts.items():
        known = {score: x for score, *x in told}
        accuracy = known.get("accuracy", [None] * 3)
        more = "tokens_per_forward", "response_length"
        rows.append([name, *accuracy, *(known.get(x, [None])[0] for x in more)])
    return rows


def overlaid(tree: dict, leaves: dict, prefix: str = "") -> dict:
    """Returns a configuration with other values of some leaves, by their dotted names."""
    return {
        name: overlaid(x, leaves, f"{prefix}{name}.")
        if isinstance(x, dict)
        else leaves.get(prefix + name, x)
        for name, x in tree.items()
    }


def object_in(file: pathlib.Path) -> dict:
    """Returns `traces.object_of` a file, and says so where it is there and is none."""
    found = traces.object_of(file)
    if not found and file.exists():
        warn(f"{file}: left out: it holds no JSON object that can be read")
    return found


def facts(rows: list[dict], cfg: dict, attempts: list[dict]) -> list[list[str]]:
    """Returns (name, value) of what the run is, and where and when it ran."""
    newest = attempts[-1] if attempts else {}
    versions = traces.group(newest, "versions")
    known = {
        "method": cfg.get("method"),
        "model": traces.group(cfg, "model").get("path"),
        "steps": rows[-1]["step"] if rows else None,
        "started": attempts[0].get("start") if attempts else None,
        "ended": newest.get("ended"),
        "device": f"{newest.get('devices')} x {newest.get('device')}"
        if newest.get("device")
        else None,
        "commit": newest.get("commit"),
        "versions": ", ".join(f"{name} {x}" for name, x in versions.items()),
    }
    return [[name, str(x)] for name, x in known.items() if x not in (None, "")]


def panels(rows: list[dict]) -> list[dict]:
    """Returns the panels of curves.png that have data."""
    return [
        {
            "title": title,
            "log": bool(lines.keys() & set(curves.LOG)),
            "lines": [
                # Of 100,000 steps all digits would be most of the page.
                {
                    "label": curves.label_of(metric, lines),
                    "points": [(step, float(f"{y:.7g}")) for step, y in points],
                }
                for metric, points in lines.items()
            ],
        }
        for title, lines in curves.panels_of(rows)
    ]


def phases(rows: list[dict]) -> dict:
    """Returns the seconds of each phase of each step, as far as they are told."""
    timed = [row for row in rows if row["step"] > 0 and curves.phases_of(row)]
    names = [
        name for name in curves.PHASES if any(f"seconds/{name}" in r for r in timed)
    ]
    seconds = [[row.get(f"seconds/{name}") or 0.0 for name in names] for row in timed]
    return {
        "names": names,
        "steps": [row["step"] for row in timed],
        "seconds": [[round(x, 4) for x in row] for row in seconds],
    }


def evals(rows: list[dict], problems: int, answers: int) -> list[list]:
    """Returns (step, accuracy, its interval's ends, tokens per forward, length).

    The interval is that of so many problems as were judged; where none was, there is no
    accuracy. problems: of each evaluation that does not tell it; 0: not known, and then the
    ends are None. answers: to each; where they were others once, the ends may be None, too.
    """
    out = []
    for row in rows:
        share = row.get("heldout_accuracy")
        known = row.get("heldout_problems") or problems
        count = known - (row.get("heldout_graded_timeouts") or 0) / answers
        unjudged = count == 0 < known
        if share is not None or (unjudged and "heldout_problems" in row):
            low, high = None, None
            share = None if unjudged else share
            # Who wrote a row by hand may have meant per cent, of which this tells nothing.
            if share is not None and 0 <= share <= 1 <= count <= traces.LARGEST:
                low, high = statistics.wilson(share, count)
            names = ("tokens_per_forward", "response_length")
            more = [row.get(f"heldout_{name}") for name in names]
            out.append([row["step"], share, low, high, *more])
    return out


def answers_each(cfg: dict) -> int:
    """Returns how many answers an evaluation had to each problem."""
    return traces.whole(traces.group(cfg, "eval").get("answers")) or 1


def heldout_size(cfg: dict) -> int:
    """Returns how many problems an evaluation had; 0 where nobody can tell any more.

    Of several files it is the first, as heldout_accuracy is.
    """
    limit = traces.whole(traces.group(cfg, "eval").get("problems"))
    files = data.files(str(traces.group(cfg, "data").get("heldout") or ""))
    path = pathlib.Path(next(iter(files), ""))
    try:  # of a pipe nobody can tell: it was read by the run, and would be waited for
        size = len(records.records(str(path))) if path.is_file() else limit
    except ValueError:
        return limit
    return min(limit or size, size)


def scores(folder: pathlib.Path) -> list[list]:
    """Returns (name, value, its interval's ends) of an evaluation; [] where there is none.

    The ends are those of card.json, and None where it has none. A share of none is left out.
    """
    found = traces.object_of(folder / "eval.json")
    card = traces.group(traces.object_of(folder / "card.json"), "scores")
    rows = []
    for name, x in found.items():
        score = traces.group(card, name)
        ends = [score.get(end) for end in ("low", "high")]
        if not all(map(traces.number, ends)):
            ends = [None, None]
        if traces.number(x) and score.get("method") != statistics.OF_NONE:
            rows.append([name, x, *ends])
    return rows


def attempt_of(attempt: dict) -> list[str]:
    """Returns start, end, host, commit and how it ended, as far as they are known."""
    names = ("start", "end", "host", "commit", "ended")
    return [str(attempt.get(name) or "") for name in names]


def sums(rows: list[dict]) -> list[list]:
    """Returns (what, how often) of what went wrong in steps."""
    totals = [[text, sum(row.get(x) or 0 for row in rows)] for x, text in SUMS.items()]
    return [[text, total] for text, total in totals if total]


def events(folder: pathlib.Path) -> list[str]:
    """Returns the lines of run.log that tell of something unusual, the last of many."""
    try:
        text = (folder / "run.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = [line[:500] for line in text.splitlines() if HAPPENED.search(line)]
    return lines[-LAST_EVENTS:]


def flat(tree: dict, prefix: str = "") -> dict[str, str]:
    """Returns a configuration's leaves by their dotted names, as JSON writes them."""
    leaves = {}
    for name, x in tree.items():
        if isinstance(x, dict):
            leaves |= flat(x, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = json.dumps(x, ensure_ascii=False)
    return leaves
