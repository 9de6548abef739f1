"""Trains a diffusion language model: RL, SFT, or pairs (DPO and reward models).

    python -m dllm_jax.train --config=configs/tracerl.py [--config.a.b=value ...]

One step of RL: sample a group of answers to each problem, grade them, turn rewards into
advantages, pack what the sampler saw into training batches, update the policy and the
value model, log, save. SFT and DPO are the same loop with other sources of batches. A run
lives in one folder and goes on from its newest checkpoint when started again.
"""

import contextlib
import dataclasses
import math
import pathlib
import sys

import jax
from absl import flags

from dllm_jax import (
    begin,
    command_line,
    config,
    curves,
    exits,
    metrics,
    processes,
    sharding,
    trackers,
)
from dllm_jax.folder import Folder
from dllm_jax.rl import best, guard, heldout, networks, rewards, rollout
from dllm_jax.rl.step import StepBatches
from dllm_jax.viewer import leave

RESUME = (
    "go on from the folder's newest checkpoint: if there is one, or else fail, or never"
)


def train(cfg: config.Config, run: Folder, resume: str = "auto") -> None:
    """Runs to the last step, or to the first error of the user's.

    run: the folder `cfg.run.folder`. resume: as the flag says it. The same in every
    process; the first one alone writes and prints. Raises exits.Stopped where SIGTERM or
    SIGINT came, once all is saved.
    """
    here = begin.scene(cfg, run, resume)
    tools = begin.tools(here)
    problems = heldout.sets(here.settings, tools)
    source = here.method(here.settings, tools)
    for line in heldout.shared(here.settings, problems, source.prompts):
        here.say(line)
    sampling, guest = begin.place(here, tools)
    programs = begin.programs(here, source, tools, sampling, guest)
    progress = begin.progress(here, source, tools, sampling.weights)
    note_judges(here, progress)

    if progress.step >= source.steps:
        here.say(f"{progress.step} of {source.steps} steps are done: none is left")
    elif profile_missed(here, progress.step, source.steps):
        here.say(
            f"warning: run.profile={cfg.run.profile}: no profile is written, as the steps to "
            f"come are {progress.step + 1} to {source.steps}"
        )
    training = Training(here, tools, problems, source, programs, progress)
    training.evaluate_first()
    for step in range(progress.step + 1, source.steps + 1):
        if training.has_the_best():
            break
        # Everything random is a function of the seed and the step: what is resumed goes on
        # as if it had not stopped.
        with profiled(here, step):
            moved = training.take(step)
        if not moved or here.stopping():
            break
    training.leave()


def note_judges(here: begin.Scene, progress: begin.Progress) -> None:
    """Notes the sources of functions of the user's that judge, and says which changed.

    A run goes on all the same: whoever mends a reward on the way means it.
    """
    cfg, before = here.cfg, progress.meta.get("judges", {})
    now = rewards.sources(cfg.rl.reward, cfg.reward) if here.samples else {}
    for name, mark in now.items():
        if before.get(name, mark) != mark:  # older checkpoints tell none
            here.say(
                f"warning: {name} is another than until step {progress.step}: rewards before "
                "and after do not compare"
            )
    progress.meta["judges"] = now


def profile_missed(here: begin.Scene, done: int, last: int) -> bool:
    """Returns whether `run.profile` names none of the steps from `done` + 1 to `last`.

    Not where an earlier attempt has written it.
    """
    named = here.cfg.run.profile
    passed = 0 < named <= done and not (here.folder / "profile").exists()
    return passed or named > last


@contextlib.contextmanager
def profiled(here: begin.Scene, step: int):
    """Writes a profile of what is done inside, if `run.profile` names this step."""
    if step != here.cfg.run.profile:
        yield
        return
    folder = here.folder / "profile"
    if jax.process_count() > 1:  # those of one host would write the same files
        folder /= f"process_{jax.process_index()}"
    with exits.room(here.folder), jax.profiler.trace(str(folder)):
        yield
    here.say(f"a profile of step {step} is in {folder}: for Perfetto, or xprof")


