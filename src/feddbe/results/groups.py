"""Runs that are one experiment, done again with other seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from feddbe.options.config import pick_identity
from feddbe.results.document import RunDocument, labels, points
from feddbe.results.extent import extent, last_round

__all__ = ["Points", "counted", "experiments", "groups", "names", "strip_options"]

Points = Callable[[RunDocument], list[tuple[int, float]]]
"""A run's curve in percent."""


def groups(documents: Sequence[RunDocument], points: Points = points) -> list[list[RunDocument]]:
    """Runs of one experiment that were evaluated in the same rounds, in order of appearance.

    A run that stopped early stays alone: a mean over ever fewer runs would jump where one ends.
    """
    found: dict[str, list[RunDocument]] = {}
    for document in documents:
        if rounds := [t for t, _ in points(document)]:
            told = pick_identity(document["config"], seed=False).items()
            rest = {key: value for key, value in told if value is not None}  # an older run may not have it
            key = json.dumps([document["method"], rest, rounds], sort_keys=True, default=str)
            while any(d["config"].get("seed") == document["config"].get("seed") for d in found.get(key, ())):
                key += "'"  # a copy of a run is not another seed
            found.setdefault(key, []).append(document)
    return list(found.values())


def experiments(documents: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return runs that differ in their seed only, however far each of them is, in order of appearance."""
    return groups(documents, lambda document: [(0, 0.0)])


def counted(experiment: Sequence[RunDocument]) -> list[RunDocument]:
    """Return the runs that an experiment's means are over: none that diverged, and only the longest.

    A run that diverged, or is shorter than others, has another best round than it would have at their length.
    """
    usable = [run for run in experiment if run["best"] and not run["diverged"]]
    longest = max(usable, key=last_round, default=None)
    return [run for run in usable if longest and extent(run) == extent(longest)]


def names(groups: Sequence[Sequence[RunDocument]]) -> list[str]:
    """A name for each group; seeds are counted, or named where that alone tells them apart."""
    plain = labels([group[0] for group in groups], seed=False)
    return [
        f"{name} ({len(group)} seeds)"
        if len(group) > 1
        else f"{name}, seed {group[0]['config'].get('seed', '?')}"
        if plain.count(name) > 1
        else name
        for group, name in zip(groups, plain, strict=True)
    ]


def strip_options(method: str) -> str:
    """Return a method's name without options: `fedprox(mu=1)+dbe(kappa=5)` is `fedprox+dbe`."""
    return re.sub(r"\([^()]*\)", "", method)
