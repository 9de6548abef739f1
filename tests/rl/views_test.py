"""Views against dLLM-RL's rows, and their promises on random traces."""

import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax.models import mask
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig, ObjectiveConfig
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling import policy
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import GIVEN
from tests.rl import dllm_rl

MASK_ID = 99


# ---- dLLM-RL's rows ------------------------------------------------------------------


def cases(*names):
    """Returns the cases of golden tables as test parameters."""
    return [
        pytest.param(case, id=f"{name}-{case['name']}")
        for name in names
        for case in dllm_rl.read(f"dataprep/{name}.json")["cases"]
    ]


def check_rows(case, traces, steps):
    """Asserts that our rounds are the reference's rows: targets, input, positions."""
    out = case["out"]
    inputs = np.array(out["input_ids"])
    labels = np.array(out["labels"]) if "labels" in out else inputs[out["seq_ids"]]
    assert len(traces) == len(inputs)
    count = sum(
        check_trajectory(case, labels, input_L, trace, step_nT)
        for input_L, trace, step_nT in zip(inputs, traces, steps, strict=True)
    )
    assert count == len(out["p_mask"])


def check_trajectory(case, labels, input_L, trace, step_nT) -> int:
    """Asserts the same of one trajectory; returns how many rows it has."""
    out, L0 = case["out"], case["out"]["start_pos"]
    shift = L0 - trace.prompt_len_B[0]  # of the left padding
    np.testing.assert_array_equal(trace.tokens_BT[0], input_L[shift:])
    rows = np.flatnonzero((labels == input_L).all(axis=1))
    is_pad_L = labels[rows[:1]].reshape(-1) == case["pad_id"]
    trained = trained_rounds(case, trace, step_nT, is_pad_L, shift)
    assert len(trained) == len(rows)
    for row, (selected_L, round_views) in zip(rows, trained, strict=True):
        np.testing.assert_array_equal(np.array(out["p_mask"][row], bool), selected_L)
        noisy = np.array(out["extended_input_ids"][row])
        pos = np.array(out["tok_idx_ext"][row])
        for view in round_views:
            at = view.pos + len(input_L) - L0 + shift  # in the noisy copy
            np.testing.assert_array_equal(noisy[at], view.shown)
            np.testing.assert_array_equal(pos[at], view.pos)
            np.testing.assert_array_equal(
                labels[row, view.supervised + shift], view.target
            )
    return len(rows)


def trained_rounds(case, trace, step_nT, is_pad_L, shift: int):
    """Returns [(positions that the reference trains, our views)] of each round."""
    cfg, out = case["config"], []
    batch, source = dllm_rl.pack(
        trace, step_nT, mask_id=case["mask_id"], block=cfg["block_size"]
    )
    for round_views in dllm_rl.rounds(dllm_rl.apart(batch, source)):
        selected_L = np.zeros(shift + trace.tokens_BT.shape[1], bool)
        selected_L[np.concatenate([v.supervised for v in round_views]) + shift] = True
        selected_L = dllm_rl.first_pads(selected_L, is_pad_L, cfg["post_num"])
        if selected_L.any():  # the reference removes rows without targets
            out.append((selected_L, round_views))
    return out


@pytest.mark.parametrize(
    "case", cases("sdar_rl_tracerl", "sdar_sft_trace", "sdar_value_tracerl")
)
def test_rounds_are_the_references_rows(case):
    cfg = case["config"]
    traces = dllm_rl.padded(
        case["samples"],
        case["pad_id"],
        post_num=cfg["post_num"],
        max_prompt=cfg["max_prompt_len"],
        max_gen=cfg["max_gen_length"],
    )
    steps = [dllm_rl.rounds_of(one, cfg["shrink"], cfg["block_size"]) for one in traces]
    check_rows(case, traces, steps)
    if "step_map_shrunk" in case["out"]:
        ours = [
            noised.step_nT[0, one.prompt_len_B[0] :] - 1
            for one, noised in zip(traces, steps, strict=True)
        ]
        # One step map more than samples where the reference dropped a prompt.
        np.testing.assert_array_equal(ours, case["out"]["step_map_shrunk"][: len(ours)])


class Draws:
    """A generator that returns recorded numbers behind a prompt of zeros."""

    def __init__(self, prompt: int, threshold, u):
        self.numbers = {
            name: np.concatenate([np.zeros(prompt), x])
            for name, x in (("uniform", threshold), ("random", u))
        }

    def uniform(self, lower, upper, shape):
        """Returns the recorded masking probabilities."""
        answer = self.numbers["uniform"][self.numbers["uniform"] > 0]
        assert ((lower <= answer) & (answer <= upper)).all()
        return self.numbers["uniform"].reshape(shape)

    def random(self, shape):
        """Returns the recorded coins."""
        return self.numbers["random"].reshape(shape)


