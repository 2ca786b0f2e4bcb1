"""Figures as values, independent of the library that draws them.

`build_figures.py` builds them from run documents; `matplotlib_backend.py` draws them into files,
`html/` onto the report page, and `terminal.py` draws `Curves` with characters. All numbers and texts are
computed once, so the three agree. A new figure of an existing kind needs no new drawing code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """The quantity along an axis, or behind a color or an area."""

    name: str
    """A short noun phrase, as in `test accuracy`."""
    unit: str = ""
    """As in `%`; values in percent are within 0 and 100 and have two digits."""

    @property
    def label(self) -> str:
        """Return the name with the unit in parentheses: `test accuracy (%)`."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Mark:
    """A highlighted point of a curve."""

    x: float
    y: float
    text: str
    """Text for the legend, as in `best 93.62 % in round 11`."""


@dataclass(frozen=True)
class Series:
    """One curve: the mean over the runs of one experiment."""

    name: str
    color: int
    """Index into the palette, which also selects the line style and the marker."""
    x: tuple[float, ...] = ()
    """Increasing values. Empty if the run has no value: only its `ending` is shown."""
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    """Lower edge of the band; empty without a band, as for a single run."""
    high: tuple[float, ...] = ()
    mark: Mark | None = None
    ending: str = ""
    """Reason for an early end, as in `diverged in round 21`."""

    @property
    def legend(self) -> str:
        """Return the name with the meaning of the mark and the ending."""
        details = [self.mark.text if self.mark else "", self.ending]
        text = ", ".join(filter(None, details))
        return f"{self.name}: {text}" if text else self.name


@dataclass(frozen=True)
class Reference:
    """A horizontal reference line."""

    y: float
    text: str


@dataclass(frozen=True)
class Curves:
    """Curves over one axis."""

    name: str
    """Unique name within the figure, shown in the selection on the page."""
    x_axis: Axis
    y_axis: Axis
    series: tuple[Series, ...]
    references: tuple[Reference, ...] = ()
    band: str = ""
    """Meaning of the bands; empty without bands."""
    shaded: tuple[float, float] | None = None
    """A range of x with a gray background."""
    is_stepped: bool = False
    note: str = ""


@dataclass(frozen=True)
class BarSeries:
    """Bars of one color: one for each group, or None."""

    name: str
    values: tuple[float | None, ...]
    spreads: tuple[float | None, ...]
    """Standard deviations, drawn as error bars."""


@dataclass(frozen=True)
class Bars:
    """Groups of bars that start at zero."""

    name: str
    y_axis: Axis
    groups: tuple[str, ...]
    series: tuple[BarSeries, ...]
    note: str = ""


@dataclass(frozen=True)
class DotRow:
    """A row of dots, one for each client."""

    name: str
    color: int
    values: tuple[float | None, ...]
    """Values; None is not finite and not drawn."""
    mean: float | None
    spreads: tuple[float | None, ...] = ()
    """Standard deviation of each value, drawn as error bars."""
    expected: tuple[float | None, ...] = ()
    """Values expected by chance, drawn as small gray ticks."""
    note: str = ""
    """A few words at the end of the row."""


@dataclass(frozen=True)
class Dots:
    """Rows of dots along one axis."""

    name: str
    x_axis: Axis
    rows: tuple[DotRow, ...]
    note: str = ""


@dataclass(frozen=True)
class Scatter:
    """Points in a plane without units; the color is the label, the marker the client."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    labels: tuple[int, ...]
    clients: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class CellMark:
    """A frame around a cell of a heat map."""

    column: int
    row: int
    text: str
    is_dashed: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A grid of colored cells."""

    name: str
    x_axis: Axis
    y_axis: Axis
    value_axis: Axis
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """A tuple for each row; None without a value."""
    limits: tuple[float, float]
    """Values of the first and the last color, which values beyond them share."""
    marks: tuple[CellMark, ...] = ()
    empty: tuple[tuple[int, int, str], ...] = ()
    """Cells without a value: column, row and reason."""
    note: str = ""


@dataclass(frozen=True)
class Bubbles:
    """A grid of bubbles with areas in proportion to counts."""

    name: str
    x_axis: Axis
    y_axis: Axis
    size_axis: Axis
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """A tuple for each column."""
    note: str = ""


Panel = Curves | Bars | Dots | Scatter | HeatMap | Bubbles


@dataclass(frozen=True)
class Figure:
    """Panels of one kind with a title and a caption.

    A picture shows all panels. The page shows dots and scatter plots next to each other, and lets the reader
    select one panel of the other kinds.
    """

    id: str
    """Short name: file name of the picture and id on the page."""
    title: str
    panels: tuple[Panel, ...]
    caption: str = ""
