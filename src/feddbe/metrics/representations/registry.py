"""The analyses of representations by name. A new one is a module with an `Analysis`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.metrics.representations.discrepancy import DISCREPANCY, SHARED_DISCREPANCY
from feddbe.metrics.representations.linear_probe import LINEAR_PROBE
from feddbe.metrics.representations.mdl import DESCRIPTION_LENGTH, split_progress
from feddbe.metrics.representations.points import AnalysisResult, Points, Readings
from feddbe.metrics.representations.tsne import TSNE
from feddbe.state import State

ANALYSES = {
    analysis.name: analysis
    for analysis in (
        DESCRIPTION_LENGTH,
        LINEAR_PROBE,
        DISCREPANCY,
        SHARED_DISCREPANCY,
        TSNE,
    )
}


def parse_analyses(what: str) -> list[str]:
    """The names in `mdl,tsne`."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    for name in names:
        if name not in ANALYSES:
            raise unknown_name("measure of representations", name, ANALYSES)
    if not names:
        raise InvalidInputError(f"nothing to measure; choose of {', '.join(sorted(ANALYSES))}")
    return list(dict.fromkeys(names))


def analysis_settings(name: str, *, quick: bool) -> tuple[dict[str, Any], bool]:
    """With what a measure is taken, and whether that is its quick way."""
    measure = ANALYSES[name]
    quickly = quick and measure.quick is not None
    return dict((measure.quick if quickly else None) or measure.settings), quickly


def compute_analysis(
    name: str, points: Points, classes: int, settings: Mapping[str, Any], *, each: bool = False
) -> AnalysisResult:
    """The measure of these points, of `classes` possible labels; `each`: of every client's alone. A client
    that has too few is left out."""
    function = ANALYSES[name].compute
    if not each:
        return function(points, classes, settings)
    found: dict[int, Readings] = {}
    why: InvalidInputError | None = None
    for client in split_progress(np.unique(points.client).tolist()):
        try:
            found[client] = function(points.select(points.client == client), classes, settings).overall
        except InvalidInputError as error:
            why = error
    if not found:
        raise InvalidInputError(f"{name} of single clients: {why}")
    shared = set.intersection(*(set(read) for read in found.values()))
    means = {key: [v for read in found.values() if (v := read[key]) is not None] for key in sorted(shared)}
    return AnalysisResult({key: float(np.mean(values)) for key, values in means.items() if values}, found)


def combine_models(taken: Sequence[AnalysisResult]) -> AnalysisResult:
    """Return the results under each client's own model as one result, with the means over clients."""
    clients = {client: readings for one in taken for client, readings in one.clients.items()}
    columns: dict[str, Any] = {name: [read[name] for read in clients.values()] for name in taken[0].overall}
    return AnalysisResult({name: float(np.mean(values)) for name, values in columns.items()}, clients)


def as_points(state: State) -> Points:
    """Back from the state that an analysis with a scatter plot leaves."""
    return Points(*(state[key].numpy() for key in Points._fields))
