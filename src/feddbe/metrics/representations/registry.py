"""The analyses of representations by name. A new one is a module with an `Analysis`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from feddbe.errors import BadInput, unknown
from feddbe.metrics.representations.discrepancy import DISCREPANCY, SHARED_DISCREPANCY
from feddbe.metrics.representations.linear_probe import LINEAR_PROBE
from feddbe.metrics.representations.mdl import DESCRIPTION_LENGTH, in_parts
from feddbe.metrics.representations.points import Points, Readings, Taken
from feddbe.metrics.representations.tsne import TSNE
from feddbe.state import State

MEASURES = {
    analysis.name: analysis
    for analysis in (
        DESCRIPTION_LENGTH,
        LINEAR_PROBE,
        DISCREPANCY,
        SHARED_DISCREPANCY,
        TSNE,
    )
}


def parse(what: str) -> list[str]:
    """The names in `mdl,tsne`."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    for name in names:
        if name not in MEASURES:
            raise unknown("measure of representations", name, MEASURES)
    if not names:
        raise BadInput(f"nothing to measure; choose of {', '.join(sorted(MEASURES))}")
    return list(dict.fromkeys(names))


def settings_of(name: str, *, quick: bool) -> tuple[dict[str, Any], bool]:
    """With what a measure is taken, and whether that is its quick way."""
    measure = MEASURES[name]
    quickly = quick and measure.quick is not None
    return dict((measure.quick if quickly else None) or measure.settings), quickly


def take(
    name: str, points: Points, classes: int, settings: Mapping[str, Any], *, each: bool = False
) -> Taken:
    """The measure of these points, of `classes` possible labels; `each`: of every client's alone. A client
    that has too few is left out."""
    function = MEASURES[name].compute
    if not each:
        return function(points, classes, settings)
    found: dict[int, Readings] = {}
    why: BadInput | None = None
    for client in in_parts(np.unique(points.client).tolist()):
        try:
            found[client] = function(points.of(points.client == client), classes, settings).overall
        except BadInput as error:
            why = error
    if not found:
        raise BadInput(f"{name} of single clients: {why}")
    shared = set.intersection(*(set(read) for read in found.values()))
    means = {key: [v for read in found.values() if (v := read[key]) is not None] for key in sorted(shared)}
    return Taken({key: float(np.mean(values)) for key, values in means.items() if values}, found)


def combine_models(taken: Sequence[Taken]) -> Taken:
    """Return the results under each client's own model as one result, with the means over clients."""
    clients = {client: readings for one in taken for client, readings in one.clients.items()}
    columns: dict[str, Any] = {name: [read[name] for read in clients.values()] for name in taken[0].overall}
    return Taken({name: float(np.mean(values)) for name, values in columns.items()}, clients)


def as_points(state: State) -> Points:
    """Back from the state that an analysis with a scatter plot leaves."""
    return Points(*(state[key].numpy() for key in Points._fields))
