"""What a page is made from: runs, read from their files, with the names and colours that they have on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from feddbe.results.document import RunDocument, labels
from feddbe.results.seeds import Points, groups, names
from feddbe.results.statistics import interval
from feddbe.runs import summary
from feddbe.runs.store import Store
from feddbe.runs.summary import accuracies as summary_accuracies

_ABOUT = ("begun", "versions", "machine", "git_commit")


@dataclass(frozen=True)
class Source:
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
class Sources:
    """The runs of a page."""

    runs: tuple[Source, ...]
    names: tuple[str, ...]
    """Of each, told apart by its folder where the settings are the same."""
    colours: dict[str, int]
    """By a run's folder: runs of one experiment that are drawn as one line have the same."""

    @classmethod
    def of(cls, runs: Sequence[Source]) -> Sources:
        documents = [run.document for run in runs]
        drawn = groups(documents) + [[d] for d in documents if not any(e["accuracy"] for e in d["rounds"])]
        colours = {d["folder"]: index for index, group in enumerate(drawn) for d in group}
        return cls(tuple(runs), tuple(_unique(labels(documents), documents)), colours)

    @property
    def documents(self) -> list[RunDocument]:
        return [run.document for run in self.runs]

    def name(self, document: RunDocument) -> str:
        return self.names[[d["folder"] for d in self.documents].index(document["folder"])]

    def called(self, found: Sequence[Sequence[RunDocument]]) -> list[str]:
        """A name for each group, told apart as those of runs are."""
        return _unique(names(found), [group[0] for group in found])


def _unique(plain: Sequence[str], documents: Sequence[RunDocument]) -> list[str]:
    return [
        f"{name} [{document['folder']}]" if plain.count(name) > 1 else name
        for name, document in zip(plain, documents, strict=True)
    ]


def read(folders: Iterable[Path]) -> Sources:
    """All of these runs, each as it is at one moment, which may be while it goes on."""
    return Sources.of([_read(folder) for folder in dict.fromkeys(folders)])


def _read(folder: Path) -> Source:
    store = Store.open(folder)
    try:
        store.hold()
        about = {key: store.meta(key) for key in _ABOUT}
        return Source(summary.document(store, hashes=False), store.meta("labels"), about)
    finally:
        store.close()


Block = dict[str, Any]


def section(id: str, title: str, blocks: Sequence[Block], commands: Sequence[Block] = ()) -> list[Block]:
    """A part of the page, or nothing where there is nothing to show; `commands` print the same numbers."""
    if not blocks:
        return []
    return [{"id": id, "title": title, "blocks": list(blocks), "commands": list(commands)}]


def command(what: str, line: str) -> Block:
    """A line for the shell, and what it gives."""
    return {"what": what, "line": line}


def table(
    id: str,
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    filter: bool = False,
    heading: str = "",
) -> Block:
    """Rows of cells, the first of which names the row. It can be sorted, and with `filter` searched."""
    return {
        "kind": "table",
        "id": id,
        "caption": caption,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "filter": filter,
        "heading": heading,
    }


def facts(id: str, caption: str, rows: Sequence[Sequence[str]]) -> Block:
    """Names and values that nobody sorts."""
    return {"kind": "facts", "id": id, "caption": caption, "rows": [list(row) for row in rows]}


def cell(text: str, value: float | None) -> dict[str, Any]:
    """A number as it is shown, and as it is sorted by."""
    return {"text": text, "value": number(value)}


def figure(kind: str, id: str, caption: str, text: str, **content: Any) -> Block:
    """Of a kind that the page can draw: curves, heat, bubbles, bars, dots, scatter."""
    return {"kind": kind, "id": id, "caption": caption, "text": text, **content}


def number(value: float | None, digits: int = 4) -> float | None:
    """As it is written on the page; JSON has nothing for what is not finite."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def thinned(items: Sequence[int], most: int, keep: Sequence[int] = ()) -> tuple[list[int], int]:
    """Every so many of ordered items, with the last and those to `keep`; and every how many."""
    step = max(1, math.ceil(len(items) / most))
    chosen = {*items[::step], *items[-1:], *(item for item in keep if item in set(items))}
    return sorted(chosen), step


def some(items: Sequence[int], most: int) -> list[int]:
    """At most so many of ordered items, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


