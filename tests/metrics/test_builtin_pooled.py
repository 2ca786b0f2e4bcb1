"""Metrics of all clients' pooled representations."""

from __future__ import annotations

import numpy as np
import pytest

from feddbe import metrics
from feddbe.metrics.client_values import ALL
from feddbe.metrics.representations.points import make_points
from feddbe.simulation.recorder import pooled_indices, pooled_records
from feddbe.testing import make_dataset
from feddbe.training.task import Task
from tests.small_runs import experiment


def test_drift_by_hand() -> None:
    """Clients at 0 +- 1 and 6 +- 1 on a line: means 6 apart, spread^2 = (2 + 2) / (4 - 2) = 2."""
    values = metrics.compute_pooled(
        ["drift", "accuracy"], make_points([[-1], [1], [5], [7]], [0, 1, 0, 1], [3, 3, 8, 8])
    )
    assert values.keys() == {3, 8}
    for client in (3, 8):
        value, weight = values[client]["drift"]
        assert (float(value), weight) == pytest.approx((6 / np.sqrt(2), 2))


def test_probe_is_over_all_clients_and_undefined_metrics_are_skipped() -> None:
    x = np.repeat([[0.0], [9.0]], 20, axis=0)
    values = metrics.compute_pooled(["probe"], make_points(x, np.repeat([0, 1], 20), np.arange(40) % 2))
    assert values == {ALL: {"probe": (1.0, 40)}}
    assert metrics.compute_pooled(["probe", "drift"], make_points(x, np.zeros(40))) == {}, (
        "one label, one client"
    )


def test_client_sends_a_fixed_small_sample() -> None:
    task: Task = experiment("fedavg", make_dataset((600, 60))).task
    few, all_ = (pooled_indices(task, client) for client in (0, 1))
    assert len(few) == metrics.POOLED_SAMPLES < len(task.split.test[0])
    assert few == tuple(sorted(set(few)))
    assert all_ == tuple(range(len(task.split.test[1])))


def test_no_representations_give_no_records() -> None:
    assert pooled_records(1, [], ["drift", "probe"]) == []
