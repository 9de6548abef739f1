"""Runs whose answers are images: RL with guidance that ends and goes on, and SFT."""

import json

import pytest
import safetensors.numpy

from tests.models.vision import common, drawers

DRAWING = ["answers=image", "steps_per_block=4", "unmasking=cosine", "strategy=static"]
DRAWING += ["target=log_confidence", "rank_temperature=1.0", "rank_cooling=True"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, pictures, and train.jsonl of captions."""
    folder = tmp_path_factory.mktemp("place")
    drawers.folder(folder / "model")
    rows = []
    for i in range(4):
        common.picture(folder / f"{i}.png", (8, 8), seed=i)
        rows.append({"question": "abcdef"[: i + 2], "image": f"{i}.png"})
        rows[-1] |= {"answer": "A", "response": "B"}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    return folder


def run(place, folder, *overrides, **how) -> str:
    """Runs a training to its end; returns what it printed."""
    keys = [
        *("data.heldout=", "sampler.max_prompt=16", "sampler.rows=8"),
        *("batch.rows=4", "batch.tokens=64"),
        *overrides,
    ]
    return common.run(place, folder, *keys, **how)


def moved(place, folder) -> set[str]:
    """Returns the tensors that a run has changed."""
    before = safetensors.numpy.load_file(place / "model" / "model.safetensors")
    after = common.weights(folder)
    return {name for name, x in before.items() if (x != after[name]).any()}


RL = [f"sampler.{x}" for x in (*DRAWING, "guidance=1.5")]
RL += ["rl.steps=2", "rl.prompts=4", "rl.group=2", "rl.updates=1"]
RL += ["rl.value=none", "rl.advantage=center", "rl.filter=varied", "rl.reward=jpeg"]
RL += ["run.samples=8", "run.keep=3", "eval.every=1", "eval.answers=2"]


@pytest.fixture(scope="module")
def whole(place):
    """Returns (folder of a run of two steps, what it printed)."""
    keys = [*RL, f"data.heldout={place / 'train.jsonl'}"]
    return place / "whole", run(place, place / "whole", *keys)


def test_rl_of_drawings_trains_what_was_drawn(place, whole):
    folder, told = whole
    rows = [row for row in common.metrics(folder) if "groups_kept" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert "tokenizer of images" in told.partition("memory of a device")[2]
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4
    assert min(row["groups_kept"] for row in rows) > 0, told
    assert all(0 < row["reward"] < 1 and row["truncated"] == 0 for row in rows)
    assert all(row["response_length"] == 16 for row in rows)
    assert any("q_proj" in name for name in moved(place, folder))
    for name in ("config.json", "model.safetensors"):
        kept, given = (at / "vq" / name for at in (folder / "export", place / "model"))
        assert kept.read_bytes() == given.read_bytes()
    samples = (folder / "samples" / "step_000001.jsonl").read_text()
    drawn = json.loads(samples.splitlines()[0])
    assert max(drawn["step_map"]) == 4
    assert min(drawn["response_ids"]) >= drawers.LENGTH
    assert drawn["finished"] == "stop"


def test_drawings_of_captions_set_aside_are_evaluated(whole):
    rows = [row for row in common.metrics(whole[0]) if "heldout_accuracy" in row]
    assert len(rows) >= 2
    assert all(row["heldout_response_length"] == 16 for row in rows)
    assert all(row["heldout_tokens_per_forward"] == 4 for row in rows)
    assert all("heldout_pass@2" in row for row in rows)


def test_a_killed_run_of_drawings_goes_on_bit_for_bit(place, whole, tmp_path):
    cut = common.cut(whole[0], tmp_path / "cut")
    keys = [*RL, f"data.heldout={place / 'train.jsonl'}"]
    assert "after step 1" in run(place, cut, *keys)
    common.check_same(whole[0], cut)


@pytest.mark.soak
def test_eight_devices_draw_and_learn_as_one(place, whole, tmp_path):
    """Without `make soak`: runs on eight devices are train_test's."""
    keys = [*RL, f"data.heldout={place / 'train.jsonl'}", "rl.steps=1"]
    run(place, tmp_path / "8", *keys, *common.EIGHT, devices=8)
    common.check_alike(whole[0], tmp_path / "8")


def test_a_judge_of_texts_is_refused_before_anything_is_begun(place, tmp_path):
    keys = [f"sampler.{x}" for x in DRAWING]
    told = run(place, tmp_path / "no", *keys, "rl.value=none", code=2)
    assert "rl.reward='math' judges no image" in told


def test_sft_learns_to_draw_and_to_look(place, tmp_path):
    keys = ["method=sft", "sft.steps=1", "sft.examples=4", "noise.kind=bernoulli"]
    drawing = [f"sampler.{x}" for x in (*DRAWING, "guidance=1.5")]
    aside = place / "aside.jsonl"  # captions without a picture
    aside.write_text(json.dumps({"question": "xyz"}) + "\n")
    blank = place / "blank.jsonl"  # what guidance leads away from is learned, too
    rows = [{"question": "", "image": f"{i}.png"} for i in range(4)]
    blank.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = [f"data.heldout={aside}", "rl.reward=jpeg", "eval.every=1"]
    run(place, tmp_path / "draw", *keys, *drawing, *evaluated, f"data.train={blank}")
    assert moved(place, tmp_path / "draw")
    assert common.metrics(tmp_path / "draw")[-1]["heldout_response_length"] == 16
    told = run(place, tmp_path / "no", *keys, *drawing, f"data.train={aside}", code=2)
    assert "record 1: it has no 'image', the image that is to be drawn" in told
    run(place, tmp_path / "look", *keys, "sampler.max_prompt=120", "batch.tokens=200")
    assert moved(place, tmp_path / "look")
