"""Curves of metrics over rounds: which metrics runs have, and their means and bands over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from feddbe.results.document import (
    RoundResult,
    RunDocument,
    accuracy_curve,
    compared_result,
    describe_moment,
    is_selected_metric,
)
from feddbe.results.repetitions import (
    CurveReader,
    describe_repetitions,
    find_repetition,
    group_names,
    group_runs,
)
from feddbe.results.statistics import Repetition, repetition_interval

TEST_MOMENTS = ("before", "adapted", "after")
"""Moments at which a client's model is evaluated on its test data."""
_OTHER_MOMENTS = {"validation": "validation data", "train": "training data", "training": "local training"}
_MEANS = {"mean": "mean of clients", "worst_tenth": "worst tenth of clients"}


@dataclass(frozen=True)
class MetricSeries:
    """A quantity that runs have for each round."""

    key: str
    """Identifies the series: `accuracy`, `accuracy/mean`, `drift`, `drift@after`."""
    name: str
    """As in `client drift, test data, after local training`."""
    label: str
    """The quantity alone, for an axis: `client drift`."""
    unit: str
    read_curve: CurveReader
    """Function that returns a run's (round, value) pairs in the unit; empty if the run has no values."""
    has_majority_reference: bool = False
    """True if the majority accuracy is a reference for it."""
    is_primary: bool = False
    """True for the accuracy that selects the best round."""
    is_selected: bool = False
    """True for a metric that is computed only if `--metrics` names it."""


ACCURACY = MetricSeries(
    "accuracy",
    "test accuracy",
    "test accuracy",
    "%",
    accuracy_curve,
    has_majority_reference=True,
    is_primary=True,
)


def metric_series(documents: Sequence[RunDocument]) -> list[MetricSeries]:
    """Return all series that any of the runs has, the primary accuracy first.

    A metric that a user registers with `@metric` and selects with `--metrics` is among them.
    """
    candidates = [*_accuracy_series(), *_cost_series(), *_metric_series(documents)]
    return [series for series in candidates if any(map(series.read_curve, documents))]


def _accuracy_series() -> Iterator[MetricSeries]:
    yield ACCURACY
    label, unit = ACCURACY.label, ACCURACY.unit
    for statistic, words in _MEANS.items():
        read = _accuracy_reader("accuracy", statistic)
        yield MetricSeries(f"accuracy/{statistic}", f"{label}, {words}", label, unit, _curve_reader(read))
    for moment in TEST_MOMENTS:
        read = _accuracy_reader(moment, "weighted", skip_primary=True)
        name = f"{label}, {describe_moment(moment)}"
        yield MetricSeries(
            f"accuracy@{moment}", name, label, unit, _curve_reader(read), has_majority_reference=True
        )
    read = _accuracy_reader("validation", "weighted")
    yield MetricSeries(
        "accuracy@validation", "validation accuracy", "validation accuracy", unit, _curve_reader(read)
    )


def _cost_series() -> Iterator[MetricSeries]:
    yield MetricSeries(
        "train_loss", "training loss", "training loss", "", _curve_reader(lambda result: result["train_loss"])
    )
    yield MetricSeries(
        "seconds",
        "time per round",
        "time per round",
        "seconds",
        _curve_reader(lambda result: result["seconds"]),
    )


def _metric_series(documents: Sequence[RunDocument]) -> Iterator[MetricSeries]:
    """Yield the metrics that are neither accuracies nor costs, each at the moments that any run has."""
    from feddbe.metrics.builtin import describe_metric

    results = [result for document in documents for result in document["rounds"]]
    pairs = dict.fromkeys(
        (name, moment)
        for result in results
        for moment, metrics in result["metrics"].items()
        for name in metrics
    )
    for name in dict.fromkeys(name for name, _ in pairs):
        label, unit = describe_metric(name)
        is_selected = is_selected_metric(name, documents)
        scale = 100.0 if unit == "%" else 1.0
        read = _metric_reader(name, None, scale)
        yield MetricSeries(
            name, f"{label}, test data", label, unit, _curve_reader(read), is_selected=is_selected
        )
        for moment in (*TEST_MOMENTS, *_OTHER_MOMENTS):
            is_training_loss = (name, moment) == ("loss", "training")
            if (name, moment) not in pairs or is_training_loss:
                continue
            read = _metric_reader(name, moment, scale)
            words = _OTHER_MOMENTS.get(moment, f"test data, {describe_moment(moment)}")
            key, full_name = f"{name}@{moment}", f"{label}, {words}"
            yield MetricSeries(key, full_name, label, unit, _curve_reader(read), is_selected=is_selected)


