"""Pictures of figures (`figure.py`) by matplotlib, written completely or not at all."""

from __future__ import annotations

import dataclasses
import math
import secrets
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feddbe.errors import InvalidInputError, replace_controls, unknown_name
from feddbe.reporting.figure import (
    Axis,
    Bars,
    Bubbles,
    Curves,
    DotRow,
    Dots,
    Figure,
    HeatMap,
    Panel,
    Scatter,
    Series,
)
from feddbe.reporting.table import fold_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


# Okabe and Ito's colorblind-safe colors, without the yellow, which is too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# Four styles and seven colors: 28 curves before a pair repeats.
STYLES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.4, 1.2)))
MARKERS = "os^Dv"
GRAY = "#6b6b6b"
# Paul Tol's colorblind-safe muted colors, and black.
LABEL_COLORS = (
    "#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677",
    "#AA4499", "#44AA99", "#882255", "#999933", "#000000",
)  # fmt: skip
_HATCHES = ("", "///", "...", "\\\\\\", "xxx")
_SHAPES = "os^Dv<>pPX*h"
"""Markers of clients: filled for the first clients, hollow for the next ones; then a client's number."""
_FORMATS = (".pdf", ".png", ".svg")
_WIDTH = 7.2
"""Width of a picture in inches."""


def draw(path: Path, *figures: Figure) -> None:
    """Draw figures below each other into a file, in the format of the path's suffix.

    Raises:
        InvalidInputError: The format is unknown, the file cannot be written, or there is nothing to draw.
    """
    write(path, render(*figures))


def render(*figures: Figure) -> Canvas:
    """Return the figures as one matplotlib figure."""
    figures = tuple(map(_replace_controls, figures))
    panels = [panel for figure in figures for panel in figure.panels]
    if not any(map(_has_marks, panels)):
        raise InvalidInputError("nothing to draw: no run has an evaluated round or a value to show")
    if isinstance(panels[0], Scatter):
        return _render_scatters(figures[0])
    if isinstance(panels[0], Bubbles):
        return _render_bubbles(figures[0], panels[0])
    return _render_stacked(figures)


def _replace_controls(value: Any) -> Any:
    """Return a figure or a part of it with control characters in its texts replaced; fonts have none."""
    if isinstance(value, str):
        return replace_controls(value, keep="\n")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _replace_controls(getattr(value, name)) for name in names})
    if type(value) is tuple:
        return tuple(map(_replace_controls, value))
    return value


def _has_marks(panel: Panel) -> bool:
    match panel:
        case Curves():
            return any(series.x for series in panel.series)
        case Bars():
            return bool(panel.groups)
        case Dots():
            return bool(panel.rows)
        case Scatter():
            return bool(panel.x)
        case _:
            return True


def write(path: Path, canvas: Canvas) -> None:
    """Save a matplotlib figure in the format of the path's suffix."""
    import matplotlib

    if path.suffix.lower() not in _FORMATS:
        raise unknown_name("picture format", path.suffix, _FORMATS)
    kind = path.suffix.lower()[1:]
    # Without dates and random ids, the same run gives the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with (
        replace_file(path, "picture") as scratch,
        matplotlib.rc_context({"svg.hashsalt": "feddbe"}),
        warnings.catch_warnings(),
    ):
        # a name may have letters that no font here has; they are drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        canvas.savefig(scratch, format=kind, dpi=150, metadata=metadata)


