"""Methods by name."""

from __future__ import annotations

import pytest

from feddbe.errors import InvalidInputError
from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.registry import (
    ADDONS,
    METHODS,
    describe_methods,
    hyperparameters,
    parse_method,
    parse_name,
)


def test_names_and_options() -> None:
    assert parse_method("fedavg") == FedAvg()
    assert parse_method("fedavg+prbm") == Composed(FedAvg(), (PRBM(),))
    assert parse_method("FedAvg + DBE(kappa=5, mu=0.1)") == Composed(
        FedAvg(), (PRBM(), MR(kappa=5.0, mu=0.1))
    )
    assert parse_method("fedavg+mr(init_mean=exact,mr_half=false)") == Composed(
        FedAvg(), (MR(init_mean="exact", mr_half=False),)
    )
    assert parse_method("fedavg+prbm(prbm_lr=none)") == parse_method("fedavg+prbm")
    assert parse_method("fedavg+mr(kappa=1e+1)") == parse_method("fedavg+mr(kappa=10)")


def test_what_is_in_brackets_wins_over_defaults() -> None:
    method = parse_name("fedavg+dbe(mu=0.5)").build({"mr": {"kappa": 7.0, "mu": 0.2}})
    assert hyperparameters(method)["mr"]["kappa"] == 7.0
    assert hyperparameters(method)["mr"]["mu"] == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedvag", "unknown method 'fedvag'; did you mean 'fedavg'? allowed: apfl, apple, ditto"),
        ("", "unknown method ''"),
        ("fedavg+dbee", "unknown add-on 'dbee'; did you mean 'dbe'? allowed: dbe, ft, mr, prbm"),
        ("fedavg+", "unknown add-on ''"),
        ("fedavg+dbe(kapa=5)", "unknown option of prbm+mr 'kapa'; did you mean 'kappa'?"),
        ("fedavg(kappa=5)", "unknown option of fedavg 'kappa'"),
        ("fedavg+mr+dbe", "has mr twice"),
        ("fedavg+dbe(kappa=-1)", "mr kappa = -1; allowed: a number >= 0"),
        ("fedavg+dbe(mu=1.5)", "mr mu = 1.5; allowed: a number >= 0 and <= 1"),
        ("fedavg+dbe(mu=nan)", "mr mu = nan; allowed"),
        ("fedavg+dbe(mu=high)", "mr mu = 'high'; allowed"),
        ("fedavg+dbe(init_epochs=1.5)", "mr init_epochs = 1.5; allowed: a whole number >= 1"),
        ("fedavg+dbe(init_mean=exct)", "unknown mr init_mean 'exct'; did you mean 'exact'?"),
        ("fedavg+dbe(mr_half=2)", "mr mr_half = 2; allowed: true, false"),
        ("fedavg+dbe(kappa)", "cannot read option 'kappa'"),
        ("fedavg+dbe(kappa=5", "cannot read method"),
    ],
)
def test_one_line_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_method(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Refusing(FedAvg):
    name = "refusing"
    discouraged_addons = {"prbm": "it personalises in its own way"}  # noqa: RUF012


def test_an_add_on_that_a_method_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "refusing", Refusing)
    assert isinstance(parse_method("refusing+mr"), Composed)
    for name in ("refusing+prbm", "refusing+dbe"):
        with pytest.raises(
            InvalidInputError, match=r"refusing does not support \+prbm: it personalises in its own way"
        ):
            parse_method(name)
        assert isinstance(parse_name(name).build(force=True), Composed)


def test_descriptions_are_complete() -> None:
    found = {d["name"]: d for d in describe_methods()}
    assert set(found) == {*METHODS, *ADDONS}
    assert found["fedavg"]["addons"] == ["prbm", "mr", "dbe", "ft"]
    assert [p["name"] for p in found["dbe"]["parameters"]][:3] == ["prbm_lr", "kappa", "mu"]
    assert all(p["meaning"] and p["allowed"] for d in describe_methods() for p in d["parameters"])
