"""The command that converts checkpoints: to Orbax, back, and from a training state."""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from dllm_jax import convert, folder, sharding
from dllm_jax.checkpoint import Checkpoints
from dllm_jax.models import hf, peft, repository, transformer
from dllm_jax.models.config import Lora
from dllm_jax.rl import best
from dllm_jax.rl.learner import TrainState
from tests import served
from tests.goldens import reader
from tests.models import common

SDAR, TIED, VALUE = map(reader.checkpoint, ("sdar", "sdar_tied", "sdar_value"))


def files(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def orbax(tmp_path_factory) -> pathlib.Path:
    """A folder that `to-orbax` wrote."""
    out = tmp_path_factory.mktemp("orbax") / "weights"
    convert.main(["to-orbax", str(SDAR), str(out)])
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """A run's folder with two checkpoints: a policy with both heads, and a value."""
    folder = tmp_path_factory.mktemp("run")
    _, params = hf.load(VALUE, mesh=sharding.make_mesh(data=2, fsdp=4))
    checkpoints = Checkpoints(folder / "checkpoints")

    def state(params, step):
        opt_state = optax.adamw(1e-3).init(params)
        return TrainState(step=jnp.int32(step), params=params, opt_state=opt_state)

    for step in (1, 2):
        params["norm"] = params["norm"] + 1
        value = {name: 2 * x for name, x in params.items() if name in ("norm", "value")}
        value = {name: x for name, x in (params | value).items() if name != "head"}
        states = {"policy": state(params, step), "value": state(value, step)}
        states["reference"] = {"norm": params["norm"]}  # no network of its own
        checkpoints.save(step, states, {"taken": step})
    checkpoints.close()
    return folder


def test_there_and_back_is_the_same_folder(orbax, tmp_path):
    out = tmp_path / "out"
    convert.main(["to-hf", str(orbax), str(out), f"--like={SDAR}"])
    assert files(out) == files(SDAR)


def test_weights_may_be_stored_in_another_dtype(tmp_path):
    out = tmp_path / "weights"
    convert.main(["to-orbax", str(TIED), str(out), "--dtype=bfloat16"])
    state, _, step = Checkpoints(out).restore(None)
    assert step == 0
    held = state["policy"]["params"]
    assert {x.dtype.name for x in jax.tree.leaves(held)} == {"bfloat16"}
    convert.main(["to-hf", str(out), str(tmp_path / "hf"), f"--like={TIED}"])
    _, params = hf.load(tmp_path / "hf")
    assert params["norm"].dtype == jnp.float32
    np.testing.assert_array_equal(params["norm"], held["norm"].astype(jnp.float32))


@pytest.mark.parametrize("step, added", [(None, 2), (1, 1)])
def test_the_policy_of_a_run(run, tmp_path, step, added):
    flags = [] if step is None else [f"--step={step}"]
    out = tmp_path / "out"
    convert.main(["to-hf", str(run), str(out), f"--like={VALUE}", *flags])
    _, params = hf.load(out)
    _, was = hf.load(VALUE)
    np.testing.assert_array_equal(params.pop("norm"), was.pop("norm") + 1 * added)
    jax.tree.map(np.testing.assert_array_equal, params, was)


@pytest.mark.parametrize(
    "kept, flags, told",
    [(1, [], True), (2, [], False), (1, ["--network=value"], False)],
)
def test_another_step_than_that_of_the_best_is_told(
    tmp_path, run, capsys, kept, flags, told
):
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    best.mark(tmp_path / "run", kept)
    folders = str(tmp_path / "run"), str(tmp_path / "out")
    convert.main(["to-hf", *folders, f"--like={VALUE}", *flags])
    line = "warning: this is step 2; best/ is of another, or of none: see "
    assert capsys.readouterr().err.startswith(line) == told


def test_the_value_network_of_a_run(run, tmp_path):
    out = tmp_path / "out"
    flags = [f"--like={VALUE}", "--network=value"]
    convert.main(["to-hf", str(run), str(out), *flags])
    _, params = hf.load(out)
    _, was = hf.load(VALUE)
    np.testing.assert_array_equal(params.pop("norm"), 2 * (was.pop("norm") + 2))
    np.testing.assert_array_equal(params.pop("value"), 2 * was.pop("value"))
    jax.tree.map(np.testing.assert_array_equal, params, was)  # the head: the original's


def test_what_a_run_made_of_its_model_is_told(orbax, tmp_path):
    state, _, _ = Checkpoints(orbax).restore(None)
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder / "checkpoints")
    model = {"attention": "full", "shift": 1, "mask_id": -1, "lora_rank": 0}
    checkpoints.save(1, state, {"config": {"model": model, "sampler": {"block": 16}}})
    checkpoints.close()
    out = tmp_path / "out"
    convert.main(["to-hf", str(folder), str(out), f"--like={SDAR}"])
    cfg, was = hf.read_config(out), hf.read_config(SDAR)
    assert (cfg.attention, cfg.shift, cfg.block) == ("full", 1, 16)
    assert cfg.mask_id == was.mask_id


