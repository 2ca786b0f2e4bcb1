"""Tests of MNIST and Fashion-MNIST: search folders, errors, and the real files if available."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from feddbe.data.builtin.images import DATASETS, IdxDataset, read_idx
from feddbe.data.files import Publisher
from feddbe.data.registry import BUILTIN_DATASETS, load_dataset
from feddbe.errors import InvalidInputError


def get_dataset(name: str) -> IdxDataset:
    """Return the registered data set, which a test may have changed."""
    dataset = DATASETS[name]
    assert isinstance(dataset, IdxDataset)
    return dataset


needs_fmnist = pytest.mark.skipif(
    get_dataset("fmnist").find(None) is None and not os.environ.get("CI"),
    reason="Fashion-MNIST is not on this machine (Debian: dataset-fashion-mnist)",
)


def encode_idx(values: npt.NDArray[np.uint8]) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_files(folder: Path, train: int = 4, test: int = 2, compressed: bool = True) -> Path:
    """Write four files with `train` + `test` images; image i has pixels of value i and label i % 10."""
    folder.mkdir(parents=True, exist_ok=True)
    number = np.arange(train + test, dtype=np.uint8)
    for part, rows in (("train", number[:train]), ("t10k", number[train:])):
        images = np.broadcast_to(rows[:, None, None], (len(rows), 28, 28))
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", rows % 10)):
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(encode_idx(values)))
            else:
                (folder / name).write_bytes(encode_idx(values))
    return folder


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine without Fashion-MNIST; return its home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    without_system_folder = replace(get_dataset("fmnist"), system_folder=tmp_path / "debian")
    monkeypatch.setitem(DATASETS, "fmnist", without_system_folder)
    return tmp_path / "home"


@needs_fmnist
def test_real_files() -> None:
    """Mean .2860 and deviation .3530 of the training pixels are the commonly used values."""
    data = get_dataset("fmnist").load(None)
    assert (data.name, data.classes, len(data)) == ("fmnist", 10, 70_000)
    assert (data.x.shape, data.x.dtype) == ((70_000, 1, 28, 28), torch.uint8)
    assert torch.bincount(data.y).tolist() == [7000] * 10
    assert torch.bincount(data.y[60_000:]).tolist() == [1000] * 10, "the test set comes last"
    pixels = data.x[:60_000].float() / 255
    assert float(pixels.mean()) == pytest.approx(0.2860, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3530, abs=5e-5)
    assert data.note == ""


def test_other_data_with_the_same_file_names_is_noted(tmp_path: Path) -> None:
    """MNIST's files have the same names and shapes; its classes have different sizes."""
    assert "not Fashion-MNIST as published" in get_dataset("fmnist").load(write_files(tmp_path)).note


@pytest.mark.parametrize("compressed", [True, False])
def test_training_set_then_test_set(tmp_path: Path, compressed: bool) -> None:
    data = get_dataset("fmnist").load(write_files(tmp_path, train=3, test=9, compressed=compressed))
    assert data.x[:, 0, 5, 7].tolist() == list(range(12))
    assert data.y.tolist() == [*range(10), 0, 1]
    assert (data.y.dtype, data.client) == (torch.int64, None)
    inputs = data.inputs(torch.tensor([0, 255], dtype=torch.uint8))
    assert inputs.tolist() == pytest.approx([-1, 1])


def test_folders_are_searched_in_order(
    tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDDBE_DATA", str(tmp_path / "env"))
    folders = [
        tmp_path / "option",
        tmp_path / "option" / "fmnist",
        tmp_path / "env",
        tmp_path / "env" / "fmnist",
        empty_home / ".cache" / "feddbe",
        empty_home / ".cache" / "feddbe" / "fmnist",
        tmp_path / "debian",
    ]
    assert get_dataset("fmnist").find(tmp_path / "option") is None
    for folder in reversed(folders):
        write_files(folder)
        assert get_dataset("fmnist").find(tmp_path / "option") == folder
    assert get_dataset("fmnist").find(None) == tmp_path / "env"


def test_incomplete_folder_is_skipped(tmp_path: Path, empty_home: Path) -> None:
    write_files(tmp_path / "data")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert get_dataset("fmnist").find(tmp_path / "data") is None
    complete_folder = write_files(empty_home / ".cache" / "feddbe")
    assert get_dataset("fmnist").find(tmp_path / "data") == complete_folder


def test_missing_data_error_names_folders_and_remedies(tmp_path: Path, empty_home: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        get_dataset("fmnist").load(tmp_path / "data")
    message = str(caught.value)
    assert "\n" not in message
    for folder in (tmp_path / "data", empty_home / ".cache" / "feddbe", tmp_path / "debian"):
        assert str(folder) in message
    assert "feddbe data get fmnist" in message
    assert "dataset-fashion-mnist" in message
    assert "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz" in message
    assert message.endswith(f"into {tmp_path / 'data' / 'fmnist'}")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "t10k-labels-idx1-ubyte",
            np.array([3, 10], np.uint8),
            "t10k-labels.* has the label 10, expected 0..9",
        ),
        ("train-labels-idx1-ubyte", np.zeros(5, np.uint8), r"train-labels\S* \(5,\); expected .* \(n,\)"),
        ("train-images-idx3-ubyte", np.zeros((4, 28, 27), np.uint8), r"train-images.* shape \(4, 28, 27\)"),
        ("train-images-idx3-ubyte", np.zeros(4, np.uint8), r"train-images.* shape \(4,\)"),
    ],
)
def test_invalid_file_is_an_error(
    tmp_path: Path, name: str, values: npt.NDArray[np.uint8], message: str
) -> None:
    write_files(tmp_path)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(encode_idx(values)))
    with pytest.raises(InvalidInputError, match=message):
        get_dataset("fmnist").load(tmp_path)


