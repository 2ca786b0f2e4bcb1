"""A measured number is a row, of one client or of all; the readings over clients are made here, for every
measure in the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypedDict

import numpy as np

ALL = -1
"""Stands for all clients, where a row has a client."""
AT = "@"
"""In the names of what is measured of a run when it is over, as in `mdl@z_g`, and in no other name."""

Value = tuple[float | Fraction, float]
"""One client's number, and its weight in the mean over clients."""
Numbers = dict[str, Value]
"""By the measure's name."""
MetricsByMoment = Mapping[str, Numbers]
"""By moment: `before`, `adapted`, `after`, `validation`, `train`; `training` is of the training itself."""


class Record(NamedTuple):
    """One number. Of all clients there are `NAME` (the weighted mean), and `NAME/READING` for the others."""

    round: int
    client: int
    moment: str
    name: str
    value: float | None
    """None: not a number."""
    weight: float


class Aggregates(TypedDict):
    """A measure over clients; accuracies are fractions of one."""

    weighted: float
    """By samples: for accuracy all correct answers over all test samples."""
    mean: float
    """The plain mean of the clients' values."""
    worst_tenth: float
    """The plain mean of the ceil(N/10) lowest clients."""
    std: float
    """The standard deviation between clients."""


def aggregate_clients(values: Sequence[Value]) -> Aggregates | None:
    """The four readings; clients without weight are left out."""
    counted = [(value, weight) for value, weight in values if weight > 0]
    if not counted:
        return None
    each = np.sort([float(value) for value, _ in counted])
    total = sum(weight * value for value, weight in counted)
    return {
        "weighted": float(total / sum(weight for _, weight in counted)),
        "mean": float(each.mean()),
        "worst_tenth": float(each[: math.ceil(len(each) / 10)].mean()),
        "std": float(each.std()),
    }


def client_records(round: int, measured: Mapping[int, MetricsByMoment]) -> list[Record]:
    """What clients measured in a round, as rows of each and of all."""
    found: dict[tuple[str, str], list[Value]] = {}
    lines = []
    for client, moments in measured.items():
        for moment, numbers in moments.items():
            for name, (value, weight) in numbers.items():
                lines.append(Record(round, client, moment, name, float(value), weight))
                found.setdefault((moment, name), []).append((value, weight))
    for (moment, name), values in found.items():
        weight = sum(weight for _, weight in values)
        for reading, number in (aggregate_clients(values) or {}).items():
            full = name if reading == "weighted" else f"{name}/{reading}"
            assert isinstance(number, float)
            lines.append(Record(round, ALL, moment, full, number, weight))
    return lines


def read_aggregates(overall: Sequence[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """Back from the rows of all clients: moment -> measure -> reading -> value."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in overall:
        name, _, reading = row.name.partition("/")
        if row.value is not None:
            found.setdefault(row.moment, {}).setdefault(name, {})[reading or "weighted"] = row.value
    return found
