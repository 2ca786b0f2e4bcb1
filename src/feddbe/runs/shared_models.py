"""Discrepancy with one model on both sides: each client's model sees the test samples of all clients.

For simulations: no client of a method has another's samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from feddbe import engines
from feddbe.data.ragged import Indices, Ragged
from feddbe.engines.client import Reply
from feddbe.errors import BadInput
from feddbe.representations import points, readings
from feddbe.representations.discrepancy import has_enough_samples
from feddbe.representations.readings import Taken
from feddbe.runs.revisit import Entry
from feddbe.runs.watch import Watch
from feddbe.training.task import Task

__all__ = ["View", "compare_under_each_model"]

View = tuple[str, str]
"""A moment and a place of the model."""
_GROUP = 16
"""Clients whose replies are in memory at once: each has the representations of all samples."""


def compare_under_each_model(
    entry: Entry,
    what: str,
    views: Sequence[View],
    chosen: Mapping[int, Sequence[int] | None],
    settings: Mapping[str, Any],
    watch: Watch,
) -> dict[View, Taken]:
    """Compare each client with the others, all of them as its own model represents them.

    Args:
        entry: The entry of a run whose models are compared.
        what: The name of the measure, one that is `shared`.
        views: Moments and places at which it is taken.
        chosen: Test samples by client, as positions among its own; None: all of them.
        settings: Keyword arguments of the measure.
        watch: Is told of each client.

    Returns:
        The measurement at each view; of every client that has two of the chosen samples.
    """
    task = entry.experiment.task
    tests = [_choose(task.split.test[client], positions) for client, positions in chosen.items()]
    counts = np.array([len(rows) for rows in tests])
    owners = np.repeat(list(chosen), counts)
    enough = has_enough_samples(np.array(list(chosen)), counts)
    clients = np.array(list(chosen))[enough].tolist()
    parts: dict[View, list[Taken]] = {view: [] for view in views}
    for reply in _ask_on_all_samples(entry, clients, np.concatenate(tests), views, watch):
        known: dict[str, Taken] = {}  # without PRBM z is z_g, and a cut has several names
        for view, part in parts.items():
            values = reply.seen.get("/".join(view))
            if values is None:
                raise BadInput(f"{entry.experiment.method.base} deploys no model: it has no representations")
            seen = points(values.numpy(), reply.seen["y"].numpy(), owners)
            key = sha256(seen.x.tobytes()).hexdigest()
            if key not in known:
                alone = {**settings, "clients": (reply.client,)}
                known[key] = readings.take(what, seen, task.dataset.classes, alone)
            part.append(known[key])
    return {view: readings.combine_models(part) for view, part in parts.items()}


def _ask_on_all_samples(
    entry: Entry, clients: Sequence[int], rows: Indices, views: Sequence[View], watch: Watch
) -> Iterator[Reply]:
    """Do these clients' work with `rows` as the test samples of each; the replies in client order."""
    task = _with_test_rows(entry.experiment.task, rows)
    moments, places = (dict.fromkeys(names) for names in zip(*views, strict=True))
    engine = engines.make("auto", task, entry.experiment.method)
    try:
        for start in range(0, len(clients), _GROUP):
            group = clients[start : start + _GROUP]
            yield from entry.ask(entry.jobs(moments, places, dict.fromkeys(group)), engine, watch)
    finally:
        engine.close()


def _choose(rows: Indices, positions: Sequence[int] | None) -> Indices:
    return rows if positions is None else rows[list(positions)]


def _with_test_rows(task: Task, rows: Indices) -> Task:
    """Return the task with these test rows for every client; training stays as it is."""
    clients = task.split.clients
    test = Ragged(np.tile(rows, clients), np.full(clients, len(rows)))
    return dataclasses.replace(task, split=dataclasses.replace(task.split, test=test))
