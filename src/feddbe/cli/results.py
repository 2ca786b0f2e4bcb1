"""`feddbe runs`, `show`, `verify`, `fairness`, `overhead` and `analyze`: commands that read runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from feddbe import paths
from feddbe.cli.command import (
    AS_JSON,
    CALLBACK_HELP,
    CODE,
    ROUND,
    TRUST,
    Argument,
    Choice,
    Command,
    print_error,
    print_json,
    print_renderable,
)
from feddbe.errors import InvalidInputError

if TYPE_CHECKING:
    from feddbe.reporting.table import Table
    from feddbe.results.document import RunDocument


_RUNS = click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/",
)  # fmt: skip
_FORMATS = ("csv", "json", "latex", "markdown")
_PROGRAM_FORMATS = ("csv", "json")
"""Formats with one record per row, all digits and settings as columns."""


@click.command("runs", cls=Command)
@click.argument(
    "folder",
    cls=Argument,
    required=False,
    metavar="[FOLDER]",
    type=Path,
    help="folder to search [default: runs]",
)
@AS_JSON
def runs(folder: Path | None, as_json: bool) -> int:
    """List the runs below a folder."""
    from feddbe import api
    from feddbe.reporting.tables import runs_table

    root = folder or paths.RUNS_DIR
    rows = api.list_runs(root)
    if as_json:
        print_json({"runs": rows})
    elif rows:
        print_renderable(runs_table(rows))
    else:
        print(f"no runs in {root}/; start one with: feddbe run fedavg+dbe")
    return 0


@click.command("show", cls=Command)
@_RUNS
@click.option(
    "--moment", default="published", type=Choice(("published", "before", "adapted", "after")),
    help="moment of the evaluation [default: published]",
)  # fmt: skip
@click.option("--clients", is_flag=True, help="print the accuracy of each client")
@click.option("--format", "format_", type=Choice(_FORMATS), help="print the table in this format")
@click.option("--plot", metavar="FILE", type=Path, help="draw the learning curves: .png, .svg or .pdf")
@click.option(
    "--callback", multiple=True, metavar="TRACKER", help=f"write the finished runs to a {CALLBACK_HELP}"
)
@AS_JSON
def show(
    names: tuple[str, ...],
    moment: str,
    clients: bool,
    format_: str | None,
    plot: Path | None,
    callback: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show runs and comparisons: table and learning curves."""
    from feddbe.callbacks.tracking import make_callback, replay_documents
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.reporting.table import render
    from feddbe.results.document import at_moment
    from feddbe.runs import folders, summary

    callbacks = make_callback(callback)
    documents = [summary.load_document(folder, hashes=as_json) for folder in folders.resolve_all_runs(names)]
    with callbacks:
        replay_documents(documents, callbacks)
    if moment != "published":
        documents = [at_moment(document, moment) for document in documents]
    if plot is not None:
        draw(plot, learning_curves(documents))
    if clients:
        _print_clients(documents, format_, as_json=as_json)
    elif as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})
    elif format_ is not None:
        print(render(_results_table(documents, for_programs=format_ in _PROGRAM_FORMATS), format_), end="")
    else:
        _print_results(documents)
        if plot is not None:
            print(f"\ncurves  {plot}")
    return 0


def _results_table(documents: list[RunDocument], *, for_programs: bool = False) -> Table:
    """Return a record per run; for readers, a record per experiment if an experiment has several seeds."""
    from feddbe.reporting.tables import has_repetitions, results_table, seeds_table

    if not for_programs and has_repetitions(documents):
        return seeds_table(documents)
    return results_table(documents)


def _print_results(documents: list[RunDocument]) -> None:
    """Print all tables of the runs, and the curves."""
    from feddbe.reporting import representations
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.tables import new_clients_table
    from feddbe.reporting.terminal import CurveChart

    tables = filter(None, [_results_table(documents), new_clients_table(documents)])
    print_renderable(*tables, "", CurveChart(learning_curves(documents)))
    for table in representations.analysis_tables(documents):
        print()
        print_renderable(table)


def _print_clients(documents: list[RunDocument], format_: str | None, *, as_json: bool) -> None:
    from feddbe.reporting.table import render
    from feddbe.reporting.tables import client_records_table, clients_table
    from feddbe.runs.summary import client_records

    clients = [client_records(document) for document in documents]
    if as_json:
        print_json({"clients": client_records_table(documents, clients).to_records()})
    elif format_ is None:
        print_renderable(clients_table(documents, clients))
    else:
        build_table = client_records_table if format_ in _PROGRAM_FORMATS else clients_table
        print(render(build_table(documents, clients), format_), end="")


