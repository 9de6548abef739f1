"""Scenes that an example draws: its checker and its codes agree with the drawer."""

import json
import sys

import numpy as np
import pytest
from PIL import Image, ImageColor

from configs import tracerl
from dllm_jax import data, images
from dllm_jax.models import hf
from dllm_jax.models.vision import codes, magvit
from dllm_jax.rl.rewards import scenes
from examples.scenes import drawer, gallery, make, tokenizer


def test_the_checker_agrees_with_the_drawer_of_mosaics():
    rng, names = np.random.default_rng(0), list(drawer.ALL)
    assert len(names) == 48
    for _ in range(10_000):
        right, other = (names[i] for i in rng.choice(len(names), 2, replace=False))
        found = scenes.seen(drawer.draw(drawer.ALL[right], rng))
        assert right in found
        one, two = drawer.ALL[right], drawer.ALL[other]
        if (one.count, one.colour) != (two.count, two.colour):
            assert other not in found, (right, other)


def test_codes_of_mosaics_lose_nothing(tmp_path):
    tokenizer.write(tmp_path / "vq")
    cfg, params = hf.load(tmp_path / "vq")
    assert (cfg.bits, cfg.factor) == (4, 4)
    rng = np.random.default_rng(1)
    drawn = np.stack([drawer.draw(scene, rng) for scene in drawer.ALL.values()])
    codes_BN = magvit.encode(params, np.moveaxis(images.normalized(drawn), 3, 1))
    assert set(np.unique(codes_BN)) == {0, 1, 2, 4, 8}
    made = codes.shown(np.asarray(magvit.decode(params, codes_BN)))
    assert np.abs(made.astype(int) - drawn).max() <= 1
    assert sum(scenes.grade(list(made), list(drawer.ALL))) == 48


def test_every_picture_of_a_scene_shows_it_once():
    rng, counts = np.random.default_rng(2), {1: 8, 2: 18, 3: 12}
    for caption, scene in drawer.ALL.items():
        pictures = {rgb.tobytes(): rgb for rgb in drawer.every(scene)}
        assert len(pictures) == len(drawer.every(scene)) == counts[scene.count]
        assert all(caption in scenes.seen(rgb) for rgb in pictures.values())
        assert drawer.draw(scene, rng).tobytes() in pictures


def test_questions_about_scenes_are_answered_by_a_word_of_one_token():
    tok, longest = make.text_tokenizer(), 0
    for scene in drawer.ALL.values():
        for one in make.questions(scene):
            assert one["answer"] in str(scene).split()
            assert len(tok(one["answer"])["input_ids"]) == 1
            asked = data.render(tok, [{"role": "user", "content": one["question"]}])
            longest = max(longest, len(asked))
    image = drawer.GRID**2 + 3  # its codes, and what stands around them
    assert image + longest <= tracerl.QUESTIONS["max_prompt"]


def test_a_gallery_shows_two_evaluations_one_below_the_other():
    def row(colour, reward):
        uri = images.embedded(np.full((4, 4, 3), colour, np.uint8))
        return {"question": "a red square", "picture": uri, "reward": reward}

    before, after = [row(10, 0.0), row(20, 1.0)], [row(30, 1.0)]
    sheet = gallery.sheet([{"a red square": before}, {"a red square": after}])
    got = [colour for _, colour in sheet.getcolors(10_000)]
    assert {(10,) * 3, (20,) * 3, (30,) * 3} <= set(got)
    frames = [ImageColor.getrgb(x) for x in (gallery.RIGHT, gallery.WRONG)]
    counts = {colour: count for count, colour in sheet.getcolors(10_000)}
    assert counts[frames[0]] == 2 * counts[frames[1]] > 0


def test_a_gallery_names_the_files_that_it_wants(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gallery"])
    with pytest.raises(SystemExit):
        gallery.main()
    assert "required: before, after, out" in capsys.readouterr().err
    picture = images.embedded(np.zeros((4, 4, 3), np.uint8))
    row = {"question": "a red square", "picture": picture, "reward": 1.0}
    answers, out = tmp_path / "eval.jsonl", tmp_path / "drawn.png"
    answers.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", ["gallery", str(answers), str(answers), str(out)])
    gallery.main()
    assert Image.open(out).width == gallery.SIDE + 2 * (gallery.FRAME + gallery.GAP)
    answers.write_text(json.dumps(row) + "\n" + json.dumps(row | {"picture": None}))
    gallery.main()  # one that was skipped is left out
    answers.write_text(json.dumps({"question": "a red square", "text": "1"}) + "\n")
    for files, message in (
        ([str(answers), str(answers)], "eval.jsonl: no answer in it is a picture"),
        ([str(tmp_path / "no.jsonl"), str(answers)], "no such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["gallery", *files, str(out)])
        with pytest.raises(SystemExit):
            gallery.main()
        assert message in capsys.readouterr().err


def test_a_maker_without_pictures_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make", f"--out={tmp_path}", "--pictures=0"])
    with pytest.raises(SystemExit):
        make.main()
    assert "--pictures must be positive" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
