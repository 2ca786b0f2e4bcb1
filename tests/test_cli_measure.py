"""`feddbe measure`: what is asked is taken once, written into the run's file, and shown; the run stays as it
was."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddbe
from feddbe.metrics.records import ALL
from feddbe.metrics.representations.discrepancy import Discrepancy, discrepancy
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.mdl import QUICK, mdl
from feddbe.metrics.representations.points import Points, make_points
from feddbe.metrics.representations.tsne import tsne
from feddbe.runs import analysis
from feddbe.runs.replay import load_experiment
from feddbe.runs.store import RunStore, verify_run
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import State
from tests.test_cli import Shell, shell

__all__ = ["shell"]

RUN = "--rounds 2 --clients 4 --partition iid --model mlp --engine serial"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison, a run of one client, and one without a model."""
    folder = tmp_path_factory.mktemp("made")
    options: dict[str, Any] = {"clients": 4, "partition": "iid", "model": "mlp", "engine": "serial"}
    feddbe.compare(["fedavg", "fedavg+dbe"], rounds=2, out=str(folder / "c"), **options)
    feddbe.run("fedavg", rounds=1, out=str(folder / "one"), **options | {"clients": 1})
    feddbe.run("majority", rounds=1, out=str(folder / "none"), **options)
    return folder


@pytest.fixture
def compared(shell: Shell, made: Path, tmp_path: Path) -> Shell:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return shell


def left(folder: Path) -> dict[str, Any]:
    """What a run is, without what was measured of it later."""
    return {**feddbe.load(folder), "analyses": []}


def by_hand(folder: Path, place: str, params: State | None = None) -> Points:
    """Of the global model (or `params`) on all test samples, client by client, by the module itself."""
    store = RunStore.open(folder)
    server = params or store.server_state("best")
    private = dict(store.private_states())
    e = load_experiment(store)
    store.close()
    assert e.task.model.module.load_state_dict(server, strict=False).missing_keys == []
    x, y, whose = [], [], []
    for client, rows in enumerate(e.task.split.test):
        data = e.task.dataset
        z = e.task.model.module.eval()[0](data.inputs(data.x[rows])).detach().numpy()  # type: ignore[index]
        p = private.get(client, {}).get("prbm")
        x.append(z + p.numpy() if p is not None and place == "z" else z)
        y.append(data.y[rows].numpy())
        whose.append(np.full(len(rows), client))
    return make_points(np.concatenate(x), np.concatenate(y), np.concatenate(whose))


def test_each_measure_is_that_of_the_points(compared: Shell) -> None:
    """All samples of the best round's global model, with each client's own p_i at z."""
    runs = [Path("c") / name for name in ("fedavg", "fedavg+dbe")]
    before = [left(run) for run in runs]
    assert before[1]["best"]["round"] == 2, "the clients' last states are those of the best round"
    asked = "--analyses probe,discrepancy,tsne --moment before --layers z_g,z --samples all"
    code, out, err = compared(f"measure c {asked}")
    assert (code, err) == (0, "")
    assert [left(run) for run in runs] == before
    assert all(verify_run(run).is_intact for run in runs)
    for place in ("z_g", "z"):
        wanted, document = by_hand(runs[1], place), feddbe.load(runs[1])
        found = {m["analysis"]: m for m in document["analyses"] if m["layer"] == place}
        assert found["probe"]["overall"]["value"] == linear_probe(wanted)
        assert found["probe"]["samples"] == len(wanted.y)
        there = discrepancy(wanted)
        assert found["discrepancy"]["overall"]["mmd2"] == pytest.approx(there.overall()["mmd2"], rel=1e-4)
        each = [read["mean_distance"] for read in found["discrepancy"]["clients"].values()]
        assert each == pytest.approx(there.mean_distance.tolist(), rel=1e-5)
        laid = analysis.load_embedding(document.document, found["tsne"])
        assert laid.client.tolist() == tsne(wanted).client.tolist()
        assert laid.x.shape == (len(wanted.y), 2)
    table = [line.split() for line in out.splitlines()]
    percent = f"{100 * linear_probe(by_hand(runs[1], 'z')):.2f}"
    assert next(row for row in table if row[:1] == ["z"] and len(row) == 3)[2] == percent
    assert {path.name for path in Path("c").glob("*.png")} >= {"discrepancy.png", "tsne.png"}
    assert "@2" in out


