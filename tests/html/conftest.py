"""Runs to make pages from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.metrics.representations.points import Taken
from feddbe.metrics.representations.registry import settings_of
from feddbe.runs.analysis import _One, _write
from feddbe.runs.replay import entry_of
from feddbe.runs.store import Store

SMALL: dict[str, Any] = {"clients": 4, "partition": "dirichlet:0.5", "model": "mlp", "engine": "serial"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds, newcomers, and what can be measured."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        feddbe.compare(
            ["fedavg", "fedavg+dbe(kappa=0.5)"], out=str(root / f"s{seed}"), seed=seed, rounds=3, newcomers=1,
            adapt_epochs=2, measure="accuracy,auc,loss,drift,probe", **SMALL,
        )  # fmt: skip
    feddbe.measure(root / "s0" / "fedavg", what="discrepancy,tsne,probe", moment="before", n=60)
    _write_mdl(root / "s0" / "fedavg")
    return root


def _write_mdl(folder: Path) -> None:
    """As if it had been measured, which takes eight seconds."""
    settings, quick = settings_of("mdl", quick=True)
    one = _One("mdl", "before", "z_g", quick, False, settings | {"samples": 60})
    store = Store.open(folder)
    taken = Taken({"": 123.0, "bits": 177.0, "std": 4.5})
    _write(store, entry_of(store, "best"), one, taken, {"samples": 60, "seconds": 1.0})
    store.close()
