"""All tables, each declared once as columns: results, seeds, sweeps, rounds, clients and costs.

Every function returns a `Table`, which `reporting/table.py` renders to the terminal, the report page,
notebooks, Markdown, LaTeX, CSV and JSON. Tables fit into terminals of 60 columns or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from feddbe.config.parameters import format_value
from feddbe.errors import CorruptRunError, StoreError
from feddbe.reporting.table import (
    BYTES,
    COUNT,
    DECIMAL,
    DIFFERENCE,
    FLAG,
    INTERVAL,
    METRIC,
    NUMBER,
    PAIRS,
    PERCENT,
    PROGRESS,
    SECONDS,
    TEXT,
    TIME,
    Column,
    Kind,
    Narrow,
    Output,
    Priority,
    Progress,
    Table,
)
from feddbe.results.document import (
    Accuracy,
    RoundResult,
    RunDocument,
    describe_moment,
    is_finished,
    is_selected_metric,
    last_round,
    metric_names,
    metric_value,
    run_labels,
    run_title,
    status_note,
)
from feddbe.results.fairness import BASELINES, Fairness, Overhead
from feddbe.results.repetitions import (
    SeedGroup,
    best_on_validation,
    count_repetitions,
    describe_repetitions,
    group_experiments,
    group_seeds,
    methods_with_unequal_rounds,
    metric_interval,
)
from feddbe.results.statistics import VERDICT_RULE, Interval, Reason
from feddbe.runs.build_document import ClientRecord, load_document
from feddbe.runs.folders import slug

_STATISTICS = {"weighted": "weighted", "mean": "mean", "worst_tenth": "worst tenth"}
"""Titles of the statistics of an accuracy over clients."""


# Results of runs


@dataclass(frozen=True)
class _NamedRun:
    """A run and its name in the table."""

    name: str
    document: RunDocument


def results_table(documents: Sequence[RunDocument], names: Sequence[str] = ()) -> Table:
    """Return the table of results: a record for each run.

    Args:
        documents: The runs.
        names: Their names; by default their methods, with the settings that distinguish them.
    """
    names = names or run_labels(documents)
    has_selected_metrics = any(is_selected_metric(name, documents) for name in metric_names(documents))
    cost_priority = Priority.OPTIONAL if has_selected_metrics else Priority.USEFUL
    sources = [_NamedRun(name, document) for name, document in zip(names, documents, strict=True)]
    has_common_data = len(set(map(_read_data, sources))) == 1  # which the note names
    columns = [
        Column("run", "method", TEXT, _read_name),
        Column("method", value=lambda run: run.document["method"], outputs=Output.PROGRAM),
        Column("data", "data", TEXT, _read_data,
               outputs=Output.PROGRAM if has_common_data else Output.PAGE | Output.PROGRAM),
        *(_setting_column(key) for key in ("partition", "clients", "seed", "lr")),
        Column("rounds", "rounds", PROGRESS, _read_progress, outputs=Output.PAGE | Output.PROGRAM),
        *_accuracy_columns("best", lambda run: _read_accuracy(run.document["best"])),
        *_accuracy_columns("last", lambda run: _read_accuracy(run.document["last"])),
        *_accuracy_columns("adapted", _read_adapted_accuracy, note=_adapted_note(documents)),
        *_accuracy_columns("new", lambda run: _read_new_accuracy(run, "before"), note=_NEW_NOTE),
        *_accuracy_columns("new, adapted", lambda run: _read_new_accuracy(run, "adapted"), note=_NEW_NOTE),
        *_metric_columns(documents),
        Column("seconds", "s per round", SECONDS, _median_seconds, priority=cost_priority),
        Column("bytes_up", "up", BYTES, lambda run: run.document["cost"]["up"], priority=cost_priority,
               note="Up and down: bytes per client and round."),
        Column("bytes_down", "down", BYTES, lambda run: run.document["cost"]["down"],
               priority=cost_priority),
        Column("majority_accuracy", "majority class", PERCENT, lambda run: run.document["majority_accuracy"],
               outputs=Output.WIDE | Output.PROGRAM),
        Column("moment", value=lambda run: _read_last(run.document, "moment"), outputs=Output.PROGRAM),
        Column("diverged", value=_read_divergence_round, outputs=Output.PROGRAM),
        Column("folder", value=lambda run: run.document["folder"], outputs=Output.PROGRAM),
    ]  # fmt: skip
    return Table.from_sources(
        columns,
        sources,
        note=_results_note(documents, names),
        footer=[
            {"run": f"majority class{data}", "best_weighted": accuracy}
            for accuracy, data in majority_accuracies(documents).items()
        ],
        line_stack="round",
    )


def _accuracy_columns(
    line: str, read: Callable[[_NamedRun], Accuracy | None], note: str = ""
) -> list[Column]:
    """Return the columns of one line of the results: the round, and the statistics over clients."""
    key = line.replace(", ", "_")
    is_evaluated = line in ("best", "last")
    columns = []
    if is_evaluated:
        columns.append(
            Column(
                f"{key}_round", f"{line} round", NUMBER,
                lambda run: _read_round(run.document, line), stack="round", line=line,
            )
        )  # fmt: skip
    for statistic, stack in _STATISTICS.items():
        columns.append(
            Column(
                f"{key}_{statistic}",
                f"{line} {stack}",
                PERCENT,
                lambda run, statistic=statistic: _read_statistic(read(run), statistic),  # type: ignore[misc]
                outputs=Output.ALL if line == "best" or statistic == "weighted" else ~Output.PAGE,
                hide_empty=not is_evaluated,
                note=note if statistic == "weighted" else "",
                stack=stack,
                line=line,
            )
        )
    return columns


def _metric_columns(documents: Sequence[RunDocument]) -> list[Column]:
    """Return two columns for each metric of the rounds, its value in the best and in the last round.

    A terminal shows only metrics that the user selected, before the costs.
    """
    from feddbe.metrics.builtin import describe_metric

    columns = []
    for name in metric_names(documents):
        label, unit = describe_metric(name)
        key = name if name not in (*_STATISTICS, "round") else f"metric_{name}"
        for line in ("best", "last"):
            columns.append(
                Column(
                    f"{line}_{key}",
                    f"{line} {label}",
                    PERCENT if unit == "%" else DECIMAL,
                    lambda run, line=line, name=name: _read_metric(run.document, line, name),  # type: ignore[misc]
                    outputs=Output.ALL if is_selected_metric(name, documents) else ~Output.TERMINAL,
                    priority=Priority.USEFUL,
                    hide_empty=True,
                    stack=label,
                    line=line,
                )
            )
    return columns


def _setting_column(key: str) -> Column:
    return Column(key, value=lambda run: run.document["config"].get(key), outputs=Output.PROGRAM)


def _read_name(run: _NamedRun) -> str:
    status = status_note(run.document)
    return f"{run.name} ({status})" if status else run.name


def _read_data(run: _NamedRun) -> str | None:
    data = run.document["config"].get("data")
    return Path(data).name if data else None


def _read_progress(run: _NamedRun) -> Progress:
    document = run.document
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    planned = document["config"].get("rounds", done)
    is_complete = "rounds" not in document["config"] or is_finished(document)
    return Progress(done, done if is_complete else planned)


def _read_accuracy(result: RoundResult | None) -> Accuracy | None:
    return result["accuracy"] if result else None


def _read_last(document: RunDocument, key: str) -> Any:
    return {**document["last"]}[key] if document["last"] else None


def _read_round(document: RunDocument, line: str) -> int | None:
    result = document["best" if line == "best" else "last"]
    return result["round"] if result and result["accuracy"] else None


def _read_metric(document: RunDocument, line: str, name: str) -> float | None:
    result = document["best" if line == "best" else "last"]
    return metric_value(result, name) if result else None


def _read_statistic(accuracy: Accuracy | None, statistic: str) -> float | None:
    return float({**accuracy}[statistic]) if accuracy else None  # type: ignore[arg-type]


def _read_adapted_accuracy(run: _NamedRun) -> Accuracy | None:
    """Return the accuracy after fine-tuning in the last round, unless it is the primary accuracy."""
    last = run.document["last"]
    return last["adapted"] if last and last["moment"] != "adapted" else None


def _read_new_accuracy(run: _NamedRun, moment: str) -> Accuracy | None:
    new_clients = run.document["new_clients"]
    if new_clients is None:
        return None
    return new_clients["before"] if moment == "before" else new_clients["adapted"]


def _median_seconds(run: _NamedRun) -> float | None:
    """Return the seconds of the median round; round 0 is the setup."""
    seconds = [result["seconds"] for result in run.document["rounds"] if result["round"] >= 1]
    return median(seconds) if seconds else None


def _read_divergence_round(run: _NamedRun) -> int | None:
    divergence = run.document["diverged"]
    return divergence["round"] if divergence else None


_NEW_NOTE = "New: clients that did not take part in training."


def _adapted_note(documents: Sequence[RunDocument]) -> str:
    epochs = {str(document["config"].get("adapt_epochs")) for document in documents}
    return f"Adapted: after {', '.join(sorted(epochs))} epochs of fine-tuning the last model on each client."


def _results_note(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    run_notes = [
        f"{name}: {'; '.join(document['remarks'])}."
        for document, name in zip(documents, names, strict=True)
        if document["remarks"]
    ]
    data_notes = sorted({document["note"] for document in documents} - {""})
    sentences = [
        f"{run_title(documents)}.",
        f"Test accuracy in % {moments_note(documents, names)}: weighted by samples, "
        "mean of clients, mean of the worst tenth of clients.",
        _evaluation_note(documents),
        f"The best round is chosen {_describe_selection(documents, 'on test accuracy')}.",
        "Majority class: always predicting each client's most frequent label.",
        _batch_norm_note(documents, names),
        *(f"Data: {note}." for note in data_notes),
        *run_notes,
    ]
    return " ".join(filter(None, sentences))


def _evaluation_note(documents: Sequence[RunDocument]) -> str:
    """Return the clients that are evaluated, if a run does not evaluate all of them in each round."""
    options = dict.fromkeys(str(document["config"].get("eval", "all")) for document in documents)
    clients = {"cohort": "its cohort", "all": "all clients"}
    texts = [clients.get(option, f"{option.removeprefix('sample:')} sampled clients") for option in options]
    return f"Each round evaluates {' or '.join(texts)} only." if set(options) - {"all"} else ""


def _describe_selection(documents: Sequence[RunDocument], on_test: str) -> str:
    """Return the data that select the best rounds."""
    shares = {document["config"].get("validation") or 0.0 for document in documents}
    texts = {f"on {share:g} of the training data, held out" if share else on_test for share in shares}
    return " or ".join(sorted(texts))


def majority_accuracies(documents: Sequence[RunDocument]) -> dict[float, str]:
    """Return each majority accuracy with the data or partition seed that distinguishes it, if any does."""
    configs = {document["majority_accuracy"]: document["config"] for document in documents}
    data = {config.get("data") for config in configs.values()}
    if len(configs) == 1:
        return dict.fromkeys(configs, "")
    if len(data) == 1 and len({config.get("partition_seed") for config in configs.values()}) == len(configs):
        return {
            accuracy: f", partition seed {config['partition_seed']}" for accuracy, config in configs.items()
        }
    return {accuracy: f", {config.get('data', '?')}" for accuracy, config in configs.items()}


def moments_note(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    """Return the moment of the accuracies; with the names of runs if moments differ between them."""
    moments = [
        (describe_moment(document["last"]["moment"]), name)
        for document, name in zip(documents, names, strict=True)
        if document["last"] is not None
    ]
    if len({moment for moment, _ in moments}) > 1:
        return f"({_group_by_text(moments)})"
    return moments[0][0] if moments else describe_moment("before")


_BATCH_NORM = {"local": "local, each client's own", "average": "averaged over clients"}


def _batch_norm_note(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    """Return the treatment of BatchNorm statistics, if a model has any; with names of runs if it differs."""
    treatments = [
        (_BATCH_NORM.get(document["bn_buffers"] or "", "none"), name)
        for document, name in zip(documents, names, strict=True)
    ]
    distinct = {treatment for treatment, _ in treatments}
    if distinct <= {"none"}:
        return ""
    text = _group_by_text(treatments) if len(distinct) > 1 else distinct.pop()
    return f"BatchNorm statistics: {text}."


def _group_by_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Return each text with its names; more than four names of the most frequent text are `all others`."""
    groups: dict[str, list[str]] = {}
    for text, name in pairs:
        groups.setdefault(text, []).append(name)
    most_frequent = max(groups, key=lambda text: len(groups[text]))
    if len(groups[most_frequent]) > 4:
        del groups[most_frequent]
        groups[most_frequent] = ["all others"]
    return "; ".join(f"{text}: {', '.join(members)}" for text, members in groups.items())


