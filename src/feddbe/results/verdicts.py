"""Better or worse: the one place that decides it, for tables in a terminal, on a page and of the paper.

The differences of one table are judged together: a paired t-test each, with Holm's correction, so that a
table of methods that are all equal has a verdict in at most one of twenty cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from feddbe.results.statistics import Interval

__all__ = ["LEVEL", "RULE", "SEEDS", "Comparison", "Verdict", "judge"]

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


class Comparison(NamedTuple):
    """A difference in points, and what forbids to judge it."""

    difference: Interval | None
    chosen_on_test: bool = False
    """Whether a best round was chosen by the test accuracy that is compared."""
    obstacle: str = ""
    """Why there is no difference, or none to judge."""


class Verdict(NamedTuple):
    """The outcome, or why there is none."""

    outcome: Literal["better", "worse", ""]
    reason: str = ""

    def __str__(self) -> str:
        return self.outcome or self.reason


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
            verdicts.append(Verdict("", reason or "not significant"))
    return verdicts


def _find_obstacle(comparison: Comparison) -> str:
    if comparison.obstacle or comparison.difference is None:
        return comparison.obstacle or "no pairs"
    if comparison.difference.n < SEEDS:
        return f"fewer than {SEEDS} seeds"
    return "best rounds chosen on test data" if comparison.chosen_on_test else ""


def _reject_by_holm(p_values: dict[int, float]) -> set[int]:
    """Return the hypotheses that are rejected: from the smallest p-value on, until one is too large."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > LEVEL / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected
