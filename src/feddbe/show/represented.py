"""What runs' documents have of representations, side by side: tables as in the paper, with a line for each
place and a column for each method and moment, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType

from feddbe.representations import Points
from feddbe.representations.discrepancy import Discrepancy
from feddbe.representations.readings import as_discrepancy
from feddbe.results.document import Measurement, RunDocument, labels
from feddbe.show import embedding, measured
from feddbe.show.cells import caption, percent, plain_table

__all__ = [
    "MOMENTS",
    "PER_ROUND",
    "WORDS",
    "column",
    "discrepancy",
    "draw",
    "draw_rounds",
    "first",
    "kinds",
    "measured_tables",
    "samples",
]

Found = list[tuple[str, Measurement]]
"""Measurements of one kind, each with the name of its run."""
Layouts = Callable[[RunDocument, Measurement], Points]

MOMENTS = ("before", "adapted", "after")
WORDS = {
    "mdl": "Minimum description length of the labels in nats, given what is at a place (± standard deviation "
    "over seeds): less is better.",
    "probe": "Accuracy in % of a linear classifier of what is at a place.",
    "discrepancy": "Between each client and the others, mean over clients: less is nearer together. Each "
    "client's own model represents its samples, so that the models of the two sides differ.",
    "discrepancy-shared": "Between each client and the others, mean over clients: less is nearer together. "
    "The client's model represents both sides, as in the paper's corollaries.",
}
DISCREPANCIES = ("discrepancy", "discrepancy-shared")
"""Both readings: each client through its own model, or both sides through one client's."""
PER_ROUND = {
    "drift": "distance of a client's mean z_g from the others', in spreads",
    "probe": "accuracy of a linear probe on z_g",
}


def measured_tables(documents: Sequence[RunDocument], what: Container[str] = WORDS) -> list[RenderableType]:
    """One for each kind of measure that has numbers; quick ones apart, and marked."""
    there = [
        (kind, found) for kind, found in kinds(documents, labels(documents)) if found[0][1]["what"] in WORDS
    ]
    return [_table(kind, found) for kind, found in there if found[0][1]["what"] in what]


def draw(folder: Path, documents: Sequence[RunDocument], layouts: Layouts) -> list[Path]:
    """Pictures of all that was measured; `layouts` finds the points that t-SNE has laid out."""
    paths = []
    by_name = dict(zip(labels(documents), documents, strict=True))
    for kind, found in kinds(documents, labels(documents)):
        path, what = folder / f"{kind}.png", found[0][1]["what"]
        title = _title(documents, found)
        if what == "mdl":
            series: dict[str, dict[str, tuple[float, float]]] = {}
            for run, one in found:
                value, std = one["overall"]["value"], one["overall"].get("std")
                series.setdefault(column(run, one), {})[one["place"]] = value or 0.0, std or 0.0
            measured.mdl(path, series, title=title, quick=found[0][1]["quick"])
        elif what in DISCREPANCIES:
            rows = {f"{column(run, one)}, {one['place']}": one for run, one in found if first(one, found)}
            measured.discrepancies(path, {n: discrepancy(one) for n, one in rows.items()}, title=title)
        elif what == "tsne":
            panels: dict[str, Points] = {}
            for run, one in found:
                points = layouts(by_name[run], one)
                if not any(np.array_equal(points.x, other.x) for other in panels.values()):  # z without PRBM
                    panels[f"{column(run, one)}, {one['place']}"] = points
            embedding.tsne(path, panels, title)
        else:
            continue
        paths.append(path)
    return paths


def draw_rounds(folder: Path, documents: Sequence[RunDocument]) -> list[Path]:
    """Pooled measures over rounds, where runs have any."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run, document in zip(labels(documents), documents, strict=True):
        for entry in document["rounds"]:
            for moment in MOMENTS:
                for name, read in entry["measures"].get(moment, {}).items():
                    if name in PER_ROUND:
                        curves = panels.setdefault(PER_ROUND[name], {})
                        point = entry["round"], read["weighted"]
                        curves.setdefault(f"{run}, {moment}", []).append(point)
    if not panels:
        return []
    measured.over_rounds(path := folder / "representations.png", panels)
    return [path]


def kinds(documents: Sequence[RunDocument], names: Sequence[str]) -> Iterator[tuple[str, Found]]:
    """Measurements of the same kind together, in the order in which they were first asked for. Those of an
    older feddbe that lack Fisher's F1 are left out."""
    kinds: dict[str, Found] = {}
    for run, document in zip(names, documents, strict=True):
        for one in document["measured"]:
            if one["what"] in DISCREPANCIES and not one["overall"].keys() >= set(Discrepancy.MEASURES):
                continue
            name = f"{one['what']}{'-clients' * one['per_client']}{'-quick' * one['quick']}"
            kinds.setdefault(name, []).append((run, one))
    yield from kinds.items()


def first(one: Measurement, found: Found) -> bool:
    """Not the same numbers as an earlier one's, as at z without PRBM."""
    earlier = [other for _, other in found]
    return not any(one["clients"] == other["clients"] for other in earlier[: earlier.index(one)])


def column(run: str, one: Measurement) -> str:
    return f"{run}, {one['moment']} @{one['round']}"


def _title(documents: Sequence[RunDocument], found: Found) -> str:
    data = dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents)
    return f"{', '.join(data)}: {samples(found)}"


def samples(found: Found) -> str:
    counts = " or ".join(map(str, sorted({one["samples"] for _, one in found})))
    whose = "of each client alone" if found[0][1]["per_client"] else "of all clients"
    return f"{counts} test samples {whose}"


def discrepancy(one: Measurement) -> Discrepancy:
    def there(read: Mapping[str, float | None]) -> dict[str, float]:
        return {name: float("inf") if value is None else value for name, value in read.items()}

    return as_discrepancy({int(client): there(read) for client, read in one["clients"].items()})


def _table(kind: str, found: Found) -> RenderableType:
    first = found[0][1]
    readings = Discrepancy.MEASURES if first["what"] in DISCREPANCIES else ("value",)
    columns = list(dict.fromkeys((run, one["moment"], one["round"]) for run, one in found))
    cells = {
        (one["place"], reading, (run, one["moment"], one["round"])): _cell(one, reading)
        for run, one in found
        for reading in readings
    }
    table = plain_table(gap=2)
    table.title, table.title_justify, table.title_style = kind, "left", "bold"
    table.add_column("place", overflow="fold")
    for run, moment, round in columns:
        table.add_column(f"{run}\n{moment} @{round}", justify="right", overflow="fold")
    for place in dict.fromkeys(one["place"] for _, one in found):
        for reading in readings:
            name = place if reading == "value" else f"{place} {reading}"
            table.add_row(name, *(cells.get((place, reading, column), "-") for column in columns))
    quick = " QUICK: fewer sizes, seeds and steps than the full measure." if first["quick"] else ""
    words = f"{WORDS[first['what']]} {samples(found).capitalize()}; before and after local training, @ round."
    return Group(table, caption(words + quick))


def _cell(one: Measurement, reading: str) -> str:
    value, std = one["overall"].get(reading), one["overall"].get("std")
    if value is None:
        return "-"
    if one["what"] == "probe":
        return percent(value)
    if one["what"] == "mdl":
        return f"{value:.0f}" if std is None else f"{value:.0f} ± {std:.0f}"
    return f"{value:.3g}"
