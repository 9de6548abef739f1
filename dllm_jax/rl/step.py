"""What a source of a step's batches is given, what it gives, and what all of them need."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from dllm_jax import data
from dllm_jax.metrics import Timer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.look import Eyes, Table
from dllm_jax.models.vision.prompts import Reader
from dllm_jax.rl import (
    batches,
    noise,
    rollout,
    views,
)
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RLConfig,
)
from dllm_jax.rl.networks import Weights
from dllm_jax.rl.rewards import Grader
from dllm_jax.rl.rollout import Rollouts
from dllm_jax.rl.views import TrainBatch
from dllm_jax.sampling import answers, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.looking import Looking


@dataclasses.dataclass(frozen=True)
class Settings:
    """The parts of a run's configuration that sources read, all complete."""

    seed: int
    data: data.DataConfig
    sampler: SamplerConfig
    noise: NoiseConfig
    objective: ObjectiveConfig
    rl: RLConfig
    sft_steps: int
    sft_examples: int  # of one update; pairs of them for DPO
    batch: BatchConfig
    policy_optim: OptimConfig
    value_optim: OptimConfig
    heldout_problems: int  # of data.heldout, from its start; 0: all
    heldout_temperature: float
    model: ModelConfig
    heldout_answers: int = 1  # to each of them
    samplers: dict[str, SamplerConfig] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> layouts.Layout:
        """How noised trajectories are shown to the model."""
        return layouts.of(self.model, self.sampler, self.noise, self.objective)

    @property
    def as_sampled(self) -> bool:
        """Whether tokens are scored in the context, and by the guidance, they had."""
        shown = self.layout
        return (
            self.noise.as_traced
            and shown.guidance == self.sampler.guidance
            and self.noise.block in (0, self.sampler.block)
        )


@dataclasses.dataclass
class Tools:
    """What a run lends its source."""

    mesh: jax.sharding.Mesh
    tok: object  # the checkpoint's tokenizer
    grader: Grader
    truncated_wrong: bool  # an answer cut at its limit earns nothing
    timer: Timer
    # Whether a signal came; every process asks it equally often.
    stop: Callable[[], bool]
    say: Callable[[str], None]
    folder: pathlib.Path
    samples: int  # rollouts of a step to write there
    # Where it samples is decided, and compiled, when all that it asks has been read.
    answerer: answers.Batches | answers.Engine | Looking | None = None
    others: dict = dataclasses.field(default_factory=dict)  # of Settings.samplers
    reader: Reader | None = None  # of a model that looks at images
    eyes: Eyes | None = None  # what looks, once there are weights
    # Of a Trace, its answers as graders take them; None: texts, decoded by `tok`.
    decode: Callable | None = None

    def look(self, prompts) -> Table | None:
        """Returns the table of a step's images; None for a model that does not look."""
        return self.eyes.look(prompts) if self.eyes else None

    def answered(
        self, params, problems, group_n, key, *, temperature: float, timer, stop=None
    ) -> Rollouts | None:
        """Returns rollout.answered with the run's sampler, tokenizer and grader."""
        return rollout.answered(
            self.answerer,
            params,
            problems,
            group_n,
            key,
            temperature=temperature,
            decode=self.decode or functools.partial(answers.decode, tok=self.tok),
            timer=timer,
            grader=self.grader,
            truncated_wrong=self.truncated_wrong,
            stop=stop,
        )


class StepBatches(NamedTuple):
    """What a step trains on."""

    metrics: dict[str, float]
    batches: list[TrainBatch]  # on the mesh, one for each update; []: nothing to learn
    sampled: int | None = None  # tokens; None where a step samples nothing
    taken: int | None = None  # items of the data; None: the source's taken_per_step
    dropped: tuple[TrainBatch, ...] = ()  # of which a value network alone learns
    table: Table | None = None  # of the images that the batches show

    def rates(self, seconds: dict[str, float]) -> dict[str, float]:
        """Returns the sampled tokens per second of each phase; {} without sampling.

        seconds: by phase. Where there was nothing to learn, sampling and grading count.
        """
        if self.sampled is None:
            return {}
        phases = tuple(seconds) if self.batches else ("rollout", "reward")
        return {f"tokens_per_second/{p}": self.sampled / seconds[p] for p in phases}


def in_order(
    settings: Settings, sizes: list[int], taken: int, count: int, weights: list[float]
) -> np.ndarray:
    """Returns the indices of the `count` items that come after `taken` others.

    sizes, weights: of the files of data.train.
    """
    cfg = settings.data
    return data.mixed(sizes, weights, taken, count, seed=cfg.seed, shuffle=cfg.shuffle)


def packer(
    settings: Settings,
    say,
    *,
    trajectories: int,
    longest: int,
    most_steps: int,
    record: bool = False,
):
    """Returns views.pack, bound to the microbatches that always suffice for an update.

    say: is told where not even one of them can be filled. trajectories: the most of an
    update; longest: tokens of the longest answer; most_steps: of an answer, as its trace
    has them; record: see views.pack.
    """
    layout, cfg = settings.layout, settings.batch
    rows = layouts.most_rows(
        trajectories=trajectories,
        slots=settings.sampler.slots,
        answer=longest,
        rounds=noise.rounds(settings.noise, layout, longest, most_steps),
        copies=settings.noise.copies,
        layout=layout,
        cfg=cfg,
    )
    if rows < cfg.rows:
        say(
            f"an update's {trajectories} answers fill at most {rows} of the {cfg.rows} "
            "rows of a microbatch: the others are padding; lower batch.rows or "
            "batch.tokens, or the number of updates, or raise mesh.model"
        )
    return functools.partial(
        views.pack,
        mask_id=settings.model.mask_id,
        layout=layout,
        cfg=cfg,
        most=-(-rows // cfg.rows),
        aggregate=settings.objective.aggregate,
        copies=settings.noise.copies,
        draws=settings.noise.draws,
        record=record,
    )


def blank(settings: Settings, tools: Tools, pack, fields: tuple[str, ...]):
    """Returns the shapes of a TrainBatch with these optional fields."""
    return batches.blank(
        trace=state.stacked([state.no_answer(settings.sampler.slots)]),
        cfg=settings.noise,
        layout=settings.layout,
        pack=pack,
        mesh=tools.mesh,
        fields=fields,
    )


def check_tiles(pictures, count: int, settings: Settings, tools: Tools) -> None:
    """Raises ValueError where the images of `count` prompts may not fit into a table.

    pictures: those of each prompt.
    """
    if tools.reader is None:
        return
    # A table has an image once: who looks at the same, as both of a pair, adds nothing.
    distinct = {frozenset(own) for own in pictures}
    tiles = [sum(picture.tiles for picture in own) for own in distinct]
    most = sum(sorted(tiles)[-count:])
    if most > settings.model.tiles:
        raise ValueError(
            f"model.tiles={settings.model.tiles}: the images of {count} prompts, a step's, "
            f"may be cut into {most} tiles; set it to {most}"
        )


def seeing(weights: Weights, table: Table | None) -> Weights:
    """Returns weights that see the images of a table, where there is one."""
    return weights if table is None else weights.seeing(table.seen)
