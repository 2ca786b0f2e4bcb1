"""Tests of Tiny-ImageNet from a folder and a zip: small ones with its layout, and the real one."""

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
    """Simulate a machine without Tiny-ImageNet, whose publisher has three classes of eleven images."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    dataset = DATASETS["tiny_imagenet"]
    assert isinstance(dataset, TinyImageNet)
    monkeypatch.setitem(DATASETS, "tiny_imagenet", replace(dataset, classes=3, images_per_class=11))
    return tmp_path / "data"


def encode_jpeg(value: int, mode: str = "RGB", side: int = 64) -> bytes:
    """Return a JPEG whose pixels have about this value."""
    file = io.BytesIO()
    Image.new(mode, (side, side), (value, 255 - value, 0) if mode == "RGB" else value).save(file, "JPEG")
    return file.getvalue()


def write_folder(folder: Path) -> Path:
    """Write a folder; image 10 of each class is gray and sorts between 1 and 2."""
    dataset_folder = folder / "tiny-imagenet-200"
    for k, name in enumerate(sorted(CLASSES)):
        (dataset_folder / "train" / name / "images").mkdir(parents=True)
        (dataset_folder / "train" / name / f"{name}_boxes.txt").write_text("0 0 63 63")
        for i in range(11):
            content = encode_jpeg(60 * k + 5 * i, "L" if i == 10 else "RGB")
            (dataset_folder / "train" / name / "images" / f"{name}_{i}.JPEG").write_bytes(content)
    (dataset_folder / "val" / "images").mkdir(parents=True)
    (dataset_folder / "val" / "images" / "val_0.JPEG").write_bytes(b"")
    (dataset_folder / "wnids.txt").write_text("\n".join(CLASSES))
    return dataset_folder


def write_zip(folder: Path, target: Path) -> Path:
    """Write a zip like the publisher's, with members for folders."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*"), reverse=True):
            archive.write(path, path.relative_to(folder.parent))
    return target


@pytest.mark.parametrize("packed", [False, True])
def test_images_are_sorted_by_class_then_name(data_dir: Path, tmp_path: Path, packed: bool) -> None:
    if packed:
        path = write_zip(
            write_folder(tmp_path / "unpacked"), data_dir / "tiny_imagenet" / "tiny-imagenet-200.zip"
        )
    else:
        path = write_folder(data_dir)
    assert DATASETS["tiny_imagenet"].find(data_dir) == path
    for _ in ("decoded", "from the cache"):
        data = load_dataset("tiny_imagenet", data_dir)
        assert (data.name, data.classes, data.x.dtype) == ("tiny_imagenet", 3, torch.uint8)
        assert data.x.shape == (33, 3, 64, 64)
        assert data.y.tolist() == [0] * 11 + [1] * 11 + [2] * 11
        order = [0, 1, 10, *range(2, 10)]
        expected = torch.tensor([60 * k + 5 * i for k in range(3) for i in order])
        assert (data.x[:, 0].flatten(1).float().mean(1) - expected).abs().max() < 4, (
            "red channel, within JPEG's accuracy"
        )
        grey = data.x[2::11]
        assert torch.equal(grey[:, 0], grey[:, 1])
        assert torch.equal(grey[:, 0], grey[:, 2])


def test_folder_and_zip_are_equal_and_progress_is_printed(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset_folder = write_folder(data_dir)
    write_zip(dataset_folder, tmp_path / "zip" / "tiny-imagenet-200.zip")
    hashes = {
        load_dataset("tiny_imagenet", folder).sha256()
        for folder in (data_dir, tmp_path / "zip", dataset_folder)
    }
    assert len(hashes) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "100 %" in captured.err
    load_dataset("tiny_imagenet", data_dir)
    assert capsys.readouterr().err == "", "the cache needs no decoding"


def test_changed_folder_is_decoded_again(data_dir: Path) -> None:
    images = write_folder(data_dir) / "train" / "n01" / "images"
    before = load_dataset("tiny_imagenet", data_dir)
    (images / "new").write_bytes(encode_jpeg(200))
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
        (encode_jpeg(9)[:-300], r"cannot decode .*n02_4\.JPEG"),
        (encode_jpeg(9, side=65), r"n02_4\.JPEG is 65x65, expected 64x64"),
    ],
)
def test_error_names_invalid_image(data_dir: Path, content: bytes, message: str) -> None:
    dataset_folder = write_folder(data_dir)
    (dataset_folder / "train" / "n02" / "images" / "n02_4.JPEG").write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        load_dataset("tiny_imagenet", data_dir)
    assert not list(data_dir.rglob("*.npy")), "no incomplete cache"


def test_error_counts_missing_images(data_dir: Path) -> None:
    dataset_folder = write_folder(data_dir)
    (dataset_folder / "train" / "n10" / "images" / "n10_3.JPEG").unlink()
    with pytest.raises(
        InvalidInputError, match="3 classes, 10 images in n10; expected 3 classes of 11 images"
    ):
        load_dataset("tiny_imagenet", data_dir)


def test_error_names_truncated_zip(data_dir: Path, tmp_path: Path) -> None:
    archive = write_zip(write_folder(tmp_path / "unpacked"), data_dir / "tiny-imagenet-200.zip")
    os.truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(InvalidInputError, match=f"cannot read {archive}"):
        load_dataset("tiny_imagenet", data_dir)


def test_missing_data_error_names_file_and_folder(data_dir: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_dataset("tiny_imagenet", data_dir)
    assert "feddbe data get tiny_imagenet" in str(caught.value)
    assert str(caught.value).endswith(f"into {data_dir / 'tiny_imagenet'}")


@needs_tiny_imagenet
def test_real_files() -> None:
    data = load_dataset("tiny_imagenet", None)
    assert data.x.shape == (100_000, 3, 64, 64)
    assert torch.bincount(data.y).tolist() == [500] * 200
    path = DATASETS["tiny_imagenet"].find(None)
    assert path is not None
    if path.is_dir():
        folders = sorted((path / "train").iterdir())
        for row in random.Random(0).sample(range(100_000), 20):
            path = sorted((folders[row // 500] / "images").iterdir())[row % 500]
            with Image.open(path) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), data.x[row].permute(1, 2, 0).numpy())
