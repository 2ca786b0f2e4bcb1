"""`feddbe reproduce`: the paper's tables and figures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from feddbe import paths
from feddbe.cli.command import Argument, Command, complain, show
from feddbe.errors import BadInput, unknown

if TYPE_CHECKING:
    from feddbe.studies.paper import Study
    from feddbe.studies.reproduce import Plans


_SCALES = ("published", "small")


@click.command("reproduce", cls=Command)
@click.argument("names", cls=Argument, nargs=-1, metavar="[NAME]...", help="experiments; --list names them")
@click.option("--all", "every", is_flag=True, help="all of them; ends with a report")
@click.option(
    "--list", "listing", is_flag=True, help="what there is, what has been run, what the rest would take here"
)
@click.option("--trials", type=int, metavar="N", help="trials, with seeds 0 to N - 1 [3; small: 1]")
@click.option(
    "--only", multiple=True, metavar="CELL", help="a line, a column or LINE/COLUMN; * is anything; repeated"
)
@click.option("--rounds", type=int, metavar="N", help="at most so many rounds; what differs is marked")
@click.option("--data", metavar="NAME", help="other data than the published; what differs is marked")
@click.option("--scale", default="published", metavar="NAME", help="published, or small: digits, in minutes")
@click.option("-o", "--out", metavar="DIR", type=Path, help="where the runs are [runs/reproduce]")
@click.option("--dry-run", is_flag=True, help="run nothing: tables of what is there, and what would be run")
@click.option(
    "--format", "form", default="text", metavar="NAME", help="text, markdown, latex, csv or json [text]"
)
def reproduce(
    names: Sequence[str],
    every: bool,
    listing: bool,
    trials: int | None,
    only: Sequence[str],
    rounds: int | None,
    data: str | None,
    scale: str,
    out: Path | None,
    dry_run: bool,
    form: str,
) -> int:
    """Run what a table or figure of the paper is made of, and show it beside the paper's."""
    from feddbe.reporting.formatting import FORMATS
    from feddbe.studies import paper

    if scale not in _SCALES:
        raise unknown("scale", scale, _SCALES)
    if form not in ("text", *FORMATS):
        raise unknown("format", form, ("text", *FORMATS))
    if not names and not every and not listing:
        raise BadInput(f"no experiment given; name one or more of {', '.join(paper.NAMES)}, or --all")
    if rounds is not None and rounds < 1:
        raise BadInput(f"rounds = {rounds}; allowed: a whole number >= 1")
    small = scale == "small"
    if small and data:
        raise BadInput(f"--data {data}: --scale small has its own data, digits")
    count = trials if trials is not None else 1 if small else 3
    chosen = list(dict.fromkeys(names or paper.NAMES))
    studies = [
        paper.read(name, trials=count, rounds=rounds, data=data, small=small).only(only) for name in chosen
    ]
    folder = out or paths.RUNS / ("reproduce-small" if small else "reproduce")
    if listing:
        return _list(studies, folder)
    instead = _instead(studies, small=small, data=data)
    given = {"scale": "small" if small else None, "trials": trials, "rounds": rounds, "data": data}
    told = [f"--{name}={value}" for name, value in given.items() if value is not None]
    told += [f"--only={word}" for word in only]
    return _carry_out(studies, folder, instead, form, dry_run=dry_run, report=told if every else None)


def _instead(studies: Sequence[Study], *, small: bool, data: str | None) -> str:
    """On what they are run, if not on what was published."""
    if small:
        from feddbe.studies.paper import settings

        about = settings()["small"]
        return f"on {about['data']} with model {about['model']}, {about['rounds']} rounds"
    return f"on {data}" if data else ""


