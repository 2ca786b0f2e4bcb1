"""docs/privacy.md lists what methods, add-ons and measures declare: nothing that is sent is left out."""

from __future__ import annotations

import re

import pytest

from feddbe import metrics
from feddbe.methods.base import BODY, HEAD, MODEL, AddOn, Method
from feddbe.methods.registry import ADDONS, METHODS
from feddbe.simulation.client import BUFFER
from tests.test_pages import DOCS

WORDS = {MODEL: "model", BODY: "f", HEAD: "h"}
PARTS: list[type[Method] | type[AddOn]] = [
    *(method for method in METHODS.values() if method.__module__.startswith("feddbe.")),
    *{part: None for parts in ADDONS.values() for part in parts},
]


def table(first_column: str) -> dict[str, list[str]]:
    """The table whose head begins so: the cells of each row by every name in its first cell."""
    text = (DOCS / "privacy.md").read_text(encoding="utf-8")
    lines = text[text.index(f"| {first_column} |") :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return {name: row[1:] for row in cells for name in re.findall("`([^`]*)`", row[0])}


def names(cell: str) -> set[str]:
    return {*re.findall("`([^`]*)`", cell)}


def declared(patterns: tuple[str, ...]) -> set[str]:
    return {WORDS.get(name, name) for name in patterns}


def test_privacy_page_lists_no_other_methods() -> None:
    known = {f"+{part.name}" if issubclass(part, AddOn) else part.name for part in PARTS}
    assert {*table("method or add-on")} == known


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_privacy_page_lists_what_is_declared(part: type[Method] | type[AddOn]) -> None:
    prefix = "+" if issubclass(part, AddOn) else ""
    sends, receives, of_others, secret = table("method or add-on")[f"{prefix}{part.name}"]
    assert names(sends) == declared(part.sends)
    assert names(receives) == declared(part.receives)
    assert names(secret) == declared(part.secret)
    hands_on = issubclass(part, Method) and part.keeps_uploads
    assert ("models" in of_others) == hands_on


def test_privacy_page_explains_every_message() -> None:
    explained = {*table("message")}
    sent = {name for part in PARTS for name in declared(part.sends)}
    assert sent | {BUFFER} <= explained


def test_privacy_page_lists_every_measure() -> None:
    listed = table("number")
    known = {name: registered.inputs for name, registered in metrics.registered_metrics().items()}
    assert {*known} <= {*listed}
    for name, asks in known.items():
        assert ("representations" in listed[name][0]) == (asks == metrics.POOLED_INPUTS), name
