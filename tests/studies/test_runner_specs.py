"""Specifications of runs and grids of them."""

from __future__ import annotations

import pytest

from feddbe.errors import InvalidInputError
from feddbe.studies.runner import RunSpec, expand_grid


def test_grid_has_every_combination_and_seeds_vary_first() -> None:
    specs = expand_grid(["fedavg", "ditto"], {"lr": [0.1, 0.2], "rounds": 3}, seeds=[0, 7])
    assert [(c.method, c.options["lr"], c.seed) for c in specs] == [
        (method, lr, seed) for method in ("fedavg", "ditto") for lr in (0.1, 0.2) for seed in (0, 7)
    ]
    assert all(cell.options["rounds"] == 3 for cell in specs)


def test_grid_without_options_has_one_run_per_method() -> None:
    assert expand_grid(["fedavg"]) == [RunSpec("fedavg", {"seed": 0})]


@pytest.mark.parametrize(
    ("methods", "options", "seeds"), [([], {}, [0]), (["fedavg"], {"lr": []}, [0]), (["fedavg"], {}, [])]
)
def test_empty_list_is_rejected(
    methods: list[str], options: dict[str, list[float]], seeds: list[int]
) -> None:
    with pytest.raises(InvalidInputError, match=r"= \[\]; a list of values needs at least one"):
        expand_grid(methods, options, seeds)


def test_request_equals_that_of_the_command_line() -> None:
    names, config, origins = RunSpec("fedavg", {"lr": 0.1, "seed": 2}).request(rounds=4)
    assert (names, config.lr, config.seed, config.rounds) == (["fedavg"], 0.1, 2, 4)
    assert set(origins) == {"lr", "seed", "rounds"}


def test_spec_as_text() -> None:
    assert str(RunSpec("fedavg", {"lr": 0.1})) == "fedavg, lr 0.1, seed 0"


def test_equal_specs_have_equal_hashes() -> None:
    assert len({RunSpec("fedavg", {"lr": 0.1, "seed": 1}), RunSpec("fedavg", {"seed": 1, "lr": 0.1})}) == 1
