"""Sources of batches that learn from examples, or from pairs of them: see sources.py."""

import dataclasses
import functools

import jax
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
            longest=int(self.examples.len_B.max()),
            most_steps=most_steps(self.examples, settings),
        )

    @property
    def memory(self) -> dict:
        """What was learned from earlier steps: nothing."""
        return {}

    def recall(self, memory: dict) -> None:
        """Puts back what `memory` was: nothing."""

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts of all examples."""
        made = self.examples
        return prompts_of(made, made.pictures or ((),) * len(made.len_B))

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
        row_n = batches.rows_of(chosen, self.each)
        pictures = self.examples.pictures
        shown = [Prompt([], pictures[row]) for row in row_n] if pictures else []
        table = self.tools.look(shown)
        examples = placed(self.examples, row_n, table, settings.model.vocab)
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
    """Returns (examples of data.train, how many items each file has, the files' weights).

    each: rows of an item, 2 for pairs. Says how many records are left out.
    """
    weights, files, left_out = data.mixture(settings.data.train), [], 0
    for path in weights:
        examples, dropped = data.examples(
            path,
            tools.tok,
            settings.data,
            end=(*settings.sampler.stop_ids, settings.model.eos_id)[0],
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
        files.append(examples)
        left_out += dropped
    rows = [len(file.len_B) for file in files]
    examples = joined(files)
    check_tiles(examples.pictures, settings.sft_examples * each, settings, tools)
    tools.say(f"{sum(rows)} examples, {left_out} empty or too long and left out")
    return examples, [count // each for count in rows], list(weights.values())


def joined(files: list[data.Examples]) -> data.Examples:
    """Returns the examples of several files as those of one."""
    pictures = [own for x in files for own in x.pictures or ((),) * len(x.len_B)]
    plain = [file.replace(pictures=()) for file in files]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *plain)
    return whole.replace(pictures=tuple(pictures) if any(pictures) else ())


def placed(examples: data.Examples, row_n, table: Table | None, vocab: int):
    """Returns the examples of these rows, with their images as rows of the table."""
    some = batches.take(examples, row_n).replace(pictures=())
    if table is None or not examples.pictures:
        return some
    prompts = prompts_of(some, [examples.pictures[row] for row in row_n])
    return some.replace(tokens_BT=table.canvases(some.tokens_BT, prompts, vocab))


def prompts_of(examples: data.Examples, pictures) -> list[Prompt]:
    """Returns the prompt of each example, with its own images of `pictures`."""
    rows = zip(examples.tokens_BT, examples.prompt_len_B, pictures, strict=True)
    return [Prompt(tokens_T[:count].tolist(), own) for tokens_T, count, own in rows]


def most_steps(examples: data.Examples, settings: Settings) -> int:
    """Returns the most steps that an example has; where it has no trace, its tokens."""
    if settings.noise.kind != "trace":
        return int(examples.len_B.max())
    return max(np.unique(step_T[step_T > 0]).size for step_T in examples.step_BT)
