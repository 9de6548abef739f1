"""Configurations: every file freezes, and what is wrong is named."""

import dataclasses
import functools
import gc
import importlib.util
import io
import json
import operator
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from unittest import mock

import jax
import numpy as np
import pytest

from configs import eval as evaluations
from dllm_jax import (
    begin,
    checks,
    command_line,
    compatible,
    compiler,
    config,
    data,
    exits,
    generate,
    train,
)
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import choice
from dllm_jax.rl import learner, rewards
from dllm_jax.rl.config import BatchConfig, OptimConfig
from dllm_jax.sampling.config import SamplerConfig
from tests import served

ROOT = pathlib.Path(__file__).parents[1]
# The translator, its keys, and what presets share.
NOT_CONFIGS = {"from_yaml.py", "dllm_rl.py", "dllm_rl_rows.py", "released.py"}
FILES = [
    p for p in sorted((ROOT / "configs").glob("*.py")) if p.name not in NOT_CONFIGS
]


def load(path: pathlib.Path):
    """Returns a config file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRESETS = [
    (path, name)
    for path in FILES
    for name in getattr(load(path), "PRESETS", {None: None})
]


def changed(**leaves):
    """Returns the defaults with leaves changed; a dot is written as two underscores."""
    tree = config.default()
    for name, value in leaves.items():
        *groups, leaf = name.split("__")
        node = tree
        for group in groups:
            node = node[group]
        node[leaf] = value
    return tree


def test_defaults_survive_the_round_trip():
    assert config.freeze(config.default()) == config.Config()
    hash(config.Config())  # a static argument


def test_changes_arrive():
    cfg = config.freeze(
        changed(seed=3, sampler__block=8, sampler__stop_ids=(1, 2), rl__value="head")
    )
    assert cfg.seed == 3
    assert cfg.sampler.block == 8
    assert cfg.sampler.stop_ids == (1, 2)
    assert cfg.rl.value == "head"
    assert cfg.policy_optim == config.Config().policy_optim


def test_numbers_of_numpy_become_pythons_own():
    """As a config file that computes has them; config.json could not hold them."""
    tree = dataclasses.asdict(config.Config())
    tree["rl"]["steps"] = np.int64(5)
    tree["policy_optim"]["lr"] = np.float32(0.5)
    tree["sampler"]["stop_ids"] = [np.int32(3)]
    leaves = config.leaves_of(config.freeze(tree))
    assert (leaves["rl.steps"], leaves["sampler.stop_ids"]) == (5, [3])
    assert (leaves["policy_optim.lr"], leaves["rl.whiten"]) == (0.5, False)


@pytest.mark.parametrize(
    ("path", "name"), PRESETS, ids=[f"{p.stem}:{n}" for p, n in PRESETS]
)
def test_every_preset_freezes(path, name):
    module = load(path)
    cfg = config.freeze(module.get_config(*([name] if name else [])))
    assert cfg.model.path
    assert cfg.run.folder != config.RunConfig().folder
    assert f"--config=configs/{path.name}" in module.__doc__
    assert name is None or name in module.__doc__
    if path.stem != "eval":  # which says nothing of training
        assert compatible.unread(cfg) == []


def test_no_two_methods_of_a_preset_share_a_folder():
    """The second would go on with the weights of the first."""
    folders = {}
    for path, name in PRESETS:
        cfg = load(path).get_config(*([name] if name else []))
        folders.setdefault(cfg.run.folder, []).append(f"{path.stem}:{name}")
    assert [names for names in folders.values() if len(names) > 1] == []


def recipes():
    """Returns the rows of docs/methods.md: the config file they go behind, and keys."""
    file = None
    for row in (ROOT / "docs" / "methods.md").read_text().split("\n"):
        if named := re.match("`--config=(.*?)`", row):
            file = named[1]
        elif row.startswith("|") and "`" in row:
            _, name, keys, _ = row.split("|")
            yield pytest.param(file, keys, id=name.split("(")[0].strip())


# Presets, and what their checkpoints' models do.
TRIED = {"arithmetic": "block", "full": "full", "llada-8b": "full", "trado-4b": "block"}


@pytest.mark.parametrize(("file", "keys"), list(recipes()))
def test_every_method_of_the_docs_goes_behind_its_config(file, keys):
    module = load(ROOT / file)
    settings = re.findall("`(.*?)=(.*?)`", keys)
    assert settings
    for preset in module.PRESETS.keys() & TRIED:
        tree = module.get_config(preset)
        for name, value in settings:
            *groups, leaf = name.split(".")
            node = functools.reduce(operator.getitem, groups, tree)
            kind = type(node[leaf])
            node[leaf] = value == "1" if kind is bool else kind(value)
        cfg = config.freeze(tree)
        assert (cfg.method == "rl") == (file == "configs/tracerl.py")
        attention = cfg.model.attention or TRIED[preset]
        shift = max(cfg.model.shift, 0)
        sampler = dataclasses.replace(cfg.sampler, block=cfg.sampler.block or 4)
        cfg = dataclasses.replace(cfg, sampler=sampler)
        assert config.chosen(cfg, ModelConfig(attention=attention, shift=shift))


def test_a_config_may_lie_in_a_folder_with_a_colon(tmp_path):
    folder = tmp_path / "1:2"
    folder.mkdir()
    shutil.copy(ROOT / "configs" / "smoke.py", folder)
    tree = command_line.of_file(str(folder / "smoke.py"))
    assert tree == command_line.of_file(str(ROOT / "configs" / "smoke.py"))


@pytest.mark.parametrize("path", [p for p in FILES if hasattr(load(p), "PRESETS")])
def test_an_unknown_preset_lists_the_known(path):
    module = load(path)
    with pytest.raises(ValueError, match="preset='nope'") as caught:
        module.get_config("nope")
    for name in module.PRESETS:
        assert name in str(caught.value)


def test_evaluation_grades_what_was_cut():
    for name in ("arithmetic", "trado-8b", "llada-8b"):
        cfg = load(ROOT / "configs" / "eval.py").get_config(name)
        assert cfg.rl.truncated == "graded"
        cfg.sampler.max_new = 100_000  # no row of training has to hold it
        assert config.freeze(cfg)
        trained = load(ROOT / "configs" / "tracerl.py").get_config(name)
        assert trained.rl.truncated == "wrong"
        assert config.freeze(trained).rl.truncated_wrong


def test_an_unknown_key_in_a_file_is_named_with_the_nearest():
    tree = config.default()
    with tree.unlocked():
        tree.rl.gruop = 8
    message = "unknown config key 'rl.gruop'; the nearest is 'rl.group'"
    with pytest.raises(ValueError, match=message):
        config.freeze(tree)
    tree = config.default()
    tree.update({"optim": {}})  # a group that does not exist
    with pytest.raises(ValueError, match="unknown config key 'optim'"):
        config.freeze(tree)


@pytest.mark.parametrize(
    ("arg", "nearest"),
    [
        ("--config.rl.gruop=8", "rl.group"),
        ("--config.sampler.treshold=0.5", "sampler.threshold"),
        ("-config.model.pth=x", "model.path"),
        ("--noconfig.data.shufle", "data.shuffle"),
        ("--config.lr=1e-5", "value_optim.lr' or 'policy_optim.lr'"),
        ("--config.train.max_prompt=1", "sampler.max_prompt'"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest(arg, nearest):
    with pytest.raises(ValueError, match="unknown config key") as caught:
        command_line.check_overrides(["train", arg])
    assert f"the nearest is '{nearest}" in str(caught.value)


def test_known_flags_pass():
    flags = [
        "--config=configs/tracerl.py:trado-4b",
        "--config.rl.group=8",
        "--config.mesh.fsdp",
        "-1",
        "--noconfig.data.shuffle",
        "--distributed",
    ]
    assert command_line.check_overrides(["train", *flags]) is None
    with pytest.raises(ValueError, match="unknown config key 'rl.groups'"):
        command_line.check_overrides(["train", *flags, "--config.rl.groups=8"])


def test_processes_grade_by_functions_of_one_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def facts(source: str) -> dict:
        (tmp_path / "mine_of_facts.py").write_text(source)
        tree = config.default()
        tree.rl.reward = "mine_of_facts:f"
        return command_line.facts(config.freeze(tree))

    before, after = (facts(f"f = lambda *_: {x}\n") for x in "12")
    name = "the source of mine_of_facts:f"
    assert [key for key in after if after[key] != before[key]] == [name]
    tree = config.default()
    tree.rl.reward = "mine_of_facts:none"  # whoever makes the grader refuses it
    assert name not in command_line.facts(config.freeze(tree))


SELECTION, NO_VALUE = {"objective__likelihood": "selection"}, {"rl__value": "none"}


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"method": "ppo"}, "method='ppo': choose from rl, sft"),
        ({"sampler__strategy": "greedy"}, "sampler.strategy='greedy'.*dynamic"),
        (
            {"sampler__block": 4, "sampler__steps_per_block": 5},
            "steps_per_block=5 .*block of 4",
        ),
        ({"sampler__block": -1}, "^sampler.block=-1: must be >= 0$"),
        ({"sampler__top_p": 0.0}, "top_p"),
        ({"sampler__max_new": 0}, "max_new"),
        ({"method": "dpo"}, "noise.kind='subset' or 'quadrature' and obj"),
        ({"objective__loss": "spg"}, "spg and dpo train"),
        (
            {
                "method": "dpo",
                "noise__kind": "subset",
                "objective__aggregate": "elbo",
            },
            "objective.reference_beta > 0",
        ),
        ({"method": "reward"}, "method='reward' and noise.kind='end' go together"),
        ({"noise__kind": "end"}, "method='reward' and noise.kind='end' go together"),
        (
            {"method": "reward", "noise__kind": "end", "objective__aggregate": "step"},
            "objective.aggregate='step': pairs of a reward model",
        ),
        (
            {"method": "reward", "noise__kind": "end", "data__heldout": "a.jsonl"},
            "data.heldout='a.jsonl': a reward model answers nothing",
        ),
        (
            {
                "method": "sft",
                "reward__split": "tokens",
                "reward__judge__at": "http://localhost/v1",
            },
            "reward.split='tokens': only method='rl'",
        ),
        (
            {
                "objective__loss": "sequence",
                "objective__aggregate": "sequence",
                "rl__value": "none",
                "reward__split": "tokens",
                "reward__judge__at": "http://localhost/v1",
            },
            "loss='sequence' has one advantage for each answer; set it to 'policy'",
        ),
        (
            {
                "sampler__answers": "image",
                "reward__split": "tokens",
                "reward__judge__at": "http://localhost/v1",
            },
            "reward.split='tokens': a judge reads excerpts of texts",
        ),
        ({"reward__split": "words"}, "reward.split='words': choose from none, tokens"),
        ({"reward__split": "steps"}, "reward.judge.at='': reward.split='steps' needs"),
        ({"reward__judge__at": "http:///v1"}, "reward.judge.at: no URL such as"),
        ({"reward__judge__votes": 0}, "^reward.judge.votes=0: must be >= 1"),
        ({"rl__outcome": -1.0}, "^rl.outcome=-1.0: must be >= 0$"),
        ({"noise__draws": 2}, "noise.draws=2: a trajectory has one trace"),
        ({"objective__upper_power": 0.5}, "objective.upper_power=0.5: must be >= 1"),
        ({"rl__group": 1}, "rl.group=1: .*'zscore' compares .* rl.advantage='none'"),
        ({"rl__value": "both"}, "rl.value='both': choose from none, own, head"),
        (
            {"rl__updates": 9999},
            "^rl.updates=9999: a step has at most .* = 1024 answers",
        ),
        (
            {"rl__prompts": 2**12, "rl__group": 2**13},
            "^rl.prompts=4096: with rl.group=8192 a step has 33,554,432 answers; at most 16,",
        ),
        ({"eval__answers": 2**17}, "^eval.answers=131072: must be >= 1 and <= 65536$"),
        (
            {"sampler__block": 4, "batch__tokens": 1000},
            "batch.tokens=1000 .*set it to 1028 or more",
        ),
        *(
            ({name.replace(".", "__"): 0}, f"^{name}=0: must be >= 1$")
            for name in ("run.save_every", "run.keep", "eval.every")
            + ("batch.rows", "rl.steps", "rl.prompts", "rl.group", "rl.updates")
            + ("sft.steps", "sft.examples")
        ),
        ({"eval__temperature": -1.0}, "eval.temperature=-1.0: must be 0 or >= 1e-6"),
        ({"run__samples": -1}, "run.samples=-1: must be >= 0"),
        ({"rl__reward": "foo"}, "rl.reward='foo': choose from math"),
        ({"rl__min_solved": 0.9, "rl__max_solved": 0.1}, "0 <= min_solved <= max"),
        ({"model__remat": "some"}, "model.remat='some'"),
        (
            {"model__kernels": "gpu"},
            "model.kernels='gpu': choose from auto, .*platform",
        ),
        ({"model__dtype": "int8"}, "model.dtype='int8'"),
        ({"noise__shrink": 0}, "^noise.shrink=0: must be >= 1$"),
        ({"noise__lower": 0.9, "noise__upper": 0.1}, "noise.lower=0.9: above upper"),
        ({"objective__kl": "k9"}, "objective.kl='k9'"),
        (
            SELECTION | {"noise__shrink": 2},
            "objective.likelihood='selection' is of what was sampled: it needs",
        ),
        (SELECTION | {"noise__grid": "response"}, "noise.grid='absolute'"),
        (SELECTION | {"method": "sft"}, "method='rl'"),
        (SELECTION | {"rl__trusted_gap": 0.1}, "set rl.trusted_gap=0"),
        (
            SELECTION | {"objective__importance_cap": 2.0},
            "importance_cap=2.0: the sampl",
        ),
        (
            {"objective__importance_cap": 0.5},
            "^objective.importance_cap=0.5: .* least 1",
        ),
        (
            {"objective__importance_cap": 2.0, "noise__kind": "subset"} | NO_VALUE,
            "importance_cap is of what was sampled",
        ),
        (
            {"objective__loss": "sequence", "noise__kind": "subset"} | NO_VALUE,
            "need objective.aggregate='elbo_sequence' or 'elbo_answer'",
        ),
        (
            {"objective__loss": "sequence", "objective__aggregate": "sequence"},
            "objective.loss='sequence' has one advantage for each answer",
        ),
        ({"objective__loss": "stable"} | NO_VALUE, "loss='stable' weighs answers"),
        ({"noise__rounds": 2}, "noise.rounds=2 leaves rounds out, which rl.value"),
        (
            {"noise__rounds": 2, "noise__kind": "subset"} | NO_VALUE,
            "noise.rounds=2: rounds are picked of noise.kind='trace'",
        ),
        (
            {"noise__kind": "quadrature", "noise__draws": 0},
            "^noise.draws=0: must be >=",
        ),
        ({"value_optim__schedule": "step"}, "^value_optim.schedule='step': choose"),
        ({"data__template": "no question"}, "data.template"),
        (
            {"model__lora_targets": ("wq",)},
            r"^model.lora_targets=\('wq',\): there are no adapters with lora_rank=0",
        ),
        (
            {"run__keep_every": 6, "run__save_every": 4},
            "^run.keep_every=6: checkpoints come every run.save_every=4 steps",
        ),
        ({"rl__rest_for": 9}, "rl.rest_for=9: no problem rests; set rl.rest_after"),
        (
            {"objective__clip_high": 0.3, "objective__loss": "dipo"},
            "objective.clip_high=0.3: no ratio is clipped with method='rl' and",
        ),
        (
            {"objective__upper_power": 2.0},
            "upper_power=2.0: there is no upper bound with .*; leave it at 1.5",
        ),
        ({"objective__upper_weight": 1.0}, "upper_weight=1.0: there is no upper bound"),
        (
            {"objective__beta": 0.1, "objective__loss": "dipo"},
            "objective.beta=0.1: no KL to the policy that sampled is in the loss with",
        ),
        # With ratios of 1 it would take a part of every gradient, where nothing is clipped.
        ({"objective__clip": 0.0}, "^objective.clip=0.0: must be > 0$"),
        # Their folders would have one name.
        (
            {"eval__sweep": "sampler.threshold=0.9,0.90000001"},
            "^eval.sweep=.*: sampler.threshold needs different numbers",
        ),
    ],
)
def test_bad_values_are_named(leaves, message):
    with pytest.raises(ValueError, match=message):
        config.freeze(changed(**leaves))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (
            {"sampler__temperature": 0.0},
            "temperature=0: all answers .*'zscore' compares",
        ),
        (
            {"rl__group": 4, "rl__min_solved": 0.3, "rl__max_solved": 0.4},
            "rl.max_solved=0.4: no group of rl.group=4 answers that differ is solved so",
        ),
        (
            {"rl__min_solved": 0.0, "rl__max_solved": 0.0},
            "no group of rl.group=16 answers that differ",
        ),
        (
            {"rl__reward": "reward_model", "reward__model": "x"},
            "rl.filter='solvable': scores of a reward model say of no answer that it is r",
        ),
    ],
)
def test_groups_that_cannot_differ_are_no_rl(leaves, message):
    cfg = config.freeze(changed(sampler__block=4, **leaves))  # so an evaluation may be
    with pytest.raises(ValueError, match=message):
        config.chosen(cfg, ModelConfig())


@pytest.mark.parametrize(
    "leaves",
    [
        {"sampler__temperature": 0.0, "rl__advantage": "none"},
        {"sampler__temperature": 0.0, "sampler__rank_temperature": 1.0},
        {
            "sampler__temperature": 0.0,
            "sampler__strategy": "static",
            "sampler__target": "random",
        },
        {"sampler__temperature": 0.0, "method": "sft"},
        {"rl__group": 4, "rl__min_solved": 0.3, "rl__filter": "varied"},
        {"rl__group": 4, "rl__min_solved": 0.25, "rl__max_solved": 0.25},
        {"rl__group": 1, "rl__advantage": "none", "rl__max_solved": 1.0},
        {"run__keep_every": 8, "run__save_every": 4},
        {"model__lora_targets": ("wq",), "model__lora_rank": 4},
        {"rl__rest_for": 9, "rl__rest_after": 1},
        {"objective__beta": 0.0, "objective__loss": "dipo"},
    ],
)
def test_values_near_those_that_are_refused_pass(leaves):
    cfg = config.freeze(changed(sampler__block=4, **leaves))
    assert config.chosen(cfg, ModelConfig())


def test_a_mask_token_that_ends_answers_is_told(capsys):
    model = str(ROOT / "examples" / "arithmetic" / "model")
    config.completed(config.freeze(changed(model__path=model)))
    assert capsys.readouterr().err == ""
    cfg = config.freeze(changed(model__path=model, model__mask_id=2))  # <|im_end|>
    config.completed(cfg)
    told = "warning: model.mask_id=2 is one of the ids that end an answer, and the mask"
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("told", "block", "steps"),
    [({}, 32, (1,) * 32), ({"sampler__block": 4}, 4, (1,) * 4)],
)
def test_the_block_is_the_checkpoints_own_unless_told(told, block, steps, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "examples" / "arithmetic" / "model", folder)
    raw = json.loads((folder / "config.json").read_text()) | {"block_size": 32}
    (folder / "config.json").write_text(json.dumps(raw))
    cfg = config.freeze(changed(model__path=str(folder), **told))
    done, model, tok = config.completed(cfg)
    assert (done.sampler.block, model.block) == (block, block)
    assert done.sampler.schedule == steps
    assert done.sampler.stop_ids == data.stop_ids(tok, model.eos_id)
    raw |= {"block_size": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    if not told:
        with pytest.raises(
            ValueError, match="sampler.block=0: .* has no block; set it"
        ):
            config.completed(cfg)


@pytest.mark.parametrize(
    ("leaves", "attention", "reason"),
    [
        ({}, "block", ""),
        ({"rl__value": "none"}, "block", ""),
        ({"noise__shrink": 2}, "block", "not the trace as it is"),
        ({"noise__kind": "bernoulli", "rl__value": "none"}, "block", "not the trace"),
        ({"rl__value": "head"}, "block", "rl.value='head'"),
        ({"model__dtype": "bfloat16"}, "block", "rounded for sampling (bfloat16)"),
        ({"sampler__int8": True}, "block", "rounded for sampling (int8)"),
        ({"sampler__temperature": 0.9}, "block", "temperature"),
        ({"sampler__top_k": 5}, "block", "top_k"),
        ({"sampler__top_p": 0.9}, "block", "top_p"),
        ({"sampler__cache": "prefix"}, "full", "sampler.cache='prefix' has stale"),
        ({"sampler__cache": "none"}, "full", ""),
    ],
)
def test_the_program_chooses_whether_the_record_stands(leaves, attention, reason):
    leaves = {"model__dtype": "float32", "sampler__block": 4} | leaves
    leaves |= {"batch__tokens": 2048}
    cfg = config.freeze(changed(**leaves))
    model = ModelConfig(attention=attention, dtype=cfg.model.dtype)
    done, (line,) = config.chosen(cfg, model)
    assert line.startswith(f"rl.trusted_gap={done.rl.trusted_gap}: ")
    assert (done.rl.trusted_gap == 0, reason in line) == (bool(reason), True)
    assert config.chosen(done, model) == (done, [])
    told = config.freeze(changed(**leaves, rl__trusted_gap=0.0))
    assert config.chosen(told, model) == (told, [])


@pytest.mark.parametrize(
    ("leaves", "attention", "width"),
    [
        # Prompt and answer, and two noised copies of 26 blocks: the answer may begin inside
        # of one.
        ({}, "block", 100 + 100 + 2 * 26 * 4),
        ({"sampler__steps_per_block": 1, "noise__shrink": 4}, "block", 200 + 26 * 4),
        ({}, "full", 200 + 4),
        ({"sampler__max_new": 184}, "full", 284 + 4),
    ],
)
def test_the_program_chooses_a_row_that_holds_the_longest(leaves, attention, width):
    leaves = {"sampler__max_prompt": 100, "sampler__max_new": 100} | leaves
    cfg = config.freeze(changed(sampler__block=4, rl__trusted_gap=0.0, **leaves))
    model = ModelConfig(attention=attention, dtype=cfg.model.dtype)
    done, (line,) = config.chosen(cfg, model)
    assert 0 <= done.batch.tokens - width < 128 and done.batch.tokens % 128 == 0
    assert line.startswith(f"batch.tokens={done.batch.tokens}: ")
    assert config.chosen(done, model) == (done, [])


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_examples_are_learned_without_guidance(method):
    leaves = {"sampler__guidance": 1.5, "sampler__blank": (5,), "batch__tokens": 2048}
    cfg = config.freeze(changed(method=method, rl__trusted_gap=0.0, **leaves))
    model = ModelConfig(attention="full", dtype=cfg.model.dtype)
    done, lines = config.chosen(cfg, model)
    assert done.noise.guided == (method != "sft")
    assert [line.split(":")[0] for line in lines] == (
        ["noise.guided=False"] if method == "sft" else []
    )
    assert config.chosen(done, model) == (done, [])


def test_who_fills_less_than_half_of_a_batch_is_told():
    batch = BatchConfig(rows=8, tokens=512)
    assert config.half_empty(0.5, batch) == []
    (line,) = config.half_empty(0.25, batch)
    assert "75% of the first update's slots" in line
    assert "lower batch.rows=8 or batch.tokens=512, or" in line
    (alone,) = config.half_empty(0.25, dataclasses.replace(batch, rows=1))
    assert "lower batch.tokens=512, or" in alone  # there are no fewer rows than one


def test_a_group_of_one_is_fine_without_the_z_score():
    cfg = config.freeze(changed(rl__group=1, rl__advantage="none", rl__prompts=4))
    assert (cfg.rl.group, cfg.rl.advantage) == (1, "none")
    with pytest.raises(ValueError, match="compares at least"):
        config.freeze(changed(rl__group=1, rl__prompts=4))


def test_help_of_train_lists_every_key():
    told = command_line.usage(train.__doc__, command_line.OPTIONS)
    for key in config.keys(dataclasses.asdict(config.Config())):
        assert f"--config.{key}=" in told
    assert "--config=FILE[:PRESET]" in told
    assert "--distributed" in told
    judge = "\n  # JudgeConfig in dllm_jax/rl/config.py\n  --config.reward.judge.at="
    assert judge in told and "\n  # Config in dllm_jax/config.py\n" in told
    for place in config.declared().values():  # each where it says
        name, _, file = place.partition(" in ")
        assert f"\nclass {name}:" in (ROOT / file).read_text()


def test_help_of_generate_lists_its_flags_and_keys():
    told = generate.help_text()
    for flag in (*generate.SHORT, "prompts", "out", "config"):
        assert f"\n  --{flag}" in told
    assert "terminal shown as it is unmasked" in told
    for field in dataclasses.fields(SamplerConfig):
        effect = field.name != "max_prompt"  # which is as long as the longest prompt
        assert (f"\n  --config.sampler.{field.name}=" in told) == effect
    assert "--config.rl." not in told


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_help_runs(command):
    run = served.run(f"dllm_jax.{command}", ["--help"])
    assert run.returncode == 0
    told = run.stdout
    assert "\nFlags:\n" in told
    assert "\n  --config.sampler.steps_per_block=0\n" in told


def test_help_beside_a_file_lists_its_values(monkeypatch, capsys):
    named = ["--config", "configs/eval.py:llada-8b", "--help"]
    monkeypatch.setattr(sys, "argv", ["eval", *named])
    told = command_line.usage("", command_line.OPTIONS)
    assert "\n  --config.sampler.max_new=1024\n" in told and "value in the file" in told
    told = generate.help_text()
    assert "\n  --max-new-tokens=1024 " in told and "value in the file" in told
    monkeypatch.setattr(sys, "argv", ["eval", "--config=none.py", "--help"])
    with pytest.raises(SystemExit):
        command_line.usage("", command_line.OPTIONS)
    assert capsys.readouterr().err.endswith("none.py: there is no such file\n")


def test_presets_of_an_evaluation_are_told_as_models_and_benchmarks():
    for preset in ("none", "math500/math500"):
        says = f"preset='{preset}': choose from models: ari.*; benchmarks: math500,"
        with pytest.raises(ValueError, match=says) as told:
            evaluations.get_config(preset)
        assert str(told.value).count("countdown") == 1


def test_a_run_keeps_the_defaults_that_it_began_with():
    begun = json.loads(json.dumps(dataclasses.asdict(config.Config())))
    assert config.keeping(config.Config(), begun) == (config.Config(), [])
    assert config.keeping(config.Config(), None) == (config.Config(), [])
    begun["rl"]["lam"], begun["policy_optim"]["lr"] = 0.5, 0.25
    begun["sampler"]["stop_ids"] = [7]
    begun["gone"] = 1
    del begun["eval"]
    cfg = config.freeze(changed(policy_optim__lr=1e-3))
    kept, lines = config.keeping(cfg, begun)
    assert (kept.rl.lam, kept.policy_optim.lr) == (0.5, 1e-3)
    assert kept.sampler.stop_ids == (7,)
    assert sorted(lines) == [
        "config.rl.lam stays 0.5, its default when the run began; by now it is 1.0",
        "config.sampler.stop_ids stays [7], its default when the run began; by now it is []",
    ]


NAMED = {
    begin: ("SPARED", "EVALUATED", "ASKING"),
    command_line: ("LOCAL", "OF_RL", "OF_ALL"),
    generate: ("USED", "UNUSED"),
}


@pytest.mark.parametrize(
    "key",
    [key for module, names in NAMED.items() for x in names for key in vars(module)[x]],
)
def test_keys_that_programs_know_by_name_are_there(key):
    leaves = config.flat(dataclasses.asdict(config.Config()))
    assert any(leaf.startswith(key) for leaf in leaves)


def test_errors_of_the_user_end_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        try:
            checks.one_of("method", "ppo", ("rl", "sft"))
        except ValueError as error:
            command_line.fail(error)
    assert capsys.readouterr().err == "error: method='ppo': choose from rl, sft\n"


@pytest.mark.parametrize(
    "error, runtime, full",
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True, True),
        (ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8"), True, True),
        (ValueError("INTERNAL: a kernel"), True, False),
        (ValueError("sampler.rows=0: Out of memory"), False, False),
        (RuntimeError("INTERNAL: Out of memory of a library's own"), False, False),
        (MemoryError(), False, True),
        (None, False, False),
    ],
)
def test_an_error_of_the_runtime_is_known_as_a_bare_value_error(error, runtime, full):
    """A program that ran before raises no other: it was told as a refusal."""
    assert exits.of_runtime(error) == runtime
    assert exits.exhausted(error) == full


def test_a_file_whose_source_is_gone_refuses_as_it_did():
    code = compile("raise ValueError('wrong')", "a_file_that_is_gone.py", "exec")
    with pytest.raises(ValueError) as refused:
        exec(code)  # noqa: S102
    assert exits.refuses(refused.value)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize("flag", ["--rows", "--config.sampler.rows"])
def test_no_memory_left_is_one_line(capsys, monkeypatch, flag, kind):
    """What XLA says of a device that is full, of 500 lines, is told in one."""
    told = "RESOURCE_EXHAUSTED: Out of memory allocating 38400012288 bytes.\nmore"

    def main():
        assert sys.argv[1] == f"{flag}={pathlib.Path.home() / 'x'}"
        raise kind(told)

    monkeypatch.setattr(sys, "argv", ["generate", f"{flag}=~/x"])
    with pytest.raises(SystemExit, match="3"):
        command_line.entry(main)
    said = capsys.readouterr().err
    assert said.startswith("error: no memory left ('RESOURCE_EXHAUSTED: Out of memory")
    assert "lower sampler.rows" in said and said.count("\n") == 1


def test_an_error_of_the_runtime_is_no_refusal(capsys, monkeypatch):
    # As if a file of the package had called the program.
    place = pathlib.Path(command_line.__file__).with_name("x.py")
    lost = compile("raise ValueError('UNKNOWN: Gloo failed')", place, "exec")
    monkeypatch.setattr(sys, "argv", ["generate"])
    with pytest.raises(ValueError, match="Gloo"):
        command_line.entry(types.FunctionType(lost, {}))
    assert not capsys.readouterr().err


def test_threads_of_a_save_that_failed_keep_nobody(monkeypatch):
    """They wait for minutes, and Python for them."""
    done, ended = threading.Event(), queue.Queue()
    waiting = type("Waiting", (threading.Thread,), {"__module__": "orbax.futures"})
    monkeypatch.setattr(exits, "GRACE_S", 0.0)
    monkeypatch.setattr(exits.os, "_exit", ended.put)
    with pytest.raises(SystemExit, match="3"):
        exits.leave()
    assert ended.empty()
    thread = waiting(target=done.wait)
    thread.start()
    try:
        with pytest.raises(SystemExit, match="3"):
            exits.leave()
        assert ended.get(timeout=60) == exits.STUCK
    finally:
        done.set()
        thread.join()


HELD = """
import signal, sys, threading
from dllm_jax import exits
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the shell of a script leaves it for `&`
exits.GRACE_S = 0.0
exits.at_end.append(lambda code, line: print(code, line, flush=True))
held = threading.Event()
if sys.argv[1] == "thread":  # Python waits for it
    threading.Thread(target=held.wait).start()
