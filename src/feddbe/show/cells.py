"""What all tables share: their look, and how names, shares, seconds and bytes are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["Name", "caption", "folded", "in_bytes", "in_seconds", "percent", "plain_table"]


@dataclass(frozen=True)
class Name:
    """A name that, where it must, breaks before + and ( and after other punctuation rather than anywhere."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, _pieces(self.text)))
        return Measurement(min(longest, 12), max(1, len(self.text))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(folded(self.text, options.max_width), style=self.style, overflow="fold")


def folded(text: str, width: int) -> str:
    """In lines of at most so many letters where there is a place to break."""
    lines = [""]
    for piece in _pieces(text):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines if line)


def _pieces(text: str) -> list[str]:
    return re.findall(r"[+(]?[^-+(,_/: ]*[-,_/: ]?", text)


def plain_table(gap: int) -> Table:
    """A table without edges, `gap` blanks between columns."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
        header_style="bold",
        caption_justify="left",
    )


def caption(words: str) -> Text:
    """As text, because in a plain string rich would take [brackets] for markup."""
    return Text(words, style="dim")


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f}"


def in_seconds(value: float) -> str:
    return f"{value:.{3 if value < 0.0995 else 2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def in_bytes(count: float) -> str:
    """Decimal units and three digits: 950 B, 81.6 kB, 2.33 MB."""
    unit, *larger = "B", "kB", "MB", "GB", "TB"
    while count >= 999.5 and larger:
        count, unit = count / 1000, larger.pop(0)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"
