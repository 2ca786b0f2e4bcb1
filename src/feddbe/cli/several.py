"""`feddbe run` and `compare` with several seeds or values: what is missing is run, then all is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from feddbe.cli.output import complain, show, show_json
from feddbe.errors import Diverged, FeddbeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feddbe.options.several import Several
    from feddbe.results.document import RunDocument
    from feddbe.studies.runner import Planned

__all__ = ["carry_out"]


def carry_out(wanted: Several, *, single: bool, dry_run: bool) -> int:
    """All cells; with `dry_run` only which there are."""
    from feddbe.cli.board import Bars, stoppable
    from feddbe.errors import BadInput
    from feddbe.studies import sweep
    from feddbe.studies.runner import Board

    if single and len(wanted.methods) > 1:
        raise BadInput(f"run takes one method, not {len(wanted.methods)}; compare takes several")
    wanted = sweep.validated(wanted, _tell)
    plans = sweep.plan(wanted, _tell)
    missing = {planned.place for planned in plans if planned.missing}
    if dry_run:
        return _would_run(plans, as_json=wanted.options.get("json") is True)
    board = Bars(len(missing))
    try:
        with stoppable(), board.bars:
            plans, failed = sweep.carry_out(plans, Board() if wanted.options.get("quiet") else board)
    except KeyboardInterrupt:
        return complain("stopped; what is done is kept, and the same command goes on from there", 130)
    documents = [planned.found for planned in plans if planned.found]
    if documents:
        _show(documents, sweep.place(wanted), wanted)
    for place, error in failed.items():
        complain(f"{place.name}: {error}", 2)
    for planned in plans:
        if planned.found and planned.found["diverged"]:
            complain(f"{planned.cell}: {planned.refused}; see feddbe show {planned.place}", 3)
    codes = [error.exit_code for error in failed.values() if isinstance(error, FeddbeError)]
    diverged = any(document["diverged"] for document in documents)
    return max([*codes, Diverged.exit_code * diverged], default=0)


def _show(documents: Sequence[RunDocument], folder: Path, wanted: Several) -> None:
    """The table over seeds or over the grid, and the curves: of a grid, of what was chosen."""
    from feddbe.results.document import points
    from feddbe.show import pictures, seeds
    from feddbe.show.formats import as_rich

    drawn = seeds.choice(documents) if wanted.grid else documents
    grid = (seeds.sweep_grid if wanted.grid else seeds.seeds_grid)(documents)
    path = folder / "curves.png"
    if any(map(points, drawn)):
        pictures.curves(path, drawn)
    if wanted.options.get("json"):
        show_json({"table": grid.records(), "runs": list(documents)})
        return
    show(as_rich(grid))
    print()
    if any(map(points, drawn)):
        print(f"curves  {path}")
    print(f"runs    {folder}")


def _would_run(plans: Sequence[Planned], *, as_json: bool) -> int:
    told = [{"run": str(p.cell), "folder": str(p.place), "there": not p.missing} for p in plans]
    if as_json:
        show_json({"runs": told})
        return 0
    for one in told:
        print(f"{'there ' if one['there'] else 'to run'}  {one['run']}  {one['folder']}")
    return 0


def _tell(text: str) -> None:
    complain(text, 0)