else:  # the main thread is in C, and Python's handler waits for it
    exits.StopSignal.note = lambda *args: None
exits.StopSignal()
print("listens", flush=True)
held.wait()
"""


@pytest.mark.parametrize("where", ["thread", "main"])
def test_a_second_signal_ends_a_run_whatever_it_is_at(where):
    """A grader may wait for its judge, and a collective operation for who does not come."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HELD, where]
    run = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        assert run.stdout.readline() == "listens\n"
        run.send_signal(signal.SIGHUP)  # as a terminal's end does, which ends no run
        run.send_signal(signal.SIGINT)
        said = [run.stderr.readline() for _ in range(2)]
        assert said[1].startswith("SIGINT: stops when what it is at is whole; another")
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == exits.STOPPED, err
    if where == "main":
        assert err.endswith("a second time\n"), err
        assert out == "75 stopped: it was told to stop a second time\n"


def test_a_command_that_cleans_is_stopped_as_by_ctrl_c():
    """It ended where it was, and what it had half written stayed."""
    code = """
import time
from dllm_jax import command_line

def main():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaned", flush=True)

command_line.entry(main, cleans=True)
"""
    pipe = subprocess.PIPE
    run = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe)
    assert run.stdout.readline() == b"begun\n"
    run.send_signal(signal.SIGTERM)
    assert run.communicate(timeout=60) == (b"cleaned\n", b"stopped by a signal\n")
    assert run.returncode == exits.STOPPED


