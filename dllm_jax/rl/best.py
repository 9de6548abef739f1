"""The best evaluation of a run: its weights stay, and a run without better ones may end.

What is known goes into checkpoints, so that a resumed run keeps and ends as if it had not
stopped. The same in every process.
"""

import json
import pathlib
import shutil

from dllm_jax import folder as folders
from dllm_jax.exits import read
from dllm_jax.models import export

MARK = "best.json"  # in the run's folder
# What is known before the first evaluation. of: what evaluations ask, see `still`.
NOTHING = {"value": None, "step": 0, "stale": 0, "of": None}


class Best:
    """The highest value of a metric so far; ties go to the earlier step."""

    def __init__(self, name: str, patience: int, memory: dict | None = None):
        """name: of the metric, "": none is watched; patience: see RunConfig.

        memory: of `still`; None, or {}: nothing was evaluated yet.
        """
        self.name, self.patience = name, patience
        memory = NOTHING | (memory or {})
        self.of, self.value = memory["of"], memory["value"]
        self.step = int(memory["step"])
        self.stale = int(memory["stale"])  # evaluations since

    @property
    def memory(self) -> dict:
        """All that it knows, as JSON has it."""
        known = {"value": self.value, "step": self.step, "stale": self.stale}
        return known | {"name": self.name, "of": self.of}

    def before(self, step: int) -> bool:
        """Returns whether the best is that of an evaluation before a step."""
        return bool(self.name) and self.value is not None and self.step < step

    @property
    def done(self) -> bool:
        """Whether there was no better evaluation for long enough."""
        return bool(self.patience) and self.stale >= self.patience

    def note(self, step: int, row: dict) -> bool:
        """Returns whether an evaluation is the best so far.

        Raises ValueError with the metrics that there are.
        """
        if not self.name:
            return False
        if self.name not in row:
            known = ", ".join(
                sorted(name for name in row if name.startswith("heldout"))
            )
            raise ValueError(
                f"run.keep_best={self.name!r} is no metric of the evaluation: {known}"
            )
        value = float(row[self.name])
        if self.value is not None and not value > self.value:
            self.stale += 1
            return False
        self.value, self.step, self.stale = value, step, 0
        return True


def still(memory: dict | None, name: str, of: dict | None, say) -> dict:
    """Returns a `Best.memory` to go on with; it forgets what is of no use now, and says so.

    That is the best of another metric, and of evaluations that ask otherwise.

    memory: of a checkpoint, None, or {}: nothing was evaluated yet. name: of the metric, "":
    none is watched. of: by their keys, the settings that decide what a value is a value of:
    as high a one of others is no better; None: nothing will be evaluated any more.
    """
    memory = memory or {}
    of = memory.get("of") if of is None else of
    asked = memory.get("of") or {}  # older checkpoints tell fewer of them, and no name
    before = memory.get("name", name)
    changed = [key for key in of or () if asked.get(key, of[key]) != of[key]]
    if before != name:
        why = f"{before!r}"
    elif changed:
        why = f"of evaluations before {' and '.join(changed)} changed"
    else:
        return memory | {"of": of}
    if before and name and memory.get("value") is not None:
        say(f"run.keep_best={name!r} was {why}: the best begins anew")
    return {"of": of}


def mark(folder: pathlib.Path, step: int | None) -> None:
    """Writes of which step best/ is, None: of none that is whole; of process 0 alone."""
    folders.write(folder / MARK, f"{json.dumps({'step': step})}\n")


def holds(folder: pathlib.Path, step: int) -> bool:
    """Returns whether best/ is of a step, as far as is known.

    It may be a later one's: of a run that was killed then, and went on from before.
    """
    file = folder / MARK
    if not file.is_file():
        return True
    told = folders.object_of(read(file)) or {}  # {}: it is damaged
    return told.get("step") == step


def publish(folder: pathlib.Path) -> None:
    """Makes best/ the run's export/; of process 0 alone."""
    with export.whole(folder / "export", 0) as partial:
        shutil.copytree(folder / "best", partial)
