"""The number that a table has of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from feddbe.results.document import Accuracy, Measurement, RunDocument
from feddbe.results.overhead import overhead
from feddbe.runs.store import Store

__all__ = ["READINGS", "is_accuracy", "is_chosen_on_test", "mdl_of", "places", "published_accuracy", "value"]

Reading = Callable[[RunDocument], float | None]


def value(read: str, document: RunDocument) -> float | None:
    """What is read of this run; None if it does not have it (yet)."""
    if read.startswith("mdl@"):
        found = mdl_of(read, document)
        return found and found["overall"]["value"]  # nats
    return READINGS[read](document)


def places(reads: Iterable[str]) -> list[str]:
    """Where MDL is to be measured for these readings."""
    return list(dict.fromkeys(read.removeprefix("mdl@") for read in reads if read.startswith("mdl@")))


def is_accuracy(read: str) -> bool:
    """Whether more of it is better."""
    return read in ("accuracy", "best", "newcomers")


def is_chosen_on_test(read: str, document: RunDocument) -> bool:
    """Return whether the reading is of a round that was chosen by test accuracy."""
    of_best_round = read == "best" or (read == "accuracy" and _tuned(document) is None)
    return of_best_round and not (document["best"] and document["best"]["validation"])


def published_accuracy(document: RunDocument) -> Accuracy | None:
    """Return the accuracy as published: of the best round; of a method that fine-tunes after the last round
    (FedBABU), after that."""
    return _tuned(document) or (document["best"] and document["best"]["accuracy"])


def _accuracy(document: RunDocument) -> float | None:
    """In percent, as published."""
    return _percent(published_accuracy(document))


def _tuned(document: RunDocument) -> Accuracy | None:
    """Return the accuracy after the fine-tuning that follows the last round, if the method has it."""
    last = document["last"]
    return last["adapted"] if last and last["when"] != "adapted" else None


def _best(document: RunDocument) -> float | None:
    return _percent(document["best"] and document["best"]["accuracy"])


def _newcomers(document: RunDocument) -> float | None:
    """After they have adapted, in percent."""
    return _percent(document["newcomers"] and document["newcomers"]["adapted"])


def _iterations(document: RunDocument) -> float | None:
    """The round of the best accuracy: the paper's are too few to be the one where it stopped."""
    return document["best"] and document["best"]["round"]


def _minutes(document: RunDocument) -> float | None:
    return document["cost"]["seconds"] / 60 if len(document["rounds"]) > 1 else None


def _minutes_to_best(document: RunDocument) -> float | None:
    seconds = overhead(document, None)["seconds_to_best"]
    return None if seconds is None else seconds / 60


def _prbm(document: RunDocument) -> float | None:
    """Numbers in p_i; a run has clients' states after its first round."""
    if "prbm" not in document["config"]["method_options"]:
        return 0
    store = Store.open(Path(document["folder"]))
    try:
        return next((state["prbm"].numel() for _, state in store.clients()), None)
    finally:
        store.close()


def mdl_of(read: str, document: RunDocument) -> Measurement | None:
    """The measurement that an `mdl@PLACE` is: of the best round, before local training; the full measure
    rather than the quick one."""
    best = document["best"]
    wanted = ("mdl", read.partition("@")[2], "before", False, best and best["round"])
    found = [
        one
        for one in document["measured"]
        if (one["what"], one["place"], one["moment"], one["per_client"], one["round"]) == wanted
    ]
    return min(found, key=lambda one: one["quick"], default=None)


def _percent(accuracy: Accuracy | None) -> float | None:
    return 100 * accuracy["weighted"] if accuracy else None


READINGS: Mapping[str, Reading] = {
    "accuracy": _accuracy,
    "best": _best,
    "newcomers": _newcomers,
    "iterations": _iterations,
    "minutes": _minutes,
    "minutes_to_best": _minutes_to_best,
    "prbm": _prbm,
}
"""Besides `mdl@PLACE`."""
