"""Where the batches of a step come from: answers of the policy, examples, or pairs.

A row of SOURCES is a class, a method of training. A fourth method is a row with these
members, and the loop in train.py knows no others:

    plans(settings)     static: the networks it trains, name -> learner.Plan
    Source(settings, tools)
                        reads its data, and says what it leaves out; raises ValueError for
                        files and records that it refuses
    steps               how many steps its run has
    taken_per_step      items of its data that a step uses up, unless its StepBatches say
                        otherwise: a checkpoint remembers how many are gone, `taken`, and
                        that is its place in the data
    memory              what it has learned from earlier steps, as JSON has it: it goes into
                        checkpoints, and `recall(memory)` puts it back
    updates             the most batches of a step, an optimizer update each
    samples             whether a step samples answers
    reference           whether the policy of the start is scored, too
    passes(step, made)  returns (names of the networks that it trains, batch) of each update
                        of a step's StepBatches: all networks, or a value network alone
    far(metrics)        whether, by an update's metrics, the step's others are left out
    objective           the ObjectiveConfig of the update
    blank()             the shapes, on the mesh, of a TrainBatch: the same for all
    batches(step, taken, weights, score)
                        returns StepBatches, or None where a signal came meanwhile.
                        weights: networks.Weights; score: learner.score, jitted

A step is a function of (settings, step, taken, memory, weights) alone, so that a resumed run goes
on as if it had not stopped. The same in every process.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from dllm_jax import data, sharding
from dllm_jax.metrics import Timer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.look import Eyes, Table
from dllm_jax.models.vision.prompts import Prompt, Reader, pictures_of
from dllm_jax.rl import (
    batches,
    bounds,
    learner,
    networks,
    noise,
    ridge,
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
from dllm_jax.rl.curriculum import Curriculum
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
    heldout_answers: int = 1  # to each of them

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
            tok=self.tok,
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


class RL:
    """Reinforcement learning: groups of answers to problems, graded and weighed."""

    samples = True

    @staticmethod
    def plans(settings: Settings) -> dict[str, learner.Plan]:
        """Returns the Plans of the policy and, unless it is a head, of a value network."""
        rl = settings.rl
        updates = rl.most_updates * rl.epochs
        plans = networks.plans(
            settings.objective.loss,
            rl.value,
            settings.policy_optim,
            settings.value_optim,
            updates=(rl.steps - rl.value_warmup) * updates,
        )
        if "value" in plans:
            updates *= rl.steps * rl.value_epochs
            updates *= 1 + rl.value_all  # at most
            plans["value"] = dataclasses.replace(plans["value"], updates=updates)
        if exact := settings.layout.selection:
            plans["policy"] = dataclasses.replace(plans["policy"], rule=exact.rule)
        return plans

    def __init__(self, settings: Settings, tools: Tools):
        rl, sampler = settings.rl, settings.sampler
        self.settings, self.tools = settings, tools
        self.steps, self.taken_per_step = rl.steps, rl.prompts
        self.updates = rl.most_updates
        self.objective = settings.objective
        self.reference = bool(settings.objective.reference_beta)
        if rl.value_path:
            networks.check_value(rl.value_path, settings.model)
        self.weights, self.problems, self.sizes = read_problems(settings, tools)
        self.recall({})
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
                f"network takes {share:.0%}; 'head', on the policy's, 'trace', a regression "
                "on the host, and 'none' take none"
            )
        if rl.value == "trace":
            tools.say(
                "rl.value='trace': a regression on the host judges the answers by what the "
                "sampler recorded; no network, and none of an update's FLOPs"
            )
        self.pack = packer(
            settings,
            tools.say,
            trajectories=rl.largest_update,
            longest=sampler.max_new,
            most_steps=sampler.max_new,
        )

    def blank(self) -> TrainBatch:
        """Returns the shapes of every batch."""
        fields = batches.asked(self.settings.objective)
        fields += ("ahead_BU",) if self.settings.layout.selection else ()
        shapes = blank(self.settings, self.tools, self.pack, fields)
        return self.anchored(shapes, 1, sharding.shapes_of_rows)

    def anchored(self, batch: TrainBatch, step: int, put=sharding.place_rows):
        """Returns a batch with the step's objective.reference_beta, if it has a schedule.

        put: what puts an array on the mesh.
        """
        cfg = self.settings.objective
        if cfg.reference_beta_final < 0:
            return batch
        done = (step - 1) / max(self.steps - 1, 1)
        beta = cfg.reference_beta + done * (
            cfg.reference_beta_final - cfg.reference_beta
        )
        return batch.replace(reference_beta=put(np.float32(beta), self.tools.mesh))

    def passes(self, step: int, made: StepBatches) -> list[tuple]:
        """Returns (the networks that an update trains, its batch), in order."""
        rl, every = self.settings.rl, tuple(self.plans(self.settings))
        alone = [(("value",), batch) for batch in (*made.batches, *made.dropped)]
        if step <= rl.value_warmup:
            return alone * rl.value_epochs
        first = [(every, batch) for batch in made.batches]
        first += alone[len(made.batches) :]
        return (first + alone * (rl.value_epochs - 1)) * rl.epochs

    def far(self, metrics: dict) -> bool:
        """Returns whether the policy is beyond rl.target_kl of the one that sampled."""
        target = self.settings.rl.target_kl
        if not target or "kl" not in metrics:
            return False
        return float(sharding.fetch(metrics["kl"])) > target

    def batches(self, step, taken, weights: Weights, score) -> StepBatches | None:
        """Samples, grades, filters and weighs; leaves some answers in the run's folder."""
        settings, tools = self.settings, self.tools
        rng = np.random.default_rng([settings.seed, step])
        found = self.asked(step, taken, weights)
        if found is None or tools.stop():
            return None
        problems, rollouts, used = found
        metrics = rollout.summary(rollouts)
        if settings.rl.max_prompts:
            metrics["prompts_asked"] = len(problems) // settings.rl.group
        if tools.grader.steps is not None:
            with tools.timer("reward"):
                keep_n = batches.teaching(rollouts, settings.rl)
                rollouts = rollout.split(rollouts, problems, tools.grader, keep_n)
            metrics |= process.summary(rollouts.chunks)
        told, dropped = [], []
        table = tools.look([x.prompt_ids for x in problems])
        with tools.timer("score"):
            how = {
                "rl": settings.rl,
                "noised": noise.noised(
                    rollouts.trace, settings.noise, settings.layout, rng
                ),
                "params": seeing(weights, table).scoring(),
                "pack": self.pack,
                "score": score,
                "mesh": tools.mesh,
                "longest": settings.sampler.max_new,
                "objective": settings.objective,
            }
            learned, complete = batches.of_rollouts(
                judged(rollouts, settings.rl),
                rng,
                as_sampled=settings.noise.kind == "trace",
                note=told.extend,
                critic=self.critic,
                **how,
            )
            if settings.rl.value_all and complete:
                dropped = batches.of_dropped(judged(rollouts, settings.rl), rng, **how)
        if told and settings.rl.value == "none":
            told[-1] = None  # there are no values to look at
        if tools.samples:
            rollout.write(tools.folder, step, rollouts, problems, tools.samples, *told)
        sampled = int(rollouts.trace.len_B.sum())
        if not complete:
            self.say_skipped(step, sampled)
        complete = [self.anchored(batch, step) for batch in complete]
        dropped = tuple(self.anchored(batch, step) for batch in dropped)
        return StepBatches(metrics | learned, complete, sampled, used, dropped, table)

    @property
    def memory(self) -> dict:
        """What was learned from earlier steps: by the critic, and of problems."""
        made = {"problems": self.curriculum.memory} if self.curriculum else {}
        return made | ({"critic": self.critic.memory} if self.critic else {})

    def recall(self, memory: dict) -> None:
        """Puts back what `memory` was; {}: nothing is learned yet."""
        rl, settings = self.settings.rl, self.settings
        self.critic = self.curriculum = None
        if rl.value == "trace":
            self.critic = ridge.Ridge(settings.sampler.max_new, memory.get("critic"))
        if rl.curriculum or rl.rest_after:
            self.curriculum = Curriculum(rl, settings.seed, memory.get("problems"))

    def asked(self, step, taken, weights: Weights):
        """Returns (problems, Rollouts, items of the data used up); None: a signal came.

        A problem stands there as often as its group has rollouts. With rl.max_prompts it
        asks again, as many as the share that passed lets expect to suffice.
        """
        rl, used, wave = self.settings.rl, 0, 0
        problems, rollouts, wanted = [], None, rl.prompts
        while wanted:
            chosen, places = self.drawn(taken + used, wanted)
            asked = [self.problems[i] for i in chosen for _ in range(rl.group)]
            more = self.rollouts(step, asked, weights, wave)
            if more is None:
                return None
            if self.curriculum:
                for i, right_n in zip(
                    chosen, more.solved_n.reshape(-1, rl.group), strict=True
                ):
                    self.curriculum.note(i, right_n)
            rollouts = rollout.joined(rollouts, more)
            problems, used, wave = problems + asked, used + places, wave + 1
            keep_n = batches.teaching(judged(rollouts, rl), rl)
            wanted = refill(
                rl, len(problems) // rl.group, len(set(rollouts.group_n[keep_n]))
            )
        return problems, rollouts, used

    def drawn(self, taken: int, count: int) -> tuple[list[int], int]:
        """Returns (the problems that are asked next, places of the data they used up)."""

        def stream(start, count):
            return in_order(self.settings, self.sizes, start, count, self.weights)

        if not self.curriculum:
            return list(stream(taken, count)), count
        return self.curriculum.drawn(stream, taken, count, len(self.problems))

    def rollouts(self, step, problems, weights: Weights, wave=0) -> Rollouts | None:
        """Returns the policy's graded answers, or None where a signal came.

        They depend on (seed, step, wave, problems, weights) alone: other hosts, or a thread
        that is a step ahead, may make them. wave: how often the step has asked before.
        """
        key = jax.random.fold_in(jax.random.key(self.settings.seed), step)
        if wave:  # answer i of the first has the key of number i
            key = jax.random.fold_in(key, 2**30 + wave)
        rl = self.settings.rl
        with self.tools.timer("rollout"):
            return self.tools.answered(
                weights.acting(),
                problems,
                np.repeat(np.arange(len(problems) // rl.group), rl.group),
                key,
                temperature=self.settings.sampler.temperature,
                timer=self.tools.timer,
                stop=self.tools.stop,
            )

    def say_skipped(self, step: int, sampled: int):
        """Says why a step has no batches; sampled: its tokens."""
        rl = self.settings.rl
        if not sampled:
            reason = "all its prompts are longer than sampler.max_prompt"
        elif rl.filter == "solvable":
            reason = f"no group is solvable in [{rl.min_solved}, {rl.max_solved}]"
        else:
            reason = f"no group is {rl.filter}"
        self.tools.say(f"step {step}: {reason}, nothing to learn; the step is skipped")


class Forgetful:
    """What has nothing to remember but its place in the data, and one network to train."""

    @property
    def memory(self) -> dict:
        """What was learned from earlier steps: nothing."""
        return {}

    def passes(self, step: int, made: StepBatches) -> list[tuple]:
        """Returns (the networks that an update trains, its batch), in order."""
        return [(("policy",), batch) for batch in made.batches]

    def far(self, metrics: dict) -> bool:
        """Returns whether a step's other updates are left out: there are none."""
        return False

    def recall(self, memory: dict) -> None:
        """Puts back what `memory` was: nothing."""


class SFT(Forgetful):
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
        self.examples, self.sizes, self.weights = read_examples(
            settings, tools, pairs=False
        )
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
        chosen = in_order(
            self.settings, self.sizes, taken, self.taken_per_step, self.weights
        )
        return noised_batch(self, step, chosen)


class DPO(Forgetful):
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
        self.examples, sizes, self.weights = read_examples(settings, tools, pairs=True)
        self.sizes = [size // 2 for size in sizes]
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
        chosen = in_order(
            self.settings, self.sizes, taken, self.taken_per_step, self.weights
        )
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


# ---- What RL's steps are made of -----------------------------------------------------


def read_problems(settings: Settings, tools: Tools):
    """Returns (weights of the files of data.train, their problems, how many each has).

    Says which prompts are too long.
    """
    weights = data.mixture(settings.data.train)
    files = []
    for path in weights:
        files.append(
            data.problems(path, tools.tok, settings.data, tools.grader, tools.reader)
        )
        rollout.report_long(files[-1], settings.sampler.max_prompt, tools.say, path)
    problems = [problem for file in files for problem in file]
    pictures = [pictures_of(problem.prompt_ids) for problem in problems]
    most = settings.rl.max_prompts or settings.rl.prompts
    check_tiles(pictures, most, settings, tools)
    return list(weights.values()), problems, [len(file) for file in files]


def judged(rollouts: Rollouts, rl: RLConfig) -> Rollouts:
    """Returns the rollouts of which rl.truncated="mask" counts the cut ones as not judged."""
    if rl.truncated != "mask":
        return rollouts
    late_n = rollouts.late_n | ~rollouts.trace.stopped_B
    return dataclasses.replace(rollouts, late_n=late_n)


def refill(rl: RLConfig, asked: int, passed: int) -> int:
    """Returns how many further prompts a step asks; asked, passed: prompts so far."""
    missing, left = rl.prompts - passed, rl.max_prompts - asked
    if missing <= 0 or left <= 0:
        return 0
    return min(-(-missing * asked // max(passed, 1)), left)


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


def read_examples(settings: Settings, tools: Tools, *, pairs: bool):
    """Returns (examples of data.train, how many each file has, the files' weights).

    Says how many are left out.
    """
    weights, files, left_out = data.mixture(settings.data.train), [], 0
    for path in weights:
        examples, dropped = data.examples(
            path,
            tools.tok,
            settings.data,
            end=settings.sampler.stop_ids[0],
            pad=settings.model.pad_id,
            vocab=settings.model.vocab,
            mask=settings.model.mask_id,
            block=settings.sampler.block,
            slots=settings.sampler.slots,
            pairs=pairs,
            traced=settings.noise.kind == "trace",
            reader=tools.reader,
        )
        files.append(examples)
        left_out += dropped
    sizes = [len(file.len_B) for file in files]
    count = settings.sft_examples * (2 if pairs else 1)
    examples = joined(files)
    check_tiles(examples.pictures, count, settings, tools)
    tools.say(f"{sum(sizes)} examples, {left_out} empty or too long and left out")
    return examples, sizes, list(weights.values())


def joined(files: list[data.Examples]) -> data.Examples:
    """Returns the examples of several files as those of one."""
    pictures = [own for x in files for own in x.pictures or ((),) * len(x.len_B)]
    plain = [file.replace(pictures=()) for file in files]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *plain)
    return whole.replace(pictures=tuple(pictures) if any(pictures) else ())


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


def in_order(
    settings: Settings, sizes: list[int], taken: int, count: int, weights: list[float]
) -> np.ndarray:
    """Returns the indices of the `count` items that come after `taken` others.

    sizes, weights: of the files of data.train.
    """
    cfg = settings.data
    return data.mixed(sizes, weights, taken, count, seed=cfg.seed, shuffle=cfg.shuffle)


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
