"""The first part of a page: what the runs come to, over seeds, and how they got there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from feddbe.page.blocks import Block, cell, command, section, table
from feddbe.page.commands import of_each, running
from feddbe.page.lines import Choice, curves
from feddbe.page.sources import Source, Sources
from feddbe.results.document import Entry, RunDocument, moment, points
from feddbe.results.extent import finished
from feddbe.results.groups import Points, experiments
from feddbe.results.repeats import repeats
from feddbe.results.statistics import Interval
from feddbe.results.verdicts import RULE
from feddbe.show.cells import in_bytes, in_seconds, percent
from feddbe.show.tables import moments, results_words

__all__ = ["learning", "summary"]

_Reading = Literal["weighted", "mean", "worst_tenth"]
_READINGS: dict[_Reading, str] = {
    "weighted": "weighted by samples",
    "mean": "mean of clients",
    "worst_tenth": "worst tenth of clients",
}


def summary(sources: Sources) -> list[Block]:
    """All runs in a table, and experiments over seeds in another."""
    columns = [
        "run", "data", "rounds", "best %", "in round", "last %", "mean of clients %", "worst tenth %",
        "majority class %", "s per round", "up", "down",
    ]  # fmt: skip
    rows = [_row(run, name) for run, name in zip(sources.runs, sources.names, strict=True)]
    words = results_words(sources.documents, sources.names, endings=False)
    tuned = [_tuned(document) for document in sources.documents]
    if any(one["value"] is not None for one in tuned):
        columns.append("tuned %")
        rows = [[*row, one] for row, one in zip(rows, tuned, strict=True)]
        words += " Tuned: after each client's own epochs (adapt_epochs) from the last model."
    blocks = [table("runs", words, columns, rows, filter=True), *_seeds(sources)]
    lines = [(name, running(run)) for run, name in zip(sources.runs, sources.names, strict=True)]
    again = [command(f"run {name}", line) for name, line in lines if line]
    return section("summary", "Summary", blocks, [*again, *of_each(sources, "show")])


def _row(run: Source, name: str) -> list[object]:
    document = run.document
    best, last, cost, config = document["best"], document["last"], document["cost"], document["config"]
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    how_far = f"{done}" if finished(document) else f"{done} of {config['rounds']}"
    return [
        name,
        Path(str(config["data"])).name,
        cell(how_far, done),
        _percent(best, "weighted"),
        cell(f"{best['round']}", best["round"]) if best else cell("-", None),
        _percent(last, "weighted"),
        _percent(best, "mean"),
        _percent(best, "worst_tenth"),
        cell(percent(document["floor"]), document["floor"]),
        cell(in_seconds(cost["seconds"]), cost["seconds"]) if done else cell("-", None),
        cell(in_bytes(cost["up"]), cost["up"]),
        cell(in_bytes(cost["down"]), cost["down"]),
    ]


def _tuned(document: RunDocument) -> dict[str, object]:
    """After the last round, where that is not what counts anyway."""
    last = document["last"]
    found = last["adapted"] if last and last["when"] != "adapted" else None
    return cell(percent(found["weighted"]) if found else "-", found["weighted"] if found else None)


def _percent(entry: Entry | None, reading: _Reading) -> dict[str, object]:
    value = entry["accuracy"][reading] if entry and entry["accuracy"] else None
    return cell(percent(value), value)


# Seeds


def _seeds(sources: Sources) -> list[Block]:
    """Mean and interval of each experiment, and its paired difference to a baseline, if any has two seeds."""
    documents = [document for document in sources.documents if document["best"] or document["diverged"]]
    groups = experiments(documents)
    if not any(len(group) > 1 for group in groups):
        return []
    first = next((index for index, group in enumerate(groups) if group[0]["method"] == "fedavg"), 0)
    found = repeats(documents, first)
    rows = [
        [
            one.name,
            cell(one.seeds, len(one.counted)),
            *(_interval_cell(value) for value in (one.best, one.mean, one.worst_tenth)),
            _interval_cell(one.difference, sign=True),
            str(one.verdict),
        ]
        for one in found
    ]
    words = (
        "Each run's best round, in %: mean and 95 % interval over seeds (Student's t). A run that diverged "
        "or is shorter than others of its experiment is not counted. The difference is that of runs with "
        f"the same split, seed and rounds, in points. {RULE}"
    )
    columns = ["experiment", "seeds", *(f"{words} %" for words in _READINGS.values())]
    columns += [f"difference to {found[first].name}", "verdict"]
    return [table("seeds", words, columns, rows)]


def _interval_cell(value: Interval | None, *, sign: bool = False) -> dict[str, object]:
    if value is None:
        return cell("" if sign else "-", None)
    return cell(value.shown(sign=sign), value.mean)


# Curves


def learning(sources: Sources) -> list[Block]:
    """Everything that was measured in each round, a reader's choice."""
    asked = [
        Choice("test accuracy in %, weighted by samples", points, floor=True, best=True),
        *(Choice(f"test accuracy in %, {words}", _accuracy("accuracy", reading))
          for reading, words in _READINGS.items() if reading != "weighted"),
        *(Choice(f"test accuracy in %, {moment(when)}", _accuracy(when, "weighted", other=True), floor=True)
          for when in ("before", "adapted", "after")),
        Choice("accuracy in % on held-out training data", _accuracy("validation", "weighted")),
        Choice("training loss", _value(lambda entry: entry["train_loss"])),
        Choice("test loss", _value(_test_loss)),
        Choice("AUC", _value(lambda entry: entry["auc"])),
        Choice("seconds per round", _value(lambda entry: entry["seconds"])),
    ]  # fmt: skip
    words = (
        f"Of the deployed model {moments(sources.documents, sources.names)}, after so many aggregations. A "
        "dot marks the best round; the grey line is each client's majority class."
    )
    blocks = curves("learning", sources, asked, "round", words)
    return section("curves", "Learning curves", blocks, of_each(sources, "show"))


def _accuracy(which: str, reading: _Reading, *, other: bool = False) -> Points:
    """Of one moment; `other`: only where it is not the one that counts."""

    def found(document: RunDocument) -> list[tuple[int, float]]:
        entries: Any = document["rounds"]
        wanted = [e for e in entries if not (other and e["when"] == which)]
        return [(e["round"], 100 * e[which][reading]) for e in wanted if e[which]]

    return found


def _value(read: Callable[[Entry], float | None]) -> Points:
    def found(document: RunDocument) -> list[tuple[int, float]]:
        read_all = ((entry["round"], read(entry)) for entry in document["rounds"])
        return [(round, value) for round, value in read_all if value is not None]

    return found


def _test_loss(entry: Entry) -> float | None:
    return entry["measures"].get(entry["when"], {}).get("loss", {}).get("weighted")
