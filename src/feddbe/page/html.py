"""The page as one file: styles, scripts and content in it, and a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from feddbe.errors import BadInput, unknown
from feddbe.page.content import content
from feddbe.page.sources import read
from feddbe.page.studied import studied
from feddbe.show.canvas import whole
from feddbe.show.compared import Compared

__all__ = ["as_json", "render", "write_report"]

_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = (
    "uplot/uPlot.iife.min.js", "elements.js", "tables.js", "canvas.js", "curves.js", "figures.js", "page.js",
)  # fmt: skip


def write_report(
    folders: Sequence[Path], out: Path, *, studies: Mapping[str, Compared] | None = None
) -> Path:
    """Write one page about these runs to `out`, and return that. It opens without a network and in any
    place; the same runs give the same bytes. `studies`: tables that the runs were made for, by the commands
    that print them."""
    if not folders:
        raise BadInput("a report of no run; name the folders of some")
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise unknown("kind of report", path.suffix, (".html", ".htm"))
    text = render(content(read(Path(folder) for folder in folders), first=studied(studies or {})))
    with whole(path, "report") as scratch:
        scratch.write_text(text, encoding="utf-8")
    return path


def render(found: Mapping[str, Any], *, live: bool = False) -> str:
    """The whole page; `live`: one that asks where it came from for news."""
    style, script = "\n".join(map(_asset, _STYLES)), "\n".join(map(_asset, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src '{'self' if live else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en"{' data-live=""' if live else ""}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(found["title"])}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<noscript>This page draws its tables and figures by script, which is switched off here.</noscript>
<script type="application/json" id="content">{as_json(found)}</script>
<script>{script}</script>
</body>
</html>
"""


def as_json(found: Any) -> str:
    """In a form in which no text of it can end the element that it stands in."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _asset(name: str) -> str:
    return files("feddbe.page").joinpath("assets", name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
