"""The part of a page about representations: over rounds, by layer, between clients, and in the plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from feddbe.metrics.representations.discrepancy import Discrepancy
from feddbe.metrics.representations.points import Points
from feddbe.reporting.html.blocks import Block, Choice, Sources, curves, figure, number, section, some
from feddbe.reporting.html.overview import measuring
from feddbe.reporting.representations import (
    MOMENTS,
    PER_ROUND,
    SAID,
    WORDS,
    column,
    discrepancy,
    first,
    kinds,
    samples,
)
from feddbe.results import seeds
from feddbe.results.document import Measurement, RunDocument
from feddbe.runs.analysis import layout

_POINTS = 24_000
"""Of all layouts of a page."""
_QUICK = " QUICK: fewer sizes, seeds and steps than the full measure."
Found = list[tuple[str, Measurement]]


def over_rounds(sources: Sources) -> list[Block]:
    """Pooled measures, where runs have any."""
    asked = [
        Choice(f"{words}, {moment} local training", _pooled(name, moment))
        for name, words in PER_ROUND.items()
        for moment in MOMENTS
    ]
    words = "Measured of the representations z_g of test samples in each round."
    return section("rounds", "Representations over rounds", curves("pooled", sources, asked, "round", words))


def _pooled(name: str, moment: str) -> seeds.Points:
    def found(document: RunDocument) -> list[tuple[int, float]]:
        each = ((e["round"], e["measures"].get(moment, {}).get(name)) for e in document["rounds"])
        return [(round, read["weighted"]) for round, read in each if read]

    return found


def representations(sources: Sources) -> list[Block]:
    """What was measured of entries when the runs were over: a section for each kind of measure."""
    by_name = dict(zip(sources.names, sources.documents, strict=True))
    sections = []
    for kind, found in kinds(sources.documents, sources.names):
        what = found[0][1]["what"]
        blocks = {"mdl": _bars, "probe": _bars, "tsne": None}.get(what, _dots)
        made = blocks(kind, found) if blocks else _layouts(kind, found, by_name)
        alone = ", of each client alone" * found[0][1]["per_client"] + " (quick)" * found[0][1]["quick"]
        lines = measuring((by_name[run], one) for run, one in found)
        sections += section(kind, _TITLES.get(what, what) + alone, made, lines)
    return sections


_TITLES = {
    "mdl": "Minimum description length by layer",
    "probe": "Linear probe by layer",
    "discrepancy": "Discrepancy between clients, each through its own model",
    "discrepancy-shared": "Discrepancy between clients, both through the model of one",
    "tsne": "Representations in the plane (t-SNE)",
}


def _caption(found: Found) -> str:
    one = found[0][1]
    said = f"{samples(found)}, before and after local training, @ round.".capitalize()
    return f"{WORDS.get(one['what'], '')} {said}{_QUICK * one['quick']}".strip()


def _bars(kind: str, found: Found) -> list[Block]:
    """A group of bars for each place."""
    percent = 100 if found[0][1]["what"] == "probe" else 1
    places = list(dict.fromkeys(one["place"] for _, one in found))
    series: dict[str, dict[str, Measurement]] = {}
    for run, one in found:
        series.setdefault(column(run, one), {})[one["place"]] = one
    drawn: list[Block] = [
        {
            "name": name,
            "values": [_reading(by_place.get(place), "value", percent) for place in places],
            "spread": [_reading(by_place.get(place), "std", percent) for place in places],
        }
        for name, by_place in series.items()
    ]
    text = "; ".join(
        f"{one['name']}: " + ", ".join(f"{p} {_plain(v)}" for p, v in zip(places, one["values"], strict=True))
        for one in drawn
    )
    unit = "accuracy of the probe in %" if percent == 100 else "nats"
    return [figure("bars", kind, _caption(found), text, groups=places, series=drawn, unit=unit)]


def _reading(one: Measurement | None, reading: str, percent: int) -> float | None:
    value = one["overall"].get(reading) if one else None
    return None if value is None else number(percent * value)


def _plain(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _dots(kind: str, found: Found) -> list[Block]:
    """A panel for each measure, a row for each run, place and moment, a dot for each client."""
    rows = {
        f"{column(run, one)}, {one['place']}": discrepancy(one) for run, one in found if first(one, found)
    }
    panels: list[Block] = [
        {
            "name": words.replace("\n", " ").replace("$^2$", "²"),
            "rows": [_row(name, measure, one) for name, one in rows.items()],
        }
        for measure, words in SAID.items()
    ]
    text = "; ".join(
        f"{row['name']}: {panel['name']} {_plain(row['mean'])}" for panel in panels for row in panel["rows"]
    )
    caption = (
        f"{_caption(found)} A dot is a client against all others, the bar their mean; small grey ticks: what "
        "it would be without any difference, because means of samples differ."
    )
    return [figure("dots", kind, caption, text, panels=panels)]


def _row(name: str, measure: str, found: Discrepancy) -> Block:
    values = np.asarray(getattr(found, measure), dtype=float)
    chance = getattr(found, f"{measure}_chance", None)
    there = values[np.isfinite(values)]
    return {
        "name": name,
        "colour": 0,
        "values": [number(value) for value in values.tolist()],
        "mean": number(float(there.mean())) if len(there) else None,
        "chance": [number(value) for value in np.asarray(chance).tolist()] if chance is not None else [],
        "note": f"{np.sum(~np.isfinite(values))} infinite" if len(there) < len(values) else "",
    }


def _layouts(kind: str, found: Found, by_name: Mapping[str, RunDocument]) -> list[Block]:
    """A panel for each layout that is not the same as another."""
    panels: dict[str, Points] = {}
    for run, one in found:
        points = layout(by_name[run], one)
        if not any(np.array_equal(points.x, other.x) for other in panels.values()):  # z without PRBM
            panels[f"{column(run, one)}, {one['place']}"] = points
    most = max(100, _POINTS // len(panels))
    thin = any(len(points.y) > most for points in panels.values())
    caption = (
        f"{samples(found).capitalize()}, laid out by t-SNE: only nearness means something, axes have no unit."
        + f" At most {most} points of each are drawn, evenly chosen." * thin
    )
    text = f"{len(panels)} layouts: {'; '.join(f'{name}, {len(p.y)} points' for name, p in panels.items())}"
    drawn = [{"name": name, **_points(points, most)} for name, points in panels.items()]
    return [figure("scatter", kind, caption, text, panels=drawn)]


def _points(points: Points, most: int) -> Block:
    """In a square of 1000 steps, both axes on one scale."""
    kept: Sequence[int] = some(range(len(points.y)), most)
    x = np.asarray(points.x, dtype=float)[kept]
    side = max(float(np.ptp(x, axis=0).max()), 1e-12)
    placed = np.round(500 + 1000 * (x - (x.max(axis=0) + x.min(axis=0)) / 2) / side).astype(int)
    return {
        "x": placed[:, 0].tolist(),
        "y": placed[:, 1].tolist(),
        "label": np.asarray(points.y)[kept].tolist(),
        "client": np.asarray(points.client)[kept].tolist(),
    }
