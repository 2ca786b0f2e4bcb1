"""CIFAR-10 in both of its formats, unpacked or not: small files of the same make."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from feddbe.data.builtin import cifar10
from feddbe.errors import BadInput

PIXELS = np.random.RandomState(0).randint(0, 256, (12, 3, 32, 32)).astype(np.uint8)
LABELS = [9, 0, 7, 7, 5, 3, 1, 2, 4, 6, 8, 8]
FILES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a machine without CIFAR-10, whose publisher's files have two images each."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cifar10, "SIZES", dict.fromkeys(FILES, 2))
    return tmp_path / "data"


def write(folder: Path, kind: str) -> Path:
    place = folder / f"cifar-10-batches-{'bin' if kind == 'binary' else 'py'}"
    place.mkdir(parents=True)
    for k, name in enumerate(FILES):
        rows = slice(2 * k, 2 * k + 2)
        if kind == "binary":
            pairs = zip(LABELS[rows], PIXELS[rows], strict=True)
            content = b"".join(bytes([label]) + image.tobytes() for label, image in pairs)
            (place / f"{name}.bin").write_bytes(content)
        else:
            values = {b"data": PIXELS[rows].reshape(-1, 3072), b"labels": LABELS[rows]}
            (place / name).write_bytes(pickle.dumps(values, protocol=2))
    return place


@pytest.mark.parametrize("kind", ["binary", "python"])
@pytest.mark.parametrize("packed", [True, False])
def test_five_batches_then_the_test_set(data_dir: Path, kind: str, packed: bool) -> None:
    place = write(data_dir / "unpacked", kind)
    where = place.parent
    if packed:
        where = data_dir / "packed"
        where.mkdir()
        with tarfile.open(where / f"cifar-10-{kind}.tar.gz", "w:gz") as tar:
            for path in sorted(place.iterdir(), reverse=True):
                tar.add(path, f"{place.name}/{path.name}")
    for _ in ("decoded", "from the cache"):
        data = cifar10.load(where)
        assert (data.name, data.classes, len(data)) == ("cifar10", 10, 12)
        assert torch.equal(data.x, torch.from_numpy(PIXELS))
        assert (data.y.tolist(), data.label_names[:2]) == (LABELS, ("airplane", "automobile"))


def test_refuses(data_dir: Path) -> None:
    place = write(data_dir, "binary")
    os.truncate(place / "data_batch_3.bin", 100)
    with pytest.raises(BadInput, match=r"data_batch_3\.bin has only 100 bytes, expected 6146"):
        cifar10.load(data_dir)
    (place / "data_batch_3.bin").unlink()
    with pytest.raises(BadInput, match="has no file for the data_batch_3 set"):
        cifar10.load(data_dir)
    (place / "test_batch.bin").unlink()
    with pytest.raises(BadInput, match=r"run 'feddbe data get cifar10', or put cifar-10-binary.tar.gz or"):
        cifar10.load(data_dir)
