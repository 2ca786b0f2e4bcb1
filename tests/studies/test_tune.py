"""A search uses training data alone, can be resumed, and reports its result."""

from __future__ import annotations

import builtins
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config, parse_options
from feddbe.data.federated import load_federated_data
from feddbe.data.split import load_split
from feddbe.errors import InvalidInputError, StoreError
from feddbe.runs.build_document import load_document
from feddbe.runs.experiment import resolve
from feddbe.studies.tune import TuneResult, build_search_space, insert_values, tune
from tests.studies.conftest import Shell

pytest.importorskip("optuna", reason="the extra tune is not installed")

SMALL = {"data": "digits", "partition": "iid", "clients": 3, "rounds": 3, "model": "mlp"}
KAPPA, LR = "kappa=0.5,2", "lr=0.05,0.2"


def search(folder: Path, trials: int, callback: Callback | None = None, **more: Any) -> TuneResult:
    request = parse_options(["fedavg+dbe"], {**SMALL, "out": str(folder), **more})
    return tune(request, trials=trials, space=[KAPPA, LR], callback=callback)


def test_runs_do_not_contain_test_data(tmp_path: Path) -> None:
    """What the runs are trained and tested on is the training data, divided; no row of the test data."""
    search(tmp_path, 1)
    federated = load_federated_data(Config(**{key: SMALL[key] for key in ("data", "partition", "clients")}))  # type: ignore[arg-type]
    used = load_split(tmp_path / "split.npz", len(federated.dataset))
    rows = np.concatenate([used.train.flat, used.test.flat])
    assert not np.isin(federated.split.test.flat, rows).any()
    assert sorted(rows) == sorted(federated.split.train.flat)
    assert len(used.test.flat) == pytest.approx(0.2 * len(rows), abs=3)


def test_stopped_search_resumes_with_the_same_result(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_round_end(self, done: int, accuracy: float | None) -> None:
            if self.runs == 3 and done == 2:
                raise KeyboardInterrupt

        runs = 0

        def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
            self.runs += 1

    whole = search(tmp_path / "whole", 4)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "stopped", 4, Stops())
    resumed = search(tmp_path / "stopped", 4)
    assert resumed.trials == whole.trials
    assert len(resumed.trials) == 4
    repeated = search(tmp_path / "stopped", 4)
    assert repeated.trials == whole.trials


def test_default_is_the_first_trial_and_best_has_the_highest_accuracy(tmp_path: Path) -> None:
    result = search(tmp_path, 3)
    assert result.trials[0].values == result.published == {"kappa": 1.0, "lr": 0.1}
    assert result.published_trial is result.trials[0]
    assert result.best.accuracy == max(trial.accuracy or 0 for trial in result.trials)
    assert result.space == {"kappa": [0.5, 1.0, 2], "lr": [0.05, 0.1, 0.2]}


def test_no_combination_is_tried_twice(tmp_path: Path) -> None:
    request = parse_options(["fedavg"], {**SMALL, "rounds": 1, "out": str(tmp_path)})
    result = tune(request, trials=20, space=["lr=0.01,0.02,0.03,0.05"])
    assert sorted(trial.values["lr"] for trial in result.trials) == [0.01, 0.02, 0.03, 0.05, 0.1]


def test_diverged_trial_has_accuracy_zero(tmp_path: Path) -> None:
    request = parse_options(["fedavg"], {**SMALL, "out": str(tmp_path)})
    result = tune(request, trials=3, space=["lr=1e30"])
    diverged = [trial for trial in result.trials if trial.values["lr"] == 1e30]
    assert diverged
    assert {(trial.accuracy, trial.note) for trial in diverged} == {(0.0, "diverged")}
    assert result.best.values == {"lr": 0.1}


def test_another_search_in_the_same_folder_is_rejected(tmp_path: Path) -> None:
    first = search(tmp_path, 1)
    split = (tmp_path / "split.npz").read_bytes()
    for other in (
        {"local_epochs": 2},
        {"rounds": 2},
        {"clients": 4},
        {"partition": "dirichlet:0.5"},
        {"validation": 0.3},
    ):
        with pytest.raises(InvalidInputError, match="contains another search"):
            search(tmp_path, 1, **other)
    assert (tmp_path / "split.npz").read_bytes() == split, "that of the search that is there"
    assert search(tmp_path, 1, quiet=True).trials == first.trials, "how it is watched is not part of it"


def test_search_on_changed_data_is_rejected(tmp_path: Path) -> None:
    random = np.random.RandomState(0)

    def search_file() -> TuneResult:
        np.savez(tmp_path / "own.npz", x=random.normal(size=(60, 4)).astype(np.float32), y=np.arange(60) % 3)
        options = {"data": str(tmp_path / "own.npz"), "clients": 3, "partition": "iid", "rounds": 1}
        request = parse_options(["fedavg"], {**options, "lr": 0.1, "out": str(tmp_path / "search")})
        return tune(request, trials=1, space=["lr=0.05"])

    search_file()
    with pytest.raises(InvalidInputError, match="contains another search"):
        search_file()


def test_client_with_one_training_sample_is_not_evaluated(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "lonely.npz",
        train_0=np.arange(100), test_0=np.arange(100, 130), train_1=np.array([130]), test_1=np.array([131]),
    )  # fmt: skip
    request = parse_options(
        ["fedavg"],
        {"split": str(tmp_path / "lonely.npz"), "model": "mlp", "rounds": 1, "out": str(tmp_path / "t")},
    )
    (trial,) = tune(request, trials=1, space=["lr=0.05"]).trials
    assert trial.accuracy
    used = load_split(tmp_path / "t" / "split.npz", 1797)
    assert [len(rows) for rows in (*used.train, *used.test)] == [80, 1, 20, 0]


