"""Messages and exit codes of errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import feddbe
from feddbe.errors import (
    DivergenceError,
    FeddbeError,
    InvalidInputError,
    StoreError,
    one_line,
    truncate,
    unknown_name,
)


def test_unknown_name_is_answered_with_the_nearest_and_all_names() -> None:
    assert str(unknown_name("method", "fedvag", ["fedprox", "fedavg"])) == (
        "unknown method 'fedvag'; did you mean 'fedavg'? allowed: fedavg, fedprox"
    )
    assert str(unknown_name("method", "zzz", ["fedavg"])) == "unknown method 'zzz'; allowed: fedavg"


def test_divergence_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(DivergenceError(3, 7, "loss", float("inf"))))
    assert (error.client, error.round, error.quantity, error.value) == (3, 7, "loss", float("inf"))
    assert "loss = inf at client 3 in round 7" in str(error)


def test_divergence_has_its_own_exit_code() -> None:
    assert [error.exit_code for error in (FeddbeError, InvalidInputError, StoreError)] == [2, 2, 2]
    assert DivergenceError.exit_code == 3


def test_quoted_text_is_short_and_printable() -> None:
    assert truncate("short text") == "short text"
    assert truncate("a\nb\0\udcff") == "a?b??"
    assert truncate("a" * 150 + "b" * 10**6 + "c" * 50) == "a" * 150 + " ... " + "c" * 50
    assert len(one_line(ValueError("x" * 10**6))) < 600
    assert len(str(unknown_name("method", "x" * 10**6, ["fedavg"]))) < 300


def test_divergence_names_the_client(tmp_path: Path) -> None:
    table = tmp_path / "people.csv"
    lines = [f"{row % 7},{row % 2},{('Ulm', 'Bern')[row % 2 ^ row // 40 % 2]}" for row in range(120)]
    table.write_text("\n".join(["age,buys,town", *lines]))
    with pytest.raises(feddbe.DivergenceError, match=r"at client '(Ulm|Bern)' in round 1"):
        feddbe.run(
            "fedavg", data=f"{table}?label=buys&client=town", rounds=2, lr=1e30, out=str(tmp_path / "run")
        )
