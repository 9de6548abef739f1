"""Hugging Face folders: in and out bit for bit, on a mesh, and every way to be refused."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import errors

from dllm_jax import exits, sharding
from dllm_jax.config import stops_of
from dllm_jax.models import export, families, hf, repository, transformer
from dllm_jax.sampling.config import SamplerConfig
from tests.goldens import reader

ORIGINS = reader.CHECKPOINTS
SDAR, TIED, VALUE = (ORIGINS[name] for name in ("sdar", "sdar_tied", "sdar_value"))
TOLD = {name: reader.config(name) for name in ORIGINS}  # what each config.json says
VOCAB, LAST = (
    TOLD["sdar_tied"]["vocab_size"],
    TOLD["sdar_tied"]["num_hidden_layers"] - 1,
)
SHARDS = json.loads((SDAR / repository.INDEX).read_text())[
    "weight_map"
]  # {tensor: file}
FIRST_SHARD, *_, LAST_SHARD = sorted(set(SHARDS.values()))


def files(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns every file below a folder."""
    every_file = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in every_file}


FLAGS = {"sdar_tied": "tie_word_embeddings", "llada": "weight_tying"}


def same(a, b) -> bool:
    """Returns whether two parameter trees are equal bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def variant(folder, *, origin=TIED, config=(), tensors=(), drop=()) -> pathlib.Path:
    """Writes a copy of a one-file checkpoint with other fields and tensors."""
    shutil.copytree(origin, folder)
    raw = json.loads((folder / "config.json").read_text()) | dict(config)
    raw = {name: value for name, value in raw.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(raw))
    stored = safetensors.numpy.load_file(folder / repository.SINGLE) | dict(tensors)
    stored = {name: x for name, x in stored.items() if name not in drop}
    safetensors.numpy.save_file(
        stored, folder / repository.SINGLE, metadata={"format": "pt"}
    )
    return folder


# ---- There and back ------------------------------------------------------------------


every_family = pytest.mark.parametrize("origin", ORIGINS.values(), ids=ORIGINS)


@every_family
def test_round_trip_is_the_same_folder(origin, tmp_path):
    cfg, params = hf.load(origin)
    assert set(jax.tree.leaves(jax.tree.map(lambda x: x.dtype.name, params))) == {
        cfg.dtype
    }
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)
    again, back = hf.load(str(tmp_path / "out"))
    assert again == cfg
    assert same(params, back)


def test_everything_but_weights_is_copied(tmp_path):
    origin = shutil.copytree(SDAR, tmp_path / "origin")
    for name in (
        "tokenizer.json",
        "modeling_sdar.py",
        "README.md",
        "templates/a.jinja",
    ):
        (origin / name).parent.mkdir(exist_ok=True)
        (origin / name).write_text(f"I am {name}")
    kept = files(origin)
    weights = ("pytorch_model.bin", "original/model.pth", "onnx/model_q4.onnx")
    for name in (*weights, "onnx/model.onnx_data_1", ".cache/lock"):
        (origin / name).parent.mkdir(exist_ok=True)
        (origin / name).write_text("weights, or none of our business")
    cfg, params = hf.load(origin)
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == kept


FRONT = b"---\nlicense: mit\n---"


@pytest.mark.parametrize(
    "head", [b"", FRONT + b"\n", FRONT.replace(b"\n", b"\r\n") + b" \r\n"]
)
def test_the_card_of_trained_weights_says_that_it_is_about_others(tmp_path, head):
    origin = shutil.copytree(SDAR, tmp_path / "origin")
    (origin / "README.md").write_bytes(head + b"It adds. \xe9\n")
    cfg, params = hf.load(origin)
    for name, like in ("out", origin), ("again", tmp_path / "out"):
        hf.save(tmp_path / name, cfg, params, like=like, trained=True)
        card = (tmp_path / name / "README.md").read_bytes()
        assert card == head + export.TRAINED + b"It adds. \xe9\n"
    (origin / "README.md").write_bytes(FRONT)  # and no more
    hf.save(tmp_path / "short", cfg, params, like=origin, trained=True)
    card = (tmp_path / "short" / "README.md").read_bytes()
    assert card == FRONT + b"\n" + export.TRAINED
    hf.save(tmp_path / "bare", cfg, params, like=SDAR, trained=True)
    assert (tmp_path / "bare" / "README.md").exists() == (SDAR / "README.md").exists()


def test_f32_masters_of_bfloat16_weights(tmp_path):
    stored = safetensors.numpy.load_file(TIED / repository.SINGLE)
    low = {name: x.astype(ml_dtypes.bfloat16) for name, x in stored.items()}
    origin = variant(tmp_path / "origin", tensors=low)
    cfg, params = hf.load(origin)
    assert cfg.dtype == "bfloat16"
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    cfg, masters = hf.load(origin, dtype=jnp.float32)
    assert cfg.dtype == "float32"
    assert same(masters, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    hf.save(tmp_path / "out", cfg, masters, like=origin)
    assert files(tmp_path / "out") == files(origin)


@pytest.mark.parametrize("family", ["llada2", "sdar_value"])
def test_what_computes_in_f32_is_not_rounded_for_computing(family):
    """A reference with rounded routers would choose other experts than the policy."""
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    cfg, stored = hf.load(ORIGINS[family], mesh=mesh)
    heads = ("lm", "value") if "value" in stored else ("lm",)
    _, low = hf.load(ORIGINS[family], mesh=mesh, dtype="bfloat16")
    want = transformer.abstract(cfg, mesh, "bfloat16", heads)
    exact = []
    for (path, x), y, z in zip(
        jax.tree_util.tree_leaves_with_path(low),
        *map(jax.tree.leaves, (want, stored)),
        strict=True,
    ):
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
        if x.dtype == jnp.float32:
            exact.append(path[-1].key)
            np.testing.assert_array_equal(x, z)
    wanted = ["router", "router_bias"] if family == "llada2" else ["value"]
    assert sorted(exact) == wanted


def test_layers_of_mixed_dtypes_lose_nothing(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    stored = safetensors.numpy.load_file(TIED / repository.SINGLE)[name]
    low = {name: stored.astype(ml_dtypes.bfloat16)}
    origin = variant(tmp_path / "origin", tensors=low)
    cfg, params = hf.load(origin)
    assert params["layers"]["w_up"].dtype == jnp.float32
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_what_nothing_is_computed_with_may_have_any_dtype(dtype, tmp_path):
    unread = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {unread: np.arange(5, dtype=dtype)}
    origin = variant(tmp_path / "origin", tensors=tensors)
    cfg, params = hf.load(origin)
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


def test_a_tied_head_that_is_stored_too_follows_the_embedding(tmp_path):
    embed = safetensors.numpy.load_file(TIED / repository.SINGLE)[
        "model.embed_tokens.weight"
    ]
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    both = {"lm_head.weight": embed} | tables
    origin = variant(tmp_path / "origin", tensors=both)
    cfg, params = hf.load(origin)
    assert "head" not in params
    params["embed"] = params["embed"] + 1
    hf.save(tmp_path / "out", cfg, params, like=origin)
    out = safetensors.numpy.load_file(tmp_path / "out" / repository.SINGLE)
    np.testing.assert_array_equal(out["lm_head.weight"], embed + 1)
    np.testing.assert_array_equal(out["model.embed_tokens.weight"], embed + 1)
    assert all(np.array_equal(out[name], x) for name, x in tables.items())


@pytest.mark.parametrize("family, key", FLAGS.items())
def test_a_tied_head_that_is_another_matrix_is_refused(family, key, tmp_path):
    """Newer versions of transformers take it, older ones the embedding."""
    names = families.FAMILIES[TOLD[family]["model_type"]].names
    origin = ORIGINS[family]
    embed = safetensors.numpy.load_file(origin / repository.SINGLE)[names["embed"]]
    low = embed.astype(ml_dtypes.bfloat16)
    for number, head in enumerate((embed + 1, embed[1:], low)):
        folder = variant(
            tmp_path / str(number),
            origin=origin,
            config={key: True},
            tensors={names["head"]: head},
        )
        with pytest.raises(
            ValueError, match=f"{names['head']} is not .* set its {key}"
        ):
            hf.load(folder)
    both = {names["head"]: low, names["embed"]: low.astype(np.float32)}
    folder = variant(tmp_path / "same", origin=origin, config={key: True}, tensors=both)
    assert "head" not in hf.load(folder)[1]


def test_merged_experts_are_the_same_model(tmp_path):
    plain = ORIGINS["llada2"]
    stored = safetensors.numpy.load_file(plain / repository.SINGLE)
    cfg = hf.read_config(plain)
    merged, parts = {}, []
    for layer, kind in itertools.product(
        range(cfg.dense_layers, cfg.layers), ("gate", "up", "down")
    ):
        stem = f"model.layers.{layer}.mlp.experts"
        names = [f"{stem}.{i}.{kind}_proj.weight" for i in range(cfg.experts)]
        merged[f"{stem}.{kind}_proj"] = np.stack([stored[name] for name in names])
        parts += names
    kind = {"model_type": "llada2_moe_veomni"}
    origin = variant(
        tmp_path / "origin", origin=plain, config=kind, tensors=merged, drop=parts
    )
    cfg, params = hf.load(origin)
    assert same(params, hf.load(plain)[1])
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


def test_a_fused_projection_is_query_key_value_in_this_order():
    stored = safetensors.numpy.load_file(ORIGINS["llada2"] / repository.SINGLE)
    cfg, params = hf.load(ORIGINS["llada2"])
    stacks = {"first": cfg.dense_layers, "layers": cfg.layers - cfg.dense_layers}
    places = [(stack, i) for stack, count in stacks.items() for i in range(count)]
    for layer, (stack, i) in enumerate(places):
        name = f"model.layers.{layer}.attention.query_key_value.weight"
        rows = stored[name].reshape(-1, cfg.head_dim, cfg.d_model)
        q, k, v = np.split(rows, [cfg.heads, cfg.heads + cfg.kv_heads])
        for weight, want in zip(("wq", "wk", "wv"), (q, k, v), strict=True):
            loaded = params[stack][weight][i]
            np.testing.assert_array_equal(loaded, want.transpose(2, 0, 1))


# ---- Heads ---------------------------------------------------------------------------


def test_heads_on_demand():
    _, both = hf.load(VALUE)
    assert {"head", "value"} <= both.keys()
    _, value = hf.load(VALUE, heads=("value",))
    assert "head" not in value
    np.testing.assert_array_equal(value["value"], both["value"])
    _, policy = hf.load(VALUE, heads=("lm",))
    assert "value" not in policy
    cfg, fresh = hf.load(SDAR, heads=("lm", "value"))
    assert fresh["value"].shape == (cfg.d_model,)
    assert not fresh["value"].any()


@every_family
def test_a_value_head_of_every_family(origin, tmp_path):
    cfg, params = hf.load(origin, heads=("value",))
    assert "head" not in params
    params["value"] = params["value"] + 0.25
    params["norm"] = 2 * params["norm"]
    hf.save(tmp_path / "out", cfg, params, like=origin)
    again, back = hf.load(tmp_path / "out", heads=("value",))
    assert again == cfg
    assert same(params, back)
    _, both = hf.load(tmp_path / "out")
    assert "value" in both
    assert ("head" in both) != cfg.tied


def test_a_value_model_needs_no_language_head(tmp_path):
    origin = variant(tmp_path / "origin", origin=VALUE, drop=["lm_head.weight"])
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        hf.load(origin)
    cfg, params = hf.load(origin, heads=("value",))
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


def test_export_adds_a_value_head_that_the_original_lacks(tmp_path):
    cfg, params = hf.load(SDAR, heads=("lm", "value"))
    params["value"] = params["value"] + 0.25
    hf.save(tmp_path / "out", cfg, params, like=SDAR)
    index = json.loads((tmp_path / "out" / repository.INDEX).read_text())
    was = json.loads((SDAR / repository.INDEX).read_text())
    assert index["weight_map"] == SHARDS | {"value_head.weight": LAST_SHARD}
    added = index["metadata"]["total_size"] - was["metadata"]["total_size"]
    assert added == 4 * cfg.d_model
    stored = safetensors.numpy.load_file(tmp_path / "out" / LAST_SHARD)
    assert stored["value_head.weight"].shape == (1, cfg.d_model)
    assert same(hf.load(tmp_path / "out")[1], params)
    silent = shutil.copytree(SDAR, tmp_path / "silent")
    (silent / repository.INDEX).write_text(
        json.dumps({"weight_map": SHARDS, "metadata": None})
    )
    hf.save(tmp_path / "again", cfg, params, like=silent)
    index = json.loads((tmp_path / "again" / repository.INDEX).read_text())
    assert index["metadata"] is None  # nor is the new head's size that of all
    assert "value_head.weight" in index["weight_map"]
    both = {"total_size": 800, "total_parameters": 200}  # as transformers 5
    (silent / repository.INDEX).write_text(
        json.dumps({"weight_map": SHARDS, "metadata": both})
    )
    hf.save(tmp_path / "both", cfg, params, like=silent)
    index = json.loads((tmp_path / "both" / repository.INDEX).read_text())
    assert index["metadata"] == {
        "total_size": 800 + 4 * cfg.d_model,
        "total_parameters": 200 + cfg.d_model,
    }
    text = {"total_size": "800"}  # which is no sum
    (silent / repository.INDEX).write_text(
        json.dumps({"weight_map": SHARDS, "metadata": text})
    )
    hf.save(tmp_path / "text", cfg, params, like=silent)
    index = json.loads((tmp_path / "text" / repository.INDEX).read_text())
    assert index["metadata"] == text


def test_export_takes_what_params_lack_from_the_original(tmp_path):
    cfg, params = hf.load(VALUE, heads=("value",))
    params["norm"] = 2 * params["norm"]
    hf.save(tmp_path / "out", cfg, params, like=VALUE)
    out, was = (
        safetensors.numpy.load_file(folder / repository.SINGLE)
        for folder in (tmp_path / "out", VALUE)
    )
    differ = [name for name in was if not np.array_equal(out[name], was[name])]
    assert out.keys() == was.keys()
    assert differ == ["model.norm.weight"]


# ---- Onto a mesh, and no more than its part ------------------------------------------

MESHES = [{"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}, {"model": 2, "data": 4}]


@pytest.mark.parametrize("sizes", MESHES)
def test_load_places_every_tensor_on_the_mesh(sizes, tmp_path):
    mesh = sharding.make_mesh(**{"fsdp": 1} | sizes)
    cfg, params = hf.load(VALUE, mesh=mesh)
    want = transformer.abstract(cfg, mesh, jnp.float32, ("lm", "value"))
    for x, like in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.sharding) == (like.shape, like.sharding)
    wq, dims = params["layers"]["wq"], {"fsdp": cfg.d_model, "model": cfg.heads}
    split = math.prod(n for x, n in sizes.items() if x in dims and dims[x] % n == 0)
    assert wq.addressable_shards[0].data.size == wq.size // split
    assert same(params, hf.load(VALUE)[1])
    hf.save(tmp_path / "out", cfg, params, like=VALUE)
    assert files(tmp_path / "out") == files(VALUE)


class Meter:
    """A tensor's handle that notes what is read of it."""

    def __init__(self, handle, log: list[int]):
        self.handle, self.log = handle, log

    def __getitem__(self, index):
        x = self.handle[index]
        self.log.append(x.size)
        return x

    def __getattr__(self, name):
        return getattr(self.handle, name)


