"""Shares of a measurement that are done."""

from __future__ import annotations

from feddbe.metrics.representations.mdl import report_progress, report_progress_to, split_progress


def test_what_is_reported_in_a_part_is_a_part_of_the_whole() -> None:
    heard: list[float] = []
    with report_progress_to(heard.append):
        for _ in split_progress(["first client", "second client"]):
            report_progress(0.5)
            report_progress(1.0)
        report_progress(1.0)
    report_progress(0.3)
    assert heard == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_without_a_listener_nothing_happens() -> None:
    assert list(split_progress([1, 2])) == [1, 2]
    report_progress(0.5)
