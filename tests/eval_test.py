"""Evaluation of the bundled model, as its command runs it."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import threading
import time
import types

import numpy as np
import pytest
import safetensors.numpy

from dllm_jax import config, data, exits, folder, metrics
from dllm_jax import eval as evaluation
from dllm_jax.rl import beside, rewards
from dllm_jax.rl import scores as scores_of
from dllm_jax.sampling import state
from tests import served
from tests.viewer import common as written

MODEL = pathlib.Path(__file__).parents[1] / "examples/arithmetic/model"


# A page a row, and a chunk a prompt: for every other number more is compiled.
FEW = ("--config.sampler.page=64", "--config.sampler.prefill=16")


def on(devices: int) -> dict:
    """Returns the environment of a command on so many fake devices."""
    flags = f"{served.HASTY} --xla_force_host_platform_device_count={devices}"
    return {"XLA_FLAGS": flags}


def run(*args, program="eval", devices=1):
    """Returns the finished command."""
    return served.run(f"dllm_jax.{program}", [*args], env=on(devices))


def test_the_bundled_model(tmp_path):
    done = run(
        "--config=configs/eval.py",
        f"--config.run.folder={tmp_path}",
        "--config.eval.problems=8",
        "--config.eval.answers=2",
        "--config.sampler.rows=16",
        *FEW,
        devices=2,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "eval.json").read_text())
    lines = [json.loads(x) for x in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    right = np.array([line["reward"] >= 1 for line in lines]).reshape(8, 2)
    assert told["pass@1"] == pytest.approx(right.mean()) == told["accuracy"]
    assert told["pass@2"] == pytest.approx(right.any(axis=1).mean())
    tokens = sum(len(line["response_ids"]) for line in lines)
    forwards = sum(line["forwards"] for line in lines)
    assert told["tokens_per_forward"] == pytest.approx(tokens / forwards)
    for line in lines:
        assert len(line["step_map"]) == len(line["response_ids"])
        assert line["question"] and line["answer"]
    assert f"accuracy {told['accuracy']:>19.4g}".split() in [
        x.split() for x in done.stdout.splitlines()
    ]

    card = json.loads((tmp_path / "card.json").read_text())
    assert (card["problems"], card["answers"], card["seed"]) == (8, 2, 0)
    assert len(card["checkpoint"]["hash"]) == 64 and card["sampler"]["block"] == 4
    names = {"accuracy", "pass@1", "pass@2", "truncated", "response_length"}
    assert card["scores"].keys() == names | {"forwards", "tokens_per_forward"}
    for name, score in card["scores"].items():
        assert score["value"] == pytest.approx(told[name])
        assert score["low"] <= score["value"] <= score["high"], name
    assert done.stdout.endswith(f"\nwritten to {tmp_path}\n")
    assert (tmp_path / "run.log").read_text().endswith(f" written to {tmp_path}\n")
    row = (tmp_path / "card.md").read_text().splitlines()[-1]
    assert row in done.stdout and f"{100 * told['accuracy']:.1f} % [" in row


SMALL = (
    "--config.eval.problems=4",
    "--config.eval.answers=2",
    "--config.sampler.rows=4",
    *FEW,
)


def evaluated(folder, *flags):
    """Returns a small evaluation that has ended."""
    return run(
        "--config=configs/eval.py", f"--config.run.folder={folder}", *SMALL, *flags
    )


def scores(folder) -> dict:
    """Returns the scores of a folder, without those that a clock decides."""
    told = json.loads((folder / "eval.json").read_text())
    return {name: x for name, x in told.items() if not name.startswith("seconds/")}


def test_an_evaluation_goes_on_behind_its_last_answer_with_the_same_scores(tmp_path):
    assert evaluated(tmp_path).returncode == 0
    before = (tmp_path / "eval.json").read_text()
    assert evaluated(tmp_path).returncode == 0  # of nothing: what it took stays
    assert (tmp_path / "eval.json").read_text() == before
    whole, file = scores(tmp_path), tmp_path / "eval.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for kept in (5, 2):  # in the middle of a problem, and between two
        (tmp_path / "eval.json").unlink()
        file.write_bytes(b"".join(lines[:kept]) + lines[kept][:30])
        done = evaluated(tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"{kept} of 8 answers are there, and stay" in done.stderr
        assert scores(tmp_path) == whole
        for line, want in zip(file.read_bytes().splitlines(), lines, strict=True):
            line, want = json.loads(line), json.loads(want)
            for name in ("logprobs", "confidence"):
                assert line.pop(name) == pytest.approx(want.pop(name), abs=1e-4)
            assert line == want

    idle = "--config.sampler.temperature=0.3"
    other = evaluated(tmp_path, "--config.eval.temperature=0.5", idle)
    assert other.returncode == 2
    assert f"{idle}: answers are drawn at eval.temperature=0.5" in other.stderr
    assert "another job: eval.temperature was 1.0, is now 0.5; name " in other.stderr
    (tmp_path / "metrics.jsonl").touch()
    trained = evaluated(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert trained.returncode == 2
    assert f"{tmp_path} is a training run's: name another folder" in trained.stderr
    assert len(file.read_bytes().splitlines()) == 8
    lacking = evaluated(tmp_path, "--overwrite", "--config.eval.by=level")
    assert lacking.returncode == 2
    assert "record 1: no field 'level', it has ['answer', 'q" in lacking.stderr
    assert "; eval.by names the field" in lacking.stderr
    named = evaluated(tmp_path, "--config.eval.samplers=lock:strategy=static")
    assert named.returncode == 2 and "'lock' is a file in " in named.stderr
    unfit = evaluated(tmp_path / "unfit", "--config.eval.samplers=a:cache=dual")
    assert unfit.returncode == 2
    assert "eval.samplers: a: sampler.cache='dual' does not serve" in unfit.stderr
    assert not list((tmp_path / "unfit").rglob("eval.jsonl"))
    several = evaluated(
        tmp_path, "--overwrite", "--config.data.heldout=a.jsonl,b.jsonl"
    )
    assert several.returncode == 2
    assert "data.heldout='a.jsonl,b.jsonl': no such file; an eval" in several.stderr
    keys = "--config.eval.problems=2", "--config.eval.by=answer"
    fewer = evaluated(tmp_path, "--overwrite", *keys)
    assert fewer.returncode == 0, fewer.stderr
    card = json.loads((tmp_path / "card.json").read_text())
    assert [x["problems"] for x in card["groups"].values()] == [1, 1]
    assert scores(tmp_path)["problems"] == 2
    assert len(file.read_bytes().splitlines()) == 4
    note = tmp_path / "eval.job.json"
    again = json.loads(note.read_text())
    assert not again.keys() & folder.OVERWRITING.keys()
    note.write_text(json.dumps(again | folder.OVERWRITING))  # as a signal leaves it
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]))
    more = evaluated(tmp_path, "--overwrite", *keys)
    assert more.returncode == 0, more.stderr
    assert "3 of 4 answers are there, and stay" in more.stderr
    told = json.loads((tmp_path / "run.json").read_text())["attempts"]
    assert [x["ended"][:7] for x in told] == ["done"] * 6
    assert not (tmp_path / "lock").exists()


def test_scores_go_where_answers_are_missing(tmp_path):
    """Of an evaluation that overwrites and is stopped they told another one's."""
    settings = []
    for name, count in (("whole", 2), ("cut", 1)):
        inside = tmp_path / name
        inside.mkdir()
        sink = folder.Answers(inside / "eval.jsonl", {}, overwrite=False)
        sink.begin(count)
        for number in range(count):
            sink.add({"n": number})
        sink.done()
        sink = folder.Answers(inside / "eval.jsonl", {}, overwrite=False)
        settings.append(evaluation.Setting(name, None, inside, sink))
        for score in evaluation.SCORES:
            (inside / score).touch()
    for score in evaluation.SWEPT:
        (tmp_path / score).touch()
    evaluation.begin(settings[:1], 2, tmp_path, sweeps=True)
    evaluation.begin(settings[1:], 2, tmp_path, sweeps=False)
    assert (tmp_path / "sweep.md").exists()
    evaluation.begin(settings, 2, tmp_path, sweeps=True)
    left = {str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*.*")}
    assert {x for x in left if "eval.j" not in x} == {
        "whole/card.json",
        "whole/card.md",
    }
    assert "whole/eval.json" in left and "cut/eval.json" not in left


def answers_in(folder) -> list[tuple]:
    """Returns what an evaluation's answers are: ids and steps."""
    lines = (folder / "eval.jsonl").read_text().splitlines()
    return [(x["response_ids"], x["step_map"]) for x in map(json.loads, lines)]


def test_a_sweep_is_its_settings_and_rows_change_no_answer(tmp_path):
    """A sweep goes on where it was stopped, and compares with what it is compared with."""
    folder, alone = tmp_path / "sweep", tmp_path / "alone"
    swept = "--config.eval.sweep=sampler.threshold=0.99,0.3"
    done = evaluated(folder, swept, "--config.eval.best=95.5")
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "sweep.json").read_text())
    assert [x["value"] for x in told["points"]] == [0.99, 0.3]
    assert told["best"] == 95.5 and (folder / "sweep.png").stat().st_size
    assert done.stdout.endswith(
        f"written to {folder}; its picture is {folder}/sweep.png\n"
    )
    slow, fast = (x["tokens_per_forward"] for x in told["points"])
    assert slow < fast
    for point in told["points"]:
        inside = folder / f"threshold={point['value']:g}"
        assert scores(inside)["tokens_per_forward"] == point["tokens_per_forward"]
        assert 100 * scores(inside)["accuracy"] == point["accuracy"]
    assert (folder / "sweep.md").read_text().splitlines()[-1] in done.stdout

    # The same settings by another key, in batches of another size.
    keys = "--config.sampler.threshold=0.3", "--config.sampler.rows=3"
    done = evaluated(alone, *keys, "--config.eval.samplers=slow:threshold=0.99")
    assert done.returncode == 0, done.stderr
    for one, name in ((alone, "threshold=0.3"), (alone / "slow", "threshold=0.99")):
        assert answers_in(one) == answers_in(folder / name)
        assert scores(one) == scores(folder / name)

    done = run("compare", str(alone), str(folder / "threshold=0.3"))
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    assert [row[3].strip(" |") for row in rows[2:5]] == ["+0"] * 3
    ahead = "4 problems in common; the first is ahead on 0 of them, the second on 0"
    assert rows[-1] == [ahead]
    done = run("compare", str(alone), str(folder / "threshold=0.99"))
    gain = scores(folder / "threshold=0.99")["response_length"]
    assert f"{gain - scores(alone)['response_length']:+.4g} [" in done.stdout

    other = tmp_path / "other.jsonl"
    lines = (alone / "eval.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"prompt_ids": [1]} for line in lines]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("compare", str(alone), str(other))  # as of another tokenizer
    assert done.stdout.endswith(f"{ahead}\n")
    other.write_text(json.dumps(rows[0] | {"problem": "0" * 16}) + "\n")
    refusals = {
        (str(alone), str(other)): "no problem in common: nothing to compare",
        (str(alone),): "compare needs two evaluations, and not 1",
        (str(alone), "no/run"): "no/run: there is no such folder or file of an eval",
        (str(alone), str(tmp_path)): "no evaluation's folder: it has no eval.jsonl",
    }
    for arguments, says in refusals.items():
        done = run("compare", *arguments)
        assert done.returncode == 2 and says in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


SWEEPS = {
    "sampler.block=2,4": "programs are compiled for each value of 'sampler.block'",
    "threshold=0.5": "sweep sampler.threshold, sampler.entropy_bound, eval.temperature",
    "sampler.threshold": "sampler.threshold needs different numbers with commas",
    "sampler.threshold=0.5,high": "needs different numbers",
    "sampler.threshold=0.5,0.50": "needs different numbers",
    "sampler.threshold=nan": "sampler.threshold=nan: must be a number",
    "eval.temperature=-1": "eval.temperature=-1.0: must be",
    "sampler.entropy_bound=0.1,0.2": "changes nothing with sampler.strategy='dynamic'",
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_that_makes_no_sense_is_refused(sweep):
    with pytest.raises(ValueError, match=re.escape(SWEEPS[sweep])) as refused:
        cfg = config.Config(eval=config.EvalConfig(sweep=sweep))
        config.settings(cfg)
    assert "\n" not in str(refused.value)


def test_settings_of_a_sweep():
    made = config.EvalConfig(sweep="eval.temperature=0,0.5", answers=3)
    named = dict(config.settings(config.Config(eval=made)))
    assert [*named] == ["temperature=0", "temperature=0.5"]
    assert [x.eval.temperature for x in named.values()] == [0.0, 0.5]
    assert named["temperature=0"].eval.answers == 3


def test_settings_of_further_samplers():
    asked = config.EvalConfig(samplers="sure:threshold=0.99,top_k=3")
    heldout = data.DataConfig(heldout="problems.jsonl")
    made = config.Config(eval=asked, data=heldout)
    (_, own), (name, other) = config.settings(made)
    assert own == made and name == "sure" and other.eval == made.eval
    assert (other.sampler.threshold, other.sampler.top_k) == (0.99, 3)
    both = dataclasses.replace(made.eval, sweep="eval.temperature=0,0.5")
    with pytest.raises(ValueError, match="eval.sweep and eval.samplers: set one of"):
        config.settings(dataclasses.replace(made, eval=both))


def test_a_signal_ends_an_evaluation_between_answers_and_it_goes_on(tmp_path):
    flags = ["--config=configs/eval.py", f"--config.run.folder={tmp_path}"]
    flags += ["--config.sampler.rows=4", "--config.eval.problems=32", *FEW]
    under_way = served.start("dllm_jax.eval", flags, env=on(1))
    file = tmp_path / "eval.jsonl"
    while not (file.exists() and file.stat().st_size):
        assert under_way.poll() is None, under_way.communicate()
        time.sleep(0.01)
    under_way.send_signal(signal.SIGTERM)
    told, _ = under_way.communicate(timeout=300)
    assert under_way.returncode == exits.STOPPED, told
    assert "stopped by a signal after " in told.splitlines()[-1]
    assert f"start the same command again to go on in {tmp_path}" in told
    kept = len(file.read_text().splitlines())
    assert 0 < kept < 96
    done = served.run("dllm_jax.eval", flags, env=on(1))
    assert f"{kept} of 96 answers are there, and stay" in done.stderr
    assert len(file.read_text().splitlines()) == 96
    told = json.loads((tmp_path / "eval.json").read_text())
    assert told["answers"] == 3 and "seconds/eval" not in told  # of some of them


def test_how_many_problems_are_compared_is_told(tmp_path):
    for name, questions in {"a": "123", "b": "1234"}.items():
        rows = [written.answer(question=x, reward=float(x < "3")) for x in questions]
        rows[0]["reward"] = float(name == "a")
        rows[1]["graded"] = name == "a"
        written.write(tmp_path / name, rows)
    told = evaluation.versus([str(tmp_path / "a"), str(tmp_path / "b")])
    assert told.endswith(
        "\n3 problems in common, of 3 and 4; the first is ahead on 1 of them, the second "
        "on 0; graded in both: 2"
    )
    told = evaluation.versus([str(tmp_path / "a")] * 2)
    assert "\n3 problems in common; the first is" in told


def test_a_folder_that_cannot_be_written_to_is_refused_before_a_minute_is_spent():
    done = evaluated("README.md")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: run.folder=README.md: it cannot be written to: ")


@pytest.mark.parametrize("program", ["eval", "train"])
def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path, program):
    keys = [f"--config.model.path={tmp_path}", f"--config.run.folder={tmp_path}/run"]
    done = run("--config=configs/smoke.py", *keys, program=program)
    assert done.returncode == 2
    told = done.stderr.strip().splitlines()[-1]
    assert told == f"error: {tmp_path} is not a checkpoint: it has no config.json"


@pytest.mark.parametrize(
    "program, keys, where",
    [
        ("eval", (), ", in all of 4 answers"),
        pytest.param("train", (), ", in all of 4 answers", marks=pytest.mark.soak),
        ("train", ("method=sft", "noise.kind=bernoulli", "data.heldout="), ": are its"),
    ],
)
def test_weights_of_an_absurd_scale_are_one_line(tmp_path, program, keys, where):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    loud = {name: 1e30 * x.astype(np.float32) for name, x in weights.items()}
    safetensors.numpy.save_file(loud, folder / "model.safetensors")
    keys += f"model.path={folder}", f"run.folder={tmp_path}/run", "eval.problems=4"
    keys += ("data.train=examples/arithmetic/heldout.jsonl",)  # few, so soon read
    keys += ("sampler.page=64",)
    done = run(
        "--config=configs/smoke.py", *(f"--config.{x}" for x in keys), program=program
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: the model's first forward is not finite{where}")
    assert "Traceback" not in done.stderr


def piped(pipe: pathlib.Path, rows: list[dict], *keys):
    """Returns an evaluation's exit code, what it said, and what the pipe gave it, once."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    keys += (f"--config.data.heldout={pipe}",)
    flags = ["--config=configs/eval.py", *SMALL, *keys]
    under_way = served.start("dllm_jax.eval", flags, env=on(1))
    try:
        told, _ = under_way.communicate(timeout=300)
    finally:
        under_way.send_signal(signal.SIGKILL)
    writer.join(timeout=60)
    return under_way.returncode, told, text


def test_problems_that_are_asked_twice_are_told(tmp_path):
    rows = [{"question": f"{i}+1", "answer": f"{i + 1}"} for i in (1, 2, 1, 1)]
    rows[2]["id"] = 7  # other fields make no other problem
    cfg, model, tok = config.completed(asking(tmp_path, rows))
    told = []
    grader = evaluation.grader_of(cfg, tok, looks=False)
    asked = evaluation.asked_of(cfg, model, tok, told.append, grader)
    assert len(asked.problems) == 4
    (line,) = told
    assert line.startswith(f"warning: 2 of 4 problems of '{tmp_path}/twice.jsonl' are")
    first = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, problems=2))
    evaluation.asked_of(first, model, tok, told.append, grader)
    assert told == [line]


def asking(folder, rows) -> config.Config:
    """Returns the configuration of an evaluation of the bundled model on some records."""
    (folder / "twice.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = config.default()
    tree.model.path, tree.data.heldout = str(MODEL), str(folder / "twice.jsonl")
    return config.freeze(tree)


def test_problems_are_read_once_and_others_are_not_gone_on_with(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    rows = [{"question": f"{i}85+800", "answer": f"{i + 1}585"} for i in range(1, 3)]
    folder = tmp_path / "run"
    key = f"--config.run.folder={folder}"
    code, told, text = piped(tmp_path / "pipe", rows, key)
    assert code == 0, told
    card = json.loads((folder / "card.json").read_text())
    assert card["data"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()

    file = folder / "eval.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]))
    code, told, _ = piped(tmp_path / "pipe", [rows[0], rows[1] | {"answer": "0"}], key)
    assert code == 2
    assert "line 3: it was graded by '3585', which is '0' now; name" in told
    assert json.loads((folder / "card.json").read_text()) == card


def test_answers_that_another_function_graded_are_not_gone_on_with(
    tmp_path, monkeypatch
):
    file = tmp_path / "mine_of_eval.py"
    monkeypatch.syspath_prepend(tmp_path)

    def job(reward: str, source: str) -> dict:
        file.write_text(source)
        rl = dataclasses.replace(config.Config().rl, reward=reward)
        return evaluation.job_of(dataclasses.replace(config.Config(), rl=rl), {})

    before, after = (job("mine_of_eval:f", f"f = lambda *_: {x}\n") for x in "12")
    differ = [key for key in after if after[key] != before[key]]
    assert differ == ["the source of mine_of_eval:f"]
    assert before.keys() - job("math", "").keys() == {*differ}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({}, None),
        ({"answer": "2"}, None),  # as it was written before lines had marks
        ({"answer": "2", "problem": "its"}, None),
        (
            {"answer": "3"},
            "line 1: it was graded by '3', which is '2' now; name another",
        ),
        (
            {"problem": "0"},
            "line 1: the record that it was graded by has changed; name",
        ),
        ({"prompt_ids": [4]}, "line 1: it does not answer problem 1; name another"),
    ],
)
def test_only_lines_that_were_graded_by_the_same_problem_are_gone_on_with(
    tmp_path, line, says
):
    problem = data.Problem([5, 6], "1+1", "2", {"question": "1+1", "answer": "2"})
    if line.get("problem") == "its":
        line = line | {"problem": evaluation.mark_of(problem)}
    row = {"prompt_ids": [5, 6], "response_ids": [7]} | line
    (tmp_path / "eval.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "eval.job.json").write_text("{}")
    sink = folder.Answers(tmp_path / "eval.jsonl", {}, overwrite=False)
    if says is None:
        evaluation.check_same(sink, [problem] * 2)
        return
    with pytest.raises(ValueError, match=re.escape(says)):
        evaluation.check_same(sink, [problem] * 2)


def test_scores_leave_out_what_nobody_judged_as_the_card_does():
    known = {"response_ids": [1], "forwards": 1, "finished": "stop", "group": 0}
    rows = [
        known | {"text": "", "reward": x, "graded": i != 1}
        for i, x in enumerate((1.0, 0.0, 1.0, 0.0))
    ]
    told = evaluation.told_of(rows, 2, scores_of.of_records(rows, 2))
    assert told["accuracy"] == told["pass@1"] == 0.75 and told["pass@2"] == 1
    none = [row | {"graded": False} for row in rows]
    told = evaluation.told_of(none, 2, scores_of.of_records(none, 2))
    assert told["graded_timeouts"] == 4 and told["unjudged"] == 1
    assert not {"reward", "accuracy", "pass@1", "pass@2"} & {*told}


def graded_beside(problems, group_n, grade=None, done=0, most=None, **facts):
    """Returns a Beside of answers that are texts of no token."""
    grader = rewards.Grader(grade, rewards.anything, **facts)
    decode = lambda trace: [""] * len(trace.len_B)
    return beside.Beside(
        grader, decode, problems, np.array(group_n), done=done, most=most
    )


def test_the_file_of_answers_is_closed_behind_the_last(tmp_path):
    sink = folder.Answers(tmp_path / "eval.jsonl", {}, overwrite=False)
    sink.begin(0)
    setting = evaluation.Setting("", config.Config(), tmp_path, sink)
    run = types.SimpleNamespace(writes=True)
    grading = functools.partial(graded_beside, [], [])
    assert evaluation.answered(setting, None, grading, None, None, run) == []
    assert sink.file.closed


def test_answers_that_stay_unjudged_are_told(tmp_path, capsys):
    lines = [{"graded": False}, {"reward": 1.0}]
    sink = types.SimpleNamespace(lines=lines, path=tmp_path / "eval.jsonl", file=None)
    setting = evaluation.Setting("", config.Config(), tmp_path, sink)
    run = types.SimpleNamespace(writes=True)
    grading = functools.partial(graded_beside, [None] * 2, [0, 1])
    assert evaluation.answered(setting, None, grading, None, None, run) == lines
    told = "eval.jsonl: of its answers nobody could judge 1, which stay so; --over"
    assert told in capsys.readouterr().err


def test_the_last_missing_answer_may_be_no_number(capsys, tmp_path):
    """As in an evaluation that nobody stopped, whose other answers are numbers."""
    problems = [data.Problem([5], "1+1", "2")] * 2

    def stream(prompts, stop):
        for i, prompt in enumerate(prompts):
            ran = state.no_answer(1)._replace(forwards=np.int32(1), bad=np.bool_(True))
            yield i, ran if prompt else state.no_answer(1)

    def missing(done):
        sink = types.SimpleNamespace(lines=[{}] * done)
        setting = evaluation.Setting("", cfg, tmp_path, sink)
        grading = graded_beside(problems, [0, 0], done=done)
        return evaluation.missing(stream, grading, setting, None)

    tree = config.default()
    tree.eval.answers = 2
    cfg = config.freeze(tree)
    ((first, trace),) = missing(1)
    assert first == 1 and trace.bad_B.tolist() == [True]
    assert "1 of 1 answers met numbers that are not finite" in capsys.readouterr().err
    with pytest.raises(exits.NotFinite):
        list(missing(0))


class Sink:
    """Keeps what is added; tells how many were there when."""

    def __init__(self, path):
        self.lines, self.path, self.added = [], path / "eval.jsonl", []

    def add(self, record):
        self.added.append(record)


def grown(
    tmp_path,
    grade,
    between=lambda i, sink: None,
    *,
    count=40,
    sink=None,
    ends=40,
    stop=lambda: False,
    **facts,
):
    """Returns the Sink of `count` answers, graded while others are sampled.

    sink: it; ends: after how many a signal ends sampling; stop: whether one has come.
    """
    problems = [data.Problem([5], str(i), "") for i in range(count)]
    grading = graded_beside(problems, range(count), grade, **facts)
    setting = evaluation.Setting("", config.Config(), tmp_path, sink or Sink(tmp_path))

    def stream(prompts, stop):
        for i in range(min(count, ends)):
            yield i, state.no_answer(1)._replace(len=np.int32(1))
            between(i, setting.sink)

    groups = evaluation.missing(stream, grading, setting, None)
    timer = metrics.Timer()
    waiting = evaluation.Waiting(grading, setting, timer, writes=True)
    records = evaluation.grown(groups, waiting, stop)
    assert records == setting.sink.added
    assert [record["question"] for record in records] == [*map(str, range(count))]
    return setting.sink


def test_answers_are_graded_while_others_are_sampled(tmp_path):
    """Those that wait meanwhile are graded together, and written once they are."""
    begun, go, sizes = threading.Event(), threading.Event(), []

    def grade(texts, problems, trace):
        sizes.append(len(texts))
        begun.set()
        assert go.wait(30)
        return rewards.Grades(np.ones(len(texts)))

    def between(i, sink):
        assert begun.wait(30)
        if i == 30:
            assert not sink.added
            go.set()

    grown(tmp_path, grade, between=between)
    assert sum(sizes) == 40 and sizes[0] == 1 and sizes[1] >= 30


def test_without_a_thread_some_are_graded_at_once(tmp_path):
    sizes, written = [], []

    def grade(texts, problems, trace):
        assert threading.current_thread() is threading.main_thread()
        sizes.append(len(texts))
        return rewards.Grades(np.ones(len(texts)))

    grown(
        tmp_path,
        grade,
        between=lambda i, sink: written.append(len(sink.added)),
        aside=False,
    )
    assert sizes == [16, 16, 8]
    assert written[14:17] == [0, 16, 16] and written[-1] == 32


def test_a_graders_error_ends_an_evaluation_early(tmp_path):
    """And not when all is sampled."""
    failed, sampled = threading.Event(), []

    def grade(texts, problems, trace):
        failed.set()
        raise ValueError("rl.reward='mine:f' returned what is no list of numbers")

    def between(i, sink):
        assert failed.wait(30)
        time.sleep(0.05)
        sampled.append(i)

    with pytest.raises(ValueError, match="returned what is no list"):
        grown(tmp_path, grade, between=between)
    assert len(sampled) < 40


def test_what_a_signal_finds_waiting_is_answered_again(tmp_path, monkeypatch):
    """What is under way is written, as it was graded."""
    begun, go, sizes = threading.Event(), threading.Event(), []
    give_up = beside.Beside.give_up

    def grade(texts, problems, trace):
        sizes.append(len(texts))
        begun.set()
        assert go.wait(30)
        return rewards.Grades(np.ones(len(texts)))

    def given_up(grading):
        give_up(grading)
        go.set()

    monkeypatch.setattr(beside.Beside, "give_up", given_up)
    sink = Sink(tmp_path)
    with pytest.raises(exits.Stopped, match="after 1 of 40 answers"):
        grown(
            tmp_path,
            grade,
            sink=sink,
            ends=10,
            between=lambda *_: begun.wait(30),
            stop=lambda: True,
        )
    assert sizes == [1] and len(sink.added) == 1


def test_a_signal_ends_what_is_left_to_grade(tmp_path):
    """All is sampled, and a few are graded by then."""
    sink = Sink(tmp_path)

    def grade(texts, problems, trace):
        time.sleep(0.02 * len(texts))
        return rewards.Grades(np.ones(len(texts)))

    with pytest.raises(exits.Stopped, match="by a signal after"):
        grown(tmp_path, grade, sink=sink, stop=lambda: len(sink.added) > 3, most=2)
    assert 4 <= len(sink.added) < 40


def test_what_has_ended_stays_where_sampling_fails(tmp_path):
    sink = Sink(tmp_path)

    def between(i, sink):
        if i == 5:
            raise RuntimeError("sampling failed")

    def grade(texts, problems, trace):
        return rewards.Grades(np.ones(len(texts)))

    with pytest.raises(RuntimeError, match="sampling failed"):
        grown(tmp_path, grade, sink=sink, between=between, aside=False)
    assert len(sink.added) == 6


def test_sampling_waits_for_a_grader_that_is_far_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "BEHIND", 5)
    written = []

    def grade(texts, problems, trace):
        time.sleep(0.01)
        return rewards.Grades(np.ones(len(texts)))

    grown(tmp_path, grade, between=lambda i, sink: written.append(i - len(sink.added)))
    assert max(written) <= 5


def test_nothing_to_evaluate_is_one_line():
    done = run("--config=configs/eval.py", "--config.data.heldout=")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: data.heldout is emp")


def test_processes_share_the_grading_and_go_on_behind_any_line(tmp_path):
    """Of two graders, which are asked of each process's share."""
    arguments = ["--config=configs/eval.py", "--config.eval.temperature=1.0", *FEW]
    arguments += ["--config.eval.problems=6", "--config.eval.answers=3"]
    arguments += ["--config.rl.reward=math:1,length:0.5"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    done = run(*arguments[1:], f"--config.run.folder={alone}", arguments[0])
    assert done.returncode == 0, done.stderr
    shared.mkdir()
    shutil.copy(alone / "eval.job.json", shared)
    kept = (alone / "eval.jsonl").read_bytes().splitlines(keepends=True)[:7]
    (shared / "eval.jsonl").write_bytes(b"".join(kept))  # of the third problem one
    both = [[*arguments, f"--config.run.folder={shared}"]] * 2
    for under_way in served.group("dllm_jax.eval", both, 1):
        told, _ = under_way.communicate(timeout=300)
        assert under_way.returncode == 0, told
    lines = [
        [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        for folder in (alone, shared)
    ]
    assert len(lines[0]) == 18
    for one, other in zip(*lines, strict=True):
        for key in ("response_ids", "reward", "rewards", "group", "problem"):
            assert one[key] == other[key]
