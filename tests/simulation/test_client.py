"""One call of one client."""

from __future__ import annotations

import torch

from feddbe.simulation.client import Job, perform
from feddbe.state import nbytes
from tests.federation import experiment, same_bits


def test_a_job_is_a_pure_function() -> None:
    """Done twice it gives the same, and changes nothing that it was given."""
    e = experiment("fedavg+dbe")
    message = {**e.task.model.parameters, "mean": torch.full((64,), 0.25)}
    private = {"prbm": torch.full((64,), 0.5)}
    before = {name: t.clone() for name, t in (message | private).items()}
    job = Job(1, 2, "train", evaluate=True, after=True)
    one, two = (perform(e.task, e.method, job, message, private) for _ in range(2))
    assert same_bits(one.up, two.up)
    assert one.private is not None
    assert two.private is not None
    assert same_bits(one.private, two.private)
    assert one.measured == two.measured
    assert one.measured.keys() == {"before", "after"}
    assert one.trained["loss"] == two.trained["loss"]
    assert same_bits(message | private, before)


def test_what_is_asked_is_done() -> None:
    e = experiment("fedavg")
    theta = e.task.model.parameters
    looked = perform(e.task, e.method, Job(0, 1, evaluate=True), theta, None)
    assert (looked.up, looked.private, looked.trained) == ({}, None, {})
    assert looked.measured.keys() == {"before"}
    assert looked.measured["before"].keys() == {"accuracy"}
    assert looked.measured["before"]["accuracy"][1] == 15
    trained = perform(e.task, e.method, Job(0, 1, "train"), theta, None)
    assert trained.measured == {}
    assert trained.trained["loss"][1] == 40
    assert trained.trained["bytes_up"] == trained.trained["bytes_down"] == (nbytes(theta), 1)
    assert trained.up.keys() == theta.keys()


def test_a_private_state_that_did_not_change_is_not_written_again() -> None:
    """The preparation leaves PRBM's vector at zero: nothing to store for clients yet to come."""
    e = experiment("fedavg+dbe")
    theta = e.task.model.parameters
    assert perform(e.task, e.method, Job(0, 0, "prepare"), theta, None).private is None
    message = {**theta, "mean": torch.zeros(64)}
    assert perform(e.task, e.method, Job(0, 1, "train"), message, None).private is not None
