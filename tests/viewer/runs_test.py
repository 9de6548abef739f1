"""What a run's folder tells, whole or damaged."""

import json
import os
import sys

import pytest

from dllm_jax import report, statistics
from dllm_jax.viewer import album, runs, traces
from tests.viewer.common import answer, write


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="no run's folder: .*run.json$"):
            runs.told(str(path))
    for name in "ba":
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"attempts": []}')
    with pytest.raises(ValueError, match="; name one that is in it, such as .*/a$"):
        runs.told(str(tmp_path))


def test_a_run_has_its_name_from_wherever_it_is_looked_at(tmp_path, monkeypatch):
    (samples := tmp_path / "first" / "samples").mkdir(parents=True)
    write(tmp_path / "first" / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    write(samples / "step_000001.jsonl", [answer()])
    (tmp_path / "newest").symlink_to("first")
    monkeypatch.chdir(samples)
    for path, name in (("..", "first"), ("../../newest", "newest")):
        assert runs.told(path)["name"] == name
        assert traces.read(path).name == f"{name}, step 1"


@pytest.mark.skipif(sys.platform != "linux", reason="it has no /proc")
def test_a_page_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    write(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "-o", "/proc/x.html"])
    with pytest.raises(
        ValueError, match="^--out=/proc/x.html: it cannot be written: .*name"
    ):
        report.main()
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    (page := tmp_path / "report.html").mkdir()
    with pytest.raises(ValueError, match="^--out=.*/report.html: a folder; name a"):
        report.main()
    page.rmdir()
    report.main()
    assert capsys.readouterr().out == f"{page}\n"
    assert f"<title>Report on {tmp_path.name}</title>" in page.read_text()
    assert {file.name for file in tmp_path.iterdir()} == {
        "metrics.jsonl",
        "report.html",
    }


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("run.json", '{"attempts": [1, {"versions": 5}], "defaults": 3}'),
        ("config.json", "[]"),
        ("config.json", '{"model": 5, "eval": [], "data": "x"}'),
        ("eval.json", '{"accuracy": "high"}'),
        ("run.log", b"\xff warning"),
    ],
    ids=str,
)
def test_a_damaged_file_costs_what_it_told(name, content, tmp_path):
    rows = [{"step": step, "reward": 0.5} for step in range(3)]
    write(tmp_path / "metrics.jsonl", rows)
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    told = runs.told(str(tmp_path))
    assert told["panels"][0]["lines"][0]["points"] == [(step, 0.5) for step in range(3)]
    assert json.dumps(told)


