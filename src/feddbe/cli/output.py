"""What commands print: tables and documents on standard output, one line of complaint on the other."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["AS_JSON", "CODE", "TRUST", "complain", "show", "show_json"]

AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON document")
CODE = click.option(
    "--code", multiple=True, metavar="FILE.py",
    help="file of the run's own model or method, to execute if its content is the run's; may be repeated",
)  # fmt: skip
TRUST = click.option("--trust", is_flag=True, help="the run is your own: execute the files that it names")


def complain(text: str, code: int) -> int:
    """One line on standard error; what would move the cursor or colour the terminal is shown as ?."""
    line = re.sub(r"\s*[\r\n]+\s*", " ", text)
    print("feddbe:", "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    return code


def show(*shown: RenderableType) -> None:
    """On standard output, without the blanks that rich leaves at the ends of lines."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        console.print(*shown, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def show_json(document: Any) -> None:
    """One key to a line, and one item to a line where the value is a list of objects: it can be grepped."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "]"
        return json.dumps(value)

    rows = [f"{json.dumps(key)}: {lines(value)}" for key, value in document.items()]
    print("{" + ",\n ".join(rows) + "}")
