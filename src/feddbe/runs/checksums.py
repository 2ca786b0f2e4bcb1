"""Checksums of what a run's file holds."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

from feddbe.measures.rows import Row

__all__ = ["crc_of", "sealed"]


def crc_of(values: tuple[Any, ...]) -> int:
    """Of numbers and text as SQLite gives them back."""
    return crc32(repr(values).encode())


def sealed(row: Row) -> tuple[Any, ...]:
    """A row as SQLite gives it back, and its checksum."""
    round, client, moment, name, value, weight = row
    number = None if value is None or math.isnan(value) else float(value) + 0.0  # SQLite has no nan and no -0
    values = (int(round), int(client), moment, name, number, float(weight))
    return (*values, crc_of(values))
