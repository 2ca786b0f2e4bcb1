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


def test_parse_names_and_options() -> None:
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


def test_options_in_brackets_override_defaults() -> None:
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
def test_invalid_name_raises_one_line_error(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_method(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Discouraging(FedAvg):
    name = "discouraging"
    discouraged_addons = {"prbm": "it has its own personalization"}  # noqa: RUF012


def test_discouraged_addon_needs_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "discouraging", Discouraging)
    assert isinstance(parse_method("discouraging+mr"), Composed)
    for name in ("discouraging+prbm", "discouraging+dbe"):
        with pytest.raises(
            InvalidInputError, match=r"discouraging does not support \+prbm: it has its own personalization"
        ):
            parse_method(name)
        assert isinstance(parse_name(name).build(force=True), Composed)


def test_descriptions_are_complete() -> None:
    infos = {d["name"]: d for d in describe_methods()}
    assert set(infos) == {*METHODS, *ADDONS}
    assert infos["fedavg"]["addons"] == ["prbm", "mr", "dbe", "ft"]
    assert [p["name"] for p in infos["dbe"]["parameters"]][:3] == ["prbm_lr", "kappa", "mu"]
    assert all(p["meaning"] and p["allowed"] for d in describe_methods() for p in d["parameters"])
