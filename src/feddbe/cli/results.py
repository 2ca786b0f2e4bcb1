"""Commands that read runs and studies, from `feddbe runs` to `feddbe report`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe import paths
from feddbe.cli.base import (
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
    print_note,
    print_renderable,
    print_text,
)
from feddbe.errors import InvalidInputError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feddbe.reporting.table import Table
    from feddbe.results.document import RunDocument
    from feddbe.studies.study_record import Study


_RUNS = click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs, comparisons or studies, or names in runs/",
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
    """List the runs and studies below a folder."""
    from feddbe import api
    from feddbe.reporting.build_tables import runs_table
    from feddbe.studies.study_record import RECORD_FILE

    root = folder or paths.RUNS_DIR
    rows = api.list_runs(root)
    studies = [path.parent for path in sorted(root.rglob(RECORD_FILE))]
    if as_json:
        print_json({"runs": rows, "studies": _studies_table(studies, root).to_records()})
    elif rows:
        print_renderable(runs_table(rows))
        if studies:
            print_text()
            print_renderable(_studies_table(studies, root))
    else:
        print_text(f"no runs in {root}/; start one with: feddbe run fedavg+dbe")
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
    """Show runs, comparisons and studies: table and learning curves."""
    from feddbe.callbacks.tracking import make_callback, replay_documents
    from feddbe.results.document import at_moment
    from feddbe.studies import study_record

    callbacks = make_callback(callback)
    study = None
    if len(names) == 1:
        studies = study_record.find_studies(names[0])
        if len(studies) > 1:
            return _list_studies(studies, as_json=as_json)
        if studies:
            study = study_record.open_study(studies[0], hashes=as_json)
    is_plain = moment == "published" and not (clients or format_ or plot or as_json or callback)
    if study is not None and is_plain and _print_study(study):
        return 0
    if study is None:
        documents = study_record.load_documents(names, print_note, hashes=as_json)
    else:
        documents = list(study.documents)
        _print_study_notes(study)
    is_sweep = study is not None and study.record.purpose is study_record.Purpose.SWEEP
    if study is not None and moment != "published":
        documents = study.shown_documents  # values are chosen at the published moment only
        is_sweep = False
    with callbacks:
        replay_documents(documents, callbacks)
    if moment != "published":
        documents = [at_moment(document, moment) for document in documents]
    _show_documents(documents, clients, format_, plot, as_json=as_json, is_sweep=is_sweep)
    return 0


def _print_study(study: Study) -> bool:
    """Print a search or a table of the paper as its command did; return False for other studies."""
    from feddbe.cli.studies import print_paper_study, print_tune_result
    from feddbe.config.options import parse_options
    from feddbe.studies.study_record import Purpose
    from feddbe.studies.tune import TuneResult

    if study.record.purpose is Purpose.TUNING:
        options = parse_options(study.record.methods, study.record.options).config
        print_tune_result(TuneResult.from_record(study.record, study.folder), options)
        return True
    if study.record.purpose is Purpose.PAPER_TABLE:
        print_paper_study(study.folder)
        return True
    return False


def _list_studies(studies: Sequence[Path], *, as_json: bool) -> int:
    table = _studies_table(studies, studies[0].parent)
    if as_json:
        print_json({"studies": table.to_records()})
        return 0
    print_renderable(table)
    print_text(f"\nshow one with: feddbe show {studies[0]}")
    return 0


def _studies_table(studies: Sequence[Path], root: Path) -> Table:
    """Return a record per study, with its path below `root`."""
    from feddbe.reporting.table import TEXT, Column, Narrow, Table
    from feddbe.studies.study_record import read_record

    records: list[dict[str, Any]] = []
    for folder in studies:
        record: dict[str, Any] = {
            "study": str(folder.relative_to(root)), "purpose": "damaged", "methods": "", "seeds": "",
            "partition seeds": "", "runs": None, "begun": "",
        }  # fmt: skip
        try:
            study = read_record(folder)
        except StoreError:
            records.append(record)
            continue
        record["purpose"] = str(study.purpose)
        record["methods"] = ", ".join(study.methods)
        record["seeds"] = " ".join(map(str, study.seeds))
        record["partition seeds"] = " ".join(map(str, study.partition_seeds))
        record["runs"] = len(study.runs)
        record["begun"] = study.begun[:10]
        records.append(record)
    columns = [
        *(Column(key, kind=TEXT) for key in ("study", "purpose", "methods")),
        Column("seeds"),
        Column("partition seeds", hide_empty=True),
        Column("runs"),
        Column("begun", kind=TEXT),
    ]
    return Table(columns, records, narrow=Narrow.LIST_RECORDS)


def _print_study_notes(study: Study) -> None:
    """Print a line for each run that is missing or was changed, and the other studies in this folder."""
    from feddbe.studies.study_record import nested_studies

    for problem in study.problems:
        print_note(problem)
    others = nested_studies(study.folder)
    if others:
        print_note(f"further studies: {', '.join(map(str, others))}")


def _show_documents(
    documents: list[RunDocument],
    clients: bool,
    format_: str | None,
    plot: Path | None,
    *,
    as_json: bool,
    is_sweep: bool,
) -> None:
    """Print the runs; of a sweep, test accuracies of the chosen values only."""
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.build_tables import chosen_runs, results_table
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.reporting.run_objects import summary_table
    from feddbe.reporting.table import render

    visible_runs = chosen_runs(documents) if is_sweep else documents
    table = summary_table(documents, is_sweep=is_sweep)
    if plot is not None:
        draw(plot, learning_curves(visible_runs))
    if clients:
        _print_clients(visible_runs, format_, as_json=as_json)
    elif as_json and is_sweep:
        print_json({"table": table.to_records(), "runs": documents})
    elif as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})
    elif format_ in _PROGRAM_FORMATS and not is_sweep:
        print_text(render(results_table(documents), format_), end="")
    elif format_ is not None:
        print_text(render(table, format_), end="")
    else:
        _print_results(visible_runs, table)
        if plot is not None:
            print_text(f"\ncurves  {plot}")


def _print_results(documents: list[RunDocument], table: Table) -> None:
    """Print the table, those of new clients and of analyses, and the curves."""
    from feddbe.reporting import analysis_tables
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.build_tables import new_clients_table
    from feddbe.reporting.terminal import CurveChart

    tables = filter(None, [table, new_clients_table(documents)])
    print_renderable(*tables, "", CurveChart(learning_curves(documents)))
    for analyses in analysis_tables.analysis_tables(documents):
        print_text()
        print_renderable(analyses)


def _print_clients(documents: list[RunDocument], format_: str | None, *, as_json: bool) -> None:
    from feddbe.reporting.build_tables import client_records_table, clients_table
    from feddbe.reporting.table import render
    from feddbe.runs.build_document import client_records

    clients = [client_records(document) for document in documents]
    if as_json:
        print_json({"clients": client_records_table(documents, clients).to_records()})
    elif format_ is None:
        print_renderable(clients_table(documents, clients))
    else:
        build_table = client_records_table if format_ in _PROGRAM_FORMATS else clients_table
        print_text(render(build_table(documents, clients), format_), end="")


@click.command("verify", cls=Command)
@_RUNS
@AS_JSON
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Verify a run's file and print the round from which it can resume."""
    from feddbe.runs.store import PartStatus, verify_run
    from feddbe.studies.study_record import find_run_folders

    results = [verify_run(folder) for name in names for folder in find_run_folders(name)]
    code = 0 if all(result.is_intact for result in results) else 2
    if as_json:
        print_json({"runs": [result.as_json() for result in results]})
        return code
    for result in results:
        if result.is_intact:
            has_begun = (result.round or 0) >= 0
            progress = f"resumes from round {result.round}" if has_begun else "training has not begun"
            print_text("; ".join([f"{result.folder}: intact; {progress}", *result.texts(PartStatus.SKIPPED)]))
        else:
            print_error(result.texts(PartStatus.DAMAGED)[0], code)
    return code


