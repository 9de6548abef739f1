"""The benchmarks run, on next to nothing, and what they print makes a table."""

import argparse
import contextlib
import functools
import importlib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from benchmarks import (
    against,
    cost_analysis,
    counted,
    decode,
    fill,
    golds,
    gradient_variance,
    jail,
    kernels,
    methods,
    mutants,
    peer,
    report,
    rl_step,
    roofline,
    sampling,
    topologies,
    train_step,
    unbiased,
)
from benchmarks.shapes import RELEASED
from dllm_jax import config, exits, pallas_kernels
from dllm_jax.models import hf, mask, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.rl.rewards import sandbox

CALLS = {
    "decode": (
        decode,
        (
            "--model=tiny --rows 2 --prompt 16 --new 8 --repeats 1 --waves 2 --group 2 "
            "--prefill 16 --room 0 32"
        ),
    ),
    "kernels": (
        kernels,
        "--small --repeats 1 --only cache_update grouped chunk token_draw queries",
    ),
    "sampling": (
        sampling,
        (
            "--family=LLaDA --rows=1 --block=4 --prompt=8 --new=8 --repeats=1 "
            "--dtype=float32"
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_benchmark_prints_its_rows(name, monkeypatch, capsys):
    module, flags = CALLS[name]
    # The specification of a grouped matmul copies a matrix for every token.
    monkeypatch.setattr(kernels, "SMALL", kernels.SMALL | {"tokens": 64, "vocab": 512})
    monkeypatch.setattr(sys, "argv", [name, *flags.split()])
    module.main()
    text = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in text if line.startswith("{")]
    assert {line["command"] for line in lines} == {
        f"python -m benchmarks.{name} {flags}"
    }
    if name == "decode":
        assert [line["max_new"] for line in lines] == [8, 32]
        assert lines[0]["times_first_room"] == "1.000"
        assert float(lines[1]["times_first_room"]) > 0
        for line in lines:
            assert line["requests"] == 4
            # All gave the same ids, and the engine wastes no forward on a full block.
            assert line["engine_forwards"] < line["batches_forwards"]
            assert 0 < line["busy_rows"] <= 2
    elif name == "sampling":
        assert [line["cache"] for line in lines] == ["none", "prefix", "dual"]
        assert lines[0]["times_faster"] == 1
        assert float(lines[0]["gap_max"]) < 1e-4  # exact, but for rounding
    else:
        ops = "cache_update", "token_draw", "grouped_matmul", *["chunk_attention"] * 2
        assert [line["op"] for line in lines] == [*ops, *["token_draw"] * 2, "queries"]
        for line in lines:  # what is off, or fails, is not timed
            ways = {key[:-4] for key in line if key.endswith("_off")}
            assert {key[:-3] for key in line if key.endswith("_ms")} == ways
            assert not [key for key in line if key.endswith("_failed")]
    table = report.tables(lines)
    assert f"## {name}, cpu" in table and "Not measured on a GPU" in table


def test_steady_rows_are_told_by_the_second_half_of_their_answers():
    args = types.SimpleNamespace(seed=0, steady=True, prompt=5, new=8)
    prompts, new = decode.requests(3, args, decode.SHAPES["tiny"])
    assert [len(prompt) for prompt in prompts] == [5] * 3 and list(new) == [8] * 3
    whole = {0: [1, 2, 3, 4], 1: [5, 6]}, decode.Work(10, 4, 20), 3.0
    half = {0: [1, 2], 1: [5]}, decode.Work(4, 1, 9), 1.0
    rest = {0: [3, 4], 1: [6]}, decode.Work(6, 3, 11), 2.0
    assert decode.second_half(whole, half) == rest


def test_attention_is_timed_with_and_without_turns():
    """Two programs, of which the first has the barrier at which warpgroups meet."""
    q, k, v = (
        jax.ShapeDtypeStruct((1, 512, heads, 128), "bfloat16") for heads in (16, 8, 8)
    )
    seen = kernels.masks(512)["causal"]

    def run(q, k, v):
        return pallas_kernels.attention(q, k, v, seen, implementation="gpu")

    arrivals = [
        str(jax.make_jaxpr(f)(q, k, v)).count("barrier_arrive")
        for f in (run, kernels.out_of_turn(run), run)
    ]
    assert arrivals[0] == arrivals[2] > arrivals[1] == 1  # of a buffer that is free


def test_rows_of_a_batch_wait_for_each_other_at_every_block():
    trace = types.SimpleNamespace(
        step_BT=np.array(
            [
                [0, 1, 2, 3, 3, FAR],  # two steps, one, and none: it has ended
                [0, 0, 1, 1, 4, 2],  # one step, then three
            ]
        ),
        prompt_len_B=np.array([1, 2]),
    )
    assert decode.together(trace, 2) == 2 + 3


# ---- Kernels, counted ----------------------------------------------------------------


def cases(platform: str):
    """Returns the cases of small arrays that are not there, by op and end of their shape."""

    def struct(key, shape, dtype, deviation=1.0):
        return jax.ShapeDtypeStruct(shape, dtype)

    model = RELEASED["sdar-1.7b"]
    scale = kernels.Scale(kernels.SMALL, model, jnp.dtype("bfloat16"), platform, struct)
    every = [case for of_ops in kernels.CASES for case in of_ops(scale)]
    return {(case.op, case.shape.split()[-1]): case for case in every}


def test_what_a_mask_lets_see_is_counted_pair_by_pair_and_tile_by_tile():
    slots = jnp.arange(512)[None]
    causal = mask.causal(slots)
    assert counted.pairs(causal) == 512 * 513 // 2
    # Of 4 x 2 tiles of 128 x 256, 6 hold something, and 10 of their 12 halves.
    keys, computed = counted.visited(causal, 128, 256, 128)
    assert (keys, computed) == (6 * 256 / 4, 10 / 12)
    # models/mask.py's picture of packed rows, whose crosses are these
    begin, end = [0] * 8 + [8], [2, 2, 4, 4, 2, 2, 2, 2, 8]
    group = [-1] * 4 + [0, 0, 1, 1, -1]
    packed = mask.packed(*(jnp.asarray([x]) for x in (begin, end, group)))
    assert counted.pairs(packed) == 2 * 2 + 2 * 4 + 4 * 4
    assert counted.visited(packed, 128, 128, 128) == (128 * 128 / 9, 1.0)


KERNELS_OF = [  # an op, its shape's end, a kernel, and its products of those that are needed
    ("attention", "causal", "forward_kernel", 1.5),
    ("attention", "packed", "forward_kernel", 12),
    ("attention", "causal", "attention", 1.3),
    ("attention", "causal", "splash_mqa_fwd_residuals", 2),
    ("paged_attention", "positions", "paged_attention", 1.2),
    ("paged_attention", "positions", "ragged_paged_attention_kernel", 24),
    ("token_logprob", "ids", "pick_kernel", 1),
    ("token_draw", "ids", "token_draw", 1),
    ("grouped_matmul", "groups", "grouped_matmul", 1),
    ("grouped_matmul", "groups", "body", 1),
]


@pytest.mark.parametrize(("op", "end", "kernel", "most"), KERNELS_OF)
def test_a_kernel_does_what_its_op_needs_and_little_more(op, end, kernel, most):
    case = cases("gpu")[op, end]
    alone = cost_analysis.Counted(kernels={kernel: 1})
    found, needed = counted.with_kernels(alone, case), counted.least(case)
    assert needed.flops <= found.flops <= most * needed.flops
    numbers = counted.figures(found, alone, needed, "h200:1")
    assert numbers["times_least"] >= 0.99 and numbers["around_kernels_mib"] == 0


def test_the_head_is_read_again_for_every_tile_of_rows():
    case = cases("tpu")["token_logprob", "ids"]
    tall = jax.ShapeDtypeStruct((1, 2048, 2048), jnp.bfloat16)
    case = case._replace(inputs=(tall, *case.inputs[1:]))
    found = counted.with_kernels(
        cost_analysis.Counted(kernels={"pick_kernel": 1}), case
    )
    assert found.read == 2 * (4 * 2048 * 4096 + 2048 * 2048)


@pytest.mark.parametrize("group, calls", [(4, 1), (8, 2)])
def test_calls_for_shares_of_the_queries_multiply_what_one_for_all_would(group, calls):
    sizes = ModelConfig(heads=group, kv_heads=1, head_dim=128)
    known = {"seats": 0, "held": 0, "context": 0, "windows": 1, "keys": 1024.0}
    facts = roofline.facts(sizes, 1, rows=1, width=4608, **known)
    flops = roofline.KERNELS["backward_kernel"](facts).flops
    assert calls * flops == 10 * 4608 * 1024 * roofline.COMPUTED * group * 128


def test_what_is_not_counted_has_no_time():
    needed = cost_analysis.Counted(flops=1e12, read=1e9)
    row = counted.figures(
        cost_analysis.Counted(read=1e9), cost_analysis.Counted(), needed, "v5p:2x2x1"
    )
    assert "us" not in row and "not all is counted" in row["says"]


def test_what_needs_no_products_is_told_by_its_bytes():
    needed = counted.least(cases("tpu")["cache_update", "positions"])
    assert needed == cost_analysis.Counted(
        read=4 * 4 * 8 * 128 * 4, written=4 * 4 * 8 * 128 * 4
    )


# ---- Two checkouts -------------------------------------------------------------------


@pytest.mark.parametrize("script, commands", [("all_gpu.sh", 7), ("all_tpu.sh", 8)])
def test_all_that_is_timed_on_a_chip_ends_within_ten_minutes(script, commands):
    folder = pathlib.Path(__file__).parents[1] / "benchmarks"
    limits = r"^ *(?:bench|one_step) (\d+)", r"if ! bench (\d+) selfchecks"
    seconds = re.findall(limits[0], (folder / script).read_text(), re.MULTILINE)
    seconds += re.findall(limits[1], (folder / "bench.sh").read_text())
    assert len(seconds) == commands
    assert sum(map(int, seconds)) < 600


def test_a_step_of_random_weights_has_a_checkpoint(tmp_path):
    home = pathlib.Path(rl_step.written("tiny", str(tmp_path)))
    model, shape = hf.read_config(home), decode.SHAPES["tiny"]
    hf.check(home, model)
    for name in ("d_model", "layers", "heads", "kv_heads", "head_dim", "ffw", "tied"):
        assert getattr(model, name) == getattr(shape, name)


def test_two_checkouts_are_compared_line_by_line():
    def lines(seconds, rate):
        return [
            {"model": "tiny", "rows": 4, "seconds": seconds, "tokens_per_second": rate}
        ]

    rounds = [
        (lines(1.0, 30.0), lines(2.0, 10.0)),
        (lines(2.0, 20.0), lines(8.0, 10.0)),
    ]
    seconds, rate = against.compared(rounds)
    assert seconds["line"] == "tiny 4" and seconds["times_faster"] == 3.0
    assert (seconds["here"], seconds["there"]) == ("1 / 1.5 / 2", "2 / 5 / 8")
    assert rate["times_faster"] == 2.5


def test_rooms_are_compared_turn_by_turn():
    """A turn that is slow for both says the same of them; by hand."""
    assert decode.compared([2.0, 8.0, 3.0], [1.0, 4.0, 1.5]) == "2.000 (2.000 to 2.000)"
    told = decode.compared([1.0, 4.0], [2.0, 2.0])
    assert told == "1.000 (0.500 to 2.000)"


# ---- The variance of a gradient ------------------------------------------------------


def gradients(mean: float, std: float, count: int, size=50, seed=0):
    """Returns the products [count, count] of gradients that are drawn around a mean."""
    draws = np.random.default_rng(seed).normal(mean, std, (count, size))
    return draws @ draws.T


def test_the_spread_of_gradients_is_unbiased():
    found = [
        gradient_variance.spread(gradients(0.3, 2.0, 6, seed=s)) for s in range(400)
    ]
    variance, signal = np.mean(found, axis=0)
    assert variance == pytest.approx(50 * 4.0, rel=0.03)
    # |E g|^2, not |mean g|^2, which is larger by a sixth of the variance
    assert signal == pytest.approx(50 * 0.09, abs=1.0)


def test_an_interval_holds_what_it_is_of():
    held = 0
    for seed in range(60):
        gram_ii = gradients(1.0, 1.0, 30, size=200, seed=seed)
        found, half = gradient_variance.interval(
            lambda one_ii: gradient_variance.spread(one_ii)[0], gram_ii
        )
        held += abs(found - 200) < half
    assert 50 <= held <= 60


def test_what_cannot_be_told_is_left_out():
    noise = {
        ("none", 1.0): gradients(0, 1, 8),
        ("trace", 1.0): gradients(0, 2, 8, seed=1),
    }
    *_, row, said = gradient_variance.table(noise, 10)
    assert row.endswith("|  |  |") and "more minibatches" in said
    clear = {
        ("none", 1.0): gradients(9, 1, 8),
        ("trace", 1.0): gradients(9, 2, 8, seed=1),
    }
    *_, first, row = gradient_variance.table(clear, 10)
    assert first.startswith("| none | 1 | 1 | 1 | ")
    ratio = float(row.split("|")[3].split("±")[0])
    assert ratio == pytest.approx(4, rel=0.3)


@pytest.mark.parametrize(("shift", "held"), [(0.0, True), (0.4, False)])
def test_the_square_of_a_mean_is_estimated_without_a_bias(shift, held):
    """Of gradients of 8 numbers, 60 problems; the mean's own square would be 8 / 60 more."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        g_pw = rng.normal(size=(60, 8)) + shift
        found.append(unbiased.squared_mean(g_pw @ g_pw.T, np.ones(60)))
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - 8 * shift**2) < 4 * error < 0.1
    mean, low, high = unbiased.interval(g_pw @ g_pw.T, 200, rng)
    assert low < mean < high and (low < 0 < high) == held


MUTATED = [  # task, solution, its tests, what its one mutant comes to
    ("swap", "def f(x):\n    return x + 1", ["assert f(2) == 3"], "found out"),
    ("even", "def f(x):\n    return x * 2", ["assert f(2) == 4"], "unseen"),
    ("near", "def f(x):\n    return x + 0.1", ["assert abs(f(1) - 1) < 1"], "lenient"),
    (
        "same",
        "def f(x):\n    return abs(x).__sub__(3) if x > 0 else abs(x).__sub__(3)",
        ["assert f(4) == 1"],
        "equivalent",
    ),
]


def test_mutants_that_pass_are_told_by_what_their_tests_see():
    rows = [
        {"task_id": task, "code": source, "test_list": tests, "test_setup_code": ""}
        for task, source, tests, _ in MUTATED
    ]
    told = mutants.found_out(rows, 4)  # of all four, three count
    sandbox.close()
    assert sorted(told.pop("counted")) == ["even", "near", "swap"]
    passed = [task for _, _, _, kind in MUTATED for task, _ in told.get(kind, [])]
    assert passed == ["even", "near", "same"]
    assert sum(map(len, told.values())) == 3


def test_a_mutant_that_a_grader_let_pass_is_the_graders_fault():
    row = {
        "task_id": "wrong",
        "code": "def f(x):\n    return x + 1",
        "test_list": ["assert f(2) == 3"],
        "test_setup_code": "",
    }
    (mutant,) = mutants.mutants(row["code"])
    kind, why = mutants.verdict(row, mutant, generated=3)
    sandbox.close()
    assert (kind, why["tests_differ"], why["accepted"]) == ("missed", 1, False)


def test_methods_are_compared_seed_by_seed():
    base, runs = (
        {seed: {"accuracy": [0.1, x]} for seed, x in enumerate(ends)}
        for ends in ([0.5, 0.6, 0.7], [0.52, 0.61, 0.73])
    )
    # Differences of 2, 1 and 3 points: 2 +- 4.303 / sqrt(3).
    assert methods.beside(runs, base) == "+2.0 [-0.5, 4.5]"
    assert methods.beside({7: runs[2], 1: runs[1]}, base) == "+1.0"


def test_methods_that_have_ended_are_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(methods, "DOCS", tmp_path)
    picture = tmp_path / "images" / "methods.png"
    picture.parent.mkdir()
    methods.draw({})
    assert not picture.exists()
    runs = [{"accuracy": [0.5, after]} for after in (0.7, 0.8, 0.9)]
    np.testing.assert_allclose(methods.ends_of(runs), (0.5, 0.8, 0.1))
    methods.draw({"DAPO": methods.ends_of(runs[:1])})
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("name", methods.NAMES[1])
def test_rows_of_newer_methods_are_configurations(name):
    head, *keys = methods.keys_of(name, pathlib.Path("folder"))
    file, _, preset = head.removeprefix("--config=").partition(":")
    tree = runpy.run_path(str(methods.ROOT / file))["get_config"](preset)
    for key in keys:
        path, _, value = key.removeprefix("--config.").partition("=")
        *groups, leaf = path.split(".")
        node = functools.reduce(lambda node, group: node[group], groups, tree)
        node[leaf] = type(node[leaf])(value)
    cfg = config.freeze(tree)
    assert (cfg.rl.value, cfg.rl.steps) == ("none", methods.STEPS)
    assert cfg.rl.reward == {"arithmetic": "math", "sudoku": "sudoku"}[preset]


# ---- Beside PyTorch ------------------------------------------------------------------


def side(torch, **more):
    """Returns what the smallest shape is measured with; torch: the other side's process."""
    args = types.SimpleNamespace(seed=0, repeats=1, **more)
    params = transformer.init(jax.random.key(0), peer.SHAPES[peer.BUNDLED])
    return peer.Side(peer.BUNDLED, peer.SHAPES[peer.BUNDLED], params, torch, args, "")


@pytest.mark.parametrize(
    ("part", "more", "asked"),
    [
        ("rows", {"rows": [2]}, {"rows": 2, "requests": 6}),
        ("prompts", {"prompts": [16]}, {"rows": 1, "requests": 1}),
    ],
)
def test_both_sides_are_asked_for_the_same(part, more, asked, capsys):
    tasks = []

    def ask(**task):
        tasks.append(task)
        return 2.0

    peer.PARTS[part](side(types.SimpleNamespace(ask=ask), **more))
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(tasks) == 2 and tasks[0] == tasks[1]  # in turns, the first not told
    assert tasks[0]["rows"] == line["rows"] == asked["rows"]
    assert len(tasks[0]["prompts"]) == len(tasks[0]["new"]) == asked["requests"]
    assert line["tokens"] == sum(tasks[0]["new"])
    assert line["pytorch_seconds"] == "2 / 2 / 2"


@pytest.mark.parametrize("name", list(peer.SHAPES))
def test_the_other_sides_model_is_read_as_the_shape(name, tmp_path):
    """As torch_loop makes it."""
    shape = peer.SHAPES[name]
    made = transformers.Qwen3Config(
        **peer.fields_of(shape), block_size=shape.block, mask_token_id=shape.mask_id
    )
    made.save_pretrained(tmp_path)
    found = hf.read_config(tmp_path)
    for field in ("vocab", "d_model", "layers", "heads", "kv_heads", "head_dim", "ffw"):
        assert getattr(found, field) == getattr(shape, field), field
    for field in ("tied", "eos_id", "block", "mask_id"):
        assert getattr(found, field) == getattr(shape, field), field


def test_the_first_answer_is_of_models_of_one_size(monkeypatch, tmp_path, capsys):
    """The bundled model's alone: a larger one of PyTorch's is not set beside it."""
    bundled, same = (
        hf.read_config(pathlib.Path(rl_step.SMALL)),
        peer.SHAPES[peer.BUNDLED],
    )
    for name in ("d_model", "layers", "heads", "kv_heads", "head_dim", "ffw"):
        assert getattr(bundled, name) == getattr(same, name)
    (tmp_path / "python").touch()
    told = []
    monkeypatch.setattr(peer, "Torch", lambda *args: types.SimpleNamespace(close=int))
    monkeypatch.setattr(peer.hf, "load", lambda *args, **more: (same, {}))
    monkeypatch.setattr(peer, "PARTS", {"first": lambda it: told.append(it.name)})
    flags = ["peer", f"--torch={tmp_path}/python", "--shapes"]
    monkeypatch.setattr(sys, "argv", [*flags, "0.6m", "30m"])
    peer.main()
    assert told == ["0.6m"]
    monkeypatch.setattr(sys, "argv", [*flags, "30m", "--parts", "first"])
    with pytest.raises(SystemExit, match="2"):
        peer.main()
    assert "--shapes 0.6m" in capsys.readouterr().err


# ---- Experts, and the host -----------------------------------------------------------


def test_of_experts_those_are_multiplied_that_a_token_goes_to():
    model, work = RELEASED["sdar-30b-a3b"], decode.Work(forwards=10, clean=10, steps=10)
    attention = 2 * 2048 * 128 * (32 + 4)
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768  # the router, and 8 experts
    head = 151936 * 2048
    found = decode.multiplications(model, work)
    norms = 1 + 1e-4
    assert 1 <= found / (2 * 4 * (20 * 48 * layer + 10 * head)) < norms
    # Of 128 experts 8 positions go to 64 at most.
    sizes = roofline.sizes_of(model)
    assert (
        1
        <= decode.weights_read(model, sizes, 8)
        / (48 * (layer + 56 * 3 * 2048 * 768) + head)
        < norms
    )
    every = sizes.stored + sizes.head
    assert decode.weights_read(model, sizes, 16) == every
    assert decode.weights_read(model, sizes, 999) == every
    dense = RELEASED["sdar-8b"]
    sizes = roofline.sizes_of(dense)
    assert decode.weights_read(dense, sizes, 1) == sizes.stored + sizes.head


def test_a_steady_runs_host_work_is_of_the_forwards_that_did_it(monkeypatch, capsys):
    """Half as long a run is watched, which has other forwards than what is told."""
    made = []

    def watched(run):
        made.append(run()[1].forwards)
        return 0.25, 3.0

    monkeypatch.setattr(decode, "host_work", watched)
    flags = "--model=tiny --rows 1 --prompt 8 --new 16 --repeats 1 --steady"
    monkeypatch.setattr(sys, "argv", ["decode", *flags.split()])
    decode.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["host_ms_per_forward"] == round(3000 / made[0], 3)
    assert line["percent_on_host"] == 25


# ---- What is asked wrongly -----------------------------------------------------------

WRONG = [  # a benchmark, its flags, and a part of the one line that says what is wrong
    (against, "HEAD", "name a benchmark"),
    (against, "--rounds=0 HEAD decode", "--rounds: 0 is less than 1"),
    (decode, "--rows 4 0", "--rows: 0 is less than 1"),
    (decode, "--group 0", "--group: 0 is less than 1"),
    (decode, "--steady --new 7", "--new=7: half of it is to be a block of 4"),
    (decode, "--dtype=f32", "invalid choice: 'f32'"),
    (decode, "--seed=-1", "--seed: -1 is less than 0"),
    (decode, "--room -5", "--room: -5 is less than 0"),
    (fill, "--draws 0", "--draws: 0 is less than 1"),
    (golds, "LINE", "record 1 has no answer"),
    (gradient_variance, "--minibatches=2", "--minibatches=2: an interval"),
    (jail, "--every=0", "--every: 0 is less than 1"),
    (jail, "--cheats", "--cheats: name the tasks"),
    (kernels, "--small --only nosuch --repeats 1", "--only nosuch: no op begins so"),
    (kernels, "--counted v9:1", "topology 'v9:1': want CHIP:SHAPE"),
    (mutants, "--count=0 LINE", "--count: 0 is less than 1"),
    (peer, "--torch=/nosuch", "/nosuch is not there"),
    (peer, "--rounds 2 5", "--rounds=5: a block has 4 positions"),
    (peer, "--torch=/bin/sh --parts canvas --rows 9", "canvas has no more than 8"),
    (report, "/nosuch.jsonl", "/nosuch.jsonl"),
    (report, "LINE BROKEN", "broken.jsonl:2: Expecting"),
    (rl_step, "--steps=1", "--steps=1: the first step compiles"),
    (sampling, "--rows 0", "--rows: 0 is less than 1"),
    (topologies, "v9:1", "topology 'v9:1': want CHIP:SHAPE"),
    (train_step, "--trajectories=0", "--trajectories: 0 is less than 1"),
    (train_step, "--steps-per-block=5", "no more rounds than positions"),
    (train_step, "--heads=3", "--heads=3: no multiple of --kv-heads=4"),
    (unbiased, "--problems=1", "--problems=1: gradients of different problems"),
]


@pytest.mark.parametrize(("module", "flags", "says"), WRONG)
def test_what_is_asked_wrongly_is_told_in_a_line(
    module, flags, says, monkeypatch, capsys, tmp_path
):
    (tmp_path / "line.jsonl").write_text('{"question": "7"}\n')
    (tmp_path / "broken.jsonl").write_text('{"benchmark": "it"}\n{"benchmark"\n')
    for word in ("LINE", "BROKEN"):
        flags = flags.replace(word, str(tmp_path / f"{word.lower()}.jsonl"))
    monkeypatch.setattr(sys, "argv", ["it", *flags.split()])
    monkeypatch.setattr(kernels, "TIMED", kernels.TIMED[:1])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_benchmark_that_fails_in_a_checkout_ends_the_comparison(monkeypatch):
    @contextlib.contextmanager
    def checkout(commit, patch):
        yield against.ROOT

    monkeypatch.setattr(against, "checkout", checkout)
    monkeypatch.setattr(sys, "argv", ["against", "HEAD", "nosuch"])
    with pytest.raises(SystemExit, match="benchmarks.nosuch ended with 1"):
        against.main()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("nosuch decode", "no checkout of nosuch"),
        ("--patch=/nosuch HEAD decode", "--patch=/nosuch does not apply to HEAD"),
    ],
)
def test_a_checkout_that_cannot_be_made_ends_in_a_line(
    flags, says, monkeypatch, tmp_path
):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "it"], check=True)
    monkeypatch.setattr(against, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["against", *flags.split()])
    with pytest.raises(SystemExit, match=says):
        against.main()


