"""Means, their intervals, and paired differences."""

from __future__ import annotations

from math import inf, sqrt

import pytest

from feddbe.results.statistics import Interval, mean_interval, paired_differences


def test_the_interval_of_three_values_is_student_s() -> None:
    found = mean_interval([1.0, 2.0, 6.0])
    assert found.mean == 3
    assert found.half == pytest.approx(4.302652729911275 * sqrt(7) / sqrt(3))  # t of 2 degrees at 0.975
    assert found.n == 3


def test_one_value_says_nothing_about_chance() -> None:
    found = mean_interval([5.0])
    assert found == Interval(5, inf, 1)
    assert found.shown() == "5.00"


def test_pairs_are_of_equal_trials() -> None:
    """The spread that both share is not in the difference."""
    ours, theirs = {0: 11.0, 1: 21.1, 2: 31.0, 7: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 9: 5.0}
    found = paired_differences(ours, theirs)
    assert found is not None
    assert found.n == 3
    assert found.mean == pytest.approx(3.1 / 3)
    assert found.p_value < 0.01 < mean_interval([*ours.values()]).p_value
    assert paired_differences({0: 1.0}, {1: 1.0}) is None


def test_differences_are_shown_with_their_sign() -> None:
    assert Interval(0.5, 1.0, 3).shown(sign=True) == "+0.50 ± 1.00"
