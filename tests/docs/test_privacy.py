"""docs/privacy.md lists all messages that methods, add-ons and metrics declare."""

from __future__ import annotations

import re

import pytest

from feddbe.methods.base import BODY, HEAD, MODEL, AddOn, Method
from feddbe.methods.registry import ADDONS, METHODS
from feddbe.metrics import builtin
from feddbe.simulation.client import BUFFER
from tests.docs.test_pages import DOCS

WORDS = {MODEL: "model", BODY: "body", HEAD: "head"}
PARTS: list[type[Method] | type[AddOn]] = [
    *(method for method in METHODS.values() if method.__module__.startswith("feddbe.")),
    *{part: None for parts in ADDONS.values() for part in parts},
]


def read_table(first_column: str) -> dict[str, list[str]]:
    """Return the cells of each row by the names in its first cell."""
    text = (DOCS / "privacy.md").read_text(encoding="utf-8")
    lines = text[text.index(f"| {first_column} |") :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return {name: row[1:] for row in cells for name in re.findall("`([^`]*)`", row[0])}


def code_names(cell: str) -> set[str]:
    """Return the names in backticks."""
    return {*re.findall("`([^`]*)`", cell)}


def declared_names(patterns: tuple[str, ...]) -> set[str]:
    """Return declared names as the page writes them."""
    return {WORDS.get(name, name) for name in patterns}


def test_page_lists_exactly_the_known_methods() -> None:
    known = {f"+{part.name}" if issubclass(part, AddOn) else part.name for part in PARTS}
    assert {*read_table("method or add-on")} == known


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_page_lists_the_declared_names_names(part: type[Method] | type[AddOn]) -> None:
    prefix = "+" if issubclass(part, AddOn) else ""
    sends, receives, from_others, secret = read_table("method or add-on")[f"{prefix}{part.name}"]
    assert code_names(sends) == declared_names(part.sends)
    assert code_names(receives) == declared_names(part.receives)
    assert code_names(secret) == declared_names(part.secret)
    sends_other_models = issubclass(part, Method) and part.keeps_uploads
    assert ("models" in from_others) == sends_other_models


def test_page_explains_every_message() -> None:
    explained_names = {*read_table("message")}
    sent_names = {name for part in PARTS for name in declared_names(part.sends)}
    assert sent_names | {BUFFER} <= explained_names


def test_page_lists_every_metric() -> None:
    listed = read_table("number")
    inputs_by_metric = {name: registered.inputs for name, registered in builtin._METRICS.items()}
    assert {*inputs_by_metric} <= {*listed}
    for name, inputs in inputs_by_metric.items():
        assert ("representations" in listed[name][0]) == (inputs == builtin.POOLED_INPUTS), name
