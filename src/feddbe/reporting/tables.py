"""What the command line shows: tables and a learning curve that fit in 80 columns and survive 60.

Everything is a rich renderable, laid out for the console it meets; one without Unicode gets ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from feddbe.reporting.formatting import (
    Column,
    Grid,
    Name,
    caption,
    in_bytes,
    in_seconds,
    percent,
    plain_table,
)
from feddbe.results.document import (
    Accuracy,
    Entry,
    RunDocument,
    adapting,
    ending,
    labels,
    last_round,
    moment,
    title,
)
from feddbe.results.fairness import BASELINES, Fairness, Overhead, Paired
from feddbe.results.seeds import Repeats, chosen, repeats, unequal
from feddbe.results.statistics import RULE, Interval
from feddbe.runs.folders import slug
from feddbe.runs.summary import Client


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


def results_table(documents: Sequence[RunDocument]) -> RenderableType:
    """Best and last round of each run, what a round costs, and the majority class to compare with."""
    return _Results(tuple(documents))


def results_words(
    documents: Sequence[RunDocument], names: Sequence[str], *, costs: bool = True, endings: bool = True
) -> str:
    """What a reader must know of the results of these runs, their costs, and what came after the last
    round."""
    return (
        f"Test accuracy in % of the deployed model {moments(documents, names)}: "
        "weighted by samples, mean of clients, mean of the worst tenth of clients. "
        f"{_choice(documents)} Majority class: each client's own."
        + (_endings(documents) if endings else "")
        + _statistics(documents, names)
        + "".join(f" The data: {note}." for note in sorted({d["note"] for d in documents} - {""}))
        + (" Bytes up and down are per client and round." if costs else "")
        + "".join(
            f" {name}: {'; '.join(d['remarks'])}."
            for d, name in zip(documents, names, strict=True)
            if d["remarks"]
        )
    )


def runs_table(rows: Sequence[RunRow]) -> RenderableType:
    """The runs of a folder, one line each if there is room, else two; a name is never broken: it is typed."""
    return _Runs(tuple(rows))


def split_table(
    train: Sequence[int] | NDArray[np.int64],
    test: Sequence[int] | NDArray[np.int64],
    labels: NDArray[np.int64],
    rows: int = 25,
    *,
    label_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    looks: Sequence[str] = (),
) -> RenderableType:
    """Each client's training and test samples and its labels (`labels`: clients x classes, sample counts), by
    name where they have names; `looks`: what was done to its images."""
    table = plain_table(gap=2)
    table.add_column("client", justify="left" if client_names else "right", overflow="fold")
    for name in ("train", "test", "labels"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (*["looks"] * bool(looks), "most frequent labels"):
        table.add_column(name)
    shown = len(labels) if len(labels) <= rows else rows - 1
    for i in range(shown):
        who = escape(client_names[i]) if client_names else str(i)
        numbers = [f"{train[i]}", f"{test[i]}", f"{np.count_nonzero(labels[i])}"]
        table.add_row(who, *numbers, *looks[i : i + 1], _top(labels[i], label_names))
    blank = [""] * bool(looks)
    if shown < len(labels):
        table.add_row("...", "", "", "", *blank, f"... and {len(labels) - shown} more clients")
    table.add_section()
    total = labels.sum(axis=0)
    numbers = [f"{sum(train)}", f"{sum(test)}", f"{np.count_nonzero(total)}"]
    table.add_row("all", *numbers, *blank, _top(total, label_names), style="bold")
    return table


def _top(counts: NDArray[np.int64], names: Sequence[str] = ()) -> str:
    """The three most frequent labels with their shares; of equal ones the lower label first."""
    order = [int(label) for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
    told = [escape(names[label]) if names else str(label) for label in order]
    return ", ".join(
        f"{name} ({counts[label] / counts.sum():.0%})" for name, label in zip(told, order, strict=True)
    )


@dataclass(frozen=True)
class _Runs:
    """What there is room for depends on the console's width."""

    rows: tuple[RunRow, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        said = [_said(row) for row in self.rows]
        told = all(slug(row["method"]) in row["name"] and row["data"] in row["name"] for row in self.rows)
        note = "Test accuracy weighted by samples; best: on it, or on held-out data; times are UTC."
        for begun in (slice(None), slice(5, None)):  # without the year, if need be
            for without in ((), ("method", "data")) if told else ((),):
                columns = {
                    key: [line[key][begun] if key == "begun" else line[key] for line in said]
                    for key in said[0]
                    if key not in without
                }
                widths = [max(map(len, [key, *values])) for key, values in columns.items()]
                if sum(widths) + len(widths) - 1 <= options.max_width:
                    table = plain_table(gap=1)
                    for key in columns:
                        left = key in ("run", "method", "data", "begun", "state")
                        table.add_column(key, justify="left" if left else "right", no_wrap=True)
                    for cells in zip(*columns.values(), strict=True):
                        table.add_row(*map(Text, cells))
                    table.caption = caption(note)
                    yield table
                    return
        for line in said:
            yield Text(line["run"], style="bold", overflow="ignore", no_wrap=True)
            found = [f"{which} {line[f'{which} %']} %" for which in ("best", "last") if line["best %"] != "-"]
            words = [line["method"], line["data"], f"seed {line['seed']}", f"{line['rounds']} rounds"]
            yield Padding(Text(", ".join([*words, *found, line["begun"], line["state"]])), (0, 0, 0, 2))
        yield caption(note)


def _said(row: RunRow) -> dict[str, str]:
    return {
        "run": row["name"],
        "method": row["method"],
        "data": row["data"],
        "seed": "-" if row["seed"] is None else str(row["seed"]),
        "rounds": str(row["rounds"]),
        "best %": percent(row["best"]),
        "last %": percent(row["last"]),
        "begun": row["begun"][:16].replace("T", " ") or "-",
        "state": row["state"],
    }


# Results


@dataclass(frozen=True)
class _Results:
    """The table of results; a class because its layout depends on the console's width."""

    documents: tuple[RunDocument, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        table = plain_table(gap=1 if width < 76 else 2)
        table.add_column("method", overflow="fold")
        table.add_column("round", no_wrap=True)
        names = ["weigh-\nted" if width < 76 else "weighted", "mean", "worst\ntenth"]
        if costs := width >= 56:  # below, there is room for the method and its accuracy only
            names += ["s per\nround", "up", "down"]
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        runs = labels(self.documents)
        for document, run in zip(self.documents, runs, strict=True):
            # All lines in one row, so that a long name has the room of all.
            lines = [_entry("best", document["best"]), _entry("last", document["last"]), *_adapted(document)]
            if costs:
                lines = [lines[0] + _cost(document), *(line + [""] * 3 for line in lines[1:])]
            name = f"{run} ({ending(document)})" if ending(document) else run
            table.add_row(Name(name, "bold"), *("\n".join(column) for column in zip(*lines, strict=True)))
        table.add_section()
        for floor, data in _floors(self.documents).items():
            table.add_row(Name(f"majority class{data}"), "", percent(floor), style="dim")
        table.caption = caption(results_words(self.documents, runs, costs=costs))
        yield table


def _entry(which: str, entry: Entry | None) -> list[str]:
    if entry is None or entry["accuracy"] is None:
        return [which, "-", "-", "-"]
    return _numbers(f"{which} @{entry['round']}", entry["accuracy"])


def _numbers(which: str, found: Accuracy | None) -> list[str]:
    numbers = (found["weighted"], found["mean"], found["worst_tenth"]) if found else (None,) * 3
    return [which, *map(percent, numbers)]


def _adapted(document: RunDocument) -> list[list[str]]:
    """What came after the last round: fine-tuned clients, and newcomers before and after they adapted."""
    lines, last, newcomers = [], document["last"], document["newcomers"]
    if last and last["adapted"] and last["when"] != "adapted":
        lines.append(_numbers("tuned", last["adapted"]))
    if newcomers:
        lines += [_numbers("new", newcomers["before"]), _numbers("new, tuned", newcomers["adapted"])]
    return lines


def _endings(documents: Sequence[RunDocument]) -> str:
    """What the lines of `_adapted` mean, if there are any."""
    epochs = {str(d["config"].get("adapt_epochs")) for d in documents if _adapted(d)}
    if not epochs:
        return ""
    new = " New: clients that took no part in the training." if any(d["newcomers"] for d in documents) else ""
    return f" Tuned: after {', '.join(sorted(epochs))} epochs of each client's own from the last model.{new}"


def _choice(documents: Sequence[RunDocument]) -> str:
    shares = {d["config"].get("validation") or 0.0 for d in documents}
    on = {f"on {share:g} of the training data, held out" if share else "on test accuracy" for share in shares}
    return f"The best round is chosen {' or '.join(sorted(on))}."


def _cost(document: RunDocument) -> list[str]:
    """Seconds of the median round (the first entry is the start, not a round) and bytes."""
    seconds = [entry["seconds"] for entry in document["rounds"] if entry["round"] >= 1]
    cost = document["cost"]
    return [in_seconds(median(seconds)) if seconds else "-", in_bytes(cost["up"]), in_bytes(cost["down"])]


def _floors(documents: Sequence[RunDocument]) -> dict[float, str]:
    """The floors, and if runs differ in it, the data that each belongs to."""
    found = {document["floor"]: f", {document['config'].get('data', '?')}" for document in documents}
    return found if len(found) > 1 else dict.fromkeys(found, "")


def moments(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    """When the accuracies were measured; with the names of the runs if that differs between them."""
    pairs = zip(documents, names, strict=True)
    found = [(moment(d["last"]["when"]), name) for d, name in pairs if d["last"] is not None]
    if len({when for when, _ in found}) > 1:
        return f"({_grouped(found)})"
    return found[0][0] if found else moment("before")


_STATISTICS = {"local": "local, each client's own", "average": "averaged over clients"}


def _statistics(documents: Sequence[RunDocument], names: Sequence[str]) -> str:
    """Where BatchNorm statistics are, if a model has any; with the names of the runs if that differs."""
    pairs = zip(documents, names, strict=True)
    found = [(_STATISTICS.get(d["bn_buffers"] or "", "none"), name) for d, name in pairs]
    kinds = {kind for kind, _ in found}
    if kinds <= {"none"}:
        return ""
    return f" BatchNorm statistics: {_grouped(found) if len(kinds) > 1 else kinds.pop()}."


def _grouped(pairs: Sequence[tuple[str, str]]) -> str:
    """Each word with the names that it belongs to; most of many are the others."""
    found: dict[str, list[str]] = {}
    for word, name in pairs:
        found.setdefault(word, []).append(name)
    most = max(found, key=lambda word: len(found[word]))
    if len(found[most]) > 4:
        del found[most]
        found[most] = ["all others"]
    return "; ".join(f"{word}: {', '.join(those)}" for word, those in found.items())


_READINGS = ("weighted", "mean", "worst_tenth")
_SETTINGS = ("data", "partition", "clients", "seed", "lr")


def results_grid(documents: Sequence[RunDocument]) -> Grid:
    """A run to a row: its best and its last round, and what a round costs."""
    entries = [
        Column(f"{which}_{key}", f"{which} {key.replace('_', ' ')}", percent)
        for which in ("best", "last")
        for key in _READINGS
    ]
    columns = [
        Column("run", "method", text=True), Column("method"), *map(Column, _SETTINGS),
        Column("best_round", "best round"), *entries[:3], Column("last_round", "last round"), *entries[3:],
        Column("seconds", "s per round", lambda value: "-" if value is None else in_seconds(value)),
        Column("bytes_up", "up", in_bytes), Column("bytes_down", "down", in_bytes),
        Column("floor"), Column("when"), Column("diverged"), Column("folder"),
    ]  # fmt: skip
    rows = [_row(document, name) for document, name in zip(documents, labels(documents), strict=True)]
    whens = " or ".join(dict.fromkeys(moment(d["last"]["when"]) for d in documents if d["last"]))
    floors = ", ".join(dict.fromkeys(percent(d["floor"]) for d in documents))
    return Grid(
        columns,
        rows,
        f"{title(documents)}. Test accuracy in % {whens}: weighted by samples, mean of clients, mean of the "
        f"worst tenth of clients; of each client's majority class {floors}. Up, down: bytes per client and "
        "round.",
    )


def _row(document: RunDocument, name: str) -> list[Any]:
    seconds = [entry["seconds"] for entry in document["rounds"] if entry["round"] >= 1]
    ended = document["diverged"]
    return [
        f"{name} ({ending(document)})" if ended else name,
        document["method"],
        *(_setting(document, key) for key in _SETTINGS),
        *_grids_entry(document["best"]),
        *_grids_entry(document["last"]),
        median(seconds) if seconds else None,
        document["cost"]["up"],
        document["cost"]["down"],
        document["floor"],
        document["last"]["when"] if document["last"] else None,
        ended["round"] if ended else None,
        document["folder"],
    ]


def _setting(document: RunDocument, key: str) -> Any:
    value = document["config"].get(key)
    return Path(value).name if key == "data" and value else value


def _grids_entry(entry: Entry | None) -> list[Any]:
    if entry is None or entry["accuracy"] is None:
        return [None] * (1 + len(_READINGS))
    found: dict[str, Any] = {**entry["accuracy"]}
    return [entry["round"], *(found[key] for key in _READINGS)]


def rounds_grid(document: RunDocument) -> Grid:
    """A round to a row, of one run."""
    readings = (*_READINGS, "std")
    rest = ("auc", "train_loss", "seconds", "bytes_up", "bytes_down")
    rows: list[list[Any]] = []
    for entry in document["rounds"]:
        found: dict[str, Any] = {**entry}
        accuracy, validation = found["accuracy"] or {}, found["validation"] or {}
        values = [accuracy.get(key) for key in readings] + [validation.get("weighted")]
        rows.append([entry["round"], entry["when"], *values, *(found[key] for key in rest)])
    names = ("accuracy", "accuracy_mean", "accuracy_worst_tenth", "accuracy_std", "validation")
    return Grid([Column(key, key) for key in ("round", "when", *names, *rest)], rows)


def clients_grid(documents: Sequence[RunDocument], clients: Sequence[Sequence[Client]]) -> Grid:
    """For programs: a client of a run to a row."""
    rows = [
        [name, document["method"], document["config"].get("seed"), *client.values()]
        for document, name, those in zip(documents, labels(documents), clients, strict=True)
        for client in those
    ]
    return Grid([Column(key) for key in ("run", "method", "seed", *Client.__annotations__)], rows)


def clients_side_by_side(documents: Sequence[RunDocument], clients: Sequence[Sequence[Client]]) -> Grid:
    """For readers: a client to a row; of one run the best and the last round, of several the best of each."""
    about = {client["client"]: client for those in clients for client in those}
    named = any(client["name"] != str(number) for number, client in about.items())
    found = [{client["client"]: client["best"] for client in those} for those in clients]
    titles = labels(documents)
    if len(documents) == 1:
        found.append({client["client"]: client["last"] for client in clients[0]})
        entries = {"best": documents[0]["best"], "last": documents[0]["last"]}
        titles = [f"{which} @{entry['round']}" if entry else which for which, entry in entries.items()]
    columns = [Column("", "client"), *[Column("", "name", text=True)] * named, Column("", "test samples")]
    rows = [
        [number, *[one["name"]] * named, one["samples"], *(those.get(number) for those in found)]
        for number, one in sorted(about.items())
    ]
    which = "" if len(documents) == 1 else " in the best round of each run"
    return Grid(
        [*columns, *(Column("", name, percent) for name in titles)],
        rows,
        f"{title(documents)}. Test accuracy in % of each client{which}.",
    )


_NUMBERS = ("best", "last", "worst_tenth", "validation", "difference")


def repeated(documents: Sequence[RunDocument]) -> bool:
    """Whether some experiment has more than one seed."""
    return any(len(one.runs) > 1 for one in repeats(documents))


def seeds_grid(documents: Sequence[RunDocument]) -> Grid:
    """An experiment to a row: mean and 95 % interval over seeds, and the difference to the first one."""
    found = repeats(documents)
    first = found[0].name
    several = len(found) > 1
    columns = [
        Column("name", "method", text=True), Column("", "seeds"), Column("", "best", _shown),
        Column("", "last", _shown, spare=True), Column("", "worst tenth", _shown, spare=True),
        Column("", f"best less\n{first}" if several else ""),
    ]  # fmt: skip
    rows = []
    for one in found:
        numbers = [one.best, one.last, one.worst_tenth, _difference(one)]
        rows.append([one.name, one.seeds, *numbers, *_plain(one)])
    return Grid([*columns, *_PLAIN], rows, _note(documents, found))


def sweep_grid(documents: Sequence[RunDocument]) -> Grid:
    """A grid's cell to a row: what it has on validation data, and of those that were chosen by it, on test
    data."""
    found = repeats(documents)
    picked = chosen(found)
    if len(picked) > 1:  # methods are compared by the cells that were chosen of them
        found = repeats(documents, picked[0], picked)
    first, several = found[picked[0]].name if picked else "", len(picked) > 1
    columns = [
        Column("name", "method", text=True), Column("", "seeds"), Column("", "validation", _shown),
        Column("chosen", "chosen", lambda value: "*" if value else ""),
        Column("", "test", _shown), Column("", f"test less\n{first}" if several else ""),
    ]  # fmt: skip
    rows = []
    for index, one in enumerate(found):
        mine = index in picked
        tested = [one.best, _difference(one)] if mine else [None, ""]
        rows.append([one.name, one.seeds, one.validation, mine, *tested, *_plain(one, tested=mine)])
    share = documents[0]["config"].get("validation")
    words = (
        f"{title(documents)}. Accuracy in %, mean ± 95 % interval over seeds, in the round that is best on "
        f"validation data: {share:g} of the training data, held out. Values are chosen by that alone; test "
        "data are looked at only for what was chosen."
        + (_judged(found) if several else "")
        + _left_out(documents, found)
    )
    if methods := unequal(found):
        words += f" Nothing is chosen among runs of unequal rounds: {', '.join(methods)}."
    return Grid([*columns, *_PLAIN], rows, words)


def choice(documents: Sequence[RunDocument]) -> list[RunDocument]:
    """The runs of the cells that were chosen."""
    found = repeats(documents)
    return [run for index in chosen(found) for run in found[index].runs]


_PLAIN = [
    *(Column(f"{key}{part}") for key in _NUMBERS for part in ("", "_half")),
    Column("verdict"), Column("n"), Column("diverged"), Column("seeds"),
]  # fmt: skip
"""For programs: means and half intervals as fractions of one, as in all other tables for them."""


def _plain(one: Repeats, *, tested: bool = True) -> list[Any]:
    found: list[Any] = []
    for key in _NUMBERS:
        value: Interval | None = getattr(one, key) if tested or key == "validation" else None
        found += [None, None] if value is None else [value.mean / 100, value.half / 100]
    seeds = " ".join(str(run["config"].get("seed")) for run in one.runs)
    return [*found, one.verdict.outcome if tested else "", len(one.counted), one.diverged, seeds]


def _shown(value: Interval | None) -> str:
    return "-" if value is None else value.shown()


def _difference(one: Repeats) -> str:
    return (
        "" if one.difference is None else f"{one.difference.shown(sign=True)} {one.verdict.outcome}".strip()
    )


def _note(documents: Sequence[RunDocument], found: Sequence[Repeats]) -> str:
    whens = " or ".join(dict.fromkeys(moment(d["last"]["when"]) for d in documents if d["last"]))
    shares = {d["config"].get("validation") or 0.0 for d in documents}
    on = {f"on {share:g} of the training data, held out" if share else "on test data" for share in shares}
    return (
        f"{title(documents)}. Test accuracy in % {whens}, weighted by samples: mean ± 95 % interval over "
        f"seeds (Student's t). The best round is chosen {' or '.join(sorted(on))}."
        + (_judged(found) if len(found) > 1 else "")
        + _left_out(documents, found)
    )


def _judged(found: Sequence[Repeats]) -> str:
    """By which rule differences are judged, and why some are not."""
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.verdict.reason and one.verdict.reason.is_obstacle:
            reasons.setdefault(one.verdict.reason, []).append(one.name)
    unjudged = [f" Not judged, {reason}: {', '.join(names)}." for reason, names in reasons.items()]
    return f" Differences are between runs with equal seed, split and rounds. {RULE}{''.join(unjudged)}"


def _left_out(documents: Sequence[RunDocument], found: Sequence[Repeats]) -> str:
    """Which runs are in no mean, and why."""
    means = {id(run) for one in found for run in one.counted}
    named = [
        (run, name) for run, name in zip(documents, labels(documents), strict=True) if id(run) not in means
    ]
    ended = [name for run, name in named if run["diverged"]]
    short = [
        f"{name} (round {last_round(run)})" for run, name in named if run["best"] and not run["diverged"]
    ]
    words = {"Diverged": ended, "Shorter": short}
    return "".join(f" {why}, and counted in no mean: {'; '.join(who)}." for why, who in words.items() if who)


_COLUMNS = 8
"""So many epochs fit beside a method's name in 80 columns."""


def newcomers_table(documents: Sequence[RunDocument]) -> list[RenderableType]:
    """One table with its caption, or none if no run has looked after each epoch."""
    runs = [(d, name) for d, name in zip(documents, labels(documents), strict=True) if adapting(d)]
    if not runs:
        return []
    epochs = _chosen(max(adapting(d)[-1][0] for d, _ in runs))
    table = plain_table(gap=2)
    table.add_column("newcomers after", overflow="fold")
    for epoch in epochs:
        table.add_column(f"{epoch}", justify="right", no_wrap=True)
    for document, name in runs:
        found = dict(adapting(document))
        numbers = [f"{found[epoch]:.2f}" if epoch in found else "-" for epoch in epochs]
        table.add_row(Text(name, style="bold"), *numbers)
    ways = {d["newcomers"]["way"] for d, _ in runs if d["newcomers"]} - {"full"}
    words = (
        "epochs of adapting: test accuracy in % of clients that took no part in the training, weighted by "
        "samples; 0 is the model as it was received."
    )
    return [
        table,
        caption(words + "".join(f" {way.capitalize()}: {_WAYS.get(way, way)}." for way in sorted(ways))),
    ]


_WAYS = {
    "prbm": "only p_i was trained",
    "newton": "p_i is one Newton step, with the ridge of so many epochs",
    "mean": "p_i is the global mean less the client's, whatever the epochs",
}


def _chosen(last: int) -> list[int]:
    """0, the last, and what fits between them, evenly in proportion."""
    if last < _COLUMNS:
        return list(range(last + 1))
    return sorted({0, *(int(e) for e in np.geomspace(1, last, _COLUMNS - 1).round())})


_Number = Literal["mean", "std", "worst_tenth", "lowest", "median"]


def fairness_table(runs: Sequence[Fairness]) -> RenderableType:
    """How clients' accuracies are spread, and how many are better and worse off than with a baseline."""
    return _Fairness(tuple(runs))


@dataclass(frozen=True)
class _Fairness:
    """A class because what there is room for depends on the console's width."""

    runs: tuple[Fairness, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = [baseline for baseline in BASELINES if any(baseline in run["paired"] for run in self.runs)]
        titles: dict[_Number, str] = {
            "mean": "mean",
            "std": "std",
            "worst_tenth": "worst\ntenth",
            "lowest": "lowest",
        }
        if options.max_width >= 76:
            titles["median"] = "median"
        table = _table(["round", *titles.values(), *(f"against\n{baseline}" for baseline in known)])
        for run in self.runs:
            numbers = [percent(run["spread"][key]) for key in titles]
            pairs = [_pairs(run["paired"].get(baseline)) for baseline in known]
            table.add_row(Name(run["name"], "bold"), f"@{run['round']}", *numbers, *pairs)
        whens = " or ".join(dict.fromkeys(moment(run["when"]) for run in self.runs))
        counts = sorted({run["spread"]["clients"] for run in self.runs})
        table.caption = caption(
            f"Accuracy in % {whens}, over {' or '.join(map(str, counts))} clients, each counted once. "
            "Worst tenth: the mean of the lowest tenth."
            + (" Against: clients better/equal/worse off than with it." if known else "")
        )
        yield table


def _pairs(found: Paired | None) -> str:
    return f"{found['better']}/{found['equal']}/{found['worse']}" if found else ""


def missing_baselines(runs: Sequence[Fairness]) -> str:
    """One line about the baselines that no run could be compared with; nothing if there are none."""
    known = {baseline for run in runs for baseline in run["paired"]}
    those = [baseline for baseline in BASELINES if baseline not in known and not _only(runs, baseline)]
    if not those:
        return ""
    return f"no run of {' or '.join(those)} with the same clients among these: no comparison with it"


def _only(runs: Sequence[Fairness], baseline: str) -> bool:
    """Whether all runs are of the baseline itself."""
    return all(run["method"].split("(")[0] == baseline for run in runs)


def overhead_table(costs: Sequence[Overhead], names: Sequence[str]) -> RenderableType:
    """What each method costs."""
    table = _table(["s per\nround", "best\nround", "s to\nbest", "up", "down", "keeps", "mem-\nory"])
    for cost, name in zip(costs, names, strict=True):
        best = "-" if cost["best"] is None else f"{cost['best']}\nof {cost['rounds']}"
        until = "-" if cost["seconds_to_best"] is None else in_seconds(cost["seconds_to_best"])
        table.add_row(
            Name(name, "bold"),
            in_seconds(cost["seconds"]),
            best,
            until,
            f"{in_bytes(cost['up'])}\n{in_bytes(cost['total_up'])}",
            f"{in_bytes(cost['down'])}\n{in_bytes(cost['total_down'])}",
            "-" if cost["kept"] is None else f"{cost['kept']:,}",
            in_bytes(1e6 * cost["memory_mb"]),
        )
    table.caption = caption(
        "Up and down: bytes per client and round, and below them all of the run, preparation included. "
        "Keeps: numbers that a client keeps between rounds. Memory: the most that was in use in a round. "
        "Seconds include evaluation, those to the best round the preparation."
    )
    return table


def _table(columns: Sequence[str]) -> Table:
    table = plain_table(gap=1)
    table.add_column("method", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
