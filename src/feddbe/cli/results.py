"""`feddbe runs`, `feddbe show` and `feddbe check`: what has been run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from feddbe.cli.command import Argument, Command
from feddbe.cli.output import AS_JSON, complain, show_json
from feddbe.cli.output import show as show_tables
from feddbe.errors import Damaged, StoreError, unknown

if TYPE_CHECKING:
    from feddbe.results.document import RunDocument
    from feddbe.show.formats import Grid
    from feddbe.show.tables import RunRow

__all__ = ["check", "runs", "show"]

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
    from feddbe.runs import folders
    from feddbe.show import tables

    folder = where or folders.RUNS
    rows = [_row(path, folder) for path in folders.listing(folder)]
    if as_json:
        show_json({"runs": rows})
    elif rows:
        show_tables(tables.runs_table(rows))
    else:
        print(f"no runs in {folder}/; start one with: feddbe run fedavg+dbe")
    return 0


def _row(path: Path, root: Path) -> RunRow:
    from feddbe.results.document import ending
    from feddbe.results.extent import finished
    from feddbe.runs import summary

    name = str(path.relative_to(root)) if path != root else path.name
    try:
        document = summary.load(path, hashes=False)
    except StoreError as error:
        nothing: RunRow = {
            "name": name, "method": "-", "data": "-", "seed": None, "begun": "", "rounds": 0,
            "best": None, "last": None, "state": "damaged" if isinstance(error, Damaged) else "unreadable",
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
        "state": ending(document) or ("done" if finished(document) else f"{settings['rounds']} wanted"),
    }


@click.command("show", cls=Command)
@_RUNS
@click.option("--when", default="published", help="moment: published, before, adapted or after")
@click.option("--clients", is_flag=True, help="accuracy of each client")
@click.option("--format", "form", metavar="NAME", help="print the table as csv, json, latex or markdown")
@click.option("--plot", metavar="FILE", type=Path, help="draw the learning curves: .png, .svg or .pdf")
@AS_JSON
def show(
    names: tuple[str, ...], when: str, clients: bool, form: str | None, plot: Path | None, as_json: bool
) -> int:
    """Show runs and comparisons: table and learning curves."""
    from feddbe.results.document import at
    from feddbe.runs import folders, summary
    from feddbe.show import formats, pictures

    if when not in (moments := ("published", "before", "adapted", "after")):
        raise unknown("moment", when, moments)
    if form is not None and form not in formats.FORMATS:
        raise unknown("format", form, formats.FORMATS)
    documents = [summary.load(folder, hashes=as_json) for folder in folders.each(names)]
    if when != "published":
        documents = [at(document, when) for document in documents]
    if plot is not None:
        pictures.curves(plot, documents)
    if clients:
        _show_clients(documents, form, as_json=as_json)
    elif as_json:
        show_json(documents[0] if len(documents) == 1 else {"runs": documents})
    elif form is not None:
        print(formats.render(_grid(documents, form), form), end="")
    else:
        _show_results(documents)
        if plot is not None:
            print(f"\ncurves  {plot}")
    return 0


def _grid(documents: list[RunDocument], form: str) -> Grid:
    """A row per run; for readers per experiment, where there are several seeds."""
    from feddbe.show import grids, seeds

    together = form not in _TIDY and seeds.repeated(documents)
    return seeds.seeds_grid(documents) if together else grids.results_grid(documents)


def _show_results(documents: list[RunDocument]) -> None:
    """Tables of all that there is, and the curves."""
    from feddbe.show import chart, newcomers, represented, seeds, tables
    from feddbe.show.formats import as_rich

    joined = newcomers.newcomers_table(documents)
    several = seeds.repeated(documents)
    table = as_rich(seeds.seeds_grid(documents)) if several else tables.results_table(documents)
    show_tables(table, *joined, "", chart.curves(documents))
    for table in represented.measured_tables(documents):
        print()
        show_tables(table)


def _show_clients(documents: list[RunDocument], form: str | None, *, as_json: bool) -> None:
    from feddbe.runs import per_client
    from feddbe.show import formats, grids

    found = [per_client.each(document) for document in documents]
    if as_json:
        show_json({"clients": grids.clients_grid(documents, found).records()})
    elif form is None:
        show_tables(formats.as_rich(grids.clients_side_by_side(documents, found)))
    else:
        grid = (grids.clients_grid if form in _TIDY else grids.clients_side_by_side)(documents, found)
        print(formats.render(grid, form), end="")


@click.command("check", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...", help="folders, or names in runs/"
)
@AS_JSON
def check(names: tuple[str, ...], as_json: bool) -> int:
    """Read all of a run: what is whole, and from which round it can go on."""
    from feddbe.runs import folders
    from feddbe.runs.check import check as look

    found = [look(folder) for name in names for folder in folders.find_all(name)]
    if as_json:
        show_json({"runs": found})
        return 0 if all(one["whole"] for one in found) else 2
    code = 0
    for one in found:
        wrong = [text for text in one["parts"].values() if text != "whole" and not text.startswith("not ")]
        if one["whole"]:
            far = (
                f"goes on from round {one['round']}" if (one["round"] or 0) >= 0 else "has not begun to train"
            )
            aside = [text for text in one["parts"].values() if text != "whole"]
            print("; ".join([f"{one['folder']}: whole, {far}", *aside]))
        else:
            code = complain(wrong[0], 2)
    return code