@pytest.mark.parametrize("case", cases("sdar_rl_random_masking", "sdar_sft_semi_ar"))
def test_bernoulli_masks_what_the_reference_masks(case):
    cfg = case["config"]
    traces = dllm_rl.padded(
        case["samples"],
        case["pad_id"],
        post_num=cfg["post_num"],
        max_gen=cfg["max_gen_length"],
    )
    kind = NoiseConfig(kind="bernoulli", lower=cfg["lower_p"], upper=cfg["upper_p"])
    steps = [
        noise.noised(
            one,
            kind,
            dllm_rl.layout(cfg["block_size"]),
            Draws(one.prompt_len_B[0], threshold, u),
        )
        for one, threshold, u in zip(
            traces, case["draws"]["threshold"], case["draws"]["u"], strict=True
        )
    ]
    check_rows(case, traces, steps)


def filled(batch, a: int, b: int):
    """Returns which slots of a packed row are in use, [T] of booleans."""
    return (batch.end_BT[a, b] > 0) | (batch.group_BT[a, b] >= 0)


def sees(batch, a: int, b: int):
    """Returns who sees whom in a packed row, [T, T] of booleans."""
    m = mask.packed(
        *(x[a, b][None] for x in (batch.begin_BT, batch.end_BT, batch.group_BT))
    )
    m = jax.tree.map(lambda x_BT: np.asarray(x_BT)[0], m)
    ranged = (m.k_pos_BS >= m.q_begin_BT[:, None]) & (m.k_pos_BS < m.q_end_BT[:, None])
    return ranged | (m.k_group_BS == m.q_group_BT[:, None])


@pytest.mark.parametrize(
    "case", dllm_rl.read("dataprep/sdar_train_attention_mask.json")["cases"]
)
def test_visibility_is_the_references(case):
    L0, L1, block = case["L0"], case["L1"], case["block_size"]
    for ids, golden in zip(case["input_ids"], case["mask_with_padding"], strict=True):
        golden = np.array([[int(bit) for bit in row] for row in golden], bool)
        left = ids[:L0].count(case["pad_id"])
        prompt, response = ids[left:L0], ids[L0 : L0 + L1]
        one = dllm_rl.trace(
            [prompt + response],
            [[GIVEN] * len(prompt) + [1] * L1],
            [len(prompt)],
            [L1],
        )
        batch, _ = dllm_rl.pack(one, one.step_BT, mask_id=MASK_ID, block=block)
        used = np.flatnonzero(filled(batch, 0, 0))
        clean = batch.group_BT[0, 0, used] < 0
        at = batch.pos_BT[0, 0, used] + left + np.where(clean, 0, L1)
        ours = sees(batch, 0, 0)[used]
        assert len(np.unique(at)) == len(used)
        np.testing.assert_array_equal(ours[:, used], golden[np.ix_(at, at)])
        # Nor does a query see anything more here, or there.
        np.testing.assert_array_equal(ours.sum(axis=1), golden[at].sum(axis=1))
        assert set(range(L0 + L1, L0 + 2 * L1)) <= set(at)  # the whole noisy copy


@pytest.mark.parametrize(
    "case", dllm_rl.read("dataprep/collapse_k_unique.json")["cases"], ids=str
)
def test_shrink_is_the_references(case):
    if "raises" in case:
        with pytest.raises(ValueError, match="shrink"):
            NoiseConfig(shrink=case["k"])
        return
    steps = np.array(case["list"]) + 2  # above GIVEN
    one_block = np.zeros(len(steps), int)
    out = noise.shrink(steps, one_block, case["k"])
    np.testing.assert_array_equal(out - 2, case["out"])


def test_grids():
    np.testing.assert_array_equal(
        Layout(block=4).numbers(9, 5), [0, 0, 0, 0, 1, 1, 1, 1, 2]
    )
    np.testing.assert_array_equal(
        dllm_rl.layout(4).numbers(9, 5), [0, 1, 1, 1, 1, 2, 2, 2, 2]
    )
    np.testing.assert_array_equal(
        dllm_rl.layout(4).numbers(9, 4), Layout(block=4).numbers(9, 4)
    )


@pytest.mark.parametrize("grid", ["absolute", "response"])
def test_with_full_attention_blocks_begin_where_the_samplers_do(grid):
    layout = Layout(attention="full", block=4, grid=grid)
    for prompt in range(1, 9):
        found, turns = (f(15, prompt)[prompt:] for f in (layout.numbers, layout.turns))
        np.testing.assert_array_equal(found - found[0], turns)
        assert policy.first_block(prompt, "full", 4) == prompt


def test_shrink_stays_inside_a_block():
    steps = np.array([1, 2, 2, 3, 4, 4, 5, 6, 7, 7])
    grid = np.arange(10) // 4
    np.testing.assert_array_equal(
        noise.shrink(steps, grid, 2), [2, 2, 2, 3, 5, 5, 5, 6, 7, 7]
    )
    np.testing.assert_array_equal(
        noise.shrink(steps, grid, 4), [3, 3, 3, 3, 6, 6, 6, 6, 7, 7]
    )


