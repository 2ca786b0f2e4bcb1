"""Measures of all clients' representations together."""

from __future__ import annotations

import numpy as np
import pytest

from feddbe import metrics
from feddbe.metrics.records import ALL
from feddbe.metrics.representations.points import make_points
from feddbe.simulation.recorder import pooled_indices, pooled_records
from feddbe.training.task import Task
from tests.federation import experiment, make_dataset


def test_drift_by_hand() -> None:
    """Clients at 0 +- 1 and 6 +- 1 on a line: means 6 apart, spread^2 = (2 + 2) / (4 - 2) = 2."""
    found = metrics.compute_pooled(
        ["drift", "accuracy"], make_points([[-1], [1], [5], [7]], [0, 1, 0, 1], [3, 3, 8, 8])
    )
    assert found.keys() == {3, 8}
    for client in (3, 8):
        value, weight = found[client]["drift"]
        assert (float(value), weight) == pytest.approx((6 / np.sqrt(2), 2))


def test_the_probe_is_of_all_and_what_cannot_be_said_is_left_out() -> None:
    x = np.repeat([[0.0], [9.0]], 20, axis=0)
    found = metrics.compute_pooled(["probe"], make_points(x, np.repeat([0, 1], 20), np.arange(40) % 2))
    assert found == {ALL: {"probe": (1.0, 40)}}
    assert metrics.compute_pooled(["probe", "drift"], make_points(x, np.zeros(40))) == {}, (
        "one label, one client"
    )


def test_a_client_sends_few_samples_and_always_the_same() -> None:
    task: Task = experiment("fedavg", make_dataset((600, 60))).task
    few, all_ = (pooled_indices(task, client) for client in (0, 1))
    assert len(few) == metrics.POOLED_SAMPLES < len(task.split.test[0])
    assert few == tuple(sorted(set(few)))
    assert all_ == tuple(range(len(task.split.test[1])))


def test_without_representations_there_are_no_rows() -> None:
    assert pooled_records(1, [], ["drift", "probe"]) == []
