"""Metrics: what is kept on resume, what is called out, and whose time it is."""

import json
import math
import shutil

import pytest

from dllm_jax import exits, metrics


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a test moves it; holds the time as its one item."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return now


def steps(folder) -> list[int]:
    """Returns the steps in metrics.jsonl."""
    return [row["step"] for row in metrics.history(folder)]


def fill(folder, count, total=10):
    """Writes some steps."""
    writer = metrics.Writer(folder, total, 0)
    for step in range(1, count + 1):
        writer.write(step, {"reward": 0.1 * step})
    writer.close()


def test_resume_cuts_what_lies_beyond_the_checkpoint(tmp_path):
    fill(tmp_path, 4)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    writer = metrics.Writer(tmp_path, 10, 2)
    assert steps(tmp_path) == [1, 2]
    writer.write(3, {"reward": 7.0})
    writer.close()
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:2] == before[:2]
    assert json.loads(after[2]) == {"step": 3, "reward": 7.0}
    assert len(after) == 3
    assert not list(tmp_path.glob("*.partial"))
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_killed_before_its_first_checkpoint_begins_from_nothing(tmp_path):
    for _ in range(2):
        writer = metrics.Writer(tmp_path, 10, 0)
        writer.write(0, {"heldout_accuracy": 0.5})
        writer.close()
    assert steps(tmp_path) == [0]


def test_a_half_written_last_line_is_left_out(tmp_path):
    fill(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-10])
    assert steps(tmp_path) == [1, 2]
    writer = metrics.Writer(tmp_path, 10, 3)
    writer.write(4, {"reward": 1.0})
    writer.close()
    assert steps(tmp_path) == [1, 2, 4]


DAMAGE = [b'{"step": 3, "rew', b"null", b"[3]", b"\xff\xfe", b"\0" * 40, b"3"]
DAMAGE += [b'{"reward": 1.0}', b'{"step": "3"}', b'{"step": true}', b'{"step": -1}']
DAMAGE += [b'{"step": 3, "reward": "high"}', b"[" * 100_000, b'{"step": 1.5}']
DAMAGE += [b'{"step": 3, "reward": 1' + b"0" * 400 + b"}"]


