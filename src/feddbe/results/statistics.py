"""What several values of one number say: their mean, how sure it is, and whether two methods differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from math import inf, sqrt
from statistics import mean, stdev
from typing import Literal, NamedTuple, TypeVar

Trial = TypeVar("Trial")


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval, which one value alone leaves infinite."""

    mean: float
    half: float
    n: int

    @property
    def p_value(self) -> float:
        """Of a difference: two-sided, by Student's t, that it is 0; 1 if it has no spread to be judged by."""
        from scipy.special import stdtr

        if self.n < 2 or not self.half:
            return 1.0
        t = self.mean / (self.half / _t(self.n - 1))
        return float(2 * stdtr(self.n - 1, -abs(t)))

    def shown(self, digits: int = 2, *, sign: bool = False) -> str:
        """As it stands in tables: `97.59 ± 1.96`, and of one value only that."""
        text = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return f"{text} ± {self.half:.{digits}f}" if self.n > 1 else text


def mean_interval(values: Sequence[float]) -> Interval:
    """Of independent repetitions, by Student's t: mean ± t_{0.975, n-1} s / sqrt(n)."""
    n = len(values)
    if n < 2:
        return Interval(mean(values), inf, n)
    return Interval(mean(values), _t(n - 1) * stdev(values) / sqrt(n), n)


@cache
def _t(freedom: int) -> float:
    """t_{0.975} with so many degrees of freedom; a curve asks for the same one at every round."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def paired_differences(ours: Mapping[Trial, float], theirs: Mapping[Trial, float]) -> Interval | None:
    """The difference ours - theirs over the trials (equal split and seed) that both have; None: over none."""
    common = [trial for trial in ours if trial in theirs]
    return mean_interval([ours[trial] - theirs[trial] for trial in common]) if common else None


LEVEL = 0.05
"""Probability of any verdict in a table without a real difference."""
SEEDS = 3
"""Fewest pairs for a verdict."""
_SMALLEST = 0.005
"""Half-width, in points, below which an interval is printed as 0.00 and is not an estimate of chance."""
RULE = (
    f"Better or worse: paired t-test at {100 * LEVEL:g} % for the whole table (Holm's correction), at least "
    f"{SEEDS} seeds, best rounds chosen on held-out data."
)


class Reason(StrEnum):
    """Why a difference has no verdict; the values are shown."""

    BASELINE = "baseline"
    NOT_COMPARED = "not compared"
    NOT_SIGNIFICANT = "not significant"
    NO_RUN = "no run to compare"
    OTHER_DATA = "other data"
    OTHER_SEEDS = "no seed in common"
    UNEQUAL_ROUNDS = "unequal rounds"
    NO_PAIRS = "no pairs"
    FEW_SEEDS = f"fewer than {SEEDS} seeds"
    CHOSEN_ON_TEST = "best rounds chosen on test data"

    @property
    def is_obstacle(self) -> bool:
        """Whether a comparison that was wanted could not be judged."""
        return self not in (Reason.BASELINE, Reason.NOT_COMPARED, Reason.NOT_SIGNIFICANT)


class Comparison(NamedTuple):
    """A difference in points, and what forbids to judge it."""

    difference: Interval | None
    chosen_on_test: bool = False
    """Whether a best round was chosen by the test accuracy that is compared."""
    obstacle: Reason | None = None
    """Why there is no difference, or none to judge."""


class Verdict(NamedTuple):
    """The outcome, or why there is none."""

    outcome: Literal["better", "worse", ""]
    reason: Reason | None = None

    def __str__(self) -> str:
        return self.outcome or str(self.reason)


def judge(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Judge all differences of one table together.

    Args:
        comparisons: all that the table shows; the correction is for the number that can be judged.

    Returns:
        A verdict for each, in their order.
    """
    reasons = [_find_obstacle(comparison) for comparison in comparisons]
    p_values = {
        index: comparison.difference.p_value if comparison.difference.half >= _SMALLEST else 1.0
        for index, comparison in enumerate(comparisons)
        if comparison.difference is not None and not reasons[index]
    }
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
    if comparison.difference.n < SEEDS:
        return Reason.FEW_SEEDS
    return Reason.CHOSEN_ON_TEST if comparison.chosen_on_test else None


def _reject_by_holm(p_values: dict[int, float]) -> set[int]:
    """Return the hypotheses that are rejected: from the smallest p-value on, until one is too large."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > LEVEL / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected
