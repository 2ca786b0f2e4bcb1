"""Means, intervals and differences over seeds, and the choice among cells, against numbers by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, sqrt
from typing import Any

import pytest

from feddbe.results.document import RunDocument
from feddbe.results.repeats import chosen, repeats
from tests.documents import document

T2 = 4.302652729911275
"""t_{0.975} with two degrees of freedom."""


def seeds(method: str, last: Sequence[float], **config: Any) -> list[RunDocument]:
    return [document(method, [0.1, value], seed=seed, **config) for seed, value in enumerate(last)]


def test_the_mean_and_its_interval() -> None:
    """70, 80, 90: s = 10, so 80 ± t 10 / sqrt(3)."""
    (found,) = repeats(seeds("fedavg", [0.7, 0.8, 0.9]))
    assert found.best is not None
    assert found.best.mean == pytest.approx(80)
    assert found.best.half == pytest.approx(T2 * 10 / sqrt(3))
    assert found.worst_tenth is not None
    assert found.worst_tenth.mean == pytest.approx(75)
    assert found.difference is None
    assert found.verdict == ""


def test_differences_are_paired_by_seed() -> None:
    """Each is 5 better than the other with its seed, ± little: less than seeds differ among each other."""
    first, second = seeds("fedavg", [0.7, 0.8, 0.9]), seeds("fedavg+dbe", [0.749, 0.85, 0.951])
    found = repeats([*first, *reversed(second)])
    assert found[1].difference is not None
    assert found[1].difference.mean == pytest.approx(5.0)
    assert found[1].difference.half == pytest.approx(T2 * 0.1 / sqrt(3))
    assert found[1].verdict == "better"
    assert repeats([*second, *first])[1].verdict == "worse"


def test_better_is_not_said_where_the_interval_has_zero_in_it() -> None:
    found = repeats([*seeds("fedavg", [0.7, 0.8, 0.9]), *seeds("moon", [0.75, 0.80, 0.91])])
    assert found[1].difference is not None
    assert found[1].difference.mean > 0
    assert found[1].verdict == ""
    alone = repeats([*seeds("fedavg", [0.1]), *seeds("moon", [0.9])])[1]
    assert alone.difference is not None
    assert isinf(alone.difference.half)
    assert alone.verdict == "", "one seed says nothing"


def test_only_equal_seeds_and_splits_are_pairs() -> None:
    first = seeds("fedavg", [0.7, 0.8, 0.9], partition_seed=1)
    other = seeds("moon", [0.9, 0.9, 0.9], partition_seed=2)
    assert repeats([*first, *other])[1].difference is None
    two = repeats([*first, *seeds("moon", [0.72, 0.83], partition_seed=1)])[1].difference
    assert two is not None
    assert two.n == 2
    assert two.mean == pytest.approx(2.5)


def test_settings_make_experiments_and_seeds_do_not() -> None:
    runs = [*seeds("fedavg", [0.7, 0.8], lr=0.1), *seeds("fedavg", [0.5, 0.6], lr=0.2)]
    found = repeats(runs)
    assert [one.name for one in found] == ["fedavg, lr 0.1", "fedavg, lr 0.2"]
    assert [len(one.runs) for one in found] == [2, 2]


def test_a_run_that_diverged_is_in_no_mean_and_counted() -> None:
    runs = seeds("fedavg", [0.7, 0.9, 0.2])
    runs[2]["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    (found,) = repeats(runs)
    assert found.best is not None
    assert (found.best.n, found.diverged) == (2, 1)
    assert found.best.mean == pytest.approx(80)
    for run in runs:
        run["diverged"] = runs[2]["diverged"]
    assert repeats(runs)[0].best is None


def validated(method: str, validation: float, test: float, **config: Any) -> RunDocument:
    run = document(method, [0.0, test], validation=0.2, **config)
    assert run["best"]
    run["best"]["validation"] = {"weighted": validation, "mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
    return run


def test_cells_are_chosen_on_validation_data_whatever_test_data_say() -> None:
    runs = [
        validated("fedavg", 0.5, 0.9, lr=0.1),
        validated("fedavg", 0.6, 0.1, lr=0.2),
        validated("fedavg+dbe(kappa=1)", 0.7, 0.2),
        validated("fedavg+dbe(kappa=10)", 0.7, 0.99),
    ]
    assert chosen(repeats(runs)) == [1, 2], "of equal ones the first"
    runs[1]["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    assert chosen(repeats(runs)) == [0, 2]
    assert chosen(repeats(seeds("fedavg", [0.9]))) == [], "nothing was held out"
