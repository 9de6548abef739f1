"""What keeps a run from training on garbage: updates that are skipped, and when it ends.

An update of a network is skipped, inside `learner.update`, where its loss or the norm of
its gradient is not finite, or where that norm is beyond `max_grad_skip` times the running
median. Here is the host's half: the medians, the count, the first bad batch on disk, and
the error that ends a run. The same in every process.
"""

import collections
import contextlib
import dataclasses
import math
import pathlib
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import exits, sharding
from dllm_jax.checkpoint import Checkpoints, dotted
from dllm_jax.rl.learner import Plan, prefixed
from dllm_jax.rl.views import TrainBatch

WINDOW, ENOUGH = 64, 8  # norms that a median is of: the last ones, and at least so many


class Guard:
    """Watches the updates of a run."""

    def __init__(
        self,
        plans: dict[str, Plan],
        checkpoints: Checkpoints,
        folder: pathlib.Path,
        max_skips: int,
        start: int,
        norms: dict[str, list[float]],
    ):
        """start: the last step that is done; norms: what `norms` was after it, or {}."""
        self.plans, self.checkpoints, self.folder = plans, checkpoints, folder
        self.max_skips, self.reason = max_skips, ""
        self.streaks = dict.fromkeys(plans, 0)
        # The last step whose weights have shown themselves good, in a step of their own.
        self.good, self.trained = start - 1, start > 0
        self.seen = {
            name: collections.deque(norms.get(name, ()), maxlen=WINDOW)
            for name in plans
        }

    @property
    def streak(self) -> int:
        """How many updates of a network were skipped one after the other, at most.

        No step is saved meanwhile. An update of another network alone does not end it.
        """
        return max(self.streaks.values())

    @property
    def norms(self) -> dict[str, list[float]]:
        """The norms of each network's last gradients that were applied, for a checkpoint."""
        return {name: list(seen) for name, seen in self.seen.items()}

    def limits(self) -> dict[str, float]:
        """Returns by network the norm beyond which an update is skipped; 0: none is."""
        limits = dict.fromkeys(self.plans, 0.0)
        for name, plan in self.plans.items():
            seen, times = self.seen[name], plan.optim.max_grad_skip
            if times and len(seen) >= ENOUGH:
                limits[name] = times * statistics.median(seen)
        return limits

    def note(
        self, step: int, updates: list[dict], batches: list[TrainBatch]
    ) -> dict[str, float]:
        """Returns how many of a step's updates each network skipped: its metrics.

        updates: their metrics, on the host; batches: theirs, of which the first that is
        skipped in a row is written to the run's folder.
        """
        counts = collections.Counter()
        if not (updates or self.streak):
            self.good = step - 1
        for number, (metrics, batch) in enumerate(zip(updates, batches, strict=True)):
            skipped = 0
            for name, seen in self.seen.items():
                own = [*prefixed(name, {"updates_skipped": 0, "grad_norm": 0})]
                if own[0] not in metrics:  # an update of the other network alone
                    continue
                counts[own[0]] += float(metrics[own[0]])
                if metrics[own[0]]:
                    skipped += 1
                    self.streaks[name] += 1
                else:
                    self.streaks[name], self.trained = 0, True
                    seen.append(float(metrics[own[1]]))
            # An update of the weights from before; a policy's row goes on beside one of the
            # value network alone.
            if number == 0 and not (skipped or self.streak):
                self.good = step - 1
            if skipped and self.streak == 1:
                self.reason = f"step {step}: {complaint(metrics)}"
                self.write(step, batch)
        return dict(counts)

    def write(self, step: int, batch: TrainBatch):
        """Writes a batch to skipped/step_N.npz, array by array."""
        arrays = sharding.fetch(batch)
        if jax.process_index() == 0:
            path = self.folder / "skipped" / f"step_{step:06d}.npz"
            fields = (field.name for field in dataclasses.fields(arrays))
            kept = {name: getattr(arrays, name) for name in fields}
            with exits.room(self.folder):
                path.parent.mkdir(exist_ok=True)
                np.savez(path, **{k: x for k, x in kept.items() if x is not None})

    def check(self):
        """Raises exits.CannotGoOn after too many updates that were skipped in a row."""
        if self.streak >= self.max_skips:
            raise self.stuck(
                f"{self.streak} updates in a row were skipped, {self.reason}"
            )

    def save(self, step: int, states: dict, meta: dict) -> int | None:
        """Saves a step and returns it; None while updates are skipped: nothing is saved.

        So the checkpoint from before stays, and the skipped steps are run again when the
        run is. Raises exits.CannotGoOn naming the first array that is not finite: what is
        saved was looked at.
        """
        for path, finite in jax.tree.leaves_with_path(
            sharding.fetch(all_finite(states))
        ):
            if not finite:
                raise self.stuck(f"step {step}: {dotted(path)} is not finite")
        if self.streak:
            return None
        self.checkpoints.save(step, states, meta)
        return step

    @contextlib.contextmanager
    def sampling(self, step: int):
        """Turns exits.NotFinite into exits.CannotGoOn, once the run has trained.

        Before, the weights are what the user gave.
        """
        try:
            yield
        except exits.NotFinite:
            if not self.trained:
                raise
            raise self.stuck(f"step {step}: no answer has finite numbers") from None

    def stuck(self, reason: str) -> exits.CannotGoOn:
        """Returns the error that ends the run, with the way back."""
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        good = [step for step in steps if step <= self.good]
        if good:
            last = (
                f"the last good checkpoint is {self.checkpoints.folder / str(good[-1])}"
            )
        elif steps:
            last = (
                f"no update of its weights shows {self.checkpoints.folder / str(steps[0])}, "
                "the earliest checkpoint, to be good: begin again in another run.folder"
            )
        else:
            last = "there is no checkpoint from before"
        return exits.CannotGoOn(f"{reason}; {last}")


@jax.jit
def all_finite(tree):
    """Returns whether every array is, by its place in the tree."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


def complaint(metrics: dict) -> str:
    """Returns what is wrong with an update, by its metrics."""
    bad = [name for name, x in metrics.items() if not math.isfinite(x)]
    if bad:
        return f"{', '.join(bad)} not finite"
    norms = [name for name in metrics if name.endswith("grad_norm")]
    sizes = ", ".join(f"{name} {metrics[name]:.3g}" for name in norms)
    return f"{sizes}, far above the median of those before"