@pytest.mark.parametrize("line", DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_damaged_line_costs_itself_alone_and_is_said(tmp_path, line, number, capsys):
    fill(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    kept = [step for step in range(1, 6) if step != number]
    assert steps(tmp_path) == kept
    assert (
        f"metrics.jsonl: left out as damaged: line {number}\n"
        in capsys.readouterr().err
    )
    writer = metrics.Writer(tmp_path, 10, 5)
    writer.close()
    capsys.readouterr()
    assert steps(tmp_path) == kept
    assert capsys.readouterr().err == ""  # it is gone


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_read_as_null(tmp_path, number):
    """As other programs write them; a page can hold none."""
    line = f'{{"step": 1, "kl": {number}, "loss": null, "reward": 0.5}}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    (row,) = metrics.history(tmp_path)
    assert row == {"step": 1, "kl": None, "loss": None, "reward": 0.5}


def test_of_two_rows_of_a_step_the_last_counts(tmp_path):
    fill(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward": 9.0}\n')
    assert [row["reward"] for row in metrics.history(tmp_path)] == [0.1, 9.0, 0.1 * 3]


def test_rows_that_are_lost_come_from_what_checkpoints_tell(tmp_path, capsys):
    fill(tmp_path, 6)
    whole = (tmp_path / "metrics.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0] + "null\n" + lines[4])
    saved = {step: {"reward": 0.1 * step} for step in (2, 3, 4, 5, 6, 7)}
    saved[4] = {"reward": math.nan}
    capsys.readouterr()
    metrics.Writer(tmp_path, 10, 6, saved).close()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "6/10"
    ]
    lines[3] = '{"step": 4, "reward": null}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)


def test_a_step_that_is_evaluated_again_has_one_row(tmp_path):
    """A signal stopped its evaluation; the attempt after that told it, and was killed."""
    fill(tmp_path, 3)
    told = []
    writer = metrics.Writer(
        tmp_path, 10, 3, {2: {"reward": 0.1 * 2}}, pending=True, trackers=told.append
    )
    assert told == [3]
    assert steps(tmp_path) == [1, 2, 3]  # it stays until there is another
    writer.write(3, {"reward": 0.1 * 3, "heldout_accuracy": 0.5})
    writer.write(4, {"reward": 0.1 * 4})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert metrics.history(tmp_path)[2]["heldout_accuracy"] == 0.5


def test_a_row_that_finds_no_room_ends_the_run_with_a_line(tmp_path):
    writer = metrics.Writer(tmp_path, 10, 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(exits.CannotGoOn, match=f"{tmp_path}: no room: "):
        writer.write(1, {"reward": 1.0})


def test_rows_are_where_the_file_is_by_now(tmp_path, capsys):
    """It was edited, which makes another file of it; removed; and its folder with it."""
    writer = metrics.Writer(tmp_path / "run", 10, 0)
    path = tmp_path / "run" / "metrics.jsonl"
    for step in (1, 2, 3):
        writer.write(step, {"reward": 1.0})
        (tmp_path / "edited").write_text(path.read_text())
        (tmp_path / "edited").replace(path)
    assert steps(tmp_path / "run") == [1, 2, 3]
    path.unlink()
    writer.write(4, {"reward": 1.0})
    assert steps(tmp_path / "run") == [4]
    assert f"{path} was removed: it begins anew" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(exits.CannotGoOn, match="No such file or directory"):
        writer.write(5, {"reward": 1.0})


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(exits.CannotGoOn, match="metrics.jsonl cannot be read: Is a"):
        metrics.Writer(tmp_path, 10, 0)


def test_numbers_that_are_not_finite_become_null_and_are_called_out(tmp_path, capsys):
    writer = metrics.Writer(tmp_path, 10, 0)
    writer.write(1, {"kl": math.nan, "grad_norm": math.inf, "reward": 0.5})
    writer.close()
    (row,) = metrics.history(tmp_path)
    assert row == {"step": 1, "kl": None, "grad_norm": None, "reward": 0.5}
    assert "warning: not finite: grad_norm, kl" in capsys.readouterr().err


def test_console_line(tmp_path, clock, capsys):
    writer = metrics.Writer(tmp_path, 100, 0)
    writer.write(0, {"heldout_accuracy": 0.25, "seconds/eval": 3.0})
    clock[0] += 2
    values = {"reward": 0.5, "kl": 0.00123, "tokens_per_forward": 1.25}
    writer.write(1, values | {"seconds/rollout": 1.5, "seconds/update": 0.5, "odd": 9})
    writer.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step   0/100  held-out 0.250  3.0s"
    assert second == (
        "step   1/100  reward 0.500  tok/fwd 1.25  kl 1.2e-03  2.0s  left 3:18"
    )


def test_time_left_follows_the_recent_pace(tmp_path, clock):
    writer = metrics.Writer(tmp_path, 50, 20)
    for step in range(21, 31):
        clock[0] += 600 if step == 21 else 60 if step == 25 else 3
        writer.write(step, {})
    assert writer.line(30, {}).endswith("left 1:00")  # 20 steps of 3 seconds
    writer.close()


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("skipped", ("updates_skipped", "value_updates_skipped")),
        ("unjudged", ("graded_timeouts", "heldout_graded_timeouts")),
    ],
)
def test_the_line_tells_of_updates_skipped_and_answers_unjudged(tmp_path, short, names):
    writer = metrics.Writer(tmp_path, 9, 0)
    told = dict(zip(names, (2.0, 1.0), strict=True))
    assert f"  {short} 3  " in writer.line(1, told)
    assert short not in writer.line(1, dict.fromkeys(names, 0.0))
    writer.close()


def test_time_left_counts_the_evaluations_to_come(tmp_path, clock):
    writer = metrics.Writer(tmp_path, 40, 0)
    for step in range(1, 21):
        evaluation = {"seconds/eval": 60.0} if step % 5 == 0 else {}
        clock[0] += 3 + evaluation.get("seconds/eval", 0)
        writer.write(step, evaluation)
    assert writer.line(20, {}).endswith("left 5:00")  # 20 x 3 seconds and 4 x 60
    writer.close()


def test_time_left_of_a_run_that_goes_on_knows_the_evaluations_before(tmp_path, clock):
    writer = metrics.Writer(tmp_path, 40, 0)
    for step in range(1, 10):
        clock[0] += 3
        writer.write(step, {"seconds/eval": 60.0} if step == 5 else {})
    writer.close()
    writer = metrics.Writer(tmp_path, 40, 8)  # the ninth was not saved
    for step in (9, 10):
        clock[0] += 63 if step == 10 else 3
        writer.write(step, {"seconds/eval": 60.0} if step == 10 else {})
    assert writer.line(10, {}).endswith("left 7:30")  # 30 x 3 seconds and 6 x 60
    writer.close()


@pytest.mark.parametrize(
    ("pace", "says"),
    [
        (35.999, "59:59"),
        (36, "1:00:00"),
        (863.995, "23:59:59"),
        (864, "1d 0:00:00"),
        (36_900, "42d 17:00:00"),
    ],
)
def test_the_time_left_of_a_long_run_is_of_hours_and_days(tmp_path, clock, pace, says):
    writer = metrics.Writer(tmp_path, 101, 0)
    clock[0] += pace
    writer.write(1, {})
    assert writer.line(1, {}).endswith(f"  left {says}")
    writer.close()


def test_a_silent_process_writes_nothing(tmp_path, capsys):
    writer = metrics.Writer(tmp_path / "run", 10, 0, enabled=False)
    writer.write(1, {"reward": 1.0})
    writer.close()
    assert not (tmp_path / "run").exists()
    assert not capsys.readouterr().out


def test_timer_counts_inner_phases_once(clock):
    timer = metrics.Timer()
    for _ in range(2):
        with timer("eval"):
            clock[0] += 1
            with timer("rollout"):
                clock[0] += 2
                with timer("reward"):
                    clock[0] += 4
            with timer("reward"):
                clock[0] += 8
    assert timer.pop() == {
        "seconds/eval": 2,
        "seconds/rollout": 4,
        "seconds/reward": 24,
    }
    assert timer.pop() == {}


def test_timer_counts_what_fails(clock):
    timer = metrics.Timer()
    with pytest.raises(KeyError), timer("eval"):
        clock[0] += 5
        raise KeyError
    assert timer.pop() == {"seconds/eval": 5}


def test_the_mean_of_rows_is_that_of_each_metric():
    rows = [{"loss": 1.0, "kl": 0.5}, {"loss": 3.0, "kl": 0.5}]
    assert metrics.mean(rows) == {"loss": 2.0, "kl": 0.5}
    # As of a value network's passes of its own behind those of both.
    rows += [{"loss": 8.0}]
    assert metrics.mean(rows) == {"loss": 4.0, "kl": 0.5}
