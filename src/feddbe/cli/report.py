"""`feddbe report`: runs as a page to read, in a file or while they go on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from feddbe.cli.command import Argument, Command
from feddbe.errors import InvalidInputError


@click.command("report", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/; with --live any folder with runs in it",
)  # fmt: skip
@click.option("-o", "--out", metavar="FILE", type=Path, help="the page [report.html in the first RUN]")
@click.option("--live", is_flag=True, help="serve it to this machine instead; it follows runs that go on")
@click.option("--port", type=int, metavar="N", help="with --live: where [any that is free]")
def report(names: tuple[str, ...], out: Path | None, live: bool, port: int | None) -> int:
    """Write runs as one page that opens anywhere: tables, curves, clients, representations, settings."""
    if live:
        if out is not None:
            raise InvalidInputError(f"--out {out}: with --live nothing is written; leave out one of them")
        return _serve(names, port or 0)
    if port is not None:
        raise InvalidInputError(f"--port {port}: nothing is served without --live; add it")
    from feddbe.reporting.html.page import write_report
    from feddbe.runs import folders

    found = [folders.resolve_runs(name) for name in names]
    first = found[0][0] if len(found[0]) == 1 else found[0][0].parent
    every = dict.fromkeys(folder for several in found for folder in several)
    print(f"report  {write_report(list(every), out or first / 'report.html')}")
    return 0


def _serve(names: Sequence[str], port: int) -> int:
    from feddbe.paths import expand_path
    from feddbe.reporting.html.live import serve
    from feddbe.runs import folders

    def now() -> list[Path]:
        """A folder that is there may have no run yet, and more later."""
        found = [
            folders.list_runs(place) if (place := expand_path(name)).is_dir() else folders.resolve_runs(name)
            for name in names
        ]
        return list(dict.fromkeys(folder for several in found for folder in several))

    now()  # what is not there at all is said at once
    with suppress(KeyboardInterrupt):
        serve(now, port, lambda address: print(f"report  {address}  (Ctrl-C ends it)", flush=True))
    return 0
