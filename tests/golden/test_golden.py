"""Trained numbers and random choices are what they were: a renamed random stream changes all results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.compute import VALUES, compute, names

EXPECTED: dict[str, Any] = json.loads(VALUES.read_text())


def differences(value: Any, expected: Any, path: str = "", tolerance: float = 1e-9) -> list[str]:
    """Return where two documents differ; numbers may differ by `tolerance`, those of float32 by more."""
    if isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        parts = [(key, value[key], expected[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        parts = [(str(i), *pair) for i, pair in enumerate(zip(value, expected, strict=True))]
    elif isinstance(expected, float) and isinstance(value, float):
        close = value == pytest.approx(expected, rel=tolerance, abs=tolerance)
        return [] if close else [f"{path}: {value!r} instead of {expected!r}"]
    else:
        return [] if value == expected else [f"{path}: {value!r} instead of {expected!r}"]
    lists = [
        differences(v, e, f"{path}/{key}", 1e-3 if key.startswith("float32") else tolerance)
        for key, v, e in parts
    ]
    return [line for lines in lists for line in lines]


@pytest.mark.parametrize("name", names())
def test_value_is_unchanged(name: str) -> None:
    assert differences(compute(name), EXPECTED[name], name)[:5] == []


def test_every_value_is_computed() -> None:
    assert sorted(EXPECTED) == sorted(names())
