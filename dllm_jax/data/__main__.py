"""Gets data: published sets with their checksums, files of the hub, generated tasks.

    python -m dllm_jax.data list
    python -m dllm_jax.data get NAME [--sha256=HEX]
    python -m dllm_jax.data get hub:OWNER/NAME/PATH.parquet
    python -m dllm_jax.data get arithmetic|countdown|sudoku [--count=1000] [--seed=0]

It prints the file, and the keys of a configuration that read it. Files go to
~/.cache/dllm_jax/data, or where DLLM_DATA_CACHE says; what is there is not downloaded again.
DLLM_DATA_MIRROR names a copy of what lies on the net, as `wget -x` leaves one: a file:// or
http:// address.
"""

import json
import os
import sys

from absl import flags

from dllm_jax import command_line
from dllm_jax.data import sets, tasks
from dllm_jax.exits import room


def generated(name: str, count: int, seed: int):
    """Writes a task's records; returns their file."""
    file = sets.place(f"{name}-{count}-seed{seed}")
    text = "".join(json.dumps(row) + "\n" for row in tasks.drawn(name, count, seed))
    with room(file.parent, len(text)):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(text)
        os.replace(partial, file)
    return file


def listed() -> str:
    """Returns a line for each set and task."""
    lines = [
        f"{name:16} {known.count or '?':>6} records  rl.reward={known.reward or '-':10}"
        f" {known.url}"
        for name, known in sets.SETS.items()
    ]
    lines += [
        f"{name:16}    any records  rl.reward={reward:10} generated"
        for name, (_, reward) in tasks.TASKS.items()
    ]
    return "\n".join(lines)


def main():
    """Parses the command line; lists, or gets."""
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow the name
    flags.DEFINE_string("sha256", "", "of the download", flag_values=values)
    flags.DEFINE_integer("count", 1000, "records", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of a task", 0, flag_values=values)
    try:
        _, *words = values(sys.argv)
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[-1]) from None
    if words == ["list"]:
        print(listed())
        return
    if len(words) != 2 or words[0] != "get":
        raise ValueError("say `list`, or `get NAME`: python -m dllm_jax.data --help")
    name = words[1]
    if name in tasks.TASKS:
        file, count = generated(name, values.count, values.seed), values.count
        reward = tasks.TASKS[name][1]
    else:
        file, count = sets.get(name, values.sha256)
        reward = sets.known_set(name).reward
    print(f"{count} records: --config.data.heldout={file}")
    if reward:
        print(f"graded by: --config.rl.reward={reward}")
    # For people: presets of released models name the field as dLLM-RL's own files do.
    answer = " --config.data.answer=answer" if reward == "math" else ""
    print(f"to train on them: --config.data.train={file}{answer}", file=sys.stderr)


if __name__ == "__main__":
    command_line.entry(main, __doc__)
