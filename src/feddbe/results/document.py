"""The document that describes a run (`--json`, `show`), and the readings that tables and pictures share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

from feddbe.config.options import identifying_settings
from feddbe.metrics.records import AT, Aggregates, Record, read_aggregates

Accuracy = Aggregates


class RoundResult(TypedDict):
    """What clients deploy after `round` aggregations; round 0 is the start."""

    round: int
    accuracy: Accuracy | None
    """At the moment that `when` names; None where nothing was evaluated."""
    moment: str
    before: Accuracy | None
    """Of the model as it was received, before the client trains."""
    adapted: Accuracy | None
    """After adapting it to the client, where the method does that."""
    after: Accuracy | None
    """After local training, of those who took part."""
    validation: Accuracy | None
    """On training data that was held out, at the moment that counts in the run (its `when` as stored)."""
    auc: float | None
    train_loss: float | None
    seconds: float
    bytes_up: int
    """Total over the clients that took part, like `bytes_down`."""
    bytes_down: int
    metrics: dict[str, dict[str, dict[str, float]]]
    """What else was measured: moment -> measure -> reading -> value. Moments are also `train`, the training
    data, and `training`, of the training itself."""


class NewClientsResult(TypedDict):
    """Clients that joined after `round`: their accuracy with what they received, and after `epochs`."""

    adaptation: str
    """How they adapted: `full`, or by p_i alone."""
    by_epoch: list[Accuracy]
    """After 1, 2, ... epochs; nothing of an older run, which looked after the last only."""

    round: int
    clients: int
    epochs: int
    before: Accuracy | None
    adapted: Accuracy | None


class AnalysisDocument(TypedDict):
    """What was measured of the representations in an entry when the run was over (`feddbe measure`)."""

    round: int
    analysis: str
    layer: str
    moment: str
    quick: bool
    """With less work than the full measure."""
    per_client: bool
    """Of each client's samples alone; `overall` is then the plain mean over clients."""
    samples: int
    settings: dict[str, Any]
    """With what it was taken; `samples` there is how many were asked for, null for all."""
    seconds: float
    overall: dict[str, float | None]
    """By reading; the measure's own number is `value`."""
    clients: dict[str, dict[str, float | None]]


class Divergence(TypedDict):
    """Where a run ended because something was not finite; the rounds before are kept."""

    round: int
    client: int
    what: str
    """What was not finite, such as `loss`; `value` is how it is written."""
    value: str


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
    rounds: list[RoundResult]
    best: RoundResult | None
    """The entry with the highest weighted accuracy: on validation data if there is some, otherwise on test
    data, which flatters."""
    last: RoundResult | None
    majority_accuracy: float
    """Weighted accuracy if each client always answers its own most frequent training label."""
    new_clients: NewClientsResult | None
    analyses: list[AnalysisDocument]
    """What was measured of its representations since, in the order in which it was first asked."""
    bn_buffers: str | None
    """Where BatchNorm statistics are kept: `local` or `average`; None: the model has none."""
    note: str
    """What a reader must know of the data, such as that it is a subset; often nothing."""
    remarks: list[str]
    """What a reader must know of this run: options that did nothing."""
    diverged: Divergence | None
    """Why it has fewer rounds than were wanted, if training diverged."""
    trainers: list[str]
    """Who trained: `autograd`, or one of those that have a step written out."""
    cost: Cost
    label_names: list[str]
    """The classes in their order; empty in a run from before they were kept."""
    client_names: list[str]
    """The clients in their order; empty where they have numbers only."""
    shift_labels: list[str]
    """What was done to each client's images (`--shift`), in words; empty without."""
    server_sha256: str
    clients_sha256: dict[str, str]
    peak_rss_mb: float
    begun: str
    """When, as in 2026-11-17T05:20:00.000+00:00."""
    versions: dict[str, str]
    """Of what numbers depend on: torch, numpy and others, when it began."""
    folder: str


