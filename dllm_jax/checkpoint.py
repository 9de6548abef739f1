"""Checkpoints that survive: Orbax, with checksums, and a fall-back to the one before.

Orbax commits a step by a rename, so a save that is killed leaves nothing that looks like
a step. It notices files that are missing or cut short, but not a byte that changed inside
a large array. So the CRC-32 of every file is written into the step before that rename:
a step without them was never whole, and no step is ever trusted unseen. The two files
that Orbax touches last (its time stamps, its mark of success) hold nothing we read and
stay out.
"""

import concurrent.futures
import contextlib
import glob
import json
import pathlib
import shutil
import sys
import time
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from dllm_jax import processes
from dllm_jax.exits import CannotGoOn, free, room, warn

SUMS = "checksums.json"
META = "meta/metadata"  # where Orbax puts the JSON
# What Orbax's errors say where what it writes is removed meanwhile.
REMOVED = ("NOT_FOUND", "No ArrayMetadata found")
# A save may take so long: a disk may be slow, and the clock, by which Orbax counts, may jump.
LONGEST_S = 24 * 3600
# What a step's meta says of how its state and meta are laid out. A change of either is a
# new number, and a row of MIGRATIONS.
FORMAT = 1


def from_0(meta: dict) -> dict:
    """Returns format 1 of a meta without a number: nothing else has changed."""
    return meta | {"format": 1}


class Misfit(ValueError):
    """A step whose arrays are not those of a run; `meta` tells of the one that saved it."""

    def __init__(self, text: str, meta: dict):
        super().__init__(text)
        self.meta = meta


class Newer(ValueError):
    """A step that a newer version of the program has written."""


MIGRATIONS = {0: from_0}  # format: what makes the next one of its meta


def check_path(folder: pathlib.Path) -> None:
    """Raises ValueError for a path from which Orbax reads something else than it wrote.

    It takes the whole path for a pattern of files, and a backslash for a slash.
    """
    path = str(folder.absolute())
    if "\\" in path or glob.escape(path) != path:
        raise ValueError(
            f"{folder}: checkpoints would not be found again in a folder with *, ?, [ or \\ "
            "in its path; choose another name"
        )


def check_resume(folder: pathlib.Path, resume: str) -> bool:
    """Returns whether a run's folder of checkpoints holds any, in every process.

    Process 0 looks: others may see what it has written only after a while. Makes nothing
    there. Raises ValueError where that is not what --resume asks for, and as `check_path`.
    """
    check_path(folder)
    has_step = jax.process_index() == 0 and holds_step(folder, resume)
    return bool(multihost_utils.broadcast_one_to_all(np.bool_(has_step)))


def holds_step(folder: pathlib.Path, resume: str) -> bool:
    """Does what `check_resume` says, in the process that looks."""
    if folder.exists() and not folder.is_dir():  # Orbax would try, and wait for minutes
        raise ValueError(f"{folder} is no folder; choose another run.folder")
    has_step = any(item.name.isdigit() for item in folder.glob("*"))
    if resume == "never" and has_step:
        raise ValueError(
            f"--resume=never, but {folder.parent} already holds a run; choose another "
            "run.folder"
        )
    if resume == "must" and not has_step:
        raise ValueError(f"--resume=must, but {folder.parent} has no checkpoint")
    return has_step