def test_shrink_never_merges_a_token_with_what_stayed_masked():
    # A stop id at the third token: the fourth was never unmasked.
    steps = np.array([GIVEN, GIVEN, 1, 2, 3, FAR, FAR, FAR])
    out = noise.shrink(steps, np.arange(8) // 4, 2)
    np.testing.assert_array_equal(out, [GIVEN, GIVEN, 2, 2, 3, FAR, FAR, FAR])


# ---- Random traces -------------------------------------------------------------------


# All that is drawn are plain numbers, so that one that fails can be written down.
problems = st.tuples(  # block, trajectories, blocks of a canvas, seed
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 6),
    st.integers(2, 7),
    st.integers(0, 2**32 - 1),
)
choices = st.fixed_dictionaries(
    {
        "shift": st.integers(0, 1),
        "grid": st.sampled_from(["absolute", "response"]),
        "longer": st.integers(0, 55),  # than the longest answer, up to the canvas
        "rate": st.sampled_from(["token", "scope"]),
        "shrink": st.integers(1, 8),  # up to the block
        "draws": st.integers(1, 3),
        "rows": st.integers(1, 4),
        "spare": st.integers(0, 168),  # slots of a packed row, up to three canvases
        "seed": st.integers(0, 2**32 - 1),
    }
)


def made(block, n, blocks, seed):
    """Returns (trace, block): ragged prompts, random orders, tails after the stop."""
    rng = np.random.default_rng(seed)
    T = blocks * block
    steps, prompts, lens = np.full((n, T), FAR), [], []
    for i in range(n):
        prompt = int(rng.integers(1, T))
        length = int(rng.integers(0 if n > 1 else 1, T - prompt + 1))
        steps[i, :prompt] = GIVEN
        count = 0
        last = (prompt + length - 1) // block
        for j in range(prompt // block, last + 1 if length else 0):
            inside = np.arange(max(j * block, prompt), (j + 1) * block)
            # Beyond the stop a token may have been unmasked or not.
            open_ = (inside < prompt + length) | (rng.random(len(inside)) < 0.5)
            drawn = rng.integers(0, rng.integers(1, block + 1), len(inside))[open_]
            rank = np.unique(drawn, return_inverse=True)[1]
            steps[i, inside[open_]] = count + 1 + rank
            count += rank.max() + 1
        prompts.append(prompt)
        lens.append(length)
    tokens = rng.integers(0, MASK_ID, (n, T))
    return dllm_rl.trace(tokens, steps, prompts, lens), block


def packed(problem, chosen, **fixed):
    """Returns (trace, batch, source, noise, layout) of a problem under these choices."""
    trace, block = made(*problem)
    T, longest = trace.tokens_BT.shape[1], max(int(trace.len_B.max()), 1)
    kind = fixed.get("kind", "trace")
    layout = Layout(
        attention=fixed.get("attention", "block"),
        # A token that is not masked cannot answer for itself.
        shift=1 if kind == "ar" else fixed.get("shift", chosen["shift"]),
        block=block * fixed.get("wide", 1),
        grid=chosen["grid"],
        longest=min(longest + chosen["longer"], T),
    )
    cfg = NoiseConfig(
        kind=kind,
        rate=chosen["rate"],
        shrink=min(chosen["shrink"], block),
        draws=chosen["draws"] if noise.KINDS[kind].random else 1,
    )
    shape = BatchConfig(
        rows=chosen["rows"], tokens=T + layout.block + min(chosen["spare"], 3 * T)
    )
    rng = np.random.default_rng(chosen["seed"])
    noised = noise.noised(trace, cfg, layout, rng)
    most = layouts.microbatches(
        trajectories=len(trace.len_B),
        slots=T,
        answer=longest,
        rounds=noise.rounds(cfg, layout, longest),
        copies=cfg.copies,
        layout=layout,
        cfg=shape,
    )
    copied = jax.tree.map(lambda x: np.repeat(x, cfg.copies, axis=0), trace)
    batch, source = views.pack(
        copied,
        noised,
        mask_id=MASK_ID,
        layout=layout,
        cfg=shape,
        most=most,
        aggregate="token",
        copies=cfg.copies,
    )
    assert batch.used <= most
    return trace, batch, source, noised, layout


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        ((8, 1, 3, 9680), {"longer": 14, "shrink": 3, "spare": 8}),
        ((8, 1, 7, 4054), {"longer": 39, "shrink": 6, "spare": 39}),
        ((4, 2, 3, 34692), {"longer": 53, "shrink": 5, "spare": 6}),
    ],
)
def test_steps_behind_the_stop_push_an_answer_into_more_rounds(problem, chosen):
    common = {"shift": 0, "grid": "absolute", "rate": "token", "draws": 1, "rows": 1}
    chosen = common | chosen | {"seed": 0}
    _, batch, *_ = packed(problem, chosen, attention="full", kind="trace")
    assert batch.used > 0


