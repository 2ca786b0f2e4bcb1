"""Runs that are one experiment, done again with other seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from feddbe.config.options import identifying_settings
from feddbe.results.document import (
    Accuracy,
    Extent,
    RoundResult,
    RunDocument,
    accuracy_curve,
    last_round,
    run_extent,
    run_labels,
)
from feddbe.results.statistics import (
    Comparison,
    Interval,
    Reason,
    Verdict,
    judge,
    mean_interval,
    paired_differences,
)

Points = Callable[[RunDocument], list[tuple[int, float]]]
"""A run's curve in percent."""


def group_runs(documents: Sequence[RunDocument], points: Points = accuracy_curve) -> list[list[RunDocument]]:
    """Runs of one experiment that were evaluated in the same rounds, in order of appearance.

    A run that stopped early stays alone: a mean over ever fewer runs would jump where one ends.
    """
    found: dict[str, list[RunDocument]] = {}
    for document in documents:
        if rounds := [t for t, _ in points(document)]:
            told = identifying_settings(document["config"], seed=False).items()
            rest = {key: value for key, value in told if value is not None}  # an older run may not have it
            key = json.dumps([document["method"], rest, rounds], sort_keys=True, default=str)
            while any(d["config"].get("seed") == document["config"].get("seed") for d in found.get(key, ())):
                key += "'"  # a copy of a run is not another seed
            found.setdefault(key, []).append(document)
    return list(found.values())


def group_experiments(documents: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return runs that differ in their seed only, however far each of them is, in order of appearance."""
    return group_runs(documents, lambda document: [(0, 0.0)])


def counted_runs(experiment: Sequence[RunDocument]) -> list[RunDocument]:
    """Return the runs that an experiment's means are over: none that diverged, and only the longest.

    A run that diverged, or is shorter than others, has another best round than it would have at their length.
    """
    usable = [run for run in experiment if run["best"] and not run["diverged"]]
    longest = max(usable, key=last_round, default=None)
    return [run for run in usable if longest and run_extent(run) == run_extent(longest)]


def group_names(groups: Sequence[Sequence[RunDocument]]) -> list[str]:
    """A name for each group; seeds are counted, or named where that alone tells them apart."""
    plain = run_labels([group[0] for group in groups], seed=False)
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


Trial = str
"""What two runs share that may be compared: data, who holds which rows, what is held out, seed and length."""
PARTITION_OPTIONS = ("data", "partition", "partition_seed", "clients", "split", "shift")
"""Settings that say which test samples a client has."""
_SAME_DATA = (*PARTITION_OPTIONS, "validation", "new_clients")
Reading = Callable[[RunDocument], Accuracy | None]


@dataclass(frozen=True)
class SeedGroup:
    """One experiment over its seeds. Numbers are in percent, and of the runs that are counted."""

    name: str
    """Its method, and the settings that tell it from others of the same method."""
    runs: tuple[RunDocument, ...]
    counted_runs: tuple[RunDocument, ...]
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
        count, total = len(self.counted_runs), len(self.runs)
        return str(total) if count == total else f"{count} of {total}"


def group_seeds(
    documents: Sequence[RunDocument], first: int = 0, compared: Collection[int] | None = None
) -> list[SeedGroup]:
    """Return the experiments among the runs, in order of appearance.

    Args:
        documents: the runs.
        first: the number of the experiment that others are compared with.
        compared: the numbers of those that are compared with it; None: all.
    """
    groups = group_experiments(documents)
    means = [counted_runs(group) for group in groups]
    comparisons = [
        _compare(runs, means[first])
        if index != first and (compared is None or index in compared)
        else Comparison(None, obstacle=Reason.BASELINE if index == first else Reason.NOT_COMPARED)
        for index, runs in enumerate(means)
    ]
    names = run_labels([group[0] for group in groups], seed=False)
    return [
        SeedGroup(
            name=name,
            runs=tuple(group),
            counted_runs=tuple(runs),
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


def best_on_validation(found: Sequence[SeedGroup]) -> list[int]:
    """Of each method the experiment with the highest mean on validation data, of equal ones the first; none
    of a method whose runs all diverged, or are not equally long. (Test data have no part in it.)"""
    return sorted(
        max(candidates, key=lambda index: _validation_mean(found[index]))
        for candidates in _candidates(found).values()
        if len(_extents(found, candidates)) == 1
    )


def unequal_rounds(found: Sequence[SeedGroup]) -> list[str]:
    """Return the methods among whose experiments nothing is chosen, because they are not equally long."""
    return [method for method, those in _candidates(found).items() if len(_extents(found, those)) > 1]


def _candidates(found: Sequence[SeedGroup]) -> dict[str, list[int]]:
    """Return the numbers of each method's experiments that have a validation accuracy."""
    candidates: dict[str, list[int]] = {}
    for index, experiment in enumerate(found):
        if experiment.validation is not None:
            candidates.setdefault(strip_options(experiment.runs[0]["method"]), []).append(index)
    return candidates


def _extents(found: Sequence[SeedGroup], candidates: Sequence[int]) -> set[Extent]:
    return {run_extent(found[index].counted_runs[0]) for index in candidates}


def _validation_mean(experiment: SeedGroup) -> float:
    assert experiment.validation is not None
    return experiment.validation.mean


def _compare(runs: Sequence[RunDocument], base: Sequence[RunDocument]) -> Comparison:
    """Compare the best rounds of two experiments, trial by trial."""
    if not runs or not base:
        return Comparison(None, obstacle=Reason.NO_RUN)
    keys: tuple[str, ...] = ()
    for more, obstacle in ((_SAME_DATA, Reason.OTHER_DATA), (("seed",), Reason.OTHER_SEEDS)):
        keys = (*keys, *more)
        if not {_settings(run, keys) for run in runs} & {_settings(run, keys) for run in base}:
            return Comparison(None, obstacle=obstacle)
    difference = paired_differences(_by_trial(runs, _best), _by_trial(base, _best))
    chosen_on_test = any(_validation(run) is None for run in (*runs, *base))
    return Comparison(difference, chosen_on_test, None if difference else Reason.UNEQUAL_ROUNDS)


def _settings(run: RunDocument, keys: Sequence[str]) -> str:
    return json.dumps([run["config"].get(key) for key in keys])


def _interval(runs: Sequence[RunDocument], read: Reading, reading: str = "weighted") -> Interval | None:
    values = _by_trial(runs, read, reading)
    return mean_interval(list(values.values())) if values else None


def _by_trial(runs: Sequence[RunDocument], read: Reading, reading: str = "weighted") -> Mapping[Trial, float]:
    """Return a number of each run in percent, by its trial."""
    values: dict[Trial, float] = {}
    for run in runs:
        accuracy = read(run)
        if accuracy is not None:
            trial = f"{_settings(run, (*_SAME_DATA, 'seed'))} {run_extent(run)}"
            values[trial] = 100 * float({**accuracy}[reading])  # type: ignore[arg-type]
    return values


def _best(document: RunDocument) -> Accuracy | None:
    return _of(document["best"])


def _last(document: RunDocument) -> Accuracy | None:
    return _of(document["last"])


def _validation(document: RunDocument) -> Accuracy | None:
    return document["best"]["validation"] if document["best"] else None


def _of(entry: RoundResult | None) -> Accuracy | None:
    return entry["accuracy"] if entry else None
