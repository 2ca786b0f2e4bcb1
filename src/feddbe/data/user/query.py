"""Query of user data, `FILE?label=target&client=user`: the columns to use, and their treatment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from feddbe.errors import InvalidInputError, truncate, unknown_name

TABLE_KEYS = ("label", "client", "x", "drop", "image", "categories", "missing", "resize", "config")
FOLDER_KEYS = ("resize",)
NPZ_KEYS = ("words",)


@dataclass(frozen=True)
class DataQuery:
    """Parsed query; columns that are not named are recognized by their usual names."""

    label: str = ""
    client: str = ""
    x: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    """Columns that are not used."""
    image: str = ""
    """Column with images, or with paths of image files, which is the only input."""
    categories: tuple[str, ...] = ()
    """Categorical columns, which would otherwise be numbers or texts."""
    missing: str = ""
    """Treatment of missing values: `drop` the row, or use the `mean` of the training rows."""
    resize: tuple[int, int] | None = None
    """Width and height of all images."""
    words: int = 0
    """Size of the vocabulary, if an .npz file contains word numbers."""
    config: str = ""
    """Configuration of a data set on the Hugging Face hub, if it has several."""

    def check_keys(self, allowed: Iterable[str], location: str) -> None:
        """Raise an error for keys that this form of data does not use."""
        used = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        for key in used:
            if key not in allowed:
                keys = ", ".join(f"?{name}=" for name in allowed) or "nothing"
                raise InvalidInputError(
                    f"'?{key}=' does not apply to '{truncate(location)}'; allowed there: {keys}"
                )


def parse_query(text: str) -> DataQuery:
    """Parse a query such as `label=target&client=user&x=age,income`; names have %26 for & and %2C for ,."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split("&")):
        key, _, value = item.partition("=")
        if key not in DataQuery.__dataclass_fields__:
            raise unknown_name("key after '?'", key, DataQuery.__dataclass_fields__)
        names = tuple(map(unquote, value.split(",")))
        values[key] = names if key in ("x", "drop", "categories") else unquote(value)
    if "missing" in values and values["missing"] not in ("drop", "mean"):
        raise unknown_name("value of ?missing=", values["missing"], ("drop", "mean"))
    if "resize" in values:
        values["resize"] = _parse_size(values["resize"])
    if "words" in values:
        if not values["words"].isdecimal() or int(values["words"]) < 2:
            raise InvalidInputError(
                f"?words={truncate(values['words'])}: it must be the size of the vocabulary, at least 2"
            )
        values["words"] = int(values["words"])
    return DataQuery(**values)


def _parse_size(text: str) -> tuple[int, int]:
    """Return width and height of a text such as 32 or 48x32."""
    sides = text.split("x")
    numbers = [int(side) for side in sides if side.isdecimal()]
    if len(numbers) != len(sides) or len(numbers) > 2 or not all(1 <= side <= 4096 for side in numbers):
        raise InvalidInputError(
            f"?resize={truncate(text)}: write a number of pixels, as in ?resize=32, or WIDTHxHEIGHT"
        )
    return numbers[0], numbers[-1]
