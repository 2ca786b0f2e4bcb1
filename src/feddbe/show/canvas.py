"""What all pictures share: colours, a legend that covers nothing, and a file written whole or not at all."""

from __future__ import annotations

import math
import secrets
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe.errors import BadInput, unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "GREY", "MARKERS", "STYLES", "legend_below", "tidy", "whole", "write"]

# Okabe and Ito's colours, told apart by colour-blind readers, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# Four styles against seven colours: 28 lines before a pair comes back.
STYLES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.4, 1.2)))
MARKERS = "os^Dv"
GREY = "#6b6b6b"
_FORMATS = (".pdf", ".png", ".svg")


def write(path: Path, figure: Figure) -> None:
    """Save what is drawn, in the format that the path's suffix says."""
    import matplotlib

    if path.suffix.lower() not in _FORMATS:
        raise unknown("picture format", path.suffix, _FORMATS)
    kind = path.suffix.lower()[1:]
    # No dates and no random ids, so that the same run gives the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with whole(path, "picture") as scratch, matplotlib.rc_context({"svg.hashsalt": "feddbe"}):
        figure.savefig(scratch, format=kind, dpi=150, metadata=metadata)


@contextmanager
def whole(path: Path, what: str) -> Iterator[Path]:
    """Where to write what shall be at `path`: beside it under another name, then it is renamed, so that a
    reader never sees half of it."""
    _clear(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write the {what} '{path}': {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """What a kill left of this file; one that is being written is younger."""
    for left in path.parent.glob(f".{path.name}.????????.tmp"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 60:
                left.unlink()


def tidy(axes: Axes) -> None:
    """A pale grid behind what is drawn, and no frame above and on the right."""
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Axes, width: float = 7.2, height: float = 3.7) -> None:
    """Names below the axes, where they cover no curve; the picture grows by the lines they take."""
    handles, names = axes.get_legend_handles_labels()
    columns = 2 if len(names) > 4 and max(map(len, names)) <= 5.8 * width else 1
    wrapped = [textwrap.fill(name, int(11.7 * width) // columns) for name in names]
    lines = sum(name.count("\n") + 1 for name in wrapped)
    figure.set_size_inches(width, height + 0.19 * math.ceil(lines / columns))
    legend = figure.legend(
        handles, wrapped, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=4
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is a dollar sign
