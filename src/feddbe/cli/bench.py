"""`feddbe bench`: where the time of a model and its data goes."""

from __future__ import annotations

from typing import Any

import click

from feddbe.cli.command import Argument, Command, config_options
from feddbe.cli.output import show, show_json
from feddbe.options import config

__all__ = ["bench"]

_METHOD = "as in fedavg+dbe(kappa=5,mu=0.1), or a file with options [fedavg+dbe]"
_PHASES = {
    "training": "{steps} steps",
    "evaluation": "{tested} predictions",
    "states": "made into bytes and back: {up} bytes sent, {kept} kept",
    "store": "what it keeps is read and written",
}


_OTHERS = {"out", "resume", "quiet", "patience", "min_replies", "worker_timeout", "keep_best"}
"""Options of a run that have no part in it."""


@click.command(
    "bench", cls=Command, params=[option for option in config_options() if option.name not in _OTHERS]
)
@click.argument("method", cls=Argument, required=False, metavar="[METHOD|FILE.toml]", help=_METHOD)
def bench(method: str | None, **options: Any) -> int:
    """Measure a model and data: who trains it, and where the time goes."""
    from rich.table import Table

    from feddbe import api
    from feddbe.runs.bench import bench as measure

    asked = config.read([method or "fedavg+dbe"], options)
    (experiment,) = api.resolve(asked, single=True)
    found = measure(experiment)
    if asked.config.json:
        show_json(found)
        return 0
    print(f"{found['method']}, model {found['model']} of {found['parameters']} parameters")
    print(f"trained by {', '.join(found['trainers']) or 'nobody'}; engine {found['engine']}")
    table = Table(
        box=None, pad_edge=False, title="a client of middling size in a round", title_justify="left"
    )
    for name in ("", "ms", "%"):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("")
    whole = sum(found["milliseconds"].values())
    for phase, words in _PHASES.items():
        taken = found["milliseconds"].get(phase, 0.0)
        about = words.format(steps=found["steps"], tested=found["tested"], **found["bytes"])
        table.add_row(phase, f"{taken:.3f}", f"{100 * taken / whole:.1f}", about)
    show(table)
    print(f"the server in a round: {found['server']:.3f} ms (with two clients)")
    print(f"all of a round: about {found['estimate']['seconds_per_round']:.2g} s")
    for remark in found["remarks"]:
        print(remark)
    return 0
