"""Curves: of single runs, and of seeds as their mean with a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from feddbe.page.blocks import Block, figure, number, thinned
from feddbe.page.sources import Sources
from feddbe.results.document import RunDocument
from feddbe.results.groups import Points, groups
from feddbe.results.statistics import interval

__all__ = ["BAND", "Choice", "choices", "curves", "series", "told"]

_MOST = 400
"""Rounds that a curve is drawn through: a screen has not many more dots across."""

BAND = "Band: 95 % interval of the mean over seeds (of two seeds: from the lower to the higher)."


class Choice(NamedTuple):
    """What a reader may choose to see as a curve."""

    name: str
    points: Points
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