def test_a_command_that_one_signal_stops_waits_for_no_thread(capsys, monkeypatch):
    ended = queue.Queue()
    monkeypatch.setattr(exits, "GRACE_S", 0.0)
    monkeypatch.setattr(exits.os, "_exit", ended.put)
    monkeypatch.setattr(sys, "argv", ["train"])

    def main():
        raise exits.Stopped("after step 3")

    with pytest.raises(SystemExit, match="75"):
        command_line.entry(main)
    assert ended.get(timeout=60) == exits.STOPPED
    assert capsys.readouterr().err == "stopped after step 3\n"


def test_an_interrupt_is_one_line_in_every_command(capsys, monkeypatch):
    """Also where nothing waits for signals, as in a download."""

    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["data"])
    with pytest.raises(SystemExit, match="75"):
        command_line.entry(main)
    assert capsys.readouterr().err == "stopped by a signal\n"


STOPPED = 75, "", "stopped by a signal\n"
LISTENS = """
from dllm_jax import command_line
command_line.entry(lambda: print(signal.getsignal(2) is signal.default_int_handler))
"""


@pytest.mark.parametrize(
    "code, ends",
    [("os.kill(os.getpid(), 2)", STOPPED), (LISTENS, (0, "True\n", ""))],
)
def test_a_command_that_imports_is_stopped_in_a_line(code, ends):
    begun = "import os, signal, sys\nsys.argv = ['-m']\n"
    # As a terminal has it: a shell's background lets interrupts be ignored.
    begun += "signal.signal(2, signal.default_int_handler)\nimport dllm_jax\n"
    told = subprocess.run(
        [sys.executable, "-c", begun + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stdout, told.stderr) == ends


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_no_device_is_one_line_and_a_defect_a_traceback(capsys, monkeypatch, error):
    def main():
        raise error

    monkeypatch.setattr(sys, "argv", ["generate"])
    with pytest.raises(error):
        command_line.entry(main)
    monkeypatch.setattr(jax, "devices", main)
    with pytest.raises(SystemExit, match="2"):
        command_line.entry(main)
    assert capsys.readouterr().err == (
        "error: JAX finds no device here of JAX_PLATFORMS='cpu': unset it, or install what "
        "drives one: make install EXTRAS=cuda, or tpu\n"
    )


def test_numbers_of_64_bits_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate"])
    with jax.enable_x64(True), pytest.raises(SystemExit, match="2"):
        command_line.entry(lambda: None)
    assert "error: JAX_ENABLE_X64 is set" in capsys.readouterr().err


def test_numbers_that_may_not_meet_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate"])
    with jax.numpy_dtype_promotion("strict"), pytest.raises(SystemExit, match="2"):
        command_line.entry(lambda: None)
    assert "error: JAX_NUMPY_DTYPE_PROMOTION=strict" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_is_none(capsys, tmp_path):
    kept = jax.config.jax_compilation_cache_dir
    file = tmp_path / "file"
    file.touch()
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        compiler.keep_compiled(str(file))
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    assert capsys.readouterr().err == (
        f"warning: run.compile_cache={file}: File exists; no program is kept\n"
    )


def test_a_program_that_was_cut_in_the_cache_is_made_anew_once(tmp_path):
    program = """if True:
        import sys, jax
        from dllm_jax import compiler

        def cut(x):
            return x + 1

        compiler.keep_compiled(sys.argv[1])
        print(jax.jit(cut)(1))
    """

    def run() -> str:
        env = {k: x for k, x in os.environ.items() if "COMPILATION_CACHE" not in k}
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == "2\n"
        return done.stderr

    assert run() == ""
    (file,) = tmp_path.glob("jit_cut-*-cache")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    told = run()
    assert told.count("\n") == 1
    assert f"run.compile_cache={tmp_path}: jit_cut was damaged: it is made" in told
    assert len(file.read_bytes()) > 100 and run() == ""


@pytest.mark.parametrize("error", ["PermissionError: no", "Denied: no"])
def test_a_program_that_cannot_be_taken_out_of_the_cache_is_told_as_jax_does(
    error, tmp_path, monkeypatch
):
    """What cannot be read may be whole, and a folder may be somebody else's."""
    (tmp_path / "jit_f-1-cache").touch()
    if "Denied" in error:
        refused = mock.Mock(side_effect=PermissionError)
        monkeypatch.setattr(pathlib.Path, "unlink", refused)
    said = []
    text = f"Error reading persistent compilation cache entry for 'jit_f': {error}"
    compiler.forget_damaged(tmp_path, lambda *x: said.append(x), text, UserWarning)
    assert said == [(text, UserWarning)] and (tmp_path / "jit_f-1-cache").exists()


def test_garbage_waits_until_a_command_begins(monkeypatch):
    """What it imports is not looked through; a script that imports the package is as ever."""
    program = "import gc, sys; sys.argv = sys.argv[1:]; import dllm_jax; print(gc.isenabled())"
    found = [
        subprocess.run(
            [sys.executable, "-c", program, first], stdout=subprocess.PIPE, check=True
        ).stdout.strip()
        for first in ("-m", "script.py")
    ]
    assert found == [b"False", b"True"]
    seen = []
    monkeypatch.setattr(sys, "argv", ["data"])
    try:
        gc.disable()
        command_line.entry(lambda: seen.append(gc.isenabled()))
        assert seen == [True] and gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_defect_of_xla_keeps_its_traceback(monkeypatch):
    def main():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(sys, "argv", ["generate"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        command_line.entry(main)


@pytest.mark.parametrize("text", ["a line", "many lines" * 10_000])
def test_who_reads_no_more_ends_a_command(monkeypatch, text):
    """As `| head -1` does: where it prints, or at its end."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "argv", ["command"])
        command_line.entry(lambda: print(text))
        print("nobody hears this", flush=True)
        nowhere = os.fstat(pipe.fileno()), os.stat(os.devnull)
        assert os.path.samestat(*nowhere)


def test_a_pipe_of_its_own_that_breaks_is_a_defect(monkeypatch):
    def main():
        raise BrokenPipeError

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(BrokenPipeError):
        command_line.entry(main)


@pytest.mark.skipif(sys.platform != "linux", reason="it has no /dev/full")
@pytest.mark.parametrize("asked", [(), ("--help",)])
@pytest.mark.parametrize("buffering", [1, -1])
def test_an_output_without_room_is_one_line(monkeypatch, capsys, buffering, asked):
    """Where it prints, or at its end; nothing is left that Python would write again."""
    with open("/dev/full", "w", buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["command", *asked])
        monkeypatch.setattr(exits, "leave", lambda: sys.exit(exits.STUCK))
        with pytest.raises(SystemExit, match=str(exits.STUCK)):
            command_line.entry(lambda: print("a line"), "help")
    assert capsys.readouterr().err == (
        "error: what it prints or writes: No space left on device\n"
    )


def test_who_is_stopped_at_once_says_so_last(monkeypatch, capsys):
    def main():
        raise exits.StoppedAtOnce(exits.STOPPED)

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit, match=str(exits.STOPPED)):
        command_line.entry(main)
    assert capsys.readouterr().err == f"stopped: {exits.TWICE}\n"


def test_a_full_disk_is_known_by_its_number_whatever_a_library_says():
    """PyArrow has its own words in place of the system's."""
    full = pytest.raises(exits.CannotGoOn, match="^a: writing. Detail: no space$")
    with full, command_line.reachable():
        raise OSError(28, "writing. Detail: no space", "a")


def test_a_closed_output_is_none_to_fail_by(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(sys, "stdout", None)  # as >&- leaves it
    command_line.entry(lambda: sys.stdout.write("nobody hears this"))
    assert sys.stdout.name == os.devnull
    sys.stdout.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_output_cannot_spell_ends_no_command(monkeypatch, encoding):
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding)
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(sys, "stdout", out)
    command_line.entry(lambda: print("✓ é"))
    spelled = {"ascii": r"\u2713 \xe9", "latin-1": r"\u2713 é", "utf-8": "✓ é"}
    assert written.getvalue() == f"{spelled[encoding]}\n".encode(encoding)


def test_what_draws_needs_no_backend_of_a_notebook(monkeypatch):
    code = "import matplotlib.pyplot; print(matplotlib.get_backend())"
    run = [sys.executable, "-c", code]
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setenv("MPLBACKEND", "module://of_a_notebook.that_is_not_here")
    command_line.entry(lambda: None)
    assert subprocess.check_output(run, text=True) == "agg\n"


def unequal():
    rewards.by_gold(rewards.choice).grade(
        ["A", "B"], [data.Problem([2], "?", "A")], None
    )


@pytest.mark.parametrize(
    "defect, said",
    [
        (lambda: int("defect"), "invalid literal"),
        (unequal, "zip.. argument 2 is shorter"),  # under a line of this package
        (lambda: json.loads("{"), "Expecting property name"),  # a library raises it
        (lambda: np.random.default_rng(0).integers(5, 2), "low >= high"),  # of no .py
    ],
)
def test_defects_keep_their_traceback(defect, said):
    with pytest.raises(ValueError, match=said):
        try:
            defect()
        except ValueError as error:
            assert exits.code_of(error) == 1
            command_line.fail(error)


@pytest.mark.parametrize(
    ("rows", "devices", "becomes"), [(8, 16, 16), (8, 6, 12), (1, 8, 8), (8, 4, None)]
)
def test_rows_of_a_microbatch_are_shared_by_all_devices(rows, devices, becomes):
    cfg = dataclasses.replace(
        config.Config(), sampler=SamplerConfig(block=4), batch=BatchConfig(rows=rows)
    )
    lines = config.warnings(cfg, ModelConfig(), devices)
    if becomes is None:
        assert not lines
    else:
        assert len(lines) == 1
        assert lines[0].startswith(f"batch.rows={rows} becomes {becomes}, of 0 slots")
    assert config.shared_batch(cfg, ModelConfig(), devices).rows == (becomes or rows)


@pytest.mark.parametrize(
    ("warmup", "updates", "told"), [(0, 0, 0), (0, 5, 0), (4, 5, 0), (5, 5, 1)]
)
def test_a_warmup_that_outlasts_the_run_is_told(warmup, updates, told):
    plan = learner.Plan(("policy",), OptimConfig(warmup=warmup), updates)
    lines = begin.endless_warmups({"policy": plan})
    start = f"warning: policy_optim.warmup={warmup}: the run has {updates} updates"
    assert [line.startswith(start) for line in lines] == [True] * told


def test_what_training_does_not_read_is_told():
    asked = config.EvalConfig(by="level", sweep="sampler.threshold=0.5,0.9")
    cfg = dataclasses.replace(config.Config(), eval=asked)
    lines = config.warnings(cfg, ModelConfig(), devices=1)
    told = "warning: eval.{} is read by python -m dllm_jax.eval alone"
    assert lines == [told.format("sweep"), told.format("by")]


UNPULLED = {
    "rl__value": "none",
    "noise__kind": "subset",
    "objective__loss": "stable",
    "objective__aggregate": "elbo_answer",
    "objective__beta": 0.0,
}
DIPO = {"rl__value": "none", "objective__loss": "dipo", "objective__beta": 0.0}
CHUNKS = {"reward__judge__at": "http://localhost/v1", "reward__split": "marks"}


@pytest.mark.parametrize(
    ("leaves", "line"),
    [
        ({"eval__answers": 4}, "eval.answers=4: with eval.temperature=0 all answers"),
        ({"eval__answers": 4, "eval__temperature": 0.5}, ""),
        ({"eval__answers": 4, "sampler__rank_temperature": 1.0}, ""),
        ({"eval__answers": 4, "data__heldout": ""}, ""),
        (
            {"reward__judge__at": "http://localhost/v1"},
            "reward.judge.at='http://localhost/v1' is not read, as rl.reward names no judge",
        ),
        ({"reward__judge__at": "http://localhost/v1", "rl__reward": "judge"}, ""),
        (CHUNKS, ""),
        (
            {"reward__model": "folder"},
            "reward.model='folder' is not read, as rl.reward",
        ),
        ({"reward__model": "folder", "rl__reward": "math:0,reward_model"}, ""),
        ({"policy_optim__final": 0.1}, "policy_optim.final=0.1 is not read, as policy"),
        ({"policy_optim__final": 0.1, "policy_optim__schedule": "cosine"}, ""),
        (
            {"noise__lower": 0.2},
            "noise.lower=0.2 is not read, as noise.kind is 'trace'",
        ),
        (
            {"noise__lower": 0.2, "noise__kind": "bernoulli", "rl__value": "none"},
            "",
        ),
        (
            {"noise__upper": 0.7},
            "noise.upper=0.7 is not read, as noise.kind is 'trace'",
        ),
        (
            {"rl__filter": "varied", "rl__min_solved": 0.1},
            "rl.min_solved=0.1 is not read",
        ),
        (
            {"rl__updates": 2, "rl__answers_per_update": 8},
            "rl.updates=2 is not read, as rl.answers_per_update is 8",
        ),
        ({"reward__chunk": 8}, "reward.chunk=8 is not read, as reward.split is 'none'"),
        ({"rl__gamma": 0.9, "rl__value": "none"}, "rl.gamma=0.9 is not read, as rl.va"),
        ({"rl__gamma": 0.9}, ""),
        (
            CHUNKS | {"rl__speed": 1.0, "rl__outcome": 0.0},
            "rl.speed=1.0 is not read, as",
        ),
        (CHUNKS | {"rl__speed": 1.0}, ""),
        (
            CHUNKS | {"rl__truncated": "soft", "rl__outcome": 0.0},
            "rl.truncated='soft' is not read, as rl.outcome is 0.0",
        ),
        (CHUNKS | {"rl__truncated": "soft"}, ""),
        (CHUNKS | {"rl__truncated": "mask", "rl__outcome": 0.0}, ""),
        ({"rl__gamma": 0.9, "rl__value": "none", "rl__reward": "own:keyed"}, ""),
        (
            {"objective__value_weight": 2.0, "rl__value": "own"},
            "objective.value_weight",
        ),
        ({"sampler__entropy_bound": 0.5}, "sampler.entropy_bound=0.5 is not read"),
        (
            {"sampler__strategy": "sequential", "sampler__target": "margin"},
            "sampler.target='margin' is not read, as sampler.strategy is 'sequential'",
        ),
        (
            {"sampler__strategy": "static", "sampler__tempered_threshold": True},
            "sampler.tempered_threshold=True is not read, as sampler.strategy is 'static'",
        ),
        ({"sampler__strategy": "static", "sampler__target": "margin"}, ""),
        (
            DIPO | {"objective__clip": 0.1},
            "objective.clip=0.1 is not read, as objective.loss is 'dipo'",
        ),
        (DIPO | {"objective__clip": 0.1, "rl__value": "own"}, ""),
        (
            DIPO | {"objective__kl": "k2"},
            "objective.kl='k2' is not read, as objective.reference_beta is 0",
        ),
        (DIPO | {"objective__kl": "k2", "objective__reference_beta": 0.1}, ""),
        (
            UNPULLED | {"objective__kl": "k2"},
            "objective.kl='k2' is not read, as objective.loss is 'stable'",
        ),
        ({"objective__kl": "k2"}, ""),
        (
            {
                "sampler__entropy_bound": 0.5,
                "eval__samplers": "a:strategy=entropy_bounded",
            },
            "",
        ),
    ],
)
def test_values_that_change_nothing_are_told(leaves, line):
    cfg = config.freeze(changed(**{"data__heldout": "a.jsonl", **leaves}))
    told = config.warnings(cfg, ModelConfig(), devices=1)
    assert len(told) == bool(line)
    assert not line or told[0].startswith(f"warning: {line}")
    # Of these an evaluation reads what follows.
    asked = [x for x in told if x.startswith(("warning: sampler.", "warning: eval."))]
    assert compatible.unasked(cfg) == asked


@pytest.mark.parametrize(
    ("targets", "becomes"),
    [
        ((), ()),
        (("wq", "wv"), ("wq", "wv")),
        (("wq,wv",), ("wq", "wv")),  # as a command line has it
        ((" wq, wv,",), ("wq", "wv")),
        (("",), ()),
    ],
)
def test_targets_of_lora_may_stand_in_one_text(targets, becomes):
    model = config.ModelArgs(lora_rank=2, lora_targets=targets)
    assert model.lora.targets == becomes


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("heldout_accuracy", True),
        ("heldout_b_accuracy", True),
        ("heldout_b_one_response_length", True),
        ("heldout_one_pass@2", True),
        ("heldout_a_accuracy", False),  # the first file has no name
        ("heldout_acuracy", False),
        ("heldout_pass@3", False),
        ("heldout_two_accuracy", False),
    ],
)
def test_the_best_is_of_what_evaluations_tell(name, known):
    leaves = {"data__heldout": "x/a.jsonl, x/b.jsonl.gz", "eval__answers": 2}
    leaves |= {"eval__samplers": "one:strategy=static", "run__keep_best": name}
    if known:
        assert config.freeze(changed(**leaves))
        return
    says = (
        f"run.keep_best='{name}' is no metric of the .* choose from heldout_accuracy, "
    )
    with pytest.raises(ValueError, match=says):
        config.freeze(changed(**leaves))


@pytest.mark.parametrize(
    ("words", "method", "keys"),
    [
        (
            "--config.rl.steps=3 -config.rl.group 4 --config.seed=1",
            "sft",
            "steps group",
        ),
        ("--noconfig.rl.whiten --config.value_optim.lr=1", "dpo", "whiten lr"),
        ("--config.rl.reward=code --config.rl.truncated=graded", "sft", ""),
        ("--config.sft.steps=3 --config.rl.steps=3", "rl", "steps"),
        ("--config.objective.clip=0.1 --config.objective.kl=k2", "sft", "clip kl"),
        ("--config.objective.loss=dipo", "dpo", "loss"),
        ("--config.objective.reference_beta=0.1", "dpo", ""),
        ("--config.objective.beta=0.1 --config.objective.kl=k2", "rl", ""),
    ],
)
def test_keys_of_another_method_are_told(words, method, keys):
    lines = command_line.of_other_methods(["train", *words.split()], method)
    assert len(lines) == len(keys.split())
    for line, key in zip(lines, keys.split(), strict=True):
        assert re.match(
            rf"--config\.(rl|sft|value_optim|objective)\.{key} is not read with", line
        )


def test_the_beta_of_dpo_is_named():
    line = "--config.objective.beta=0.1"
    (told,) = command_line.of_other_methods(["train", line], "dpo")
    assert told.endswith("objective.reference_beta for its beta")
    (told,) = command_line.of_other_methods(["train", line], "sft")
    assert told.endswith("whose keys are sft.*")


@pytest.mark.parametrize(
    ("tokens", "platform", "rows"),
    [(1024, "cpu", 2), (1023, "cpu", 8), (1024, "tpu", 8), (1024, "gpu", 8)],
)
def test_a_cpu_computes_wide_rows_one_at_a_time(monkeypatch, tokens, platform, rows):
    monkeypatch.setattr(choice, "platform", lambda: platform)
    batch = BatchConfig(rows=8, tokens=tokens)
    sampler = SamplerConfig(block=4, max_new=256)
    cfg = dataclasses.replace(config.Config(), sampler=sampler, batch=batch)
    lines = config.warnings(cfg, ModelConfig(), devices=2)
    shared = config.shared_batch(cfg, ModelConfig(), devices=2)
    assert shared == BatchConfig(rows=rows, tokens=tokens)
    told = "batch.rows=8 becomes 2, of 1024 slots each: a CPU is as fast"
    assert [line.startswith(told) for line in lines] == [True] * (rows != 8)


@pytest.mark.parametrize(
    ("attention", "lengths", "devices", "becomes"),
    [
        ("block", (784, 2000, 4), 8, 8192),
        ("block", (784, 2000, 4), 9, 4608),  # 5/3 of 2,784 slots are 4,640
        ("block", (784, 2000, 4), 64, 4608),
        ("block", (64, 64, 64), 64, 256),  # a canvas and a noised block of it
        ("block", (2000, 4000, 4), 64, 8192),
        ("full", (784, 2000, 4), 64, 8192),
    ],
)
def test_rows_are_narrower_where_more_devices_than_rows_share_them(
    attention, lengths, devices, becomes
):
    prompt, answer, block = lengths
    cfg = dataclasses.replace(
        config.Config(),
        sampler=SamplerConfig(block=block, max_prompt=prompt, max_new=answer),
        batch=BatchConfig(rows=8, tokens=8192),
    )
    model = ModelConfig(attention=attention, block=block)
    assert config.shared_batch(cfg, model, devices).tokens == becomes


PAIRS = {
    "method": "dpo",
    "noise.kind": "subset",
    "objective.aggregate": "elbo",
    "objective.reference_beta": 0.2,
}
STABLE = {
    "rl.value": "none",
    "objective.loss": "stable",
    "noise.kind": "subset",
    "objective.aggregate": "elbo_answer",
}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (
            {"rl.epochs": 2, "objective.loss": "dipo"},
            "rl.epochs=2: objective.loss='dipo'",
        ),
        (
            {
                "rl.target_kl": 0.1,
                "rl.value": "none",
                "objective.loss": "sequence",
                "objective.aggregate": "sequence",
            },
            "rl.target_kl=0.1: objective.loss='sequence' tells no KL",
        ),
        (
            {
                "rl.value": "none",
                "objective.loss": "sequence",
                "objective.aggregate": "sequence",
                "objective.reference_beta": 0.1,
                "objective.reference_beta_final": 0.0,
            },
            "objective.reference_beta_final=0.0: the weight stays",
        ),
        (
            {"rl.value_path": "x", "model.lora_rank": 4},
            "rl.value_path: with model.lora",
        ),
        ({"run.export_value": True, "rl.value": "head"}, "run.export_value: there is"),
        ({"run.keep_best": "heldout_accuracy"}, "set data.heldout"),
        ({"rl.value": "trace", "rl.value_warmup": 1}, "rl.value_warmup=1: needs"),
        ({"rl.value": "none", "rl.value_all": True}, "rl.value_all=True: needs"),
        ({"eval.samplers": "a:block=8"}, "eval.samplers='a:block=8': they answer held"),
        ({"eval.samplers": "a"}, "eval.samplers: 'a': a name of small letters"),
        ({"rl.reference_reset": 5}, "rl.reference_reset=5: it needs method='rl', a"),
        (
            {
                "rl.reference_reset": 5,
                "objective.reference_beta": 0.1,
                "model.lora_rank": 4,
            },
            "rl.reference_reset=5: it needs",
        ),
        ({"rl.value": "head", "value_optim.b1": 0.8}, "value_optim.b1=0.8: with rl.v"),
        ({"noise.block": 6, "sampler.block": 4}, "noise.block=6: a trace's steps lie"),
        (
            {"noise.block": 8, "sampler.block": 4, "rl.trusted_gap": 0.1},
            "noise.block=8: rl.trusted_gap is of tokens in the sampler's blocks, of 4",
        ),
        (
            {
                "noise.block": 8,
                "sampler.block": 4,
                "rl.trusted_gap": 0.0,
                "objective.likelihood": "selection",
            },
            "set objective.likelihood='tokens', or noise.block=0",
        ),
        (
            {"rl.value": "trace", "noise.kind": "bernoulli", "rl.trusted_gap": 0.0},
            "a value model would see the future",
        ),
        (
            {"rl.value": "trace", "noise.kind": "left_to_right"},
            "a value model would see the future",
        ),
        (
            {
                "objective.likelihood": "selection",
                "sampler.guidance": 1.0,
                "sampler.blank": (1,),
                "noise.guided": False,
            },
            "noise.guided=False scores another distribution",
        ),
        (
            {"method": "sft", "objective.reference_beta": 0.1},
            "objective.reference_beta=0.1: no reference pulls with method='sft'",
        ),
        (
            {**STABLE, "objective.reference_beta": 0.1},
            "no reference pulls with method='rl' and objective.loss='stable'",
        ),
        (
            {
                "rl.value": "own",
                "rl.value_all": True,
                "reward.split": "tokens",
                "reward.judge.at": "http://x/v1",
            },
            "rl.value_all=True: no judge is asked",
        ),
        (
            {**PAIRS, "objective.nll_weight": 0.1},
            "objective.nll_weight=0.1: only method='rl' adds it",
        ),
        (
            {"method": "sft", "objective.entropy_bonus": 0.1},
            "objective.entropy_bonus=0.1: only method='rl' adds it",
        ),
        (
            {"rl.value": "trace", "objective.value_clip": 0.0},
            "objective.value_clip=0.0: no value network learns",
        ),
        ({"noise.pick": "surprise"}, "noise.pick='surprise': no rounds are picked"),
        ({"rl.target_kl": 0.1}, "rl.target_kl=0.1: no update follows"),
        (
            {
                "rl.truncated": "soft",
                "rl.truncated_tail": 9,
                "sampler.max_new": 8,
            },
            "rl.truncated_tail=9: at most sampler.max_new=8",
        ),
    ],
)
def test_levers_that_go_ill_together(tree, says):
    node = config.default()
    for name, value in tree.items():
        *groups, leaf = name.split(".")
        functools.reduce(operator.getitem, groups, node)[leaf] = value
    with pytest.raises(ValueError, match=re.escape(says)):
        config.freeze(node)


