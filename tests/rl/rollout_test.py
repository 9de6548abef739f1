"""Rollouts: prompts of any number and length through a fixed batch, and their rewards."""

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import data, exits, sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import noise, rollout
from dllm_jax.rl.rewards import Grader, Grades
from dllm_jax.sampling import answers, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import Trace
from tests.rl import lent

CFG = SamplerConfig(max_prompt=6, max_new=5, rows=4, stop_ids=(9,))
PROMPTS = [[1], [2, 3], [4, 5, 6, 7, 8, 1], [1] * 7, [], [3, 3, 3]]
LONG = np.array([False, False, False, True, True, False])


class Fake(answers.Batches):
    """Batches that answer row b with its prompt's first token, keeping their calls."""

    def __init__(self, mesh):
        super().__init__(model=ModelConfig(vocab=9), cfg=CFG, mesh=mesh)
        self.calls = []

    def trace(self, s: Trace) -> Trace:
        """Returns what `turns` left."""
        return s

    def turns(self, params, arrays, watched):
        """Yields answers of 3 tokens, of which the last stops rows of even length."""
        self.calls.append(arrays)
        len_B = arrays["prompt_len_B"]
        live_B = len_B > 0
        pos_T = jnp.arange(CFG.slots)[None]
        prompt_BT = jnp.pad(
            arrays["prompt_BT"], ((0, 0), (0, CFG.slots - CFG.max_prompt))
        )
        answer_BT = (pos_T >= len_B[:, None]) & (pos_T < len_B[:, None] + 3)
        step_BT = jnp.where(answer_BT, pos_T - len_B[:, None] + 1, 0)
        trace = Trace(
            tokens_BT=jnp.where(answer_BT, prompt_BT[:, :1], prompt_BT),
            step_BT=step_BT,
            logp_BT=-0.1234567 * step_BT,
            conf_BT=0.5 * answer_BT,
            prompt_len_B=len_B,
            len_B=3 * live_B,
            steps_B=2 * live_B,
            forwards_B=4 * live_B,
            stopped_B=live_B & (len_B % 2 == 0),
            bad_B=len_B < 0,
        )
        yield np.zeros(CFG.rows, bool), None, jax.device_get(trace)


def grader(grade) -> Grader:
    """Returns a Grader of a function of texts and problems that lets all of these pass."""

    def grades(texts, problems, trace) -> Grades:
        assert len(trace.len_B) == len(texts) == len(problems)
        return Grades(np.array(grade(texts, problems), np.float32))

    return Grader(grade=grades, check=lambda problem: None)


@pytest.fixture(scope="module")
def mesh():
    """Eight devices, four of which hold a row each."""
    return sharding.make_mesh(data=4, model=2, fsdp=1)


def sample(fake, prompts=PROMPTS):
    """Returns the host trace of the prompts, answered in batches."""
    return answers.collect(
        fake.stream(None, prompts, jax.random.key(5), temperature=0.7), len(prompts)
    )


def test_any_number_of_prompts_in_batches_of_one_shape(mesh):
    fake = Fake(mesh)
    trace = sample(fake)
    assert len(fake.calls) == 2  # 6 prompts in rows of 4: two fillers
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(trace))
    assert trace.tokens_BT.shape == (6, CFG.slots)
    for i in np.flatnonzero(~LONG):
        n = len(PROMPTS[i])
        assert trace.prompt_len_B[i] == n
        assert trace.tokens_BT[i, :n].tolist() == PROMPTS[i]
        assert trace.tokens_BT[i, n : n + 3].tolist() == [PROMPTS[i][0]] * 3
    for call in fake.calls:
        assert call["prompt_BT"].shape == (4, CFG.max_prompt)
        assert call["prompt_BT"].sharding.spec[0] is not None  # rows are split
        np.testing.assert_array_equal(
            call["limit_B"] - call["prompt_len_B"], CFG.max_new
        )
        np.testing.assert_allclose(call["temperature_B"], 0.7)
    assert fake.calls[1]["prompt_len_B"].tolist() == [0, 3, 0, 0]


