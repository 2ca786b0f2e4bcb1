"""Pages of the site that are not files of this folder (`mkdocs.yml` names this module).

- The home page is the README. Files elsewhere in the repository that a page links to become pages too, so
  that every link works both on the site and on a code host.
- The pages of commands and methods are generated from the same data as `--help` and `feddbe methods`.
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
HOME, DOCS, OTHER_FILES = "README.md", "docs/", "files/"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
IN_NAVIGATION = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/README.md",
    "examples/tutorial.ipynb",
)
"""Files outside of this folder that are in the navigation."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not written in this folder."""
    from mkdocs.structure.files import File

    generated = {"index.md": (ROOT / HOME).read_text(encoding="utf-8"), "commands.md": render_commands()}
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()} | generated
    for uri, text in (generated | linked_files(pages)).items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt a page to the site.

    Links into the repository become links to pages. Bars inside code in a table are escaped for code hosts
    and must not be escaped for Python-Markdown. The page of methods ends with the generated list.
    """
    uri = page.file.src_uri
    text = relink(markdown, uri)
    text = re.sub(r"(?m)^\|.*$", lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), text)
    return f"{text}\n\n{render_methods()}" if uri == "methods.md" else text


def repository_folder(uri: str) -> str:
    """Return the folder of the repository from which a page comes: `dbe.md` -> `docs`."""
    if uri.startswith(OTHER_FILES):
        return posixpath.dirname(uri.removeprefix(OTHER_FILES))
    return "" if uri == "index.md" else posixpath.dirname(DOCS + uri)


def site_uri(path: str) -> str:
    """Return the page for a file of the repository; a folder's page is its README or its list of files."""
    if path == HOME:
        return "index.md"
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return OTHER_FILES + (path if path.endswith(".md") else f"{path}.md")


def link_targets(markdown: str, uri: str) -> Iterator[str]:
    """Yield the files of the repository to which a page links."""
    folder = repository_folder(uri)
    for text in FENCE.split(markdown)[::2]:
        for link in LINK.findall(text):
            yield posixpath.normpath(posixpath.join(folder, link))


def relink(markdown: str, uri: str) -> str:
    """Return the page with links to files of the repository replaced by links to pages of the site."""
    folder = repository_folder(uri)

    def replace(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[0]))
        return posixpath.relpath(site_uri(path), posixpath.dirname(uri) or ".")

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(replace, text) for text in parts[::2]]
    return "".join(parts)


def linked_files(pages: dict[str, str]) -> dict[str, str]:
    """Return pages for all files outside of this folder that are linked, directly or indirectly."""
    added: dict[str, str] = {}
    waiting = [*IN_NAVIGATION, *(path for uri, text in pages.items() for path in link_targets(text, uri))]
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        if uri.startswith(OTHER_FILES) and uri not in added and (ROOT / path).exists():
            added[uri] = render_file(path)
            waiting += link_targets(added[uri], uri)
    return added


def render_file(path: str) -> str:
    """Return a file or a folder as a page."""
    source = ROOT / path
    if source.is_dir():
        if (source / "README.md").exists():
            return (source / "README.md").read_text(encoding="utf-8")
        rows = [f"- [{file.name}]({file.name}): {_summary(file)}" for file in sorted(source.glob("*.py"))]
        return "\n".join([f"# {path}", "", *rows, ""])
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text
    if source.suffix == ".ipynb":
        return "\n\n".join(_notebook_cell(cell) for cell in json.loads(text)["cells"]) + "\n"
    not_searched = "---\nsearch: {exclude: true}\n---\n"  # otherwise code dominates the search results
    return f"{not_searched}# {source.name}\n\n`{path}`\n\n````{source.suffix.lstrip('.')}\n{text}````\n"


def _notebook_cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def _summary(file: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


class _MarkdownHelp(click.HelpFormatter):
    """Help of a command as Markdown, with lists as tables."""

    heading = ""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f"```text\n{prog} {args}\n```\n")

    def write_heading(self, heading: str) -> None:
        self.heading = heading  # of the next table

    def write_text(self, text: str) -> None:
        self.write(f"{text.strip()}\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        cells = [f"| `{_escape(term.strip())}` | {_escape(text)} |" for term, text in rows]
        self.write("\n".join([f"| {self.heading} | |", "|---|---|", *cells, ""]))


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def render_commands() -> str:
    """Return a page with the help of every command."""
    from feddbe.cli.main import app

    pages = ["# Commands", f"{app.help} This page is generated from `--help`."]
    pages += [_render_help(command, name) for name, command in _all_commands(app, "feddbe")]
    return "\n\n".join(pages) + "\n"


def _all_commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for subname, subcommand in getattr(command, "commands", {}).items():
        yield from _all_commands(subcommand, f"{name} {subname}")


def _render_help(command: click.Command, name: str) -> str:
    formatter = _MarkdownHelp()
    command.format_help(click.Context(command, info_name=name), formatter)
    return f"## {name}\n\n{formatter.getvalue()}"


def render_methods() -> str:
    """Return a list of all methods, add-ons and hyperparameters."""
    from feddbe.cli.methods import format_default
    from feddbe.methods.registry import describe_methods

    intro = ["## All methods and parameters", "This list is generated from `feddbe methods`."]
    return (
        "\n\n".join([*intro, *(_render_method(method, format_default) for method in describe_methods())])
        + "\n"
    )


def _render_method(method: Any, default_of: Callable[[dict[str, Any]], str]) -> str:
    properties, exchange = [method["family"]], method["exchange"]
    if method["addons"]:
        properties.append(f"supports {', '.join(f'`+{name}`' for name in method['addons'])}")
    if exchange:
        parts = ((key, exchange.get(key)) for key in ("receives", "sends", "keeps", "secret", "evaluated"))
        properties += [f"{key}: {text}" for key, text in parts if text]
    rows = [
        [f"`{p['name']}`", p["meaning"], p["allowed"], default_of(p), p["search"]]
        for p in method["parameters"]
    ]
    table = ["| parameter | meaning | allowed | default | search |", "|---|---|---|---|---|"] if rows else []
    table += [f"| {' | '.join(map(_escape, row))} |" for row in rows]
    prefix = "+" if method["family"] == "add-on" else ""
    return "\n".join([f"### {prefix}{method['name']}", "", "; ".join(properties) + ".", "", *table])
