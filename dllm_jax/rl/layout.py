"""Layouts: how noised views of a trajectory are shown to the model, and what they cost.

    block   one clean copy, then noised blocks: each sees the clean tokens before it and
            itself
    full    a canvas of its own for every view: the prompt and the noised answer see
            each other
    causal  the clean copy alone: each token sees those before it

The layout follows from the model's attention. In terms of `models.mask.packed`: begin
is the first slot, and a group the id of a noised block. Host numpy. `cfg` is a
BatchConfig throughout; rl/config.py imports what imports this module.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from dllm_jax.models.mask import FAR
from dllm_jax.rl import selection
from dllm_jax.rl.selection import Selection

# The round of a view that supervises the tokens of all steps. It is later than every
# step, so that nothing is masked.
EVERY = FAR + 1
WHOLE = 128  # slots, of which a chosen width is a multiple: whole tiles of attention


@dataclasses.dataclass(frozen=True)
class Attention:
    """Facts about a model's attention that layouts read; nothing compares names."""

    # Views are noised blocks behind one clean copy; else each is a canvas of its own.
    by_block: bool
    # A view masks the tokens of its round and of later ones; else it masks nothing.
    masks: bool


ATTENTIONS = {
    "block": Attention(by_block=True, masks=True),
    "full": Attention(by_block=False, masks=True),
    "causal": Attention(by_block=False, masks=False),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a view looks like."""

    attention: str = "block"  # ModelConfig.attention, a key of ATTENTIONS
    shift: int = 0  # ModelConfig.shift: position i - shift answers for position i
    block: int = 4  # Q: SamplerConfig.block, or NoiseConfig.block where that is set
    grid: str = "absolute"  # NoiseConfig.grid
    longest: int = 512  # tokens of an answer's canvas, at least
    tail: int = 0  # tokens that stand behind it, given: SamplerConfig.tail
    # With guidance each canvas has one beside it, whose prompt is `blank`.
    guidance: float = 0.0  # SamplerConfig.guidance; 0: none has
    blank: tuple[int, ...] = ()
    # objective.likelihood="selection": what was thrown away has seats, too.
    selection: Selection | None = None

    @property
    def facts(self) -> Attention:
        """The row of ATTENTIONS."""
        return ATTENTIONS[self.attention]

    def numbers(self, T: int, prompt_len: int) -> np.ndarray:
        """Returns the block [T] of each position, counted from 0.

        "absolute" is the sampler's grid: pos // Q, or with full attention blocks from the
        answer's first token on (policy.first_block). "response" starts a block there
        whatever the attention, as dLLM-RL trains: blocks of the prompt are counted back
        from its end, and the first may lack positions.
        """
        from_answer = self.grid == "response" or not self.facts.by_block
        lacking = -prompt_len % self.block if from_answer else 0
        return (np.arange(T) + lacking) // self.block

    def scope(self, T: int, prompt_len: int) -> np.ndarray:
        """Returns what [T] is noised together: a block's number, or 0 in a canvas."""
        if self.facts.by_block:
            return self.numbers(T, prompt_len)
        return np.zeros(T, int)

    def turns(self, T: int, prompt_len: int) -> np.ndarray:
        """Returns the sampler's block [T] of each position; those of prompts may be < 0.

        With full attention blocks are counted from the answer's start.
        """
        if self.facts.by_block:
            return np.arange(T) // self.block
        return (np.arange(T) - prompt_len) // self.block

    def largest_scope(self, answer: int) -> int:
        """Returns the most tokens of an answer that one scope holds."""
        return self.block if self.facts.by_block else answer

    def most_steps(self, answer: int) -> int:
        """Returns the most steps in which the tokens of one scope were unmasked.

        Those of what follows the answer count: up to the canvas's end, in whole blocks.
        """
        if self.facts.by_block:
            return self.block
        return max(answer, self.longest) + self.block - 1

    def canvas_end(self, T: int, prompt_len: int, length: int) -> int:
        """Returns where the canvas of an answer of this length ends.

        Where masks show how long an answer may become, all have room for the longest.
        """
        end = prompt_len + length
        if not self.facts.masks:
            return end
        return max(end, min(T, prompt_len + self.longest + self.tail))

    @property
    def beside(self) -> int:
        """The most slots of the canvas beside each."""
        return len(self.blank) + self.longest + self.tail if self.guidance else 0

    def width(self, slots: int, rounds: int) -> int:
        """Returns the slots of a row that holds the longest trajectory in one piece.

        slots: of a canvas; rounds: the most of a block, of which two are usual. A wider row
        would repeat fewer clean copies of what is cut, and end with more empty slots.
        """
        noised = self.block
        if self.facts.by_block:
            noised *= (-(-self.longest // self.block) + 1) * min(rounds, 2)
        return -(-(slots + max(noised, self.beside)) // WHOLE) * WHOLE

    def seats(self, cfg) -> int:
        """Returns how many slots of a row can be supervised.

        Noised blocks stand behind a clean copy, of which each token is supervised once; a
        canvas can be supervised everywhere, and all that a round masks has a seat where
        what was thrown away counts.
        """
        if self.selection and self.selection.skips:
            return cfg.tokens
        return cfg.tokens // 2 if self.facts.by_block else cfg.tokens


def of(model, sampler, noise, objective=None) -> Layout:
    """Returns the Layout of a ModelConfig, a SamplerConfig and a NoiseConfig.

    objective: an ObjectiveConfig whose `likelihood` counts, where rollouts are learned from.
    """
    exact = objective is not None and objective.likelihood == "selection"
    return Layout(
        attention=model.attention,
        shift=model.shift,
        block=noise.block or sampler.block,
        grid=noise.grid,
        longest=1 if noise.whole else sampler.max_new,
        tail=len(sampler.tail),
        guidance=sampler.guidance if noise.guided else 0.0,
        blank=sampler.blank,
        selection=selection.of(sampler, model) if exact else None,
    )


class View(NamedTuple):
    """One round of one scope: what is noised, and what it teaches."""

    draw: int  # the row of noise
    first: int  # its positions are first .. end
    end: int
    round: int  # the step that it supervises, or EVERY
    supervised: int  # how many tokens that is
    skipped: int = 0  # masked tokens whose draws were thrown away, where they count

    @property
    def seats(self) -> int:
        """How many of its slots something is asked of."""
        return self.supervised + self.skipped


def views_of(
    draws, prompt_len: int, length: int, noise, supervised_nT, layout: Layout
) -> list[View]:
    """Returns the Views of a trajectory, from left to right: all that teach something.

    draws: its rows of noise; prompt_len, length: of its prompt and of its answer.
    noise: a noise.Noise of n rows; supervised_nT: which tokens are, in each of them.
    A view belongs to every (scope, draw, round) in which a token is supervised.
    """
    T = supervised_nT.shape[1]
    scope_T = layout.scope(T, prompt_len)
    nth_U, pos_U = np.nonzero(supervised_nT[draws])
    draw_U = np.asarray(draws)[nth_U]
    round_U = noise.step_nT[draw_U, pos_U]
    if not layout.facts.masks:
        round_U = np.full_like(round_U, EVERY)
    # From here on arrays have a place for each view.
    (scopes, view_draws, rounds), counts = np.unique(
        np.stack([scope_T[pos_U], draw_U, round_U]), axis=1, return_counts=True
    )
    firsts = np.searchsorted(scope_T, scopes)
    ends = np.searchsorted(scope_T, scopes, side="right")
    if not layout.facts.by_block:
        ends = np.full_like(ends, layout.canvas_end(T, prompt_len, length))
    columns = np.stack([view_draws, firsts, ends, rounds, counts])
    views = [View(*column) for column in columns.T.tolist()]
    if not (layout.selection and layout.selection.skips):
        return views
    turn_T = layout.turns(T, prompt_len)
    return [
        view._replace(skipped=int(passed_over(view, noise, turn_T).sum()))
        for view in views
    ]


def passed_over(view: View, noise, turn_T) -> np.ndarray:
    """Returns which of a view's positions drew a token that its round threw away.

    All that its block had masked and did not take. turn_T: Layout.turns.
    """
    step_T = noise.step_nT[view.draw, view.first : view.end]
    turn_T = turn_T[view.first : view.end]
    return (step_T > view.round) & (turn_T == turn_T[np.argmax(step_T == view.round)])


@dataclasses.dataclass(frozen=True)
class Piece:
    """What goes into one row together: a clean copy, and the views behind it."""

    views: tuple[View, ...]  # from left to right
    beside: int = 0  # slots of the canvas beside its own: Layout.guidance

    @property
    def clean(self) -> int:
        """Length of the clean copy: up to where the last view begins."""
        return self.views[-1].first

    @functools.cached_property
    def cost(self) -> int:
        """Slots that it takes."""
        noised = sum(view.end - view.first for view in self.views)
        return self.clean + noised + self.beside

    @functools.cached_property
    def supervised(self) -> int:
        """Seats that it takes."""
        return sum(view.seats for view in self.views)

    def split(self, slots: int, seats: int) -> tuple["Piece | None", "Piece | None"]:
        """Returns (what of its first views fits into so many slots and seats, the rest).

        None: nothing.
        """
        if self.views[0].end + self.beside > slots:
            return None, self
        first_n, end_n = np.array([view[1:3] for view in self.views]).T
        seats_n = np.cumsum([view.seats for view in self.views])
        cost_n = first_n + np.cumsum(end_n - first_n) + self.beside
        count = int(((cost_n <= slots) & (seats_n <= seats)).sum())  # both only grow
        part, rest = (
            dataclasses.replace(self, views=views) if views else None
            for views in (self.views[:count], self.views[count:])
        )
        return part, rest


def cut(views: list[View], prompt_len: int, layout: Layout, cfg) -> list[Piece]:
    """Returns a trajectory's views in Pieces, none of which exceeds a row of the batch.

    prompt_len: of its prompt.

    Noised blocks share a clean copy while there is room; canvases share nothing. Raises
    ValueError when a clean copy and one block, or one canvas, do not fit into a row.
    """
    size = cfg.tokens, layout.seats(cfg)
    answer = views[0].end - prompt_len if views else 0
    beside = len(layout.blank) + answer if layout.guidance else 0
    together = [views] if layout.facts.by_block else [[view] for view in views]
    pieces = []
    for shared in filter(None, together):
        rest = Piece(tuple(shared), beside)
        while rest is not None:
            part, rest = rest.split(*size)
            if part is None:
                view = rest.views[0]
                raise ValueError(
                    f"batch.tokens={cfg.tokens} is too small for a trajectory of "
                    f"{view.end} tokens and one noised view of {view.end - view.first}"
                    + (f", and {beside} of its blank prompt's" if beside else "")
                )
            pieces.append(part)
    return pieces


@dataclasses.dataclass
class Shown:
    """A piece in its slots, counted from its first one.

    Seats are supervised tokens, and where they count draws that were thrown away.
    """

    pos_T: np.ndarray
    masked_T: np.ndarray
    end_T: np.ndarray  # the slot before which it sees clean tokens
    group_T: np.ndarray  # of a noised block; -1: none
    slot_U: np.ndarray  # where the token is predicted
    draw_U: np.ndarray  # its row of noise; -1: thrown away
    pos_U: np.ndarray
    size_U: np.ndarray  # supervised tokens of its step
    lead_U: np.ndarray  # the seat of its step's first supervised token
    limit_U: np.ndarray  # selection.limits of what was thrown away; inf: supervised
    # With the canvas beside it, behind its own; else None.
    begin_T: np.ndarray | None = None  # the slot from which it sees clean tokens
    given_T: np.ndarray | None = None  # the blank prompt's tokens; -1: as in the trace
    beside_U: np.ndarray | None = None  # the slot with the token's position there


def present(piece: Piece, prompt_len: int, noise, supervised_nT, layout: Layout):
    """Returns what a piece looks like, a Shown; the arguments are those of views_of."""
    draws, firsts, ends, rounds = np.array(piece.views).T[:4]
    # The noised slots; those of the clean copy stand before them.
    view_T = np.repeat(np.arange(len(piece.views)), ends - firsts)
    pos_T = np.concatenate([np.arange(view.first, view.end) for view in piece.views])
    place_T, round_T = (draws[view_T], pos_T), rounds[view_T]
    step_T, taught_T = noise.step_nT[place_T], supervised_nT[place_T]
    taught_T &= (step_T == round_T) | (round_T == EVERY)

    slot_U = np.flatnonzero(taught_T | skipped(piece, prompt_len, noise, layout))
    pos_U, view_U, taken_U = pos_T[slot_U], view_T[slot_U], taught_T[slot_U]
    unit_U = steps_of(view_U, step_T[slot_U], layout)
    lead_U = leads(unit_U, taken_U)
    answering_U = pos_U - layout.shift  # the position that predicts it
    scope_T = layout.scope(supervised_nT.shape[1], prompt_len)
    end_T, group_T = sights(piece, view_T, pos_T, scope_T, layout)
    return with_blank(
        Shown(
            pos_T=np.concatenate([np.arange(piece.clean), pos_T]),
            masked_T=np.concatenate([np.zeros(piece.clean, bool), step_T >= round_T]),
            end_T=end_T,
            group_T=group_T,
            # With shift 1 a block's first token is predicted at the position before it,
            # which lies in the clean copy, where a position is its slot.
            slot_U=np.where(
                answering_U < firsts[view_U],
                answering_U,
                piece.clean + slot_U - layout.shift,
            ),
            draw_U=np.where(taken_U, draws[view_U], -1),
            pos_U=pos_U,
            size_U=np.bincount(unit_U, taken_U)[unit_U],
            lead_U=lead_U,
            limit_U=limits_of(noise, draws[view_U], pos_U, lead_U, taken_U),
        ),
        prompt_len,
        layout,
    )


def with_blank(shown: Shown, prompt_len: int, layout: Layout) -> Shown:
    """Returns a canvas and, behind it, the same answer behind the blank prompt.

    That prompt ends where the canvas's own does, so that the answer has its positions.
    Without guidance there is none.
    """
    if not layout.guidance:
        return shown
    slots, blank = len(shown.pos_T), layout.blank
    pos_T = np.concatenate(
        [prompt_len - len(blank) + np.arange(len(blank)), np.arange(prompt_len, slots)]
    )
    masked_T = shown.masked_T[prompt_len:]
    masked_T = np.concatenate([np.zeros(len(blank), bool), masked_T])
    both = slots + len(pos_T)
    return dataclasses.replace(
        shown,
        pos_T=np.concatenate([shown.pos_T, pos_T]),
        masked_T=np.concatenate([shown.masked_T, masked_T]),
        end_T=np.concatenate([shown.end_T, np.full(len(pos_T), both)]),
        group_T=np.concatenate([shown.group_T, np.full(len(pos_T), -1)]),
        begin_T=np.repeat([0, slots], [slots, len(pos_T)]),
        given_T=np.concatenate(
            [np.full(slots, -1), blank, np.full(slots - prompt_len, -1)]
        ),
        beside_U=slots + shown.slot_U - prompt_len + len(blank),
    )


def skipped(piece: Piece, prompt_len: int, noise, layout: Layout):
    """Returns which noised slots of a piece drew a token that was thrown away, and counts."""
    if not (layout.selection and layout.selection.skips):
        return False
    turn_T = layout.turns(noise.step_nT.shape[1], prompt_len)
    return np.concatenate([passed_over(view, noise, turn_T) for view in piece.views])


def steps_of(view_U, step_U, layout: Layout):
    """Returns the number [U] of each seat's step, from 0.

    A view supervises one, with what it threw away, but where nothing is masked it shows
    the tokens of all.
    """
    if layout.facts.masks:
        return view_U
    both_2U = np.stack([view_U, step_U])
    return np.unique(both_2U, axis=1, return_inverse=True)[1].reshape(-1)


def leads(unit_U, taken_U):
    """Returns the seat [U] of the first taken token of each seat's step."""
    seats = np.flatnonzero(taken_U)
    _, first = np.unique(unit_U[seats], return_index=True)
    return seats[first][unit_U]


def limits_of(noise, draw_U, pos_U, lead_U, taken_U):
    """Returns the limits of what was thrown away in each seat; inf: it was taken."""
    if noise.border_nT is None:
        return np.full(len(pos_U), np.inf)
    lead = draw_U, pos_U[lead_U]  # a step's tokens all know its border
    limit_U = selection.limits(noise.border_nT[lead], noise.place_nT[lead], pos_U)
    return np.where(taken_U, np.inf, limit_U)


def sights(piece: Piece, view_T, pos_T, scope_T, layout: Layout):
    """Returns (end_T, group_T) of a piece's slots: who sees whom.

    view_T, pos_T: of its noised slots, which view and which position of the canvas each
    is; scope_T: of the canvas' positions.
    """
    clean, slots = piece.clean, piece.clean + len(pos_T)
    group_T = np.full(slots, -1)
    if not layout.facts.by_block:
        # In a canvas with masks all see each other, else each sees what comes before.
        end_T = np.full(slots, slots) if layout.facts.masks else pos_T + 1
        return end_T, group_T
    # A clean token sees its own block too, a noised one the clean blocks before it.
    clean_end_T = np.searchsorted(scope_T, scope_T[:clean], side="right")
    noised_end_T = np.searchsorted(scope_T, scope_T[pos_T])
    # Ids of groups only have to differ within a row: a view's first slot is its id.
    group_T[clean:] = clean + np.searchsorted(view_T, view_T)
    return np.concatenate([clean_end_T, noised_end_T]), group_T


def microbatches(*, cfg, **facts) -> int:
    """Returns how many microbatches always suffice; the arguments are `most_rows`'s."""
    return -(-most_rows(cfg=cfg, **facts) // cfg.rows)


def most_rows(
    *,
    trajectories: int,
    slots: int,
    answer: int,
    rounds: int,
    copies: int,
    layout: Layout,
    cfg,
) -> int:
    """Returns how many rows always suffice for so many trajectories.

    slots: of a canvas; answer: the longest one's tokens; rounds: the most that a scope
    has, in all of a trajectory's `copies` rows of noise.
    """
    if not layout.facts.by_block:
        # No view is longer than a canvas, so all rows but the last hold as many as fit.
        views = trajectories * rounds if layout.facts.masks else trajectories
        return -(-views // max(cfg.tokens // (slots + layout.beside), 1))
    seats = layout.seats(cfg)
    # An answer has one block more than its length says where it begins inside of one.
    # Every block is noised once for each of its rounds, and a row of noise supervises a
    # token once.
    noised = (-(-answer // layout.block) + 1) * layout.block * rounds
    supervised = noised if layout.selection else min(noised, answer * copies)
    # A piece ends where the next block does not fit. With its clean copy, of less than
    # `slots`, it then fills the row, so it holds at least tokens - slots noised slots;
    # or it holds more than seats - block supervised tokens. Either happens so often:
    cuts = 0
    if slots + noised > cfg.tokens:
        cuts += noised // max(cfg.tokens - slots, layout.block)
    if supervised > seats:
        cuts += supervised // max(seats - layout.block + 1, 1)
    # What a trajectory takes of a row: a share of its slots, with a clean copy for
    # every piece, and a share of its seats.
    load = (noised + (cuts + 1) * slots) / cfg.tokens + supervised / seats
    # First fit: two rows together hold more than one row's load of slots or seats. Nor
    # are there more rows than pieces.
    rows = 2 * int(np.ceil(trajectories * load)) + 1
    return min(rows, trajectories * (cuts + 1))
