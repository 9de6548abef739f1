"""Sources of batches that learn from examples, or from pairs of them: see sources.py."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from dllm_jax import data
from dllm_jax.models.vision.look import Table
from dllm_jax.models.vision.prompts import Prompt
from dllm_jax.rl import (
    batches,
    bounds,
    learner,
    networks,
    noise,
)
from dllm_jax.rl.networks import Weights
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


class FromExamples:
    """What SFT and the sources of pairs share: items of data.train, each with new noise.

    An item is `each` rows of the examples, which follow each other. Nothing is remembered
    but the place in the data, and one network is trained.
    """

    samples, reference, updates = False, False, 1
    each = 1
    term = "nll"  # of its objective: see learner.Plan
    fields: tuple[str, ...] = ()  # the optional ones of its batches
    compare = None  # how the answers of pairs are told apart: see batches.of_examples

    @classmethod
    def plans(cls, settings: Settings) -> dict[str, learner.Plan]:
        """Returns the Plan of the policy."""
        return networks.plans(
            cls.term,
            "none",
            settings.policy_optim,
            settings.value_optim,
            updates=settings.sft_steps,
        )

    def __init__(self, settings: Settings, tools: Tools):
        self.settings, self.tools = settings, tools
        self.steps, self.taken_per_step = settings.sft_steps, settings.sft_examples
        self.objective = settings.objective
        self.examples, self.sizes, self.weights = read_examples(
            settings, tools, each=self.each
        )
        self.pack = packer(
            settings,
            tools.say,
            trajectories=self.each * settings.sft_examples,
            longest=max(len(x.answer) for x in self.examples),
            most_steps=most_steps(self.examples, settings),
        )

    @property
    def memory(self) -> dict:
        """What was learned from earlier steps: nothing."""
        return {}

    def recall(self, memory: dict) -> None:
        """Puts back what `memory` was: nothing."""

    @property
    def prompts(self) -> Iterator[list[int]]:
        """The prompts of all examples, one after the other: as lists they take much room."""
        return map(prompt_of, self.examples)

    def passes(self, step: int, made: StepBatches) -> list[tuple]:
        """Returns (the networks that an update trains, its batch), in order."""
        return [(("policy",), batch) for batch in made.batches]

    def far(self, metrics: dict) -> bool:
        """Returns whether a step's other updates are left out: there are none."""
        return False

    def blank(self) -> TrainBatch:
        """Returns the shapes of every batch."""
        return blank(self.settings, self.tools, self.pack, self.fields)

    def batches(self, step, taken, weights: Weights, score) -> StepBatches:
        """Draws new noise, of this step's own, for the items that come next.

        The answers of pairs are scored by the networks, to be compared.
        """
        settings = self.settings
        chosen = in_order(
            settings, self.sizes, taken, self.taken_per_step, self.weights
        )
        some = [self.examples[i] for i in batches.rows_of(chosen, self.each)]
        table = self.tools.look([Prompt([], example.pictures) for example in some])
        examples = placed(some, table, settings)
        if self.compare is None:
            score = None
        else:
            score = functools.partial(score, seeing(weights, table).scoring())
        rng = np.random.default_rng([settings.seed, step])
        metrics, complete = batches.of_examples(
            examples,
            noised=noise.noised(examples, settings.noise, settings.layout, rng),
            copies=settings.noise.copies,
            pack=self.pack,
            mesh=self.tools.mesh,
            score=score,
            compare=self.compare,
        )
        return StepBatches(metrics, complete, table=table)


class SFT(FromExamples):
    """Supervised fine-tuning: prompts with the answers to learn."""


class DPO(FromExamples):
    """Direct preference optimization on evidence bounds (VRPO): pairs of answers.

    A pair is two neighbouring rows of the examples: the chosen answer, then the rejected.
    """

    reference = True
    each, term, fields = 2, "dpo", batches.PAIR_FIELDS

    def __init__(self, settings: Settings, tools: Tools):
        super().__init__(settings, tools)
        # The reference is in the factors of the gradient, not in its objective.
        self.objective = dataclasses.replace(settings.objective, reference_beta=0.0)

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
    term = "ranking"  # the network has a value head alone

    def __init__(self, settings: Settings, tools: Tools):
        # An answer's end is where it is judged: nothing is learned after it.
        pairs = dataclasses.replace(settings.data, post_num=0)
        super().__init__(dataclasses.replace(settings, data=pairs), tools)

    def compare(self, outputs, share_nT, len_n):
        """Returns bounds.ranking_factors of the scores."""
        return bounds.ranking_factors(outputs["policy"]["value"], share_nT)


def read_examples(settings: Settings, tools: Tools, *, each: int):
    """Returns ([Example] of data.train, how many items each file has, the files' weights).

    each: rows of an item, 2 for pairs. Says how many records are left out.
    """
    weights = data.mixture(settings.data.train)
    examples, sizes, left_out = [], [], 0
    for path in weights:
        found, dropped = data.examples(
            path,
            tools.tok,
            settings.data,
            end=(*settings.sampler.stop_ids, settings.model.eos_id)[0],
            stops=settings.sampler.stop_ids,
            pad=settings.model.pad_id,
            vocab=settings.model.vocab,
            mask=settings.model.mask_id,
            block=settings.sampler.block,
            slots=settings.sampler.slots,
            full=settings.model.attention == "full",
            pairs=each == 2,
            traced=settings.noise.kind == "trace",
            reader=tools.reader,
            drawn=settings.model.drawn,
            tail=settings.sampler.tail,
        )
        examples += found
        sizes.append(len(found) // each)
        left_out += dropped
    pictures = [example.pictures for example in examples]
    check_tiles(pictures, settings.sft_examples * each, settings, tools)
    what = "pairs" if each == 2 else "examples"
    tools.say(f"{sum(sizes)} {what}, {left_out} empty or too long and left out")
    return examples, sizes, list(weights.values())


def placed(
    examples: list[data.Example], table: Table | None, settings: Settings
) -> data.Examples:
    """Returns examples as rows of a canvas, with their images as rows of the table."""
    sampler, model = settings.sampler, settings.model
    rows = data.stacked(examples, model.pad_id, sampler.slots, sampler.tail)
    if table is None:
        return rows
    prompts = list(map(prompt_of, examples))
    tokens_BT = table.canvases(rows.tokens_BT, prompts, model.vocab)
    return rows.replace(tokens_BT=tokens_BT)


def prompt_of(example: data.Example) -> Prompt:
    """Returns the prompt of an example, with its images."""
    return Prompt(example.prompt.tolist(), example.pictures)


def most_steps(examples: list[data.Example], settings: Settings) -> int:
    """Returns the most steps that an example has; where it has no trace, its tokens."""
    if settings.noise.kind != "trace":
        return max(len(example.answer) for example in examples)
    return max(np.unique(example.step).size for example in examples)
