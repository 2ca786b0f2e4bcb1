"""`feddbe run` and `feddbe compare`: run methods, or with `--dry-run` print what would be run."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.base import (
    CALLBACK_HELP,
    Argument,
    Command,
    Option,
    config_options,
    print_error,
    print_json,
    print_note,
    print_renderable,
    print_text,
    sigterm_as_interrupt,
)
from feddbe.config.options import RawOptions, collect_options, parse_sweep
from feddbe.config.parameters import format_value
from feddbe.config.user_code import Permission
from feddbe.errors import DivergenceError, FeddbeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from feddbe.callbacks.display import CliProgress
    from feddbe.config.options import SweepSpec
    from feddbe.results.document import RunDocument
    from feddbe.runs.timing import Preview
    from feddbe.studies.runner import PlannedRun


_METHOD = "method as in fedavg+dbe(kappa=5,mu=0.1), your own as FILE.py:CLASS, or a TOML file with options"
_SEEDS = "several seeds: their number, as in 5, or a list, as in 0,1,2; existing runs are not repeated"
_PARTITION_SEEDS = (
    "several partitions: their number, as in 3, or a list of seeds; every seed is run on every partition"
)
_NAME = "name of the study; default: comparison-N or sweep-N, or the folder of a comparison"
_CODE = "with --resume: file with the run's model or method; executed if it has not changed since"
_TRUST = "with --resume: execute the code files that the run names; only for your own runs"
_DRY_RUN = "run nothing; print all settings with their origin, and the estimated time and memory"


def _build_command(name: str, help_text: str, *, single: bool) -> click.Command:
    @click.command(name, cls=Command, help=help_text, params=config_options())
    @click.argument(
        "methods",
        cls=Argument,
        nargs=-1,
        metavar=f"[METHOD|FILE.toml]{'' if single else '...'}",
        help=_METHOD,
    )
    @click.option("--seeds", cls=Option, section="Training", metavar="N|LIST", help=_SEEDS)
    @click.option("--partition-seeds", cls=Option, section="Data", metavar="N|LIST", help=_PARTITION_SEEDS)
    @click.option("--name", cls=Option, section="Run", metavar="NAME", help=_NAME)
    @click.option("--code", cls=Option, section="Run", multiple=True, metavar="FILE.py", help=_CODE)
    @click.option("--trust", cls=Option, section="Run", is_flag=True, help=_TRUST)
    @click.option(
        "--callback", cls=Option, section="Run", multiple=True, metavar="TRACKER", help=CALLBACK_HELP
    )
    @click.option("--dry-run", cls=Option, section="Run", is_flag=True, help=_DRY_RUN)
    def command(
        methods: list[str],
        code: tuple[str, ...],
        trust: bool,
        callback: tuple[str, ...],
        dry_run: bool,
        **options: Any,
    ) -> int:
        raw = collect_options(methods, options)
        spec = parse_sweep(raw)
        if spec is not None:
            return _run_sweep(spec, callback, single=single, dry_run=dry_run)
        permission = Permission(code, trust)
        if dry_run:
            return _print_preview(raw, permission, single=single)
        return _run_and_print(raw, permission, callback, click.get_current_context().obj, single=single)

    return command


run = _build_command("run", "Run one method: feddbe run fedavg+dbe --rounds 20", single=True)
compare = _build_command("compare", "Run several methods on the same data and compare them.", single=False)


def _run_and_print(
    raw: RawOptions, permission: Permission, trackers: Sequence[str], command_line: list[str], *, single: bool
) -> int:
    from feddbe.callbacks.display import CliProgress
    from feddbe.callbacks.tracking import make_callback
    from feddbe.runs.build_document import divergence_error
    from feddbe.runs.start import run_requests
    from feddbe.studies.sweep import name_folder, record_comparison

    as_json = raw.values.get("json") is True
    progress = CliProgress([make_callback(trackers)], quiet=raw.values.get("quiet") is True)
    try:
        with sigterm_as_interrupt(), progress:
            documents = run_requests(
                raw if single else name_folder(raw),
                single=single,
                callback=progress,
                hashes=as_json,
                allowed=permission,
            )
    except KeyboardInterrupt:
        return print_error(_stop_message(progress, command_line, single=single), 130)
    folder = progress.output_dir(single=single)
    if not single:
        folder = record_comparison(raw, documents)
    _print_finished_runs(documents, folder, as_json=as_json, single=single)
    for document in documents:
        error = divergence_error(document)
        if error is not None:
            print_error(f"{document['method']}: {error}; see feddbe show {folder}", error.exit_code)
    return DivergenceError.exit_code if any(document["diverged"] for document in documents) else 0


def _stop_message(progress: CliProgress, command_line: Sequence[str], *, single: bool) -> str:
    """Return the message after Ctrl-C: the last stored round, and the command that resumes."""
    from feddbe.runs.build_document import load_document

    if progress.folder is None:
        return "stopped before anything was written"
    rounds = load_document(progress.folder, hashes=False)["rounds"]
    status = f"after round {rounds[-1]['round']}, which is kept" if rounds else "before the first round"
    words = [word for word in command_line if word != "--resume"]
    if not any(re.match(r"--out(=|$)|-o", word) for word in words):
        words += ["--out", str(progress.output_dir(single=single))]
    return f"stopped {status}; continue with: {shlex.join(['feddbe', *words, '--resume'])}"


def _print_finished_runs(documents: list[RunDocument], folder: Path, *, as_json: bool, single: bool) -> None:
    """Print the tables or the document, and draw the figures."""
    from feddbe import api
    from feddbe.reporting.build_tables import new_clients_table, results_table

    if as_json:
        print_json(documents[0] if single else {"runs": documents})
    else:
        print_renderable(*filter(None, [results_table(documents), new_clients_table(documents)]))
    figures = api.draw(folder, documents)
    if not as_json:
        print_text()
        for path in figures:
            print_text(f"{'new' if path.stem == 'new_clients' else path.stem:<7} {path}")
        print_text(f"run     {folder}")


def _print_preview(raw: RawOptions, permission: Permission, *, single: bool) -> int:
    """Print the settings that all methods share, then those of each method, with its estimated cost."""
    from feddbe.runs.start import collect_requests, resolve_request
    from feddbe.runs.timing import preview_run

    raw = raw if single else raw._replace(name=None)
    previews = [
        preview_run(experiment)
        for request in collect_requests(raw, permission, single=single)
        for experiment in resolve_request(request, single=single or not raw.names)
    ]
    if raw.values.get("json"):
        print_json(previews[0] if single else {"experiments": previews})
        return 0
    first, *others = (preview["settings"] for preview in previews)
    common = {
        key: setting
        for key, setting in first.items()
        if not single and all(settings.get(key) == setting for settings in others)
    }
    if common:
        print_renderable(_settings_table("all methods", common))
    for preview in previews:
        specific = {
            key: setting
            for key, setting in preview["settings"].items()
            if key not in common and key != "method"
        }
        print_renderable(_settings_table(preview["method"], specific))
        print_text(_describe_estimate(preview))
        print_text(_describe_client_cost(preview))
        for note in preview["remarks"]:
            print_text(note)
    return 0


def _describe_estimate(preview: Preview) -> str:
    cost, rounds = preview["estimate"], preview["settings"]["rounds"]["value"]
    memory = f"{cost['memory_mb']:.0f} MB"
    if cost["memory_mb"] >= 1000:
        memory = f"{cost['memory_mb'] / 1000:.1f} GB"
    processes = f"{cost['workers']} workers" if cost["workers"] else "one process"
    return (
        f"estimate: {timedelta(seconds=round(cost['seconds']))} for {rounds} rounds of "
        f"{cost['seconds_per_round']:.2g} s in {processes}, {memory}; roughly, from a few batches"
    )


def _describe_client_cost(preview: Preview) -> str:
    """Return the cost of a round for a client of median size, in two lines."""
    client, trainers = preview["client"], ", ".join(preview["trainers"])
    counts = {
        "training": f" ({client['steps']} steps)",
        "evaluation": f" ({client['predictions']} predictions)",
    }
    phases = (f"{name} {ms:.2f}{counts.get(name, '')}" for name, ms in client["milliseconds"].items())
    return (
        f"trained by {trainers}; a client of median size sends {client['bytes_up']} bytes and keeps "
        f"{client['bytes_kept']}\nits round in ms: {', '.join(phases)}"
    )


def _settings_table(title: str, settings: dict[str, dict[str, Any]]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", show_header=False
    )
    for _ in range(3):
        table.add_column(overflow="fold")
    for key, setting in settings.items():
        if setting["value"] is not None:
            table.add_row(key, escape(format_value(setting["value"])), setting["from"])
    return table


def _run_sweep(spec: SweepSpec, trackers: Sequence[str], *, single: bool, dry_run: bool) -> int:
    """Run the missing runs of a sweep and print its table; with `dry_run` only list the runs."""
    from feddbe.callbacks.base import StudyCallback
    from feddbe.callbacks.display import StudyBars
    from feddbe.callbacks.tracking import make_callback, replay_documents
    from feddbe.errors import InvalidInputError
    from feddbe.studies import sweep

    if single and len(spec.methods) > 1:
        raise InvalidInputError(f"run takes one method, not {len(spec.methods)}; compare takes several")
    callbacks = make_callback(trackers)
    spec = sweep.require_validation(spec, print_note)
    plans = sweep.plan_sweep(spec, print_note)
    missing = {planned.folder for planned in plans if planned.is_missing}
    if dry_run:
        return _list_planned_runs(plans, as_json=spec.options.get("json") is True)
    study_folder = sweep.record_sweep(spec, plans)
    bars = StudyBars(len(missing))
    try:
        with sigterm_as_interrupt(), bars.bars:
            plans, failed = sweep.run_sweep(plans, StudyCallback() if spec.options.get("quiet") else bars)
    except KeyboardInterrupt:
        return print_error("stopped; finished rounds are kept, repeat the command to continue", 130)
    documents = [planned.document for planned in plans if planned.document]
    with callbacks:  # runs proceed in parallel, and trackers have one at a time
        replay_documents(documents, callbacks)
    if documents:
        _print_sweep(documents, study_folder, spec)
    for folder, error in failed.items():
        print_error(f"{folder.name}: {error}", 2)
    for planned in plans:
        if planned.document and planned.document["diverged"]:
            print_error(f"{planned.spec}: {planned.skip_reason}; see feddbe show {planned.folder}", 3)
    codes = [error.exit_code for error in failed.values() if isinstance(error, FeddbeError)]
    diverged = any(document["diverged"] for document in documents)
    return max([*codes, DivergenceError.exit_code * diverged], default=0)


def _print_sweep(documents: Sequence[RunDocument], study_folder: Path, spec: SweepSpec) -> None:
    """Print the table over seeds or the grid, and draw the curves; of a grid, those of the selected runs."""
    from feddbe.reporting import build_tables
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.reporting.run_objects import summary_table
    from feddbe.results.document import accuracy_curve

    table = summary_table(documents, is_sweep=spec.is_grid)
    runs_to_draw = build_tables.chosen_runs(documents) if spec.is_grid else documents
    path = study_folder / "curves.png"
    has_curves = any(map(accuracy_curve, runs_to_draw))
    if has_curves:
        draw(path, learning_curves(runs_to_draw))
    if spec.options.get("json"):
        print_json({"table": table.to_records(), "runs": list(documents)})
        return
    print_renderable(table)
    print_text()
    if has_curves:
        print_text(f"curves  {path}")
    print_text(f"study   {study_folder}")


def _list_planned_runs(plans: Sequence[PlannedRun], *, as_json: bool) -> int:
    runs = [{"run": str(p.spec), "folder": str(p.folder), "exists": not p.is_missing} for p in plans]
    if as_json:
        print_json({"runs": runs})
        return 0
    for run in runs:
        print_text(f"{'exists' if run['exists'] else 'to run'}  {run['run']}  {run['folder']}")
    return 0
