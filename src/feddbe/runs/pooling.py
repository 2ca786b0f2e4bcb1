"""Representations of several clients, put together: which of their samples, and what comes of the replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from feddbe import measures, seeds
from feddbe.engines.client import Reply
from feddbe.measures.rows import ALL, Row, rows
from feddbe.representations import Points, points
from feddbe.training.task import Task

__all__ = ["asks", "chosen_rows", "pooled", "rows_of"]


def asks(names: Iterable[str]) -> bool:
    """Whether one of these measures is a pooled one."""
    return bool(measures.asked(names) & measures.POOLED)


def chosen_rows(task: Task, client: int) -> tuple[int, ...]:
    """The test samples of a client that pooled measures see, the same in every round."""
    order = seeds.stream(task.seed, "pooled", 0, client).permutation(len(task.split.test[client]))
    return tuple(sorted(order[: measures.POOLED_ROWS].tolist()))


def pooled(replies: Sequence[Reply], moment: str, place: str) -> Points | None:
    """What clients have shown of one place at one moment, in client order; None if nobody has."""
    name = f"{moment}/{place}"
    found = [reply for reply in replies if name in reply.seen and len(reply.seen["y"])]
    if not found:
        return None
    x, y = (np.concatenate([reply.seen[key].numpy() for reply in found]) for key in (name, "y"))
    return points(x, y, np.repeat([reply.client for reply in found], [len(r.seen["y"]) for r in found]))


def rows_of(entry: int, replies: Sequence[Reply], names: Iterable[str]) -> list[Row]:
    """The pooled measures of an entry, at each moment at which clients have shown z_g."""
    lines = []
    for moment in ("before", "adapted", "after"):
        if (seen := pooled(replies, moment, "z_g")) is not None:
            found = measures.pool(names, seen)
            overall = found.pop(ALL, {})
            lines += rows(entry, {client: {moment: numbers} for client, numbers in found.items()})
            lines += [Row(entry, ALL, moment, name, float(v), w) for name, (v, w) in overall.items()]
    return lines