def test_error_names_truncated_gzip(tmp_path: Path) -> None:
    path = write_files(tmp_path) / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InvalidInputError, match=f"cannot read {path}"):
        get_dataset("fmnist").load(tmp_path)


@pytest.fixture
def publisher(tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace the publisher by a local server with small files; return its folder."""
    folder = write_files(tmp_path / "publisher")
    dataset = get_dataset("fmnist")
    checksums = {
        name: f"md5:{hashlib.md5((folder / name).read_bytes()).hexdigest()}"
        for name in dataset.publisher.checksums
    }

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setitem(DATASETS, "fmnist", replace(dataset, publisher=Publisher(url, checksums)))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder
        server.shutdown()
        thread.join()


def test_download_keeps_intact_files(empty_home: Path, publisher: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    BUILTIN_DATASETS["fmnist"].download(None, lambda done, total: calls.append((done, total)))
    folder = empty_home / ".cache" / "feddbe" / "fmnist"
    assert get_dataset("fmnist").find(None) == folder
    assert len(get_dataset("fmnist").load(None)) == 6
    assert [done for done, _ in calls] == [total for _, total in calls]
    assert len(calls) == 4

    calls.clear()
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    BUILTIN_DATASETS["fmnist"].download(None, lambda done, total: calls.append((done, total)))
    assert len(calls) == 1, "existing files are kept"


def test_download_into_data_dir(tmp_path: Path, empty_home: Path, publisher: Path) -> None:
    BUILTIN_DATASETS["fmnist"].download(tmp_path / "data")
    assert get_dataset("fmnist").find(tmp_path / "data") == tmp_path / "data" / "fmnist"


def test_download_with_wrong_checksum_is_an_error(tmp_path: Path, empty_home: Path, publisher: Path) -> None:
    (publisher / "t10k-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(InvalidInputError, match=r"t10k-images-idx3-ubyte.gz from .* has the checksum md5:"):
        BUILTIN_DATASETS["fmnist"].download(tmp_path / "data")
    assert get_dataset("fmnist").find(tmp_path / "data") is None


def test_mnist_training_set_then_test_set(empty_home: Path) -> None:
    data = load_dataset("mnist", write_files(empty_home.parent / "data" / "mnist", train=3, test=9).parent)
    assert (data.name, data.classes, data.x.shape) == ("mnist", 10, (12, 1, 28, 28))
    assert (data.x[:, 0, 5, 7].tolist(), data.y.tolist()) == (list(range(12)), [*range(10), 0, 1])
    assert data.label_names == tuple("0123456789")
    assert "not MNIST as published" in data.note


def test_mnist_class_sizes_are_the_published_ones(empty_home: Path) -> None:
    """The counts are public: 60,000 and 10,000 images."""
    dataset = get_dataset("mnist")
    assert sum(dataset.class_sizes) == 70_000
    labels = np.repeat(np.arange(10), dataset.class_sizes).astype(np.uint8)
    folder = write_files(empty_home.parent / "data")
    for part, y in (("train", labels[:60_000]), ("t10k", labels[60_000:])):
        images = np.zeros((len(y), 28, 28), np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(encode_idx(images), 1))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(encode_idx(y), 1))
    assert get_dataset("mnist").load(folder).note == ""


def test_missing_mnist_error_names_the_command(empty_home: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"MNIST is in none of .*run 'feddbe data get mnist'"):
        get_dataset("mnist").load(empty_home.parent / "data")
    assert len(get_dataset("mnist").publisher.checksums) == 4


VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
BYTES = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(range(24))


@pytest.mark.parametrize("content", [BYTES, gzip.compress(BYTES, mtime=0)], ids=["plain", "gz"])
def test_read_idx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"  # recognized by content, not by name
    path.write_bytes(content)
    assert np.array_equal(read_idx(path, 100), VALUES)
    assert read_idx(path, 100).dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file of bytes: it starts with nothing"),
        (BYTES[:3], "starts with 000008, expected 000008 and the number of axes"),
        (BYTES[:10], "starts with 00000803"),
        (b"\0\0\x08\0", "starts with 00000800"),
        (b"\0\0\x0d\x01" + struct.pack(">I", 0), "starts with 00000d01"),
        (b"<html>404</html>", "starts with 3c68746d"),
        (BYTES[:-1], r"has 39 bytes, but its header announces \(2, 3, 4\), which takes 40"),
        (BYTES + b"\0", "has 41 bytes, .* which takes 40"),
        (b"\0\0\x08\x04" + b"\xff" * 16, "has 20 bytes"),
        (gzip.compress(BYTES, mtime=0)[:-9], "cannot read .*fetch the file again"),
        (gzip.compress(BYTES, mtime=0)[:5], "cannot read"),
        (gzip.compress(BYTES, mtime=0)[:10] + b"\xff" * 30, "cannot read"),
        (gzip.compress(BYTES, mtime=0) + b"garbage", "cannot read"),
    ],
)
def test_read_idx_rejects_other_content(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_idx(path, 100)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_idx_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot read .*absent.*No such file"):
        read_idx(tmp_path / "absent", 100)
