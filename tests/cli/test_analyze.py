"""`feddbe analyze`: each analysis is computed once, stored in the run's file, and shown."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddbe
from feddbe.callbacks import display
from feddbe.callbacks.base import Callback
from feddbe.metrics.client_values import ALL
from feddbe.metrics.representations.discrepancy import Discrepancy, discrepancy
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.mdl import QUICK, mdl
from feddbe.metrics.representations.points import Points, make_points
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.metrics.representations.tsne import tsne
from feddbe.runs import analysis
from feddbe.runs.reopen import load_experiment
from feddbe.runs.store import RunStore, verify_run
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import State
from tests.cli.shell import Shell

RUN = "--rounds 2 --clients 4 --partition iid --model mlp --engine serial"


@pytest.fixture(scope="module")
def stored_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a comparison, a run with a single client, and a run without a model."""
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"clients": 4, "partition": "iid", "model": "mlp", "engine": "serial"}
    feddbe.compare(["fedavg", "fedavg+dbe"], rounds=2, out=str(folder / "pair"), **options)
    feddbe.run("fedavg", rounds=1, out=str(folder / "single_client"), **options | {"clients": 1})
    feddbe.run("majority", rounds=1, out=str(folder / "no_model"), **options)
    return folder


@pytest.fixture
def shell_with_runs(shell: Shell, stored_runs: Path, tmp_path: Path) -> Shell:
    """Return a shell in a folder with copies of the stored runs."""
    shutil.copytree(stored_runs, tmp_path, dirs_exist_ok=True)
    return shell


def load_without_analyses(folder: Path) -> dict[str, Any]:
    """Return the document of a run without its analyses."""
    return {**feddbe.load_run(folder), "analyses": []}


def compute_points(folder: Path, layer: str, params: State | None = None) -> Points:
    """Return the representations of all test samples, computed by the torch module itself.

    Args:
        folder: The run.
        layer: `z_g` or `z`.
        params: Parameters of the model; by default those of the global model of the best round.
    """
    store = RunStore.open(folder)
    server = params or store.server_state("best")
    private_states = dict(store.private_states())
    experiment = load_experiment(store)
    store.close()
    module, dataset = experiment.task.model.module, experiment.task.dataset
    assert module.load_state_dict(server, strict=False).missing_keys == []
    features, labels, clients = [], [], []
    for client, indices in enumerate(experiment.task.split.test):
        z = module.eval()[0](dataset.inputs(dataset.x[indices])).detach().numpy()  # type: ignore[index]
        p = private_states.get(client, {}).get("prbm")
        features.append(z + p.numpy() if p is not None and layer == "z" else z)
        labels.append(dataset.y[indices].numpy())
        clients.append(np.full(len(indices), client))
    return make_points(np.concatenate(features), np.concatenate(labels), np.concatenate(clients))


def sample_points(points: Points, count: int) -> Points:
    """Return the test samples that `--samples COUNT` selects."""
    permutation = np.random.RandomState(0).permutation(len(points.y))
    return points.select(np.sort(permutation[:count]))


def test_analyses_are_those_of_the_best_global_model(shell_with_runs: Shell) -> None:
    """All samples are used; at z, each client's p_i is added."""
    runs = [Path("pair") / name for name in ("fedavg", "fedavg+dbe")]
    before = [load_without_analyses(run) for run in runs]
    assert before[1]["best"]["round"] == 2, "the clients' last states are those of the best round"
    options = "--analyses probe,discrepancy,tsne --on own --moment before --layers z_g,z --samples all"
    code, out, err = shell_with_runs(f"analyze pair {options}")
    assert (code, err) == (0, "")
    assert [load_without_analyses(run) for run in runs] == before
    assert all(verify_run(run).is_intact for run in runs)
    document = feddbe.load_run(runs[1])
    for layer in ("z_g", "z"):
        points = compute_points(runs[1], layer)
        results = {result["analysis"]: result for result in document["analyses"] if result["layer"] == layer}
        assert results["probe"]["overall"]["value"] == linear_probe(points)
        assert results["probe"]["samples"] == len(points.y)
        expected = discrepancy(points)
        assert results["discrepancy"]["overall"]["mmd2"] == pytest.approx(
            expected.mean_over_clients()["mmd2"], rel=1e-4
        )
        distances = [values["mean_distance"] for values in results["discrepancy"]["clients"].values()]
        assert distances == pytest.approx(expected.mean_distance.tolist(), rel=1e-5)
        embedding = analysis.load_embedding(document.document, results["tsne"])
        assert embedding.client.tolist() == tsne(points).client.tolist()
        assert embedding.x.shape == (len(points.y), 2)
    table = [line.split() for line in out.splitlines()]
    percent = f"{100 * linear_probe(compute_points(runs[1], 'z')):.2f}"
    assert next(row for row in table if row[:1] == ["z"] and len(row) == 3)[2] == percent
    assert {path.name for path in Path("pair").glob("*.png")} >= {"discrepancy.png", "tsne.png"}
    assert "@2" in out


