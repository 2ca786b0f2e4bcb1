"""Fairness and overhead: the spread of accuracies over clients, clients that a method helps or hurts, costs.

Two runs are compared client by client, on the same test data: a client is *helped* by a method if its
accuracy is higher than with the baseline, *hurt* if it is lower. The baselines are `local` (is it worth
participating?) and FedAvg (is it worth personalizing?).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from feddbe.errors import InvalidInputError
from feddbe.metrics.client_values import aggregate_clients
from feddbe.results.document import RoundResult, RunDocument, compared_result, deployed_result, run_labels
from feddbe.results.repetitions import PARTITION_OPTIONS, strip_options

BASELINES = ("local", "fedavg")


class Spread(TypedDict):
    """Distribution of the clients' accuracies, as fractions; every client counts once."""

    clients: int
    mean: float
    std: float
    worst_tenth: float
    """Mean of the ceil(N/10) lowest."""
    lowest: float
    quarter: float
    """Quantile at 1/4, followed by the median and the quantile at 3/4."""
    median: float
    three_quarters: float
    highest: float


class PairedClients(TypedDict):
    """A method compared with a baseline over their common `clients`: numbers of better and worse ones."""

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
    """Mean of the differences, method minus baseline."""
    lowest: float
    """Lowest difference, below zero if a client is hurt."""
    differences: dict[int, float]
    """Differences by client."""


class Fairness(TypedDict):
    """Fairness of one run in the requested round."""

    name: str
    method: str
    round: int
    chosen_on_test: bool
    """True if the round has the highest of the test accuracies, which is too high."""
    moment: str
    """Moment at which the method's model is deployed."""
    accuracy: dict[int, float]
    spread: Spread
    paired: dict[str, PairedClients]
    """Comparisons by the baseline's method, if it is among the runs."""


def client_spread(accuracy: Mapping[int, float]) -> Spread:
    """Return the distribution of the accuracies (client -> fraction)."""
    aggregates = aggregate_clients([(value, 1) for value in accuracy.values()])
    if aggregates is None:
        raise InvalidInputError("fairness is not defined without clients: the round has no accuracies")
    quantiles = np.quantile(list(accuracy.values()), [0, 0.25, 0.5, 0.75, 1])
    lowest, quarter, median, three_quarters, highest = (float(value) for value in quantiles)
    return {
        "clients": len(accuracy),
        "mean": aggregates["mean"],
        "std": aggregates["std"],
        "worst_tenth": aggregates["worst_tenth"],
        "lowest": lowest,
        "quarter": quarter,
        "median": median,
        "three_quarters": three_quarters,
        "highest": highest,
    }


def pair_clients(
    accuracy: Mapping[int, float], baseline: Mapping[int, float], against: str = ""
) -> PairedClients:
    """Return the comparison of two runs over their common clients.

    Args:
        accuracy: Accuracies of the method by client.
        baseline: Accuracies of the baseline by client.
        against: Name of the baseline.

    Raises:
        InvalidInputError: No client is in both.
    """
    common = sorted(accuracy.keys() & baseline.keys())
    if not common:
        raise InvalidInputError(
            f"no client was evaluated in both runs: cannot compare with {against or 'the baseline'}"
        )
    differences = {client: accuracy[client] - baseline[client] for client in common}
    better = sum(difference > 0 for difference in differences.values())
    worse = sum(difference < 0 for difference in differences.values())
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


def requested_result(document: RunDocument, which_round: str | None) -> RoundResult | None:
    """Return the result in which clients are compared, at the moment at which the model is deployed.

    Args:
        document: The run.
        which_round: `best` or `last`; None: the round by which tables over seeds compare methods.
    """
    return deployed_result(document, which_round) if which_round else compared_result(document)


