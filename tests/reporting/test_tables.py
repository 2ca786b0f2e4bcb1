"""What the terminal shows: the right numbers, in any width from 60 columns on, with and without Unicode."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from feddbe.reporting import tables
from feddbe.reporting.formatting import Name, format_bytes, format_seconds
from feddbe.reporting.table import render, to_html, to_page_block
from feddbe.reporting.tables import RunRow
from feddbe.results.document import Accuracy, at_moment, run_labels
from tests.documents import document

RISING = [0.1, 0.5, 0.91234, 0.8]
LONG = "fedprox+dbe(kappa=50,mu=1)"
ROWS: list[RunRow] = [
    {
        "name": "digits-fedavg+dbe-seed0",
        "method": LONG,
        "data": "tiny_imagenet",
        "seed": 7,
        "begun": "2026-11-17T05:20:31.123+00:00",
        "rounds": 2000,
        "best": 0.97164,
        "last": 0.5,
        "state": "finished",
    },
    {
        "name": "x",
        "method": "fedavg",
        "data": "digits",
        "seed": None,
        "begun": "",
        "rounds": 0,
        "best": None,
        "last": None,
        "state": "[stopped], 2000 wanted",
    },
]
LABELS = np.random.RandomState(0).poisson(1.5, (40, 10)).astype(np.int64)
EVERYTHING: dict[str, RenderableType] = {
    "results": tables.results_table(
        [
            document("fedavg", RISING),
            document(LONG, [*[0.5] * 1999, 1.0]),
            document("moon", RISING, moment="after"),
        ]
    ),
    "runs": tables.runs_table(ROWS),
    "split": tables.split_table(LABELS.sum(1), LABELS.sum(1), LABELS * 1000),
}


def lines(shown: RenderableType, width: int = 80, encoding: str = "utf-8") -> list[str]:
    """As printed; a character that the encoding lacks raises."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as file:
        Console(file=file, width=width, legacy_windows=False).print(shown)
        return raw.getvalue().decode(encoding).splitlines()


def words(shown: RenderableType, width: int = 80) -> str:
    return " ".join(" ".join(lines(shown, width)).split())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", EVERYTHING)
def test_no_line_is_longer_than_the_console_and_nothing_is_cut(name: str, width: int, encoding: str) -> None:
    found = lines(EVERYTHING[name], width, encoding)
    assert max(map(len, found)) <= width
    assert "…" not in "".join(found)
    assert len(found) > 3


def row(found: list[str], start: str) -> list[str]:
    """The words of the first line that has `start` in it, from there on."""
    line = next(line for line in found if start in line)
    return line[line.index(start) :].split()


@pytest.mark.parametrize("width", [60, 80])
def test_results_show_best_and_last_round_cost_and_floor(width: int) -> None:
    """Rounds 1..3 took 1.25, 2.25 and 3.25 seconds; the 99 of the start do not count."""
    found = lines(tables.results_table([document("fedavg", RISING)]), width)
    assert row(found, "best") == ["best", "@2", "91.23", "90.23", "86.23", "2.25", "61.0", "kB", "2.33", "MB"]
    assert row(found, "last") == ["last", "@3", "80.00", "79.00", "75.00"]
    assert "20.00" in next(line for line in found if line.startswith("majority"))


def test_results_without_room_for_costs_keep_the_accuracy() -> None:
    found = lines(tables.results_table([document("fedavg", RISING)]), 40)
    assert row(found, "best") == ["best", "@2", "91.23", "90.23", "86.23"]
    assert "ytes" not in "".join(found), "its note goes with the column"


def test_numbers_are_right_aligned() -> None:
    found = lines(tables.results_table([document("a", [0.1, 1.0, 0.05])]))
    ends = {
        line.index(text) + len(text)
        for line in found
        for text in ("100.00", "  5.00", " 20.00")
        if text in line
    }
    assert len(ends) == 1


