"""Tests of the cache: it returns the built arrays, detects damage, and is never incomplete."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddbe.data.dataset import Dataset
from feddbe.data.files import CachedArrays, NewArray, load_cached
from feddbe.errors import InvalidInputError
from tests.waiting import PATIENCE

X = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDBE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = tmp_path / "source"
    path.write_bytes(b"published")
    return path


class Builder:
    """Fills the arrays, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, new: NewArray) -> None:
        self.calls += 1
        new("x", X.shape, X.dtype)[:] = X
        new("y", (2,), np.int64)[:] = [7, self.calls]


def cache_folder(source: Path) -> Path:
    return source.parent / "home" / ".cache" / "feddbe" / "toy"


def list_names(source: Path) -> list[str]:
    """Return the names in the cache folder, except the lock, which waiting processes have open."""
    return sorted(path.name for path in cache_folder(source).glob("*") if path.name != ".arrays.cache.lock")


def load_toy(source: Path, build: Callable[[NewArray], None], data_dir: Path | None = None) -> CachedArrays:
    return load_cached("toy", data_dir, "arrays", [source], build)


def test_built_once_and_mapped(source: Path) -> None:
    build = Builder()
    for cached in (load_toy(source, build), load_toy(source, build)):
        assert isinstance(cached.arrays["x"], np.memmap)
        assert cached.arrays["x"].tolist() == X.tolist()
        assert cached.arrays["y"].tolist() == [7, 1]
        assert [a.dtype.name for a in cached.arrays.values()] == ["uint8", "int64"]
        assert cached.sha256["x"] == hashlib.sha256(X.tobytes()).hexdigest()
    assert build.calls == 1
    assert list_names(source) == ["arrays.cache"]


def test_writing_to_a_tensor_does_not_change_the_file(source: Path) -> None:
    """torch warns (here: raises) if the memory is read-only."""
    tensor = torch.from_numpy(load_toy(source, Builder()).arrays["x"])
    tensor.zero_()
    assert load_toy(source, Builder()).arrays["x"].tolist() == X.tolist()


def test_known_sha256_equals_hash_of_content(source: Path) -> None:
    cached = load_toy(source, Builder())
    x, y = (torch.from_numpy(cached.arrays[name]) for name in ("x", "y"))
    known = Dataset("toy", x, y, 8, known_sha256=cached.sha256)
    assert known.sha256() == Dataset("toy", torch.from_numpy(X), torch.tensor([7, 1]), 8).sha256()
    assert known.sha256() != Dataset("toy", torch.from_numpy(X), torch.tensor([7, 2]), 8).sha256()


def truncate_array(folder: Path) -> None:
    os.truncate(folder / "x.npy", 100)


def change_last_byte(folder: Path) -> None:
    """Change a byte, but not the length."""
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content[:-1] + b"!")


def remove_array(folder: Path) -> None:
    (folder / "y.npy").unlink()


def remove_header(folder: Path) -> None:
    (folder / "header.json").unlink()


def truncate_header(folder: Path) -> None:
    os.truncate(folder / "header.json", 50)


def replace_header(folder: Path) -> None:
    (folder / "header.json").write_text("[1, 2]")


def change_shape(folder: Path) -> None:
    header = json.loads((folder / "header.json").read_text())
    header["arrays"]["x"]["shape"] = [4, 3, 2]
    (folder / "header.json").write_text(json.dumps(header))


def change_dtype(folder: Path) -> None:
    """The header of an array is not part of its values' checksum."""
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content.replace(b"|u1", b"|i1"))


@pytest.mark.parametrize(
    "damage",
    [
        truncate_array,
        change_last_byte,
        remove_array,
        remove_header,
        truncate_header,
        replace_header,
        change_shape,
        change_dtype,
    ],
)
def test_damaged_cache_is_rebuilt(source: Path, damage: Callable[[Path], None]) -> None:
    build = Builder()
    load_toy(source, build)
    damage(cache_folder(source) / "arrays.cache")
    assert load_toy(source, build).arrays["x"].tolist() == X.tolist()
    assert load_toy(source, build).arrays["y"].tolist() == [7, 2]
    assert build.calls == 2
    assert list_names(source) == ["arrays.cache"]


def flip_bit(folder: Path, array: str) -> None:
    """Flip one bit of the values without changing the file's time."""
    path = folder / f"{array}.npy"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("array", ["x", "y"])
