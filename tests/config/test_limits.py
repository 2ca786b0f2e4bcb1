"""Options: what each takes, and the one line that names the option, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddbe.config.parameters import Parameters, describe_allowed, parameter
from feddbe.errors import InvalidInputError


@dataclass(frozen=True)
class Sample(Parameters):
    name: ClassVar[str] = "sample"

    count: int = parameter(3, "a count", low=1, high=9)
    rate: float = parameter(0.5, "a rate", above=0, high=1)
    weight: float = parameter(1.0, "a weight", low=0)
    any: float = parameter(0.0, "a number")
    seed: int | None = parameter(None, "a seed", low=0)
    lr: float | None = parameter(None, "a learning rate", above=0)
    on: bool = parameter(False, "a switch")
    path: str = parameter("x", "a text")
    place: str | None = parameter(None, "a text or nothing")
    kind: str = parameter("plain", "a choice", choices=("plain", "fancy"))
    maybe: str | None = parameter(None, "a choice or nothing", choices=("keep", "refuse"))
    free: object = None


@dataclass(frozen=True)
class Nameless(Parameters):
    count: int = parameter(3, "a count", low=1)


def test_defaults() -> None:
    sample = Sample()
    assert (sample.count, sample.rate, sample.seed, sample.on, sample.kind) == (3, 0.5, None, False, "plain")
    assert (sample.maybe, sample.place, sample.free) == (None, None, None)


@pytest.mark.parametrize(
    ("option", "given", "kept"),
    [
        ("count", 1, 1), ("count", 9, 9), ("count", 4.0, 4), ("rate", 1, 1.0), ("rate", 1e-9, 1e-9),
        ("weight", 0, 0.0), ("any", -7, -7.0), ("seed", 0, 0), ("seed", None, None), ("lr", 2, 2.0),
        ("on", True, True), ("path", 5, "5"), ("path", "a b", "a b"), ("place", None, None),
        ("place", 1, "1"),
        ("kind", "fancy", "fancy"), ("maybe", "keep", "keep"), ("maybe", None, None), ("free", [1], [1]),
    ],
)  # fmt: skip
def test_values_that_fit_get_the_type_of_the_option(option: str, given: Any, kept: Any) -> None:
    found = getattr(Sample(**{option: given}), option)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("option", "value", "shown", "what"),
    [
        ("count", 0, "0", "a whole number >= 1 and <= 9"),
        ("count", 10, "10", "a whole number >= 1 and <= 9"),
        ("count", 2.5, "2.5", "a whole number >= 1 and <= 9"),
        ("count", "2", "'2'", "a whole number >= 1 and <= 9"),
        ("count", True, "True", "a whole number >= 1 and <= 9"),
        ("count", None, "None", "a whole number >= 1 and <= 9"),
        ("count", [3], "[3]", "a whole number >= 1 and <= 9"),
        ("rate", 0, "0", "a number > 0 and <= 1"),
        ("rate", 1.01, "1.01", "a number > 0 and <= 1"),
        ("rate", "many", "'many'", "a number > 0 and <= 1"),
        ("weight", -1e-9, "-1e-09", "a number >= 0"),
        ("any", math.nan, "nan", "a number"),
        ("any", -math.inf, "-inf", "a number"),
        ("any", False, "False", "a number"),
        ("seed", -1, "-1", "a whole number >= 0"),
        ("seed", math.inf, "inf", "a whole number >= 0"),
        ("lr", 0.0, "0.0", "a number > 0"),
        ("on", 1, "1", "true, false"),
        ("on", "false", "'false'", "true, false"),
        ("on", None, "None", "true, false"),
    ],
)
def test_values_that_do_not_fit_are_named_with_what_is_allowed(
    option: str, value: Any, shown: str, what: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Sample(**{option: value})
    assert str(caught.value) == f"sample {option} = {shown}; allowed: {what}"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("kind", "fancey", "unknown sample kind 'fancey'; did you mean 'fancy'? allowed: fancy, plain"),
        ("kind", "zzz", "unknown sample kind 'zzz'; allowed: fancy, plain"),
        ("kind", None, "unknown sample kind 'None'; allowed: fancy, plain"),
        ("kind", 3, "unknown sample kind '3'; allowed: fancy, plain"),
        ("kind", ["plain"], "unknown sample kind '['plain']'; did you mean 'plain'? allowed: fancy, plain"),
        ("maybe", "refus", "unknown sample maybe 'refus'; did you mean 'refuse'? allowed: keep, refuse"),
    ],
)
def test_a_choice_that_does_not_exist_is_answered_with_the_nearest(
    option: str, value: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        Sample(**{option: value})


def test_a_set_without_a_name_says_the_option_only() -> None:
    with pytest.raises(InvalidInputError, match=r"^count = 0; allowed: a whole number >= 1$"):
        Nameless(count=0)


def test_what_is_allowed_in_words() -> None:
    fields = {
        field.name: describe_allowed(field) for field in dataclasses.fields(Sample) if field.name != "free"
    }
    assert fields == {
        "count": "a whole number >= 1 and <= 9",
        "rate": "a number > 0 and <= 1",
        "weight": "a number >= 0",
        "any": "a number",
        "seed": "a whole number >= 0",
        "lr": "a number > 0",
        "on": "true, false",
        "path": "text",
        "place": "text",
        "kind": "plain, fancy",
        "maybe": "keep, refuse",
    }


def test_options_cannot_be_changed_but_replaced_and_are_checked_again() -> None:
    sample = Sample()
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.count = 4  # type: ignore[misc]
    assert dataclasses.replace(sample, count=4).count == 4
    with pytest.raises(InvalidInputError):
        dataclasses.replace(sample, count=40)


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(), st.lists(st.integers())))
def test_any_value_is_kept_or_refused(value: Any) -> None:
    """No other error than ours, and what is kept is equal to what was given."""
    for option in ("count", "rate", "seed", "on", "kind"):
        with suppress(InvalidInputError):
            assert getattr(Sample(**{option: value}), option) == value
