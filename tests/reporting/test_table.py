"""A table in every format has the same values."""

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

from feddbe.errors import InvalidInputError
from feddbe.reporting.table import (
    FORMATS,
    INTERVAL,
    PERCENT,
    TEXT,
    Column,
    Kind,
    Narrow,
    Output,
    Priority,
    Table,
    render,
    to_html,
    to_page_block,
)
from feddbe.results.statistics import mean_interval

TABLE = Table(
    [
        Column("method", kind=TEXT),
        Column("accuracy", "accuracy in %", PERCENT),
        Column("folder", outputs=Output.PROGRAM),
        Column("spread", "±", Kind("± {:.1f}".format), outputs=Output.READER),
    ],
    [
        {"method": "fedavg+dbe(kappa=5,mu=1)", "accuracy": 1 / 3, "folder": "runs/a b", "spread": 2.0},
        {"method": "a|b & c_d", "accuracy": None, "folder": "x,y", "spread": 0.5},
    ],
    note="Of 2 clients.",
)


def print_lines(table: Table, width: int) -> list[str]:
    with Console(width=width, file=io.StringIO()) as console, console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_csv_has_keys_all_digits_and_program_columns() -> None:
    rows = list(csv.reader(io.StringIO(render(TABLE, "csv"))))
    assert rows == [
        ["method", "accuracy", "folder"],
        ["fedavg+dbe(kappa=5,mu=1)", repr(1 / 3), "runs/a b"],
        ["a|b & c_d", "", "x,y"],
    ]


def test_json_has_one_object_per_line() -> None:
    text = render(TABLE, "json")
    assert json.loads(text) == [
        {"method": "fedavg+dbe(kappa=5,mu=1)", "accuracy": 1 / 3, "folder": "runs/a b"},
        {"method": "a|b & c_d", "accuracy": None, "folder": "x,y"},
    ]
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_null_for_programs(value: float) -> None:
    table = Table([Column("a")], [{"a": value}])
    assert json.loads(render(table, "json")) == [{"a": None}]
    assert list(csv.reader(io.StringIO(render(table, "csv")))) == [["a"], [""]]
    assert to_page_block(table, "x")["rows"] == [[{"text": str(value), "value": None}]]


def test_markdown() -> None:
    assert render(TABLE, "markdown").splitlines() == [
        "| method | accuracy in % | ± |",
        "|---|---:|---:|",
        "| fedavg+dbe(kappa=5,mu=1) | 33.33 | ± 2.0 |",
        "| a\\|b & c_d | - | ± 0.5 |",
        "",
        "Of 2 clients.",
    ]


def test_latex_escapes_special_characters() -> None:
    lines = render(TABLE, "latex").splitlines()
    assert lines[0] == "% Of 2 clients."
    assert lines[1] == r"\begin{tabular}{lrr}"
    assert r"method & accuracy in \% & $\pm$ \\" in lines
    assert r"a|b \& c\_d & - & $\pm$ 0.5 \\" in lines
    assert lines[-1] == r"\end{tabular}"


def test_html_escapes_names() -> None:
    table = Table([Column("a", "<b>", TEXT), Column("b", "n")], [{"a": "<script>", "b": 1}], note="a < b")
    root = ElementTree.fromstring(f"<div>{to_html(table)}</div>")
    assert [cell.text for cell in root.iter("th")] == ["<b>", "n"]
    assert [cell.text for cell in root.iter("td")] == ["<script>", "1"]
    assert [cell.attrib["style"] for cell in root.iter("td")] == ["text-align: left", "text-align: right"]
    assert [note.text for note in root.iter("small")] == ["a < b"]


def test_rich_console() -> None:
    lines = [line.split() for line in print_lines(TABLE, 60)]
    assert lines[:2] == [["accuracy"], ["method", "in", "%", "±"]], "a title is as wide as its values"
    assert ["a|b", "&", "c_d", "-", "±", "0.5"] in lines
    assert lines[-1] == ["Of", "2", "clients."]


@given(
    st.lists(
        st.tuples(st.text("ab|,\"'\n\r \\&é") | st.text(), st.floats() | st.none() | st.integers()),
        max_size=5,
    )
)
def test_any_text_stays_one_cell(rows: list[tuple[str, float | None]]) -> None:
    """A record stays one row with the same number of cells."""
    table = Table([Column("a", kind=TEXT), Column("b")], [{"a": a, "b": b} for a, b in rows])
    assert [record["a"] for record in json.loads(render(table, "json"))] == [a for a, _ in rows]
    read = list(csv.DictReader(io.StringIO(render(table, "csv"), newline="")))
    assert [record["a"] for record in read] == [" ".join(a.splitlines()) for a, _ in rows]
    assert render(table, "markdown").count("\n") == 2 + len(rows)


