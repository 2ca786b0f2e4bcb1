"""Tables in the terminal: numbers, widths from 60 columns, with and without Unicode."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from feddbe.reporting import build_tables
from feddbe.reporting.build_tables import RunRecord, majority_accuracies
from feddbe.reporting.table import Name, format_bytes, format_seconds, render, to_html, to_page_block
from feddbe.results.document import Accuracy, at_moment, run_labels
from tests.documents import document

RISING = [0.1, 0.5, 0.91234, 0.8]
LONG = "fedprox+dbe(kappa=50,mu=1)"
RUN_RECORDS: list[RunRecord] = [
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
        "state": "[stopped], 2000 planned",
    },
]
LABELS = np.random.RandomState(0).poisson(1.5, (40, 10)).astype(np.int64)
TABLES: dict[str, RenderableType] = {
    "results": build_tables.results_table(
        [
            document("fedavg", RISING),
            document(LONG, [*[0.5] * 1999, 1.0]),
            document("moon", RISING, moment="after"),
        ]
    ),
    "runs": build_tables.runs_table(RUN_RECORDS),
    "split": build_tables.split_table(LABELS.sum(1), LABELS.sum(1), LABELS * 1000),
}


def lines(renderable: RenderableType, width: int = 80, encoding: str = "utf-8") -> list[str]:
    """Return the printed lines; a character that the encoding lacks raises an error."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as file:
        Console(file=file, width=width, legacy_windows=False).print(renderable)
        return raw.getvalue().decode(encoding).splitlines()


def words(renderable: RenderableType, width: int = 80) -> str:
    """Return the printed text in one line."""
    return " ".join(" ".join(lines(renderable, width)).split())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", TABLES)
def test_lines_fit_and_nothing_is_cut(name: str, width: int, encoding: str) -> None:
    printed = lines(TABLES[name], width, encoding)
    assert max(map(len, printed)) <= width
    assert "…" not in "".join(printed)
    assert len(printed) > 3


def find_row(printed: list[str], start: str) -> list[str]:
    """Return the words of the first line with `start`, from there to its end."""
    line = next(line for line in printed if start in line)
    return line[line.index(start) :].split()


@pytest.mark.parametrize("width", [60, 80])
def test_results_show_best_and_last_round_cost_and_majority_class(width: int) -> None:
    """Rounds 1 to 3 took 1.25, 2.25 and 3.25 seconds; the 99 of the setup do not count."""
    printed = lines(build_tables.results_table([document("fedavg", RISING)]), width)
    assert find_row(printed, "best") == [
        "best",
        "@2",
        "91.23",
        "90.23",
        "86.23",
        "2.25",
        "61.0",
        "kB",
        "2.33",
        "MB",
    ]
    assert find_row(printed, "last") == ["last", "@3", "80.00", "79.00", "75.00"]
    assert "20.00" in next(line for line in printed if line.startswith("majority"))


def test_results_without_room_for_costs_keep_the_accuracy() -> None:
    printed = lines(build_tables.results_table([document("fedavg", RISING)]), 40)
    assert find_row(printed, "best") == ["best", "@2", "91.23", "90.23", "86.23"]
    assert "ytes" not in "".join(printed), "the note of a column is dropped with it"


def test_numbers_are_right_aligned() -> None:
    printed = lines(build_tables.results_table([document("a", [0.1, 1.0, 0.05])]))
    ends = {
        line.index(text) + len(text)
        for line in printed
        for text in ("100.00", "  5.00", " 20.00")
        if text in line
    }
    assert len(ends) == 1


def test_results_note_names_moment_and_selection() -> None:
    text = words(build_tables.results_table([document("fedavg", RISING)]))
    assert "before local training" in text
    assert "chosen on test accuracy" in text
    mixed = words(
        build_tables.results_table([document("fedavg", RISING), document("moon", RISING, moment="after")])
    )
    assert "(before local training: fedavg; after local training: moon)" in mixed
    many = [document(f"m{i}", RISING) for i in range(5)]
    text = words(build_tables.results_table([*many, document("moon", RISING, moment="after")]))
    assert "(after local training: moon; before local training: all others)" in text


