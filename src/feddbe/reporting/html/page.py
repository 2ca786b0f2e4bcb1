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

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.reporting.html.blocks import Block, ReportRuns, command_block, read_runs, section
from feddbe.reporting.html.clients import clients_section, data_section, fairness_section, new_clients_section
from feddbe.reporting.html.overview import (
    configuration_section,
    costs_section,
    learning_section,
    summary_section,
    versions_section,
)
from feddbe.reporting.html.representations import representations_section
from feddbe.reporting.matplotlib_backend import COLORS, LABELS, STYLES, replace_file
from feddbe.reporting.paper_table import PaperTable, paper_table
from feddbe.reporting.table import to_page_block
from feddbe.results.document import is_finished


def studied_folders(found: Mapping[str, PaperTable]) -> list[Block]:
    """One section of them all; the keys are the commands that print them."""
    blocks = [to_page_block(paper_table(compared), f"study-{compared.name}") for compared in found.values()]
    commands = [command_block(compared.name, line) for line, compared in found.items()]
    return section("studies", "The paper's tables", blocks, commands)


NAMED = 6
"""Methods that the title has the names of."""
_SECTIONS = (
    summary_section, learning_section, clients_section, fairness_section, new_clients_section, data_section, representations_section, costs_section, configuration_section, versions_section,
)  # fmt: skip


def page_content(
    runs: ReportRuns, failed: Sequence[str] = (), *, first: Sequence[Block] = ()
) -> dict[str, Any]:
    """The title, the sections that have something to show, `first` these, and the colours that pictures have,
    too; `failed`: what is to be said of runs that could not be read."""
    documents = runs.documents
    names = list(dict.fromkeys(document["method"] for document in documents))
    methods = ", ".join(names) if len(names) <= NAMED else f"{len(names)} methods"
    places = ", ".join(dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents))
    going = sum(not is_finished(document) for document in documents)
    about = [f"{len(documents)} run{'s' * (len(documents) != 1)}", f"{going} not finished" * bool(going)]
    return {
        "title": f"{methods} on {places}" if documents else "No run yet",
        "about": ", ".join(filter(None, about)),
        "failed": list(failed),
        "sections": [*first, *(part for make in _SECTIONS for part in make(runs))] if documents else [],
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
    folders: Sequence[Path], out: Path, *, studies: Mapping[str, PaperTable] | None = None
) -> Path:
    """Write one page about these runs to `out`, and return that. It opens without a network and in any
    place; the same runs give the same bytes. `studies`: tables that the runs were made for, by the commands
    that print them."""
    if not folders:
        raise InvalidInputError("a report of no run; name the folders of some")
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise unknown_name("kind of report", path.suffix, (".html", ".htm"))
    text = render(
        page_content(read_runs(Path(folder) for folder in folders), first=studied_folders(studies or {}))
    )
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