# Rounds of a run


def rounds_table(document: RunDocument) -> Table:
    """Return the table of one run's rounds: a record for each evaluated or trained round."""
    fixed = [
        Column("round", value=itemgetter("round")),
        Column("moment", kind=TEXT, value=itemgetter("moment")),
        *(
            Column(key, value=lambda result, name=name: _read_statistic(result["accuracy"], name))  # type: ignore[misc]
            for key, name in (
                ("accuracy", "weighted"), ("accuracy_mean", "mean"),
                ("accuracy_worst_tenth", "worst_tenth"), ("accuracy_std", "std"),
            )
        ),
        Column("validation", value=lambda result: _read_statistic(result["validation"], "weighted")),
        *(Column(key, value=itemgetter(key))
          for key in ("auc", "train_loss", "seconds", "bytes_up", "bytes_down")),
    ]  # fmt: skip
    keys = {column.key for column in fixed}
    metrics = [
        Column(name, value=lambda result, name=name: metric_value(result, name))  # type: ignore[misc]
        for name in metric_names([document])
        if name not in keys
    ]
    return Table.from_sources([*fixed, *metrics], document["rounds"])


# Clients


def client_records_table(
    documents: Sequence[RunDocument], clients: Sequence[Sequence[ClientRecord]]
) -> Table:
    """Return the table of clients for programs: a record for each client of each run."""
    records = [
        {"run": name, "method": document["method"], "seed": document["config"].get("seed"), **client}
        for document, name, members in zip(documents, run_labels(documents), clients, strict=True)
        for client in members
    ]
    return Table([Column(key) for key in ("run", "method", "seed", *ClientRecord.__annotations__)], records)


