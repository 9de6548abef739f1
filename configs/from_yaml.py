"""Translates dLLM-RL's YAML files: see dllm_rl.py for what becomes of their keys.

    python -m configs.from_yaml FILE.yaml > configs/mine.py

prints the config file that does what a YAML file of dLLM-RL does; its docstring names each
key that has no effect here, or another one, and why.
"""

import difflib
import pathlib
import re
import signal
import sys
import textwrap

import yaml

from configs.dllm_rl import KINDS, START, settled
from configs.dllm_rl_rows import Row, attends_fully, number, whole
from dllm_jax import command_line, config, records
from dllm_jax.checks import shown

# Of SFT that predicts the next token: causal attention answers token by token.
AR = {"model.attention": "causal", "sampler.block": 1, "sampler.steps_per_block": 1}

# ---- A file, read and translated ---------------------------------------------------------


class Loader(yaml.SafeLoader):
    """YAML without what makes a small file endless, or of two values takes one."""

    def compose_node(self, parent, index):
        """Returns a node; raises ValueError for one that stands elsewhere."""
        if self.check_event(yaml.AliasEvent):
            name = self.peek_event().anchor
            raise ValueError(f"*{name}: aliases are not read; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        """Returns a mapping; raises ValueError for a key that it has twice."""
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} stands there twice")
        return super().construct_mapping(node, deep)


def read(path: str) -> dict:
    """Returns the leaves of a YAML file by dotted name, `${a.b}` in a text by its value.

    Raises ValueError naming a file that is not there, what is not YAML in it, and a key
    that it has twice: dotted, and in its section.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        tree = yaml.load(records.text(file), Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not tree or type(tree) is not dict:
        raise ValueError(f"{path}: it has no keys; it needs sections such as rollout")
    raw = {}
    for key, value in config.pairs(tree):
        if key in raw:
            raise ValueError(f"{path}: {key!r} stands there twice, once with its dots")
        raw[key] = value
    for key, value in raw.items():
        for named in re.findall(r"\$\{(.*?)\}", str(value)):
            told = raw.get(named, "${")
            if "${" in str(told) or not isinstance(value, str):
                raise ValueError(f"{path}: {key}={value} refers to no value")
            alone = value == f"${{{named}}}"
            raw[key] = told if alone else raw[key].replace(f"${{{named}}}", str(told))
    return raw


def kind_of(raw: dict) -> str:
    """Returns the kind of a file, a key of KINDS, by its sections."""
    sections = {key.split(".")[0] for key in raw}
    if "training" not in sections:
        return "eval"
    return "rl" if "rollout" in sections else "sft"


def refuse_unknown(raw: dict):
    """Raises ValueError naming an unknown key, or a section without keys."""
    known = {key for rows in KINDS.values() for key in rows}
    for key, value in raw.items():
        if key in known:
            continue
        if some := sorted(name for name in known if name.startswith(f"{key}.")):
            raise ValueError(
                f"{key}={shown(value)}: a section needs keys, such as {some[0]}; without "
                "any, leave it out"
            )
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown key {key!r}; the nearest is {near!r}")


def row_of(row: Row, key: str, value, raw: dict) -> Row:
    """Returns what a key becomes in its file; raises ValueError for what it cannot."""
    if not row.make:
        return row
    try:
        return row.make(value, key, raw)
    except KeyError as error:
        raise ValueError(f"{key}={shown(value)}: needs {error.args[0]}, too") from None
    except (TypeError, ArithmeticError):
        raise ValueError(
            f"{key}={shown(value)} has no counterpart; write it as dLLM-RL's own files do"
        ) from None


def translate(raw: dict) -> tuple[dict, dict, dict]:
    """Returns (our leaves with their values, reasons, the key that each leaf is from).

    The reasons are of keys that are not only leaves. Raises ValueError naming an unknown
    key with the nearest known one, and a value that has no counterpart.
    """
    refuse_unknown(raw)
    kind = kind_of(raw)
    raw = settled(raw, kind)
    leaves, reasons, origins = dict(START[kind]), {}, {}
    defaults = config.flat(config.default().to_dict())
    if raw.get("model.value_base_model") is not None:
        leaves["rl.value"] = "own"
    if kind != "eval" and attends_fully(raw):  # a mean over each row's targets
        leaves["objective.aggregate"] = "step"
    if raw.get("training.method") == "ar":
        leaves |= AR
    elsewhere = Row(why=f"it means nothing in a file of kind {kind}")
    for key, value in raw.items():
        row = row_of(KINDS[kind].get(key, elsewhere), key, value, raw)
        new = dict.fromkeys(row.ours, value) | row.leaves
        refuse_unfit(key, value, new, defaults)
        leaves |= new
        section = key.split(".")[0]
        for leaf, made in new.items():
            if made is not None:
                # Several keys of one section say eval.samplers.
                same = origins.get(leaf, "").split(".")[0] == section
                origins[leaf] = section if same else key
        if row.why:
            reasons[key] = row.why if row.same else f"NOT THE SAME: {row.why}"
    return leaves, reasons, origins


def refuse_unfit(key: str, value, leaves: dict, known: dict):
    """Raises ValueError naming a key whose value only a conversion would make fit its leaf.

    known: the defaults of all leaves.
    """
    for leaf, made in leaves.items():
        kind = type(known[leaf])
        if made is None:
            continue
        if kind is int:
            whole(made, key)
        if kind is float:
            number(made, key)
        if kind is str and not isinstance(made, str):
            raise ValueError(f"{key}={shown(value)} is no text")


# ---- The config file ---------------------------------------------------------------------


def assignments(leaves: dict, origins: dict) -> list[str]:
    """Returns the lines that set what differs from the defaults.

    origins: the file's key that a leaf is from. Raises ValueError naming a value that a
    leaf cannot have, or what cannot run together, and the file's keys for it.
    """
    tree, lines = config.default(), []
    known = config.flat(tree.to_dict())
    for leaf, value in leaves.items():
        if value is None:  # theirs for "off", where ours is the default
            continue
        try:
            typed = type(known[leaf])(value)  # 1e-6 is a text in YAML
        except (TypeError, ValueError, OverflowError):
            told = f"{shown(value)} is no value for {leaf}"
            raise ValueError(told + cause(told, origins)) from None
        if typed != known[leaf]:
            tree.update_from_flattened_dict({leaf: typed})
            lines.append(f"    c.{leaf} = {typed!r}")
    try:
        config.freeze(tree)
    except ValueError as error:
        raise ValueError(f"{error}{cause(str(error), origins)}") from None
    return lines


def cause(told: str, origins: dict) -> str:
    """Returns the file's keys for the leaves that a message names, to stand behind it."""
    named = re.findall(r"\w+(?:\.\w+)*", told)
    keys = dict.fromkeys(origins[name] for name in named if name in origins)
    return f" (from {', '.join(keys)})" if keys else ""


def notes(reasons: dict) -> list[str]:
    """Returns the lines that say each reason and, below it, the keys that it is for."""
    lines = []
    # What is NOT THE SAME comes first.
    for reason in sorted(set(reasons.values()), key=lambda x: (x[:3] != "NOT", x)):
        keys = ", ".join(key for key, why in reasons.items() if why == reason)
        lines.append(reason)
        lines += textwrap.wrap(
            keys, 84, initial_indent=" " * 4, subsequent_indent=" " * 4
        )
    return lines


def quoted(text: str) -> str:
    """Returns a text as it stands in a docstring: a value of the file may end one."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def ported(path: str) -> str:
    """Returns a config file that does what a YAML file of dLLM-RL does.

    Its docstring names each key that has no effect here, or another one, and why. Raises
    ValueError naming the file and what it has that cannot be translated.
    """
    raw = read(path)
    try:
        leaves, reasons, origins = translate(raw)
        body = assignments(leaves, origins)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    entry = "eval" if kind_of(raw) == "eval" else "train"
    return "\n".join(
        [
            f'"""{quoted(pathlib.Path(path).name)} of dLLM-RL, translated.',
            "",
            f"    python -m dllm_jax.{entry} --config=FILE",
            "",
            "Its keys without effect here, or with another:",
            "",
            *map(quoted, notes(reasons) or [""]),
            '"""',
            "",
            "from dllm_jax import config",
            "",
            "",
            "def get_config():",
            '    """Returns the configuration."""',
            "    c = config.default()",
            *body,
            "    return c",
        ]
    )


def main():
    """Prints the translation of one YAML file."""
    if len(sys.argv) != 2:
        raise ValueError("one argument: a YAML file of dLLM-RL")
    print(ported(sys.argv[1]))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    command_line.entry(main, __doc__)
