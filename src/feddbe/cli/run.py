"""`feddbe run` and `feddbe compare`: run methods, or with `--dry-run` say what would be run."""

from __future__ import annotations

import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.command import (
    Argument,
    Command,
    Option,
    config_options,
    print_error,
    print_json,
    print_renderable,
    sigterm_as_interrupt,
)
from feddbe.config.options import RawOptions, parse_sweep
from feddbe.config.options import collect_options as options_given
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


_METHOD = "as in fedavg+dbe(kappa=5,mu=0.1), your own as FILE.py:CLASS, or a file with options"
_SEEDS = "several seeds: how many, as in 5, or which, as in 0,1,2; what is there is not run again"
_CODE = "with --resume: file of the run's own model or method, to execute if its content is the run's"
_TRUST = "with --resume: the run is your own, execute the files that it names"
_DRY_RUN = "only tell what would be run, where each value comes from, and about what it costs"


def _command(name: str, words: str, *, single: bool) -> click.Command:
    @click.command(name, cls=Command, help=words, params=config_options())
    @click.argument(
        "methods",
        cls=Argument,
        nargs=-1,
        metavar=f"[METHOD|FILE.toml]{'' if single else '...'}",
        help=_METHOD,
    )
    @click.option("--seeds", cls=Option, section="Training", metavar="N|LIST", help=_SEEDS)
    @click.option("--code", cls=Option, section="Run", multiple=True, metavar="FILE.py", help=_CODE)
    @click.option("--trust", cls=Option, section="Run", is_flag=True, help=_TRUST)
    @click.option("--dry-run", cls=Option, section="Run", is_flag=True, help=_DRY_RUN)
    def command(
        methods: list[str],
        code: tuple[str, ...],
        trust: bool,
        dry_run: bool,
        **options: Any,
    ) -> int:
        given = options_given(methods, options)
        if wanted := parse_sweep(given):
            return carry_out(wanted, single=single, dry_run=dry_run)
        allowed = Permission(code, trust)
        if dry_run:
            return _preview(given, allowed, single=single)
        return _carry_out(given, allowed, click.get_current_context().obj, single=single)

    return command


run = _command("run", "Run one method: feddbe run fedavg+dbe --rounds 20", single=True)
compare = _command(
    "compare", "Run several methods on the same data and show them side by side.", single=False
)


def _carry_out(raw: RawOptions, allowed: Permission, typed: list[str], *, single: bool) -> int:
    from feddbe.callbacks.display import CliProgress
    from feddbe.runs.execution import run_requests

    as_json = raw.values.get("json") is True
    watch = CliProgress(quiet=raw.values.get("quiet") is True)
    try:
        with sigterm_as_interrupt(), watch:
            documents = run_requests(raw, single=single, callback=watch, hashes=as_json, allowed=allowed)
    except KeyboardInterrupt:
        return print_error(_stop_message(watch, typed, single=single), 130)
    folder = watch.root(single=single)
    _show(documents, folder, as_json=as_json, single=single)
    for document in documents:
        if mark := document["diverged"]:
            error = DivergenceError(mark["client"], mark["round"], mark["what"], float(mark["value"]))
            print_error(f"{document['method']}: {error}; see feddbe show {folder}", error.exit_code)
    return DivergenceError.exit_code if any(document["diverged"] for document in documents) else 0


def _stop_message(watch: CliProgress, typed: Sequence[str], *, single: bool) -> str:
    """Return what to print after Ctrl-C: the last stored round, and the command that resumes."""
    from feddbe.runs import summary

    if watch.folder is None:
        return "stopped before anything was written"
    rounds = summary.load_document(watch.folder, hashes=False)["rounds"]
    progress = f"after round {rounds[-1]['round']}, which is kept" if rounds else "before the first round"
    words = [word for word in typed if word != "--resume"]
    if not any(word.split("=")[0] == "--out" for word in words):
        words += ["--out", str(watch.root(single=single))]
    return f"stopped {progress}; continue with: {shlex.join(['feddbe', *words, '--resume'])}"


def _show(documents: list[RunDocument], folder: Path, *, as_json: bool, single: bool) -> None:
    """The table or the document, and pictures."""
    from feddbe import api
    from feddbe.reporting.tables import new_clients_table, results_table

    if as_json:
        print_json(documents[0] if single else {"runs": documents})
    else:
        shown = filter(None, [results_table(documents), new_clients_table(documents)])
        print_renderable(*shown)
    drawn = api.draw(folder, documents)
    if not as_json:
        print()
        for path in drawn:
            print(f"{'new' if path.stem == 'new_clients' else path.stem:<7} {path}")
        print(f"run     {folder}")