def test_counts_whose_names_end_like_times_are_none():
    found = against.compared([[[{"problems": 3, "kernel_ms": 1.0}]] * 2])
    assert [row["time"] for row in found] == ["kernel_ms"]


def test_golds_without_a_number_have_no_perturbations(tmp_path, monkeypatch, capsys):
    file = tmp_path / "golds.jsonl"
    file.write_text('{"answer": "x"}\n')
    monkeypatch.setattr(sys, "argv", ["golds", str(file)])
    golds.main()
    assert "1 golds {'spellings': 4}" in capsys.readouterr().out


def test_a_draw_of_one_problem_alone_is_left_out_of_an_interval():
    told = unbiased.interval(np.eye(3), 50, np.random.default_rng(0))
    assert told == (0.0, 0.0, 0.0)


def test_prompts_have_a_token_at_least():
    args = types.SimpleNamespace(
        seed=0, steady=False, prompt=1, new=1, waves=2, group=1
    )
    prompts, _ = decode.requests(3, args, decode.SHAPES["tiny"])
    assert [len(prompt) for prompt in prompts] == [1] * 6


def test_a_pytorch_loop_that_ends_is_told(tmp_path):
    shape = peer.SHAPES[peer.BUNDLED]
    with pytest.raises(exits.CannotGoOn, match="did not start"):
        peer.Torch("/bin/false", str(tmp_path), shape)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ready\nexit 3\n")
    python.chmod(0o755)
    torch = peer.Torch(str(python), str(tmp_path), shape)
    with pytest.raises(exits.CannotGoOn, match="ended with 3 in 'sample'"):
        torch.ask(task="sample")


