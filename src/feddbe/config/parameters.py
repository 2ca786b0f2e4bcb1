"""Options with limits, and the grammar `name(key=value, ...)` of methods, data sets, models and engines."""

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
    """Return a dataclass field that is an option.

    Args:
        default: Default value.
        meaning: Help text.
        low: Smallest allowed number.
        high: Largest allowed number.
        above: Number that must be exceeded.
        choices: Allowed names, if the values are a list.
        words: Words that are allowed in addition to numbers.
        search: Values that `feddbe tune` tries, separated by commas.
        search_rule: Rule for choosing a value, in words.
    """
    limits: dict[str, Any] = {"meaning": meaning, "low": low, "high": high, "above": above}
    limits |= {"choices": tuple(choices), "words": tuple(words), "search": search, "search_rule": search_rule}
    return dataclasses.field(default=default, metadata=limits)


@dataclass(frozen=True)
class Parameters:
    """Base class of named sets of options; values are checked when an instance is created."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "meaning" in field.metadata:
                value = _check_value(f"{self.name} {field.name}".strip(), getattr(self, field.name), field)
                object.__setattr__(self, field.name, value)


_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


def value_type(field: dataclasses.Field[Any]) -> tuple[str, bool]:
    """Return the name of the field's type, one of `_KINDS`, and True if it may be None.

    The type is a string in modules with `from __future__ import annotations`, otherwise an object.
    """
    text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    match = re.match(r"(?:typing\.)?(Optional\[)?(\w+)", text)
    if match is None or match[2] not in _KINDS:
        raise InvalidInputError(
            f"option '{field.name}' is of type {text}; allowed: bool, int, float, str, and each with | None"
        )
    return match[2], bool(match[1]) or "None" in text


def describe_allowed(field: dataclasses.Field[Any]) -> str:
    """Return the allowed values of an option, in words."""
    (kind, _), limits = value_type(field), field.metadata
    if limits["choices"]:
        return ", ".join(limits["choices"])
    if kind == "bool":
        return "true, false"
    if kind == "str":
        return "text"
    low = limits["low"]
    high = limits["high"]
    above = limits["above"]
    bounds = [f">= {low:g}"] * math.isfinite(low) + [f"> {above:g}"] * math.isfinite(above)
    bounds += [f"<= {high:g}"] * math.isfinite(high)
    number = f"{'a whole number' if kind == 'int' else 'a number'} {' and '.join(bounds)}".strip()
    return " or ".join([number, *limits["words"]])


def _check_value(name: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """Return the value as the field's type, or raise an error that lists the allowed values."""
    (kind, optional), limits = value_type(field), field.metadata
    if (value is None and optional) or (isinstance(value, str) and value in limits["words"]):
        return value
    if limits["choices"]:
        if value not in limits["choices"]:
            raise unknown_name(name, str(value), limits["choices"])
        return value
    if kind == "str":
        return str(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308
    if kind == "bool":
        is_allowed = isinstance(value, bool)
    else:
        is_allowed = is_number and limits["low"] <= value <= limits["high"] and value > limits["above"]
    if not is_allowed or (kind == "int" and value != int(value)):
        text = f"'{value}'" if isinstance(value, str) else value
        raise InvalidInputError(f"{name} = {text}; allowed: {describe_allowed(field)}")
    return _KINDS[kind](value)


def parse_number_or_text(text: str) -> Any:
    """Return a number if the text is one, otherwise the text, which the option's check then rejects."""
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
    """A name with all of its options; its text form can be parsed again."""

    name: str
    options: P
    explicit_options: frozenset[str] = frozenset()
    """Names of the options that were given in parentheses."""

    def __str__(self) -> str:
        values = {k: v for k, v in dataclasses.asdict(self.options).items() if v is not None}
        return self.name + (
            f"({','.join(f'{k}={format_value(v)}' for k, v in values.items())})" if values else ""
        )


def parse_spec(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and options of `name(key=value)`, or None if the text has another form."""
    match = re.fullmatch(r"\s*(\w*)\s*(?:\(([^()]*)\)\s*)?", text, re.ASCII)
    if match is None:
        return None
    options: dict[str, Any] = {}
    for item in filter(str.strip, (match[2] or "").split(",")):
        key, _, value = (word.strip() for word in item.partition("="))
        if not key or not value:
            raise InvalidInputError(f"cannot read option '{item.strip()}' in '{text}'; write it like kappa=5")
        if key in options:
            raise InvalidInputError(f"option '{key}' is given twice in '{text.strip()}'")
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        options[key] = words[value] if value in words else parse_number_or_text(value)
    return match[1], options


def find_class(
    kind: str,
    text: str,
    known: Mapping[str, type[P]],
    defaults: Defaults | None = None,
    other_names: Iterable[str] = (),
) -> ParsedName[P]:
    """Return the class that `text` names, with its options.

    Args:
        kind: The kind of thing for error messages, as in `model`.
        text: A name, with or without options.
        known: Classes of options by name.
        defaults: Values that replace the class defaults; options in parentheses override them.
        other_names: Further names that an error message lists.
    """
    name, options = parse_spec(text) or (text, {})
    if name not in known:
        raise unknown_name(kind, name, [*known, *other_names])
    return ParsedName(name, instantiate(name, [known[name]], options, defaults)[0], frozenset(options))


def instantiate(
    name: str, classes: Sequence[type[P]], options: Mapping[str, Any], defaults: Defaults | None = None
) -> list[P]:
    """Return one instance per class; each receives those of the options that are its fields."""
    fields = {cls: {field.name for field in dataclasses.fields(cls)} for cls in classes}
    all_fields = set().union(*fields.values())
    for key in options:
        if key not in all_fields:
            raise unknown_name(f"option of {name}", key, all_fields or {"(none)"})
    instances = []
    for cls in classes:
        values = dict((defaults or {}).get(cls.name, {}))
        values |= {key: value for key, value in options.items() if key in fields[cls]}
        instances.append(cls(**values))
    return instances


def describe_signature(name: str, options: type[Parameters]) -> str:
    """Return a name with its options, as in `har(layout=channels|scrambled)`."""
    fields = [
        f"{f.name}={'|'.join(f.metadata['choices']) or 'N'}" for f in dataclasses.fields(options)
    ]  # fmt: skip
    return f"{name}({','.join(fields)})" if fields else name


def format_value(value: Any) -> str:
    """Return a value as the user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)
