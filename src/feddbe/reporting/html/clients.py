"""The part of a page about clients: their accuracy in each round, fairness, newcomers, and their data."""

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
    thin,
)
from feddbe.reporting.figure import Figure, HeatMap, Panel
from feddbe.reporting.html.blocks import (
    Block,
    ReportRun,
    ReportRuns,
    command_block,
    figure_block,
    section,
)
from feddbe.reporting.html.overview import holding, of_all, of_each
from feddbe.reporting.table import to_page_block
from feddbe.reporting.tables import fairness_table, new_clients_table
from feddbe.results.document import new_clients_curve
from feddbe.results.fairness import compute_fairness
from feddbe.runs import summary

_CLIENTS, _ROUNDS, _CELLS = 100, 120, 300_000
"""How many a heat map shows, and the cells of all of a page's."""


def clients_section(runs: ReportRuns) -> list[Block]:
    """A heat map for each run."""
    rounds = max(12, min(_ROUNDS, _CELLS // _CLIENTS // max(1, len(runs.runs))))
    pairs = zip(runs.runs, runs.names, strict=True)
    panels = tuple(panel for run, name in pairs if (panel := _heat_map(run, name, rounds)))
    if not panels:
        return []
    caption = "Test accuracy of each client at the moment that counts; blank: not evaluated."
    block = figure_block(Figure("heat", "", panels, caption))
    return section(
        "clients", "Clients over rounds", [block], of_all(runs, "fairness", "by client, best round")
    )


def _heat_map(run: ReportRun, name: str, max_rounds: int) -> HeatMap | None:
    best = run.document["best"]
    entries = {entry["round"]: entry for entry in run.document["rounds"] if entry["accuracy"]}
    everyone = sorted(run.accuracies)
    if best is None or not everyone:
        return None
    clients = spread_evenly(everyone, _CLIENTS)
    rounds, step = thin(entries, max_rounds, [best["round"]])
    history = summary.accuracy_history(run.folder, [entries[round_] for round_ in rounds], clients)
    config = run.document["config"]
    members = (config.get("clients") or 0) - (config.get("new_clients") or 0)
    notes = []
    if len(everyone) < members:
        notes.append(f"the {len(everyone):,} clients that were evaluated in the best round")
    if len(clients) < len(everyone):
        notes.append(f"{len(clients)} of {len(everyone):,} clients, evenly by number")
    if step > 1:
        notes.append(f"one in {step} rounds, with the best and the last")
    return client_heat_map(name, clients, rounds, history, "; ".join(notes))


# Fairness


def fairness_section(sources: ReportRuns) -> list[Block]:
    """How accuracies are spread in the best round, and who is helped and hurt."""
    runs = [run for run in sources.runs if run.accuracies]
    if not runs:
        return []
    documents = [run.document for run in runs]
    found = compute_fairness(documents, [run.accuracies for run in runs])
    called = [sources.name(document) for document in documents]
    differences = client_differences(documents, found, called, sources.colors)
    figures = [client_ranks(documents, found, sources.colors), *filter(None, [differences])]
    blocks = [to_page_block(fairness_table(found, called), "spread"), *map(figure_block, figures)]
    return section("fairness", "Fairness", blocks, of_all(sources, "fairness", "all of this section"))


# Newcomers


def new_clients_section(runs: ReportRuns) -> list[Block]:
    """What clients come to that join when training is over."""
    table = new_clients_table(runs.documents, runs.names)
    if table is None:
        return []
    figure = adaptation_curves(runs.documents, runs.colors)
    drawn = [figure_block(figure)] if any(map(new_clients_curve, runs.documents)) else []
    blocks = [*drawn, to_page_block(table, "joined")]
    return section("new_clients", "Newcomers", blocks, of_each(runs, "show"))


# Data


def data_section(sources: ReportRuns) -> list[Block]:
    """Who holds how many samples of which label, once for all runs with the same."""
    same: dict[str, list[ReportRun]] = {}
    for run in sources.runs:
        if run.labels:
            same.setdefault(json.dumps(run.labels), []).append(run)
    if not same:
        return []
    lines, panels = list[Block](), list[Panel]()
    for runs in same.values():
        figure = _distribution(runs[0], [sources.name(run.document) for run in runs], len(same))
        panels += figure.panels
        if line := holding(runs[0]):
            lines.append(command_block(figure.title, line))
    block = figure_block(Figure("labels", "", tuple(panels), figure.caption))
    return section("data", "Data", [block], lines)


def _distribution(run: ReportRun, run_names: Sequence[str], distinct: int) -> Figure:
    document, counts = run.document, np.array(run.labels)
    config = document["config"]
    partition = config.get("partition") or "split from a file"
    name = f"{Path(str(config['data'])).name}, {partition}, {len(counts)} clients"
    notes = [f"the largest bubble is {counts.max()} samples"]
    if config.get("new_clients"):
        notes.append(f"the last {config['newcomers']} are newcomers")
    if distinct > 1:
        notes.append(f"of {', '.join(run_names)}")
    return client_distribution(
        counts, name, document["label_names"], document["client_names"], max_clients=_CLIENTS, notes=notes
    )