def clients_table(documents: Sequence[RunDocument], clients: Sequence[Sequence[ClientRecord]]) -> Table:
    """Return the table of clients for readers: a record for each client.

    It shows the best and the last round of a single run, or the best round of each of several runs.
    """
    by_number = {client["client"]: client for members in clients for client in members}
    accuracies = [{client["client"]: client["best"] for client in members} for members in clients]
    titles = run_labels(documents)
    if len(documents) == 1:
        accuracies.append({client["client"]: client["last"] for client in clients[0]})
        results = {"best": documents[0]["best"], "last": documents[0]["last"]}
        titles = [f"{title} @{result['round']}" if result else title for title, result in results.items()]
    has_names = any(client["name"] != str(number) for number, client in by_number.items())
    columns = [
        Column("client", value=lambda number: number),
        Column("name", kind=TEXT, value=lambda number: by_number[number]["name"] if has_names else None,
               hide_empty=True),
        Column("samples", "test samples", value=lambda number: by_number[number]["samples"]),
        *(Column(f"accuracy_{index}", name, PERCENT, members.get)
          for index, (name, members) in enumerate(zip(titles, accuracies, strict=True))),
    ]  # fmt: skip
    best_rounds = "" if len(documents) == 1 else " in the best round of each run"
    note = f"{run_title(documents)}. Test accuracy in % of each client{best_rounds}."
    return Table.from_sources(columns, sorted(by_number), note=note, narrow=Narrow.STACK_BLOCKS)


