"""What a run's file has of single clients is what its readings were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.metrics.records import aggregate_clients
from feddbe.runs.store import RunStore
from feddbe.runs.summary import accuracy_history, client_accuracies, retained_rounds
from feddbe.state import Receipt

SMALL: dict[str, Any] = {"clients": 4, "partition": "iid", "model": "mlp", "engine": "serial", "rounds": 2}


@pytest.mark.parametrize("method", ["fedavg", "perfedavg"])
def test_accuracies_are_those_at_the_moment_that_counts(method: str, tmp_path: Path) -> None:
    """Per-FedAvg's is after adapting."""
    document = feddbe.run(method, out=str(tmp_path / "run"), **SMALL)
    for entry in (document["best"], document["last"]):
        assert entry is not None
        found = client_accuracies(tmp_path / "run", entry)
        assert sorted(found) == [0, 1, 2, 3]
        readings, shown = aggregate_clients([(value, 1) for value in found.values()]), entry["accuracy"]
        assert readings is not None
        assert shown is not None
        assert readings["mean"] == pytest.approx(shown["mean"])
        assert readings["worst_tenth"] == pytest.approx(shown["worst_tenth"])
    assert client_accuracies(tmp_path / "run", None) == {}


def test_newcomers_are_no_part(tmp_path: Path) -> None:
    document = feddbe.run("fedavg", out=str(tmp_path / "run"), new_clients=1, adapt_epochs=1, **SMALL)
    assert sorted(client_accuracies(tmp_path / "run", document["last"])) == [0, 1, 2]


def test_history_has_the_clients_that_are_asked_for(tmp_path: Path) -> None:
    document = feddbe.run("fedavg", out=str(tmp_path / "run"), **SMALL)
    entries = document["rounds"]
    found = accuracy_history(tmp_path / "run", entries, [3, 1, 99])
    assert [sorted(one) for one in found] == [[1, 3]] * 3
    for entry, one in zip(entries, found, strict=True):
        assert one.items() <= client_accuracies(tmp_path / "run", entry).items()


def test_what_clients_keep(tmp_path: Path) -> None:
    """FedAvg's nothing, DBE's a vector as wide as the representation, those that train alone a model."""
    sizes = {}
    for method in ("fedavg", "fedavg+dbe", "local"):
        feddbe.run(method, out=str(tmp_path / method), participation=0.5, **SMALL)
        sizes[method] = retained_rounds(tmp_path / method)
    store = RunStore.open(tmp_path / "fedavg")
    model = sum(tensor.numel() for tensor in store.server_state().values())
    store.close()
    assert sizes == {"fedavg": 0, "fedavg+dbe": 64, "local": model}


def test_what_clients_keep_elsewhere_is_not_known(tmp_path: Path) -> None:
    feddbe.run("fedavg+dbe", out=str(tmp_path), **SMALL)
    store = RunStore.open(tmp_path)
    with store.transaction(2):
        for client in range(4):
            store.write_pending(client, Receipt(2, "0" * 64).encode())
    store.close()
    assert retained_rounds(tmp_path) is None
