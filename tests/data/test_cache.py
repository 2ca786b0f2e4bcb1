"""The cache gives back what was built, notices what is not whole, and never leaves half of one behind."""

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

from feddbe.data.cache import CachedArrays, NewArray, load_cached
from feddbe.data.dataset import Dataset
from feddbe.errors import InvalidInputError

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
    """Fills the arrays, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, new: NewArray) -> None:
        self.times += 1
        new("x", X.shape, X.dtype)[:] = X
        new("y", (2,), np.int64)[:] = [7, self.times]


def home(source: Path) -> Path:
    return source.parent / "home" / ".cache" / "feddbe" / "toy"


def names(source: Path) -> list[str]:
    """What is there; the lock stays, as a process that waits for it has it open."""
    return sorted(path.name for path in home(source).glob("*") if path.name != ".arrays.cache.lock")


def take(source: Path, build: Callable[[NewArray], None], data_dir: Path | None = None) -> CachedArrays:
    return load_cached("toy", data_dir, "arrays", [source], build)


def test_built_once_and_mapped(source: Path) -> None:
    build = Builder()
    for found in (take(source, build), take(source, build)):
        assert isinstance(found.arrays["x"], np.memmap)
        assert found.arrays["x"].tolist() == X.tolist()
        assert found.arrays["y"].tolist() == [7, 1]
        assert [a.dtype.name for a in found.arrays.values()] == ["uint8", "int64"]
        assert found.sha256["x"] == hashlib.sha256(X.tobytes()).hexdigest()
    assert build.times == 1
    assert names(source) == ["arrays.cache"]


def test_torch_takes_it_and_writing_does_not_reach_the_file(source: Path) -> None:
    """torch warns (here: raises) if the memory is read-only."""
    tensor = torch.from_numpy(take(source, Builder()).arrays["x"])
    tensor.zero_()
    assert take(source, Builder()).arrays["x"].tolist() == X.tolist()


def test_the_known_hash_is_the_one_of_the_content(source: Path) -> None:
    found = take(source, Builder())
    x, y = (torch.from_numpy(found.arrays[name]) for name in ("x", "y"))
    known = Dataset("toy", x, y, 8, known_sha256=found.sha256)
    assert known.sha256() == Dataset("toy", torch.from_numpy(X), torch.tensor([7, 1]), 8).sha256()
    assert known.sha256() != Dataset("toy", torch.from_numpy(X), torch.tensor([7, 2]), 8).sha256()


def cut(folder: Path) -> None:
    os.truncate(folder / "x.npy", 100)


def rewrite(folder: Path) -> None:
    """The same length, other bytes."""
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content[:-1] + b"!")


def remove(folder: Path) -> None:
    (folder / "y.npy").unlink()


def no_header(folder: Path) -> None:
    (folder / "header.json").unlink()


def half_header(folder: Path) -> None:
    os.truncate(folder / "header.json", 50)


def foreign_header(folder: Path) -> None:
    (folder / "header.json").write_text("[1, 2]")


def other_shape(folder: Path) -> None:
    header = json.loads((folder / "header.json").read_text())
    header["arrays"]["x"]["shape"] = [4, 3, 2]
    (folder / "header.json").write_text(json.dumps(header))


def other_type(folder: Path) -> None:
    """The header of an array is not part of its values' checksum."""
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content.replace(b"|u1", b"|i1"))


@pytest.mark.parametrize(
    "damage",
    [cut, rewrite, remove, no_header, half_header, foreign_header, other_shape, other_type],
)
def test_what_is_not_whole_is_built_again(source: Path, damage: Callable[[Path], None]) -> None:
    build = Builder()
    take(source, build)
    damage(home(source) / "arrays.cache")
    assert take(source, build).arrays["x"].tolist() == X.tolist()
    assert take(source, build).arrays["y"].tolist() == [7, 2]
    assert build.times == 2
    assert names(source) == ["arrays.cache"]


def rot(folder: Path, array: str) -> None:
    """One bit of the values, and the time is kept."""
    path = folder / f"{array}.npy"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("array", ["x", "y"])