@pytest.mark.parametrize("sizes", MESHES)
def test_load_reads_every_number_once_and_only_slices(sizes, monkeypatch):
    log = []
    plain = repository.Tensors.slice
    monkeypatch.setattr(
        repository.Tensors, "slice", lambda self, name: Meter(plain(self, name), log)
    )
    mesh = sharding.make_mesh(**{"fsdp": 1} | sizes)
    _, params = hf.load(SDAR, mesh=mesh)
    assert sum(log) == sum(x.size for x in jax.tree.leaves(params))
    layers = params.pop("layers").values()
    shards = [x.addressable_shards[0].data.size for x in jax.tree.leaves(params)]
    shards += [x.addressable_shards[0].data.size // len(x) for x in layers]
    assert max(log) == max(shards)  # each layer has a tensor of its own


def test_two_processes_load_and_save_together(tmp_path):
    script = """
import sys
import jax
from dllm_jax import sharding
from dllm_jax.models import hf

port, me, origin, out = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(me))
mesh = sharding.make_mesh(fsdp=4, model=-1)
cfg, params = hf.load(origin, mesh=mesh)
assert not params["embed"].is_fully_addressable
hf.save(out, cfg, params, like=origin)
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    folders = [str(SDAR), str(tmp_path / "out")]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, port, str(me), *folders],
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    try:
        errors = [run.communicate(timeout=120)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], errors
    assert files(tmp_path / "out") == files(SDAR)


# ---- Exports that could do harm ------------------------------------------------------


def test_a_crash_leaves_the_old_export_or_none(tmp_path, monkeypatch):
    cfg, params = hf.load(SDAR)
    out = tmp_path / "out"

    def crash(*args, **kwargs):
        if str(args[1]).endswith(LAST_SHARD):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hf.safetensors.numpy, "save_file", crash)
        with pytest.raises(KeyboardInterrupt):
            hf.save(out, cfg, params, like=SDAR)
        assert not list(tmp_path.iterdir())
    hf.save(out, cfg, params, like=SDAR)
    params["norm"] = 2 * params["norm"]
    with monkeypatch.context() as patched:
        patched.setattr(hf.safetensors.numpy, "save_file", crash)
        with pytest.raises(KeyboardInterrupt):
            hf.save(out, cfg, params, like=SDAR)
        assert files(out) == files(SDAR)
    hf.save(out, cfg, params, like=SDAR)
    assert same(hf.load(out)[1], params)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    out.rename(tmp_path / ".out.old")  # as it is where a swap is killed half-way
    hf.save(out, cfg, params, like=SDAR)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", repository.OTHER_NAMES)
def test_an_export_takes_its_own_place_whatever_its_weights_are_called(tmp_path, name):
    origin = shutil.copytree(TIED, tmp_path / "origin")
    (origin / repository.SINGLE).rename(origin / name)
    cfg, params = hf.load(origin)
    for _ in range(2):
        hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


def test_export_refuses_to_destroy(tmp_path):
    cfg, params = hf.load(TIED)
    origin = shutil.copytree(TIED, tmp_path / "models" / "origin")
    for path in (origin, origin / "export", tmp_path / "models"):
        with pytest.raises(ValueError, match=f"cannot export to {path}: the original"):
            hf.save(path, cfg, params, like=origin)
    full = tmp_path / "full"
    full.mkdir()
    (full / "config.json").write_text("of a run")
    with pytest.raises(ValueError, match="is there and not an export"):
        hf.save(full, cfg, params, like=origin)
    with pytest.raises(ValueError, match="is there and not an export"):
        hf.save(full / "config.json", cfg, params, like=origin)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape"):
        hf.save(tmp_path / "other", cfg, params, like=SDAR)
    assert files(full) == {"config.json": b"of a run"}
    assert files(origin) == files(TIED)


INDICES = [None, [], {}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}]


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_an_index_without_names_is_refused(tmp_path, index):
    folder = shutil.copytree(SDAR, tmp_path / "model")
    (folder / repository.INDEX).write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=f"{repository.INDEX}: .*no (weight_map|JSON object)"
    ):
        hf.load(folder)


NAMES = ["../base.safetensors", "sub/base.safetensors", "{}/base.safetensors", ".."]
NAMES += [".", "", "a\0b", 7, None, ["base.safetensors"], "./base.safetensors"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_in_an_index_never_leaves_the_folder(tmp_path, name):
    cfg, params = hf.load(TIED)
    folder = shutil.copytree(TIED, tmp_path / "model")
    name = name.format(tmp_path) if isinstance(name, str) else name
    for place in (tmp_path, folder, folder / "sub"):
        place.mkdir(exist_ok=True)
        shutil.copy(folder / repository.SINGLE, place / "base.safetensors")
    (folder / repository.SINGLE).unlink()
    names = dict.fromkeys(repository.Tensors(TIED).file_of, name)
    (folder / repository.INDEX).write_text(json.dumps({"weight_map": names}))
    before = files(tmp_path)
    for go in (
        lambda: hf.load(folder),
        lambda: hf.save(tmp_path / "out", cfg, params, like=folder),
    ):
        with pytest.raises(
            ValueError, match="is not the name of a file in this folder"
        ):
            go()
    assert files(tmp_path) == before


def snapshot(root: pathlib.Path) -> pathlib.Path:
    """Returns a copy of SDAR as the hub's cache lays it out: links into blobs."""
    folder, blobs = root / "snapshots" / "a1", root / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(SDAR.iterdir())):
        shutil.copy(file, blobs / str(number))
        (folder / file.name).symlink_to(f"../../blobs/{number}")
    return folder