def test_shared_discrepancy_uses_one_model_for_both_clients(shell_with_runs: Shell) -> None:
    """Compare shared discrepancy with the plain one.

    Before local training, FedAvg's clients have the global model, and both analyses agree. With the client's
    own p_i on both sides, z equals z_g. After local training, the shared model is the one of client i.
    """
    options = "--analyses discrepancy --samples 100 --layers z_g,z"
    assert shell_with_runs(f"analyze pair {options}").code == 0
    code, out, err = shell_with_runs(f"analyze pair {options} --on all")
    assert (code, err) == (0, "")
    assert "discrepancy-all" in out
    figures = {path.name for path in Path("pair").glob("*.png")}
    assert figures >= {"discrepancy.png", "discrepancy-all.png"}
    fedavg, dbe = (
        {
            (result["on"], result["moment"], result["layer"]): result["clients"]
            for result in feddbe.load_run(f"pair/{name}")["analyses"]
        }
        for name in ("fedavg", "fedavg+dbe")
    )
    close = partial(pytest.approx, rel=1e-3, abs=1e-5)

    def read(clients: Any, metric: str) -> Any:
        return np.array([values[metric] for values in clients.values()])

    for metric in Discrepancy.METRICS:
        plain = read(fedavg["own", "before", "z_g"], metric)
        shared = read(fedavg["all", "before", "z_g"], metric)
        assert shared == close(plain), metric
        shared_z_g = read(dbe["all", "before", "z_g"], metric)
        shared_z = read(dbe["all", "before", "z"], metric)
        plain_z = read(dbe["own", "before", "z"], metric)
        if metric != "a_distance":  # a sample near the border may change sides
            assert shared_z == close(shared_z_g), metric
            assert shared_z != close(plain_z), metric

    store = RunStore.open(Path("pair/fedavg"))
    experiment, server, best_round = (
        load_experiment(store),
        store.server_state("best"),
        store.round_of("best"),
    )
    store.close()
    assert best_round is not None
    task = ClientTask(3, best_round + 1, "train")
    trained = run_client(experiment.task, experiment.method, task, dict(server), None).upload
    points = sample_points(compute_points(Path("pair/fedavg"), "z_g", trained), 100)
    expected = discrepancy(points, clients=[3])
    shared_after = fedavg["all", "after", "z_g"]["3"]
    assert shared_after["fisher_f1"] == pytest.approx(expected.fisher_f1[0], rel=1e-3)
    assert shared_after["spread"] == pytest.approx(expected.spread[0], rel=1e-3)
    plain_after = fedavg["own", "after", "z_g"]["3"]
    assert shared_after["fisher_f1"] != pytest.approx(plain_after["fisher_f1"], rel=1e-2)


def test_probe_of_all_samples_under_each_clients_model(shell_with_runs: Shell) -> None:
    """Before local training all clients have the global model; after it, each has its own."""
    code, out, err = shell_with_runs("analyze pair --analyses probe --samples all")
    assert (code, err) == (0, "")
    document = feddbe.load_run("pair/fedavg")
    results = {(result["on"], result["moment"]): result for result in document["analyses"]}
    assert set(results) == {("all", "before"), ("all", "after")}, "the default"
    before = {values["value"] for values in results["all", "before"]["clients"].values()}
    assert before == {linear_probe(compute_points(Path("pair/fedavg"), "z_g"))}
    store = RunStore.open(Path("pair/fedavg"))
    experiment, server, best_round = (
        load_experiment(store),
        store.server_state("best"),
        store.round_of("best"),
    )
    store.close()
    assert best_round is not None
    after = {}
    for client in range(4):
        task = ClientTask(client, best_round + 1, "train")
        trained = run_client(experiment.task, experiment.method, task, dict(server), None).upload
        after[str(client)] = linear_probe(compute_points(Path("pair/fedavg"), "z_g", trained))
    stored = {client: values["value"] for client, values in results["all", "after"]["clients"].items()}
    assert stored == after
    overall = results["all", "after"]["overall"]
    assert overall["value"] == pytest.approx(np.mean(list(after.values())))
    assert overall["std"] == pytest.approx(np.std(list(after.values()), ddof=1))
    rises = sum(value > next(iter(before)) for value in after.values())
    row = next(line.split() for line in out.splitlines() if line.startswith("fedavg ") and " of 4" in line)
    assert row[-3:] == [str(rises), "of", "4"]