SHAPES = [  # attention, kind of noise, blocks of the sampler in one that is trained
    ("block", "trace", 1),
    ("block", "trace", 2),
    ("block", "complement", 1),
    ("block", "subset", 1),
    ("block", "left_to_right", 1),
    ("full", "trace", 1),
    ("full", "bernoulli", 1),
    ("full", "semi_ar", 1),
    ("full", "left_to_right", 1),
    ("causal", "ar", 1),
]


@pytest.mark.parametrize(("attention", "kind", "wide"), SHAPES)
@given(problem=problems, chosen=choices)
def test_views_by_definition(attention, kind, wide, problem, chosen):
    """What is supervised, and what is seen from the slot that answers for it."""
    trace, batch, source, noised, layout = packed(
        problem, chosen, attention=attention, kind=kind, wide=wide
    )
    real_mBU = source.row_mBU >= 0
    copies = len(noised.step_nT) // len(trace.len_B)
    answer_nT = np.repeat(noise.answers(trace), copies, axis=0)
    if copies == 1 and not noise.KINDS[kind].random:
        assert (noised.share_nT[answer_nT] == 1).all()
    # Once each: what the noise supervises, and nothing else.
    taught_nT = np.zeros(answer_nT.shape, int)
    np.add.at(taught_nT, (source.row_mBU[real_mBU], source.pos_mBU[real_mBU]), 1)
    np.testing.assert_array_equal(taught_nT, answer_nT & (noised.share_nT > 0))
    np.testing.assert_array_equal(real_mBU, batch.weight_BU > 0)
    for a, b in np.ndindex(batch.group_BT.shape[:2]):
        sees_TT = sees(batch, a, b)
        for u in np.flatnonzero(real_mBU[a, b]):
            row, at = source.row_mBU[a, b, u], source.pos_mBU[a, b, u]
            slot, i = batch.where_BU[a, b, u], row // copies
            assert batch.pos_BT[a, b, slot] == at - layout.shift
            assert batch.target_BU[a, b, u] == trace.tokens_BT[i, at]
            shown_T, context_T = context(trace, i, noised.step_nT[row], at, layout)
            seen = np.flatnonzero(sees_TT[slot])
            seen = seen[np.argsort(batch.pos_BT[a, b, seen])]
            np.testing.assert_array_equal(
                batch.pos_BT[a, b, seen], np.flatnonzero(context_T)
            )
            np.testing.assert_array_equal(
                batch.tokens_BT[a, b, seen], shown_T[context_T]
            )


def context(trace, i: int, step_T, at: int, layout: Layout):
    """Returns (what is shown, where it is seen) [T] when position `at` is predicted."""
    tokens_T, pos_T = trace.tokens_BT[i], np.arange(len(step_T))
    shown_T = np.where(step_T >= step_T[at], MASK_ID, tokens_T)
    if layout.attention == "full":
        return shown_T, pos_T < trace.prompt_len_B[i] + layout.longest
    if layout.attention == "causal":
        return tokens_T, pos_T <= at - layout.shift
    grid_T = layout.numbers(len(tokens_T), trace.prompt_len_B[i])
    inside_T = grid_T == grid_T[at]
    context_T = grid_T <= grid_T[at]
    if not inside_T[at - layout.shift]:  # it is predicted in the clean copy
        context_T = grid_T < grid_T[at]
    return np.where(inside_T, shown_T, tokens_T), context_T


@given(problems, choices)
def test_packed_rows_by_definition(problem, chosen):
    """Who sees whom, from positions and membership alone."""
    trace, batch, source, _, layout = packed(problem, chosen, shift=0)
    for a, b in np.ndindex(batch.group_BT.shape[:2]):
        used_T, sees_TT = filled(batch, a, b), sees(batch, a, b)
        assert a < batch.used or not used_T.any()
        assert not sees_TT[~used_T].any() and not sees_TT[:, ~used_T].any()
        copy_T = batch.begin_BT[a, b]  # which clean copy a slot belongs to
        for start in np.unique(copy_T[used_T]):
            mine_T = used_T & (copy_T == start)
            seats_U = (source.row_mBU[a, b] >= 0) & mine_T[batch.where_BU[a, b]]
            (row,) = np.unique(source.row_mBU[a, b, seats_U])
            check_copy(batch, (a, b), mine_T, sees_TT, trace, row, layout)


