"""The document that describes a run (`--json`, `show`), and functions that tables and figures share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

from feddbe.config.options import Config, identifying_settings
from feddbe.metrics.client_values import LAYER_SEPARATOR, Aggregates, Record, read_aggregates

Accuracy = Aggregates


class RoundResult(TypedDict):
    """The model that clients use after `round` aggregations; round 0 is the initial model."""

    round: int
    accuracy: Accuracy | None
    """Accuracy at `moment`; None if nothing was evaluated."""
    moment: str
    before: Accuracy | None
    """Accuracy of the received model, before local training."""
    adapted: Accuracy | None
    """Accuracy after the method adapted the model to the client."""
    after: Accuracy | None
    """Accuracy after local training, of the clients that took part."""
    validation: Accuracy | None
    """Accuracy on held-out training data, at the moment that the run stored."""
    auc: float | None
    train_loss: float | None
    seconds: float
    bytes_up: int
    """Total over the clients that took part, like `bytes_down`."""
    bytes_down: int
    metrics: dict[str, dict[str, dict[str, float]]]
    """Further metrics: moment -> metric -> statistic -> value. Moments include `train`, a pass over the
    training data, and `training`, the training itself."""


class NewClientsResult(TypedDict):
    """Clients that joined after `round`: their accuracy with the received model, and after `epochs`."""

    adaptation: str
    """The way they adapted: `full`, or p_i alone."""
    by_epoch: list[Accuracy]
    """Accuracy after 1, 2, ... epochs; empty in older runs, which evaluated only after the last."""

    round: int
    clients: int
    epochs: int
    before: Accuracy | None
    adapted: Accuracy | None


class AnalysisDocument(TypedDict):
    """An analysis of a finished run's representations in one round (`feddbe analyze`)."""

    round: int
    analysis: str
    layer: str
    moment: str
    on: str
    """Samples that each client's model represents: `own`, those of its client, or `all`."""
    quick: bool
    """True if the analysis used less work than by default."""
    per_client: bool
    """True if each client's samples were analyzed alone; `overall` is then the plain mean over clients."""
    samples: int
    settings: dict[str, Any]
    """Settings of the analysis; `samples` is the requested number, null for all."""
    seconds: float
    overall: dict[str, float | None]
    """Values by name; the main value of the analysis is `value`."""
    clients: dict[str, dict[str, float | None]]


class Divergence(TypedDict):
    """The value that was not finite and ended the run; the rounds before it are kept."""

    round: int
    client: int
    what: str
    """Name of the quantity, such as `loss`."""
    value: str
    """The value as text, such as `nan`."""


class Cost(TypedDict):
    """Cost of a round: bytes `up` and `down` per client that takes part, and `seconds`."""

    up: float
    down: float
    seconds: float


class RunDocument(TypedDict):
    """One run: its configuration, a result for each round (0..T), and its summary."""

    method: str
    config: dict[str, Any]
    config_hash: str
    rounds: list[RoundResult]
    best: RoundResult | None
    """The round with the highest weighted accuracy: on validation data if there is some, otherwise on test
    data, which is optimistic."""
    last: RoundResult | None
    deployed_moment: str
    """Moment at which clients deploy the model: `adapted` if the method adapts it, otherwise `before`."""
    test_samples: int
    """Number of test samples of all clients that were evaluated in the last round."""
    majority_accuracy: float
    """Weighted accuracy if each client always predicts its most frequent training label."""
    new_clients: NewClientsResult | None
    analyses: list[AnalysisDocument]
    """Analyses of the run's representations, in the order of their first request."""
    bn_buffers: str | None
    """Treatment of BatchNorm statistics: `local` or `average`; None if the model has none."""
    note: str
    """Note on the data, such as that it is a subset; often empty."""
    remarks: list[str]
    """Notes on this run: options that had no effect."""
    diverged: Divergence | None
    """Reason for missing rounds, if training diverged."""
    trainers: list[str]
    """Training backends that ran: `autograd`, `compiled`."""
    cost: Cost
    label_names: list[str]
    """Names of the classes, in order; empty in older runs, which did not store them."""
    client_names: list[str]
    """Names of the clients, in order; empty if they have numbers only."""
    shift_labels: list[str]
    """Description of each client's image shift (`--shift`); empty without."""
    server_sha256: str
    clients_sha256: dict[str, str]
    peak_rss_mb: float
    begun: str
    """Start time, as in 2026-11-17T05:20:00.000+00:00."""
    versions: dict[str, str]
    """Versions of torch, numpy and other packages at the start."""
    folder: str