def test_results_say_what_the_numbers_are() -> None:
    said = words(tables.results_table([document("fedavg", RISING)]))
    assert "before local training" in said
    assert "chosen on test accuracy" in said
    mixed = words(
        tables.results_table([document("fedavg", RISING), document("moon", RISING, moment="after")])
    )
    assert "(before local training: fedavg; after local training: moon)" in mixed
    many = [document(f"m{i}", RISING) for i in range(5)]
    told = words(tables.results_table([*many, document("moon", RISING, moment="after")]))
    assert "(after local training: moon; before local training: all others)" in told


def test_results_say_where_batch_norm_statistics_are() -> None:
    plain, local = document("fedavg", RISING), document("moon", RISING, bn_buffers="local")
    average = document("ditto", RISING, bn_buffers="average")
    assert "BatchNorm" not in words(tables.results_table([plain]))
    assert "BatchNorm statistics: local" in words(tables.results_table([local]))
    assert "BatchNorm statistics: averaged" in words(tables.results_table([average] * 2))
    assert "statistics: none: fedavg; local, each client's own: moon; averaged over clients: ditto." in words(
        tables.results_table([plain, local, average])
    )


def test_remarks_are_below_the_table_with_the_run_they_belong_to() -> None:
    run = document("pfedme", RISING)
    run["remarks"] = ["lr does nothing: its rates are lr_p and eta", "mr kappa 3, found by itself"]
    said = words(tables.results_table([document("fedavg", RISING), run]))
    assert "pfedme: lr does nothing: its rates are lr_p and eta; mr kappa 3, found by itself." in said
    assert "fedavg:" not in said


def test_results_name_fine_tuning_newcomers_and_how_the_round_was_chosen() -> None:
    run = document("fedavg+ft", RISING, validation=0.2, adapt_epochs=7)
    tuned: Accuracy = {"weighted": 0.9511, "mean": 0.9422, "worst_tenth": 0.9333, "std": 0.1}
    assert run["last"]
    run["last"]["adapted"] = tuned
    shown = words(tables.results_table([run]))
    assert "tuned 95.11 94.22 93.33" in shown
    assert "after 7 epochs of each client's own from the last model" in shown
    assert "The best round is chosen on 0.2 of the training data, held out." in shown
    assert "New:" not in shown
    run["new_clients"] = {
        "adaptation": "full", "round": 3, "clients": 2, "epochs": 7, "by_epoch": [],
        "before": None, "adapted": tuned,
    }  # fmt: skip
    shown = words(tables.results_table([run]))
    assert "new, tuned 95.11 94.22 93.33" in shown
    assert "New: clients that took no part in the training." in shown


def test_another_moment_of_the_same_run() -> None:
    run = document("fedavg", RISING)
    for entry, weighted in zip(run["rounds"], (0.2, 0.9, 0.3), strict=False):
        entry["after"] = {"weighted": weighted, "mean": 0.5, "worst_tenth": 0.1, "std": 0.1}
    other = at_moment(run, "after")
    assert [entry["moment"] for entry in other["rounds"]] == ["after"] * 4
    assert other["best"] == other["rounds"][1]
    assert other["last"] == other["rounds"][2], "nobody trained after the last round"
    assert "after local training" in words(tables.results_table([other]))
    assert run["best"] == run["rounds"][2]


def test_results_tell_runs_of_one_method_apart() -> None:
    same = [document("fedavg", RISING, seed=seed, out=f"runs/{seed}") for seed in (0, 1)]
    found = words(tables.results_table([*same, document("moon", RISING, seed=2)]))
    assert "fedavg, seed 0 " in found
    assert "fedavg, seed 1 " in found
    assert "moon, seed" not in found
    resumed = [document("fedavg", RISING, resume=resume, data_dir=str(resume)) for resume in (False, True)]
    assert "fedavg," not in words(tables.results_table(resumed))
    assert "runs/" not in found