def _curve_reader(read: Callable[[RoundResult], float | None]) -> CurveReader:
    def read_rounds(document: RunDocument) -> list[tuple[int, float]]:
        values = ((result["round"], read(result)) for result in document["rounds"])
        return [(round_, value) for round_, value in values if value is not None]

    return read_rounds


def _accuracy_reader(
    moment_key: str, statistic: str, *, skip_primary: bool = False
) -> Callable[[RoundResult], float | None]:
    """Return a function that reads an accuracy in percent.

    Args:
        moment_key: Key of the round's result, as in `after`.
        statistic: Key of the accuracy, as in `mean`.
        skip_primary: Skip rounds in which it is the primary accuracy.
    """

    def read(result: RoundResult) -> float | None:
        accuracy = {**result}.get(moment_key)
        if not isinstance(accuracy, dict) or (skip_primary and result["moment"] == moment_key):
            return None
        return 100 * float(accuracy[statistic])

    return read


def _metric_reader(name: str, moment: str | None, scale: float) -> Callable[[RoundResult], float | None]:
    """Return a function that reads a metric at a moment; None is the moment of the primary accuracy."""

    def read(result: RoundResult) -> float | None:
        if moment is not None and moment == result["moment"]:
            return None
        statistics = result["metrics"].get(moment or result["moment"], {}).get(name, {})
        value = statistics.get("weighted")
        return None if value is None else scale * value

    return read


@dataclass(frozen=True)
class MeanCurve:
    """Mean over the runs of one experiment, which differ in seed and partition, and a band around it."""

    name: str
    runs: tuple[RunDocument, ...]
    x: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Lower edge of the band, see `band_edges`; empty for a single run."""
    high: tuple[float, ...]

    @property
    def best(self) -> tuple[int, float]:
        """Return the point of a single run's best round.

        With validation data, it is the round selected on it. Otherwise it is the first of the highest points.
        """
        curve = list(zip(self.x, self.mean, strict=True))
        best = self.runs[0]["best"]
        if best and best["validation"] and best["accuracy"]:
            selected = best["round"], 100 * best["accuracy"]["weighted"]
            if selected in curve:
                return selected
        return max(curve, key=lambda point: point[1])

    @property
    def compared(self) -> tuple[list[int], float]:
        """Return the rounds by which the runs are compared, and their mean accuracy, as in tables over seeds.

        The accuracy is at the moment at which the model is deployed, so it may be above the curve.
        """
        results = [result for result in map(compared_result, self.runs) if result]
        accuracies = [100 * result["accuracy"]["weighted"] for result in results if result["accuracy"]]
        return [result["round"] for result in results], mean(accuracies)


def mean_curves(
    documents: Sequence[RunDocument], read_curve: CurveReader = accuracy_curve
) -> list[MeanCurve]:
    """Return a curve for each experiment among the runs, in order of appearance."""
    experiments = group_runs(documents, read_curve)
    curves = []
    for runs, name in zip(experiments, group_names(experiments), strict=True):
        x = tuple(round_ for round_, _ in read_curve(runs[0]))
        values = {find_repetition(run): [value for _, value in read_curve(run)] for run in runs}
        means, low, high = mean_and_band(values)
        curves.append(MeanCurve(name, tuple(runs), x, means, low, high))
    return curves


Values = tuple[float, ...]


def mean_and_band(runs: Mapping[Repetition, Sequence[float]]) -> tuple[Values, Values, Values]:
    """Return the mean of runs of equal length, and the lower and upper edge of the band around it.

    A single run has no band.
    """
    columns = [dict(zip(runs, values, strict=True)) for values in zip(*runs.values(), strict=True)]
    means = tuple(mean(values.values()) for values in columns)
    if len(runs) < 2:
        return means, (), ()
    edges = [band_edges(values) for values in columns]
    return means, tuple(low for low, _ in edges), tuple(high for _, high in edges)


def band_edges(values: Mapping[Repetition, float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t; for two values the lower and the higher.

    With two values the interval would be 13 standard errors wide on either side.
    """
    if len(values) < 3:
        return min(values.values()), max(values.values())
    estimate = repetition_interval(values)
    return estimate.mean - estimate.half_width, estimate.mean + estimate.half_width


def describe_band(groups: Sequence[Sequence[RunDocument]]) -> str:
    """Return the caption of bands for groups of runs that are drawn as their mean; empty without bands."""
    pairs = dict.fromkeys(describe_repetitions(group) for group in groups if len(group) == 2)
    others = dict.fromkeys(describe_repetitions(group) for group in groups if len(group) > 2)
    if not others:
        return f"band: lower to higher of {' or '.join(pairs)}" if pairs else ""
    meaning = f"band: 95 % interval of the mean over {' or '.join(others)}"
    return f"{meaning} ({' or '.join(pairs)}: lower to higher)" if pairs else meaning
