"""Where the batches of a step come from: answers of the policy, examples, or pairs.

A row of SOURCES is a class, a method of training. A further method is a row with these
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

import jax
import numpy as np

from dllm_jax import data, sharding
from dllm_jax.models.vision.look import Table
from dllm_jax.models.vision.prompts import pictures_of
from dllm_jax.rl import (
    batches,
    learner,
    networks,
    noise,
    ridge,
    rollout,
)
from dllm_jax.rl.config import RLConfig
from dllm_jax.rl.curriculum import Curriculum
from dllm_jax.rl.examples import DPO, SFT, Ranking
from dllm_jax.rl.networks import Weights
from dllm_jax.rl.rewards import process
from dllm_jax.rl.rollout import Rollouts
from dllm_jax.rl.step import (
    Settings,
    StepBatches,
    Tools,
    blank,
    check_tiles,
    in_order,
    packer,
    seeing,
)
from dllm_jax.rl.views import TrainBatch


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
            most = rl.steps * (rl.most_updates + rl.most_dropped)
            plans["value"] = dataclasses.replace(
                plans["value"],
                updates=most * rl.value_epochs * rl.epochs,
                record=rl.value_record,
            )
        if exact := settings.layout.selection:
            plans["policy"] = dataclasses.replace(plans["policy"], rule=exact.rule)
        return plans

    def __init__(self, settings: Settings, tools: Tools):
        rl, sampler = settings.rl, settings.sampler
        self.settings, self.tools = settings, tools
        self.steps, self.taken_per_step = rl.steps, rl.prompts
        self.updates = rl.most_updates + rl.most_dropped
        self.objective = settings.objective
        self.reference = bool(settings.objective.reference_beta)
        if rl.value_path:
            networks.check_value(rl.value_path, settings.model, rl.value_record)
        self.weights, self.problems, self.sizes = read_problems(settings, tools)
        self.recall({})
        tools.say(cost_of_critic(settings))
        self.pack = packer(
            settings,
            tools.say,
            trajectories=rl.largest_update,
            longest=sampler.max_new,
            most_steps=sampler.most_steps,
            record=rl.value_record,
        )

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts of all problems."""
        return [problem.prompt_ids for problem in self.problems]

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
                keep_n = batches.teaching(judged(rollouts, settings.rl), settings.rl)
                rollouts = rollout.split(rollouts, problems, tools.grader, keep_n)
            metrics |= process.summary(rollouts.chunks)
        dropped = []
        table = tools.look([x.prompt_ids for x in problems])
        rollouts = placed(rollouts, problems, table, settings.model.vocab)
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
            learned, complete, notes = batches.of_rollouts(
                judged(rollouts, settings.rl),
                rng,
                as_sampled=settings.as_sampled,
                critic=self.critic,
                **how,
            )
            if settings.rl.value_all and complete:
                dropped = batches.of_dropped(judged(rollouts, settings.rl), rng, **how)
        if notes and settings.rl.value == "none":
            notes = notes._replace(value_nT=None)  # there are none to look at
        if tools.samples:
            rollout.write(tools.folder, step, rollouts, problems, tools.samples, notes)
        sampled = int(rollouts.trace.len_B.sum())
        if not complete:
            self.say_skipped(step, judged(rollouts, settings.rl), metrics | learned)
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
            batches.check_earned(more, self.settings.objective.loss)
            if self.curriculum:
                judged_n = judged(more, rl).judged_n  # the others say nothing
                groups = np.split(np.arange(len(asked)), len(chosen))
                for i, group_n in zip(chosen, groups, strict=True):
                    right_n = more.solved_n[group_n[judged_n[group_n]]]
                    if len(right_n):
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

    def say_skipped(self, step: int, rollouts, metrics: dict):
        """Says why a step has no batches, or none that teaches."""
        rl = self.settings.rl
        if not rollouts.trace.len_B.any():
            reason = "all its prompts are longer than sampler.max_prompt"
        elif rollouts.late_n.all():
            cut = metrics.get("truncated") == 1 and rl.truncated == "mask"
            reason = "every answer was cut" if cut else "no answer could be graded"
        elif metrics["groups_kept"]:
            reason = "the noise masks nothing of its answers"
        elif rl.filter == "solvable":
            reason = f"no group is solvable in [{rl.min_solved}, {rl.max_solved}]"
        else:
            reason = f"no group is {rl.filter}"
        self.tools.say(f"step {step}: {reason}, nothing to learn; the step is skipped")


SOURCES = {"rl": RL, "sft": SFT, "dpo": DPO, "reward": Ranking}


# ---- What RL's steps are made of -----------------------------------------------------


def of_others(memory: dict) -> dict:
    """Returns a source's memory without its problems: their numbers are of others now."""
    return {name: x for name, x in memory.items() if name != "problems"}


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
        rollout.check_prompts(
            files[-1],
            settings.sampler.max_prompt,
            settings.model.vocab,
            tools.say,
            path,
        )
    problems = [problem for file in files for problem in file]
    pictures = [pictures_of(problem.prompt_ids) for problem in problems]
    most = settings.rl.max_prompts or settings.rl.prompts
    check_tiles(pictures, most, settings, tools)
    return list(weights.values()), problems, [len(file) for file in files]


CRITICS = {  # what a run says at its start of its rl.value
    "own": "of the FLOPs of an update, and of scoring, the value network takes {share:.0%}; "
    "'head', on the policy's, 'trace', a regression on the host, and 'none' take none",
    "trace": "a regression on the host judges the answers by what the sampler recorded; no "
    "network, and none of an update's FLOPs",
    "head": "{width} weights on the policy's last layer judge the answers, for next to none "
    "of an update's FLOPs; but every answer is scored before it, and their loss trains the "
    "policy's layers, too",
    "none": "nothing judges an answer's tokens, at no cost: they share its advantage",
}


def cost_of_critic(settings: Settings) -> str:
    """Returns the line that says what judges the answers, and what that takes."""
    share = networks.value_share(
        settings.model, settings.layout.seats(settings.batch), settings.batch
    )
    value = settings.rl.value
    line = CRITICS[value].format(share=share, width=settings.model.d_model)
    if value != "own":
        line += f"; 'own' would take {share:.0%} of an update's FLOPs"
    return f"rl.value={value!r}: {line}"


def placed(rollouts: Rollouts, problems, table: Table | None, vocab: int) -> Rollouts:
    """Returns rollouts whose prompts have their images as rows of the step's table.

    Where a step asks several times (rl.max_prompts), each time had a table of its own.
    """
    if table is None:
        return rollouts
    trace = rollouts.trace
    prompts = [  # one that was too long is in no canvas
        problem.prompt_ids if count else []
        for problem, count in zip(problems, trace.prompt_len_B, strict=True)
    ]
    tokens_BT = table.canvases(trace.tokens_BT, prompts, vocab)
    return dataclasses.replace(rollouts, trace=trace.replace(tokens_BT=tokens_BT))


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
