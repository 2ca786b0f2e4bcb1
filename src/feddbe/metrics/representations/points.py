"""Representations as points, and the declaration of an analysis: its function, columns and figure.

An analysis is a module with a pure function of `Points` and an `Analysis` value, listed in `registry.py`.
Tables and figures are rendered from the value alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe.errors import InvalidInputError
from feddbe.state import State


class Points(NamedTuple):
    """Representations of samples (one per row), with their labels and clients."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]
    client: npt.NDArray[np.int64]

    def select(self, indices: Any) -> Points:
        """Return the points with these indices, or where this mask is true."""
        return Points(self.x[indices], self.y[indices], self.client[indices])


def make_points(x: Any, y: Any, client: Any = None) -> Points:
    """Return points from arrays of any type.

    Args:
        x: Representations of any shape, samples first.
        y: Labels.
        client: Clients; None if all samples belong to one.

    Raises:
        InvalidInputError: The lengths differ, there are no samples, or a value is not finite.
    """
    x = np.asarray(x, dtype=np.float32)
    x = x.reshape(len(x), int(np.prod(x.shape[1:])))
    y = np.asarray(y, dtype=np.int64)
    client = np.zeros(len(x), np.int64) if client is None else np.asarray(client, dtype=np.int64)
    if y.shape != (len(x),) or client.shape != (len(x),):
        raise InvalidInputError(
            f"lengths differ: got {len(x)} representations, labels of shape {y.shape}, clients of shape "
            f"{client.shape}; expected one label and one client for each representation"
        )
    if not len(x) or not x.shape[1]:
        raise InvalidInputError(
            f"representations are empty: got shape {x.shape}; there is nothing to analyze"
        )
    if not np.isfinite(x).all():
        index = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise InvalidInputError(
            f"representation {index} has a value that is not finite; it cannot be analyzed"
        )
    return Points(x, y, client)


AnalysisValues = dict[str, float | None]
"""Values by name; the main value of an analysis has an empty name."""


class AnalysisResult(NamedTuple):
    """Result of an analysis: values over all clients, values of each client, and tensors."""

    overall: AnalysisValues
    clients: Mapping[int, AnalysisValues] = {}
    state: State = {}  # noqa: RUF012  (never written to)


class FigureKind(Enum):
    """Figure that shows an analysis."""

    BARS = "bars"
    """Groups of bars, one for each layer."""
    DOTS = "dots"
    """A panel for each column, with a dot for each client."""
    SCATTER = "scatter"
    """Points in the plane; the analysis stores `Points` with two dimensions as its state."""
    CONFUSION = "confusion"
    """Heat maps of labels and predictions; the analysis has values `count:LABEL:PREDICTION`."""


@dataclass(frozen=True)
class AnalysisColumn:
    """A value of an analysis, in tables and as the axis of its figure."""

    key: str
    """Name of the value; `value` for the main value. `recall:*` is a value for each class."""
    label: str
    unit: str = ""
    """Values in `%` are fractions."""
    digits: int | None = None
    """Digits after the decimal point; None: three significant digits."""
    spread: str = ""
    """Name of the value that is its standard deviation."""
    expected: str = ""
    """Name of the value that is expected by chance."""


@dataclass(frozen=True)
class Analysis:
    """An analysis of the representations of a finished run."""

    name: str
    """Name for `feddbe analyze --analyses`."""
    title: str
    description: str
    """Meaning of the values, in one or two sentences for captions."""
    compute: Callable[[Points, int, Mapping[str, Any]], AnalysisResult]
    """Function of the points, the number of classes and the settings."""
    settings: Mapping[str, Any]
    columns: tuple[AnalysisColumn, ...]
    """Columns of its table; empty for an analysis without one."""
    figure: FigureKind
    quick_settings: Mapping[str, Any] | None = None
    """Settings with less work, if the analysis supports that."""
    supports_per_client: bool = False
    """True if it can be computed from the samples of a single client."""
    on: tuple[str, ...] = ("own",)
    """Samples that a client's model can represent, the default first: `own`, those of its client, or `all`,
    those of every client. With `all` there is a result for each client's model, and their mean."""
    compares_clients: bool = False
    """True if a result compares the samples of one client with those of the others."""
    layers: tuple[str, ...] = ()
    """The only layers that it can analyze; empty: those that the user selects."""
    uses_all_samples: bool = False
    """True if it always analyzes all test samples, because its cost is small."""
