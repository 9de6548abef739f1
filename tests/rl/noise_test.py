"""Noise and layouts against dLLM-RL's rows of every method, and what each kind promises."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax.models.mask import FAR
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling.state import GIVEN
from tests.rl import dllm_rl

METHODS = {
    "TraceRL": "trace",
    "random_masking": "bernoulli",
    "coupled": "complement",
    "semi-ar": "semi_ar",
    "ar": "ar",
}


class Draws:
    """A generator that returns recorded numbers, one after the other."""

    def __init__(self, numbers):
        self.numbers = iter(numbers)

    def uniform(self, lower, upper, shape):
        """Returns the next masking probabilities."""
        return np.broadcast_to(next(self.numbers), shape)

    def random(self, shape):
        """Returns the next coins."""
        return next(self.numbers).reshape(shape)


def recorded(case, i: int, one, layout: Layout) -> Draws:
    """Returns the reference's draws for sample i, placed in its canvas."""
    draws, cfg = case.get("draws", {}), case["config"]
    prompt, T = int(one.prompt_len_B[0]), one.tokens_BT.shape[1]
    if "u_t" in draws:
        rate = np.array(draws["u_t"][i]) * (cfg["upper_p"] - cfg["lower_p"])
        coins = np.array(draws["u"][i])[:, -T:]
        return Draws(x for pair in zip(rate + cfg["lower_p"], coins) for x in pair)
    if not draws:
        return Draws([])
    drawn = [np.array(draws[name]) for name in ("threshold", "u")]
    if cfg["method"] == "semi-ar":  # vectors for each group; inside it they count
        numbers = layout.numbers(T, prompt)
        groups = numbers[-1] - numbers[prompt] + 1
        inside = np.clip(numbers - numbers[prompt], 0, None)
        drawn = [x[i * groups + inside, x.shape[1] - T + np.arange(T)] for x in drawn]
    else:
        drawn = [np.concatenate([np.zeros(prompt), x[i]]) for x in drawn]
    return Draws(drawn)


def rows(case, one, batch, source, layout: Layout):
    """Returns a trajectory's rows: what is shown in each view, and what is supervised."""
    out = {}
    for a, b in np.ndindex(batch.group_BT.shape[:2]):
        where, begin = batch.where_BU[a, b], batch.begin_BT[a, b]
        view = batch.group_BT[a, b] if layout.attention == "block" else begin
        for u in np.flatnonzero(source.row_mBU[a, b] >= 0):
            mine = view == view[where[u]]
            if layout.attention != "block":
                mine &= batch.end_BT[a, b] > begin
            name = source.row_mBU[a, b, u], a, b
            name += () if layout.attention == "block" else (int(view[where[u]]),)
            shown, selected = out.setdefault(
                name,
                (
                    np.full(one.tokens_BT.shape[1], -1),
                    np.zeros(len(one.tokens_BT[0]), bool),
                ),
            )
            shown[batch.pos_BT[a, b, mine]] = batch.tokens_BT[a, b, mine]
            selected[source.pos_mBU[a, b, u]] = True
    return out.values()


def in_order(case) -> bool:
    """Returns whether semi-AR goes from left to right; a trace's order is trace SFT here."""
    return case["config"]["method"] != "semi-ar" or all(
        s["step_map"] == sorted(s["step_map"]) for s in case["samples"]
    )


def whole(one, sample):
    """Returns a trace with the steps of positions that the canvas lacks: they count."""
    prompt = int(one.prompt_len_B[0])
    steps = [GIVEN] * prompt + [step + 1 for step in sample["step_map"]]
    more = len(steps) - one.tokens_BT.shape[1]
    return one.replace(
        tokens_BT=np.pad(one.tokens_BT, ((0, 0), (0, max(more, 0)))),
        step_BT=np.array([steps], np.int32) if more > 0 else one.step_BT,
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{case['name']}")
        for name in (
            "dream_rl",
            "dream_sft",
            "llada_rl",
            "llada_sft",
            "sdar_rl_coupled",
        )
        for case in dllm_rl.read(f"dataprep/{name}.json")["cases"]
        if "raises" not in case and in_order(case)
    ],
)
def test_rows_are_the_references(case):
    traces = dllm_rl.padded(
        case["samples"],
        case["pad_id"],
        post_num=case["config"]["post_num"],
        max_prompt=case["config"]["max_prompt_len"],
        max_gen=case["config"]["max_gen_length"],
    )
    ours = [row for i, trace in enumerate(traces) for row in our_rows(case, i, trace)]
    assert sorted(ours) == sorted(their_rows(case))


