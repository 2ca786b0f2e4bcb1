"""`feddbe tune` and `feddbe reproduce`: values chosen on validation data, and the tables of the paper."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe import paths
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
from feddbe.config.defaults import PER_MODEL
from feddbe.config.options import Config, parse_options
from feddbe.config.parameters import format_value
from feddbe.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from feddbe.studies.paper import PaperStudy
    from feddbe.studies.reproduce import Plans
    from feddbe.studies.tune import Trial, TuneResult


_OTHERS = {"split", "resume", "new_clients", "adaptation", "keep_best"}
"""Options of a run that have no part in it."""


@click.command(
    "tune", cls=Command, params=[option for option in config_options() if option.name not in _OTHERS]
)
@click.argument("method", cls=Argument, metavar="METHOD", help="as in fedavg+dbe, without brackets")
@click.option(
    "--trials",
    cls=Option,
    section="Run",
    default=20,
    metavar="N",
    help="runs, the published values first [20]",
)
@click.option(
    "--space", cls=Option, section="Run", multiple=True, metavar="KEY=V1,V2",
    help="values to choose from, of these only; may be repeated [the paper's grids]",
)  # fmt: skip
def tune(method: str, trials: int, space: tuple[str, ...], **options: Any) -> int:
    """Search hyper-parameters on a share of the training data: feddbe tune fedavg+dbe"""
    from feddbe.callbacks.display import CliProgress
    from feddbe.reporting.build_figures import tuning_surface
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.studies.tune import tune as tune_tune

    asked = parse_options([method], options)
    watch = CliProgress(quiet=asked.config.quiet)
    try:
        with sigterm_as_interrupt(), watch:
            found = tune_tune(asked, trials=trials, space=space, callback=watch)
    except KeyboardInterrupt:
        return print_error("stopped; what is done is kept, and the same command goes on from there", 130)
    picture = found.folder / "surface.png"
    told = [(trial.values, trial.accuracy) for trial in found.trials]
    title = f"{found.method}, {asked.config.data}: {len(told)} trials"
    draw(picture, tuning_surface(found.space, told, found.published, title))
    if asked.config.json:
        trials_found = [
            {**trial.values, "accuracy": trial.accuracy, "note": trial.note} for trial in found.trials
        ]
        print_json({
            "method": found.method, "best": found.best.values, "accuracy": found.best.accuracy,
            "published": found.published, "published_accuracy": found.first.accuracy,
            "trials": trials_found, "picture": str(picture),
        })  # fmt: skip
        return 0
    _show_search(found, asked.config)
    print(f"surface  {picture}")
    return 0


def _show_search(found: TuneResult, options: Config) -> None:
    from feddbe.reporting.formatting import format_percent
    from feddbe.reporting.html import overview
    from feddbe.reporting.table import TEXT, Column, Table
    from feddbe.studies.tune import VALIDATION

    def record(title: str, trial: Trial) -> dict[str, str]:
        values = {key: format_value(trial.values[key]) for key in found.space}
        return {"": title, **values, "validation %": trial.note or format_percent(trial.accuracy)}

    columns = [Column("", kind=TEXT), *(Column(key) for key in (*found.space, "validation %"))]
    compared = [record("found", found.best), record("default", found.first)]
    others = [trial for trial in found.trials if trial is not found.best and trial is not found.first]
    others = sorted(others, key=lambda trial: -(trial.accuracy or 0.0))[:8]
    count, early = len(found.trials), sum(trial.accuracy is None for trial in found.trials)
    accuracy = "Validation accuracy after fine-tuning" if found.is_fine_tuned else "Best validation accuracy"
    words = (
        f"{accuracy}, on {options.validation or VALIDATION:g} of every client's training data; "
        f"test data took no part. {count} trials, {early} of them stopped early, with one seed: small "
        f"differences may be chance. Default: what a run has without a search.{_paper(found)}"
    )
    footer = [record("", trial) for trial in others]
    print_renderable(Table(columns, compared, note=words, footer=footer))
    name, more = found.best_name(found.best.values)
    print(f"use it   {overview.format_run_command(name, vars(options) | more | {'validation': 0.0})}")


def _paper(found: TuneResult) -> str:
    """kappa and mu of the paper, if they are searched."""
    if "kappa" not in found.space:
        return ""
    layers = {model: {"mu": 1.0, **PER_MODEL[model]["mr"]} for model in ("cnn", "resnet18", "fasttext")}
    each = (
        f"{format_value(mr['kappa'])}, {format_value(mr['mu'])} for {model}" for model, mr in layers.items()
    )
    return f" The paper's kappa, mu: {'; '.join(each)}."


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
    from feddbe.reporting.table import FORMATS
    from feddbe.studies import paper

    if scale not in _SCALES:
        raise unknown_name("scale", scale, _SCALES)
    if form not in ("text", *FORMATS):
        raise unknown_name("format", form, ("text", *FORMATS))
    if not names and not every and not listing:
        raise InvalidInputError(
            f"no experiment given; name one or more of {', '.join(paper.NAMES)}, or --all"
        )
    if rounds is not None and rounds < 1:
        raise InvalidInputError(f"rounds = {rounds}; allowed: a whole number >= 1")
    small = scale == "small"
    if small and data:
        raise InvalidInputError(f"--data {data}: --scale small has its own data, digits")
    count = trials if trials is not None else 1 if small else 3
    chosen = list(dict.fromkeys(names or paper.NAMES))
    studies = [
        paper.load_study(name, trials=count, rounds=rounds, data=data, small=small).only(only)
        for name in chosen
    ]
    folder = out or paths.RUNS_DIR / ("reproduce-small" if small else "reproduce")
    if listing:
        return _list(studies, folder)
    instead = _instead(studies, small=small, data=data)
    given = {"scale": "small" if small else None, "trials": trials, "rounds": rounds, "data": data}
    told = [f"--{name}={value}" for name, value in given.items() if value is not None]
    told += [f"--only={word}" for word in only]
    return _carry_out(studies, folder, instead, form, dry_run=dry_run, report=told if every else None)


def _instead(studies: Sequence[PaperStudy], *, small: bool, data: str | None) -> str:
    """On what they are run, if not on what was published."""
    if small:
        from feddbe.studies.paper import load_settings

        about = load_settings()["small"]
        return f"on {about['data']} with model {about['model']}, {about['rounds']} rounds"
    return f"on {data}" if data else ""


def _list(studies: Sequence[PaperStudy], folder: Path) -> int:
    from feddbe.reporting.table import TEXT, Column, Table
    from feddbe.studies.reproduce import plan_studies, study_runs
    from feddbe.studies.runner import RemainingTime

    plans, clock = plan_studies(studies, folder), RemainingTime()
    records = []
    for study in studies:
        planned = [plans[cell] for cell in study_runs([study])]
        missing = [run for run in planned if run.is_missing]
        records.append({
            "experiment": study.name,
            "what": study.title,
            "runs": len(planned),
            "done": sum(run.is_done for run in planned),
            "begun": sum(bool(run.document) for run in missing) or None,
            "no data": sum(run.experiment is None for run in planned) or None,
            "rest": str(timedelta(seconds=round(clock.left(missing)))) if missing else "-",
        })  # fmt: skip
    columns = [
        Column("experiment", kind=TEXT),
        Column("what", kind=TEXT),
        *(Column(key, hide_empty=True) for key in ("runs", "done", "begun", "no data", "rest")),
    ]
    note = (
        f"Runs in {folder}; experiments share runs. Rest: what is missing of those whose data is here would "
        "take at most, side by side on this machine, by a timed round of each kind; many stop earlier."
    )
    print_renderable(Table(columns, records, note=note))
    return 0


def _carry_out(
    studies: Sequence[PaperStudy],
    folder: Path,
    instead: str,
    form: str,
    *,
    dry_run: bool,
    report: Sequence[str] | None,
) -> int:
    from feddbe.callbacks.display import StudyBars
    from feddbe.studies import runner
    from feddbe.studies.reproduce import (
        compare_with_paper,
        plan_studies,
        run_embedding_analyses,
        run_study_analyses,
    )

    try:
        with sigterm_as_interrupt():
            plans = plan_studies(studies, folder, _tell)
            missing = {one.folder: one for one in plans.values() if one.is_missing}
            if not dry_run:
                board = StudyBars(len(missing))
                with board.bars:
                    runner.run_missing(list(plans.values()), board)
                    plans, aside = _refreshed(plans), board.aside()
                    for study in studies:
                        for problem in run_study_analyses(study, plans, quick=study.is_small, callback=aside):
                            board.say(f"feddbe: not measured: {problem}")
                        run_embedding_analyses(study, plans, aside)
                    aside.remove()
                plans = _refreshed(plans)
    except KeyboardInterrupt:
        return print_error("stopped; what is done is kept, and the same command goes on from there", 130)
    for study in studies:
        _show(study, plans, folder, instead, form, dry_run=dry_run)
    runs = list(dict.fromkeys(one.folder for one in plans.values() if one.document))
    if dry_run:
        _would_run(list(missing))
    elif report is not None and runs:
        from feddbe.reporting.html.page import write_report

        tables = {}
        for study in studies:
            if not study.figure:
                words = ["feddbe", "reproduce", study.name, *report, "--out", str(folder), "--dry-run"]
                tables[shlex.join(words)] = compare_with_paper(study, plans, instead=instead)
        path = write_report(runs, folder / "report.html", studies=tables)
        print(f"report  {path}", file=sys.stdout if form == "text" else sys.stderr)
    return 0


def _refreshed(plans: Plans) -> Plans:
    from feddbe.studies import runner

    return dict(zip(plans, runner.refresh_plans(plans.values()), strict=True))


def _show(study: PaperStudy, plans: Plans, folder: Path, instead: str, form: str, *, dry_run: bool) -> None:
    from feddbe.reporting.paper_table import paper_table, render_paper_table
    from feddbe.studies.reproduce import compare_with_paper, draw_study

    if study.figure:
        if form == "text" and not dry_run:
            print(f"{study.name}: {study.title}")
            for title, drawn in draw_study(study, plans, folder / "figures").items():
                print(f"  {title}: {drawn}")
            print()
        return
    found = compare_with_paper(study, plans, instead=instead)
    if form == "text":
        print_renderable(paper_table(found))
        print()
    else:
        print(render_paper_table(found, form))


def _would_run(places: Sequence[Path]) -> None:
    """On standard error, where it is in nobody's way."""
    for place in places:
        print(f"would run: {place}", file=sys.stderr)
    if not places:
        print("nothing is missing", file=sys.stderr)


def _tell(text: str) -> None:
    print_error(text, 0)
