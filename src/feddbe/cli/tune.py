"""`feddbe tune`: hyper-parameters chosen on validation data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.command import Argument, Command, Option, complain, config_options, show, show_json
from feddbe.config.defaults import PER_MODEL
from feddbe.config.options import Config, read
from feddbe.config.spec import written

if TYPE_CHECKING:
    from feddbe.studies.tune import Trial, Tuned


_OTHERS = {"split", "resume", "newcomers", "adapt", "keep_best"}
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
    from feddbe.cli.progress import Following, stoppable
    from feddbe.reporting.figures import surface
    from feddbe.studies.tune import tune as tune_tune

    asked = read([method], options)
    watch = Following(quiet=asked.config.quiet)
    try:
        with stoppable(), watch:
            found = tune_tune(asked, trials=trials, space=space, watch=watch)
    except KeyboardInterrupt:
        return complain("stopped; what is done is kept, and the same command goes on from there", 130)
    picture = found.folder / "surface.png"
    told = [(trial.values, trial.accuracy) for trial in found.trials]
    title = f"{found.method}, {asked.config.data}: {len(told)} trials"
    surface(picture, found.space, told, found.published, title)
    if asked.config.json:
        trials_found = [
            {**trial.values, "accuracy": trial.accuracy, "note": trial.note} for trial in found.trials
        ]
        show_json({
            "method": found.method, "best": found.best.values, "accuracy": found.best.accuracy,
            "published": found.published, "published_accuracy": found.first.accuracy,
            "trials": trials_found, "picture": str(picture),
        })  # fmt: skip
        return 0
    _show(found, asked.config)
    print(f"surface  {picture}")
    return 0


def _show(found: Tuned, options: Config) -> None:
    from feddbe.reporting.formatting import caption, percent, plain_table
    from feddbe.reporting.html import overview
    from feddbe.studies.tune import VALIDATION

    table = plain_table(gap=2)
    for name in ("", *found.space, "validation %"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)

    def line(title: str, trial: Trial) -> None:
        values = [written(trial.values[key]) for key in found.space]
        table.add_row(title, *values, trial.note if trial.note else percent(trial.accuracy))

    line("found", found.best)
    line("default", found.first)
    table.add_section()
    others = [trial for trial in found.trials if trial is not found.best and trial is not found.first]
    for trial in sorted(others, key=lambda trial: -(trial.accuracy or 0.0))[:8]:
        line("", trial)
    count, early = len(found.trials), sum(trial.accuracy is None for trial in found.trials)
    accuracy = "Validation accuracy after fine-tuning" if found.is_fine_tuned else "Best validation accuracy"
    words = (
        f"{accuracy}, on {options.validation or VALIDATION:g} of every client's training data; "
        f"test data took no part. {count} trials, {early} of them stopped early, with one seed: small "
        f"differences may be chance. Default: what a run has without a search.{_paper(found)}"
    )
    show(table, caption(words))
    name, more = found.named(found.best.values)
    print(f"use it   {overview.line(name, vars(options) | more | {'validation': 0.0})}")


def _paper(found: Tuned) -> str:
    """kappa and mu of the paper, if they are searched."""
    if "kappa" not in found.space:
        return ""
    layers = {model: {"mu": 1.0, **PER_MODEL[model]["mr"]} for model in ("cnn", "resnet18", "fasttext")}
    each = (f"{written(mr['kappa'])}, {written(mr['mu'])} for {model}" for model, mr in layers.items())
    return f" The paper's kappa, mu: {'; '.join(each)}."
