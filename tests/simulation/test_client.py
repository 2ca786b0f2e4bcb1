"""Client tasks: purity, and the contents of results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from feddbe.errors import CorruptRunError
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import nbytes
from tests.small_runs import are_identical, experiment


def test_client_task_is_a_pure_function() -> None:
    """Two calls have equal results and do not change their arguments."""
    e = experiment("fedavg+dbe")
    message = {**e.task.model.parameters, "mean": torch.full((64,), 0.25)}
    private = {"prbm": torch.full((64,), 0.5)}
    before = {name: t.clone() for name, t in (message | private).items()}
    client_task = ClientTask(1, 2, "train", evaluate=True, evaluate_after=True)
    first, second = (run_client(e.task, e.method, client_task, message, private) for _ in range(2))
    assert are_identical(first.upload, second.upload)
    assert first.private is not None
    assert second.private is not None
    assert are_identical(first.private, second.private)
    assert first.metrics == second.metrics
    assert first.metrics.keys() == {"before", "after"}
    assert first.training_metrics["loss"] == second.training_metrics["loss"]
    assert are_identical(message | private, before)


def test_result_has_only_the_requested_parts() -> None:
    e = experiment("fedavg")
    theta = e.task.model.parameters
    evaluated = run_client(e.task, e.method, ClientTask(0, 1, evaluate=True), theta, None)
    assert (evaluated.upload, evaluated.private, evaluated.training_metrics) == ({}, None, {})
    assert evaluated.metrics.keys() == {"before"}
    assert evaluated.metrics["before"].keys() == {"accuracy"}
    assert evaluated.metrics["before"]["accuracy"][1] == 15
    trained = run_client(e.task, e.method, ClientTask(0, 1, "train"), theta, None)
    assert trained.metrics == {}
    assert trained.training_metrics["loss"][1] == 40
    assert (
        trained.training_metrics["bytes_up"] == trained.training_metrics["bytes_down"] == (nbytes(theta), 1)
    )
    assert trained.upload.keys() == theta.keys()


def test_unchanged_private_state_is_not_returned() -> None:
    """The setup leaves PRBM's vector at zero, so there is nothing to store."""
    e = experiment("fedavg+dbe")
    theta = e.task.model.parameters
    assert run_client(e.task, e.method, ClientTask(0, 0, "prepare"), theta, None).private is None
    message = {**theta, "mean": torch.zeros(64)}
    assert run_client(e.task, e.method, ClientTask(0, 1, "train"), message, None).private is not None


def test_message_about_a_stored_state_names_the_client() -> None:
    e = experiment("fedavg+dbe")
    names = tuple(f"town {client}" for client in range(len(e.task.split.train)))
    task = replace(e.task, dataset=replace(e.task.dataset, client_names=names))
    message = {**task.model.parameters, "mean": torch.zeros(64)}
    with pytest.raises(CorruptRunError, match=r"^the stored state of client 'town 1' does not fit fedavg"):
        run_client(task, e.method, ClientTask(1, 2, "train"), message, {"other": torch.zeros(1)})
