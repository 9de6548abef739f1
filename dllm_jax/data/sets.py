r"""Published data sets by name: where each lies, what it must be, and as what it is kept.

`get` downloads a file, compares its SHA-256, and writes the records as JSON lines with the
fields that the other commands read (`question`, `answer`, or tests) into a cache:

    $DLLM_DATA_CACHE    the cache; default: ~/.cache/dllm_jax/data
    $DLLM_DATA_MIRROR   where to download from instead: a file:// or http:// address, below
                        which files lie as HOST/PATH, as `wget -x` leaves them

Nothing here needs a network but `get` itself, of what is not in the cache yet.
"""

import csv
import dataclasses
import hashlib
import http.client
import io
import json
import os
import pathlib
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from dllm_jax import records
from dllm_jax.exits import room, whole

CACHE, MIRROR = "DLLM_DATA_CACHE", "DLLM_DATA_MIRROR"
DEFAULT_CACHE = "~/.cache/dllm_jax/data"
SECONDS = 60.0  # without a byte: the server is gone
MOST_BYTES = 2**34
PIECE = 2**20
# What a server, or the way to it, fails with.
LOST = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)
HUB = "https://huggingface.co/datasets/{}/resolve/main/{}"
SHA256 = re.compile("[0-9a-f]{64}")
GITHUB = "https://raw.githubusercontent.com/{}"


# ---- Records, as they are kept -----------------------------------------------------------


def answered(rows: list[dict]) -> list[dict]:
    """Reads mathematics of dLLM-RL."""
    names = {"ground_truth_answer": "answer"}
    return [{names.get(field, field): x for field, x in row.items()} for row in rows]


def grade_school(rows: list[dict]) -> list[dict]:
    """Reads GSM8K: the answer is what follows `####`."""
    return [
        {
            "question": row["question"],
            "answer": row["answer"].rsplit("####")[-1].strip().replace(",", ""),
            "solution": row["answer"],
        }
        for row in rows
    ]


BEGUN = "Here is the completed code:\n```python\n"  # of dLLM-RL's code prefixes


def humaneval(rows: list[dict]) -> list[dict]:
    """Reads HumanEval; `question` and `prefix` are as dLLM-RL has them."""
    return [
        row
        | {
            "question": f"You need to complete this code:\n{row['prompt']}\n",
            "prefix": f"{BEGUN}{row['prompt']}\n",
        }
        for row in rows
    ]


def mbpp(rows: list[dict]) -> list[dict]:
    """Reads MBPP's test split, tasks 11 to 510; `question` and `prefix` are as dLLM-RL's.

    There a prefix ends with the first function of the reference solution, which for some
    tasks is a helper's.
    """
    return [
        row
        | {
            "question": f"{row['text']}\nYour code should pass the test:\n"
            f"{row['test_list'][0]}\n",
            "prefix": f"{BEGUN}{header(row['code'])}\n"
            f'    """ {row["text"]}\n    """\n\n',
        }
        for row in rows
        if 11 <= row["task_id"] <= 510
    ]


def header(code: str) -> str:
    """Returns a program's lines up to its first function's first."""
    lines = code.replace("\r", "").split("\n")
    first = next(i for i, x in enumerate(lines) if re.match(r"def ", x))
    return "\n".join([*map(str.rstrip, lines[:first]), lines[first]])


def countdown(rows: list[dict]) -> list[dict]:
    """Reads d1's countdown: three numbers, and the target they are to make."""
    return [
        countdown_row([int(x) for x in row["input"].split(",")], int(row["output"]))
        for row in rows
    ]


def countdown_row(numbers: list[int], target: int) -> dict:
    """Returns the record of a countdown, which the grader `countdown` judges."""
    shown = ", ".join(map(str, numbers))
    return {
        "question": f"Using each of the numbers {shown} exactly once, with +, -, *, / and "
        f"brackets, write an expression that equals {target}. Put the expression within "
        "\\boxed{}.",
        "numbers": numbers,
        "target": target,
    }


def sudoku(rows: list[dict]) -> list[dict]:
    """Reads d1's 4 x 4 sudoku: 16 digits, 0 where a cell is empty."""
    return [sudoku_row(row["Puzzle"].zfill(16), row["Solution"]) for row in rows]


def sudoku_row(puzzle: str, solution: str) -> dict:
    """Returns the record of a 4 x 4 sudoku, which the grader `sudoku` judges."""
    grid = "\n".join(puzzle[i : i + 4] for i in range(0, 16, 4))
    return {
        "question": "Fill in this 4x4 sudoku, in which 0 is an empty cell, so that every row, "
        "every column and every 2x2 box has the digits 1 to 4. Put the 16 digits, row by "
        f"row, within \\boxed{{}}.\n{grid}",
        "puzzle": puzzle,
        "solution": solution,
    }


# ---- The table ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Set:
    """A published data set."""

    url: str
    sha256: str  # of the file there; "": not known, noted when it is first downloaded
    reward: str  # the grader that judges its answers
    read: Callable[[list[dict]], list[dict]] = list  # as they are
    count: int = 0  # records that are kept; 0: not known


