"""Files of answers with their traces, as a page shows them.

A file is what `generate --out` and `eval` write, or a run's samples/step_N.jsonl: a record
for each answer with response_ids and step_map, and as far as they are known prompt_ids,
logprobs (nats), confidence, advantage, value, reward, forwards, finished, question, answer;
where the model looked images, and where it drew picture.
"""

import dataclasses
import json
import math
import os
import pathlib
import re

from dllm_jax import data, records
from dllm_jax.exits import warn
from dllm_jax.folder import note_of
from dllm_jax.viewer import album
from dllm_jax.viewer.pieces import Pieces

# What a record may say of each token, and in the page: its letter, its decimals.
PER_TOKEN = {
    "logprobs": ("l", 2),
    "confidence": ("c", 2),
    "advantage": ("a", 2),
    "value": ("v", 2),
}
TEXTS = ("text", "question", "answer", "finished")
NUMBERS = ("reward", "forwards")
STEP = re.compile(r"step_(\d+)\.jsonl")
MOST = 2000  # answers on a page; of more, some are taken
# Of ids, and of steps: what a page keeps for each of them would not fit beyond that.
BELOW = {"response_ids": 2**31, "step_map": 2**20, "prompt_ids": 2**31}
LARGEST = 1e30  # of numbers, in size: what f32 holds, with some room
LONG_PROMPT = 20_000  # characters of a prompt that are shown
# Values of model_type with full attention where config.json has no attention_pattern: as
# models.families has them, which lies above this floor.
FULL = ("Dream", "llada", "llava_llada", "mmada")


@dataclasses.dataclass(frozen=True)
class File:
    """A file of answers, and what stands beside it."""

    path: pathlib.Path
    rows: list[dict]
    model: str  # the checkpoint's folder or hub name; "": not known
    block: int  # positions that are denoised together; 0: not known
    roots: tuple[str, ...] = (".",)  # the folders in which images may lie
    attention: str = ""  # what the command made of the model; "": the checkpoint's

    @property
    def name(self) -> str:
        """What people call it: of a run's samples the run and the step."""
        folder = pathlib.Path(os.path.abspath(self.path)).parent
        step = STEP.fullmatch(self.path.name)
        if step and folder.name == "samples":
            return f"{folder.parent.name}, step {int(step[1])}"
        return f"{folder.name}/{self.path.name}"


def read(path: str, images: str = "") -> File:
    """Reads a file of answers, or of a run's folder the newest.

    images: the folder in which images must lie; "": that of the run's data, or the file's.
    Raises ValueError naming the file and the answer that is none.
    """
    file = found(pathlib.Path(path))
    rows = records.records(str(file), "file of answers")
    for number, row in enumerate(rows, 1):
        try:
            check(row)
        except ValueError as error:
            raise ValueError(f"{file}: answer {number}: {error}") from None
    told = settings(file, rows)
    return dataclasses.replace(told, roots=(images,)) if images else told


def found(path: pathlib.Path) -> pathlib.Path:
    """Returns a file of answers: the path itself, or of a run's folder the newest samples.

    Raises ValueError where a folder has none.
    """
    if not path.is_dir():
        return path
    for pattern in ("samples/step_*.jsonl", "eval.jsonl"):
        if files := sorted(path.glob(pattern), key=lambda x: (len(x.name), x.name)):
            return files[-1]
    inside = sorted(path.glob("*/eval.jsonl"))  # of a sweep, say
    such = inside[0] if inside else "python -m dllm_jax.generate --out writes"
    raise ValueError(
        f"{path}: a folder without samples/step_N.jsonl and eval.jsonl; name a file of "
        f"answers, such as {such}"
    )


def check(row: dict) -> None:
    """Raises ValueError for a record that tells of no answer, or of one that cannot be."""
    for name in ("response_ids", "step_map"):
        if name not in row:
            raise ValueError(
                f"it has no {name}; python -m dllm_jax.generate --out writes them"
            )
    for name, end in BELOW.items():
        data.ids(row | {"prompt_ids": row.get("prompt_ids", [])}, name, end)
    count = len(row["response_ids"])
    for name in ("step_map", *PER_TOKEN):
        given = row.get(name)
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != count:
            found = len(given) if isinstance(given, list) else "no list of"
            raise ValueError(f"{name} has {found} numbers for {count} tokens")
        if not all(x is None or number(x) for x in given):
            raise ValueError(f"{name} must be numbers of at most {LARGEST:g} in size")
    for name in TEXTS:
        if type(row.get(name)) not in (str, type(None)):
            raise ValueError(f"{name} must be a text")
    numbers = {name: row.get(name) for name in NUMBERS} | group(row, "rewards")
    for name, x in numbers.items():
        if not (x is None or number(x)):
            raise ValueError(f"{name} must be a number of at most {LARGEST:g} in size")
    album.check(row)


def number(x) -> bool:
    """Returns whether a JSON value is a number that a page can show, a sane one."""
    return type(x) in (int, float) and abs(x) <= LARGEST


