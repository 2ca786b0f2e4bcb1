"""Analyses of representations."""

from feddbe.metrics.representations.points import Points, make_points

__all__ = ["Points", "make_points"]
