"""Process rewards: where answers are split, what bears a reward, and what it is worth."""

import dataclasses
import types

import numpy as np
import pytest

from dllm_jax import data
from dllm_jax.models.vision import prompts
from dllm_jax.rl import batches, noise, rewards, rollout
from dllm_jax.rl.config import JudgeConfig, RewardConfig, RLConfig
from dllm_jax.rl.rewards import Grades, judge, process
from dllm_jax.rl.rollout import Rollouts
from dllm_jax.sampling import state
from examples.arithmetic import verdicts
from tests.rl import common, lent
from tests.rl.lent import answer

NAN = np.nan


# ---- Splitting, and who bears a reward -------------------------------------------------


def test_chunks_of_tokens_are_as_many_as_dllm_rls():
    for length in (1, 199, 200, 201, 400, 401):
        cfg = RewardConfig(chunk=200)
        chunk_T = process.by_tokens(np.arange(length), [""] * length, cfg)
        assert chunk_T[-1] + 1 == max(1, int((length - 1) / 200 + 1))
        assert chunk_T.tolist() == [i // 200 for i in range(length)]


def test_chunks_of_steps_hold_what_steps_unmasked():
    cfg = RewardConfig(chunk=2)
    step_T = np.array([9, 3, 3, 5, 7, 5])  # the distinct ones are 3, 5, 7, 9
    assert process.by_steps(step_T, [""] * 6, cfg).tolist() == [1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["1", ",", "2", ",", "3"], [0, 0, 1, 1, 2]),
        (["1", ",", "2", "3,", ""], [0, 0, 1, 1, 1]),  # the end token alone is none
        (["1", "2"], [0, 0]),
        ([",", ","], [0, 1]),
        ([""], [0]),
    ],
)
def test_chunks_end_with_marks(pieces, expected):
    cfg = RewardConfig(mark=",")
    chunk_T = process.by_marks(np.arange(len(pieces)), pieces, cfg)
    assert chunk_T.tolist() == expected


def test_a_mark_that_no_token_has_is_refused():
    at = JudgeConfig(at="examples.arithmetic.verdicts:verdicts")
    for mark in (",", "=", "1"):
        cfg = RewardConfig(split="marks", mark=mark, judge=at)
        assert rewards.grader("math", cfg, lent.TOK).steps
    # A shell's `\n` is two characters, and a mark may be cut by the tokenizer.
    for mark in (r"\n", ",,", "<|im_end|>"):
        cfg = RewardConfig(split="marks", mark=mark, judge=at)
        with pytest.raises(ValueError, match="is in the text of no token"):
            rewards.grader("math", cfg, lent.TOK)
        otherwise = dataclasses.replace(cfg, split="tokens")
        assert rewards.grader("math", otherwise, lent.TOK).steps


