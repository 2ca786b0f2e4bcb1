"""Tests of Python objects as data: arrays, frames, torch data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import feddbe
from feddbe.data.registry import dataset_from_object
from feddbe.data.user.arrays import load_object
from feddbe.errors import InvalidInputError

X = np.random.RandomState(0).randn(30, 4).astype(np.float32)
Y = np.array(["no", "yes", "yes"] * 10)
CLIENTS = np.array(["Ulm", "Bonn"] * 15)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda values: values.tolist()])
def test_load_arrays_tensors_and_lists(make: Any) -> None:
    data = load_object((make(X), Y))
    assert torch.allclose(data.x, torch.from_numpy(X))
    assert (data.y.tolist(), data.label_names, data.client) == ([0, 1, 1] * 10, ("no", "yes"), None)
    data = load_object((make(X), Y, CLIENTS))
    assert data.client is not None
    assert (data.client.tolist(), data.client_names) == ([1, 0] * 15, ("Bonn", "Ulm"))


def test_load_mapping_with_the_names_of_an_npz() -> None:
    data = load_object({"x": np.arange(60).reshape(30, 2), "y": Y, "words": 60})
    assert (data.num_words, data.x.dtype) == (60, torch.int32)


def test_load_torch_dataset() -> None:
    data = load_object(TensorDataset(torch.from_numpy(X), torch.arange(30) % 3 + 1))
    assert torch.equal(data.x, torch.from_numpy(X))
    assert data.label_names == ("1", "2", "3")
    who = load_object(TensorDataset(torch.from_numpy(X), torch.arange(30) % 3, torch.arange(30) // 10))
    assert who.client_names == ("0", "1", "2")


def test_load_pandas_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": np.arange(30), "job": ["a", "b", None] * 10, "buys": Y, "town": CLIENTS})
    data = load_object((frame, "label=buys&client=town&missing=mean"))
    assert (data.x.shape, data.label_names, data.client_names) == ((30, 3), ("no", "yes"), ("Bonn", "Ulm"))
    with pytest.raises(
        InvalidInputError, match="column 'job' of the frame has no value in row 2 and in 9 more"
    ):
        load_object((frame, "label=buys&client=town"))
    plain = frame.drop(columns="job").rename(columns={"buys": "label", "town": "client"})
    assert load_object(plain).x.shape == (30, 1)
    with pytest.raises(InvalidInputError, match="the frame has no column 'label'; it has: age"):
        load_object(frame)


def test_large_integer_labels_in_a_frame_stay_exact_with_missing_values() -> None:
    pandas = pytest.importorskip("pandas")
    labels = pandas.array([2**53 + 1, 2**53, None, 2**53 + 1], dtype="Int64")
    data = load_object((pandas.DataFrame({"a": range(4), "label": labels}), "missing=drop"))
    assert (data.label_names, data.y.tolist()) == ((str(2**53), str(2**53 + 1)), [1, 0, 1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, r"data is a int; accepted are a name or path, a feddbe\.Dataset, \(x, y\)"),
        ((X,), "data is a tuple; accepted"),
        ([X, Y], "data is a list; accepted"),
        ((X, Y[:5]), r"y in data has shape \(5,\), but x has 30 samples"),
        ((X.astype(int), Y), "x in data is int64; accepted are uint8 .* and word numbers with"),
        ({"x": X}, "data has no array 'y'; it has: x"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "'x' in data is not an array: "),
        (TensorDataset(torch.from_numpy(X)), r"sample 0 of data is a tuple, not \(x, y\)"),
    ],
)
def test_invalid_object_is_an_error(data: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_object(data)
    assert "\n" not in str(caught.value)


def test_names_and_paths_are_not_objects() -> None:
    assert dataset_from_object("digits") is None
    assert dataset_from_object(Path("a.csv")) is None


def test_run_stores_label_and_client_names(tmp_path: Path) -> None:
    run = feddbe.run("fedavg", data=(X, Y, CLIENTS), rounds=1, out=str(tmp_path / "run"), engine="serial")
    assert (run["label_names"], run["client_names"]) == (["no", "yes"], ["Bonn", "Ulm"])
    assert feddbe.load_run(tmp_path / "run")["client_names"] == ["Bonn", "Ulm"]
    assert run["config"]["data"] == "arrays"
