"""Measures of representations."""

from feddbe.metrics.representations.points import Points, points

__all__ = ["Points", "points"]