@click.command("verify", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...", help="folders, or names in runs/"
)
@AS_JSON
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Verify all of a run and print the round from which it can resume."""
    from feddbe.runs import folders
    from feddbe.runs.store import PartStatus, verify_run

    results = [verify_run(folder) for name in names for folder in folders.resolve_runs(name)]
    code = 0 if all(result.is_intact for result in results) else 2
    if as_json:
        print_json({"runs": [result.as_json() for result in results]})
        return code
    for result in results:
        if result.is_intact:
            has_begun = (result.round or 0) >= 0
            progress = f"resumes from round {result.round}" if has_begun else "training has not begun"
            print("; ".join([f"{result.folder}: intact; {progress}", *result.texts(PartStatus.SKIPPED)]))
        else:
            print_error(result.texts(PartStatus.DAMAGED)[0], code)
    return code


@click.command("fairness", cls=Command)
@_RUNS
@ROUND
@click.option(
    "-o", "--out", metavar="FILE", type=Path,
    help="figure: .png, .svg or .pdf [default: fairness.png in the first RUN]",
)  # fmt: skip
@AS_JSON
def fairness(names: tuple[str, ...], round_: str, out: Path | None, as_json: bool) -> int:
    """Show each client's accuracy, and how many clients gain or lose against local and fedavg."""
    from feddbe import api
    from feddbe.reporting import tables
    from feddbe.reporting.build_figures import client_differences, client_ranks
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.runs import folders

    documents = _load_documents(names)
    results = api.fairness(names, round=round_)
    first = folders.resolve_runs(names[0])
    path = out or (first[0] if len(first) == 1 else first[0].parent) / "fairness.png"
    draw(path, client_ranks(documents, results), *filter(None, [client_differences(documents, results)]))
    if as_json:
        print_json({"runs": results, "picture": str(path)})
        return 0
    print_renderable(tables.fairness_table(results))
    missing = tables.missing_baselines(results)
    if missing:
        print(missing)
    print(f"\nfairness  {path}")
    return 0


@click.command("overhead", cls=Command)
@_RUNS
@AS_JSON
def overhead(names: tuple[str, ...], as_json: bool) -> int:
    """Show the cost of methods: seconds, bytes, state kept by clients, memory."""
    from feddbe import api
    from feddbe.reporting.tables import overhead_table
    from feddbe.results.document import run_labels

    costs = api.overhead(names)
    if as_json:
        print_json({"runs": costs})
    else:
        print_renderable(overhead_table(costs, run_labels(_load_documents(names))))
    return 0


def _load_documents(names: tuple[str, ...]) -> list[RunDocument]:
    from feddbe.runs import folders, summary

    return [summary.load_document(folder, hashes=False) for folder in folders.resolve_all_runs(names)]


@click.command("analyze", cls=Command)
@_RUNS
@click.option(
    "--analyses", default="mdl", metavar="NAMES",
    help="mdl, probe, discrepancy, discrepancy-shared, tsne, confusion [default: mdl]",
)  # fmt: skip
@ROUND
@click.option(
    "--moment", default="before,after", metavar="NAMES",
    help="before or after local training, or adapted, if the method adapts [default: before,after]",
)  # fmt: skip
@click.option(
    "--layers", default="z_g", metavar="NAMES",
    help="layers of the model, as in conv1, z_g, z, logits [default: z_g]",
)  # fmt: skip
@click.option(
    "--samples", default="1000", metavar="N",
    help="number of test samples over all clients, or all [default: 1000]",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="use fewer probes and steps; results are marked")
@click.option("--per-client", is_flag=True, help="analyze each client separately: mdl, probe")
@CODE
@TRUST
@AS_JSON
def analyze(
    names: tuple[str, ...],
    analyses: str,
    round_: str,
    moment: str,
    layers: str,
    samples: str,
    quick: bool,
    per_client: bool,
    code: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Analyze the representations in runs, by layer, before and after local training."""
    from feddbe import api
    from feddbe.callbacks.display import CliProgress
    from feddbe.metrics.representations import registry
    from feddbe.reporting import representations
    from feddbe.runs import folders

    progress = CliProgress()
    try:
        with progress:
            documents = api.analyze(
                names, analyses=analyses, round=round_, moment=moment, layers=layers,
                samples=_parse_samples(samples), quick=quick, per_client=per_client, code=code, trust=trust,
                callback=progress, quiet=True,
            )  # fmt: skip
    except KeyboardInterrupt:
        return print_error("stopped; finished analyses are kept, repeat the command for the others", 130)
    first = folders.resolve_runs(names[0])
    figures = api.draw_analyses(first[0] if len(first) == 1 else first[0].parent, documents)
    if as_json:
        print_json({"runs": documents, "pictures": [str(path) for path in figures]})
        return 0
    for table in representations.analysis_tables(documents.documents, registry.parse_analyses(analyses)):
        print_renderable(table)
        print()
    for path in figures:
        print(f"picture  {path}")
    return 0


def _parse_samples(text: str) -> int | None:
    """Return the number of samples, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise InvalidInputError(f"samples = '{text}'; allowed: a whole number >= 1, or all")
    return int(text)