def _list(studies: Sequence[Study], folder: Path) -> int:
    from feddbe.reporting.formatting import caption, plain_table
    from feddbe.studies.reproduce import cells_of, plan
    from feddbe.studies.runner import Clock

    plans, clock = plan(studies, folder), Clock()
    rows, rest = dict[str, list[int]](), dict[str, str]()
    for study in studies:
        mine = [plans[cell] for cell in cells_of([study])]
        missing = [one for one in mine if one.missing]
        begun, absent = sum(bool(one.found) for one in missing), sum(one.experiment is None for one in mine)
        rows[study.name] = [len(mine), sum(one.done for one in mine), begun, absent]
        rest[study.name] = str(timedelta(seconds=round(clock.left(missing)))) if missing else "-"
    wanted = [0, 1, *(index for index in (2, 3) if any(row[index] for row in rows.values()))]
    table = plain_table(gap=2)
    table.add_column("experiment", no_wrap=True)
    table.add_column("what", overflow="fold")
    for index in wanted:
        table.add_column(("runs", "done", "begun", "no data")[index], justify="right", no_wrap=True)
    table.add_column("rest", justify="right", no_wrap=True)
    for study in studies:
        numbers = [str(rows[study.name][index]) for index in wanted]
        table.add_row(study.name, study.title, *numbers, rest[study.name])
    table.caption = caption(
        f"Runs in {folder}; experiments share runs. Rest: what is missing of those whose data is here would "
        "take at most, side by side on this machine, by a timed round of each kind; many stop earlier."
    )
    show(table)
    return 0


def _carry_out(
    studies: Sequence[Study],
    folder: Path,
    instead: str,
    form: str,
    *,
    dry_run: bool,
    report: Sequence[str] | None,
) -> int:
    from feddbe.cli.progress import Bars, stoppable
    from feddbe.studies import runner
    from feddbe.studies.reproduce import compared, measure, measure_embeddings, plan

    try:
        with stoppable():
            plans = plan(studies, folder, _tell)
            missing = {one.place: one for one in plans.values() if one.missing}
            if not dry_run:
                board = Bars(len(missing))
                with board.bars:
                    runner.run(list(plans.values()), board)
                    plans, aside = _refreshed(plans), board.aside()
                    for study in studies:
                        for problem in measure(study, plans, quick=study.is_small, watch=aside):
                            board.say(f"feddbe: not measured: {problem}")
                        measure_embeddings(study, plans, aside)
                    aside.remove()
                plans = _refreshed(plans)
    except KeyboardInterrupt:
        return complain("stopped; what is done is kept, and the same command goes on from there", 130)
    for study in studies:
        _show(study, plans, folder, instead, form, dry_run=dry_run)
    runs = list(dict.fromkeys(one.place for one in plans.values() if one.found))
    if dry_run:
        _would_run(list(missing))
    elif report is not None and runs:
        from feddbe.reporting.html.page import write_report

        tables = {}
        for study in studies:
            if not study.figure:
                words = ["feddbe", "reproduce", study.name, *report, "--out", str(folder), "--dry-run"]
                tables[shlex.join(words)] = compared(study, plans, instead=instead)
        path = write_report(runs, folder / "report.html", studies=tables)
        print(f"report  {path}", file=sys.stdout if form == "text" else sys.stderr)
    return 0


def _refreshed(plans: Plans) -> Plans:
    from feddbe.studies import runner

    return dict(zip(plans, runner.refresh(plans.values()), strict=True))


def _show(study: Study, plans: Plans, folder: Path, instead: str, form: str, *, dry_run: bool) -> None:
    from feddbe.reporting.paper_table import compared_table, written_out
    from feddbe.studies.reproduce import compared, draw

    if study.figure:
        if form == "text" and not dry_run:
            print(f"{study.name}: {study.title}")
            for title, drawn in draw(study, plans, folder / "figures").items():
                print(f"  {title}: {drawn}")
            print()
        return
    found = compared(study, plans, instead=instead)
    if form == "text":
        show(compared_table(found))
        print()
    else:
        print(written_out(found, form))


def _would_run(places: Sequence[Path]) -> None:
    """On standard error, where it is in nobody's way."""
    for place in places:
        print(f"would run: {place}", file=sys.stderr)
    if not places:
        print("nothing is missing", file=sys.stderr)


def _tell(text: str) -> None:
    complain(text, 0)
