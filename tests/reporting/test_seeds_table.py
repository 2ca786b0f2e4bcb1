"""Tables over seeds and partitions: what they compare, name and show at every width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from feddbe.reporting.build_figures import learning_curves
from feddbe.reporting.build_tables import results_table, seeds_table, sweep_table
from feddbe.reporting.figure import Curves
from feddbe.reporting.table import Output, Table, to_page_block
from feddbe.results.document import RunDocument
from tests.documents import document
from tests.reporting.test_build_tables import find_row, lines, words

SETTINGS: dict[str, Any] = {
    "model": "cnn_small", "lr": 0.1, "participation": 0.5, "partition": "dirichlet:0.1", "partition_seed": 1,
}  # fmt: skip


def repeat(
    method: str, last: Sequence[float], adapted: float | None = None, **config: Any
) -> list[RunDocument]:
    """Return runs with seeds 0, 1, ...: round 1 has accuracy 0.99, the last one these."""
    runs = [
        document(method, [0.1, 0.99, value], **SETTINGS | {"seed": i} | config)
        for i, value in enumerate(last)
    ]
    for run in runs if adapted else ():
        assert run["last"]
        run["last"]["adapted"] = {"weighted": adapted or 0, "mean": 0.5, "worst_tenth": 0.4, "std": 0.1}
        run["deployed_moment"] = "adapted"
    return runs


FEDAVG = repeat("fedavg", [0.7, 0.8, 0.9])
DBE = repeat("fedavg+dbe", [0.749, 0.85, 0.951])
TUNED = repeat("fedavg+ft", [0.7, 0.8, 0.9], adapted=0.97)


def test_verdicts_are_by_the_last_round_and_the_test_is_named_below() -> None:
    table = seeds_table([*FEDAVG, *DBE])
    printed = lines(table, 100)
    assert find_row(printed, "fedavg+dbe")[:7] == ["fedavg+dbe", "3", "85.00", "±", "25.09", "+5.00", "±"]
    assert "better" in find_row(printed, "fedavg+dbe")
    text = words(table, 100)
    assert "in the last round" in text
    assert "mean ± 95 % interval over 3 seeds (Student's t)" in text
    assert "1 difference of accuracy over 3 pairs of runs" in text
    assert "two-sided paired t-test at 5 % for the whole table (Holm's correction)" in text
    assert "Best round: chosen on test data, too high, and not compared." in text
    assert table.to_records()[1]["best"] == pytest.approx(0.99)
    assert table.to_records()[1]["difference"] == pytest.approx(0.05)


def test_page_explains_missing_verdicts_only() -> None:
    """A column in which only the baseline has a text hides other columns of a narrow page."""

    def keys(*runs: RunDocument) -> set[str]:
        return {column.key for column in seeds_table(runs).visible_columns(Output.PAGE)}

    assert "reason" not in keys(*FEDAVG, *DBE)
    assert "reason" in keys(*FEDAVG, *DBE[:2])
    assert "data" not in {column.key for column in results_table(FEDAVG).visible_columns(Output.PAGE)}


def test_note_names_a_missing_interval_and_clients_that_are_not_evaluated() -> None:
    text = words(seeds_table([FEDAVG[0], DBE[0]]), 100)
    assert "weighted by samples: a single run each, without an interval." in text
    assert "Each round evaluates" not in text
    sampled = repeat("fedavg", [0.7, 0.8], eval="sample:3")
    for table in (seeds_table(sampled), sweep_table(sampled), results_table(sampled)):
        assert "Each round evaluates 3 sampled clients only." in words(table, 100)
    assert "evaluates all clients or its cohort only" in words(
        seeds_table([*FEDAVG, *repeat("fedavg", [0.7, 0.8, 0.9], eval="cohort")]), 100
    )


@pytest.mark.parametrize(
    ("methods", "trials", "expected"),
    [
        (1, 1, "1 difference of accuracy over 1 pair of"),
        (2, 3, "2 differences of accuracy, each over 3 pairs"),
    ],
)
def test_note_counts_differences_and_pairs(methods: int, trials: int, expected: str) -> None:
    others = [DBE, repeat("ditto", [0.7, 0.8, 0.9])][:methods]
    compared = [run for runs in others for run in runs[:trials]]
    assert expected in words(seeds_table([*FEDAVG, *compared]), 100)


def test_the_baseline_can_be_any_experiment() -> None:
    table = seeds_table([*FEDAVG, *DBE], baseline=1)
    assert [record["difference"] for record in table.to_records()] == [pytest.approx(-0.05), None]
    assert "difference to fedavg+dbe" in to_page_block(table, "seeds")["columns"]


def test_the_moment_of_each_method_is_named_if_a_method_adapts() -> None:
    table = seeds_table([*FEDAVG, *TUNED])
    moments = {record["name"]: record["moment"] for record in table.to_records()}
    assert moments == {"fedavg": "before", "fedavg+ft": "adapted"}
    tuned = table.to_records()[1]
    assert (tuned["accuracy"], tuned["adapted"], tuned["last"]) == pytest.approx((0.97, 0.97, 0.8))
    assert tuned["difference"] == pytest.approx(0.17)
    printed = lines(table, 160)
    assert find_row(printed, "fedavg+ft")[:4] == ["fedavg+ft", "3", "adapted", "97.00"]
    assert "adapted" in find_row(printed, "method")
    assert "Deployed before: before local training; adapted: after adapting" in words(table, 160)
    without = lines(seeds_table([*FEDAVG, *DBE]), 160)
    assert "adapted" not in find_row(without, "method")
    assert "deployed" not in find_row(without, "method")


def test_settings_and_majority_class_are_shown() -> None:
    text = words(seeds_table([*FEDAVG, *DBE]))
    assert "digits, dirichlet:0.1, 20 clients, 2 rounds, seeds 0 to 2, model cnn_small" in text
    assert "learning rate 0.1, participation 0.5." in text
    assert find_row(lines(seeds_table([*FEDAVG, *DBE])), "majority class") == ["majority", "class", "20.00"]
    table = seeds_table([*FEDAVG, *repeat("moon", [0.7, 0.8, 0.9], lr=0.02)])
    assert "Learning rate 0.1: fedavg; 0.02: moon." in words(table)
    assert "majority class" in to_page_block(table, "seeds")["columns"]


@pytest.mark.parametrize(
    ("seeds", "partitions", "title", "interval"),
    [
        (3, 1, "seeds", "over 3 seeds (Student's t)"),
        (1, 3, "partitions", "over 3 partitions (Student's t)"),
        (3, 2, "runs", "over 3 seeds x 2 partitions (Student's t, clustered by seed and by partition)"),
    ],
)
def test_the_interval_names_what_varies(seeds: int, partitions: int, title: str, interval: str) -> None:
    runs = [
        document(method, [0.1, 0.5 + 0.02 * seed + 0.1 * partition], seed=seed, partition_seed=partition)
        for method in ("fedavg", "moon")
        for seed in range(seeds)
        for partition in range(partitions)
    ]
    table = seeds_table(runs)
    assert len(table.records) == 2
    assert interval in words(table)
    assert title in find_row(lines(table, 120), "method")
    assert f"over {seeds * partitions} pairs" in words(table)


def cells(table: Table, width: int, title: str) -> list[str]:
    """Return the words of all rows with this title in a transposed table."""
    return [word for line in lines(table, width) if line.startswith(f"{title}  ") for word in line.split()]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_names_and_numbers_are_whole_at_every_width(width: int) -> None:
    long = "fedprox+dbe(kappa=50)"
    table = seeds_table([*FEDAVG, *TUNED, *repeat(long, [0.75, 0.8, 0.9])])
    printed = lines(table, width)
    assert max(map(len, printed)) <= width
    for text in ("fedavg+ft", long, "97.00 ± 0.00", "80.00 ± 24.84", "+17.00 ± 24.84", "majority class"):
        assert any(text in line for line in printed), text


def test_a_narrow_terminal_has_a_row_for_each_column() -> None:
    table = seeds_table([*FEDAVG, *TUNED])
    assert lines(table, 60)[0].split() == ["fedavg", "fedavg+ft"]
    assert cells(table, 60, "deployed") == ["deployed", "before", "adapted"]
    assert cells(table, 60, "accuracy")[:4] == ["accuracy", "80.00", "±", "24.84"]
    assert cells(table, 160, "accuracy") == []


def test_legend_and_table_have_the_same_number() -> None:
    """The best round of the mean curve is 99 %, which is in no table."""
    runs = [*FEDAVG, *DBE, *TUNED]
    (panel,) = learning_curves(runs).panels
    assert isinstance(panel, Curves)
    means = [f"{record['accuracy'].mean:.2f} %" for record in seeds_table(runs).records]
    texts = [series.mark.text for series in panel.series if series.mark]
    assert texts == [f"{means[0]} in round 2", f"{means[1]} in round 2", f"adapted {means[2]} in round 2"]


def test_a_sweep_compares_chosen_experiments_as_they_are_deployed() -> None:
    runs = [
        *repeat("fedavg", [0.7, 0.8, 0.9], validation=0.2),
        *repeat("fedavg+ft", [0.7, 0.8, 0.9], 0.97, validation=0.2),
    ]
    for run in runs:
        for result in run["rounds"]:
            result["validation"] = result["accuracy"]
    table = sweep_table(runs)
    assert [record["accuracy"] for record in table.to_records()] == pytest.approx([0.99, 0.97])
    assert [record["moment"] for record in table.to_records()] == ["before", "adapted"]
    assert "in the last round if the method adapts only after it" in words(table)
    assert "majority class" in words(table, 120)


def test_selected_metrics_are_columns_over_seeds() -> None:
    """A metric in percent is in percent for readers and a fraction for programs; others are as they are."""
    selected = repeat("fedavg", [0.7, 0.8, 0.9], metrics="accuracy,macro_f1,drift")
    for index, run in enumerate(selected):
        assert run["last"]
        values = {"macro_f1": 0.5 + index / 100, "drift": 1.25}
        run["last"]["metrics"]["before"] = {name: {"weighted": value} for name, value in values.items()}
    table = seeds_table(selected)
    (row,) = table.to_records()
    assert row["macro_f1"] == pytest.approx(0.51)
    assert row["macro_f1_half"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (row["drift"], row["drift_half"]) == (1.25, 0.0)
    text = words(table, 120)
    assert "51.00 ± 2.48" in text
    assert "1.2500 ± 0.0000" in text
    default = repeat("fedavg", [0.7, 0.8, 0.9])
    assert "AUC" not in words(seeds_table(default), 120)


def test_sweep_hides_test_results_of_values_that_are_not_chosen() -> None:
    runs = [
        *repeat("fedavg", [0.7, 0.8], metrics="accuracy,macro_f1", lr=0.1),
        *repeat("fedavg", [0.7, 0.8], metrics="accuracy,macro_f1", lr=0.2),
    ]
    for run in runs:
        for result in run["rounds"]:
            share = 0.4 + run["config"]["lr"]
            result["validation"] = {"weighted": share, "mean": share, "worst_tenth": share, "std": 0.0}
            result["metrics"]["before"] = {"macro_f1": {"weighted": 0.5}}
        run["best"] = run["last"] = run["rounds"][-1]
    records = sweep_table(runs).to_records()
    assert [(record["chosen"], record["macro_f1"]) for record in records] == [(False, None), (True, 0.5)]
    keys = ("accuracy", "best", "last", "worst_tenth")
    assert [[record[key] is None for key in keys] for record in records] == [[True] * 4, [False] * 4]