_MOST = 400
"""Rounds that a curve is drawn through: a screen has not many more dots across."""

BAND = "Band: 95 % interval of the mean over seeds (of two seeds: from the lower to the higher)."


class Choice(NamedTuple):
    """What a reader may choose to see as a curve."""

    name: str
    points: Points
    unit: Literal["%", ""] = ""
    """% for values between 0 and 100, which are written with two digits."""
    floor: bool = False
    """There is each client's majority class to compare with."""
    best: bool = False
    """It is what the best round is chosen by, which is marked."""


def curves(id: str, sources: Sources, asked: Sequence[Choice], x: str, caption: str) -> list[Block]:
    """One figure with all of these that any run has; none if there is none."""
    found = choices(sources, asked)
    if not found:
        return []
    thin = max(one["step"] for one in found)
    several = any(line["runs"] > 1 for one in found for line in one["series"])
    words = [
        caption,
        BAND * several,
        f"Every {_ordinal(thin)} {x} is drawn, with the best and the last." * (thin > 1),
    ]
    text = "; ".join(map(told, found[0]["series"]))
    return [figure("curves", id, " ".join(filter(None, words)), text, x=x, choices=found)]


def choices(sources: Sources, asked: Sequence[Choice]) -> list[Block]:
    """Of each of these the lines of all runs that have it."""
    return [block for choice in asked if (block := _choice(sources, choice))]


def _choice(sources: Sources, choice: Choice) -> Block | None:
    found = groups(sources.documents, choice.points)
    if not found:
        return None
    every = sorted({t for group in found for t, _ in choice.points(group[0])})
    best = [d["best"]["round"] for group in found for d in group if d["best"]]
    rounds, step = thinned(every, _MOST, best)
    floors = sorted({round(100 * d["floor"], 2) for group in found for d in group}) if choice.floor else []
    return {
        "name": choice.name,
        "unit": choice.unit,
        "x": rounds,
        "step": step,
        "floors": floors,
        "series": [
            _series(sources, group, name, rounds, choice)
            for group, name in zip(found, sources.called(found), strict=True)
        ],
    }


def _series(
    sources: Sources, group: Sequence[RunDocument], name: str, rounds: Sequence[int], choice: Choice
) -> Block:
    """The line of one experiment at these rounds, nothing where it has no value."""
    curves = [dict(choice.points(document)) for document in group]
    colour = sources.colours[group[0]["folder"]]
    found = series(name, colour, [[curve.get(t) for t in rounds] for curve in curves])
    if choice.best:
        best = group[0]["best"]
        known = [index for index, mean in enumerate(found["y"]) if mean is not None]
        found["best"] = max(known, key=found["y"].__getitem__)
        if len(group) == 1 and best and best["round"] in rounds:  # by validation data it may be another
            found["best"] = rounds.index(best["round"])
    return found


def series(name: str, colour: int, runs: Sequence[Sequence[float | None]]) -> Block:
    """One line through the mean of runs of the same length, with a band if there are several."""
    values = [[value for value in at if value is not None] for at in zip(*runs, strict=True)]
    means = [sum(at) / len(at) if at else None for at in values]
    spans = [_span(at) if at else (None, None) for at in values] if len(runs) > 1 else []
    return {
        "name": name,
        "colour": colour,
        "runs": len(runs),
        "y": [number(mean) for mean in means],
        "low": [number(low) for low, _ in spans] if spans else None,
        "high": [number(high) for _, high in spans] if spans else None,
        "best": None,
    }


def _span(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 3:  # Student's t of two would be 13 standard errors
        return min(values), max(values)
    found = interval(values)
    return found.mean - found.half, found.mean + found.half


def told(series: Block) -> str:
    known = [value for value in series["y"] if value is not None]
    first, last = f"{known[0]:.4g}", f"{known[-1]:.4g}"
    return f"{series['name']} goes from {first} to {last}"


def _ordinal(n: int) -> str:
    ending = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
