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
