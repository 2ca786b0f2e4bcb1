"""Tests of PFLlib folders: they are read with their split, and pickles are not executed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddbe.config.options import Config
from feddbe.data.federated import load_federated_data
from feddbe.data.registry import load_dataset
from feddbe.errors import InvalidInputError

SIZES = {"train/0": 5, "train/1": 3, "test/0": 2, "test/1": 1}


def write_npz(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, data=data)


def write_folder(folder: Path, **config: Any) -> Path:
    """Write two clients; the first pixel of a sample is its index in the merged data."""
    first = 0
    for name, n in SIZES.items():
        x = np.zeros((n, 1, 2, 2), np.float32)
        x[:, 0, 0, 0] = np.arange(first, first + n)
        write_npz(folder / f"{name}.npz", {"x": x, "y": np.arange(n) % 3})
        first += n
    (folder / "config.json").write_text(json.dumps({"num_clients": 2, "num_classes": 4} | config))
    return folder


def test_load_data_and_split(tmp_path: Path) -> None:
    data = load_dataset(write_folder(tmp_path / "mnist"))
    assert (data.name, data.classes, data.x.dtype) == ("mnist/", 4, torch.float32)
    assert data.x[:, 0, 0, 0].tolist() == [*range(11)]
    assert data.y.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 0]
    assert data.split is not None
    assert [rows.tolist() for rows in data.split.train] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert [rows.tolist() for rows in data.split.test] == [[8, 9], [10]]


def test_config_of_newer_versions_without_classes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"num_clients": 2, "partition": "dir"}')
    assert load_dataset(tmp_path).classes == 3


def test_stored_split_is_the_default_partition(tmp_path: Path) -> None:
    data = str(write_folder(tmp_path))
    _, split, config = load_federated_data(Config(data=data))
    assert [*map(len, split.train)] == [5, 3]
    assert (config.clients, config.partition) == (2, None)
    _, split, config = load_federated_data(Config(data=data, partition="iid", clients=3))
    assert [len(a) + len(b) for a, b in zip(split.train, split.test, strict=True)] == [4, 4, 3]
    with pytest.raises(InvalidInputError, match=r"clients = 3; .* has 2"):
        load_federated_data(Config(data=data, clients=3))


def test_load_texts(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for name, n in SIZES.items():
        x = np.array([([row, 7, 0], 3) for row in range(n)], dtype=object)
        write_npz(tmp_path / f"{name}.npz", {"x": x, "y": np.arange(n) % 3})
    data = load_dataset(tmp_path)
    assert (data.x.dtype, data.x.shape, data.num_words) == (torch.int32, (11, 3), 8)
    assert data.x[4].tolist() == [4, 7, 0]


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_npz(tmp_path / "train/1.npz", {"x": Trap(tmp_path / "sprung"), "y": np.arange(3)})
    with pytest.raises(InvalidInputError, match=r"train/1.npz: .* it asks for 'posix.mkdir'"):
        load_dataset(tmp_path)
    assert not (tmp_path / "sprung").exists()


X3 = np.zeros((3, 1, 2, 2), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "test/1.npz").unlink(), r"test/1.npz does not exist"),
        (
            lambda f: write_npz(f / "train/2.npz", {"x": X3, "y": [0] * 3}),
            r"train/2.npz belongs to no client",
        ),
        (
            lambda f: write_npz(f / "train/1.npz", {"x": X3}),
            r"train/1.npz does not contain what PFLlib writes",
        ),
        (lambda f: write_npz(f / "train/1.npz", X3), r"train/1.npz does not contain what PFLlib writes"),
        (
            lambda f: write_npz(f / "train/1.npz", {"x": X3, "y": np.arange(2)}),
            r"1.npz has x of shape \(3, 1, 2, 2\)",
        ),
        (
            lambda f: write_npz(f / "train/1.npz", {"x": X3[:0], "y": np.arange(0)}),
            "at least one sample to train",
        ),
        (
            lambda f: write_npz(f / "train/1.npz", {"x": X3[:, 0], "y": np.arange(3)}),
            r"have shape \(1, 2, 2\), in .*1.npz",
        ),
        (
            lambda f: write_npz(f / "train/1.npz", {"x": X3, "y": np.array([0, 1, 4])}),
            "label 4, but .* num_classes = 4",
        ),
        (
            lambda f: write_npz(
                f / "train/1.npz", {"x": np.array([[1, 2], [3]] * 2, object)[:3], "y": np.arange(3)}
            ),
            "neither numbers nor texts",
        ),
        (
            lambda f: (f / "train/1.npz").write_bytes(b"PK"),
            r"cannot read .*train/1.npz: .*; let PFLlib write it",
        ),
        (lambda f: np.savez(f / "train/1.npz", x=X3), r"cannot read .*train/1.npz: .*data.npy"),
        (lambda f: (f / "config.json").write_text("{}"), r"cannot use .*config.json: KeyError 'num_clients'"),
        (lambda f: (f / "config.json").write_text("[1"), r"cannot use .*config.json: JSONDecodeError"),
        (lambda f: (f / "config.json").write_text('{"num_clients": "2"}'), "num_clients = '2'"),
    ],
)
def test_invalid_folder_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    change(write_folder(tmp_path))
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_dataset(tmp_path)
    assert "\n" not in str(caught.value)
