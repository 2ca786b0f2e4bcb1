"""Learning curves as lines to draw, in a terminal or in a picture: a line per experiment, over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from feddbe.results.document import RunDocument, ending, labels, moment, points
from feddbe.results.seeds import Points, groups, names


@dataclass(frozen=True)
class Line:
    """The mean of runs that differ in their seeds only, in percent; `low` and `high` are the lowest and the
    highest run in each round. What ended at once has no points."""

    name: str
    rounds: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    runs: int = 1
    moment: str = ""
    """When it was measured, in words."""
    ending: str = ""
    """`diverged in round 21`, where the line ends before the others."""

    chosen: tuple[int, float] | None = None
    """The point that was chosen on validation data, of one run."""

    @property
    def best(self) -> tuple[int, float]:
        """What was chosen, else its highest point, of equal ones the first."""
        return self.chosen or max(zip(self.rounds, self.mean, strict=True), key=lambda point: point[1])


def lines(documents: Sequence[RunDocument], points: Points = points) -> list[Line]:
    """In the order of the runs."""
    found = []
    together = groups(documents, points)
    for group, name in zip(together, names(together), strict=True):
        values = [[percent for _, percent in points(document)] for document in group]
        whens = dict.fromkeys(moment(e["when"]) for d in group for e in d["rounds"] if e["accuracy"])
        found.append(
            Line(
                name,
                tuple(round for round, _ in points(group[0])),
                tuple(map(mean, zip(*values, strict=True))),
                tuple(map(min, zip(*values, strict=True))),
                tuple(map(max, zip(*values, strict=True))),
                len(group),
                " / ".join(whens),
                " or ".join(dict.fromkeys(filter(None, map(ending, group)))),
                _chosen(group[0], points(group[0])) if len(group) == 1 else None,
            )
        )
    never = [document for document in documents if ending(document) and not points(document)]
    return found + [Line(name, ending=ending(d)) for d, name in zip(never, labels(never), strict=True)]


def _chosen(document: RunDocument, line: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """Where the best entry lies on the line, if it was chosen by more than the line."""
    best = document["best"]
    if best is None or not best["validation"] or not best["accuracy"]:
        return None
    point = best["round"], 100 * best["accuracy"]["weighted"]
    return point if point in line else None
