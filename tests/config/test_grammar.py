"""Names with options: what is read, what is made of it, and how it is written again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from feddbe.config.parameters import Parameters, describe_signature, find_class, parameter, parse_spec
from feddbe.errors import InvalidInputError


@dataclass(frozen=True)
class Sieve(Parameters):
    name: ClassVar[str] = "sieve"

    mesh: str = parameter("fine", "its mesh", choices=("fine", "coarse"))
    width: float | None = parameter(None, "in metres", above=0)


KNOWN: dict[str, type[Parameters]] = {"sieve": Sieve, "plain": Parameters}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sieve", ("sieve", {})), ("sieve()", ("sieve", {})), ("", ("", {})), (" sieve ", ("sieve", {})),
        ("sieve(mesh=fine)", ("sieve", {"mesh": "fine"})),
        ("s_2 ( a = 1 , b=-2e+3, c=none,d=true )", ("s_2", {"a": 1, "b": -2000.0, "c": None, "d": True})),
        ("sieve(mesh=fine", None), ("sieve(a=(1))", None), ("sieve:4", None), ("a b", None), ("é(a=1)", None),
    ],
)  # fmt: skip
def test_what_is_read(text: str, found: Any) -> None:
    assert parse_spec(text) == found


def test_brackets_win_over_defaults_and_defaults_over_its_own() -> None:
    defaults: dict[str, dict[str, Any]] = {"sieve": {"mesh": "coarse", "width": 2.0}, "other": {}}
    assert find_class("tool", "sieve", KNOWN).options == Sieve()
    assert find_class("tool", "sieve", KNOWN, defaults).options == Sieve("coarse", 2.0)
    one = find_class("tool", "sieve(width=3)", KNOWN, defaults)
    assert one.options == Sieve("coarse", 3.0)
    assert one.explicit_options == frozenset({"width"})


@pytest.mark.parametrize("text", ["sieve", "sieve(width=0.1)", "sieve(mesh=coarse,width=1e-07)", "plain"])
def test_written_and_read_again_it_is_the_same(text: str) -> None:
    one = find_class("tool", text, KNOWN)
    assert find_class("tool", str(one), KNOWN).options == one.options
    assert str(find_class("tool", str(one), KNOWN)) == str(one)


def test_no_digit_is_lost() -> None:
    width = 0.1234567890123
    assert find_class(
        "tool", str(find_class("tool", f"sieve(width={width})", KNOWN)), KNOWN
    ).options == Sieve("fine", width)


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
    ],
)
def test_one_line_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_class("tool", text, KNOWN, other_names=["FILE"])
    assert str(caught.value) == message


def test_signatures() -> None:
    assert [describe_signature(*item) for item in KNOWN.items()] == [
        "sieve(mesh=fine|coarse,width=N)",
        "plain",
    ]