def test_results_note_names_batch_norm_statistics() -> None:
    plain, local = document("fedavg", RISING), document("moon", RISING, bn_buffers="local")
    average = document("ditto", RISING, bn_buffers="average")
    assert "BatchNorm" not in words(build_tables.results_table([plain]))
    assert "BatchNorm statistics: local" in words(build_tables.results_table([local]))
    assert "BatchNorm statistics: averaged" in words(build_tables.results_table([average] * 2))
    assert "statistics: none: fedavg; local, each client's own: moon; averaged over clients: ditto." in words(
        build_tables.results_table([plain, local, average])
    )


def test_run_notes_are_below_the_table_with_the_run_name() -> None:
    run = document("pfedme", RISING)
    run["remarks"] = ["lr does nothing: its rates are lr_p and eta", "mr kappa 3, selected automatically"]
    text = words(build_tables.results_table([document("fedavg", RISING), run]))
    assert "pfedme: lr does nothing: its rates are lr_p and eta; mr kappa 3, selected automatically." in text
    assert "fedavg:" not in text


def test_results_name_fine_tuning_new_clients_and_selection() -> None:
    run = document("fedavg+ft", RISING, validation=0.2, adapt_epochs=7)
    adapted: Accuracy = {"weighted": 0.9511, "mean": 0.9422, "worst_tenth": 0.9333, "std": 0.1}
    assert run["last"]
    run["last"]["adapted"] = adapted
    text = words(build_tables.results_table([run]))
    assert "adapted 95.11 94.22 93.33" in text
    assert "after 7 epochs of fine-tuning the last model on each client" in text
    assert "The best round is chosen on 0.2 of the training data, held out." in text
    assert "New:" not in text
    run["new_clients"] = {
        "adaptation": "full", "round": 3, "clients": 2, "epochs": 7, "by_epoch": [],
        "before": None, "adapted": adapted,
    }  # fmt: skip
    text = words(build_tables.results_table([run]))
    assert "new, adapted 95.11 94.22 93.33" in text
    assert "New: clients that did not take part in training." in text


def test_another_moment_of_the_same_run() -> None:
    run = document("fedavg", RISING)
    for result, weighted in zip(run["rounds"], (0.2, 0.9, 0.3), strict=False):
        result["after"] = {"weighted": weighted, "mean": 0.5, "worst_tenth": 0.1, "std": 0.1}
    other = at_moment(run, "after")
    assert [result["moment"] for result in other["rounds"]] == ["after"] * 4
    assert other["best"] == other["rounds"][1]
    assert other["last"] == other["rounds"][2], "no client trained after the last round"
    assert "after local training" in words(build_tables.results_table([other]))
    assert run["best"] == run["rounds"][2]


def test_results_distinguish_runs_of_one_method() -> None:
    same = [document("fedavg", RISING, seed=seed, out=f"runs/{seed}") for seed in (0, 1)]
    printed = words(build_tables.results_table([*same, document("moon", RISING, seed=2)]))
    assert "fedavg, seed 0 " in printed
    assert "fedavg, seed 1 " in printed
    assert "moon, seed" not in printed
    resumed = [document("fedavg", RISING, resume=resume, data_dir=str(resume)) for resume in (False, True)]
    assert "fedavg," not in words(build_tables.results_table(resumed))
    assert "runs/" not in printed


def test_labels_name_other_data_without_its_settings() -> None:
    """Runs on the same data have all settings that differ."""
    digits_runs = [
        document("fedavg", RISING, lr=lr, batch_size=batch) for lr, batch in ((0.1, 10), (0.2, 20))
    ]
    har_run = document("fedavg", RISING, data="har", partition="natural", model="har_cnn", lr=0.05)
    assert run_labels([*digits_runs, har_run, document("moon", RISING)]) == [
        "fedavg, data digits, lr 0.1, batch size 10",
        "fedavg, data digits, lr 0.2, batch size 20",
        "fedavg, data har",
        "moon",
    ]