def run_id(config_hash: str, begun: str) -> str:
    """Return a text that identifies a run in an experiment tracker, from its configuration and start."""
    return sha256(f"{config_hash} {begun}".encode()).hexdigest()[:16]


def build_round_result(round_: int, moment: str, records: Sequence[Record]) -> RoundResult:
    """Return a round's result from its records over all clients.

    Args:
        round_: Number of the round.
        moment: Moment whose accuracy is the round's accuracy.
        records: Records over all clients; those of analyses are skipped.

    Raises:
        KeyError: A record is missing.
    """
    metrics = read_aggregates([record for record in records if LAYER_SEPARATOR not in record.name])
    totals = {name: statistics["weighted"] for name, statistics in metrics.pop("round").items()}
    accuracies = {key: _read_accuracy(values.pop("accuracy", None)) for key, values in metrics.items()}
    training = metrics.get("training", {})
    for name in totals:  # the clients' shares of a total
        training.pop(name, None)
    accuracy = accuracies.get(moment)
    return RoundResult(
        round=round_,
        accuracy=accuracy,
        moment=moment if accuracy else "before",
        before=accuracies.get("before"),
        adapted=accuracies.get("adapted"),
        after=accuracies.get("after"),
        validation=accuracies.get("validation"),
        auc=metrics.get(moment, {}).get("auc", {}).get("weighted"),
        train_loss=training.get("loss", {}).get("weighted"),
        seconds=totals["seconds"],
        bytes_up=int(totals["bytes_up"]),
        bytes_down=int(totals["bytes_down"]),
        metrics={key: values for key, values in metrics.items() if values},
    )


def _read_accuracy(statistics: Mapping[str, float] | None) -> Accuracy | None:
    """Return the statistics as an accuracy, or None; a missing statistic is a KeyError."""
    if statistics is None:
        return None
    return Accuracy(
        weighted=statistics["weighted"],
        mean=statistics["mean"],
        worst_tenth=statistics["worst_tenth"],
        std=statistics["std"],
    )


def build_new_clients_result(description: Mapping[str, Any], records: Sequence[Record]) -> NewClientsResult:
    """Return the result of new clients from their stored description and their records over all clients."""
    metrics = read_aggregates(records)

    def accuracy_at(moment: str) -> Any:
        return _read_accuracy(metrics.get(f"newcomers {moment}", {}).get("accuracy"))

    before, adapted = accuracy_at("before"), accuracy_at("adapted")
    epochs = range(1, description["epochs"])
    by_epoch = [*takewhile(bool, (accuracy_at(f"adapted {epoch}") for epoch in epochs)), adapted]
    if len(by_epoch) < description["epochs"] or not adapted:
        by_epoch = []
    result = {
        "adaptation": "full", **description, "before": before, "adapted": adapted, "by_epoch": by_epoch,
    }  # fmt: skip
    return cast(NewClientsResult, result)


_MOMENTS = {
    "before": "before local training",
    "adapted": "after adapting to the client",
    "after": "after local training",
}


def describe_moment(moment: str) -> str:
    """Return a moment in words; an unknown moment is returned unchanged."""
    return _MOMENTS.get(moment, moment)


