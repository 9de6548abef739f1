"""Whole runs of the command: killed, stopped, damaged and resumed, bit for bit."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import signal
import tarfile
import time
import types

import jax
import numpy as np
import pytest
import safetensors.numpy

from configs import tracerl
from dllm_jax import (
    begin,
    checkpoint,
    config,
    convert,
    exits,
    metrics,
    sharding,
    train,
)
from dllm_jax.checkpoint import Checkpoints
from dllm_jax.rl import best
from tests import served

ROOT = pathlib.Path(__file__).parents[1]
MODEL = ROOT / "examples" / "arithmetic" / "model"
STEPS = 4
# Compiling takes most of a short run's time.
FLAGS = f"{served.HASTY} --xla_force_host_platform_device_count="


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Returns a function that starts a run; all runs share what one has compiled."""
    cache = tmp_path_factory.getbasetemp() / "compiled"

    def start(
        folder, *overrides, file="smoke.py", devices=1, logged=False
    ) -> served.Run:
        keys = [
            f"run.folder={folder}",
            f"rl.steps={STEPS}",
            "eval.problems=8",
            "batch.rows=4",  # more of them would be empty
            "sampler.rows=8",  # for a fourth of more another program is compiled
            "sampler.page=64",  # a row's: for each width of pages more is compiled
            "data.train=examples/arithmetic/heldout.jsonl",  # few, so soon read
            f"run.compile_cache={cache}",
            *overrides,
        ]
        flags = [key if key.startswith("--") else f"--config.{key}" for key in keys]
        return served.start(
            "dllm_jax.train",
            [f"--config=configs/{file}", *flags],
            env={"XLA_FLAGS": f"{FLAGS}{devices}"},
            jax_compilation_cache_dir=None,  # run.compile_cache is
            jax_log_compiles=logged,
        )

    return start


def end(run: served.Run, code: int = 0) -> str:
    """Returns what a run printed, once it has ended as it should."""
    told, _ = run.communicate(timeout=900)
    assert run.returncode == code, told
    return told


def until(run: served.Run, *paths: pathlib.Path):
    """Waits for a run to write some files."""
    while not all(path.exists() for path in paths):
        if run.poll() is not None:
            pytest.fail(f"ended too early: {run.communicate()[0]}")
        time.sleep(0.002)


