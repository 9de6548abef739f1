"""Where the batches of a step come from: answers of the policy, examples, or pairs.

A row of SOURCES is a class, a method of training. A fourth method is a row with these
members, and the loop in train.py knows no others:

    plans(settings)     static: the networks it trains, name -> learner.Plan
    Source(settings, tools)
                        reads its data, and says what it leaves out; raises ValueError for
                        files and records that it refuses
    steps               how many steps its run has
    taken_per_step      items of its data that a step uses up: a checkpoint remembers how
                        many are gone, `taken`, and that is its place in the data
    updates             the most batches of a step, an optimizer update each
    samples             whether a step samples answers
    reference           whether the policy of the start is scored, too
    objective           the ObjectiveConfig of the update
    blank()             the shapes, on the mesh, of a TrainBatch: the same for all
    batches(step, taken, weights, score)
                        returns StepBatches, or None where a signal came meanwhile.
                        weights: networks.Weights; score: learner.score, jitted

A step is a function of (settings, step, taken, weights) alone, so that a resumed run goes
on as if it had not stopped. The same in every process.
"""

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
from dllm_jax.models.vision.prompts import Prompt, Reader, pictures_of
from dllm_jax.rl import batches, bounds, learner, networks, noise, rollout, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RLConfig,
)
from dllm_jax.rl.networks import Weights
from dllm_jax.rl.rewards import Grader, process
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

    @property
    def layout(self) -> layouts.Layout:
        """How noised trajectories are shown to the model."""
        return layouts.of(self.model, self.sampler, self.noise, self.objective)


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
    reader: Reader | None = None  # of a model that looks at images
    eyes: Eyes | None = None  # what looks, once there are weights
    # Of a Trace, the pictures that its answers are; None: they are texts.
    pictures: Callable | None = None

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
            decode=self.pictures or functools.partial(answers.decode, tok=self.tok),
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
    table: Table | None = None  # of the images that the batches show

    def rates(self, seconds: dict[str, float]) -> dict[str, float]:
        """Returns the sampled tokens per second of each phase; {} without sampling.

        seconds: by phase. Where there was nothing to learn, sampling and grading count.
        """
        if self.sampled is None:
            return {}
        phases = tuple(seconds) if self.batches else ("rollout", "reward")
        return {f"tokens_per_second/{p}": self.sampled / seconds[p] for p in phases}