def test_a_hub_snapshot_is_exported_as_files_of_its_own(tmp_path):
    folder = snapshot(tmp_path / "models--org--name")
    cfg, params = hf.load(folder)
    before = files(tmp_path)
    hf.save(tmp_path / "out", cfg, params, like=folder)
    assert files(tmp_path / "out") == files(SDAR)
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    blobs = tmp_path / "models--org--name" / "blobs"
    for path in (blobs, blobs.parent, folder):
        with pytest.raises(ValueError, match=f"cannot export to {path}: the original"):
            hf.save(path, cfg, params, like=folder)
    shutil.rmtree(tmp_path / "out")
    assert files(tmp_path) == before


def test_a_link_out_of_the_folder_is_not_exported_and_this_is_said(tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("of mine")
    folder = shutil.copytree(TIED, tmp_path / "model")
    (folder / "key.txt").symlink_to(secret / "key.txt")
    (folder / "all").symlink_to(secret)
    (folder / "again.json").symlink_to("config.json")
    cfg, params = hf.load(folder)
    hf.save(tmp_path / "out", cfg, params, like=folder)
    again = {"again.json": (TIED / "config.json").read_bytes()}
    assert files(tmp_path / "out") == files(TIED) | again
    assert f"{folder / 'key.txt'} leads out of its folder" in capsys.readouterr().err


def test_an_export_never_replaces_what_its_source_is_a_link_to(tmp_path):
    home = shutil.copytree(TIED, tmp_path / "home")
    folder = tmp_path / "model"
    folder.mkdir()
    for file in home.iterdir():
        (folder / file.name).symlink_to(file)
    (tmp_path / "door").symlink_to(home)
    cfg, params = hf.load(folder)
    for path in (home, tmp_path / "door"):
        with pytest.raises(ValueError, match=f"cannot export to {path}: the original"):
            hf.save(path, cfg, params, like=folder)
    assert files(home) == files(TIED)
    hf.save(tmp_path / "out", cfg, params, like=folder)
    assert files(tmp_path / "out") == files(TIED)


def test_an_export_is_for_whom_the_umask_says(tmp_path):
    cfg, params = hf.load(SDAR)
    hf.save(tmp_path / "out", cfg, params, like=SDAR)
    (tmp_path / "mine").write_text("")
    mode = (tmp_path / "mine").stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {mode}


def test_an_export_without_room_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    cfg, params = hf.load(SDAR)

    def full(*args, **kwargs):
        raise safetensors.SafetensorError("I/O error: No space left on device (os err")

    monkeypatch.setattr(hf.safetensors.numpy, "save_file", full)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    with pytest.raises(
        exits.CannotGoOn, match=f"{tmp_path}: no room: {size} bytes are"
    ):
        hf.save(tmp_path / "out", cfg, params, like=SDAR)
    assert not list(tmp_path.iterdir())


# ---- config.json ---------------------------------------------------------------------


def test_fields_of_the_reference():
    cfg, _ = hf.load(SDAR)
    raw = TOLD["sdar"]
    keys = {
        "d_model": "hidden_size",
        "head_dim": "head_dim",
        "mask_id": "mask_token_id",
        "eos_id": "eos_token_id",
        "pad_id": "eos_token_id",  # it names no pad
        "block": "block_size",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    }
    assert "pad_token_id" not in raw
    assert {x: getattr(cfg, x) for x in keys} == {x: raw[keys[x]] for x in keys}
    assert cfg.qk_norm
    assert not cfg.qkv_bias


LLADA2 = {
    "attention": "block",
    "block": 32,
    "shift": 0,
    "mask_id": 156895,
    "rotary": 0.5,
    "dense_layers": 1,
    "experts": 256,
    "experts_per_token": 8,
    "shared_experts": 1,
    "router": "sigmoid",
    "router_bias": True,
    "router_norm": True,
    "router_scale": 2.5,
    "router_groups": 8,
    "router_best_groups": 4,
}
RELEASED = {
    "SDAR-4B-Chat": {"d_model": 2560, "heads": 32, "head_dim": 128, "block": 4},
    "SDAR-8B-Chat": {"d_model": 4096, "ffw": 12288, "mask_id": 151669},
    "LLaDA2.0-mini": LLADA2 | {"layers": 20, "expert_ffw": 512, "eos_id": 156892},
    "LLaDA2.0-flash": LLADA2 | {"layers": 32, "d_model": 4096, "pad_id": 156892},
}


@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
def test_a_tokens_weights_sum_to_one_whatever_its_config_says(family, tmp_path):
    raw = reader.config(family)
    for said in ({"norm_topk_prob": False}, {}):
        raw.pop("norm_topk_prob", None)
        (tmp_path / "config.json").write_text(json.dumps(raw | said))
        assert hf.read_config(tmp_path).router_norm


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs(name, tmp_path):
    shutil.copy(reader.path(f"hf_configs/{name}.json"), tmp_path / "config.json")
    cfg = hf.read_config(tmp_path)
    assert {key: getattr(cfg, key) for key in RELEASED[name]} == RELEASED[name]


def test_every_family_is_documented():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in families.FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "family, dream, kv_heads, layers",
    [
        ("dream", True, "num_key_value_heads", "num_hidden_layers"),
        ("llada", False, "n_kv_heads", "n_layers"),
        ("mmada", False, "n_kv_heads", "n_layers"),
    ],
)
def test_fields_of_full_attention(family, dream, kv_heads, layers):
    cfg, raw = hf.read_config(ORIGINS[family]), TOLD[family]
    wanted = {
        "vocab": raw["embedding_size" if "embedding_size" in raw else "vocab_size"],
        "mask_id": raw["mask_token_id"],
        "pad_id": raw["pad_token_id"],
        "rope_theta": raw["rope_theta"],
        "norm_eps": raw["rms_norm_eps"],
        "kv_heads": raw[kv_heads],
        "layers": raw[layers],
        "qkv_bias": dream,
        "shift": int(dream),
        "attention": "full",
        "qk_norm": False,
        "block": 32,
    }
    assert {key: getattr(cfg, key) for key in wanted} == wanted