def compute_fairness(
    documents: Sequence[RunDocument],
    accuracies: Sequence[Mapping[int, float]],
    which_round: str | None = None,
) -> list[Fairness]:
    """Return the fairness of each run, compared with the baselines among the runs.

    A baseline's clients must have the same data. A baseline with the same seed is preferred.

    Args:
        documents: The runs.
        accuracies: Accuracies of each run's clients in the requested round, of the model that they deploy.
        which_round: See `requested_result`.

    Raises:
        InvalidInputError: A run has no evaluated round.
    """
    names = run_labels(documents)
    results: list[Fairness] = []
    for document, name, accuracy in zip(documents, names, accuracies, strict=True):
        result = requested_result(document, which_round)
        if result is None:
            raise InvalidInputError(
                f"{name}: no round has been evaluated yet; there are no clients to compare"
            )
        pairs: dict[str, PairedClients] = {}
        for baseline in BASELINES:
            index = _find_baseline(document, documents, baseline)
            if index is not None:
                pairs[baseline] = pair_clients(accuracy, accuracies[index], names[index])
        results.append(
            Fairness(
                name=name,
                method=document["method"],
                round=result["round"],
                chosen_on_test=which_round == "best" and _is_chosen_on_test(document, result),
                moment=result["moment"],
                accuracy=dict(accuracy),
                spread=client_spread(accuracy),
                paired=pairs,
            )
        )
    return results


def _is_chosen_on_test(document: RunDocument, result: RoundResult) -> bool:
    """Return True if this is the best round, selected without validation data."""
    best = document["best"]
    return best is not None and best["validation"] is None and best["round"] == result["round"]


def _find_baseline(document: RunDocument, documents: Sequence[RunDocument], method: str) -> int | None:
    """Return the index of the run's baseline of this method; a baseline is not compared with itself."""

    def partition_settings(run: RunDocument) -> list[object]:
        return [run["config"].get(key) for key in PARTITION_OPTIONS]

    if strip_options(document["method"]) == method:
        return None
    candidates = [
        index
        for index, run in enumerate(documents)
        if strip_options(run["method"]) == method and partition_settings(run) == partition_settings(document)
    ]
    for index in candidates:
        if documents[index]["config"].get("seed") == document["config"].get("seed"):
            return index
    return candidates[0] if candidates else None


class Overhead(TypedDict):
    """Overhead of one run. Bytes are those of the sent tensors; evaluation sends none."""

    method: str
    rounds: int
    """Number of aggregations."""
    seconds: float
    """Wall-clock time of the median round, including evaluation."""
    preparation: float
    """Seconds of the setup before round 1, such as MR's initialization."""
    best: int | None
    """Round with the highest accuracy."""
    seconds_to_best: float | None
    """Seconds of the setup and of all rounds up to the best."""
    up: float
    """Bytes per client and round without the setup; tensors sent once are averaged over all rounds."""
    down: float
    total_up: int
    """Bytes of the whole run, including the setup."""
    total_down: int
    kept: int | None
    """Numbers that a client keeps between rounds: personal parameters, p_i, control variates, BatchNorm
    statistics. None if clients keep them outside the run's file."""
    memory_mb: float
    """Peak memory of the process and its workers in a round; shared pages count once."""


def compute_overhead(document: RunDocument, kept: int | None) -> Overhead:
    """Return the overhead of a run; `kept` comes from the clients' states, not from the document."""
    results, best = document["rounds"], document["best"]
    seconds_to_best = None
    if best:
        seconds_to_best = sum(result["seconds"] for result in results if result["round"] <= best["round"])
    return {
        "method": document["method"],
        "rounds": max((result["round"] for result in results), default=0),
        "seconds": document["cost"]["seconds"],
        "preparation": sum(result["seconds"] for result in results if result["round"] == 0),
        "best": best["round"] if best else None,
        "seconds_to_best": seconds_to_best,
        "up": document["cost"]["up"],
        "down": document["cost"]["down"],
        "total_up": sum(result["bytes_up"] for result in results),
        "total_down": sum(result["bytes_down"] for result in results),
        "kept": kept,
        "memory_mb": document["peak_rss_mb"],
    }