def settings_of(case) -> tuple[NoiseConfig, Layout, bool]:
    """Returns a case's noise, its layout, and whether a row has a clean copy, too."""
    cfg, out = case["config"], case["out"]
    packed = "extended_input_ids" in out
    kind = METHODS[cfg["method"]]
    noise_cfg = NoiseConfig(
        kind=kind,
        rate="scope" if "mask_times_per_sample" in cfg else "token",
        draws=cfg.get("mask_times_per_sample", 1),
        shrink=cfg.get("shrink", 1),
    )
    layout = Layout(
        attention="block" if packed else "causal" if kind == "ar" else "full",
        shift=1 if kind == "ar" else 0,
        block=cfg.get("block_size", 4),
        grid="response",
        longest=len(out["labels"][0]) - out["start_pos"],
    )
    return noise_cfg, layout, packed


def our_rows(case, i: int, trace) -> list[tuple[list, list]]:
    """Returns our rows of sample i: (what is shown, what is supervised) of each."""
    cfg, layout, packed = settings_of(case)
    post_num, prompt = case["config"]["post_num"], int(trace.prompt_len_B[0])
    is_pad = trace.tokens_BT[0] == case["pad_id"]
    is_pad[:prompt] = False
    # Of a whole answer's pads the first ones count; blocks count them in each row.
    surplus = is_pad & (np.cumsum(is_pad) > (99 if post_num is None else post_num))
    if cfg.kind in ("bernoulli", "complement") and not packed:
        trace = trace.replace(step_BT=np.where(surplus, FAR, trace.step_BT))
    if cfg.kind == "trace":
        trace = whole(trace, case["samples"][i])
    noised = noise.noised(trace, cfg, layout, recorded(case, i, trace, layout))
    batch, source = views.pack(
        jax.tree.map(lambda x: np.repeat(x, cfg.copies, axis=0), trace),
        noised,
        mask_id=case["mask_id"],
        layout=layout,
        cfg=BatchConfig(rows=1, tokens=1000),
        most=1,
        aggregate="token",
        copies=cfg.copies,
    )
    out, left = [], case["out"]["start_pos"] - prompt
    for shown, selected in rows(case, trace, batch, source, layout):
        shown, selected = shown[: len(is_pad)], selected[: len(is_pad)]
        if cfg.kind == "ar":  # what follows an answer is left out: nothing sees it
            shown = np.where(shown < 0, case["pad_id"], shown)
        padding = [case["pad_id"]] * left
        if packed:
            selected = dllm_rl.first_pads(selected, is_pad, post_num)
            # Blocks without a target are not there.
            number = layout.numbers(len(selected), prompt)
            shown[~np.isin(number, number[selected])] = -1
            shown, padding = shown[prompt:], []
        else:
            selected &= ~surplus
        if selected.any():
            out.append(([*padding, *shown], [*[0] * left, *selected.astype(int)]))
    return out


def their_rows(case) -> list[tuple[list, list]]:
    """Returns the reference's rows; without the clean copy, if they have one."""
    _, layout, packed = settings_of(case)
    out, L0, L1 = case["out"], case["out"]["start_pos"], layout.longest
    if not packed:
        return list(zip(out["input_ids"], out["p_mask"], strict=True))
    pairs = []
    for ids, selected in zip(out["extended_input_ids"], out["p_mask"], strict=True):
        blocks = np.arange(L1) // layout.block
        active = np.isin(blocks, blocks[np.array(selected[L0:], bool)])
        pairs.append((np.where(active, ids[L0 + L1 :], -1).tolist(), selected))
    return pairs


# ---- What each kind promises -----------------------------------------------------------


problems = st.tuples(  # trajectories, slots, block, attention, seed
    st.integers(1, 4),
    st.integers(4, 24),
    st.integers(1, 8),
    st.sampled_from(["block", "full"]),
    st.integers(0, 2**32 - 1),
)


def made(n, T, block, attention, seed):
    """Returns (trace, layout): ragged prompts, random orders, masked tails."""
    rng = np.random.default_rng(seed)
    prompt_n = rng.integers(1, T, n)
    len_n = rng.integers(1, T - prompt_n + 1)
    step_nT = rng.integers(1, T, (n, T))
    for i in range(n):
        step_nT[i, : prompt_n[i]] = GIVEN
        step_nT[i, prompt_n[i] + len_n[i] :] = FAR
    layout = Layout(attention=attention, block=block, longest=T)
    return dllm_rl.trace(rng.integers(0, 50, (n, T)), step_nT, prompt_n, len_n), layout


