"""MNIST: files of the same form as Fashion-MNIST's, which must not be taken for each other unsaid."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from feddbe.data.builtin import mnist
from feddbe.data.registry import load
from feddbe.errors import BadInput
from tests.data.builtin.test_fmnist import idx, write


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def test_train_then_test(nowhere: Path) -> None:
    data = load("mnist", write(nowhere / "data" / "mnist", train=3, test=9).parent)
    assert (data.name, data.classes, data.x.shape) == ("mnist", 10, (12, 1, 28, 28))
    assert (data.x[:, 0, 5, 7].tolist(), data.y.tolist()) == (list(range(12)), [*range(10), 0, 1])
    assert data.label_names == tuple("0123456789")
    assert "not MNIST as published" in data.note


def test_the_published_numbers_of_digits_are_known(nowhere: Path) -> None:
    """The counts are public: 60,000 and 10,000 images."""
    assert sum(mnist.COUNTS) == 70_000
    labels = np.repeat(np.arange(10), mnist.COUNTS).astype(np.uint8)
    folder = write(nowhere / "data")
    for part, y in (("train", labels[:60_000]), ("t10k", labels[60_000:])):
        images = np.zeros((len(y), 28, 28), np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images), 1))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y), 1))
    assert mnist.load(folder).note == ""


def test_nowhere_says_what_to_do(nowhere: Path) -> None:
    with pytest.raises(BadInput, match=r"MNIST is in none of .*run 'feddbe data get mnist'"):
        mnist.load(nowhere / "data")
    assert set(mnist.sums()) == {f"{name}.gz" for name in mnist.MD5}