def test_prompts_that_are_too_long_or_empty_get_empty_answers(mesh):
    trace = sample(Fake(mesh))
    np.testing.assert_array_equal(trace.len_B == 0, LONG)
    assert (trace.prompt_len_B[LONG] == 0).all()


def test_a_prompt_of_another_models_ids_is_refused_before_anything_is_sampled():
    """As another model's tokenizer makes them; full attention would look up row 9 of 9."""
    problems = [data.Problem([1, 8], "q", "a", {}), data.Problem([9], "q", "a", {})]
    rollout.check_prompts(problems, 6, 10, print, "x.jsonl")
    refused = "dataset 'x.jsonl', record 2: a token id is beyond .* vocabulary, 0..8;"
    with pytest.raises(ValueError, match=refused):
        rollout.check_prompts(problems, 6, 9, print, "x.jsonl")


def test_a_prompt_draws_from_its_own_key(mesh):
    def keys(fake, count):
        rows = [jax.random.key_data(call["key_B"]) for call in fake.calls]
        return np.concatenate(rows)[:count]

    whole, part = Fake(mesh), Fake(mesh)
    sample(whole)
    sample(part, PROMPTS[:3])
    all_keys = keys(whole, 6)
    assert len(np.unique(all_keys, axis=0)) == 6
    np.testing.assert_array_equal(keys(part, 3), all_keys[:3])


def test_the_engine_and_batches_give_the_same_answers(tiny, mesh):
    model, params = tiny
    cfg = dataclasses.replace(CFG, threshold=0.5)
    with jax.set_mesh(mesh):
        batches = answers.Batches(model=model, cfg=cfg, mesh=mesh)
        engine = answers.answerer(model=model, cfg=cfg, mesh=mesh)
        want, got = (
            answers.collect(
                run.stream(params, PROMPTS, jax.random.key(5), temperature=1.0),
                len(PROMPTS),
            )
            for run in (batches, engine)
        )
    np.testing.assert_array_equal(got.len_B, want.len_B)
    answer = noise.answers(want)
    for name in ("tokens_BT", "step_BT"):
        found, wanted = getattr(got, name), getattr(want, name)
        np.testing.assert_array_equal(found[answer], wanted[answer], err_msg=name)
    np.testing.assert_allclose(got.logp_BT[answer], want.logp_BT[answer], atol=1e-5)
    assert (got.forwards_B <= want.forwards_B).all()


@pytest.mark.parametrize("truncated_wrong", [True, False])
def test_no_answer_and_a_cut_answer_earn_nothing(mesh, truncated_wrong):
    trace = sample(Fake(mesh))
    texts, golds = list("abcdef"), list("ABCDEF")
    asked = []

    def grade(texts, golds):
        asked.append((texts, golds))
        return [1.0] * len(texts)

    got = lent.graded(
        trace,
        texts,
        golds,
        np.arange(6),
        grader(grade),
        truncated_wrong=truncated_wrong,
    )
    assert asked == [(texts, golds)]
    even = np.array([len(p) % 2 == 0 for p in PROMPTS])
    want = ~LONG & (even | (not truncated_wrong))
    np.testing.assert_array_equal(got.reward_n, want.astype(np.float32))
    told = rollout.summary(got)
    assert told["accuracy"] == pytest.approx(want.mean())
    assert told["reward"] == pytest.approx(want.mean())
    assert told["response_length"] == 3  # of those that were answered
    assert told["tokens_per_forward"] == pytest.approx(3 / 4)
    assert told["truncated"] == pytest.approx((~LONG & ~even).mean())


