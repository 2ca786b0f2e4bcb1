"""An export is written completely or not at all, and never through a link."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddbe.errors import InvalidInputError
from feddbe.export import export_model, replace_folder
from tests.export.test_client_model import train_run

NAMES = {"a", "b", "mark"}


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def large(folder: Path) -> dict[str, Any]:
    x = np.random.RandomState(0).randint(0, 256, (60, 20, 20)).astype(np.uint8)
    np.savez(folder / "large.npz", x=x, y=np.arange(60) % 2, client=np.arange(60) // 20)
    return {"data": str(folder / "large.npz"), "model": "mlp"}


@pytest.mark.parametrize("size", [60_000, 110_000], ids=["model.safetensors", "model.pt2"])
def test_full_disk_leaves_older_export_unchanged(size: int, tmp_path: Path) -> None:
    run, home = train_run(tmp_path, "fedavg+dbe", large, rounds=1), tmp_path / "out" / "home"
    home.mkdir(parents=True)
    (home / "preprocessing.json").write_text(json.dumps({"client": 0}))
    (home / "model.safetensors").write_bytes(b"the weights of client 0")
    before = read_files(home)
    with (
        limit_file_size(size),
        pytest.raises(InvalidInputError, match=r"cannot write to .*home': ") as caught,
    ):
        export_model(run, 1, out=home)
    assert "\n" not in str(caught.value)
    assert read_files(home) == before
    assert [path.name for path in home.parent.iterdir()] == ["home"]


KILLED = """
import sys, time
from pathlib import Path
from feddbe.export import replace_folder
with replace_folder(Path(sys.argv[1]), {"a", "b", "mark"}, "mark") as new:
    for name in ("a", "b", "mark"):
        (new / name).write_text("client 1")
        print(name, flush=True)
        time.sleep(60)
"""


def test_kill_leaves_older_export_and_next_export_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    with replace_folder(folder, NAMES, "mark") as new:
        for name in NAMES:
            (new / name).write_text("client 0")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert {path.name for path in tmp_path.iterdir()} > {"home"}
    assert read_files(folder) == dict.fromkeys(NAMES, b"client 0")
    with replace_folder(folder, NAMES, "mark") as new:
        (new / "mark").write_text("client 2")
    assert read_files(folder) == {"mark": b"client 2"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_unfinished_folder_of_a_live_process_stays(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "home", NAMES, "mark") as first:
        with replace_folder(tmp_path / "home", NAMES, "mark") as second:
            (second / "mark").write_text("second")
        (first / "mark").write_text("first")
    assert read_files(tmp_path / "home") == {"mark": b"first"}


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "mark").touch()
    (folder / "a").symlink_to(tmp_path / "precious")
    with replace_folder(folder, NAMES, "mark") as new:
        (new / "a").write_text("weights")
        (new / "mark").touch()
    assert (tmp_path / "precious").read_text() == "years of work"
    assert not (folder / "a").is_symlink()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InvalidInputError, match="link' is a link, which is never written through"):
        replace(tmp_path / "link")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    with pytest.raises(InvalidInputError, match="nowhere' is a link"):
        replace(tmp_path / "nowhere")


def replace(path: Path) -> None:
    with replace_folder(path, NAMES, "mark"):
        pass


@pytest.mark.parametrize("names", [["thesis"], ["a"], ["mark", "thesis"]])
def test_other_files_are_not_removed(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / name).touch()
    with pytest.raises(InvalidInputError, match=rf"has other files \('{names[-1]}'\); choose another --out"):
        replace(tmp_path / "home")
    assert len(list((tmp_path / "home").iterdir())) == len(names)


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (Path(), Path(".."), tmp_path / "here", tmp_path):
        with pytest.raises(InvalidInputError, match="is the working directory or above it"):
            replace(path)


def test_folder_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    replace(tmp_path / "home")
    assert (tmp_path / "home").stat().st_mode == (tmp_path / "other").stat().st_mode
