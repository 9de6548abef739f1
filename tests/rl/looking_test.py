"""Runs of a model that looks: RL that ends and goes on, and SFT of the vision tower too."""

import functools
import json

import numpy as np
import pytest
import safetensors.numpy

from tests.models.vision import common

SIZES = [(20, 16), (9, 30), (12, 12), (40, 9)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, four pictures and train.jsonl about them."""
    folder = tmp_path_factory.mktemp("place")
    common.folder(folder / "model")
    rows = [{"question": "No picture?", "answer": "A", "response": "B"}]
    rows += [{"question": "Lost?", "answer": "A", "response": "B", "image": "no.png"}]
    for i, size in enumerate(SIZES):
        common.picture(folder / f"{i}.png", size, seed=i)
        row = {"question": f"Which, {i}?", "answer": "A", "response": "ABBA"}
        rows.append(row | {"image": f"{i}.png"})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    return folder


def run(place, folder, *overrides, **how) -> str:
    """Runs a training to its end; returns what it printed."""
    keys = [
        *("model.tiles=20", "sampler.max_prompt=250", "sampler.max_new=8"),
        *("sampler.block=8", "sampler.rows=8", "sampler.before_stop=True"),
        *("sampler.threshold=0.3", "batch.rows=2", "batch.tokens=320"),
        *overrides,
    ]
    return common.run(place, folder, *keys, **how)


def moved(place, folder) -> set[str]:
    """Returns which parts of the model a run has changed."""
    before = safetensors.numpy.load_file(place / "model" / "model.safetensors")
    after = common.weights(folder)
    assert before.keys() <= after.keys()
    changed = {name for name, x in before.items() if (x != after[name]).any()}
    parts = ("mm_projector", "image_newline", "vision_tower", "embed_tokens", "lm_head")
    return {part for part in parts if any(part in name for name in changed)}


RL = ["rl.steps=2", "rl.prompts=4", "rl.group=2", "rl.updates=1", "rl.value=head"]
RL += [
    "rl.advantage=center",
    "rl.filter=varied",
    "rl.truncated=graded",
    "data.heldout=",
]
RL += ["run.samples=8", "run.keep=3", "rl.reward=tests.models.vision.common:variety"]


@pytest.fixture(scope="module")
def whole(place):
    """Returns (folder of a run of two steps of RL, what it printed)."""
    return place / "whole", run(place, place / "whole", *RL)


def test_rl_with_images_goes_on_where_it_stopped(place, whole, tmp_path):
    folder, told = whole
    assert "1 of 6 records are skipped" in told and "image 'no.png'" in told
    rows = common.metrics(folder)
    assert [row["step"] for row in rows] == [1, 2], rows
    # Training sees what sampling saw, images too.
    assert min(row["groups_kept"] for row in rows) > 0, told
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4
    learned = {"mm_projector", "image_newline", "embed_tokens", "lm_head"}
    assert moved(place, folder) == learned
    samples = (folder / "samples" / "step_000001.jsonl").read_text()
    shown = [json.loads(line).get("images") for line in samples.splitlines()]
    assert any(images and "mark" in images[0] for images in shown)

    cut = common.cut(folder, tmp_path / "two")
    assert "after step 1" in run(place, cut, *RL)
    common.check_same(folder, cut)


@pytest.mark.soak
def test_eight_devices_look_and_learn_as_one(place, whole, tmp_path):
    """Without `make soak`: runs on eight devices are train_test's."""
    run(place, tmp_path / "8", *RL, "rl.steps=1", *common.EIGHT, devices=8)
    common.check_alike(whole[0], tmp_path / "8")


@pytest.fixture(scope="module")
def towered(place, tmp_path_factory):
    """Returns a function that trains a model with its tower: the run's folder."""

    def train(devices):
        folder = tmp_path_factory.mktemp("towered") / "run"
        keys = ["method=sft", "sft.steps=1", "sft.examples=4", "data.heldout="]
        keys += ["noise.kind=bernoulli", "model.tower=True"]
        run(place, folder, *keys, devices=devices)
        assert {"vision_tower", "mm_projector"} <= moved(place, folder)
        return folder

    return functools.cache(train)


def test_sft_trains_the_tower_where_it_is_asked(towered):
    towered(1)


@pytest.mark.soak
def test_a_tower_is_trained_alike_on_any_devices(towered):
    """Without `make soak`: drawing_runs_test has a run on four."""
    one, many = (common.metrics(towered(devices))[0] for devices in (1, 2))
    for name in ("loss", "grad_norm", "entropy"):
        assert one[name] == pytest.approx(many[name], rel=1e-4), name


def test_a_pair_of_answers_sees_the_images(place, tmp_path):
    text = [json.loads(x) for x in (place / "train.jsonl").read_text().splitlines()]
    pairs = [
        {
            "prompt": row["question"],
            "chosen": "AB",
            "rejected": "BA",
            "image": row["image"],
        }
        for row in text[2:]
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    # Both of a pair look at one image: tables have it once, and so count its tiles once.
    keys = ["method=dpo", "sft.steps=1", "sft.examples=4", "data.heldout="]
    keys += ["noise.kind=subset", "noise.draws=2", "objective.aggregate=elbo"]
    keys += ["objective.reference_beta=0.2", f"data.train={place / 'pairs.jsonl'}"]
    run(place, tmp_path / "dpo", *keys, "model.tiles=13")
    (row,) = common.metrics(tmp_path / "dpo")
    assert row["preference_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert row["grad_norm"] > 0
    assert {"mm_projector", "lm_head"} <= moved(place, tmp_path / "dpo")


@pytest.mark.soak
def test_a_value_network_of_its_own_sees_the_images(place, tmp_path):
    """Without `make soak`: a value network is train_test's, here a head sees them."""
    keys = ["rl.steps=1", "rl.prompts=4", "rl.group=2", "rl.updates=1", "rl.value=own"]
    keys += ["rl.advantage=center", "rl.filter=varied", "rl.truncated=graded"]
    keys += ["rl.reward=tests.models.vision.common:variety", "data.heldout="]
    told = run(place, tmp_path / "own", *keys)
    (row,) = common.metrics(tmp_path / "own")
    assert row["groups_kept"] > 0, told
    assert row["value_loss"] > 0 and row["value_grad_norm"] > 0
    assert row["logprob_gap_max"] < 1e-4
    assert {"mm_projector", "lm_head"} <= moved(place, tmp_path / "own")