@contextmanager
def replace_file(path: Path, description: str) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` afterwards.

    Args:
        path: The file to write or replace; readers never see a partial file.
        description: The kind of file, for the error message.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    _remove_leftovers(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write the {description} '{path}': {error.strerror or error}"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed processes; files younger than a minute may be in use."""
    for leftover in path.parent.glob(f".{path.name}.????????.tmp"):
        with suppress(OSError):
            if leftover.stat().st_mtime < time.time() - 60:
                leftover.unlink()


# Curves, bars, dots and heat maps: panels below each other


def _render_stacked(figures: Sequence[Figure]) -> Canvas:
    """Return all panels below each other; panels of dots with equal row names share a row."""
    from matplotlib.figure import Figure as MatplotlibFigure

    rows = [row for figure in figures for row in _rows(figure.panels)]
    width = 10.0 if max(map(len, rows)) > 2 else _WIDTH
    heights = [_height(row[0], is_alone=len(rows) == 1) for row in rows]
    canvas = MatplotlibFigure(figsize=(width, sum(heights)), layout="constrained")
    grid = canvas.add_gridspec(len(rows), math.lcm(*map(len, rows)), height_ratios=heights)
    has_several_panels = len(figures[0].panels) > 1
    legend_axes = []
    for index, row in enumerate(rows):
        span = grid.ncols // len(row)
        shared: Axes | None = None
        for position, panel in enumerate(row):
            axes = canvas.add_subplot(grid[index, position * span : (position + 1) * span], sharey=shared)
            shared = shared or axes
            _draw_panel(canvas, axes, panel, is_first=position == 0, has_several_panels=has_several_panels)
            if isinstance(panel, Curves | Bars | HeatMap):
                legend_axes.append(axes)
    title = textwrap.fill(figures[0].title, int(12 * width))
    canvas.suptitle(title, fontsize=10, parse_math=False)
    notes = [
        note for figure in figures for note in (figure.caption, *(panel.note for panel in figure.panels))
    ]
    caption = textwrap.fill(" ".join(filter(None, notes)), int(14.5 * width))
    height = sum(heights) + 0.18 * len(title.splitlines()) + 0.15 * len(caption.splitlines())
    _add_legend(canvas, legend_axes, caption, (width, height))
    return canvas


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    names = {tuple(row.name for row in panel.rows) for panel in panels if isinstance(panel, Dots)}
    return [list(panels)] if len(names) == 1 else [[panel] for panel in panels]


def _height(panel: Panel, *, is_alone: bool) -> float:
    """Return the height of a panel in inches."""
    match panel:
        case Curves():
            return 3.4 if is_alone else 2.5
        case Dots():
            return 0.44 * len(panel.rows) + 0.75
        case HeatMap():
            return max(1.8, min(4.0, 0.8 + 0.5 * len(panel.rows)))
        case _:
            return 3.4


def _draw_panel(
    canvas: Canvas, axes: Axes, panel: Panel, *, is_first: bool, has_several_panels: bool
) -> None:
    match panel:
        case Curves():
            _draw_curves(axes, panel)
            if has_several_panels:
                axes.set_title(panel.name, fontsize=9, loc="left", parse_math=False)
        case Bars():
            _draw_bars(axes, panel)
        case Dots():
            _draw_dots(axes, panel, is_first=is_first, is_narrow=has_several_panels)
        case HeatMap():
            _draw_heat_map(canvas, axes, panel)
            if has_several_panels:
                axes.set_title(panel.name, fontsize=9, loc="left", parse_math=False)
        case _:
            raise TypeError(f"{type(panel).__name__} is drawn alone")


def _add_legend(canvas: Canvas, legend_axes: Sequence[Axes], caption: str, size: tuple[float, float]) -> None:
    """Add caption and legend below the panels, and increase the height of the picture by the legend."""
    width, height = size
    handles: dict[str, Any] = {}
    for axes in legend_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if not handles:
        canvas.set_size_inches(width, height)
        canvas.supxlabel(caption, fontsize=8, color=GRAY, parse_math=False)
        return
    columns = 2 if len(handles) > 4 and max(map(len, handles)) <= 5.8 * width else 1
    wrapped = [textwrap.fill(name, int(11.7 * width) // columns) for name in handles]
    lines = sum(name.count("\n") + 1 for name in wrapped)
    canvas.set_size_inches(width, height + 0.19 * math.ceil(lines / columns))
    legend = canvas.legend(
        handles.values(), wrapped, loc="outside lower center", ncols=columns, frameon=False, fontsize=9,
        handlelength=4, title=caption,
        title_fontsize=8,
    )  # fmt: skip
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)  # names may contain dollar signs
    legend.get_title().set_color(GRAY)


def _style_axes(axes: Axes) -> None:
    """Add a pale grid behind the marks, and remove the frame above and on the right."""
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _wrap_label(axis: Axis, width: int) -> str:
    """Return the label of an axis, with the unit in a second line if the label is too long."""
    if len(axis.label) <= width or not axis.unit:
        return axis.label
    return f"{axis.name}\n({axis.unit})"


def _draw_curves(axes: Axes, panel: Curves) -> None:
    from matplotlib.ticker import MaxNLocator

    if panel.shaded:
        axes.axvspan(*panel.shaded, color=GRAY, alpha=0.14, linewidth=0)
    for series in panel.series:
        _draw_series(axes, series, is_stepped=panel.is_stepped)
    for reference in panel.references:
        axes.axhline(reference.y, color=GRAY, linestyle="--", linewidth=1.1, label=reference.text)
    if panel.band:
        axes.fill_between([], [], color=GRAY, alpha=0.25, label=panel.band)
    axes.set_ylabel(_wrap_label(panel.y_axis, 26), parse_math=False)
    axes.set_xlabel(panel.x_axis.label, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0 if panel.is_stepped else 0.02, y=0.05)
    if panel.y_axis.unit == "%":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -1), min(high, 101))
    _style_axes(axes)


def _draw_series(axes: Axes, series: Series, *, is_stepped: bool) -> None:
    """Draw the curve with its band and its mark, and a cross where it ends early.

    A curve without points has its cross in the legend only.
    """
    color = COLORS[series.color % len(COLORS)]
    marker = MARKERS[series.color % len(MARKERS)]
    style = STYLES[series.color % len(STYLES)]
    cross: dict[str, Any] = {
        "color": color, "marker": "X", "markersize": 9, "markeredgecolor": "white", "linestyle": "",
    }  # fmt: skip
    if not series.x:
        axes.plot([], [], label=series.legend, **cross)
        return
    if series.low:
        axes.fill_between(
            series.x, series.low, series.high, color=color, alpha=0.18, linewidth=0,
            step="post" if is_stepped else None,
        )  # fmt: skip
    is_point = len(series.x) == 1 and series.mark is None
    axes.plot(
        series.x, series.mean, color=color, linestyle=style, linewidth=1.8, label=series.legend,
        drawstyle="steps-post" if is_stepped else "default", marker=marker if series.mark or is_point else "",
        markevery=[0] if is_point else [], markersize=7.5, markeredgecolor="white",
    )  # fmt: skip
    if series.mark:
        axes.plot(
            [series.mark.x], [series.mark.y], color=color, marker=marker, markersize=7.5,
            markeredgecolor="white", linestyle="", clip_on=False, zorder=3,
        )  # fmt: skip
    if series.ending:
        axes.plot(series.x[-1:], series.mean[-1:], clip_on=False, zorder=3, **cross)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    width = min(0.8 / len(panel.series), 0.3)
    for index, series in enumerate(panel.series):
        offset = (index - (len(panel.series) - 1) / 2) * width
        known = [group for group, value in enumerate(series.values) if value is not None]
        axes.bar(
            [group + offset for group in known],
            [series.values[group] or 0.0 for group in known],
            width,
            yerr=[series.spreads[group] or 0.0 for group in known] if any(series.spreads) else None,
            label=series.name,
            edgecolor="white",
            linewidth=0.5,
            color=COLORS[index % len(COLORS)],
            hatch=_HATCHES[index % len(_HATCHES)],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(range(len(panel.groups)), panel.groups, parse_math=False)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, None)
    axes.set_ylabel(panel.y_axis.label, parse_math=False)
    _style_axes(axes)
    axes.grid(visible=False, axis="x")


def _draw_dots(axes: Axes, panel: Dots, *, is_first: bool, is_narrow: bool) -> None:
    for height, row in enumerate(reversed(panel.rows)):
        _draw_dot_row(axes, row, height)
    axes.axvline(0, color=GRAY, linewidth=1.1)
    axes.set_xlim(min(axes.get_xlim()[0], 0), None)
    axes.set_xlabel(_wrap_label(panel.x_axis, 24 if is_narrow else 60), fontsize=9, parse_math=False)
    axes.set_ylim(-0.55, len(panel.rows) - 0.45)
    axes.tick_params(axis="y", length=0, labelleft=is_first)
    if is_first:
        names = [_fold_name(row.name) for row in reversed(panel.rows)]
        axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    _style_axes(axes)


def _draw_dot_row(axes: Axes, row: DotRow, height: float) -> None:
    """Draw a dot for each client, in all rows at the same relative height, and a bar at the mean."""
    color = COLORS[row.color % len(COLORS)]
    values = np.array([math.nan if value is None else value for value in row.values], dtype=float)
    heights = height + (np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1))
    if row.spreads:
        spreads = [spread or 0.0 for spread in row.spreads]
        axes.errorbar(values, heights, xerr=spreads, fmt="none", ecolor=color, elinewidth=0.5, alpha=0.5)
    if row.expected:
        expected = np.array([math.nan if value is None else value for value in row.expected], dtype=float)
        axes.scatter(expected, heights, marker="|", s=14, color=GRAY, linewidth=1)
    finite = np.isfinite(values)
    axes.scatter(
        values[finite], heights[finite], s=15, color=color, alpha=0.8, linewidth=0, zorder=3,
        marker=MARKERS[row.color % len(MARKERS)],
    )  # fmt: skip
    if row.mean is not None:
        axes.plot([row.mean, row.mean], [height - 0.4, height + 0.4], color="black", linewidth=2.2, zorder=2)
    if row.note:
        note = textwrap.fill(row.note, 18)
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center", fontsize=8)


def _fold_name(text: str) -> str:
    """Return a row's name in lines; the layer after the last comma is not broken."""
    run, comma, layer = text.rpartition(", ")
    return f"{fold_text(run, 26)},\n{layer}" if comma and len(text) > 26 else fold_text(text, 26)


_MAX_HEAT_MAP_TICKS = 25


def _draw_heat_map(canvas: Canvas, axes: Axes, panel: HeatMap) -> None:
    from matplotlib.patches import Rectangle

    numbers = np.array([[math.nan if value is None else value for value in row] for row in panel.values])
    low, high = panel.limits
    image = axes.imshow(numbers, aspect="auto", cmap="cividis", vmin=low, vmax=high)
    extend = "min" if (numbers < low).any() else "neither"
    canvas.colorbar(image, ax=axes, extend=extend).set_label(
        _wrap_label(panel.value_axis, 20), parse_math=False
    )
    if numbers.size <= 200:
        for (row, column), value in np.ndenumerate(numbers):
            if not np.isnan(value):
                color = "black" if value > (low + high) / 2 else "white"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=color)
    for column, row, text in panel.empty:
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color=GRAY)
    for mark in panel.marks:
        axes.add_patch(
            Rectangle(
                (mark.column - 0.5, mark.row - 0.5), 1, 1, fill=False, ls="--" if mark.is_dashed else "-",
                lw=2.2, clip_on=False, label=mark.text,
            )
        )  # fmt: skip
    for set_ticks, names in ((axes.set_xticks, panel.columns), (axes.set_yticks, panel.rows)):
        ticks = range(0, len(names), math.ceil(len(names) / _MAX_HEAT_MAP_TICKS))
        set_ticks(ticks, [_truncate(names[tick], 12) for tick in ticks])
    if max(map(len, panel.columns)) > 6:
        axes.tick_params(axis="x", rotation=90)
    if len(panel.rows) == 1:
        axes.set_yticks([])
    axes.set_xlabel(panel.x_axis.label, parse_math=False)
    axes.set_ylabel(panel.y_axis.label, parse_math=False)


# Bubbles: laid out in inches, because the area of a bubble depends on the size of a cell


def _render_bubbles(figure: Figure, panel: Bubbles) -> Canvas:
    from matplotlib.figure import Figure as MatplotlibFigure

    counts = np.array(panel.counts)
    columns, rows = counts.shape
    max_count = max(1, int(counts.max()))
    cell_width = _cell_size(columns, 7.4)
    # With more than 100 labels the height increases, up to twice at 200, so that labels can be distinguished.
    cell_height = _cell_size(rows, min(12.8, max(6.4, 0.064 * rows)))
    largest = _largest_bubble(counts, 72 * min(cell_width, cell_height))
    grid_width = columns * cell_width
    grid_height = rows * cell_height
    column_ticks = range(0, columns, _tick_step(cell_width))
    row_ticks = range(0, rows, _tick_step(cell_height))
    column_labels = [_truncate(panel.columns[tick], 16) for tick in column_ticks]
    row_labels = [_truncate(panel.rows[tick], 20) for tick in row_ticks]
    longest = max(map(len, column_labels))
    is_rotated = 0.075 * longest > _tick_step(cell_width) * cell_width
    left = max(0.6, 0.4 + 0.07 * max(map(len, row_labels)))
    bottom = 0.45 + 0.07 * longest if is_rotated else 0.55
    width = max(3.4, left + grid_width + 0.35 + largest / 72 + 0.75)
    text = f"{figure.title}; {panel.note}" if panel.note else figure.title
    lines = textwrap.wrap(text, width=int(12.5 * (width - left))) or [""]
    height = bottom + max(grid_height, 1.5) + 0.2 + 0.2 * len(lines)

    canvas = MatplotlibFigure(figsize=(width, height))
    axes = canvas.add_axes((left / width, bottom / height, grid_width / width, grid_height / height))
    _draw_bubbles(axes, counts, largest)
    # Margins keep bubbles off the frame.
    across, up = (max(0.5, 0.55 * largest / (72 * side)) for side in (cell_width, cell_height))
    axes.set(xlim=(-across, columns - 1 + across), ylim=(-up, rows - 1 + up))
    axes.set(xlabel=panel.x_axis.label, ylabel=panel.y_axis.label)
    axes.set_xticks(column_ticks, column_labels, rotation=90 if is_rotated else 0)
    axes.set_yticks(row_ticks, row_labels)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        tick.set_parse_math(False)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_color("#c8c8c8")
    canvas.text(left / width, 1 - 0.1 / height, "\n".join(lines), va="top", fontsize=10, parse_math=False)
    top = bottom + max(grid_height, 1.5)
    _draw_size_key(canvas, panel.size_axis.label, (left + grid_width + 0.3, top), largest, max_count)
    return canvas


def _largest_bubble(counts: NDArray[np.int64], cell: float) -> float:
    """Return the diameter of the largest bubble for cells of this size, in points.

    In a fine grid of sparse data bubbles may overlap, because they would be too small otherwise. In a denser
    grid they are smaller, so that bubbles of an even split do not touch.
    """
    fullness = float(counts.sum()) / max(1, int(counts.max())) / counts.size
    return min(36.0, 0.67 * cell / math.sqrt(max(fullness, 1e-9)), max(0.95 * cell, min(11.0, 2.2 * cell)))


def _draw_bubbles(axes: Axes, counts: NDArray[np.int64], largest: float) -> None:
    column, row = np.nonzero(counts)
    order = np.argsort(-counts[column, row], kind="stable")  # small bubbles are drawn on top of large ones
    column, row = column[order], row[order]
    area = largest**2 * counts[column, row] / max(1, int(counts.max()))
    edge = np.where(area > 9, 0.4, 0.0)  # separates overlapping bubbles; tiny ones have no edge
    axes.scatter(
        column, row, s=area, c=COLORS[0], alpha=0.85, linewidths=edge.tolist(), edgecolors="white",
        clip_on=False, zorder=2,
    )  # fmt: skip


def _truncate(name: str, maximum: int) -> str:
    return name if len(name) <= maximum else f"{name[: maximum - 3]}..."


def _cell_size(count: int, room: float) -> float:
    """Return the side of a cell in inches: `room` divided by the count, but limited for few cells."""
    return min(room / count, max(0.36, 1.4 / count))


def _tick_step(cell: float) -> int:
    """Return 1, 2 or 5 times a power of ten: the number of cells after which a tick label fits."""
    steps = (digit * zeros for zeros in (1, 10, 100, 1000, 10_000) for digit in (1, 2, 5))
    return next((step for step in steps if step * cell >= 0.2), 100_000)


def _draw_size_key(
    canvas: Canvas, label: str, corner: tuple[float, float], largest: float, max_count: int
) -> None:
    """Draw bubbles of round counts with their numbers, downwards from the corner (left, top) in inches."""
    left, top = corner
    width, height = canvas.get_size_inches()
    axes = canvas.add_axes((left / width, 0, 1 - left / width, top / height))
    axes.set_axis_off()
    axes.set(xlim=(0, 72 * (width - left)), ylim=(-72 * top, 0))  # points, so that areas match the grid's
    axes.text(0, -2, label, va="top", fontsize=8)
    y = -16.0
    for count in _round_counts(max_count):
        diameter = largest * math.sqrt(count / max_count)
        y -= max(diameter, 9) / 2
        axes.scatter([largest / 2], [y], s=[diameter**2], color=COLORS[0], alpha=0.85, linewidth=0)
        axes.text(largest + 5, y, f"{count}", va="center", fontsize=8)
        y -= max(diameter, 9) / 2 + 4


def _round_counts(max_count: int) -> list[int]:
    """Return up to three round counts (1, 2 or 5 times a power of ten), the largest first."""
    steps = [digit * 10**power for power in range(len(str(max_count))) for digit in (1, 2, 5)]
    return [step for step in steps if step <= max_count][::-2][:3]


# Scatter plots: square panels with a key for labels and one for clients


def _render_scatters(figure: Figure) -> Canvas:
    """Return a panel for each scatter plot.

    Up to ten labels have a color each; more labels share a color bar. Up to 24 clients have a marker each;
    with more clients, the marker is the client's number.
    """
    from matplotlib.figure import Figure as MatplotlibFigure

    panels = [panel for panel in figure.panels if isinstance(panel, Scatter)]
    labels = sorted({label for panel in panels for label in panel.labels})
    clients = sorted({client for panel in panels for client in panel.clients})
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = math.ceil(len(panels) / columns)
    side = 5.2 if columns == 1 else 4.0 if columns == 2 else 3.2
    below = 0.45 + 0.2 * math.ceil(len(clients) / (6 * columns)) if len(clients) <= 2 * len(_SHAPES) else 0.5
    canvas = MatplotlibFigure(
        figsize=(side * columns + 0.9, (side + 0.3) * rows + below), layout="constrained"
    )
    grid = list(canvas.subplots(rows, columns, squeeze=False).flat)
    colors = _label_colors(labels)
    for axes, panel in zip(grid, panels, strict=False):
        _draw_scatter(axes, panel, clients, colors)
        axes.set_title(fold_text(panel.name, int(11 * side)), fontsize=9, parse_math=False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _add_label_key(canvas, grid, labels, colors)
    _add_client_key(canvas, clients, columns)
    if figure.title:
        canvas.suptitle(textwrap.fill(figure.title, int(11 * side * columns)), fontsize=10, parse_math=False)
    return canvas


def _label_colors(labels: Sequence[int]) -> dict[int, Any]:
    import matplotlib

    if len(labels) <= len(LABEL_COLORS):
        return dict(zip(labels, LABEL_COLORS, strict=False))
    scale = matplotlib.colormaps["viridis"]  # without the last yellow, which is too pale on white
    return {label: scale(0.93 * index / (len(labels) - 1)) for index, label in enumerate(labels)}


def _client_marker(clients: Sequence[int], index: int) -> tuple[str, bool]:
    """Return the marker of a client, and True if it is filled."""
    if len(clients) > 2 * len(_SHAPES):
        return f"${clients[index]}$", True
    return _SHAPES[index % len(_SHAPES)], index < len(_SHAPES)


def _draw_scatter(axes: Axes, panel: Scatter, clients: Sequence[int], colors: Mapping[int, Any]) -> None:
    size = float(np.clip(9000 / max(1, len(panel.x)), 9, 36))
    x, y, owners = np.array(panel.x), np.array(panel.y), np.array(panel.clients)
    shades = [colors[label] for label in panel.labels]
    for index, client in enumerate(clients):
        indices = np.flatnonzero(owners == client)
        marker, is_filled = _client_marker(clients, index)
        edges = [shades[position] for position in indices]
        axes.scatter(
            x[indices], y[indices], s=2 * size if marker.startswith("$") else size, marker=marker,
            facecolors=edges if is_filled else "none", edgecolors=edges, linewidths=0.5, alpha=0.85,
        )  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.04)
    axes.spines[:].set_color("#c8c8c8")


def _add_label_key(
    canvas: Canvas, grid: Sequence[Axes], labels: Sequence[int], colors: Mapping[int, Any]
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.lines import Line2D

    if len(labels) <= len(LABEL_COLORS):
        dots = [Line2D([], [], linestyle="", marker="o", color=colors[k], label=f"{k}") for k in labels]
        canvas.legend(handles=dots, title="label", loc="outside right upper", frameon=False, fontsize=9)
        return
    steps = BoundaryNorm(np.arange(len(labels) + 1) - 0.5, len(labels))
    listed = ListedColormap([colors[label] for label in labels])
    bar = canvas.colorbar(ScalarMappable(steps, listed), ax=grid, fraction=0.04, pad=0.01, label="label")
    ticks = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), 11)).round().astype(int))
    bar.set_ticks(ticks.tolist(), labels=[f"{labels[tick]}" for tick in ticks])
    bar.minorticks_off()


def _add_client_key(canvas: Canvas, clients: Sequence[int], columns: int) -> None:
    from matplotlib.lines import Line2D

    if len(clients) > 2 * len(_SHAPES):
        canvas.supxlabel("a marker is the number of the client", fontsize=9)
        return
    markers = []
    for index, client in enumerate(clients):
        marker, is_filled = _client_marker(clients, index)
        face = "#404040" if is_filled else "none"
        markers.append(
            Line2D(
                [], [], linestyle="", marker=marker, color="#404040", markerfacecolor=face, label=f"{client}"
            )
        )
    canvas.legend(
        handles=markers, title="client", loc="outside lower center", ncols=min(len(markers), 5 * columns),
        frameon=False, fontsize=9, columnspacing=1.2, handletextpad=0.2,
    )  # fmt: skip
