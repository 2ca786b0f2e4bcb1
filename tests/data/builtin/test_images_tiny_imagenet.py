"""Tiny-ImageNet from a folder and from a zip: small ones of the same layout, and the real one."""

from __future__ import annotations

import io
import os
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from feddbe.data.builtin.images import DATASETS, TinyImageNet
from feddbe.data.registry import load_dataset
from feddbe.errors import InvalidInputError

needs_tiny_imagenet = pytest.mark.skipif(
    DATASETS["tiny_imagenet"].find(None) is None,
    reason="Tiny-ImageNet is not on this machine (feddbe data get tiny_imagenet)",
)

CLASSES = ["n02", "n01", "n10"]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a machine without Tiny-ImageNet, whose publisher has three classes of eleven images."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    facts = DATASETS["tiny_imagenet"]
    assert isinstance(facts, TinyImageNet)
    monkeypatch.setitem(DATASETS, "tiny_imagenet", replace(facts, classes=3, images_per_class=11))
    return tmp_path / "data"


def jpeg(value: int, mode: str = "RGB", side: int = 64) -> bytes:
    """All pixels have about this value."""
    file = io.BytesIO()
    Image.new(mode, (side, side), (value, 255 - value, 0) if mode == "RGB" else value).save(file, "JPEG")
    return file.getvalue()


def write(folder: Path) -> Path:
    """Image 10 of each class is grey and sorts between 1 and 2; `val` and boxes must not be read."""
    place = folder / "tiny-imagenet-200"
    for k, name in enumerate(sorted(CLASSES)):
        (place / "train" / name / "images").mkdir(parents=True)
        (place / "train" / name / f"{name}_boxes.txt").write_text("0 0 63 63")
        for i in range(11):
            content = jpeg(60 * k + 5 * i, "L" if i == 10 else "RGB")
            (place / "train" / name / "images" / f"{name}_{i}.JPEG").write_bytes(content)
    (place / "val" / "images").mkdir(parents=True)
    (place / "val" / "images" / "val_0.JPEG").write_bytes(b"")
    (place / "wnids.txt").write_text("\n".join(CLASSES))
    return place


def pack(place: Path, target: Path) -> Path:
    """As the publisher does, with entries for folders."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(place.rglob("*"), reverse=True):
            archive.write(path, path.relative_to(place.parent))
    return target


@pytest.mark.parametrize("packed", [False, True])
def test_sorted_by_class_then_name(data_dir: Path, tmp_path: Path, packed: bool) -> None:
    if packed:
        place = pack(write(tmp_path / "unpacked"), data_dir / "tiny_imagenet" / "tiny-imagenet-200.zip")
    else:
        place = write(data_dir)
    assert DATASETS["tiny_imagenet"].find(data_dir) == place
    for _ in ("decoded", "from the cache"):
        data = load_dataset("tiny_imagenet", data_dir)
        assert (data.name, data.classes, data.x.dtype) == ("tiny_imagenet", 3, torch.uint8)
        assert data.x.shape == (33, 3, 64, 64)
        assert data.y.tolist() == [0] * 11 + [1] * 11 + [2] * 11
        order = [0, 1, 10, *range(2, 10)]
        expected = torch.tensor([60 * k + 5 * i for k in range(3) for i in order])
        assert (data.x[:, 0].flatten(1).float().mean(1) - expected).abs().max() < 4, "red, as JPEG has it"
        grey = data.x[2::11]
        assert torch.equal(grey[:, 0], grey[:, 1])
        assert torch.equal(grey[:, 0], grey[:, 2])


def test_folder_and_zip_are_the_same_data_and_progress_is_said(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write(data_dir)
    pack(place, tmp_path / "zip" / "tiny-imagenet-200.zip")
    hashes = {
        load_dataset("tiny_imagenet", folder).sha256() for folder in (data_dir, tmp_path / "zip", place)
    }
    assert len(hashes) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "100 %" in said.err
    load_dataset("tiny_imagenet", data_dir)
    assert capsys.readouterr().err == "", "the cache needs no decoding"


def test_a_changed_folder_is_decoded_again(data_dir: Path) -> None:
    images = write(data_dir) / "train" / "n01" / "images"
    before = load_dataset("tiny_imagenet", data_dir)
    (images / "new").write_bytes(jpeg(200))
    (images / "new").replace(images / "n01_0.JPEG")
    os.utime(images, (1, 1))
    after = load_dataset("tiny_imagenet", data_dir)
    assert after.sha256() != before.sha256()
    assert not torch.equal(after.x[0], before.x[0])
    assert torch.equal(after.x[1:], before.x[1:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", r"cannot decode .*n02_4\.JPEG"),
        (jpeg(9)[:-300], r"cannot decode .*n02_4\.JPEG"),
        (jpeg(9, side=65), r"n02_4\.JPEG is 65x65, expected 64x64"),
    ],
)
def test_an_image_that_is_none_is_named(data_dir: Path, content: bytes, message: str) -> None:
    place = write(data_dir)
    (place / "train" / "n02" / "images" / "n02_4.JPEG").write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        load_dataset("tiny_imagenet", data_dir)
    assert not list(data_dir.rglob("*.npy")), "no half a cache"


def test_missing_images_are_counted(data_dir: Path) -> None:
    place = write(data_dir)
    (place / "train" / "n10" / "images" / "n10_3.JPEG").unlink()
    with pytest.raises(
        InvalidInputError, match="3 classes, 10 images in n10; expected 3 classes of 11 images"
    ):
        load_dataset("tiny_imagenet", data_dir)


def test_a_truncated_zip_is_named(data_dir: Path, tmp_path: Path) -> None:
    place = pack(write(tmp_path / "unpacked"), data_dir / "tiny-imagenet-200.zip")
    os.truncate(place, place.stat().st_size // 2)
    with pytest.raises(InvalidInputError, match=f"cannot read {place}"):
        load_dataset("tiny_imagenet", data_dir)


def test_nowhere_says_which_file_to_put_where(data_dir: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_dataset("tiny_imagenet", data_dir)
    assert "feddbe data get tiny_imagenet" in str(caught.value)
    assert str(caught.value).endswith(f"into {data_dir / 'tiny_imagenet'}")


@needs_tiny_imagenet
def test_the_real_files() -> None:
    data = load_dataset("tiny_imagenet", None)
    assert data.x.shape == (100_000, 3, 64, 64)
    assert torch.bincount(data.y).tolist() == [500] * 200
    place = DATASETS["tiny_imagenet"].find(None)
    assert place is not None
    if place.is_dir():
        folders = sorted((place / "train").iterdir())
        for row in random.Random(0).sample(range(100_000), 20):
            path = sorted((folders[row // 500] / "images").iterdir())[row % 500]
            with Image.open(path) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), data.x[row].permute(1, 2, 0).numpy())
