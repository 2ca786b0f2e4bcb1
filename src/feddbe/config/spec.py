"""One way to name things: `name(key=value, ...)`, for methods, add-ons, data sets, models and engines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from feddbe.config.parameters import Parameters, number_or_text
from feddbe.errors import BadInput, unknown

Defaults = Mapping[str, Mapping[str, Any]]
"""Name (`mr`, `har`) -> option -> value."""
P = TypeVar("P", bound=Parameters)


@dataclass(frozen=True)
class Named(Generic[P]):
    """A name and its options, all of them; as text it is what one would type to say all this."""

    name: str
    options: P
    given: frozenset[str] = frozenset()
    """Those in its brackets."""

    def __str__(self) -> str:
        values = {k: v for k, v in dataclasses.asdict(self.options).items() if v is not None}
        return self.name + (f"({','.join(f'{k}={written(v)}' for k, v in values.items())})" if values else "")


def read(text: str) -> tuple[str, dict[str, Any]] | None:
    """`name(key=value)` -> name, {key: value}; None if it is not written like that."""
    match = re.fullmatch(r"\s*(\w*)\s*(?:\(([^()]*)\)\s*)?", text, re.ASCII)
    if match is None:
        return None
    given: dict[str, Any] = {}
    for item in filter(str.strip, (match[2] or "").split(",")):
        key, _, value = (word.strip() for word in item.partition("="))
        if not key or not value:
            raise BadInput(f"cannot read option '{item.strip()}' in '{text}'; write it like kappa=5")
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        given[key] = words[value] if value in words else number_or_text(value)
    return match[1], given


def find(
    kind: str,
    text: str,
    known: Mapping[str, type[P]],
    defaults: Defaults | None = None,
    also: Iterable[str] = (),
) -> Named[P]:
    """What `text` names among the `known`; `defaults` win over its own and lose against the brackets'.

    `also`: what else could have been written, for the one who is told that this is not known.
    """
    name, given = read(text) or (text, {})
    if name not in known:
        raise unknown(kind, name, [*known, *also])
    return Named(name, make(name, [known[name]], given, defaults)[0], frozenset(given))


def make(
    whose: str, classes: Sequence[type[P]], given: Mapping[str, Any], defaults: Defaults | None = None
) -> list[P]:
    """One instance per class, each taking its own of the given options."""
    names = {cls: {field.name for field in dataclasses.fields(cls)} for cls in classes}
    every = set().union(*names.values())
    for key in given:
        if key not in every:
            raise unknown(f"option of {whose}", key, every or {"(none)"})
    return [
        cls(**{**(defaults or {}).get(cls.name, {}), **{k: v for k, v in given.items() if k in names[cls]}})
        for cls in classes
    ]


def signature(name: str, options: type[Parameters]) -> str:
    """A name with the options that it takes, in short: `har(layout=channels|scrambled)`."""
    fields = [
        f"{f.name}={'|'.join(f.metadata['choices']) or 'N'}" for f in dataclasses.fields(options)
    ]  # fmt: skip
    return f"{name}({','.join(fields)})" if fields else name


def written(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
