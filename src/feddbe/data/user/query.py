"""What stands after a `?`: which columns to take of a table, and what to do with what does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from feddbe.errors import BadInput, short, unknown

TABLE = ("label", "client", "x", "categories", "missing", "resize", "config")
FOLDER = ("resize",)
NPZ = ("words",)


@dataclass(frozen=True)
class Choice:
    """Columns that are not named are found by their usual names."""

    label: str = ""
    client: str = ""
    x: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    """Columns that hold names of kinds rather than numbers or texts."""
    missing: str = ""
    """Where a value is missing: `drop` the row, or take the `mean` of the training rows."""
    resize: tuple[int, int] | None = None
    """Width and height that all images are brought to."""
    words: int = 0
    """The size of the vocabulary of which an .npz has the numbers."""
    config: str = ""
    """One of several data sets under one name on the hub."""

    def only(self, allowed: Iterable[str], place: str) -> None:
        """Refuse what this form of data has no use for."""
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        for word in given:
            if word not in allowed:
                words = ", ".join(f"?{name}=" for name in allowed) or "nothing"
                raise BadInput(f"'?{word}=' says nothing about '{short(place)}'; allowed there: {words}")


def chosen(query: str) -> Choice:
    """From `label=target&client=user&x=age,income`; `%26` and `%2C` stand for & and , in names."""
    values: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        key, _, value = item.partition("=")
        if key not in Choice.__dataclass_fields__:
            raise unknown("word after '?'", key, Choice.__dataclass_fields__)
        names = tuple(map(unquote, value.split(",")))
        values[key] = names if key in ("x", "categories") else unquote(value)
    if "missing" in values and values["missing"] not in ("drop", "mean"):
        raise unknown("value of ?missing=", values["missing"], ("drop", "mean"))
    if "resize" in values:
        values["resize"] = _size(values["resize"])
    if "words" in values:
        if not values["words"].isdecimal() or int(values["words"]) < 2:
            raise BadInput(
                f"?words={short(values['words'])}: it must be the size of the vocabulary, from 2 on"
            )
        values["words"] = int(values["words"])
    return Choice(**values)


def _size(text: str) -> tuple[int, int]:
    """32 or 48x32, width times height."""
    sides = text.split("x")
    numbers = [int(side) for side in sides if side.isdecimal()]
    if len(numbers) != len(sides) or len(numbers) > 2 or not all(1 <= side <= 4096 for side in numbers):
        raise BadInput(f"?resize={short(text)}: write a number of pixels, as in ?resize=32, or WIDTHxHEIGHT")
    return numbers[0], numbers[-1]
