"""Of two jobs, the longer one."""

from __future__ import annotations

from feddbe.engines.client import Job
from feddbe.engines.cost import cost
from tests.federation import experiment, samples


def test_by_hand() -> None:
    """A client's 40 samples are 30 to train on and 10 to test on; training counts three times."""
    task = experiment("fedavg", samples([40]), epochs=2).task
    assert (task.samples[0], len(task.split.test[0])) == (30, 10)
    assert cost(task, Job(0, 1, evaluate=True)) == 10
    assert cost(task, Job(0, 1, "train")) == 3 * 2 * 30
    whole = Job(0, 1, "train", evaluate=True, after=True, train_pass=True, adapt=5)
    assert cost(task, whole) == 2 * 10 + 30 + 3 * (2 + 5) * 30
