"""Evaluation of models that look, on records as dLLM-RL has them, by its command."""

import json

import pytest

from tests import served
from tests.models.vision import common, drawers

KINDS = ("colour", "shape", "colour", "shape", "colour")


@pytest.fixture
def place(tmp_path):
    """Returns a folder with dLLM-RL's kind of file, and its images in a folder of theirs."""
    (tmp_path / "images" / "set").mkdir(parents=True)
    rows = []
    for i, kind in enumerate(KINDS):
        if i < 4:  # the last one's image is missing
            common.picture(tmp_path / "images" / "set" / f"{i}.png", (16, 12), seed=i)
        row = {"question": f"Which, {i}? A or B", "ground_truth_answer": "AB"[i % 2]}
        rows.append(row | {"image": f"set/{i}.png", "question_type": kind})
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.mark.parametrize("name", ["llada-v-8b", "mmada-8b-images"])
def test_questions_about_images_have_cards_and_types(place, name):
    made = common if name == "llada-v-8b" else drawers
    keys = {
        "model.path": made.folder(place / "model"),
        "model.dtype": "float32",
        "model.remat": "none",
        "data.heldout": place / "bench.json",
        "data.image_root": place / "images",
        "data.template": "{question}",
        "eval.by": "question_type",
        "eval.answers": 2,
        "run.folder": place / "run",
        "sampler.max_prompt": 320,
        "sampler.max_new": 8,
        "sampler.block": 8,
        "sampler.steps_per_block": 2,
        "sampler.horizon": 0,
        "sampler.rows": 8,
    }
    if made is drawers:
        keys |= {"model.vq": "", "model.image_size": drawers.SIDE}
    flags = [f"--config.{key}={x}" for key, x in keys.items()]
    config = f"--config={served.ROOT}/configs/eval.py:{name}/seedbench"
    done = served.run("dllm_jax.eval", [config, *flags])
    assert done.returncode == 0, done.stderr
    assert "1 of 5 records are skipped" in done.stderr and "set/4.png" in done.stderr
    card = json.loads((place / "run" / "card.json").read_text())
    assert (card["problems"], card["answers"]) == (4, 2)
    accuracy = card["scores"]["accuracy"]
    assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]
    groups = card["groups"]
    assert {kind: x["problems"] for kind, x in groups.items()} == {
        "colour": 2,
        "shape": 2,
    }
    lines = (place / "run" / "eval.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    by_kind = [[], []]
    for i, row in enumerate(rows):
        by_kind[i // 2 % 2].append(row["reward"] >= 1)
        assert row["images"][0]["file"] == str(place / f"images/set/{i // 2}.png")
    for kind, right in zip(("colour", "shape"), by_kind, strict=True):
        assert groups[kind]["accuracy"]["value"] == pytest.approx(sum(right) / 4)
    # The page shows what was looked at.
    command = [str(place / "run"), "-o", str(place / "page.html")]
    shown = served.run("dllm_jax.trace", command)
    assert shown.returncode == 0, shown.stderr
    assert (place / "page.html").read_text().count("data:image/png") == 4
