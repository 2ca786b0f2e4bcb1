"""Tests of CIFAR-10 and CIFAR-100 in both formats, packed or not: small files and the real ones."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from feddbe.config.options import Config
from feddbe.data.builtin.images import DATASETS, CifarDataset
from feddbe.errors import InvalidInputError
from feddbe.runs.experiment import resolve


def get_dataset(name: str) -> CifarDataset:
    """Return the registered data set, which a test may have changed."""
    dataset = DATASETS[name]
    assert isinstance(dataset, CifarDataset)
    return dataset


def shrink(monkeypatch: pytest.MonkeyPatch, name: str, sizes: Mapping[str, int]) -> None:
    """Change the sizes of the publisher's parts."""
    monkeypatch.setitem(DATASETS, name, replace(get_dataset(name), sizes=sizes))


needs_cifar100 = pytest.mark.skipif(
    get_dataset("cifar100").find(None) is None,
    reason="CIFAR-100 is not on this machine (feddbe data get cifar100)",
)

PIXELS = np.random.RandomState(0).randint(0, 256, (6, 3, 32, 32)).astype(np.uint8)
LABELS = [99, 0, 7, 7, 50, 3]
PIXELS_10 = np.random.RandomState(0).randint(0, 256, (12, 3, 32, 32)).astype(np.uint8)
LABELS_10 = [9, 0, 7, 7, 5, 3, 1, 2, 4, 6, 8, 8]
PARTS_10 = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine without the data, whose publishers' parts have few images."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    shrink(monkeypatch, "cifar100", {"train": 4, "test": 2})
    shrink(monkeypatch, "cifar10", dict.fromkeys(PARTS_10, 2))
    return tmp_path / "data"


def part_rows(part: str) -> slice:
    return slice(0, 4) if part == "train" else slice(4, 6)


def write_binary(folder: Path) -> Path:
    """Write train.bin and test.bin; the coarse labels are all 19."""
    (folder / "cifar-100-binary").mkdir(parents=True)
    for part in ("train", "test"):
        content = b"".join(
            bytes([19, label]) + image.tobytes()
            for label, image in zip(LABELS[part_rows(part)], PIXELS[part_rows(part)], strict=True)
        )
        (folder / "cifar-100-binary" / f"{part}.bin").write_bytes(content)
    return folder / "cifar-100-binary"


def write_python(folder: Path, **change: Any) -> Path:
    """Write train and test as dictionaries with bytes as keys, like Python 2's pickles."""
    (folder / "cifar-100-python").mkdir(parents=True)
    for part in ("train", "test"):
        values = {
            b"data": PIXELS[part_rows(part)].reshape(-1, 3072),
            b"fine_labels": LABELS[part_rows(part)],
            b"coarse_labels": [19] * len(LABELS[part_rows(part)]),
            **{key.encode(): value for key, value in change.items()},
        }
        (folder / "cifar-100-python" / part).write_bytes(pickle.dumps(values, protocol=2))
    return folder / "cifar-100-python"


