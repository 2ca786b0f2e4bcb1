"""Missing runs are executed, existing ones recognized, and complete rounds survive a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.callbacks.base import Callback, StudyCallback
from feddbe.errors import DivergenceError, FeddbeError
from feddbe.metrics.client_values import Record
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RunStore, exclusive, make_folder
from feddbe.simulation import loop
from feddbe.studies import runner
from feddbe.studies.runner import RunSpec, expand_grid, plan_runs, run_missing
from tests.waiting import PATIENCE, wait_until

SMALL: dict[str, Any] = {
    "data": "digits",
    "partition": "iid",
    "clients": 4,
    "rounds": 2,
    "metrics": "accuracy",
}


class RecordingCallback(StudyCallback):
    """Records the hooks that are called."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []
        self.rounds: list[int] = []

    def run_callback(self, folder: Path) -> Callback:
        notes = self

        class RunCallback(Callback):
            def on_round_end(self, done: int, accuracy: float | None) -> None:
                notes.rounds.append(done)

        return RunCallback()

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        method = folder.name.removeprefix("digits-").partition("-seed")[0]
        self.ends.append((method, str(error or "done")))


@pytest.mark.parametrize("at_once", [1, 2])
def test_only_missing_runs_are_executed(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "available_cores", lambda: at_once)
    cells = expand_grid(["fedavg", "fedavg+dbe"], SMALL)
    notes = RecordingCallback()
    assert run_missing(plan_runs(cells, tmp_path), notes) == {}
    assert sorted(notes.ends) == [("fedavg", "done"), ("fedavg+dbe", "done")]
    assert sorted(set(notes.rounds)) == [0, 1, 2]
    plans = plan_runs(cells, tmp_path)
    assert [p.is_done for p in plans] == [True, True]
    assert [p.document["method"] for p in plans if p.document] == ["fedavg", "fedavg+dbe"]
    notes = RecordingCallback()
    assert run_missing(plans, notes) == {}
    assert notes.ends == []


def test_parallel_runs_are_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    run_missing(plan_runs(cells := expand_grid(["fedavg", "fedavg+dbe"], SMALL, seeds=[3]), tmp_path))
    for planned in plan_runs(cells, tmp_path):
        single = feddbe.run(
            planned.spec.method, seed=3, out=str(tmp_path / "alone" / planned.spec.method), **SMALL
        )
        assert feddbe.load_run(planned.folder)["server_sha256"] == single["server_sha256"]


def test_run_is_recognized_by_its_configuration_hash(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "mine"), **SMALL)
    (planned, other) = plan_runs(
        [RunSpec("fedavg", SMALL), RunSpec("fedavg", {**SMALL, "lr": 0.07})], tmp_path
    )
    assert planned.folder == tmp_path / "mine"
    assert planned.is_done
    assert other.document is None
    assert not other.folder.exists()


def test_run_with_fewer_rounds_is_resumed(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "mine"), **{**SMALL, "rounds": 1})
    (planned,) = plan_runs([RunSpec("fedavg", SMALL)], tmp_path)
    assert planned.is_missing
    run_missing([planned])
    assert [entry["round"] for entry in feddbe.load_run(tmp_path / "mine")["rounds"]] == [0, 1, 2]
    assert plan_runs([RunSpec("fedavg", SMALL)], tmp_path)[0].is_done


def test_run_with_more_rounds_is_truncated(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "mine"), **{**SMALL, "rounds": 4})
    short = feddbe.run("fedavg", out=str(tmp_path / "short" / "run"), **SMALL)
    (planned,) = plan_runs([RunSpec("fedavg", SMALL)], tmp_path)
    assert planned.is_done
    assert planned.document
    assert [entry["round"] for entry in planned.document["rounds"]] == [0, 1, 2]
    assert planned.document["config"]["rounds"] == 2
    for which in ("best", "last"):
        entry: Any = planned.document[which]
        assert (entry["round"], entry["accuracy"]) == (short[which]["round"], short[which]["accuracy"])


def test_run_fine_tuned_after_more_rounds_is_rejected(tmp_path: Path) -> None:
    feddbe.run("fedbabu", out=str(tmp_path / "mine"), **SMALL)
    (planned,) = plan_runs([RunSpec("fedbabu", {**SMALL, "rounds": 1})], tmp_path)
    assert planned.document is None
    assert (
        "has 2 rounds; fine-tuning or new clients followed the last round, not round 1" in planned.skip_reason
    )


def test_equal_specs_are_one_run(tmp_path: Path) -> None:
    """The second sets explicitly the default of the first."""
    plans = plan_runs([RunSpec("fedavg", SMALL), RunSpec("fedavg", {**SMALL, "lr": 0.1})], tmp_path)
    assert plans[0].folder == plans[1].folder
    notes = RecordingCallback()
    run_missing(plans, notes)
    assert len(notes.ends) == 1