def test_an_unknown_format_suggests_a_known_one() -> None:
    with pytest.raises(InvalidInputError, match="unknown format 'latx'; did you mean 'latex'"):
        render(TABLE, "latx")
    assert sorted(FORMATS) == ["csv", "json", "latex", "markdown"]


def test_the_page_sorts_by_value_and_shows_text() -> None:
    block = to_page_block(TABLE, "runs", has_filter=True)
    assert (block["id"], block["filter"], block["caption"]) == ("runs", True, "Of 2 clients.")
    assert block["columns"] == ["method", "accuracy in %", "±"]
    assert block["rows"][0] == [
        "fedavg+dbe(kappa=5,mu=1)", {"text": "33.33", "value": 0.3333}, {"text": "± 2.0", "value": 2.0},
    ]  # fmt: skip
    assert block["rows"][1][1] == {"text": "-", "value": None}


def test_an_interval_is_two_fractions_for_programs_and_one_text_for_readers() -> None:
    table = Table([Column("best", kind=INTERVAL)], [{"best": mean_interval([50.0, 60.0])}, {"best": None}])
    (first, second) = table.to_records()
    assert first["best"] == 0.55
    assert first["best_half"] == pytest.approx(0.635, abs=0.001)
    assert second == {"best": None, "best_half": None}
    assert to_page_block(table, "x")["rows"][0] == [{"text": "55.00 ± 63.53", "value": 55.0}]
    assert table.to_pandas()["best"].tolist()[0] == 0.55


_KEYS = ("name", "best_round", "best", "last_round", "last", "tuned", "cost", "extra")
STACKED = Table(
    [
        Column("name", kind=TEXT),
        Column("best_round", stack="round", line="best"),
        Column("best", "best score", stack="score", line="best"),
        Column("last_round", stack="round", line="last"),
        Column("last", "last score", stack="score", line="last"),
        Column("tuned", "tuned score", stack="score", line="tuned", hide_empty=True, note="Tuned: later."),
        Column("cost", priority=Priority.USEFUL, note="Cost: in coins."),
        Column("extra", priority=Priority.OPTIONAL, note="Extra: more."),
    ],
    [
        dict(zip(_KEYS, ("a", 3, 9, 4, 8, None, 1, 2), strict=True)),
        dict(zip(_KEYS, ("b", 1, 7, 4, 6, 5, 2, 3), strict=True)),
    ],
    footer=[{"name": "total", "best": 4}],
    line_stack="round",
)  # fmt: skip


def test_a_terminal_stacks_lines_that_other_outputs_have_side_by_side() -> None:
    lines = [line.split() for line in print_lines(STACKED, 60)]
    assert lines[0] == ["name", "round", "score", "cost", "extra"]
    assert lines[2:4] == [["a", "best", "@3", "9", "1", "2"], ["last", "@4", "8"]]
    assert lines[4:7] == [["b", "best", "@1", "7", "2", "3"], ["last", "@4", "6"], ["tuned", "5"]]
    assert ["total", "4"] in lines
    titles = render(STACKED, "markdown").splitlines()[0]
    assert "best score | last round | last score | tuned score | cost" in titles
    assert "total" not in render(STACKED, "markdown")


def test_a_narrow_terminal_drops_columns_with_their_notes() -> None:
    assert print_lines(STACKED, 60)[-1] == "Tuned: later. Cost: in coins. Extra: more."
    narrow = print_lines(STACKED, 25)
    assert "extra" not in narrow[0]
    assert " ".join(narrow).endswith("Tuned: later. Cost: in coins.")
    tiny = print_lines(STACKED, 20)
    assert "cost" not in tiny[0]
    assert tiny[-1] == "Tuned: later."
    assert max(map(len, tiny)) <= 20


def test_columns_without_a_value_are_hidden_from_readers_only() -> None:
    first = Table(STACKED.columns, STACKED.records[:1])
    assert "tuned" not in render(first, "markdown")
    assert "Tuned" not in " ".join(print_lines(first, 60))
    assert json.loads(render(first, "json"))[0]["tuned"] is None


def test_blocks_repeat_the_first_column() -> None:
    columns = [Column("name", kind=TEXT), *(Column(f"c{i}") for i in range(5))]
    table = Table(columns, [{"name": "a"} | {f"c{i}": 10**i for i in range(5)}], narrow=Narrow.STACK_BLOCKS)
    lines = [line.split() for line in print_lines(table, 16) if line]
    assert [line for line in lines if line[0] in ("name", "a")] == [
        ["name", "c0", "c1"], ["a", "1", "10"], ["name", "c2", "c3"], ["a", "100", "1000"],
        ["name", "c4"], ["a", "10000"],
    ]  # fmt: skip
    assert len([line for line in print_lines(table, 60) if line.startswith("a")]) == 1
