"""Runs to make pages from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.metrics.representations.points import AnalysisResult
from feddbe.metrics.representations.registry import analysis_settings
from feddbe.runs.analysis import _AnalysisItem, _write_result
from feddbe.runs.replay import checkpoint_round
from feddbe.runs.store import RunStore

SMALL: dict[str, Any] = {"clients": 4, "partition": "dirichlet:0.5", "model": "mlp", "engine": "serial"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds, newcomers, and what can be measured."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        feddbe.compare(
            ["fedavg", "fedavg+dbe(kappa=0.5)"], out=str(root / f"s{seed}"), seed=seed, rounds=3, new_clients=1,
            adapt_epochs=2, metrics="accuracy,auc,loss,drift,probe", **SMALL,
        )  # fmt: skip
    feddbe.analyze(root / "s0" / "fedavg", analyses="discrepancy,tsne,probe", moment="before", samples=60)
    _write_mdl(root / "s0" / "fedavg")
    return root


def _write_mdl(folder: Path) -> None:
    """As if it had been measured, which takes eight seconds."""
    settings, quick = analysis_settings("mdl", quick=True)
    one = _AnalysisItem("mdl", "before", "z_g", quick, False, settings | {"samples": 60})
    store = RunStore.open(folder)
    taken = AnalysisResult({"": 123.0, "bits": 177.0, "std": 4.5})
    _write_result(store, checkpoint_round(store, "best"), one, taken, samples=60, seconds=1.0)
    store.close()
