"""Curves of metrics over rounds: which metrics runs have, and their means and bands over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from feddbe.config.options import Config
from feddbe.results.document import RoundResult, RunDocument, accuracy_curve, describe_moment
from feddbe.results.seeds import Points, group_names, group_runs
from feddbe.results.statistics import mean_interval

TEST_MOMENTS = ("before", "adapted", "after")
"""Moments at which a client's model is evaluated on its test data."""
_OTHER_MOMENTS = {"validation": "validation data", "train": "training data", "training": "local training"}
_DEFAULT_METRICS = Config().metrics.split(",")
_MEANS = {"mean": "mean of clients", "worst_tenth": "worst tenth of clients"}


@dataclass(frozen=True)
class MetricSeries:
    """A number that runs have for each round."""

    key: str
    """Identifies the series: `accuracy`, `accuracy/mean`, `drift`, `drift@after`."""
    name: str
    """As in `client drift, test data, after local training`."""
    label: str
    """The quantity alone, for an axis: `client drift`."""
    unit: str
    points: Points
    """Returns a run's (round, value) pairs, in the unit; none where the run does not have it."""
    has_floor: bool = False
    """The accuracy of each client's majority class is a reference for it."""
    is_primary: bool = False
    """It is the accuracy by which the best round is chosen."""
    is_selected: bool = False
    """It is of a metric that is computed only if `--metrics` names it."""


ACCURACY = MetricSeries(
    "accuracy", "test accuracy", "test accuracy", "%", accuracy_curve, has_floor=True, is_primary=True
)


def metric_series(documents: Sequence[RunDocument]) -> list[MetricSeries]:
    """Return everything that any of the runs has for each round, the primary accuracy first.

    A metric that a user registers with `@measure` and selects with `--metrics` is among them.
    """
    candidates = [*_accuracy_series(), *_cost_series(), *_measure_series(documents)]
    return [series for series in candidates if any(map(series.points, documents))]


def _accuracy_series() -> Iterator[MetricSeries]:
    yield ACCURACY
    label, unit = ACCURACY.label, ACCURACY.unit
    for reading, words in _MEANS.items():
        read = _accuracy_reader("accuracy", reading)
        yield MetricSeries(f"accuracy/{reading}", f"{label}, {words}", label, unit, _points(read))
    for when in TEST_MOMENTS:
        read = _accuracy_reader(when, "weighted", skip_primary=True)
        name = f"{label}, {describe_moment(when)}"
        yield MetricSeries(f"accuracy@{when}", name, label, unit, _points(read), has_floor=True)
    read = _accuracy_reader("validation", "weighted")
    yield MetricSeries(
        "accuracy@validation", "validation accuracy", "validation accuracy", unit, _points(read)
    )


def _cost_series() -> Iterator[MetricSeries]:
    yield MetricSeries(
        "train_loss", "training loss", "training loss", "", _points(lambda entry: entry["train_loss"])
    )
    yield MetricSeries(
        "seconds", "time per round", "time per round", "seconds", _points(lambda entry: entry["seconds"])
    )


def _measure_series(documents: Sequence[RunDocument]) -> Iterator[MetricSeries]:
    """Yield the metrics that are neither accuracies nor costs, each at the moments that any run has."""
    from feddbe.metrics.builtin import describe_metric

    entries = [entry for document in documents for entry in document["rounds"]]
    pairs = dict.fromkeys(
        (name, when) for entry in entries for when, numbers in entry["metrics"].items() for name in numbers
    )
    measured_names = dict.fromkeys(name for name, _ in pairs)
    for name in measured_names:
        label, unit = describe_metric(name)
        is_selected = name not in _DEFAULT_METRICS
        scale = 100.0 if unit == "%" else 1.0
        read = _measure_reader(name, None, scale)
        yield MetricSeries(name, f"{label}, test data", label, unit, _points(read), is_selected=is_selected)
        for when in (*TEST_MOMENTS, *_OTHER_MOMENTS):
            is_training_loss = (name, when) == ("loss", "training")
            if (name, when) not in pairs or is_training_loss:
                continue
            read = _measure_reader(name, when, scale)
            words = _OTHER_MOMENTS.get(when, f"test data, {describe_moment(when)}")
            key, full_name = f"{name}@{when}", f"{label}, {words}"
            yield MetricSeries(key, full_name, label, unit, _points(read), is_selected=is_selected)