_MAX_SPLIT_RECORDS = 25
"""Maximum number of clients in the table of a split."""


def split_table(
    train: Sequence[int] | NDArray[np.int64],
    test: Sequence[int] | NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    label_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    shift_labels: Sequence[str] = (),
) -> Table:
    """Return the table of a split: a record for each client.

    Args:
        train: Training samples of each client.
        test: Test samples of each client.
        labels: Samples by client and class.
        label_names: The classes; by default their numbers.
        client_names: The clients; by default their numbers.
        shift_labels: Transformation of each client's images, with `--shift`.
    """
    columns = [
        Column("client", kind=TEXT if client_names else NUMBER,
               value=lambda client: client_names[client] if client_names else client),
        Column("train", value=lambda client: train[client]),
        Column("test", value=lambda client: test[client]),
        Column("labels", value=lambda client: np.count_nonzero(labels[client])),
        Column("shift", kind=TEXT, value=lambda client: shift_labels[client] if shift_labels else None,
               hide_empty=True),
        Column("frequent", "most frequent labels", TEXT,
               lambda client: _frequent_labels(labels[client], label_names)),
    ]  # fmt: skip
    is_complete = len(labels) <= _MAX_SPLIT_RECORDS
    record_count = len(labels) if is_complete else _MAX_SPLIT_RECORDS - 1
    total = labels.sum(axis=0)
    omitted = {"client": "...", "frequent": f"... and {len(labels) - record_count} more clients"}
    all_clients = {
        "client": "all", "train": sum(train), "test": sum(test), "labels": np.count_nonzero(total),
        "frequent": _frequent_labels(total, label_names),
    }  # fmt: skip
    footer = [all_clients] if is_complete else [omitted, all_clients]
    return Table.from_sources(columns, range(record_count), footer=footer)


