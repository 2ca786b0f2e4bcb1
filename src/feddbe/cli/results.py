"""`feddbe runs`, `feddbe show` and `feddbe check`: what has been run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from feddbe import paths
from feddbe.cli.command import AS_JSON, CODE, TRUST, Argument, Command, print_error, print_json
from feddbe.cli.command import print_renderable as show_tables
from feddbe.errors import CorruptRunError, InvalidInputError, StoreError, unknown_name

if TYPE_CHECKING:
    from feddbe.reporting.table import Table
    from feddbe.reporting.tables import RunRecord
    from feddbe.results.document import RunDocument


_RUNS = click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/",
)  # fmt: skip


_TIDY = ("csv", "json")
"""For programs: one thing to a row."""


@click.command("runs", cls=Command)
@click.argument(
    "where", cls=Argument, required=False, metavar="[FOLDER]", type=Path, help="where to look [runs]"
)
@AS_JSON
def runs(where: Path | None, as_json: bool) -> int:
    """List the runs below a folder."""
    from feddbe.reporting.tables import runs_table
    from feddbe.runs import folders

    folder = where or paths.RUNS_DIR
    rows = [_row(path, folder) for path in folders.list_names(folder)]
    if as_json:
        print_json({"runs": rows})
    elif rows:
        show_tables(runs_table(rows))
    else:
        print(f"no runs in {folder}/; start one with: feddbe run fedavg+dbe")
    return 0


def _row(path: Path, root: Path) -> RunRecord:
    from feddbe.results.document import is_finished, status_note
    from feddbe.runs import summary

    name = str(path.relative_to(root)) if path != root else path.name
    try:
        document = summary.load_document(path, hashes=False)
    except StoreError as error:
        nothing: RunRecord = {
            "name": name, "method": "-", "data": "-", "seed": None, "begun": "", "rounds": 0,
            "best": None, "last": None, "state": "damaged" if isinstance(error, CorruptRunError) else "unreadable",
        }  # fmt: skip
        return nothing
    best, last, settings = document["best"], document["last"], document["config"]
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    return {
        "name": name,
        "method": document["method"],
        "data": Path(settings["data"]).name,
        "seed": settings["seed"],
        "begun": document["begun"],
        "rounds": done,
        "best": best["accuracy"]["weighted"] if best and best["accuracy"] else None,
        "last": last["accuracy"]["weighted"] if last and last["accuracy"] else None,
        "state": status_note(document)
        or ("done" if is_finished(document) else f"{settings['rounds']} wanted"),
    }


@click.command("show", cls=Command)
@_RUNS
@click.option("--moment", default="published", help="moment: published, before, adapted or after")
@click.option("--clients", is_flag=True, help="accuracy of each client")
@click.option("--format", "form", metavar="NAME", help="print the table as csv, json, latex or markdown")
@click.option("--plot", metavar="FILE", type=Path, help="draw the learning curves: .png, .svg or .pdf")
@AS_JSON
def show(
    names: tuple[str, ...], moment: str, clients: bool, form: str | None, plot: Path | None, as_json: bool
) -> int:
    """Show runs and comparisons: table and learning curves."""
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.reporting.table import FORMATS, render
    from feddbe.results.document import at_moment
    from feddbe.runs import folders, summary

    if moment not in (moments := ("published", "before", "adapted", "after")):
        raise unknown_name("moment", moment, moments)
    if form is not None and form not in FORMATS:
        raise unknown_name("format", form, FORMATS)
    documents = [summary.load_document(folder, hashes=as_json) for folder in folders.iterate_runs(names)]
    if moment != "published":
        documents = [at_moment(document, moment) for document in documents]
    if plot is not None:
        draw(plot, learning_curves(documents))
    if clients:
        _show_clients(documents, form, as_json=as_json)
    elif as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})
    elif form is not None:
        print(render(_results(documents, tidy=form in _TIDY), form), end="")
    else:
        _show_results(documents)
        if plot is not None:
            print(f"\ncurves  {plot}")
    return 0


def _results(documents: list[RunDocument], *, tidy: bool = False) -> Table:
    """Return a record per run; for readers per experiment, if one has several seeds."""
    from feddbe.reporting.tables import has_repetitions, results_table, seeds_table

    return seeds_table(documents) if not tidy and has_repetitions(documents) else results_table(documents)


def _show_results(documents: list[RunDocument]) -> None:
    """Print all tables of the runs, and the curves."""
    from feddbe.reporting import representations
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.tables import new_clients_table
    from feddbe.reporting.terminal import CurveChart

    tables = filter(None, [_results(documents), new_clients_table(documents)])
    show_tables(*tables, "", CurveChart(learning_curves(documents)))
    for table in representations.analysis_tables(documents):
        print()
        show_tables(table)


def _show_clients(documents: list[RunDocument], form: str | None, *, as_json: bool) -> None:
    from feddbe.reporting.table import render
    from feddbe.reporting.tables import client_records_table, clients_table
    from feddbe.runs.summary import client_records

    clients = [client_records(document) for document in documents]
    if as_json:
        print_json({"clients": client_records_table(documents, clients).to_records()})
    elif form is None:
        show_tables(clients_table(documents, clients))
    else:
        table = (client_records_table if form in _TIDY else clients_table)(documents, clients)
        print(render(table, form), end="")


@click.command("check", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...", help="folders, or names in runs/"
)
@AS_JSON
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Read all of a run: what is whole, and from which round it can go on."""
    from feddbe.runs import folders
    from feddbe.runs.store import PartStatus
    from feddbe.runs.store import verify_run as check_run

    checked = [check_run(folder) for name in names for folder in folders.resolve_runs(name)]
    code = 0 if all(run.is_intact for run in checked) else 2
    if as_json:
        print_json({"runs": [run.as_json() for run in checked]})
        return code
    for run in checked:
        if run.is_intact:
            has_begun = (run.round or 0) >= 0
            progress = f"goes on from round {run.round}" if has_begun else "has not begun to train"
            print("; ".join([f"{run.folder}: whole, {progress}", *run.texts(PartStatus.SKIPPED)]))
        else:
            print_error(run.texts(PartStatus.DAMAGED)[0], code)
    return code