def build_round_result(round: int, when: str, overall: Sequence[Record]) -> RoundResult:
    """An entry from its rows of all clients; `when` is the moment that counts."""
    found = read_aggregates([row for row in overall if AT not in row.name])
    whole = {name: read["weighted"] for name, read in found.pop("round").items()}
    moments = {
        moment: cast(Accuracy | None, numbers.pop("accuracy", None)) for moment, numbers in found.items()
    }
    for name in whole:  # clients' parts of what is there in total
        found.get("training", {}).pop(name, None)
    loss = found.get("training", {}).get("loss") or {}
    return RoundResult(
        round=round,
        accuracy=moments.get(when),
        moment=when if moments.get(when) else "before",
        before=moments.get("before"),
        adapted=moments.get("adapted"),
        after=moments.get("after"),
        validation=moments.get("validation"),
        auc=found.get(when, {}).get("auc", {}).get("weighted"),
        train_loss=loss.get("weighted"),
        seconds=whole["seconds"],
        bytes_up=int(whole["bytes_up"]),
        bytes_down=int(whole["bytes_down"]),
        metrics={moment: numbers for moment, numbers in found.items() if numbers},
    )


def build_new_clients_result(about: Mapping[str, Any], overall: Sequence[Record]) -> NewClientsResult:
    """What newcomers came to: `about` them, and the rows of all of them."""
    found = read_aggregates(overall)
    measured: Any = {
        when: found.get(f"newcomers {when}", {}).get("accuracy") for when in ("before", "adapted")
    }
    each = [found.get(f"newcomers adapted {e}", {}).get("accuracy") for e in range(1, about["epochs"])]
    each.append(measured["adapted"])
    return cast(
        NewClientsResult, {"adaptation": "full", **about, **measured, "by_epoch": each if all(each) else []}
    )


_MOMENTS = {
    "before": "before local training",
    "adapted": "after adapting to the client",
    "after": "after local training",
}


def describe_moment(moment: str) -> str:
    """An entry's `when` in words; one that is not known stands for itself."""
    return _MOMENTS.get(moment, moment)


def at_moment(document: RunDocument, moment: str) -> RunDocument:
    """Return the run read at another moment: `before`, `adapted` or `after`.

    If data was held out, it still chooses the best round, by its accuracy at the run's own moment.
    """
    rounds: Any = [{**e, "accuracy": e.get(moment), "moment": moment} for e in document["rounds"]]
    known = [entry for entry in rounds if entry["accuracy"]]
    best, last = max(known, key=selection_accuracy, default=None), known[-1] if known else None
    return {**document, "rounds": rounds, "best": best, "last": last}


def selection_accuracy(result: RoundResult) -> float:
    """What the best round is chosen by; below all others where nothing was evaluated."""
    found = result["validation"] or result["accuracy"]
    return found["weighted"] if found else -1.0


def accuracy_curve(document: RunDocument) -> list[tuple[int, float]]:
    """The learning curve: (round, weighted accuracy in percent) of every evaluated entry."""
    return [(e["round"], 100 * e["accuracy"]["weighted"]) for e in document["rounds"] if e["accuracy"]]


def metric_names(documents: Sequence[RunDocument]) -> list[str]:
    """Return the metrics other than accuracy that any run has for its rounds, such as `auc` and `loss`.

    A metric that a user registers with `@measure` and selects with `--metrics` is among them.
    """
    entries = [entry for document in documents for entry in document["rounds"]]
    moments = [
        entry["metrics"].get(moment, {}) for entry in entries for moment in (entry["moment"], "training")
    ]
    return list(dict.fromkeys(name for numbers in moments for name in numbers))


def metric_value(result: RoundResult, name: str) -> float | None:
    """Return a metric at the moment that counts, weighted over clients; else that of the training."""
    measures = result["metrics"]
    numbers = measures.get(result["moment"], {}).get(name) or measures.get("training", {}).get(name)
    return numbers["weighted"] if numbers else None


def status_note(document: RunDocument) -> str:
    """What a reader must know of where a run ended; nothing if all was well."""
    mark = document["diverged"]
    return f"diverged in round {mark['round']}" if mark else ""


def run_title(documents: Sequence[RunDocument]) -> str:
    """What runs are about: data, clients, rounds (those wanted, of one that diverged) and seeds."""

    def told(values: Iterable[Any]) -> str:
        return " or ".join(dict.fromkeys(str(value) for value in values if value is not None))

    settings = [document["config"] for document in documents]
    done = [d["config"].get("rounds") if d["diverged"] else len(d["rounds"]) - 1 for d in documents]
    clients, seeds = told(s.get("clients") for s in settings), sorted({s.get("seed", 0) for s in settings})
    row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    words = [
        told(Path(s.get("data", "")).name for s in settings),
        told(s.get("partition") for s in settings),
        f"{clients} clients" if clients else "",
        f"{told(max(0, rounds or 0) for rounds in done)} rounds",
        f"seed{'s' * (len(seeds) > 1)} {f'{seeds[0]} to {seeds[-1]}' if row else ', '.join(map(str, seeds))}",
    ]
    return ", ".join(filter(None, words))


