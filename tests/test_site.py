"""The site is built strictly, from what the code says of itself, and asks nobody else for anything."""

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

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
ROOT = Path(__file__).parents[1]
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
"""What a browser would fetch from elsewhere; a link that a reader may follow is none of it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def words(page: Path) -> str:
    """What a page says, without its marks."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_every_page_is_there(site: Path) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert (site / f"{page.stem}.html").exists(), page.name
    assert "Quickstart" in words(site / "index.html"), "the README is the home page"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert pages
    found = {path.name: FETCHED.findall(path.read_text(encoding="utf-8")) for path in pages}
    assert {name: urls for name, urls in found.items() if urls} == {}


def test_links_lead_to_files(site: Path) -> None:
    """Those to sources, which a checker of pages does not know, too."""
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # which is shown at any address
        text = re.sub(r"<script.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r'(?:href|src)="(?!\w+:|#)([^"#?]+)', text):
            assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


def test_search_can_be_used_from_the_disk(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "kappa" in index
    assert 'src="assets/iframe-worker.js"' in (site / "index.html").read_text(encoding="utf-8")


def every(command: click.Command, name: str) -> dict[str, click.Command]:
    found = {name: command}
    for below, inner in getattr(command, "commands", {}).items():
        found |= every(inner, f"{name} {below}")
    return found


def test_the_help_of_every_command(site: Path) -> None:
    page = words(site / "commands.html")
    for name, command in every(cli.app, "feddbe").items():
        assert f"\n{name}" in page
        for option in command.params:
            for flag in option.opts if isinstance(option, click.Option) else ():
                assert flag in page, f"{name} {flag}"
            if help := getattr(option, "help", None):
                assert help.split("<")[0].strip() in page, f"{name}: {help}"


def test_every_method_with_its_parameters(site: Path) -> None:
    page = words(site / "methods.html")
    for one in describe_methods():
        assert one["name"] in page
        for parameter in one["parameters"]:
            assert parameter["meaning"] in page


def test_every_public_name(site: Path) -> None:
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
def test_links(uri: str, markdown: str, expected: str) -> None:
    assert hooks.relink(markdown, uri) == expected