def test_what_follows_from_other_data_is_not_said() -> None:
    """Only which data it is; and all in which runs on the same data differ."""
    mine = [document("fedavg", RISING, lr=lr, batch_size=batch) for lr, batch in ((0.1, 10), (0.2, 20))]
    theirs = document("fedavg", RISING, data="har", partition="natural", model="har_cnn", lr=0.05)
    assert run_labels([*mine, theirs, document("moon", RISING)]) == [
        "fedavg, data digits, lr 0.1, batch 10",
        "fedavg, data digits, lr 0.2, batch 20",
        "fedavg, data har",
        "moon",
    ]


def test_results_name_the_data_of_a_floor_only_where_floors_differ() -> None:
    two = [document("a", RISING, majority_accuracy=0.2), document("b", RISING, majority_accuracy=0.3, data="har")]
    found = lines(tables.results_table(two))
    assert row(found, "majority class, digits")[-1] == "20.00"
    assert row(found, "majority class, har")[-1] == "30.00"
    assert len([line for line in lines(tables.results_table([two[0]] * 2)) if "majority" in line]) == 1


def test_results_of_a_run_without_evaluation_or_rounds() -> None:
    found = lines(tables.results_table([document("fedavg", [None])]))
    assert row(found, "best") == ["best", "-", "-", "-", "-", "61.0", "kB", "2.33", "MB"]
    assert row(found, "last") == ["last", "-", "-", "-"]


def test_brackets_in_a_name_are_shown_not_obeyed() -> None:
    run = document("[bold]x[/bold]", RISING)
    mixed = tables.results_table([run, document("y", RISING, moment="after")])
    assert words(mixed).count("[bold]x[/bold]") == 2
    assert "[stopped], 2000" in words(EVERYTHING["runs"])


@given(st.text("ab+(,_/-: 1)", min_size=1, max_size=40), st.integers(1, 30))
def test_a_broken_name_loses_nothing(name: str, width: int) -> None:
    assert "".join("".join(lines(Name(name), width)).split()) == "".join(name.split())


def test_a_name_breaks_at_its_joints() -> None:
    assert [line.strip() for line in lines(Name(LONG), 13)] == [
        "fedprox+dbe",
        "(kappa=50,",
        "mu=1)",
    ]


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.00 kB"),
        (1000, "1.00 kB"),
        (81_640, "81.6 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (2_328_104, "2.33 MB"),
        (3.2e12, "3.20 TB"),
        (5e16, "50000 TB"),
    ],
)
def test_bytes_in_decimal_units_and_three_digits(count: float, said: str) -> None:
    assert format_bytes(count) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0.000"), (0.0123, "0.012"), (0.0996, "0.10"), (9.996, "10.0"), (123.4, "123")]
)
def test_seconds_in_three_digits(value: float, said: str) -> None:
    assert format_seconds(value) == said


# Lists


