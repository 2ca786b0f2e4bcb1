"""Metrics of every round, by name."""

from feddbe.metrics.registry import POOLED, POOLED_ROWS, asked, known, measure, parse, pool, take

__all__ = ["POOLED", "POOLED_ROWS", "asked", "known", "measure", "parse", "pool", "take"]