def test_a_page_has_no_more_digits_than_it_draws(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": 1, "kl": 1e-5 / 3, "loss": 2**70}])
    lines = [x["lines"][0]["points"] for x in runs.told(str(tmp_path))["panels"]]
    assert lines == [[(1, 1.180592e21)], [(1, 3.333333e-6)]]


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_what_a_damaged_file_costs_is_said(name, tmp_path, capsys):
    write(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    (tmp_path / name).write_text('{"method": "sft"}')
    runs.told(str(tmp_path))
    assert capsys.readouterr().err == ""
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    runs.told(str(tmp_path))
    assert f"{tmp_path / name}: left out: it holds no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "count"), [(63.5, 20), (-0.1, 20), (0.5, -3), (0.5, 1e-300), (0.5, 1e300)]
)
def test_a_row_by_hand_has_no_interval_where_there_can_be_none(share, count, tmp_path):
    row = {"step": 1, "heldout_accuracy": share, "heldout_problems": count}
    write(tmp_path / "metrics.jsonl", [row])
    assert runs.told(str(tmp_path))["evals"] == [[1, share, None, None, None, None]]


@pytest.mark.parametrize(
    ("timeouts", "answers", "judged"), [(236, 1, 20), (236, 2, 138), (256, 1, 0)]
)
def test_an_interval_is_that_of_problems_that_were_judged(
    timeouts, answers, judged, tmp_path
):
    row = {"step": 1, "heldout_accuracy": 0.5, "heldout_problems": 256}
    write(tmp_path / "metrics.jsonl", [row | {"heldout_graded_timeouts": timeouts}])
    cfg = {"eval": {"answers": answers}}
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    want = [0.5, *statistics.wilson(0.5, judged)] if judged else [None] * 3
    ((_, *told),) = runs.told(str(tmp_path))["evals"]
    assert told == [*want, None, None]


def test_an_evaluation_that_nobody_judged_is_told_without_an_accuracy(tmp_path):
    row = {"step": 1, "heldout_problems": 9, "heldout_graded_timeouts": 9}
    write(tmp_path / "metrics.jsonl", [row | {"heldout_tokens_per_forward": 1.5}])
    assert runs.told(str(tmp_path))["evals"] == [[1, *[None] * 3, 1.5, None]]


def test_what_does_not_add_up_costs_an_interval_alone(tmp_path):
    """As rows of an earlier eval.answers, which was larger."""
    row = {"step": 1, "heldout_accuracy": 0.7, "heldout_problems": 256}
    write(tmp_path / "metrics.jsonl", [row | {"heldout_graded_timeouts": 300}])
    assert runs.told(str(tmp_path))["evals"] == [[1, 0.7, None, None, None, None]]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_all_or_nothing_has_an_interval(share, tmp_path):
    row = {"step": 1, "heldout_accuracy": share, "heldout_problems": 16}
    write(tmp_path / "metrics.jsonl", [row])
    ((_, _, low, high, *_),) = runs.told(str(tmp_path))["evals"]
    assert 0 <= low < high <= 1 and share in (low, high)


def test_a_run_is_told_as_its_newest_attempt_was(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": 7, "reward": 0.5}])
    first = {"start": "Monday", "ended": "stopped", "device": "CPU", "devices": 1}
    last = {"start": "Friday", "ended": "", "device": "TPU", "devices": 4}
    last |= {"versions": {"jax": "1", "python": "3"}, "commit": None}
    (tmp_path / "run.json").write_text(json.dumps({"attempts": [first, last]}))
    cfg = {"method": "rl", "model": {"path": "here"}}
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    assert runs.told(str(tmp_path))["facts"] == [
        ["method", "rl"],
        ["model", "here"],
        ["steps", "7"],
        ["started", "Monday"],
        ["device", "4 x TPU"],
        ["versions", "jax 1, python 3"],
    ]


def test_the_time_of_steps_is_told_by_phases_that_some_have(tmp_path):
    rows = [
        {"step": 0, "seconds/eval": 9.0},
        {"step": 1, "seconds/rollout": 1.23456, "seconds/update": 2.0},
        {"step": 2, "reward": 0.5},
        {"step": 3, "seconds/update": 4.0},
    ]
    write(tmp_path / "metrics.jsonl", rows)
    told = runs.told(str(tmp_path))["phases"]
    assert told["names"] == ["rollout", "update"] and told["steps"] == [1, 3]
    assert told["seconds"] == [[1.2346, 2.0], [0.0, 4.0]]


def test_a_share_of_none_is_not_told(tmp_path):
    told = {"accuracy": 0.0, "problems": 4}
    (tmp_path / "eval.json").write_text(json.dumps(told))
    none = statistics.Score(0.0, None, None, statistics.OF_NONE)._asdict()
    (tmp_path / "card.json").write_text(json.dumps({"scores": {"accuracy": none}}))
    assert runs.scores(tmp_path) == [["problems", 4, None, None]]


def test_only_what_is_unusual_is_told_of_the_log(tmp_path):
    lines = ["t step 1/4", "t warning: x", "t step 2: the step is skipped", "t fine"]
    (tmp_path / "run.log").write_text("\n".join(lines))
    assert runs.events(tmp_path) == lines[1:3]
    lines = [f"t error: {i}" for i in range(runs.LAST_EVENTS + 1)]
    (tmp_path / "run.log").write_text("\n".join(lines))
    assert runs.events(tmp_path) == lines[1:]


def test_leaves_are_named_as_on_the_command_line():
    assert runs.flat({"a": {"b": [1, "x"]}, "c": None}) == {
        "a.b": '[1, "x"]',
        "c": "null",
    }


def test_no_pipe_is_waited_for(tmp_path):
    """The run has read it: nobody writes to it again."""
    os.mkfifo(tmp_path / "pipe")
    cfg = {"data": {"heldout": str(tmp_path / "pipe")}, "eval": {"problems": 7}}
    assert runs.heldout_size(cfg) == 7
    (tmp_path / "x.jsonl").write_text('{"question": "1"}\n' * 3)
    cfg["data"]["heldout"] = str(tmp_path / "x.jsonl")
    assert runs.heldout_size(cfg) == 3
    assert runs.heldout_size({"eval": {"problems": 7}}) == 7


def test_of_several_held_out_files_the_first_is_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1"}\n' * 256)
    cfg = {"data": {"heldout": f" {tmp_path}/a.jsonl , {tmp_path}/b.jsonl"}}
    for problems, size in ((2000, 256), (0, 256), (100, 100)):
        cfg["eval"] = {"problems": problems}
        assert runs.heldout_size(cfg) == size
    write(tmp_path / "metrics.jsonl", [{"step": 1, "heldout_accuracy": 0.5}])
    (tmp_path / "config.json").write_text(json.dumps(cfg | {"eval": {"problems": 0}}))
    ((_, _, low, high, *_),) = runs.told(str(tmp_path))["evals"]
    assert [round(low, 3), round(high, 3)] == [0.439, 0.561]


def test_an_evaluation_is_told_with_its_intervals(tmp_path):
    """As far as a card has them: a damaged one costs no more than they."""
    told = {"accuracy": 0.5, "problems": 4, "odd": "x"}
    (tmp_path / "eval.json").write_text(json.dumps(told))
    bare = [["accuracy", 0.5, None, None], ["problems", 4, None, None]]
    assert runs.scores(tmp_path) == bare
    card = tmp_path / "card.json"
    for damaged in (
        "{",
        "[]",
        '{"scores": 3}',
        '{"scores": {"accuracy": {"low": "x"}}}',
    ):
        card.write_text(damaged)
        assert runs.scores(tmp_path) == bare
    card.write_text('{"scores": {"accuracy": {"low": 0.1, "high": 0.9}}}')
    assert runs.scores(tmp_path) == [["accuracy", 0.5, 0.1, 0.9], bare[1]]


def test_a_setting_of_a_sweep_has_the_rest_of_the_sweeps_folder(tmp_path):
    cfg = {"seed": 3, "eval": {"temperature": 1.0, "sweep": "eval.temperature=0,1"}}
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    (tmp_path / "run.json").write_text('{"attempts": [{"ended": "done"}]}')
    (tmp_path / "run.log").write_text("t warning: slow\n")
    for value in (0, 1):
        (part := tmp_path / f"temperature={value}").mkdir()
        (part / "eval.json").write_text('{"accuracy": 0.5}')
        (part / "eval.job.json").write_text(json.dumps({"eval.temperature": value}))
        write(part / "eval.jsonl", [answer(question="a", reward=float(value))])
    parts = [str(tmp_path / f"temperature={value}") for value in (0, 1)]
    made = report.content(parts)
    assert [told["config"]["eval.temperature"] for told in made["runs"]] == ["0", "1"]
    names = [f"{tmp_path.name}/temperature={value}" for value in (0, 1)]
    assert [told["name"] for told in made["runs"]] == names
    for told in made["runs"]:
        assert told["config"]["seed"] == "3" and told["scores"][0][1] == 0.5
        assert told["attempts"][0][-1] == "done" and told["events"]
    assert made["summary"]["wins"] == [0, 1, 0]


def test_a_sweeps_own_folder_shows_each_of_its_settings(tmp_path):
    (tmp_path / "run.json").write_text('{"attempts": [{"ended": "done"}]}')
    settings = "temperature=2", "temperature=0.5", "threshold=0.9", "temperature=10"
    for share, name in enumerate(settings, 1):  # of two sweeps
        (part := tmp_path / name).mkdir()
        told = {"accuracy": share / 4, "tokens_per_forward": 2.5}
        (part / "eval.json").write_text(json.dumps(told))
        card = {"scores": {"accuracy": {"low": 0.1, "high": 0.9}}}
        (part / "card.json").write_text(json.dumps(card))
        write(part / "eval.jsonl", [answer(question=name)])
    (other := tmp_path / "another run").mkdir()  # of its own
    for name in ("run.json", "eval.json"):
        (other / name).write_text('{"accuracy": 1}')
    assert runs.told(str(other))["name"] == other.name
    made = report.content([str(tmp_path)])
    assert made["runs"][0]["settings"] == [
        ["temperature=0.5", 0.5, 0.1, 0.9, 2.5, None],
        ["temperature=2", 0.25, 0.1, 0.9, 2.5, None],
        ["temperature=10", 1.0, 0.1, 0.9, 2.5, None],
        ["threshold=0.9", 0.75, 0.1, 0.9, 2.5, None],
    ]
    assert made["title"] == "Answers of the first and the last setting"
    shown = [file["rows"][0]["q"] for file in made["samples"]["files"]]
    assert shown == ["temperature=0.5", "threshold=0.9"]
    for part in sorted(tmp_path.glob("*/eval.jsonl"))[1:]:
        part.unlink()
    made = report.content([str(tmp_path)])
    assert made["title"] == "Answers of the only setting"
    assert [file["rows"][0]["q"] for file in made["samples"]["files"]] == shown[:1]
    (tmp_path / "temperature=0.5" / "eval.jsonl").unlink()
    assert report.content([str(tmp_path)])["samples"] is None


def test_beside_further_samplers_the_first_one_has_a_row(tmp_path):
    """The folder itself holds its answers and scores."""
    (tmp_path / "run.json").write_text('{"attempts": []}')
    for name, share in ((".", 0.5), ("two", 0.25), ("one", 0.75)):
        (part := tmp_path / name).mkdir(exist_ok=True)
        (part / "eval.json").write_text(json.dumps({"accuracy": share}))
        write(part / "eval.jsonl", [answer(question=name)])
    made = report.content([str(tmp_path)])
    rows = [row[:2] for row in made["runs"][0]["settings"]]
    assert rows == [["sampler", 0.5], ["one", 0.75], ["two", 0.25]]
    assert made["samples"]["files"][0]["rows"][0]["q"] == "."
    for name in ("one", "two"):
        (tmp_path / name / "eval.json").unlink()
    assert report.content([str(tmp_path)])["runs"][0]["settings"] == []


@pytest.mark.parametrize("text", ["", '{"response_ids": [1], "step_m'])
def test_answers_that_cannot_be_read_cost_no_report(tmp_path, text, capsys):
    """As an evaluation leaves them that was killed, or has hardly begun."""
    (tmp_path / "run.json").write_text('{"attempts": []}')
    (tmp_path / "eval.jsonl").write_text(text)
    made = report.content([str(tmp_path)])
    assert made["samples"] is None and made["summary"] is None
    assert "warning: answers are left out: " in capsys.readouterr().err


def test_one_evaluation_shows_its_answers(tmp_path):
    (tmp_path / "run.json").write_text('{"attempts": []}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    write(tmp_path / "eval.jsonl", [answer(question="a"), answer(question="b")])
    made = report.content([str(tmp_path)])
    (file,) = made["samples"]["files"]
    assert [row["q"] for row in file["rows"]] == ["a", "b"]
    assert made["title"] == "Evaluated answers" and made["summary"] is None


def test_a_comma_in_a_held_out_files_name_is_no_border(tmp_path):
    write(tmp_path / "a,b.jsonl", [{"question": "1"}] * 5)
    cfg = {"data": {"heldout": str(tmp_path / "a,b.jsonl")}, "eval": {"problems": 0}}
    assert runs.heldout_size(cfg) == 5
    assert album.roots_of(tmp_path / "x.jsonl", cfg["data"]) == (str(tmp_path),)


def test_two_evaluations_without_a_common_problem_are_told(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
        write(tmp_path / name / "eval.jsonl", [answer(question=name)])
    made = report.content([str(tmp_path / name) for name in "ab"])
    assert made["summary"] is None
    assert "no question of the one stands in the other" in capsys.readouterr().err


def of_steps(folder, steps) -> str:
    """Returns a run's folder with an answer of each of these steps, all to one question."""
    (folder / "samples").mkdir(parents=True)
    write(folder / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    for step in steps:
        file = folder / "samples" / f"step_{step:06d}.jsonl"
        write(file, [answer(question="1+1")])
    return str(folder)


def shown(made: dict) -> list[str]:
    """Returns the names of the files whose answers a report replays."""
    return [file["name"] for file in made["samples"]["files"]]


def test_a_run_shows_answers_of_its_first_and_its_last_step(tmp_path):
    run = of_steps(tmp_path / "a", [3, 1, 2])
    write(tmp_path / "a" / "eval.jsonl", [answer(question="1+1")])
    made = report.content([run])
    assert made["title"] == "Answers of the first and the last step"
    assert shown(made) == ["a, step 1", "a, step 3"]
    assert made["samples"]["pairs"] == [(0, 0)] and made["summary"] is None


def test_two_runs_show_answers_of_the_last_step_that_both_have(tmp_path, capsys):
    runs_of_two = [
        of_steps(tmp_path / name, [1, 2, own]) for name, own in (("a", 3), ("b", 4))
    ]
    write(tmp_path / "a" / "eval.jsonl", [answer(question="1+1")])  # of one alone
    made = report.content(runs_of_two)
    assert made["title"] == "Answers at the last step of both"
    assert shown(made) == ["a, step 2", "b, step 2"] and made["summary"] is None
    write(tmp_path / "b" / "eval.jsonl", [answer(question="1+1")])
    made = report.content(runs_of_two)
    assert made["title"] == "Evaluated answers"
    assert shown(made) == ["a/eval.jsonl", "b/eval.jsonl"]
    assert made["samples"]["pairs"] == [(0, 0)] and made["summary"]["problems"] == 1
    other = of_steps(tmp_path / "c", [5])
    assert report.content([runs_of_two[0], other])["samples"] is None
    assert "in common" not in capsys.readouterr().err
