"""Tests of data sets by name and by path."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from feddbe.data import files
from feddbe.data.builtin.images import DATASETS, IdxDataset
from feddbe.data.files import VERIFICATION_TEXTS, Publisher, Verification
from feddbe.data.registry import BUILTIN_DATASETS, load_dataset
from feddbe.errors import InvalidInputError


def test_every_builtin_dataset_has_a_description() -> None:
    assert {"digits", "fmnist", "cifar100", "tiny_imagenet"} <= set(BUILTIN_DATASETS)
    for name, dataset in BUILTIN_DATASETS.items():
        assert dataset.name == name
        assert dataset.description
        assert "\n" not in dataset.description


def test_load_digits_by_name() -> None:
    data = load_dataset("digits")
    assert (data.name, len(data)) == ("digits", 1797)
    assert not BUILTIN_DATASETS["digits"].is_downloadable
    assert BUILTIN_DATASETS["digits"].locate(None) == "in scikit-learn"


def test_fmnist_is_searched_in_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    dataset = DATASETS["fmnist"]
    assert isinstance(dataset, IdxDataset)
    monkeypatch.setitem(DATASETS, "fmnist", replace(dataset, system_folder=tmp_path / "debian"))
    assert BUILTIN_DATASETS["fmnist"].is_downloadable
    assert BUILTIN_DATASETS["fmnist"].locate(tmp_path) is None
    with pytest.raises(InvalidInputError, match="feddbe data get fmnist"):
        load_dataset("fmnist", tmp_path)
    for name in dataset.publisher.checksums:
        (tmp_path / name).touch()
    assert BUILTIN_DATASETS["fmnist"].locate(tmp_path) == str(tmp_path)
    with pytest.raises(InvalidInputError, match="is not an IDX file"):
        load_dataset("fmnist", tmp_path)


def test_checksum_status_is_that_of_the_least_verified_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least verified file counts, also if its text is the shortest."""
    contents = {"train-images-idx3-ubyte.gz": b"images", "train-labels-idx1-ubyte.gz": b"labels"}
    for name in DATASETS["mnist"].publisher.checksums:
        (tmp_path / name).write_bytes(contents.get(name, b"other"))
    texts = {verification: "-" * (9 - verification) for verification in VERIFICATION_TEXTS}
    for mapping in (VERIFICATION_TEXTS, texts):
        monkeypatch.setattr(files, "VERIFICATION_TEXTS", mapping)
        for is_right, expected in ((False, Verification.OTHER_CHECKSUM), (True, Verification.VERIFIED)):
            checksums = {
                name: "md5:"
                + hashlib.md5(
                    b"wrong" if not is_right and name in contents else path.read_bytes()
                ).hexdigest()
                for name in DATASETS["mnist"].publisher.checksums
                if (path := tmp_path / name)
            }
            with monkeypatch.context() as patch:
                patch.setitem(
                    DATASETS, "mnist", replace(DATASETS["mnist"], publisher=Publisher("", checksums))
                )
                assert BUILTIN_DATASETS["mnist"].checksum_status(tmp_path) == mapping[expected]


@pytest.mark.parametrize("kind", [str, Path])
def test_load_user_file_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[str] | type[Path]
) -> None:
    np.savez(tmp_path / "digits.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4) % 2)
    assert len(load_dataset(kind(tmp_path / "digits.npz"))) == 4
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_dataset(kind("~/digits.npz"))) == 4


def test_unknown_name_suggests_closest_name() -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_dataset("digit")
    assert str(caught.value).startswith("unknown data set 'digit'; did you mean 'digits'? allowed: ")
    assert "FILE.npz" in str(caught.value)


def test_missing_path_lists_accepted_forms() -> None:
    with pytest.raises(InvalidInputError, match=r"nowhere/mine does not exist; accepted are FILE.npz, "):
        load_dataset("nowhere/mine")
