"""Measures of representations: pure functions of points, wherever these come from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe.errors import BadInput


class Points(NamedTuple):
    """Representations of samples, a row each, with their labels and the clients that hold them."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]
    client: npt.NDArray[np.int64]

    def of(self, rows: Any) -> Points:
        """Some of them: by index or by mask."""
        return Points(self.x[rows], self.y[rows], self.client[rows])


def points(x: Any, y: Any, client: Any = None) -> Points:
    """From arrays of any shape (samples first) and type; without clients, all are of one."""
    x = np.asarray(x, dtype=np.float32)
    x = x.reshape(len(x), int(np.prod(x.shape[1:])))
    y = np.asarray(y, dtype=np.int64)
    client = np.zeros(len(x), np.int64) if client is None else np.asarray(client, dtype=np.int64)
    if y.shape != (len(x),) or client.shape != (len(x),):
        raise BadInput(f"{len(x)} representations, labels {y.shape}, clients {client.shape}; one of each")
    if not len(x) or not x.shape[1]:
        raise BadInput(f"representations of shape {x.shape}: there is nothing to measure")
    if not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise BadInput(f"representation {bad} has a value that is no finite number; nothing can be measured")
    return Points(x, y, client)