def test_shared_discrepancy_has_one_model_on_both_sides(compared: Shell) -> None:
    """Before local training FedAvg's clients have the global model, so that both readings agree. With the
    client's own p_i on both sides, z is z_g. After local training it is the model that client i trained."""
    asked = "--analyses discrepancy,discrepancy-shared --samples 100 --layers z_g,z"
    code, out, err = compared(f"measure c {asked}")
    assert (code, err) == (0, "")
    assert "discrepancy-shared" in out
    assert {path.name for path in Path("c").glob("*.png")} >= {"discrepancy.png", "discrepancy-shared.png"}
    plain, dbe = (
        {(m["analysis"], m["moment"], m["layer"]): m["clients"] for m in feddbe.load(f"c/{name}")["analyses"]}
        for name in ("fedavg", "fedavg+dbe")
    )
    close = partial(pytest.approx, rel=1e-3, abs=1e-5)
    for name in Discrepancy.METRICS:
        own, shared = (
            [read[name] for read in found.values()]
            for found in (plain["discrepancy", "before", "z_g"], plain["discrepancy-shared", "before", "z_g"])
        )
        assert shared == close(own), name
        at_z_g, at_z, own_at_z = (
            np.array([read[name] for read in dbe[what, "before", place].values()])
            for what, place in (
                ("discrepancy-shared", "z_g"), ("discrepancy-shared", "z"), ("discrepancy", "z"),
            )
        )  # fmt: skip
        if name != "a_distance":  # a sample near the border may change sides
            assert at_z == close(at_z_g), name
            assert at_z != close(own_at_z), name
    store = RunStore.open(Path("c/fedavg"))
    e, server, round = load_experiment(store), store.server_state("best"), store.round_of("best")
    store.close()
    assert round is not None
    trained = run_client(e.task, e.method, ClientTask(3, round + 1, "train"), dict(server), None).upload
    with_f3 = by_hand(Path("c/fedavg"), "z_g", trained)
    kept = np.sort(np.random.RandomState(0).permutation(len(with_f3.y))[:100])
    wanted = discrepancy(with_f3.select(kept), clients=[3])
    found = plain["discrepancy-shared", "after", "z_g"]["3"]
    assert found["fisher_f1"] == pytest.approx(wanted.fisher_f1[0], rel=1e-3)
    assert found["spread"] == pytest.approx(wanted.spread[0], rel=1e-3)
    own = plain["discrepancy", "after", "z_g"]["3"]
    assert found["fisher_f1"] != pytest.approx(own["fisher_f1"], rel=1e-2)


