"""Runs for the tests of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.metrics.representations.points import AnalysisResult
from feddbe.metrics.representations.registry import analysis_settings
from feddbe.runs.analysis import _AnalysisItem, _write_result
from feddbe.runs.reopen import checkpoint_round
from feddbe.runs.store import RunStore

SMALL: dict[str, Any] = {"clients": 4, "partition": "dirichlet:0.5", "model": "mlp", "engine": "serial"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two methods with two seeds, new clients and analyses."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        feddbe.compare(
            ["fedavg", "fedavg+dbe(kappa=0.5)"], out=str(root / f"s{seed}"), seed=seed, rounds=3,
            new_clients=1, adapt_epochs=2, metrics="accuracy,auc,loss,drift,probe", **SMALL,
        )  # fmt: skip
    feddbe.analyze(root / "s0" / "fedavg", analyses="discrepancy,tsne,probe", moment="before", samples=60)
    _write_mdl(root / "s0" / "fedavg")
    return root


def _write_mdl(folder: Path) -> None:
    """Write a result of MDL, which would take eight seconds to compute."""
    settings, quick = analysis_settings("mdl", quick=True)
    item = _AnalysisItem("mdl", "before", "z_g", "own", quick, False, settings | {"samples": 60})
    store = RunStore.open(folder)
    result = AnalysisResult({"": 123.0, "bits": 177.0, "std": 4.5})
    _write_result(store, checkpoint_round(store, "best"), item, result, 60, 1.0)
    store.close()