class RL:
    """Reinforcement learning: groups of answers to problems, graded and weighed."""

    samples = True

    @staticmethod
    def plans(settings: Settings) -> dict[str, learner.Plan]:
        """Returns the Plans of the policy and, unless it is a head, of a value network."""
        plans = networks.plans(
            settings.objective.loss,
            settings.rl.value,
            settings.policy_optim,
            settings.value_optim,
            updates=settings.rl.steps * settings.rl.updates,
        )
        if exact := settings.layout.selection:
            plans["policy"] = dataclasses.replace(plans["policy"], rule=exact.rule)
        return plans

    def __init__(self, settings: Settings, tools: Tools):
        rl, sampler = settings.rl, settings.sampler
        self.settings, self.tools = settings, tools
        self.steps, self.taken_per_step, self.updates = rl.steps, rl.prompts, rl.updates
        self.objective = settings.objective
        self.reference = bool(settings.objective.reference_beta)
        self.problems = data.problems(
            settings.data.train,
            tools.tok,
            settings.data,
            tools.grader,
            tools.reader,
        )
        pictures = [pictures_of(problem.prompt_ids) for problem in self.problems]
        check_tiles(pictures, rl.prompts, settings, tools)
        rollout.report_long(
            self.problems, sampler.max_prompt, tools.say, settings.data.train
        )
        if idle := networks.idle_keys(rl.value, settings.value_optim):
            tools.say(
                f"value_optim.{', value_optim.'.join(idle)}: without effect, as with "
                "rl.value='head' the value head has the policy's optimizer, "
                "policy_optim, and only value_optim.lr is its own"
            )
        if rl.value == "own":
            share = networks.value_share(
                settings.model, settings.layout.seats(settings.batch), settings.batch
            )
            tools.say(
                f"rl.value='own': of the FLOPs of an update, and of scoring, the value "
                f"network takes {share:.0%}; 'head', on the policy's, and 'none' take none"
            )
        self.pack = packer(
            settings,
            tools.say,
            trajectories=-(-rl.prompts * rl.group // rl.updates),
            longest=sampler.max_new,
            most_steps=sampler.most_steps,
        )

    def blank(self) -> TrainBatch:
        """Returns the shapes of every batch."""
        fields = batches.asked(self.settings.objective)
        fields += ("ahead_BU",) if self.settings.layout.selection else ()
        return blank(self.settings, self.tools, self.pack, fields)

    def batches(self, step, taken, weights: Weights, score) -> StepBatches | None:
        """Samples, grades, filters and weighs; leaves some answers in the run's folder."""
        settings, tools = self.settings, self.tools
        rng = np.random.default_rng([settings.seed, step])
        problems = self.asked(taken)
        rollouts = self.rollouts(step, problems, weights)
        if rollouts is None:
            return None
        metrics = rollout.summary(rollouts)
        if tools.grader.steps is not None:
            with tools.timer("reward"):
                keep_n = batches.teaching(rollouts, settings.rl)
                rollouts = rollout.split(rollouts, problems, tools.grader, keep_n)
            metrics |= process.summary(rollouts.chunks)
        if tools.stop():
            return None
        told, table = [], tools.look([x.prompt_ids for x in problems])
        with tools.timer("score"):
            learned, complete = batches.of_rollouts(
                rollouts,
                rng,
                rl=settings.rl,
                noised=noise.noised(
                    rollouts.trace, settings.noise, settings.layout, rng
                ),
                as_sampled=settings.noise.kind == "trace"
                and settings.layout.guidance == settings.sampler.guidance,
                objective=settings.objective,
                params=seeing(weights, table).scoring(),
                pack=self.pack,
                score=score,
                mesh=tools.mesh,
                note=told.extend,
            )
        if told and settings.rl.value == "none":
            told[-1] = None  # there are no values to look at
        if tools.samples:
            rollout.write(tools.folder, step, rollouts, problems, tools.samples, *told)
        sampled = int(rollouts.trace.len_B.sum())
        if not complete:
            reason = self.nothing_learned(sampled)
            tools.say(f"step {step}: {reason}, nothing to learn; the step is skipped")
        return StepBatches(metrics | learned, complete, sampled, table)

    def asked(self, taken: int) -> list[data.Problem]:
        """Returns the problems of a step, each as often as its group has rollouts."""
        chosen = in_order(self.settings, len(self.problems), taken, self.taken_per_step)
        group = range(self.settings.rl.group)
        return [self.problems[i] for i in chosen for _ in group]

    def rollouts(self, step, problems, weights: Weights) -> Rollouts | None:
        """Returns the policy's graded answers, or None where a signal came.

        They depend on (seed, step, problems, weights) alone: other hosts, or a thread that
        is a step ahead, may make them.
        """
        key = jax.random.fold_in(jax.random.key(self.settings.seed), step)
        rl = self.settings.rl
        with self.tools.timer("rollout"):
            return self.tools.answered(
                weights.acting(),
                problems,
                np.repeat(np.arange(rl.prompts), rl.group),
                key,
                temperature=self.settings.sampler.temperature,
                timer=self.tools.timer,
                stop=self.tools.stop,
            )

    def nothing_learned(self, sampled: int) -> str:
        """Returns why a step has no batches; sampled: its tokens."""
        rl = self.settings.rl
        if not sampled:
            return "all its prompts are longer than sampler.max_prompt"
        if rl.filter == "solvable":
            return f"no group is solvable in [{rl.min_solved}, {rl.max_solved}]"
        return f"no group is {rl.filter}"


class SFT:
    """Supervised fine-tuning: prompts with the answers to learn."""

    samples, reference, updates = False, False, 1

    @staticmethod
    def plans(settings: Settings) -> dict[str, learner.Plan]:
        """Returns the policy's Plan."""
        return plans_of_examples(settings, "nll")

    def __init__(self, settings: Settings, tools: Tools):
        self.settings, self.tools = settings, tools
        self.steps, self.taken_per_step = settings.sft_steps, settings.sft_examples
        self.objective = settings.objective
        self.examples = read_examples(settings, tools, pairs=False)
        self.pack = packer(
            settings,
            tools.say,
            trajectories=settings.sft_examples,
            longest=int(self.examples.len_B.max()),
            most_steps=most_steps(self.examples, settings),
        )

    def blank(self) -> TrainBatch:
        """Returns the shapes of every batch."""
        return blank(self.settings, self.tools, self.pack, ())

    def batches(self, step, taken, weights: Weights, score) -> StepBatches:
        """Draws new noise for the examples that come next."""
        size = len(self.examples.len_B)
        chosen = in_order(self.settings, size, taken, self.taken_per_step)
        return noised_batch(self, step, chosen)


class DPO:
    """Direct preference optimization on evidence bounds (VRPO): pairs of answers.

    A pair is two neighbouring rows of the examples: the chosen answer, then the rejected.
    """

    samples, reference, updates = False, True, 1

    @staticmethod
    def plans(settings: Settings) -> dict[str, learner.Plan]:
        """Returns the policy's Plan."""
        return plans_of_examples(settings, "dpo")

    def __init__(self, settings: Settings, tools: Tools):
        self.settings, self.tools = settings, tools
        self.steps, self.taken_per_step = settings.sft_steps, settings.sft_examples
        # The reference is in the factors of the gradient, not in its objective.
        self.objective = dataclasses.replace(settings.objective, reference_beta=0.0)
        self.examples = read_examples(settings, tools, pairs=True)
        self.pack = packer(
            settings,
            tools.say,
            trajectories=2 * settings.sft_examples,
            longest=int(self.examples.len_B.max()),
            most_steps=most_steps(self.examples, settings),
        )

    def blank(self) -> TrainBatch:
        """Returns the shapes of every batch."""
        return blank(self.settings, self.tools, self.pack, batches.PAIR_FIELDS)

    def batches(self, step, taken, weights: Weights, score) -> StepBatches:
        """Draws new noise for the pairs that come next; policy and reference score it."""
        size = len(self.examples.len_B) // 2
        chosen = in_order(self.settings, size, taken, self.taken_per_step)
        rows = batches.rows_of(chosen, 2)
        return noised_batch(self, step, rows, weights, score, self.compare)

    def compare(self, outputs, share_nT, len_n):
        """Returns bounds.preference_factors of what policy and reference say."""
        return bounds.preference_factors(
            outputs["policy"]["logp"],
            outputs["reference"]["logp"],
            share_nT,
            len_n,
            draws=self.settings.noise.draws,
            beta=self.settings.objective.reference_beta,
        )


class Ranking(DPO):
    """A reward model: the same pairs, of which its value head tells the better answer."""

    reference = False

    @staticmethod
    def plans(settings: Settings) -> dict[str, learner.Plan]:
        """Returns the Plan of the network, which has a value head alone."""
        return plans_of_examples(settings, "ranking")

    def __init__(self, settings: Settings, tools: Tools):
        # An answer's end is where it is judged: nothing is learned after it.
        pairs = dataclasses.replace(settings.data, post_num=0)
        super().__init__(dataclasses.replace(settings, data=pairs), tools)

    def compare(self, outputs, share_nT, len_n):
        """Returns bounds.ranking_factors of the scores."""
        return bounds.ranking_factors(outputs["policy"]["value"], share_nT)


SOURCES = {"rl": RL, "sft": SFT, "dpo": DPO, "reward": Ranking}


# ---- What they share -----------------------------------------------------------------


def plans_of_examples(settings: Settings, term: str) -> dict[str, learner.Plan]:
    """Returns the Plan of a policy that learns from examples by one objective."""
    return networks.plans(
        term,
        "none",
        settings.policy_optim,
        settings.value_optim,
        updates=settings.sft_steps,
    )


def read_examples(settings: Settings, tools: Tools, *, pairs: bool) -> data.Examples:
    """Reads data.train, and says how much of it is left out."""
    examples, dropped = data.examples(
        settings.data.train,
        tools.tok,
        settings.data,
        end=(*settings.sampler.stop_ids, settings.model.eos_id)[0],
        pad=settings.model.pad_id,
        vocab=settings.model.vocab,
        mask=settings.model.mask_id,
        block=settings.sampler.block,
        slots=settings.sampler.slots,
        pairs=pairs,
        traced=settings.noise.kind == "trace",
        reader=tools.reader,
        drawn=settings.model.drawn,
        tail=settings.sampler.tail,
    )
    count = settings.sft_examples * (2 if pairs else 1)
    check_tiles(examples.pictures, count, settings, tools)
    tools.say(
        f"{len(examples.len_B)} examples, {dropped} empty or too long and left out"
    )
    return examples


def check_tiles(pictures, count: int, settings: Settings, tools: Tools) -> None:
    """Raises ValueError where the images of `count` prompts may not fit into a table.

    pictures: those of each prompt.
    """
    if tools.reader is None:
        return
    tiles = [sum(picture.tiles for picture in set(own)) for own in pictures]
    most = sum(sorted(tiles)[-count:])
    if most > settings.model.tiles:
        raise ValueError(
            f"model.tiles={settings.model.tiles}: the images of {count} prompts, a step's, "
            f"may be cut into {most} tiles; set it to {most}"
        )


def seeing(weights: Weights, table: Table | None) -> Weights:
    """Returns weights that see the images of a table, where there is one."""
    return weights if table is None else weights.seeing(table.seen)


def placed(examples: data.Examples, row_n, table: Table | None, vocab: int):
    """Returns the examples of these rows, with their images as rows of the table."""
    some = batches.take(examples, row_n).replace(pictures=())
    if table is None or not examples.pictures:
        return some
    tokens_BT = some.tokens_BT.copy()
    for i, (row, count) in enumerate(zip(row_n, some.prompt_len_B, strict=True)):
        prompt = Prompt(tokens_BT[i, :count].tolist(), examples.pictures[row])
        tokens_BT[i, :count] = table.placed(prompt, vocab)
    return some.replace(tokens_BT=tokens_BT)


def most_steps(examples: data.Examples, settings: Settings) -> int:
    """Returns the most steps that an example has; where it has no trace, its tokens."""
    if settings.noise.kind != "trace":
        return int(examples.len_B.max())
    return max(np.unique(step_T[step_T > 0]).size for step_T in examples.step_BT)


def in_order(settings: Settings, size: int, taken: int, count: int) -> np.ndarray:
    """Returns the indices of the `count` items that come after `taken` others."""
    cfg = settings.data
    return data.order(size, taken, count, seed=cfg.seed, shuffle=cfg.shuffle)


def packer(
    settings: Settings, say, *, trajectories: int, longest: int, most_steps: int
):
    """Returns views.pack, bound to the microbatches that always suffice for an update.

    say: is told where not even one of them can be filled. trajectories: the most of an
    update; longest: tokens of the longest answer; most_steps: of an answer, as its trace
    has them.
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


def noised_batch(
    source,
    step: int,
    row_n,
    weights: Weights | None = None,
    score=None,
    compare=None,
) -> StepBatches:
    """Returns the batch of a source's examples with noise of this step's own.

    row_n: which of its examples. weights, score: the networks, and learner.score, where the
    examples are pairs; compare: how these are told apart. See batches.of_examples.
    """
    settings = source.settings
    pictures = source.examples.pictures
    shown = [Prompt([], pictures[row]) for row in row_n] if pictures else []
    table = source.tools.look(shown)
    examples = placed(source.examples, row_n, table, settings.model.vocab)
    if weights is not None:
        score = functools.partial(score, seeing(weights, table).scoring())
    rng = np.random.default_rng([settings.seed, step])
    metrics, complete = batches.of_examples(
        examples,
        noised=noise.noised(examples, settings.noise, settings.layout, rng),
        copies=settings.noise.copies,
        pack=source.pack,
        mesh=source.tools.mesh,
        score=score,
        compare=compare,
    )
    return StepBatches(metrics, complete, table=table)