def of_paper(name: str, split: str, **facts) -> Set:
    """Returns a set of the paper's (arXiv 2509.06949), as its authors publish it."""
    url = HUB.format(f"Gen-Verse/{name}", f"{split}/{name}.json")
    return Set(url, **facts)


SETS = {
    "math500": of_paper(
        "MATH500",
        "test",
        sha256="ca87d63fab75d106facbff0a4c3d5a79b1da0b5770dde12e2e54a8833898b29e",
        reward="math",
        read=answered,
        count=500,
    ),
    "math_train": of_paper(
        "MATH_train",
        "train",
        sha256="539028c708d30c18805c92329f0b7d4cedb29f99b25cfe7742772f57c6e8a961",
        reward="math",
        read=answered,
        count=8523,
    ),
    "gsm8k": Set(
        GITHUB.format(
            "openai/grade-school-math/master/grade_school_math/data/test.jsonl"
        ),
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        "math",
        grade_school,
        1319,
    ),
    "gsm8k_train": Set(
        GITHUB.format(
            "openai/grade-school-math/master/grade_school_math/data/train.jsonl"
        ),
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        "math",
        grade_school,
        7473,
    ),
    "aime24": of_paper("AIME2024", "test", sha256="", reward="math", read=answered),
    "mbpp": Set(
        GITHUB.format("google-research/google-research/master/mbpp/mbpp.jsonl"),
        "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f",
        "code",
        mbpp,
        500,
    ),
    "humaneval": Set(
        GITHUB.format("openai/human-eval/master/data/HumanEval.jsonl.gz"),
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        "code",
        humaneval,
        164,
    ),
    "livecodebench": of_paper("LiveCodeBench", "test", sha256="", reward="code"),
    "livebench": of_paper("LiveBench", "test", sha256="", reward="code"),
    "primeintellect": of_paper("PrimeIntellect", "train", sha256="", reward="code"),
    "openr1math": of_paper("demon_openr1math", "train", sha256="", reward=""),
    "countdown_d1": Set(
        GITHUB.format("dllm-reasoning/d1/main/dataset/countdown_cd3_test.jsonl"),
        "9916f614621e26fb2b035ed4ea641e35e4fff0d533bb9b9c7bcaaa61017d88c6",
        "countdown",
        countdown,
        256,
    ),
    "sudoku_d1": Set(
        GITHUB.format("dllm-reasoning/d1/main/dataset/4x4_test_sudoku.csv"),
        "ef86c7c28ebef88484d85fda59b3909a7b621241aa1abf36343437dbc4a3ffb6",
        "sudoku",
        sudoku,
        500,
    ),
}


# ---- The cache ---------------------------------------------------------------------------


def cache() -> pathlib.Path:
    """Returns the folder of what was downloaded."""
    return pathlib.Path(os.environ.get(CACHE) or DEFAULT_CACHE).expanduser()


def place(name: str) -> pathlib.Path:
    """Returns where a set's records are, or would be."""
    return cache() / f"{name}.jsonl"


def check(path: str) -> None:
    """Raises ValueError for a file that is not there and can be got, naming the command.

    It is one of the cache, or has the name of a published one.
    """
    file = pathlib.Path(path)
    if file.exists():
        return
    if file.parent == cache():
        raise ValueError(
            f"dataset {path!r}: it was not downloaded yet: python -m dllm_jax.data get "
            f"{file.stem}"
        )
    for name, known in SETS.items():
        published = pathlib.PurePosixPath(known.url)
        if published.name == file.name and published.stem not in ("train", "test"):
            raise ValueError(
                f"dataset {path!r}: no such file; python -m dllm_jax.data get {name} "
                f"downloads what is published by this name to {place(name)}"
            )


def get(name: str, sha256: str = "") -> tuple[pathlib.Path, int]:
    """Returns (a set's file in the cache, its records), downloaded if it is not there.

    name: a key of SETS, or hub:OWNER/NAME/PATH of a file on the Hugging Face hub. sha256:
    what the download must have, where nothing is known of it. Raises ValueError naming an
    unknown set, a wrong checksum, a download that fails, and a record that is none.
    """
    known, sha256 = known_set(name), sha256.lower()
    if sha256 and not SHA256.fullmatch(sha256):  # known before much is downloaded
        raise ValueError(
            f"--sha256={sha256}: a SHA-256 has 64 digits of 0 to 9 and a to f"
        )
    if sha256 and known.sha256 not in ("", sha256):
        raise ValueError(
            f"--sha256={sha256}: {name} is known to be of a file with SHA-256 {known.sha256}"
        )
    kept = place(name if name in SETS else name_of(name.removeprefix("hub:")))
    raw = cache() / "downloaded" / kept.stem / pathlib.PurePosixPath(known.url).name
    note = raw.with_name(f"{raw.name}.sha256")
    noted = note.read_text() if note.exists() else ""
    wanted = known.sha256 or sha256
    if kept.exists():
        if sha256 and sha256 != noted:
            raise ValueError(
                f"{kept} is of a file with SHA-256 {noted}: remove it first"
            )
        return kept, len(records.records(str(kept)))
    with room(cache()):
        raw.parent.mkdir(parents=True, exist_ok=True)
        why = f", as noted at the first download in {note}; --sha256=NEW takes this one"
        found = download(mirrored(known.url), raw, wanted or noted, why * (not wanted))
    rows = kept_rows(name, known, raw)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with room(kept.parent, len(text)):
        note.write_text(found)  # of a file with records, not of a page to log in
        with whole(kept, len(text), str(os.getpid())) as partial:
            partial.write_text(text, encoding="utf-8")
    return kept, len(rows)


