"""Tables of fairness and overhead: numbers, widths from 60 to 120 columns, and missing baselines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from feddbe.reporting.build_tables import fairness_table, missing_baselines, overhead_table
from feddbe.results.fairness import compute_fairness, compute_overhead
from tests.documents import document

LONG = "fedprox+dbe(kappa=50,mu=1,init_mean=debiased)"


def print_table(table: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def row(name: str, table: str) -> list[str]:
    return next(line.split() for line in table.splitlines() if line.startswith(name))


def test_fairness_in_percent_with_pairs() -> None:
    runs = [document(method, [0.1, 0.9]) for method in ("fedavg+dbe", "fedavg", "local")]
    fairness = compute_fairness(
        runs, [{0: 0.9, 1: 0.5, 2: 0.5}, {0: 0.8, 1: 0.6, 2: 0.5}, {0: 0.7, 1: 0.2, 2: 0.1}]
    )
    table = print_table(fairness_table(fairness))
    assert row("fedavg+dbe", table) == [
        *("fedavg+dbe", "1", "63.33", "18.86", "50.00", "50.00", "50.00"),
        *("3/0/0", "1/1/1"),
    ]
    assert row("local", table)[-1] == "0/0/3", "against fedavg, not against itself"
    assert "over 3 clients" in table
    assert missing_baselines(fairness) == ""


def test_missing_baselines_are_named_and_the_rest_is_shown() -> None:
    fairness = compute_fairness([document("ditto", [0.5])], [{0: 0.9, 1: 0.5}])
    assert "against" not in print_table(fairness_table(fairness)).lower()
    assert missing_baselines(fairness).startswith("not compared with local or fedavg")
    only_fedavg = compute_fairness([document("fedavg", [0.5])], [{0: 0.9}])
    assert "local" in missing_baselines(only_fedavg)
    assert "fedavg" not in missing_baselines(only_fedavg)


def test_overhead_per_client_and_round_and_in_total() -> None:
    runs = [document("fedavg+dbe", [0.1, 0.5, 0.9, 0.8]), document("majority", [None])]
    table = print_table(
        overhead_table(
            [compute_overhead(runs[0], 13706), compute_overhead(runs[1], None)], ["fedavg+dbe", "majority"]
        )
    )
    first = row("fedavg+dbe", table)
    assert first == ["fedavg+dbe", "1.00", "2", "102", "61.0", "kB", "2.33", "MB", "13,706", "0", "B"]
    below = table.splitlines()[
        next(i for i, line in enumerate(table.splitlines()) if "fedavg+dbe" in line) + 1
    ]
    assert below.split() == ["of", "3", "4.88", "MB", "186", "MB"]
    assert row("majority", table)[2:4] == ["-", "-"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit(width: int) -> None:
    runs = [document(method, [0.1, 0.9]) for method in (LONG, "fedavg", "local")]
    accuracies = [{client: (i + client) / 130 for client in range(100)} for i in range(3)]
    costs = [compute_overhead(run, 11_279_112) for run in runs]
    for table in (
        fairness_table(compute_fairness(runs, accuracies)),
        overhead_table(costs, [LONG, "fedavg", "local"]),
    ):
        lines = print_table(table, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any("fedprox+dbe" in line for line in lines)
        assert "…" not in "".join(lines), "nothing is cut off"


def test_table_that_is_too_wide_is_transposed_and_its_words_stay_whole() -> None:
    runs = [document("fedavg+dbe", [0.1, 0.9], partition_seed=seed) for seed in (1, 2)]
    accuracies = [{client: (i + client) / 130 for client in range(100)} for i in range(2)]
    printed = print_table(fairness_table(compute_fairness(runs, accuracies)), 36)
    assert "fedavg+dbe, partition\n" in printed
    assert "worst tenth" in printed
    assert max(map(len, printed.splitlines())) <= 36
