"""Representations as points, and the declaration of an analysis: what it computes and how it is shown.

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
    """Representations of samples, a row each, with their labels and the clients that hold them."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]
    client: npt.NDArray[np.int64]

    def select(self, rows: Any) -> Points:
        """Some of them: by index or by mask."""
        return Points(self.x[rows], self.y[rows], self.client[rows])


def make_points(x: Any, y: Any, client: Any = None) -> Points:
    """From arrays of any shape (samples first) and type; without clients, all are of one."""
    x = np.asarray(x, dtype=np.float32)
    x = x.reshape(len(x), int(np.prod(x.shape[1:])))
    y = np.asarray(y, dtype=np.int64)
    client = np.zeros(len(x), np.int64) if client is None else np.asarray(client, dtype=np.int64)
    if y.shape != (len(x),) or client.shape != (len(x),):
        raise InvalidInputError(
            f"{len(x)} representations, labels {y.shape}, clients {client.shape}; one of each"
        )
    if not len(x) or not x.shape[1]:
        raise InvalidInputError(f"representations of shape {x.shape}: there is nothing to measure")
    if not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise InvalidInputError(
            f"representation {bad} has a value that is no finite number; nothing can be measured"
        )
    return Points(x, y, client)


Readings = dict[str, float | None]
"""By the reading's name; the number of the analysis itself has an empty one."""


class AnalysisResult(NamedTuple):
    """The result of an analysis: of all clients together, of each client, and what is not a number."""

    overall: Readings
    clients: Mapping[int, Readings] = {}
    state: State = {}  # noqa: RUF012  (never written to)


class FigureKind(Enum):
    """The figure that shows an analysis."""

    BARS = "bars"
    """Groups of bars, one for each layer."""
    DOTS = "dots"
    """A panel for each column and a dot for each client."""
    SCATTER = "scatter"
    """Points in the plane: the analysis stores `Points` with two dimensions as its state."""


@dataclass(frozen=True)
class AnalysisColumn:
    """A number of an analysis, in tables and as the axis of its figure."""

    key: str
    """The reading; `value` for the one with an empty name."""
    label: str
    unit: str = ""
    """Numbers in `%` are fractions of one."""
    digits: int | None = None
    """Digits after the point; None: three significant ones."""
    spread: str = ""
    """The reading that is its standard deviation."""
    expected: str = ""
    """The reading that chance alone would give."""


@dataclass(frozen=True)
class Analysis:
    """An analysis of the representations of a finished run."""

    name: str
    """As in `feddbe measure --analyses`."""
    title: str
    description: str
    """What the numbers mean, in a sentence or two for captions."""
    compute: Callable[[Points, int, Mapping[str, Any]], AnalysisResult]
    """A function of the points, the number of classes and the settings."""
    settings: Mapping[str, Any]
    columns: tuple[AnalysisColumn, ...]
    """Empty: there is no table."""
    figure: FigureKind
    quick: Mapping[str, Any] | None = None
    """Settings with less work, if the analysis supports that."""
    per_client: bool = False
    """Whether it can be computed from the samples of one client alone."""
    shared: bool = False
    """Whether each client's model sees the samples of all clients, not its own alone."""
