"""`feddbe report`: runs as an HTML page, written to a file or served while runs are in progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from feddbe.cli.command import Argument, Command, print_text
from feddbe.errors import InvalidInputError


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
        return _serve(names, port or 0)
    if port is not None:
        raise InvalidInputError(f"--port {port} has no effect without --live; add --live")
    from feddbe import api
    from feddbe.callbacks.display import MessagesOnly

    print_text(f"report  {api.report(names, out, callback=MessagesOnly())}")
    return 0


def _serve(names: Sequence[str], port: int) -> int:
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
    from feddbe.studies.record import Purpose, find_run_folders, find_studies, read_record

    studies = find_studies(name)
    if len(studies) != 1:
        return None
    if read_record(studies[0]).purpose is Purpose.SWEEP:
        raise InvalidInputError(
            f"'{name}' is a sweep, whose values are chosen at its end; use report {name} without --live"
        )
    return [folder for folder in find_run_folders(name) if RunStore.is_run(folder)]
