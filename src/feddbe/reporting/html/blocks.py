"""Input and building blocks of the report: runs with their names and colors, sections, figures as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from feddbe.reporting.figure import Axis, Bars, Bubbles, Curves, Dots, Figure, HeatMap, Panel, Scatter
from feddbe.results.document import RunDocument, compared_result, run_labels
from feddbe.results.repetitions import group_runs
from feddbe.runs.build_document import build_document, client_accuracies
from feddbe.runs.store import RunStore

_ENVIRONMENT_KEYS = ("begun", "versions", "machine", "git_commit")

Block = dict[str, Any]
"""A part of the page as JSON values: a section, or a table, figure or command in it."""


@dataclass(frozen=True)
class ReportRun:
    """A run on the page."""

    document: RunDocument
    labels: list[list[int]] | None
    """Samples of each label, by client; None with too many clients."""
    environment: dict[str, Any]
    """Start time, machine, Git commit and versions of packages."""

    @property
    def folder(self) -> Path:
        return Path(self.document["folder"])

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Accuracy of each client in the round by which methods are compared."""
        return client_accuracies(self.folder, compared_result(self.document))


@dataclass(frozen=True)
class ReportRuns:
    """The runs of a page."""

    runs: tuple[ReportRun, ...]
    names: tuple[str, ...]
    """A unique name for each run: its label, with the folder if labels are equal."""
    colors: dict[str, int]
    """Palette index by folder; runs of one experiment that are drawn as one curve share it."""

    @classmethod
    def from_runs(cls, runs: Sequence[ReportRun]) -> ReportRuns:
        """Return the runs with names and colors."""
        documents = [run.document for run in runs]
        unevaluated = [
            [document]
            for document in documents
            if not any(round_result["accuracy"] for round_result in document["rounds"])
        ]
        groups = group_runs(documents) + unevaluated
        colors = {document["folder"]: index for index, group in enumerate(groups) for document in group}
        return cls(tuple(runs), tuple(_unique_names(documents)), colors)

    @property
    def documents(self) -> list[RunDocument]:
        return [run.document for run in self.runs]

    def get_name(self, document: RunDocument) -> str:
        """Return the name of the run with this document."""
        folders = [run.document["folder"] for run in self.runs]
        return self.names[folders.index(document["folder"])]


def _unique_names(documents: Sequence[RunDocument]) -> list[str]:
    labels = run_labels(documents)
    return [
        f"{label} [{document['folder']}]" if labels.count(label) > 1 else label
        for label, document in zip(labels, documents, strict=True)
    ]


def read_runs(folders: Iterable[Path], documents: Sequence[RunDocument] = ()) -> ReportRuns:
    """Read the runs in these folders, each from a consistent snapshot, also while it is running.

    Args:
        folders: Folders of the runs.
        documents: Documents that replace the stored ones, such as those of runs that a study cuts.
    """
    replacements = {Path(document["folder"]): document for document in documents}
    runs = [_read_run(folder) for folder in dict.fromkeys(folders)]
    runs = [dataclasses.replace(run, document=replacements.get(run.folder, run.document)) for run in runs]
    return ReportRuns.from_runs(runs)


def _read_run(folder: Path) -> ReportRun:
    store = RunStore.open(folder)
    try:
        store.snapshot()
        environment = {key: store.meta(key) for key in _ENVIRONMENT_KEYS}
        return ReportRun(build_document(store, hashes=False), store.meta("labels"), environment)
    finally:
        store.close()


def section(id_: str, title: str, blocks: Sequence[Block], commands: Sequence[Block] = ()) -> list[Block]:
    """Return a section of the page as a list, which is empty if the section has no blocks.

    Args:
        id_: Its name in addresses.
        title: Its heading.
        blocks: Tables and figures.
        commands: Commands that print the same numbers.
    """
    if not blocks:
        return []
    return [{"id": id_, "title": title, "blocks": list(blocks), "commands": list(commands)}]


def command_block(title: str, command: str) -> Block:
    """Return a shell command with a title."""
    return {"title": title, "command": command}