LLAMA3 = {
    "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "factor": 8.0,
}
PLAIN = ["block_size", "mask_token_id"]  # what only diffusion models have
AUTOREGRESSIVE = {"attention": "causal", "shift": 1, "block": 1, "mask_id": VOCAB}
TWO_ENDS = {"pad_id": 7, "eos_id": 5, "ends": (6,)}
FOUR_HEADS = {"num_attention_heads": 4}


@pytest.mark.parametrize(
    "config, drop, wanted",
    [
        ({}, ["block_size"], {"block": 4}),
        ({"block_size": 16}, [], {"block": 16}),
        ({"pad_token_id": 7, "eos_token_id": [5, 6]}, [], TWO_ENDS),
        # The token that ends a text is said to be the pad, or another file's affair.
        ({"eos_token_id": None, "pad_token_id": 7}, [], {"eos_id": 7, "pad_id": 7}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            ["rope_theta", "rope_scaling"],
            {"rope_theta": 5e5},
        ),
        ({}, ["rope_theta"], {"rope_theta": 1e4}),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None},
            [],
            {"rope_theta": 5e5},
        ),
        ({"rope_scaling": LLAMA3}, [], {"rope_llama3": (8.0, 1.0, 4.0, 8192)}),
        ({"head_dim": 98}, [], {"head_dim": 98}),
        (FOUR_HEADS | {"head_dim": None, "hidden_size": 48}, [], {"head_dim": 12}),
        ({"rms_norm_eps": 1e-5}, [], {"norm_eps": 1e-5}),
        ({"mask_token_id": 0}, [], {"mask_id": 0}),
        ({"num_attention_heads": 6}, ["num_key_value_heads"], {"kv_heads": 6}),
        ({"model_type": "qwen3"}, [], {"qk_norm": True, "attention": "block"}),
        (
            {"model_type": "llama"},
            [],
            {
                "qk_norm": False,
                "shift": 0,
                "mask_id": TOLD["sdar_tied"]["mask_token_id"],
            },
        ),
        ({"model_type": "qwen3"}, PLAIN, AUTOREGRESSIVE | {"qk_norm": True}),
        (
            {"model_type": "qwen3", "block_size": None},
            ["mask_token_id"],
            AUTOREGRESSIVE,
        ),
        ({"model_type": "llama"}, PLAIN, AUTOREGRESSIVE | {"qk_norm": False}),
        ({"model_type": "qwen2"}, PLAIN, AUTOREGRESSIVE | {"qkv_bias": True}),
    ],
)
def test_fields(tmp_path, config, drop, wanted):
    folder = variant(tmp_path / "model", config=config, drop=drop)
    cfg = hf.read_config(folder)
    assert {name: getattr(cfg, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "family, config, wanted",
    [
        ("llada", {"rms_norm_eps": "norm_eps"}, {"norm_eps": 1e-5}),
        ("llada", {"weight_tying": "tied"}, {"tied": True}),
        ("mmada", {"rms_norm_eps": "norm_eps"}, {"norm_eps": 1e-5}),
        (
            "llada2",
            {
                "rms_norm_eps": "norm_eps",
                "partial_rotary_factor": "rotary",
                "routed_scaling_factor": "router_scale",
            },
            {"norm_eps": 1e-5, "rotary": 0.5, "router_scale": 2.5},
        ),
        (
            "llada2",
            {"n_group": "router_groups", "topk_group": "router_best_groups"},
            {"router_groups": 8, "router_best_groups": 4},
        ),
    ],
)
def test_what_config_json_leaves_out_is_as_in_the_original_class(
    family, config, wanted, tmp_path
):
    many = {"num_experts": 16} if "n_group" in config else {}
    folder = variant(
        tmp_path / "model", origin=ORIGINS[family], config=many, drop=list(config)
    )
    cfg = hf.read_config(folder)
    assert {field: getattr(cfg, field) for field in config.values()} == wanted


def test_the_end_of_a_text_is_asked_of_one_file_after_the_other(tmp_path):
    """Token 0, which it was without a word, is a token like any other."""
    folder = variant(tmp_path / "model", drop=["eos_token_id", "pad_token_id"])
    for name in ("generation_config", "tokenizer_config", "tokenizer"):
        (folder / f"{name}.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="nothing tells which token ends a text; .* n"):
        hf.read_config(folder)
    known = [{"content": "<end>", "id": 11}, {"content": "<other>", "id": 12}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": known}))
    settings = folder / "tokenizer_config.json"
    for named in ("<end>", {"content": "<end>"}):
        settings.write_text(json.dumps({"eos_token": named}))
        cfg = hf.read_config(folder)
        assert (cfg.eos_id, cfg.pad_id) == (11, 11)
    settings.write_text(json.dumps({"eos_token": "<unknown>"}))
    with pytest.raises(ValueError, match="needs eos_token_id, or the tokenizer an eos"):
        hf.read_config(folder)
    said = folder / "generation_config.json"
    for value, eos_id in (([9, 8], 9), (9, 9)):
        said.write_text(json.dumps({"eos_token_id": value}))
        cfg = hf.read_config(folder)
        assert (cfg.eos_id, cfg.ends) == (eos_id, (8,) if value == [9, 8] else ())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"pad_token_id": 7}))
    cfg = hf.read_config(folder)
    assert (cfg.eos_id, cfg.pad_id) == (9, 7)
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": 5}))
    cfg = hf.read_config(folder)
    assert (cfg.eos_id, cfg.ends) == (5, (9,))  # each says where an answer ends
    sampler = SamplerConfig(stop_ids=(4, 9))
    assert stops_of(sampler, cfg, None) == (5, 9, 4)
    for value in ([[9]], {}, "<end>", [9, True], -1):
        said.write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(
            ValueError, match=f"{said.name}: eos_token_id=.*: a token's"
        ):
            hf.read_config(folder)


