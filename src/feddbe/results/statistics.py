"""Statistics over seeds: means with confidence intervals, paired differences, and significance tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from math import inf, sqrt
from statistics import mean, stdev
from typing import Literal, NamedTuple, TypeVar

Trial = TypeVar("Trial")


class Interval(NamedTuple):
    """A mean with half the width of its 95 % confidence interval, which is infinite for a single value."""

    mean: float
    half_width: float
    n: int

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value of Student's t-test for mean 0; 1 without spread."""
        from scipy.special import stdtr

        if self.n < 2 or not self.half_width:
            return 1.0
        t = self.mean / (self.half_width / _t_quantile(self.n - 1))
        return float(2 * stdtr(self.n - 1, -abs(t)))

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


@cache
def _t_quantile(degrees: int) -> float:
    """Return t_{0.975} for these degrees of freedom; cached, because curves need it for every round."""
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def paired_differences(ours: Mapping[Trial, float], theirs: Mapping[Trial, float]) -> Interval | None:
    """Return the mean of ours - theirs over common trials (equal split and seed); None without any."""
    common = [trial for trial in ours if trial in theirs]
    if not common:
        return None
    return mean_interval([ours[trial] - theirs[trial] for trial in common])


SIGNIFICANCE_LEVEL = 0.05
"""Probability that a table without real differences has a verdict."""
MIN_SEEDS = 3
"""Minimum number of pairs for a verdict."""
_MIN_HALF_WIDTH = 0.005
"""Half-width in percentage points below which an interval is printed as 0.00 and is not tested."""
VERDICT_RULE = (
    f"Better or worse: paired t-test at {100 * SIGNIFICANCE_LEVEL:g} % for the whole table "
    f"(Holm's correction), at least {MIN_SEEDS} seeds, best rounds chosen on held-out data."
)


class Reason(StrEnum):
    """Reason for a missing verdict; tables show the values."""

    BASELINE = "baseline"
    NOT_COMPARED = "not compared"
    NOT_SIGNIFICANT = "not significant"
    NO_RUN = "no run to compare"
    OTHER_DATA = "other data"
    OTHER_SEEDS = "no seed in common"
    UNEQUAL_ROUNDS = "unequal rounds"
    NO_PAIRS = "no pairs"
    FEW_SEEDS = f"fewer than {MIN_SEEDS} seeds"
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


class Verdict(NamedTuple):
    """The outcome, or the reason why there is none."""

    outcome: Literal["better", "worse", ""]
    reason: Reason | None = None

    def __str__(self) -> str:
        return self.outcome or str(self.reason)


def judge_comparisons(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return a verdict for each comparison of one table.

    Args:
        comparisons: All comparisons of the table. Holm's correction counts those that can be judged.
    """
    reasons = [_find_obstacle(comparison) for comparison in comparisons]
    p_values: dict[int, float] = {}
    for index, (comparison, reason) in enumerate(zip(comparisons, reasons, strict=True)):
        difference = comparison.difference
        if difference is not None and not reason:
            has_spread = difference.half_width >= _MIN_HALF_WIDTH
            p_values[index] = difference.p_value if has_spread else 1.0
    significant = _reject_by_holm(p_values)
    verdicts = []
    for index, (comparison, reason) in enumerate(zip(comparisons, reasons, strict=True)):
        if index in significant and comparison.difference is not None:
            verdicts.append(Verdict("better" if comparison.difference.mean > 0 else "worse"))
        else:
            verdicts.append(Verdict("", reason or Reason.NOT_SIGNIFICANT))
    return verdicts


def _find_obstacle(comparison: Comparison) -> Reason | None:
    if comparison.obstacle or comparison.difference is None:
        return comparison.obstacle or Reason.NO_PAIRS
    if comparison.difference.n < MIN_SEEDS:
        return Reason.FEW_SEEDS
    return Reason.CHOSEN_ON_TEST if comparison.chosen_on_test else None


def _reject_by_holm(p_values: dict[int, float]) -> set[int]:
    """Return the rejected hypotheses: in order of p-values, until one is too large."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > SIGNIFICANCE_LEVEL / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected
