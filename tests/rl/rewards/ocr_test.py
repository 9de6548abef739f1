"""Words in pictures: how they are compared, and how they are read where the extra is there."""

import sys
import types

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from dllm_jax.rl.rewards import ocr


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("", "", 0),
        ("abc", "", 3),
        ("", "ab", 2),
        ("kitten", "sitting", 3),
        ("ab", "ba", 2),
    ],
)
def test_the_distance_counts_what_is_put_in_left_out_or_changed(one, other, expected):
    assert ocr.distance(one, other) == ocr.distance(other, one) == expected


def test_a_drawing_earns_what_can_be_read_of_its_gold(monkeypatch):
    said = iter([["Stop", "42!"], ["STOP"], None, ["something else entirely"]])
    sizes = []

    def read(bgr):
        sizes.append(bgr.shape)
        return types.SimpleNamespace(txts=next(said))

    monkeypatch.setattr(ocr, "reader", lambda: read)
    pictures = [np.zeros((64, 128, 3), np.uint8)] * 3 + [
        np.zeros((300, 300, 3), np.uint8)
    ]
    grades = ocr.grade(pictures, ["stop 42"] * 4)
    np.testing.assert_allclose(grades, [1.0, 4 / 6, 0.0, 0.0])
    assert sizes == [(256, 512, 3)] * 3 + [(300, 300, 3)]


def test_without_the_extra_a_run_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    ocr.reader.cache_clear()
    grader = rewards.grader("ocr", RewardConfig(), answers="image")
    with pytest.raises(ValueError, match="make install EXTRAS=ocr$") as caught:
        grader.begin()
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="rl.reward='ocr' judges no text"):
        rewards.grader("ocr", RewardConfig())
    with pytest.raises(ValueError, match="no letter or digit"):
        ocr.check("!?")


def test_words_are_read():
    pytest.importorskip("rapidocr", reason="no dllm-jax[ocr]")
    ocr.reader.cache_clear()
    assert len(ocr.begin()) == 1

    def written(text, side, size):
        image = Image.new("RGB", (side, side), "white")
        pen, font = ImageDraw.Draw(image), ImageFont.load_default(size)
        pen.text((side // 10, side // 3), text, fill="black", font=font)
        return np.asarray(image)

    pictures = [written("STOP 42", 256, 48), written("CAT", 64, 24)]
    assert ocr.grade(pictures, ["Stop 42", "cat"]) == [1.0, 1.0]
    assert ocr.grade(pictures[::-1], ["Stop 42", "cat"])[0] < 0.5
    assert ocr.grade([np.full((64, 64, 3), 255, np.uint8)], ["cat"]) == [0.0]
