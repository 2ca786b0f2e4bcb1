"""Tables of the paper beside ours, where runs were made for them."""

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
from feddbe.reporting.html.blocks import Block, Sources, command, read, section
from feddbe.reporting.html.clients import data, each, fair, joined
from feddbe.reporting.html.overview import configuration, costs, learning, summary, versions
from feddbe.reporting.html.representations import representations
from feddbe.reporting.matplotlib_backend import COLORS, LABELS, STYLES, replace_file
from feddbe.reporting.paper_table import Compared, paper_table
from feddbe.reporting.table import to_page_block
from feddbe.results.document import finished


def studied(found: Mapping[str, Compared]) -> list[Block]:
    """One section of them all; the keys are the commands that print them."""
    blocks = [to_page_block(paper_table(compared), f"study-{compared.name}") for compared in found.values()]
    commands = [command(compared.name, line) for line, compared in found.items()]
    return section("studies", "The paper's tables", blocks, commands)


NAMED = 6
"""Methods that the title has the names of."""
_SECTIONS = (
    summary, learning, each, fair, joined, data, representations, costs, configuration, versions,
)  # fmt: skip


def content(sources: Sources, failed: Sequence[str] = (), *, first: Sequence[Block] = ()) -> dict[str, Any]:
    """The title, the sections that have something to show, `first` these, and the colours that pictures have,
    too; `failed`: what is to be said of runs that could not be read."""
    documents = sources.documents
    names = list(dict.fromkeys(document["method"] for document in documents))
    methods = ", ".join(names) if len(names) <= NAMED else f"{len(names)} methods"
    places = ", ".join(dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents))
    going = sum(not finished(document) for document in documents)
    about = [f"{len(documents)} run{'s' * (len(documents) != 1)}", f"{going} not finished" * bool(going)]
    return {
        "title": f"{methods} on {places}" if documents else "No run yet",
        "about": ", ".join(filter(None, about)),
        "failed": list(failed),
        "sections": [*first, *(part for make in _SECTIONS for part in make(sources))] if documents else [],
        "palette": {
            "lines": list(COLORS),
            "dashes": [[] if style == "-" else list(style[1]) for style in STYLES],
            "labels": list(LABELS),
        },
    }


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
    with replace_file(path, "report") as scratch:
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
    return files("feddbe.reporting.html").joinpath("assets", name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


report = write_report
"""Its name in `feddbe`."""