@pytest.mark.parametrize("method", ["fedbabu", "fedavg+ft"])
def test_fine_tuned_method_is_judged_after_fine_tuning(tmp_path: Path, method: str) -> None:
    """A run below the others before fine-tuning may be above them after it, so none is stopped early."""
    request = parse_options([method], {**SMALL, "rounds": 8, "adapt_epochs": 2, "out": str(tmp_path)})
    result = tune(request, trials=6, space=["lr=0.0001,0.001,0.01,0.05,0.2"])
    runs = [load_document(folder.parent) for folder in tmp_path.glob("*/run.sqlite")]
    tuned = {run["config"]["lr"]: run["last"]["adapted"] for run in runs if run["last"]}
    assert {trial.values["lr"]: trial.accuracy for trial in result.trials} == {
        lr: accuracy["weighted"] for lr, accuracy in tuned.items() if accuracy
    }
    assert [trial.note for trial in result.trials] == [""] * 6


def test_space_is_the_suggested_grid_with_published_values() -> None:
    experiment = resolve("fedavg+dbe", Config(data="digits", partition="iid", clients=2, variant="official"))
    space = build_search_space(experiment)
    assert space["kappa"] == [0, 0.001, 0.01, 0.1, 1, 5, 10, 20, 50, 100, 200, 500]
    assert space["mu"] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert space["lr"] == [0.005, 0.01, 0.05, 0.1]
    pfedme = build_search_space(resolve("pfedme", Config(data="digits", partition="iid", clients=2)))
    assert "lr" not in pfedme  # it has no use for it
    apple = build_search_space(resolve("apple", Config(data="digits", partition="iid", clients=2)))
    assert "rounds_l" not in apple  # a rule, no list


def test_values_are_inserted_into_the_matching_part() -> None:
    values = {"kappa": 5, "mu": 0.1, "lr": 0.05}
    assert insert_values("fedavg+dbe", values) == ("fedavg+dbe(kappa=5,mu=0.1)", {"lr": 0.05})
    assert insert_values("fedprox+dbe", {"mu": 0.1}) == ("fedprox+dbe(mu=0.1)", {})
    assert insert_values("ditto+mr", {"lam": 2, "kappa": 1}) == ("ditto(lam=2)+mr(kappa=1)", {})


def test_command_shows_best_and_default(shell: Shell) -> None:
    options = "--partition iid --clients 3 --model mlp --rounds 2"
    code, out, err = shell(f"tune fedavg+dbe {options} --space {KAPPA} --trials 2 --out here")
    assert code == 0
    assert "1: fedavg+dbe(kappa=1): round 2 of 2" in err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["best", "default"]
    assert lines[4].split()[1] == "1"
    assert "The paper's kappa, mu: 50, 1 for cnn; 1, 0.1 for resnet18; 0.1, 1 for fasttext." in " ".join(
        out.split()
    )
    assert "use it   feddbe run 'fedavg+dbe(kappa=" in out
    assert " --model mlp " in out.split("use it")[1]  # as it was searched with
    assert Path("here/surface.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune fedavg --trials 0", "trials = 0"),
        ("tune fedavg --validation 0", "validation = 0; a search needs validation data"),
        ("tune 'fedavg+dbe(kappa=1)'", "a searched method cannot have values in brackets"),
        ("tune fedavg+dbe --space kapa=1", "unknown hyperparameter 'kapa'; did you mean 'kappa'"),
        ("tune fedavg+dbe --space kappa", "write it as --space kappa=1,5,50"),
        ("tune fedavgg", "unknown method 'fedavgg'"),
    ],
)
def test_invalid_input_is_one_line(shell: Shell, words: str, message: str) -> None:
    code, out, err = shell(words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert not Path("runs").exists()


def test_missing_optuna_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        InvalidInputError, match=r"tune needs Optuna; install it with: pip install 'feddbe\[tune\]'"
    ):
        search(tmp_path, 1)


_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS trial_id FROM n"


def test_damaged_file_of_a_search_is_one_line(tmp_path: Path) -> None:
    """Without the file, the search starts again and uses the finished runs."""
    whole = search(tmp_path, 1)
    file = tmp_path / "tune.sqlite"
    content = file.read_bytes()
    for statement in (
        "UPDATE trial_params SET param_value = 1e9",
        "UPDATE trial_params SET distribution_json = '{'",
        "DELETE FROM trial_params",
        "UPDATE trial_values SET value = NULL",
        "UPDATE trial_values SET value = 'x'",
        "UPDATE trials SET state = 'other'",
        "UPDATE alembic_version SET version_num = 'x'",
        f"DROP TABLE trials; CREATE VIEW trials AS {_ENDLESS}",
    ):
        file.write_bytes(content)
        with closing(sqlite3.connect(file)) as db:
            db.executescript(statement)
        _assert_not_a_search(tmp_path)
    file.write_bytes(b"x" * 1000)
    _assert_not_a_search(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StoreError, match=r"tune.sqlite' is not a plain file; remove it"):
        search(tmp_path, 1)
    file.unlink()
    runs = sorted(tmp_path.glob("*/run.sqlite"))
    assert search(tmp_path, 1).trials == whole.trials
    assert sorted(tmp_path.glob("*/run.sqlite")) == runs


def _assert_not_a_search(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"tune.sqlite' is not the file of a search .*; remove it") as raised:
        search(folder, 1)
    assert "\n" not in str(raised.value)


def test_unknown_method_of_a_record_is_one_line() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown method '\.\./etc'; .*allowed: .*fedavg"):
        insert_values("fedavg+../etc", {"lr": 0.1})