def check_copy(batch, place, mine_T, sees_TT, trace, row, layout: Layout):
    """Asserts what the slots of one clean copy and its views hold and see."""
    group_T, pos_T = batch.group_BT[place], batch.pos_BT[place]
    grid_T = layout.numbers(trace.tokens_BT.shape[1], trace.prompt_len_B[row])
    clean_T = mine_T & (group_T < 0)
    np.testing.assert_array_equal(pos_T[clean_T], np.arange(clean_T.sum()))
    np.testing.assert_array_equal(
        batch.tokens_BT[place][clean_T], trace.tokens_BT[row, : clean_T.sum()]
    )
    for slot in np.flatnonzero(mine_T):
        number = grid_T[pos_T[slot]]
        if group_T[slot] < 0:
            expected_T = clean_T & (grid_T[pos_T] <= number)
        else:
            expected_T = (clean_T & (grid_T[pos_T] < number)) | (
                mine_T & (group_T == group_T[slot])
            )
            assert expected_T.sum() == (grid_T <= number).sum()  # its context is whole
        np.testing.assert_array_equal(sees_TT[slot], expected_T)


@given(problems)
def test_packed_tokens_are_one_copy_and_the_active_blocks(problem):
    trace, block = made(*problem)
    answer_nT, bound = noise.answers(trace), 0
    for i in np.flatnonzero(trace.len_B):
        step_T = trace.step_BT[i]
        steps = {(p // block, step_T[p]) for p in np.flatnonzero(answer_nT[i])}
        bound += trace.prompt_len_B[i] + trace.len_B[i] + len(steps) * block
    batch, _ = views.pack(
        trace,
        noise.of_steps(trace.step_BT),
        mask_id=MASK_ID,
        layout=Layout(block=block),
        cfg=BatchConfig(rows=1, tokens=int(2 * bound) + block),
        most=1,
        aggregate="token",
    )
    held = (batch.end_BT > batch.begin_BT) | (batch.group_BT >= 0)
    assert answer_nT.sum() < held.sum() <= bound or bound == 0


def test_pieces_are_put_where_they_fit_the_longest_first():
    """Rows of six slots and four seats; by hand."""

    def fill(*pieces):
        made = [layouts.Piece((layouts.View(0, 0, c, 1, s),)) for c, s in pieces]
        rows = views.fit(made, slots=6, seats=4)
        return [[(piece.cost, piece.supervised) for piece in row] for row in rows]

    # The shortest first would leave the last two a row each.
    assert fill((2, 1), (2, 1), (4, 1), (4, 1)) == [[(4, 1), (2, 1)]] * 2
    # A row may be full of slots, and of seats.
    assert fill((4, 3), (2, 1)) == [[(4, 3), (2, 1)]]
    assert fill((4, 3), (2, 2)) == [[(4, 3)], [(2, 2)]]
    assert fill((4, 1), (3, 1)) == [[(4, 1)], [(3, 1)]]


def piece(*firsts):
    """Returns a Piece of views of two positions and one seat that begin at these."""
    made = tuple(layouts.View(0, first, first + 2, 1, 1) for first in firsts)
    return layouts.Piece(made)


def test_the_emptiest_row_is_cut_into_gaps_if_all_of_it_goes_in():
    """By hand, in rows of ten slots: a view stands behind a clean copy."""
    three = piece(0, 0, 0)  # six slots and three seats
    rows = [[three], [three], [piece(2, 2)]]  # a gap holds one of the last views
    assert views.poured(rows, slots=10, seats=4) == [[three, piece(2)]] * 2
    # A seat, a slot or a gap too few.
    assert views.poured(rows, slots=10, seats=3) == rows
    assert views.poured(rows, slots=9, seats=4) == rows
    assert views.poured(rows[1:], slots=10, seats=4) == rows[1:]
    # The widest gap first.
    rows = [[three], [piece(0, 0)], [piece(0)]]
    assert views.poured(rows, slots=10, seats=9) == [[piece(0, 0), piece(0)], [three]]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=7), max_size=12),
    st.integers(0, 30),
)
def test_pouring_keeps_every_view_and_the_size_of_rows(firsts, spare):
    pieces = [piece(*sorted(of_piece)) for of_piece in firsts]
    slots = max((p.cost for p in pieces), default=0) + spare
    seats = max((p.supervised for p in pieces), default=0) + spare // 4
    before = [[p] for p in pieces]
    after = views.poured(before, slots, seats)
    assert len(after) <= len(before)
    for row in after:
        assert sum(p.cost for p in row) <= slots
        assert sum(p.supervised for p in row) <= seats
        assert all(list(p.views) == sorted(p.views) for p in row)

    def held(rows):
        return sorted(view for row in rows for p in row for view in p.views)

    assert held(after) == held(before)


