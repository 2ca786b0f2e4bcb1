"""Experiment trackers: what they stored is read back with their own packages, without a network."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.callbacks import replay
from feddbe.cli.main import main

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 4, "partition": "iid", "model": "mlp", "engine": "serial", "quiet": True,
}  # fmt: skip
OPTIONS = ["--clients", "4", "--partition", "iid", "--model", "mlp", "--quiet"]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select local storage by the packages' own environment variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")


def _expected(run: Mapping[str, Any]) -> dict[int, float]:
    return {result["round"]: result["accuracy"]["weighted"] for result in run["rounds"]}


# --- TensorBoard


def _tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    """Scalars are read back from the event files, also for a resumed run."""
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    board = feddbe.callbacks.TensorBoard(tmp_path / "board")
    methods = ["fedavg", "fedavg+mr"]
    feddbe.compare(methods, rounds=1, callback=board, out="both", **SMALL)
    runs = feddbe.compare(methods, rounds=2, resume=True, callback=[board], out="both", **SMALL)
    for run in runs:
        folder = tmp_path / "board" / "both" / run["method"]
        for tag, statistic in (("accuracy/weighted", "weighted"), ("accuracy/worst_tenth", "worst_tenth")):
            assert dict(_tensorboard_scalars(folder, tag)) == pytest.approx(dict(run.curve(statistic)))
        losses = {r["round"]: r["train_loss"] for r in run["rounds"] if r["train_loss"] is not None}
        assert dict(_tensorboard_scalars(folder, "train_loss")) == pytest.approx(losses)


def test_finished_runs_and_several_seeds_replace_their_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    runs = feddbe.compare(["fedavg"], seeds=2, rounds=1, out="seeds", callback="tensorboard:board", **SMALL)
    replay(runs[0], "tensorboard:board")
    for run in runs:
        folder = tmp_path.joinpath("board", *Path(run["folder"]).parts[-2:])
        rounds, accuracies = zip(*_tensorboard_scalars(folder, "accuracy/weighted"), strict=True)
        assert list(rounds) == [0, 1]
        assert list(accuracies) == pytest.approx(list(_expected(run).values()))


# --- W&B


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, whose first seven bytes are W&B's header."""
    block, position, record = 32_768, 7, b""
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield record
            record = b""


def _wandb_records(folder: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """Return the configuration and the accuracy by round of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    config: dict[str, Any] = {}
    accuracies: dict[int, float] = {}
    for data in _leveldb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "accuracy/weighted" in items:
            accuracies[record.history.step.num] = json.loads(items["accuracy/weighted"])
    return config, accuracies


@pytest.mark.filterwarnings("ignore")  # of the package
def test_wandb_has_options_and_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line with worker processes, then from the finished run into another folder."""
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    command = ["run", "fedavg", *OPTIONS, "--rounds", "2", "--engine", "pool(workers=2)", "--out", "one"]
    assert main([*command, "--callback", "wandb:project", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "fedavg"
    run = feddbe.load_run("one")
    (live,) = Path("wandb").glob("offline-run-*")
    config, accuracies = _wandb_records(live)
    assert (config["lr"], config["clients"]) == (run["config"]["lr"], 4)
    assert accuracies == pytest.approx(_expected(run))

    replay(run, "wandb:project")
    assert {path.name.rpartition("-")[2] for path in Path("wandb").glob("offline-run-*")} == {
        live.name.rpartition("-")[2]
    }


# --- MLflow


@pytest.mark.filterwarnings("ignore")  # of the package
def test_mlflow_has_options_and_every_round_once(tmp_path: Path) -> None:
    """A resumed run continues its MLflow run; a finished one adds nothing."""
    mlflow: Any = pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    feddbe.compare(["fedavg", "fedavg+mr"], rounds=1, out="both", callback="mlflow:experiment", **SMALL)
    runs = feddbe.compare(
        ["fedavg", "fedavg+mr"], rounds=2, resume=True, out="both", callback="mlflow:experiment", **SMALL
    )
    assert main(["show", "both", "--callback", "mlflow:experiment"]) == 0

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("experiment")
    tracked = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert tracked.keys() == {"fedavg", "fedavg+mr"}
    for run in runs:
        info = tracked[run["method"]]
        assert info.info.status == "FINISHED"
        assert info.data.params["clients"] == "4"
        history = client.get_metric_history(info.info.run_id, "accuracy/weighted")
        assert [(point.step, point.value) for point in history] == list(_expected(run).items())


@pytest.mark.filterwarnings("ignore")  # of the package
def test_a_failed_run_is_marked(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")

    class Stop(feddbe.Callback):
        def on_evaluation(self, result: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg", rounds=2, callback=["mlflow:experiment", Stop()], out="one", **SMALL)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"


# --- mistakes


@pytest.mark.parametrize(
    ("tracker", "module"),
    [("wandb:p", "wandb"), ("mlflow:e", "mlflow"), ("tensorboard", "torch.utils.tensorboard")],
)
def test_a_missing_package_is_one_line_before_anything_runs(
    tracker: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for command in (["run", "fedavg"], ["compare", "fedavg", "--seeds", "2"], ["show", "x"]):
        assert main([*command, "--callback", tracker]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"is not installed; pip install 'feddbe[{tracker.partition(':')[0]}]'" in line
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("tracker", ["wandb", "mlflow:", "tensorbord", "comet:x"])
def test_an_unknown_tracker_is_one_line(tracker: str) -> None:
    with pytest.raises(feddbe.InvalidInputError, match=r"^callback = .* allowed: wandb:PROJECT, mlflow:"):
        feddbe.run("fedavg", callback=tracker, **SMALL)