class Checkpoints:
    """The checkpoints of one run folder; `save` writes in the background.

    keep: the newest that stay. keep_every: multiples of it stay for good. Every process
    makes the same calls on one shared folder.
    """

    def __init__(
        self, folder, keep: int | None = 2, keep_every: int | None = None
    ) -> None:
        self.folder = pathlib.Path(folder).absolute()
        self.keep, self.keep_every = keep, keep_every
        check_path(self.folder)
        # Orbax tells every file that it touches, and of a save that fails 600 lines more;
        # what counts of these is raised, or heard.
        logging.set_verbosity(logging.ERROR)
        logging.get_absl_logger().filters = [self.hear]
        sys.unraisablehook = report
        self.saving, self.wanted = None, 0  # the step, and its bytes
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                keep_period=keep_every,
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self.seal, timeout_secs=LONGEST_S
                ),
            ),
            # Without them a process that has not saved yet cannot read the metadata.
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first, as process 0 finds them.

        No process returns before all have looked: a step that one then deletes would
        otherwise be missing from another's list.
        """
        self.manager.reload()
        steps = sorted(self.manager.all_steps())
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
        # All processes need an array of one size; what process 0 put in it is what counts.
        steps_n = np.resize(np.array(steps, np.int32), count)
        return multihost_utils.broadcast_one_to_all(steps_n).tolist()

    def scarce(self, tree) -> list[str]:
        """Returns a warning, where the disk has not room for all that is to stay there.

        tree: what will be saved, as shapes. Those that stay and the one being written are
        counted, less those that are there, by the bytes of their arrays: packed they may
        take less. Of those that are to go by now each leaves room for another.
        """
        names = [item.name for item in self.folder.glob("*")]
        there = sorted(int(name) for name in names if name.isdigit())
        each = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        more = max((self.keep or 0) + 1 - len(there), 1) - len(self.over(there))
        wanted = each * more
        if wanted <= free(self.folder):
            return []
        line = (
            f"warning: {self.folder}: {free(self.folder) / 2**30:.2f} GiB are free, and "
            f"checkpoints of {each / 2**30:.2f} GiB each may want {wanted / 2**30:.2f} more "
            f"(run.keep={self.keep} of them, and the one being written)"
        )
        return [line]

    def save(self, step: int, tree, meta: dict) -> None:
        """Saves a pytree of arrays with a JSON-able dict.

        Waits for the save before it and for the copy to the host; the arrays may be
        donated then. Steps from this one on are those that `restore` found damaged, or
        passed over by name: they make way, since Orbax saves nothing older than it has.
        """
        self.wait()
        if jax.process_index() == 0:
            self.clear_partial()
        steps = self.steps()
        later = [number for number in steps if number >= step]
        for number in later:
            warn(f"checkpoint {self.folder / str(number)} makes way for step {step}")
        before = [number for number in steps if number < step]
        with room(self.folder):
            for number in later + self.surplus(before):
                self.manager.delete(number)
        self.saving = step
        self.wanted = sum(x.nbytes for x in jax.tree.leaves(tree))
        with self.written():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(tree),
                    meta=ocp.args.JsonSave(meta | {"format": FORMAT}),
                ),
            )

    def over(self, steps: list[int]) -> list[int]:
        """Returns which of some steps, oldest first, are to go once the others are whole."""
        if self.keep is None:
            return []
        every = self.keep_every
        return [n for n in steps[: -self.keep] if not every or n % every]

    def surplus(self, steps: list[int]) -> list[int]:
        """Returns which of some steps a run was killed before it removed.

        With them there is a step more than the disk was to have room for.
        """
        over = self.over(steps)
        return [] if over and any(map(self.damaged, steps[-self.keep :])) else over

    def seal(self) -> None:
        """Writes the checksums of the step being saved; Orbax calls it in process 0.

        It calls when every process has written its part, just before the rename.
        """
        folders = list(self.folder.glob(f"{self.saving}.*"))
        assert folders, "Orbax renamed the step before its checksums were written"
        for folder in folders:
            files = [f for f in sorted(folder.glob("*/**/*")) if f.is_file()]
            names = [str(f.relative_to(folder)) for f in files]
            sums = dict(zip(names, crc32s(files), strict=True))
            (folder / SUMS).write_text(json.dumps(sums))

    def wait(self) -> None:
        """Blocks until the last save is committed; raises what went wrong with it."""
        with self.written():
            self.manager.wait_until_finished()

    @contextlib.contextmanager
    def written(self):
        """Raises exits.CannotGoOn where the step being saved finds no room on the disk.

        And where somebody removes it meanwhile. What it has written goes: the steps before
        it are whole.
        """
        try:
            with room(self.folder, self.wanted):
                yield
        except CannotGoOn as error:
            self.clear_partial()
            if not (self.folder / str(self.saving)).is_dir():
                raise
            raise CannotGoOn(
                f"step {self.saving} is whole, and one before it cannot be removed: {error}"
            ) from None
        except ValueError as error:
            if not any(words in str(error) for words in REMOVED):
                raise
            raise CannotGoOn(
                f"{self.folder}: files of step {self.saving} were removed while it was "
                "written; start the same command again, from the steps that are left"
            ) from None

    def hear(self, record) -> bool:
        """Ends all processes of a run where this one's part of a save fails; prints nothing.

        record: what Orbax logs, which is where it tells of it first: it lets this process
        wait for the others at one barrier, and these for this one at another, and raises
        after LONGEST_S that these are over.
        """
        if record.exc_info and record.threadName == "async_save":
            try:
                with room(self.folder, self.wanted):
                    raise record.exc_info[1]
            except BaseException as error:  # noqa: BLE001 (whatever Orbax has met)
                processes.fail(error)
                # Others that have lost this process may have begun to write again.
                if isinstance(error, CannotGoOn):
                    self.clear_partial()
        return record.levelname == "CRITICAL"

    def clear_partial(self) -> None:
        """Removes what saves have written that were never whole.

        That is the one that has found no room, or one of a run that was killed meanwhile,
        of a step that is perhaps not saved again. Orbax's threads may still write there for
        a moment.
        """
        for _ in range(20):
            folders = list(self.folder.glob("*.orbax-checkpoint-tmp*"))
            if not folders:
                return
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)

    def restore(self, target, step: int | None = None):
        """Returns (tree, meta, step) of the newest whole checkpoint, or None without any.

        target: a pytree of ShapeDtypeStructs with shardings, which may belong to another
        mesh than the one that saved; arrays are cast to its dtypes. None restores
        whatever is there as host arrays.
        step: that one and no other. A damaged checkpoint is reported and the one before
        it is taken.

        Raises CannotGoOn when none is whole, Misfit when a tree does not have the target's
        structure and shapes, Newer when it is of a newer format, and ValueError when there is
        no such step.
        """
        self.wait()
        steps = self.steps()
        if step is not None and step not in steps:
            raise ValueError(f"{self.folder} has no step {step}; it has {steps}")
        candidates = [step] if step is not None else steps[::-1]
        for number in candidates:
            if self.damaged(number):
                continue
            if target is not None:
                self.check_fit(number, target)
            return self.load(number, target), self.meta(number), number
        if candidates:
            raise CannotGoOn(
                f"{self.folder}: no checkpoint of {candidates} is whole; put a copy of one "
                "back, or begin again with --resume=never and another run.folder"
            )
        return None

    def check_fit(self, step: int, target) -> dict:
        """Returns a step's meta.

        Raises Misfit when its tree does not have the target's structure and shapes, and
        Newer as `meta` does.
        """
        meta = self.meta(step)
        if fault := misfit(self.shapes(step), target):
            raise Misfit(
                f"{self.folder / str(step)} does not fit this configuration: {fault}; "
                "another model, or other networks beside it, made it: name another "
                "run.folder",
                meta,
            )
        return meta

    def meta(self, step: int) -> dict:
        """Returns a step's meta, as this version of the program writes it.

        Raises Newer where a newer one has written it.
        """
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = self.manager.restore(step, args=args).meta
        if (number := meta.get("format", 0)) > FORMAT:
            raise Newer(
                f"checkpoint {self.folder / str(step)} is of format {number}, which a newer "
                f"dllm_jax has written; this one reads formats up to {FORMAT}"
            )
        while number < FORMAT:
            meta = MIGRATIONS[number](meta)
            number = meta["format"]
        return {name: x for name, x in meta.items() if name != "format"}

    def rows(self, last: int) -> dict[int, dict]:
        """Returns the metrics of the steps up to `last`, as far as their metas tell."""
        rows = {}
        for folder in self.folder.iterdir():
            if folder.name.isdigit() and int(folder.name) <= last:
                # Not by Orbax, which fails for what is damaged.
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    sums = json.loads((folder / SUMS).read_text())
                    if crc32(folder / META) == sums[META]:
                        row = json.loads((folder / META).read_text())["row"]
                        rows[int(folder.name)] = dict(row)
        return rows

    def damaged(self, step: int) -> bool:
        """Returns whether a step is not what was saved, and reports what differs.

        Process 0 looks, and its word holds for all: processes that went on from
        different steps would train on a mixture.
        """
        reason = damage(self.folder / str(step)) if jax.process_index() == 0 else None
        if reason is not None:
            warn(f"checkpoint {self.folder / str(step)} is damaged: {reason}")
        return bool(multihost_utils.broadcast_one_to_all(np.bool_(reason is not None)))

    def load(self, step: int, target):
        """Returns the tree of one step; see `restore`.

        Containers may be others than the target's where they hold the same arrays: an
        optimizer that decays weights has a mask around nothing, another nothing.
        """
        like = target
        if target is not None:
            like = contained(target, self.shapes(step).tree)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        state = self.manager.restore(step, args=args).state
        return state if target is None else contained(state, target)

    def shapes(self, step: int):
        """Returns the tree of one step with shapes and dtypes for its arrays."""
        return self.manager.item_metadata(step).state

    def load_part(self, step: int, target):
        """Returns a part of one step's tree; target: of that part, as for `restore`."""
        # Orbax's standard handler, which writes a tree, cannot read a part of it.
        with ocp.PyTreeCheckpointer() as reader:
            return reader.restore(
                self.folder / str(step) / "state",
                args=ocp.args.PyTreeRestore(
                    item=target,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                    partial_restore=True,
                ),
            )

    def close(self) -> None:
        """Finishes what is being written."""
        self.wait()
        self.manager.close()