def run_with_adapters(folder: pathlib.Path, path: pathlib.Path, targets=()) -> str:
    """Returns a folder, of a run with random adapters of rank 2 beside a checkpoint's weights."""
    cfg = dataclasses.replace(hf.read_config(path), lora=Lora(2, 4.0, targets))
    adapters = transformer.init(jax.random.key(0), cfg)
    adapters = jax.tree.map(
        lambda x: x + jax.random.normal(jax.random.key(1), x.shape), adapters
    )
    model = {
        "path": str(path),
        "lora_rank": 2,
        "lora_alpha": 4.0,
        "lora_targets": targets,
    }
    meta = {"config": {"model": model}, "model": repository.marks(path)}
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, {"policy": {"params": adapters}}, meta)
    checkpoints.close()
    return str(folder)


@pytest.mark.parametrize(
    "name, targets, wide",
    [
        ("sdar", (), {}),
        ("llada", ("wq", "w_down"), {}),
        ("llada2", (), {"query_key_value": 3}),
        ("llada2", ("wk",), {}),
    ],
)
def test_adapters_alone_are_what_an_export_adds(name, targets, wide, tmp_path):
    like = reader.checkpoint(name)
    source = run_with_adapters(tmp_path / "run", like, targets)
    convert.main(["to-hf", source, str(tmp_path / "whole"), f"--like={like}"])
    out = tmp_path / "adapters"
    convert.main(["to-peft", source, str(out), f"--like={like}"])
    told = json.loads((out / peft.CONFIG).read_text())
    pairs = safetensors.numpy.load_file(out / peft.WEIGHTS)
    assert told["base_model_name_or_path"] == str(like)
    assert len(pairs) == 2 * len(told["target_modules"])
    was, became = (hf_tensors(folder) for folder in (like, tmp_path / "whole"))
    changed = {x for x in was if not np.array_equal(was[x], became[x])}
    assert changed == {f"{module}.weight" for module in told["target_modules"]}
    for module in told["target_modules"]:
        a, b = (pairs[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        rank = told["rank_pattern"].get(module, told["r"])
        times = wide.get(module.split(".")[-1], 1)
        assert rank == len(a) == 2 * times
        alpha = told["alpha_pattern"].get(module, told["lora_alpha"])
        want = was[f"{module}.weight"] + alpha / rank * b @ a
        np.testing.assert_allclose(became[f"{module}.weight"], want, atol=1e-5)


def hf_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a folder, f32."""
    tensors = repository.Tensors(folder)
    return {x: tensors.slice(x)[:].astype(np.float32) for x in tensors.file_of}


def test_adapters_go_with_the_weights_that_they_were_trained_beside(tmp_path):
    run_with_adapters(tmp_path / "run", TIED, ("wq",))
    like = shutil.copytree(TIED, tmp_path / "like")
    (like / "config.json").write_text((like / "config.json").read_text() + "\n")
    convert.main(
        ["to-hf", str(tmp_path / "run"), str(tmp_path / "a"), f"--like={like}"]
    )
    stored = safetensors.numpy.load_file(like / repository.SINGLE)
    stored = {name: 2 * x for name, x in stored.items()}
    safetensors.numpy.save_file(stored, like / repository.SINGLE)
    message = "its model.safetensors is another than that which the run's adapters were"
    with pytest.raises(ValueError, match=f"{message} trained .*path='{TIED}'; name"):
        convert.to_hf(str(tmp_path / "run"), str(tmp_path / "b"), str(like))
    assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match=message):
        convert.to_peft(str(tmp_path / "run"), str(tmp_path / "b"), str(like))


def test_a_run_without_adapters_has_none(run, tmp_path):
    with pytest.raises(ValueError, match="run.* has no adapters, .* use to-hf"):
        convert.to_peft(str(run), str(tmp_path / "out"), str(VALUE))


def test_what_adapters_do_not_tell_is_said(tmp_path, capsys):
    source = run_with_adapters(tmp_path / "run", TIED)
    meta = Checkpoints(f"{source}/checkpoints", keep=None).meta(1)
    meta["config"]["model"]["attention"] = "full"
    cfg = dataclasses.replace(hf.read_config(TIED), lora=Lora(2, 4.0))
    checkpoints = Checkpoints(tmp_path / "other" / "checkpoints")
    params = {"policy": {"params": transformer.init(jax.random.key(0), cfg)}}
    checkpoints.save(1, params, meta)
    checkpoints.close()
    convert.to_peft(str(tmp_path / "other"), str(tmp_path / "out"), str(TIED))
    said = capsys.readouterr()
    assert "adapters do not tell what the run made of" in said.out + said.err
    assert "attention_pattern=full" in said.out + said.err
    told = json.loads((tmp_path / "out" / peft.CONFIG).read_text())
    assert told["lora_dropout"] == 0  # there was none
    (tmp_path / "mine").touch()  # safetensors' files are for the owner alone
    mode = (tmp_path / "mine").stat().st_mode
    assert {x.stat().st_mode for x in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.parametrize(
    "family, step, targets, warns",
    [
        ("qwen3_moe", 2, (), True),
        ("qwen3_moe", 2, ("wq", "wo"), False),
        ("qwen3_moe", 1, (), False),
        ("sdar_moe", 2, (), False),
    ],
)
def test_adapters_that_peft_would_not_add_are_told(
    family, step, targets, warns, tmp_path, capsys
):
    """It warned itself, of adapters of experts, and the dense layers were the original's."""
    cfg = dataclasses.replace(
        common.STEPPED, family=family, sparse_step=step, lora=Lora(2, 4.0, targets)
    )
    pairs = transformer.init(jax.random.key(0), cfg)
    peft.save(tmp_path / "out", cfg, pairs, "org/model")
    said = "adds no adapters to dense layers of qwen3_moe; use to-hf"
    assert (said in capsys.readouterr().err) == warns


def test_what_is_wrong_is_told_before_weights_are_read(orbax, tmp_path, monkeypatch):
    def read(*args, **options):
        raise AssertionError("they were read")

    monkeypatch.setattr(convert.hf, "load", read)
    monkeypatch.setattr(convert, "read_network", read)
    with pytest.raises(ValueError, match="checkpoints would not be found again"):
        convert.main(["to-orbax", str(SDAR), str(tmp_path / "a[1]")])
    like = shutil.copytree(SDAR, tmp_path / "like")
    index = json.loads((like / repository.INDEX).read_text())
    (like / max(index["weight_map"].values())).unlink()
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        convert.main(["to-hf", str(orbax), str(tmp_path / "out"), f"--like={like}"])


def test_only_the_weights_of_a_state_are_read(run, tmp_path, monkeypatch):
    asked = []
    plain = ocp.args.PyTreeRestore

    def note(item, **rest):
        asked.append(item)
        return plain(item=item, **rest)

    monkeypatch.setattr(ocp.args, "PyTreeRestore", note)
    convert.main(["to-hf", str(run), str(tmp_path / "out"), f"--like={VALUE}"])
    assert [set(item) for item in asked] == [{"policy"}]
    assert set(asked[0]["policy"]) == {"params"}


def test_what_is_refused(orbax, run, tmp_path):
    def refused(message, *argv):
        with pytest.raises(ValueError, match=message):
            convert.main([str(word) for word in argv])

    out = tmp_path / "out"
    refused("exists; name a new folder", "to-orbax", SDAR, orbax)
    refused("exists; name a new folder", "to-hf", orbax, run, f"--like={SDAR}")
    file = tmp_path / "file"
    file.write_text("")
    refused("file/new' cannot be made: Not a dir", "to-orbax", SDAR, file / "new")
    refused("is not a folder", "to-orbax", tmp_path / "nothing", out)
    other = tmp_path / "tower"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "siglip_vision_model"}')
    refused("tower: a vision tower, siglip", "to-orbax", other, out)
    refused("tower: a vision tower, siglip", "to-hf", run, out, f"--like={other}")
    (other / "config.json").write_text('{"_class_name": "MAGVITv2"}')
    refused("model_type None is not supported", "to-orbax", other, out)
    refused("is not a folder", "to-hf", tmp_path / "nothing", out, f"--like={SDAR}")
    refused("asked for 7", "to-hf", run, out, f"--like={VALUE}", "--step=7")
    refused(
        "'value'; choose from policy$",
        *("to-hf", orbax, out, f"--like={SDAR}"),
        "--network=value",
    )
    refused(
        "'critic'; choose from policy, value$",
        *("to-hf", run, out),
        f"--like={VALUE}",
        "--network=critic",
    )
    refused("no checkpoints", "to-hf", tmp_path, out, f"--like={SDAR}")
    inside = shutil.copytree(SDAR, tmp_path / "original") / "new"
    refused("the original", "to-hf", tmp_path, inside, f"--like={inside.parent}")
    ours, others = (
        re.escape(str((told["vocab_size"], told["hidden_size"])))
        for told in map(reader.config, ("sdar", "sdar_tied"))
    )
    refused(
        f"does not hold the weights of .*: embed is {ours}, expected {others}",
        *("to-hf", orbax, out, f"--like={TIED}"),
    )
    broken = shutil.copytree(orbax, tmp_path / "broken")
    largest = max((broken / "0").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")
    refused("0 is damaged", "to-hf", broken, out, f"--like={SDAR}")
    assert not out.exists()


def test_what_was_cut_short_is_no_folder_and_the_same_command_goes_on(
    tmp_path, monkeypatch
):
    out = tmp_path / "weights"
    to_orbax = ["to-orbax", str(SDAR), str(out)]
    close = Checkpoints.close

    def stopped(checkpoints):
        close(checkpoints)
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(Checkpoints, "close", stopped)
        convert.main(to_orbax)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".weights.partial" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    convert.main(to_orbax)
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]
    convert.main(["to-hf", str(out), str(tmp_path / "hf"), f"--like={SDAR}"])


def test_of_two_commands_one_converts(orbax, tmp_path, monkeypatch):
    """The two had written to one half-made folder, and one ended with a traceback."""
    out = tmp_path / "hf"
    monkeypatch.setattr(folder, "seen_alive", lambda text: True)
    of_other = contextlib.closing(folder.Lock(tmp_path / ".hf.lock", of="another"))
    with of_other, pytest.raises(ValueError, match="OUT_DIR='.*hf' is in use by pid"):
        convert.main(["to-hf", str(orbax), str(out), f"--like={SDAR}"])
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path):
    def call(*argv):
        return served.run("dllm_jax.convert", [*map(str, argv)])

    told = call("to-hf", "--help")
    assert told.returncode == 0
    for flag in ("--like", "--step", "--network", "ORBAX_DIR", "OUT_DIR"):
        assert flag in told.stdout
    told = call("to-orbax", tmp_path, tmp_path / "out")
    assert told.returncode == 2
    assert told.stderr.strip().endswith("is not a checkpoint: it has no config.json")
    assert "Traceback" not in told.stderr