def at_moment(document: RunDocument, moment: str) -> RunDocument:
    """Return the document as if the model were deployed at another moment: `before`, `adapted` or `after`.

    If data was held out, it still selects the best round, by its accuracy at the run's own moment.
    """
    rounds: Any = [
        {**result, "accuracy": result.get(moment), "moment": moment} for result in document["rounds"]
    ]
    evaluated = [result for result in rounds if result["accuracy"]]
    best = max(evaluated, key=selection_accuracy, default=None)
    last = evaluated[-1] if evaluated else None
    return {**document, "rounds": rounds, "best": best, "last": last, "deployed_moment": moment}


def find_deployed_moment(last: RoundResult | None) -> str:
    """Return the moment at which clients deploy the model of a run with this last evaluated round."""
    if last is None:
        return "before"
    return "adapted" if last["adapted"] else last["moment"]


def deployed_result(document: RunDocument, which_round: str = "best") -> RoundResult | None:
    """Return a round's result at the moment at which the model is deployed; None if nothing was evaluated.

    Args:
        document: The run.
        which_round: `best` or `last`. A method that adapts after the last round only is always at the last.
    """
    result = document["best" if which_round == "best" else "last"]
    if result is None or document["last"] is None:
        return None
    return result_at_deployment(result, document["last"], document["deployed_moment"])


def result_at_deployment(result: RoundResult, last: RoundResult, moment: str) -> RoundResult:
    """Return the result with the accuracy at a moment; that of the last round if only it has one."""
    accuracy = _accuracy_at(result, moment)
    if accuracy is None:
        result, accuracy = last, _accuracy_at(last, moment)
    return {**result, "accuracy": accuracy, "moment": moment}


def _accuracy_at(result: RoundResult, moment: str) -> Accuracy | None:
    if moment == result["moment"]:
        return result["accuracy"]
    return cast(Accuracy | None, {**result}.get(moment))


def compared_result(document: RunDocument) -> RoundResult | None:
    """Return the result by which runs are compared, at the moment at which the model is deployed.

    It is that of the last round, or of the round that was chosen on validation data. A best round that was
    chosen on test data is never compared.
    """
    is_validated = document["best"] is not None and document["best"]["validation"] is not None
    return deployed_result(document, "best" if is_validated else "last")


def selection_accuracy(result: RoundResult) -> float:
    """Return the accuracy that selects the best round, or -1 if the round was not evaluated."""
    accuracy = result["validation"] or result["accuracy"]
    return accuracy["weighted"] if accuracy else -1.0


def accuracy_curve(document: RunDocument) -> list[tuple[int, float]]:
    """Return the learning curve: (round, weighted accuracy in percent) of every evaluated round."""
    return [
        (result["round"], 100 * result["accuracy"]["weighted"])
        for result in document["rounds"]
        if result["accuracy"]
    ]


def metric_names(documents: Sequence[RunDocument]) -> list[str]:
    """Return the metrics other than accuracy that any run has for its rounds, such as `auc` and `loss`.

    A metric that a user registers with `@metric` and selects with `--metrics` is among them.
    """
    results = [result for document in documents for result in document["rounds"]]
    by_moment = [
        result["metrics"].get(moment, {}) for result in results for moment in (result["moment"], "training")
    ]
    return list(dict.fromkeys(name for metrics in by_moment for name in metrics))


def is_selected_metric(name: str, documents: Sequence[RunDocument]) -> bool:
    """Return True if a user selected the metric: it is not a default, or `--metrics` names it with others."""
    default = Config().metrics
    lists = [str(document["config"].get("metrics", default)) for document in documents]
    if name not in default.split(","):
        return True
    return any(name in spec.replace(" ", "").split(",") for spec in lists if spec != default)


def metric_value(result: RoundResult, name: str) -> float | None:
    """Return a metric at the round's moment, weighted over clients; else the metric of the training."""
    metrics = result["metrics"]
    statistics = metrics.get(result["moment"], {}).get(name) or metrics.get("training", {}).get(name)
    return statistics.get("weighted") if statistics else None


