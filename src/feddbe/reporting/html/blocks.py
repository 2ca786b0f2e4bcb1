"""What a page is made from: runs, read from their files, with the names and colours that they have on it."""

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
from feddbe.results.document import RunDocument, run_labels
from feddbe.results.seeds import group_runs
from feddbe.runs import summary
from feddbe.runs.store import RunStore
from feddbe.runs.summary import client_accuracies as summary_accuracies

_ABOUT = ("begun", "versions", "machine", "git_commit")


@dataclass(frozen=True)
class ReportRun:
    """One run."""

    document: RunDocument
    labels: list[list[int]] | None
    """Samples of each label, by client; None: of too many clients to look at."""
    about: dict[str, Any]
    """When, where and with what it was begun."""

    @property
    def folder(self) -> Path:
        return Path(self.document["folder"])

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Each client's in the best round."""
        return summary_accuracies(self.folder, self.document["best"])


@dataclass(frozen=True)
class ReportRuns:
    """The runs of a page."""

    runs: tuple[ReportRun, ...]
    names: tuple[str, ...]
    """Of each, told apart by its folder where the settings are the same."""
    colors: dict[str, int]
    """By a run's folder: runs of one experiment that are drawn as one line have the same."""

    @classmethod
    def from_runs(cls, runs: Sequence[ReportRun]) -> ReportRuns:
        documents = [run.document for run in runs]
        drawn = group_runs(documents) + [
            [d] for d in documents if not any(e["accuracy"] for e in d["rounds"])
        ]
        colours = {d["folder"]: index for index, group in enumerate(drawn) for d in group}
        return cls(tuple(runs), tuple(_unique(run_labels(documents), documents)), colours)

    @property
    def documents(self) -> list[RunDocument]:
        return [run.document for run in self.runs]

    def name(self, document: RunDocument) -> str:
        return self.names[[d["folder"] for d in self.documents].index(document["folder"])]


def _unique(plain: Sequence[str], documents: Sequence[RunDocument]) -> list[str]:
    return [
        f"{name} [{document['folder']}]" if plain.count(name) > 1 else name
        for name, document in zip(plain, documents, strict=True)
    ]


def read_runs(folders: Iterable[Path]) -> ReportRuns:
    """All of these runs, each as it is at one moment, which may be while it goes on."""
    return ReportRuns.from_runs([_read(folder) for folder in dict.fromkeys(folders)])


def _read(folder: Path) -> ReportRun:
    store = RunStore.open(folder)
    try:
        store.snapshot()
        about = {key: store.meta(key) for key in _ABOUT}
        return ReportRun(summary.build_document(store, hashes=False), store.meta("labels"), about)
    finally:
        store.close()


Block = dict[str, Any]


def section(id: str, title: str, blocks: Sequence[Block], commands: Sequence[Block] = ()) -> list[Block]:
    """A part of the page, or nothing where there is nothing to show; `commands` print the same numbers."""
    if not blocks:
        return []
    return [{"id": id, "title": title, "blocks": list(blocks), "commands": list(commands)}]


def command_block(what: str, line: str) -> Block:
    """A line for the shell, and what it gives."""
    return {"what": what, "line": line}


def fact_list(id: str, caption: str, rows: Sequence[Sequence[str]]) -> Block:
    """Names and values that nobody sorts."""
    return {"kind": "facts", "id": id, "caption": caption, "rows": [list(row) for row in rows]}


def number(value: float | None, digits: int = 4) -> float | None:
    """As it is written on the page; JSON has nothing for what is not finite."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def figure_block(figure: Figure) -> Block:
    """Return a figure as the page's script reads it; the script has a function for each kind of panel."""
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
    return number(value) if isinstance(value, float) else value


def _curves_content(panel: Curves) -> Block:
    """Return curves with values at common points of x, None where a curve has none."""
    common = sorted({x for series in panel.series for x in series.x})

    def align(x: Sequence[float], values: Sequence[float]) -> list[float | None]:
        known = dict(zip(x, values, strict=True))
        return [number(known.get(position)) for position in common]

    content: Block = _as_json_values(panel)
    content["x"] = [_as_json_values(x) for x in common]
    for entry, series in zip(content["series"], panel.series, strict=True):
        del entry["x"], entry["mean"]
        entry["y"] = align(series.x, series.mean)
        for edge, values in (("low", series.low), ("high", series.high)):
            entry[edge] = align(series.x, values) if values else None
    return content


def _scatter_content(panel: Scatter) -> Block:
    """Return points in a square of 1000 steps, both axes on one scale."""
    plane = np.array([panel.x, panel.y])
    center = (plane.max(axis=1) + plane.min(axis=1)) / 2
    side = max(float(np.ptp(plane, axis=1).max()), 1e-12)
    x, y = np.round(500 + 1000 * (plane - center[:, None]) / side).astype(int).tolist()
    return {**_as_json_values(dataclasses.replace(panel, x=(), y=())), "x": x, "y": y}


def describe_panel(panel: Panel) -> str:
    """Return a panel in words, for readers who do not see it."""

    def text(value: float | None) -> str:
        return "none" if value is None else f"{value:.4g}"

    match panel:
        case Curves():
            drawn = [series for series in panel.series if series.x]
            parts = [f"{one.name} goes from {text(one.mean[0])} to {text(one.mean[-1])}" for one in drawn]
        case Bars():
            parts = [
                ", ".join(
                    f"{one.name} {group} {text(value)}"
                    for group, value in zip(panel.groups, one.values, strict=True)
                )
                for one in panel.series
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
            held = [sum(count > 0 for count in column) for column in panel.counts]
            total = sum(map(sum, panel.counts))
            parts = [f"{total} samples; a client has {min(held)} to {max(held)} labels"]
    return f"{panel.name}: {'; '.join(parts)}"