def _frequent_labels(counts: NDArray[np.int64], names: Sequence[str] = ()) -> str:
    """Return the three most frequent labels with their shares; the lower label is first among equal ones."""
    order = [int(label) for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
    texts = [names[label] if names else str(label) for label in order]
    return ", ".join(
        f"{text} ({counts[label] / counts.sum():.0%})" for text, label in zip(texts, order, strict=True)
    )


class RunRecord(TypedDict):
    """A run in the list of `feddbe runs`; accuracies are weighted, as fractions of one."""

    name: str
    method: str
    data: str
    seed: int | None
    begun: str
    """Start time in UTC; empty if unknown."""
    rounds: int
    best: float | None
    last: float | None
    state: str


def run_record(path: Path, root: Path) -> RunRecord:
    """Return the record of the run in `path`, named relative to `root`; a damaged run has only a state."""
    name = str(path.relative_to(root)) if path != root else path.name
    try:
        document = load_document(path, hashes=False)
    except StoreError as error:
        state = "damaged" if isinstance(error, CorruptRunError) else "unreadable"
        return {
            "name": name, "method": "-", "data": "-", "seed": None, "begun": "", "rounds": 0,
            "best": None, "last": None, "state": state,
        }  # fmt: skip
    best, last, settings = document["best"], document["last"], document["config"]
    status = "done" if is_finished(document) else f"{settings['rounds']} requested"
    return {
        "name": name,
        "method": document["method"],
        "data": Path(settings["data"]).name,
        "seed": settings["seed"],
        "begun": document["begun"],
        "rounds": document["rounds"][-1]["round"] if document["rounds"] else 0,
        "best": best["accuracy"]["weighted"] if best and best["accuracy"] else None,
        "last": last["accuracy"]["weighted"] if last and last["accuracy"] else None,
        "state": status_note(document) or status,
    }


def runs_table(records: Sequence[RunRecord]) -> Table:
    """Return the table of the runs in a folder; names are not broken, because users type them."""
    names_are_complete = all(
        slug(record["method"]) in record["name"] and record["data"] in record["name"] for record in records
    )
    priority = Priority.OPTIONAL if names_are_complete else Priority.REQUIRED
    columns = [
        Column("name", "run", TEXT),
        Column("method", kind=TEXT, priority=priority),
        Column("data", kind=TEXT, priority=priority),
        Column("seed"),
        Column("rounds"),
        Column("best", "best %", PERCENT),
        Column("last", "last %", PERCENT),
        Column("begun", "started", TIME),
        Column("state", kind=TEXT),
    ]
    note = (
        "Test accuracy weighted by samples; the best round is chosen on test accuracy or on validation data. "
        "Times are UTC."
    )
    if any(record["rounds"] and record["last"] is None for record in records):
        note += (
            " Without accuracies: not evaluated, or a run of a sweep, whose study shows the chosen values."
        )
    return Table(columns, [{**record} for record in records], note=note, narrow=Narrow.LIST_RECORDS)


# Experiments over seeds


def has_repetitions(documents: Sequence[RunDocument]) -> bool:
    """Return True if an experiment has more than one seed or partition."""
    return any(len(experiment) > 1 for experiment in group_experiments(documents))


def _interval_column(key: str, title: str = "", **options: Any) -> Column:
    return Column(key, title, INTERVAL, lambda experiment: getattr(experiment, key), **options)


def _read_distinct(key: str) -> Callable[[SeedGroup], str]:
    """Return a function that reads the values of a setting of all runs, in order of appearance."""
    return lambda experiment: " ".join(dict.fromkeys(str(run["config"].get(key)) for run in experiment.runs))


_PROGRAM_COLUMNS = [
    Column("n", value=lambda experiment: len(experiment.counted_runs), outputs=Output.PROGRAM),
    Column("diverged", value=lambda experiment: experiment.diverged, outputs=Output.PROGRAM),
    Column("seeds", value=_read_distinct("seed"), outputs=Output.PROGRAM),
    Column("partition_seeds", value=_read_distinct("partition_seed"), outputs=Output.PROGRAM),
]
_NAME_COLUMN = Column("name", "method", TEXT, lambda experiment: experiment.name)


def _repetitions_column(documents: Sequence[RunDocument]) -> Column:
    """Return the column of the number of runs, with what varies between them as its title."""
    units = count_repetitions(documents)
    return Column(
        "counted", next(iter(units)) if len(units) == 1 else "runs", PROGRESS,
        lambda experiment: Progress(len(experiment.counted_runs), len(experiment.runs)),
        outputs=Output.READER,
    )  # fmt: skip


def _majority_column() -> Column:
    return Column(
        "majority_accuracy", "majority class", PERCENT, lambda experiment: experiment.majority_accuracy,
        outputs=Output.WIDE | Output.PROGRAM,
    )  # fmt: skip


def _majority_footer(documents: Sequence[RunDocument]) -> list[dict[str, Any]]:
    """Return a record for each data set, with the mean accuracy of its majority classes."""
    by_data: dict[str, list[float]] = {}
    for document in documents:
        by_data.setdefault(str(document["config"].get("data", "?")), []).append(document["majority_accuracy"])
    return [
        {
            "name": "majority class" if len(by_data) == 1 else f"majority class, {Path(data).name}",
            "accuracy": Interval(100 * mean(accuracies), 0.0, 1),
        }
        for data, accuracies in by_data.items()
    ]


def _verdict_columns(
    experiments: Sequence[SeedGroup],
    baseline: str,
    *,
    is_compared: bool,
    is_shown: Callable[[SeedGroup], bool] = lambda experiment: True,
) -> list[Column]:
    """Return the columns of the difference to the baseline, its verdict, and the reason if there is none."""
    readers = Output.READER if is_compared else Output(0)
    reasons = {experiment.verdict.reason for experiment in experiments if is_shown(experiment)}
    is_explained = is_compared and bool(reasons - {None, Reason.BASELINE})
    outcome = Column(
        "verdict", "verdict", TEXT,
        lambda experiment: experiment.verdict.outcome if is_shown(experiment) else "",
        outputs=readers | Output.PROGRAM, hide_empty=True,
    )  # fmt: skip
    reason = Column(
        "reason", "reason for no verdict", TEXT,
        lambda experiment: str(experiment.verdict.reason or "") if is_shown(experiment) else "",
        outputs=(Output.PAGE if is_explained else Output(0)) | Output.PROGRAM,
    )  # fmt: skip
    difference = Column(
        "difference", f"difference to {baseline}", DIFFERENCE,
        lambda experiment: experiment.difference if is_shown(experiment) else None,
        outputs=readers | Output.PROGRAM,
    )  # fmt: skip
    return [difference, outcome, reason]


def seeds_table(documents: Sequence[RunDocument], baseline: int = 0) -> Table:
    """Return the table over seeds and partitions: a record for each experiment.

    Args:
        documents: The runs.
        baseline: Index of the experiment that others are compared with, in order of appearance.
    """
    experiments = group_seeds(documents, baseline)
    is_compared = len(experiments) > 1
    is_validated = all(experiment.validation for experiment in experiments)
    columns = [
        _NAME_COLUMN,
        _repetitions_column(documents),
        _moment_column(attrgetter("moment"), experiments),
        _interval_column("accuracy"),
        *_verdict_columns(experiments, experiments[baseline].name, is_compared=is_compared),
        _interval_column(
            "best", "best round", note="" if is_validated else _TEST_CHOSEN_NOTE,
            outputs=_unless_equal("best", experiments),
        ),
        _interval_column("last", "last round", outputs=_unless_equal("last", experiments)),
        _interval_column("adapted", hide_empty=True, note=_ADAPTED_NOTE, priority=Priority.OPTIONAL),
        _interval_column("mean", "mean of clients", outputs=Output.PAGE | Output.PROGRAM),
        _interval_column("worst_tenth", priority=Priority.OPTIONAL),
        *_metric_interval_columns(documents),
        _majority_column(),
        _interval_column("validation", outputs=Output.PROGRAM),
        *_PROGRAM_COLUMNS,
    ]  # fmt: skip
    sentences = [
        _describe_settings(documents, experiments),
        _accuracy_note(documents, experiments),
        _evaluation_note(documents),
        _judgment_note(experiments) if is_compared else "",
        _excluded_note(documents, experiments),
    ]
    return Table.from_sources(
        columns,
        experiments,
        note=" ".join(filter(None, sentences)),
        footer=_majority_footer(documents),
        narrow=Narrow.TRANSPOSE,
    )


def _metric_interval_columns(
    documents: Sequence[RunDocument], is_shown: Callable[[SeedGroup], bool] = lambda experiment: True
) -> list[Column]:
    """Return a column for each metric of the rounds; a terminal shows only metrics that the user selected."""
    from feddbe.metrics.builtin import describe_metric

    columns = []
    for name in metric_names(documents):
        label, unit = describe_metric(name)
        scale = 100 if unit == "%" else 1

        def read(experiment: SeedGroup, name: str = name, scale: int = scale) -> Interval | None:
            if not is_shown(experiment):
                return None
            return metric_interval(experiment.counted_runs, name, scale)

        columns.append(
            Column(
                name if name not in SeedGroup.__annotations__ else f"metric_{name}",
                label,
                INTERVAL if unit == "%" else METRIC,
                read,
                outputs=Output.ALL if is_selected_metric(name, documents) else ~Output.TERMINAL,
                hide_empty=True,
            )
        )
    return columns


_TEST_CHOSEN_NOTE = "Best round: chosen on test data, too high, and not compared."
_ADAPTED_NOTE = "Adapted: after adapting the last model to each client."


def _moment_column(read: Callable[[Any], str], sources: Sequence[Any]) -> Column:
    """Return the moments at which models are deployed; a terminal shows them if they differ."""
    moments = list(dict.fromkeys(map(read, sources)))
    meanings = [f"{moment}: {describe_moment(moment)}" for moment in moments]
    return Column(
        "moment", "deployed", TEXT, read, outputs=Output.ALL if len(moments) > 1 else ~Output.TERMINAL,
        note=f"Deployed {'; '.join(meanings)}." if len(moments) > 1 else "",
    )  # fmt: skip


def _name_moment(moments: Sequence[str]) -> str:
    """Return the common moment in words; empty if moments differ, which the table then has as a column."""
    distinct = set(moments)
    return f" {describe_moment(distinct.pop())}" if len(distinct) == 1 else ""


def _unless_equal(key: str, experiments: Sequence[SeedGroup]) -> Output:
    """Return the outputs of a column, which readers do not need if it has the values of the accuracy."""
    is_equal = all(getattr(experiment, key) == experiment.accuracy for experiment in experiments)
    return Output.PROGRAM if is_equal else Output.ALL


def _accuracy_note(documents: Sequence[RunDocument], experiments: Sequence[SeedGroup]) -> str:
    moment = _name_moment([experiment.moment for experiment in experiments])
    model = f"model{moment}" if moment else "deployed model"
    return (
        f"Test accuracy in % of the {model}, {_describe_compared_round(documents)}, "
        f"weighted by samples: {_describe_interval(experiments)}."
    )


def _describe_compared_round(documents: Sequence[RunDocument]) -> str:
    shares = {document["config"].get("validation") or 0.0 for document in documents}
    rounds = [
        f"in the round chosen on {share:g} of the training data, held out" if share else "in the last round"
        for share in sorted(shares)
    ]
    if any(shares) and any(document["deployed_moment"] == "adapted" for document in documents):
        rounds.append("in the last round if the method adapts only after it")
    return " or ".join(rounds)


def _describe_interval(experiments: Sequence[SeedGroup]) -> str:
    repetitions = dict.fromkeys(
        describe_repetitions(experiment.counted_runs) for experiment in experiments if experiment.counted_runs
    )
    accuracies = [experiment.accuracy for experiment in experiments if experiment.accuracy]
    if all(accuracy.n == 1 for accuracy in accuracies):
        return "a single run each, without an interval"
    is_clustered = any(accuracy.degrees is not None for accuracy in accuracies)
    test = "Student's t, clustered by seed and by partition" if is_clustered else "Student's t"
    return f"mean ± 95 % interval over {' or '.join(repetitions)} ({test})"


_NAMED_SETTINGS = {"model": "model", "lr": "learning rate", "participation": "participation"}


def _describe_settings(documents: Sequence[RunDocument], experiments: Sequence[SeedGroup]) -> str:
    """Return the title of the runs, and settings that it does not have; with methods if they differ."""
    common = [run_title(documents)]
    differing = []
    for key, word in _NAMED_SETTINGS.items():
        pairs = [
            (format_value(value), experiment.name)
            for experiment in experiments
            if (value := experiment.runs[0]["config"].get(key)) is not None
        ]
        distinct = {text for text, _ in pairs}
        if len(distinct) > 1 and all(f"{key} {text}" in name for text, name in pairs):
            continue  # the names have it
        if len(distinct) == 1:
            common.append(f"{word} {distinct.pop()}")
        elif distinct:
            differing.append(f"{word.capitalize()} {_group_by_text(pairs)}.")
    return " ".join([f"{', '.join(common)}.", *differing])


def sweep_table(documents: Sequence[RunDocument]) -> Table:
    """Return the table of a grid of values: a record for each experiment.

    All show their validation accuracy; only the chosen ones show their test accuracy.
    """
    chosen = best_on_validation(group_seeds(documents))
    is_compared = len(chosen) > 1
    # a difference to an experiment that is not chosen would reveal its test accuracy
    experiments = group_seeds(documents, chosen[0] if chosen else 0, chosen)
    chosen_names = {experiments[index].name for index in chosen}
    baseline = experiments[chosen[0]].name if chosen else ""

    def is_chosen(experiment: SeedGroup) -> bool:
        return experiment.name in chosen_names

    def test_column(key: str, title: str = "", **options: Any) -> Column:
        def read(experiment: SeedGroup) -> Interval | None:
            return getattr(experiment, key) if is_chosen(experiment) else None

        return Column(key, title, INTERVAL, read, **options)

    columns = [
        _NAME_COLUMN,
        _repetitions_column(documents),
        _moment_column(attrgetter("moment"), experiments),
        _interval_column("validation"),
        Column("chosen", kind=FLAG, value=is_chosen),
        test_column("accuracy", "test"),
        *_verdict_columns(experiments, baseline, is_compared=is_compared, is_shown=is_chosen),
        *(test_column(key, outputs=Output.PROGRAM) for key in ("best", "last", "adapted", "worst_tenth")),
        *_metric_interval_columns(documents, is_shown=is_chosen),
        _majority_column(),
        *_PROGRAM_COLUMNS,
    ]
    unequal_methods = methods_with_unequal_rounds(experiments)
    sentences = [
        _describe_settings(documents, experiments),
        _accuracy_note(documents, experiments),
        _evaluation_note(documents),
        "Values are chosen by validation accuracy alone; test accuracy is shown for the chosen values only.",
        _judgment_note(experiments) if is_compared else "",
        _excluded_note(documents, experiments),
    ]
    if unequal_methods:
        sentences.append(f"Nothing is chosen among runs of unequal rounds: {', '.join(unequal_methods)}.")
    return Table.from_sources(
        columns,
        experiments,
        note=" ".join(filter(None, sentences)),
        footer=_majority_footer(documents),
        narrow=Narrow.TRANSPOSE,
    )


def chosen_runs(documents: Sequence[RunDocument]) -> list[RunDocument]:
    """Return the runs of the experiments that are best on validation data, one experiment of each method."""
    experiments = group_seeds(documents)
    return [run for index in best_on_validation(experiments) for run in experiments[index].runs]


def _judgment_note(experiments: Sequence[SeedGroup]) -> str:
    """Return the pairs and the number of comparisons, the rule for verdicts, and reasons for missing ones."""
    reasons: dict[str, list[str]] = {}
    for experiment in experiments:
        reason = experiment.verdict.reason
        if reason and reason.is_obstacle:
            reasons.setdefault(reason, []).append(experiment.name)
    differences = [experiment.difference for experiment in experiments if experiment.difference]
    counts = " or ".join(map(str, sorted({difference.n for difference in differences})))
    pairs = ""
    if differences:
        noun = "difference of accuracy" if len(differences) == 1 else "differences of accuracy, each"
        pair_noun = "pair" if counts == "1" else "pairs"
        runs = f"{counts} {pair_noun} of runs with equal seed, partition and rounds"
        pairs = f"{len(differences)} {noun} over {runs}."
    sentences = [
        pairs,
        VERDICT_RULE,
        *(f"Not judged, {reason}: {', '.join(names)}." for reason, names in reasons.items()),
    ]
    return " ".join(filter(None, sentences))


def _excluded_note(documents: Sequence[RunDocument], experiments: Sequence[SeedGroup]) -> str:
    """Return the runs that the means exclude, and the reasons."""
    counted = {id(run) for experiment in experiments for run in experiment.counted_runs}
    excluded = [
        (run, name)
        for run, name in zip(documents, run_labels(documents), strict=True)
        if id(run) not in counted
    ]
    diverged = [name for run, name in excluded if run["diverged"]]
    shorter = [
        f"{name} (round {last_round(run)})" for run, name in excluded if run["best"] and not run["diverged"]
    ]
    reasons = {"Diverged": diverged, "Shorter": shorter}
    return " ".join(
        f"{reason}, and excluded from means: {'; '.join(names)}."
        for reason, names in reasons.items()
        if names
    )


# New clients


_MAX_EPOCHS = 8
"""Maximum number of columns of epochs; they fit next to a method's name in 80 letters."""
_ADAPTATION_NOTES = {
    "prbm": "only p_i was trained",
    "newton": "p_i is one Newton step, with a ridge that corresponds to the epochs",
}


def new_clients_table(documents: Sequence[RunDocument], names: Sequence[str] = ()) -> Table | None:
    """Return the accuracy of new clients over the epochs of adaptation, or None if no run has new clients."""
    sources = [
        _NamedRun(name, document)
        for document, name in zip(documents, names or run_labels(documents), strict=True)
        if document["new_clients"]
    ]
    if not sources:
        return None
    adaptations = sorted({_read_adaptation(run) for run in sources} - {"full"})
    columns = [
        Column("run", "new clients, epoch", TEXT, lambda run: run.name),
        Column("adaptation", kind=TEXT, value=_read_adaptation, outputs=~Output.TERMINAL),
        Column("clients", kind=COUNT, value=lambda run: run.document["new_clients"]["clients"],
               outputs=~Output.TERMINAL),
        *(Column(f"epoch_{epoch}", str(epoch), PERCENT,
                 lambda run, epoch=epoch: _read_by_epoch(run).get(epoch))  # type: ignore[misc]
          for epoch in _select_epochs(max(max(_read_by_epoch(run)) for run in sources))),
    ]  # fmt: skip
    note = (
        "Test accuracy in % of clients that did not take part in training, after each epoch of adaptation, "
        "weighted by samples; epoch 0 is the received model."
    )
    meanings = [f"{name.capitalize()}: {_ADAPTATION_NOTES.get(name, name)}." for name in adaptations]
    return Table.from_sources(columns, sources, note=" ".join([note, *meanings]))


def _read_adaptation(run: _NamedRun) -> str:
    return run.document["new_clients"]["adaptation"] if run.document["new_clients"] else ""


def _read_by_epoch(run: _NamedRun) -> dict[int, float | None]:
    """Return the accuracy after each epoch that was evaluated."""
    new_clients = run.document["new_clients"]
    assert new_clients is not None
    accuracies = dict(enumerate(new_clients["by_epoch"], start=1))
    accuracies |= {0: new_clients["before"], new_clients["epochs"]: new_clients["adapted"]}  # type: ignore[dict-item]
    return {epoch: _read_statistic(accuracy, "weighted") for epoch, accuracy in sorted(accuracies.items())}


def _select_epochs(last: int) -> list[int]:
    """Return 0, the last epoch, and epochs between them at equal ratios, as many as fit."""
    if last < _MAX_EPOCHS:
        return list(range(last + 1))
    return sorted({0, *(int(epoch) for epoch in np.geomspace(1, last, _MAX_EPOCHS - 1).round())})


# Fairness and overhead


def fairness_table(runs: Sequence[Fairness], names: Sequence[str] = ()) -> Table:
    """Return the spread of clients' accuracies, and the numbers of clients that gain over each baseline."""
    baselines = [baseline for baseline in BASELINES if any(baseline in run["paired"] for run in runs)]
    by_name = dict(zip(map(id, runs), names or [run["name"] for run in runs], strict=True))

    def spread(key: str, kind: Kind = PERCENT, **options: Any) -> Column:
        return Column(key, "", kind, lambda run: run["spread"][key], **options)

    columns = [
        Column("name", "method", TEXT, lambda run: by_name[id(run)]),
        _moment_column(itemgetter("moment"), runs),
        Column("round", value=lambda run: run["round"]),
        spread("clients", COUNT, outputs=~Output.TERMINAL),
        spread("mean"),
        spread("std"),
        spread("worst_tenth", note="Worst tenth: mean of the lowest tenth of clients."),
        spread("lowest"),
        spread("median", priority=Priority.OPTIONAL),
        spread("highest", priority=Priority.OPTIONAL),
        *(Column(f"against_{baseline}", f"against {baseline}", PAIRS,
                 lambda run, baseline=baseline: run["paired"].get(baseline),  # type: ignore[misc]
                 note="Against: clients with higher/equal/lower accuracy than with it.")
          for baseline in baselines),
    ]  # fmt: skip
    moment = _name_moment([run["moment"] for run in runs])
    counts = " or ".join(map(str, sorted({run["spread"]["clients"] for run in runs})))
    sentences = [f"Accuracy in % of the deployed model{moment}, over {counts} clients, each counted once."]
    if any(run["chosen_on_test"] for run in runs):
        sentences.append("The best round is chosen on test accuracy, which is too high.")
    return Table.from_sources(columns, runs, note=" ".join(sentences))


def missing_baselines(runs: Sequence[Fairness]) -> str:
    """Return a message about baselines without a run to compare with, or an empty string."""
    known = {baseline for run in runs for baseline in run["paired"]}
    methods = {run["method"].split("(")[0] for run in runs}
    missing = [baseline for baseline in BASELINES if baseline not in known and not methods <= {baseline}]
    if not missing:
        return ""
    return f"not compared with {' or '.join(missing)}: no such run has the same clients"


_TOTAL_ROUNDS = Kind(terminal_format=lambda value: "" if value is None else f"of {value}")


def overhead_table(costs: Sequence[Overhead], names: Sequence[str]) -> Table:
    """Return the costs of each run: seconds, bytes, values that clients keep, and memory."""
    by_name = dict(zip(map(id, costs), names, strict=True))

    def cost(key: str, title: str, kind: Kind, **options: Any) -> Column:
        return Column(key, title, kind, lambda run: run[key], **options)

    columns = [
        Column("name", "method", TEXT, lambda run: by_name[id(run)]),
        Column("seconds", "s per round", SECONDS, lambda run: run["seconds"] if run["rounds"] else None,
               note="Seconds include evaluation; those to the best round include the setup."),
        cost("preparation", "s setup", SECONDS, outputs=~Output.TERMINAL),
        cost("best", "best round", NUMBER, stack="best round", line="round"),
        Column("rounds", "rounds", _TOTAL_ROUNDS, lambda run: None if run["best"] is None else run["rounds"],
               hide_empty=True, stack="best round", line="total"),
        cost("seconds_to_best", "s to best", SECONDS),
        cost("up", "up", BYTES, stack="up", line="round",
             note="Up and down: bytes per client and round, and of the whole run with the setup."),
        cost("total_up", "total up", BYTES, stack="up", line="total"),
        cost("down", "down", BYTES, stack="down", line="round"),
        cost("total_down", "total down", BYTES, stack="down", line="total"),
        cost("kept", "keeps", COUNT, note="Keeps: numbers that a client keeps between rounds."),
        Column("memory", "memory", BYTES, lambda run: 1e6 * run["memory_mb"],
               note="Memory: peak in a round."),
    ]  # fmt: skip
    return Table.from_sources(columns, costs)