def is_fine_tuned(document: RunDocument) -> list[tuple[int, float]]:
    """The newcomers' curve: (epoch, weighted accuracy in percent), epoch 0 being the model as received;
    nothing where it was not looked at after each."""
    new = document["new_clients"]
    found = [new["before"], *new["by_epoch"]] if new and new["by_epoch"] else []
    return [(epoch, 100 * accuracy["weighted"]) for epoch, accuracy in enumerate(found) if accuracy]


def run_labels(documents: Sequence[RunDocument], *, seed: bool = True) -> list[str]:
    """A name for each run: its method, and where others have the same one, the settings that tell them apart
    (`seed`: that one, too). Of those on other data only that is said: much follows from it."""
    found = []
    for document in documents:
        settings = distinguishing_settings(document, documents, seed=seed)
        found.append(", ".join([document["method"], *(f"{key} {value}" for key, value in settings.items())]))
    return found


def distinguishing_settings(
    document: RunDocument, documents: Sequence[RunDocument], *, seed: bool
) -> dict[str, Any]:
    """Return the settings that tell a run from others of the same method (`seed`: that one, too)."""
    peers = [
        identifying_settings(d["config"], seed=seed) for d in documents if d["method"] == document["method"]
    ]
    mine = identifying_settings(document["config"], seed=seed)
    near = [peer for peer in peers if peer.get("data") == mine.get("data")]
    keys = dict.fromkeys(key for peer in near for key in peer if key != "method")
    differ = [key for key in keys if any(p.get(key) != mine.get(key) for p in near)]
    differ[:0] = ["data"] * (len(near) < len(peers))
    return {key: mine.get(key, "-") for key in differ}


Extent = tuple[int, int | None]
"""(Rounds, patience) of a run that is finished under a patience, otherwise (last evaluated round, None)."""


def is_finished(document: RunDocument) -> bool:
    """Return whether the run has the rounds that it was asked for, or was ended by its patience."""
    settings = document["config"]
    return best_so_far(document, settings["rounds"], settings.get("patience"))


def best_so_far(document: RunDocument, rounds: int, patience: int | None) -> bool:
    """Return whether the run was evaluated after `rounds` rounds, or would have been ended by `patience`."""
    scores = [selection_accuracy(entry) for entry in document["rounds"] if entry["accuracy"]]
    return bool(scores) and (last_round(document) >= rounds or _is_impatient(scores, patience))


def last_round(document: RunDocument) -> int:
    """Return the last evaluated round, or -1."""
    return document["last"]["round"] if document["last"] else -1


def run_extent(document: RunDocument) -> Extent:
    """Return the length of a run, equal for runs whose best rounds may be compared.

    Under one patience and one number of rounds, runs end where the rule ends them: they are equally long.
    """
    rounds, patience = document["config"].get("rounds"), document["config"].get("patience")
    if rounds is not None and patience is not None and best_so_far(document, rounds, patience):
        return rounds, patience
    return last_round(document), None


def truncate_run(document: RunDocument, rounds: int, patience: int | None) -> RunDocument:
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
        "best": max(evaluated, key=selection_accuracy, default=None),
        "last": evaluated[-1] if evaluated else None,
        "new_clients": None,
        "analyses": [taken for taken in document["analyses"] if taken["round"] in numbers],
        "diverged": diverged,
        "cost": {**document["cost"], "seconds": median(seconds) if seconds else 0.0},
        "server_sha256": "",
        "clients_sha256": {},
    }


def _first_entries(entries: Sequence[RoundResult], rounds: int, patience: int | None) -> list[RoundResult]:
    """Return the entries up to `rounds`, or up to the one after which the run does not resume.

    The loop sees that its patience is exhausted one entry late, and evaluates that one, too.
    """
    kept: list[RoundResult] = []
    scores: list[float] = []
    for entry in entries:
        if entry["round"] > rounds:
            break
        kept.append(entry)
        if entry["accuracy"]:
            was_impatient = _is_impatient(scores, patience)
            scores.append(selection_accuracy(entry))
            if was_impatient and _is_impatient(scores, patience):
                break
    return kept


def _is_impatient(scores: Sequence[float], patience: int | None) -> bool:
    """Return whether the best score is more than `patience` evaluations old, itself counted."""
    return patience is not None and bool(scores) and len(scores) - scores.index(max(scores)) > patience
