"""`feddbe measure`: what the representations in runs are like."""

from __future__ import annotations

import click

from feddbe.cli.command import Argument, Command
from feddbe.cli.output import AS_JSON, CODE, TRUST, complain, show, show_json
from feddbe.errors import BadInput

__all__ = ["measure"]


@click.command("measure", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/",
)  # fmt: skip
@click.option(
    "--what",
    default="mdl",
    metavar="NAMES",
    help="mdl, probe, discrepancy, discrepancy-shared, tsne [mdl]",
)
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@click.option(
    "--moment",
    default="before,after",
    metavar="NAMES",
    help="before and after local training, or adapted, where the method does that [before,after]",
)
@click.option(
    "--at", default="z_g", metavar="NAMES", help="places: cuts of the model as in conv1, z_g, z, logits [z_g]"
)
@click.option("--n", default="1000", metavar="N", help="test samples kept, of all clients; or all [1000]")
@click.option("--quick", is_flag=True, help="less work where there is a way; marked wherever it is shown")
@click.option("--per-client", is_flag=True, help="of each client alone: mdl, probe")
@CODE
@TRUST
@AS_JSON
def measure(
    names: tuple[str, ...],
    what: str,
    which: str,
    moment: str,
    at: str,
    n: str,
    quick: bool,
    per_client: bool,
    code: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Measure the representations in runs: layer by layer, before and after local training."""
    from feddbe import api
    from feddbe.cli.progress import Following
    from feddbe.representations import readings
    from feddbe.runs import folders
    from feddbe.show import represented

    watch, count = Following(), _count(n)
    try:
        with watch:
            documents = api.measure(
                names, what=what, round=which, moment=moment, at=at, n=count, quick=quick,
                per_client=per_client, code=code, trust=trust, watch=watch, quiet=True,
            )  # fmt: skip
    except KeyboardInterrupt:
        return complain("stopped; what was finished is kept, the same command takes the rest", 130)
    first = folders.find_all(names[0])
    paths = api.draw_measured(first[0] if len(first) == 1 else first[0].parent, documents)
    if as_json:
        show_json({"runs": documents, "pictures": [str(path) for path in paths]})
        return 0
    for table in represented.measured_tables(documents.documents, readings.parse(what)):
        show(table)
        print()
    for path in paths:
        print(f"picture  {path}")
    return 0


def _count(text: str) -> int | None:
    """--n: a number, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise BadInput(f"n = '{text}'; allowed: a number from 1 on, or all")
    return int(text)
