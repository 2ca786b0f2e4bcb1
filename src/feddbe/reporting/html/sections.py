"""Sections of the report: results, curves, clients, data, analyses, costs, settings; commands it prints."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddbe import data
from feddbe.config.options import Config
from feddbe.config.parameters import format_value
from feddbe.reporting.analysis_tables import analysis_title, group_analyses
from feddbe.reporting.build_figures import (
    adaptation_curves,
    analysis_figures,
    client_differences,
    client_distribution,
    client_heat_map,
    client_ranks,
    metric_curves,
    spread_evenly,
    thin_rounds,
)
from feddbe.reporting.build_tables import (
    fairness_table,
    has_repetitions,
    moments_note,
    new_clients_table,
    overhead_table,
    results_table,
    seeds_table,
)
from feddbe.reporting.figure import Figure, HeatMap, Panel
from feddbe.reporting.html.blocks import (
    Block,
    ReportRun,
    ReportRuns,
    command_block,
    fact_list,
    figure_block,
    section,
)
from feddbe.reporting.table import TEXT, TIME, Column, Table, to_page_block
from feddbe.results.document import AnalysisDocument, RunDocument, new_clients_curve
from feddbe.results.fairness import compute_fairness, compute_overhead
from feddbe.runs.analysis import load_embedding
from feddbe.runs.build_document import accuracy_history, count_private_values

_MAX_CLIENTS = 100
"""Clients of a heat map or a figure of data."""
_MAX_HEAT_MAP_ROUNDS = 120
"""Rounds of a heat map."""
_MAX_CELLS = 300_000
"""Cells of all heat maps of a page."""
_MAX_ROUNDS = 400
"""Rounds of a curve: a screen does not have many more pixels."""
_MAX_POINTS = 24_000
"""Points of the scatter plots of an analysis."""
_MAX_RUN_COLUMNS = 6
"""Runs that fit next to each other as columns of a table."""
_NOT_SETTINGS = ("method", "method_options", "out", "resume", "json", "quiet")
_EXECUTION_OPTIONS = ("method", "engine", "worker_timeout", "out", "resume", "json", "quiet")
"""Options that do not change the result of a run, and the method, which is an argument."""


def summary_section(runs: ReportRuns) -> list[Block]:
    """Return a table over seeds if an experiment has several, and a table of all runs."""
    blocks = []
    if has_repetitions(runs.documents):
        blocks.append(to_page_block(seeds_table(runs.documents), "seeds"))
    blocks.append(to_page_block(results_table(runs.documents, runs.names), "runs", has_filter=True))
    commands = []
    for run, name in zip(runs.runs, runs.names, strict=True):
        command = rerun_command(run)
        if command:
            commands.append(command_block(f"run {name}", command))
    return section("summary", "Summary", blocks, [*commands, *commands_per_run(runs, "show")])


def learning_section(runs: ReportRuns) -> list[Block]:
    """Return the curves of all metrics, of which the reader selects one."""
    figure = metric_curves(runs.documents, colors=runs.colors, max_rounds=_MAX_ROUNDS)
    if not figure.panels:
        return []
    caption = (
        f"Accuracy {moments_note(runs.documents, runs.names)}. {_describe_mark(runs.documents)} "
        "The dashed line is the accuracy of each client's majority class."
    )
    block = figure_block(dataclasses.replace(figure, id="learning", caption=caption))
    return section("curves", "Learning curves", [block], commands_per_run(runs, "show"))


def _describe_mark(documents: Sequence[RunDocument]) -> str:
    if has_repetitions(documents):
        return "A dot marks the accuracy of the deployed model, as in the table over repetitions."
    return "A dot marks the best round."


def clients_section(runs: ReportRuns) -> list[Block]:
    """Return a heat map for each run."""
    max_rounds = max(12, min(_MAX_HEAT_MAP_ROUNDS, _MAX_CELLS // _MAX_CLIENTS // max(1, len(runs.runs))))
    heat_maps = [_heat_map(run, name, max_rounds) for run, name in zip(runs.runs, runs.names, strict=True)]
    panels = tuple(panel for panel in heat_maps if panel is not None)
    if not panels:
        return []
    caption = "Test accuracy of each client, of the model that it deploys; blank: not evaluated."
    block = figure_block(Figure("heat", "", panels, caption))
    commands = joint_command(runs, "fairness", "by client")
    return section("clients", "Clients over rounds", [block], commands)


def _heat_map(run: ReportRun, name: str, max_rounds: int) -> HeatMap | None:
    best = run.document["best"]
    results = {result["round"]: result for result in run.document["rounds"] if result["accuracy"]}
    evaluated = sorted(run.accuracies)
    if best is None or not evaluated:
        return None
    clients = spread_evenly(evaluated, _MAX_CLIENTS)
    rounds, step = thin_rounds(results, max_rounds, [best["round"]])
    history = accuracy_history(run.folder, [results[round_] for round_ in rounds], clients)
    config = run.document["config"]
    client_count = (config.get("clients") or 0) - (config.get("new_clients") or 0)
    notes = []
    if len(evaluated) < client_count:
        notes.append(f"the {len(evaluated):,} clients that were evaluated in the compared round")
    if len(clients) < len(evaluated):
        notes.append(f"{len(clients)} of {len(evaluated):,} clients, evenly by number")
    if step > 1:
        notes.append(f"one in {step} rounds, with the best and the last")
    return client_heat_map(name, clients, rounds, history, "; ".join(notes))


def fairness_section(runs: ReportRuns) -> list[Block]:
    """Return the spread of accuracies in the compared round, and the comparison with baselines by client."""
    evaluated = [run for run in runs.runs if run.accuracies]
    if not evaluated:
        return []
    documents = [run.document for run in evaluated]
    fairness = compute_fairness(documents, [run.accuracies for run in evaluated])
    names = [runs.get_name(document) for document in documents]
    figures = [client_ranks(documents, fairness, runs.colors)]
    differences = client_differences(documents, fairness, names, runs.colors)
    if differences is not None:
        figures.append(differences)
    blocks = [to_page_block(fairness_table(fairness, names), "spread"), *map(figure_block, figures)]
    return section("fairness", "Fairness", blocks, joint_command(runs, "fairness", "all of this section"))


def new_clients_section(runs: ReportRuns) -> list[Block]:
    """Return the accuracy of clients that joined after training."""
    table = new_clients_table(runs.documents, runs.names)
    if table is None:
        return []
    blocks = [to_page_block(table, "joined")]
    if any(map(new_clients_curve, runs.documents)):
        blocks.insert(0, figure_block(adaptation_curves(runs.documents, runs.colors)))
    return section("new_clients", "New clients", blocks, commands_per_run(runs, "show"))


def data_section(runs: ReportRuns) -> list[Block]:
    """Return the samples of each label by client, once for all runs with the same data."""
    groups: dict[str, list[ReportRun]] = {}
    for run in runs.runs:
        if run.labels:
            groups.setdefault(json.dumps(run.labels), []).append(run)
    if not groups:
        return []
    commands: list[Block] = []
    panels: list[Panel] = []
    for group in groups.values():
        names = [runs.get_name(run.document) for run in group] if len(groups) > 1 else []
        figure = _distribution_figure(group[0], names)
        panels += figure.panels
        command = data_command(group[0])
        if command:
            commands.append(command_block(figure.title, command))
    block = figure_block(Figure("labels", "", tuple(panels), figure.caption))
    return section("data", "Data", [block], commands)


def _distribution_figure(run: ReportRun, run_names: Sequence[str]) -> Figure:
    """Return the figure of a run's data; `run_names`: runs to name in its note."""
    counts = np.array(run.labels)
    document = run.document
    config = document["config"]
    partition = config.get("partition") or "split from a file"
    title = f"{Path(str(config['data'])).name}, {partition}, {len(counts)} clients"
    notes = [f"the largest bubble is {counts.max()} samples"]
    new_clients = config.get("new_clients") or 0
    if new_clients:
        notes.append(
            "the last client is new" if new_clients == 1 else f"the last {new_clients} clients are new"
        )
    if run_names:
        notes.append(f"data of {', '.join(run_names)}")
    return client_distribution(
        counts,
        title,
        document["label_names"],
        document["client_names"],
        max_clients=_MAX_CLIENTS,
        notes=notes,
    )


