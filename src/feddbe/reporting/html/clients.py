"""The report's sections about clients: accuracy in each round, fairness, new clients, and their data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddbe.reporting.build_figures import (
    adaptation_curves,
    client_differences,
    client_distribution,
    client_heat_map,
    client_ranks,
    spread_evenly,
    thin_rounds,
)
from feddbe.reporting.build_tables import fairness_table, new_clients_table
from feddbe.reporting.figure import Figure, HeatMap, Panel
from feddbe.reporting.html.blocks import (
    Block,
    ReportRun,
    ReportRuns,
    command_block,
    figure_block,
    section,
)
from feddbe.reporting.html.overview import commands_per_run, data_command, joint_command
from feddbe.reporting.table import to_page_block
from feddbe.results.document import new_clients_curve
from feddbe.results.fairness import compute_fairness
from feddbe.runs import summary

_MAX_CLIENTS = 100
"""Clients of a heat map or a figure of data."""
_MAX_HEAT_MAP_ROUNDS = 120
"""Rounds of a heat map."""
_MAX_CELLS = 300_000
"""Cells of all heat maps of a page."""


def clients_section(runs: ReportRuns) -> list[Block]:
    """Return a heat map for each run."""
    max_rounds = max(12, min(_MAX_HEAT_MAP_ROUNDS, _MAX_CELLS // _MAX_CLIENTS // max(1, len(runs.runs))))
    heat_maps = [_heat_map(run, name, max_rounds) for run, name in zip(runs.runs, runs.names, strict=True)]
    panels = tuple(panel for panel in heat_maps if panel is not None)
    if not panels:
        return []
    caption = "Test accuracy of each client, of the model that it deploys; blank: not evaluated."
    block = figure_block(Figure("heat", "", panels, caption))
    commands = joint_command(runs, "fairness", "by client, best round")
    return section("clients", "Clients over rounds", [block], commands)


def _heat_map(run: ReportRun, name: str, max_rounds: int) -> HeatMap | None:
    best = run.document["best"]
    results = {result["round"]: result for result in run.document["rounds"] if result["accuracy"]}
    evaluated = sorted(run.accuracies)
    if best is None or not evaluated:
        return None
    clients = spread_evenly(evaluated, _MAX_CLIENTS)
    rounds, step = thin_rounds(results, max_rounds, [best["round"]])
    history = summary.accuracy_history(run.folder, [results[round_] for round_ in rounds], clients)
    config = run.document["config"]
    client_count = (config.get("clients") or 0) - (config.get("new_clients") or 0)
    notes = []
    if len(evaluated) < client_count:
        notes.append(f"the {len(evaluated):,} clients that were evaluated in the best round")
    if len(clients) < len(evaluated):
        notes.append(f"{len(clients)} of {len(evaluated):,} clients, evenly by number")
    if step > 1:
        notes.append(f"one in {step} rounds, with the best and the last")
    return client_heat_map(name, clients, rounds, history, "; ".join(notes))


def fairness_section(runs: ReportRuns) -> list[Block]:
    """Return the spread of accuracies in the best round, and the comparison with baselines by client."""
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
