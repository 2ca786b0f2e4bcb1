"""Methods by name: `fedavg`, `fedavg+dbe`, `fedavg+dbe(kappa=5,mu=0.1)`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypedDict

from feddbe.errors import BadInput, unknown
from feddbe.methods.addons import FT, MR, PRBM
from feddbe.methods.base import AddOn, Method, Upload, parameter
from feddbe.methods.composed import Composed
from feddbe.methods.own import file_of, package_version, source_sha256
from feddbe.methods.registry import Registry
from feddbe.options import allowed, defaults, grammar
from feddbe.options.from_file import Source
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
    "file_in",
    "hyper_parameters",
    "identity",
    "in_brackets",
    "in_memory",
    "package_versions",
    "parameter",
    "parse",
    "source_of",
    "spelled",
    "takes",
]


ADDONS: dict[str, tuple[type[AddOn], ...]] = {"prbm": (PRBM,), "mr": (MR,), "dbe": (PRBM, MR), "ft": (FT,)}
METHODS = Registry({
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
}, ADDONS)  # fmt: skip
"""Name -> module and class, in the order in which people read them; and those that are not feddbe's."""


class Description(TypedDict):
    """What a person needs to know to use a method or an add-on."""

    name: str
    family: str
    addons: list[str]
    parameters: list[dict[str, Any]]
    facts: dict[str, str]
    """Messages and kept state in models, and what is evaluated."""


def parse(text: str, chosen: Defaults | None = None, *, force: bool = False) -> Method:
    """The method that `text` names. Those `chosen` win over a part's own, and lose against those in brackets.
    `force` allows an add-on that the method refuses."""
    (name, own), *rest = _read(text)
    method = grammar.make(name, [METHODS[name]], own, chosen)[0]
    addons: list[AddOn] = []
    for addon, given in rest:
        classes = ADDONS[addon]
        for part in grammar.make("+".join(c.name for c in classes), classes, given, chosen):
            if any(part.name == a.name for a in addons):
                raise BadInput(f"'{text}' has {part.name} twice (dbe = prbm + mr)")
            reason = method.cannot.get(part.name) or ("" if force else method.refuses.get(part.name))
            if reason:
                raise BadInput(f"{method.name} does not take +{part.name}: {reason}")
            addons.append(part)
    return Composed(method, tuple(addons)) if addons else method


def hyper_parameters(method: Method) -> dict[str, dict[str, Any]]:
    """Every hyper-parameter of a method and its add-ons, as resolved: part -> option -> value."""
    return {part.name: dataclasses.asdict(part) for part in _parts(method)}


def identity(method: Method) -> dict[str, Any]:
    """What tells runs of methods apart: hyper-parameters, and what a method does that is not feddbe's."""
    found: dict[str, Any] = {"method_options": hyper_parameters(method)}
    source = source_sha256(type(_inner(method)))
    return found | ({"method_source": source} if source else {})


def source_of(method: Method) -> Source | None:
    """Return the content of the file that a method is from; None if it is not from a file."""
    found = file_of(type(_inner(method)))
    return found.source if found else None


def package_versions(method: Method) -> dict[str, str]:
    """Return name and version of the installed package that a method is from, if it is from one."""
    return package_version(type(_inner(method)))


def in_memory(method: Method) -> bool:
    """Whether no other process can make it from its name."""
    return METHODS.given(type(_inner(method)))


def spelled(method: Method) -> str:
    """What one would type for this method; its class is known by name from now on. An option is left out at
    its default, unless the default depends on model or variant."""
    if not isinstance(method, Method):
        raise BadInput(f"'{method}' is not a method; give its name, or an instance, as in FedAvg()")
    inner, words = _inner(method), list[str]()
    cls = type(inner)
    if (file := file_of(cls)) is None and METHODS.get(cls.name) is not cls:
        METHODS[cls.name] = cls
    for part in _parts(method):
        options = [
            f"{field.name}={grammar.written(value)}"
            for field in dataclasses.fields(part)
            if (value := getattr(part, field.name)) != field.default
            or field.name in defaults.of_part(part.name)
        ]
        name = f"{file.path}:{file.name}" if file and part is inner else part.name
        words.append(name + (f"({','.join(options)})" if options else ""))
    return "+".join(words)


def _inner(method: Method) -> Method:
    return method.inner if isinstance(method, Composed) else method


def _parts(method: Method) -> tuple[Method | AddOn, ...]:
    return (method.inner, *method.addons) if isinstance(method, Composed) else (method,)


def describe(names: Sequence[str] = ()) -> list[Description]:
    """Methods and add-ons with their hyper-parameters: these, or every one."""
    for name in names:
        if name not in METHODS and name not in ADDONS:
            raise unknown("method or add-on", name, [*METHODS, *ADDONS])
    return [
        Description(
            name=name,
            family=parts[0].family if issubclass(parts[0], Method) else "add-on",
            addons=takes(parts[0]) if issubclass(parts[0], Method) else [],
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
        for name in names or [*METHODS, *ADDONS]
        for parts in [ADDONS.get(name) or (METHODS[name],)]
    ]


def takes(method: type[Method]) -> list[str]:
    """The add-ons that it takes."""
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


def file_in(text: str) -> str:
    """Return the `FILE.py:CLASS` that a method's name begins with; nothing if it does not."""
    file = re.match(r"(.+?\.py(?::\w*)?)(?=\s*(?:[(+]|$))", text.lstrip())
    return file[1] if file else ""


def _read(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`a(x=1)+b(y=2)` -> [(a, {x: 1}), (b, {y: 2})]: a method, then add-ons. Of what is feddbe's, letters may
    be small or large."""
    name = file_in(text)
    rest = text.lstrip()[len(name) :]
    found: list[tuple[str, dict[str, Any]]] = []
    for piece in re.split(r"\+(?![^(]*\))", rest):  # a plus outside of brackets
        ours = not name and piece.partition("(")[0].strip().lower() in METHODS.ours
        part = grammar.read(piece.lower() if found or ours else piece)
        if part is None or (name and not found and part[0]):
            raise BadInput(f"cannot read method '{text}'; write it like fedavg+dbe(kappa=5,mu=0.1)")
        kind, known = ("add-on", ADDONS) if found else ("method", METHODS)
        part = (part[0] or name, part[1]) if not found else part
        if part[0] not in known:
            raise unknown(kind, part[0], known)
        found.append(part)
    return found