def representations_section(runs: ReportRuns) -> list[Block]:
    """Return a section for each kind of analysis that the runs have."""
    by_name = dict(zip(runs.names, runs.documents, strict=True))
    figures = analysis_figures(runs.documents, load_embedding, runs.names, max_points=_MAX_POINTS)
    sections = []
    for kind, analyses in group_analyses(runs.documents, runs.names):
        commands = analysis_commands((by_name[run], analysis) for run, analysis in analyses)
        sections += section(kind, analysis_title(analyses), [figure_block(figures[kind])], commands)
    return sections


def costs_section(runs: ReportRuns) -> list[Block]:
    """Return the table of time, traffic, client state and memory."""
    costs = [compute_overhead(run.document, count_private_values(run.folder)) for run in runs.runs]
    block = to_page_block(overhead_table(costs, runs.names), "overhead")
    return section("overhead", "Overhead", [block], joint_command(runs, "overhead", "all runs"))


def configuration_section(runs: ReportRuns) -> list[Block]:
    """Return the settings: first those that differ between runs, then the common ones."""
    settings = [_read_settings(run) for run in runs.runs]
    blocks = _comparison_blocks("settings", runs.names, settings, "setting")
    return section("configuration", "Configuration", blocks, commands_per_run(runs, "show"))


