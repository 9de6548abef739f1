"""Gets data: published sets with their checksums, files of the hub, generated tasks.

    python -m dllm_jax.data list
    python -m dllm_jax.data get NAME [--sha256=HEX]
    python -m dllm_jax.data get hub:OWNER/NAME/PATH.parquet
    python -m dllm_jax.data get arithmetic|countdown|sudoku [--count=1000] [--seed=0]
    python -m dllm_jax.data strengthen IN OUT.jsonl [--tests=30] [--seed=0]

`get` prints the file, and the keys of a configuration that read it. Files go to
~/.cache/dllm_jax/data, or where DLLM_DATA_CACHE says; what is there is not downloaded again.
DLLM_DATA_MIRROR names a copy of what lies on the net, as `wget -x` leaves one: a file:// or
http:// address.

`strengthen` adds tests to records of code that have a solution: inputs near those of their
tests, and what the solution says of them, each run in the sandbox.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import shlex
import sys

from absl import flags

from dllm_jax import command_line
from dllm_jax.data import sets, tasks
from dllm_jax.exits import room, whole
from dllm_jax.records import records
from dllm_jax.rl.rewards import sandbox, strengthen


def write(file: pathlib.Path, rows):
    """Writes records, as lines, all or none."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with room(file.parent, len(text)):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file, len(text), str(os.getpid())) as partial:
            partial.write_text(text)


def generated(name: str, count: int, seed: int) -> pathlib.Path:
    """Writes a task's records; returns their file."""
    file = sets.place(f"{name}-{count}-seed{seed}")
    write(file, tasks.drawn(name, count, seed))
    return file


def strengthened(path: str, out: str, tests: int, seed: int):
    """Writes a file's records with more tests, and prints what came of it.

    Raises ValueError for a record that none can be added to, before any program runs, and
    where programs cannot be confined; CannotGoOn for a file that cannot be written, too.
    """
    file = pathlib.Path(out)
    if file.suffix != ".jsonl" or file.is_dir():
        raise ValueError(f"{out}: records are written as lines; name a file *.jsonl")
    rows = records(path)
    if file.exists() and file.samefile(path):
        raise ValueError(f"{out}: that is the file it reads; name another")
    for number, row in enumerate(rows, 1):
        try:
            strengthen.check(row)
        except ValueError as error:
            raise ValueError(f"dataset {path!r}, record {number}: {error}") from None
    try:
        print(f"sandbox: {sandbox.available()}", file=sys.stderr)
    except RuntimeError as error:
        raise ValueError(f"strengthen: {error}") from None

    # As it is written in the end, which may be hours away.
    write(probe := file.with_name(f".{file.name}.{os.getpid()}"), [])
    probe.unlink()

    def one(row: dict) -> tuple[dict, str]:
        return strengthen.strengthened(row, tests, seed)

    with concurrent.futures.ThreadPoolExecutor(sandbox.pool.workers) as threads:
        stronger, why = zip(*threads.map(one, rows), strict=True)
    write(file, stronger)
    left = collections.defaultdict(list)
    for number, reason in enumerate(why, 1):
        left[reason].append(number)
    for reason, numbers in left.items():
        if reason:
            told = ", ".join(map(str, numbers[:20])) + ", ..." * (len(numbers) > 20)
            print(f"as they were, since {reason}: records {told}", file=sys.stderr)
    print(f"{len(left[''])} of {len(rows)} records have more tests: {file}")
    if left[""]:
        key = f"--config.data.train={shlex.quote(str(file))}"
        print(f"to train on them: {key} --config.rl.reward=code")


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


def check_read(values: flags.FlagValues, command: str, *read: str):
    """Raises ValueError for a flag that a command line has and the command does not read."""
    for name in ("sha256", "count", "seed", "tests"):
        if values[name].present and name not in read:
            told = " and ".join(f"--{x}" for x in read) or "no flag"
            raise ValueError(f"--{name}: `{command}` does not read it; it reads {told}")


def main():
    """Parses the command line; lists, gets, or strengthens."""
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow the name
    flags.DEFINE_string("sha256", "", "of the download", flag_values=values)
    flags.DEFINE_integer("count", 1000, "records", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of what is drawn", 0, flag_values=values)
    most = strengthen.TESTS
    flags.DEFINE_integer("tests", most, "more, at most", 1, flag_values=values)
    try:
        _, *words = values(sys.argv)
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[-1]) from None
    if words == ["list"]:
        check_read(values, "list")
        print(listed())
        return
    if len(words) == 3 and words[0] == "strengthen":
        check_read(values, "strengthen", "tests", "seed")
        strengthened(*words[1:], values.tests, values.seed)
        return
    if len(words) != 2 or words[0] != "get":
        raise ValueError(
            "say `list`, `get NAME` or `strengthen IN OUT.jsonl`: python -m dllm_jax.data "
            "--help"
        )
    name = words[1]
    read = ("count", "seed") if name in tasks.TASKS else ("sha256",)
    check_read(values, f"get {name}", *read)
    if name in tasks.TASKS:
        file, count = generated(name, values.count, values.seed), values.count
        reward = tasks.TASKS[name][1]
    else:
        file, count = sets.get(name, values.sha256)
        reward = sets.known_set(name).reward
    file = shlex.quote(str(file))  # a shell takes the keys as they are printed
    print(f"{count} records: --config.data.heldout={file}")
    if reward:
        print(f"graded by: --config.rl.reward={reward}")
    # For people: presets of released models name the field as dLLM-RL's own files do.
    answer = " --config.data.answer=answer" if reward == "math" else ""
    print(f"to train on them: --config.data.train={file}{answer}", file=sys.stderr)


if __name__ == "__main__":
    command_line.entry(main, __doc__, cleans=True)