@pytest.mark.parametrize("family", ORIGINS)
def test_positions_turn_in_f32_where_the_original_does(family, tmp_path):
    """LLaDA and MMaDA, unless their config.json says otherwise; an export says the same."""
    cfg = hf.read_config(ORIGINS[family])
    says = TOLD[family].get("rope_full_precision", family in ("llada", "mmada"))
    assert cfg.rope_f32 == says
    if family in ("llada", "mmada"):
        for said in (False, True):
            changed = {"rope_full_precision": said}
            origin = tmp_path / f"origin_{said}"
            variant(origin, origin=ORIGINS[family], config=changed)
            cfg, params = hf.load(origin)
            assert cfg.rope_f32 == said
            hf.save(tmp_path / f"out_{said}", cfg, params, like=origin)
            assert files(tmp_path / f"out_{said}") == files(origin)
        plain = variant(
            tmp_path / "plain", origin=ORIGINS[family], drop=["rope_full_precision"]
        )
        assert hf.read_config(plain).rope_f32


@pytest.mark.parametrize("config, block", [({"bd_size": 8}, 8), ({}, 32)])
def test_fast_dllm_is_a_qwen_that_fills_blocks(tmp_path, config, block):
    kind = {"model_type": "Fast_dLLM_Qwen", "tie_word_embeddings": True}
    origin = variant(
        tmp_path / "origin",
        origin=ORIGINS["dream"],
        config=kind | config,
        drop=["lm_head.weight"],
    )
    cfg, params = hf.load(origin)
    assert (cfg.attention, cfg.block, cfg.shift) == ("block", block, 1)
    assert cfg.qkv_bias and cfg.tied and not cfg.qk_norm
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


