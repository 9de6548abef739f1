"""Held-out problems: which they are, what is told of them, and whose time it is."""

import dataclasses
import re

import numpy as np
import pytest

from dllm_jax import data
from dllm_jax.models.vision.prompts import Picture, Prompt
from dllm_jax.rl import heldout, sources
from dllm_jax.rl.config import NoiseConfig
from dllm_jax.rl.rewards import Grader, Grades
from dllm_jax.sampling.config import SamplerConfig, variants
from tests.rl import lent


@pytest.mark.parametrize(("count", "number"), [(3, 3), (0, 256)])
def test_the_first_problems_of_the_file_are_evaluated(tmp_path, count, number):
    settings = lent.settings(heldout_problems=count)
    problems = heldout.problems(settings, lent.tools(settings, tmp_path))
    whole = (lent.ARITHMETIC / "heldout.jsonl").read_text().splitlines()
    assert len(problems) == (count or len(whole))
    assert problems[0].text in whole[0]


def test_without_a_file_there_are_none(tmp_path):
    settings = lent.settings()
    nothing = dataclasses.replace(settings.data, heldout="")
    settings = dataclasses.replace(settings, data=nothing)
    assert heldout.problems(settings, lent.tools(settings, tmp_path)) == []


def test_all_of_an_evaluation_is_time_of_eval(tmp_path):
    settings = lent.settings()
    tools = lent.tools(settings, tmp_path)
    problems = heldout.problems(settings, tools)
    metrics = heldout.evaluate(2, lent.Weights(), problems, settings, tools)
    assert metrics == {
        "heldout_accuracy": pytest.approx(1 / 3),
        "heldout_tokens_per_forward": 1.0,
        "heldout_response_length": lent.ANSWER,
        "heldout_nan_answers": 0,
        "heldout_graded_timeouts": 0,
        "heldout_problems": 3,
    }
    assert tools.timer.pop().keys() == {"seconds/eval"}


@pytest.mark.parametrize("answers", [1, 2])
def test_an_evaluation_that_nobody_judged_has_no_accuracy(tmp_path, answers):
    settings = lent.settings(heldout_answers=answers)
    grader = Grader(
        lambda texts, *_: Grades(np.full(len(texts), np.nan)),
        check=lambda problem: None,
    )
    tools = lent.tools(settings, tmp_path, grader=grader)
    problems = heldout.problems(settings, tools)
    row = heldout.evaluate(2, lent.Weights(), problems, settings, tools)
    assert row["heldout_graded_timeouts"] == 3 * answers
    assert not [name for name in row if "accuracy" in name or "pass@" in name]
    why = heldout.unjudged(row, "heldout_accuracy", answers)
    assert why.startswith(f"{3 * answers} of {3 * answers} answers")


@pytest.mark.parametrize(
    ("metric", "missing", "answers", "told"),
    [
        ("heldout_accuracy", (1, 9), 1, ""),
        ("heldout_accuracy", (2, 0), 1, "2 of 10 answers of heldout_accuracy were"),
        ("heldout_accuracy", (2, 0), 2, ""),
        ("heldout_easy_accuracy", (9, 2), 1, "2 of 10 answers of heldout_easy_acc"),
        ("heldout_easy_accuracy", (9, 1), 1, ""),
        ("heldout_pass@1", (2, 0), 1, "2 of 10 answers of heldout_pass@1 were"),
        ("heldout_tokens_per_forward", (9, 9), 1, ""),
        ("", (9, 9), 1, ""),
        ("reward", (9, 9), 1, ""),
    ],
)
def test_what_too_few_judged_is_not_compared(metric, missing, answers, told):
    row = {}
    for front, count in zip(("heldout_", "heldout_easy_"), missing, strict=True):
        row |= {f"{front}graded_timeouts": count, f"{front}problems": 10}
    why = heldout.unjudged(row, metric, answers)
    assert why.startswith(told) and bool(why) == bool(told)


# An answer that is longer than sampler.max_new is no example.
@pytest.mark.parametrize(("method", "count"), [("rl", 5), ("sft", 4)])
def test_problems_that_are_learned_from_too_are_told(tmp_path, method, count):
    settings = lent.settings(heldout_problems=5, noise=NoiseConfig(kind="subset"))
    tools = lent.tools(settings, tmp_path)
    sets = heldout.sets(settings, tools)
    prompts = [*sources.SOURCES[method](settings, tools).prompts]  # of the same file
    (line,) = heldout.shared(settings, sets, prompts)
    assert line.startswith(f"warning: {count} of 5 problems of '") and "too" in line
    assert f"{count - 3} of 5" in heldout.shared(settings, sets, prompts[3:])[0]
    assert heldout.shared(settings, sets, prompts[count:]) == []
    # Of another image it is another problem.
    shown = [Prompt(prompts[0], (Picture("a.png", "mark", (1, 1)),))]
    assert heldout.shared(settings, sets, shown) == []
    assert heldout.shared(settings, {}, prompts) == []