def test_checkouts_that_print_other_lines_have_no_pairs():
    with pytest.raises(SystemExit, match=r"\[1, 2\] lines"):
        against.compared([[[{"seconds": 1.0}], [{"seconds": 1.0}] * 2]])


# Writes its arguments down; it is not the program that would report.
NO_PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >> "$(dirname "$0")/calls"
[[ $2 != benchmarks.report ]]
"""


class Parsed(Exception):
    """A command's flags are all known."""


@pytest.mark.parametrize(("script", "count"), [("all_gpu.sh", 8), ("all_tpu.sh", 9)])
def test_all_that_a_chip_is_asked_for_has_flags_that_exist(
    script, count, monkeypatch, tmp_path
):
    python = tmp_path / "python"
    python.write_text(NO_PYTHON)
    python.chmod(0o755)
    subprocess.run(
        [against.ROOT / "benchmarks" / script, "results"],
        cwd=tmp_path,  # where the folder is made
        env=os.environ | {"PYTHON": str(python)},
        check=False,
        capture_output=True,
    )
    assert (tmp_path / "results" / "results.jsonl").exists()
    calls = [x.split() for x in (tmp_path / "calls").read_text().splitlines()]
    calls = [call for call in calls if call[0] == "-m"]
    assert len(calls) == count
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(*args, **more):
        _, rest = parse(*args, **more)
        assert all(x.startswith("--config.model.") for x in rest)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    for _, name, *flags in calls:
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(Parsed):
            importlib.import_module(name).main()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_timed(tmp_path):
    (tmp_path / "file").touch()
    script = against.ROOT / "benchmarks" / "all_gpu.sh"
    run = subprocess.run(
        ["bash", script, tmp_path / "file"],
        env=os.environ | {"PYTHON": "/bin/true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and not run.stdout
    assert "name another folder" in run.stderr


HOURS = """#!/bin/bash
[[ $1 == -c ]] && exit
echo '{"benchmark": "it"}'
[[ $2 == *.slow ]] && exec sleep 60
exit 3
"""


def test_what_was_cut_off_or_failed_says_so_and_keeps_its_lines(tmp_path):
    python = tmp_path / "python"
    python.write_text(HOURS)
    python.chmod(0o755)
    script = ". benchmarks/bench.sh; bench 1 slow; bench 9 fails; sleep 0.3"
    run = subprocess.run(
        ["bash", "-c", script, "it", tmp_path / "results"],
        cwd=against.ROOT,
        env=os.environ | {"PYTHON": str(python)},
        check=False,
        capture_output=True,
        text=True,
    )
    told = [line for line in run.stdout.splitlines() if line.startswith("== ")]
    cut = "== cut off after 1 s; what it told before is kept"
    assert told == ["== slow", cut, "== fails", "== ended with 3"]
    kept = (tmp_path / "results" / "results.jsonl").read_text().splitlines()
    assert kept == ['{"benchmark": "it"}'] * 2


def test_a_chips_script_needs_a_python_that_has_the_packages():
    script = against.ROOT / "benchmarks" / "all_gpu.sh"
    run = subprocess.run(
        ["bash", script, "/nosuch/results"],
        env=os.environ | {"PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and "/bin/false lacks" in run.stderr
    assert not run.stdout


@pytest.mark.parametrize("words", ["--help", "one two"])
def test_a_chips_script_takes_a_folder_alone(words):
    script = against.ROOT / "benchmarks" / "all_gpu.sh"
    run = subprocess.run(
        ["bash", script, *words.split()], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2 and "[FOLDER]" in run.stderr
