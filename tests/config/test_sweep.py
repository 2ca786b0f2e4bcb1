"""Sweeps: several values of an option, several seeds, and commas that are part of a value."""

from __future__ import annotations

from typing import Any

import pytest

from feddbe.config.options import SweepSpec, collect_options, expand_values, parse_sweep
from feddbe.errors import InvalidInputError


def parse(**options: Any) -> SweepSpec:
    """Return the sweep of fedavg with these options."""
    sweep = parse_sweep(collect_options(["fedavg"], options))
    assert sweep is not None
    return sweep


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("fedavg+dbe", ["fedavg+dbe"]),
        ("fedavg+dbe(kappa=5,mu=0.1)", ["fedavg+dbe(kappa=5,mu=0.1)"]),
        ("fedavg+dbe(kappa=1,10,50)", [f"fedavg+dbe(kappa={k})" for k in (1, 10, 50)]),
        ("fedprox(mu=0.1, 1)", ["fedprox(mu=0.1)", "fedprox(mu=1)"]),
        (
            "fedprox(mu=1,2)+mr(kappa=3,init_mean=exact,start)",
            [
                f"fedprox(mu={mu})+mr(kappa=3,init_mean={start})"
                for mu in (1, 2)
                for start in ("exact", "start")
            ],
        ),
        ("fedavg+dbe(kappa)", ["fedavg+dbe(kappa)"]),
        ("my,file.py:Mine(a=1,2)", ["my,file.py:Mine(a=1)", "my,file.py:Mine(a=2)"]),
        ("fedavg+dbe(kappa=3", ["fedavg+dbe(kappa=3"]),
    ],
)
def test_values_in_parentheses_are_expanded(name: str, variants: list[str]) -> None:
    assert expand_values(name) == variants


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"lr": "0.01,0.1"}, {"lr": [0.01, 0.1]}),
        ({"lr": [0.01, 0.1]}, {"lr": [0.01, 0.1]}),
        ({"local_epochs": "1, 5"}, {"local_epochs": [1, 5]}),
        ({"partition": "iid,dirichlet:0.1"}, {"partition": ["iid", "dirichlet:0.1"]}),
        ({"model": "mlp,fasttext(rep=linear)"}, {"model": ["mlp", "fasttext(rep=linear)"]}),
        ({"data": ["digits", "fmnist"]}, {"data": ["digits", "fmnist"]}),
        ({"variant": "default,paper"}, {"variant": ["default", "paper"]}),
    ],
)
def test_several_values_are_a_grid(options: dict[str, Any], values: dict[str, Any]) -> None:
    sweep = parse(**options)
    assert sweep.options == values
    assert sweep.varied_options == list(values)
    assert sweep.is_grid


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": "accuracy,auc"},
        {"data": "people.csv?label=buys&x=age,income"},
        {"out": "first,second"},
        {"split": "a,b.npz"},
        {"engine": "pool(workers=2),"},
        {"model": "fasttext(rep=linear,)"},
        {"rounds": "5,10"},  # invalid, as the check of the option reports
        {"rounds": [5, 10]},
        {"eval": "sample:3"},
        {"lr": [0.1]},
        {},
    ],
)
def test_single_value_with_commas_is_not_a_sweep(options: dict[str, Any]) -> None:
    assert parse_sweep(collect_options(["fedavg"], options)) is None


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [("0,1,2", [0, 1, 2]), ("5", [0, 1, 2, 3, 4]), (3, [0, 1, 2]), ([4, 2], [4, 2]), ("7,", [7]), ("1", [0])],
)
def test_seeds_are_a_number_or_a_list(seeds: Any, expected: list[int]) -> None:
    sweep = parse(seeds=seeds)
    assert sweep.seeds == expected
    assert not sweep.is_grid


@pytest.mark.parametrize("seeds", ["0", 0, -1, "a", "0,a", "1,1", [], [0.5], [True], True, ",", "-1,2"])
def test_invalid_seeds_are_an_error(seeds: Any) -> None:
    message = "seeds = .*; allowed: a number of seeds, as in 5, or a list, as in 0,1,2"
    with pytest.raises(InvalidInputError, match=message):
        parse(seeds=seeds)


def test_seed_and_seeds_exclude_each_other() -> None:
    with pytest.raises(InvalidInputError, match="seed = 3 and seeds = 2; give one of them"):
        parse(seed=3, seeds=2)
    for seed in ("0,1", [0, 1]):
        with pytest.raises(InvalidInputError, match="several seeds are --seeds 0,1,2"):
            parse_sweep(collect_options(["fedavg"], {"seed": seed}))
    assert parse(seed=3, lr="0.1,0.2").seeds == [3]


@pytest.mark.parametrize("values", ["0.1,0.1", [], [0.1, 0.1]])
def test_values_of_a_sweep_must_differ(values: Any) -> None:
    with pytest.raises(InvalidInputError, match="values of a sweep must be different, and at least one"):
        parse(lr=values)


def test_seeds_are_invalid_for_a_single_run() -> None:
    with pytest.raises(InvalidInputError, match=r"seeds = 3; this is one run"):
        collect_options(["fedavg"], {"seeds": 3}).request()


@pytest.mark.parametrize(("seeds", "expected"), [("3", [1, 2, 3]), ("1,5", [1, 5]), ([7], [7])])
def test_partition_seeds_are_repetitions(seeds: Any, expected: list[int]) -> None:
    """Their number starts with 1, the published split and the default."""
    spec = parse(partition_seeds=seeds)
    assert spec.partition_seeds == expected
    assert not spec.is_grid