def test_several_files_have_metrics_by_their_names(tmp_path):
    lines = (lent.ARITHMETIC / "heldout.jsonl").read_text().splitlines()
    paths = [tmp_path / name for name in ("a.jsonl", "easy.jsonl", "hard.v2.jsonl")]
    for path, count in zip(paths, (3, 1, 2), strict=True):
        path.write_text("\n".join(lines[:count]))
    settings = lent.settings(heldout_problems=0)
    files = dataclasses.replace(settings.data, heldout=", ".join(map(str, paths)))
    settings = dataclasses.replace(settings, data=files)
    tools = lent.tools(settings, tmp_path)
    sets = heldout.sets(settings, tools)
    assert {name: len(x) for name, x in sets.items()} == {"": 3, "easy_": 1, "hard_": 2}
    row = heldout.evaluate_sets(2, lent.Weights(), sets, settings, tools)
    assert row["heldout_accuracy"] == pytest.approx(1 / 3)
    assert (row["heldout_easy_accuracy"], row["heldout_hard_accuracy"]) == (1, 0.5)
    alone = heldout.evaluate(2, lent.Weights(), sets[""], settings, tools)
    assert alone == {key: row[key] for key in alone}
    for third, says in ((paths[1], "each once"), ("a/easy", "two files named 'easy'")):
        twice = dataclasses.replace(files, heldout=f"{paths[0]},{paths[1]},{third}")
        with pytest.raises(ValueError, match=says):
            heldout.sets(dataclasses.replace(settings, data=twice), tools)


def test_several_answers_to_each_problem(tmp_path):
    settings = lent.settings(heldout_answers=4)
    tools = lent.tools(settings, tmp_path)
    problems = heldout.problems(settings, tools)
    row = heldout.evaluate(2, lent.Weights(), problems, settings, tools)
    # Of 12 answers in a row every third is right: 2, 1 and 1 of 4.
    assert row["heldout_accuracy"] == row["heldout_pass@1"] == pytest.approx(1 / 3)
    assert row["heldout_pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 1 / 2) / 3)
    assert row["heldout_pass@4"] == 1


def test_several_samplers_have_metrics_by_their_names(tmp_path):
    settings = lent.settings()
    tools = lent.tools(settings, tmp_path)
    sets = heldout.sets(settings, tools)
    alone = heldout.evaluate_sets(2, lent.Weights(), sets, settings, tools)

    class Slow(lent.Answerer):
        """The same answers, in twice the forwards."""

        def stream(self, *args, **how):
            for i, answer in super().stream(*args, **how):
                yield i, answer._replace(forwards=2 * answer.forwards)

    slots, longest = settings.sampler.slots, settings.sampler.max_prompt
    both = dataclasses.replace(tools, others={"slow": Slow(slots, longest)})
    row = heldout.evaluate_sets(2, lent.Weights(), sets, settings, both)
    assert {key: row[key] for key in alone} == alone
    assert row["heldout_slow_accuracy"] == row["heldout_accuracy"]
    assert row["heldout_slow_tokens_per_forward"] == 0.5
    assert row.keys() - alone.keys() == {
        key.replace("heldout_", "heldout_slow_") for key in alone
    }
    clash = dataclasses.replace(
        settings.data, heldout=f"{settings.data.heldout},s.jsonl"
    )
    clash = dataclasses.replace(settings, data=clash, samplers={"s": settings.sampler})
    with pytest.raises(ValueError, match="would both have metrics named heldout_s_..."):
        heldout.sets(clash, tools)


def test_no_file_has_the_metrics_of_another_and_a_sampler():
    settings = lent.settings()
    for heldout_files, twice in (("a,b,b_s", "b_s_"), ("a,b,c_s", ""), ("a,b", "")):
        files = dataclasses.replace(settings.data, heldout=heldout_files)
        made = dataclasses.replace(
            settings, data=files, samplers={"s": settings.sampler}
        )
        if not twice:
            assert [
                *heldout.files(made.data.heldout, made.samplers).values()
            ] == heldout_files.split(",")
            continue
        with pytest.raises(ValueError, match=f"metrics named heldout_{twice}[.]{{3}}:"):
            heldout.files(made.data.heldout, made.samplers)


def test_samplers_are_told_by_their_keys():
    cfg = SamplerConfig()
    assert variants("", cfg) == {}
    found = variants(
        "one: strategy=static , top_p=0.5 / wide:block=8,before_stop=True", cfg
    )
    assert found == {
        "one": dataclasses.replace(cfg, strategy="static", top_p=0.5),
        "wide": dataclasses.replace(cfg, block=8, before_stop=True),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "wide",
            "'wide': a name of small letters and digits, another for each, and keys",
        ),
        ("Wide:block=8", "'Wide:block=8': a name of small"),
        ("a:block=8/a:block=4", "'a:block=4': a name of small"),
        ("a:rows=3", "a: 'rows' cannot be varied; choose from block, steps"),
        ("a:block=8,top_k=3,block=4", "a: block is set twice"),
        ("a:block=x", "a: block='x': needs a whole number"),
        ("a:before_stop=1", "a: before_stop='1': needs true or false"),
        ("a:threshold=nan", "a: threshold=nan"),
        ("a:strategy=best", "a: strategy='best'"),
    ],
)
def test_samplers_that_are_none(text, says):
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        variants(text, SamplerConfig())
    assert "\n" not in str(error.value)


def test_problems_that_a_file_has_twice_are_told():
    told = []
    looked = [Prompt([5], (Picture("x", mark, (1, 1)),)) for mark in "ab"]
    problems = [data.Problem(x, text="", answer="") for x in looked]
    heldout.repeated(problems, "x", told.append)
    assert told == []
    heldout.repeated(problems * 2, "x", told.append)
    assert told[0].startswith("warning: 2 of 4 problems of 'x' are")
