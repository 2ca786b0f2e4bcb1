"""The tables of feddbe, each declared once as columns: results, seeds, sweeps, rounds, clients and costs.

Every function returns a `Table`, which `reporting/table.py` renders to the terminal, the report page,
notebooks, Markdown, LaTeX, CSV and JSON. The terminal has room for 60 columns and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from feddbe.config.options import Config
from feddbe.reporting.table import (
    BYTES,
    COUNT,
    DIFFERENCE,
    INTERVAL,
    MARK,
    MEASURED,
    NUMBER,
    PAIRS,
    PERCENT,
    PROGRESS,
    SECONDS,
    SOFT_HYPHEN,
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
    last_round,
    metric_names,
    metric_value,
    run_labels,
    run_title,
    status_note,
)
from feddbe.results.fairness import BASELINES, Fairness, Overhead
from feddbe.results.seeds import SeedGroup, best_on_validation, group_seeds, methods_with_unequal_rounds
from feddbe.results.statistics import VERDICT_RULE, Interval
from feddbe.runs.folders import slug
from feddbe.runs.summary import ClientRecord

_READINGS = {"weighted": f"weigh{SOFT_HYPHEN}ted", "mean": "mean", "worst_tenth": "worst tenth"}
"""Readings of an accuracy over clients, and their titles."""
_DEFAULT_METRICS = Config().metrics.split(",")


# Results of runs


@dataclass(frozen=True)
class _Result:
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
    sources = [_Result(name, document) for name, document in zip(names, documents, strict=True)]
    columns = [
        Column("run", "method", TEXT, _result_name),
        Column("method", value=lambda run: run.document["method"], outputs=Output.PROGRAM),
        Column("data", "data", TEXT, _data_name, outputs=Output.PAGE | Output.PROGRAM),
        *(_setting_column(key) for key in ("partition", "clients", "seed", "lr")),
        Column("rounds", "rounds", PROGRESS, _rounds_done, outputs=Output.PAGE | Output.PROGRAM),
        *_accuracy_columns("best", lambda run: _primary(run.document["best"])),
        *_accuracy_columns("last", lambda run: _primary(run.document["last"])),
        *_accuracy_columns("tuned", _tuned_accuracy, note=_tuned_note(documents)),
        *_accuracy_columns("new", lambda run: _new_accuracy(run, "before"), note=_NEW_NOTE),
        *_accuracy_columns("new, tuned", lambda run: _new_accuracy(run, "adapted"), note=_NEW_NOTE),
        Column("seconds", "s per round", SECONDS, _round_seconds, priority=Priority.USEFUL),
        Column("bytes_up", "up", BYTES, lambda run: run.document["cost"]["up"], priority=Priority.USEFUL,
               note="Up and down: bytes per client and round."),
        Column("bytes_down", "down", BYTES, lambda run: run.document["cost"]["down"],
               priority=Priority.USEFUL),
        *_metric_columns(documents),
        Column("majority_accuracy", "majority class", PERCENT, lambda run: run.document["majority_accuracy"],
               outputs=Output.WIDE | Output.PROGRAM),
        Column("moment", value=lambda run: _last(run.document, "moment"), outputs=Output.PROGRAM),
        Column("diverged", value=_divergence_round, outputs=Output.PROGRAM),
        Column("folder", value=lambda run: run.document["folder"], outputs=Output.PROGRAM),
    ]  # fmt: skip
    return Table.from_sources(
        columns,
        sources,
        note=_results_note(documents, names),
        footer=[
            {"run": f"majority class{data}", "best_weighted": floor}
            for floor, data in _floors(documents).items()
        ],
        line_stack="round",
    )


def _accuracy_columns(line: str, read: Callable[[_Result], Accuracy | None], note: str = "") -> list[Column]:
    """Return the columns of one line of the results: the round, and the readings over clients."""
    key = line.replace(", ", "_")
    is_evaluated = line in ("best", "last")
    columns = []
    if is_evaluated:
        columns.append(
            Column(
                f"{key}_round", f"{line} round", NUMBER,
                lambda run: _entry_round(run.document, line), stack="round", line=line,
            )
        )  # fmt: skip
    for reading, stack in _READINGS.items():
        columns.append(
            Column(
                f"{key}_{reading}",
                f"{line} {stack}",
                PERCENT,
                lambda run, reading=reading: _reading(read(run), reading),  # type: ignore[misc]
                outputs=Output.ALL if line == "best" or reading == "weighted" else ~Output.PAGE,
                hide_empty=not is_evaluated,
                note=note if reading == "weighted" else "",
                stack=stack,
                line=line,
            )
        )
    return columns


def _metric_columns(documents: Sequence[RunDocument]) -> list[Column]:
    """Return two columns for each metric of the rounds, its value in the best and in the last round.

    A terminal has no room for those that all runs have; it shows what the user selected.
    """
    from feddbe.metrics.builtin import describe_metric

    columns = []
    for name in metric_names(documents):
        label, unit = describe_metric(name)
        key = name if name not in (*_READINGS, "round") else f"metric_{name}"
        for which in ("best", "last"):
            columns.append(
                Column(
                    f"{which}_{key}",
                    f"{which} {label}",
                    PERCENT if unit == "%" else MEASURED,
                    lambda run, which=which, name=name: _entry_metric(run.document, which, name),  # type: ignore[misc]
                    outputs=~Output.TERMINAL if name in _DEFAULT_METRICS else Output.ALL,
                    priority=Priority.OPTIONAL,
                    hide_empty=True,
                    stack=label,
                    line=which,
                )
            )
    return columns


def _setting_column(key: str) -> Column:
    return Column(key, value=lambda run: run.document["config"].get(key), outputs=Output.PROGRAM)


def _result_name(run: _Result) -> str:
    status = status_note(run.document)
    return f"{run.name} ({status})" if status else run.name


def _data_name(run: _Result) -> str | None:
    data = run.document["config"].get("data")
    return Path(data).name if data else None


def _rounds_done(run: _Result) -> Progress:
    document = run.document
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    wanted = document["config"].get("rounds", done)
    is_complete = "rounds" not in document["config"] or is_finished(document)
    return Progress(done, done if is_complete else wanted)


def _primary(entry: RoundResult | None) -> Accuracy | None:
    return entry["accuracy"] if entry else None


def _last(document: RunDocument, key: str) -> Any:
    return {**document["last"]}[key] if document["last"] else None


def _entry_round(document: RunDocument, which: str) -> int | None:
    entry = document["best" if which == "best" else "last"]
    return entry["round"] if entry and entry["accuracy"] else None


def _entry_metric(document: RunDocument, which: str, name: str) -> float | None:
    entry = document["best" if which == "best" else "last"]
    return metric_value(entry, name) if entry else None


def _reading(accuracy: Accuracy | None, reading: str) -> float | None:
    return float({**accuracy}[reading]) if accuracy else None  # type: ignore[arg-type]


def _tuned_accuracy(run: _Result) -> Accuracy | None:
    """Return the accuracy of clients that were tuned after the last round, if that is not the primary one."""
    last = run.document["last"]
    return last["adapted"] if last and last["moment"] != "adapted" else None


def _new_accuracy(run: _Result, moment: str) -> Accuracy | None:
    new_clients = run.document["new_clients"]
    if new_clients is None:
        return None
    return new_clients["before"] if moment == "before" else new_clients["adapted"]


def _round_seconds(run: _Result) -> float | None:
    """Return the seconds of the median round; the first entry is the start, not a round."""
    seconds = [entry["seconds"] for entry in run.document["rounds"] if entry["round"] >= 1]
    return median(seconds) if seconds else None


def _divergence_round(run: _Result) -> int | None:
    divergence = run.document["diverged"]
    return divergence["round"] if divergence else None


_NEW_NOTE = "New: clients that took no part in the training."


def _tuned_note(documents: Sequence[RunDocument]) -> str:
    epochs = {str(document["config"].get("adapt_epochs")) for document in documents}
    return f"Tuned: after {', '.join(sorted(epochs))} epochs of each client's own from the last model."


def _results_note(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    remarks = [
        f"{name}: {'; '.join(document['remarks'])}."
        for document, name in zip(documents, names, strict=True)
        if document["remarks"]
    ]
    data_notes = sorted({document["note"] for document in documents} - {""})
    sentences = [
        f"{run_title(documents)}.",
        f"Test accuracy in % of the deployed model {moments_note(documents, names)}: weighted by samples, mean of "
        "clients, mean of the worst tenth of clients.",
        f"The best round is chosen {_choice(documents, 'on test accuracy')}.",
        "Majority class: each client's own.",
        _batch_norm_note(documents, names),
        *(f"The data: {note}." for note in data_notes),
        *remarks,
    ]
    return " ".join(filter(None, sentences))


def _choice(documents: Sequence[RunDocument], on_test: str) -> str:
    """Return by which data the best rounds are chosen."""
    shares = {document["config"].get("validation") or 0.0 for document in documents}
    texts = {f"on {share:g} of the training data, held out" if share else on_test for share in shares}
    return " or ".join(sorted(texts))


def _floors(documents: Sequence[RunDocument]) -> dict[float, str]:
    """Return the accuracies of majority classes; if they differ, with the data that each belongs to."""
    floors = {
        document["majority_accuracy"]: f", {document['config'].get('data', '?')}" for document in documents
    }
    return floors if len(floors) > 1 else dict.fromkeys(floors, "")


def moments_note(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    """Return when the accuracies were measured; with the names of the runs if that differs between them."""
    pairs = zip(documents, names, strict=True)
    measured = [(describe_moment(d["last"]["moment"]), name) for d, name in pairs if d["last"] is not None]
    if len({when for when, _ in measured}) > 1:
        return f"({_grouped(measured)})"
    return measured[0][0] if measured else describe_moment("before")


_BATCH_NORM = {"local": "local, each client's own", "average": "averaged over clients"}


def _batch_norm_note(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    """Return where BatchNorm statistics are, if a model has any; with names of runs if that differs."""
    pairs = zip(documents, names, strict=True)
    kept = [(_BATCH_NORM.get(document["bn_buffers"] or "", "none"), name) for document, name in pairs]
    kinds = {kind for kind, _ in kept}
    if kinds <= {"none"}:
        return ""
    return f"BatchNorm statistics: {_grouped(kept) if len(kinds) > 1 else kinds.pop()}."


def _grouped(pairs: Sequence[tuple[str, str]]) -> str:
    """Return each text with the names that it belongs to; the names of the most frequent one are `all others`
    if there are more than four."""
    groups: dict[str, list[str]] = {}
    for text, name in pairs:
        groups.setdefault(text, []).append(name)
    most = max(groups, key=lambda text: len(groups[text]))
    if len(groups[most]) > 4:
        del groups[most]
        groups[most] = ["all others"]
    return "; ".join(f"{text}: {', '.join(members)}" for text, members in groups.items())


# Rounds of a run


def rounds_table(document: RunDocument) -> Table:
    """Return the table of one run's rounds: a record for each evaluated or trained round."""
    fixed = [
        Column("round", value=itemgetter("round")),
        Column("moment", kind=TEXT, value=itemgetter("moment")),
        *(
            Column(key, value=lambda entry, reading=reading: _reading(entry["accuracy"], reading))  # type: ignore[misc]
            for key, reading in (
                ("accuracy", "weighted"), ("accuracy_mean", "mean"),
                ("accuracy_worst_tenth", "worst_tenth"), ("accuracy_std", "std"),
            )
        ),
        Column("validation", value=lambda entry: _reading(entry["validation"], "weighted")),
        *(Column(key, value=itemgetter(key))
          for key in ("auc", "train_loss", "seconds", "bytes_up", "bytes_down")),
    ]  # fmt: skip
    keys = {column.key for column in fixed}
    metrics = [
        Column(name, value=lambda entry, name=name: metric_value(entry, name))  # type: ignore[misc]
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

    It has the best and the last round of one run, or the best round of each of several.
    """
    about = {client["client"]: client for members in clients for client in members}
    accuracies = [{client["client"]: client["best"] for client in members} for members in clients]
    titles = run_labels(documents)
    if len(documents) == 1:
        accuracies.append({client["client"]: client["last"] for client in clients[0]})
        entries = {"best": documents[0]["best"], "last": documents[0]["last"]}
        titles = [f"{which} @{entry['round']}" if entry else which for which, entry in entries.items()]
    has_names = any(client["name"] != str(number) for number, client in about.items())
    columns = [
        Column("client", value=lambda number: number),
        Column("name", kind=TEXT, value=lambda number: about[number]["name"] if has_names else None,
               hide_empty=True),
        Column("samples", "test samples", value=lambda number: about[number]["samples"]),
        *(Column(f"accuracy_{index}", name, PERCENT, members.get)
          for index, (name, members) in enumerate(zip(titles, accuracies, strict=True))),
    ]  # fmt: skip
    which = "" if len(documents) == 1 else " in the best round of each run"
    note = f"{run_title(documents)}. Test accuracy in % of each client{which}."
    return Table.from_sources(columns, sorted(about), note=note, narrow=Narrow.STACK_BLOCKS)


_SPLIT_RECORDS = 25
"""Most clients that the table of a split shows."""


def split_table(
    train: Sequence[int] | NDArray[np.int64],
    test: Sequence[int] | NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    label_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    looks: Sequence[str] = (),
) -> Table:
    """Return the table of a split: a record for each client.

    Args:
        train: Training samples of each client.
        test: Test samples of each client.
        labels: Samples by client and class.
        label_names: The classes; by default their numbers.
        client_names: The clients; by default their numbers.
        looks: Transformation of each client's images, if there is one.
    """
    columns = [
        Column("client", kind=TEXT if client_names else NUMBER,
               value=lambda client: client_names[client] if client_names else client),
        Column("train", value=lambda client: train[client]),
        Column("test", value=lambda client: test[client]),
        Column("labels", value=lambda client: np.count_nonzero(labels[client])),
        Column("shift", kind=TEXT, value=lambda client: looks[client] if looks else None, hide_empty=True),
        Column("frequent", "most frequent labels", TEXT,
               lambda client: _frequent_labels(labels[client], label_names)),
    ]  # fmt: skip
    shown = len(labels) if len(labels) <= _SPLIT_RECORDS else _SPLIT_RECORDS - 1
    total = labels.sum(axis=0)
    more = {"client": "...", "frequent": f"... and {len(labels) - shown} more clients"}
    everyone = {
        "client": "all", "train": sum(train), "test": sum(test), "labels": np.count_nonzero(total),
        "frequent": _frequent_labels(total, label_names),
    }  # fmt: skip
    footer = [more, everyone] if shown < len(labels) else [everyone]
    return Table.from_sources(columns, range(shown), footer=footer)


def _frequent_labels(counts: NDArray[np.int64], names: Sequence[str] = ()) -> str:
    """Return the three most frequent labels with their shares; of equal ones the lower label first."""
    order = [int(label) for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
    texts = [names[label] if names else str(label) for label in order]
    return ", ".join(
        f"{text} ({counts[label] / counts.sum():.0%})" for text, label in zip(texts, order, strict=True)
    )


class RunRow(TypedDict):
    """One line of `feddbe runs`; accuracies are weighted, as fractions of one."""

    name: str
    method: str
    data: str
    seed: int | None
    begun: str
    """When, in UTC; nothing if it is not known."""
    rounds: int
    best: float | None
    last: float | None
    state: str


def runs_table(rows: Sequence[RunRow]) -> Table:
    """Return the table of the runs in a folder; a name is never broken, because users type it."""
    is_in_names = all(slug(row["method"]) in row["name"] and row["data"] in row["name"] for row in rows)
    priority = Priority.OPTIONAL if is_in_names else Priority.REQUIRED
    columns = [
        Column("name", "run", TEXT),
        Column("method", kind=TEXT, priority=priority),
        Column("data", kind=TEXT, priority=priority),
        Column("seed"),
        Column("rounds"),
        Column("best", "best %", PERCENT),
        Column("last", "last %", PERCENT),
        Column("begun", kind=TIME),
        Column("state", kind=TEXT),
    ]
    note = "Test accuracy weighted by samples; best: on it, or on held-out data; times are UTC."
    records = [{**row} for row in rows]
    return Table(columns, records, note=note, narrow=Narrow.LIST_RECORDS)


# Experiments over seeds


def has_repetitions(documents: Sequence[RunDocument]) -> bool:
    """Return whether an experiment has more than one seed."""
    return any(len(experiment.runs) > 1 for experiment in group_seeds(documents))


def _interval_column(key: str, text: str = "", **about: Any) -> Column:
    return Column(
        key, text, about.pop("kind", INTERVAL), lambda experiment: getattr(experiment, key), **about
    )


_PROGRAM_COLUMNS = [
    Column("n", value=lambda experiment: len(experiment.counted), outputs=Output.PROGRAM),
    Column("diverged", value=lambda experiment: experiment.diverged, outputs=Output.PROGRAM),
    Column(
        "seeds",
        value=lambda experiment: " ".join(str(run["config"].get("seed")) for run in experiment.runs),
        outputs=Output.PROGRAM,
    ),
]
_NAME_COLUMN = Column("name", "method", TEXT, lambda experiment: experiment.name)
_SEEDS_COLUMN = Column(
    "counted", "seeds", PROGRESS,
    lambda experiment: Progress(len(experiment.counted), len(experiment.runs)), outputs=Output.READER,
)  # fmt: skip


def _verdict_columns(text: str, *, is_compared: bool, is_shown: Callable[[SeedGroup], bool]) -> list[Column]:
    """Return the difference to the baseline, whether it is significant, and if not, why."""
    readers = Output.READER if is_compared else Output(0)
    outcome = Column(
        "verdict", "verdict", TEXT,
        lambda experiment: experiment.verdict.outcome if is_shown(experiment) else "",
        outputs=readers | Output.PROGRAM, hide_empty=True,
    )  # fmt: skip
    reason = Column(
        "reason", "no verdict because", TEXT,
        lambda experiment: str(experiment.verdict.reason or "") if is_shown(experiment) else "",
        outputs=(Output.PAGE if is_compared else Output(0)) | Output.PROGRAM,
    )  # fmt: skip
    difference = Column(
        "difference", text, DIFFERENCE,
        lambda experiment: experiment.difference if is_shown(experiment) else None,
        outputs=readers | Output.PROGRAM,
    )  # fmt: skip
    return [difference, outcome, reason]


def seeds_table(documents: Sequence[RunDocument]) -> Table:
    """Return the table over seeds: a record for each experiment, compared with the first one."""
    experiments = group_seeds(documents)
    columns = [
        _NAME_COLUMN,
        _SEEDS_COLUMN,
        _interval_column("best"),
        _interval_column("last", priority=Priority.OPTIONAL),
        _interval_column("mean", "mean of clients", outputs=Output.PAGE | Output.PROGRAM),
        _interval_column("worst_tenth", priority=Priority.OPTIONAL),
        _interval_column("validation", outputs=Output.PROGRAM),
        *_verdict_columns(
            f"best less {experiments[0].name}",
            is_compared=len(experiments) > 1,
            is_shown=lambda experiment: True,
        ),
        *_PROGRAM_COLUMNS,
    ]
    whens = " or ".join(dict.fromkeys(describe_moment(d["last"]["moment"]) for d in documents if d["last"]))
    sentences = [
        f"{run_title(documents)}.",
        f"Test accuracy in % {whens}, weighted by samples: mean ± 95 % interval over seeds (Student's t).",
        f"The best round is chosen {_choice(documents, 'on test data')}.",
        _judgment_note(experiments) if len(experiments) > 1 else "",
        _excluded_note(documents, experiments),
    ]
    return Table.from_sources(columns, experiments, note=" ".join(filter(None, sentences)))


def sweep_table(documents: Sequence[RunDocument]) -> Table:
    """Return the table of a grid of values: a record for each experiment.

    All have their accuracy on validation data; only those that are chosen by it have one on test data.
    """
    experiments = group_seeds(documents)
    picked = best_on_validation(experiments)
    is_compared = len(picked) > 1
    if is_compared:  # methods are compared by the experiments that were chosen of them
        experiments = group_seeds(documents, picked[0], picked)
    chosen_names = {experiments[index].name for index in picked}
    baseline = experiments[picked[0]].name if picked else ""

    def is_chosen(experiment: SeedGroup) -> bool:
        return experiment.name in chosen_names

    def tested(key: str) -> Callable[[SeedGroup], Interval | None]:
        return lambda experiment: getattr(experiment, key) if is_chosen(experiment) else None

    columns = [
        _NAME_COLUMN,
        _SEEDS_COLUMN,
        _interval_column("validation"),
        Column("chosen", kind=MARK, value=is_chosen),
        Column("best", "test", INTERVAL, tested("best")),
        Column("last", kind=INTERVAL, value=tested("last"), outputs=Output.PROGRAM),
        Column("worst_tenth", kind=INTERVAL, value=tested("worst_tenth"), outputs=Output.PROGRAM),
        *_verdict_columns(f"test less {baseline}", is_compared=is_compared, is_shown=is_chosen),
        *_PROGRAM_COLUMNS,
    ]
    methods = methods_with_unequal_rounds(experiments)
    sentences = [
        f"{run_title(documents)}.",
        "Accuracy in %, mean ± 95 % interval over seeds, in the round that is best on validation data: "
        f"{documents[0]['config'].get('validation'):g} of the training data, held out.",
        "Values are chosen by that alone; test data are looked at only for what was chosen.",
        _judgment_note(experiments) if is_compared else "",
        _excluded_note(documents, experiments),
        f"Nothing is chosen among runs of unequal rounds: {', '.join(methods)}." if methods else "",
    ]
    return Table.from_sources(columns, experiments, note=" ".join(filter(None, sentences)))


def chosen_runs(documents: Sequence[RunDocument]) -> list[RunDocument]:
    """Return the runs of the experiments that are best on validation data, one experiment of each method."""
    experiments = group_seeds(documents)
    return [run for index in best_on_validation(experiments) for run in experiments[index].runs]


def _judgment_note(experiments: Sequence[SeedGroup]) -> str:
    """Return the rule by which differences are judged, and why some are not."""
    reasons: dict[str, list[str]] = {}
    for experiment in experiments:
        reason = experiment.verdict.reason
        if reason and reason.is_obstacle:
            reasons.setdefault(reason, []).append(experiment.name)
    not_judged = [f" Not judged, {reason}: {', '.join(names)}." for reason, names in reasons.items()]
    return (
        f"Differences are between runs with equal seed, split and rounds. {VERDICT_RULE}{''.join(not_judged)}"
    )


def _excluded_note(documents: Sequence[RunDocument], experiments: Sequence[SeedGroup]) -> str:
    """Return which runs are counted in no mean, and why."""
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
        f"{reason}, and counted in no mean: {'; '.join(names)}." for reason, names in reasons.items() if names
    )


# New clients


_MAX_EPOCHS = 8
"""Epochs that fit next to a method's name in 80 columns."""
_ADAPTATIONS = {
    "prbm": "only p_i was trained",
    "newton": "p_i is one Newton step, with the ridge of so many epochs",
    "mean": "p_i is the global mean less the client's, whatever the epochs",
}


def new_clients_table(documents: Sequence[RunDocument], names: Sequence[str] = ()) -> Table | None:
    """Return the accuracy of new clients over the epochs of adapting, or None if no run has new clients."""
    sources = [
        _Result(name, document)
        for document, name in zip(documents, names or run_labels(documents), strict=True)
        if document["new_clients"]
    ]
    if not sources:
        return None
    ways = sorted({_adaptation(run) for run in sources} - {"full"})
    columns = [
        Column("run", "newcomers after", TEXT, lambda run: run.name),
        Column("way", kind=TEXT, value=_adaptation, outputs=~Output.TERMINAL),
        Column("clients", kind=COUNT, value=lambda run: run.document["new_clients"]["clients"],
               outputs=~Output.TERMINAL),
        *(Column(f"epoch_{epoch}", str(epoch), PERCENT,
                 lambda run, epoch=epoch: _by_epoch(run).get(epoch))  # type: ignore[misc]
          for epoch in _shown_epochs(max(max(_by_epoch(run)) for run in sources))),
    ]  # fmt: skip
    note = (
        "epochs of adapting: test accuracy in % of clients that took no part in the training, weighted by "
        "samples; 0 is the model as it was received."
    )
    meanings = [f" {way.capitalize()}: {_ADAPTATIONS.get(way, way)}." for way in ways]
    return Table.from_sources(columns, sources, note=note + "".join(meanings))


def _adaptation(run: _Result) -> str:
    return run.document["new_clients"]["adaptation"] if run.document["new_clients"] else ""


def _by_epoch(run: _Result) -> dict[int, float | None]:
    """Return the accuracy after each epoch that was evaluated."""
    new_clients = run.document["new_clients"]
    assert new_clients is not None
    accuracies = dict(enumerate(new_clients["by_epoch"], start=1))
    accuracies |= {0: new_clients["before"], new_clients["epochs"]: new_clients["adapted"]}  # type: ignore[dict-item]
    return {epoch: _reading(accuracy, "weighted") for epoch, accuracy in sorted(accuracies.items())}


def _shown_epochs(last: int) -> list[int]:
    """Return 0, the last epoch, and those that fit between them, at equal ratios."""
    if last < _MAX_EPOCHS:
        return list(range(last + 1))
    return sorted({0, *(int(epoch) for epoch in np.geomspace(1, last, _MAX_EPOCHS - 1).round())})


# Fairness and overhead


def fairness_table(runs: Sequence[Fairness], names: Sequence[str] = ()) -> Table:
    """Return how clients' accuracies are spread, and how many clients are better off than with a baseline."""
    baselines = [baseline for baseline in BASELINES if any(baseline in run["paired"] for run in runs)]
    by_name = dict(zip(map(id, runs), names or [run["name"] for run in runs], strict=True))

    def spread(key: str, text: str = "", **about: Any) -> Column:
        return Column(key, text, about.pop("kind", PERCENT), lambda run: run["spread"][key], **about)

    columns = [
        Column("name", "method", TEXT, lambda run: by_name[id(run)]),
        Column("round", value=lambda run: run["round"]),
        spread("clients", kind=COUNT, outputs=~Output.TERMINAL),
        spread("mean"),
        spread("std"),
        spread("worst_tenth", note="Worst tenth: the mean of the lowest tenth."),
        spread("lowest"),
        spread("median", priority=Priority.OPTIONAL),
        spread("highest", priority=Priority.OPTIONAL),
        *(Column(f"against_{baseline}", f"against {baseline}", PAIRS,
                 lambda run, baseline=baseline: run["paired"].get(baseline),  # type: ignore[misc]
                 note="Against: clients better/equal/worse off than with it.")
          for baseline in baselines),
    ]  # fmt: skip
    whens = " or ".join(dict.fromkeys(describe_moment(run["moment"]) for run in runs))
    counts = " or ".join(map(str, sorted({run["spread"]["clients"] for run in runs})))
    note = f"Accuracy in % {whens}, over {counts} clients, each counted once."
    return Table.from_sources(columns, runs, note=note)


def missing_baselines(runs: Sequence[Fairness]) -> str:
    """Return a line about the baselines that no run could be compared with, or nothing."""
    known = {baseline for run in runs for baseline in run["paired"]}
    missing = [baseline for baseline in BASELINES if baseline not in known and not _only(runs, baseline)]
    if not missing:
        return ""
    return f"no run of {' or '.join(missing)} with the same clients among these: no comparison with it"


def _only(runs: Sequence[Fairness], baseline: str) -> bool:
    """Return whether all runs are of the baseline itself."""
    return all(run["method"].split("(")[0] == baseline for run in runs)


_OF_ROUNDS = Kind(terminal_format=lambda value: "" if value is None else f"of {value}")


def overhead_table(costs: Sequence[Overhead], names: Sequence[str]) -> Table:
    """Return the costs of each run: seconds, bytes, kept numbers and memory."""
    by_name = dict(zip(map(id, costs), names, strict=True))

    def cost(key: str, text: str, kind: Kind, **about: Any) -> Column:
        return Column(key, text, kind, lambda run: run[key], **about)

    columns = [
        Column("name", "method", TEXT, lambda run: by_name[id(run)]),
        Column("seconds", "s per round", SECONDS, lambda run: run["seconds"] if run["rounds"] else None,
               note="Seconds include evaluation, those to the best round the preparation."),
        cost("preparation", "s preparation", SECONDS, outputs=~Output.TERMINAL),
        cost("best", "best round", NUMBER, stack="best round", line="round"),
        Column("rounds", "rounds", _OF_ROUNDS, lambda run: None if run["best"] is None else run["rounds"],
               hide_empty=True, stack="best round", line="total"),
        cost("seconds_to_best", "s to best", SECONDS),
        cost("up", "up", BYTES, stack="up", line="round",
             note="Up and down: bytes per client and round, and of the whole run, preparation included."),
        cost("total_up", "all up", BYTES, stack="up", line="total"),
        cost("down", "down", BYTES, stack="down", line="round"),
        cost("total_down", "all down", BYTES, stack="down", line="total"),
        cost("kept", "keeps", COUNT, note="Keeps: numbers that a client keeps between rounds."),
        Column("memory", f"mem{SOFT_HYPHEN}ory", BYTES, lambda run: 1e6 * run["memory_mb"],
               note="Memory: the most that was in use in a round."),
    ]  # fmt: skip
    return Table.from_sources(columns, costs)
