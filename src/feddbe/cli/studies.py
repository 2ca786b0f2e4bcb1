"""`feddbe tune` and `feddbe reproduce`: hyperparameter search, and the paper's tables and figures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.base import (
    Argument,
    Choice,
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
from feddbe.config.defaults import PUBLISHED
from feddbe.config.options import NOT_TUNED, Config, parse_options
from feddbe.config.parameters import format_value
from feddbe.errors import InvalidInputError

if TYPE_CHECKING:
    from feddbe.studies.paper import PaperStudy
    from feddbe.studies.reproduce import Plans
    from feddbe.studies.tune import Trial, TuneResult


@click.command(
    "tune", cls=Command, params=[option for option in config_options() if option.name not in NOT_TUNED]
)
@click.argument("method", cls=Argument, metavar="METHOD", help="method as in fedavg+dbe, without parentheses")
@click.option(
    "--trials",
    cls=Option,
    section="Run",
    default=20,
    metavar="N",
    help="number of trials; the first has the default values [default: 20]",
)
@click.option(
    "--space", cls=Option, section="Run", multiple=True, metavar="KEY=V1,V2",
    help="values of a hyperparameter to search; may be repeated [default: the paper's grids]",
)  # fmt: skip
def tune(method: str, trials: int, space: tuple[str, ...], **options: Any) -> int:
    """Search hyperparameters on validation data: feddbe tune fedavg+dbe"""
    from feddbe.callbacks.display import CliProgress
    from feddbe.reporting.build_figures import tuning_surface
    from feddbe.reporting.matplotlib_backend import draw
    from feddbe.studies import tune as search

    request = parse_options([method], options)
    progress = CliProgress(quiet=request.config.quiet)
    try:
        with sigterm_as_interrupt(), progress:
            result = search.tune(request, trials=trials, space=space, callback=progress)
    except KeyboardInterrupt:
        return print_error("stopped; finished trials are kept, repeat the command to continue", 130)
    picture = result.folder / "surface.png"
    points = [(trial.values, trial.accuracy) for trial in result.trials]
    title = f"{result.method}, {request.config.data}: {len(points)} trials"
    draw(picture, tuning_surface(result.space, points, result.published, title))
    if request.config.json:
        records = [
            {**trial.values, "accuracy": trial.accuracy, "note": trial.note} for trial in result.trials
        ]
        print_json({
            "method": result.method, "best": result.best.values, "accuracy": result.best.accuracy,
            "published": result.published, "published_accuracy": result.published_trial.accuracy,
            "trials": records, "picture": str(picture),
        })  # fmt: skip
        return 0
    print_tune_result(result, request.config)
    print_text(f"surface  {picture}")
    return 0


def print_tune_result(result: TuneResult, options: Config) -> None:
    """Print the best values of a search, the default ones, and the next best trials."""
    from feddbe.reporting.html import sections
    from feddbe.reporting.table import TEXT, Column, Table, format_percent
    from feddbe.studies.tune import VALIDATION

    def record(title: str, trial: Trial) -> dict[str, str]:
        values = {key: format_value(trial.values[key]) for key in result.space}
        return {"": title, **values, "validation %": trial.note or format_percent(trial.accuracy)}

    columns = [Column("", kind=TEXT), *(Column(key) for key in (*result.space, "validation %"))]
    compared = [record("best", result.best), record("default", result.published_trial)]
    others = [
        trial for trial in result.trials if trial is not result.best and trial is not result.published_trial
    ]
    others = sorted(others, key=lambda trial: -(trial.accuracy or 0.0))[:8]
    count, pruned = len(result.trials), sum(trial.accuracy is None for trial in result.trials)
    accuracy = "Validation accuracy after fine-tuning" if result.is_fine_tuned else "Best validation accuracy"
    note = (
        f"{accuracy}, on {options.validation or VALIDATION:g} of every client's training data; test data is "
        f"not used. {count} trials, {pruned} of them stopped early, with one seed: small differences may be "
        f"chance. Default: the values of a run without a search.{_paper_values(result)}"
    )
    footer = [record("", trial) for trial in others]
    print_renderable(Table(columns, compared, note=note, footer=footer))
    name, changes = result.method_with(result.best.values)
    print_text(f"use it   {sections.format_run_command(name, vars(options) | changes | {'validation': 0.0})}")


def _paper_values(result: TuneResult) -> str:
    """Return kappa and mu of the paper, if they are searched."""
    if "kappa" not in result.space:
        return ""
    texts = []
    for model in ("cnn", "resnet18", "fasttext"):
        mr = {"mu": 1.0, **PUBLISHED[model]["mr"]}
        texts.append(f"{format_value(mr['kappa'])}, {format_value(mr['mu'])} for {model}")
    return f" The paper's kappa, mu: {'; '.join(texts)}."


_FORMATS = ("text", "csv", "json", "latex", "markdown")


@click.command("reproduce", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, metavar="[NAME]...", help="experiments; --list prints their names"
)
@click.option("--all", "is_all", is_flag=True, help="run all experiments, and write a report")
@click.option(
    "--list", "is_list", is_flag=True, help="list experiments, finished runs and the remaining time"
)
@click.option(
    "--trials", type=int, metavar="N", help="number of trials, with seeds 0 to N - 1 [default: 3; small 1]"
)
@click.option(
    "--only", multiple=True, metavar="CELL",
    help="a row, a column or ROW/COLUMN of the table; * matches anything; may be repeated",
)  # fmt: skip
@click.option("--rounds", type=int, metavar="N", help="maximum number of rounds; deviations are marked")
@click.option("--data", metavar="NAME", help="other data than the published; deviations are marked")
@click.option(
    "--scale", default="published", type=Choice(("published", "small")),
    help="published, or small: on digits, in minutes [default: published]",
)  # fmt: skip
@click.option("-o", "--out", metavar="DIR", type=Path, help="folder of the runs [default: runs/reproduce]")
@click.option(
    "--dry-run", is_flag=True, help="run nothing; print tables of existing runs, and the missing runs"
)
@click.option(
    "--format", "format_", default="text", type=Choice(_FORMATS), help="format of the tables [default: text]"
)
def reproduce(
    names: Sequence[str],
    is_all: bool,
    is_list: bool,
    trials: int | None,
    only: Sequence[str],
    rounds: int | None,
    data: str | None,
    scale: str,
    out: Path | None,
    dry_run: bool,
    format_: str,
) -> int:
    """Run the experiments of a table or figure of the paper, and print it next to the paper's numbers."""
    from feddbe.studies import paper
    from feddbe.studies.reproduce import load_studies, study_folder

    if not names and not is_all and not is_list:
        raise InvalidInputError(
            f"no experiment given; name one or more of {', '.join(paper.NAMES)}, or --all"
        )
    small = scale == "small"
    studies = load_studies(
        names or paper.NAMES, trials=trials, only=only, rounds=rounds, data=data, small=small
    )
    folder = out or study_folder(small=small)
    if is_list:
        return _print_studies(studies, folder)
    options = {"scale": "small" if small else None, "trials": trials, "rounds": rounds, "data": data}
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    arguments += [f"--only={cell}" for cell in only]
    report = arguments if is_all else None
    return _run_studies(studies, folder, format_, dry_run=dry_run, report=report)