def test_a_llama_that_fills_blocks(tmp_path):
    stored = safetensors.numpy.load_file(TIED / repository.SINGLE)
    norms = [name for name in stored if "q_norm" in name or "k_norm" in name]
    origin = variant(tmp_path / "origin", config={"model_type": "llama"}, drop=norms)
    cfg, params = hf.load(origin)
    assert not {"q_norm", "k_norm"} & params["layers"].keys()
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


def plain_qwen2(folder) -> pathlib.Path:
    """Writes Dream's golden checkpoint as the Qwen2 model that it is otherwise."""
    config = {"model_type": "qwen2", "sliding_window": 32}
    origin = ORIGINS["dream"]
    return variant(folder, origin=origin, config=config, drop=["mask_token_id"])


def test_a_causal_class_that_is_told_to_look_ahead(tmp_path):
    """transformers heeds is_causal; our own key says what is meant."""
    origin = plain_qwen2(tmp_path / "origin")
    raw = json.loads((origin / "config.json").read_text()) | {"is_causal": False}
    (origin / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="is_causal=False is not supported"):
        hf.load(origin)
    raw |= {"attention_pattern": "full", "mask_token_id": 7}
    (origin / "config.json").write_text(json.dumps(raw))
    assert hf.read_config(origin).attention == "full"


def test_an_autoregressive_model_is_a_baseline(tmp_path):
    origin = plain_qwen2(tmp_path / "origin")
    cfg, params = hf.load(origin)
    assert same(params, hf.load(ORIGINS["dream"])[1])
    hf.save(tmp_path / "out", cfg, params, like=origin)
    assert files(tmp_path / "out") == files(origin)


KINDS = {
    "sdar": {"attention": "full", "shift": 0, "mask_id": 7},
    "dream": {"attention": "block", "block": 8},
    "llada": {"attention": "block", "block": 16, "shift": 1},
    "sdar_moe": {"block": 16},
    "llada2": {"attention": "causal", "shift": 1},
}


@pytest.mark.parametrize("family", KINDS)
def test_an_export_tells_what_training_made_of_a_model(family, tmp_path):
    origin, kind = ORIGINS[family], dict(KINDS[family])
    cfg, params = hf.load(origin)
    block = {"block": kind.pop("block", cfg.block)}
    made = dataclasses.replace(families.adapt(cfg, **kind), **block)
    hf.save(tmp_path / "out", made, params, like=origin)
    assert hf.load(tmp_path / "out")[0] == made != cfg
    was = json.loads((origin / "config.json").read_text())
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    keys = {"attention_pattern", "logit_shift", "block_size", "mask_token_id"}
    assert {key: x for key, x in raw.items() if key not in keys} == {
        key: x for key, x in was.items() if key not in keys
    }
    hf.save(tmp_path / "again", made, params, like=tmp_path / "out")
    assert files(tmp_path / "again") == files(tmp_path / "out")


@pytest.mark.parametrize("attention, shift", [("block", 0), ("block", 1), ("full", 1)])
def test_from_next_tokens_to_diffusion(attention, shift, tmp_path):
    origin = plain_qwen2(tmp_path / "origin")
    cfg, params = hf.load(origin)
    made = families.adapt(cfg, attention=attention, shift=shift, mask_id=cfg.vocab - 1)
    made = dataclasses.replace(made, block=8)
    hf.save(tmp_path / "out", made, params, like=origin)
    again, back = hf.load(tmp_path / "out")
    assert again == made
    assert same(back, params)


def test_the_block_of_a_full_canvas_is_the_samplers(tmp_path):
    cfg, params = hf.load(ORIGINS["dream"])
    cfg = dataclasses.replace(cfg, block=4)
    hf.save(tmp_path / "out", cfg, params, like=ORIGINS["dream"])
    assert files(tmp_path / "out") == files(ORIGINS["dream"])


@pytest.mark.parametrize(
    "kind, message",
    [
        ({"attention": "block"}, "model.attention='block' needs a mask token"),
        ({"attention": "blocks"}, "model.attention='blocks': choose from block, full"),
        ({"shift": 2}, "model.shift=2: 0 or 1"),
        (
            {"mask_id": TOLD["dream"]["vocab_size"]},
            "model.mask_id={vocab}: the vocabulary has {vocab} ids",
        ),
    ],
)
def test_adaptations_refused(kind, message, tmp_path):
    cfg = hf.read_config(plain_qwen2(tmp_path / "origin"))
    assert families.adapt(cfg) == cfg
    with pytest.raises(ValueError, match=message.format(vocab=cfg.vocab)):
        families.adapt(cfg, **kind)


@pytest.mark.parametrize(
    "name, content",
    [
        ("added_tokens.json", {"<|MASK|>": 77}),
        ("tokenizer.json", {"added_tokens": [{"content": "[MASK]", "id": 77}]}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"77": {"content": "<|mdm_mask|>"}}},
        ),
    ],
)
def test_mask_token_of_the_tokenizer(tmp_path, name, content):
    folder = variant(tmp_path / "model", drop=["mask_token_id"])
    (folder / name).write_text(json.dumps(content))
    assert hf.read_config(folder).mask_id == 77


