"""Cells and grids of them."""

from __future__ import annotations

import pytest

from feddbe.errors import InvalidInputError
from feddbe.studies.runner import RunSpec, run_grid


def test_a_grid_is_every_combination_and_seeds_vary_first() -> None:
    found = run_grid(["fedavg", "ditto"], {"lr": [0.1, 0.2], "rounds": 3}, seeds=[0, 7])
    assert [(c.method, c.options["lr"], c.seed) for c in found] == [
        (method, lr, seed) for method in ("fedavg", "ditto") for lr in (0.1, 0.2) for seed in (0, 7)
    ]
    assert all(cell.options["rounds"] == 3 for cell in found)


def test_a_grid_without_options_is_one_cell_per_method() -> None:
    assert run_grid(["fedavg"]) == [RunSpec("fedavg", {"seed": 0})]


@pytest.mark.parametrize(
    ("methods", "options", "seeds"), [([], {}, [0]), (["fedavg"], {"lr": []}, [0]), (["fedavg"], {}, [])]
)
def test_an_empty_list_is_refused(
    methods: list[str], options: dict[str, list[float]], seeds: list[int]
) -> None:
    with pytest.raises(InvalidInputError, match=r"= \[\]; a list of values needs at least one"):
        run_grid(methods, options, seeds)


def test_what_is_asked_for_is_what_the_command_line_would_ask() -> None:
    names, config, origins = RunSpec("fedavg", {"lr": 0.1, "seed": 2}).request(rounds=4)
    assert (names, config.lr, config.seed, config.rounds) == (["fedavg"], 0.1, 2, 4)
    assert set(origins) == {"lr", "seed", "rounds"}


def test_a_cell_can_be_read() -> None:
    assert str(RunSpec("fedavg", {"lr": 0.1})) == "fedavg, lr 0.1, seed 0"


def test_cells_with_equal_options_are_one_in_a_set() -> None:
    assert len({RunSpec("fedavg", {"lr": 0.1, "seed": 1}), RunSpec("fedavg", {"seed": 1, "lr": 0.1})}) == 1
