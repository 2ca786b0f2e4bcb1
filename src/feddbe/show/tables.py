"""What the command line shows: tables and a learning curve that fit in 80 columns and survive 60.

Everything is a rich renderable, laid out for the console it meets; one without Unicode gets ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from feddbe.results.document import Accuracy, Entry, RunDocument, ending, labels, moment
from feddbe.runs.folders import slug
from feddbe.show.cells import Name, caption, in_bytes, in_seconds, percent, plain_table

__all__ = ["RunRow", "moments", "results_table", "results_words", "runs_table", "split_table"]


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
