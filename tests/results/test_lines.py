"""Which point of a learning curve is marked."""

from __future__ import annotations

from feddbe.results.curves import lines
from tests.documents import document


def test_the_best_round_is_the_chosen_one() -> None:
    """On validation data, if there is some, whatever the test accuracies are; of several seeds the mean's."""
    run = document("fedavg", [0.1, 0.8, 0.7, 0.6])
    assert lines([run])[0].best == (1, 80.0)
    entry = run["rounds"][2]
    entry["validation"] = entry["accuracy"]
    run["best"] = entry
    assert lines([run])[0].best == (2, 70.0)
    other = document("fedavg", [0.1, 0.8, 0.7, 0.6], seed=1)
    assert lines([run, other])[0].best == (1, 80.0)
