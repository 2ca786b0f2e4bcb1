"""What a user installs: the wheel, with all that is no Python file in it, works without the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content. (What it depends on is that of the environment; `make wheel` tries
    it in an empty one.)"""
    built, place = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    copied = tmp_path_factory.mktemp("sources") / "feddbe"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.startswith("src/") or "/" not in name:
            target = copied / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, *build, "--wheel-dir", str(built)], cwd=copied, check=True)
    (wheel,) = built.glob("feddbe-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place)
    return place


def feddbe(installed: Path, *words: str, cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "feddbe", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_the_sources_is_in_it(installed: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "src/feddbe"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    missing = [n for n in listed if n and not (installed / Path(n).relative_to("src")).is_file()]
    assert missing == []


def test_it_runs_from_there(installed: Path, tmp_path: Path) -> None:
    words = ["run", "fedavg+dbe", "--rounds", "2", "--out", "r", "--engine", "serial"]
    assert "best @" in feddbe(installed, *words, cwd=tmp_path)
    assert "fedavg+dbe" in feddbe(installed, "show", "r", cwd=tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", "import feddbe; print(feddbe.__file__)"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(installed) in found