def drawn(problem, seed: int = 0, **kind):
    """Returns (trace, layout, answers, noise) of settings."""
    trace, layout = made(*problem)
    cfg = NoiseConfig(**kind)
    noised = noise.noised(trace, cfg, layout, np.random.default_rng(seed))
    assert len(noised.step_nT) == cfg.copies * len(trace.len_B)
    return trace, layout, noise.answers(trace), noised


@given(problems, st.integers(0, 2**32 - 1), st.sampled_from(["token", "scope"]))
def test_a_mask_and_its_complement_are_the_answer(problem, seed, rate):
    trace, layout, answer_nT, noised = drawn(
        problem, seed, kind="complement", draws=2, rate=rate
    )
    seen = (noised.share_nT > 0).reshape(len(answer_nT), 2, 2, -1)
    for draw in (0, 1):
        np.testing.assert_array_equal(seen[:, draw].sum(axis=1), answer_nT)
    share = noised.share_nT.reshape(seen.shape)
    assert (share[seen] >= 1).all()  # 1/p and 1/(1 - p)
    if rate == "scope":
        for i, prompt in enumerate(trace.prompt_len_B):
            scope = layout.scope(len(answer_nT[i]), prompt)
            for one in np.unique(scope):
                values = share[i, 0, 0][seen[i, 0, 0] & (scope == one)]
                assert len(np.unique(values)) <= 1


@given(problems, st.integers(0, 2**32 - 1))
def test_random_masks_weigh_by_the_probability_that_was_drawn(problem, seed):
    trace, _, answer_nT, noised = drawn(problem, seed, kind="bernoulli", lower=0.5)
    seen = noised.share_nT > 0
    assert not seen[~answer_nT].any()
    assert ((noised.share_nT[seen] >= 1 / 0.9) & (noised.share_nT[seen] <= 2)).all()
    np.testing.assert_array_equal(noised.step_nT[seen], 1)
    np.testing.assert_array_equal(noised.step_nT[answer_nT & ~seen], GIVEN)
    np.testing.assert_array_equal(noised.step_nT[~answer_nT], trace.step_BT[~answer_nT])


@given(problems, st.integers(0, 2**32 - 1))
def test_semi_ar_hides_later_blocks(problem, seed):
    trace, layout, answer_nT, noised = drawn(problem, seed, kind="semi_ar")
    for i, prompt in enumerate(trace.prompt_len_B):
        number = layout.numbers(answer_nT.shape[1], prompt)
        step, seen = noised.step_nT[i], noised.share_nT[i] > 0
        for at in np.flatnonzero(seen):
            masked = step >= step[at]
            assert masked[answer_nT[i] & (number > number[at])].all()
            assert not masked[answer_nT[i] & (number < number[at])].any()
            inside = answer_nT[i] & (number == number[at])
            np.testing.assert_array_equal(masked[inside], seen[inside])


