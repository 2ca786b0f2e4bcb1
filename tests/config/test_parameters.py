"""Options with limits, and names with options such as `har(layout=channels)`."""

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

from feddbe.config.parameters import (
    Parameters,
    describe_allowed,
    describe_signature,
    find_class,
    parameter,
    parse_spec,
)
from feddbe.errors import InvalidInputError
from feddbe.methods.registry import parse_method


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
    output_dir: str | None = parameter(None, "a text or None")
    kind: str = parameter("plain", "a choice", choices=("plain", "fancy"))
    maybe: str | None = parameter(None, "a choice or None", choices=("keep", "refuse"))
    free: object = None


@dataclass(frozen=True)
class Nameless(Parameters):
    count: int = parameter(3, "a count", low=1)


def test_defaults_are_set() -> None:
    sample = Sample()
    assert (sample.count, sample.rate, sample.seed, sample.on, sample.kind) == (3, 0.5, None, False, "plain")
    assert (sample.maybe, sample.output_dir, sample.free) == (None, None, None)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("count", 1, 1), ("count", 9, 9), ("count", 4.0, 4), ("rate", 1, 1.0), ("rate", 1e-9, 1e-9),
        ("weight", 0, 0.0), ("any", -7, -7.0), ("seed", 0, 0), ("seed", None, None), ("lr", 2, 2.0),
        ("on", True, True), ("path", 5, "5"), ("path", "a b", "a b"), ("output_dir", None, None),
        ("output_dir", 1, "1"),
        ("kind", "fancy", "fancy"), ("maybe", "keep", "keep"), ("maybe", None, None), ("free", [1], [1]),
    ],
)  # fmt: skip
def test_valid_value_is_converted_to_the_type_of_the_option(option: str, value: Any, expected: Any) -> None:
    converted = getattr(Sample(**{option: value}), option)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("option", "value", "text", "allowed"),
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
def test_invalid_value_is_named_with_the_allowed_ones(
    option: str, value: Any, text: str, allowed: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Sample(**{option: value})
    assert str(caught.value) == f"sample {option} = {text}; allowed: {allowed}"


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
def test_unknown_choice_is_answered_with_the_nearest(option: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        Sample(**{option: value})


def test_message_of_a_set_without_name_has_only_the_option() -> None:
    with pytest.raises(InvalidInputError, match=r"^count = 0; allowed: a whole number >= 1$"):
        Nameless(count=0)


def test_allowed_values_are_described_in_words() -> None:
    descriptions = {
        field.name: describe_allowed(field) for field in dataclasses.fields(Sample) if field.name != "free"
    }
    assert descriptions == {
        "count": "a whole number >= 1 and <= 9",
        "rate": "a number > 0 and <= 1",
        "weight": "a number >= 0",
        "any": "a number",
        "seed": "a whole number >= 0",
        "lr": "a number > 0",
        "on": "true, false",
        "path": "text",
        "output_dir": "text",
        "kind": "plain, fancy",
        "maybe": "keep, refuse",
    }


def test_options_are_frozen_and_checked_when_replaced() -> None:
    sample = Sample()
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.count = 4  # type: ignore[misc]
    assert dataclasses.replace(sample, count=4).count == 4
    with pytest.raises(InvalidInputError):
        dataclasses.replace(sample, count=40)


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(), st.lists(st.integers())))
def test_any_value_is_kept_or_an_input_error(value: Any) -> None:
    """No other error is raised, and a valid value is not changed."""
    for option in ("count", "rate", "seed", "on", "kind"):
        with suppress(InvalidInputError):
            assert getattr(Sample(**{option: value}), option) == value


@dataclass(frozen=True)
class Sieve(Parameters):
    name: ClassVar[str] = "sieve"

    mesh: str = parameter("fine", "size of the holes", choices=("fine", "coarse"))
    width: float | None = parameter(None, "width in meters", above=0)