@pytest.mark.parametrize("name", ["<gap>", {"content": "<gap>", "lstrip": False}])
def test_mask_token_that_the_tokenizer_names(tmp_path, name):
    folder = variant(tmp_path / "model", drop=["mask_token_id"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": name}))
    ids = {"<|MASK|>": 77, "<gap>": 78}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    assert hf.read_config(folder).mask_id == 78


def test_a_token_whose_id_is_no_number(tmp_path):
    folder = variant(tmp_path / "model", drop=["mask_token_id"])
    added = [{"content": "<|MASK|>", "id": "abc"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    told = f"{folder}: its tokenizer files are damaged: '<.MASK.>' has the id 'abc'"
    with pytest.raises(ValueError, match=told):
        hf.read_config(folder)


# ---- What is refused -----------------------------------------------------------------


def test_a_runs_folder_is_no_checkpoint(tmp_path):
    for name in ("config.json", "run.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="is a run's folder, and no model is in it$"):
        repository.find(tmp_path)
    for name in ("value", "export"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=f"is a run's folder: name .*/{name}$"):
            repository.find(tmp_path)


@pytest.mark.parametrize(
    "config, drop, message",
    [
        (
            {"model_type": "gpt2"},
            [],
            "'gpt2' is not supported; supported are Dream, .* llada, ",
        ),
        ({}, ["model_type"], "model_type None is not supported"),
        ({"hidden_act": "gelu"}, [], "hidden_act='gelu' is not supported"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            [],
            "rope_scaling=.*linear",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            [],
            "rope_scaling=.*yarn.* is not supported",
        ),
        (
            {"rope_scaling": {"factor": 4.0}},
            [],
            "rope_scaling=.*4.0.* is not supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 2}},
            [],
            "rope_scaling=.*yarn.* is not supported",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, [], "rope_scaling=.*llama3"),
        (
            {"sliding_window": 64, "use_sliding_window": True},
            [],
            "sliding_window=64 is not supported",
        ),
        ({"attention_bias": True}, [], "attention_bias=True is not supported"),
        ({"partial_rotary_factor": 0.5}, [], "partial_rotary_factor=0.5 is not suppo"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
            [],
            "partial_rotary_factor=0.25 is not supported",
        ),
        ({"mlp_bias": True}, [], "mlp_bias=True is not supported"),
        ({"rope_theta": 0}, [], "rope_theta=0: must be > 0"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            [],
            "quantization_config is not supported: name the checkpoint whose",
        ),
        ({"attention_pattern": "odd"}, [], "attention_pattern='odd' is not supported"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            [],
            "rope_scaling=.*llama3.* beside another rope_parameters: leave",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
            [],
            "rope_theta=10000.0 beside 500000.0, which another key says: leave",
        ),
        (
            {"num_local_experts": 8, "num_experts": 4},
            [],
            "num_experts=4 beside 8, which another key says",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            [],
            "rope_scaling=.*full_attention.* is not supported",
        ),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, [], "rope_scaling=.*factor.*0.* is"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
            [],
            "rope_scaling=.*low_freq_factor.*4.0.* is not supported",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            [],
            "layer_types=.*sliding_attention.* is not supported",
        ),
        ({"layer_types": "chunked"}, [], "layer_types='chunked' is not supported"),
        ({}, ["mask_token_id"], "tokenizer without mask token"),
        (
            {"mask_token_id": VOCAB},
            [],
            f"mask token {VOCAB} is outside the vocabulary of {VOCAB}",
        ),
        ({}, ["vocab_size"], "no field 'vocab_size'"),
    ],
)
def test_configs_refused(tmp_path, config, drop, message):
    folder = variant(tmp_path / "model", config=config, drop=drop)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


GROUPS = {"num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    "family, config, message",
    [
        ("llada", {"block_type": "llada"}, "block_type='llada' is not supported"),
        ("llada", {"alibi": True}, "alibi=True is not supported"),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=True is not supported"),
        ("llada", {"mlp_hidden_size": None}, "no field 'mlp_hidden_size'"),
        ("llada", {"num_experts": 64}, "num_experts=64 is not supported"),
        ("sdar_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not"),
        ("sdar_moe", {"decoder_sparse_step": 3}, "step=3 does not go with .*layers=2"),
        ("sdar_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be >= 1"),
        ("sdar_moe", {"num_experts": None}, "no field 'num_experts'"),
        ("sdar_moe", {"num_experts_per_tok": 0}, "per_tok=0 does not go with num_exp"),
        ("llada2", {"score_function": "softmax"}, "score_function='softmax' is not"),
        ("llada2", {"use_qkv_bias": True}, "use_qkv_bias=True is not supported"),
        (
            "llada2",
            {"first_k_dense_replace": 3, "num_hidden_layers": 3},
            "first_k_dense_replace=3 does not go with num_hidden_layers=3",
        ),
        ("llada2", GROUPS | {"topk_group": 5}, "topk_group=5 .* with n_group=4"),
        ("llada2", GROUPS | {"n_group": 3}, "n_group=3 does not go with num_experts=8"),
        (
            "llada2",
            GROUPS | {"n_group": None},
            "num_experts_per_tok=3 does not go with num_experts=8",
        ),
        (
            "dream",
            FOUR_HEADS | {"num_key_value_heads": 3},
            "key_value_heads=3 does not",
        ),
    ],
)
def test_configs_of_families_refused(tmp_path, family, config, message):
    folder = variant(tmp_path / "model", origin=ORIGINS[family], config=config)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


def spoiled(name: str, value: float, dtype="float32") -> dict:
    """Returns a golden tensor with one number replaced."""
    x = safetensors.numpy.load_file(TIED / repository.SINGLE)[name].astype(dtype)
    x.flat[3] = value
    return {name: x}


NORM = f"model.layers.{LAST}.input_layernorm.weight"
DOWN = f"model.layers.{LAST}.mlp.down_proj.weight"
DOWN_SHAPE = safetensors.numpy.load_file(TIED / repository.SINGLE)[DOWN].shape


@pytest.mark.parametrize(
    "tensors, drop, message",
    [
        ({}, [NORM], f"missing {NORM}"),
        ({}, [NORM, DOWN], f"missing {NORM}; missing {DOWN}"),
        ({"extra": np.ones(3)}, [], "unknown extra"),
        (
            {DOWN: np.ones(DOWN_SHAPE[::-1], np.float32)},
            [],
            re.escape(f"{DOWN} has shape {DOWN_SHAPE[::-1]}, expected {DOWN_SHAPE}"),
        ),
        (
            {f"model.layers.{i}.z": np.ones(1) for i in range(9)},
            [],
            r"layers\.7\.z and 1 more",
        ),
        ({DOWN: np.zeros(DOWN_SHAPE, np.float32)}, [], f"{DOWN} is all zero"),
        (
            spoiled(NORM, 1, np.int8),
            [],
            f"safetensors: tensor '{NORM}': dtype I8 .* in one of bf",
        ),
        (spoiled(DOWN, np.nan), [], f"{DOWN} is not finite"),
        (spoiled(DOWN, -np.inf), [], f"{DOWN} is not finite"),
        (spoiled(NORM, np.nan, ml_dtypes.bfloat16), [], f"{NORM} is not finite"),
        (
            spoiled("model.norm.weight", np.nan),
            [],
            r"model\.norm\.weight is not finite",
        ),
    ],
)
def test_tensors_refused(tmp_path, tensors, drop, message):
    folder = variant(tmp_path / "model", tensors=tensors, drop=drop)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


@pytest.mark.parametrize("stem", ["model.", "module.model.", "_orig_mod.model.", ""])
def test_tensors_under_other_names_are_told(stem, tmp_path):
    folder = variant(tmp_path / "model")
    stored = safetensors.numpy.load_file(folder / repository.SINGLE)
    stored = {stem + name.removeprefix("model."): x for name, x in stored.items()}
    safetensors.numpy.save_file(stored, folder / repository.SINGLE)
    if stem == "model.":
        hf.load(folder)
        return
    name = "embed_tokens.weight"
    says = re.escape(f"missing model.{name}, but has {stem}{name} (all names must be")
    with pytest.raises(ValueError, match=says):
        hf.load(folder)


def test_magnitudes_of_half_precision_are_summed_in_single():
    """Those of a large matrix come to more than float16's greatest number, 65,504."""
    (sums,) = hf.totals([np.full((2, 1000), 100, np.float16)], (1,))
    assert sums.tolist() == [1e5, 1e5]


def test_more_layers_than_the_config_says_are_unknown(tmp_path):
    folder = variant(tmp_path / "model", config={"num_hidden_layers": LAST})
    with pytest.raises(ValueError, match=rf"unknown model\.layers\.{LAST}\."):
        hf.load(folder)


def test_adapters_are_not_read_as_the_model_beside_them(tmp_path):
    """transformers adds them where peft is installed, and an export would name them."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter_config.json: adapters .* merge_and"):
        hf.load(tmp_path)
    folder = variant(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter_config.json: adapters .* merge_and"):
        hf.load(folder)


def test_files_refused(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match="is not a folder, nor a hub repository"):
        hf.load(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"not a checkpoint: it has no config\.json"):
        hf.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        hf.load(folder)
    shutil.copy(SDAR / "config.json", folder)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        hf.load(folder)
    (folder / repository.SINGLE).symlink_to("lost")
    with pytest.raises(
        ValueError, match=r"model\.safetensors: cannot be read: No such"
    ):
        hf.load(folder)
    (folder / repository.SINGLE).unlink()
    shutil.copy(SDAR / repository.INDEX, folder)
    with pytest.raises(ValueError, match=f"{FIRST_SHARD}: cannot be read"):
        hf.load(folder)
    for shard in SDAR.glob("*.safetensors"):
        shutil.copy(shard, folder)
    half = folder / LAST_SHARD
    half.write_bytes(half.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{LAST_SHARD}: cannot be read"):
        hf.load(folder)


@pytest.mark.parametrize("name", ["config.json", repository.SINGLE])
def test_a_pointer_of_git_lfs_is_called_one(name, tmp_path):
    """What is cloned without Git LFS has a few lines in the place of each large file."""
    folder = variant(tmp_path / "model")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 7\n")
    with pytest.raises(ValueError, match=f"{name}: cannot be read: .*git lfs pull"):
        hf.load(folder)


def test_a_folder_of_the_hubs_cache_is_told_by_its_snapshot(tmp_path):
    root = tmp_path / "models--org--name"
    folder = snapshot(root)
    says = re.escape(f"{root} holds snapshots of a repository: name {folder}")
    with pytest.raises(ValueError, match=says):
        hf.load(root)


def test_an_index_that_names_too_few_files(tmp_path):
    folder = shutil.copytree(SDAR, tmp_path / "model")
    index = json.loads((folder / repository.INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], FIRST_SHARD)
    (folder / repository.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="missing ") as refused:
        hf.load(folder)
    assert any(
        f"missing {name}" in str(refused.value)
        for name, file in SHARDS.items()
        if file != FIRST_SHARD
    )


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = shutil.copytree(SDAR, tmp_path / "model")
    first = safetensors.numpy.load_file(folder / FIRST_SHARD)
    last = safetensors.numpy.load_file(folder / LAST_SHARD)
    name = min(first)
    safetensors.numpy.save_file(last | {name: first[name] + 1}, folder / LAST_SHARD)
    words = f"tensor '{name}' is in two files, {FIRST_SHARD} and {LAST_SHARD}"
    with pytest.raises(ValueError, match=re.escape(words)):
        hf.load(folder)


@pytest.fixture
def hub(monkeypatch):
    """Returns a function by which another answers for the hub; nothing is remembered."""
    repository.snapshot.cache_clear()
    yield functools.partial(
        monkeypatch.setattr, repository.huggingface_hub, "snapshot_download"
    )
    repository.snapshot.cache_clear()


def test_a_hub_repository_is_fetched_once_it_is_none_of_our_folders(hub):
    asked = []

    def fetch(repository, ignore_patterns):
        asked.append(repository)
        assert {"*.bin", "*.onnx"} <= {*ignore_patterns}
        assert "*.safetensors" not in ignore_patterns
        if repository != "org/model":
            raise OSError("no such repository")
        return str(SDAR)

    hub(fetch)
    assert repository.find("org/model") == SDAR
    with pytest.raises(ValueError, match="the hub did not give it: no such repository"):
        repository.find("org/other")
    with pytest.raises(ValueError, match="such repository; the command that makes it"):
        repository.find("runs/model")
    with pytest.raises(ValueError, match="nor a hub repository"):
        repository.find("models")
    assert asked == ["org/model", "org/other", "runs/model"]


def test_an_export_is_made_with_the_revision_that_a_run_began_with(hub, tmp_path):
    """Whatever has become of the repository meanwhile."""
    hub(lambda name, ignore_patterns: str(TIED))
    cfg, params = hf.load("org/model")
    newer = variant(tmp_path / "newer", config={"rms_norm_eps": 0.5})
    hub(lambda name, ignore_patterns: str(newer))
    hf.save(tmp_path / "out", cfg, params, like="org/model")
    assert files(tmp_path / "out") == files(TIED)


def test_what_the_hubs_client_fails_with_is_one_line(hub):
    """Whichever HTTP client that is: its errors are neither OSError nor ValueError."""

    class ProxyError(Exception):
        pass

    def fail(error):
        def fetch(*_, **options):
            raise error

        hub(fetch)
        with pytest.raises(ValueError, match="the hub did not give it: ") as refused:
            repository.find("org/model")
        return str(refused.value)

    assert fail(ProxyError("403\n Forbidden")).endswith(
        "did not give it: 403 Forbidden"
    )
    assert fail(ProxyError()).endswith("did not give it: ProxyError")
    client = sys.modules[errors.HTTPError.__module__]
    for name in ("ConnectError", "ReadTimeout", "RemoteProtocolError"):
        assert fail(getattr(client, name)("gone")).endswith("did not give it: gone")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-1-of-2.bin"])
def test_weights_in_bin_files_are_not_read_and_there_is_a_way(tmp_path, name):
    (tmp_path / "config.json").write_bytes((TIED / "config.json").read_bytes())
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name} is not read.*save_pretrained"):
        hf.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError) as refused:
        hf.load(tmp_path)
    assert "save_pretrained" not in str(refused.value)
    fetched = shutil.copytree(tmp_path, tmp_path / "snapshots" / "a1")
    with pytest.raises(ValueError, match="no others are fetched.*save_pretrained"):
        hf.load(fetched)
