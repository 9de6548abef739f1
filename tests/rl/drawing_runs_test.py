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
        *("batch.rows=8", "batch.tokens=64"),
        *overrides,
    ]
    return common.run(place, folder, *keys, **how)


def moved(place, folder) -> set[str]:
    """Returns the tensors that a run has changed."""
    before = safetensors.numpy.load_file(place / "model" / "model.safetensors")
    after = safetensors.numpy.load_file(folder / "export" / "model.safetensors")
    return {name for name, x in before.items() if (x != after[name]).any()}


def test_rl_of_drawings_trains_what_was_drawn(place, tmp_path):
    keys = [f"sampler.{x}" for x in (*DRAWING, "guidance=1.5")]
    keys += ["rl.steps=2", "rl.prompts=4", "rl.group=2", "rl.updates=1"]
    keys += ["rl.value=none", "rl.advantage=center", "rl.filter=varied"]
    told = run(place, tmp_path / "one", *keys, "rl.reward=jpeg")
    rows = common.metrics(tmp_path / "one")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4
    assert min(row["groups_kept"] for row in rows) > 0, told
    assert all(0 < row["reward"] < 1 and row["truncated"] == 0 for row in rows)
    assert all(row["response_length"] == 16 for row in rows)
    assert any("q_proj" in name for name in moved(place, tmp_path / "one"))
    assert (tmp_path / "one" / "export" / "vq" / "config.json").is_file()
    samples = (tmp_path / "one" / "samples" / "step_000001.jsonl").read_text()
    drawn = json.loads(samples.splitlines()[0])
    assert max(drawn["step_map"]) == 4
    assert min(drawn["response_ids"]) >= drawers.LENGTH
    assert drawn["finished"] == "stop"


def test_a_judge_of_texts_is_refused_before_anything_is_begun(place, tmp_path):
    keys = [f"sampler.{x}" for x in DRAWING]
    told = run(place, tmp_path / "no", *keys, "rl.value=none", code=2)
    assert "rl.reward='math' judges no image" in told


def test_sft_learns_to_draw_and_to_look(place, tmp_path):
    keys = ["method=sft", "sft.steps=1", "sft.examples=4", "noise.kind=bernoulli"]
    drawing = [f"sampler.{x}" for x in (*DRAWING, "guidance=1.5")]
    run(place, tmp_path / "draw", *keys, *drawing)
    assert moved(place, tmp_path / "draw")
    run(place, tmp_path / "look", *keys, "sampler.max_prompt=120", "batch.tokens=200")
    assert moved(place, tmp_path / "look")
