"""What the site has besides the pages in this folder (`mkdocs.yml` names this file).

- The start is the README. Files elsewhere in the repository that a page links to are pages of the site, too,
  so that every link leads somewhere, on the site as on a code host.
- Commands and methods describe themselves: their pages are made of what `--help` and `feddbe methods` print.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
HOME, DOCS, ELSEWHERE = "README.md", "docs/", "files/"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
ALSO = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "examples/tutorial.ipynb")
"""In the navigation, whether a page links to them or not."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not written in this folder."""
    from mkdocs.structure.files import File

    made = {"index.md": (ROOT / HOME).read_text(encoding="utf-8")}
    made |= {"commands.md": commands(), "methods.md": methods()}
    own = {file.src_uri: file.content_string for file in files.documentation_pages()} | made
    for uri, text in (made | elsewhere(own)).items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What a code host reads and Python-Markdown reads otherwise: links into the repository, and bars in the
    code of a table's cell, which are escaped there and not here."""
    here = relinked(markdown, page.file.src_uri)
    return re.sub(r"(?m)^\|.*$", lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), here)


def home(uri: str) -> str:
    """The folder of the repository that a page of the site comes from: `dbe.md` -> `docs`."""
    if uri.startswith(ELSEWHERE):
        return posixpath.dirname(uri.removeprefix(ELSEWHERE))
    return "" if uri == "index.md" else posixpath.dirname(DOCS + uri)


def site_uri(path: str) -> str:
    """Where a file of the repository is on the site; a folder is its README, or a list of what is in it."""
    if path == HOME:
        return "index.md"
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return ELSEWHERE + (path if path.endswith(".md") else f"{path}.md")


def targets(markdown: str, uri: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    here = home(uri)
    for text in FENCE.split(markdown)[::2]:
        for link in LINK.findall(text):
            yield posixpath.normpath(posixpath.join(here, link))


def relinked(markdown: str, uri: str) -> str:
    """The page with its links to files of the repository made links to pages of the site."""
    here = home(uri)

    def on(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[0]))
        return posixpath.relpath(site_uri(path), posixpath.dirname(uri) or ".")

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(on, text) for text in parts[::2]]
    return "".join(parts)


def elsewhere(pages: dict[str, str]) -> dict[str, str]:
    """Pages for the files outside of this folder that `pages`, and they themselves, link to."""
    made: dict[str, str] = {}
    waiting = [*ALSO, *(path for uri, text in pages.items() for path in targets(text, uri))]
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        if uri.startswith(ELSEWHERE) and uri not in made and (ROOT / path).exists():
            made[uri] = shown(path)
            waiting += targets(made[uri], uri)
    return made


def shown(path: str) -> str:
    """A file or a folder as a page."""
    place = ROOT / path
    if place.is_dir():
        if (place / "README.md").exists():
            return (place / "README.md").read_text(encoding="utf-8")
        rows = [f"- [{file.name}]({file.name}): {_about(file)}" for file in sorted(place.glob("*.py"))]
        return "\n".join([f"# {path}", "", *rows, ""])
    text = place.read_text(encoding="utf-8")
    if place.suffix == ".md":
        return text
    if place.suffix == ".ipynb":
        return "\n\n".join(_cell_of_notebook(cell) for cell in json.loads(text)["cells"]) + "\n"
    unsearched = "---\nsearch: {exclude: true}\n---\n"  # or every word would be found in the code first
    return f"{unsearched}# {place.name}\n\n`{path}`\n\n````{place.suffix.lstrip('.')}\n{text}````\n"


def _cell_of_notebook(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def _about(file: Path) -> str:
    """The first sentence of a module's docstring."""
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(words.split("\n\n")[0].split())


class _Markdown(click.HelpFormatter):
    """Writes a command's help as Markdown: what click would print, with its lists as tables."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f"```text\n{prog} {args}\n```\n")

    heading = ""

    def write_heading(self, heading: str) -> None:
        self.heading = heading  # of the table that follows

    def write_text(self, text: str) -> None:
        self.write(f"{text.strip()}\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        cells = [f"| `{_cell(term.strip())}` | {_cell(text)} |" for term, text in rows]
        self.write("\n".join([f"| {self.heading} | |", "|---|---|", *cells, ""]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """A page with the help of every command."""
    from feddbe.cli.main import app

    pages = ["# Commands", f"{app.help} This page is made of what `--help` prints."]
    pages += [_help(command, name) for name, command in _every(app, "feddbe")]
    return "\n\n".join(pages) + "\n"


def _every(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for below, inner in getattr(command, "commands", {}).items():
        yield from _every(inner, f"{name} {below}")


def _help(command: click.Command, name: str) -> str:
    formatter = _Markdown()
    command.format_help(click.Context(command, info_name=name), formatter)
    return f"## {name}\n\n{formatter.getvalue()}"


def methods() -> str:
    """A page with every method, add-on and hyper-parameter."""
    from feddbe.cli.methods import default_of
    from feddbe.methods.registry import describe

    pages = ["# Methods and their parameters", "This page is made of what `feddbe methods` prints."]
    return "\n\n".join([*pages, *(_method(one, default_of) for one in describe())]) + "\n"


def _method(one: Any, default_of: Callable[[dict[str, Any]], str]) -> str:
    about, facts = [one["family"]], one["facts"]
    if one["addons"]:
        about.append(f"takes {', '.join(f'`+{name}`' for name in one['addons'])}")
    if facts:
        about.append(f"down {facts['down']}, up {facts['up']}, kept {facts['keeps']}")
        about.append(f"evaluated: {facts['evaluated']}")
    rows = [
        [f"`{p['name']}`", p["meaning"], p["allowed"], default_of(p), p["search"]] for p in one["parameters"]
    ]
    table = ["| parameter | meaning | takes | default | try |", "|---|---|---|---|---|"] if rows else []
    table += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    name = f"{'+' * (one['family'] == 'add-on')}{one['name']}"
    return "\n".join([f"## {name}", "", "; ".join(about) + ".", "", *table])