@given(problems, st.integers(1, 30))
def test_shrink_merges_within_a_scope(problem, size):
    trace, layout, answer_nT, noised = drawn(problem, kind="trace", shrink=size)
    np.testing.assert_array_equal(noised.share_nT > 0, answer_nT)
    if size == 1:
        np.testing.assert_array_equal(noised.step_nT, trace.step_BT)
    bound = noise.rounds(NoiseConfig(shrink=size), layout, int(trace.len_B.max()))
    for i, prompt in enumerate(trace.prompt_len_B):
        scope = layout.scope(answer_nT.shape[1], prompt)
        for one in np.unique(scope[answer_nT[i]]):
            inside = answer_nT[i] & (scope == one)
            old, new = trace.step_BT[i, inside], noised.step_nT[i, inside]
            count = len(np.unique(old))
            assert len(np.unique(new)) == -(-count // size) <= bound
            order = np.argsort(old, kind="stable")
            assert (np.diff(new[order]) >= 0).all() and (new >= old).all()


@pytest.mark.parametrize("count", [0, 3])
def test_what_follows_an_answer_is_masked_where_nobody_says_when_it_was_unmasked(count):
    step_nT = np.full((1, 10), GIVEN)
    trace = dllm_rl.trace(np.ones((1, 10), int), step_nT, [4], [count])
    kind, layout = NoiseConfig(kind="bernoulli"), Layout(attention="full")
    noised = noise.noised(trace, kind, layout, np.random.default_rng(0))
    np.testing.assert_array_equal(noised.step_nT[0, :4], GIVEN)
    assert set(noised.step_nT[0, 4 : 4 + count]) <= {GIVEN, 1}
    np.testing.assert_array_equal(noised.step_nT[0, 4 + count :], FAR)


def test_a_row_is_as_wide_as_the_longest_trajectory_in_one_piece():
    """Whole 128s of a canvas and two noised copies of each of its answer's blocks."""
    blocks = Layout(block=4, longest=10)  # an answer of 10 touches 4 blocks at the most
    assert [blocks.width(slots, rounds=3) for slots in (96, 97)] == [128, 256]
    assert [blocks.width(slots, rounds=1) for slots in (112, 113)] == [128, 256]
    full = Layout(attention="full", block=4, longest=10)
    assert [full.width(slots, rounds=9) for slots in (124, 125)] == [128, 256]


def test_rows_of_canvases_hold_as_many_as_fit():
    cfg, full = BatchConfig(rows=2, tokens=64), Layout(attention="full", longest=10)
    most = {"slots": 20, "answer": 10, "rounds": 3, "copies": 1, "cfg": cfg}
    assert layouts.most_rows(trajectories=5, layout=full, **most) == 5  # of 15 canvases
    assert layouts.most_rows(trajectories=6, layout=full, **most) == 6
    causal = Layout(attention="causal", shift=1, longest=10)
    assert layouts.most_rows(trajectories=6, layout=causal, **most) == 2


def test_a_given_trace_bounds_its_rounds():
    cfg, full = NoiseConfig(kind="trace", shrink=2), Layout(attention="full")
    # The steps of what follows the answer in its last block count, too: 1,811 of them.
    assert noise.rounds(cfg, full, 1808) == 906
    assert noise.rounds(cfg, full, 1808, steps=7) == 4
    assert noise.rounds(cfg, Layout(block=4), 1808, steps=7) == 2


@pytest.mark.parametrize("kind", ["bernoulli", "complement", "semi_ar", "subset"])
@pytest.mark.parametrize("attention", ["block", "full"])
def test_noise_is_fresh_at_every_step(kind, attention):
    step_nT = np.where(np.arange(40) < 8, GIVEN, 1)[None]
    trace = dllm_rl.trace(np.ones((1, 40), int), step_nT, [8], [32])
    layout = Layout(attention=attention, block=8)

    def masked(step):  # as `train` seeds it
        rng = np.random.default_rng([0, step])
        return noise.noised(trace, NoiseConfig(kind=kind), layout, rng).share_nT > 0

    assert (masked(1) == masked(1)).all()
    assert len({masked(step).tobytes() for step in range(8)}) == 8


def test_what_a_causal_model_cannot_learn_from():
    ar, causal = NoiseConfig(kind="ar"), Layout(attention="causal", shift=1)
    noise.check(ar, causal)
    with pytest.raises(ValueError, match="noise.kind='bernoulli' masks tokens, but"):
        noise.check(NoiseConfig(kind="bernoulli"), causal)
    with pytest.raises(ValueError, match="the model's shift is 0"):
        noise.check(ar, Layout(attention="causal", shift=0))
    for attention in ("full", "block"):
        with pytest.raises(
            ValueError, match="sample with .* set model.attention='causal'"
        ):
            noise.check(ar, Layout(attention=attention, shift=1))
    noise.check(NoiseConfig(kind="trace"), causal)  # masks nothing


def test_draws_share_a_clean_copy():
    trace = dllm_rl.trace([range(40)], [[GIVEN] * 20 + [1] * 20], [20], [20])
    layout, cfg = Layout(block=4), NoiseConfig(kind="complement", draws=3)
    noised = noise.noised(trace, cfg, layout, np.random.default_rng(0))
    answer_nT = np.repeat(noise.answers(trace), 6, axis=0) & (noised.share_nT > 0)
    big = BatchConfig(rows=1, tokens=1000)
    found = layouts.views_of(range(6), 20, 20, noised, answer_nT, layout)
    (piece,) = layouts.cut(found, 20, layout, big)
    assert piece.clean == 36
    assert piece.cost == 36 + 4 * len(piece.views) <= 36 + 6 * 20
    assert piece.supervised == 3 * 20
