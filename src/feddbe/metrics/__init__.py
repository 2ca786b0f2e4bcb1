"""Metrics of every round, by name."""

from feddbe.metrics.builtin import POOLED, POOLED_ROWS, asked, known, measure, parse, pool, take

__all__ = ["POOLED", "POOLED_ROWS", "asked", "known", "measure", "parse", "pool", "take"]
