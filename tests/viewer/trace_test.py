"""The page of answers: what it is made of, what it refuses, and what nobody can put into it."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import types
import unicodedata

import numpy as np
import pytest
from huggingface_hub import constants

from dllm_jax import data, trace
from dllm_jax.models import families
from dllm_jax.viewer import compare, leave, page, table, traces
from tests import served
from tests.viewer.common import FULL, MODEL, answer, write


def test_numbers_arrive_in_the_page_as_they_were(tmp_path):
    row = answer(advantage=[1.5, None, -0.25], reward=1.0, answer="8", question="3+5")
    row["step_map"] = [4, 1, 9]
    file = traces.read(str(write(tmp_path / "x.jsonl", [row])))
    packed = traces.packed(file, None, block=4)
    (told,) = packed["rows"]
    assert np.cumsum(told["s"]).tolist() == [4, 1, 9]
    assert [packed["pieces"][i][2] for i in told["t"]] == [5, 6, 7]
    assert told["l"] == [-25] * 3 and told["c"] == [50] * 3
    assert told["a"] == [150, None, -25]
    assert (told["q"], told["g"], told["r"], told["n"]) == ("3+5", "8", 1.0, 3)
    assert packed["block"] == 4 and "v" not in told


def test_the_settings_are_those_of_the_command_that_wrote_the_file(tmp_path):
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    for step in (2, 10):
        write(samples / f"step_{step:06d}.jsonl", [answer()])
    told = {"model": {"path": "a"}, "sampler": {"block": 4}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(told))
    newest = traces.read(str(tmp_path / "run"))
    assert (newest.name, newest.model, newest.block) == ("run, step 10", "a", 4)
    loose = write(tmp_path / "x.jsonl", [answer()])
    (tmp_path / "x.job.json").write_text('{"model.path": "b", "sampler.block": 0}')
    assert (traces.read(str(loose)).model, traces.read(str(loose)).block) == ("b", 0)


def test_a_hub_name_is_read_from_its_cache(tmp_path, monkeypatch, capsys):
    stored, commit = tmp_path / "models--org--tiny", "0123456789abcdef"
    shutil.copytree(MODEL, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    file = traces.read(str(write(tmp_path / "x.jsonl", [answer()])))
    told, here = (
        trace.shown(dataclasses.replace(file, model=model), "")
        for model in ("org/tiny", str(MODEL))
    )
    assert told | {"model": ""} == here | {"model": ""} and told["block"]
    assert capsys.readouterr().err == ""
    trace.shown(dataclasses.replace(file, model="org/none"), "")
    assert "'org/none' is no folder with a tokenizer, nor a" in capsys.readouterr().err


ATTENTIONS = {
    "its checkpoint's": ("", FULL, None, True),
    "a checkpoint with blocks": ("", MODEL, None, False),
    "what a run makes of it": ("full", MODEL, None, True),
    "what a run unmakes": ("block", FULL, None, False),
    "where the tokenizer lies": ("", "org/name", FULL, True),
    "a hub's, and no tokenizer": ("", "org/name", None, False),
    "nobody's": ("", "", None, False),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("noted", [False, True])
def test_a_page_knows_whether_attention_was_full(name, noted, tmp_path):
    attention, model, of_tokenizer, full = ATTENTIONS[name]
    told = {"path": str(model), "attention": attention}
    file = write(tmp_path / "x.jsonl", [answer()])
    if noted:
        flat = {f"model.{key}": x for key, x in told.items()}
        (tmp_path / "x.job.json").write_text(json.dumps(flat))
    else:
        (tmp_path / "config.json").write_text(json.dumps({"model": told}))
    tok = data.tokenizer(of_tokenizer) if of_tokenizer else None
    assert traces.packed(traces.read(str(file)), tok)["full"] is full


@pytest.mark.parametrize("kind", families.FAMILIES)
def test_families_without_a_word_attend_as_models_do(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    file = traces.File(tmp_path, [], str(tmp_path), 4)
    attention = families.FAMILIES[kind].assumed.get("attention", "block")
    assert traces.full(file, None) == (attention == "full")
    lone = types.SimpleNamespace(name_or_path=str(tmp_path / "none"))
    assert traces.full(file, lone) == traces.full(file, None)
    (tmp_path / "config.json").write_text("{")  # damaged: nobody can tell
    assert traces.full(file, None) is False


def test_of_very_many_answers_some_are_shown_and_that_is_said():
    rows, notice = traces.some([*range(5001)])
    assert len(rows) == traces.MOST and rows[0] == 0 and rows[-1] > 4990
    assert notice == "2,000 of 5,001 answers, spread evenly over the file"
    assert traces.some([1, 2]) == ([1, 2], "")


REFUSED = {
    "nothing": ("", "it is empty"),
    "no JSON": ("hello", "line 1: not JSON"),
    "prompts": ('{"prompt": "1+1"}', "answer 1: it has no response_ids"),
    "ids": (answer() | {"response_ids": "abc"}, "answer 1: response_ids must be"),
    "steps": (answer() | {"step_map": [1]}, "step_map has 1 numbers for 3 tokens"),
    "list": (answer() | {"confidence": 5}, "confidence has no list of numbers"),
    "far": (
        answer() | {"step_map": [2**30, 1, 2]},
        "step_map must be a list of numbers",
    ),
    "number": (answer() | {"logprobs": ["a"] * 3}, "logprobs must be numbers"),
    "reward": (answer() | {"reward": "high"}, "reward must be a number"),
    "large": (answer() | {"logprobs": [1e308] * 3}, "logprobs must be numbers of at m"),
    "digits": (
        answer() | {"forwards": 10**400},
        "forwards must be a number of at most",
    ),
    "parts": (answer() | {"rewards": {"math": "1"}}, "math must be a number"),
    "text": (answer() | {"question": 5}, "question must be a text"),
    "prompt": (answer() | {"prompt_ids": [-1]}, "prompt_ids must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_shown_is_one_line(name, tmp_path):
    content, says = REFUSED[name]
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "x.jsonl").write_text(text + "\n")
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        traces.read(str(tmp_path / "x.jsonl"))
    assert "x.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_page_of_a_pipe_needs_a_name(tmp_path):
    file = write(tmp_path / "a.jsonl", [answer()])
    assert trace.place_of(file.absolute()) == tmp_path / "a.html"
    for path in ("/dev/stdin", "/dev/fd/63", "/proc/self/fd/0"):
        with pytest.raises(
            ValueError, match=f"^{path} has no name .*: add -o page.html"
        ):
            trace.place_of(pathlib.Path(path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe has no name that its page could take"):
        trace.place_of(tmp_path / "pipe")
    (tmp_path / "a.html").mkdir()
    with pytest.raises(ValueError, match="a.html: a folder; name a file"):
        trace.place_of(file)


def test_the_command_writes_a_page_or_refuses_in_one_line(tmp_path):
    write(tmp_path / "a.jsonl", [answer()])
    write(tmp_path / "b.jsonl", [answer(prompt_ids=[9])])

    def run(*words):
        return served.run("dllm_jax.trace", [*map(str, words)])

    told = run(tmp_path / "a.jsonl", f"--model={MODEL}", "-o", tmp_path / "p.html")
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    told = run(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert told.returncode == 2 and told.stdout == ""
    assert "have no problem in common: nothing" in told.stderr.splitlines()[-1]
    told = run(tmp_path / "none.jsonl")
    assert told.returncode == 2
    assert (
        told.stderr == f"error: file of answers '{tmp_path}/none.jsonl': no such file\n"
    )
    told = run("x" * 300)
    assert told.returncode == 2
    assert told.stderr.endswith("xxx...: File name too long\n")
    assert told.stderr.count("\n") == 1
    write(tmp_path / "c.jsonl", [answer()])
    told = run(tmp_path / "a.jsonl", tmp_path / "c.jsonl", f"--model={MODEL}")
    assert told.stdout.splitlines()[0] == (
        f"answers of {tmp_path}/a.jsonl; those of {tmp_path}/c.jsonl are on the page"
    )


# ---- Two files -----------------------------------------------------------------------


def test_of_a_folder_without_answers_it_is_said_what_to_name(tmp_path):
    with pytest.raises(ValueError, match="such as python -m dllm_jax.generate --out"):
        traces.read(str(tmp_path))
    (part := tmp_path / "threshold=0.9").mkdir()  # a setting of a sweep
    write(part / "eval.jsonl", [answer()])
    with pytest.raises(ValueError, match=r"such as .*/threshold=0\.9/eval\.jsonl$"):
        traces.read(str(tmp_path))


def test_answers_are_paired_by_prompt_and_in_order():
    first = [answer(prompt_ids=[p]) for p in (1, 1, 2, 3)]
    second = [answer(prompt_ids=[p]) for p in (3, 1, 4, 1, 1)]
    shared = compare.common(first, second)
    assert shared == [([0, 1], [1, 3, 4]), ([3], [0])]
    assert compare.pairs(shared) == [(0, 1), (1, 3), (3, 0)]


def test_answers_are_paired_by_the_record_that_was_asked():
    """Another tokenizer has other ids for it, and another template other words, too."""
    first = [answer(prompt_ids=[p], problem=f"{p:016x}") for p in (1, 1, 2)]
    second = [
        answer(prompt_ids=[p + 50], problem=f"{p:016x}", question="?")
        for p in (2, 1, 1)
    ]
    assert compare.common(first, second) == [([0, 1], [1, 2]), ([2], [0])]
    same_ids = [x | {"problem": "f" * 16} for x in first]
    assert compare.common(first, same_ids) == []


def test_where_a_line_lacks_the_record_questions_are_compared():
    first = [
        answer(prompt_ids=[i], question=q, answer=gold, problem=f"{i:016x}")
        for i, (q, gold) in enumerate((("a", "1"), ("b", "2"), ("b", "3"), ("a", "1")))
    ]
    older = [{**x, "prompt_ids": [9, *x["prompt_ids"]]} for x in first]
    for row in older:
        del row["problem"]
    pairs = [([0, 3], [0, 3]), ([1], [1]), ([2], [2])]
    assert compare.common(first, older) == pairs
    assert compare.common(first, [first[0], *older[1:]]) == pairs
    named = [x | {"problem": "What is 1 + 1?"} for x in first]  # the data's own field
    assert compare.common(first, named) == pairs
    seen = [x | {"images": [{"mark": "a"}]} for x in older]
    assert compare.common(first, seen) == []
    for row in older:
        row |= {"question": ""}  # of captions, say: then ids are all that is told
    assert compare.common(first, older) == []


def test_a_prompt_that_was_skipped_lets_the_others_be_compared():
    """Its line, of an image that could not be read, say, has no question and no ids."""
    none = answer((), prompt_ids=[], finished="skipped", forwards=0)
    first, second = (
        [answer(prompt_ids=[model], question="a"), none] for model in (1, 2)
    )
    assert compare.common(first, second) == [([0], [0])]
    assert compare.common([none], [none]) == []


def test_the_same_words_about_another_image_are_another_prompt():
    shown = [answer(prompt_ids=[1], images=[{"mark": mark}]) for mark in "aba"]
    assert compare.common(shown, shown[1:]) == [([0, 2], [1]), ([1], [0])]


LINES = [answer(question=x, answer="1", problem=x * 16) for x in "ab"]
APART = {  # what another file has in place of the fields of LINES, and what is said
    "other questions": (
        {"question": "c", "problem": "0" * 16},
        "no question of the one stands in the other",
    ),
    "other gold answers": (
        {"answer": "9", "problem": None},
        "2 questions stand in both, with other gold answers or images",
    ),
    "other records": (
        {"problem": "0" * 16},
        "2 questions stand in both: they have the same gold answer and images",
    ),
    "other ids": (
        {"question": None, "prompt_ids": [9], "problem": None},
        "lines without a question are known by their prompt_ids, which all differ",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_two_files_without_a_common_problem_are_told_why(name):
    fields, reason = APART[name]
    second = [row | fields for row in LINES]
    rows = {"a": LINES, "b": second}
    files = [traces.File(pathlib.Path(x), rows[x], "", 0) for x in rows]
    with pytest.raises(ValueError, match="^a and b have no problem in common") as told:
        compare.check_common(*files)
    assert f"nothing to compare; {reason}" in str(told.value)
    second.append(answer(prompt_ids=[8]))
    if name == "other gold answers":
        assert "both; but lines without" in compare.why_apart(LINES, second)


def test_a_file_compared_with_itself_gives_zero_and_no_interval():
    rows = [answer(prompt_ids=[i], reward=float(i % 2)) for i in range(20)]
    told = compare.summary(rows, rows, compare.common(rows, rows))
    assert told["wins"] == [0, 0, 20] and told["problems"] == 20
    assert [row[0] for row in told["measures"]] == [
        "right",
        "tokens per forward",
        "tokens",
    ]
    assert all(row[3:] == [0.0, None, None] for row in told["measures"])


@pytest.mark.parametrize("reward", [0.1, 0.7, -0.2])
def test_the_same_rewards_of_other_numbers_of_answers_are_the_same(reward):
    """Their means differ by rounding."""
    first, second = ([answer(reward=reward)] * n for n in (7, 3))
    told = compare.summary(first, second, compare.common(first, second))
    assert told["wins"] == [0, 0, 1]
    close = answer(reward=reward + 1e-6)
    told = compare.summary(first, [close], compare.common(first, [close]))
    assert told["wins"] == [0, 1, 0]


def test_an_id_may_be_any_json_where_no_prompt_is_told():
    rows = [answer(prompt_ids=[], id=x) for x in (["a", 1], {"b": 2}, "c", None)]
    assert compare.common(rows, rows[::-1]) == [([0], [3]), ([1], [2]), ([2], [1])]


def test_what_is_not_graded_is_compared_by_length_and_speed():
    rows = [answer(prompt_ids=[i], forwards=2) for i in range(3)]
    told = compare.summary(rows, rows, compare.common(rows, rows))
    assert told["wins"] is None
    assert [row[:3] for row in told["measures"]] == [
        ["tokens per forward", 1.5, 1.5],
        ["tokens", 3.0, 3.0],
    ]


def test_a_prompt_that_was_skipped_has_no_length():
    first, second = ([answer(prompt_ids=[i]) for i in range(3)] for _ in range(2))
    none = {"response_ids": [], "step_map": [], "forwards": 0, "finished": "skipped"}
    first[2] |= none
    told = compare.summary(first, second, compare.common(first, second))
    tokens = {row[0]: row[1:] for row in told["measures"]}["tokens"]
    assert tokens[0] == tokens[1] and told["problems"] == 3


def test_what_nobody_judged_is_left_out_of_rewards_alone():
    late = {"reward": 0.0, "graded": False}
    first = [answer(prompt_ids=[i], reward=1.0) for i in (0, 0, 1, 2)]
    second = [answer(prompt_ids=[i], reward=0.0) for i in (0, 1, 2)]
    first[1] |= late  # of two answers one
    second[2] |= late  # of a problem all
    told = compare.summary(first, second, compare.common(first, second))
    assert (told["problems"], told["wins"]) == (3, [2, 0, 0])
    measures = {row[0]: row[1:] for row in told["measures"]}
    assert measures["right"][:3] == [1, 0, -1] and measures["tokens"][:2] == [3, 3]


# ---- Right, wrong, and not known -----------------------------------------------------

JUDGED = {
    "right": ({"reward": 1.0}, True),
    "wrong": ({"reward": 0.5}, False),
    "no grader": ({}, None),
    "late": ({"reward": 0.0, "graded": False}, None),
    "a weighed sum": ({"reward": 1.2, "rewards": {"math": 0.0, "form": 1.2}}, False),
    "a penalty": ({"reward": 0.9, "rewards": {"math": 1.0, "length": -0.1}}, True),
    "the first is late": ({"reward": 1.0, "rewards": {"math": None, "form": 1}}, None),
    "another's field": ({"reward": 1.0, "rewards": [0.0]}, True),
}


@pytest.mark.parametrize("name", JUDGED)
def test_the_first_grader_says_what_is_right_everywhere(name, tmp_path):
    fields, right = JUDGED[name]
    row = answer(**fields)
    assert compare.MEASURES["right"](row) is right
    sign = {True: "✓", False: "✗", None: ""}[right]
    assert table.cells_of(row)[0].strip() == sign
    file = traces.read(str(write(tmp_path / "x.jsonl", [row])))
    (told,) = traces.packed(file, None)["rows"]
    assert told.get("o") is right
    assert ("r" in told) == ("reward" in fields and name != "late")


# ---- The file that comes out ---------------------------------------------------------


def test_no_text_gets_out_of_the_data_or_the_title():
    hostile = "</script><script>alert(1)</script><!-- \u2028 {{script}} \ud800"
    made = page.page(hostile, page.TRACE, {"x": hostile})
    assert made.count("<script") == 2 and made.count("</script>") == 2
    assert "<title>&lt;/script&gt;" in made
    data = re.search(r'id="data">(.*?)</script>', made, re.DOTALL)[1]
    assert json.loads(data)["x"] == hostile.replace("\ud800", "?")
    assert not set(data) & {"\u2028", "<", ">"}


def test_a_page_needs_nothing_else():
    for kind in (page.TRACE, page.REPORT):
        made = page.page("x", kind, {})
        assert not re.search(r'(src|href)="(?!data:)|@import|url\(|fetch\(', made)
        assert len(made) < 68_000


def test_a_table_is_as_wide_as_it_may_be():
    rows = [
        answer(question="日本 " * 40, text="a\x1b[31m\n" * 90, reward=0.5),
        answer(question=None, text=None),
    ]
    for width in (60, 80, 200):
        lines = table.of_rows(rows, width).splitlines()
        assert len(lines) == 3
        assert all(table.columns(line) <= width for line in lines)
        assert not re.search(r"[\x00-\x1f]", "".join(lines))
    assert lines[1].split()[:4] == ["✗", "0.50", "3", "1.00"]


def test_wide_characters_take_two_columns():
    assert table.columns("日本語") == 6 and table.columns("ab") == 2
    assert table.cut("日本語", 6) == "日本語" and table.cut("ab", 2) == "ab"
    assert table.cut("日本語", 5) == "日本…" and table.cut("日本語", 4) == "日… "


def test_a_prompt_without_a_question_is_told_by_its_ids():
    row = answer(question=None, text="x", prompt_ids=[7, 8])
    assert table.cells_of(row)[4:] == ("[7, 8]", "x")


@pytest.mark.parametrize("word", ["हिन्दी", "Tie\u0302\u0301ng", "ที่นี่"])
def test_marks_above_and_below_take_no_column(word):
    marks = sum(unicodedata.category(char) == "Mn" for char in word)
    assert table.columns(word) == len(word) - marks < len(word)
    first, second = (
        table.of_rows([answer(question=text, text="4")], 80).splitlines()[1]
        for text in (word, "x" * table.columns(word))
    )
    assert first.replace(word, "") == second.replace("x" * table.columns(word), "")


# ---- At the end of a run -------------------------------------------------------------


def test_a_run_leaves_its_last_samples_as_a_page_and_a_table(tmp_path, monkeypatch):
    told = []
    monkeypatch.setenv("COLUMNS", "70")
    leave.after_run(tmp_path, None, told.append)
    assert not told and not [*tmp_path.iterdir()]  # it has no samples
    (tmp_path / "samples").mkdir()
    write(tmp_path / "samples" / "step_000001.jsonl", [answer(question="old")])
    new = answer(question="new", text="word " * 40)
    write(tmp_path / "samples" / "step_000002.jsonl", [new])
    leave.after_run(tmp_path, None, told.append)
    assert '"q":"new"' in (tmp_path / "trace.html").read_text()
    assert "new" in told[0] and told[1].endswith("trace.html")
    assert max(map(len, told[0].splitlines())) == 70  # the terminal's


def test_samples_that_are_damaged_do_not_end_a_run(tmp_path, capsys):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_000001.jsonl").write_text('{"half')
    leave.after_run(tmp_path, None, print)
    assert "warning: no page of samples" in capsys.readouterr().err
    assert not (tmp_path / "trace.html").exists()
