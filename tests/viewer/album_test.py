"""Pictures of a page: each once, of bounded size, from the image root and nowhere else."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from dllm_jax import images, trace
from dllm_jax.viewer import album, traces
from dllm_jax.viewer.pieces import CODE
from tests.viewer.common import answer, write

RNG = np.random.default_rng(0)


def noise(width: int, height: int) -> np.ndarray:
    """Returns a picture that no format makes small."""
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def opened(uri: str) -> Image.Image:
    """Returns the image in a data URI."""
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


@pytest.mark.parametrize("size", [(4000, 30), (1, 1), (300, 900), (64, 64)])
def test_a_picture_keeps_its_shape_and_little_else(size):
    uri = images.embedded(noise(*size))
    assert album.SOURCE.fullmatch(uri) and len(uri) < 300_000
    width, height = opened(uri).size
    assert max(width, height) == min(max(size), images.LOOKED_AT)
    assert abs(width * size[1] - height * size[0]) <= max(size)


def test_a_small_picture_is_the_same_pixels():
    rgb = noise(64, 48)
    np.testing.assert_array_equal(np.asarray(opened(images.embedded(rgb))), rgb)


def folder(tmp_path):
    """Returns a run's folder, whose data and image lie beside it, and that image's record."""
    (tmp_path / "data").mkdir()
    rgb = noise(20, 10)
    Image.fromarray(rgb).save(tmp_path / "data" / "a.png")
    (tmp_path / "run" / "samples").mkdir(parents=True)
    told = {"data": {"train": f"{tmp_path}/data/x.jsonl:2,{tmp_path}/data/y.jsonl"}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(told))
    seen = {"file": str(tmp_path / "data" / "a.png"), "mark": images.mark(rgb)}
    return tmp_path / "run", seen | {"first_row": 0}


def test_images_are_shown_once_and_what_cannot_be_is_named(tmp_path):
    run, seen = folder(tmp_path)
    outside = tmp_path / "secret.png"
    Image.fromarray(noise(5, 5)).save(outside)
    (tmp_path / "data" / "b.png").write_bytes(b"\x89PNG, or so")
    (tmp_path / "data" / "link.png").symlink_to(outside)
    files = ("lost.png", "b.png", "../secret.png", "link.png")
    bad = [{"file": str(tmp_path / "data" / x)} for x in files]
    changed = seen | {"mark": "0" * 32}
    rows = [answer(images=[seen, seen]), answer(images=[*bad, changed]), answer()]
    write(run / "samples" / "step_000001.jsonl", rows)
    file = traces.read(str(run))
    packed = traces.packed(file, None)
    first, second, third = packed["rows"]
    assert first["i"] == [0, 0] and len(packed["pictures"]) == 1
    assert opened(packed["pictures"][0]).size == (20, 10)
    words = ("No such file", "damaged", "outside of", "outside of", "has changed")
    for line, word in zip(second["i"], words, strict=True):
        assert word in line and "\n" not in line
    assert "i" not in third
    # Another root says that the same file is outside.
    moved = traces.packed(traces.read(str(run), str(tmp_path / "run")), None)
    assert "outside of" in moved["rows"][0]["i"][0] and not moved["pictures"]


def test_a_page_holds_so_much_of_pictures_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(album, "TOTAL", 3000)
    uris = [images.embedded(noise(24, 24)) for _ in range(3)]
    rows = [answer(range(4), picture=uri) for uri in (*uris, uris[0])]
    packed = traces.packed(traces.read(str(write(tmp_path / "x.jsonl", rows))), None)
    assert packed["rows"][0]["p"] == packed["rows"][3]["p"] == 0
    assert "left out" in packed["rows"][2]["p"]
    assert sum(map(len, packed["pictures"])) <= 3000


def test_two_files_of_a_page_share_its_pictures(tmp_path, monkeypatch):
    """Each has room for as many of its own."""
    seen = folder(tmp_path)[1]
    uris = [images.embedded(noise(24, 24)) for _ in range(3)]
    shown = images.embedded(images.read(seen["file"]))
    monkeypatch.setattr(album, "TOTAL", len(shown) + len(uris[0]))
    drawn = (uris[:1], uris[1:])
    for name, own in zip("ab", drawn, strict=True):
        rows = [answer(range(4), images=[seen], picture=uri) for uri in own]
        write(tmp_path / name, rows * (3 - len(own)))
    paths = [str(tmp_path / name) for name in "ab"]
    made = trace.content([traces.read(x, str(tmp_path / "data")) for x in paths])
    first, second = made["files"]
    assert first["pictures"] == [shown, *uris[:2]] and second["pictures"] is None
    assert [row["i"] for row in first["rows"] + second["rows"]] == [[0]] * 4
    assert [row["p"] for row in first["rows"]] == [1, 1]
    assert second["rows"][0]["p"] == 2 and "left out" in second["rows"][1]["p"]


def test_of_a_name_each_file_has_the_picture_in_its_own_folder(tmp_path):
    own, other = noise(8, 8), noise(8, 8)
    for name, rgb in (("own", own), ("other", other)):
        (tmp_path / name).mkdir()
        Image.fromarray(rgb).save(tmp_path / name / "a.png")
    pictures, seen = album.Album(), {"file": "a.png", "mark": images.mark(own)}
    assert pictures.begin((str(tmp_path / "own"),)) and pictures.shown(seen) == 0
    assert not pictures.begin((str(tmp_path / "other"),))
    assert "has changed since" in pictures.shown(seen)


def test_an_image_lies_in_any_of_the_folders_of_the_data(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        Image.fromarray(noise(4, 4)).save(tmp_path / name / "x.png")
    pictures, roots = album.Album(), tuple(str(tmp_path / name) for name in "ab")
    pictures.begin(roots)
    found = [pictures.shown({"file": f"{tmp_path}/{name}/x.png"}) for name in "abc"]
    assert found[:2] == [0, 1]
    assert (
        f"is outside of {' and '.join(roots)}; name its folder by --images" in found[2]
    )


def test_codes_of_a_drawing_are_no_text(tmp_path):
    uri = images.embedded(noise(8, 8))
    rows = [answer(range(90, 99), picture=uri), answer(range(90, 98), picture=uri)]
    rows += [answer(range(90, 99))]
    packed = traces.packed(traces.read(str(write(tmp_path / "x.jsonl", rows))), None)
    kinds = [[packed["pieces"][i][1] for i in row["t"]] for row in packed["rows"]]
    assert set(kinds[0]) == {CODE} and CODE not in kinds[1]  # which fills no square
    assert CODE not in kinds[2]  # which drew nothing
    assert packed["rows"][2]["q"] == "1 2 3"  # where no question is told


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"images": "a.png"}, "images must be a list"),
        ({"images": [{"mark": "x"}]}, "images must be a list"),
        ({"images": ["a.png"]}, "images must be a list"),
        ({"images": [{"file": "", "mark": "x"}]}, "images must be a list"),
        ({"picture": 5}, "picture must be a data URI"),
        ({"picture": "https://example.org/x.png"}, "picture must be a data URI"),
        (
            {"picture": "data:image/svg+xml;base64,PHN2Zz4="},
            "picture must be a data URI",
        ),
        ({"picture": "data:image/png;base64,AA\n"}, "picture must be a data URI"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        traces.read(str(write(tmp_path / "x.jsonl", [answer(**fields)])))
