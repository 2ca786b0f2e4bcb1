"""`feddbe run` and `feddbe compare`: run methods, or with `--dry-run` say what would be run."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.command import Argument, Command, Option, config_options
from feddbe.cli.output import complain, show, show_json
from feddbe.errors import Diverged
from feddbe.options import config
from feddbe.options.config import Given
from feddbe.options.grammar import written
from feddbe.options.permission import Permission
from feddbe.options.several import several

if TYPE_CHECKING:
    from rich.console import RenderableType

    from feddbe.results.document import RunDocument

__all__ = ["compare", "run"]

_METHOD = "as in fedavg+dbe(kappa=5,mu=0.1), your own as FILE.py:CLASS, or a file with options"
_SET = "any option, over that of a file; may be repeated"
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
    @click.option(
        "--set", "settings", cls=Option, section="Run", multiple=True, metavar="KEY=VALUE", help=_SET
    )
    @click.option("--code", cls=Option, section="Run", multiple=True, metavar="FILE.py", help=_CODE)
    @click.option("--trust", cls=Option, section="Run", is_flag=True, help=_TRUST)
    @click.option("--dry-run", cls=Option, section="Run", is_flag=True, help=_DRY_RUN)
    def command(
        methods: list[str],
        settings: list[str],
        code: tuple[str, ...],
        trust: bool,
        dry_run: bool,
        **options: Any,
    ) -> int:
        given = config.given(methods, options, settings)
        if wanted := several(given):
            from feddbe.cli.several import carry_out

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


def _carry_out(given: Given, allowed: Permission, typed: list[str], *, single: bool) -> int:
    from feddbe import api
    from feddbe.cli.board import stoppable
    from feddbe.cli.progress import Following

    as_json = given.values.get("json") is True
    watch = Following(quiet=given.values.get("quiet") is True)
    try:
        with stoppable(), watch:
            documents = api.carry_out_all(given, single=single, watch=watch, hashes=as_json, allowed=allowed)
    except KeyboardInterrupt:
        return complain(watch.stopped(typed, single=single), 130)
    folder = watch.root(single=single)
    _show(documents, folder, as_json=as_json, single=single)
    for document in documents:
        if mark := document["diverged"]:
            error = Diverged(mark["client"], mark["round"], mark["what"], float(mark["value"]))
            complain(f"{document['method']}: {error}; see feddbe show {folder}", error.exit_code)
    return Diverged.exit_code if any(document["diverged"] for document in documents) else 0


def _show(documents: list[RunDocument], folder: Path, *, as_json: bool, single: bool) -> None:
    """The table or the document, and pictures."""
    from feddbe import api
    from feddbe.show import newcomers, tables

    if as_json:
        show_json(documents[0] if single else {"runs": documents})
    else:
        show(tables.results_table(documents), *newcomers.newcomers_table(documents))
    drawn = api.draw(folder, documents)
    if not as_json:
        print()
        for path in drawn:
            print(f"{'new' if path.stem == 'newcomers' else path.stem:<7} {path}")
        print(f"run     {folder}")


def _preview(given: Given, allowed: Permission, *, single: bool) -> int:
    """What all methods share once, then each with what it has of its own."""
    from feddbe import api
    from feddbe.runs.preview import preview

    wanted, alone = api.wanted(given, single=single, allowed=allowed), single or not given.names
    previews = [preview(experiment) for asked in wanted for experiment in api.resolve(asked, single=alone)]
    if given.values.get("json"):
        show_json(previews[0] if single else {"experiments": previews})
        return 0
    first, *others = (one["settings"] for one in previews)
    common = {k: s for k, s in first.items() if not single and all(o.get(k) == s for o in others)}
    if common:
        show(_settings("all methods", common))
    for one in previews:
        own = {k: s for k, s in one["settings"].items() if k not in common and k != "method"}
        cost, rounds = one["estimate"], one["settings"]["rounds"]["value"]
        memory = (
            f"{cost['memory_mb'] / 1000:.1f} GB"
            if cost["memory_mb"] >= 1000
            else f"{cost['memory_mb']:.0f} MB"
        )
        where = f"{cost['workers']} workers" if cost["workers"] else "one process"
        show(_settings(one["method"], own))
        print(
            f"estimate: {timedelta(seconds=round(cost['seconds']))} for {rounds} rounds of "
            f"{cost['seconds_per_round']:.2g} s in {where}, {memory}; roughly, from a few batches"
        )
        for remark in one["remarks"]:
            print(remark)
    return 0


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
            table.add_row(key, escape(written(setting["value"])), setting["from"])
    return table