def name_of(path: str) -> str:
    """Returns what a file of the hub is called in the cache: no two have one name."""
    stem, kind = os.path.splitext(path)
    # Own ones of "+" and "=" are %2B and %3D now.
    told, kind = (urllib.parse.quote(x).replace("/", "+") for x in (stem, kind))
    return told if kind == ".jsonl" else f"{told}={kind[1:]}"


def known_set(name: str) -> Set:
    """Returns the Set of a name; raises ValueError listing what there is."""
    if name in SETS:
        return SETS[name]
    parts = name.removeprefix("hub:").split("/")
    if name.startswith("hub:") and len(parts) >= 3 and all(parts):
        # A blank or a "#" ends an address; a "%" stays, as names are copied from addresses.
        file = urllib.parse.quote("/".join(parts[2:]), safe="/%")
        return Set(HUB.format("/".join(parts[:2]), file), "", "")
    raise ValueError(
        f"unknown data set {name!r}: choose from {', '.join(SETS)}, name a file on the "
        "hub as hub:OWNER/NAME/PATH.jsonl, or a generated task of `python -m "
        "dllm_jax.data list`"
    )


def kept_rows(name: str, known: Set, raw: pathlib.Path) -> list[dict]:
    """Returns the records of a downloaded file, as they are kept.

    Raises ValueError for a file without them, and naming a record that lacks a field.
    """
    rows = of_csv(raw) if raw.suffix == ".csv" else records.records(str(raw))
    out = []
    for number, row in enumerate(rows, 1):
        try:
            out += known.read([row])
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            StopIteration,
        ) as error:
            raise ValueError(
                f"dataset {str(raw)!r}, record {number}: no record of {name}: "
                f"{type(error).__name__} {error}"
            ) from None
    if known.count and len(out) != known.count:
        raise ValueError(f"{name}: {len(out)} records, and not {known.count}")
    return out


def of_csv(file: pathlib.Path) -> list[dict]:
    """Returns the rows of a CSV file by the names of its first line.

    Raises ValueError naming the file, and the line that has other fields than the first.
    """
    csv.field_size_limit(2**31 - 1)  # the module's own is 131,072 characters
    table, rows = None, []
    try:
        table = csv.reader(io.StringIO(records.text(file), newline=""), strict=True)
        head = next(table, [])
        if not head or len({*head}) < len(head):
            raise ValueError("line 1: each column needs a name of its own")
        for cells in filter(None, table):  # blank lines are no rows
            if len(cells) != len(head):
                raise ValueError(
                    f"line {table.line_num}: {len(cells)} fields, and not {len(head)}"
                )
            rows.append(dict(zip(head, cells, strict=True)))
    except (csv.Error, ValueError) as error:
        place = f"line {table.line_num}: " if isinstance(error, csv.Error) else ""
        raise ValueError(f"dataset {str(file)!r}, {place}{error}") from None
    if not rows:
        raise ValueError(f"dataset {str(file)!r}: it is empty")
    return rows


def mirrored(url: str) -> str:
    """Returns where a file is downloaded from: its address, or the mirror's."""
    mirror = os.environ.get(MIRROR)
    if not mirror:
        return url
    if urllib.parse.urlsplit(mirror).scheme not in ("file", "http", "https"):
        raise ValueError(f"{MIRROR}={mirror}: needs file://, http:// or https://")
    return f"{mirror.rstrip('/')}/{url.partition('://')[2]}"


def download(url: str, file: pathlib.Path, sha256: str, why: str = "") -> str:
    """Downloads a file and returns its SHA-256; the file is whole, or is not there.

    sha256: what it has to be; "": anything. why: more of that, for people. Raises
    ValueError where it is not, and for what cannot be downloaded.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with (
            urllib.request.urlopen(url, timeout=SECONDS) as source,
            partial.open("wb") as out,
        ):
            while piece := source.read(PIECE):
                digest.update(piece)
                out.write(piece)
                if out.tell() > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES} bytes")
            size = source.headers.get("Content-Length")
            if size is not None and int(size) != out.tell():
                raise ValueError(f"it ended after {out.tell()} of {size} bytes")
        found = digest.hexdigest()
        if sha256 and found != sha256:
            raise ValueError(f"its SHA-256 is {found}, and should be {sha256}{why}")
        shutil.move(partial, file)
    except LOST as error:
        reason = getattr(error, "reason", "") or error
        raise ValueError(
            f"cannot download {url}: {reason}; without a network, let {MIRROR} name a "
            "mirror"
        ) from None
    except ValueError as error:
        raise ValueError(f"cannot take {url}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return found