def settings(file: pathlib.Path, rows: list[dict]) -> File:
    """Returns a File with what the command that wrote it says, in a note or its run's."""
    job = object_of(note_of(file))
    model, sampler, dataset = (
        {key.removeprefix(front): x for key, x in job.items() if key.startswith(front)}
        for front in ("model.", "sampler.", "data.")
    )
    beside = () if job else (file.parent, file.parent.parent)
    cfg = next(filter(None, (object_of(x / "config.json") for x in beside)), None)
    if cfg is not None:
        model, sampler, dataset = (group(cfg, x) for x in ("model", "sampler", "data"))
    return File(
        file,
        rows,
        model=str(model.get("path", "")),
        block=whole(sampler.get("block")),
        roots=album.roots_of(file, dataset),
        attention=str(model.get("attention") or ""),
    )


def group(tree: dict, name: str) -> dict:
    """Returns a group of a tree's keys; {} where it has none of this name."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def whole(x) -> int:
    """Returns a number above 0, or 0 for anything else."""
    return x if type(x) is int and x > 0 else 0


def object_of(file: pathlib.Path) -> dict:
    """Returns the JSON object in a file; {} where there is none."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def folder_of(model: str) -> pathlib.Path:
    """Returns a checkpoint's folder, of a hub's name the one in its cache; nothing is loaded."""
    folder = pathlib.Path(model)
    if folder.is_dir():
        return folder
    # Imported here: a local model needs none of it. It knows which names can be a hub's.
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(model, local_files_only=True)
    except (OSError, ValueError):  # it is not there, or no such name can be
        return folder
    return pathlib.Path(found)


def tokenizer(model: str):
    """Returns the tokenizer of a checkpoint that is on this machine, or None, which is said."""
    folder = folder_of(model)
    try:
        if model and folder.is_dir() and any(folder.glob("tokenizer*")):
            return data.tokenizer(folder)
        what = "no folder with a tokenizer, nor a name in the hub's cache"
        reason = f"{model!r} is {what}" if model else "not known"
    except ValueError as error:
        reason = str(error)
    warn(
        f"token ids are shown in place of texts: the model: {reason}; name --model=DIR"
    )
    return None


def full(file: File, tok) -> bool:
    """Returns whether the model that wrote a file has full attention; False: or not known.

    What the command made of the model comes first. Else the checkpoint says it, which lies
    where the tokenizer was read: --model and a hub's snapshot are not where model.path is.
    """
    folders = filter(None, (getattr(tok, "name_or_path", ""), file.model))
    found = (object_of(folder_of(x) / "config.json") for x in folders)
    raw = next(filter(None, found), {})
    told = file.attention or raw.get("attention_pattern")
    return told == "full" if told else raw.get("model_type") in FULL


# ---- In the page -------------------------------------------------------------------------


def packed(
    file: File,
    tok,
    *,
    block: int = 0,
    name: str = "",
    pictures: album.Album | None = None,
) -> dict:
    """Returns a file's answers for the page: short names, and each distinct piece once.

    block: where the file does not say it. pictures: of all files of the page, with the
    first of which they are; None: it has no other.
    """
    pieces, table, pictures = Pieces(tok), {}, pictures or album.Album()
    first = pictures.begin(file.roots)
    rows, notice = some(file.rows)
    made = [packed_row(row, pieces, table) | seen(row, pictures) for row in rows]
    return {
        "name": name or file.name,
        "model": file.model,
        "block": file.block or block,
        # Where blocks are counted from: see policy.first_block.
        "full": full(file, tok),
        "notice": notice,
        "pieces": [list(piece) for piece in table],
        "pictures": pictures.pictures if first else None,
        "rows": made,
    }


def some(rows: list) -> tuple[list, str]:
    """Returns (at most MOST rows, spread over all of them; what to say of that)."""
    if len(rows) <= MOST:
        return rows, ""
    chosen = [rows[i * len(rows) // MOST] for i in range(MOST)]
    return chosen, f"{MOST:,} of {len(rows):,} answers, spread evenly over the file"


def packed_row(row: dict, pieces: Pieces, table: dict) -> dict:
    """Returns an answer for the page; table: Piece -> its number, which grows."""
    ids, steps = row["response_ids"], row["step_map"]
    prompt = row.get("question") or pieces.text(row.get("prompt_ids") or [])
    before = [0, *steps]
    square = math.isqrt(len(ids)) ** 2 == len(ids) > 0
    cut = pieces.drawn if row.get("picture") and square else pieces.of
    out = {
        "q": prompt[:LONG_PROMPT],
        "n": len(row.get("prompt_ids") or []),
        "t": [table.setdefault(piece, len(table)) for piece in cut(ids)],
        "s": [after - step for step, after in zip(before, steps, strict=False)],
    }
    for name, (letter, decimals) in PER_TOKEN.items():
        if row.get(name) is not None:
            scale = 10**decimals
            out[letter] = [None if x is None else round(scale * x) for x in row[name]]
    known = {"g": "answer", "f": "forwards", "e": "finished"}
    told = {key: row.get(name) for key, name in known.items()}
    told |= {"r": records.reward(row), "o": records.right(row)}
    return out | {key: x for key, x in told.items() if x is not None}


def seen(row: dict, pictures: album.Album) -> dict:
    """Returns the pictures of an answer for the page, numbers or why there are none.

    "i": of what its prompt showed; "p": of what it drew.
    """
    out = {}
    if row.get("images"):
        out["i"] = [pictures.shown(image) for image in row["images"]]
    if row.get("picture"):
        out["p"] = pictures.drawn(row["picture"])
    return out
