"""`feddbe fairness` and `feddbe overhead`: tables, JSON, figure and invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import feddbe
from tests.cli.shell import Shell

METHODS = ("local", "fedavg", "fedavg+dbe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a comparison in runs/three, and a method on another split in runs/other."""
    folder = tmp_path_factory.mktemp("fairness")
    options: dict[str, Any] = {"clients": 4, "model": "mlp", "engine": "serial", "rounds": 2}
    feddbe.compare(METHODS, out=str(folder / "runs" / "three"), partition="dirichlet:0.5", **options)
    feddbe.run("ditto", out=str(folder / "runs" / "other"), partition="iid", **options)
    return folder


@pytest.fixture
def shell(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Return a shell in the folder with the runs."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("COLUMNS", "80")
    return Shell(capsys)


def test_fairness_prints_comparison_and_draws_figure(shell: Shell, root: Path) -> None:
    code, out, err = shell("fairness three")
    assert (code, err) == (0, "")
    assert "against" in out
    assert "no run of" not in out
    assert out.endswith("\nfairness  runs/three/fairness.png\n")
    assert (root / "runs/three/fairness.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("round_", ["best", "last"])
def test_fairness_json_uses_the_requested_round(shell: Shell, root: Path, round_: str) -> None:
    code, out, err = shell(f"fairness three --round {round_} -o {round_}.svg --json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["picture"] == f"{round_}.svg"
    assert (root / f"{round_}.svg").read_bytes().startswith(b"<?xml")
    by_method = {run["method"]: run for run in document["runs"]}
    assert by_method.keys() == set(METHODS)
    for method, run in by_method.items():
        result: Any = feddbe.load_run(f"three/{method}")[round_]
        assert run["round"] == result["round"]
        assert run["spread"]["mean"] == pytest.approx(result["accuracy"]["mean"])
        assert run["spread"]["worst_tenth"] == pytest.approx(result["accuracy"]["worst_tenth"])
    pair = by_method["fedavg+dbe"]["paired"]["local"]
    accuracy, baseline = by_method["fedavg+dbe"]["accuracy"], by_method["local"]["accuracy"]
    assert pair["better"] == sum(accuracy[client] > baseline[client] for client in accuracy)
    assert pair["better"] + pair["equal"] + pair["worse"] == 4


def test_missing_baseline_is_named_below_the_table(shell: Shell, root: Path) -> None:
    code, out, err = shell("fairness other")
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "not compared with local or fedavg: no such run has the same clients",
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


def test_run_named_twice_is_counted_once(shell: Shell) -> None:
    assert len(json.loads(shell("fairness three three/local --json")[1])["runs"]) == 3


def test_overhead_counts_messages_and_kept_state(shell: Shell) -> None:
    code, out, err = shell("overhead three")
    assert (code, err) == (0, "")
    assert "keeps" in out
    costs = {run["method"]: run for run in json.loads(shell("overhead three --json")[1])["runs"]}
    model = costs["local"]["kept"]
    assert costs["local"]["up"] == costs["local"]["total_down"] == 0
    assert costs["fedavg"] | {"kept": 0, "up": 4 * model, "total_up": 2 * 4 * 4 * model} == costs["fedavg"]
    # DBE: the mean is uploaded once in the setup and received once in round 1; p_i stays
    dbe = costs["fedavg+dbe"]
    width = dbe["kept"]
    assert dbe["total_up"] == costs["fedavg"]["total_up"] + 4 * 4 * width
    assert dbe["down"] == 4 * model + 4 * width / 2
    assert all(run["memory_mb"] > 10 and run["seconds_to_best"] > 0 for run in costs.values())


INVALID_INPUTS = {
    "fairness": "feddbe fairness --help",
    "fairness nowhere": "'nowhere' is not the folder of a run",
    "fairness three --round first": "unknown round 'first'; allowed: best, last",
    "fairness three -o picture.gif": "unknown picture format '.gif'",
    "fairness three -o nowhere/picture.png": "cannot write the picture 'nowhere/picture.png'",
    "overhead": "feddbe overhead --help",
    "overhead nowhere": "'nowhere' is not the folder of a run",
}


@pytest.mark.parametrize("line", INVALID_INPUTS)
def test_invalid_input_prints_one_line(shell: Shell, line: str) -> None:
    code, out, err = shell(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert INVALID_INPUTS[line] in err