def _read_settings(run: ReportRun) -> dict[str, Any]:
    """Return options, hyperparameters (as in `mr kappa`) and the folder."""
    config = run.document["config"]
    settings = {key: value for key, value in config.items() if key not in _NOT_SETTINGS}
    for part, options in config.get("method_options", {}).items():
        settings |= {f"{part} {key}": value for key, value in options.items()}
    return settings | {"folder": run.document["folder"]}


def versions_section(runs: ReportRuns) -> list[Block]:
    """Return versions of packages, machine, commit, start time and training backend."""
    settings = [
        {
            **(run.environment["versions"] or {}),
            "machine": run.environment["machine"],
            "git commit": run.environment["git_commit"],
            "started": TIME.format(run.environment["begun"]),
            "training backend": ", ".join(run.document["trainers"]) or None,
            "configuration hash": run.document["config_hash"][:12],
        }
        for run in runs.runs
    ]
    return section("versions", "Versions", _comparison_blocks("versions", runs.names, settings, "item"))


def _comparison_blocks(
    id_: str, run_names: Sequence[str], settings: Sequence[Mapping[str, Any]], key_title: str
) -> list[Block]:
    """Return a table of the settings that differ, and a list of those that are equal.

    Args:
        id_: The id of the list.
        run_names: The name of each run.
        settings: The settings of each run.
        key_title: Title of the column of names.
    """
    keys = list(dict.fromkeys(key for values in settings for key in values))
    texts = [{key: _format_setting(values.get(key)) for key in keys} for values in settings]
    differing = [key for key in keys if any(values[key] != texts[0][key] for values in texts)]
    common = [[key, texts[0][key]] for key in keys if key not in differing and texts[0][key] != "-"]
    blocks = []
    if differing:
        if len(run_names) <= _MAX_RUN_COLUMNS:
            titles = [key_title, *run_names]
            rows = [[key, *(values[key] for values in texts)] for key in differing]
        else:
            titles = ["run", *differing]
            rows = [
                [name, *(values[key] for key in differing)]
                for name, values in zip(run_names, texts, strict=True)
            ]
        columns = [Column(str(index), title, TEXT) for index, title in enumerate(titles)]
        records = [{str(index): text for index, text in enumerate(row)} for row in rows]
        table = Table(columns, records, note="Differences between the runs.")
        blocks.append(to_page_block(table, f"{id_}-differ"))
    if common:
        caption = "Equal in all runs" if len(run_names) > 1 else ""
        blocks.append(fact_list(id_, caption, common))
    return blocks


