"""The document that describes a run (`--json`, `show`), and the readings that tables and pictures share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

__all__ = ["Accuracy", "Cost", "Entry", "RunDocument", "labels", "moment", "points"]


class Accuracy(TypedDict):
    """Test accuracy over clients, as fractions of one."""

    weighted: float
    """By samples: all correct answers over all test samples."""
    mean: float
    """The plain mean of the clients' accuracies."""
    worst_tenth: float
    """The plain mean of the ceil(N/10) lowest clients."""
    std: float
    """The standard deviation between clients."""


class Entry(TypedDict):
    """What clients deploy after `round` aggregations; round 0 is the start."""

    round: int
    accuracy: Accuracy | None
    """At the moment that `when` names; None where nothing was evaluated."""
    when: str
    adapted: Accuracy | None
    after: Accuracy | None
    auc: float | None
    train_loss: float | None
    seconds: float
    bytes_up: int
    """Total over the clients that took part, like `bytes_down`."""
    bytes_down: int


class Cost(TypedDict):
    """What a round costs: bytes `up` and `down` per client that takes part, and `seconds`."""

    up: float
    down: float
    seconds: float


class RunDocument(TypedDict):
    """One run: its configuration, one entry per round (0..T), and what they come to."""

    method: str
    config: dict[str, Any]
    config_hash: str
    rounds: list[Entry]
    best: Entry | None
    """The entry with the highest weighted accuracy: chosen on test data, so it flatters."""
    last: Entry | None
    floor: float
    """Weighted accuracy if each client always answers its own most frequent training label."""
    bn_buffers: str | None
    """Where BatchNorm statistics are kept: `local` or `average`; None: the model has none."""
    cost: Cost
    server_sha256: str
    clients_sha256: dict[str, str]
    peak_rss_mb: float
    folder: str


_MOMENTS = {
    "before": "before local training",
    "adapted": "after adapting to the client",
    "after": "after local training",
}


def moment(when: str) -> str:
    """An entry's `when` in words; one that is not known stands for itself."""
    return _MOMENTS.get(when, when)


def points(document: RunDocument) -> list[tuple[int, float]]:
    """The learning curve: (round, weighted accuracy in percent) of every evaluated entry."""
    return [(e["round"], 100 * e["accuracy"]["weighted"]) for e in document["rounds"] if e["accuracy"]]


def labels(documents: Sequence[RunDocument], ignore: Collection[str] = ()) -> list[str]:
    """A name for each run: its method, and where others have the same one, the settings that differ.

    Settings in `ignore` are never named.
    """
    return [_label(document, documents, ignore) for document in documents]


def _label(document: RunDocument, documents: Sequence[RunDocument], ignore: Collection[str]) -> str:
    peers = [d["config"] for d in documents if d["method"] == document["method"]]
    keys = dict.fromkeys(key for peer in peers for key in peer if key not in ignore)
    differ = [key for key in keys if any(p.get(key) != peers[0].get(key) for p in peers)]
    return ", ".join([document["method"], *(f"{key} {document['config'].get(key, '-')}" for key in differ)])