def test_no_answer_gains_by_having_no_end(mesh):
    """Scores of a reward model have no zero: 0 would be the best of these."""
    given = [-1.2, -0.9, -2.0, -0.5, 0.5, 2.0]
    trace = sample(Fake(mesh))
    trace = trace.replace(
        len_B=np.full(6, 3), stopped_B=np.array([1, 1, 0, 0, 1, 1], bool)
    )
    got = lent.graded(
        trace,
        list("abcdef"),
        list("ABCDEF"),
        np.array([0, 0, 0, 1, 1, 1]),
        grader(lambda texts, golds: given),
        truncated_wrong=True,
    )
    wanted = [-1.2, -0.9, -1.2, 0, 0.5, 2]  # the worst of those that ended, or 0
    np.testing.assert_allclose(got.reward_n, np.float32(wanted))


def test_a_stream_that_is_stopped_is_no_rollout(mesh):
    fake, asked = Fake(mesh), []

    def stop():
        asked.append(len(fake.calls))
        return len(fake.calls) == 2

    prompts = [[1]] * 10  # three batches, of which two are begun
    stream = fake.stream(None, prompts, jax.random.key(5), temperature=0.7, stop=stop)
    assert [i for i, _ in stream] == list(range(8))  # what has ended is not lost
    assert asked == [1, 2]
    assert len(sample(Fake(mesh), prompts).len_B) == 10
    fake.calls.clear()
    problems = [data.Problem(prompt, "", "1") for prompt in prompts]
    none = dict.fromkeys(("decode", "timer", "truncated_wrong"))
    how = {"temperature": 1.0, "stop": stop, "grader": grader(None)}
    group_n, key = np.zeros(10, int), jax.random.key(5)
    assert rollout.answered(fake, None, problems, group_n, key, **none, **how) is None


def bad_answers(count, bad):
    """Yields answers of which the first `bad` met what is not finite."""
    for i in range(count):
        answer = state.no_answer(1)._replace(forwards=np.int32(1))
        yield i, answer._replace(bad=np.bool_(i < bad), len=np.int32(i >= bad))