def rows(folder) -> list[dict]:
    """Returns the metrics, without those that a clock decides."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    clock = ("seconds/", "tokens_per_second/")
    return [
        {k: x for k, x in json.loads(line).items() if not k.startswith(clock)}
        for line in text.split("\n")[:-1]
    ]


def attempts(folder) -> list[dict]:
    """Returns what run.json says of each attempt."""
    return json.loads((folder / "run.json").read_text())["attempts"]


def saved(folder) -> list[int]:
    """Returns the steps that have a committed checkpoint."""
    path = folder / "checkpoints"
    names = [p.name for p in path.iterdir()] if path.exists() else []
    return sorted(int(name) for name in names if name.isdigit())


def same(folder, whole):
    """Asserts that two runs left the same metrics and, bit for bit, the same weights."""
    assert rows(folder) == rows(whole)
    file = pathlib.Path("export", "model.safetensors")
    got = safetensors.numpy.load_file(folder / file)
    want = safetensors.numpy.load_file(whole / file)
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    keys = ["run.export_value=true"]
    (folder.parent / "told").write_text(end(command(folder, *keys, logged=True)))
    return folder


def compiled_once(told: str):
    """Asserts that a run compiled what is large no second time."""
    for name in ("advance", "admit", "update"):
        assert told.count(f"Finished XLA compilation of jit({name}) ") == 1, name


def test_programs_are_compiled_once_in_a_run(whole):
    compiled_once((whole.parent / "told").read_text())


def test_a_run_leaves_everything_behind(whole, tmp_path_factory):
    assert any((tmp_path_factory.getbasetemp() / "compiled").iterdir())
    for name in ("config.json", "curves.png", "export", "tensorboard", "samples"):
        assert (whole / name).exists(), name
    assert "step 4" in (whole / "trace.html").read_text()[:1000]
    assert saved(whole) == [3, 4]
    assert [row["step"] for row in rows(whole)] == [0, 1, 2, 3, 4]
    last = rows(whole)[-1]
    for name in (
        ["reward", "accuracy", "heldout_accuracy", "response_length", "kl"]
        + ["tokens_per_forward", "clip_fraction", "entropy", "value_loss"]
        + ["explained_variance", "advantage_std", "grad_norm", "learning_rate"]
        + ["logprob_gap_max", "logprob_gap_mean", "packed_fill"]
    ):
        assert np.isfinite(last[name]), name
    assert last["logprob_gap_max"] < 1e-4
    text = (whole / "samples" / "step_000001.jsonl").read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    assert [sample["group"] for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({sample["question"] for sample in samples}) == 4
    for sample in samples:
        assert sample["response_ids"] and sample["answer"]
        assert len(sample["step_map"]) == len(sample["response_ids"])
        assert sample["reward"] in (0, 1)
        if "advantage" in sample:  # its group was learned from
            assert len(sample["advantage"]) == len(sample["value"])
            assert len(sample["value"]) == len(sample["response_ids"])
    assert any("advantage" in sample for sample in samples)
    (attempt,) = attempts(whole)
    assert attempt["ended"] == "done"
    assert attempt["config"] == json.loads((whole / "config.json").read_text())
    assert not (whole / "lock").exists()
    log = (whole / "run.log").read_text()
    assert "step 4/4" in log and "exported to" in log
    start = safetensors.numpy.load_file(MODEL / "model.safetensors")
    got = safetensors.numpy.load_file(whole / "export/model.safetensors")
    assert any((got[name] != x).any() for name, x in start.items())  # it has learned
    critic = safetensors.numpy.load_file(whole / "value" / "model.safetensors")
    assert critic.keys() - start.keys() == {"value_head.weight"}
    assert critic["value_head.weight"].any()


def test_seconds_are_of_the_step_and_of_what_was_done(whole, others):
    told = metrics.history(whole)
    assert "seconds/reward" not in told[0]  # grading the held-out answers is "eval"
    for row in told[1:]:
        assert row["seconds/checkpoint"] > 0
    rates = {f"tokens_per_second/{p}" for p in ("rollout", "reward", "score", "update")}
    sampling = {"tokens_per_second/rollout", "tokens_per_second/reward"}
    for folder, wanted in ((whole, rates), (others["none"][0], sampling)):
        for row in metrics.history(folder)[-2:]:
            assert wanted == {n for n in row if n.startswith("tokens_per_second/")}


def test_eight_devices_do_what_one_does(command, whole, tmp_path):
    """A step of two updates. mesh.rollout="model" is processes_test's and placement_test's."""
    sizes = dict(zip(sharding.AXES, (2, 2, 2)))
    mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    how = {"devices": 8, "logged": True}
    told = end(command(tmp_path, *mesh, "rl.steps=1", "run.export=false", **how))
    compiled_once(told)
    assert f"mesh {sizes}" in told
    assert "mesh.rollout='auto': sampling has 4 x all weights" in told
    assert len(rows(tmp_path)) == 2
    for row, want in zip(rows(tmp_path), rows(whole)):
        found = {name: row[name] for name in want}  # its last step is evaluated, too
        assert found == pytest.approx(want, rel=1e-3, abs=1e-4), row["step"]


def test_killed_between_a_checkpoint_and_its_row(command, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    written = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(written[:-1]))
    end(command(folder))
    same(folder, whole)


LEVERS = (
    "rl.value=trace",
    "rl.max_prompts=6",
    "rl.min_solved=0.3",
    "rl.answers_per_update=4",
    "rl.epochs=2",
    "rl.target_kl=1e-4",
    "rl.rest_after=1",
    "rl.curriculum=0.5",
    "rl.whiten=true",
    "rl.entropy_floor=9",
    "objective.entropy_bonus=0.01",
    "run.keep_best=heldout_accuracy",
    "data.train=examples/arithmetic/heldout.jsonl:2,examples/arithmetic/train.jsonl:1",
    "eval.every=1",
    "sampler.int8=true",
    "rl.steps=3",
)


@pytest.mark.soak
def test_killed_and_resumed_with_all_that_remembers_is_bit_for_bit(command, tmp_path):
    """A critic, problems that rest, a best checkpoint: all of it is in the checkpoint.

    Without `make soak`: what a source remembers and recalls is sources_test's, what is best
    best_test's; test_stopped_then_damaged_falls_back goes on bit for bit.
    """
    whole, folder = tmp_path / "whole", tmp_path / "run"
    told = end(command(whole, *LEVERS))
    assert "warning: step 1: entropy" in told
    run = command(folder, *LEVERS)
    until(run, folder / "checkpoints" / "1")
    second = command(folder, *LEVERS)  # while the first one is there
    assert f"error: {folder} is in use by pid {run.process.pid} on" in end(second, 2)
    until(run, folder / "samples" / "step_000002.jsonl")
    run.kill()
    end(run, -signal.SIGKILL)
    assert rows(folder)[-1]["step"] in (1, 2)
    # A line in the middle is lost, too; its checkpoint is gone.
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    (folder / "metrics.jsonl").write_bytes(b"\n".join([b"\xff", *lines[1:]]))
    resumed = end(command(folder, *LEVERS))
    assert f"resuming {folder} after step" in resumed
    assert f"taken over from pid {run.process.pid} on" in resumed
    assert "metrics.jsonl: left out as damaged: line 1\n" in resumed
    text = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(lines[0] + b"\n" + text)
    same(folder, whole)
    assert [x["ended"] for x in attempts(folder)] == [
        "killed, or its machine was lost",
        "done",
    ]
    written = rows(whole)
    accuracy = [row["heldout_accuracy"] for row in written]
    best = accuracy.index(max(accuracy))
    assert any(row["explained_variance"] > 0 for row in written[2:])
    assert all(row["entropy_low"] == 1 for row in written[1:])
    # What is rounded to sample is scored with the weights that learn.
    assert all(row["logprob_gap_max"] > 1e-4 for row in written[1:])
    assert "scored anew, as weights are rounded for sampling (int8)" in told
    assert all(4 <= row["prompts_asked"] <= 6 for row in written[1:])
    name = "model.safetensors"
    kept, exported = (
        safetensors.numpy.load_file(whole / where / name)
        for where in ("best", "export")
    )
    for key, x in kept.items():
        np.testing.assert_array_equal(exported[key], x, err_msg=key)
    line = f"heldout_accuracy was highest, {max(accuracy):.4g}, after step {best}"
    assert (line in told) == (best < 3)


@pytest.mark.soak
def test_a_value_network_learns_first_and_a_run_ends_without_better_ones(
    command, tmp_path
):
    """Without `make soak`: passes are sources_test's, patience best_test's."""
    told = end(
        command(
            tmp_path,
            "rl.value_warmup=2",
            "rl.value_epochs=2",
            "run.keep_best=heldout_nan_answers",  # always 0: the first is the best
            "run.patience=3",
            "eval.every=1",
            "policy_optim.lr=1e-3",
            "rl.value_all=true",
            "rl.value_record=true",
            "noise.block=8",  # twice the sampler's
            "eval.samplers=wide:block=8",
            f"rl.value_path={MODEL}",
            "run.export_value=true",
            "rl.min_solved=0.3",
        )
    )
    assert "in 3 evaluations: the run ends after step 3" in told
    first, *_, last = rows(tmp_path)[1:]
    assert {"heldout_accuracy", "heldout_wide_accuracy"} <= last.keys()
    assert "grad_norm" not in first and first["value_grad_norm"] > 0
    assert last["grad_norm"] > 0
    start = safetensors.numpy.load_file(MODEL / "model.safetensors")
    exported = safetensors.numpy.load_file(tmp_path / "export" / "model.safetensors")
    for key, x in start.items():  # what was best is what it began with
        np.testing.assert_array_equal(exported[key], x, err_msg=key)
    critic = safetensors.numpy.load_file(tmp_path / "value" / "model.safetensors")
    added = {"value_head.weight", "value_record.weight"}
    assert critic.keys() - start.keys() == added
    assert all(critic[name].any() for name in added)


@pytest.mark.soak
def test_the_reference_moves_and_a_resumed_run_has_it(command, tmp_path):
    keys = ("objective.reference_beta=0.5", "rl.reference_reset=2", "run.keep=9")
    keys += ("policy_optim.lr=1e-3", "rl.value=none")
    end(command(tmp_path / "whole", *keys))
    saved = Checkpoints(tmp_path / "whole" / "checkpoints", keep=None)
    trees = {step: saved.load(step, None) for step in (1, 2, 3)}
    saved.close()
    policy = {step: tree["policy"]["params"] for step, tree in trees.items()}
    start = trees[1]["reference"]["embed"]
    assert np.abs(start - policy[1]["embed"]).max() > 0
    for step in (2, 3):  # the policy of step 2, not of 3
        jax.tree.map(np.testing.assert_array_equal, trees[step]["reference"], policy[2])
    assert np.abs(policy[3]["embed"] - policy[2]["embed"]).max() > 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "again" / "export")
    end(command(tmp_path / "again", *keys))
    file = pathlib.Path("export", "model.safetensors")
    assert (tmp_path / "again" / file).read_bytes() == (
        tmp_path / "whole" / file
    ).read_bytes()


def test_a_run_keeps_the_defaults_it_began_with_and_ends_where_it_diverges(
    command, whole, tmp_path
):
    folder = shutil.copytree(whole, tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    run["defaults"]["rl"]["lam"] = 0.5
    run["defaults"]["policy_optim"]["lr"] = 0.5  # which the command sets
    (folder / "run.json").write_text(json.dumps(run))
    lost = ("rl.steps=9", "policy_optim.lr=1e6")
    told = end(command(folder, *lost), exits.STUCK)
    said = "config.rl.lam stays 0.5, its default when the run began; by now it is 1.0"
    assert said in told
    assert told.count(" stays ") == 1
    kept = json.loads((folder / "config.json").read_text())
    assert (kept["rl"]["lam"], kept["policy_optim"]["lr"]) == (0.5, 1e6)
    assert told.splitlines()[-1] == (
        "error: step 6: no answer has finite numbers; the last good checkpoint is "
        f"{folder / 'checkpoints' / '4'}"
    )
    assert "Traceback" not in told
    assert 4 in saved(folder)  # nothing has taken its place


def test_stopped_then_damaged_falls_back(command, whole, tmp_path):
    folder = tmp_path / "run"
    every = "run.save_every=2"
    run = command(folder, every)
    until(run, folder / "samples" / "step_000004.jsonl")  # in the middle of a step
    run.send_signal(signal.SIGTERM)
    told = end(run, exits.STOPPED)
    assert "\nSIGTERM: stops when what it is at is whole; another one" in told
    assert "stopped by a signal" in told
    newest = rows(folder)[-1]["step"]
    assert newest in (3, 4)
    assert saved(folder) == [2, newest]  # also what was not yet due
    assert attempts(folder)[0]["ended"].startswith("stopped: by a signal; start")

    state = folder / "checkpoints" / str(newest) / "state"
    file = max(
        (f for f in state.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    told = end(command(folder, every))
    assert f"{folder / 'checkpoints' / str(newest)} is damaged" in told
    assert f"resuming {folder} after step 2" in told
    same(folder, whole)


LORA = ("model.lora_rank=4", "data.heldout=", "policy_optim.lr=1e-2", "rl.value=head")


def pairs(path: pathlib.Path) -> pathlib.Path:
    """Writes preferences: the right sum over a wrong one."""
    told = (ROOT / "examples/arithmetic/heldout.jsonl").read_text().splitlines()[:32]
    with path.open("w") as file:
        for row in map(json.loads, told):
            wrong = f"\\boxed{{{int(row['answer']) + 1}}}"
            pair = {"chosen": f"\\boxed{{{row['answer']}}}", "rejected": wrong}
            file.write(json.dumps({"prompt": row["question"], **pair}) + "\n")
    return path


def dice(folder: pathlib.Path) -> pathlib.Path:
    r"""Writes a judge that throws dice: \boxed{1} and \boxed{-1} are tokens, drawn alike.

    Its layers add next to nothing, so that every masked position sees the mask token alone.
    """
    model = ROOT / "examples/arithmetic/model"
    shutil.copytree(model, folder)
    tok = json.loads((model / "tokenizer.json").read_text())
    words = {"\\boxed{": "\\boxed{1}", "system": "\\boxed{-1}"}
    vocab = tok["model"]["vocab"]
    ids = [vocab[word] for word in words]
    tok["model"]["vocab"] = {words.get(word, word): i for word, i in vocab.items()}
    for added in tok["added_tokens"]:
        added["content"] = words.get(added["content"], added["content"])
    (folder / "tokenizer.json").write_text(json.dumps(tok))
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    for name, x in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            x *= 1e-6
    mask_D = weights["model.embed_tokens.weight"][3]
    seen_D = mask_D / np.sqrt((mask_D**2).mean()) * weights["model.norm.weight"]
    weights["lm_head.weight"] *= 0
    weights["lm_head.weight"][ids] = 20 * seen_D / (seen_D @ seen_D)  # logits
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.soak
def test_models_that_judge_are_counted_and_resumed_bit_for_bit(command, tmp_path):
    """A reward model that was just trained, and a checkpoint that gives verdicts."""
    ranks = tmp_path / "ranks"
    end(
        command(
            ranks,
            f"data.train={pairs(tmp_path / 'pairs.jsonl')}",
            "sft.steps=1",
            "sft.examples=8",
            "policy_optim.warmup=0",
            file="rlhf.py:reward",
        )
    )
    keys = (
        "rl.steps=3",
        "rl.prompts=2",
        "rl.updates=1",
        "rl.value=none",
        "rl.reward=math:0.5,reward_model",
        "rl.filter=varied",
        f"reward.model={ranks / 'export'}",
        "reward.split=tokens",
        "reward.chunk=8",
        f"reward.judge.at={dice(tmp_path / 'dice')}",
        "reward.judge.votes=1",
        "reward.judge.tokens=4",
        "reward.judge.prompt=1100",
        "reward.judge.rows=8",
        "data.heldout=",
    )
    whole, folder = tmp_path / "whole", tmp_path / "run"
    told = end(command(whole, *keys))
    assert f"reward model: {ranks / 'export'}\n" in told
    assert f"judge: the checkpoint {tmp_path / 'dice'}, 1 votes\n" in told
    always, reward = (
        next(line for line in told.splitlines() if line.startswith(f"  {which} "))
        for which in ("always", "+reward")
    )
    assert "reward model 0.002, judge 0.001, its rows and pages 0.0" in always
    assert "weights 0.002, " in reward
    assert len(rows(whole)) == 3
    verdicts = [row["reward/verdict"] for row in rows(whole)]
    assert all(row["chunks_judged"] == 1 for row in rows(whole))
    assert -1 < np.mean(verdicts) < 1 and len(set(verdicts)) > 1
    assert all(np.isfinite(row["reward/reward_model"]) for row in rows(whole))
    run = command(folder, *keys)
    until(run, folder / "checkpoints" / "1")
    run.kill()
    end(run, -signal.SIGKILL)
    assert f"resuming {folder} after step" in end(command(folder, *keys))
    same(folder, whole)


@pytest.fixture(scope="module")
def others(command, tmp_path_factory):
    """Folders of short runs by name, with what they printed; they ran side by side."""
    folder = tmp_path_factory.mktemp("others")
    wrong = [{"question": f"{n}+1", "answer": "-1"} for n in range(8)]
    (folder / "wrong.jsonl").write_text("\n".join(map(json.dumps, wrong)))
    never = [f"data.train={folder / 'wrong.jsonl'}", "rl.min_solved=0.2"]
    never += ["data.heldout=", "rl.steps=2", "run.profile=3"]
    runs = {
        "none": command(folder / "none", *never),
        "lora": command(folder / "lora", *LORA, "rl.steps=2", "run.profile=2"),
    }
    return {name: (folder / name, end(run)) for name, run in runs.items()}


def test_no_group_left_is_reported_and_the_run_goes_on(others):
    folder, told = others["none"]
    for step in (1, 2):
        assert f"step {step}: no group is solvable" in told
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert rows(folder)[0]["groups_kept"] == 0
    want = safetensors.numpy.load_file(MODEL / "model.safetensors")
    got = safetensors.numpy.load_file(folder / "export/model.safetensors")
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)


def test_the_value_may_be_a_head_on_the_policy(others):
    folder, _ = others["lora"]
    last = rows(folder)[-1]
    assert last["step"] == 2
    assert np.isfinite(last["value_loss"])
    assert "value_grad_norm" not in last  # one network, one gradient


def test_a_profile_is_of_the_step_that_was_named(others):
    folder, told = others["lora"]
    (xplane,) = folder.glob("profile/**/*.xplane.pb")
    assert b"jit_update" in xplane.read_bytes()
    before, _, after = told.partition("a profile of step 2 is in")
    assert "step 1/2" in before and "step 2/2" in before
    assert str(folder / "profile") in after
    folder, told = others["none"]
    assert not (folder / "profile").exists()
    missed = "run.profile=3: no profile is written, as the steps to come are 1 to 2"
    assert f"warning: {missed}\n" in told


@pytest.mark.soak
def test_dpo_learns_to_tell_the_chosen_from_the_rejected(command, tmp_path):
    """Without `make soak`: a run is looking_test's, the loss objectives_test's."""
    folder = tmp_path / "run"
    said = end(
        command(
            folder,
            f"model.path={MODEL}",
            f"data.train={pairs(tmp_path / 'pairs.jsonl')}",
            "data.heldout=",
            "sft.steps=6",
            "sft.examples=16",
            "policy_optim.warmup=0",
            "policy_optim.lr=1e-4",
            file="sft.py:dpo",
        )
    )
    told = rows(folder)
    assert told[0]["preference_loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert told[-1]["preference_loss"] < 0.9 * np.log(2)
    assert not {"kl", "clip_fraction"} & set(told[-1])  # to itself: always 0
    assert "told apart" in said
    assert told[-1]["preference_margin"] > told[0]["preference_margin"] == 0


@pytest.mark.soak
def test_spg_with_two_draws_and_a_reward_for_speed(command, tmp_path):
    """Without `make soak`: the loss is objectives_test's, speed advantage_test's."""
    keys = ["data.heldout=", "rl.steps=2", "rl.value=none", "rl.updates=1"]
    keys += ["rl.advantage=loo", "rl.speed=0.5", "rl.filter=paced"]
    keys += ["noise.kind=subset", "noise.draws=2"]
    keys += ["objective.loss=spg", "objective.aggregate=elbo"]
    end(command(tmp_path / "run", *keys))
    told = rows(tmp_path / "run")
    assert [row["step"] for row in told] == [1, 2]
    assert all(row["groups_kept"] > 0 for row in told)
    assert all(row["grad_norm"] > 0 for row in told)


# The bundled model as one with full attention and a shift, as Dream has.
FULL = ("model.attention=full", "model.shift=1", "data.heldout=", "rl.steps=2")
FULL += ("rl.value=none", "rl.updates=1", "rl.advantage=center", "rl.speed=1.0")
FULL += ("batch.tokens=96", "objective.aggregate=step", "sampler.max_new=16")
FULL_KINDS = {
    "trace": (),
    "complement": ("noise.draws=2", "noise.rate=scope", "sampler.cache=dual"),
    "bernoulli": ("noise.draws=3", "sampler.cache=prefix", "sampler.horizon=4"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak) for kind in FULL_KINDS]
)
def test_rl_with_full_attention(command, tmp_path, kind):
    """Without `make soak`: caches are stale_test's, kinds of noise views_test's.

    A whole run with full attention by its trace is looking_test's.
    """
    folder = tmp_path / kind
    end(command(folder, *FULL, f"noise.kind={kind}", *FULL_KINDS[kind]))
    told = rows(folder)
    assert [row["step"] for row in told] == [1, 2]
    for row in told:
        assert row["grad_norm"] > 0
        assert row["response_length"] > 0
        if kind == "trace":
            assert row["logprob_gap_max"] < 1e-4
        else:  # random masks show another context
            assert "logprob_gap_max" not in row
    made = json.loads((folder / "export/config.json").read_text())
    assert (made["attention_pattern"], made["logit_shift"]) == ("full", 1)


@pytest.mark.soak
def test_lora_is_resumed_bit_for_bit(command, others, tmp_path):
    """Without `make soak`: test_stopped_then_damaged_falls_back goes on bit for bit."""
    folder, _ = others["lora"]
    resumed = shutil.copytree(folder, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints/2")  # as if it had been killed before
    told = end(command(resumed, *LORA, "rl.steps=2"))
    assert f"resuming {resumed} after step 1" in told
    same(resumed, folder)


def test_adapters_are_trained_alone_and_exported_merged(others, tmp_path):
    folder, told = others["lora"]
    start = safetensors.numpy.load_file(MODEL / "model.safetensors")
    frozen = sum(x.size for x in start.values())
    assert re.search(rf": [\d,]+ parameters beside {frozen:,} frozen ones on", told)
    assert rows(folder)[0]["logprob_gap_max"] < 1e-4
    size = sum(f.stat().st_size for f in (folder / "checkpoints/2/state").rglob("*"))
    assert size < frozen * 4  # no copy of the weights that stay

    got = safetensors.numpy.load_file(folder / "export/model.safetensors")
    for name, x in start.items():
        assert (got[name] != x).any() == name.endswith("proj.weight"), name
    convert.main(["to-hf", str(folder), str(tmp_path / "out"), f"--like={MODEL}"])
    out = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    for name, x in got.items():
        np.testing.assert_allclose(out[name], x, atol=1e-8, err_msg=name)


def test_help_lists_every_key():
    run = served.run("dllm_jax.train", ["--help"])
    assert run.returncode == 0
    for name in ("--config=FILE", "--config.rl.group=16", "--config.mesh.fsdp=-1"):
        assert name in run.stdout


def test_the_package_tells_its_commands():
    run = served.run("dllm_jax", [])
    told = [line.split()[2] for line in run.stdout.splitlines()]
    folder = pathlib.Path(convert.__file__).parent
    modules = [
        x.stem for x in folder.glob("*.py") if "\nif __name__ ==" in x.read_text()
    ]
    modules += [x.parent.name for x in folder.glob("*/__main__.py")]
    modules.remove("__main__")
    assert sorted(told) == sorted(f"dllm_jax.{name}" for name in modules)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--config.rl.gruop=8"], "unknown config key 'rl.gruop'; the nearest is"),
        (["--config=configs/nope.py"], "--config=configs/nope.py: there is no such"),
        (["--config=configs/tracerl.py:nope"], "preset='nope': choose from arithmetic"),
        (["--config=configs/tracerl.py", "more"], "unknown argument 'more'"),
        (["--resume=maybe"], "--resume=maybe: value should be one of <auto|must|"),
        (["--bogus"], "Unknown command line flag 'bogus'"),
        ([], "--config=FILE is required"),
    ],
)
def test_bad_flags_end_in_one_line(args, message):
    run = served.run("dllm_jax.train", args)
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_what_cannot_fit_is_refused_before_it_is_made(command, tmp_path):
    # Of one recomputation: what is tried before it is refused is budget_test's.
    keys = ["sampler.pages=10000000", "sampler.rows=1", "model.remat=none"]
    told = end(command(tmp_path / "run", *keys), 2)
    assert "error: rollout needs" in told and "Traceback" not in told
    assert "lower sampler.rows or sampler.pages" in told
    assert not (tmp_path / "run").exists()


def test_never_resume_refuses_a_folder_in_use(command, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    told = end(command(tmp_path / "run", "--resume=never"), 2)
    assert "already holds a run" in told


OLD = ROOT / "tests" / "goldens" / "checkpoints"
OLD_KEYS = ("model.lora_rank=1", "rl.value=none", "rl.advantage=center", "rl.prompts=2")
OLD_KEYS += ("rl.updates=1", "data.heldout=", "run.export=false", "sampler.max_new=8")
OLD_KEYS += ("batch.tokens=64", "rl.steps=2")


def test_a_checkpoint_without_a_format_number_is_gone_on_with(command, tmp_path):
    folder = tmp_path / "run"
    with tarfile.open(OLD / "format_0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    told = end(command(folder, *OLD_KEYS, "rl.value=own", "value_optim.warmup=9"), 2)
    assert "warning: value_optim.warmup=9: the run has 2 updates, so that its" in told
    assert (
        "error: " in told and "checkpoints/1 does not fit this configuration: " in told
    )
    assert "config.rl.value was 'none', is now 'own'" in told
    assert "memory of a device" not in told  # nothing was compiled
    told = end(command(folder, *OLD_KEYS))
    assert f"resuming {folder} after step 1" in told
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert np.isfinite(rows(folder)[-1]["grad_norm"])
    assert "steps are done" not in told and "holds other records" not in told
    assert "2 of 2 steps are done" in end(command(folder, *OLD_KEYS))
    told = end(command(folder, *OLD_KEYS, "seed=1"), 2)
    assert "all 2 steps of its run are done, and config.seed was 0, is now 1" in told
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    told = end(command(folder, *OLD_KEYS, "rl.steps=3", f"data.train={other}"))
    assert f"data.train='{other}' holds other records than until step 2" in told


@pytest.mark.parametrize(
    "meta, says",
    [
        ({"config": {"method": "sft"}}, "method was 'sft', is now 'rl'"),
        (
            {"model": {"model.safetensors": [1, 2]}},
            "has other weights than it began with",
        ),
        (
            {"config": {"model": {"lora_alpha": 64.0}}},
            "lora_alpha was 64.0, .*now 32.0",
        ),
        ({}, ""),  # of an older version
    ],
)
def test_a_folder_of_another_run_is_refused(meta, says):
    tree = tracerl.get_config()
    tree.model.path = str(MODEL)
    tree.model.lora_rank = 2
    cfg = config.freeze(tree)
    begin.check_same(cfg, {"model": begin.origin(cfg.model.path)})
    refused = pytest.raises(ValueError, match=f"holds another run: .*{says}; name ano")
    with refused if says else contextlib.nullcontext():
        begin.check_same(cfg, meta)
    if says:  # nor is the one before it gone on with, where the newest is damaged
        here = types.SimpleNamespace(cfg=cfg, model=None, mesh=None)
        with refused:
            begin.begin_or_resume(here, ({}, meta, 3))


def test_a_newer_checkpoint_is_refused_before_a_minute_is_spent():
    """One that is damaged is told of later, when the one before it is taken."""

    def found(error):
        raise error

    for error in (checkpoint.Newer("of format 2"), KeyError("damaged")):
        kept = types.SimpleNamespace(
            steps=lambda: [3], check_fit=lambda *args, error=error: found(error)
        )
        here = types.SimpleNamespace(checkpoints=kept, saved=None)
        newer = pytest.raises(ValueError, match="of format 2")
        with newer if isinstance(error, ValueError) else contextlib.nullcontext():
            begin.check_fit(here)


def test_curves_that_cannot_be_drawn_cost_nothing_else(monkeypatch, tmp_path, capsys):
    def fails(*args):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(train.curves, "draw", fails)
    train.draw(tmp_path)
    assert capsys.readouterr().err == "warning: no curves: no fonts\n"


def test_of_other_records_nothing_is_known(monkeypatch, tmp_path):
    """Problem 3 of one file, which rests, is not problem 3 of another."""
    cfg = tracerl.get_config()
    cfg.model.path, cfg.data.train = str(MODEL), str(tmp_path / "train.jsonl")
    cfg = config.freeze(cfg)
    monkeypatch.setattr(begin.networks, "frozen", lambda *args: (None, None))
    memory = {"problems": [[3, 0.9, 2, 4]], "critic": {"tokens": 1}}
    meta = {"config": config.leaves_of(cfg), "memory": memory, "taken": 4}
    told = []
    here = types.SimpleNamespace(cfg=cfg, model=None, mesh=None, say=told.append)

    def resumed(written):
        (tmp_path / "train.jsonl").write_text(written)
        return begin.begin_or_resume(here, ({}, meta, 3))[-1]

    meta = resumed("one")
    assert meta["memory"] == memory and len(told) == 1
    assert resumed("one")["memory"] == memory and len(told) == 2
    assert resumed("other")["memory"] == {"critic": {"tokens": 1}}
    assert "holds other records" in told[3] and "is forgotten" in told[4]


def test_other_held_out_problems_are_told(tmp_path, monkeypatch):
    cfg, file = tracerl.get_config(), tmp_path / "held.jsonl"
    cfg.data.heldout = str(file)
    cfg, told = config.freeze(cfg), []
    here = types.SimpleNamespace(cfg=cfg, say=told.append)
    file.write_text("one")
    meta = {"config": config.leaves_of(cfg), "best": {"of": begin.evaluated(cfg)}}
    begin.say_other_problems(here, meta, begin.evaluated(cfg), 2)
    assert told == []
    file.write_text("other")
    begin.say_other_problems(here, meta, begin.evaluated(cfg), 0)
    begin.say_other_problems(here, {"best": None}, begin.evaluated(cfg), 2)
    assert told == []
    begin.say_other_problems(here, meta, begin.evaluated(cfg), 2)
    assert "held.jsonl' holds other problems than until step 2: eval" in told[0]
    data = dataclasses.replace(cfg.data, heldout=f"{file},{file}x")
    named = dataclasses.replace(cfg, data=data)
    (tmp_path / "held.jsonlx").write_text("more")
    here = types.SimpleNamespace(cfg=named, say=told.append)
    begin.say_other_problems(here, meta, begin.evaluated(named), 2)
    assert len(told) == 1  # the key is told

    # A run that goes on looks.
    state = ({}, None, 2, meta)
    monkeypatch.setattr(begin, "begin_or_resume", lambda *args: state)
    kept = types.SimpleNamespace(scarce=lambda saved: [], restore=lambda saved: None)
    here = types.SimpleNamespace(
        cfg=cfg, say=told.append, model=None, mesh=None, saved=None, checkpoints=kept
    )
    with pytest.raises(AttributeError, match="recall"):  # so far it goes here
        begin.progress(here, types.SimpleNamespace(steps=9), None, None)
    assert "holds other problems than until step 2" in told[1]


def test_a_reward_function_that_changed_on_the_way_is_told(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    cfg = tracerl.get_config()
    cfg.rl.reward = "math,mine_of_train:f:0.5"
    cfg, told = config.freeze(cfg), []
    here = types.SimpleNamespace(cfg=cfg, samples=True, say=told.append)
    progress = types.SimpleNamespace(step=3, meta={})

    def resumed(source) -> list[str]:
        (tmp_path / "mine_of_train.py").write_text(source)
        told.clear()
        train.note_judges(here, progress)
        progress.meta = json.loads(json.dumps(progress.meta))
        return told

    assert (
        resumed("f = lambda *_: 1\n") == []
    )  # of a run that begins, or an older checkpoint
    assert resumed("f = lambda *_: 1\n") == []
    (line,) = resumed("f = lambda *_: 2\n")
    assert line.startswith(
        "warning: the source of mine_of_train:f is another than until"
    )
    assert resumed("f = lambda *_: 2\n") == []


@pytest.mark.parametrize(
    "key",
    ["sft.examples", "reward.split", "rl.group", "model.lora_alpha", "sampler.block"]
    + ["sampler.temperature", "data.template", "model.tower"],
)
def test_a_run_that_is_done_is_not_asked_for_something_else(key):
    cfg = tracerl.get_config()
    cfg.model.path = str(MODEL)
    cfg = config.freeze(cfg)
    meta = {"config": dataclasses.asdict(cfg)}
    meta["config"]["sft"]["steps"] += 1
    meta["config"]["sampler"]["page"] += 1
    del meta["config"]["model"]["tiles"]  # of an older version
    begin.check_unfinished(cfg, meta, 4)
    section, name = key.split(".")
    meta["config"][section][name] = "another"
    with pytest.raises(ValueError, match=f"are done, and config.{key} was 'another'"):
        begin.check_unfinished(cfg, meta, 4)


@pytest.mark.parametrize("name", ["best", "export", "value"])
def test_what_cannot_be_exported_is_refused_before_a_minute_is_spent(name, tmp_path):
    wants = {"best": "keep_best", "export": "export", "value": "export_value"}
    run = config.RunConfig(export=False, keep_best="")
    given = {"keep_best": "heldout_accuracy"}.get(wants[name], True)
    wanted = dataclasses.replace(run, **{wants[name]: given})
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("of mine")
    cfg = config.Config(model=config.ModelArgs(path=str(MODEL)), run=run)
    begin.check_targets(cfg, tmp_path)
    cfg = types.SimpleNamespace(model=cfg.model, run=wanted)
    with pytest.raises(ValueError, match=f"export to {tmp_path / name}: it is there"):
        begin.check_targets(cfg, tmp_path)


def test_an_export_is_not_made_with_weights_that_have_changed_meanwhile(tmp_path):
    """Adapters that were trained beside others would be added to them without a word."""
    path = shutil.copytree(MODEL, tmp_path / "model")
    before = (path / "model.safetensors").read_bytes()
    begin.origin(str(path))
    begin.check_origin(str(path))
    changed = before[:-4] + b"\0\0\0\0"
    run = types.SimpleNamespace(
        here=types.SimpleNamespace(
            cfg=config.Config(model=config.ModelArgs(path=str(path)))
        )
    )
    for harm in (
        lambda: (path / "model.safetensors").write_bytes(changed),
        lambda: shutil.rmtree(path),
    ):
        harm()
        with pytest.raises(exits.CannotGoOn, match="are others than those"):
            train.Training.export(run, "export", None)


def test_an_export_over_the_original_is_refused_before_a_minute_is_spent(
    command, tmp_path
):
    start = shutil.copytree(MODEL, tmp_path / "run" / "export")
    before = {file.name: file.read_bytes() for file in start.iterdir()}
    told = end(command(tmp_path / "run", f"model.path={start}"), 2)
    assert f"error: cannot export to {start}: the original" in told
    assert {file.name: file.read_bytes() for file in start.iterdir()} == before


def test_must_resume_wants_a_checkpoint(command, tmp_path):
    told = end(command(tmp_path / "run", "--resume=must"), 2)
    assert "has no checkpoint" in told


def test_an_autoregressive_model_becomes_one_that_fills_blocks(command, tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "ar")
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3"}
    mask = raw.pop("mask_token_id")
    del raw["block_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["mask_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace("<|MASK|>", "<|unused|>")
    )
    small = ["sampler.max_prompt=16", "sampler.max_new=32", "batch.tokens=128"]
    small += ["sft.steps=2", "sft.examples=4", "model.dtype=float32", "batch.rows=1"]
    small += [f"model.path={folder}", "data.train=examples/arithmetic/train.jsonl"]
    run = tmp_path / "run"
    start = functools.partial(command, run, *small, file="sft.py:adapt")
    assert "set model.mask_id to a token that no text uses" in end(
        start("model.mask_id=-1"), code=2
    )
    assert "noise.kind='bernoulli' masks tokens, but the model's" in end(
        start("model.mask_id=-1", "model.attention=causal"), code=2
    )
    end(start(f"model.mask_id={mask}"))
    told = rows(run)
    assert [row["step"] for row in told] == [1, 2] and told[-1]["loss"] > 0
    made = json.loads((run / "export" / "config.json").read_text())
    more = {"attention_pattern": "block", "logit_shift": 0, "block_size": 4}
    assert made == raw | more | {"mask_token_id": mask}


def test_a_run_says_what_of_it_cannot_be_saved():
    said, training = [], object.__new__(train.Training)
    training.here = types.SimpleNamespace(say=said.append)
    training.progress = types.SimpleNamespace(step=5)
    training.watch = types.SimpleNamespace(reason="step 3: grad_norm not finite")
    training.saved, training.save = 5, lambda: None
    training.save_rest()
    assert said == []
    training.saved = 2
    training.save_rest()
    (line,) = said
    assert line.startswith("warning: the last updates were skipped, step 3: grad_norm")
    assert "nothing is saved after step 2, behind which" in line


def test_an_entropy_below_its_floor_is_told():
    said, training = [], object.__new__(train.Training)
    training.here = types.SimpleNamespace(say=said.append)
    for floor, row in (
        (0.0, {"entropy": 0.1}),
        (0.5, {"entropy": 0.5}),
        (0.5, {"entropy": float("nan")}),
        (0.5, {}),  # of a loss that tells none
    ):
        rl = types.SimpleNamespace(entropy_floor=floor)
        training.cfg = types.SimpleNamespace(rl=rl)
        assert training.entropy_low(3, row) == {}
    assert said == []
    assert training.entropy_low(3, {"entropy": 0.25}) == {"entropy_low": 1.0}
    assert said[0].startswith("warning: step 3: entropy 0.25 nats a token, below")


def test_no_update_follows_one_that_went_too_far():
    """Of a step's four passes, which train what they name, the third is beyond rl.target_kl."""
    noted, training = [], object.__new__(train.Training)
    passes = [
        (("value",), 1),
        (("policy", "value"), 2),
        (("policy",), 5),
        (("policy",), 9),
    ]

    def trainer(states, batch, beside, limits):
        assert (beside, limits) == ("base", "limits")
        return {name: x + batch for name, x in states.items()}, {"kl": float(batch)}

    training.here = types.SimpleNamespace(timer=metrics.Timer())
    training.source = types.SimpleNamespace(
        passes=lambda step, made: iter(passes), far=lambda told: told["kl"] > 4
    )
    training.programs = begin.Programs(None, {names: trainer for names, _ in passes})
    states = {"policy": 10, "value": 20}
    training.progress = types.SimpleNamespace(states=states, base="base")
    training.watch = types.SimpleNamespace(
        limits=lambda: "limits", note=lambda *told: noted.append(told) or {"skipped": 0}
    )
    row = training.update(7, types.SimpleNamespace(table=None))
    assert training.progress.states == {"policy": 17, "value": 23}
    assert row == {"kl": pytest.approx(8 / 3), "skipped": 0}
    assert noted == [(7, [{"kl": 1.0}, {"kl": 2.0}, {"kl": 5.0}], [1, 2, 5])]


