"""Reads the goldens: values of the original PyTorch code on tiny checkpoints.

DLLM_GOLDENS names another folder of this layout, whose fixtures take the place of these.
What differs from one set to the next (ids, widths, numbers of layers and of cases) is
therefore read from the fixtures and written into no test.
"""

import json
import os
import pathlib
import re

import pytest
import safetensors.numpy

HERE = pathlib.Path(__file__).parent
FOLDER = pathlib.Path(os.environ.get("DLLM_GOLDENS") or HERE)


def path(name: str) -> pathlib.Path:
    """Returns where a file or folder lies, by its path below the goldens.

    A family that the other set lacks is ours; a case that it lacks of a family that it
    has is skipped, and so is a family that neither has: some are too large for ours.
    """
    family = name.split("/")[0]
    if not (FOLDER / family).exists():
        if not (HERE / family).exists():
            pytest.skip(f"{FOLDER} has no {family}", allow_module_level=True)
        return HERE / name
    if FOLDER != HERE and (HERE / name).exists() and not (FOLDER / name).exists():
        pytest.skip(f"{FOLDER} has no {name}", allow_module_level=True)
    return FOLDER / name


def read(name: str):
    """Returns what a JSON file says."""
    return json.loads(path(name).read_text())


def tensors(name: str) -> dict:
    """Returns the arrays of a file."""
    return safetensors.numpy.load_file(path(name))


def checkpoint(family: str) -> pathlib.Path:
    """Returns the folder of a family's checkpoint."""
    return path(f"{family}/checkpoint")


def config(family: str) -> dict:
    """Returns a checkpoint's config.json."""
    return read(f"{family}/checkpoint/config.json")


CHECKPOINTS = {
    folder.parent.name: checkpoint(folder.parent.name)
    for folder in sorted(HERE.glob("*/checkpoint"))
}


def numbered(family: str, stem: str) -> list[int]:
    """Returns the numbers that end the names of a family's forward passes, after `stem`."""
    names = read(f"{family}/forward/case.json")["tensors"]
    found = [re.fullmatch(rf"{stem}(\d+)", name) for name in names]
    return sorted(int(match[1]) for match in found if match)