def test_majority_class_names_the_data_only_if_accuracies_differ() -> None:
    two = [document("a", RISING), document("b", RISING, majority_accuracy=0.3, data="har")]
    printed = lines(build_tables.results_table(two))
    assert find_row(printed, "majority class, digits")[-1] == "20.00"
    assert find_row(printed, "majority class, har")[-1] == "30.00"
    assert len([line for line in lines(build_tables.results_table([two[0]] * 2)) if "majority" in line]) == 1


def test_majority_accuracies_are_named_by_data_or_partition_seed() -> None:
    first = document("fedavg", [0.1], partition_seed=1, majority_accuracy=0.2)
    second = document("fedavg", [0.1], partition_seed=2, majority_accuracy=0.3)
    other_data = document("fedavg", [0.1], data="har", partition_seed=1, majority_accuracy=0.4)
    assert majority_accuracies([first, first]) == {0.2: ""}
    assert majority_accuracies([first, second]) == {0.2: ", partition seed 1", 0.3: ", partition seed 2"}
    assert majority_accuracies([first, other_data]) == {0.2: ", digits", 0.4: ", har"}


def test_results_of_a_run_without_evaluation_or_rounds() -> None:
    printed = lines(build_tables.results_table([document("fedavg", [None])]))
    assert find_row(printed, "best") == ["best", "-", "-", "-", "-", "61.0", "kB", "2.33", "MB"]
    assert find_row(printed, "last") == ["last", "-", "-", "-"]


def test_brackets_in_a_name_are_not_markup() -> None:
    run = document("[bold]x[/bold]", RISING)
    mixed = build_tables.results_table([run, document("y", RISING, moment="after")])
    assert words(mixed).count("[bold]x[/bold]") == 2
    assert "[stopped], 2000" in words(TABLES["runs"])


@given(st.text("ab+(,_/-: 1)", min_size=1, max_size=40), st.integers(1, 30))
def test_a_broken_name_loses_nothing(name: str, width: int) -> None:
    assert "".join("".join(lines(Name(name), width)).split()) == "".join(name.split())


def test_a_name_breaks_at_punctuation() -> None:
    assert [line.strip() for line in lines(Name(LONG), 13)] == [
        "fedprox+dbe",
        "(kappa=50,",
        "mu=1)",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
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
def test_bytes_in_decimal_units_and_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.000"), (0.0123, "0.012"), (0.0996, "0.10"), (9.996, "10.0"), (123.4, "123")]
)
def test_seconds_in_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


# Lists