def status_note(document: RunDocument) -> str:
    """Return a note on the run's end, such as `diverged in round 3`; empty if it ended normally."""
    divergence = document["diverged"]
    return f"diverged in round {divergence['round']}" if divergence else ""


def run_title(documents: Sequence[RunDocument]) -> str:
    """Return a title for runs: data, partition, clients, rounds and seeds.

    For a run that diverged, the title has the requested number of rounds.
    """

    def join_distinct(values: Iterable[Any]) -> str:
        return " or ".join(dict.fromkeys(str(value) for value in values if value is not None))

    def count(values: Iterable[Any], noun: str) -> str:
        numbers = join_distinct(values)
        return f"{numbers} {noun}" if numbers == "1" else f"{numbers} {noun}s"

    settings = [document["config"] for document in documents]
    clients = [config["clients"] for config in settings if config.get("clients")]
    rounds = []
    for document in documents:
        requested = document["config"].get("rounds") or 0
        rounds.append(max(0, requested if document["diverged"] else len(document["rounds"]) - 1))
    partition_seeds = sorted({config.get("partition_seed", 1) for config in settings})
    parts = [
        join_distinct(Path(config.get("data", "")).name for config in settings),
        join_distinct(config.get("partition") for config in settings),
        count(clients, "client") if clients else "",
        count(rounds, "round"),
        _describe_seeds(sorted({config.get("seed", 0) for config in settings})),
        f"partition {_describe_seeds(partition_seeds)}" if len(partition_seeds) > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _describe_seeds(seeds: Sequence[int]) -> str:
    """Return `seed 3`, `seeds 1, 5`, or for a range of three or more `seeds 0 to 4`."""
    if len(seeds) < 2:
        return f"seed {', '.join(map(str, seeds))}"
    is_range = len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1  # they are sorted and differ
    if is_range:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def new_clients_curve(document: RunDocument) -> list[tuple[int, float]]:
    """Return (epoch, weighted accuracy in percent) of the new clients; epoch 0 is the received model.

    The curve is empty if the new clients were not evaluated after each epoch.
    """
    result = document["new_clients"]
    if not result or not result["by_epoch"]:
        return []
    accuracies = [result["before"], *result["by_epoch"]]
    return [(epoch, 100 * accuracy["weighted"]) for epoch, accuracy in enumerate(accuracies) if accuracy]


def run_labels(documents: Sequence[RunDocument], *, seed: bool = True) -> list[str]:
    """Return a label for each run: its method, and the settings that distinguish runs of this method.

    Args:
        documents: The runs.
        seed: Treat the seeds of run and partition as such settings.
    """
    labels = []
    for document in documents:
        settings = distinguishing_settings(document, documents, seed=seed)
        words = [f"{key.replace('_', ' ')} {value}" for key, value in settings.items()]
        labels.append(", ".join([document["method"], *words]))
    return labels


def distinguishing_settings(
    document: RunDocument, documents: Sequence[RunDocument], *, seed: bool
) -> dict[str, Any]:
    """Return the settings that distinguish a run from others of the same method.

    Runs on other data are distinguished by the data alone, because many defaults follow from it.

    Args:
        document: The run.
        documents: All runs, including this one.
        seed: Treat the seeds of run and partition as such settings.
    """
    settings = identifying_settings(document["config"], seed=seed)
    peers = [
        identifying_settings(peer["config"], seed=seed)
        for peer in documents
        if peer["method"] == document["method"]
    ]
    peers_on_data = [peer for peer in peers if peer.get("data") == settings.get("data")]
    keys = dict.fromkeys(key for peer in peers_on_data for key in peer if key != "method")
    differing = [key for key in keys if any(peer.get(key) != settings.get(key) for peer in peers_on_data)]
    if len(peers_on_data) < len(peers):
        differing.insert(0, "data")
    return {key: settings.get(key, "-") for key in differing}


Extent = tuple[int, int | None]
"""(Rounds, patience) of a run that is finished under a patience, otherwise (last evaluated round, None)."""


def is_finished(document: RunDocument) -> bool:
    """Return True if the run has all requested rounds, or was ended by its patience."""
    settings = document["config"]
    return has_completed(document, settings["rounds"], settings.get("patience"))


def has_completed(document: RunDocument, rounds: int, patience: int | None) -> bool:
    """Return True if the run was evaluated after `rounds` rounds, or would have been ended by `patience`."""
    scores = [selection_accuracy(result) for result in document["rounds"] if result["accuracy"]]
    return bool(scores) and (last_round(document) >= rounds or _is_patience_exhausted(scores, patience))


def last_round(document: RunDocument) -> int:
    """Return the last evaluated round, or -1."""
    return document["last"]["round"] if document["last"] else -1


def run_extent(document: RunDocument) -> Extent:
    """Return the length of a run, equal for runs whose best rounds may be compared.

    Runs with equal patience and number of rounds are equally long, even if patience ended them at different
    rounds.
    """
    rounds, patience = document["config"].get("rounds"), document["config"].get("patience")
    if rounds is not None and patience is not None and has_completed(document, rounds, patience):
        return rounds, patience
    return last_round(document), None


def truncate_run(document: RunDocument, rounds: int, patience: int | None) -> RunDocument:
    """Return the run as it was after `rounds` rounds, or where `patience` ends it.

    Fine-tuning and new clients come after the last round, so a truncated run does not have them.
    """
    results = _select_rounds(document["rounds"], rounds, patience)
    settings = {**document["config"], "rounds": rounds, "patience": patience}
    divergence = document["diverged"]
    if divergence and divergence["round"] > rounds:
        divergence = None
    if len(results) == len(document["rounds"]):
        return {**document, "config": settings, "diverged": divergence}
    evaluated = [result for result in results if result["accuracy"]]
    selected = {result["round"] for result in results}
    seconds = [result["seconds"] for result in results if result["round"] > 0]
    return {
        **document,
        "config": settings,
        "rounds": results,
        "best": max(evaluated, key=selection_accuracy, default=None),
        "last": evaluated[-1] if evaluated else None,
        "deployed_moment": find_deployed_moment(evaluated[-1] if evaluated else None),
        "new_clients": None,
        "analyses": [analysis for analysis in document["analyses"] if analysis["round"] in selected],
        "diverged": divergence,
        "cost": {**document["cost"], "seconds": median(seconds) if seconds else 0.0},
        "server_sha256": "",
        "clients_sha256": {},
    }


def follows_last_round(document: RunDocument) -> bool:
    """Return True if fine-tuning or new clients follow the last round, so that the run cannot be cut."""
    last = document["last"]
    is_fine_tuned = bool(last and last["adapted"] and last["moment"] != "adapted")
    return is_fine_tuned or document["new_clients"] is not None


def _select_rounds(results: Sequence[RoundResult], rounds: int, patience: int | None) -> list[RoundResult]:
    """Return the results up to `rounds`, or up to the one after which `patience` ends the run.

    The loop detects exhausted patience one round late, and evaluates that round, too.
    """
    selected: list[RoundResult] = []
    scores: list[float] = []
    for result in results:
        if result["round"] > rounds:
            break
        selected.append(result)
        if result["accuracy"]:
            was_exhausted = _is_patience_exhausted(scores, patience)
            scores.append(selection_accuracy(result))
            if was_exhausted and _is_patience_exhausted(scores, patience):
                break
    return selected


def _is_patience_exhausted(scores: Sequence[float], patience: int | None) -> bool:
    """Return True if the best score is more than `patience` evaluations old, including itself."""
    return patience is not None and bool(scores) and len(scores) - scores.index(max(scores)) > patience