def test_what_is_filling_is_nothing_and_what_nobody_asked_for_is_not_there():
    trace, block = made(2, 3, 3, 0)
    batch, source = views.pack(
        trace,
        noise.of_steps(trace.step_BT),
        mask_id=MASK_ID,
        layout=Layout(block=block),
        cfg=BatchConfig(rows=1, tokens=200),
        most=2,
        aggregate="token",
    )
    for name in ("tokens", "pos", "begin", "end"):
        assert not getattr(batch, f"{name}_BT")[1].any(), name
    assert (batch.group_BT[1] == -1).all() and (source.row_mBU[1] == -1).all()
    for name in ("where", "target", "weight"):
        assert not getattr(batch, f"{name}_BU")[1].any(), name
    asked = batch.beside_BU, batch.guidance, batch.unit_BU, batch.limit_BU
    assert (*asked, batch.record_BT) == (None,) * 5


def test_a_canvas_beside_its_own_shows_the_blank_prompt_and_records_nothing_of_it():
    """Two slots of an answer behind a prompt of one, on both canvases; by hand."""
    shown = layouts.Shown(
        pos_T=np.array([0, 1, 2, 0, 1, 2]),
        masked_T=np.array([0, 0, 1, 0, 0, 1], bool),
        group_T=np.full(6, -1),
        end_T=np.array([3, 3, 3, 6, 6, 6]),
        begin_T=np.array([0, 0, 0, 3, 3, 3]),
        given_T=np.array([-1, -1, -1, 0, -1, -1]),  # id 0 is a token like others
        pos_U=np.array([2]),
        slot_U=np.array([2]),
        beside_U=np.array([5]),
        draw_U=0,
        size_U=np.array([1]),
        lead_U=np.array([0]),
        limit_U=np.array([np.inf]),
    )
    step_BT, logp_BT = np.array([[1, 1, 2]]), np.array([[-0.5, -0.25, -0.75]])
    trace = types.SimpleNamespace(step_BT=step_BT, logp_BT=logp_BT)
    rows = views.empty(1, 8, 3)
    views.lay(rows, 0, 2, 1, shown, np.array([7, 8, 9]), MASK_ID)
    views.lay_record(rows, 0, 2, shown, trace, 0)
    assert rows.tokens_BT[0].tolist() == [0, 0, 7, 8, MASK_ID, 0, 8, MASK_ID]
    assert rows.record_BT[0].tolist() == [0, 0, -0.5, -0.25, 0, 0, -0.25, 0]
    assert rows.begin_BT[0].tolist() == [0, 0, 2, 2, 2, 5, 5, 5]
    assert rows.end_BT[0].tolist() == [0, 0, 5, 5, 5, 8, 8, 8]
    assert (rows.where_BU[0, 1], rows.beside_BU[0, 1]) == (4, 7)
    assert (rows.target_BU[0, 1], rows.unit_BU[0, 1]) == (9, 1)


def test_what_rows_hold_is_a_share_of_the_microbatches_in_use():
    """Of two microbatches of two rows of four slots; by hand."""
    ids, seats = np.zeros((2, 2, 4), np.int32), np.zeros((2, 2, 3), np.int32)
    batch = views.TrainBatch(
        used=np.int32(1),
        tokens_BT=ids,
        pos_BT=ids,
        begin_BT=ids + 1,
        end_BT=ids + 1,
        group_BT=ids - 1,
        where_BU=seats,
        target_BU=seats,
        weight_BU=seats,
    )
    assert (batch.held, batch.fill) == (0, 0)
    batch.end_BT[0, 0] = [3, 2, 1, 0]  # the first two see something
    batch.group_BT[0, 1, :3] = [0, 1, -1]  # so do these
    assert (batch.held, batch.fill) == (4, 4 / 8)
    assert batch.replace(used=np.int32(2)).fill == 4 / 16
    assert batch.replace(used=np.int32(0)).fill == 4  # of nothing: no division by zero


def test_a_long_trajectory_is_split_into_the_same_views():
    order = [GIVEN] * 5 + [1 + (7 * i) % 27 for i in range(27)]
    trace = dllm_rl.trace([range(32)], [order], [5], [27])
    found = []
    for tokens in (36, 50, 400):
        batch, source = views.pack(
            trace,
            noise.of_steps(trace.step_BT),
            mask_id=MASK_ID,
            layout=Layout(block=4),
            cfg=BatchConfig(rows=1, tokens=tokens),
            most=30,
            aggregate="token",
        )
        found.append(
            sorted((*v.pos, *v.shown, *v.target) for v in dllm_rl.apart(batch, source))
        )
        assert (batch.used > 1) == (tokens < 400)
    assert found[0] == found[1] == found[2]


@given(problems, choices)
def test_gather_undoes_scatter(problem, chosen):
    trace, _, source, *_ = packed(problem, chosen)
    shape = trace.tokens_BT.shape
    rng = np.random.default_rng(0)
    x_nT = rng.normal(size=shape).astype(np.float32)
    x_mBU = source.gather(x_nT)
    assert x_mBU.dtype == np.float32
    assert (x_mBU[source.row_mBU < 0] == 0).all()
    np.testing.assert_array_equal(
        source.scatter(x_mBU + (source.row_mBU < 0), shape),
        np.where(noise.answers(trace), x_nT, 0),
    )