def _preview(raw: RawOptions, allowed: Permission, *, single: bool) -> int:
    """What all methods share once, then each with what it has of its own."""
    from feddbe.runs.execution import collect_requests, resolve_request
    from feddbe.runs.timing import preview_run

    requests, is_alone = collect_requests(raw, allowed, single=single), single or not raw.names
    previews = [
        preview_run(experiment)
        for request in requests
        for experiment in resolve_request(request, single=is_alone)
    ]
    if raw.values.get("json"):
        print_json(previews[0] if single else {"experiments": previews})
        return 0
    first, *others = (one["settings"] for one in previews)
    common = {k: s for k, s in first.items() if not single and all(o.get(k) == s for o in others)}
    if common:
        print_renderable(_settings("all methods", common))
    for one in previews:
        own = {k: s for k, s in one["settings"].items() if k not in common and k != "method"}
        cost, rounds = one["estimate"], one["settings"]["rounds"]["value"]
        memory = (
            f"{cost['memory_mb'] / 1000:.1f} GB"
            if cost["memory_mb"] >= 1000
            else f"{cost['memory_mb']:.0f} MB"
        )
        where = f"{cost['workers']} workers" if cost["workers"] else "one process"
        print_renderable(_settings(one["method"], own))
        print(
            f"estimate: {timedelta(seconds=round(cost['seconds']))} for {rounds} rounds of "
            f"{cost['seconds_per_round']:.2g} s in {where}, {memory}; roughly, from a few batches"
        )
        print(_client_cost(one))
        for remark in one["remarks"]:
            print(remark)
    return 0


def _client_cost(preview: Preview) -> str:
    """Return in two lines how a client of middling size spends a round."""
    client, trainers = preview["client"], ", ".join(preview["trainers"])
    counts = {
        "training": f" ({client['steps']} steps)",
        "evaluation": f" ({client['predictions']} predictions)",
    }
    phases = (f"{name} {ms:.2f}{counts.get(name, '')}" for name, ms in client["milliseconds"].items())
    return (
        f"trained by {trainers}; a client of middling size sends {client['bytes_up']} bytes and keeps "
        f"{client['bytes_kept']}\nits round in ms: {', '.join(phases)}"
    )


def _settings(title: str, settings: dict[str, dict[str, Any]]) -> RenderableType:
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


def carry_out(spec: SweepSpec, *, single: bool, dry_run: bool) -> int:
    """All cells; with `dry_run` only which there are."""
    from feddbe.callbacks.base import StudyCallback
    from feddbe.callbacks.display import StudyBars
    from feddbe.errors import InvalidInputError
    from feddbe.studies import sweep

    if single and len(spec.methods) > 1:
        raise InvalidInputError(f"run takes one method, not {len(spec.methods)}; compare takes several")
    spec = sweep.with_validation(spec, _tell)
    plans = sweep.plan_sweep(spec, _tell)
    missing = {planned.folder for planned in plans if planned.is_missing}
    if dry_run:
        return _would_run(plans, as_json=spec.options.get("json") is True)
    board = StudyBars(len(missing))
    try:
        with sigterm_as_interrupt(), board.bars:
            plans, failed = sweep.run_sweep(plans, StudyCallback() if spec.options.get("quiet") else board)
    except KeyboardInterrupt:
        return print_error("stopped; what is done is kept, and the same command goes on from there", 130)
    documents = [planned.document for planned in plans if planned.document]
    if documents:
        _several_show(documents, sweep.sweep_folder(spec), spec)
    for place, error in failed.items():
        print_error(f"{place.name}: {error}", 2)
    for planned in plans:
        if planned.document and planned.document["diverged"]:
            print_error(f"{planned.spec}: {planned.skip_reason}; see feddbe show {planned.folder}", 3)
    codes = [error.exit_code for error in failed.values() if isinstance(error, FeddbeError)]
    diverged = any(document["diverged"] for document in documents)
    return max([*codes, DivergenceError.exit_code * diverged], default=0)


def _several_show(documents: Sequence[RunDocument], folder: Path, spec: SweepSpec) -> None:
    """The table over seeds or over the grid, and the curves: of a grid, of what was chosen."""
    from feddbe.reporting import tables
    from feddbe.reporting.build_figures import learning_curves
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.results.document import accuracy_curve

    drawn = tables.chosen_runs(documents) if spec.is_grid else documents
    table = (tables.sweep_table if spec.is_grid else tables.seeds_table)(documents)
    path = folder / "curves.png"
    if any(map(accuracy_curve, drawn)):
        draw(path, learning_curves(drawn))
    if spec.options.get("json"):
        print_json({"table": table.to_records(), "runs": list(documents)})
        return
    print_renderable(table)
    print()
    if any(map(accuracy_curve, drawn)):
        print(f"curves  {path}")
    print(f"runs    {folder}")


def _would_run(plans: Sequence[PlannedRun], *, as_json: bool) -> int:
    told = [{"run": str(p.spec), "folder": str(p.folder), "there": not p.is_missing} for p in plans]
    if as_json:
        print_json({"runs": told})
        return 0
    for one in told:
        print(f"{'there ' if one['there'] else 'to run'}  {one['run']}  {one['folder']}")
    return 0


def _tell(text: str) -> None:
    print_error(text, 0)
