"""Several values where one is usual: what is split at its commas, and what keeps them."""

from __future__ import annotations

from typing import Any

import pytest

from feddbe.config.options import SweepSpec, collect_options, expand_values, parse_sweep
from feddbe.errors import InvalidInputError


def read(*methods: str, **options: Any) -> SweepSpec:
    found = parse_sweep(collect_options(methods or ["fedavg"], options))
    assert found is not None
    return found


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
def test_lists_in_brackets(name: str, variants: list[str]) -> None:
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
def test_values_that_vary(options: dict[str, Any], values: dict[str, Any]) -> None:
    found = read(**options)
    assert found.options == values
    assert found.varied_options == list(values)
    assert found.is_grid


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": "accuracy,auc"},
        {"data": "people.csv?label=buys&x=age,income"},
        {"out": "here,there"},
        {"split": "a,b.npz"},
        {"engine": "pool(workers=2),"},
        {"model": "fasttext(rep=linear,)"},
        {"rounds": "5,10"},  # a mistake, told as one
        {"rounds": [5, 10]},
        {"eval": "sample:3"},
        {"lr": [0.1]},
        {},
    ],
)
def test_what_has_commas_of_its_own_keeps_them(options: dict[str, Any]) -> None:
    assert parse_sweep(collect_options(["fedavg"], options)) is None


@pytest.mark.parametrize(
    ("seeds", "found"),
    [("0,1,2", [0, 1, 2]), ("5", [0, 1, 2, 3, 4]), (3, [0, 1, 2]), ([4, 2], [4, 2]), ("7,", [7]), ("1", [0])],
)
def test_seeds(seeds: Any, found: list[int]) -> None:
    wanted = read(seeds=seeds)
    assert wanted.seeds == found
    assert not wanted.is_grid


@pytest.mark.parametrize("seeds", ["0", 0, -1, "a", "0,a", "1,1", [], [0.5], [True], True, ",", "-1,2"])
def test_seeds_that_are_none(seeds: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"seeds = .*; allowed: a number of seeds, as in 5, or a list, as in 0,1,2"
    ):
        read(seeds=seeds)


@pytest.mark.parametrize(("seeds", "expected"), [("3", [1, 2, 3]), ("1,5", [1, 5]), ([7], [7])])
def test_partition_seeds_are_repetitions(seeds: Any, expected: list[int]) -> None:
    """Their number starts with 1, the published split and the default."""
    spec = read(partition_seeds=seeds)
    assert spec.partition_seeds == expected
    assert not spec.is_grid


def test_one_seed_and_several_exclude_each_other() -> None:
    with pytest.raises(InvalidInputError, match="seed = 3 and seeds = 2; give one of them"):
        read(seed=3, seeds=2)
    for seed in ("0,1", [0, 1]):
        with pytest.raises(InvalidInputError, match="several seeds are --seeds 0,1,2"):
            parse_sweep(collect_options(["fedavg"], {"seed": seed}))
    assert read(seed=3, lr="0.1,0.2").seeds == [3]


@pytest.mark.parametrize("values", ["0.1,0.1", [], [0.1, 0.1]])
def test_values_that_are_the_same(values: Any) -> None:
    with pytest.raises(InvalidInputError, match="values of a sweep must be different, and at least one"):
        read(lr=values)


def test_seeds_are_for_those_who_take_them() -> None:
    with pytest.raises(InvalidInputError, match=r"seeds = 3; this is one run"):
        collect_options(["fedavg"], {"seeds": 3}).request()
