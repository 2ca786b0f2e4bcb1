"""Metrics of every round, by name."""

from feddbe.metrics.builtin import (
    POOLED,
    POOLED_SAMPLES,
    compute,
    compute_pooled,
    metric,
    parse_metrics,
    registered_metrics,
    required_inputs,
)

__all__ = [
    "POOLED",
    "POOLED_SAMPLES",
    "compute",
    "compute_pooled",
    "metric",
    "parse_metrics",
    "registered_metrics",
    "required_inputs",
]
