"""Method classes by name: feddbe's own, each imported when it is first asked for; those of packages; those in
users' files (`my_method.py:MyProx`); and what a program puts here itself."""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypedDict

from feddbe.config import defaults, spec, user_code
from feddbe.config.parameters import allowed
from feddbe.config.spec import Defaults
from feddbe.config.user_code import Found, Source, names_file
from feddbe.errors import BadInput, one_line, unknown
from feddbe.methods.addons import FT, MR, PRBM
from feddbe.methods.base import AddOn, Method
from feddbe.methods.composed import Composed


class Registry(MutableMapping[str, type[Method]]):
    """A client has no use for methods other than its own: nothing is imported that is not asked for."""

    def __init__(self, places: Mapping[str, str], addons: Mapping[str, object]) -> None:
        self._places = dict(places)
        self._found: dict[str, type[Method]] = {}
        self._taken = {*places, *addons}

    def __getitem__(self, name: str) -> type[Method]:
        if names_file(name):
            return in_file(name, self._taken)
        if name not in self._found and name in self._places:
            module, _, cls = self._places[name].partition(".")
            self._found[name] = getattr(import_module(f"feddbe.methods.{module}"), cls)
        if name not in self._found and name in self._installed():
            self._found[name] = from_package(name, self._taken)
        return self._found[name]

    def __setitem__(self, name: str, cls: type[Method]) -> None:
        checked(cls, getattr(cls, "__name__", str(cls)), self._taken)
        if cls.name != name:
            raise BadInput(f"{cls.__name__} has name = '{cls.name}', not '{name}'")
        self._found[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        known = name in self._places or name in self._found
        return known or (isinstance(name, str) and (names_file(name) or name in self._installed()))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._installed(), *self._found]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def ours(self) -> Collection[str]:
        """feddbe's own."""
        return self._places.keys()

    def given(self, cls: type[Method]) -> bool:
        """Whether it was put here by this program: no other process can find it by its name."""
        return self._found.get(cls.name) is cls and cls.name not in {*self._places, *self._installed()}

    def _installed(self) -> Mapping[str, EntryPoint]:
        for name in packages().keys() & self._taken:
            raise BadInput(f"{owner(name)} has the name of one of feddbe's own; uninstall the package")
        return packages()


_GROUP = "feddbe.methods"
_FILES: dict[type[Method], Found] = {}
"""Where classes are from that are from files."""


def in_file(text: str, taken: Collection[str], sha256: str = "") -> type[Method]:
    """The class that `FILE.py:CLASS` names; its name must be none of those `taken`."""
    found = user_code.load("method", "class", text, inspect.isclass, sha256)
    cls = checked(found.value, f"{found.name} in '{found.path}'", taken)
    _FILES[cls] = found
    copyreg.pickle(cls, _reduced)  # other processes know nothing of its module
    return cls


def file_of(cls: type[Method]) -> Found | None:
    return _FILES.get(cls)


def _reduced(method: Method) -> tuple[Any, ...]:
    return _again, (*_FILES[type(method)].again, dataclasses.asdict(method))


def _again(text: str, sha256: str, options: Mapping[str, Any]) -> Method:
    """The same method in another process; the file must not have changed."""
    return in_file(text, (), sha256)(**options)


@cache
def packages() -> dict[str, EntryPoint]:
    """Name -> where an installed package has the method."""
    return {point.name: point for point in entry_points(group=_GROUP)}


def owner(name: str) -> str:
    """An installed method in words."""
    point = packages()[name]
    return f"method '{name}' of the package {point.dist.name if point.dist else '?'} ({point.value})"


def package_version(cls: type[Method]) -> dict[str, str]:
    """Return name and version of the installed package that has this method; nothing for other methods."""
    point = packages().get(cls.name)
    if point is None or point.dist is None or cls.__module__.split(".")[0] != point.module.split(".")[0]:
        return {}
    return {point.dist.name: point.dist.version}


def from_package(name: str, taken: Collection[str]) -> type[Method]:
    """The class that a package has under this name."""
    point, where = packages()[name], owner(name)
    try:
        found = point.load()
    except Exception as error:  # somebody else's code may raise anything
        raise BadInput(f"{where} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    cls = checked(found, where, taken)
    if cls.name != name:
        raise BadInput(f"{where} has name = '{cls.name}'; it must be '{name}'")
    return cls


def checked(cls: Any, where: str, taken: Collection[str]) -> type[Method]:
    """The class, if it can be used as a method; else what is wrong with it."""
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise BadInput(
            f"{where} is not a method: it must be a subclass of feddbe.Method (docs/own_method.md)"
        )
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise BadInput(f"{where} is not a dataclass; write @dataclass(frozen=True) above it")
    if cls.name in taken:
        raise BadInput(
            f"{where} has name = '{cls.name}', which is taken; give it its own: name: ClassVar[str] = ..."
        )
    if not cls.name.isidentifier() or cls.name != cls.name.lower():
        raise BadInput(f"{where} has name = '{cls.name}'; allowed: small letters, digits and _")
    for needed in ("train", "combine"):
        if getattr(cls, needed) is getattr(Method, needed):
            raise BadInput(f"{where} has no {needed}(...) (docs/own_method.md)")
    for field in dataclasses.fields(cls):
        if "meaning" not in field.metadata:
            raise BadInput(
                f"{where}: '{field.name}' is no option; write {field.name}: TYPE = parameter(DEFAULT, "
                "MEANING), or ClassVar[TYPE] if it is not meant to be one"
            )
        try:
            allowed(field)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
    return cls


def source_sha256(cls: type[Method]) -> str:
    """Of what it does, as far as it is not feddbe's: empty for feddbe's own methods."""
    found, digest = _FILES.get(cls), hashlib.sha256()
    parts = [found.sha256] if found else []
    for one in cls.__mro__:
        if one is object or one.__module__.split(".")[0] == "feddbe":
            continue
        if not found or one.__module__ not in found.modules:
            parts.append(_source(one))
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest() if parts else ""


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # typed into an interpreter
        return f"{cls.__module__}.{cls.__qualname__}"


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
    "local": "baselines.LocalOnly",
    "majority": "baselines.Majority",
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
    method = spec.make(name, [METHODS[name]], own, chosen)[0]
    addons: list[AddOn] = []
    for addon, given in rest:
        classes = ADDONS[addon]
        for part in spec.make("+".join(c.name for c in classes), classes, given, chosen):
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
            f"{field.name}={spec.written(value)}"
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
                    "search_rule": field.metadata["search_rule"],
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
        part = spec.read(piece.lower() if found or ours else piece)
        if part is None or (name and not found and part[0]):
            raise BadInput(f"cannot read method '{text}'; write it like fedavg+dbe(kappa=5,mu=0.1)")
        kind, known = ("add-on", ADDONS) if found else ("method", METHODS)
        part = (part[0] or name, part[1]) if not found else part
        if part[0] not in known:
            raise unknown(kind, part[0], known)
        found.append(part)
    return found