def report(unraisable, known=sys.unraisablehook) -> None:
    """Tells an error as before, but for what a failed save leaves behind in its threads.

    known: what told errors when this module was imported.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        known(unraisable)


def dotted(path) -> str:
    """Returns a leaf's dotted name, however its containers spell their keys."""
    keys = (
        getattr(p, "key", getattr(p, "name", getattr(p, "idx", None))) for p in path
    )
    return ".".join(str(key) for key in keys)


def by_name(tree) -> dict:
    """Returns every leaf by its dotted name."""
    return {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def contained(tree, like):
    """Returns the leaves of a tree in the containers of another, by their dotted names."""
    leaves = by_name(tree)
    return jax.tree.map_with_path(lambda path, _: leaves[dotted(path)], like)


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf by its dotted name."""
    return {name: tuple(leaf.shape) for name, leaf in by_name(tree).items()}


def misfit(stored, target) -> str | None:
    """Returns the first leaf whose shapes differ, and how, or None."""
    has, wants = shapes_of(stored), shapes_of(target)
    for leaf in sorted(has.keys() | wants.keys()):
        if has.get(leaf) != wants.get(leaf):
            return (
                f"{leaf} is {has.get(leaf, 'missing')}, expected "
                f"{wants.get(leaf, 'no such array')}"
            )
    return None


def damage(folder: pathlib.Path) -> str | None:
    """Returns how a step's files differ from its checksums, or None."""
    try:
        sums = json.loads((folder / SUMS).read_text())
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        return f"{SUMS} cannot be read ({error})"
    if not (isinstance(sums, dict) and META in sums):
        return f"{SUMS} does not tell the sum of {META}"
    try:
        sums_now = crc32s([folder / name for name in sums])
    except OSError as error:
        return str(error)
    for name, sum_now in zip(sums, sums_now, strict=True):
        if sum_now != sums[name]:
            return f"{name} has changed"
    return None


def crc32s(files: list[pathlib.Path]) -> list[int]:
    """Returns the CRC-32 of each file; reads several at a time."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(crc32, files))


def crc32(file: pathlib.Path) -> int:
    """Returns the CRC-32 of a file."""
    total = 0
    with file.open("rb") as data:
        while chunk := data.read(1 << 22):
            total = zlib.crc32(chunk, total)
    return total