def pack(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Return a function that writes an archive instead, the test set first."""

    def archive(folder: Path) -> Path:
        unpacked = write(folder.with_name(f"{folder.name}-unpacked"))
        folder.mkdir(parents=True)
        with tarfile.open(folder / f"{unpacked.name}.tar.gz", "w:gz") as tar:
            for path in sorted(unpacked.iterdir()):
                tar.add(path, f"{unpacked.name}/{path.name}")
        return folder / f"{unpacked.name}.tar.gz"

    return archive


FORMATS = {
    "binary": write_binary,
    "python": write_python,
    "binary.tar.gz": pack(write_binary),
    "python.tar.gz": pack(write_python),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_training_set_then_test_set(data_dir: Path, kind: str) -> None:
    path = FORMATS[kind](data_dir)
    assert get_dataset("cifar100").find(data_dir) == path
    for _ in ("decoded", "from the cache"):
        data = get_dataset("cifar100").load(data_dir)
        assert (data.name, data.classes, len(data)) == ("cifar100", 100, 6)
        assert torch.equal(data.x, torch.from_numpy(PIXELS))
        assert data.y.tolist() == LABELS
        assert data.inputs(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1, 1])


def test_all_formats_give_equal_data(data_dir: Path) -> None:
    hashes = {
        get_dataset("cifar100").load(make(data_dir / kind).parent).sha256() for kind, make in FORMATS.items()
    }
    assert len(hashes) == 1


def test_dataset_folder_is_accepted_as_data_dir(data_dir: Path) -> None:
    folder = write_binary(data_dir)
    assert get_dataset("cifar100").find(folder) == folder
    assert len(get_dataset("cifar100").load(folder)) == 6


def truncate_train(folder: Path) -> None:
    os.truncate(folder / "train.bin", 4 * 3074 - 1)


def extend_test(folder: Path) -> None:
    os.truncate(folder / "test.bin", 3 * 3074)


def write_invalid_label(folder: Path) -> None:
    content = bytearray((folder / "test.bin").read_bytes())
    content[3074 + 1] = 100
    (folder / "test.bin").write_bytes(content)


def remove_train(folder: Path) -> None:
    (folder / "train.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_train, r"train\.bin has only 12295 bytes, expected 12296"),
        (extend_test, r"test\.bin has more bytes, expected 6148"),
        (write_invalid_label, r"the test set in .* has labels outside of 0\.\.99"),
        (remove_train, "has no file for the train set"),
    ],
)
def test_invalid_binary_file_is_an_error(
    data_dir: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(write_binary(data_dir))
    with pytest.raises(InvalidInputError, match=message):
        get_dataset("cifar100").load(data_dir)
    assert not list(data_dir.rglob("*.npy")), "no incomplete cache"


def test_error_names_truncated_archive(data_dir: Path) -> None:
    archive = pack(write_binary)(data_dir)
    os.truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(InvalidInputError, match=f"cannot read {archive}"):
        get_dataset("cifar100").load(data_dir)


class TouchFile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_calls_in_a_pickle_are_not_executed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_python(data_dir, filenames=[TouchFile()])
    monkeypatch.chdir(data_dir)
    with pytest.raises(InvalidInputError, match="is never called"):
        get_dataset("cifar100").load(data_dir)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((4, 3072))}, r"pixels float64\(4, 3072\)"),
        ({"data": PIXELS[:4]}, r"pixels uint8\(4, 3, 32, 32\)"),
        ({"fine_labels": [0.5, 1, 2, 3]}, "labels outside of 0..99"),
        ({"fine_labels": [0, 1, 2]}, r"labels \(3,\)"),
    ],
)
def test_invalid_python_file_is_an_error(
    data_dir: Path, change: dict[str, npt.NDArray[Any]], message: str
) -> None:
    write_python(data_dir, **change)
    with pytest.raises(InvalidInputError, match=message):
        get_dataset("cifar100").load(data_dir)


def test_missing_data_error_names_file_and_folder(data_dir: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        get_dataset("cifar100").load(data_dir)
    assert "feddbe data get cifar100" in str(caught.value)
    assert str(caught.value).endswith(
        "put cifar-100-binary.tar.gz or cifar-100-python.tar.gz into " + str(data_dir / "cifar100")
    )


def test_default_options_are_the_tuned_ones(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, "cifar100", {"train": 800, "test": 200})
    folder = data_dir / "cifar-100-binary"
    folder.mkdir(parents=True)
    for part, n in get_dataset("cifar100").sizes.items():
        (folder / f"{part}.bin").write_bytes(b"".join(bytes([0, k % 100]) + bytes(3072) for k in range(n)))
    experiment = resolve("fedavg+dbe", Config(data="cifar100", data_dir=str(data_dir)))
    assert (experiment.options.model, experiment.options.lr) == ("cnn", 0.1)
    assert (experiment.options.partition, experiment.options.clients) == ("dirichlet:0.1", 20)
    assert experiment.config["method_options"]["mr"].items() >= {"kappa": 1.0, "mu": 1.0}.items()
    assert experiment.task.model.parameters["conv1.0.weight"].shape == (32, 3, 5, 5)


@needs_cifar100
def test_real_files() -> None:
    """The hash is that of files with the published MD5; the means are the commonly used ones."""
    data = get_dataset("cifar100").load(None)
    assert torch.bincount(data.y).tolist() == [600] * 100
    assert torch.bincount(data.y[50_000:]).tolist() == [100] * 100, "the test set comes last"
    assert data.sha256() == "1b57c00d52706c5316bb11d2163606641a6562d829f28c09c77008297b5c86cf"
    pixels = data.x[:50_000].to(torch.float32).mean((0, 2, 3)) / 255
    assert pixels.tolist() == pytest.approx([0.5071, 0.4865, 0.4409], abs=5e-5)


def write_cifar10(folder: Path, kind: str) -> Path:
    batch_folder = folder / f"cifar-10-batches-{'bin' if kind == 'binary' else 'py'}"
    batch_folder.mkdir(parents=True)
    for k, name in enumerate(PARTS_10):
        rows = slice(2 * k, 2 * k + 2)
        if kind == "binary":
            pairs = zip(LABELS_10[rows], PIXELS_10[rows], strict=True)
            content = b"".join(bytes([label]) + image.tobytes() for label, image in pairs)
            (batch_folder / f"{name}.bin").write_bytes(content)
        else:
            values = {b"data": PIXELS_10[rows].reshape(-1, 3072), b"labels": LABELS_10[rows]}
            (batch_folder / name).write_bytes(pickle.dumps(values, protocol=2))
    return batch_folder


@pytest.mark.parametrize("kind", ["binary", "python"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar10_five_batches_then_the_test_set(data_dir: Path, kind: str, packed: bool) -> None:
    batch_folder = write_cifar10(data_dir / "unpacked", kind)
    data_folder = batch_folder.parent
    if packed:
        data_folder = data_dir / "packed"
        data_folder.mkdir()
        with tarfile.open(data_folder / f"cifar-10-{kind}.tar.gz", "w:gz") as tar:
            for path in sorted(batch_folder.iterdir(), reverse=True):
                tar.add(path, f"{batch_folder.name}/{path.name}")
    for _ in ("decoded", "from the cache"):
        data = get_dataset("cifar10").load(data_folder)
        assert (data.name, data.classes, len(data)) == ("cifar10", 10, 12)
        assert torch.equal(data.x, torch.from_numpy(PIXELS_10))
        assert (data.y.tolist(), data.label_names[:2]) == (LABELS_10, ("airplane", "automobile"))


def test_cifar10_missing_or_truncated_file_is_an_error(data_dir: Path) -> None:
    batch_folder = write_cifar10(data_dir, "binary")
    os.truncate(batch_folder / "data_batch_3.bin", 100)
    with pytest.raises(InvalidInputError, match=r"data_batch_3\.bin has only 100 bytes, expected 6146"):
        get_dataset("cifar10").load(data_dir)
    (batch_folder / "data_batch_3.bin").unlink()
    with pytest.raises(InvalidInputError, match="has no file for the data_batch_3 set"):
        get_dataset("cifar10").load(data_dir)
    (batch_folder / "test_batch.bin").unlink()
    with pytest.raises(
        InvalidInputError, match=r"run 'feddbe data get cifar10', or put cifar-10-binary.tar.gz or"
    ):
        get_dataset("cifar10").load(data_dir)
