"""Statistics over repetitions: means with confidence intervals, paired differences, significance tests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from math import inf, sqrt
from statistics import mean, stdev
from typing import Literal, NamedTuple, TypeVar, cast

AnyRepetition = TypeVar("AnyRepetition")


class Repetition(NamedTuple):
    """One repetition. Runs of two methods with equal repetitions are a pair."""

    seed: int | None
    partition_seed: int | None
    settings: str = ""
    """Further settings that a pair has in common: the data, and the number of rounds."""


class Interval(NamedTuple):
    """A mean with half the width of its 95 % confidence interval, which is infinite for a single value."""

    mean: float
    half_width: float
    n: int
    degrees: float | None = None
    """Degrees of freedom of Student's t; None: n - 1."""

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value of Student's t-test for mean 0; 1 without spread."""
        from scipy.special import stdtr

        if self.n < 2 or not self.half_width:
            return 1.0
        degrees = self.n - 1 if self.degrees is None else self.degrees
        t = self.mean / (self.half_width / _t_quantile(degrees))
        return float(2 * stdtr(degrees, -abs(t)))

    def format(self, digits: int = 2, *, sign: bool = False) -> str:
        """Return the text for tables: `97.59 ± 1.96`, or `97.59` for a single value."""
        text = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return f"{text} ± {self.half_width:.{digits}f}" if self.n > 1 else text


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of independent repetitions: mean ± t_{0.975, n-1} s / sqrt(n)."""
    n = len(values)
    if n < 2:
        return Interval(mean(values), inf, n)
    return Interval(mean(values), _t_quantile(n - 1) * stdev(values) / sqrt(n), n)


def repetition_interval(values: Mapping[Repetition, float]) -> Interval:
    """Return the 95 % interval of the mean over seeds and partitions.

    Runs that share a seed or a partition are not independent. If some do, the variance of the mean is that of
    the means of seeds plus that of the means of partitions, an upper bound for any correlation of such runs.
    Its degrees of freedom are Satterthwaite's. Otherwise it is `mean_interval`.
    """
    factors = [
        [repetition.seed for repetition in values],
        [repetition.partition_seed for repetition in values],
    ]
    return crossed_interval(list(values.values()), factors)


def crossed_interval(values: Sequence[float], factors: Sequence[Sequence[Hashable]]) -> Interval:
    """Return the 95 % interval of a mean of values that share levels of factors, see `repetition_interval`.

    Args:
        values: The values.
        factors: For each factor, such as the seed, its level for each value.
    """
    shared = [levels for levels in factors if 1 < len(set(levels)) < len(values)]
    if not shared:
        return mean_interval(values)
    center = mean(values)
    deviations = [value - center for value in values]
    variances = [_cluster_variance(deviations, levels) for levels in shared]
    variance = sum(variances)
    degrees = float(min(len(set(levels)) for levels in shared) - 1)
    if variance:
        parts = zip(variances, shared, strict=True)
        degrees = variance**2 / sum(part**2 / (len(set(levels)) - 1) for part, levels in parts)
    return Interval(center, _t_quantile(degrees) * sqrt(variance), len(values), degrees)


def _cluster_variance(deviations: Sequence[float], levels: Sequence[Hashable]) -> float:
    """Return the variance of a mean whose terms are correlated within each level."""
    sums: dict[Hashable, float] = {}
    for deviation, level in zip(deviations, levels, strict=True):
        sums[level] = sums.get(level, 0.0) + deviation
    total = sum(value**2 for value in sums.values())
    return len(sums) / (len(sums) - 1) * total / len(deviations) ** 2


@cache
def _t_quantile(degrees: float) -> float:
    """Return t_{0.975} for these degrees of freedom; cached, because curves need it for every round."""
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def paired_differences(
    ours: Mapping[AnyRepetition, float], theirs: Mapping[AnyRepetition, float]
) -> Interval | None:
    """Return the mean of ours - theirs over common repetitions (equal split and seed); None without any."""
    differences = {
        repetition: value - theirs[repetition] for repetition, value in ours.items() if repetition in theirs
    }
    if not differences:
        return None
    if all(isinstance(repetition, Repetition) for repetition in differences):
        return repetition_interval(cast(Mapping[Repetition, float], differences))
    return mean_interval(list(differences.values()))


SIGNIFICANCE_LEVEL = 0.05
"""Probability that a table without real differences has a verdict."""
MIN_PAIRS = 3
"""Minimum number of pairs for a verdict."""
_MIN_HALF_WIDTH = 0.005
"""Half-width in percentage points below which an interval is printed as 0.00 and is not tested."""
VERDICT_RULE = (
    f"Better or worse: two-sided paired t-test at {100 * SIGNIFICANCE_LEVEL:g} % for the whole table "
    f"(Holm's correction), at least {MIN_PAIRS} pairs, a difference of at least one test sample, no round "
    "chosen on test data."
)


class Reason(StrEnum):
    """Reason for a missing verdict; tables show the values."""

    BASELINE = "baseline"
    NOT_COMPARED = "not compared"
    NOT_SIGNIFICANT = "not significant"
    NO_RUN = "no run to compare"
    OTHER_DATA = "other data"
    OTHER_REPETITIONS = "no seed and partition in common"
    UNEQUAL_ROUNDS = "unequal rounds"
    NO_PAIRS = "no pairs"
    FEW_PAIRS = f"fewer than {MIN_PAIRS} pairs"
    BELOW_ONE_SAMPLE = "less than one test sample"
    CHOSEN_ON_TEST = "best rounds chosen on test data"

    @property
    def is_obstacle(self) -> bool:
        """True if a requested comparison could not be judged."""
        return self not in (Reason.BASELINE, Reason.NOT_COMPARED, Reason.NOT_SIGNIFICANT)


class Comparison(NamedTuple):
    """A difference in percentage points, and the obstacles to judging it."""

    difference: Interval | None
    chosen_on_test: bool = False
    """True if a best round was selected by the test accuracy that is compared."""
    obstacle: Reason | None = None
    """Reason for a missing difference, or for not judging it."""
    one_sample: float = 0.0
    """One test sample in percentage points, 100 / number of test samples; 0 if it is unknown."""


class Verdict(NamedTuple):
    """The outcome, or the reason why there is none."""

    outcome: Literal["better", "worse", ""]
    reason: Reason | None = None

    def __str__(self) -> str:
        return self.outcome or str(self.reason)


def judge_comparisons(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return a verdict for each comparison of one table.

    Args:
        comparisons: All comparisons of the table. Holm's correction counts those that can be judged. A
            difference below one test sample counts, too, with a p-value of 1.
    """
    obstacles = [_find_obstacle(comparison) for comparison in comparisons]
    p_values = {
        index: _p_value(comparison)
        for index, (comparison, obstacle) in enumerate(zip(comparisons, obstacles, strict=True))
        if obstacle is None
    }
    significant = _reject_by_holm(p_values)
    verdicts = []
    for index, (comparison, obstacle) in enumerate(zip(comparisons, obstacles, strict=True)):
        if index in significant and comparison.difference is not None:
            verdicts.append(Verdict("better" if comparison.difference.mean > 0 else "worse"))
        elif obstacle is None and _is_below_one_sample(comparison):
            verdicts.append(Verdict("", Reason.BELOW_ONE_SAMPLE))
        else:
            verdicts.append(Verdict("", obstacle or Reason.NOT_SIGNIFICANT))
    return verdicts


def _p_value(comparison: Comparison) -> float:
    """Return the p-value of the difference; 1 without spread, and below one test sample."""
    difference = comparison.difference
    if difference is None or difference.half_width < _MIN_HALF_WIDTH or _is_below_one_sample(comparison):
        return 1.0
    return difference.p_value


def _is_below_one_sample(comparison: Comparison) -> bool:
    return comparison.difference is not None and abs(comparison.difference.mean) < comparison.one_sample


def _find_obstacle(comparison: Comparison) -> Reason | None:
    if comparison.obstacle or comparison.difference is None:
        return comparison.obstacle or Reason.NO_PAIRS
    if comparison.difference.n < MIN_PAIRS:
        return Reason.FEW_PAIRS
    return Reason.CHOSEN_ON_TEST if comparison.chosen_on_test else None


def _reject_by_holm(p_values: dict[int, float]) -> set[int]:
    """Return the rejected hypotheses: in order of p-values, until one is too large."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > SIGNIFICANCE_LEVEL / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected
