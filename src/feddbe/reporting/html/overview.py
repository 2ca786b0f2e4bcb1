"""The first part of a page: what the runs come to, over seeds, and how they got there."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from feddbe import data
from feddbe.config.options import Config
from feddbe.config.parameters import format_value
from feddbe.reporting.build_figures import metric_curves
from feddbe.reporting.html.blocks import (
    Block,
    ReportRun,
    ReportRuns,
    command_block,
    fact_list,
    figure_block,
    section,
)
from feddbe.reporting.table import TEXT, Column, Table, to_page_block
from feddbe.reporting.tables import has_repetitions, moments_note, overhead_table, results_table, seeds_table
from feddbe.results.document import AnalysisDocument, RunDocument
from feddbe.results.fairness import compute_overhead
from feddbe.runs.summary import count_private_values


def summary_section(runs: ReportRuns) -> list[Block]:
    """All runs in a table, and experiments over seeds in another."""
    blocks = [to_page_block(results_table(runs.documents, runs.names), "runs", has_filter=True)]
    if has_repetitions(runs.documents):
        blocks.append(to_page_block(seeds_table(runs.documents), "seeds"))
    lines = [(name, running(run)) for run, name in zip(runs.runs, runs.names, strict=True)]
    again = [command_block(f"run {name}", line) for name, line in lines if line]
    return section("summary", "Summary", blocks, [*again, *of_each(runs, "show")])


def learning_section(runs: ReportRuns) -> list[Block]:
    """Return every metric of each round, of which the reader selects one."""
    figure = metric_curves(runs.documents, colors=runs.colors, max_rounds=_MAX_ROUNDS)
    if not figure.panels:
        return []
    caption = (
        f"Accuracy of the deployed model {moments_note(runs.documents, runs.names)}. A dot marks the best "
        "round; the dashed line is the accuracy of each client's majority class."
    )
    block = figure_block(dataclasses.replace(figure, id="learning", caption=caption))
    return section("curves", "Learning curves", [block], of_each(runs, "show"))


_MAX_ROUNDS = 400
"""Rounds of a curve: a screen has not many more pixels."""
_ACROSS = 6
"""Runs that fit beside each other."""
_NOT_SETTINGS = ("method", "method_options", "out", "resume", "json", "quiet")


def costs_section(runs: ReportRuns) -> list[Block]:
    """Time, traffic, what clients keep, memory."""
    costs = [compute_overhead(run.document, count_private_values(run.folder)) for run in runs.runs]
    block = to_page_block(overhead_table(costs, runs.names), "overhead")
    return section("overhead", "Overhead", [block], of_all(runs, "overhead", "all"))


def configuration_section(runs: ReportRuns) -> list[Block]:
    """Settings in which the runs differ first, then those that all have."""
    every = [_settings(run) for run in runs.runs]
    blocks = _compared("settings", runs.names, every, "setting")
    return section("configuration", "Configuration", blocks, of_each(runs, "show"))


def _settings(run: ReportRun) -> dict[str, Any]:
    """Options and hyper-parameters, these as in `mr kappa`; and where the run is."""
    config = run.document["config"]
    found = {key: value for key, value in config.items() if key not in _NOT_SETTINGS}
    for part, options in config.get("method_options", {}).items():
        found |= {f"{part} {key}": value for key, value in options.items()}
    return found | {"folder": run.document["folder"]}


def versions_section(runs: ReportRuns) -> list[Block]:
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
        for run in runs.runs
    ]
    return section("versions", "Versions", _compared("versions", runs.names, every, "what"))


def _compared(id: str, names: Sequence[str], every: Sequence[Mapping[str, Any]], what: str) -> list[Block]:
    """A table of what differs, with the runs across where there is room, and what is the same."""
    keys = list(dict.fromkeys(key for one in every for key in one))
    shown = [{key: _shown(one.get(key)) for key in keys} for one in every]
    differ = [key for key in keys if any(one[key] != shown[0][key] for one in shown)]
    same = [[key, shown[0][key]] for key in keys if key not in differ and shown[0][key] != "-"]
    if len(names) <= _ACROSS:
        titles, rows = [what, *names], [[key, *(one[key] for one in shown)] for key in differ]
    else:
        titles = ["run", *differ]
        rows = [[name, *(one[key] for key in differ)] for name, one in zip(names, shown, strict=True)]
    columns = [Column(str(index), title, TEXT) for index, title in enumerate(titles)]
    records = [{str(index): text for index, text in enumerate(row)} for row in rows]
    table = Table(columns, records, note="In what the runs differ.")
    blocks = [to_page_block(table, f"{id}-differ")] if differ else []
    words = "The same in all runs" if len(names) > 1 else ""
    return [*blocks, *([fact_list(id, words, same)] if same else [])]


def _shown(value: Any) -> str:
    return "-" if value is None else format_value(value)


_ELSEWHERE = ("method", "engine", "worker_timeout", "out", "resume", "json", "quiet")
"""Options that say where and how something is done, not what."""


def running(source: ReportRun) -> str | None:
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


def holding(source: ReportRun) -> str | None:
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
    return [f"--{flag}", format_value(value)]


def _has_name(name: str) -> bool:
    """Whether the command line finds data by this name; a file may be on another machine, or gone."""
    return (
        name.split("(")[0] in data.BUILTIN_DATASETS
        or any(sign in name for sign in "/.:")
        or Path(name).exists()
    )


def of_all(runs: ReportRuns, verb: str, what: str) -> list[Block]:
    """One line for all runs: `feddbe fairness RUN...`."""
    return [command_block(what, shlex.join(["feddbe", verb, *(str(run.folder) for run in runs.runs)]))]


def of_each(runs: ReportRuns, verb: str) -> list[Block]:
    """A line for each run: `feddbe show RUN`."""
    return [
        command_block(f"{verb} {run.folder}", shlex.join(["feddbe", verb, str(run.folder)]))
        for run in runs.runs
    ]


def measuring(found: Iterable[tuple[RunDocument, AnalysisDocument]]) -> list[Block]:
    """What takes these measurements, a line for each run; those of the same settings in one."""
    asked: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for document, one in found:
        best = document["best"]
        which = "best" if best and best["round"] == one["round"] else "last"
        n = one["settings"].get("samples")
        flags = ["--quick"] * one["quick"] + ["--per-client"] * one["per_client"]
        key = (document["folder"], which, "all" if n is None else str(n), *flags)
        lists = asked.setdefault(key, {"analyses": {}, "moment": {}, "layers": {}})
        for name, value in (("analysis", one["analysis"]), ("moment", one["moment"]), ("at", one["layer"])):
            lists[name][value] = None
    lines = []
    for (folder, which, n, *flags), lists in asked.items():
        chosen = [word for option, names in lists.items() for word in (f"--{option}", ",".join(names))]
        words = ["feddbe", "measure", folder, *chosen, "--round", which, "--samples", n, *flags]
        lines.append(command_block(f"measure {folder}", shlex.join(words)))
    return lines
