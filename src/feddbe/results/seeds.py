"""Experiments over seeds: runs grouped by their settings, their means, and comparisons with a baseline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from feddbe.config.options import identifying_settings
from feddbe.results.document import (
    Accuracy,
    Extent,
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
    judge_comparisons,
    mean_interval,
    paired_differences,
)

CurveReader = Callable[[RunDocument], list[tuple[int, float]]]
"""A function that returns a run's curve as (x, value) pairs."""


def group_runs(
    documents: Sequence[RunDocument], read_curve: CurveReader = accuracy_curve
) -> list[list[RunDocument]]:
    """Return runs of one experiment that were evaluated in the same rounds, in order of appearance.

    A run that stopped early is its own group, because a mean over fewer runs would jump where a run ends.
    """
    groups: dict[str, list[RunDocument]] = {}
    for document in documents:
        rounds = [round_ for round_, _ in read_curve(document)]
        if not rounds:
            continue
        settings = identifying_settings(document["config"], seed=False)
        # older runs do not have all settings
        settings = {name: value for name, value in settings.items() if value is not None}
        key = json.dumps([document["method"], settings, rounds], sort_keys=True, default=str)
        seed = document["config"].get("seed")
        while any(run["config"].get("seed") == seed for run in groups.get(key, ())):
            key += "'"  # a copy of a run is not another seed
        groups.setdefault(key, []).append(document)
    return list(groups.values())


