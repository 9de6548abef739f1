"""Special tokens of a checkpoint: the mask, and the end of a text.

config.json tells them, and where it does not, the files beside it.
"""

import contextlib
import pathlib

from dllm_jax import records
from dllm_jax.checks import shown, suits
from dllm_jax.exits import warn

# What tokenizers call their mask token, where tokenizer_config.json does not name it.
MASK_TOKENS = ("<|MASK|>", "<|mask|>", "|<MASK>|", "<|mdm_mask|>", "[MASK]")


def read_json(file: pathlib.Path) -> dict:
    """Returns the object that a JSON file holds; raises ValueError naming a bad file."""
    try:
        tree = records.of_json(records.text(file))
    except ValueError as error:
        raise ValueError(f"{file}: cannot be read: {pointed(file, error)}") from None
    if type(tree) is not dict:
        raise ValueError(f"{file}: cannot be read: it holds no JSON object")
    return tree


def pointed(file: pathlib.Path, error) -> str:
    """Returns why a file cannot be read: `error`, or that Git has its pointer alone."""
    pointer = b"version https://git-lfs"
    with contextlib.suppress(OSError), file.open("rb") as opened:
        if opened.read(len(pointer)) == pointer:
            return "it is a pointer of Git LFS: git lfs pull fetches what it stands for"
    return str(error)


def token_id(raw: dict, key: str):
    """Returns an id that config.json may give as a list; None: it does not give any."""
    value = raw.get(key)
    return next(iter(value), None) if isinstance(value, list) else value


def find_mask_id(folder: pathlib.Path, raw: dict, fields: dict) -> int:
    """Returns the mask token's id, from config.json or the tokenizer's files.

    Where neither has one it is the family's, or for a causal model the id behind the
    vocabulary, which is no token. Raises ValueError for any other model.
    """
    if raw.get("mask_token_id") is not None:
        return raw["mask_token_id"]
    if (token := tokenizers_id(folder, "mask_token", *MASK_TOKENS)) is not None:
        return token
    if "mask_id" in fields:
        return fields["mask_id"]
    if fields.get("attention") == "causal":
        return fields["vocab"]
    raise ValueError(
        f"{folder}: tokenizer without mask token; config.json needs mask_token_id, or the "
        "tokenizer a mask_token"
    )


def find_eos_id(folder: pathlib.Path, raw: dict) -> int:
    """Returns the id of the token that ends a text.

    config.json, generation_config.json and the tokenizer's files are asked in this order;
    where none has one it is the pad token, as the two are often the same. Raises ValueError
    where that is not told either: no token is to end answers without a word.
    """
    if (token := token_id(raw, "eos_token_id")) is not None:
        return token
    file = folder / "generation_config.json"
    if file.is_file():
        token = token_id(read_json(file), "eos_token_id")
    if token is None:
        token = tokenizers_id(folder, "eos_token")
    if token is None:
        token = token_id(raw, "pad_token_id")
    if token is None:
        raise ValueError(
            f"{folder}: nothing tells which token ends a text; config.json needs "
            "eos_token_id, or the tokenizer an eos_token"
        )
    return token


def find_ends(folder: pathlib.Path, raw: dict, eos_id: int) -> tuple[int, ...]:
    """Returns what ends an answer besides `eos_id`: a turn's end, or a text's.

    config.json and generation_config.json may each list several ids, as those of Llama 3.1
    and Qwen2.5 do.
    """
    said, file = [raw], folder / "generation_config.json"
    if file.is_file():
        said.append(read_json(file))
    ids = []
    for tree in said:
        told = tree.get("eos_token_id")
        ids += told if isinstance(told, list) else [told]
        for x in ids:
            if not (x is None or (suits(x, int) and x >= 0)):
                where = folder / "config.json" if tree is raw else file
                words = "a token's id, or a list of ids"
                raise ValueError(f"{where}: eos_token_id={shown(x)}: {words}")
    return tuple(dict.fromkeys(x for x in ids if x not in (None, eos_id)))


def looked_at(stops: tuple[int, ...], mask_id: int) -> tuple[int, ...]:
    """Returns the ids that end answers, and warns where the mask token is one of them."""
    if mask_id in stops:
        others = sorted({*stops} - {mask_id}) or "their length"
        warn(
            f"model.mask_id={mask_id} is one of the ids that end an answer, and the mask token "
            f"is never one: answers end by {others} alone"
        )
    return stops


def tokenizers_id(folder: pathlib.Path, kind: str, *others: str) -> int | None:
    """Returns the id of a tokenizer's token, None where its files have none.

    kind: "mask_token", for example; others: what such a token may be called where
    tokenizer_config.json does not name it.
    """
    try:
        id_of, settings = added_tokens(folder)
        named = settings.get(kind)
        named = named["content"] if isinstance(named, dict) else named
        for token in (named, *others):
            if token in id_of:
                if not suits(id_of[token], int):
                    raise TypeError(f"{token!r} has the id {shown(id_of[token])}")
                return id_of[token]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: its tokenizer files are damaged: {error}"
        ) from None
    return None


def added_tokens(folder: pathlib.Path) -> tuple[dict, dict]:
    """Returns ({an added token: its id}, tokenizer_config.json) of a tokenizer's files."""
    id_of, settings = {}, {}
    if (file := folder / "added_tokens.json").is_file():
        id_of = read_json(file)
    if (file := folder / "tokenizer.json").is_file():
        for token in read_json(file).get("added_tokens", []):
            id_of[token["content"]] = token["id"]
    if (file := folder / "tokenizer_config.json").is_file():
        settings = read_json(file)
    for number, token in settings.get("added_tokens_decoder", {}).items():
        if not str(number).isdecimal():
            raise ValueError(
                f"{file}: added_tokens_decoder has an id that is no number"
            )
        id_of[token["content"]] = int(number)
    return id_of, settings