def test_stored_analysis_is_not_repeated_unless_settings_change(
    shell_with_runs: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "analyze pair/fedavg --analyses probe --samples 60"
    first = shell_with_runs(command)
    assert first.code == 0
    calls = list[str]()
    compute_missing = analysis._compute_missing

    def count_calls(*arguments: Any) -> None:
        calls.append("computed")
        compute_missing(*arguments)

    monkeypatch.setattr(analysis, "_compute_missing", count_calls)
    assert shell_with_runs(command) == first
    assert calls == []
    document = shell_with_runs.json("analyze pair/fedavg --analyses probe --samples 50")["runs"][0]
    assert calls == ["computed"]
    results = document["analyses"]
    assert [(result["moment"], result["samples"]) for result in results] == [("before", 50), ("after", 50)]
    assert shell_with_runs.json("show pair/fedavg")["analyses"] == results
    assert "probe" in shell_with_runs("show pair/fedavg").out


def test_quick_results_are_marked_and_progress_is_printed(
    shell_with_runs: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddbe.metrics.representations.mdl.REPORT_SECONDS", 0.01)
    monkeypatch.setattr(display, "_SECONDS_TO_FIRST_LINE", 0.0)
    monkeypatch.setattr(display, "_SECONDS_BETWEEN_LINES", 0.0)
    code, out, err = shell_with_runs("analyze pair/fedavg --on own --quick --samples 60 --moment before")
    assert re.search(
        r"fedavg: representations: \d+% of step 2 of 2, 0:\d\d:\d\d, about 0:\d\d:\d\d left\n", err
    )
    assert code == 0
    assert "mdl-quick" in out
    assert "QUICK" in out
    assert Path("pair/fedavg/mdl-quick.png").exists()
    (result,) = feddbe.load_run("pair/fedavg")["analyses"]
    assert (result["quick"], result["settings"]["steps"], result["samples"]) == (True, QUICK.steps, 60)
    points = sample_points(compute_points(Path("pair/fedavg"), "z"), 60)
    expected = mdl(points, classes=10, settings=QUICK)
    assert result["overall"]["value"] == pytest.approx(expected.nats, rel=1e-4)
    assert result["overall"]["bits"] == pytest.approx(expected.nats / np.log(2), rel=1e-4)
    assert result["overall"][f"loss:{expected.sizes[-1]}"] == result["overall"]["validation_loss"]
    store = RunStore.open(Path("pair/fedavg"))
    names = {record.name for record in store.records(result["round"]) if "@" in record.name}
    store.close()
    assert {"mdl-quick@z_g", "mdl-quick@z_g/bits", "mdl-quick@z_g/std"} <= names
    assert "QUICK" in shell_with_runs("show pair/fedavg").out


def test_analyzed_run_resumes_with_identical_results(shell_with_runs: Shell) -> None:
    analyze = "analyze pair/fedavg --analyses probe,tsne --layers z_g,fc1 --round last --samples 40"
    assert shell_with_runs(analyze).code == 0
    options = RUN.replace("--rounds 2", "--rounds 3")
    assert shell_with_runs(f"run fedavg {options} --out pair/fedavg --resume").code == 0
    assert shell_with_runs(f"run fedavg {options} --out not_analyzed").code == 0
    analyzed = load_without_analyses(Path("pair/fedavg"))
    not_analyzed = load_without_analyses(Path("not_analyzed"))
    for document in (analyzed, not_analyzed):
        document["rounds"] = [{**result, "seconds": 0} for result in document["rounds"]]
    for key in ("rounds", "server_sha256", "clients_sha256", "config_hash"):
        assert analyzed[key] == not_analyzed[key]
    still_stored = feddbe.load_run("pair/fedavg")["analyses"]
    assert [result["round"] for result in still_stored] == [2] * 8


def test_per_client_analyzes_each_client_separately(shell_with_runs: Shell) -> None:
    (run,) = feddbe.analyze("pair/fedavg", analyses="probe", moment="before", samples=None, per_client=True)
    result = run["analyses"][0]
    points = compute_points(Path("pair/fedavg"), "z")
    expected = {str(client): linear_probe(points.select(points.client == client)) for client in range(4)}
    assert {client: values["value"] for client, values in result["clients"].items()} == expected
    assert result["overall"]["value"] == pytest.approx(np.mean(list(expected.values())))


INVALID_INPUTS = {
    "pair --analyses mld": ["unknown analysis 'mld'; did you mean 'mdl'? allowed: "],
    "pair --analyses ,": ["no analysis is selected; allowed: confusion, discrepancy, mdl, probe, tsne"],
    "pair --layers cov1": ["unknown layer 'cov1'; allowed: fc1, fc1.0, fc1.1, fc1.2, logits, z, z_g"],
    "pair --round first": ["unknown round 'first'; allowed: best, last"],
    "pair --moment during": ["unknown moment of fedavg 'during'; "],
    "pair --moment adapted": ["unknown moment of fedavg 'adapted'; "],
    "pair --samples 0": ["samples = '0'; allowed: a whole number >= 1, or all"],
    "pair --samples 10": ["9 training samples (nine tenths of all) are too few for 10 different sizes"],
    "pair --analyses tsne --per-client": ["tsne cannot analyze single clients; leave out --per-client"],
    "pair --analyses tsne --on all": ["tsne on all samples; allowed: own"],
    "pair --analyses probe --on all --per-client": ["probe on all samples with --per-client; allowed: own"],
    "nowhere": ["'nowhere' is not the folder of a run"],
    "no_model --analyses discrepancy --on all": ["majority deploys no model: it has no representations"],
    "no_model --analyses probe": ["majority deploys no model: it has no representations"],
    "pair --quick --samples 10 --per-client": ["mdl of single clients: 9 training samples"],
}


@pytest.mark.parametrize("arguments", INVALID_INPUTS)
def test_invalid_input_prints_one_line(shell_with_runs: Shell, arguments: str) -> None:
    code, out, err = shell_with_runs(f"analyze {arguments}")
    assert (code, out) == (2, "")
    for part in INVALID_INPUTS[arguments]:
        assert part in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("on", ["own", "all"])
def test_discrepancy_requires_two_clients(shell_with_runs: Shell, on: str) -> None:
    code, out, err = shell_with_runs(f"analyze single_client --analyses discrepancy --on {on}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "discrepancy needs two or more clients: got 1" in err


def test_ctrl_c_keeps_finished_analyses(shell_with_runs: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Callback, done: int, accuracy: float | None) -> None:
        if done == 2:  # step 1 computes the representations
            raise KeyboardInterrupt

    monkeypatch.setattr(display.CliProgress, "on_round_end", interrupt)
    code, _, err = shell_with_runs("analyze pair/fedavg --analyses probe,discrepancy --on all --samples 40")
    message = "feddbe: stopped; finished analyses are kept, repeat the command for the others\n"
    assert (code, err) == (130, message)
    finished = {result["analysis"] for result in feddbe.load_run("pair/fedavg")["analyses"]}
    assert finished == {"probe"}


def test_pooled_metrics_of_every_round_are_stored_and_drawn(shell: Shell) -> None:
    assert shell(f"run fedavg+dbe {RUN} --metrics drift,probe --out r").code == 0
    document = shell.json("show r")
    for result in document["rounds"]:
        moments = ("before", "after") if result["round"] < 2 else ("before",)
        for moment in moments:
            metrics = result["metrics"][moment]
            assert metrics["drift"].keys() == {"weighted", "mean", "worst_tenth", "std"}
            assert 0 < metrics["drift"]["mean"] < 5
            assert metrics["probe"].keys() == {"weighted"}
    store = RunStore.open(Path("r"))
    records = store.records(2)
    store.close()
    drift = {record.client: record.value for record in records if record.name == "drift"}
    assert drift.keys() == {ALL, 0, 1, 2, 3}
    points = compute_points(Path("r"), "z_g")
    if document["best"]["round"] == 2 and max(np.bincount(points.client)) <= 100:
        expected = discrepancy(points).mean_distance.tolist()
        assert [drift[client] for client in range(4)] == pytest.approx(expected, rel=1e-4)
    assert Path("r/metrics.png").exists()


class ProgressRecorder(Callback):
    """Records the number of steps, the completed steps, and the fractions of the step in progress."""

    def __init__(self) -> None:
        self.steps = 0
        self.completed = 0
        self.progress: list[float] = []

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.steps = rounds

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.completed = done

    def on_analysis_progress(self, fraction: float) -> None:
        self.progress.append(self.completed + fraction)


def test_progress_over_layers_and_models_never_falls(
    shell_with_runs: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, moments and models of one analysis are one step."""
    monkeypatch.setattr("feddbe.metrics.representations.mdl.REPORT_SECONDS", 0.001)
    quick_settings = ANALYSES["mdl"].quick_settings
    assert quick_settings is not None
    monkeypatch.setitem(quick_settings, "steps", 30)
    recorder = ProgressRecorder()
    feddbe.analyze("pair/fedavg", analyses="mdl", layers="z_g,logits", quick=True, callback=recorder)
    assert recorder.steps == recorder.completed == 2
    assert len(recorder.progress) > 10
    assert recorder.progress == sorted(recorder.progress)
