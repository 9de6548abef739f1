"""Views packed into fixed rows: what one update trains on.

A *round* of a block supervises the tokens that one step of its noise unmasked, with
those of this and later steps masked and earlier ones shown (noise.py); a trajectory's
rounds are laid out as its model sees them (layout.py), and several trajectories share a
row. Packing is done in stages, each a function:

    pieces_of   trajectories, cut where they would exceed a row
    fit         which pieces share a row, and which are cut again to fill the others' gaps
    lay         a piece's tokens and seats, written into its row
    AGGREGATES  what every supervised token weighs in the loss

Everything here is numpy on the host; the result is a TrainBatch of one fixed shape.
`cfg` is a BatchConfig throughout; rl/config.py imports this module for the names of
AGGREGATES.
"""

import dataclasses

import flax.struct
import numpy as np

from dllm_jax.rl.layout import Layout, Piece, Shown, cut, present, views_of
from dllm_jax.rl.noise import Noise, taught, unmasked
from dllm_jax.sampling.state import Trace


@flax.struct.dataclass
class TrainBatch:
    """B rows of T slots, of which U are supervised.

    As packed it is a stack of m microbatches: every array has a leading m, and the
    first `used` of them hold something. Optional fields are what an objective asks for.
    """

    used: np.ndarray  # int32 scalar
    tokens_BT: np.ndarray
    pos_BT: np.ndarray  # rotary position: restarts with every trajectory
    begin_BT: np.ndarray  # models.mask.packed
    end_BT: np.ndarray
    group_BT: np.ndarray
    where_BU: np.ndarray  # slot of each supervised token
    target_BU: np.ndarray  # the token to predict there
    weight_BU: np.ndarray  # its share of the loss; 0: filling
    # With guidance: the slot of its position behind the blank prompt, and how far hidden
    # states are led from it (transformer.guided).
    beside_BU: np.ndarray | None = None
    guidance: np.ndarray | None = None  # f32 scalar
    # For a value network: log-probs, nats, with which the shown tokens were drawn; 0: of
    # masks, and of what was given.
    record_BT: np.ndarray | None = None
    adv_BU: np.ndarray | None = None
    old_logp_BU: np.ndarray | None = None
    ref_logp_BU: np.ndarray | None = None
    ret_BU: np.ndarray | None = None
    old_value_BU: np.ndarray | None = None
    # f32 scalar: objective.reference_beta at this step, where it has a schedule.
    reference_beta: np.ndarray | None = None
    right_BU: np.ndarray | None = None  # 1: of a right answer
    answer_BU: np.ndarray | None = None  # the number of its answer in the update
    # f32 scalar: answers of the update, also those of which the noise masks nothing.
    answers: np.ndarray | None = None
    # Where the likelihood is that of steps (selection.py): the seat of the lead, -1 filling;
    # the limit of what was thrown away, inf for tokens; and `ahead` when it was scored.
    unit_BU: np.ndarray | None = None
    limit_BU: np.ndarray | None = None
    ahead_BU: np.ndarray | None = None

    @property
    def held(self) -> int:
        """How many slots hold something: clean tokens and noised copies of blocks."""
        return int(((self.end_BT > self.begin_BT) | (self.group_BT >= 0)).sum())

    @property
    def fill(self) -> float:
        """The share of the used microbatches' slots that hold something."""
        return self.held / max(int(self.used) * self.group_BT[0].size, 1)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where each supervised seat comes from: a row of noise and a position in it."""

    row_mBU: np.ndarray  # -1: filling, or a draw that was thrown away
    pos_mBU: np.ndarray

    def gather(self, x_nT) -> np.ndarray:
        """Returns the [n, T] array's values in the batch's order, f32; filling is 0."""
        x_mBU = np.where(self.row_mBU >= 0, x_nT[self.row_mBU, self.pos_mBU], 0)
        return x_mBU.astype(np.float32)

    def scatter(self, x_mBU, shape: tuple[int, int]) -> np.ndarray:
        """Returns an [n, T] array of the batch's values in place, f32; 0 elsewhere."""
        out_nT = np.zeros(shape, np.float32)
        real_mBU = self.row_mBU >= 0
        rows, positions = self.row_mBU[real_mBU], self.pos_mBU[real_mBU]
        out_nT[rows, positions] = np.asarray(x_mBU)[real_mBU]
        return out_nT