def test_flipped_bit_is_detected(source: Path, array: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    load_toy(source, build)
    flip_bit(cache_folder(source) / "arrays.cache", array)
    cached = load_toy(source, build)
    assert (cached.arrays["x"].tolist(), cached.arrays["y"].tolist()) == (X.tolist(), [7, 2])
    assert "arrays.cache is damaged" in caplog.text


def test_changed_source_rebuilds_cache(source: Path) -> None:
    build = Builder()
    load_toy(source, build)
    source.write_bytes(b"published again")
    load_toy(source, build)
    assert build.calls == 2
    load_toy(source, build)
    assert build.calls == 2


def replace_file(path: Path) -> None:
    """Replace a file with another one of the same size and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def rewrite_in_place(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [replace_file, rewrite_in_place])
@pytest.mark.parametrize("folder", [False, True])
def test_changed_source_of_same_size_and_time_rebuilds_cache(
    source: Path, change: Callable[[Path], None], folder: bool
) -> None:
    source_path = source
    if folder:
        source_path = source.parent / "images"
        source_path.mkdir()
        source = source.rename(source_path / "one")
    build = Builder()
    load_cached("toy", None, "arrays", [source_path], build)
    folder_time = source_path.stat()
    change(source)
    os.utime(source_path, ns=(folder_time.st_atime_ns, folder_time.st_mtime_ns))
    cached = load_cached("toy", None, "arrays", [source_path], build)
    assert (build.calls, cached.arrays["y"].tolist()) == (2, [7, 2])


def test_unchanged_source_is_not_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive can have hundreds of megabytes."""
    load_toy(source, Builder())
    opened, original = list[Path](), Path.open

    def observe(path: Path, *args: Any, **more: Any) -> Any:
        opened.append(path)
        return original(path, *args, **more)

    monkeypatch.setattr(Path, "open", observe)
    load_toy(source, Builder())
    assert opened
    assert source not in opened


def test_failing_build_leaves_no_files(source: Path) -> None:
    def build(new: NewArray) -> None:
        new("x", X.shape, X.dtype)
        raise InvalidInputError("a broken image")

    with pytest.raises(InvalidInputError, match="a broken image"):
        load_toy(source, build)
    assert list_names(source) == []


@pytest.mark.parametrize("moment", ["build", "write"])
def test_process_killed_while_building_leaves_no_cache(source: Path, moment: str) -> None:
    """The next process removes the incomplete folder."""
    code = f"""
import os, signal, sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from feddbe.data import files
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def build(new):
    new("x", (1000,), "u1")[:] = 1
    if {moment!r} == "build":
        kill()
files._describe_array = kill
files.load_cached("toy", None, "arrays", [Path({str(source)!r})], build)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert list_names(source) == ([".arrays.cache.part"] if moment == "write" else [])
    build = Builder()
    load_toy(source, build)
    assert build.calls == 1
    assert list_names(source) == ["arrays.cache"]


def test_unwritable_folders_keep_arrays_in_memory_and_warn_once(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    (tmp_path / "data").write_text("here too")
    build = Builder()
    for _ in range(2):
        cached = load_toy(source, build, tmp_path / "data")
        assert cached.arrays["x"].tolist() == X.tolist()
        assert not isinstance(cached.arrays["x"], np.memmap)
        assert cached.sha256["x"] == hashlib.sha256(X.tobytes()).hexdigest()
    (record,) = caplog.records
    assert "no folder for a cache" in record.getMessage()
    assert str(cache_folder(source)) in record.getMessage()


def test_next_folder_is_used_if_first_is_unwritable(source: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    build = Builder()
    for _ in range(2):
        load_toy(source, build, tmp_path / "data")
    assert build.calls == 1
    assert (cache_folder(source) / "arrays.cache").is_dir()


def test_full_disk_keeps_arrays_in_memory(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files are limited to 1 MB, as on a full disk; the array has 4 MB."""

    def build(new: NewArray) -> None:
        new("x", (1 << 22,), np.uint8)[:] = 3

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        cached = load_toy(source, build)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert int(cached.arrays["x"].sum(dtype=np.int64)) == 3 << 22
    assert list_names(source) == []
    assert "File too large" in caplog.text


def build_concurrently(source: Path, barrier: Barrier, results: Any) -> None:
    def build(new: NewArray) -> None:
        x = new("x", (1 << 20,), np.uint8)
        barrier.wait(PATIENCE)  # all processes are building
        x[:] = 5
        new("owner", (1,), np.int64)[:] = os.getpid()

    cached = load_toy(source, build)
    results.put((int(cached.arrays["x"].sum(dtype=np.int64)), int(cached.arrays["owner"][0])))


@pytest.mark.parametrize("stale", [False, True])
def test_concurrent_builds_share_one_cache(source: Path, stale: bool) -> None:
    if stale:
        load_toy(source, Builder())
        source.write_bytes(b"something new")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=build_concurrently, args=(source, barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    totals_and_owners = [results.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
    assert [total for total, _ in totals_and_owners] == [5 << 20] * 3
    cached = load_cached("toy", None, "arrays", [source], Builder()).arrays
    assert int(cached["x"].sum(dtype=np.int64)) == 5 << 20, "not built again"
    assert int(cached["owner"][0]) in [owner for _, owner in totals_and_owners]
    if not stale:
        assert len({owner for _, owner in totals_and_owners}) == 1, "all processes load the first cache"
    assert list_names(source) == ["arrays.cache"]
