"""An export is there as a whole or not at all, and never written through a link."""

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
from feddbe.export import export_model
from feddbe.export.folder import replace_folder
from tests.export.test_deployed import trained

NAMES = {"a", "b", "mark"}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def large(folder: Path) -> dict[str, Any]:
    x = np.random.RandomState(0).randint(0, 256, (60, 20, 20)).astype(np.uint8)
    np.savez(folder / "large.npz", x=x, y=np.arange(60) % 2, client=np.arange(60) // 20)
    return {"data": str(folder / "large.npz"), "model": "mlp"}


@pytest.mark.parametrize("size", [60_000, 110_000], ids=["model.safetensors", "model.pt2"])
def test_a_full_disk_leaves_the_older_export_whole(size: int, tmp_path: Path) -> None:
    """Whichever file does not fit."""
    run, home = trained(tmp_path, "fedavg+dbe", large, rounds=1), tmp_path / "out" / "home"
    home.mkdir(parents=True)
    (home / "preprocessing.json").write_text(json.dumps({"client": 0}))
    (home / "model.safetensors").write_bytes(b"the weights of client 0")
    before = content(home)
    with (
        files_of_at_most(size),
        pytest.raises(InvalidInputError, match=r"cannot write to .*home': ") as caught,
    ):
        export_model(run, 1, out=home)
    assert "\n" not in str(caught.value)
    assert content(home) == before
    assert [path.name for path in home.parent.iterdir()] == ["home"]


KILLED = """
import sys, time
from pathlib import Path
from feddbe.export.folder import replaced_folder
with replaced_folder(Path(sys.argv[1]), {"a", "b", "mark"}, "mark") as new:
    for name in ("a", "b", "mark"):
        (new / name).write_text("client 1")
        print(name, flush=True)
        time.sleep(60)
"""


def test_a_kill_leaves_the_older_one_whole_and_the_next_one_cleans_up(tmp_path: Path) -> None:
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
    assert content(folder) == dict.fromkeys(NAMES, b"client 0")
    with replace_folder(folder, NAMES, "mark") as new:
        (new / "mark").write_text("client 2")
    assert content(folder) == {"mark": b"client 2"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_an_unfinished_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "home", NAMES, "mark") as first:
        with replace_folder(tmp_path / "home", NAMES, "mark") as second:
            (second / "mark").write_text("second")
        (first / "mark").write_text("first")
    assert content(tmp_path / "home") == {"mark": b"first"}


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
    with pytest.raises(InvalidInputError, match="link' is a link, through which nothing is written"):
        export_link(tmp_path / "link")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    with pytest.raises(InvalidInputError, match="nowhere' is a link"):
        export_link(tmp_path / "nowhere")


def export_link(path: Path) -> None:
    with replace_folder(path, NAMES, "mark"):
        pass


@pytest.mark.parametrize("names", [["thesis"], ["a"], ["mark", "thesis"]])
def test_other_files_are_not_removed(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / name).touch()
    with pytest.raises(
        InvalidInputError, match=rf"holds something else \('{names[-1]}'\); choose another --out"
    ):
        export_link(tmp_path / "home")
    assert len(list((tmp_path / "home").iterdir())) == len(names)


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (Path(), Path(".."), tmp_path / "here", tmp_path):
        with pytest.raises(InvalidInputError, match="is the working directory or above it"):
            export_link(path)


def test_a_folder_has_the_rights_that_others_have(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    export_link(tmp_path / "home")
    assert (tmp_path / "home").stat().st_mode == (tmp_path / "other").stat().st_mode
