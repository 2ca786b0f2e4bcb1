"""Runs to make pages from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feddbe

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
    feddbe.measure(
        root / "s0" / "fedavg", what="mdl,discrepancy,tsne,probe", moment="before", n=60, quick=True
    )
    return root
