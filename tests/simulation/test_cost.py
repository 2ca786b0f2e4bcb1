"""Of two jobs, the longer one; and how many at a time."""

from __future__ import annotations

from feddbe.simulation.client import ClientTask
from feddbe.simulation.engines.pool import TaskQueue, task_cost
from tests.federation import experiment, make_dataset


def test_by_hand() -> None:
    """A client's 40 samples are 30 to train on and 10 to test on; training counts three times."""
    task = experiment("fedavg", make_dataset([40]), local_epochs=2).task
    assert (task.samples[0], len(task.split.test[0])) == (30, 10)
    assert task_cost(task, ClientTask(0, 1, evaluate=True)) == 10
    assert task_cost(task, ClientTask(0, 1, "train")) == 3 * 2 * 30
    whole = ClientTask(0, 1, "train", evaluate=True, evaluate_after=True, adapt_epochs=5)
    assert task_cost(task, whole) == 2 * 10 + 3 * (2 + 5) * 30


def queue(sizes: list[int], together: int, workers: int = 2) -> TaskQueue:
    task = experiment("fedavg", make_dataset(sizes)).task
    return TaskQueue(
        task, [ClientTask(client, 1, "train") for client in range(len(sizes))], workers, together
    )


def drained(jobs: TaskQueue) -> list[list[int]]:
    found = []
    while jobs:
        found.append([job.client for job in jobs.pop()])
    return found


def test_one_at_a_time_the_longest_first() -> None:
    assert drained(queue([40, 80, 60], 1)) == [[1], [2], [0]]


def test_many_at_a_time_and_fewer_towards_the_end() -> None:
    sizes = [len(some) for some in drained(queue([40] * 40, 100))]
    assert sum(sizes) == 40
    assert sizes[0] == 10  # half of a worker's share
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert [len(some) for some in drained(queue([40] * 40, 7))][:2] == [7, 7]


def test_a_client_with_most_of_the_data_goes_alone() -> None:
    assert drained(queue([40, 800, 40, 40], 100))[0] == [1]


def test_what_was_not_done_comes_next_and_alone() -> None:
    jobs = queue([40] * 16, 100)
    first = jobs.pop()
    assert [job.client for job in first] == [0, 1, 2, 3]
    jobs.give_back(first)
    assert [[job.client for job in jobs.pop()] for _ in first] == [[0], [1], [2], [3]]
    assert [jobs.tries[client] for client in (0, 4)] == [2, 0]
    assert len(jobs.pop()) == 3


def test_of_the_next_ones_a_client_whose_state_the_worker_holds_comes_first() -> None:
    jobs = queue([100 - client for client in range(12)], 1, workers=1)
    assert [job.client for job in jobs.pop({2, 3})] == [2]
    assert [job.client for job in jobs.pop({8})] == [0]  # 8 is too far: long ones would come last
    assert drained(jobs)[:2] == [[1], [3]]
