"""Experiments that were done several times, with other seeds: what they come to, and which differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from feddbe.results.document import Accuracy, Entry, RunDocument, labels
from feddbe.results.extent import Extent, extent
from feddbe.results.fairness import HOLDINGS
from feddbe.results.groups import counted, experiments, strip_options
from feddbe.results.statistics import Interval, interval, paired
from feddbe.results.verdicts import Comparison, Verdict, judge

__all__ = ["Repeats", "chosen", "repeats", "unequal"]

Trial = str
"""What two runs share that may be compared: data, who holds which rows, what is held out, seed and length."""
_SAME_DATA = (*HOLDINGS, "validation", "newcomers")
Reading = Callable[[RunDocument], Accuracy | None]


@dataclass(frozen=True)
class Repeats:
    """One experiment over its seeds. Numbers are in percent, and of the runs that are counted."""

    name: str
    """Its method, and the settings that tell it from others of the same method."""
    runs: tuple[RunDocument, ...]
    counted: tuple[RunDocument, ...]
    """Those that did not diverge and are as long as the longest; see `groups.counted`."""
    best: Interval | None
    """Test accuracy in the best round of each run, weighted by samples."""
    last: Interval | None
    mean: Interval | None
    """In the best round, the mean of clients."""
    worst_tenth: Interval | None
    """In the best round, of the worst tenth of clients."""
    validation: Interval | None
    """What the best round was chosen by, if data was held out."""
    difference: Interval | None
    """Of `best` to that of the first experiment, over equal trials; None: it is the first, or has none."""
    verdict: Verdict

    @property
    def diverged(self) -> int:
        """How many runs did."""
        return sum(run["diverged"] is not None for run in self.runs)

    @property
    def seeds(self) -> str:
        """How many seeds are counted, and of how many if some are not."""
        count, total = len(self.counted), len(self.runs)
        return str(total) if count == total else f"{count} of {total}"


def repeats(
    documents: Sequence[RunDocument], first: int = 0, compared: Collection[int] | None = None
) -> list[Repeats]:
    """Return the experiments among the runs, in order of appearance.

    Args:
        documents: the runs.
        first: the number of the experiment that others are compared with.
        compared: the numbers of those that are compared with it; None: all.
    """
    groups = experiments(documents)
    means = [counted(group) for group in groups]
    comparisons = [
        _compare(runs, means[first])
        if index != first and (compared is None or index in compared)
        else Comparison(None, obstacle="baseline" if index == first else "not compared")
        for index, runs in enumerate(means)
    ]
    names = labels([group[0] for group in groups], seed=False)
    return [
        Repeats(
            name=name,
            runs=tuple(group),
            counted=tuple(runs),
            best=_interval(runs, _best),
            last=_interval(runs, _last),
            mean=_interval(runs, _best, "mean"),
            worst_tenth=_interval(runs, _best, "worst_tenth"),
            validation=_interval(runs, _validation),
            difference=comparison.difference,
            verdict=verdict,
        )
        for name, group, runs, comparison, verdict in zip(
            names, groups, means, comparisons, judge(comparisons), strict=True
        )
    ]


def chosen(found: Sequence[Repeats]) -> list[int]:
    """Of each method the experiment with the highest mean on validation data, of equal ones the first; none
    of a method whose runs all diverged, or are not equally long. (Test data have no part in it.)"""
    return sorted(
        max(candidates, key=lambda index: _validation_mean(found[index]))
        for candidates in _candidates(found).values()
        if len(_extents(found, candidates)) == 1
    )


def unequal(found: Sequence[Repeats]) -> list[str]:
    """Return the methods among whose experiments nothing is chosen, because they are not equally long."""
    return [method for method, those in _candidates(found).items() if len(_extents(found, those)) > 1]


def _candidates(found: Sequence[Repeats]) -> dict[str, list[int]]:
    """Return the numbers of each method's experiments that have a validation accuracy."""
    candidates: dict[str, list[int]] = {}
    for index, experiment in enumerate(found):
        if experiment.validation is not None:
            candidates.setdefault(strip_options(experiment.runs[0]["method"]), []).append(index)
    return candidates


def _extents(found: Sequence[Repeats], candidates: Sequence[int]) -> set[Extent]:
    return {extent(found[index].counted[0]) for index in candidates}


def _validation_mean(experiment: Repeats) -> float:
    assert experiment.validation is not None
    return experiment.validation.mean


def _compare(runs: Sequence[RunDocument], base: Sequence[RunDocument]) -> Comparison:
    """Compare the best rounds of two experiments, trial by trial."""
    if not runs or not base:
        return Comparison(None, obstacle="no run to compare")
    keys: tuple[str, ...] = ()
    for more, obstacle in ((_SAME_DATA, "other data"), (("seed",), "no seed in common")):
        keys = (*keys, *more)
        if not {_settings(run, keys) for run in runs} & {_settings(run, keys) for run in base}:
            return Comparison(None, obstacle=obstacle)
    difference = paired(_by_trial(runs, _best), _by_trial(base, _best))
    chosen_on_test = any(_validation(run) is None for run in (*runs, *base))
    return Comparison(difference, chosen_on_test, "" if difference else "unequal rounds")


def _settings(run: RunDocument, keys: Sequence[str]) -> str:
    return json.dumps([run["config"].get(key) for key in keys])


def _interval(runs: Sequence[RunDocument], read: Reading, reading: str = "weighted") -> Interval | None:
    values = _by_trial(runs, read, reading)
    return interval(list(values.values())) if values else None


def _by_trial(runs: Sequence[RunDocument], read: Reading, reading: str = "weighted") -> Mapping[Trial, float]:
    """Return a number of each run in percent, by its trial."""
    values: dict[Trial, float] = {}
    for run in runs:
        accuracy = read(run)
        if accuracy is not None:
            trial = f"{_settings(run, (*_SAME_DATA, 'seed'))} {extent(run)}"
            values[trial] = 100 * float({**accuracy}[reading])  # type: ignore[arg-type]
    return values


def _best(document: RunDocument) -> Accuracy | None:
    return _of(document["best"])


def _last(document: RunDocument) -> Accuracy | None:
    return _of(document["last"])


def _validation(document: RunDocument) -> Accuracy | None:
    return document["best"]["validation"] if document["best"] else None


def _of(entry: Entry | None) -> Accuracy | None:
    return entry["accuracy"] if entry else None
