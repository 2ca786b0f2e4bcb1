"""One call of one client."""

from __future__ import annotations

import torch

from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import nbytes
from tests.federation import are_identical, experiment


def test_a_job_is_a_pure_function() -> None:
    """Done twice it gives the same, and changes nothing that it was given."""
    e = experiment("fedavg+dbe")
    message = {**e.task.model.parameters, "mean": torch.full((64,), 0.25)}
    private = {"prbm": torch.full((64,), 0.5)}
    before = {name: t.clone() for name, t in (message | private).items()}
    job = ClientTask(1, 2, "train", evaluate=True, evaluate_after=True)
    one, two = (run_client(e.task, e.method, job, message, private) for _ in range(2))
    assert are_identical(one.upload, two.upload)
    assert one.private is not None
    assert two.private is not None
    assert are_identical(one.private, two.private)
    assert one.metrics == two.metrics
    assert one.metrics.keys() == {"before", "after"}
    assert one.training_metrics["loss"] == two.training_metrics["loss"]
    assert are_identical(message | private, before)


def test_what_is_asked_is_done() -> None:
    e = experiment("fedavg")
    theta = e.task.model.parameters
    looked = run_client(e.task, e.method, ClientTask(0, 1, evaluate=True), theta, None)
    assert (looked.upload, looked.private, looked.training_metrics) == ({}, None, {})
    assert looked.metrics.keys() == {"before"}
    assert looked.metrics["before"].keys() == {"accuracy"}
    assert looked.metrics["before"]["accuracy"][1] == 15
    trained = run_client(e.task, e.method, ClientTask(0, 1, "train"), theta, None)
    assert trained.metrics == {}
    assert trained.training_metrics["loss"][1] == 40
    assert (
        trained.training_metrics["bytes_up"] == trained.training_metrics["bytes_down"] == (nbytes(theta), 1)
    )
    assert trained.upload.keys() == theta.keys()


def test_a_private_state_that_did_not_change_is_not_written_again() -> None:
    """The preparation leaves PRBM's vector at zero: nothing to store for clients yet to come."""
    e = experiment("fedavg+dbe")
    theta = e.task.model.parameters
    assert run_client(e.task, e.method, ClientTask(0, 0, "prepare"), theta, None).private is None
    message = {**theta, "mean": torch.zeros(64)}
    assert run_client(e.task, e.method, ClientTask(0, 1, "train"), message, None).private is not None