KNOWN: dict[str, type[Parameters]] = {"sieve": Sieve, "plain": Parameters}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sieve", ("sieve", {})), ("sieve()", ("sieve", {})), ("", ("", {})), (" sieve ", ("sieve", {})),
        ("sieve(mesh=fine)", ("sieve", {"mesh": "fine"})),
        ("s_2 ( a = 1 , b=-2e+3, c=none,d=true )", ("s_2", {"a": 1, "b": -2000.0, "c": None, "d": True})),
        ("sieve(mesh=fine", None), ("sieve(a=(1))", None), ("sieve:4", None), ("a b", None), ("é(a=1)", None),
    ],
)  # fmt: skip
def test_spec_is_parsed_into_name_and_options(text: str, expected: Any) -> None:
    assert parse_spec(text) == expected


def test_options_in_parentheses_override_defaults() -> None:
    defaults: dict[str, dict[str, Any]] = {"sieve": {"mesh": "coarse", "width": 2.0}, "other": {}}
    assert find_class("tool", "sieve", KNOWN).options == Sieve()
    assert find_class("tool", "sieve", KNOWN, defaults).options == Sieve("coarse", 2.0)
    parsed = find_class("tool", "sieve(width=3)", KNOWN, defaults)
    assert parsed.options == Sieve("coarse", 3.0)
    assert parsed.explicit_options == frozenset({"width"})


@pytest.mark.parametrize("text", ["sieve", "sieve(width=0.1)", "sieve(mesh=coarse,width=1e-07)", "plain"])
def test_parsed_name_has_a_text_that_parses_to_the_same(text: str) -> None:
    parsed = find_class("tool", text, KNOWN)
    parsed_again = find_class("tool", str(parsed), KNOWN)
    assert parsed_again.options == parsed.options
    assert str(parsed_again) == str(parsed)


def test_text_of_a_parsed_name_has_all_digits() -> None:
    width = 0.1234567890123
    parsed = find_class("tool", f"sieve(width={width})", KNOWN)
    assert find_class("tool", str(parsed), KNOWN).options == Sieve("fine", width)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seive", "unknown tool 'seive'; did you mean 'sieve'? allowed: FILE, plain, sieve"),
        ("seive(mesh=fine)", "unknown tool 'seive'; did you mean 'sieve'? allowed: FILE, plain, sieve"),
        ("sieve(mash=fine)", "unknown option of sieve 'mash'; did you mean 'mesh'? allowed: mesh, width"),
        ("plain(mesh=fine)", "unknown option of plain 'mesh'; allowed: (none)"),
        ("sieve(mesh=fin)", "unknown sieve mesh 'fin'; did you mean 'fine'? allowed: coarse, fine"),
        ("sieve(width=0)", "sieve width = 0; allowed: a number > 0"),
        ("sieve(mesh)", "cannot read option 'mesh' in 'sieve(mesh)'; write it like kappa=5"),
        ("sieve(=fine)", "cannot read option '=fine' in 'sieve(=fine)'; write it like kappa=5"),
        ("sieve(mesh=1,mesh=2)", "option 'mesh' is given twice in 'sieve(mesh=1,mesh=2)'"),
    ],
)
def test_invalid_spec_is_answered_with_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_class("tool", text, KNOWN, other_names=["FILE"])
    assert str(caught.value) == message


def test_signature_lists_options_and_choices() -> None:
    assert [describe_signature(*item) for item in KNOWN.items()] == [
        "sieve(mesh=fine|coarse,width=N)",
        "plain",
    ]


@pytest.mark.parametrize(
    "name",
    ["fedgen(noise=1e12)", "fedgen(hidden=1e12)", "fedgen(gen_batch=1e12)", "moon(projection=1e12)"],
)
def test_sizes_beyond_any_memory_are_invalid(name: str) -> None:
    with pytest.raises(InvalidInputError, match="allowed: a whole number >= "):
        parse_method(name)