@given(problems)
def test_shrink_by_one_is_the_identity(problem):
    trace, block = made(*problem)
    grid = np.arange(trace.tokens_BT.shape[1]) // block
    for step_T in trace.step_BT:
        np.testing.assert_array_equal(noise.shrink(step_T, grid, 1), step_T)


@given(problems, st.integers(0, 2**32 - 1))
def test_subsets_mask_some_of_each_blocks_answer_and_all_that_follows(problem, seed):
    trace, block = made(*problem)
    rng = np.random.default_rng(seed)
    kind = NoiseConfig(kind="subset")
    out_nT = noise.noised(trace, kind, Layout(block=block), rng).step_nT
    answer_nT = noise.answers(trace)
    assert np.isin(out_nT[answer_nT], [GIVEN, 1]).all()
    np.testing.assert_array_equal(
        out_nT[~answer_nT], np.where(trace.step_BT[~answer_nT] == GIVEN, GIVEN, FAR)
    )
    grid = np.arange(out_nT.shape[1]) // block
    for out_T, answer_T in zip(out_nT, answer_nT, strict=True):
        for number in np.unique(grid[answer_T]):
            assert (out_T[answer_T & (grid == number)] == 1).any()


def test_every_size_of_a_subset_and_every_subset_of_a_size_are_equally_likely():
    rng, counts = np.random.default_rng(0), {}
    step_T, grid_T = np.full(3, 7), np.zeros(3, int)
    for _ in range(6000):
        cfg = NoiseConfig(kind="subset")
        (one,) = noise.subset(step_T, np.ones(3, bool), grid_T, grid_T, rng, cfg)
        out_T = one.step_T
        counts[tuple(out_T)] = counts.get(tuple(out_T), 0) + 1
    assert len(counts) == 7
    for chosen, count in counts.items():
        expected = 2000 / {1: 3, 2: 3, 3: 1}[sum(chosen)]
        assert abs(count - expected) < 4 * np.sqrt(expected), chosen


@pytest.mark.parametrize("aggregate", views.AGGREGATES)
@given(problem=problems, spare=st.integers(0, 112), share=st.integers(2, 9))
def test_weights_sum_to_their_definition(aggregate, problem, spare, share):
    trace, block = made(*problem)
    n, T = trace.tokens_BT.shape
    step_nT = trace.step_BT
    group_n = np.arange(n) // 2
    cfg = BatchConfig(rows=2, tokens=T + block + min(spare, 2 * T))
    layout = Layout(block=block, longest=100)
    share_nT = share * (step_nT > 0).astype(np.float32)
    batch, source = views.pack(
        trace,
        noise.Noise(step_nT=step_nT, share_nT=share_nT),
        mask_id=MASK_ID,
        layout=layout,
        cfg=cfg,
        most=layouts.microbatches(
            trajectories=n,
            slots=T,
            answer=T,
            rounds=block,
            copies=1,
            layout=layout,
            cfg=cfg,
        ),
        aggregate=aggregate,
        group_n=group_n,
    )
    weight_nT = source.scatter(batch.weight_BU, (n, T))
    answer_nT = noise.answers(trace)
    # A step belongs to one block: a group's steps are those of its rows.
    steps_n = np.array([len(np.unique(step_nT[i, answer_nT[i]])) for i in range(n)])
    steps_g = np.bincount(group_n, steps_n)
    for i in np.flatnonzero(answer_nT.any(axis=1)):
        inside_T = answer_nT[i]
        steps = step_nT[i, inside_T]
        expected = {
            "token": 1 / answer_nT.sum(),
            "sequence": 1 / (n * inside_T.sum()),
            "step": 1 / (n * (steps == steps[:, None]).sum(axis=1)),
            "constant": 1 / (n * 100),
            "group": 1 / ((steps_g > 0).sum() * steps_g[group_n[i]]),
            "elbo": share_nT[i, inside_T] / answer_nT.sum(),
            "elbo_sequence": share_nT[i, inside_T] / (n * inside_T.sum()),
            "elbo_answer": share_nT[i, inside_T] / n,
        }[aggregate]
        expected = np.broadcast_to(expected, inside_T.sum())
        np.testing.assert_allclose(weight_nT[i, inside_T], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "aggregate",
    ["token", "sequence", "constant", "elbo", "elbo_sequence", "elbo_answer"],
)
def test_a_mask_and_its_complement_weigh_as_much_as_a_trace(aggregate):
    step_nT = np.where(np.arange(8) < 4, GIVEN, np.arange(8))[None].repeat(2, axis=0)
    trace = dllm_rl.trace(np.ones((2, 8), int), step_nT, [4, 4], [4, 4])
    layout, cfg = Layout(block=4, longest=8), BatchConfig(rows=1, tokens=64)

    def total(kind, draws):
        # Each token stands for two, in one of two rows.
        how = NoiseConfig(kind=kind, draws=draws, lower=0.5, upper=0.5)
        batch, _ = views.pack(
            jax.tree.map(lambda x: np.repeat(x, how.copies, axis=0), trace),
            noise.noised(trace, how, layout, np.random.default_rng(0)),
            mask_id=MASK_ID,
            layout=layout,
            cfg=cfg,
            most=8,
            aggregate=aggregate,
            copies=how.copies,
            draws=draws,
        )
        return batch.weight_BU.sum()

    assert total("complement", 1) == pytest.approx(total("trace", 1), rel=1e-6)
    assert total("complement", 3) == pytest.approx(total("trace", 1), rel=1e-6)


