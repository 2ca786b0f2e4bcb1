"""What a method does for each of its clients: how their accuracies are spread, and whom it helps or hurts.

Two runs are compared client by client, on the same test data: a client is *helped* by a method if its
accuracy is higher than with the baseline, *hurt* if it is lower. The baselines are `local` (is it worth
taking part?) and FedAvg (is it worth personalizing?).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from feddbe.errors import InvalidInputError
from feddbe.metrics.records import aggregate_clients
from feddbe.results.document import RunDocument, run_labels
from feddbe.results.seeds import PARTITION_OPTIONS, strip_options

BASELINES = ("local", "fedavg")


class Spread(TypedDict):
    """Clients' accuracies as a distribution; fractions of one, every client counted once."""

    clients: int
    mean: float
    std: float
    worst_tenth: float
    """The mean of the ceil(N/10) lowest."""
    lowest: float
    quarter: float
    """The quantile at 1/4; then the median and the quantile at 3/4."""
    median: float
    three_quarters: float
    highest: float


class PairedClients(TypedDict):
    """A method against a baseline, over the `clients` that both have: how many are better off and worse."""

    against: str
    clients: int
    better: int
    equal: int
    worse: int
    helped: float
    """better / clients"""
    hurt: float
    """worse / clients"""
    mean: float
    """Of the differences, method less baseline."""
    lowest: float
    """The largest loss: the lowest difference, below zero if somebody is hurt."""
    differences: dict[int, float]
    """By client."""


class Fairness(TypedDict):
    """One run, in the round that was asked for."""

    name: str
    method: str
    round: int
    moment: str
    accuracy: dict[int, float]
    spread: Spread
    paired: dict[str, PairedClients]
    """By the baseline's method, where it is among the runs."""


def client_spread(accuracy: Mapping[int, float]) -> Spread:
    """How the accuracies (client -> fraction) are spread."""
    found = aggregate_clients([(value, 1) for value in accuracy.values()])
    if found is None:
        raise InvalidInputError("fairness of no client at all: the round has no accuracies")
    lowest, quarter, median, three, highest = np.quantile(list(accuracy.values()), [0, 0.25, 0.5, 0.75, 1])
    return {
        "clients": len(accuracy),
        "mean": found["mean"],
        "std": found["std"],
        "worst_tenth": found["worst_tenth"],
        "lowest": float(lowest),
        "quarter": float(quarter),
        "median": float(median),
        "three_quarters": float(three),
        "highest": float(highest),
    }


def pair_clients(
    accuracy: Mapping[int, float], baseline: Mapping[int, float], against: str = ""
) -> PairedClients:
    """Client by client, of those that both have."""
    common = sorted(accuracy.keys() & baseline.keys())
    if not common:
        raise InvalidInputError(
            f"no client was evaluated in both runs, so there are no pairs against {against or 'it'}"
        )
    differences = {client: accuracy[client] - baseline[client] for client in common}
    better, worse = (sum(sign * d > 0 for d in differences.values()) for sign in (1, -1))
    return {
        "against": against,
        "clients": len(common),
        "better": better,
        "equal": len(common) - better - worse,
        "worse": worse,
        "helped": better / len(common),
        "hurt": worse / len(common),
        "mean": float(np.mean(list(differences.values()))),
        "lowest": min(differences.values()),
        "differences": differences,
    }


def compute_fairness(
    documents: Sequence[RunDocument], accuracies: Sequence[Mapping[int, float]], round: str = "best"
) -> list[Fairness]:
    """Of each run, with its clients' accuracies in the `best` or the `last` round; baselines are found among
    the runs by their method: those whose clients hold the same data, of the same seed if there is one."""
    names = run_labels(documents)
    found: list[Fairness] = []
    for document, name, accuracy in zip(documents, names, accuracies, strict=True):
        entry = document["best" if round == "best" else "last"]
        if entry is None:
            raise InvalidInputError(
                f"{name}: no round has been evaluated yet, so there are no clients to compare"
            )
        pairs: dict[str, PairedClients] = {}
        for baseline in BASELINES:
            other = _baseline(document, documents, baseline)
            if other is not None:
                pairs[baseline] = pair_clients(accuracy, accuracies[other], names[other])
        found.append(
            Fairness(
                name=name,
                method=document["method"],
                round=entry["round"],
                moment=entry["moment"],
                accuracy=dict(accuracy),
                spread=client_spread(accuracy),
                paired=pairs,
            )
        )
    return found


def _baseline(mine: RunDocument, documents: Sequence[RunDocument], method: str) -> int | None:
    """Which of the runs is the baseline of this one; it is none of its own, nor of other baselines' kind."""
    base = strip_options(mine["method"])

    def holdings(document: RunDocument) -> list[object]:
        return [document["config"].get(key) for key in PARTITION_OPTIONS]

    fits = [
        index
        for index, other in enumerate(documents)
        if strip_options(other["method"]) == method != base and holdings(other) == holdings(mine)
    ]
    seed = mine["config"].get("seed")
    return next((i for i in fits if documents[i]["config"].get("seed") == seed), fits[0] if fits else None)


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


def compute_overhead(document: RunDocument, kept: int | None) -> Overhead:
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
