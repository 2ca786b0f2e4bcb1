"""`feddbe predict`: what one client's model says of new rows."""

from __future__ import annotations

import click

from feddbe.cli.command import Argument, Command
from feddbe.cli.output import AS_JSON, CODE, TRUST, complain, show_json
from feddbe.errors import short

__all__ = ["predict"]


@click.command("predict", cls=Command)
@click.argument("run", cls=Argument, help="folder of a run, or its name in runs/")
@click.option("--client", required=True, metavar="NAME|N", help="whose model: a client's name or number")
@click.option(
    "--data", required=True, metavar="FILE", help="new rows: .csv, .tsv, .npz, an image or a folder"
)
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@CODE
@TRUST
@AS_JSON
def predict(
    run: str, client: str, data: str, which: str, code: tuple[str, ...], trust: bool, as_json: bool
) -> int:
    """Predict new rows with one client's model: a label and its probabilities for each."""
    from feddbe import export

    found = export.predict(run, client, data, round=which, code=code, trust=trust)
    if found["remark"]:
        complain(found["remark"], 0)
    if as_json:
        show_json(found)
        return 0
    names = [short(name) for name in found["labels"]]
    width = max(map(len, ("label", *names)))
    print("\t".join([f"{'label':<{width}}", *names]))
    for row in found["rows"]:
        print("\t".join([f"{short(row['label']):<{width}}", *(f"{p:.4f}" for p in row["probabilities"])]))
    return 0
