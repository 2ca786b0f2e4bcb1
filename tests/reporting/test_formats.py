"""A table in every format: the same values, as each reader takes them."""

from __future__ import annotations

import csv
import io
import json
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from feddbe.errors import BadInput
from feddbe.reporting.formatting import FORMATS, Column, Grid, as_html, as_rich, percent, render

GRID = Grid(
    [
        Column("method", "method", text=True),
        Column("accuracy", "accuracy in %", percent),
        Column("folder"),
        Column("", "±", lambda value: f"± {value:.1f}"),
    ],
    [["fedavg+dbe(kappa=5,mu=1)", 1 / 3, "runs/a b", 2.0], ["a|b & c_d", None, "x,y", 0.5]],
    "Of 2 clients.",
)


def test_csv_has_plain_names_all_digits_and_what_only_programs_want() -> None:
    rows = list(csv.reader(io.StringIO(render(GRID, "csv"))))
    assert rows == [
        ["method", "accuracy", "folder"],
        ["fedavg+dbe(kappa=5,mu=1)", repr(1 / 3), "runs/a b"],
        ["a|b & c_d", "", "x,y"],
    ]


def test_json_is_one_object_to_a_line() -> None:
    text = render(GRID, "json")
    assert json.loads(text) == [
        {"method": "fedavg+dbe(kappa=5,mu=1)", "accuracy": 1 / 3, "folder": "runs/a b"},
        {"method": "a|b & c_d", "accuracy": None, "folder": "x,y"},
    ]
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null_for_programs(value: float) -> None:
    grid = Grid([Column("a", "a")], [[value]])
    assert json.loads(render(grid, "json")) == [{"a": None}]
    assert list(csv.reader(io.StringIO(render(grid, "csv")))) == [["a"], [""]]


def test_markdown() -> None:
    assert render(GRID, "markdown").splitlines() == [
        "| method | accuracy in % | ± |",
        "|---|---:|---:|",
        "| fedavg+dbe(kappa=5,mu=1) | 33.33 | ± 2.0 |",
        "| a\\|b & c_d | - | ± 0.5 |",
        "",
        "Of 2 clients.",
    ]


def test_latex_says_what_it_means_to_tex() -> None:
    found = render(GRID, "latex").splitlines()
    assert found[0] == "% Of 2 clients."
    assert found[1] == r"\begin{tabular}{lrr}"
    assert r"method & accuracy in \% & $\pm$ \\" in found
    assert r"a|b \& c\_d & - & $\pm$ 0.5 \\" in found
    assert found[-1] == r"\end{tabular}"


def test_html_is_a_table_and_obeys_no_name() -> None:
    grid = Grid([Column("a", "<b>", text=True), Column("b", "n")], [["<script>", 1]], "a < b")
    table = ElementTree.fromstring(f"<div>{as_html(grid)}</div>")
    assert [cell.text for cell in table.iter("th")] == ["<b>", "n"]
    assert [cell.text for cell in table.iter("td")] == ["<script>", "1"]
    assert [cell.attrib["style"] for cell in table.iter("td")] == ["text-align: left", "text-align: right"]
    assert [note.text for note in table.iter("small")] == ["a < b"]


def test_rich() -> None:
    with Console(width=60, file=io.StringIO()) as console:
        with console.capture() as captured:
            console.print(as_rich(GRID))
        found = [line.split() for line in captured.get().splitlines()]
    assert found[0] == ["method", "accuracy", "in", "%", "±"]
    assert ["a|b", "&", "c_d", "-", "±", "0.5"] in found
    assert found[-1] == ["Of", "2", "clients."]


@given(
    st.lists(
        st.tuples(st.text("ab|,\"'\n\r \\&é") | st.text(), st.floats() | st.none() | st.integers()),
        max_size=5,
    )
)
def test_any_cell_survives(rows: list[tuple[str, float | None]]) -> None:
    """One row stays one row of as many cells, whatever is in it."""
    grid = Grid([Column("a", "a", text=True), Column("b", "b")], rows)
    assert [record["a"] for record in json.loads(render(grid, "json"))] == [a for a, _ in rows]
    read = list(csv.DictReader(io.StringIO(render(grid, "csv"), newline="")))
    assert [record["a"] for record in read] == [" ".join(a.splitlines()) for a, _ in rows]
    assert render(grid, "markdown").count("\n") == 2 + len(rows)


def test_an_unknown_format_lists_those_that_there_are() -> None:
    with pytest.raises(BadInput, match="unknown format 'latx'; did you mean 'latex'"):
        render(GRID, "latx")
    assert sorted(FORMATS) == ["csv", "json", "latex", "markdown"]
