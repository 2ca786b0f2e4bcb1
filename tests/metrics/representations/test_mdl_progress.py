"""Progress of an analysis."""

from __future__ import annotations

from feddbe.metrics.representations.mdl import report_progress, report_progress_to, split_progress


def test_progress_of_a_part_is_scaled_to_the_whole() -> None:
    reported: list[float] = []
    with report_progress_to(reported.append):
        for _ in split_progress(["first client", "second client"]):
            report_progress(0.5)
            report_progress(1.0)
        report_progress(1.0)
    report_progress(0.3)
    assert reported == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_progress_without_listener_is_ignored() -> None:
    assert list(split_progress([1, 2])) == [1, 2]
    report_progress(0.5)
