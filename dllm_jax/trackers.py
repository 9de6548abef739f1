"""Where metrics go beside metrics.jsonl: a row of TRACKERS for each service.

A tracker is made once, in the process that writes, and has these methods; whatever it
raises later costs the tracker and never the run (`Trackers`):

    __init__(run)         run: Run. Imports its package, which nothing else does
    log(step, values)     metrics by name, all of them finite
    close(stopped)        stopped: whether a signal ends the run, to whichever process

None of them needs a network: wandb and mlflow write into the run's folder, trackio to its
own database, unless their environment variables (WANDB_API_KEY, MLFLOW_TRACKING_URI,
TRACKIO_SPACE_ID) name a server.
"""

import atexit
import dataclasses
import hashlib
import importlib.util
import math
import os
import pathlib
import re
import socket
import time

from dllm_jax import exits
from dllm_jax.exits import warn


@dataclasses.dataclass(frozen=True)
class Run:
    """What a tracker is told of a run."""

    folder: pathlib.Path
    next_step: int  # what it knows of this step and later ones is not true any more
    config: dict  # flat
    begun: str  # when its first attempt started

    @property
    def name(self) -> str:
        """What people call it."""
        return self.folder.absolute().name

    @property
    def id(self) -> str:
        """The same whenever the run in this folder goes on.

        Another one of that name, once this is removed, is no part of it: what a service has
        of its steps would stay, or be mixed with the new ones.
        """
        told = f"{self.folder.absolute()} {self.begun}"
        return hashlib.sha1(told.encode(errors="replace")).hexdigest()[:12]


class TensorBoard:
    """Events in the run's folder, for `tensorboard --logdir`.

    Records as tensorboardX makes them, but not by its writer: the thread of that one ends
    where it finds no room, and whoever tells it more waits for ever.
    """

    package = "tensorboardX"

    def __init__(self, run: Run):
        from tensorboardX import record_writer, summary
        from tensorboardX.proto import event_pb2

        self.proto, self.scalar = event_pb2, summary.scalar
        folder = (run.folder / "tensorboard").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{after(folder)}.{socket.gethostname()}"
        self.file = record_writer.RecordWriter(str(folder / name))
        self.write(file_version="brain.Event:2")
        # What was told of this step and later ones is shown no more.
        start = self.proto.SessionLog(status=self.proto.SessionLog.START)
        self.write(step=run.next_step, session_log=start)

    def write(self, **fields) -> None:
        """Writes an event, which is on the disk when this returns."""
        event = self.proto.Event(wall_time=time.time(), **fields)
        self.file.write(event.SerializeToString())
        self.file.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes a step."""
        parts = [self.scalar(name, x).value[0] for name, x in values.items()]
        self.write(step=step, summary={"value": parts})

    def close(self, stopped: bool) -> None:
        """Closes the file."""
        self.file.close()


def after(folder: pathlib.Path) -> int:
    """Returns the second by which a file of events is named, later than all that are there.

    TensorBoard reads them in the order of their names, and a clock may be set back.
    """
    files = folder.glob("events.out.tfevents.*")
    seconds = [path.name.split(".")[3] for path in files]
    return max([int(time.time()), *(int(x) + 1 for x in seconds if x.isdecimal())])


class Wandb:
    """Weights & Biases; without a key offline, for `wandb sync`."""

    package = "wandb"

    def __init__(self, run: Run):
        import wandb

        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dllm-jax"),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            mode=os.environ.get("WANDB_MODE", mode),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes a step; those that the service has already stay as they were."""
        self.run.log(values, step=step)

    def close(self, stopped: bool) -> None:
        """Ends the run; the exit code of one that a signal stopped is the command's."""
        self.run.finish(exit_code=exits.STOPPED if stopped else 0)


class Trackio:
    """Trackio's local database, for `trackio show`."""

    package = "trackio"

    def __init__(self, run: Run):
        import trackio

        self.trackio = trackio
        name = f"{run.name}-{run.id}"  # the name is all that it knows a run by
        trackio.init(project="dllm-jax", name=name, config=run.config, resume="allow")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes a step."""
        self.trackio.log(values, step=step)

    def close(self, stopped: bool) -> None:
        """Ends the run."""
        self.trackio.finish()


class Mlflow:
    """MLflow; without a server a database in the run's folder, for `mlflow ui`.

    A run that is started again is a further one there, of the same name. One that ends
    before `close` has FAILED there, one that a signal stopped was KILLED, and so was, once
    the next begins, one that could say nothing any more.
    """

    package, tag = "mlflow", "dllm_jax.run"

    def __init__(self, run: Run):
        import mlflow

        self.mlflow = mlflow
        local = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", local))
        experiment = mlflow.set_experiment("dllm-jax")
        self.bury(experiment.experiment_id, run.id)
        mlflow.start_run(run_name=run.name, tags={self.tag: run.id})
        # Before MLflow's own, which was registered earlier, and says FINISHED of whatever is
        # not ended yet.
        atexit.register(self.end, "FAILED")
        mlflow.log_params({name: str(x)[:500] for name, x in run.config.items()})

    def bury(self, experiment: str, of: str) -> None:
        """Says of earlier attempts that are still told to run that they were killed.

        experiment: its id; of: Run.id.
        """
        client = self.mlflow.MlflowClient()
        found = f"attributes.status = 'RUNNING' and tags.`{self.tag}` = '{of}'"
        for earlier in client.search_runs([experiment], found):
            client.set_terminated(earlier.info.run_id, "KILLED")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes a step; MLflow takes few signs in a name."""
        named = {re.sub(r"[^\w./ -]", "_", name): x for name, x in values.items()}
        self.mlflow.log_metrics(named, step=step)

    def close(self, stopped: bool) -> None:
        """Ends the run."""
        self.end("KILLED" if stopped else "FINISHED")

    def end(self, status: str) -> None:
        """Ends the run, if that is not done, with a status, or as one that was stopped."""
        self.mlflow.end_run("KILLED" if exits.received else status)


TRACKERS = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def named(text: str) -> list[str]:
    """Returns the names in a list with commas.

    Raises ValueError for one that is not in TRACKERS, and where its package is missing.
    """
    told = [name.strip() for name in text.split(",")]
    names = list(dict.fromkeys(filter(None, told)))
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise ValueError(f"run.trackers={text!r}: {name!r} is none of {known}")
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"run.trackers={text!r}: {name} is not installed: pip install {package}"
            )
    return names


class Trackers:
    """Several trackers as one; one that fails is left out from then on, which is said."""

    def __init__(self, names: list[str], run: Run):
        """names: of `named`."""
        self.live = {}
        for name in names:
            self.tried(
                name, lambda name=name: self.live.update({name: TRACKERS[name](run)})
            )

    def tried(self, name: str, call) -> None:
        """Calls; where it raises, the tracker is left out."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 (a service, or its client, may raise anything)
            self.live.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            warn(f"run.trackers: {name} is left out from here on: {reason[:300]}")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Tells all of them a step's metrics, but for numbers that are not finite."""
        finite = {name: x for name, x in values.items() if math.isfinite(x)}
        for name, tracker in list(self.live.items()):
            self.tried(name, lambda tracker=tracker: tracker.log(step, finite))

    def close(self, stopped: bool = False) -> None:
        """Closes all of them. stopped: whether a signal ends the run."""
        for name, tracker in list(self.live.items()):
            self.tried(name, lambda tracker=tracker: tracker.close(stopped))
