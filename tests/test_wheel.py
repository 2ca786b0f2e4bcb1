"""The wheel: it contains all files, and runs without the sources."""

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
    """Return a folder with the wheel's content.

    Dependencies are those of this environment; `make wheel` uses an empty one.
    """
    wheel_dir = tmp_path_factory.mktemp("wheel")
    target_dir = tmp_path_factory.mktemp("installed")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    source_dir = tmp_path_factory.mktemp("sources") / "feddbe"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.startswith("src/") or "/" not in name:
            target = source_dir / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, *build, "--wheel-dir", str(wheel_dir)], cwd=source_dir, check=True)
    (wheel,) = wheel_dir.glob("feddbe-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target_dir)
    return target_dir


def run_feddbe(installed: Path, *words: str, cwd: Path) -> str:
    """Run the installed command and return its output."""
    environment = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "feddbe", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_has_every_source_file(installed: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "src/feddbe"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    missing = [name for name in listed if name and not (installed / Path(name).relative_to("src")).is_file()]
    assert missing == []


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    words = ["run", "fedavg+dbe", "--rounds", "2", "--out", "r", "--engine", "serial"]
    assert "best @" in run_feddbe(installed, *words, cwd=tmp_path)
    assert "fedavg+dbe" in run_feddbe(installed, "show", "r", cwd=tmp_path)
    module_file = subprocess.run(
        [sys.executable, "-c", "import feddbe; print(feddbe.__file__)"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(installed) in module_file
