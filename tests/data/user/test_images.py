"""Tests of image folders, and of decoding images."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from feddbe.config.options import Config
from feddbe.data.federated import load_federated_data
from feddbe.data.registry import load_dataset
from feddbe.data.user.images import decode_images
from feddbe.errors import InvalidInputError


def write_image(path: Path, value: Any, mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)
    return path


def write_pets(folder: Path) -> Path:
    for name, value in {"dog/b.png": (1, 2, 3), "dog/a.png": (4, 5, 6), "cat/x.bmp": (7, 8, 9)}.items():
        write_image(folder / name, value)
    return folder


def test_classes_and_files_are_sorted_by_name(tmp_path: Path) -> None:
    (write_pets(tmp_path / "pets") / "dog" / ".hidden").write_text("not an image")
    data = load_dataset(tmp_path / "pets")
    assert (data.name, data.classes, data.y.tolist()) == ("pets/", 2, [0, 1, 1])
    assert (data.x.shape, data.x.dtype, data.client) == ((3, 3, 4, 5), torch.uint8, None)
    assert data.x[:, :, 0, 0].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3]]
    assert data.inputs(data.x[:1])[0, 0, 0, 0].item() == pytest.approx(7 * 2 / 255 - 1)


def test_training_folder_comes_before_test_folder(tmp_path: Path) -> None:
    write_pets(tmp_path / "train")
    write_image(tmp_path / "test/dog/1.png", (0, 0, 0))
    write_image(tmp_path / "test/eel/1.png", (1, 1, 1))
    data = load_dataset(tmp_path)
    assert (data.classes, data.y.tolist()) == (3, [0, 1, 1, 1, 2])
    assert data.x[:, 0, 0, 0].tolist() == [7, 4, 1, 0, 1]


def test_gray_images_have_one_channel_unless_an_image_has_colors(tmp_path: Path) -> None:
    files = [write_image(tmp_path / "a.png", 3, "L"), write_image(tmp_path / "b.png", 1, "1")]
    assert decode_images(files, ["a", "b"])[:, 0, 0, 0].tolist() == [3, 255]
    files.append(write_image(tmp_path / "c.png", (9, 8, 7, 128), "RGBA"))
    assert decode_images(files, ["a", "b", "c"])[:, :, 0, 0].tolist() == [
        [3, 3, 3],
        [255, 255, 255],
        [9, 8, 7],
    ]


def test_images_in_memory_are_decoded() -> None:
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    assert np.array_equal(decode_images([file.getvalue()], ["a"])[0], pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: write_image(f / "dog/c.png", 0, size=(6, 4)),
            r"dog/c.png is 6x4, but .*cat/x.bmp is 5x4; all",
        ),
        (
            lambda f: (f / "dog/c.png").write_bytes(b"no"),
            r"cannot read the image .*dog/c.png: cannot",
        ),
        (
            lambda f: (f / "dog/b.png").write_bytes((f / "dog/b.png").read_bytes()[:45]),
            r"cannot read the image .*dog/b.png: ",
        ),
        (
            lambda f: write_image(f / "dog/c.png", 500, "I;16"),
            "dog/c.png: it has .* pixels of mode 'I;16', at most .* of 8 bits",
        ),
        (lambda f: (f / "dog/notes.txt").touch(), "notes.txt is not named like an image"),
        (
            lambda f: (f / "dog/puppies").mkdir(),
            "dog/puppies is a folder; a class folder must hold",
        ),
        (lambda f: (f / "eel").mkdir(), "the class 'eel' in .* has no images"),
        (
            lambda f: write_image(f / "train/dog/1.png", 0),
            "has train and unexpected folders \\(cat, dog\\); only train and test",
        ),
    ],
)
def test_invalid_folder_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    change(write_pets(tmp_path))
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_dataset(tmp_path)
    assert "\n" not in str(caught.value)


def test_single_class_is_an_error(tmp_path: Path) -> None:
    write_image(tmp_path / "cat/1.png", 0)
    with pytest.raises(InvalidInputError, match="has only the label 'cat'; at least 2 classes are needed"):
        load_federated_data(Config(data=str(tmp_path)))
    (tmp_path / "cat/1.png").rename(tmp_path / "1.png")
    (tmp_path / "cat").rmdir()
    with pytest.raises(InvalidInputError, match="has no folders with images; expected one for each class"):
        load_dataset(tmp_path)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EndComments\nshowpage\n"


def test_images_never_start_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript for EPS, even with another suffix."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process is started: {args}")

    monkeypatch.setattr(subprocess.Popen, "__init__", fail)
    (write_pets(tmp_path) / "dog" / "0.png").write_bytes(EPS)
    with pytest.raises(
        InvalidInputError, match=r"cannot read the image .*0\.png: cannot identify image file"
    ):
        load_dataset(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot identify image file"):
        decode_images([EPS], ["in memory"])


def test_image_over_pixel_limit_is_not_decoded() -> None:
    """24 kB that would take 25 million pixels."""
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "png")
    assert len(file.getvalue()) < 30_000
    with pytest.raises(
        InvalidInputError, match=r"a: it has 5000x5000 pixels of mode '.', at most 16777216 of 8 bits"
    ):
        decode_images([file.getvalue()], ["a"])


def test_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(write_pets(tmp_path) / "dog" / "0.png")
    with pytest.raises(InvalidInputError, match=r"0\.png: it is not a plain file"):
        load_dataset(tmp_path)


def test_images_of_different_sizes_need_resize(tmp_path: Path) -> None:
    write_image(write_pets(tmp_path / "pets") / "dog" / "c.png", (9, 9, 9), size=(8, 7))
    with pytest.raises(
        InvalidInputError, match=r"is 8x7, but .* is 5x4; all images .*: \?resize=4 resizes them"
    ):
        load_dataset(tmp_path / "pets")
    data = load_dataset(f"{tmp_path / 'pets'}?resize=4")
    assert (data.x.shape, data.label_names) == ((4, 3, 4, 4), ("cat", "dog"))
    assert data.x[:, :, 1, 1].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3], [9, 9, 9]]
    assert load_dataset(f"{tmp_path / 'pets'}?resize=6x3").x.shape == (4, 3, 3, 6), "width x height"
    assert (data.preprocessing_spec.kind, data.preprocessing_spec.resized, data.preprocessing_spec.shape) == (
        "images",
        True,
        (3, 4, 4),
    )


@pytest.mark.parametrize("size", ["0", "x", "4x", "4x4x4", "9999", "-3"])
def test_invalid_resize_is_an_error(tmp_path: Path, size: str) -> None:
    with pytest.raises(InvalidInputError, match=r"\?resize=.*: write a number of pixels"):
        load_dataset(f"{write_pets(tmp_path / 'pets')}?resize={size}")


def test_folders_of_clients_are_a_natural_partition(tmp_path: Path) -> None:
    """Not every client has every class."""
    for name in ("ulm/cat/1", "ulm/dog/1", "ulm/dog/2", "bern/dog/1", "bern/dog/2", "metz/cat/1"):
        write_image(tmp_path / "pets" / f"{name}.png", (1, 2, 3))
    data = load_dataset(tmp_path / "pets")
    assert (data.client_names, data.label_names) == (("bern", "metz", "ulm"), ("cat", "dog"))
    assert data.client is not None
    assert data.client.tolist() == [0, 0, 1, 2, 2, 2]
    assert data.y.tolist() == [1, 1, 0, 0, 1, 1]
    with pytest.raises(
        InvalidInputError, match=r"leaves client 'metz' with 1 of 6 samples; .*--min-samples 2"
    ):
        load_federated_data(Config(data=str(tmp_path / "pets")))
    federated = load_federated_data(Config(data=str(tmp_path / "pets"), min_samples=2))
    assert federated.options.partition == "natural"
    assert federated.dataset.client_names == ("bern", "ulm")
    assert [len(part) for part in federated.split.parts or ()] == [2, 3]
    assert federated.dataset.note == "1 of 3 clients were left out: they have fewer than 2 samples"
    with pytest.raises(InvalidInputError, match="min_samples = 9; the largest client has 3 samples"):
        load_federated_data(Config(data=str(tmp_path / "pets"), min_samples=9))


def test_min_samples_needs_a_client_column() -> None:
    with pytest.raises(InvalidInputError, match="min_samples = 5; 'digits' has no client column"):
        load_federated_data(Config(data="digits", min_samples=5))