@click.command("fairness", cls=Command)
@_RUNS
@click.option(
    "--round", "round_", type=Choice(("best", "last")),
    help="round to use [default: last, or best if it was chosen on validation data]",
)  # fmt: skip
@click.option(
    "-o", "--out", metavar="FILE", type=Path,
    help="figure: .png, .svg or .pdf [default: fairness.png in the first RUN]",
)  # fmt: skip
@AS_JSON
def fairness(names: tuple[str, ...], round_: str | None, out: Path | None, as_json: bool) -> int:
    """Show each client's accuracy, and how many clients gain or lose against local and fedavg."""
    from feddbe.reporting import build_tables
    from feddbe.reporting.build_figures import client_differences, client_ranks
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.results.fairness import compute_fairness, requested_result
    from feddbe.runs.build_document import client_accuracies
    from feddbe.studies.study_record import load_documents, output_folder

    documents = load_documents(names, print_note)
    accuracies = [
        client_accuracies(Path(document["folder"]), requested_result(document, round_))
        for document in documents
    ]
    results = compute_fairness(documents, accuracies, round_)
    path = out or output_folder(names[0]) / "fairness.png"
    draw(path, client_ranks(documents, results), *filter(None, [client_differences(documents, results)]))
    if as_json:
        print_json({"runs": results, "picture": str(path)})
        return 0
    print_renderable(build_tables.fairness_table(results))
    missing = build_tables.missing_baselines(results)
    if missing:
        print_text(missing)
    print_text(f"\nfairness  {path}")
    return 0


