"""A Hugging Face repository's folder: where it is, its files, and their tensors by name."""

import functools
import math
import os
import pathlib
import zlib

import huggingface_hub
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches numpy and safetensors about bfloat16)
import numpy as np
import safetensors

from dllm_jax import records
from dllm_jax.models.special import pointed, read_json

# Files of weights: the first are read, the others are neither fetched nor exported.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5")
WEIGHTS += ("*.msgpack", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.ot", "*.tflite")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What else a file of all weights is called: the released MAGVIT-v2's, diffusers'.
OTHER_NAMES = ("pytorch_model.safetensors", "diffusion_pytorch_model.safetensors")
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def find(path) -> pathlib.Path:
    """Returns the folder of a checkpoint: a local one, or a hub repository's snapshot.

    Raises ValueError when it is neither.
    """
    if not str(path):
        raise ValueError("model.path is empty: name a Hugging Face folder")
    folder = pathlib.Path(path)
    if folder.is_dir():
        refuse_holder(folder)
        return folder
    if folder.is_absolute() or str(path).count("/") != 1:
        seen_from = "" if folder.is_absolute() else f"; looked for in {os.getcwd()}"
        raise ValueError(
            f"{str(path)!r} is not a folder, nor a hub repository like org/name{seen_from}"
            f"{records.made_by(path)}"
        )
    try:
        return snapshot(str(path))
    except Exception as error:  # noqa: BLE001 (its HTTP client has errors of its own)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{str(path)!r} is not a folder, and the hub did not give it: {reason}"
            f"{records.made_by(path)}"
        ) from None


def refuse_holder(folder: pathlib.Path) -> None:
    """Raises ValueError for what holds checkpoints: a run, the hub's cache of a repository."""
    if (folder / "run.json").is_file() and not any(folder.glob("*.safetensors")):
        there = [x for x in ("export", "best", "value") if (folder / x).is_dir()]
        which = f": name {folder / there[0]}" if there else ", and no model is in it"
        raise ValueError(f"{folder} is a run's folder{which}")
    snapshots = sorted((folder / "snapshots").glob("*/"))
    if snapshots and not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds snapshots of a repository: name {snapshots[-1]}"
        )


@functools.cache
def snapshot(name: str) -> pathlib.Path:
    """Returns the folder of a hub repository, the same until the process ends.

    What a run began with is to be what its export is made with, days later, whatever the hub
    has by then.
    """
    others = [pattern for pattern in WEIGHTS if pattern != "*.safetensors"]
    return pathlib.Path(huggingface_hub.snapshot_download(name, ignore_patterns=others))


def marks(folder: pathlib.Path) -> dict[str, list[int]]:
    """Returns size and CRC-32 of a checkpoint's files of weights and config.

    Other weights by the same path have others. Of a large file the CRC is of 256 pieces.
    """
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    return {file.name: mark(file) for file in files}


def mark(file: pathlib.Path) -> list[int]:
    """Returns a file's size and CRC-32."""
    piece, size, crc = 2**14, file.stat().st_size, 0
    with file.open("rb") as data:
        for start in range(0, size, max(piece, size // 256)):
            data.seek(start)
            crc = zlib.crc32(data.read(piece), crc)
    return [size, crc]


class Tensors:
    """The tensors of a folder by name; nothing is read before it is asked for."""

    def __init__(self, folder: pathlib.Path):
        if (folder / SINGLE).is_file() or (folder / SINGLE).is_symlink():
            files = [SINGLE]
        elif (folder / INDEX).is_file():
            files = files_of(folder / INDEX)
        elif there := [name for name in OTHER_NAMES if (folder / name).is_file()]:
            files = there[:1]
        else:
            raise ValueError(
                f"{folder} is not a checkpoint: it has neither {SINGLE} nor {INDEX}"
                + pickled(folder)
            )
        self.folder = folder
        self.handle_of, self.file_of = {}, {}  # by file, by tensor name
        for file in files:
            try:
                self.handle_of[file] = safetensors.safe_open(folder / file, "np")
            except (OSError, safetensors.SafetensorError) as error:
                reason = pointed(folder / file, error)
                raise ValueError(f"{folder / file}: cannot be read: {reason}") from None
            names = self.handle_of[file].keys()
            if twice := sorted(self.file_of.keys() & names):
                # An index says which is meant, and transformers does not ask it.
                raise ValueError(
                    f"{folder}: tensor {twice[0]!r} is in two files, "
                    f"{self.file_of[twice[0]]} and {file}"
                )
            self.file_of |= dict.fromkeys(names, file)

    def slice(self, name: str):
        """Returns a handle that reads only the part it is indexed with."""
        return self.handle_of[self.file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's dtype."""
        kind = self.slice(name).get_dtype()
        if kind not in DTYPES:
            raise ValueError(
                f"{self.folder / self.file_of[name]}: tensor {name!r}: dtype {kind} is not "
                f"supported: store it in one of {', '.join(DTYPES.values())}"
            )
        return jnp.dtype(DTYPES[kind])

    def size(self, name: str) -> int:
        """Returns the bytes of a tensor; 0 of a dtype that is copied alone, not read."""
        kind = DTYPES.get(self.slice(name).get_dtype())
        return math.prod(self.shape(name)) * jnp.dtype(kind).itemsize if kind else 0


def pickled(folder: pathlib.Path) -> str:
    """Returns what is to be said of weights that are not read; "": there are none."""
    files = sorted(file.name for file in folder.glob("*.bin"))
    way = "write the model anew with transformers' save_pretrained, which makes safetensors"
    if files:
        return f"; {files[0]} is not read, as a .bin file is a program: {way}"
    if folder.parent.name == "snapshots":
        return f"; of a hub repository no others are fetched: {way}"
    return ""


def files_of(index: pathlib.Path) -> list[str]:
    """Returns the names of an index's files.

    Raises ValueError where it names none, or anything but a file beside it: an export
    writes the same names.
    """
    names = read_json(index).get("weight_map")
    if not names or not isinstance(names, dict):
        raise ValueError(f"{index}: it has no weight_map of tensor names to file names")
    for tensor, name in names.items():
        plain = isinstance(name, str) and "\0" not in name
        if not plain or name in ("", ".", "..") or name != os.path.basename(name):
            raise ValueError(
                f"{index}: {tensor!r} is in {name!r}, which is not the name of a file in "
                "this folder"
            )
    return sorted(set(names.values()))


def refuse(folder, faults: list[str]):
    """Raises ValueError with the first of the faults, if there are any."""
    if faults:
        others = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"{folder}: " + "; ".join(faults[:8]) + others)
