"""Fairness: values computed by hand, and baselines that must have the same clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddbe.errors import InvalidInputError
from feddbe.results.fairness import client_spread, compute_fairness, pair_clients
from tests.documents import document

CURVE = [0.1, 0.9, 0.5]


def test_spread_by_hand() -> None:
    """Of 0.0, 0.1, ..., 1.0 the worst tenth is two clients of eleven: 0.0 and 0.1."""
    spread = client_spread({client: client / 10 for client in range(11)})
    assert spread == {
        "clients": 11,
        "mean": pytest.approx(0.5),
        "std": pytest.approx(0.1**0.5),
        "worst_tenth": pytest.approx(0.05),
        "lowest": 0.0,
        "quarter": pytest.approx(0.25),
        "median": pytest.approx(0.5),
        "three_quarters": pytest.approx(0.75),
        "highest": 1.0,
    }
    assert client_spread({3: 0.4})["worst_tenth"] == 0.4
    with pytest.raises(InvalidInputError, match="fairness is not defined without clients"):
        client_spread({})


def test_pairs_by_hand() -> None:
    """Clients 0 and 5 gain 0.5, 1 loses 0.25, 2 is unchanged; 3 and 4 are in one run only."""
    paired = pair_clients(
        {0: 0.75, 1: 0.5, 2: 1.0, 3: 0.0, 5: 1.0}, {0: 0.25, 1: 0.75, 2: 1.0, 4: 0.0, 5: 0.5}, "local"
    )
    assert (paired["clients"], paired["better"], paired["equal"], paired["worse"]) == (4, 2, 1, 1)
    assert (paired["helped"], paired["hurt"]) == (0.5, 0.25)
    assert (paired["mean"], paired["lowest"]) == pytest.approx((0.75 / 4, -0.25))
    assert paired["differences"] == {0: 0.5, 1: -0.25, 2: 0.0, 5: 0.5}
    assert paired["against"] == "local"
    with pytest.raises(InvalidInputError, match="no client was evaluated in both runs"):
        pair_clients({0: 1.0}, {1: 1.0})


@given(
    st.dictionaries(st.integers(0, 9), st.floats(0, 1), min_size=10),
    st.dictionaries(st.integers(0, 9), st.floats(0, 1), min_size=10),
)
def test_swapping_runs_swaps_helped_and_hurt(first: dict[int, float], second: dict[int, float]) -> None:
    forward, backward = pair_clients(first, second), pair_clients(second, first)
    assert (forward["better"], forward["worse"]) == (backward["worse"], backward["better"])
    assert forward["better"] + forward["equal"] + forward["worse"] == forward["clients"] == 10


def test_baselines_are_found_by_method() -> None:
    runs = [document(method, CURVE) for method in ("fedavg+dbe", "fedavg(weights=uniform)", "local")]
    dbe, fedavg, local = compute_fairness(runs, [{0: 0.9, 1: 0.5}, {0: 0.8, 1: 0.6}, {0: 0.7, 1: 0.7}])
    assert dbe["paired"].keys() == {"local", "fedavg"}
    assert dbe["paired"]["local"]["differences"] == pytest.approx({0: 0.2, 1: -0.2})
    assert dbe["paired"]["fedavg"]["against"] == "fedavg(weights=uniform)"
    assert fedavg["paired"].keys() == {"local"}
    assert local["paired"].keys() == {"fedavg"}
    assert (dbe["round"], dbe["moment"], dbe["accuracy"]) == (2, "before", {0: 0.9, 1: 0.5})


def test_method_with_add_ons_and_options_is_not_its_baseline() -> None:
    """Parentheses at both ends are not one pair."""
    methods = ("fedavg(weights=uniform)+dbe(kappa=1)", "local", "fedavg(weights=uniform)")
    dbe, local, fedavg = compute_fairness(
        [document(method, CURVE) for method in methods], [{0: 0.9}, {0: 0.7}, {0: 0.8}]
    )
    assert local["paired"]["fedavg"]["differences"] == pytest.approx({0: -0.1})
    assert dbe["paired"]["fedavg"]["differences"] == pytest.approx({0: 0.1})
    assert fedavg["paired"].keys() == {"local"}


def test_baseline_has_the_same_clients_and_preferably_the_same_seed() -> None:
    ditto = document("ditto", CURVE, seed=1)
    seeds = [document("fedavg", CURVE, seed=seed) for seed in (0, 1)]
    others = [document("fedavg", CURVE, partition_seed=2), document("fedavg", CURVE, data="fmnist")]
    accuracies = [{0: accuracy} for accuracy in (0.5, 0.25, 0.75, 0.75)]
    fairness = compute_fairness([ditto, *seeds, *others], [{0: 0.5}, *accuracies])[0]
    assert fairness["paired"]["fedavg"]["differences"] == {0: 0.25}
    assert "seed 1" in fairness["paired"]["fedavg"]["against"]
    assert compute_fairness([ditto, seeds[0]], [{0: 0.6}, {0: 0.5}])[0]["paired"].keys() == {"fedavg"}
    assert compute_fairness([ditto, *others], [{0: 0.6}, *accuracies[:2]])[0]["paired"] == {}


def test_best_round_is_not_the_default_unless_validation_data_chose_it() -> None:
    run = document("ditto", CURVE)

    def chosen(which_round: str | None) -> tuple[int, bool]:
        (fairness,) = compute_fairness([run], [{0: 0.5}], which_round)
        return fairness["round"], fairness["chosen_on_test"]

    assert [chosen(which_round) for which_round in (None, "last", "best")] == [
        (2, False),
        (2, False),
        (1, True),
    ]
    assert run["best"]
    run["best"]["validation"] = run["best"]["accuracy"]
    assert [chosen(which_round) for which_round in (None, "last", "best")] == [
        (1, False),
        (2, False),
        (1, False),
    ]


def test_run_without_rounds() -> None:
    with pytest.raises(InvalidInputError, match="ditto: no round has been evaluated yet"):
        compute_fairness([document("ditto", [None])], [{}])


def test_method_that_adapts_after_the_last_round_is_compared_there() -> None:
    tuned = document("fedavg+ft", CURVE)
    assert tuned["last"]
    tuned["last"]["adapted"] = {"weighted": 0.95, "mean": 0.95, "worst_tenth": 0.9, "std": 0.0}
    tuned["deployed_moment"] = "adapted"
    fedavg, finetuned = compute_fairness([document("fedavg", CURVE), tuned], [{0: 0.9}, {0: 0.95}], "best")
    assert (fedavg["round"], fedavg["moment"]) == (1, "before")
    assert (finetuned["round"], finetuned["moment"]) == (2, "adapted")
