"""Means, intervals and differences over seeds and partitions, and selection on validation data, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, sqrt
from typing import Any

import numpy as np
import pytest

from feddbe.results.document import RunDocument
from feddbe.results.repetitions import (
    best_on_validation,
    describe_repetitions,
    group_names,
    group_seeds,
    methods_with_unequal_rounds,
    strip_options,
)
from tests.documents import document

T2 = 4.302652729911275
"""t_{0.975} with two degrees of freedom."""


def seeds(method: str, last: Sequence[float], *, held_out: bool = True, **config: Any) -> list[RunDocument]:
    """Return runs of two rounds with seeds 0, 1, ..., with or without validation data."""
    runs = [document(method, [0.1, value], seed=seed, **config) for seed, value in enumerate(last)]
    for run in runs if held_out else ():
        run["config"]["validation"] = 0.2
        for result in run["rounds"]:
            result["validation"] = result["accuracy"]
    return runs


def test_mean_and_interval_by_hand() -> None:
    """70, 80, 90: s = 10, so 80 ± t 10 / sqrt(3)."""
    (group,) = group_seeds(seeds("fedavg", [0.7, 0.8, 0.9]))
    assert group.accuracy is not None
    assert group.accuracy.mean == pytest.approx(80)
    assert group.accuracy.half_width == pytest.approx(T2 * 10 / sqrt(3))
    assert group.worst_tenth is not None
    assert group.worst_tenth.mean == pytest.approx(75)
    assert group.difference is None
    assert str(group.verdict) == "baseline"


def test_differences_are_paired_by_seed() -> None:
    """Each is about 5 better than the other with its seed, although seeds differ by more."""
    first, second = seeds("fedavg", [0.7, 0.8, 0.9]), seeds("fedavg+dbe", [0.749, 0.85, 0.951])
    groups = group_seeds([*first, *reversed(second)])
    assert groups[1].difference is not None
    assert groups[1].difference.mean == pytest.approx(5.0)
    assert groups[1].difference.half_width == pytest.approx(T2 * 0.1 / sqrt(3))
    assert groups[1].verdict.outcome == "better"
    assert group_seeds([*second, *first])[1].verdict.outcome == "worse"


def test_interval_with_zero_is_not_significant() -> None:
    groups = group_seeds([*seeds("fedavg", [0.7, 0.8, 0.9]), *seeds("moon", [0.75, 0.80, 0.91])])
    assert groups[1].difference is not None
    assert groups[1].difference.mean > 0
    assert str(groups[1].verdict) == "not significant"
    single = group_seeds([*seeds("fedavg", [0.1]), *seeds("moon", [0.9])])[1]
    assert single.difference is not None
    assert isinf(single.difference.half_width)
    assert str(single.verdict) == "fewer than 3 pairs"


def test_only_equal_seeds_and_splits_are_pairs() -> None:
    first = seeds("fedavg", [0.7, 0.8, 0.9], partition_seed=1)
    other = seeds("moon", [0.9, 0.9, 0.9], partition_seed=2)
    group = group_seeds([*first, *other])[1]
    assert group.difference is None
    assert str(group.verdict) == "no seed and partition in common"
    difference = group_seeds([*first, *seeds("moon", [0.72, 0.83], partition_seed=1)])[1].difference
    assert difference is not None
    assert difference.n == 2
    assert difference.mean == pytest.approx(2.5)


def curves(method: str, last: Sequence[float], peak: float, **config: Any) -> list[RunDocument]:
    """Return runs of three rounds without validation data, whose best round is not the last."""
    return [document(method, [0.1, peak, value], seed=seed, **config) for seed, value in enumerate(last)]


def test_last_rounds_are_compared_and_not_best_ones_chosen_on_test_data() -> None:
    """By the last round moon is 5 better, by the best round 9 worse."""
    first = curves("fedavg", [0.7, 0.8, 0.9], 0.99)
    group = group_seeds([*first, *curves("moon", [0.749, 0.85, 0.951], 0.96)])[1]
    assert group.difference is not None
    assert group.difference.mean == pytest.approx(5.0)
    assert group.verdict.outcome == "better"
    assert group.accuracy == group.last
    assert group.best is not None
    assert group.best.mean == pytest.approx(96)


def test_rounds_chosen_on_validation_data_are_compared() -> None:
    """Validation data selects round 1, in which moon is 3 worse; it is 5 better in the last round."""
    first = curves("fedavg", [0.7, 0.8, 0.9], 0.99, validation=0.2)
    second = curves("moon", [0.749, 0.85, 0.951], 0.96, validation=0.2)
    for run in (*first, *second):
        for result in run["rounds"]:
            result["validation"] = result["accuracy"]
    group = group_seeds([*first, *second])[1]
    assert group.accuracy == group.best
    assert group.difference is not None
    assert group.difference.mean == pytest.approx(-3)


def adapted(method: str, before: Sequence[float], after: Sequence[float], **config: Any) -> list[RunDocument]:
    """Return runs whose clients fine-tune the model of the last round."""
    runs = seeds(method, before, **config)
    for run, weighted in zip(runs, after, strict=True):
        assert run["last"]
        run["last"]["adapted"] = {"weighted": weighted, "mean": 0.5, "worst_tenth": 0.4, "std": 0.1}
        run["deployed_moment"] = "adapted"
    return runs


@pytest.mark.parametrize("held_out", [False, True])
def test_methods_are_compared_at_the_moment_at_which_they_are_deployed(held_out: bool) -> None:
    """Before fine-tuning, `fedavg+ft` is equal to `fedavg`."""
    before = [0.7, 0.8, 0.9]
    tuned = adapted("fedavg+ft", before, [0.749, 0.85, 0.951], held_out=held_out)
    fedavg, finetuned = group_seeds([*seeds("fedavg", before, held_out=held_out), *tuned])
    assert (fedavg.moment, finetuned.moment) == ("before", "adapted")
    assert fedavg.adapted is None
    assert finetuned.accuracy == finetuned.adapted
    assert finetuned.last == fedavg.last
    assert finetuned.difference is not None
    assert finetuned.difference.mean == pytest.approx(5)
    assert finetuned.verdict.outcome == "better"
    assert finetuned.worst_tenth is not None
    assert finetuned.worst_tenth.mean == pytest.approx(40)


def test_partitions_are_repetitions_of_one_experiment() -> None:
    """Runs are paired by seed and partition: 2 better with each partition, which differ by 20."""
    first = [document("fedavg", [0.1, 0.5 + 0.2 * p], partition_seed=p) for p in range(3)]
    second = [document("moon", [0.1, 0.5199 + 0.2001 * p], partition_seed=p) for p in range(3)]
    fedavg, moon = group_seeds([*first, *reversed(second)])
    assert (fedavg.name, fedavg.seeds) == ("fedavg", "3")
    assert describe_repetitions(fedavg.runs) == "3 partitions"
    assert moon.difference is not None
    assert (moon.difference.n, moon.verdict.outcome) == (3, "better")
    assert moon.difference.mean == pytest.approx(2)


def test_repetitions_are_named_by_what_varies() -> None:
    def runs(seeds: int, partitions: int) -> list[RunDocument]:
        return [
            document("fedavg", [0.1, 0.5], seed=seed, partition_seed=partition)
            for seed in range(seeds)
            for partition in range(partitions)
        ]

    assert describe_repetitions(runs(1, 1)) == "1 seed"
    assert describe_repetitions(runs(3, 1)) == "3 seeds"
    assert describe_repetitions(runs(1, 3)) == "3 partitions"
    assert describe_repetitions(runs(3, 2)) == "3 seeds x 2 partitions"
    assert group_names([runs(3, 3)]) == ["fedavg (3 seeds x 3 partitions)"]


def test_difference_below_one_test_sample_has_no_verdict() -> None:
    """With 1,000 test samples, one is 0.1 points."""
    fedavg, below = seeds("fedavg", [0.7, 0.8, 0.9]), [0.7008, 0.8009, 0.9010]
    group = group_seeds([*fedavg, *seeds("moon", below)])[1]
    assert str(group.verdict) == "less than one test sample"
    runs = [*fedavg, *seeds("moon", below)]
    for run in runs:
        run["test_samples"] = 2000
    assert group_seeds(runs)[1].verdict.outcome == "better"


def test_differently_shifted_images_are_not_pairs() -> None:
    first = seeds("fedavg", [0.7, 0.8, 0.9], shift="rotate:30")
    group = group_seeds([*first, *seeds("moon", [0.75, 0.86, 0.95], shift="blur")])[1]
    assert group.difference is None
    assert str(group.verdict) == "other data"


def test_runs_of_unequal_rounds_are_not_pairs() -> None:
    """Twelve rounds and four rounds cannot be compared."""
    long, short = seeds("fedavg", [0.7, 0.8, 0.9]), seeds("fedavg+dbe", [0.5, 0.61, 0.7])
    for run in long:
        run["rounds"] = [run["rounds"][0]] * 11 + [{**run["rounds"][1], "round": 12}]
        run["best"] = run["last"] = run["rounds"][-1]
    group = group_seeds([*long, *short])[1]
    assert group.difference is None
    assert str(group.verdict) == "unequal rounds"
    (mixed,) = group_seeds([*long[:2], *seeds("fedavg", [0.1, 0.1, 0.1])[2:]])
    assert mixed.accuracy is not None
    assert (mixed.accuracy.n, mixed.seeds) == (2, "2 of 3"), "the short run is in no mean"
    assert mixed.accuracy.mean == pytest.approx(75)


def test_copy_of_a_run_is_not_another_seed() -> None:
    runs = seeds("fedavg", [0.7, 0.8])
    assert [group.seeds for group in group_seeds([*runs, runs[0]])] == ["2", "1"]


def test_settings_separate_experiments_and_seeds_do_not() -> None:
    runs = [*seeds("fedavg", [0.7, 0.8], lr=0.1), *seeds("fedavg", [0.5, 0.6], lr=0.2)]
    groups = group_seeds(runs)
    assert [group.name for group in groups] == ["fedavg, lr 0.1", "fedavg, lr 0.2"]
    assert [len(group.runs) for group in groups] == [2, 2]


def test_diverged_run_is_counted_but_not_averaged() -> None:
    runs = seeds("fedavg", [0.7, 0.9, 0.2])
    runs[2]["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    (group,) = group_seeds(runs)
    assert group.best is not None
    assert (group.best.n, group.diverged, group.seeds) == (2, 1, "2 of 3")
    assert group.best.mean == pytest.approx(80)
    for run in runs:
        run["diverged"] = runs[2]["diverged"]
    assert group_seeds(runs)[0].best is None


def validated(method: str, validation: float, test: float, **config: Any) -> RunDocument:
    run = document(method, [0.0, test], validation=0.2, **config)
    assert run["best"]
    run["best"]["validation"] = {"weighted": validation, "mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
    return run


def test_experiments_are_selected_on_validation_data_only() -> None:
    runs = [
        validated("fedavg", 0.5, 0.9, lr=0.1),
        validated("fedavg", 0.6, 0.1, lr=0.2),
        validated("fedavg+dbe(kappa=1)", 0.7, 0.2),
        validated("fedavg+dbe(kappa=10)", 0.7, 0.99),
    ]
    assert best_on_validation(group_seeds(runs)) == [1, 2], "of equal ones the first"
    runs[1]["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    assert best_on_validation(group_seeds(runs)) == [0, 2]
    assert methods_with_unequal_rounds(group_seeds(runs)) == []
    assert runs[2]["last"]
    runs[2]["last"]["round"] = 9
    assert best_on_validation(group_seeds(runs)) == [0], "nothing is selected among runs of unequal rounds"
    assert methods_with_unequal_rounds(group_seeds(runs)) == ["fedavg+dbe"]
    assert best_on_validation(group_seeds(seeds("fedavg", [0.9], held_out=False))) == [], (
        "nothing was held out"
    )


def test_documents_of_equal_methods_rarely_have_a_verdict() -> None:
    """The simulation in `test_statistics_verdicts.py`, from documents without validation data.

    Bound: 5 % and three standard deviations of the share among 200 tables.
    """
    rng, tables, wrong = np.random.RandomState(0), 200, 0
    for _ in range(tables):
        noise = rng.uniform(0.001, 0.03, (11, 1))
        accuracy = 0.8 + rng.normal(0, 0.02, (1, 3)) + noise * rng.normal(0, 1, (11, 3))
        runs = [
            run
            for index, row in enumerate(accuracy)
            for run in seeds(f"method{index}", row.tolist(), held_out=False)
        ]
        wrong += any(group.verdict.outcome for group in group_seeds(runs))
    assert wrong / tables <= 0.05 + 3 * sqrt(0.05 * 0.95 / tables)


def test_strip_options_of_every_part() -> None:
    assert strip_options("fedprox(mu=1)+dbe(kappa=5,mu=0.1)") == "fedprox+dbe"
    assert strip_options("local") == "local"