@pytest.mark.parametrize("likelihood", ["tokens", "selection"])
def test_where_nothing_is_masked_a_token_is_a_step_as_it_was_sampled(likelihood):
    """One view shows all of an answer; one given without an order is of one step."""
    step_nT = np.array([[0, 0, 1, 2, 3, 4], [0, 1, 2, FAR, FAR, FAR]])
    trace = dllm_rl.trace(np.ones((2, 6), int), step_nT, [2, 1], [4, 2])
    model = ModelConfig(attention="causal", shift=1, block=1)
    sampler = SamplerConfig(block=1, max_new=4)
    layout = layouts.of(
        model, sampler, NoiseConfig(), ObjectiveConfig(likelihood=likelihood)
    )

    def packed(trace, aggregate):
        batch, source = views.pack(
            trace,
            noise.noised(trace, NoiseConfig(), layout),
            mask_id=MASK_ID,
            layout=layout,
            cfg=BatchConfig(rows=1, tokens=16),
            most=1,
            aggregate=aggregate,
            group_n=np.array([0, 1]),
        )
        return batch, source.scatter(batch.weight_BU, step_nT.shape)

    answer_nT = noise.answers(trace)
    for aggregate, want_n in {"step": [1 / 2, 1 / 2], "group": [1 / 8, 1 / 4]}.items():
        batch, weight_nT = packed(trace, aggregate)
        want_nT = np.where(answer_nT, np.array(want_n)[:, None], 0)
        np.testing.assert_allclose(weight_nT, want_nT, rtol=1e-6)
        assert learner.supervised_units(batch) == answer_nT.sum() == 6
    unordered = trace.replace(step_BT=np.where(answer_nT, 1, trace.step_BT))
    batch, weight_nT = packed(unordered, "step")
    np.testing.assert_allclose(weight_nT.sum(axis=1), [1 / 2, 1 / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("n", "slots", "block", "tokens", "rows"),
    [
        (6, 20, 1, 60, 5),  # each fills little more than half a row; one is cut to fit
        (8, 8, 8, 32, 4),  # four fit by their slots, but only two by their targets
    ],
)
def test_the_bound_on_microbatches_holds_where_rows_are_half_full(
    n, slots, block, tokens, rows
):
    step_nT = np.array([[GIVEN] + [1] * (slots - 1)] * n)
    trace = dllm_rl.trace(np.ones((n, slots)), step_nT, [1] * n, [slots - 1] * n)
    cfg = BatchConfig(rows=1, tokens=tokens)
    layout = Layout(block=block)
    batch, source = views.pack(
        trace,
        noise.of_steps(step_nT),
        mask_id=MASK_ID,
        layout=layout,
        cfg=cfg,
        most=layouts.microbatches(
            trajectories=n,
            slots=slots,
            answer=slots - 1,
            rounds=1,
            copies=1,
            layout=layout,
            cfg=cfg,
        ),
        aggregate="token",
    )
    assert batch.used == rows
    assert (source.row_mBU >= 0).sum() == n * (slots - 1)


def test_a_batch_that_is_too_small_says_so():
    def pack(trace, tokens, most, **layout):
        views.pack(
            trace,
            noise.of_steps(trace.step_BT),
            mask_id=MASK_ID,
            layout=Layout(**layout),
            cfg=BatchConfig(1, tokens),
            most=most,
            aggregate="token",
        )

    trace = dllm_rl.trace([[1] * 12], [[GIVEN] * 4 + [1] * 8], [4], [8])
    with pytest.raises(ValueError, match="batch.tokens=11 is too small"):
        pack(trace, 11, 9)
    with pytest.raises(ValueError, match="batch.tokens=11 is too small"):
        pack(trace, 11, 9, attention="full")
    with pytest.raises(ValueError, match="raise batch.tokens"):
        pack(trace, 12, 1)
    # An answer that is drawn at once from almost nothing has more targets than seats.
    trace = dllm_rl.trace([[1] * 8], [[GIVEN] + [1] * 7], [1], [7])
    with pytest.raises(ValueError, match="batch.tokens=8 is too small"):
        pack(trace, 8, 9, block=8)
