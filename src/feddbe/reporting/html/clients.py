"""The part of a page about clients: their accuracy in each round, fairness, newcomers, and their data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from feddbe.reporting.formatting import percent
from feddbe.reporting.html.blocks import (
    BAND,
    Block,
    Choice,
    Source,
    Sources,
    cell,
    command,
    curves,
    figure,
    number,
    section,
    series,
    some,
    table,
    thinned,
    told,
)
from feddbe.reporting.html.overview import holding, of_all, of_each
from feddbe.results.document import Accuracy, RunDocument, adapting
from feddbe.results.fairness import BASELINES, Fairness, Paired, fairness
from feddbe.results.seeds import counted, experiments
from feddbe.runs import summary

_CLIENTS, _ROUNDS, _CELLS = 100, 120, 300_000
"""How many a heat map shows, and the cells of all of a page's."""
_Number = Literal["mean", "std", "worst_tenth", "lowest", "median", "highest"]
_SHARES = range(101)
"""In percent of clients, at which the curve of ranks is drawn."""
_DOTS = 200
"""Clients that are drawn as dots of a row."""


def each(sources: Sources) -> list[Block]:
    """A heat map for each run."""
    rounds = max(12, min(_ROUNDS, _CELLS // _CLIENTS // max(1, len(sources.runs))))
    pairs = zip(sources.runs, sources.names, strict=True)
    found = [one for run, name in pairs if (one := _heat(run, name, rounds))]
    if not found:
        return []
    caption = (
        "Test accuracy of each client (a row) in each round (a column), at the moment that counts; blank: "
        "not evaluated."
    )
    text = "; ".join(map(_told, found))
    block = figure("heat", "heat", caption, text, choices=found)
    return section(
        "clients", "Clients over rounds", [block], of_all(sources, "fairness", "by client, best round")
    )


def _told(one: Block) -> str:
    last = [row[-1] / 10 for row in one["values"] if row[-1] >= 0] or [0.0]
    return f"{one['name']}: in round {one['rounds'][-1]} clients have {min(last):.0f} to {max(last):.0f} %"


def _heat(run: Source, name: str, most: int) -> Block | None:
    """Accuracies in tenths of a percent, -1 where there is none; a list for each client."""
    best = run.document["best"]
    entries = {e["round"]: e for e in run.document["rounds"] if e["accuracy"]}
    everyone = sorted(run.accuracies)
    if best is None or not everyone:
        return None
    clients = some(everyone, _CLIENTS)
    rounds, step = thinned(sorted(entries), most, [best["round"]])
    found = summary.history(run.folder, [entries[t] for t in rounds], clients)
    config = run.document["config"]
    members = (config.get("clients") or 0) - (config.get("newcomers") or 0)
    told = [
        f"the {len(everyone):,} clients that were evaluated in the best round" * (len(everyone) < members),
        f"{len(clients)} of {len(everyone):,} clients, evenly by number" * (len(clients) < len(everyone)),
        f"one in {step} rounds, with the best and the last" * (step > 1),
    ]
    return {
        "name": name,
        "note": "; ".join(filter(None, told)),
        "clients": clients,
        "rounds": rounds,
        "values": [[round(1000 * at.get(client, -0.001)) for at in found] for client in clients],
    }


# Fairness


def fair(sources: Sources) -> list[Block]:
    """How accuracies are spread in the best round, and who is helped and hurt."""
    runs = [run for run in sources.runs if run.accuracies]
    if not runs:
        return []
    documents = [run.document for run in runs]
    found = fairness(documents, [run.accuracies for run in runs])
    called = [sources.name(document) for document in documents]
    colours = [sources.colours[document["folder"]] for document in documents]
    blocks = [
        _spread(found, called),
        _ranks(sources, found, documents),
        *_differences(found, called, colours),
    ]
    return section("fairness", "Fairness", blocks, of_all(sources, "fairness", "all of this section"))


def _spread(found: Sequence[Fairness], called: Sequence[str]) -> Block:
    numbers: tuple[_Number, ...] = ("mean", "std", "worst_tenth", "lowest", "median", "highest")
    against = [baseline for baseline in BASELINES if any(baseline in run["paired"] for run in found)]
    rows = []
    for run, name in zip(found, called, strict=True):
        pairs = [run["paired"].get(baseline) for baseline in against]
        rows.append(
            [
                name,
                cell(str(run["round"]), run["round"]),
                cell(f"{run['spread']['clients']:,}", run["spread"]["clients"]),
                *(cell(percent(run["spread"][key]), run["spread"][key]) for key in numbers),
                *(_helped(pair) for pair in pairs),
            ]
        )  # fmt: skip
    words = "Accuracy in % over clients, each counted once, in the best round."
    if against:
        words += " Against: clients better / equal / worse off than with it."
    columns = ["run", "in round", "clients", *(key.replace("_", " ") for key in numbers)]
    return table("spread", words, [*columns, *(f"against {baseline}" for baseline in against)], rows)


def _helped(pair: Paired | None) -> dict[str, object]:
    if pair is None:
        return cell("", None)
    return cell(f"{pair['better']} / {pair['equal']} / {pair['worse']}", pair["helped"])


def _drawn_together(experiment: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return the runs that are drawn as their mean, and each of the others alone."""
    together = counted(experiment)
    folders = {run["folder"] for run in together}
    alone = [[run] for run in experiment if run["folder"] not in folders]
    return [together, *alone] if together else alone


def _ranks(sources: Sources, found: Sequence[Fairness], documents: Sequence[RunDocument]) -> Block:
    """Accuracy of the client at each rank, ranks as shares of all clients."""
    at = {d["folder"]: _at_ranks(run["accuracy"]) for d, run in zip(documents, found, strict=True)}
    drawn = [group for experiment in experiments(documents) for group in _drawn_together(experiment)]
    lines = [
        series(name, sources.colours[group[0]["folder"]], [at[d["folder"]] for d in group])
        for group, name in zip(drawn, sources.called(drawn), strict=True)
    ]
    choice = {"name": "test accuracy in %", "unit": "%", "x": list(_SHARES), "floors": [], "series": lines}
    caption = "Clients from the worst to the best, in % of them: a flat line is a fair method."
    several = any(line["runs"] > 1 for line in lines)
    text = "; ".join(map(told, lines))
    words = f"{caption} {BAND}" if several else caption
    return figure("curves", "ranks", words, text, x="% of clients", choices=[choice], stepped=True)


def _at_ranks(accuracy: Mapping[int, float]) -> list[float | None]:
    values = np.sort(list(accuracy.values()))
    return [100 * float(values[min(len(values) - 1, share * len(values) // 100)]) for share in _SHARES]


def _differences(found: Sequence[Fairness], called: Sequence[str], colours: Sequence[int]) -> list[Block]:
    panels: list[Block] = []
    for baseline in BASELINES:
        rows = [
            {
                "name": name,
                "colour": colour,
                "values": [number(100 * values[index], 2) for index in some(range(len(values)), _DOTS)],
                "mean": number(100 * pair["mean"], 2),
            }
            for run, name, colour in zip(found, called, colours, strict=True)
            if (pair := run["paired"].get(baseline))
            for values in [sorted(pair["differences"].values())]
        ]
        if rows:
            panels.append({"name": f"accuracy less that with {baseline}, in points", "rows": rows})
    if not panels:
        return []
    caption = (
        "Each client's difference to the baseline with the same data (and seed, where there is one): right "
        f"of zero it is helped. The bar is the mean. Of more than {_DOTS} clients every so many are drawn."
    )
    text = "; ".join(
        f"{row['name']}: mean {row['mean']}, {panel['name']}" for panel in panels for row in panel["rows"]
    )
    return [figure("dots", "differences", caption, text, panels=panels)]


# Newcomers


def joined(sources: Sources) -> list[Block]:
    """What clients come to that join when training is over."""
    there = [(d, name) for d, name in zip(sources.documents, sources.names, strict=True) if d["newcomers"]]
    if not there:
        return []
    rows = []
    for document, name in there:
        new = document["newcomers"]
        assert new is not None
        before, after = (_weighted(new[when]) for when in ("before", "adapted"))
        clients, epochs = (cell(str(count), count) for count in (new["clients"], new["epochs"]))
        rows.append([name, new["way"], clients, before, epochs, after])
    words = "Clients that took no part in the training: test accuracy in %, weighted by samples."
    columns = ["run", "way", "clients", "as received %", "epochs", "adapted %"]
    choice = Choice("test accuracy of newcomers in %", adapting, "%")
    over = "Over the epochs of adapting; 0 is the model as received."
    blocks = [*curves("adapting", sources, [choice], "epoch", over), table("joined", words, columns, rows)]
    return section("newcomers", "Newcomers", blocks, of_each(sources, "show"))


def _weighted(found: Accuracy | None) -> dict[str, object]:
    value = found["weighted"] if found else None
    return cell(percent(value), value)


# Data


def data(sources: Sources) -> list[Block]:
    """Who holds how many samples of which label, once for all runs with the same."""
    same: dict[str, list[Source]] = {}
    for run in sources.runs:
        if run.labels:
            same.setdefault(json.dumps(run.labels), []).append(run)
    if not same:
        return []
    found = [_bubbles(runs[0], [sources.name(r.document) for r in runs], len(same)) for runs in same.values()]
    told = "; ".join(f"{one['name']}: {one['told']}" for one in found)
    caption = (
        "Samples of each label (rows) that each client (columns) holds, training and test: a bubble's area."
    )
    lines = [command(one["name"], line) for one in found if (line := one.pop("line"))]
    return section("data", "Data", [figure("bubbles", "labels", caption, told, choices=found)], lines)


def _bubbles(run: Source, runs: Sequence[str], kinds: int) -> Block:
    config, counts = run.document["config"], np.array(run.labels)
    clients = some(range(len(counts)), _CLIENTS)
    kind = config.get("partition") or "split from a file"
    name = f"{Path(str(config['data'])).name}, {kind}, {len(counts)} clients"
    notes = [
        f"the largest bubble is {counts.max()} samples",
        f"{len(clients)} of {len(counts):,} clients, evenly by number" * (len(clients) < len(counts)),
        f"the last {config.get('newcomers')} are newcomers" * bool(config.get("newcomers")),
        f"of {', '.join(runs)}" * (kinds > 1),
    ]
    held = np.count_nonzero(counts, axis=1)
    return {
        "name": name,
        "note": "; ".join(filter(None, notes)),
        "clients": clients,
        "counts": counts[clients].tolist(),
        "told": f"{counts.sum()} samples; a client has {held.min()} to {held.max()} labels",
        "line": holding(run),
    }
