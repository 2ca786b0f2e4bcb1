"""Trained numbers and random choices are unchanged; a renamed random stream would change all results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.compute import VALUES, compute, names

EXPECTED: dict[str, Any] = json.loads(VALUES.read_text())


def list_differences(value: Any, expected: Any, path: str = "", tolerance: float = 1e-9) -> list[str]:
    """Return the differences of two documents.

    Numbers may differ by `tolerance`, float32 numbers by 1e-3.
    """
    if isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        parts = [(key, value[key], expected[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        parts = [(str(index), *pair) for index, pair in enumerate(zip(value, expected, strict=True))]
    elif isinstance(expected, float) and isinstance(value, float):
        is_close = value == pytest.approx(expected, rel=tolerance, abs=tolerance)
        return [] if is_close else [f"{path}: {value!r} instead of {expected!r}"]
    else:
        return [] if value == expected else [f"{path}: {value!r} instead of {expected!r}"]
    lines = []
    for key, part, expected_part in parts:
        part_tolerance = 1e-3 if key.startswith("float32") else tolerance
        lines += list_differences(part, expected_part, f"{path}/{key}", part_tolerance)
    return lines


@pytest.mark.parametrize("name", names())
def test_value_is_unchanged(name: str) -> None:
    assert list_differences(compute(name), EXPECTED[name], name)[:5] == []


def test_all_stored_values_are_computed() -> None:
    assert sorted(EXPECTED) == sorted(names())