@click.command("overhead", cls=Command)
@_RUNS
@AS_JSON
def overhead(names: tuple[str, ...], as_json: bool) -> int:
    """Show the cost of methods: seconds, bytes, state kept by clients, memory."""
    from feddbe.reporting.build_tables import overhead_table
    from feddbe.results.document import run_labels
    from feddbe.results.fairness import compute_overhead
    from feddbe.runs.build_document import count_private_values
    from feddbe.studies.study_record import load_documents

    documents = load_documents(names, print_note)
    costs = [
        compute_overhead(document, count_private_values(Path(document["folder"]))) for document in documents
    ]
    if as_json:
        print_json({"runs": costs})
    else:
        print_renderable(overhead_table(costs, run_labels(documents)))
    return 0


@click.command("analyze", cls=Command)
@_RUNS
@click.option(
    "--analyses", default="mdl", metavar="NAMES",
    help="mdl, probe, discrepancy, tsne, confusion [default: mdl]",
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
@click.option(
    "--on", type=click.Choice(["own", "all"]),
    help="test samples that each client's model represents: its client's own, or those of all N clients, "
    "which takes up to N times as long "
    "[default: all for mdl and probe, own for the others]",
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
    on: str | None,
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
    from feddbe.reporting import analysis_tables
    from feddbe.studies.study_record import output_folder

    progress = CliProgress()
    try:
        with progress:
            documents = api.analyze(
                names, analyses=analyses, round=round_, moment=moment, layers=layers,
                samples=_parse_samples(samples), on=on, quick=quick, per_client=per_client, code=code,
                trust=trust, callback=progress, quiet=True,
            )  # fmt: skip
    except KeyboardInterrupt:
        return print_error("stopped; finished analyses are kept, repeat the command for the others", 130)
    figures = api.draw_analyses(output_folder(names[0]), documents)
    if as_json:
        print_json({"runs": documents, "pictures": [str(path) for path in figures]})
        return 0
    for table in analysis_tables.analysis_tables(documents.documents, registry.parse_analyses(analyses)):
        print_renderable(table)
        print_text()
    for path in figures:
        print_text(f"picture  {path}")
    return 0


def _parse_samples(text: str) -> int | None:
    """Return the number of samples, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise InvalidInputError(f"samples = '{text}'; allowed: a whole number >= 1, or all")
    return int(text)


@click.command("report", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="runs, comparisons or studies: folders, or names in runs/; with --live also folders with runs",
)  # fmt: skip
@click.option(
    "-o", "--out", metavar="FILE", type=Path, help="HTML file [default: report.html in the first RUN]"
)
@click.option("--live", is_flag=True, help="serve the page on 127.0.0.1 instead; it follows runs in progress")
@click.option("--port", type=int, metavar="N", help="port of --live [default: a free one]")
def report(names: tuple[str, ...], out: Path | None, live: bool, port: int | None) -> int:
    """Write runs as one HTML page: tables, curves, clients, representations, settings."""
    if live:
        if out is not None:
            raise InvalidInputError(f"--out {out} has no effect with --live; give one of them")
        return _serve_report(names, port or 0)
    if port is not None:
        raise InvalidInputError(f"--port {port} has no effect without --live; add --live")
    from feddbe import api
    from feddbe.callbacks.display import MessagesOnly

    print_text(f"report  {api.report(names, out, callback=MessagesOnly())}")
    return 0


def _serve_report(names: Sequence[str], port: int) -> int:
    from feddbe.paths import expand_path
    from feddbe.reporting.html.live import serve
    from feddbe.runs import folders

    def list_runs() -> list[Path]:
        """Return the runs that exist now; a folder may get runs later."""
        runs = dict[Path, None]()
        for name in names:
            folder = expand_path(name)
            study_runs = _list_study_runs(name)
            if study_runs is not None:
                runs |= dict.fromkeys(study_runs)
            else:
                runs |= dict.fromkeys(
                    folders.list_runs(folder) if folder.is_dir() else folders.resolve_runs(name)
                )
        return list(runs)

    list_runs()  # raises an error for names that do not exist
    with suppress(KeyboardInterrupt):
        serve(list_runs, port, lambda address: print_text(f"report  {address}  (Ctrl-C ends it)"))
    return 0


def _list_study_runs(name: str) -> list[Path] | None:
    """Return the runs of a study that exist now; None if the name is not that of one study.

    Raises:
        InvalidInputError: The study is a sweep. Its page would show test accuracies before values are chosen.
    """
    from feddbe.runs.store import RunStore
    from feddbe.studies.study_record import Purpose, find_run_folders, find_studies, read_record

    studies = find_studies(name)
    if len(studies) != 1:
        return None
    if read_record(studies[0]).purpose is Purpose.SWEEP:
        raise InvalidInputError(
            f"'{name}' is a sweep, whose values are chosen at its end; use report {name} without --live"
        )
    return [folder for folder in find_run_folders(name) if RunStore.is_run(folder)]
