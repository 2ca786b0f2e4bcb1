"""Experiments that were done several times, with other seeds: what they come to, and which differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from feddbe.options.config import pick_identity
from feddbe.results.document import Accuracy, Entry, RunDocument, labels
from feddbe.results.groups import strip_options
from feddbe.results.statistics import Interval, interval, paired

__all__ = ["Repeats", "chosen", "repeats"]

Trial = str
"""What two runs share that may be compared: seed, data, who holds which rows, and what is held out."""
_TRIAL = ("seed", "data", "partition", "partition_seed", "clients", "split", "validation", "newcomers")
Reading = Callable[[RunDocument], Accuracy | None]


@dataclass(frozen=True)
class Repeats:
    """One experiment over its seeds. Numbers are in percent, and of the runs that did not diverge."""

    name: str
    """Its method, and the settings that tell it from others of the same method."""
    runs: tuple[RunDocument, ...]
    best: Interval | None
    """Test accuracy in the best round of each run, weighted by samples."""
    last: Interval | None
    worst_tenth: Interval | None
    """In the best round, of the worst tenth of clients."""
    validation: Interval | None
    """What the best round was chosen by, if data was held out."""
    difference: Interval | None
    """Of `best` to that of the first experiment, over equal trials; None: it is the first, or has none."""

    @property
    def diverged(self) -> int:
        """How many runs did."""
        return sum(run["diverged"] is not None for run in self.runs)

    @property
    def verdict(self) -> str:
        """Only where the interval of the difference excludes zero."""
        found = self.difference
        return "" if found is None else "better" if found.improves else "worse" if found.worsens else ""


def repeats(documents: Sequence[RunDocument], first: int = 0) -> list[Repeats]:
    """The experiments among the runs, in order of appearance; each is compared with the one that is `first`
    (by its number here)."""
    groups: dict[str, list[RunDocument]] = {}
    for document in documents:
        told = {k: v for k, v in pick_identity(document["config"], seed=False).items() if v is not None}
        key = json.dumps([document["method"], told], sort_keys=True, default=str)
        groups.setdefault(key, []).append(document)
    found = list(groups.values())
    names = labels([group[0] for group in found], seed=False)
    against = _trials(found[first], _best) if found else {}
    return [
        Repeats(
            name,
            tuple(group),
            _interval(group, _best),
            _interval(group, _last),
            _interval(group, _best, "worst_tenth"),
            _interval(group, _validation),
            None if index == first else paired(_trials(group, _best), against),
        )
        for index, (group, name) in enumerate(zip(found, names, strict=True))
    ]


def chosen(found: Sequence[Repeats]) -> list[int]:
    """Of each method the experiment with the highest mean on validation data, of equal ones the first; none
    of a method whose runs all diverged. (What test data say has no part in it.)"""
    best: dict[str, int] = {}
    for index, one in enumerate(found):
        method = strip_options(one.runs[0]["method"])
        there = best.get(method)
        mine, other = one.validation, None if there is None else found[there].validation
        if mine is not None and (other is None or mine.mean > other.mean):
            best[method] = index
    return sorted(best.values())


def _interval(group: Sequence[RunDocument], read: Reading, reading: str = "weighted") -> Interval | None:
    values = _trials(group, read, reading)
    return interval(list(values.values())) if values else None


def _trials(group: Sequence[RunDocument], read: Reading, reading: str = "weighted") -> Mapping[Trial, float]:
    found: dict[Trial, float] = {}
    for document in group:
        accuracy = None if document["diverged"] else read(document)
        if accuracy is not None:
            trial = json.dumps([document["config"].get(key) for key in _TRIAL])
            found[trial] = 100 * float({**accuracy}[reading])  # type: ignore[arg-type]
    return found


def _best(document: RunDocument) -> Accuracy | None:
    return _of(document["best"])


def _last(document: RunDocument) -> Accuracy | None:
    return _of(document["last"])


def _validation(document: RunDocument) -> Accuracy | None:
    return document["best"]["validation"] if document["best"] else None


def _of(entry: Entry | None) -> Accuracy | None:
    return entry["accuracy"] if entry else None
