"""Formatting of names, percentages, seconds and bytes for tables and figures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text


@dataclass(frozen=True)
class Name:
    """A name that is broken only before + and (, and after other punctuation."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, break_points(self.text)))
        return Measurement(min(longest, 12), max(1, len(self.text))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(fold_text(self.text, options.max_width), style=self.style, overflow="fold")


def fold_text(text: str, width: int) -> str:
    """Return the text in lines of at most `width` letters, as far as it can be broken."""
    lines = [""]
    for piece in break_points(text):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines if line)


def break_points(text: str) -> list[str]:
    """Return the pieces of a name that stay together."""
    return re.findall(r"[+(]?[^-+(,_/: ]*[-,_/: ]?", text)


def format_percent(fraction: float | None) -> str:
    """Return a fraction of one in percent with two digits, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f}"


def format_seconds(value: float) -> str:
    """Return seconds with three significant digits."""
    if value < 0.0995:
        return f"{value:.3f}"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_bytes(count: float) -> str:
    """Return bytes in decimal units with three digits: 950 B, 81.6 kB, 2.33 MB."""
    unit, *larger_units = "B", "kB", "MB", "GB", "TB"
    while count >= 999.5 and larger_units:
        count /= 1000
        unit = larger_units.pop(0)
    if unit == "B" or count >= 99.95:
        return f"{count:.0f} {unit}"
    return f"{count:.1f} {unit}" if count >= 9.995 else f"{count:.2f} {unit}"
