"""The folder of an export: what lies there besides weights, and how it takes its name."""

import contextlib
import json
import os
import pathlib
import re
import shutil

from dllm_jax import exits
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.families import changes, read_config
from dllm_jax.models.repository import INDEX, OTHER_NAMES, SINGLE, WEIGHTS, find
from dllm_jax.models.special import read_json
from dllm_jax.models.vision import autoencoders

TRAINED = b"""> dllm_jax has trained the weights beside this text further: it was written about
> others, and not all of it holds any more.

"""
HELD = (SINGLE, INDEX, *OTHER_NAMES)  # a checkpoint has one of them


def check_target(path, like) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the folders of an export and of its original, without symbolic links.

    Raises ValueError where the export would write over the original, or over files that
    the original's are links to, or over something else than a checkpoint.
    """
    target, origin = pathlib.Path(path).resolve(), find(like).resolve()
    homes = {origin} | {item.resolve().parent for item in origin.iterdir()}
    if origin in target.parents or any(
        target == home or target in home.parents for home in homes
    ):
        raise ValueError(f"cannot export to {path}: the original {like} is there")
    if not replaceable(target):
        raise ValueError(f"cannot export to {path}: it is there and not an export")
    return target, origin


def replaceable(target: pathlib.Path) -> bool:
    """Returns whether an export may take this name: it is free, empty or a checkpoint's."""
    taken = [target] if target.is_file() else list(target.glob("*"))
    return not taken or any((target / name).is_file() for name in HELD)


@contextlib.contextmanager
def whole(target: pathlib.Path, wanted: int, *, writes: bool = True):
    """Gives the path of a folder to make, which takes the name `target` once all is inside.

    So a crash never leaves half of one under that name. wanted: bytes; writes: False in
    processes that write nothing. Raises exits.CannotGoOn where the disk is full.
    """
    partial = target.with_name(f".{target.name}.partial")
    if not writes:
        yield partial
        return
    shutil.rmtree(partial, ignore_errors=True)  # of a killed one
    try:
        with exits.room(partial.parent, wanted):
            yield partial
            swap(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def begin_export(folder: pathlib.Path, origin: pathlib.Path, cfg: ModelConfig) -> None:
    """Makes the folder with all of the original but weights, and our config.json."""
    folder.mkdir(parents=True)
    copy_others(origin, folder)
    if changed := changes(cfg, read_config(origin)):
        raw = read_json(origin / "config.json") | changed
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def copy_others(origin: pathlib.Path, target: pathlib.Path) -> None:
    """Copies what is not weights: tokenizer, configs, remote code, model card.

    Those of a tokenizer of images, a folder inside, are copied too: no run changes them.

    A link that leads out of the folder is not followed, as what it leads to may be no part
    of the model. Two are: a hub snapshot's into its repository's blobs, and config.json,
    which was read as the model's.
    """
    homes = [origin]
    if origin.parent.name == "snapshots":
        homes.append(origin.parents[1] / "blobs")
    for item in origin.rglob("*"):
        name = item.relative_to(origin)
        hidden = any(folder.startswith(".") for folder in name.parts[:-1])
        weights = any(map(item.match, WEIGHTS)) and not (
            item.parent != origin and autoencoders.module_of(item.parent)
        )
        if not item.is_file() or hidden or weights:
            continue
        source = item.resolve()
        inside = any(home in source.parents for home in homes)
        if not inside and name != pathlib.Path("config.json"):
            exits.warn(
                f"{item} leads out of its folder, to {source}: it is not exported"
            )
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(item, target / name)


def begin_card(file: pathlib.Path) -> None:
    """Says in a model card, where there is one, that it is about other weights."""
    text = file.read_bytes() if file.exists() else TRAINED
    if TRAINED not in text:
        # For the hub's search.
        head = re.match(rb"---\r?\n.*?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
        end = head.end() if head else 0
        gap = b"\n" if head and not head[1] else b""
        file.write_bytes(text[:end] + gap + TRAINED + text[end:])


def extend_index(
    folder: pathlib.Path, file: str, added: dict[str, dict[str, int]]
) -> None:
    """Adds tensors of `file` to the folder's index, where it has one.

    added: of each, what it adds to which of the index's sums, where these are told.
    """
    if not added or not (folder / INDEX).is_file():
        return
    index = read_json(folder / INDEX)
    index["weight_map"] |= dict.fromkeys(added, file)
    sums = index.get("metadata") or {}
    for key in ("total_size", "total_parameters"):
        if type(sums.get(key)) is int and sums[key]:
            sums[key] += sum(of_tensor[key] for of_tensor in added.values())
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def swap(partial: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a finished folder its name; an older export there goes only then."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)  # also one that a killed swap has left
