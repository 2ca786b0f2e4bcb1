"""The table of newcomers: their accuracy after each epoch of adapting, one line per run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from feddbe.results.document import RunDocument, adapting, labels
from feddbe.show.cells import caption, plain_table

__all__ = ["newcomers_table"]

_COLUMNS = 8
"""So many epochs fit beside a method's name in 80 columns."""


def newcomers_table(documents: Sequence[RunDocument]) -> list[RenderableType]:
    """One table with its caption, or none if no run has looked after each epoch."""
    runs = [(d, name) for d, name in zip(documents, labels(documents), strict=True) if adapting(d)]
    if not runs:
        return []
    epochs = _chosen(max(adapting(d)[-1][0] for d, _ in runs))
    table = plain_table(gap=2)
    table.add_column("newcomers after", overflow="fold")
    for epoch in epochs:
        table.add_column(f"{epoch}", justify="right", no_wrap=True)
    for document, name in runs:
        found = dict(adapting(document))
        numbers = [f"{found[epoch]:.2f}" if epoch in found else "-" for epoch in epochs]
        table.add_row(Text(name, style="bold"), *numbers)
    ways = {d["newcomers"]["way"] for d, _ in runs if d["newcomers"]} - {"full"}
    words = (
        "epochs of adapting: test accuracy in % of clients that took no part in the training, weighted by "
        "samples; 0 is the model as it was received."
    )
    return [
        table,
        caption(words + "".join(f" {way.capitalize()}: {_WAYS.get(way, way)}." for way in sorted(ways))),
    ]


_WAYS = {
    "prbm": "only p_i was trained",
    "newton": "p_i is one Newton step, with the ridge of so many epochs",
    "mean": "p_i is the global mean less the client's, whatever the epochs",
}


def _chosen(last: int) -> list[int]:
    """0, the last, and what fits between them, evenly in proportion."""
    if last < _COLUMNS:
        return list(range(last + 1))
    return sorted({0, *(int(e) for e in np.geomspace(1, last, _COLUMNS - 1).round())})
