"""Image files, whole and damaged: what is read, what is refused, and in which memory."""

import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from dllm_jax import images

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (9, 14, 3), dtype=np.uint8)


@pytest.mark.parametrize("ending", ["png", "bmp", "ppm", "tiff", "webp"])
def test_what_was_written_is_read(tmp_path, ending):
    Image.fromarray(RGB).save(tmp_path / f"x.{ending}", lossless=True)
    np.testing.assert_array_equal(images.read(tmp_path / f"x.{ending}"), RGB)


def test_other_modes_become_rgb(tmp_path):
    file = tmp_path / "x.tiff"
    Image.fromarray(RGB).convert("CMYK").save(file)
    assert np.abs(images.read(file).astype(int) - RGB).max() <= 1
    Image.fromarray(RGB).convert("RGBA").save(file)
    np.testing.assert_array_equal(images.read(file), RGB)
    Image.fromarray(RGB[:, :, 0]).save(file)
    np.testing.assert_array_equal(images.read(file), RGB[:, :, :1].repeat(3, 2))
    Image.fromarray(RGB).quantize(256).save(tmp_path / "palette.png")
    assert np.abs(images.read(tmp_path / "palette.png").astype(int) - RGB).mean() < 4


@pytest.mark.parametrize("ending", ["png", "tiff", "ppm"])
def test_sixteen_bits_keep_the_upper_eight(tmp_path, ending):
    deep = RNG.integers(0, 2**16, (5, 6), dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / f"x.{ending}")
    upper = (deep >> 8).astype(np.uint8)
    np.testing.assert_array_equal(
        images.read(tmp_path / f"x.{ending}"), np.repeat(upper[:, :, None], 3, 2)
    )


def test_of_an_animation_it_is_the_first_frame(tmp_path):
    flat = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (250, 20, 90)]
    flat[0].save(tmp_path / "x.gif", save_all=True, append_images=flat[1:])
    np.testing.assert_array_equal(images.read(tmp_path / "x.gif")[:, :, 0], 250)


def refused(path, text, **how):
    with pytest.raises(ValueError, match=text) as caught:
        images.read(path, **how)
    assert "\n" not in str(caught.value)
    assert os.path.basename(str(path)) in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path):
    refused(tmp_path / "no.png", "No such file")
    for url in ("https://a.b/c.png", "data:image/png;base64,iVBORw0KGgo="):
        refused(url, "URLs are not read: it must be a file's path", root=tmp_path)
    refused(tmp_path, "is no file")
    (tmp_path / "words.png").write_text("a text")
    refused(tmp_path / "words.png", "none of BMP")
    (tmp_path / "empty.png").touch()
    refused(tmp_path / "empty.png", "none of BMP")
    Image.fromarray(RGB).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:250])
    refused(tmp_path / "half.png", "cannot be read")
    (tmp_path / "script.eps").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9"
    )
    refused(tmp_path / "script.eps", "none of BMP")  # a program, to be run
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "deep.tiff")
    refused(tmp_path / "deep.tiff", "fractions")
    Image.fromarray(np.arange(12, dtype=np.int32)[None]).save(tmp_path / "deep.tiff")
    refused(tmp_path / "deep.tiff", "32 bits or a sign")
    os.mkfifo(tmp_path / "pipe.png")  # nobody writes: to open it would wait for ever
    refused(tmp_path / "pipe.png", "is no file")


def test_files_do_not_leave_the_root(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for folder in (tmp_path, root):
        Image.fromarray(RGB).save(folder / "x.png")
    (root / "link.png").symlink_to(tmp_path / "x.png")
    np.testing.assert_array_equal(images.read("x.png", root=root), RGB)
    np.testing.assert_array_equal(images.read(root / "x.png", root=root), RGB)
    for path in ("../x.png", tmp_path / "x.png", "link.png"):
        refused(path, "outside of the image root", root=root)
    for path, text in ((7, "a file's path"), ("", "a file's"), ("a\0b", "null")):
        with pytest.raises(ValueError, match=text):
            images.read(path, root=root)


def test_twenty_thousand_pixels_a_side_take_no_memory(tmp_path):
    rows = b"\0" + bytes(2500)  # one bit a pixel

    def chunk(kind, data):
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    bomb += chunk(b"IDAT", zlib.compress(rows * 20_000)) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(bomb)
    # A process of its own, whose largest size tells what reading took.
    code = (
        "import re, sys; from dllm_jax import images\n"
        "def largest():\n"  # not getrusage's, which begins with its parent's
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = largest()\n"
        "try: images.read(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "print(largest() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb.png")]
    told, grown = subprocess.check_output(command, text=True).splitlines()
    assert "bomb.png" in told and "pixels" in told
    assert int(grown) * 1024 < 50 * 2**20
    Image.new("RGB", (20_000, 40), (1, 2, 3)).save(tmp_path / "long.png")
    assert images.read(tmp_path / "long.png").shape == (40, 20_000, 3)


def test_the_mark_tells_pixels_and_shapes_apart():
    assert images.mark(RGB) == images.mark(RGB.copy())
    marks = {images.mark(x) for x in (RGB, RGB.swapaxes(0, 1), RGB[:, ::-1], RGB + 1)}
    assert len(marks) == 4


def test_pixels_are_normalized_to_the_last_bit_as_the_originals():
    """LLaDA-V's processor multiplies in f64 and rounds, MMaDA's divides in f32."""
    pixels = np.arange(256, dtype=np.uint8)
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    half = np.float32(0.5)
    np.testing.assert_array_equal(scaled, pixels / np.float32(255))
    np.testing.assert_array_equal(images.normalized(pixels), (scaled - half) / half)
