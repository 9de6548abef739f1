"""How to sample; every field is documented here and nowhere else."""

import dataclasses
import functools
import re

from dllm_jax import checks
from dllm_jax.sampling import schedules
from dllm_jax.sampling.confidence import TARGETS
from dllm_jax.sampling.policy import POLICIES
from dllm_jax.sampling.strategy import STRATEGIES

IN_NATS = "log_confidence", "neg_entropy"  # keys of TARGETS with scores of 0 at most

DRAWING = {  # of MMaDA's images; what of it differs is said on the command line
    "answers": "image",
    "steps_per_block": 18,
    "unmasking": "cosine",
    "strategy": "static",
    "target": "log_confidence",
    "rank_temperature": 1.0,
    "rank_cooling": True,
    "guidance": 3.5,
}
LIMITS = {  # of the fields of SamplerConfig: see checks.fields
    "answers": ("text", "image"),
    "block": ">= 0",
    "steps_per_block": ">= 0",
    "rank_temperature": ">= 0",
    "pad_penalty": ">= 1",
    "entropy_bound": ">= 0",
    "cache": ("auto", *POLICIES),
    "horizon": ">= 0",
    "temperature": checks.TEMPERATURE,
    "top_k": ">= 0",
    "top_p": "> 0, <= 1",
    "guidance": ">= 0",
    "blank": ">= 0",
    "tail": ">= 0",
    "max_prompt": ">= 1",
    "max_new": ">= 1",
    "stop_ids": ">= 0",
    "rows": ">= 1",
    "page": ">= 1, <= 65536",
    "pages": ">= 0",
    "prefill": ">= 1",
}
# What programs take as an array, a number for each row: no value compiles anything anew.
TRACED = ("threshold", "entropy_bound")
IDLE = ("rows", "pages", "page", "prefill")  # no answer depends on them


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Static facts of a sampler. Temperatures and limits are arrays, one per row."""

    # What an answer is: "text", or the codes of an "image" that the prompt describes. Then
    # block, max_new, blank, tail and stop_ids follow from the model (pictures.drawing).
    answers: str = "text"
    # Q: positions denoised together, on the absolute grid pos // Q. 0: the block of the
    # checkpoint, which a run puts here (config.completed).
    block: int = 4
    # Step t unmasks at least its share of Q; 0: one a token. Not of "entropy_bounded", which
    # takes as many steps as its bound makes.
    steps_per_block: int = 0
    # "even": steps have equal shares; cosine, linear, sigmoid, pow2 ...: as many as leave
    # the masks that a function of time says (schedules.MASKED). With a step for each token
    # all are alike.
    unmasking: str = "even"
    strategy: str = "dynamic"  # which masked positions to unmask: a key of STRATEGIES
    threshold: float = 0.9  # "dynamic": unmask every score above it
    tempered_threshold: bool = False  # ... of what is drawn from, not of the model
    # The others up to pad_penalty are of "static" and "dynamic" alone, which rank.
    untempered_ranks: bool = False  # by scores of the model, as LLaDA
    target: str = "confidence"  # how they score: a key of TARGETS
    rank_temperature: float = 0.0  # > 0: draw the best-scored instead of taking them
    rank_cooling: bool = False  # times 1 - t / T at every step t of T, cumulatively
    pad_penalty: float = 1.0  # > 1: scores of padding are that many times lower
    entropy_bound: float = 0.35  # "entropy_bounded": sum of entropies to unmask, nats
    # Once a block has a stop token, only positions before the first are unmasked: so does
    # LLaDA-V. False: all of the block, as the others do.
    before_stop: bool = False
    cache: str = "auto"  # a key of POLICIES; "auto": the exact one of the family
    horizon: int = 0  # "prefix": positions after the block that a step re-runs, too
    temperature: float = 1.0  # 0 takes the arg-max
    top_k: int = 0  # the most probable tokens that are kept; 0: off, all are
    top_p: float = 1.0  # then the fewest whose probabilities reach it; 1: off
    # top_p is of all tokens, and top_k of what it leaves: so does Dream. False: top_p is of
    # what top_k leaves, as in block models.
    top_p_first: bool = False
    # Classifier-free: logits move by so many times what they are beyond those behind `blank`.
    # 0: off.
    guidance: float = 0.0
    # The prompt that asks for nothing, from which guidance leads away.
    blank: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()  # ids that stand behind every answer, given
    max_prompt: int = 512  # tokens; a longer prompt is reported and skipped
    max_new: int = 512  # tokens of the answer, the stop token included
    stop_ids: tuple[int, ...] = ()  # besides the checkpoint's end token
    # Canvases sampled together, over all devices; rounded up to as many on each.
    rows: int = 64
    page: int = 32  # positions of a cache page, rounded up to whole blocks
    # Of one device's rows; 0: as many as all of them can use, or, but with full attention, as
    # fit if that is half of them.
    pages: int = 0
    # Prompt tokens of one forward, on each device; with full attention canvases' positions,
    # or eight times as many where rows begin together.
    prefill: int = 512
    # Layers' weights are rounded to int8 for sampling: half the bytes that a forward reads
    # of them, and a log-prob gap (metrics logprob_gap_*). Not with experts. See models/int8.py.
    int8: bool = False

    def __post_init__(self):
        checks.fields(
            self, strategy=sorted(STRATEGIES), target=sorted(TARGETS), **LIMITS
        )
        try:
            schedules.masked(self.unmasking)
        except ValueError as error:
            raise checks.Refused("unmasking", str(error)) from None
        self.refuse_idle()
        if self.guidance and len(self.blank) > self.max_prompt:
            raise ValueError(
                f"sampler.blank has {len(self.blank)} tokens, more than a prompt may have: "
                f"sampler.max_prompt={self.max_prompt}"
            )
        if self.block > 0 and self.steps_per_block > self.block:
            raise ValueError(
                f"sampler.steps_per_block={self.steps_per_block} cannot share out a "
                f"block of {self.block}: every step unmasks something; set it to "
                f"1..{self.block}, or 0"
            )
        if STRATEGIES[self.strategy].reads_sure and (
            self.target == "random" or (self.target in IN_NATS and self.threshold >= 0)
        ):
            kind = (
                "strategy='static'" if self.target == "random" else "one below 0 (nats)"
            )
            raise ValueError(
                f"sampler.threshold={self.threshold} says nothing about target="
                f"{self.target!r}: {self.target} needs {kind}"
            )

    def refuse_idle(self):
        """Raises ValueError for a field that says something of what another has off."""
        if self.rank_cooling and not self.rank_temperature:
            raise ValueError(
                "sampler.rank_cooling=True cools sampler.rank_temperature, which is 0: set it, "
                "to 1.0 for example"
            )
        if self.guidance and not self.blank and self.answers == "text":
            raise ValueError(
                f"sampler.guidance={self.guidance} leads away from what sampler.blank, the "
                "prompt that asks for nothing, gives: set it, or sampler.answers='image'"
            )
        if self.top_p_first and not (self.top_k and self.top_p < 1):
            raise ValueError(
                f"sampler.top_p_first=True says which of sampler.top_k={self.top_k} and "
                f"sampler.top_p={self.top_p} comes first, and one of them is off: set it to "
                "False"
            )
        if self.horizon and self.cache != "prefix":
            raise ValueError(
                f"sampler.horizon={self.horizon}: positions that only "
                "sampler.cache='prefix' re-runs"
            )

    def lengths(self, new: list[int] | None, count: int) -> list[int]:
        """Returns the most tokens of each of `count` answers; None: of all `max_new`.

        Raises ValueError for what no answer can have.
        """
        new = [self.max_new] * count if new is None else new
        if len(new) != count or not all(1 <= most <= self.max_new for most in new):
            raise ValueError(
                f"new={checks.shown(new)}: needs a number in 1..{self.max_new} for each of "
                f"{count} answers"
            )
        return new

    @property
    def static(self):
        """The same for programs: nothing in it tells what is TRACED."""
        return untraced(self)

    @property
    def filters_draws(self) -> bool:
        """Whether tokens are taken for what was drawn: see confidence.Target."""
        of_draw = TARGETS[self.target].of_draw or self.pad_penalty > 1
        return STRATEGIES[self.strategy].ranks and of_draw

    @property
    def draws_order(self) -> bool:
        """Whether chance decides which positions are unmasked, at temperature 0, too."""
        of_chance = self.target == "random" or self.rank_temperature > 0
        return STRATEGIES[self.strategy].ranks and of_chance

    @property
    def slots(self) -> int:
        """Positions of a canvas: prompt and answer, filled up to whole blocks, and the tail.

        With a tail blocks are counted from the answer's start.
        """
        Q = max(self.block, 1)
        if self.tail:
            return self.max_prompt + -(-self.max_new // Q) * Q + len(self.tail)
        return -(-(self.max_prompt + self.max_new) // Q) * Q

    @property
    def slots_beside(self) -> int:
        """Positions of the canvas that guidance needs beside each."""
        return len(self.blank) + self.max_new + len(self.tail)

    @property
    def schedule(self) -> tuple[int, ...]:
        """Tokens that each step of a block unmasks at least; their sum is the block."""
        return schedules.counts(self.unmasking, self.block, self.steps)

    @property
    def steps(self) -> int:
        """Steps of a block, at most."""
        return self.steps_per_block or self.block

    @property
    def most_steps(self) -> int:
        """The most steps in which tokens of one block, or one canvas, are unmasked.

        An image is one block. A block on the grid may be longer than the answer in it.
        """
        return self.steps if self.answers == "image" else max(self.max_new, self.block)

    @property
    def rank_temperatures(self) -> tuple[float, ...]:
        """`rank_temperature` at each step of a block; the last one's holds for what follows."""
        if self.rank_cooling:
            return schedules.cooled(self.rank_temperature, self.steps)
        return (self.rank_temperature,)

    @property
    def most_forwards(self) -> int:
        """The most that a row can take: a loop that goes beyond them has a defect.

        A forward unmasks a token of the row at least, or keeps the keys of a block.
        """
        return self.slots + self.slots // self.block

    def window_counts(self, rows: int, rides: bool = False) -> tuple[int, ...]:
        """Returns how many windows a forward of `rows` rows' blocks may be made for.

        A row has two at most: the block that it has just filled and its next; at two
        steps a block half of the rows have both, and where rows are in step, as a static
        schedule keeps those that began together, none has. Fewer are for the time when rows
        have ended and nothing waits. Each number is a program to compile: that for a fourth
        costs 1 to 3 s of a CPU, once, and makes a rollout of the default run's sizes 1.08 times
        as fast, one of 32 rows of which four have answers eight times as long 1.21 times (CPU
        seconds, median of 5 and of 3 pairs).

        Where prompts ride, each of their blocks has a window, too: the largest holds one for
        every row, or all of a row whose prompt is shorter than 64 positions.
        """
        fewer = [rows // n for n in (4, 2) if rows >= 4 * n] or [rows]
        counts = {*fewer, rows, rows + rows // 2, 2 * rows}
        if rides:
            counts.add(2 * (rows - 1) + max(rows + 1, 64 // self.block))
        return tuple(sorted(counts))

    @property
    def chunk(self) -> int:
        """Positions of a chunk of a prompt: whole blocks.

        A sixteenth of the longest prompt, but 64 to 256: wide ones read a row's pages
        less often, and waste more behind a short prompt's end. Of 64, and not 32, 8 rows
        with prompts of 256 and 512 take 1.05 times as short on two cores; with prompts of
        128 they take 1.08 times as long, so that below 256 a chunk has 32.
        """
        least = 64 if self.max_prompt >= 256 else 32
        width = min(max(self.max_prompt // 16, least), 256)
        return -(-min(width, self.prefill, self.max_prompt) // self.block) * self.block

    @property
    def has_chunks(self) -> bool:
        """Whether a prompt may have more than one whole block, which chunks are for."""
        return self.max_prompt >= 2 * self.block

    def chunk_counts(self, rows: int) -> tuple[int, ...]:
        """Returns how many chunks of `rows` rows' prompts a forward may be made for.

        As many as `prefill` says, but no more than all rows can wait for; or few, for a
        short prompt that comes alone, where that is less. The greatest is the last.
        """
        longest = -(-self.max_prompt // self.chunk)
        many = min(-(-self.prefill // self.chunk), rows * longest)
        return tuple(sorted({-(-many // 8), many}))

    @property
    def window(self) -> int:
        """Positions of a window over keys that are not final.

        `horizon` counts no further than an answer can be long.
        """
        return max(min(self.block + self.horizon, self.max_new), self.block)

    def present_counts(self, rows: int) -> tuple[int, ...]:
        """Returns how many such windows a forward of `rows` rows' blocks may be made for.

        A row has one at most, and none while its canvas answers for its block: so has none
        of rows that all began a block together.
        """
        least = rows // 2 if rows >= 8 else rows
        return tuple(sorted({0, least, rows}))

    @property
    def canvas_widths(self) -> tuple[int, ...]:
        """Positions that a canvas may be run with, whole pages: the least that holds it.

        The longest, and one halfway to the shortest, for short prompts.
        """
        longest, shortest = self.max_prompt + self.max_new, self.max_new + 1
        ends = (longest + shortest) // 2, longest
        return tuple(
            sorted({-(-end // self.page_slots) * self.page_slots for end in ends})
        )

    def canvas_counts(self, rows: int, width: int) -> tuple[int, ...]:
        """Returns how many canvases of `width` a forward of `rows` rows' may be made for.

        As few as have `prefill` positions, for rows that come to a block one by one; and
        eight times as many, for those that do together. The greatest is the last.
        """
        few = max(self.prefill // width, 1)
        many = max(8 * self.prefill // width, 1)
        return tuple(sorted({min(few, rows), min(many, rows)}))

    @property
    def page_slots(self) -> int:
        """Positions of a cache page: whole blocks."""
        return -(-self.page // self.block) * self.block


@functools.lru_cache(64)  # it is asked for at every turn, and checks all fields anew
def untraced(cfg: SamplerConfig) -> SamplerConfig:
    """Returns a sampler's `static`."""
    return dataclasses.replace(cfg, threshold=-1.0, entropy_bound=0.0)


# What a run's evaluation may sample otherwise than its rollouts: see `variants`.
VARIED = ("block", "steps_per_block", "unmasking", "strategy", "threshold")
VARIED += ("tempered_threshold", "untempered_ranks", "target")
VARIED += ("rank_temperature", "rank_cooling", "entropy_bound", "before_stop")
VARIED += ("cache", "horizon", "top_k", "top_p", "top_p_first")


def variants(text: str, cfg: SamplerConfig) -> dict[str, SamplerConfig]:
    """Returns the samplers of "name:key=value,key=value/name:key=value", by their names.

    Each is cfg but for its keys, some of VARIED. Raises ValueError for a text that says
    something else, and for values that make no sampler.
    """
    found, types = {}, {x.name: x.type for x in dataclasses.fields(SamplerConfig)}
    for part in filter(None, map(str.strip, text.split("/"))):
        name, _, pairs = part.partition(":")
        name, changes = name.strip(), {}
        if not re.fullmatch("[a-z][a-z0-9]*", name) or name in found or not pairs:
            raise ValueError(
                f"{checks.shown(part)}: a name of small letters and digits, another for "
                "each, and keys, as in one:strategy=static/wide:block=8"
            )
        for pair in pairs.split(","):
            key, _, value = map(str.strip, pair.partition("="))
            if key not in VARIED:
                raise ValueError(
                    f"{name}: {checks.shown(key)} cannot be varied; choose from "
                    + ", ".join(VARIED)
                )
            if key in changes:
                raise ValueError(f"{name}: {key} is set twice")
            try:
                known = {"true": True, "false": False} if types[key] is bool else None
                changes[key] = known[value.lower()] if known else types[key](value)
            except (KeyError, ValueError):
                wanted = {
                    int: "a whole number",
                    float: "a number",
                    bool: "true or false",
                }
                raise ValueError(
                    f"{name}: {key}={checks.shown(value)}: needs {wanted[types[key]]}"
                ) from None
        if changes.get("block") == 0:  # the first sampler's has become the checkpoint's
            raise ValueError(
                f"{name}: block=0: 1 or more, or leave it out for sampler.block"
            )
        try:
            found[name] = dataclasses.replace(cfg, **changes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found