def test_runs() -> None:
    found = lines(tables.runs_table(ROWS), 140)
    numbers = ["7", "2000", "97.16", "50.00", "2026-11-17", "05:20", "finished"]
    assert row(found, "digits-fedavg")[1:] == [LONG, "tiny_imagenet", *numbers]
    assert row(found, "x ") == [
        "x",
        "fedavg",
        "digits",
        "-",
        "0",
        "-",
        "-",
        "-",
        "[stopped],",
        "2000",
        "wanted",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_name_of_a_run_is_never_broken_and_all_is_said(width: int) -> None:
    found = lines(tables.runs_table(ROWS), width)
    assert "digits-fedavg+dbe-seed0" in {line.strip() for line in found}
    said = " ".join(" ".join(found).split())
    about = "rounds 2000, best % 97.16, last % 50.00, 2026-11-17 05:20, finished"
    assert f"{LONG}, tiny_imagenet, seed 7, {about}" in said


def test_runs_leave_out_what_every_name_says() -> None:
    rows: list[RunRow] = [
        {**ROWS[0], "name": f"compare-digits-1/{method}", "method": method, "data": "digits"}
        for method in ("fedavg", "fedavg+dbe")
    ]
    assert lines(tables.runs_table(rows), 120)[0].split()[:3] == ["run", "method", "data"]
    narrow = lines(tables.runs_table(rows), 80)
    assert narrow[0].split()[:3] == ["run", "seed", "rounds"]
    assert row(narrow, "compare-digits-1/fedavg+dbe")[-2:] == ["05:20", "finished"]


def test_split_shows_sizes_and_the_most_frequent_labels() -> None:
    labels = np.array([[0, 5, 2, 0, 3], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    found = lines(tables.split_table([7, 1, 0], [3, 0, 0], labels))
    assert row(found, "0      7") == ["0", "7", "3", "3", "1", "(50%),", "4", "(30%),", "2", "(20%)"]
    assert row(found, "1      1") == ["1", "1", "0", "1", "0", "(100%)"]
    assert row(found, "2      0") == ["2", "0", "0", "0"]
    assert row(found, "all") == ["all", "8", "3", "4", "1", "(45%),", "4", "(27%),", "2", "(18%)"]


def test_of_equally_frequent_labels_the_lower_come_first() -> None:
    assert tables._frequent_labels(np.full(100, 3)) == "0 (1%), 1 (1%), 2 (1%)"


@pytest.mark.parametrize(("clients", "shown"), [(25, 25), (26, 24), (1000, 24)])
def test_split_stops_at_25_rows(clients: int, shown: int) -> None:
    found = lines(tables.split_table([3] * clients, [1] * clients, np.ones((clients, 4), dtype=np.int64)))
    assert len([line for line in found if re.match(r" *\d+ ", line)]) == shown
    more = [line for line in found if "more clients" in line]
    assert len(more) == (shown < clients)
    if more:
        assert f"... and {clients - shown} more clients" in more[0]
    assert row(found, "all")[1:4] == [str(3 * clients), str(clients), "4"]


def test_a_subset_is_marked_in_the_table() -> None:
    run = document("fedavg", RISING)
    run["note"] = "a subset: 9,995 of 120,000 training rows"
    assert "The data: a subset: 9,995 of 120,000 training rows." in words(tables.results_table([run]))


# Metrics of users


def test_a_metric_of_every_round_is_in_every_output() -> None:
    """`sharpness` is measured of test data, `effort` of the training alone."""
    run = document("fedavg", RISING)
    for entry in run["rounds"]:
        read = {"weighted": 2.5 + entry["round"], "mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
        entry["metrics"] = {"before": {"sharpness": read, "loss": read}, "training": {"effort": read}}
    table = tables.results_table([run])
    assert table.to_records()[0]["best_sharpness"] == 4.5
    assert table.to_records()[0]["last_effort"] == 5.5
    for text in (render(table, "markdown"), render(table, "latex"), to_html(table)):
        assert "best sharpness" in text
        assert "last effort" in text
    assert {"best sharpness", "last effort", "best loss"} <= set(to_page_block(table, "runs")["columns"])
    wide = lines(table, 120)
    assert row(wide, "method")[-2:] == ["sharpness", "effort"], "loss is measured anyway"
    assert row(wide, "best")[-2:] == ["4.5", "4.5"]
    assert "sharpness" not in " ".join(lines(table, 70)[:3])
    frame = tables.rounds_table(run).to_pandas()
    assert frame["sharpness"].tolist() == frame["effort"].tolist() == [2.5, 3.5, 4.5, 5.5]


def test_a_metric_may_have_the_name_of_a_column() -> None:
    run = document("fedavg", RISING)
    for entry in run["rounds"]:
        entry["metrics"] = {"before": {"mean": {"weighted": 7.0}}}
    record = tables.results_table([run]).to_records()[0]
    assert (record["best_mean"], record["best_metric_mean"]) == (pytest.approx(0.90234), 7.0)