def test_nothing_is_taken_twice_and_other_settings_anew(
    compared: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "analyze c/fedavg --analyses probe --samples 60"
    first = compared(asked)
    assert first.code == 0
    taken = list[str]()
    again = analysis._compute_missing
    monkeypatch.setattr(analysis, "_take_missing", lambda *a: taken.append("again") or again(*a))  # type: ignore[func-returns-value]
    assert compared(asked) == first
    assert taken == []
    found = compared.json("analyze c/fedavg --analyses probe --samples 50")["runs"][0]["analyses"]
    assert taken == ["again"]
    assert [(m["moment"], m["samples"]) for m in found] == [("before", 50), ("after", 50)]
    assert compared.json("show c/fedavg")["analyses"] == found
    assert "probe" in compared("show c/fedavg").out


def test_quick_is_marked_wherever_it_is_shown(compared: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while it is taken, standard error tells how far it is and how long the rest takes."""
    monkeypatch.setattr("feddbe.metrics.representations.mdl.TICK", 0.01)
    for seconds in ("_FIRST", "_EVERY"):
        monkeypatch.setattr(f"feddbe.callbacks.display.{seconds}", 0.0)
    code, out, err = compared("analyze c/fedavg --quick --samples 60 --moment before")
    assert re.search(
        r"fedavg: representations: \d+% of step 2 of 2, 0:\d\d:\d\d, about 0:\d\d:\d\d left\n", err
    )
    assert code == 0
    assert "mdl-quick" in out
    assert "QUICK" in out
    assert Path("c/fedavg/mdl-quick.png").exists()
    (found,) = feddbe.load("c/fedavg")["analyses"]
    assert (found["quick"], found["settings"]["steps"], found["samples"]) == (True, QUICK.steps, 60)
    kept = np.sort(np.random.RandomState(0).permutation(len(by_hand(Path("c/fedavg"), "z").y))[:60])
    wanted = mdl(by_hand(Path("c/fedavg"), "z").select(kept), classes=10, settings=QUICK)
    assert found["overall"]["value"] == pytest.approx(wanted.nats, rel=1e-4)
    assert found["overall"]["bits"] == pytest.approx(wanted.nats / np.log(2), rel=1e-4)
    assert found["overall"][f"loss:{wanted.sizes[-1]}"] == found["overall"]["validation_loss"]
    store = RunStore.open(Path("c/fedavg"))
    names = {row.name for row in store.records(found["round"]) if "@" in row.name}
    store.close()
    assert {"mdl-quick@z_g", "mdl-quick@z_g/bits", "mdl-quick@z_g/std"} <= names
    assert "QUICK" in compared("show c/fedavg").out


def test_a_measured_run_goes_on_as_if_nothing_had_been_measured(compared: Shell) -> None:
    assert (
        compared("analyze c/fedavg --analyses probe,tsne --layers z_g,fc1 --round last --samples 40").code
        == 0
    )
    more = RUN.replace("--rounds 2", "--rounds 3")
    assert compared(f"run fedavg {more} --out c/fedavg --resume").code == 0
    assert compared(f"run fedavg {more} --out alone").code == 0
    measured, alone = left(Path("c/fedavg")), left(Path("alone"))
    for document in (measured, alone):
        document["rounds"] = [{**entry, "seconds": 0} for entry in document["rounds"]]
    for key in ("rounds", "server_sha256", "clients_sha256", "config_hash"):
        assert measured[key] == alone[key]
    assert [m["round"] for m in feddbe.load("c/fedavg")["analyses"]] == [2] * 8, (
        "what was known is still there"
    )


def test_of_each_client_alone(compared: Shell) -> None:
    found = feddbe.analyze("c/fedavg", analyses="probe", moment="before", samples=None, per_client=True)[0][
        "analyses"
    ]
    every = by_hand(Path("c/fedavg"), "z")
    wanted = {str(c): linear_probe(every.select(every.client == c)) for c in range(4)}
    assert {client: read["value"] for client, read in found[0]["clients"].items()} == wanted
    assert found[0]["overall"]["value"] == pytest.approx(np.mean(list(wanted.values())))


MISTAKES = [
    ("c --analyses mld", "unknown analysis 'mld'; did you mean 'mdl'? allowed: "),
    ("c --analyses ,", "no analysis is selected; allowed: discrepancy, discrepancy-shared, mdl, probe, tsne"),
    ("c --layers cov1", "unknown layer 'cov1'; allowed: fc1, fc1.0, fc1.1, fc1.2, logits, z, z_g"),
    ("c --round first", "unknown round 'first'; allowed: best, last"),
    ("c --moment during", "unknown moment of fedavg 'during'; "),
    ("c --moment adapted", "unknown moment of fedavg 'adapted'; "),
    ("c --samples 0", "n = '0'; allowed: a number from 1 on, or all"),
    ("c --samples 10", "9 training samples (nine tenths of those given) are too few for 10 different sizes"),
    ("c --analyses tsne --per-client", "tsne cannot be taken of single clients; leave out --per-client"),
    ("nowhere", "'nowhere' is not the folder of a run"),
    ("one --analyses discrepancy", "discrepancy needs two or more clients: got 1"),
    ("one --analyses discrepancy-shared", "discrepancy needs two or more clients: got 1"),
    ("none --analyses discrepancy-shared", "majority deploys no model: it has no representations"),
    ("none --analyses probe", "majority deploys no model: it has no representations"),
    ("c --quick --samples 10 --per-client", "mdl of single clients: 9 training samples"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_mistakes_are_one_line(compared: Shell, words: str, said: str) -> None:
    code, out, err = compared(f"measure {words}")
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_ctrl_c_keeps_what_is_finished(compared: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    write = analysis._write_result

    def one_only(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(analysis, "_write_result", one_only)
    code, _, err = compared("analyze c/fedavg --analyses probe --samples 40")
    assert (code, err) == (
        130,
        "feddbe: stopped; what was finished is kept, the same command takes the rest\n",
    )
    assert len(feddbe.load("c/fedavg")["analyses"]) == 1


def test_pooled_measures_of_every_round_are_shown_and_drawn(shell: Shell) -> None:
    assert shell(f"run fedavg+dbe {RUN} --metrics drift,probe --out r").code == 0
    document = shell.json("show r")
    for entry in document["rounds"]:
        for moment in ("before", "after") if entry["round"] < 2 else ("before",):
            found = entry["metrics"][moment]
            assert found["drift"].keys() == {"weighted", "mean", "worst_tenth", "std"}
            assert 0 < found["drift"]["mean"] < 5
            assert found["probe"].keys() == {"weighted"}
    store = RunStore.open(Path("r"))
    rows = store.records(2)
    store.close()
    each = {row.client: row.value for row in rows if row.name == "drift"}
    assert each.keys() == {ALL, 0, 1, 2, 3}
    last = by_hand(Path("r"), "z_g")
    if document["best"]["round"] == 2 and max(np.bincount(last.client)) <= 100:
        assert [each[c] for c in range(4)] == pytest.approx(
            discrepancy(last).mean_distance.tolist(), rel=1e-4
        )
    assert Path("r/metrics.png").exists()
