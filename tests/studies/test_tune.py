"""A search chooses on training data alone, goes on where it was stopped, and says what it found."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config, parse_options
from feddbe.data.federated import load_federated_data
from feddbe.data.split import load_split
from feddbe.errors import InvalidInputError
from feddbe.runs import summary
from feddbe.runs.experiment import resolve
from feddbe.studies.tune import TuneResult, name_with_values, search_space, tune
from tests.studies.conftest import Shell

pytest.importorskip("optuna", reason="the extra tune is not installed")

SMALL = {"data": "digits", "partition": "iid", "clients": 3, "rounds": 3, "model": "mlp"}
KAPPA, LR = "kappa=0.5,2", "lr=0.05,0.2"


def search(folder: Path, trials: int, callback: Callback | None = None, **more: Any) -> TuneResult:
    asked = parse_options(["fedavg+dbe"], {**SMALL, "out": str(folder), **more})
    return tune(asked, trials=trials, space=[KAPPA, LR], callback=callback)


def test_the_test_data_are_not_even_in_the_runs(tmp_path: Path) -> None:
    """What the runs are trained and tested on is the training data, divided; no row of the test data."""
    search(tmp_path, 1)
    held = load_federated_data(Config(**{key: SMALL[key] for key in ("data", "partition", "clients")}))  # type: ignore[arg-type]
    used = load_split(tmp_path / "split.npz", len(held.dataset))
    rows = np.concatenate([used.train.flat, used.test.flat])
    assert not np.isin(held.split.test.flat, rows).any()
    assert sorted(rows) == sorted(held.split.train.flat)
    assert len(used.test.flat) == pytest.approx(0.2 * len(rows), abs=3)


def test_a_search_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    class Stops(Callback):
        def round(self, done: int, accuracy: float | None) -> None:
            if self.runs == 3 and done == 2:
                raise KeyboardInterrupt

        runs = 0

        def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
            self.runs += 1

    whole = search(tmp_path / "whole", 4)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "stopped", 4, Stops())
    found = search(tmp_path / "stopped", 4)
    assert found.trials == whole.trials
    assert len(found.trials) == 4
    again = search(tmp_path / "stopped", 4)
    assert again.trials == whole.trials


def test_the_default_comes_first_and_the_best_is_the_best(tmp_path: Path) -> None:
    found = search(tmp_path, 3)
    assert found.trials[0].values == found.published == {"kappa": 1.0, "lr": 0.1}
    assert found.first is found.trials[0]
    assert found.best.accuracy == max(trial.accuracy or 0 for trial in found.trials)
    assert found.space == {"kappa": [0.5, 1.0, 2], "lr": [0.05, 0.1, 0.2]}


def test_nothing_is_tried_twice_and_a_small_space_ends_the_search(tmp_path: Path) -> None:
    asked = parse_options(["fedavg"], {**SMALL, "rounds": 1, "out": str(tmp_path)})
    found = tune(asked, trials=20, space=["lr=0.01,0.02,0.03,0.05"])
    assert sorted(trial.values["lr"] for trial in found.trials) == [0.01, 0.02, 0.03, 0.05, 0.1]


def test_a_trial_that_diverges_is_worth_nothing(tmp_path: Path) -> None:
    asked = parse_options(["fedavg"], {**SMALL, "out": str(tmp_path)})
    found = tune(asked, trials=3, space=["lr=1e30"])
    diverged = [trial for trial in found.trials if trial.values["lr"] == 1e30]
    assert diverged
    assert {(trial.accuracy, trial.note) for trial in diverged} == {(0.0, "diverged")}
    assert found.best.values == {"lr": 0.1}


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = search(tmp_path, 1)
    split = (tmp_path / "split.npz").read_bytes()
    for other in (
        {"local_epochs": 2},
        {"rounds": 2},
        {"clients": 4},
        {"partition": "dirichlet:0.5"},
        {"validation": 0.3},
    ):
        with pytest.raises(InvalidInputError, match="holds another search"):
            search(tmp_path, 1, **other)
    assert (tmp_path / "split.npz").read_bytes() == split, "that of the search that is there"
    assert search(tmp_path, 1, quiet=True).trials == first.trials, "how it is watched is not part of it"


def test_a_search_on_changed_data_is_refused(tmp_path: Path) -> None:
    random = np.random.RandomState(0)

    def search_file() -> TuneResult:
        np.savez(tmp_path / "own.npz", x=random.normal(size=(60, 4)).astype(np.float32), y=np.arange(60) % 3)
        options = {"data": str(tmp_path / "own.npz"), "clients": 3, "partition": "iid", "rounds": 1}
        asked = parse_options(["fedavg"], {**options, "lr": 0.1, "out": str(tmp_path / "search")})
        return tune(asked, trials=1, space=["lr=0.05"])

    search_file()
    with pytest.raises(InvalidInputError, match="holds another search"):
        search_file()


def test_a_client_with_one_training_sample_trains_and_is_not_judged(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "lonely.npz",
        train_0=np.arange(100), test_0=np.arange(100, 130), train_1=np.array([130]), test_1=np.array([131]),
    )  # fmt: skip
    asked = parse_options(
        ["fedavg"],
        {"split": str(tmp_path / "lonely.npz"), "model": "mlp", "rounds": 1, "out": str(tmp_path / "t")},
    )
    (trial,) = tune(asked, trials=1, space=["lr=0.05"]).trials
    assert trial.accuracy
    used = load_split(tmp_path / "t" / "split.npz", 1797)
    assert [len(rows) for rows in (*used.train, *used.test)] == [80, 1, 20, 0]


@pytest.mark.parametrize("method", ["fedbabu", "fedavg+ft"])
def test_a_method_that_fine_tunes_is_judged_after_it(tmp_path: Path, method: str) -> None:
    """A run below the others before fine-tuning may be above them after it, so none is stopped early."""
    asked = parse_options([method], {**SMALL, "rounds": 8, "adapt_epochs": 2, "out": str(tmp_path)})
    found = tune(asked, trials=6, space=["lr=0.0001,0.001,0.01,0.05,0.2"])
    runs = [summary.load_document(folder.parent) for folder in tmp_path.glob("*/run.sqlite")]
    tuned = {run["config"]["lr"]: run["last"]["adapted"] for run in runs if run["last"]}
    assert {trial.values["lr"]: trial.accuracy for trial in found.trials} == {
        lr: accuracy["weighted"] for lr, accuracy in tuned.items() if accuracy
    }
    assert [trial.note for trial in found.trials] == [""] * 6


def test_the_space_is_the_papers_grid_and_the_models_own_values() -> None:
    experiment = resolve("fedavg+dbe", Config(data="digits", partition="iid", clients=2, variant="official"))
    found = search_space(experiment)
    assert found["kappa"] == [0, 0.001, 0.01, 0.1, 1, 5, 10, 20, 50, 100, 200, 500]
    assert found["mu"] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert found["lr"] == [0.005, 0.01, 0.05, 0.1]
    pfedme = search_space(resolve("pfedme", Config(data="digits", partition="iid", clients=2)))
    assert "lr" not in pfedme  # it has no use for it
    apple = search_space(resolve("apple", Config(data="digits", partition="iid", clients=2)))
    assert "rounds_l" not in apple  # a rule, no list


def test_values_go_into_the_brackets_of_the_part_that_has_them() -> None:
    values = {"kappa": 5, "mu": 0.1, "lr": 0.05}
    assert name_with_values("fedavg+dbe", values) == ("fedavg+dbe(kappa=5,mu=0.1)", {"lr": 0.05})
    assert name_with_values("fedprox+dbe", {"mu": 0.1}) == ("fedprox+dbe(mu=0.1)", {})
    assert name_with_values("ditto+mr", {"lam": 2, "kappa": 1}) == ("ditto(lam=2)+mr(kappa=1)", {})


def test_the_command_shows_what_was_found_beside_the_default(shell: Shell) -> None:
    options = "--partition iid --clients 3 --model mlp --rounds 2"
    code, out, err = shell(f"tune fedavg+dbe {options} --space {KAPPA} --trials 2 --out here")
    assert code == 0
    assert "1: fedavg+dbe(kappa=1): round 2 of 2" in err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["found", "default"]
    assert lines[4].split()[1] == "1"
    assert "The paper's kappa, mu: 50, 1 for cnn; 1, 0.1 for resnet18; 0.1, 1 for fasttext." in " ".join(
        out.split()
    )
    assert "use it   feddbe run 'fedavg+dbe(kappa=" in out
    assert " --model mlp " in out.split("use it")[1]  # as it was searched with
    assert Path("here/surface.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("tune fedavg --trials 0", "trials = 0"),
        ("tune fedavg --validation 0", "validation = 0; a search needs validation data"),
        ("tune 'fedavg+dbe(kappa=1)'", "what is searched has no values yet"),
        ("tune fedavg+dbe --space kapa=1", "unknown hyper-parameter 'kapa'; did you mean 'kappa'"),
        ("tune fedavg+dbe --space kappa", "write it as --space kappa=1,5,50"),
        ("tune fedavgg", "unknown method 'fedavgg'"),
    ],
)
def test_bad_input_is_one_line(shell: Shell, words: str, told: str) -> None:
    code, out, err = shell(words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert told in err
    assert not Path("runs").exists()


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
