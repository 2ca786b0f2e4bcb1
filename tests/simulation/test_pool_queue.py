"""Queue of the pool: costs of tasks, their order, and the size of groups."""

from __future__ import annotations

from feddbe.simulation.client import ClientTask
from feddbe.simulation.engines.pool import TaskQueue, task_cost
from tests.small_runs import experiment, make_dataset


def test_task_cost_by_hand() -> None:
    """A client with 40 samples has 30 for training, which count three times, and 10 for testing."""
    task = experiment("fedavg", make_dataset([40]), local_epochs=2).task
    assert (task.samples[0], len(task.split.test[0])) == (30, 10)
    assert task_cost(task, ClientTask(0, 1, evaluate=True)) == 10
    assert task_cost(task, ClientTask(0, 1, "train")) == 3 * 2 * 30
    train_and_evaluate = ClientTask(0, 1, "train", evaluate=True, evaluate_after=True, adapt_epochs=5)
    assert task_cost(task, train_and_evaluate) == 2 * 10 + 3 * (2 + 5) * 30


def make_queue(sizes: list[int], group_size: int, workers: int = 2) -> TaskQueue:
    task = experiment("fedavg", make_dataset(sizes)).task
    return TaskQueue(
        task, [ClientTask(client, 1, "train") for client in range(len(sizes))], workers, group_size
    )


def drain(queue: TaskQueue) -> list[list[int]]:
    groups = []
    while queue:
        groups.append([client_task.client for client_task in queue.pop()])
    return groups


def test_longest_task_is_first() -> None:
    assert drain(make_queue([40, 80, 60], 1)) == [[1], [2], [0]]


def test_groups_get_smaller_towards_the_end() -> None:
    sizes = [len(group) for group in drain(make_queue([40] * 40, 100))]
    assert sum(sizes) == 40
    assert sizes[0] == 10  # half of a worker's share
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert [len(group) for group in drain(make_queue([40] * 40, 7))][:2] == [7, 7]


def test_client_with_most_data_is_alone_in_its_group() -> None:
    assert drain(make_queue([40, 800, 40, 40], 100))[0] == [1]


def test_returned_tasks_are_next_and_alone() -> None:
    queue = make_queue([40] * 16, 100)
    first = queue.pop()
    assert [client_task.client for client_task in first] == [0, 1, 2, 3]
    queue.put_back(first)
    assert [[client_task.client for client_task in queue.pop()] for _ in first] == [[0], [1], [2], [3]]
    assert [queue.attempts[client] for client in (0, 4)] == [2, 0]
    assert len(queue.pop()) == 3


def test_client_with_cached_state_is_preferred() -> None:
    queue = make_queue([100 - client for client in range(12)], 1, workers=1)
    assert [client_task.client for client_task in queue.pop({2, 3})] == [2]
    assert [client_task.client for client_task in queue.pop({8})] == [
        0
    ]  # 8 is too far back: long tasks would be last
    assert drain(queue)[:2] == [[1], [3]]
