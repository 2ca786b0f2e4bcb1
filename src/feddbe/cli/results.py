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
    from feddbe.show.tables import RunRow

__all__ = ["check", "runs", "show"]


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
    from feddbe import api
    from feddbe.results.document import finished

    name = str(path.relative_to(root)) if path != root else path.name
    try:
        document = api.load(path, hashes=False)
    except StoreError as error:
        nothing: RunRow = {
            "name": name, "method": "-", "data": "-", "rounds": 0, "best": None, "last": None,
            "state": "damaged" if isinstance(error, Damaged) else "unreadable",
        }  # fmt: skip
        return nothing
    best, last, settings = document["best"], document["last"], document["config"]
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    return {
        "name": name,
        "method": document["method"],
        "data": Path(settings["data"]).name,
        "rounds": done,
        "best": best["accuracy"]["weighted"] if best and best["accuracy"] else None,
        "last": last["accuracy"]["weighted"] if last and last["accuracy"] else None,
        "state": "done" if finished(document) else f"{settings['rounds']} wanted",
    }


@click.command("show", cls=Command)
@click.argument("run", cls=Argument, help="folder of a run or a comparison, or its name in runs/")
@click.option("--when", default="published", help="moment: published, before, adapted or after")
@AS_JSON
def show(run: str, when: str, as_json: bool) -> int:
    """Show a run or a comparison: table and learning curves."""
    from feddbe import api
    from feddbe.results.document import at
    from feddbe.runs import folders
    from feddbe.show import chart, newcomers, represented, tables

    if when not in (moments := ("published", "before", "adapted", "after")):
        raise unknown("moment", when, moments)
    documents = [api.load(folder, hashes=as_json) for folder in folders.find_all(run)]
    if when != "published":
        documents = [at(document, when) for document in documents]
    if as_json:
        show_json(documents[0] if len(documents) == 1 else {"runs": documents})
    else:
        joined = newcomers.newcomers_table(documents)
        curves = (chart.curve(document) for document in documents)
        show_tables(tables.results_table(documents), *joined, *curves)
        for table in represented.measured_tables(documents):
            print()
            show_tables(table)
    return 0


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
            print("; ".join([f"{one['folder']}: whole, {far}", *filter(None, [one["lost"]]), *aside]))
        else:
            code = complain(wrong[0], 2)
    return code
