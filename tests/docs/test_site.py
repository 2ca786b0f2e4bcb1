"""The documentation site: built strictly, complete, and without requests to other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import click
import pytest

import feddbe
from docs import hooks
from feddbe import cli
from feddbe.methods.registry import describe_methods
from tests.waiting import PATIENCE

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
ROOT = Path(__file__).parents[2]
EXTERNAL_RESOURCE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
"""A resource that a browser would load from another server; links are allowed."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return folder


def read_text(page: Path) -> str:
    """Return the text of a page without tags."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_site_has_every_page(site: Path) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert (site / f"{page.stem}.html").exists(), page.name
    assert "Quickstart" in read_text(site / "index.html"), "the README is the home page"


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert pages
    urls = {path.name: EXTERNAL_RESOURCE.findall(path.read_text(encoding="utf-8")) for path in pages}
    assert {name: matches for name, matches in urls.items() if matches} == {}


def test_links_lead_to_existing_files(site: Path) -> None:
    """Links to source files, which mkdocs does not check, are included."""
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # served at any address
        text = re.sub(r"<script.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r'(?:href|src)="(?!\w+:|#)([^"#?]+)', text):
            assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


def test_search_works_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "kappa" in index
    assert 'src="assets/iframe-worker.js"' in (site / "index.html").read_text(encoding="utf-8")


def all_commands(command: click.Command, name: str) -> dict[str, click.Command]:
    """Return a command and its subcommands by their full names."""
    commands = {name: command}
    for subcommand_name, subcommand in getattr(command, "commands", {}).items():
        commands |= all_commands(subcommand, f"{name} {subcommand_name}")
    return commands


def test_page_has_the_help_of_every_command(site: Path) -> None:
    page = read_text(site / "commands.html")
    for name, command in all_commands(cli.app, "feddbe").items():
        assert f"\n{name}" in page
        for option in command.params:
            for flag in option.opts if isinstance(option, click.Option) else ():
                assert flag in page, f"{name} {flag}"
            help_text = getattr(option, "help", None)
            if help_text:
                assert help_text.split("<")[0].strip() in page, f"{name}: {help_text}"


def test_page_has_every_method_with_its_parameters(site: Path) -> None:
    page = read_text(site / "methods.html")
    for description in describe_methods():
        assert description["name"] in page
        for parameter in description["parameters"]:
            assert parameter["meaning"] in page


def test_page_has_every_public_name(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    assert [name for name in feddbe.__all__ if f'id="feddbe.{name}"' not in page] == []


@pytest.mark.parametrize(
    ("uri", "markdown", "expected"),
    [
        ("index.md", "[a](docs/dbe.md#x)", "[a](dbe.md#x)"),
        ("index.md", "![a](docs/images/digits.png)", "![a](images/digits.png)"),
        ("dbe.md", "[a](../src/feddbe/seeds.py)", "[a](files/src/feddbe/seeds.py.md)"),
        ("dbe.md", "[a](../examples)", "[a](files/examples/README.md)"),
        ("dbe.md", "[a](../README.md)", "[a](index.md)"),
        ("files/CONTRIBUTING.md", "[a](docs/dbe.md)", "[a](../dbe.md)"),
        ("files/examples/README.md", "[a](arrays.py)", "[a](arrays.py.md)"),
        ("dbe.md", "[a](https://example.org/x) [b](#c)", "[a](https://example.org/x) [b](#c)"),
        ("dbe.md", "```sh\n[a](../README.md)\n```", "```sh\n[a](../README.md)\n```"),
    ],
)
def test_links_are_rewritten_for_the_site(uri: str, markdown: str, expected: str) -> None:
    assert hooks.relink(markdown, uri) == expected
