"""The documents in a run's file: their types, against which each is checked when a run is opened.

A file may come from anywhere. A document that fits its type can be used without further checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_type_hints

import msgspec
from msgspec import Meta

from feddbe.config.options import Config

Whole = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]
"""Larger numbers are not finite in sums and squares."""
Share = Annotated[float, Meta(ge=0, le=1)]
Setting = bool | Whole | Number | str | None


class SourceDocument(TypedDict):
    """A user's file by content."""

    sha256: str
    modules: dict[str, str]


class StoredNewClients(TypedDict):
    """Clients that joined after the last round."""

    round: Count
    clients: Count
    epochs: Count
    adaptation: NotRequired[str]


class StoredDivergence(TypedDict):
    """The value that was not finite, see `results.document.Divergence`."""

    round: Count
    client: Count
    what: str
    value: Annotated[str, Meta(pattern=r"^-?(nan|inf|[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?)$")]


class StoredAnalysis(TypedDict):
    """Settings of an analysis; its numbers are records."""

    round: Count
    analysis: str
    layer: str
    moment: Literal["before", "after", "adapted"]
    quick: bool
    on: Literal["own", "all"]
    per_client: bool
    settings: dict[str, Setting]
    samples: Count
    seconds: Number


class StoredColumn(TypedDict):
    """A column of a table, see `data.dataset.Column`."""

    name: str
    categories: list[str]
    mean: list[Number]
    deviation: Number


class StoredPreprocessing(TypedDict):
    """Conversion of raw rows to inputs, see `data.dataset.Preprocessing`."""

    kind: str
    shape: list[Count]
    columns: list[StoredColumn]
    missing: str
    comma: bool
    vocabulary: list[str]
    words: Count
    scale: Number
    shift: Number
    resized: bool


_REQUIRED_OPTIONS = ("method", "data", "seed", "partition_seed", "rounds")
_LIMITED: dict[Any, Any] = {
    int: Whole, float: Number, int | None: Whole | None, float | None: Number | None,
}  # fmt: skip
"""Type with limits for each type of an option that is a number."""


def _config_type() -> Any:
    """Return the type of a stored configuration; an option that has no effect is stored as None."""
    types: dict[str, Any] = {"method_options": Annotated[dict[str, dict[str, Setting]], Meta(min_length=1)]}
    hints = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        kind = _LIMITED.get(hints[field.name], hints[field.name])
        types[field.name] = NotRequired[kind | None]
        if field.name in _REQUIRED_OPTIONS:
            types[field.name] = Whole if field.name == "rounds" else kind
    return TypedDict("StoredConfig", types)  # type: ignore[operator]


Texts = list[str]
DOCUMENT_TYPES: dict[str, Any] = {
    "config": _config_type(),
    "config_hash": str,
    "layout": dict[str, str],
    "majority_accuracy": Share,
    "bn_buffers": str | None,
    "note": str,
    "remarks": Texts,
    "label_names": Texts,
    "client_names": Texts,
    "shift_labels": Texts,
    "preprocessing": StoredPreprocessing,
    "labels": list[list[Count]] | None,
    "keeps_best": bool,
    "begun": str,
    "sources": dict[str, SourceDocument],
    "inputs": dict[str, str],
    "versions": dict[str, str],
    "machine": str,
    "git_commit": str | None,
    "seeds": dict[str, Whole],
    "moment": str,
    "trainers": Texts,
    "peak_rss_mb": Number,
    "diverged": StoredDivergence,
    "new_clients": StoredNewClients,
    "analyses": dict[Annotated[str, Meta(pattern="^[0-9]+/[^/]+/.+$")], StoredAnalysis],
}
"""Type of each document by key; other keys may have any JSON value."""
REQUIRED = ("config", "config_hash", "majority_accuracy")
"""Documents that every run has."""


def decode_document(key: str, text: str) -> Any:
    """Return a stored document.

    Args:
        key: Name of the document.
        text: Its JSON text, not trusted.

    Raises:
        ValueError: The text is not JSON, or its value does not fit the type of this document.
    """
    try:
        value = msgspec.json.decode(text)
        msgspec.convert(value, DOCUMENT_TYPES.get(key, Any))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if key == "labels" and value and len({len(counts) for counts in value}) > 1:
        raise ValueError("its rows differ in length")
    return value


def check_sizes(documents: Mapping[str, Any]) -> None:
    """Raise an error if documents about the same clients or classes differ in number.

    Args:
        documents: All documents of a run by key, each of its type.

    Raises:
        ValueError: A document has more or fewer names than there are clients or classes.
    """
    labels = documents.get("labels")
    names = documents.get("client_names")
    divergence = documents.get("diverged")
    if labels:
        for key, count in {"client_names": len(labels), "label_names": len(labels[0])}.items():
            if documents.get(key) and len(documents[key]) != count:
                raise ValueError(f"{key}: got {len(documents[key])} names; expected {count}")
    if divergence and names and divergence["client"] >= len(names):
        raise ValueError(f"diverged: got client {divergence['client']}; expected less than {len(names)}")
