"""Tests that small files which unpack to large data are rejected before memory is allocated."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddbe.data.builtin import ag_news, har
from feddbe.data.builtin.images import read_idx
from feddbe.data.files import READ_ERRORS, iterate_members
from feddbe.data.registry import load_dataset
from feddbe.errors import InvalidInputError

MB = 1 << 20


@contextmanager
def expect_error(match: str, max_bytes: int = 8 * MB) -> Iterator[None]:
    """Expect an error of one short line, with at most `max_bytes` bytes in use."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=match) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def write_zeros(file: Any, size: int) -> None:
    for _ in range(size // MB):
        file.write(bytes(MB))


def write_pfllib(folder: Path, x: Any, **config: int) -> Path:
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        content = np.array({"x": x, "y": np.arange(len(x)) % 2}, object)
        np.savez_compressed(folder / part / "0.npz", data=content)
    (folder / "config.json").write_text(json.dumps({"num_clients": 1, "num_classes": 2} | config))
    return folder


def test_pfllib_config_with_a_billion_clients_or_classes(tmp_path: Path) -> None:
    x = np.zeros((4, 3), np.float32)
    with expect_error(r"1\.npz does not exist, but config.json says num_clients = 1000000000"):
        load_dataset(write_pfllib(tmp_path / "clients", x, num_clients=10**9))
    with expect_error(r"has 8 samples, but config.json says num_classes = 1000000000"):
        load_dataset(write_pfllib(tmp_path / "classes", x, num_classes=10**9))


def test_pfllib_text_with_high_word_number(tmp_path: Path) -> None:
    x = np.empty(4, object)
    for row in range(4):
        x[row] = ([1, 2, 2**31 - 1], 3)
    with expect_error(r"has the word number 2147483647, but only 24 words"):
        load_dataset(write_pfllib(tmp_path / "words", x))


def test_npz_that_unpacks_to_300_mb(tmp_path: Path) -> None:
    for name, member in {"a.npz": "x.npy", "folder/train/0.npz": "data.npy"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(member, "w") as file:
            write_zeros(file, 300 * MB)
    with expect_error(r"a\.npz has \d+ bytes and would unpack to 314572800; write it without compression"):
        load_dataset(tmp_path / "a.npz")
    (tmp_path / "folder" / "test").mkdir()
    (tmp_path / "folder" / "test" / "0.npz").write_bytes(b"")
    (tmp_path / "folder" / "config.json").write_text('{"num_clients": 1}')
    with expect_error("would unpack to 314572800"):
        load_dataset(tmp_path / "folder")


def test_idx_gzip_over_limit(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        write_zeros(file, 50 * MB)
    with expect_error("has more than the 1048576 bytes that were expected"):
        read_idx(tmp_path / "a.gz", MB)


@pytest.mark.parametrize(("suffix", "open_file"), [(".gz", gzip.open), (".xz", lzma.open), ("", open)])
def test_ag_news_file_over_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, open_file: Callable[..., Any]
) -> None:
    monkeypatch.setattr(ag_news, "_MAX_UNPACKED_BYTES", MB)
    for name in ag_news.publisher.checksums:
        with open_file(tmp_path / f"{name}{suffix}", "wb") as file:
            write_zeros(file, 20 * MB)
    with expect_error("it has more than the 1048576 bytes that were expected", 16 * MB):
        ag_news.load(tmp_path)
    assert str(ag_news.describe_location(tmp_path)).endswith("(damaged)")


@pytest.mark.parametrize(
    ("text", "most", "message"),
    [
        ((b"1 " * 99 + b"\n") * 1000, 10**5, "has 502 lines or more, 100001 bytes"),
        (b"1\n" * 11_000, 10**5, "has 11000 lines or more"),
        (b"1 " * 1_400_000, 10**7, r"has a table of \(1, 1400000\)"),
    ],
)
def test_har_table_over_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, most: int, message: str
) -> None:
    monkeypatch.setattr(har, "_MAX_FILE_BYTES", most)
    with zipfile.ZipFile(tmp_path / har.ARCHIVES[0], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{har.FOLDER}/{har.FILES[0]}", text)
    with expect_error(message, 64 * MB):
        har.load(tmp_path)


def test_har_archive_with_duplicate_member(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / har.ARCHIVES[1], "w:xz") as archive:
        for _ in range(2):
            entry = tarfile.TarInfo(f"{har.FOLDER}/{har.FILES[0]}")
            entry.size = 2
            archive.addfile(entry, io.BytesIO(b"1\n"))
    with expect_error("has 'train/y_train.txt' twice", 64 * MB):
        har.load(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_tar_with_a_long_name(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb") as file:
        entry = tarfile.TarInfo("a")
        entry.type, entry.size = kind, 50 * MB
        file.write(entry.tobuf())
        write_zeros(file, 50 * MB)
    tracemalloc.start()
    with pytest.raises(READ_ERRORS, match="a name or attributes of 52428800 bytes"):
        list(iterate_members(path, 10**9))
    assert tracemalloc.get_traced_memory()[1] < 8 * MB
    tracemalloc.stop()


def test_tar_with_too_many_members(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(tarfile.TarInfo("a").tobuf() * 20_000)
    with expect_error("has more than 10000 entries", 64 * MB):
        for _ in iterate_members(path, 10**9):
            pass


@pytest.mark.parametrize("name", ["a.npz", "a.csv", "a.parquet", "a"])
def test_pipe_is_rejected(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with expect_error("is neither a file nor a folder"):
        load_dataset(tmp_path / name)


def test_pipe_in_folder_is_rejected(tmp_path: Path) -> None:
    folder = write_pfllib(tmp_path / "set", np.zeros((4, 3), np.float32))
    (folder / "test" / "0.npz").unlink()
    os.mkfifo(folder / "test" / "0.npz")
    with expect_error("is neither a file nor a folder"):
        load_dataset(folder)
    os.mkfifo(tmp_path / har.ARCHIVES[0])
    assert har.find(tmp_path) is None
