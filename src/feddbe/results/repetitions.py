"""Experiments over seeds and partitions: runs grouped by settings, means, comparisons with a baseline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import mean

from feddbe.config.options import REPETITION_OPTIONS, identifying_settings
from feddbe.results.document import (
    Extent,
    RoundResult,
    RunDocument,
    accuracy_curve,
    compared_result,
    last_round,
    metric_value,
    run_extent,
    run_labels,
)
from feddbe.results.statistics import (
    Comparison,
    Interval,
    Reason,
    Repetition,
    Verdict,
    judge_comparisons,
    paired_differences,
    repetition_interval,
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
        key = json.dumps([document["method"], settings, rounds], sort_keys=True, default=str)
        repetition = find_repetition(document)
        while any(find_repetition(run) == repetition for run in groups.get(key, ())):
            key += "'"  # a copy of a run is not another repetition
        groups.setdefault(key, []).append(document)
    return list(groups.values())


def group_experiments(documents: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return runs that differ only in seed and partition seed, with any number of rounds.

    Experiments are in order of appearance.
    """
    return group_runs(documents, lambda document: [(0, 0.0)])


def find_repetition(document: RunDocument) -> Repetition:
    """Return the seeds of a run and of its partition."""
    return Repetition(document["config"].get("seed"), document["config"].get("partition_seed"))


def describe_repetitions(runs: Sequence[RunDocument]) -> str:
    """Return what varies: `3 seeds`, `3 partitions` or `3 seeds x 3 partitions`."""
    if len(runs) == 1:
        return "1 seed"
    return " x ".join(f"{count} {unit}" for unit, count in count_repetitions(runs).items())


def count_repetitions(runs: Sequence[RunDocument]) -> dict[str, int]:
    """Return the numbers of `seeds` and `partitions`, without one that does not vary between the runs."""
    repetitions = [find_repetition(run) for run in runs]
    counts = {
        "seeds": len({repetition.seed for repetition in repetitions}),
        "partitions": len({repetition.partition_seed for repetition in repetitions}),
    }
    return {unit: count for unit, count in counts.items() if count > 1} or {"seeds": 1}


def counted_runs(experiment: Sequence[RunDocument]) -> list[RunDocument]:
    """Return the runs that enter an experiment's means: the longest that did not diverge.

    The best round of a shorter run is not comparable with that of a longer one.
    """
    usable = [run for run in experiment if run["best"] and not run["diverged"]]
    longest = max(usable, key=last_round, default=None)
    return [run for run in usable if longest and run_extent(run) == run_extent(longest)]


def group_names(groups: Sequence[Sequence[RunDocument]]) -> list[str]:
    """Return a name for each group, with its repetitions, or with its seeds if names are equal."""
    labels = run_labels([group[0] for group in groups], seed=False)
    names = []
    for group, label in zip(groups, labels, strict=True):
        if len(group) > 1:
            names.append(f"{label} ({describe_repetitions(group)})")
        elif labels.count(label) > 1:
            names.append(f"{label}, {_describe_repetition(group[0], groups)}")
        else:
            names.append(label)
    return names


def strip_options(method: str) -> str:
    """Return a method's name without options: `fedprox(mu=1)+dbe(kappa=5)` is `fedprox+dbe`."""
    return re.sub(r"\([^()]*\)", "", method)


def _describe_repetition(run: RunDocument, groups: Sequence[Sequence[RunDocument]]) -> str:
    """Return a run's seed, and that of its partition if partitions differ between the groups."""
    repetition = find_repetition(run)
    seed = f"seed {'?' if repetition.seed is None else repetition.seed}"
    partitions = {find_repetition(other).partition_seed for group in groups for other in group}
    return seed if len(partitions) == 1 else f"{seed}, partition seed {repetition.partition_seed}"


_DATA_OPTIONS = ("data", "partition", "clients", "split", "shift")
PARTITION_OPTIONS = (*_DATA_OPTIONS, "partition_seed")
"""Settings that determine the test samples of a client."""
_SAME_DATA = (*_DATA_OPTIONS, "validation", "new_clients")
ResultReader = Callable[[RunDocument], RoundResult | None]


