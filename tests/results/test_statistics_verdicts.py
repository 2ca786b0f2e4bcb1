"""Verdicts: by hand, and their rate among equal methods."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from feddbe.results.statistics import (
    SIGNIFICANCE_LEVEL,
    Comparison,
    Interval,
    judge_comparisons,
    mean_interval,
    paired_differences,
)


def outcome(*differences: float, chosen_on_test: bool = False) -> str:
    (verdict,) = judge_comparisons([Comparison(mean_interval(differences), chosen_on_test)])
    return str(verdict)


def test_significant_difference_is_better_or_worse() -> None:
    assert outcome(5.0, 5.1, 4.9) == "better"
    assert outcome(-5.0, -5.1, -4.9) == "worse"
    assert outcome(5.0, 0.0, 1.0) == "not significant"


def test_two_seeds_have_no_verdict() -> None:
    assert outcome(5.0, 5.1) == "fewer than 3 seeds"
    assert outcome(5.0) == "fewer than 3 seeds"


def test_best_rounds_selected_on_test_data_have_no_verdict() -> None:
    assert outcome(5.0, 5.1, 4.9, chosen_on_test=True) == "best rounds chosen on test data"


def test_equal_differences_have_no_verdict() -> None:
    """Their interval would be printed as +5.00 ± 0.00."""
    assert outcome(5.0, 5.0, 5.0) == "not significant"
    assert outcome(5.0, 5.0 + 1e-12, 5.0 - 1e-12) == "not significant"


def test_p_values_are_students_t() -> None:
    """With two degrees of freedom, P(|T| > t) = 1 - t / sqrt(2 + t^2)."""
    interval = mean_interval([1.0, 2.0, 6.0])
    t = 3 / (sqrt(7) / sqrt(3))
    assert interval.p_value == pytest.approx(1 - t / sqrt(2 + t * t))
    assert mean_interval([4.0]).p_value == 1.0


def test_holm_correction_covers_all_comparisons_of_a_table() -> None:
    """p = 0.01, 0.03, 0.04: of three, 0.01 < 0.05 / 3 is rejected, 0.03 > 0.05 / 2 is not, nor is 0.04."""

    def with_p_value(p: float) -> Comparison:
        t = sqrt(2) * (1 - p) / sqrt(1 - (1 - p) ** 2)  # the inverse of the formula above
        return Comparison(Interval(t, 4.302652729911275, 3))

    comparisons = [with_p_value(p) for p in (0.04, 0.01, 0.03)]
    assert [c.difference.p_value for c in comparisons if c.difference] == pytest.approx([0.04, 0.01, 0.03])
    assert [verdict.outcome for verdict in judge_comparisons(comparisons)] == ["", "better", ""]
    assert [judge_comparisons([comparison])[0].outcome for comparison in comparisons] == ["better"] * 3


def test_tables_of_equal_methods_rarely_have_a_verdict() -> None:
    """Ten methods equal to the baseline, three seeds: at most 5 % of tables may have a verdict.

    Bound: 5 % and three standard deviations of the share among 2,000 tables. (Without a correction: 35 %.)
    """
    rng, tables, wrong = np.random.RandomState(0), 2000, 0
    for _ in range(tables):
        accuracy = 80 + rng.normal(0, 2, (1, 3)) + rng.normal(0, 1, (11, 3))
        baseline, *methods = (dict(enumerate(row)) for row in accuracy.tolist())
        verdicts = judge_comparisons([Comparison(paired_differences(method, baseline)) for method in methods])
        wrong += any(verdict.outcome for verdict in verdicts)
    assert wrong / tables <= SIGNIFICANCE_LEVEL + 3 * sqrt(
        SIGNIFICANCE_LEVEL * (1 - SIGNIFICANCE_LEVEL) / tables
    )