def by_hand(length: int, step_T, size: int, block: int) -> list[int]:
    """Returns which chunk each token bears, told as the reference tells it."""
    bears = [-1] * length
    count = max(1, (length - 1) // size + 1)
    for chunk in range(count - 1):
        end = (chunk + 1) * size
        window = range(max(end - block, 0), end)
        highest = max(step_T[i] for i in window)
        for i in window:
            if step_T[i] == highest:
                bears[i] = chunk
    for i in range(length):
        if step_T[i] == max(step_T):
            bears[i] = count - 1
    return bears


@pytest.mark.parametrize("seed", range(6))
def test_a_chunk_is_borne_by_the_latest_of_its_last_block(seed):
    rng = np.random.default_rng(seed)
    length, size, block = rng.integers([1, 1, 1], [30, 9, 6])
    step_T = np.arange(length) // block * block + rng.integers(0, block, length)
    chunk_T = process.by_tokens(step_T, [""] * length, RewardConfig(chunk=int(size)))
    bears_T = process.borne(chunk_T, step_T, tail=int(block))
    assert bears_T.tolist() == by_hand(length, step_T, size, block)


def test_without_a_tail_all_of_a_chunk_may_bear_its_reward():
    bears_T = process.borne(np.array([0, 0, 0, 1]), np.array([5, 1, 2, 6]), tail=0)
    assert bears_T.tolist() == [0, -1, -1, 1]
    # Nor does the last chunk take what of others was unmasked with it.
    bears_T = process.borne(np.array([0, 0, 1, 1]), np.array([4, 1, 2, 4]), tail=0)
    assert bears_T.tolist() == [0, -1, -1, 1]
    bears_T = process.borne(np.array([0, 0, 1, 1]), np.array([4, 1, 2, 4]), tail=2)
    assert bears_T.tolist() == [1, -1, -1, 1]
    # Though the tail's own last step is another one.
    bears_T = process.borne(np.array([0, 0, 1, 1]), np.array([4, 1, 3, 2]), tail=2)
    assert bears_T.tolist() == [1, -1, -1, -1]


# ---- What the judge is asked, and what holds -------------------------------------------


def chunks_of(texts, right, asked, **cfg):
    """Returns the Chunks of answers to 12+9."""
    trace = state.stacked([answer(text) for text in texts])
    problem = types.SimpleNamespace(text="12+9", answer="21")
    given = RewardConfig(judge=JudgeConfig(at="x:y"), **cfg)
    said = process.steps(given, asked, lent.TOK)
    return said(texts, [problem] * len(texts), trace, np.array(right))


def test_a_judge_is_asked_of_what_is_there_when_a_chunk_ends():
    asked = []

    def votes(questions):
        asked.extend(questions)
        return [[1.0, 1.0]] * len(questions)

    chunks_of(
        ["2+9=11,\\boxed{21}"], [True], judge.Judge(votes), split="marks", mark=","
    )
    assert [q.excerpt for q in asked] == ["2+9=11,", "2+9=11,\\boxed{21}"]
    assert [q.part for q in asked] == ["2+9=11,", "\\boxed{21}"]
    assert all(q.right and q.gold == "21" and q.problem == "12+9" for q in asked)
    text = asked[0].messages[1]["content"]
    assert "whose final answer is correct" in text and "\n2+9=11,\n" in text


def test_gaps_of_an_excerpt_are_told():
    shown_T, ids_T = np.array([1, 1, 0, 0, 1, 0]) > 0, np.arange(6)
    text = process.excerpt(shown_T, ids_T, lambda ids: "".join(map(str, ids)))
    assert text == "01 … 4"


@pytest.mark.parametrize(
    ("votes", "verdict", "source"),
    [
        ([1.0, 1.0, 1.0], 1.0, process.JUDGED),
        ([-1.0, -1.0, -1.0], -1.0, process.JUDGED),
        ([0.0, 0.0, 0.0], 0.0, process.JUDGED),  # nonsense all over, as the reference
        ([1.0, 1.0, -1.0], "outcome", process.DISAGREED),
        ([1.0, 0.0, 1.0], "outcome", process.DISAGREED),
        ([1.0, None, 1.0], "outcome", process.UNHEARD),
    ],
)
@pytest.mark.parametrize("right", [True, False])
def test_votes_that_do_not_agree_leave_the_outcome(votes, verdict, source, right):
    asked = judge.Judge(lambda questions: [votes] * len(questions))
    chunks = chunks_of(["123"], [right], asked, split="tokens", chunk=2)
    expected = (1.0 if right else -1.0) if verdict == "outcome" else verdict
    assert chunks.verdict_nT[0, :3].tolist()[:2] == [expected, expected]
    assert np.isnan(chunks.verdict_nT[0, 2:]).all()
    assert chunks.source_nT[0, :3].tolist() == [source, source, process.NONE]


def test_of_an_answer_about_an_image_three_votes_of_nothing_leave_the_outcome():
    assert process.agreement([0.0] * 3, silent=True) == (process.DISAGREED, None)
    assert process.agreement([-1.0] * 3, silent=True) == (process.JUDGED, -1.0)
    picture = prompts.Picture("a.png", "mark", (4, 4))
    problem = types.SimpleNamespace(
        text="?", answer="21", prompt_ids=prompts.Prompt([1], (picture,))
    )
    asked = judge.Judge(lambda questions: [[0.0] * 3] * len(questions))
    cfg = RewardConfig(judge=JudgeConfig(at="x:y"), split="tokens", chunk=2)
    trace = state.stacked([answer("123")])
    # Codes of an image without its file are one, too.
    coded = data.Problem([1], "?", "21", {"image_token_ids": [7]})
    for about in (problem, coded):
        said = process.steps(cfg, asked, lent.TOK)(["123"], [about], trace, [False])
        assert said.verdict_nT[0, :2].tolist() == [-1.0, -1.0]
    # A function of one's own that says 0 means it.
    own = judge.of_function("a:b", lambda questions: [0.0] * len(questions))
    said = process.steps(cfg, own, lent.TOK)(["123"], [problem], trace, [False])
    assert said.verdict_nT[0, :2].tolist() == [0.0, 0.0]
    assert said.source_nT[0, :2].tolist() == [process.JUDGED] * 2


def test_the_bundled_judge_knows_worked_sums():
    worked = "4+3=7,0+6=6,9+2=11,\\boxed{1167}"
    wrong = "4+3=8,0+6=6,9+2=11,2+2=4,\\boxed{1168}"
    trace_of = [worked, wrong, "\\boxed{1167}", "\\boxed{7}", ""]
    cfg = RewardConfig(
        split="marks",
        mark=",",
        judge=JudgeConfig(at="examples.arithmetic.verdicts:verdicts"),
    )
    grader = rewards.grader("math", cfg, lent.TOK)
    trace = state.stacked([answer(text) for text in trace_of])
    problem = types.SimpleNamespace(text="904+263", answer="1167")
    chunks = grader.steps(trace_of, [problem] * 5, trace, np.zeros(5))
    told = [[x for x in row if not np.isnan(x)] for row in chunks.verdict_nT.tolist()]
    assert told == [[1] * 4, [-1, 1, 1, -1, -1], [1], [-1], []]
    assert verdicts.digits(95, 7) == ["5+7=12,", "9+0+1=10,"]
    metrics = process.summary(chunks)
    assert (metrics["chunks"], metrics["chunks_unheard"]) == (11, 0)
    assert metrics["reward/verdict"] == pytest.approx(3 / 11)
    assert metrics["chunks_judged"] == 1


# ---- Rewards of tokens -----------------------------------------------------------------


def test_a_verdict_is_relative_to_those_of_the_same_chunk_in_its_group():
    verdict_nT = np.array(
        [[1, -1, NAN], [-1, 1, 1], [1, -1, NAN], [1, NAN, NAN], [-1, NAN, NAN]]
    )
    chunk_nT = np.array([[0, -1, 1]] + [[0, 1, 2]] + [[1, 0, -1]] + [[0, -1, -1]] * 2)
    chunks = process.Chunks(chunk_nT, verdict_nT, np.ones((5, 3)))
    out_nT = process.relative(chunks, np.array([7, 7, 7, 8, 8]), "zscore")
    a, b = np.sqrt(0.5), np.sqrt(2.0)  # of (1, -1, 1): mean 1/3, std sqrt(8) / 3
    expected = [[a, 0, -a], [-b, b, 1], [-a, a, 0], [1, 0, 0], [-1, 0, 0]]
    np.testing.assert_allclose(out_nT, expected, rtol=1e-6)
    # The third chunk of the second answer is the only one: it stays as it is judged.
    same = process.relative(chunks, np.array([7, 7, 7, 8, 8]), "none")
    np.testing.assert_array_equal(same[0], [1, 0, -1])


def test_equal_verdicts_say_nothing():
    chunks = process.Chunks(np.zeros((2, 1)), np.ones((2, 1)), np.ones((2, 1)))
    assert not process.relative(chunks, np.zeros(2), "zscore").any()


def advantages(token_nT, **rl):
    """Returns the advantages of common.rollouts, whose tokens have these rewards."""
    sampled = common.rollouts()
    noised = noise.of_steps(sampled.trace.step_BT)
    answer_nT = noise.answers(sampled.trace)
    rl = RLConfig(**({"value": "none"} | rl))
    earned = batches.Earned(np.arange(8.0), token_nT, noised.step_nT)
    zeros_nT = np.zeros(answer_nT.shape, np.float32)
    return batches.advantages(earned, answer_nT, noised, zeros_nT, rl)[0]


@pytest.mark.parametrize("value", ["none", "own"])
def test_tokens_earn_what_their_step_and_later_ones_earn(value):
    token_nT = np.zeros((8, 16), np.float32)
    token_nT[:, 6], token_nT[:, 2] = 3.0, 100.0  # of the third step, and of the prompt
    adv_nT = advantages(token_nT, value=value, gamma=0.5, outcome=2.0)
    late = 2 * np.arange(8.0)
    for i in range(8):
        discounted = late[i] * 0.5 ** np.arange(8)[::-1]
        earlier = 3.0 * np.array([0.25, 0.5, 1, 0, 0, 0, 0, 0])
        np.testing.assert_allclose(adv_nT[i, 4:12], discounted + earlier)
    assert not adv_nT[:, :4].any() and not adv_nT[:, 12:].any()
    alone = advantages(token_nT, value=value, gamma=0.5, outcome=0.0)
    np.testing.assert_allclose(alone[3, 4:8], [0.75, 1.5, 3, 0])


def test_without_rewards_of_tokens_nothing_changes():
    zeros_nT = np.zeros((8, 16), np.float32)
    np.testing.assert_allclose(advantages(None), advantages(zeros_nT))


# ---- From a grader to the batches ------------------------------------------------------


def graded(reward_n, reward_nT=None, truncated_wrong=False, lengths=(3, 3, 3, 0)):
    """Returns the Rollouts of answers of these lengths, graded so."""
    rows = [answer("1" * n, room=4) for n in lengths]
    rows[2] = rows[2]._replace(stopped=np.bool_(False))
    grades = Grades(np.array(reward_n), reward_nT)
    grader = rewards.Grader(lambda *_: grades, rewards.anything)
    group_n = np.zeros(len(rows), int)
    return lent.graded(
        state.stacked(rows),
        [""] * len(rows),
        [None] * len(rows),
        group_n,
        grader,
        truncated_wrong=truncated_wrong,
    )


def test_rewards_of_tokens_arrive_by_position():
    reward_nT = np.arange(24.0).reshape(4, 6)
    got = graded([1, 0, 1, 0], reward_nT, truncated_wrong=True)
    np.testing.assert_array_equal(got.reward_nT[:2], reward_nT[:2])
    assert not got.reward_nT[2:].any()  # cut, and without an answer
    lost = graded([1, 0, 1, 0], -reward_nT, truncated_wrong=True)
    np.testing.assert_array_equal(lost.reward_nT[2], -reward_nT[2])
    both = batches.token_rewards(got, RLConfig())
    np.testing.assert_array_equal(both, got.reward_nT)
    assert batches.token_rewards(graded([1, 0, 1, 0]), RLConfig()) is None
    reward_nT[1, 3] = NAN
    assert graded([1, 0, 1, 0], reward_nT).late_n.tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_only_what_is_learned_from_is_split():
    asked = []

    def votes(questions):
        asked.extend(questions)
        return [[1.0]] * len(questions)

    cfg = RewardConfig(split="tokens", judge=JudgeConfig(at="x:y"), chunk=2)
    grader = rewards.Grader(
        None, None, steps=process.steps(cfg, judge.Judge(votes), lent.TOK)
    )
    got = graded([1, 0, 1, 0])
    problems = [types.SimpleNamespace(text="?", answer="1")] * 4
    split = rollout.split(got, problems, grader, np.array([True, False, True, False]))
    assert len(asked) == 4  # two chunks of each of two answers
    assert split.chunks.verdict_nT[[0, 2], :2].tolist() == [[1, 1], [1, 1]]
    assert np.isnan(split.chunks.verdict_nT[[1, 3]]).all()
    assert split.chunks.chunk_nT[0].tolist() == [-1, -1, -1, 0, 1, -1]
    assert rollout.split(got, problems, rewards.Grader(None, None), None) is got


def test_what_may_be_right_or_not_is_not_split():
    """Its grader timed out, of no weight: an outcome is what its chunks are judged by."""

    def steps(texts, problems, trace, right_n):
        assert right_n.tolist() == [True]
        return process.none_of(trace.tokens_BT.shape)

    parts = {"math": np.array([1.0, NAN, 0.0, NAN])}
    got = dataclasses.replace(graded([1, 1, 1, 1]), parts=parts)
    grader = rewards.Grader(None, None, steps=steps)
    rollout.split(got, [None] * 4, grader, np.array([True, True, False, False]))


def late(reward_n, late_n, filter="varied", **rl) -> tuple[Rollouts, RLConfig]:
    """Returns the rollouts of common with these rewards, some of them not judged."""
    sampled = common.rollouts()
    rl = RLConfig(filter=filter, group=4, prompts=2, **rl)
    reward_n, late_n = np.array(reward_n, np.float32), np.array(late_n, bool)
    return Rollouts(sampled.trace, sampled.group_n, [""] * 8, reward_n, late_n), rl


@pytest.mark.parametrize("kind", ["zscore", "center", "loo", "none"])
def test_what_nobody_judged_is_in_no_groups_statistics(kind):
    rewards_n = [1, 0, 0, 1, 0, 1, 1, 1]
    late_n = [0, 0, 1, 1, 1, 0, 0, 0]
    rollouts, rl = late(rewards_n, late_n, advantage=kind)
    keep_n = batches.teaching(rollouts, rl)
    assert keep_n.tolist() == [True, True] + [False] * 6  # 1, 1, 1 do not vary
    relative_n = batches.relative_rewards(rollouts, keep_n, rl)
    pair = {"zscore": 1.0, "center": 0.5, "loo": 1.0}
    expected = [1, 0] if kind == "none" else [pair[kind], -pair[kind]]
    np.testing.assert_allclose(relative_n[:2], expected)
    assert not relative_n[2:5].any()
    if kind != "none":
        assert not relative_n[5:].any()


def test_a_solve_rate_is_that_of_what_was_judged():
    rollouts, rl = late(
        [1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], "solvable", min_solved=0.4
    )
    assert batches.teaching(rollouts, rl).tolist() == [True, True] + [False] * 6
    nobody, rl = late([0] * 8, [1] * 8)
    assert not batches.teaching(nobody, rl).any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"split": "lines"}, "split='lines': choose from none, tokens, steps, marks"),
        ({"split": "tokens"}, "judge.at='': reward.split='tokens' needs a judge"),
        ({"chunk": 0}, "chunk=0: must be"),
        ({"mark": ""}, "mark=''"),
        ({"split": "steps", "tail": 4}, "tail=4: chunks of steps end nowhere"),
    ],
)
def test_a_bad_split_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**bad)
