"""What a page consists of: sections of blocks, as plain values that become JSON.

Each kind of block is drawn by a function of the same name in `assets/`. A figure has a `caption`, and a
`text` that says what is to be seen for those who do not see it; its numbers as a table are made by the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Block", "cell", "command", "facts", "figure", "number", "section", "some", "table", "thinned"]

Block = dict[str, Any]


def section(id: str, title: str, blocks: Sequence[Block], commands: Sequence[Block] = ()) -> list[Block]:
    """A part of the page, or nothing where there is nothing to show; `commands` print the same numbers."""
    if not blocks:
        return []
    return [{"id": id, "title": title, "blocks": list(blocks), "commands": list(commands)}]


def command(what: str, line: str) -> Block:
    """A line for the shell, and what it gives."""
    return {"what": what, "line": line}


def table(
    id: str,
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    filter: bool = False,
    heading: str = "",
) -> Block:
    """Rows of cells, the first of which names the row. It can be sorted, and with `filter` searched."""
    return {
        "kind": "table",
        "id": id,
        "caption": caption,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "filter": filter,
        "heading": heading,
    }


def facts(id: str, caption: str, rows: Sequence[Sequence[str]]) -> Block:
    """Names and values that nobody sorts."""
    return {"kind": "facts", "id": id, "caption": caption, "rows": [list(row) for row in rows]}


def cell(text: str, value: float | None) -> dict[str, Any]:
    """A number as it is shown, and as it is sorted by."""
    return {"text": text, "value": number(value)}


def figure(kind: str, id: str, caption: str, text: str, **content: Any) -> Block:
    """Of a kind that the page can draw: curves, heat, bubbles, bars, dots, scatter."""
    return {"kind": kind, "id": id, "caption": caption, "text": text, **content}


def number(value: float | None, digits: int = 4) -> float | None:
    """As it is written on the page; JSON has nothing for what is not finite."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def thinned(items: Sequence[int], most: int, keep: Sequence[int] = ()) -> tuple[list[int], int]:
    """Every so many of ordered items, with the last and those to `keep`; and every how many."""
    step = max(1, math.ceil(len(items) / most))
    chosen = {*items[::step], *items[-1:], *(item for item in keep if item in set(items))}
    return sorted(chosen), step


def some(items: Sequence[int], most: int) -> list[int]:
    """At most so many of ordered items, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