@dataclass(frozen=True)
class SeedGroup:
    """One experiment over its seeds and partitions. Accuracies are in percent, over `counted_runs`."""

    name: str
    """The method, and the settings that distinguish experiments of this method."""
    runs: tuple[RunDocument, ...]
    counted_runs: tuple[RunDocument, ...]
    """Runs that did not diverge and are as long as the longest; see `counted_runs`."""
    moment: str
    """Moment at which clients deploy the model, which `accuracy` is that of."""
    accuracy: Interval | None
    """Test accuracy by which methods are compared, weighted by samples; see `compared_result`."""
    mean: Interval | None
    """Mean accuracy of clients, in the same round and at the same moment."""
    worst_tenth: Interval | None
    """Mean accuracy of the worst tenth of clients, in the same round and at the same moment."""
    best: Interval | None
    """Test accuracy in the best round of each run; if it was chosen on test data, it is not compared."""
    last: Interval | None
    """Test accuracy in the last round, before an adaptation that follows it."""
    adapted: Interval | None
    """Test accuracy in the last round, after the method adapted the model to the client."""
    validation: Interval | None
    """Validation accuracy that selected the best round, if data was held out."""
    difference: Interval | None
    """Difference of `accuracy` to the baseline's over equal repetitions, if there are any."""
    verdict: Verdict
    majority_accuracy: float
    """Mean over all runs, as a fraction of one."""

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(run["diverged"] is not None for run in self.runs)

    @property
    def seeds(self) -> str:
        """Number of counted runs, as in `3` or `2 of 3`."""
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
            moment=(runs or group)[0]["deployed_moment"],
            accuracy=_interval(runs, compared_result),
            mean=_interval(runs, compared_result, statistic="mean"),
            worst_tenth=_interval(runs, compared_result, statistic="worst_tenth"),
            best=_interval(runs, itemgetter("best")),
            last=_interval(runs, itemgetter("last")),
            adapted=_interval(runs, itemgetter("last"), "adapted"),
            validation=_interval(runs, itemgetter("best"), "validation"),
            difference=comparison.difference,
            verdict=verdict,
            majority_accuracy=mean(run["majority_accuracy"] for run in group),
        )
        for name, group, runs, comparison, verdict in zip(
            names, groups, counted, comparisons, verdicts, strict=True
        )
    ]


def metric_interval(runs: Sequence[RunDocument], name: str, scale: int) -> Interval | None:
    """Return a metric over runs, in the compared round and at the moment of deployment.

    Args:
        runs: The runs.
        name: The metric. Runs without it are left out; None is returned if no run has it.
        scale: Factor of its values: 100 for a metric in percent.
    """
    values = {}
    for run in runs:
        result = compared_result(run)
        value = metric_value(result, name) if result else None
        if value is not None:
            values[find_repetition(run)] = scale * value
    return repetition_interval(values) if values else None


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
    """Compare the deployed models of two experiments, repetition by repetition."""
    if not runs or not baseline:
        return Comparison(None, obstacle=Reason.NO_RUN)
    if not _have_common_settings(runs, baseline, _SAME_DATA):
        return Comparison(None, obstacle=Reason.OTHER_DATA)
    if not _have_common_settings(runs, baseline, (*_SAME_DATA, *REPETITION_OPTIONS)):
        return Comparison(None, obstacle=Reason.OTHER_REPETITIONS)
    difference = paired_differences(
        _by_repetition(runs, compared_result), _by_repetition(baseline, compared_result)
    )
    return Comparison(
        difference,
        obstacle=None if difference else Reason.UNEQUAL_ROUNDS,
        one_sample=one_test_sample([*runs, *baseline]),
    )


def one_test_sample(runs: Sequence[RunDocument]) -> float:
    """Return one test sample of the smallest test set in percentage points; 0 if the sizes are unknown."""
    test_samples = min(run["test_samples"] for run in runs)
    return 100 / test_samples if test_samples else 0.0


def _have_common_settings(
    runs: Sequence[RunDocument], baseline: Sequence[RunDocument], keys: Sequence[str]
) -> bool:
    """Return True if a run and a run of the baseline agree in all these settings."""
    baseline_settings = {_format_settings(run, keys) for run in baseline}
    return any(_format_settings(run, keys) in baseline_settings for run in runs)


def _format_settings(run: RunDocument, keys: Sequence[str]) -> str:
    return json.dumps([run["config"].get(key) for key in keys])


def _interval(
    runs: Sequence[RunDocument], read: ResultReader, key: str = "accuracy", *, statistic: str = "weighted"
) -> Interval | None:
    values = _by_repetition(runs, read, key, statistic)
    return repetition_interval(values) if values else None


def _by_repetition(
    runs: Sequence[RunDocument], read: ResultReader, key: str = "accuracy", statistic: str = "weighted"
) -> dict[Repetition, float]:
    """Return an accuracy of each run in percent, by its repetition.

    Args:
        runs: The runs.
        read: Returns the result of a round.
        key: Name of the accuracy in this result.
        statistic: Statistic over clients.
    """
    values = {}
    for run in runs:
        accuracy = {**(read(run) or {})}.get(key)
        if isinstance(accuracy, dict):
            settings = f"{_format_settings(run, _SAME_DATA)} {run_extent(run)}"
            values[find_repetition(run)._replace(settings=settings)] = 100 * float(accuracy[statistic])
    return values