def group_experiments(documents: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return runs that differ in their seed only, with any number of rounds, in order of appearance."""
    return group_runs(documents, lambda document: [(0, 0.0)])


def counted_runs(experiment: Sequence[RunDocument]) -> list[RunDocument]:
    """Return the runs that enter an experiment's means: the longest that did not diverge.

    The best round of a shorter run is not comparable with that of a longer one.
    """
    usable = [run for run in experiment if run["best"] and not run["diverged"]]
    longest = max(usable, key=last_round, default=None)
    return [run for run in usable if longest and run_extent(run) == run_extent(longest)]


def group_names(groups: Sequence[Sequence[RunDocument]]) -> list[str]:
    """Return a name for each group, with its number of seeds, or with its seed if names are equal."""
    labels = run_labels([group[0] for group in groups], seed=False)
    names = []
    for group, label in zip(groups, labels, strict=True):
        if len(group) > 1:
            names.append(f"{label} ({len(group)} seeds)")
        elif labels.count(label) > 1:
            names.append(f"{label}, seed {group[0]['config'].get('seed', '?')}")
        else:
            names.append(label)
    return names


def strip_options(method: str) -> str:
    """Return a method's name without options: `fedprox(mu=1)+dbe(kappa=5)` is `fedprox+dbe`."""
    return re.sub(r"\([^()]*\)", "", method)


Trial = str
"""Key of comparable runs: data, partition, held-out data, seed and length."""
PARTITION_OPTIONS = ("data", "partition", "partition_seed", "clients", "split", "shift")
"""Settings that determine the test samples of a client."""
_SAME_DATA = (*PARTITION_OPTIONS, "validation", "new_clients")
AccuracyReader = Callable[[RunDocument], Accuracy | None]


@dataclass(frozen=True)
class SeedGroup:
    """One experiment over its seeds. Values are in percent, over `counted_runs`."""

    name: str
    """The method, and the settings that distinguish experiments of this method."""
    runs: tuple[RunDocument, ...]
    counted_runs: tuple[RunDocument, ...]
    """Runs that did not diverge and are as long as the longest; see `counted_runs`."""
    best: Interval | None
    """Test accuracy in the best round of each run, weighted by samples."""
    last: Interval | None
    mean: Interval | None
    """Mean accuracy of clients in the best round."""
    worst_tenth: Interval | None
    """Mean accuracy of the worst tenth of clients in the best round."""
    validation: Interval | None
    """Validation accuracy that selected the best round, if data was held out."""
    difference: Interval | None
    """Difference of `best` to the baseline's over equal trials; None for the baseline or without trials."""
    verdict: Verdict

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(run["diverged"] is not None for run in self.runs)

    @property
    def seeds(self) -> str:
        """Number of counted seeds, as in `3` or `2 of 3`."""
        count, total = len(self.counted_runs), len(self.runs)
        return str(total) if count == total else f"{count} of {total}"


def group_seeds(
    documents: Sequence[RunDocument], baseline: int = 0, compared: Collection[int] | None = None
) -> list[SeedGroup]:
    """Return the experiments among the runs, in order of appearance.

    Args:
        documents: The runs.
        baseline: Index of the experiment that others are compared with.
        compared: Indices of the experiments to compare with it; None: all.
    """
    groups = group_experiments(documents)
    counted = [counted_runs(group) for group in groups]
    comparisons = []
    for index, runs in enumerate(counted):
        if index == baseline:
            comparison = Comparison(None, obstacle=Reason.BASELINE)
        elif compared is not None and index not in compared:
            comparison = Comparison(None, obstacle=Reason.NOT_COMPARED)
        else:
            comparison = _compare(runs, counted[baseline])
        comparisons.append(comparison)
    verdicts = judge_comparisons(comparisons)
    names = run_labels([group[0] for group in groups], seed=False)
    return [
        SeedGroup(
            name=name,
            runs=tuple(group),
            counted_runs=tuple(runs),
            best=_mean_interval(runs, _best_accuracy),
            last=_mean_interval(runs, _last_accuracy),
            mean=_mean_interval(runs, _best_accuracy, "mean"),
            worst_tenth=_mean_interval(runs, _best_accuracy, "worst_tenth"),
            validation=_mean_interval(runs, _validation_accuracy),
            difference=comparison.difference,
            verdict=verdict,
        )
        for name, group, runs, comparison, verdict in zip(
            names, groups, counted, comparisons, verdicts, strict=True
        )
    ]


def best_on_validation(groups: Sequence[SeedGroup]) -> list[int]:
    """Return the index of each method's experiment with the highest mean validation accuracy.

    Of equal ones it is the first. Methods are skipped if all runs diverged, or if experiments are not equally
    long. Test data is not used.
    """
    return sorted(
        max(candidates, key=lambda index: _validation_mean(groups[index]))
        for candidates in _candidates_by_method(groups).values()
        if len(_extents(groups, candidates)) == 1
    )


def methods_with_unequal_rounds(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the methods without a selected experiment, because their experiments are not equally long."""
    candidates = _candidates_by_method(groups)
    return [method for method, indices in candidates.items() if len(_extents(groups, indices)) > 1]


def _candidates_by_method(groups: Sequence[SeedGroup]) -> dict[str, list[int]]:
    """Return the indices of each method's experiments that have a validation accuracy."""
    candidates: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if group.validation is not None:
            candidates.setdefault(strip_options(group.runs[0]["method"]), []).append(index)
    return candidates


def _extents(groups: Sequence[SeedGroup], candidates: Sequence[int]) -> set[Extent]:
    return {run_extent(groups[index].counted_runs[0]) for index in candidates}


def _validation_mean(group: SeedGroup) -> float:
    assert group.validation is not None
    return group.validation.mean


def _compare(runs: Sequence[RunDocument], baseline: Sequence[RunDocument]) -> Comparison:
    """Compare the best rounds of two experiments, trial by trial."""
    if not runs or not baseline:
        return Comparison(None, obstacle=Reason.NO_RUN)
    if not _have_common_settings(runs, baseline, _SAME_DATA):
        return Comparison(None, obstacle=Reason.OTHER_DATA)
    if not _have_common_settings(runs, baseline, (*_SAME_DATA, "seed")):
        return Comparison(None, obstacle=Reason.OTHER_SEEDS)
    difference = paired_differences(_by_trial(runs, _best_accuracy), _by_trial(baseline, _best_accuracy))
    chosen_on_test = any(_validation_accuracy(run) is None for run in (*runs, *baseline))
    return Comparison(difference, chosen_on_test, None if difference else Reason.UNEQUAL_ROUNDS)


def _have_common_settings(
    runs: Sequence[RunDocument], baseline: Sequence[RunDocument], keys: Sequence[str]
) -> bool:
    """Return True if a run and a run of the baseline agree in all these settings."""
    baseline_settings = {_format_settings(run, keys) for run in baseline}
    return any(_format_settings(run, keys) in baseline_settings for run in runs)


def _format_settings(run: RunDocument, keys: Sequence[str]) -> str:
    return json.dumps([run["config"].get(key) for key in keys])


def _mean_interval(
    runs: Sequence[RunDocument], read: AccuracyReader, statistic: str = "weighted"
) -> Interval | None:
    values = _by_trial(runs, read, statistic)
    return mean_interval(list(values.values())) if values else None


def _by_trial(
    runs: Sequence[RunDocument], read: AccuracyReader, statistic: str = "weighted"
) -> Mapping[Trial, float]:
    """Return an accuracy of each run in percent, by its trial."""
    values: dict[Trial, float] = {}
    for run in runs:
        accuracy = read(run)
        if accuracy is not None:
            trial = f"{_format_settings(run, (*_SAME_DATA, 'seed'))} {run_extent(run)}"
            values[trial] = 100 * float({**accuracy}[statistic])  # type: ignore[arg-type]
    return values


def _best_accuracy(document: RunDocument) -> Accuracy | None:
    return document["best"]["accuracy"] if document["best"] else None


def _last_accuracy(document: RunDocument) -> Accuracy | None:
    return document["last"]["accuracy"] if document["last"] else None


def _validation_accuracy(document: RunDocument) -> Accuracy | None:
    return document["best"]["validation"] if document["best"] else None
