"""What a linear classifier can tell from all clients' representations."""

from __future__ import annotations

from feddbe.measures import measure
from feddbe.measures.rows import ALL, Value
from feddbe.representations import Points
from feddbe.representations.linear_probe import linear_probe

__all__ = ["probe"]


@measure
def probe(points: Points) -> dict[int, Value]:
    """Accuracy of a linear probe on the pooled z_g (`representations/linear_probe.py`), of all together."""
    return {ALL: (linear_probe(points), len(points.y))}
