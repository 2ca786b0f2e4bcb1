"""Everything on which a run's numbers depend is in its record, and a change is named."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddbe
from feddbe.config.options import collect_options, parse_sweep
from feddbe.errors import InvalidInputError
from feddbe.runs import reopen
from feddbe.runs.store import RunStore
from feddbe.studies.sweep import plan_sweep

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from feddbe import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name: ClassVar[str] = "mine"
"""
MODEL = """
from torch import nn

def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, classes))
"""
OPTIONS: dict[str, Any] = {
    "data": "table.csv", "model": "model.py:small", "rounds": 1, "lr": 0.1, "engine": "serial",
}  # fmt: skip


def plan_messages() -> list[str]:
    """Return the messages about stored runs when a sweep over two seeds is planned."""
    spec = parse_sweep(collect_options(["fedavg"], {**OPTIONS, "seeds": 2, "out": "study"}))
    assert spec
    messages: list[str] = []
    plan_sweep(spec, messages.append)
    return messages


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a table, a model and a method."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.RandomState(0)
    lines = [",".join(map(str, [*rng.rand(4).round(3), k % 2, f"town{k % 3}"])) for k in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,c,d,label,client", *lines]) + "\n")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "method.py").write_text(METHOD)
    return tmp_path


def change_data(folder: Path) -> None:
    lines = (folder / "table.csv").read_text().splitlines()
    lines[1] = "9" + lines[1][1:]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def change_model(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL + "# edited\n")


def change_method(folder: Path) -> None:
    (folder / "method.py").write_text(METHOD + "# edited\n")


def test_inputs_and_versions_are_recorded(folder: Path) -> None:
    feddbe.run("method.py:Mine", out="run", **OPTIONS)
    with closing(RunStore.open(Path("run"))) as store:
        assert store.meta("inputs").keys() == {"data", "partition", "model", "method"}
        assert all(len(digest) == 64 for digest in store.meta("inputs").values())
        assert store.meta("versions").keys() >= {"feddbe", "torch", "numpy", "python", "pandas"}
        assert store.meta("sources").keys() == {"model", "method"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_data, r"the content of data 'table.csv' changed \(sha256 \w{12} in the run, \w{12} now\)"),
        (change_model, r"the model's file was edited \(sha256 \w{12} in the run, \w{12} now\)"),
        (change_method, r"the method's file was edited \(sha256 \w{12} in the run, \w{12} now\)"),
    ],
)
@pytest.mark.parametrize("out", ["run", None])
def test_resume_names_the_changed_input(folder: Path, change: Any, message: str, out: str | None) -> None:
    feddbe.run("method.py:Mine", out=out, **OPTIONS)
    change(folder)
    with pytest.raises(InvalidInputError, match=message) as caught:
        feddbe.run("method.py:Mine", out=out, resume=True, **OPTIONS | {"rounds": 2})
    assert "partition" not in str(caught.value)


def test_all_changes_are_named(folder: Path) -> None:
    feddbe.run("method.py:Mine", out="run", **OPTIONS)
    change_data(folder)
    change_method(folder)
    with pytest.raises(InvalidInputError, match=r"content of data .*; the method's file was edited"):
        feddbe.run("method.py:Mine", out="run", resume=True, **OPTIONS)


def test_an_edited_file_is_named_next_to_changed_settings(folder: Path) -> None:
    feddbe.run("method.py:Mine", out="run", **OPTIONS)
    change_method(folder)
    with pytest.raises(InvalidInputError, match=r"lr 0.1 in the run, 0.2 now; the method's file was edited"):
        feddbe.run("method.py:Mine", out="run", resume=True, **OPTIONS | {"lr": 0.2})


def test_sweep_names_runs_that_it_does_not_reuse(folder: Path) -> None:
    feddbe.compare(["fedavg"], seeds=2, out="study", **OPTIONS)
    assert plan_messages() == []
    change_data(folder)
    (text,) = plan_messages()
    assert "and 1 more: not reused: the content of data 'table.csv' changed (sha256 " in text


def test_sweep_names_other_versions_of_runs_that_it_reuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feddbe.compare(["fedavg"], seeds=2, out="study", **OPTIONS)
    versions = reopen.package_versions
    monkeypatch.setattr(reopen, "package_versions", lambda experiment: versions(experiment) | {"torch": "99"})
    (text,) = plan_messages()
    assert "and 1 more: reused with other versions: torch " in text
    assert text.endswith(" before, 99 now")
