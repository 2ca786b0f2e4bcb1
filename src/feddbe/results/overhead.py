"""What a method costs: time, traffic, what clients must keep, memory; all from what a run recorded."""

from __future__ import annotations

from typing import TypedDict

from feddbe.results.document import RunDocument

__all__ = ["Overhead", "overhead"]


class Overhead(TypedDict):
    """One run. Bytes are those of the messages' numbers, as sent; evaluation costs none."""

    method: str
    rounds: int
    """Aggregations that were done."""
    seconds: float
    """Wall clock of the median round, evaluation included."""
    preparation: float
    """Seconds before the first round: MR's initialization period, for one."""
    best: int | None
    """The round with the highest accuracy."""
    seconds_to_best: float | None
    """Preparation and all rounds up to it."""
    up: float
    """Bytes per client and round, without the preparation; what is sent once is spread over all rounds."""
    down: float
    total_up: int
    """Bytes of the whole run, preparation included."""
    total_down: int
    kept: int | None
    """Numbers that a client keeps from round to round: its own parameters, p_i, control variates, BatchNorm
    statistics. None where clients keep them elsewhere."""
    memory_mb: float
    """The most that the process and its workers used in a round, shared pages counted once."""


def overhead(document: RunDocument, kept: int | None) -> Overhead:
    """Of one run; `kept` is not in its document, because only the clients' states say it."""
    entries, best = document["rounds"], document["best"]
    until = [entry["seconds"] for entry in entries if best is not None and entry["round"] <= best["round"]]
    return {
        "method": document["method"],
        "rounds": max((entry["round"] for entry in entries), default=0),
        "seconds": document["cost"]["seconds"],
        "preparation": sum(entry["seconds"] for entry in entries if entry["round"] == 0),
        "best": best["round"] if best else None,
        "seconds_to_best": sum(until) if best else None,
        "up": document["cost"]["up"],
        "down": document["cost"]["down"],
        "total_up": sum(entry["bytes_up"] for entry in entries),
        "total_down": sum(entry["bytes_down"] for entry in entries),
        "kept": kept,
        "memory_mb": document["peak_rss_mb"],
    }