def _print_studies(studies: Sequence[PaperStudy], folder: Path) -> int:
    from feddbe.reporting.table import TEXT, Column, Table
    from feddbe.studies.reproduce import plan_studies, study_specs
    from feddbe.studies.runner import RemainingTimeEstimator

    plans, clock = plan_studies(studies, folder), RemainingTimeEstimator()
    records = []
    for study in studies:
        planned = [plans[cell] for cell in study_specs([study])]
        missing = [run for run in planned if run.is_missing]
        records.append({
            "experiment": study.name,
            "title": study.title,
            "runs": len(planned),
            "done": sum(run.is_done for run in planned),
            "begun": sum(bool(run.document) for run in missing) or None,
            "no data": sum(run.experiment is None and run.is_data_missing for run in planned) or None,
            "refused": sum(run.experiment is None and not run.is_data_missing for run in planned) or None,
            "remaining": str(timedelta(seconds=round(clock.estimate_seconds(missing)))) if missing else "-",
        })  # fmt: skip
    columns = [
        Column("experiment", kind=TEXT),
        Column("title", kind=TEXT),
        *(
            Column(key, hide_empty=True)
            for key in ("runs", "done", "begun", "no data", "refused", "remaining")
        ),
    ]
    note = (
        f"Runs in {folder}; experiments share runs. Remaining: upper bound of the time for missing runs with "
        "available data, in parallel on this machine, from a timed round of each kind, without "
        "analyses such as MDL; many stop earlier."
    )
    print_renderable(Table(columns, records, note=note))
    return 0