def test_runs_have_all_columns_in_a_wide_terminal() -> None:
    printed = lines(build_tables.runs_table(RUN_RECORDS), 140)
    numbers = ["7", "2000", "97.16", "50.00", "2026-11-17", "05:20", "finished"]
    assert find_row(printed, "digits-fedavg")[1:] == [LONG, "tiny_imagenet", *numbers]
    assert find_row(printed, "x ") == [
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
        "planned",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_run_names_are_not_broken_and_records_are_complete(width: int) -> None:
    printed = lines(build_tables.runs_table(RUN_RECORDS), width)
    assert "digits-fedavg+dbe-seed0" in {line.strip() for line in printed}
    text = " ".join(" ".join(printed).split())
    values = "rounds 2000, best % 97.16, last % 50.00, 2026-11-17 05:20, finished"
    assert f"{LONG}, tiny_imagenet, seed 7, {values}" in text


def test_runs_drop_columns_that_names_contain() -> None:
    rows: list[RunRecord] = [
        {**RUN_RECORDS[0], "name": f"compare-digits-1/{method}", "method": method, "data": "digits"}
        for method in ("fedavg", "fedavg+dbe")
    ]
    assert lines(build_tables.runs_table(rows), 120)[0].split()[:3] == ["run", "method", "data"]
    narrow = lines(build_tables.runs_table(rows), 80)
    assert narrow[0].split()[:3] == ["run", "seed", "rounds"]
    assert find_row(narrow, "compare-digits-1/fedavg+dbe")[-2:] == ["05:20", "finished"]


def test_split_shows_sizes_and_the_most_frequent_labels() -> None:
    labels = np.array([[0, 5, 2, 0, 3], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    printed = lines(build_tables.split_table([7, 1, 0], [3, 0, 0], labels))
    assert find_row(printed, "0      7") == ["0", "7", "3", "3", "1", "(50%),", "4", "(30%),", "2", "(20%)"]
    assert find_row(printed, "1      1") == ["1", "1", "0", "1", "0", "(100%)"]
    assert find_row(printed, "2      0") == ["2", "0", "0", "0"]
    assert find_row(printed, "all") == ["all", "8", "3", "4", "1", "(45%),", "4", "(27%),", "2", "(18%)"]


def test_the_lower_of_equally_frequent_labels_is_first() -> None:
    assert build_tables._frequent_labels(np.full(100, 3)) == "0 (1%), 1 (1%), 2 (1%)"


@pytest.mark.parametrize(("clients", "record_count"), [(25, 25), (26, 24), (1000, 24)])
def test_split_shows_at_most_25_rows(clients: int, record_count: int) -> None:
    printed = lines(
        build_tables.split_table([3] * clients, [1] * clients, np.ones((clients, 4), dtype=np.int64))
    )
    assert len([line for line in printed if re.match(r" *\d+ ", line)]) == record_count
    more = [line for line in printed if "more clients" in line]
    assert len(more) == (record_count < clients)
    if more:
        assert f"... and {clients - record_count} more clients" in more[0]
    assert find_row(printed, "all")[1:4] == [str(3 * clients), str(clients), "4"]


def test_results_note_names_a_subset_of_the_data() -> None:
    run = document("fedavg", RISING)
    run["note"] = "a subset: 9,995 of 120,000 training rows"
    assert "Data: a subset: 9,995 of 120,000 training rows." in words(build_tables.results_table([run]))


# Metrics of users


def test_a_metric_of_every_round_is_in_every_output() -> None:
    """`sharpness` is a metric of test data, `effort` of training."""
    run = document("fedavg", RISING)
    for result in run["rounds"]:
        read = {"weighted": 2.5 + result["round"], "mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
        result["metrics"] = {"before": {"sharpness": read, "loss": read}, "training": {"effort": read}}
    table = build_tables.results_table([run])
    assert table.to_records()[0]["best_sharpness"] == 4.5
    assert table.to_records()[0]["last_effort"] == 5.5
    for text in (render(table, "markdown"), render(table, "latex"), to_html(table)):
        assert "best sharpness" in text
        assert "last effort" in text
    assert {"best sharpness", "last effort", "best loss"} <= set(to_page_block(table, "runs")["columns"])
    wide = lines(table, 120)
    assert "sharpness effort" in " ".join(find_row(wide, "method"))
    assert "loss" not in " ".join(wide[:3]), "it is a default metric"
    assert find_row(wide, "best").count("4.500") == 2
    narrow = " ".join(lines(table, 70)[:3])
    assert "sharpness" in narrow
    assert "down" not in narrow, "selected metrics come before costs"
    run["config"]["metrics"] = "accuracy,loss"
    assert "loss" in " ".join(lines(build_tables.results_table([run]), 120)[:3])
    frame = build_tables.rounds_table(run).to_pandas()
    assert frame["sharpness"].tolist() == frame["effort"].tolist() == [2.5, 3.5, 4.5, 5.5]


def test_a_metric_may_have_the_name_of_a_column() -> None:
    run = document("fedavg", RISING)
    for result in run["rounds"]:
        result["metrics"] = {"before": {"mean": {"weighted": 7.0}}}
    record = build_tables.results_table([run]).to_records()[0]
    assert (record["best_mean"], record["best_metric_mean"]) == (pytest.approx(0.90234), 7.0)
