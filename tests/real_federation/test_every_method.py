"""Every method with every add-on gives the bits of the serial engine through messages to nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.federation.data_spec import DataSpec
from tests.real_federation.nodes import (
    LocalFederation,
    hashes,
    make_files,
    pool_datasets,
    run_serial,
)
from tests.small_runs import COMBINATIONS, shorten_fedgen


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files(tmp_path_factory.mktemp("data"), (60, 44, 32))


@pytest.fixture(scope="module")
def pooled(files: dict[str, Path], spec: DataSpec) -> Dataset:
    return pool_datasets(files, spec)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_bits_equal_serial(
    name: str, files: dict[str, Path], spec: DataSpec, pooled: Dataset, tmp_path: Path
) -> None:
    method = shorten_fedgen(name)
    federation = LocalFederation(files, spec, tmp_path)
    document = federation.run(method, rounds=2)
    serial = run_serial(method, pooled, tmp_path / "serial", rounds=2)
    assert hashes(document) == hashes(serial)
    assert document["majority_accuracy"] == serial["majority_accuracy"]
    assert [r["accuracy"] for r in document["rounds"]] == [r["accuracy"] for r in serial["rounds"]]
    assert federation.messages.texts == []


def test_node_with_a_single_label_equals_serial(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    whole = digits.load()
    zeros = whole.y.numpy() == 0
    path = tmp_path / "zeros.npz"
    np.savez(path, x=whole.x.numpy()[zeros], y=whole.y.numpy()[zeros])
    with_zeros = {**files, "anna": path}
    document = LocalFederation(with_zeros, spec, tmp_path).run("fedavg+dbe", rounds=2)
    pooled = pool_datasets(with_zeros, spec)
    assert hashes(document) == hashes(run_serial("fedavg+dbe", pooled, tmp_path / "serial", rounds=2))


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": "accuracy,loss,ece", "eval_after": False, "variant": "paper"},
        {"validation": 0.2, "participation": 0.67, "eval": "cohort"},
        {"new_clients": 1, "adapt_epochs": 2},
        {"last_test_batch": "drop", "batch_size": 4, "batch_order": "fixed"},
        {"optimizer": "adam", "lr": 0.001, "lr_decay": "cosine", "trainer": "auto"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_equal_serial(
    options: dict[str, Any], files: dict[str, Path], spec: DataSpec, pooled: Dataset, tmp_path: Path
) -> None:
    document = LocalFederation(files, spec, tmp_path).run("fedavg+dbe", **options)
    assert hashes(document) == hashes(run_serial("fedavg+dbe", pooled, tmp_path / "serial", **options))
