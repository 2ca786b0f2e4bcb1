"""Records of metrics: one value of one client, or aggregated over all clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypedDict

import numpy as np

ALL = -1
"""Client number of a record over all clients."""
LAYER_SEPARATOR = "@"
"""Part of the names of analyses, as in `mdl@z_g`, and of no other names."""

Value = tuple[float | Fraction, float]
"""A client's value, and its weight in the mean over clients."""
MetricValues = dict[str, Value]
"""Values by metric."""
MetricsByMoment = Mapping[str, MetricValues]
"""Values by moment: `before`, `adapted`, `after`, `validation`, `train`, `training` (the training itself)."""


class Record(NamedTuple):
    """A stored value. Over all clients, `NAME` is the weighted mean, `NAME/STATISTIC` another statistic."""

    round: int
    client: int
    moment: str
    name: str
    value: float | None
    """None if it is not a number."""
    weight: float


class Aggregates(TypedDict):
    """Statistics of a metric over clients; accuracies are fractions."""

    weighted: float
    """Mean weighted by samples: for accuracy, all correct predictions over all test samples."""
    mean: float
    """Plain mean of the clients' values."""
    worst_tenth: float
    """Plain mean of the ceil(N/10) lowest values."""
    std: float
    """Standard deviation over clients."""


def aggregate_clients(values: Sequence[Value]) -> Aggregates | None:
    """Return the statistics over clients, skipping those without weight; None if none is left."""
    counted = [(value, weight) for value, weight in values if weight > 0]
    if not counted:
        return None
    ordered = np.sort([float(value) for value, _ in counted])
    total = sum(weight * value for value, weight in counted)
    return {
        "weighted": float(total / sum(weight for _, weight in counted)),
        "mean": float(ordered.mean()),
        "worst_tenth": float(ordered[: math.ceil(len(ordered) / 10)].mean()),
        "std": float(ordered.std()),
    }


def round_records(round_: int, metrics: Mapping[int, MetricsByMoment]) -> list[Record]:
    """Return the records of a round: of each client, and aggregated over all.

    Args:
        round_: Number of the round.
        metrics: Values of each client, by client, moment and metric.
    """
    values_by_key: dict[tuple[str, str], list[Value]] = {}
    records = []
    for client, moments in metrics.items():
        for moment, values in moments.items():
            for name, (value, weight) in values.items():
                records.append(Record(round_, client, moment, name, float(value), weight))
                values_by_key.setdefault((moment, name), []).append((value, weight))
    for (moment, name), client_values in values_by_key.items():
        weight = sum(weight for _, weight in client_values)
        for statistic, aggregate in (aggregate_clients(client_values) or {}).items():
            full_name = name if statistic == "weighted" else f"{name}/{statistic}"
            assert isinstance(aggregate, float)
            records.append(Record(round_, ALL, moment, full_name, aggregate, weight))
    return records


def read_aggregates(records: Sequence[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the values of records over all clients: moment -> metric -> statistic -> value."""
    aggregates: dict[str, dict[str, dict[str, float]]] = {}
    for record in records:
        name, _, statistic = record.name.partition("/")
        if record.value is not None:
            metric = aggregates.setdefault(record.moment, {}).setdefault(name, {})
            metric[statistic or "weighted"] = record.value
    return aggregates
