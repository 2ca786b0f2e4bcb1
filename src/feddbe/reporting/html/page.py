"""The report: one HTML page about runs, with its content, style and script in a single file."""

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
from feddbe.reporting.html.sections import (
    clients_section,
    configuration_section,
    costs_section,
    data_section,
    fairness_section,
    learning_section,
    new_clients_section,
    representations_section,
    summary_section,
    versions_section,
)
from feddbe.reporting.matplotlib_backend import COLORS, LABEL_COLORS, STYLES, replace_file
from feddbe.reporting.paper_table import PaperTable, paper_table
from feddbe.reporting.table import Table, to_page_block
from feddbe.results.document import RunDocument, is_finished

_MAX_TITLE_METHODS = 6
"""Methods that the title names; more are counted."""
_SECTIONS = (
    summary_section, learning_section, clients_section, fairness_section, new_clients_section, data_section,
    representations_section, costs_section, configuration_section, versions_section,
)  # fmt: skip
_STYLE_FILES = ("uplot/uPlot.min.css", "page.css")
_SCRIPT_FILES = (
    "uplot/uPlot.iife.min.js", "elements.js", "tables.js", "canvas.js", "curves.js", "figures.js", "page.js",
)  # fmt: skip


def page_content(
    runs: ReportRuns, failed: Sequence[str] = (), *, first: Sequence[Block] = ()
) -> dict[str, Any]:
    """Return the content of the page as JSON values.

    Args:
        runs: The runs that could be read.
        failed: Messages about the others.
        first: Sections before those of the runs.

    Returns:
        Title, sections that have something to show, and the colors, which are those of the pictures.
    """
    documents = runs.documents
    method_names = list(dict.fromkeys(document["method"] for document in documents))
    has_few_methods = len(method_names) <= _MAX_TITLE_METHODS
    methods = ", ".join(method_names) if has_few_methods else f"{len(method_names)} methods"
    data = ", ".join(dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents))
    sections = []
    if documents:
        sections = [*first, *(block for build in _SECTIONS for block in build(runs))]
    return {
        "title": f"{methods} on {data}" if documents else "No run yet",
        "about": _count_runs(runs),
        "failed": list(failed),
        "sections": sections,
        "palette": {
            "lines": list(COLORS),
            "dashes": [[] if style == "-" else list(style[1]) for style in STYLES],
            "labels": list(LABEL_COLORS),
        },
    }


def _count_runs(runs: ReportRuns) -> str:
    total = len(runs.documents)
    unfinished = sum(not is_finished(document) for document in runs.documents)
    text = "1 run" if total == 1 else f"{total} runs"
    return f"{text}, {unfinished} not finished" if unfinished else text


def paper_tables_section(tables: Mapping[str, PaperTable]) -> list[Block]:
    """Return the section with tables of the paper next to ours; keys are the commands that print them."""
    blocks = [to_page_block(paper_table(table), f"study-{table.name}") for table in tables.values()]
    commands = [command_block(table.name, command) for command, table in tables.items()]
    return section("studies", "The paper's tables", blocks, commands)


def sweeps_section(tables: Mapping[str, Table]) -> list[Block]:
    """Return the section with tables of sweeps; keys are the commands that print them."""
    blocks = [to_page_block(table, f"sweep-{number}") for number, table in enumerate(tables.values(), 1)]
    commands = [command_block("all values", command) for command in tables]
    return section("sweeps", "Sweeps", blocks, commands)


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    studies: Mapping[str, PaperTable] | None = None,
    sweeps: Mapping[str, Table] | None = None,
    documents: Sequence[RunDocument] = (),
) -> Path:
    """Write one page about runs.

    The page is a single file that opens without a network. The same runs give the same bytes.

    Args:
        folders: Folders of the runs.
        out: Path of the page, with the suffix `.html`.
        studies: Tables of the paper that the runs belong to, by the commands that print them.
        sweeps: Tables of sweeps whose chosen runs are on the page, by the commands that print them.
        documents: Runs of a study, which may be shorter than the stored ones that they replace.

    Returns:
        The path of the page.

    Raises:
        InvalidInputError: The list of folders is empty, the suffix is unknown, or the file cannot be written.
        StoreError: A run cannot be read.
    """
    if not folders:
        raise InvalidInputError("a report needs at least one run: got none. Name the folders of runs.")
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise unknown_name("kind of report", path.suffix, (".html", ".htm"))
    runs = read_runs((Path(folder) for folder in folders), documents)
    first = [*paper_tables_section(studies or {}), *sweeps_section(sweeps or {})]
    text = render(page_content(runs, first=first))
    with replace_file(path, "report") as scratch:
        scratch.write_text(text, encoding="utf-8")
    return path


def render(content: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page as HTML.

    Args:
        content: The content, from `page_content`.
        live: If True, the page asks its server for changes.
    """
    style = "\n".join(map(_read_asset, _STYLE_FILES))
    script = "\n".join(map(_read_asset, _SCRIPT_FILES))
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
<title>{html.escape(content["title"])}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript for its tables and figures, and JavaScript is disabled.</noscript>
<script type="application/json" id="content">{encode_json(content)}</script>
<script>{script}</script>
</body>
</html>
"""


def encode_json(content: Any) -> str:
    """Return the content as JSON in which no text can end the HTML element that contains it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _read_asset(name: str) -> str:
    return files("feddbe.reporting.html").joinpath("assets", name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