_QUALITY_RUNS = click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/",
)  # fmt: skip


@click.command("fairness", cls=Command)
@_QUALITY_RUNS
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=Path,
    help="picture: .png, .svg or .pdf [fairness.png in the first RUN]",
)
@AS_JSON
def fairness(names: tuple[str, ...], which: str, out: Path | None, as_json: bool) -> int:
    """Accuracy of each client: its spread, and who is helped and hurt against local and fedavg."""
    from feddbe.reporting import tables
    from feddbe.reporting.build_figures import client_differences, client_ranks
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.results.fairness import compute_fairness as fairness_fairness
    from feddbe.runs import folders
    from feddbe.runs.summary import client_accuracies as summary_accuracies

    if which not in (rounds := ("best", "last")):
        raise unknown_name("round", which, rounds)
    documents = _documents(names)
    entries = [document["best" if which == "best" else "last"] for document in documents]
    accuracies = [
        summary_accuracies(Path(document["folder"]), entry)
        for document, entry in zip(documents, entries, strict=True)
    ]
    found = fairness_fairness(documents, accuracies, which)
    first = folders.resolve_runs(names[0])
    path = out or (first[0] if len(first) == 1 else first[0].parent) / "fairness.png"
    draw(path, client_ranks(documents, found), *filter(None, [client_differences(documents, found)]))
    if as_json:
        print_json({"runs": found, "picture": str(path)})
        return 0
    show_tables(tables.fairness_table(found))
    if missing := tables.missing_baselines(found):
        print(missing)
    print(f"\nfairness  {path}")
    return 0


@click.command("overhead", cls=Command)
@_QUALITY_RUNS
@AS_JSON
def overhead(names: tuple[str, ...], as_json: bool) -> int:
    """What methods cost: seconds, bytes, what clients keep, memory."""
    from feddbe.reporting.tables import overhead_table
    from feddbe.results.document import run_labels
    from feddbe.results.fairness import compute_overhead as cost
    from feddbe.runs.summary import retained_rounds

    documents = _documents(names)
    costs = [cost(document, retained_rounds(Path(document["folder"]))) for document in documents]
    if as_json:
        print_json({"runs": costs})
    else:
        show_tables(overhead_table(costs, run_labels(documents)))
    return 0


def _documents(names: tuple[str, ...]) -> list[RunDocument]:
    """Of all runs that are meant, each once."""
    from feddbe.runs import folders, summary

    return [summary.load_document(folder, hashes=False) for folder in folders.iterate_runs(names)]


@click.command("measure", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/",
)  # fmt: skip
@click.option(
    "--analyses",
    default="mdl",
    metavar="NAMES",
    help="mdl, probe, discrepancy, discrepancy-shared, tsne [mdl]",
)
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@click.option(
    "--moment",
    default="before,after",
    metavar="NAMES",
    help="before and after local training, or adapted, where the method does that [before,after]",
)
@click.option(
    "--layers",
    default="z_g",
    metavar="NAMES",
    help="places: cuts of the model as in conv1, z_g, z, logits [z_g]",
)
@click.option(
    "--samples", default="1000", metavar="N", help="test samples kept, of all clients; or all [1000]"
)
@click.option("--quick", is_flag=True, help="less work where there is a way; marked wherever it is shown")
@click.option("--per-client", is_flag=True, help="of each client alone: mdl, probe")
@CODE
@TRUST
@AS_JSON
def analyze(
    names: tuple[str, ...],
    what: str,
    which: str,
    moment: str,
    at: str,
    n: str,
    quick: bool,
    per_client: bool,
    code: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Measure the representations in runs: layer by layer, before and after local training."""
    from feddbe import api
    from feddbe.callbacks.display import CliProgress
    from feddbe.metrics.representations import registry
    from feddbe.reporting import representations
    from feddbe.runs import folders

    watch, count = CliProgress(), _count(n)
    try:
        with watch:
            documents = api.analyze(
                names, analyses=what, round=which, moment=moment, layers=at, samples=count, quick=quick,
                per_client=per_client, code=code, trust=trust, callback=watch, quiet=True,
            )  # fmt: skip
    except KeyboardInterrupt:
        return print_error("stopped; what was finished is kept, the same command takes the rest", 130)
    first = folders.resolve_runs(names[0])
    paths = api.draw_analyses(first[0] if len(first) == 1 else first[0].parent, documents)
    if as_json:
        print_json({"runs": documents, "pictures": [str(path) for path in paths]})
        return 0
    for table in representations.analysis_tables(documents.documents, registry.parse_analyses(what)):
        show_tables(table)
        print()
    for path in paths:
        print(f"picture  {path}")
    return 0


def _count(text: str) -> int | None:
    """--samples: a number, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise InvalidInputError(f"n = '{text}'; allowed: a number from 1 on, or all")
    return int(text)