# ---- Packing -------------------------------------------------------------------------


def pack(
    trace: Trace,
    noise: Noise,
    *,
    mask_id: int,
    layout: Layout,
    cfg,
    most: int,
    aggregate: str,
    copies: int = 1,
    draws: int = 1,
    group_n: np.ndarray | None = None,
    record: bool = False,
) -> tuple[TrainBatch, Source]:
    """Returns (TrainBatch, Source) of `most` microbatches for one update.

    trace: a host Trace, or data.Examples, of n rows; noise: a Noise of as many.
    copies: each trajectory has so many consecutive rows, `copies / draws` for each draw
    (two of a mask and its complement, else one).
    aggregate: a key of AGGREGATES; group_n: the group of each row (None: each its own).
    record: whether the log-probs of a trace's shown tokens are told.
    Raises ValueError where a view, or all of them together, do not fit.
    """
    n = len(noise.step_nT)
    supervised_nT = taught(trace, layout.selection is not None) & (noise.share_nT > 0)
    pieces = pieces_of(trace, noise, supervised_nT, layout, cfg, copies)
    rows = fit(pieces, cfg.tokens, layout.seats(cfg))
    if len(rows) > most * cfg.rows:
        raise ValueError(
            f"{len(rows)} packed rows do not fit {most} microbatches of "
            f"batch.rows={cfg.rows}; raise batch.tokens"
        )
    packed = empty(most * cfg.rows, cfg.tokens, layout.seats(cfg))
    for b, row in enumerate(rows):
        slot, seat = 0, 0  # the next free ones
        for piece in row:
            i = piece.views[0].draw
            prompt_len = int(trace.prompt_len_B[i])
            shown = present(piece, prompt_len, noise, supervised_nT, layout)
            lay(packed, b, slot, seat, shown, trace.tokens_BT[i], mask_id)
            if record:
                lay_record(packed, b, slot, shown, trace, i)
            slot, seat = slot + len(shown.pos_T), seat + len(shown.pos_U)
    supervised = Seats(
        row_BU=packed.row_BU,
        size_BU=packed.size_BU,
        share_BU=noise.share_nT[packed.row_BU, packed.at_BU],
        real_BU=packed.row_BU >= 0,
        len_n=trace.len_B,
        group_n=np.arange(n) if group_n is None else group_n,
        answers=n * draws / copies,
        tokens=(trace.len_B if noise.weight_nT is not None else supervised_nT).sum(),
        longest=layout.longest,
    )
    weight_BU = weights_of(AGGREGATES[aggregate], supervised, packed, layout)
    if noise.weight_nT is not None:
        weight_BU = weight_BU * noise.weight_nT[packed.row_BU, packed.at_BU]
    used, weight_BU = -(-len(rows) // cfg.rows), weight_BU.astype(np.float32)
    return packed.stacked(weight_BU, used, most, n / copies, layout, record)


def pieces_of(
    trace: Trace,
    noise: Noise,
    supervised_nT,
    layout: Layout,
    cfg,
    copies: int,
) -> list[Piece]:
    """Returns all trajectories in Pieces; the arguments are those of `pack`."""
    pieces = []
    for i in range(0, len(noise.step_nT), copies):
        prompt_len, length = int(trace.prompt_len_B[i]), int(trace.len_B[i])
        views = views_of(
            range(i, i + copies), prompt_len, length, noise, supervised_nT, layout
        )
        pieces += cut(views, prompt_len, layout, cfg)
    return pieces


def fit(pieces: list[Piece], slots: int, seats: int) -> list[list[Piece]]:
    """Returns the pieces in rows of such a size: first fit, longest first, then `poured`."""
    rows, free_slots, free_seats = [], [], []
    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        cost, taken = piece.cost, piece.supervised
        roomy = (
            b
            for b in range(len(rows))
            if cost <= free_slots[b] and taken <= free_seats[b]
        )
        b = next(roomy, len(rows))
        if b == len(rows):
            rows.append([])
            free_slots.append(slots)
            free_seats.append(seats)
        rows[b].append(piece)
        free_slots[b] -= cost
        free_seats[b] -= taken
    return poured(rows, slots, seats)


def poured(rows: list[list[Piece]], slots: int, seats: int) -> list[list[Piece]]:
    """Returns rows of such a size, of which the emptiest were cut into the others' gaps.

    All slots of a row are computed, so what is repeated of a clean copy costs nothing in
    a gap, and a row less is a row's time. A row whose pieces do not all go in stays.
    """
    while len(rows) > 1:
        *others, last = sorted(rows, key=lambda row: -sum(p.cost for p in row))
        others = others[::-1]  # the widest gap first
        free_slots = [slots - sum(p.cost for p in row) for row in others]
        free_seats = [seats - sum(p.supervised for p in row) for row in others]
        added = [[] for _ in others]
        for rest in last:
            for b, row in enumerate(added):
                part, rest = rest.split(free_slots[b], free_seats[b])
                if part is not None:
                    row.append(part)
                    free_slots[b] -= part.cost
                    free_seats[b] -= part.supervised
                if rest is None:
                    break
            else:
                return rows
        rows = [row + more for row, more in zip(others, added, strict=True)]
    return rows


@dataclasses.dataclass
class Rows:
    """The rows of all microbatches in the making, filled piece by piece.

    int32, but for limits and log-probs, which are f32.
    """

    tokens_BT: np.ndarray  # as in TrainBatch
    pos_BT: np.ndarray
    begin_BT: np.ndarray
    end_BT: np.ndarray
    group_BT: np.ndarray
    where_BU: np.ndarray
    target_BU: np.ndarray
    beside_BU: np.ndarray
    row_BU: np.ndarray  # as in Source
    at_BU: np.ndarray
    size_BU: np.ndarray  # supervised tokens of its step
    unit_BU: np.ndarray  # as in TrainBatch
    limit_BU: np.ndarray
    record_BT: np.ndarray

    def stacked(
        self,
        weight_BU,
        used: int,
        most: int,
        answers: float,
        layout: Layout,
        record: bool,
    ) -> tuple[TrainBatch, Source]:
        """Returns the rows as (TrainBatch, Source) of `most` microbatches."""
        guidance, exact = layout.guidance, layout.selection is not None

        def stack(x):
            return x.reshape(most, len(x) // most, -1)

        batch = TrainBatch(
            used=np.int32(used),
            tokens_BT=stack(self.tokens_BT),
            pos_BT=stack(self.pos_BT),
            begin_BT=stack(self.begin_BT),
            end_BT=stack(self.end_BT),
            group_BT=stack(self.group_BT),
            where_BU=stack(self.where_BU),
            target_BU=stack(self.target_BU),
            weight_BU=stack(weight_BU),
            beside_BU=stack(self.beside_BU) if guidance else None,
            guidance=np.float32(guidance) if guidance else None,
            answers=np.float32(answers),
            unit_BU=stack(self.unit_BU) if exact else None,
            limit_BU=stack(self.limit_BU) if exact else None,
            record_BT=stack(self.record_BT) if record else None,
        )
        return batch, Source(row_mBU=stack(self.row_BU), pos_mBU=stack(self.at_BU))


def empty(rows: int, slots: int, seats: int) -> Rows:
    """Returns Rows that hold nothing.

    A slot that stays so has end = begin and no group: it sees nothing and is seen by
    nothing. A seat that stays so comes from row -1.
    """

    def filled(width, value=0):
        return np.full((rows, width), value, np.int32)

    return Rows(
        tokens_BT=filled(slots),
        pos_BT=filled(slots),
        begin_BT=filled(slots),
        end_BT=filled(slots),
        group_BT=filled(slots, -1),
        where_BU=filled(seats),
        target_BU=filled(seats),
        beside_BU=filled(seats),
        row_BU=filled(seats, -1),
        at_BU=filled(seats),
        size_BU=filled(seats, 1),
        unit_BU=filled(seats, -1),
        limit_BU=np.full((rows, seats), np.inf, np.float32),
        record_BT=np.zeros((rows, slots), np.float32),
    )


def lay(rows: Rows, b: int, slot: int, seat: int, shown: Shown, tokens_T, mask_id: int):
    """Writes a piece into row b, from this slot and this seat on.

    tokens_T: of its trajectory's canvas. What `shown` counts from the piece's first
    slot is counted from the row's in Rows.
    """
    slots = slice(slot, slot + len(shown.pos_T))
    shown_T = np.where(shown.masked_T, mask_id, tokens_T[shown.pos_T])
    if shown.given_T is not None:
        shown_T = np.where(shown.given_T >= 0, shown.given_T, shown_T)
    rows.tokens_BT[b, slots] = shown_T
    rows.pos_BT[b, slots] = shown.pos_T
    rows.begin_BT[b, slots] = slot + (0 if shown.begin_T is None else shown.begin_T)
    rows.end_BT[b, slots] = slot + shown.end_T
    rows.group_BT[b, slots] = np.where(shown.group_T >= 0, slot + shown.group_T, -1)
    first, seats = seat, slice(seat, seat + len(shown.pos_U))
    rows.where_BU[b, seats] = slot + shown.slot_U
    rows.target_BU[b, seats] = tokens_T[shown.pos_U]
    if shown.beside_U is not None:
        rows.beside_BU[b, seats] = slot + shown.beside_U
    rows.row_BU[b, seats] = shown.draw_U
    rows.at_BU[b, seats] = shown.pos_U
    rows.size_BU[b, seats] = shown.size_U
    rows.unit_BU[b, seats] = first + shown.lead_U
    rows.limit_BU[b, seats] = shown.limit_U


def lay_record(rows: Rows, b: int, slot: int, shown: Shown, trace: Trace, i: int):
    """Writes, as `lay` does, the log-probs with which a piece's shown tokens were drawn.

    i: the row of the trace.
    """
    drawn_T = ~shown.masked_T & unmasked(trace.step_BT[i])[shown.pos_T]
    if shown.given_T is not None:
        drawn_T &= shown.given_T < 0
    record_T = np.where(drawn_T, trace.logp_BT[i][shown.pos_T], 0.0)
    rows.record_BT[b, slot : slot + len(record_T)] = record_T


# ---- What a supervised token weighs --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Seats:
    """The supervised seats of an update, and the n rows of noise they come from."""

    row_BU: np.ndarray  # the row of noise; -1: filling
    size_BU: np.ndarray  # supervised tokens of its step
    share_BU: np.ndarray  # how many tokens it stands for: Noise.share_nT
    real_BU: np.ndarray  # False: filling
    len_n: np.ndarray  # tokens of the answer
    group_n: np.ndarray
    answers: float  # in the update, each counted for every draw of its noise
    tokens: float  # supervised ones, or with picked rounds (noise.rounds) all answers'
    longest: int  # tokens of the longest possible answer


# An aggregate takes Seats and returns what each token's loss is multiplied by, [B, U]
# or a number for all; what it says of filling counts for nothing. Below n is `answers`,
# |o_i| the length of an answer i of them, l_it the loss of its token t.


def by_token(seats: Seats):
    """1 / sum_i |o_i| sum_i sum_t l_it: DAPO (arXiv 2503.14476, section 3.3)."""
    return 1.0 / max(seats.tokens, 1)


def by_sequence(seats: Seats):
    """1/n sum_i 1/|o_i| sum_t l_it: GRPO (arXiv 2402.03300, Eq. 3)."""
    return 1.0 / (seats.answers * np.maximum(seats.len_n, 1)[seats.row_BU])


def by_step(seats: Seats):
    """1/n sum_i sum_s 1/|s| sum_{t in s} l_it: TraceRL (arXiv 2509.06949, Eq. 3)."""
    return 1.0 / (seats.answers * seats.size_BU)


def by_constant(seats: Seats):
    """1/n sum_i 1/L sum_t l_it, L the longest possible: Dr. GRPO (arXiv 2503.20783)."""
    return 1.0 / (seats.answers * seats.longest)


def by_group(seats: Seats):
    """1/G sum_g 1/S_g sum_{i in g} sum_t l_it: DiPO (arXiv 2512.22234, Eq. 7).

    G groups have supervised tokens; S_g counts the steps of all answers of group g. They are
    those of an update: with rl.updates=1 all.
    """
    real_BU, group_n = seats.real_BU, seats.group_n
    group_of_token = group_n[seats.row_BU[real_BU]]
    share_of_step = 1.0 / seats.size_BU[real_BU]  # the shares of a step's tokens are 1
    steps = np.bincount(group_of_token, share_of_step, group_n.max() + 1)  # [groups]
    groups = max(np.count_nonzero(steps), 1)
    return 1.0 / (groups * np.maximum(steps, 1)[group_n[seats.row_BU]])


def by_elbo(seats: Seats):
    """1 / sum_i |o_i| sum_i sum_t share_it l_it: LLaDA (arXiv 2502.09992, Eqs. 3, 6).

    The shares make a sum over the masked tokens an unbiased estimate of that over all.
    """
    return seats.share_BU / max(seats.len_n.sum(), 1)


def weights_of(weigh, seats: Seats, rows: Rows, layout: Layout) -> np.ndarray:
    """Returns what each token weighs; weigh: a row of AGGREGATES.

    Where the likelihood is that of steps it counts steps for tokens, and the tokens of one
    share what it weighs.
    """
    if layout.selection is None:
        return np.where(seats.real_BU, weigh(seats), 0.0)
    unit_BU = rows.unit_BU
    lead_BU = unit_BU == np.arange(unit_BU.shape[1])[None]
    steps_n = np.bincount(seats.row_BU[lead_BU], minlength=len(seats.len_n))
    of_steps = dataclasses.replace(
        seats,
        size_BU=np.ones_like(seats.size_BU),
        real_BU=lead_BU,
        tokens=lead_BU.sum(),
        len_n=steps_n,
    )
    return np.where(seats.real_BU, weigh(of_steps) / seats.size_BU, 0.0)


# Of the bounds of answers n is the rows of noise: with its shares a row estimates all of a
# bound, a mask as much as the complement that is drawn with it.


def by_elbo_sequence(seats: Seats):
    """1/n sum_i 1/|o_i| sum_t share_it l_it: ESPO (arXiv 2512.03759)."""
    return by_elbo_answer(seats) / np.maximum(seats.len_n, 1)[seats.row_BU]


def by_elbo_answer(seats: Seats):
    """1/n sum_i sum_t share_it l_it: EBPO (arXiv 2602.08676)."""
    return seats.share_BU / len(seats.len_n)


AGGREGATES = {
    "token": by_token,
    "sequence": by_sequence,
    "step": by_step,
    "constant": by_constant,
    "group": by_group,
    "elbo": by_elbo,
    "elbo_sequence": by_elbo_sequence,
    "elbo_answer": by_elbo_answer,
}
