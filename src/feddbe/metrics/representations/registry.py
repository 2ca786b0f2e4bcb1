"""Analyses of representations by name. A new one is a module with an `Analysis`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.metrics.representations.confusion import CONFUSION
from feddbe.metrics.representations.discrepancy import DISCREPANCY
from feddbe.metrics.representations.linear_probe import LINEAR_PROBE
from feddbe.metrics.representations.mdl import DESCRIPTION_LENGTH, split_progress
from feddbe.metrics.representations.points import AnalysisResult, AnalysisValues, Points
from feddbe.metrics.representations.tsne import TSNE
from feddbe.state import State

ANALYSES = {
    analysis.name: analysis
    for analysis in (
        DESCRIPTION_LENGTH,
        LINEAR_PROBE,
        DISCREPANCY,
        TSNE,
        CONFUSION,
    )
}


def parse_analyses(spec: str) -> list[str]:
    """Return the names in a list such as `mdl,tsne`."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    for name in names:
        if name not in ANALYSES:
            raise unknown_name("analysis", name, ANALYSES)
    if not names:
        raise InvalidInputError(f"no analysis is selected; allowed: {', '.join(sorted(ANALYSES))}")
    return list(dict.fromkeys(names))


def samples_of_each_model(name: str, on: str | None, *, per_client: bool) -> str:
    """Return the samples that each client's model represents: `own` or `all`.

    Args:
        name: Name of the analysis.
        on: Requested samples; None: the default of the analysis.
        per_client: True if each client's samples are analyzed alone, which is `own`.

    Raises:
        InvalidInputError: The analysis does not support the request.
    """
    supported = ("own",) if per_client else ANALYSES[name].on
    if on is not None and on not in supported:
        reason = " with --per-client" if per_client else ""
        raise InvalidInputError(f"{name} on {on} samples{reason}; allowed: {', '.join(supported)}")
    return on or supported[0]


def analysis_settings(name: str, *, quick: bool) -> tuple[dict[str, Any], bool]:
    """Return the settings of an analysis, and True if they are its quick settings.

    Args:
        name: Name of the analysis.
        quick: Use the quick settings, if the analysis has some.
    """
    analysis = ANALYSES[name]
    if quick and analysis.quick_settings is not None:
        return dict(analysis.quick_settings), True
    return dict(analysis.settings), False


def compute_analysis(
    name: str, points: Points, classes: int, settings: Mapping[str, Any], *, per_client: bool = False
) -> AnalysisResult:
    """Return the result of an analysis.

    Args:
        name: Name of the analysis.
        points: Representations of samples.
        classes: Number of possible labels.
        settings: Settings of the analysis.
        per_client: Analyze the samples of each client alone, and average. Clients with too few are skipped.

    Raises:
        InvalidInputError: There are too few samples, with `per_client` for every client.
    """
    function = ANALYSES[name].compute
    if not per_client:
        return function(points, classes, settings)
    clients: dict[int, AnalysisValues] = {}
    last_error: InvalidInputError | None = None
    for client in split_progress(np.unique(points.client).tolist()):
        try:
            clients[client] = function(points.select(points.client == client), classes, settings).overall
        except InvalidInputError as error:
            last_error = error
    if not clients:
        raise InvalidInputError(f"{name} of single clients: {last_error}")
    common = set.intersection(*(set(values) for values in clients.values()))
    overall: AnalysisValues = {}
    for key in sorted(common):
        defined_values = [value for values in clients.values() if (value := values[key]) is not None]
        if defined_values:
            overall[key] = float(np.mean(defined_values))
    return AnalysisResult(overall, clients)


def combine_client_results(name: str, results: Sequence[AnalysisResult]) -> AnalysisResult:
    """Return the results under each client's own model as one result, with the means over clients.

    Args:
        name: Name of the analysis. Unless it compares clients, `std` is the standard deviation of its main
            value over the clients' models.
        results: A result for each client's model.
    """
    clients = {client: values for result in results for client, values in result.clients.items()}
    overall: AnalysisValues = {}
    for key in results[0].overall:
        defined_values = [value for values in clients.values() if (value := values[key]) is not None]
        overall[key] = float(np.mean(defined_values)) if defined_values else None
    if not ANALYSES[name].compares_clients:
        values = [values[""] for values in clients.values()]
        overall["std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None  # type: ignore[arg-type]
    return AnalysisResult(overall, clients)


def is_embedding(state: State) -> bool:
    """Return True if a stored state has points in a plane, with a label and a client for each."""
    if state.keys() != set(Points._fields):
        return False
    x, labels = state["x"], [state[key] for key in Points._fields if key != "x"]
    is_plane = x.ndim == 2 and x.shape[1] == 2 and x.is_floating_point() and len(x) > 0
    has_labels = all(t.shape == x.shape[:1] and not t.is_floating_point() for t in labels)
    return is_plane and has_labels and bool(x.isfinite().all())


def points_from_state(state: State) -> Points:
    """Return the points that an analysis with a scatter plot stored as its state."""
    return Points(*(state[key].numpy() for key in Points._fields))