def test_answers_that_are_not_finite_are_said_and_all_of_them_are_refused(capsys):
    trace = answers.collect(answers.checked(bad_answers(5, 2), 5), 5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: 2 of 5 answers met numbers that are not finite")
    got = rollout.Rollouts(
        trace, np.arange(5), [""] * 5, np.zeros(5), np.zeros(5, bool)
    )
    assert rollout.summary(got)["nan_answers"] == 2
    records = rollout.as_records(got, [data.Problem([1], "", "")] * 5)
    assert [x["finished"] for x in records] == ["nan"] * 2 + ["length"] * 3
    with pytest.raises(exits.NotFinite, match="not finite, in all of 5 answers"):
        list(answers.checked(bad_answers(5, 5), 5))
    # A skipped prompt was never begun; of a stream that is stopped nobody knows.
    list(answers.checked(bad_answers(5, 5), 6))
    skipped = (5, state.no_answer(1))
    with pytest.raises(exits.NotFinite):
        list(answers.checked([*bad_answers(5, 5), skipped], 6))
    capsys.readouterr()
    list(answers.checked(bad_answers(5, 0), 5))
    assert capsys.readouterr().err == ""


def test_texts_are_of_the_answers_alone_and_without_special_tokens():
    """Which stand behind the prompts, and have others behind them."""
    short, long = (lent.TOK(text)["input_ids"] for text in ("7", "15"))
    end = lent.TOK.eos_token_id
    tokens_BT = np.array(
        [[*long, *short, end, *long], [*short, *long, end, end, *short]]
    )
    prompt_len_B, len_B = np.array([len(long), len(short)]), np.array([2, 3])
    trace = types.SimpleNamespace(
        tokens_BT=tokens_BT, prompt_len_B=prompt_len_B, len_B=len_B
    )
    assert lent.decode(trace) == ["7", "15"]


def test_an_answer_that_was_not_graded_in_time_is_counted_and_earns_nothing(mesh):
    trace = sample(Fake(mesh), PROMPTS[:2])
    grades = [float("nan"), 1.0]
    got = lent.graded(
        trace,
        ["", ""],
        ["", ""],
        np.zeros(2, int),
        grader(lambda *_: grades),
        truncated_wrong=False,
    )
    assert got.reward_n.tolist() == [0.0, 1.0]
    assert rollout.summary(got)["graded_timeouts"] == 1
    assert rollout.summary(got)["reward"] == rollout.summary(got)["accuracy"] == 1


def test_every_process_grades_its_share_and_has_all_rewards(mesh, monkeypatch):
    trace = sample(Fake(mesh), PROMPTS[:3])
    texts, asked, sent = ["a", "b", "c"], [], {}
    grades = {"a": 1.0, "b": float("nan"), "c": 0.5}

    def grade(texts, golds):
        asked.append(texts)
        return [grades[text] for text in texts]

    def all_have(own_n):  # by the place of the call
        index, number = jax.process_index(), next(calls)
        sent[index, number] = own_n
        return np.stack([sent.get((i, number), own_n) for i in range(2)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(sharding.multihost_utils, "process_allgather", all_have)
    for index in (0, 1, 0):  # the first again, once the second has sent its share
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        calls = itertools.count()
        got = lent.graded(
            trace, texts, texts, np.zeros(3, int), grader(grade), truncated_wrong=False
        )
    assert asked == [["a", "c"], ["b"], ["a", "c"]]
    assert got.reward_n.tolist() == [1.0, 0.0, 0.5]
    assert got.late_n.tolist() == [False, True, False]


def test_a_step_without_any_answer_can_be_told(mesh):
    trace = sample(Fake(mesh), [[], [1] * 9])
    got = lent.graded(
        trace,
        ["", ""],
        ["", ""],
        np.zeros(2),
        grader(lambda *_: [1, 1]),
        truncated_wrong=True,
    )
    told = rollout.summary(got)
    assert all(x == 0 for x in told.values())


def test_records_hold_the_answer_and_its_trace(mesh):
    trace = sample(Fake(mesh))
    got = lent.graded(
        trace,
        list("abcdef"),
        [""] * 6,
        np.arange(6) // 2,
        grader(lambda *_: [0.5] * 6),
        truncated_wrong=False,
    )
    problems = [data.Problem(p, f"of {len(p)}", "7") for p in PROMPTS]
    records = rollout.as_records(got, problems)
    assert len(records) == len(PROMPTS)
    assert json.loads(json.dumps(records)) == records
    assert records[1] == {
        "prompt_ids": [2, 3],
        "response_ids": [2, 2, 2],
        "step_map": [1, 2, 3],
        "logprobs": [-0.123457, -0.246913, -0.37037],
        "confidence": [0.5, 0.5, 0.5],
        "forwards": 4,
        "finished": "stop",
        "text": "b",
        "reward": 0.5,
        "group": 0,
        "question": "of 2",
        "answer": "7",
    }
    assert records[0]["finished"] == "length"
    assert records[3]["finished"] == "skipped"
    assert records[3]["prompt_ids"] == PROMPTS[3]
    assert records[3]["response_ids"] == records[3]["step_map"] == []


def test_samples_are_spread_over_the_problems():
    groups = np.repeat([0, 1, 2], 4)
    assert rollout.spread(groups, 0) == []
    assert rollout.spread(groups, 2) == [0, 4]
    assert rollout.spread(groups, 3) == [0, 4, 8]
    assert rollout.spread(groups, 5) == [0, 1, 4, 5, 8]
    assert rollout.spread(groups, 99) == list(range(12))


def test_records_tell_of_rollouts_what_these_tell_themselves(mesh):
    grades = [1.0, 0.25, float("nan"), 0.0, 1.0, 1.0]
    got = lent.graded(
        sample(Fake(mesh)),
        list("abcdef"),
        [""] * 6,
        np.arange(6) // 2,
        grader(lambda *_: grades),
        truncated_wrong=False,
    )
    records = rollout.as_records(got, [data.Problem(p, "", "") for p in PROMPTS])
    assert [record.get("graded") for record in records].count(False) == 1
    read = rollout.of_records(json.loads(json.dumps(records)))
    assert rollout.summary(read) == rollout.summary(got)
    assert rollout.passed(read, 2) == rollout.passed(got, 2)


def test_records_of_other_graders_are_not_told_together():
    one = {"response_ids": [5], "forwards": 1, "finished": "stop", "group": 0}
    one |= {"text": "a", "reward": 1.0}
    many = [one | {"rewards": {name: 1.0, "length": 0.5}} for name in ("math", "judge")]
    assert [*rollout.of_records(many[:1] * 2).parts] == ["math", "length"]
    for others in (many, [one, many[0]]):
        with pytest.raises(ValueError, match="graded by .* and .*: the graders have"):
            rollout.of_records(others)


def test_what_one_of_several_graders_could_not_judge_passes_nothing():
    """As an evaluation has it, also where the first called it right."""
    right = {"math": np.ones(2), "judge": np.array([np.nan, 1.0])}
    blank = state.stacked([state.no_answer(1)] * 2)
    late = np.array([True, False])
    got = rollout.Rollouts(blank, np.zeros(2, int), [""] * 2, 1.0 - late, late, right)
    assert rollout.passed(got, 2) == {"pass@1": 1.0, "pass@2": 1.0}
    got.parts["math"][1] = 0.0
    assert rollout.passed(got, 2) == {"pass@1": 0.0, "pass@2": 0.0}


def test_a_problem_of_which_nothing_was_judged_is_in_no_share():
    """Of its two sets of answers none passes: see `scores.of_records`."""
    late = np.array([False, True, True, True])
    blank = state.stacked([state.no_answer(1)] * 4)
    got = rollout.Rollouts(blank, np.arange(4) // 2, [""] * 4, 1.0 - late, late)
    assert rollout.passed(got, 2) == {"pass@1": 1.0, "pass@2": 0.5}


def test_samples_beyond_the_last_step_that_is_done_are_cut(tmp_path):
    """Of a run that was killed, and that may end now before it takes these steps again."""
    rollout.cut(tmp_path, 0)  # there are none
    (tmp_path / "samples").mkdir()
    names = [f"step_{step:06d}.jsonl" for step in (2, 9, 10, 11, 1_000_000)]
    for name in (*names, "step_best.jsonl"):  # of the user's
        (tmp_path / "samples" / name).touch()
    rollout.cut(tmp_path, 10)
    left = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert left == [*names[:3], "step_best.jsonl"]


def test_samples_tell_the_advantages_of_what_is_learned_from(mesh, tmp_path):
    trace = sample(Fake(mesh))
    n, slots = trace.tokens_BT.shape
    problems = [data.Problem(prompt, "q", "1") for prompt in PROMPTS]
    rollouts = rollout.Rollouts(
        trace, np.arange(n), ["a"] * n, np.ones(n, np.float32), np.zeros(n, bool)
    )
    keep_n = np.arange(n) == 2
    adv_nT = np.arange(n * slots, dtype=np.float32).reshape(n, slots) / 3
    notes = rollout.Notes(keep_n, adv_nT, None)
    valued = rollout.Notes(keep_n, adv_nT, 0 * adv_nT)
    rollout.write(tmp_path, 4, rollouts, problems, n, notes)
    lines = (tmp_path / "samples" / "step_000004.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    first = len(PROMPTS[2])
    expected = [round(float(x), 4) for x in adv_nT[2, first : first + 3]]
    assert [row.get("advantage") for row in told] == [None, None, expected, *[None] * 3]
    assert not any("value" in row for row in told)  # there is no such network
    rollout.write(tmp_path, 6, rollouts, problems, n, valued)
    text = (tmp_path / "samples" / "step_000006.jsonl").read_text()
    assert json.loads(text.splitlines()[2])["value"] == [
        0.0,
        0.0,
        0.0,
    ]  # a new network's
    rollout.write(tmp_path, 5, rollouts, problems, n)  # nothing is known
    assert "advantage" not in (tmp_path / "samples" / "step_000005.jsonl").read_text()
