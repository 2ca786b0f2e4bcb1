"""How far clients' representations have drifted apart."""

from __future__ import annotations

import numpy as np

from feddbe.measures import measure
from feddbe.measures.rows import Value
from feddbe.representations import Points
from feddbe.representations.discrepancy import mean_distances

__all__ = ["drift"]


@measure
def drift(points: Points) -> dict[int, Value]:
    """Of each client, the distance of its mean z_g from that of the others, in units of the spread within
    clients (`representations/discrepancy.py`); it counts for as many samples as were looked at."""
    counts = dict(zip(*(a.tolist() for a in np.unique(points.client, return_counts=True)), strict=True))
    return {client: (value, counts[client]) for client, value in mean_distances(points).items()}
