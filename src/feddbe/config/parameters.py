"""Options with limits, and the one grammar `name(key=value, ...)` for methods, add-ons, data sets, models and
engines.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from feddbe.errors import InvalidInputError, unknown_name


def parameter(
    default: Any,
    meaning: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    choices: Sequence[str] = (),
    words: Sequence[str] = (),
    search: str = "",
    search_rule: str = "",
) -> Any:
    """An option: its default, what it means, and which values it takes (low..high; `above` is exclusive;
    `words` besides). `search` lists values worth trying, `search_rule` states in words how to choose one."""
    limits: dict[str, Any] = {"meaning": meaning, "low": low, "high": high, "above": above}
    limits |= {"choices": tuple(choices), "words": tuple(words), "search": search, "search_rule": search_rule}
    return dataclasses.field(default=default, metadata=limits)


@dataclass(frozen=True)
class Parameters:
    """A named set of options, each checked against what it takes."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "meaning" in field.metadata:
                value = _checked(f"{self.name} {field.name}".strip(), getattr(self, field.name), field)
                object.__setattr__(self, field.name, value)


_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


def value_type(field: dataclasses.Field[Any]) -> tuple[str, bool]:
    """Of its type, one of `_KINDS` and whether it may be None. A type is text in a module that begins with
    `from __future__ import annotations`, elsewhere it is an object."""
    text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    match = re.match(r"(?:typing\.)?(Optional\[)?(\w+)", text)
    if match is None or match[2] not in _KINDS:
        raise InvalidInputError(
            f"option '{field.name}' is of type {text}; allowed: bool, int, float, str, and each with | None"
        )
    return match[2], bool(match[1]) or "None" in text


def describe_allowed(field: dataclasses.Field[Any]) -> str:
    """The values that an option takes, in words."""
    (kind, _), limits = value_type(field), field.metadata
    if limits["choices"]:
        return ", ".join(limits["choices"])
    if kind == "bool":
        return "true, false"
    if kind == "str":
        return "text"
    low, high, above = limits["low"], limits["high"], limits["above"]
    bounds = [f">= {low:g}"] * math.isfinite(low) + [f"> {above:g}"] * math.isfinite(above)
    bounds += [f"<= {high:g}"] * math.isfinite(high)
    number = f"{'a whole number' if kind == 'int' else 'a number'} {' and '.join(bounds)}".strip()
    return " or ".join([number, *limits["words"]])


def _checked(what: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """The value as the field's type, or the error that names it and what is allowed."""
    (kind, optional), limits = value_type(field), field.metadata
    if (value is None and optional) or (isinstance(value, str) and value in limits["words"]):
        return value
    if limits["choices"]:
        if value not in limits["choices"]:
            raise unknown_name(what, str(value), limits["choices"])
        return value
    if kind == "str":
        return str(value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308
    if kind == "bool":
        fits = isinstance(value, bool)
    else:
        fits = number and limits["low"] <= value <= limits["high"] and value > limits["above"]
    if not fits or (kind == "int" and value != int(value)):
        shown = f"'{value}'" if isinstance(value, str) else value
        raise InvalidInputError(f"{what} = {shown}; allowed: {describe_allowed(field)}")
    return _KINDS[kind](value)


def parse_number_or_text(text: str) -> Any:
    """A number if it is one; else the text, so that a check of the option can say what is allowed."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


Defaults = Mapping[str, Mapping[str, Any]]
"""Name (`mr`, `har`) -> option -> value."""
P = TypeVar("P", bound=Parameters)


@dataclass(frozen=True)
class ParsedName(Generic[P]):
    """A name and its options, all of them; as text it is what one would type to say all this."""

    name: str
    options: P
    explicit_options: frozenset[str] = frozenset()
    """Those in its brackets."""

    def __str__(self) -> str:
        values = {k: v for k, v in dataclasses.asdict(self.options).items() if v is not None}
        return self.name + (
            f"({','.join(f'{k}={format_value(v)}' for k, v in values.items())})" if values else ""
        )


def parse_spec(text: str) -> tuple[str, dict[str, Any]] | None:
    """`name(key=value)` -> name, {key: value}; None if it is not written like that."""
    match = re.fullmatch(r"\s*(\w*)\s*(?:\(([^()]*)\)\s*)?", text, re.ASCII)
    if match is None:
        return None
    given: dict[str, Any] = {}
    for item in filter(str.strip, (match[2] or "").split(",")):
        key, _, value = (word.strip() for word in item.partition("="))
        if not key or not value:
            raise InvalidInputError(f"cannot read option '{item.strip()}' in '{text}'; write it like kappa=5")
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        given[key] = words[value] if value in words else parse_number_or_text(value)
    return match[1], given


def find_class(
    kind: str,
    text: str,
    known: Mapping[str, type[P]],
    defaults: Defaults | None = None,
    also: Iterable[str] = (),
) -> ParsedName[P]:
    """What `text` names among the `known`; `defaults` win over its own and lose against the brackets'.

    `also`: what else could have been written, for the one who is told that this is not known.
    """
    name, given = parse_spec(text) or (text, {})
    if name not in known:
        raise unknown_name(kind, name, [*known, *also])
    return ParsedName(name, instantiate(name, [known[name]], given, defaults)[0], frozenset(given))


def instantiate(
    whose: str, classes: Sequence[type[P]], given: Mapping[str, Any], defaults: Defaults | None = None
) -> list[P]:
    """One instance per class, each taking its own of the given options."""
    names = {cls: {field.name for field in dataclasses.fields(cls)} for cls in classes}
    every = set().union(*names.values())
    for key in given:
        if key not in every:
            raise unknown_name(f"option of {whose}", key, every or {"(none)"})
    return [
        cls(**{**(defaults or {}).get(cls.name, {}), **{k: v for k, v in given.items() if k in names[cls]}})
        for cls in classes
    ]


def describe_signature(name: str, options: type[Parameters]) -> str:
    """A name with the options that it takes, in short: `har(layout=channels|scrambled)`."""
    fields = [
        f"{f.name}={'|'.join(f.metadata['choices']) or 'N'}" for f in dataclasses.fields(options)
    ]  # fmt: skip
    return f"{name}({','.join(fields)})" if fields else name


def format_value(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
