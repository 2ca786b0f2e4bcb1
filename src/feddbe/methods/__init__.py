"""Methods by name: `fedavg`, `fedavg+dbe`, `fedavg+dbe(kappa=5,mu=0.1)`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypedDict

from feddbe.errors import BadInput, unknown
from feddbe.methods.addons import FT, MR, PRBM
from feddbe.methods.base import AddOn, Method, Upload, parameter
from feddbe.methods.composed import Composed
from feddbe.options import allowed, grammar, without_late
from feddbe.options.grammar import Defaults

__all__ = [
    "ADDONS",
    "METHODS",
    "MR",
    "PRBM",
    "AddOn",
    "Composed",
    "Description",
    "Method",
    "Upload",
    "describe",
    "hyper_parameters",
    "identity",
    "in_brackets",
    "parameter",
    "parse",
]


class _Registry(MutableMapping[str, type[Method]]):
    """Classes by name, each imported when it is first asked for: a client has no use for the others."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._known: dict[str, str | type[Method]] = dict(places)

    def __getitem__(self, name: str) -> type[Method]:
        found = self._known[name]
        if isinstance(found, str):
            module, _, cls = found.partition(".")
            found = self._known[name] = getattr(import_module(f"feddbe.methods.{module}"), cls)
        return found

    def __setitem__(self, name: str, cls: type[Method]) -> None:
        self._known[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known  # without importing it

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


METHODS = _Registry({
    "fedavg": "fedavg.FedAvg",
    "scaffold": "scaffold.Scaffold",
    "fedprox": "fedprox.FedProx",
    "moon": "moon.Moon",
    "fedgen": "fedgen.FedGen",
    "perfedavg": "perfedavg.PerFedAvg",
    "pfedme": "pfedme.PFedMe",
    "ditto": "ditto.Ditto",
    "fedper": "fedper.FedPer",
    "fedrep": "fedrep.FedRep",
    "fedrod": "fedrod.FedRoD",
    "fedbabu": "fedbabu.FedBABU",
    "apfl": "apfl.APFL",
    "fedfomo": "fedfomo.FedFomo",
    "apple": "apple.APPLE",
    "local": "floors.LocalOnly",
    "majority": "floors.Majority",
})  # fmt: skip
"""Name -> module and class, in the order in which people read them."""
ADDONS: dict[str, tuple[type[AddOn], ...]] = {"prbm": (PRBM,), "mr": (MR,), "dbe": (PRBM, MR), "ft": (FT,)}


class Description(TypedDict):
    """What a person needs to know to use a method or an add-on."""

    name: str
    family: str
    addons: list[str]
    parameters: list[dict[str, Any]]
    facts: dict[str, str]
    """Messages and kept state in models, and what is evaluated."""


def parse(text: str, defaults: Defaults | None = None, *, force: bool = False) -> Method:
    """The method that `text` names. `defaults` win over a part's own, and lose against those in brackets.
    `force` allows an add-on that the method refuses."""
    (name, own), *rest = _read(text)
    method = grammar.make(name, [METHODS[name]], own, defaults)[0]
    addons: list[AddOn] = []
    for addon, given in rest:
        classes = ADDONS[addon]
        for part in grammar.make("+".join(c.name for c in classes), classes, given, defaults):
            if any(part.name == a.name for a in addons):
                raise BadInput(f"'{text}' has {part.name} twice (dbe = prbm + mr)")
            reason = method.cannot.get(part.name) or ("" if force else method.refuses.get(part.name))
            if reason:
                raise BadInput(f"{name} does not take +{part.name}: {reason}")
            addons.append(part)
    return Composed(method, tuple(addons)) if addons else method


def hyper_parameters(method: Method) -> dict[str, dict[str, Any]]:
    """Every hyper-parameter of a method and its add-ons, as resolved: part -> option -> value."""
    return {part.name: dataclasses.asdict(part) for part in _parts(method)}


def identity(method: Method) -> dict[str, dict[str, Any]]:
    """Those of them that tell runs apart."""
    return {part.name: without_late(part) for part in _parts(method)}


def _parts(method: Method) -> tuple[Method | AddOn, ...]:
    return (method.inner, *method.addons) if isinstance(method, Composed) else (method,)


def describe() -> list[Description]:
    """Every method and add-on with its hyper-parameters."""
    return [
        Description(
            name=name,
            family=parts[0].family if issubclass(parts[0], Method) else "add-on",
            addons=_taken(parts[0]) if issubclass(parts[0], Method) else [],
            parameters=[
                {
                    "name": field.name,
                    "part": part.name,
                    "default": field.default,
                    "allowed": allowed(field),
                    "search": field.metadata["search"],
                    "meaning": field.metadata["meaning"],
                }
                for part in parts
                for field in dataclasses.fields(part)
            ],
            facts=parts[0].facts._asdict() if issubclass(parts[0], Method) else {},
        )
        for name, parts in ({name: (cls,) for name, cls in METHODS.items()} | ADDONS).items()
    ]


def _taken(method: type[Method]) -> list[str]:
    refused = method.refuses.keys() | method.cannot.keys()
    return [name for name, parts in ADDONS.items() if not {p.name for p in parts} & refused]


def in_brackets(text: str) -> set[str]:
    """The hyper-parameters that a method's name gives, as in `mr kappa`."""
    return {
        f"{part.name} {field.name}"
        for name, given in _read(text)
        for part in ADDONS.get(name) or (METHODS[name],)
        for field in dataclasses.fields(part)
        if field.name in given
    }


def _read(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`a(x=1)+b(y=2)` -> [(a, {x: 1}), (b, {y: 2})]: a method, then add-ons."""
    found: list[tuple[str, dict[str, Any]]] = []
    for piece in re.split(r"\+(?![^(]*\))", text.lower()):  # a plus outside of brackets
        part = grammar.read(piece)
        if part is None:
            raise BadInput(f"cannot read method '{text}'; write it like fedavg+dbe(kappa=5,mu=0.1)")
        kind, known = ("add-on", ADDONS) if found else ("method", METHODS)
        if part[0] not in known:
            raise unknown(kind, part[0], known)
        found.append(part)
    return found
