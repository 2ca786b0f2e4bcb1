"""`feddbe fairness` and `feddbe overhead`: what methods do for each client, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from feddbe.cli.command import Argument, Command
from feddbe.cli.output import AS_JSON, show_json
from feddbe.cli.output import show as show_tables
from feddbe.errors import unknown

if TYPE_CHECKING:
    from feddbe.results.document import RunDocument

__all__ = ["fairness", "overhead"]

_RUNS = click.argument(
    "names", cls=Argument, nargs=-1, required=True, metavar="RUN...",
    help="folders of runs or comparisons, or names in runs/",
)  # fmt: skip


@click.command("fairness", cls=Command)
@_RUNS
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=Path,
    help="picture: .png, .svg or .pdf [fairness.png in the first RUN]",
)
@AS_JSON
def fairness(names: tuple[str, ...], which: str, out: Path | None, as_json: bool) -> int:
    """Accuracy of each client: its spread, and who is helped and hurt against local and fedavg."""
    from feddbe.results import fairness as results
    from feddbe.runs import folders, per_client
    from feddbe.show import fairness as picture
    from feddbe.show import quality

    if which not in (rounds := ("best", "last")):
        raise unknown("round", which, rounds)
    documents = _documents(names)
    entries = [document["best" if which == "best" else "last"] for document in documents]
    accuracies = [
        per_client.accuracies(Path(document["folder"]), entry)
        for document, entry in zip(documents, entries, strict=True)
    ]
    found = results.fairness(documents, accuracies, which)
    first = folders.find_all(names[0])
    path = out or (first[0] if len(first) == 1 else first[0].parent) / "fairness.png"
    picture.fairness(path, found)
    if as_json:
        show_json({"runs": found, "picture": str(path)})
        return 0
    show_tables(quality.fairness_table(found))
    if missing := quality.missing_baselines(found):
        print(missing)
    print(f"\nfairness  {path}")
    return 0


@click.command("overhead", cls=Command)
@_RUNS
@AS_JSON
def overhead(names: tuple[str, ...], as_json: bool) -> int:
    """What methods cost: seconds, bytes, what clients keep, memory."""
    from feddbe.results.document import labels
    from feddbe.results.overhead import overhead as cost
    from feddbe.runs import per_client
    from feddbe.show import quality

    documents = _documents(names)
    costs = [cost(document, per_client.kept(Path(document["folder"]))) for document in documents]
    if as_json:
        show_json({"runs": costs})
    else:
        show_tables(quality.overhead_table(costs, labels(documents)))
    return 0


def _documents(names: tuple[str, ...]) -> list[RunDocument]:
    """Of all runs that are meant, each once."""
    from feddbe.runs import folders, summary

    return [summary.load(folder, hashes=False) for folder in folders.each(names)]