def _run_studies(
    studies: Sequence[PaperStudy],
    folder: Path,
    format_: str,
    *,
    dry_run: bool,
    report: Sequence[str] | None,
) -> int:
    from feddbe.callbacks.display import StudyBars
    from feddbe.studies.reproduce import compare_with_paper, plan_studies, record_study, run_studies

    study_folders: dict[str, Path] = {}
    try:
        with sigterm_as_interrupt():
            plans = plan_studies(studies, folder, print_note)
            missing = list(dict.fromkeys(planned.folder for planned in plans.values() if planned.is_missing))
            if not dry_run:
                study_folders = {study.name: record_study(study, plans, folder) for study in studies}
                bars = StudyBars(len(missing))
                with bars.bars:
                    plans = run_studies(studies, plans, bars)
    except KeyboardInterrupt:
        return print_error("stopped; finished rounds are kept, repeat the command to continue", 130)
    for study in studies:
        _print_study(study, plans, study_folders.get(study.name), format_)
    runs = list(dict.fromkeys(planned.folder for planned in plans.values() if planned.document))
    if dry_run:
        _print_missing(missing)
    elif report is not None and runs:
        from feddbe.reporting.html.page import write_report

        tables = {}
        for study in studies:
            if not study.figure:
                words = ["feddbe", "reproduce", study.name, *report, "--out", str(folder), "--dry-run"]
                tables[shlex.join(words)] = compare_with_paper(study, plans)
        path = write_report(runs, folder / "report.html", studies=tables)
        print_text(f"report  {path}", file=sys.stdout if format_ == "text" else sys.stderr)
    return 0


def print_paper_study(study_folder: Path) -> None:
    """Print the table or figure of a record, from the runs that exist."""
    from feddbe.studies.reproduce import plan_studies, reopen_study
    from feddbe.studies.study_record import read_record

    study = reopen_study(read_record(study_folder), study_folder)
    plans = plan_studies([study], study_folder.parent, print_note)
    _print_study(study, plans, study_folder, "text")


def _print_study(study: PaperStudy, plans: Plans, figures_dir: Path | None, format_: str) -> None:
    """Print a table, or draw figures into a folder; without a folder nothing is drawn."""
    from feddbe.reporting.paper_table import paper_table, render_paper_table
    from feddbe.studies.reproduce import compare_with_paper, draw_study

    if study.figure:
        if format_ == "text" and figures_dir is not None:
            print_text(f"{study.name}: {study.title}")
            for title, path in draw_study(study, plans, figures_dir).items():
                print_text(f"  {title}: {path}")
            print_text()
        return
    table = compare_with_paper(study, plans)
    if format_ == "text":
        print_renderable(paper_table(table))
        print_text()
    else:
        print_text(render_paper_table(table, format_))


def _print_missing(folders: Sequence[Path]) -> None:
    """Print the missing runs on standard error, since the tables are on standard output."""
    for folder in folders:
        print_text(f"would run: {folder}", file=sys.stderr)
    if not folders:
        print_text("nothing is missing", file=sys.stderr)