def fact_list(id_: str, caption: str, rows: Sequence[Sequence[str]]) -> Block:
    """Return a list of names and values that cannot be sorted."""
    return {"kind": "facts", "id": id_, "caption": caption, "rows": [list(row) for row in rows]}


def to_json_number(value: float | None, digits: int = 4) -> float | None:
    """Return the rounded number; None if it is not finite, which JSON cannot represent."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def figure_block(figure: Figure) -> Block:
    """Return a figure as the page's script expects it; the script has a function for each kind of panel."""
    kind = type(figure.panels[0]).__name__.lower()
    return {
        "kind": kind,
        "id": figure.id,
        "caption": figure.caption,
        "text": "; ".join(map(describe_panel, figure.panels)),
        "panels": [_panel_content(panel) for panel in figure.panels],
    }


def _panel_content(panel: Panel) -> Block:
    if isinstance(panel, Curves):
        return _curves_content(panel)
    if isinstance(panel, Scatter):
        return _scatter_content(panel)
    content: Block = _as_json_values(panel)
    return content


def _as_json_values(value: Any) -> Any:
    """Return a value of dataclasses and tuples as dictionaries and lists; numbers are rounded."""
    if isinstance(value, Axis):
        return {"label": value.label, "unit": value.unit}
    if dataclasses.is_dataclass(value):
        return {
            field.name: _as_json_values(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_as_json_values(item) for item in value]
    return to_json_number(value) if isinstance(value, float) else value


def _curves_content(panel: Curves) -> Block:
    """Return curves with values at common points of x; None if a curve has no value there."""
    common = sorted({x for series in panel.series for x in series.x})

    def align(x: Sequence[float], values: Sequence[float]) -> list[float | None]:
        known = dict(zip(x, values, strict=True))
        return [to_json_number(known.get(position)) for position in common]

    content: Block = _as_json_values(panel)
    content["x"] = [_as_json_values(x) for x in common]
    for aligned, series in zip(content["series"], panel.series, strict=True):
        del aligned["x"], aligned["mean"]
        aligned["y"] = align(series.x, series.mean)
        for edge, values in (("low", series.low), ("high", series.high)):
            aligned[edge] = align(series.x, values) if values else None
    return content


def _scatter_content(panel: Scatter) -> Block:
    """Return points in a square of 1000 units, with both axes on one scale."""
    plane = np.array([panel.x, panel.y])
    center = (plane.max(axis=1) + plane.min(axis=1)) / 2
    side = max(float(np.ptp(plane, axis=1).max()), 1e-12)
    x, y = np.round(500 + 1000 * (plane - center[:, None]) / side).astype(int).tolist()
    return {**_as_json_values(dataclasses.replace(panel, x=(), y=())), "x": x, "y": y}


def describe_panel(panel: Panel) -> str:
    """Return a description of the panel for screen readers."""

    def text(value: float | None) -> str:
        return "none" if value is None else f"{value:.4g}"

    match panel:
        case Curves():
            drawn = [series for series in panel.series if series.x]
            parts = [
                f"{series.name} from {text(series.mean[0])} to {text(series.mean[-1])}" for series in drawn
            ]
        case Bars():
            parts = [
                ", ".join(
                    f"{series.name} {group} {text(value)}"
                    for group, value in zip(panel.groups, series.values, strict=True)
                )
                for series in panel.series
            ]
        case Dots():
            parts = [f"{row.name}: mean {text(row.mean)}" for row in panel.rows]
        case Scatter():
            parts = [f"{len(panel.x)} points"]
        case HeatMap():
            last = [row[-1] for row in panel.values if row[-1] is not None]
            span = f"{text(min(last))} to {text(max(last))}" if last else "no value"
            parts = [f"{span} in {panel.x_axis.label} {panel.columns[-1]}"]
        case Bubbles():
            label_counts = [sum(count > 0 for count in column) for column in panel.counts]
            total = sum(map(sum, panel.counts))
            parts = [f"{total} samples; a client has {min(label_counts)} to {max(label_counts)} labels"]
    return f"{panel.name}: {'; '.join(parts)}"
