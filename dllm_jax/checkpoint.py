"""Checkpoints that survive: Orbax, with checksums, and a fall-back to the one before.

Orbax commits a step atomically and notices missing and truncated files, but not a byte
that changed on disk; so once a step is committed, the checksums of its files are written
beside it and compared before it is read. A step that was killed between the two has no
checksums: it is whole, Orbax says so, and it is trusted.
"""

import json
import os
import pathlib
import sys
import zlib

import jax
import orbax.checkpoint as ocp

SUMS, PARTIAL = "checksums.json", "checksums.partial"


class Checkpoints:
    """The checkpoints of one run folder; `save` writes in the background."""

    def __init__(self, folder, keep: int | None = 2):
        self.folder = pathlib.Path(folder).absolute()
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep),
            # Without them a process that has not saved yet cannot read the metadata.
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        self.manager.reload()
        return sorted(self.manager.all_steps())

    def save(self, step: int, tree, meta: dict) -> None:
        """Saves a pytree of arrays with a JSON-able dict; waits for the save before it.

        Steps from this one on are those that `restore` found damaged, or passed over by
        name: they make way, since Orbax saves nothing older than what it has.
        """
        self.wait()
        for late in [number for number in self.steps() if number >= step]:
            self.manager.delete(late)
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(meta)
            ),
        )

    def wait(self) -> None:
        """Blocks until every save is committed and its checksums are written."""
        self.manager.wait_until_finished()
        if jax.process_index() == 0:
            for step in self.steps():
                file = self.folder / str(step) / SUMS
                if not file.exists():
                    partial = file.with_name(PARTIAL)
                    partial.write_text(json.dumps(checksums(file.parent)))
                    os.replace(partial, file)

    def restore(self, target, step: int | None = None):
        """Returns (tree, meta, step) of the newest whole checkpoint, or None without any.

        target: a pytree of ShapeDtypeStructs with shardings, which may belong to another
        mesh than the one that saved; None restores whatever is there as host arrays.
        step: that one and no other. A damaged checkpoint is reported and the one before
        it is taken.

        Raises ValueError when none is whole, and when a tree does not have the target's
        structure and shapes.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            raise ValueError(f"{self.folder} has no step {step}; it has {steps}")
        tried = [step] if step is not None else steps[::-1]
        for number in tried:
            damage = self.damage(number)
            if damage is None:
                try:
                    self.fits(number, target)
                    tree, meta = self.read(number, target)
                    return tree, meta, number
                except Misfit as error:
                    raise ValueError(str(error)) from None
                except Exception as error:  # noqa: BLE001  (Orbax raises many kinds)
                    damage = str(error).split("\n")[0][:200]
            print(
                f"warning: checkpoint {self.folder / str(number)} is damaged "
                f"({damage}); trying the one before",
                file=sys.stderr,
            )
        if tried:
            raise ValueError(f"{self.folder}: no checkpoint of {tried} can be read")
        return None

    def damage(self, step: int) -> str | None:
        """Returns what the checksums say is wrong with a step, or None."""
        file = self.folder / str(step) / SUMS
        if not file.exists():
            return None
        try:
            wanted = json.loads(file.read_text())
        except json.JSONDecodeError:
            return f"{SUMS} is not JSON"
        found = checksums(file.parent)
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                return f"{name} is {'changed' if name in found else 'missing'}"
        return None

    def fits(self, step: int, target) -> None:
        """Raises Misfit naming the first leaf that the target wants otherwise."""
        if target is None:
            return
        held = self.manager.item_metadata(step).state
        flat = jax.tree_util.tree_leaves_with_path
        have = {names(path): leaf for path, leaf in flat(held)}
        want = {names(path): leaf for path, leaf in flat(target)}
        where = f"{self.folder / str(step)} does not fit this configuration: "
        for name in sorted(have.keys() | want.keys()):
            if name not in have or name not in want:
                side = "has no" if name in want else "has an unexpected"
                raise Misfit(f"{where}it {side} {name}")
            if tuple(have[name].shape) != tuple(want[name].shape):
                raise Misfit(
                    f"{where}{name} is {tuple(have[name].shape)}, "
                    f"expected {tuple(want[name].shape)}"
                )

    def read(self, step: int, target):
        """Returns (tree, meta) of one step."""
        state = ocp.args.StandardRestore(target)
        out = self.manager.restore(
            step, args=ocp.args.Composite(state=state, meta=ocp.args.JsonRestore())
        )
        return out.state, out.meta

    def close(self) -> None:
        """Finishes what is being written."""
        self.wait()
        self.manager.close()


class Misfit(Exception):
    """A whole checkpoint of something else."""


def names(path) -> str:
    """Returns a leaf's dotted name, however its containers spell their keys."""
    keys = (
        getattr(p, "key", getattr(p, "name", getattr(p, "idx", None))) for p in path
    )
    return ".".join(str(key) for key in keys)


def checksums(folder: pathlib.Path) -> dict[str, int]:
    """Returns the CRC-32 of every file below a folder by relative name."""
    out = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name not in (SUMS, PARTIAL):
            total = 0
            with file.open("rb") as data:
                while part := data.read(1 << 22):
                    total = zlib.crc32(part, total)
            out[str(file.relative_to(folder))] = total
    return out
