"""`feddbe fairness` and `feddbe overhead` on a small comparison: tables, JSON, the picture, mistakes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe import cli

METHODS = ("local", "fedavg", "fedavg+dbe")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison in runs/three, and the same method on another split in runs/other."""
    here = tmp_path_factory.mktemp("here")
    small: dict[str, Any] = {"clients": 4, "model": "mlp", "engine": "serial", "rounds": 2}
    feddbe.compare(METHODS, out=str(here / "runs" / "three"), partition="dirichlet:0.5", **small)
    feddbe.run("ditto", out=str(here / "runs" / "other"), partition="iid", **small)
    return here


@pytest.fixture
def shell(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:  # of what was typed: code, out, err
    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "80")

    def typed(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(shlex.split(line))
        return code, *capsys.readouterr()

    return typed


def test_fairness_of_a_comparison(shell: Any, runs: Path) -> None:
    code, out, err = shell("fairness three")
    assert (code, err) == (0, "")
    assert "against" in out
    assert "no run of" not in out
    assert out.endswith("\nfairness  runs/three/fairness.png\n")
    assert (runs / "runs/three/fairness.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("which", ["best", "last"])
def test_fairness_as_json_is_of_the_round_that_was_asked_for(shell: Any, runs: Path, which: str) -> None:
    code, out, err = shell(f"fairness three --round {which} -o {which}.svg --json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["picture"] == f"{which}.svg"
    assert (runs / f"{which}.svg").read_bytes().startswith(b"<?xml")
    by_method = {run["method"]: run for run in document["runs"]}
    assert by_method.keys() == set(METHODS)
    for method, run in by_method.items():
        entry: Any = feddbe.load(f"three/{method}")[which]
        assert run["round"] == entry["round"]
        assert run["spread"]["mean"] == pytest.approx(entry["accuracy"]["mean"])
        assert run["spread"]["worst_tenth"] == pytest.approx(entry["accuracy"]["worst_tenth"])
    pair = by_method["fedavg+dbe"]["paired"]["local"]
    mine, others = by_method["fedavg+dbe"]["accuracy"], by_method["local"]["accuracy"]
    assert pair["better"] == sum(mine[client] > others[client] for client in mine)
    assert pair["better"] + pair["equal"] + pair["worse"] == 4


def test_what_cannot_be_compared_is_said_below_the_table(shell: Any, runs: Path) -> None:
    code, out, err = shell("fairness other")
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "no run of local or fedavg with the same clients among these: no comparison with it",
        "",
        "fairness  runs/other/fairness.png",
    ]
    mixed = json.loads(shell("fairness other three --json")[1])["runs"]
    assert {run["method"]: sorted(run["paired"]) for run in mixed} == {
        "ditto": [],
        "fedavg": ["local"],
        "fedavg+dbe": ["fedavg", "local"],
        "local": ["fedavg"],
    }


def test_a_run_that_is_named_twice_is_one_run(shell: Any) -> None:
    assert len(json.loads(shell("fairness three three/local --json")[1])["runs"]) == 3


def test_overhead(shell: Any) -> None:
    code, out, err = shell("overhead three")
    assert (code, err) == (0, "")
    assert "keeps" in out
    found = {run["method"]: run for run in json.loads(shell("overhead three --json")[1])["runs"]}
    model = found["local"]["kept"]
    assert found["local"]["up"] == found["local"]["total_down"] == 0
    assert found["fedavg"] | {"kept": 0, "up": 4 * model, "total_up": 2 * 4 * 4 * model} == found["fedavg"]
    # DBE: the mean once up in the preparation, once down in round 1; p_i stays
    width, dbe = found["fedavg+dbe"]["kept"], found["fedavg+dbe"]
    assert dbe["total_up"] == found["fedavg"]["total_up"] + 4 * 4 * width
    assert dbe["down"] == 4 * model + 4 * width / 2
    assert all(run["memory_mb"] > 10 and run["seconds_to_best"] > 0 for run in found.values())


MISTAKES = {
    "fairness": "feddbe fairness --help",
    "fairness nowhere": "'nowhere' is not the folder of a run",
    "fairness three --round first": "unknown round 'first'; allowed: best, last",
    "fairness three -o picture.gif": "unknown picture format '.gif'",
    "fairness three -o nowhere/picture.png": "cannot write the picture 'nowhere/picture.png'",
    "overhead": "feddbe overhead --help",
    "overhead nowhere": "'nowhere' is not the folder of a run",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(shell: Any, line: str) -> None:
    code, out, err = shell(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert MISTAKES[line] in err
