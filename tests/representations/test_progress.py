"""Shares of a measurement that are done."""

from __future__ import annotations

from feddbe.metrics.representations.mdl import in_parts, listening, report


def test_what_is_reported_in_a_part_is_a_part_of_the_whole() -> None:
    heard: list[float] = []
    with listening(heard.append):
        for _ in in_parts(["first client", "second client"]):
            report(0.5)
            report(1.0)
        report(1.0)
    report(0.3)
    assert heard == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_without_a_listener_nothing_happens() -> None:
    assert list(in_parts([1, 2])) == [1, 2]
    report(0.5)
