"""Verdicts: by hand, and their rate among equal methods."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from feddbe.results.statistics import (
    SIGNIFICANCE_LEVEL,
    Comparison,
    Interval,
    Repetition,
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


def test_two_pairs_have_no_verdict() -> None:
    assert outcome(5.0, 5.1) == "fewer than 3 pairs"
    assert outcome(5.0) == "fewer than 3 pairs"


def test_difference_below_one_test_sample_has_no_verdict() -> None:
    comparison = Comparison(mean_interval([0.31, 0.32, 0.33]), one_sample=0.33)
    assert str(*judge_comparisons([comparison])) == "less than one test sample"
    assert str(*judge_comparisons([comparison._replace(one_sample=0.31)])) == "better"


def test_holm_correction_counts_differences_below_one_test_sample() -> None:
    """Whether a difference is that small is known only from the test data."""
    clear = Comparison(mean_interval([5.0, 5.5, 6.0]))
    assert clear.difference is not None
    assert 0.0025 < clear.difference.p_value < 0.05 / 10
    small = Comparison(mean_interval([0.01, 0.02, 0.06]), one_sample=0.1)
    assert judge_comparisons([clear, *[small] * 9])[0].outcome == "better"
    assert judge_comparisons([clear, *[small] * 19])[0].outcome == ""


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


def share_with_verdict(
    tables: int, draw_table: Callable[[np.random.RandomState], NDArray[np.float64]]
) -> float:
    """Return the share of tables with any verdict: ten methods against a baseline, on 1,000 test samples.

    Args:
        tables: Number of tables.
        draw_table: Returns the accuracies in percent, (baseline and methods) x (seeds) x (partitions).
    """
    rng, wrong = np.random.RandomState(0), 0
    for _ in range(tables):
        accuracy = draw_table(rng).round(1)  # one test sample is 0.1
        baseline, *methods = (
            {Repetition(*indices): float(value) for indices, value in np.ndenumerate(row)} for row in accuracy
        )
        differences = [paired_differences(method, baseline) for method in methods]
        verdicts = judge_comparisons([Comparison(item, one_sample=0.1) for item in differences])
        wrong += any(verdict.outcome for verdict in verdicts)
    return wrong / tables


def unequal_noise(rng: np.random.RandomState) -> NDArray[np.float64]:
    """Return equal methods on three seeds, with noise from 0.05 to 3 points that differs between methods."""
    noise = np.exp(rng.uniform(np.log(0.05), np.log(3), (11, 1, 1)))
    return 80 + rng.normal(0, 2, (1, 3, 1)) + noise * rng.normal(0, 1, (11, 3, 1))


def test_tables_of_equal_methods_rarely_have_a_verdict() -> None:
    """Ten methods equal to the baseline, three seeds, unequal noise: at most 5 % of 2,000 tables.

    Without a correction, 27 % of them have a verdict.
    """
    assert share_with_verdict(2000, unequal_noise) <= SIGNIFICANCE_LEVEL


def crossed(rng: np.random.RandomState) -> NDArray[np.float64]:
    """Return equal methods on three seeds x three partitions; some partitions suit some methods."""
    shared = rng.normal(0, 3, (1, 1, 3)) + rng.normal(0, 1, (11, 1, 3)) + rng.normal(0, 0.5, (11, 3, 1))
    return 80 + shared + rng.normal(0, 0.3, (11, 3, 3))


def test_runs_that_share_a_partition_are_not_independent_repetitions() -> None:
    """As nine independent pairs, 58 % of these tables would have a verdict."""
    assert share_with_verdict(2000, crossed) <= SIGNIFICANCE_LEVEL


@pytest.mark.parametrize(("methods", "seeds"), [(1, 3), (10, 5)])
def test_clear_difference_has_a_verdict(methods: int, seeds: int) -> None:
    """One method is better by six standard deviations of its differences, the others are equal."""
    rng, detected = np.random.RandomState(0), 0
    for _ in range(500):
        differences = rng.normal(0, 0.5, (methods, seeds))
        differences[0] += 3
        verdicts = judge_comparisons([Comparison(mean_interval(row), one_sample=0.1) for row in differences])
        detected += verdicts[0].outcome == "better"
    assert detected / 500 > 0.9
