"""Views packed into fixed rows: what one update trains on.

A *round* of a block supervises the tokens that one step of its noise unmasked, with those of
this and later steps masked and earlier ones shown (noise.py); a trajectory's rounds are laid
out as its model sees them (layout.py), and several trajectories share a row.

Everything here is numpy on the host; the result is a TrainBatch of one fixed shape.
"""

import dataclasses

import flax.struct
import numpy as np

from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import BatchConfig
from dllm_jax.rl.noise import answers


@flax.struct.dataclass
class TrainBatch:
    """B rows of T slots, of which U are supervised.

    As packed it is a stack of m microbatches: every array has a leading m, and the first
    `used` of them hold something. Optional fields are what an objective asks for.
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
    adv_BU: np.ndarray | None = None
    old_logp_BU: np.ndarray | None = None
    ref_logp_BU: np.ndarray | None = None
    ret_BU: np.ndarray | None = None
    old_value_BU: np.ndarray | None = None

    @property
    def fill(self) -> float:
        """The share of the used microbatches' slots that hold something."""
        held = (self.end_BT > self.begin_BT) | (self.group_BT >= 0)
        return float(held.sum() / max(self.used * held[0].size, 1))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where each supervised slot comes from: (trajectory, position), -1 for filling."""

    row_mBU: np.ndarray
    pos_mBU: np.ndarray

    def gather(self, x_nT):
        """Returns the [n, T] array's values in the batch's order; 0 for filling."""
        return np.where(self.row_mBU >= 0, x_nT[self.row_mBU, self.pos_mBU], 0).astype(
            np.float32
        )

    def scatter(self, x_mBU, shape):
        """Returns an [n, T] array with the batch's values in place; 0 elsewhere."""
        out_nT = np.zeros(shape, np.float32)
        held = self.row_mBU >= 0
        out_nT[self.row_mBU[held], self.pos_mBU[held]] = np.asarray(x_mBU)[held]
        return out_nT


def fit(
    items: list[layouts.Piece], capacity: int, slots: int
) -> list[list[layouts.Piece]]:
    """Packs pieces into rows, first fit, longest first."""
    rows, room, free = [], [], []
    for item in sorted(items, key=lambda piece: -piece.cost):
        for i in range(len(rows)):
            if item.cost <= room[i] and item.supervised <= free[i]:
                break
        else:
            i = len(rows)
            rows.append([])
            room.append(capacity)
            free.append(slots)
        rows[i].append(item)
        room[i] -= item.cost
        free[i] -= item.supervised
    return rows


def pack(
    trace, noise,
    *, mask_id: int, layout: layouts.Layout, cfg: BatchConfig, most: int, aggregate: str,
    copies=1, draws=1, group_n=None,
):  # fmt: skip
    """Returns (TrainBatch, Source) of `most` microbatches for one update.

    trace: a host Trace of n rows; noise: a Noise of as many; `copies` rows after each other
    are one trajectory, of whose tokens they show `draws` draws. aggregate, group_n (None:
    each row its own): how tokens are weighed, see ObjectiveConfig.
    """
    n = len(noise.step_nT)
    wanted_nT = answers(trace) & (noise.share_nT > 0)
    seats = layout.seats(cfg)
    items = []
    for i in range(0, n, copies):
        prompt, length = int(trace.prompt_len_B[i]), int(trace.len_B[i])
        rows = range(i, i + copies)
        found = layouts.views_of(rows, prompt, length, noise, wanted_nT, layout)
        items += layouts.cut(found, layout, cfg)
    rows = fit(items, cfg.tokens, seats)
    if len(rows) > most * cfg.rows:
        raise ValueError(
            f"{len(rows)} packed rows do not fit {most} microbatches of "
            f"batch.rows={cfg.rows}; raise batch.tokens"
        )

    def filled(width, value=0):
        return np.full((most * cfg.rows, width), value, np.int32)

    # What stays as it is, with end = begin, sees nothing, and nothing sees it.
    tokens, pos, begin = (filled(cfg.tokens) for _ in range(3))
    end, group = filled(cfg.tokens), filled(cfg.tokens, -1)
    where, target = filled(seats), filled(seats)
    row, at, size = filled(seats, -1), filled(seats), filled(seats, 1)
    for r, packed in enumerate(rows):
        first, supervised = 0, 0  # next free slot, next free supervised slot
        for piece in packed:
            i = piece.views[0].draw
            prompt, tokens_T = int(trace.prompt_len_B[i]), trace.tokens_BT[i]
            x = layouts.present(piece, prompt, noise, wanted_nT, layout)
            span = slice(first, first + len(x.pos_T))
            tokens[r, span] = np.where(x.masked_T, mask_id, tokens_T[x.pos_T])
            pos[r, span] = x.pos_T
            begin[r, span] = first
            end[r, span] = first + x.end_T
            group[r, span] = np.where(x.group_T >= 0, first + x.group_T, -1)

            seat = slice(supervised, supervised + len(x.pos_U))
            where[r, seat] = first + x.slot_U
            target[r, seat] = tokens_T[x.pos_U]
            row[r, seat], at[r, seat], size[r, seat] = x.draw_U, x.pos_U, x.size_U
            first, supervised = span.stop, seat.stop
    held = row >= 0
    group_n = np.arange(n) if group_n is None else group_n
    share = noise.share_nT[row, at]
    whole = n * draws / copies  # a mask and its complement are two rows of one draw
    how = (share, trace, layout.longest, held, group_n)
    weight = weights(aggregate, whole, row, size, *how)
    weight = np.where(held, weight, 0.0)

    def cut(x):
        return x.reshape(most, cfg.rows, -1)

    batch = TrainBatch(
        used=np.int32(-(-len(rows) // cfg.rows)),
        tokens_BT=cut(tokens),
        pos_BT=cut(pos),
        begin_BT=cut(begin),
        end_BT=cut(end),
        group_BT=cut(group),
        where_BU=cut(where),
        target_BU=cut(target),
        weight_BU=cut(weight.astype(np.float32)),
    )
    return batch, Source(row_mBU=cut(row), pos_mBU=cut(at))


def weights(aggregate: str, n, row, size, share, trace, longest: int, held, group_n):
    """Returns each supervised token's share of an update's loss; n: of answers' draws."""
    if aggregate == "token":
        return 1.0 / max(held.sum(), 1)
    if aggregate == "sequence":
        return 1.0 / (n * np.maximum(trace.len_B, 1)[row])
    if aggregate == "step":
        return 1.0 / (n * size)
    if aggregate == "group":  # DiPO (arXiv 2512.22234) Eq. 7
        steps = np.bincount(group_n[row[held]], 1.0 / size[held], group_n.max() + 1)
        groups = max(np.count_nonzero(steps), 1)
        return 1.0 / (groups * np.maximum(steps, 1)[group_n[row]])
    if aggregate == "elbo":
        return share / max(trace.len_B.sum(), 1)
    return 1.0 / (n * longest)
