"""Metrics of every round, by name."""

from feddbe.metrics.builtin import (
    POOLED_INPUTS,
    POOLED_SAMPLES,
    compute_metrics,
    compute_pooled,
    metric,
    parse_metrics,
    required_inputs,
)

__all__ = [
    "POOLED_INPUTS",
    "POOLED_SAMPLES",
    "compute_metrics",
    "compute_pooled",
    "metric",
    "parse_metrics",
    "required_inputs",
]
