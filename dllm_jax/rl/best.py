"""The best evaluation of a run: its weights stay, and a run without better ones may end.

What is known goes into checkpoints, so that a resumed run keeps and ends as if it had not
stopped. The same in every process.
"""

import json
import pathlib
import shutil

from dllm_jax import folder as folders
from dllm_jax.exits import room
from dllm_jax.models import export

MARK = "best.json"  # in the run's folder
# What is known before the first evaluation. of: what evaluations ask, see `still`.
NOTHING = {"value": None, "step": 0, "stale": 0, "of": None}


class Best:
    """The highest value of a metric so far; ties go to the earlier step."""

    def __init__(self, name: str, patience: int, memory: dict | None = None, say=print):
        """name: of the metric, "": none is watched; patience: see RunConfig.

        memory: what another's `memory` was; None, or {}: nothing was evaluated yet. That of
        another metric counts for nothing, which is said.
        """
        self.name, self.patience = name, patience
        memory = NOTHING | (memory or {})
        self.of = memory["of"]
        before = memory.get("name", name)  # older checkpoints do not tell it
        if before != name:
            memory = NOTHING
            if before and name:
                say(f"run.keep_best={name!r} was {before!r}: the best begins anew")
        self.value, self.step = memory["value"], int(memory["step"])
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


def still(memory: dict | None, of: dict, say) -> dict:
    """Returns a `Best.memory` to go on with; it forgets where evaluations ask otherwise now.

    memory: of a checkpoint, None, or {}: nothing was evaluated yet. of: by their keys, the
    settings that decide what a value is a value of: as high a one of others is no better.
    """
    memory = memory or {}
    before = memory.get("of") or of  # older checkpoints do not tell it
    changed = [key for key in of if before.get(key) != of[key]]
    if not changed or memory.get("value") is None:
        return memory | {"of": of}
    say(
        f"run.keep_best={memory.get('name', '')!r} was of evaluations before "
        f"{' and '.join(changed)} changed: the best begins anew"
    )
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
    told = folders.object_of(file.read_bytes()) or {}  # {}: it is damaged
    return told.get("step") == step


def publish(folder: pathlib.Path) -> None:
    """Makes best/ the run's export/; of process 0 alone."""
    partial = folder / ".export.partial"
    with room(folder):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(folder / "best", partial)
        export.swap(partial, folder / "export")