def _format_setting(value: Any) -> str:
    return "-" if value is None else format_value(value)


# Commands


# --- commands


def rerun_command(run: ReportRun) -> str | None:
    """Return the command that repeats a run, or None if its data or model was a Python object."""
    config = run.document["config"]
    if config.get("model") == "own" or not _has_name(str(config["data"])):
        return None
    return format_run_command(run.document["method"], config)


def format_run_command(method: str, config: Mapping[str, Any]) -> str:
    """Return the command that runs a method with these options; general defaults are left out."""
    names = [field.name for field in dataclasses.fields(Config) if field.name not in _EXECUTION_OPTIONS]
    return shlex.join(["feddbe", "run", method, *_format_options(config, names)])


def data_command(run: ReportRun) -> str | None:
    """Return the command that shows the clients' data, or None if the data was a Python object."""
    config = run.document["config"]
    if not _has_name(str(config["data"])):
        return None
    names = ["data_dir", "partition", "partition_seed", "split", "clients", "shift"]
    return shlex.join(["feddbe", "data", "show", str(config["data"]), *_format_options(config, names)])


def _format_options(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the options that differ from the general defaults; data and seed in any case."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    words = []
    for name in names:
        value = config.get(name, defaults[name])
        if value != defaults[name] or name in ("data", "seed"):
            words += _format_option(name, value)
    return words


def _format_option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if value is None:  # an option that this run could not use
        return []
    return [f"--{flag}", format_value(value)]


def _has_name(name: str) -> bool:
    """Return True if the command line accepts data of this name; a file may be missing on this machine."""
    return (
        name.split("(")[0] in data.BUILTIN_DATASETS
        or any(sign in name for sign in "/.:")
        or Path(name).exists()
    )


def joint_command(runs: ReportRuns, command: str, title: str) -> list[Block]:
    """Return one command for all runs, as in `feddbe fairness RUN...`."""
    folders = [str(run.folder) for run in runs.runs]
    return [command_block(title, shlex.join(["feddbe", command, *folders]))]


def commands_per_run(runs: ReportRuns, command: str) -> list[Block]:
    """Return a command for each run, as in `feddbe show RUN`."""
    return [
        command_block(f"{command} {run.folder}", shlex.join(["feddbe", command, str(run.folder)]))
        for run in runs.runs
    ]


def analysis_commands(analyses: Iterable[tuple[RunDocument, AnalysisDocument]]) -> list[Block]:
    """Return the commands that compute these analyses: one for each run and choice of settings."""
    # Analyses, moments and layers by the other settings; dictionaries are ordered sets.
    lists_by_settings: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for document, analysis in analyses:
        best = document["best"]
        round_name = "best" if best and best["round"] == analysis["round"] else "last"
        samples = analysis["settings"].get("samples")
        flags = ["--on", analysis["on"]]
        flags += ["--quick"] * analysis["quick"] + ["--per-client"] * analysis["per_client"]
        settings = (document["folder"], round_name, "all" if samples is None else str(samples), *flags)
        lists = lists_by_settings.setdefault(settings, {"analyses": {}, "moment": {}, "layers": {}})
        lists["analyses"][analysis["analysis"]] = None
        lists["moment"][analysis["moment"]] = None
        lists["layers"][analysis["layer"]] = None
    commands = []
    for (folder, round_name, sample_count, *flags), lists in lists_by_settings.items():
        options = [word for option, names in lists.items() for word in (f"--{option}", ",".join(names))]
        words = ["feddbe", "analyze", folder, *options, "--round", round_name, "--samples", sample_count]
        commands.append(command_block(f"analyze {folder}", shlex.join([*words, *flags])))
    return commands