@pytest.mark.parametrize(
    "tree",
    [
        {
            "rl.value": "none",
            "objective.loss": "sequence",
            "objective.aggregate": "sequence",
            "objective.clip_high": 0.3,
            "objective.beta": 0.1,
        },
        {**STABLE, "objective.upper_weight": 0.25, "objective.upper_power": 2.0},
    ],
)
def test_levers_that_a_loss_of_answers_reads(tree):
    node = config.default()
    node.update_from_flattened_dict(tree)
    assert config.freeze(node).objective.loss == tree["objective.loss"]


@pytest.mark.parametrize("more", ["rl.epochs", "rl.updates"])
def test_a_target_of_kl_goes_with_more_updates_than_one(more):
    node = config.default()
    node.update_from_flattened_dict({"rl.target_kl": 0.1, more: 2})
    assert config.freeze(node).rl.target_kl == 0.1


@pytest.mark.parametrize(
    "dtype, backend, asked, found",
    [
        ("float32", "gpu", None, "highest"),
        ("float32", "tpu", "tensorfloat32", "tensorfloat32"),
        ("bfloat16", "gpu", None, None),
        ("float32", "cpu", None, None),
    ],
)
def test_float32_is_not_rounded_by_a_chip(monkeypatch, dtype, backend, asked, found):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    name = "jax_default_matmul_precision"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, asked)
        model = ModelConfig(dtype=dtype, kernels="reference")
        config.check_kernels(model, SamplerConfig(), "")
        assert getattr(jax.config, name) == found
    finally:
        jax.config.update(name, before)
