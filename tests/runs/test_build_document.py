"""Values of single clients agree with the aggregated values of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.metrics.client_values import aggregate_clients
from feddbe.runs.build_document import accuracy_history, client_accuracies, count_private_values
from feddbe.runs.store import RunStore
from feddbe.state import Receipt

SMALL: dict[str, Any] = {"clients": 4, "partition": "iid", "model": "mlp", "engine": "serial", "rounds": 2}


@pytest.mark.parametrize("method", ["fedavg", "perfedavg"])
def test_client_accuracies_are_at_the_moment_of_the_round(method: str, tmp_path: Path) -> None:
    """For Per-FedAvg, that is after adaptation."""
    document = feddbe.run(method, out=str(tmp_path / "run"), **SMALL)
    for entry in (document["best"], document["last"]):
        assert entry is not None
        accuracies = client_accuracies(tmp_path / "run", entry)
        assert sorted(accuracies) == [0, 1, 2, 3]
        readings = aggregate_clients([(value, 1) for value in accuracies.values()])
        expected = entry["accuracy"]
        assert readings is not None
        assert expected is not None
        assert readings["mean"] == pytest.approx(expected["mean"])
        assert readings["worst_tenth"] == pytest.approx(expected["worst_tenth"])
    assert client_accuracies(tmp_path / "run", None) == {}


@pytest.mark.parametrize("method", ["fedavg+ft", "fedbabu"])
def test_clients_that_adapt_after_the_last_round_deploy_its_model(method: str, tmp_path: Path) -> None:
    document = feddbe.run(method, out=str(tmp_path / "run"), adapt_epochs=1, **SMALL)
    assert document["deployed_moment"] == "adapted"
    for entry in (document["rounds"][1], document["last"]):
        accuracies = client_accuracies(tmp_path / "run", entry)
        readings = aggregate_clients([(value, 1) for value in accuracies.values()])
        assert readings is not None
        assert readings["mean"] == pytest.approx(document["last"]["adapted"]["mean"])


def test_document_has_the_number_of_test_samples(tmp_path: Path) -> None:
    run = feddbe.run("fedavg", out=str(tmp_path / "run"), **SMALL)
    assert run["deployed_moment"] == "before"
    assert run["test_samples"] == sum(client["samples"] for client in run.clients()) > 100


def test_new_clients_are_excluded(tmp_path: Path) -> None:
    document = feddbe.run("fedavg", out=str(tmp_path / "run"), new_clients=1, adapt_epochs=1, **SMALL)
    assert sorted(client_accuracies(tmp_path / "run", document["last"])) == [0, 1, 2]


def test_history_contains_the_requested_clients(tmp_path: Path) -> None:
    document = feddbe.run("fedavg", out=str(tmp_path / "run"), **SMALL)
    entries = document["rounds"]
    history = accuracy_history(tmp_path / "run", entries, [3, 1, 99])
    assert [sorted(accuracies) for accuracies in history] == [[1, 3]] * 3
    for entry, accuracies in zip(entries, history, strict=True):
        assert accuracies.items() <= client_accuracies(tmp_path / "run", entry).items()


def test_number_of_private_values(tmp_path: Path) -> None:
    """FedAvg's nothing, DBE's a vector as wide as the representation, those that train alone a model."""
    sizes = {}
    for method in ("fedavg", "fedavg+dbe", "local"):
        feddbe.run(method, out=str(tmp_path / method), participation=0.5, **SMALL)
        sizes[method] = count_private_values(tmp_path / method)
    store = RunStore.open(tmp_path / "fedavg")
    model = sum(tensor.numel() for tensor in store.server_state().values())
    store.close()
    assert sizes == {"fedavg": 0, "fedavg+dbe": 64, "local": model}


def test_number_of_private_values_is_unknown_if_kept_elsewhere(tmp_path: Path) -> None:
    feddbe.run("fedavg+dbe", out=str(tmp_path), **SMALL)
    store = RunStore.open(tmp_path)
    with store.transaction(2):
        for client in range(4):
            store.write_pending(client, Receipt(2, "0" * 64).encode())
    store.close()
    assert count_private_values(tmp_path) is None