def test_invalid_runs_have_a_reason_and_do_not_stop_others(tmp_path: Path) -> None:
    cells = [
        *expand_grid(["fedavg", "perfedavg+dbe"], SMALL),
        RunSpec("fedavg", {**SMALL, "data": "nowhere.npz"}),
    ]
    good, bad, nowhere = plan_runs(cells, tmp_path)
    assert good.is_missing
    assert "perfedavg does not support" in bad.skip_reason
    assert "nowhere.npz" in nowhere.skip_reason


def test_diverged_run_is_marked_and_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    cells = expand_grid(["fedavg"], {**SMALL, "lr": [1e30, 0.1]})
    failed = run_missing(plan_runs(cells, tmp_path))
    assert [type(error) for error in failed.values()] == [DivergenceError]
    bad, good = plan_runs(cells, tmp_path)
    assert bad.skip_reason == "diverged in round 1"
    assert not bad.is_missing  # the same bits would diverge again
    assert bad.document
    assert bad.document["diverged"]
    assert good.is_done


def test_run_in_use_is_not_touched(tmp_path: Path) -> None:
    cells = expand_grid(["fedavg"], SMALL)
    (planned,) = plan_runs(cells, tmp_path)
    make_folder(planned.folder)
    with exclusive(planned.folder):
        failed = run_missing([planned])
    assert "is in use" in str(failed[planned.folder])


def test_unexpected_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    plans = plan_runs(expand_grid(["fedavg", "ditto"], SMALL), tmp_path)
    monkeypatch.setattr(loop, "run_experiment", lambda *a, **k: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run_missing(plans)


def test_killed_child_is_reported_and_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    specs = expand_grid(["ditto", "fedavg", "fedavg+dbe"], SMALL)
    plans = plan_runs(specs, tmp_path)
    run_experiment = loop.run_experiment

    def kill_ditto(experiment: Experiment, *arguments: Any) -> None:
        if experiment.name == "ditto":
            os.kill(os.getpid(), signal.SIGKILL)
        run_experiment(experiment, *arguments)

    monkeypatch.setattr(loop, "run_experiment", kill_ditto)
    failed = run_missing(plans)
    assert list(failed) == [plans[0].folder]
    error = failed[plans[0].folder]
    assert isinstance(error, FeddbeError)
    assert str(error) == "worker process exited unexpectedly (exit code -9)"
    assert [planned.is_done for planned in plan_runs(specs, tmp_path)] == [False, True, True]


STUDY = """
import sys
from pathlib import Path
from feddbe.studies import runner
from feddbe.studies.runner import expand_grid
runner.available_cores = lambda: 2
options = {"data": "digits", "partition": "iid", "clients": 4, "rounds": 4000, "metrics": "accuracy"}
runner.run_missing(runner.plan_runs(expand_grid(["fedavg", "fedavg+dbe"], options), Path(sys.argv[1])))
"""


def test_plan_of_a_run_in_progress_is_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = expand_grid(["fedavg"], SMALL)
    run_missing(plan_runs(cells, tmp_path))
    (folder,) = tmp_path.iterdir()
    overall = RunStore.aggregate_records

    def later(store: RunStore) -> list[Record]:
        monkeypatch.setattr(RunStore, "aggregate_records", overall)
        feddbe.run(out=str(folder), resume=True, rounds=3)
        return overall(store)

    monkeypatch.setattr(RunStore, "aggregate_records", later)
    longer = expand_grid(["fedavg"], {**SMALL, "rounds": 3})
    for done in (2, 3):
        (planned,) = plan_runs(longer, tmp_path)
        assert planned.document
        assert planned.document["rounds"][-1]["round"] == done


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_study_can_be_resumed(tmp_path: Path, number: signal.Signals) -> None:
    cells = expand_grid(["fedavg", "fedavg+dbe"], SMALL)
    unlimited = expand_grid(["fedavg", "fedavg+dbe"], {**SMALL, "rounds": 4000})

    def have_four_rounds() -> bool:
        documents = [planned.document for planned in plan_runs(unlimited, tmp_path)]
        return all(document and len(document["rounds"]) > 3 for document in documents)

    study = subprocess.Popen([sys.executable, "-c", STUDY, str(tmp_path)], stderr=subprocess.DEVNULL)
    with study:
        try:
            wait_until(have_four_rounds, "round 3 of both runs", pause=0.2)
            children = Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()
            study.send_signal(number)
            study.wait(PATIENCE)
        finally:
            study.kill()
    assert len(children) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the end of both runs")
    if number == signal.SIGINT:
        assert not list(tmp_path.glob("*/.lock"))
    stopped = plan_runs(cells, tmp_path)
    assert all(p.is_done for p in stopped)  # of the two rounds that these cells want
    far = [len(p.document["rounds"]) - 1 for p in plan_runs(unlimited, tmp_path) if p.document]
    assert all(3 <= count < 4000 for count in far)
    longer = expand_grid(["fedavg", "fedavg+dbe"], {**SMALL, "rounds": max(far) + 1})
    assert run_missing(plan_runs(longer, tmp_path)) == {}
    assert all(p.is_done for p in plan_runs(longer, tmp_path))