def test_bytes_that_rot_are_noticed(source: Path, array: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    take(source, build)
    rot(home(source) / "arrays.cache", array)
    found = take(source, build)
    assert (found.arrays["x"].tolist(), found.arrays["y"].tolist()) == (X.tolist(), [7, 2])
    assert "arrays.cache is damaged" in caplog.text


def test_another_source_is_built_again(source: Path) -> None:
    build = Builder()
    take(source, build)
    source.write_bytes(b"published again")
    take(source, build)
    assert build.times == 2
    take(source, build)
    assert build.times == 2


def replace(path: Path) -> None:
    """With another file of the same size and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def rewrite_in_place(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [replace, rewrite_in_place])
@pytest.mark.parametrize("folder", [False, True])
def test_source_of_the_same_size_and_time_is_built_again(
    source: Path, change: Callable[[Path], None], folder: bool
) -> None:
    given = source
    if folder:
        given = source.parent / "images"
        given.mkdir()
        source = source.rename(given / "one")
    build = Builder()
    load_cached("toy", None, "arrays", [given], build)
    folder_time = given.stat()
    change(source)
    os.utime(given, ns=(folder_time.st_atime_ns, folder_time.st_mtime_ns))
    found = load_cached("toy", None, "arrays", [given], build)
    assert (build.times, found.arrays["y"].tolist()) == (2, [7, 2])


def test_an_unchanged_source_is_not_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive can have hundreds of megabytes."""
    take(source, Builder())
    opened, original = list[Path](), Path.open

    def observe(path: Path, *args: Any, **more: Any) -> Any:
        opened.append(path)
        return original(path, *args, **more)

    monkeypatch.setattr(Path, "open", observe)
    take(source, Builder())
    assert opened
    assert source not in opened


def test_a_failing_build_leaves_nothing_and_says_why(source: Path) -> None:
    def build(new: NewArray) -> None:
        new("x", X.shape, X.dtype)
        raise InvalidInputError("a broken image")

    with pytest.raises(InvalidInputError, match="a broken image"):
        take(source, build)
    assert names(source) == []


@pytest.mark.parametrize("moment", ["build", "write"])
def test_a_process_killed_while_building_leaves_no_cache(source: Path, moment: str) -> None:
    """The next one removes what it left."""
    code = f"""
import os, signal, sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from feddbe.data import cache
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def build(new):
    new("x", (1000,), "u1")[:] = 1
    if {moment!r} == "build":
        kill()
cache._describe = kill
cache.load_cached("toy", None, "arrays", [Path({str(source)!r})], build)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert names(source) == ([".arrays.cache.part"] if moment == "write" else [])
    build = Builder()
    take(source, build)
    assert build.times == 1
    assert names(source) == ["arrays.cache"]


def test_no_place_means_memory_said_once(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    (tmp_path / "data").write_text("here too")
    build = Builder()
    for _ in range(2):
        found = take(source, build, tmp_path / "data")
        assert found.arrays["x"].tolist() == X.tolist()
        assert not isinstance(found.arrays["x"], np.memmap)
        assert found.sha256["x"] == hashlib.sha256(X.tobytes()).hexdigest()
    (record,) = caplog.records
    assert "no folder for a cache" in record.getMessage()
    assert str(home(source)) in record.getMessage()


def test_the_next_place_is_used_if_the_first_refuses(source: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    build = Builder()
    for _ in range(2):
        take(source, build, tmp_path / "data")
    assert build.times == 1
    assert (home(source) / "arrays.cache").is_dir()


def test_a_full_disk_means_memory(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No file may grow beyond 1 MB here, as if the disk were full; the array has 4 MB."""

    def build(new: NewArray) -> None:
        new("x", (1 << 22,), np.uint8)[:] = 3

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        found = take(source, build)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert int(found.arrays["x"].sum(dtype=np.int64)) == 3 << 22
    assert names(source) == []
    assert "File too large" in caplog.text


def race(source: Path, barrier: Barrier, results: Any) -> None:
    def build(new: NewArray) -> None:
        x = new("x", (1 << 20,), np.uint8)
        barrier.wait(60)  # all are building now
        x[:] = 5
        new("owner", (1,), np.int64)[:] = os.getpid()

    found = take(source, build)
    results.put((int(found.arrays["x"].sum(dtype=np.int64)), int(found.arrays["owner"][0])))


@pytest.mark.parametrize("stale", [False, True])
def test_processes_that_build_at_once_end_with_the_same(source: Path, stale: bool) -> None:
    if stale:
        take(source, Builder())
        source.write_bytes(b"something new")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=race, args=(source, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [total for total, _ in found] == [5 << 20] * 3
    kept = load_cached("toy", None, "arrays", [source], Builder()).arrays
    assert int(kept["x"].sum(dtype=np.int64)) == 5 << 20, "not built anew"
    assert int(kept["owner"][0]) in [owner for _, owner in found]
    if not stale:
        assert len({owner for _, owner in found}) == 1, "the losers take the winner's"
    assert names(source) == ["arrays.cache"]