def _points(read: Callable[[RoundResult], float | None]) -> Points:
    def read_rounds(document: RunDocument) -> list[tuple[int, float]]:
        values = ((entry["round"], read(entry)) for entry in document["rounds"])
        return [(round_, value) for round_, value in values if value is not None]

    return read_rounds


def _accuracy_reader(
    moment_key: str, reading: str, *, skip_primary: bool = False
) -> Callable[[RoundResult], float | None]:
    """Return a function that reads an accuracy in percent.

    Args:
        moment_key: A key of the entry, as in `after`.
        reading: A key of the accuracy, as in `mean`.
        skip_primary: Whether to leave out rounds in which it is the primary accuracy.
    """

    def read(result: RoundResult) -> float | None:
        accuracy = {**result}.get(moment_key)
        if not isinstance(accuracy, dict) or (skip_primary and result["moment"] == moment_key):
            return None
        return 100 * float(accuracy[reading])

    return read


def _measure_reader(name: str, when: str | None, scale: float) -> Callable[[RoundResult], float | None]:
    """Return a function that reads a metric at a moment; None: at that of the primary accuracy."""

    def read(result: RoundResult) -> float | None:
        if when is not None and when == result["moment"]:
            return None
        readings = result["metrics"].get(when or result["moment"], {}).get(name)
        return scale * readings["weighted"] if readings else None

    return read


@dataclass(frozen=True)
class MeanCurve:
    """The mean over the runs of one experiment, which differ in their seeds only, and a band around it."""

    name: str
    runs: tuple[RunDocument, ...]
    x: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Lower edge of the band, see `band_edges`; empty for a single run."""
    high: tuple[float, ...]

    @property
    def best(self) -> tuple[int, float]:
        """Return the point of the best round: of one run the one chosen on its validation data, else the
        highest, of equal ones the first."""
        curve = list(zip(self.x, self.mean, strict=True))
        best = self.runs[0]["best"]
        if len(self.runs) == 1 and best and best["validation"] and best["accuracy"]:
            chosen = best["round"], 100 * best["accuracy"]["weighted"]
            if chosen in curve:
                return chosen
        return max(curve, key=lambda point: point[1])


def mean_curves(documents: Sequence[RunDocument], points: Points = accuracy_curve) -> list[MeanCurve]:
    """Return a curve for each experiment among the runs, in order of appearance."""
    experiments = group_runs(documents, points)
    curves = []
    for runs, name in zip(experiments, group_names(experiments), strict=True):
        x = tuple(round_ for round_, _ in points(runs[0]))
        values = [[value for _, value in points(run)] for run in runs]
        means, low, high = mean_and_band(values)
        curves.append(MeanCurve(name, tuple(runs), x, means, low, high))
    return curves


Values = tuple[float, ...]


def mean_and_band(runs: Sequence[Sequence[float]]) -> tuple[Values, Values, Values]:
    """Return the mean of runs of equal length, and the lower and upper edge of the band around it.

    There is no band for a single run.
    """
    columns = list(zip(*runs, strict=True))
    means = tuple(mean(values) for values in columns)
    if len(runs) < 2:
        return means, (), ()
    edges = [band_edges(values) for values in columns]
    return means, tuple(low for low, _ in edges), tuple(high for _, high in edges)


def band_edges(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t; of two values the lower and the higher.

    With two values the interval would be 13 standard errors wide.
    """
    if len(values) < 3:
        return min(values), max(values)
    estimate = mean_interval(values)
    return estimate.mean - estimate.half, estimate.mean + estimate.half


def band_meaning(seed_counts: Sequence[int]) -> str:
    """Return what bands show in a figure of experiments with these numbers of seeds; empty without bands."""
    counts = {count for count in seed_counts if count > 1}
    if not counts:
        return ""
    if counts == {2}:
        return "band: lower to higher of two seeds"
    meaning = "band: 95 % interval of the mean over seeds"
    return f"{meaning} (two seeds: lower to higher)" if 2 in counts else meaning