class Training:
    """The steps of a run: what one changes, tells and leaves behind."""

    def __init__(self, here: begin.Scene, tools, problems, source, programs, progress):
        self.here, self.cfg, self.tools = here, here.cfg, tools
        self.problems, self.source, self.programs = problems, source, programs
        self.progress = progress
        start, meta = progress.step, progress.meta
        self.first, self.saved = start + 1, start
        rows = here.checkpoints.rows(start) if start else {}
        # Whether the last step was not evaluated yet, since a signal came.
        self.pending = bool(problems) and meta.get("pending", start == 0)
        self.row = rows.pop(start, {}) if self.pending else {}
        self.resolved = dataclasses.asdict(here.cfg)
        if here.main:
            rollout.cut(here.folder, start)
        self.writer = metrics.Writer(
            here.folder,
            source.steps,
            start,
            rows,
            enabled=here.main,
            pending=self.pending,
            trackers=lambda next_step: trackers.Trackers(
                here.boards,
                trackers.Run(
                    here.folder, next_step, config.flat(self.resolved), here.run.begun
                ),
            ),
        )
        self.watch = guard.Guard(
            here.plans,
            here.checkpoints,
            here.folder,
            here.cfg.run.max_skips,
            start,
            meta.get("norms", {}),
        )
        self.champion = best.Best(
            here.cfg.run.keep_best, here.cfg.run.patience, meta["best"]
        )

    def evaluate_first(self):
        """Evaluates what has learned nothing yet, or what a signal kept from it."""
        start, model = self.progress.step, self.here.model
        if not (self.problems or self.source.samples):
            with self.watch.sampling(start):
                weights = self.progress.weights().scoring()
                networks.check_forward(weights["policy"], model)
        answered = self.evaluate(start) if self.pending else None
        if answered is not None:
            self.writer.write(start, self.row | answered | self.here.timer.pop())

    def evaluate(self, step: int) -> dict | None:
        """Returns the held-out problems' metrics, None where a signal came meanwhile.

        Weights that are better than all before are exported.
        """
        with self.watch.sampling(step):
            answered = heldout.evaluate_sets(
                step,
                self.progress.weights(),
                sets=self.problems,
                settings=self.here.settings,
                tools=self.tools,
            )
        here, name = self.here, self.champion.name
        if answered is None:
            return None
        if why := heldout.unjudged(answered, name, here.settings.heldout_answers):
            here.say(f"warning: step {step}: {why}: it is compared with no other")
        elif self.champion.note(step, answered):
            with here.timer("best"):
                if here.main:
                    best.mark(here.folder, None)
                self.export("best", self.progress.states["policy"])
                if here.main:
                    best.mark(here.folder, step)
        return answered

    def has_the_best(self) -> bool:
        """Returns whether `run.patience` is at its end, and says so."""
        champion = self.champion
        if champion.done:
            self.here.say(
                f"no {champion.name} above {champion.value:.4g}, of step {champion.step}, in "
                f"{self.cfg.run.patience} evaluations: the run ends after step "
                f"{self.progress.step}"
            )
        return champion.done

    def take(self, step: int) -> bool:
        """Takes a step and keeps what it tells; False where a signal came before it moved."""
        here, timer, source = self.here, self.here.timer, self.source
        timer.step = step
        with self.watch.sampling(step):
            made = source.batches(
                step,
                self.progress.meta["taken"],
                self.progress.weights(),
                self.programs.score,
            )
        if made is None or here.stopping():
            return False
        row = dict(made.metrics)
        if made.batches:
            if step == self.first:
                fill = row.get("packed_fill", 1.0)
                for line in config.half_empty(fill, here.settings.batch):
                    here.say(line)
            row |= self.update(step, made)
        self.move_reference(step)
        row |= self.entropy_low(step, row) | made.rates(timer.seconds)
        used = made.taken or source.taken_per_step
        del made  # its batches make room for the next rollout
        pending, last = False, step == source.steps
        if self.problems and (step % self.cfg.eval.every == 0 or last):
            answered = self.evaluate(step)
            row, pending = row | (answered or {}), answered is None
        row = {name: float(x) for name, x in (row | timer.pop()).items()}
        # From here on the step is done: it is saved now, or when a signal comes. The row is
        # saved with it, as a run may be killed before it is written.
        self.note_done(step, used, row, pending)
        if step % self.cfg.run.save_every == 0 or last:
            with timer("checkpoint"):
                self.save()
        if not pending:
            self.writer.write(step, row | timer.pop())
        self.watch.check()
        return True

    def update(self, step: int, made: StepBatches) -> dict:
        """Learns from a step's batches; returns the mean metrics of the updates."""
        progress = self.progress
        with self.here.timer("update"):
            told, trained_on = [], []
            beside = networks.beside(progress.base, made.table and made.table.seen)
            for names, batch in self.source.passes(step, made):
                moved = {name: progress.states[name] for name in names}
                moved, metrics_of_pass = self.programs.trainers[names](
                    moved, batch, beside, self.watch.limits()
                )
                progress.states = progress.states | moved
                told.append(metrics_of_pass)
                trained_on.append(batch)
                if self.source.far(metrics_of_pass):
                    break
            told = sharding.fetch(told)
            row = metrics.mean(told)
            return row | self.watch.note(step, told, trained_on)

    def move_reference(self, step: int):
        """Makes the policy the reference, every `rl.reference_reset` steps."""
        progress = self.progress
        if self.here.anchor and step % self.cfg.rl.reference_reset == 0:
            policy = progress.states["policy"].params
            progress.reference = networks.as_reference(policy, self.here.anchor)

    def entropy_low(self, step: int, row: dict) -> dict:
        """Returns the alarm of an entropy below its floor, and says it."""
        floor, entropy = self.cfg.rl.entropy_floor, row.get("entropy", math.inf)
        if not (floor and entropy < floor):  # nor of NaN, which has a word of its own
            return {}
        self.here.say(
            f"warning: step {step}: entropy {entropy:.3g} nats a token, below "
            f"rl.entropy_floor={floor}: hardly anything new is tried"
        )
        return {"entropy_low": 1.0}

    def note_done(self, step: int, used: int, row: dict, pending: bool):
        """Notes that a step is done, and what a checkpoint of it says."""
        self.progress.step = step
        self.progress.meta = {
            "taken": self.progress.meta["taken"] + used,
            **{name: self.progress.meta[name] for name in ("data", "judges", "model")},
            "config": self.resolved,
            "row": row,
            "norms": self.watch.norms,
            "pending": pending,
            "memory": self.source.memory,
            "best": self.champion.memory,
        }

    def save(self):
        """Saves the last step that is done, unless its weights are not to be kept."""
        progress = self.progress
        tree = progress.saved(bool(self.here.anchor))
        step = self.watch.save(progress.step, tree, progress.meta)
        self.saved = step or self.saved

    def save_rest(self):
        """Saves what is not saved yet, or says that it cannot be."""
        step = self.progress.step
        if step > self.saved:  # a signal came before a save was due
            self.save()
        if step > self.saved:
            self.here.say(
                f"warning: the last updates were skipped, {self.watch.reason}: nothing is "
                f"saved after step {self.saved}, behind which the same command goes on"
            )

    def leave(self):
        """Ends a run: what is not saved yet, curves and pages, and what is exported."""
        here, progress = self.here, self.progress
        self.save_rest()
        here.checkpoints.close()
        stopped = here.stopping()  # by a signal to any process
        self.writer.close(stopped)
        if here.main:
            draw(here.folder)
            leave.after_run(here.folder, here.tok, here.say)
        if stopped or here.stopping():
            raise exits.Stopped(
                f"by a signal; start the same command again to go on in {here.folder}"
            )
        # The export loads weights as precise as they are stored.
        progress.base = progress.reference = None
        if self.cfg.run.export:
            self.export_policy()
        if self.cfg.run.export_value:
            self.export("value", progress.states["value"])
            here.say(f"the value network is in {here.folder / 'value'}")

    def export_policy(self):
        """Exports the best policy that was kept, or else the last."""
        here, champion = self.here, self.champion
        earlier = champion.before(self.progress.step)
        lost = earlier and sharding.anywhere(
            here.main and not best.holds(here.folder, champion.step)
        )
        if lost:
            here.say(
                f"warning: {champion.name} was highest, {champion.value:.4g}, after step "
                f"{champion.step}, whose weights a later step has replaced that was then "
                "taken anew: the last weights are exported"
            )
        if earlier and not lost:
            if here.main:
                best.publish(here.folder)
            here.say(
                f"{champion.name} was highest, {champion.value:.4g}, after step "
                f"{champion.step}: those weights are exported"
            )
        else:
            self.export("export", self.progress.states["policy"])
        here.say(f"exported to {here.folder / 'export'}")

    def export(self, name: str, state):
        """Writes a network as a checkpoint like the one it began with."""
        here = self.here
        begin.check_origin(here.cfg.model.path)
        networks.export(
            here.folder / name, state.params, here.cfg.model.path, here.model, here.mesh
        )


def draw(folder: pathlib.Path) -> None:
    """Draws curves.png; what goes wrong is said and costs nothing: the export comes after."""
    try:
        curves.draw(metrics.history(folder), folder / "curves.png")
    except Exception as error:  # noqa: BLE001 (as matplotlib may raise anything)
        exits.warn(f"no curves: {error}")


def main():
    """Parses the command line and trains."""
    resume = flags.DEFINE_enum("resume", "auto", ["auto", "must", "never"], RESUME)
    cfg = command_line.from_command_line(sys.argv, example="configs/tracerl.py")
    with Folder(
        cfg.run.folder, writes=jax.process_index() == 0, agreed=sharding.anywhere
    ) as run:
        processes.see(run.path / "lock")
        train(cfg, run, resume.value)


if __name__ == "__main__":
    options = command_line.OPTIONS | {"--resume=auto|must|never": RESUME}
    command_line.entry(main, command_line.usage(__doc__, options))