def test_the_reference_becomes_the_policy_every_so_many_steps(monkeypatch):
    training = object.__new__(train.Training)
    policy = types.SimpleNamespace(params="policy")
    training.progress = types.SimpleNamespace(
        states={"policy": policy}, reference="old"
    )
    training.cfg = types.SimpleNamespace(rl=types.SimpleNamespace(reference_reset=3))
    monkeypatch.setattr(train.networks, "as_reference", lambda *made: made)
    for anchor, step, reference in (
        (None, 3, "old"),
        ("shapes", 4, "old"),
        ("shapes", 6, ("policy", "shapes")),
    ):
        training.here = types.SimpleNamespace(anchor=anchor)
        training.move_reference(step)
        assert training.progress.reference == reference


@pytest.mark.parametrize("main", [True, False])
def test_the_best_is_no_whole_one_while_it_is_written(monkeypatch, tmp_path, main):
    did, said, training = [], [], object.__new__(train.Training)
    training.here = types.SimpleNamespace(
        say=said.append,
        timer=metrics.Timer(),
        main=main,
        folder=tmp_path,
        settings=types.SimpleNamespace(heldout_answers=1),
    )
    sampling = contextlib.nullcontext()
    training.watch = types.SimpleNamespace(sampling=lambda step: sampling)
    training.problems = training.tools = None
    training.champion = best.Best("heldout_accuracy", 0)
    training.progress = types.SimpleNamespace(
        weights=lambda: None, states={"policy": "weights"}
    )
    training.export = lambda *what: did.append(what)
    monkeypatch.setattr(train.best, "mark", lambda *what: did.append(what))
    alike = {"heldout_problems": 8, "heldout_graded_timeouts": 0}
    unsure = alike | {"heldout_accuracy": 1.0, "heldout_graded_timeouts": 8}
    answered = [alike | {"heldout_accuracy": x} for x in (0.5, 0.25)] + [unsure, None]
    monkeypatch.setattr(
        train.heldout, "evaluate_sets", lambda step, *_, **more: answered[step]
    )
    for step, row in enumerate(answered):
        assert training.evaluate(step) == row
    exported = ("best", "weights")
    marks = [(tmp_path, None), exported, (tmp_path, 0)]
    assert did == (marks if main else [exported])
    (line,) = said
    assert line.startswith("warning: step 2: 8 of 8 answers of heldout_accuracy were")


def test_each_of_many_processes_has_a_profile_of_its_own(monkeypatch, tmp_path):
    traced, said = [], []
    monkeypatch.setattr(
        jax.profiler,
        "trace",
        lambda folder: traced.append(folder) or contextlib.nullcontext(),
    )
    run = types.SimpleNamespace(profile=3)
    here = types.SimpleNamespace(
        cfg=types.SimpleNamespace(run=run), folder=tmp_path, say=said.append
    )
    own = tmp_path / "profile" / "process_1"
    for count, folder in ((2, own), (1, tmp_path / "profile")):
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        for step in (2, 3, 4):
            with train.profiled(here, step):
                assert traced == [str(folder)] * (step > 2)
        assert traced.pop() == str(folder) and traced == []
        assert said.pop().startswith(f"a profile of step 3 is in {folder}: ")
