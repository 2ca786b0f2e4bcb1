"""The first part of a page: what the runs come to, over seeds, and how they got there."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from feddbe import data
from feddbe.config.options import Config
from feddbe.config.spec import written
from feddbe.reporting.formatting import in_bytes, in_seconds, percent
from feddbe.reporting.html.blocks import (
    Block,
    Choice,
    Source,
    Sources,
    cell,
    command,
    curves,
    facts,
    section,
    table,
)
from feddbe.reporting.tables import moments, results_words
from feddbe.results.document import Entry, Measurement, RunDocument, finished, moment, points
from feddbe.results.fairness import overhead
from feddbe.results.seeds import Points, experiments, repeats
from feddbe.results.statistics import RULE, Interval
from feddbe.runs.summary import kept

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
        Choice("test accuracy in %, weighted by samples", points, "%", floor=True, best=True),
        *(Choice(f"test accuracy in %, {words}", _accuracy("accuracy", reading), "%")
          for reading, words in _READINGS.items() if reading != "weighted"),
        *(Choice(f"test accuracy in %, {moment(when)}", _accuracy(when, "weighted", other=True), "%", True)
          for when in ("before", "adapted", "after")),
        Choice("accuracy in % on held-out training data", _accuracy("validation", "weighted"), "%"),
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


_ACROSS = 6
"""Runs that fit beside each other."""
_NOT_SETTINGS = ("method", "method_options", "out", "resume", "json", "quiet")


def costs(sources: Sources) -> list[Block]:
    """Time, traffic, what clients keep, memory."""
    rows = []
    for run, name in zip(sources.runs, sources.names, strict=True):
        cost = overhead(run.document, kept(run.folder))
        sizes = [(in_bytes(cost[key]), cost[key]) for key in ("up", "down", "total_up", "total_down")]
        times = [cost["seconds"] if cost["rounds"] else None, cost["preparation"], cost["seconds_to_best"]]
        rows.append(
            [
                name,
                *(cell("-" if value is None else in_seconds(value), value) for value in times),
                *(cell(text, value) for text, value in sizes),
                cell("-" if cost["kept"] is None else f"{cost['kept']:,}", cost["kept"]),
                cell(in_bytes(1e6 * cost["memory_mb"]), cost["memory_mb"]),
            ]
        )
    words = (
        "Seconds of the median round, evaluation included, of the preparation, and until the best round. "
        "Bytes per client and round, and of the whole run, preparation included. Keeps: numbers that a "
        "client keeps between rounds. Memory: the most that was in use in a round."
    )
    columns = [
        "run", "s per round", "s preparation", "s to best", "up", "down", "all up", "all down", "keeps",
        "memory",
    ]  # fmt: skip
    return section(
        "overhead", "Overhead", [table("overhead", words, columns, rows)], of_all(sources, "overhead", "all")
    )


def configuration(sources: Sources) -> list[Block]:
    """Settings in which the runs differ first, then those that all have."""
    every = [_settings(run) for run in sources.runs]
    blocks = _compared("settings", sources.names, every, "setting")
    return section("configuration", "Configuration", blocks, of_each(sources, "show"))


def _settings(run: Source) -> dict[str, Any]:
    """Options and hyper-parameters, these as in `mr kappa`; and where the run is."""
    config = run.document["config"]
    found = {key: value for key, value in config.items() if key not in _NOT_SETTINGS}
    for part, options in config.get("method_options", {}).items():
        found |= {f"{part} {key}": value for key, value in options.items()}
    return found | {"folder": run.document["folder"]}


def versions(sources: Sources) -> list[Block]:
    """With what, where and when runs were begun, and who trained."""
    every = [
        {
            **(run.about["versions"] or {}),
            "machine": run.about["machine"],
            "git commit": run.about["git_commit"],
            "begun": run.about["begun"],
            "trained by": ", ".join(run.document["trainers"]) or None,
            "configuration hash": run.document["config_hash"][:12],
        }
        for run in sources.runs
    ]
    return section("versions", "Versions", _compared("versions", sources.names, every, "what"))


def _compared(id: str, names: Sequence[str], every: Sequence[Mapping[str, Any]], what: str) -> list[Block]:
    """A table of what differs, with the runs across where there is room, and what is the same."""
    keys = list(dict.fromkeys(key for one in every for key in one))
    shown = [{key: _shown(one.get(key)) for key in keys} for one in every]
    differ = [key for key in keys if any(one[key] != shown[0][key] for one in shown)]
    same = [[key, shown[0][key]] for key in keys if key not in differ and shown[0][key] != "-"]
    if len(names) <= _ACROSS:
        columns, rows = [what, *names], [[key, *(one[key] for one in shown)] for key in differ]
    else:
        columns = ["run", *differ]
        rows = [[name, *(one[key] for key in differ)] for name, one in zip(names, shown, strict=True)]
    blocks = [table(f"{id}-differ", "In what the runs differ.", columns, rows)] if differ else []
    words = "The same in all runs" if len(names) > 1 else ""
    return [*blocks, *([facts(id, words, same)] if same else [])]


def _shown(value: Any) -> str:
    return "-" if value is None else written(value)


_ELSEWHERE = ("method", "engine", "worker_timeout", "out", "resume", "json", "quiet")
"""Options that say where and how something is done, not what."""


def running(source: Source) -> str | None:
    """The line that runs the same again, with every option that is not the general default; None: its data or
    model was a Python object, which has no name there."""
    config = source.document["config"]
    if config.get("model") == "own" or not _has_name(str(config["data"])):
        return None
    return line(source.document["method"], config)


def line(method: str, config: Mapping[str, Any]) -> str:
    """The line that runs this method with these options."""
    told = [field.name for field in dataclasses.fields(Config) if field.name not in _ELSEWHERE]
    return shlex.join(["feddbe", "run", method, *_options(config, told)])


def holding(source: Source) -> str | None:
    """The line that shows who holds what; None as above."""
    config = source.document["config"]
    if not _has_name(str(config["data"])):
        return None
    told = ["data_dir", "partition", "partition_seed", "split", "clients", "shift"]
    return shlex.join(["feddbe", "data", "show", str(config["data"]), *_options(config, told)])


def _options(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those that are not the general default; data and seed in any case, for who reads them."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    values = {name: config.get(name, defaults[name]) for name in names}
    told = {name: v for name, v in values.items() if v != defaults[name] or name in ("data", "seed")}
    return [word for name, value in told.items() for word in _option(name, value)]


def _option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if value is None:  # an option that this run could not use
        return []
    return [f"--{flag}", written(value)]


def _has_name(name: str) -> bool:
    """Whether the command line finds data by this name; a file may be on another machine, or gone."""
    return name.split("(")[0] in data.SOURCES or any(sign in name for sign in "/.:") or Path(name).exists()


def of_all(sources: Sources, verb: str, what: str) -> list[Block]:
    """One line for all runs: `feddbe fairness RUN...`."""
    return [command(what, shlex.join(["feddbe", verb, *(str(run.folder) for run in sources.runs)]))]


def of_each(sources: Sources, verb: str) -> list[Block]:
    """A line for each run: `feddbe show RUN`."""
    return [
        command(f"{verb} {run.folder}", shlex.join(["feddbe", verb, str(run.folder)])) for run in sources.runs
    ]


def measuring(found: Iterable[tuple[RunDocument, Measurement]]) -> list[Block]:
    """What takes these measurements, a line for each run; those of the same settings in one."""
    asked: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for document, one in found:
        best = document["best"]
        which = "best" if best and best["round"] == one["round"] else "last"
        n = one["settings"].get("samples")
        flags = ["--quick"] * one["quick"] + ["--per-client"] * one["per_client"]
        key = (document["folder"], which, "all" if n is None else str(n), *flags)
        lists = asked.setdefault(key, {"what": {}, "moment": {}, "at": {}})
        for name, value in (("what", one["what"]), ("moment", one["moment"]), ("at", one["place"])):
            lists[name][value] = None
    lines = []
    for (folder, which, n, *flags), lists in asked.items():
        chosen = [word for option, names in lists.items() for word in (f"--{option}", ",".join(names))]
        words = ["feddbe", "measure", folder, *chosen, "--round", which, "--n", n, *flags]
        lines.append(command(f"measure {folder}", shlex.join(words)))
    return lines
