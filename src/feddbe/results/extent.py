"""How far runs have come: whether they are finished, equally long, and a run cut to the rounds asked for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from feddbe.results.document import Entry, RunDocument, score

__all__ = ["Extent", "cut", "extent", "finished", "last_round", "reached"]

Extent = tuple[int, int | None]
"""(Rounds, patience) of a run that is finished under a patience, otherwise (last evaluated round, None)."""


def finished(document: RunDocument) -> bool:
    """Return whether the run has the rounds that it was asked for, or was ended by its patience."""
    settings = document["config"]
    return reached(document, settings["rounds"], settings.get("patience"))


def reached(document: RunDocument, rounds: int, patience: int | None) -> bool:
    """Return whether the run was evaluated after `rounds` rounds, or would have been ended by `patience`."""
    scores = [score(entry) for entry in document["rounds"] if entry["accuracy"]]
    return bool(scores) and (last_round(document) >= rounds or _is_impatient(scores, patience))


def last_round(document: RunDocument) -> int:
    """Return the last evaluated round, or -1."""
    return document["last"]["round"] if document["last"] else -1


def extent(document: RunDocument) -> Extent:
    """Return the length of a run, equal for runs whose best rounds may be compared.

    Under one patience and one number of rounds, runs end where the rule ends them: they are equally long.
    """
    rounds, patience = document["config"].get("rounds"), document["config"].get("patience")
    if rounds is not None and patience is not None and reached(document, rounds, patience):
        return rounds, patience
    return last_round(document), None


def cut(document: RunDocument, rounds: int, patience: int | None) -> RunDocument:
    """Return the run as it was after `rounds` rounds, or where `patience` ends it.

    Fine-tuning and newcomers come after the last round, so a run that is cut does not have them.
    """
    kept = _first_entries(document["rounds"], rounds, patience)
    settings = {**document["config"], "rounds": rounds, "patience": patience}
    mark = document["diverged"]
    diverged = mark if mark and mark["round"] <= rounds else None
    if len(kept) == len(document["rounds"]):
        return {**document, "config": settings, "diverged": diverged}
    evaluated = [entry for entry in kept if entry["accuracy"]]
    numbers = {entry["round"] for entry in kept}
    seconds = [entry["seconds"] for entry in kept if entry["round"] > 0]
    return {
        **document,
        "config": settings,
        "rounds": kept,
        "best": max(evaluated, key=score, default=None),
        "last": evaluated[-1] if evaluated else None,
        "newcomers": None,
        "measured": [taken for taken in document["measured"] if taken["round"] in numbers],
        "diverged": diverged,
        "cost": {**document["cost"], "seconds": median(seconds) if seconds else 0.0},
        "server_sha256": "",
        "clients_sha256": {},
    }


def _first_entries(entries: Sequence[Entry], rounds: int, patience: int | None) -> list[Entry]:
    """Return the entries up to `rounds`, or up to the one after which the run does not resume.

    The loop sees that its patience is exhausted one entry late, and evaluates that one, too.
    """
    kept: list[Entry] = []
    scores: list[float] = []
    for entry in entries:
        if entry["round"] > rounds:
            break
        kept.append(entry)
        if entry["accuracy"]:
            was_impatient = _is_impatient(scores, patience)
            scores.append(score(entry))
            if was_impatient and _is_impatient(scores, patience):
                break
    return kept


def _is_impatient(scores: Sequence[float], patience: int | None) -> bool:
    """Return whether the best score is more than `patience` evaluations old, itself counted."""
    return patience is not None and bool(scores) and len(scores) - scores.index(max(scores)) > patience
