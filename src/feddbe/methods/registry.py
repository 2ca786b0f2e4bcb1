"""Methods by name.

Method classes are feddbe's own (imported on first use), those of installed packages (entry points), those in
users' files (`my_method.py:MyProx`), and those registered by a program.
"""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypedDict

from feddbe.config import defaults, parameters, user_code
from feddbe.config.parameters import Defaults, describe_allowed
from feddbe.config.user_code import StoredSource, UserObject, is_file_reference
from feddbe.errors import InvalidInputError, one_line, unknown_name
from feddbe.methods.addons import FT, MR, PRBM, Composed
from feddbe.methods.base import AddOn, Method


class Registry(MutableMapping[str, type[Method]]):
    """Method classes by name; a class is imported on first use."""

    def __init__(self, locations: Mapping[str, str], addons: Mapping[str, object]) -> None:
        self._locations = dict(locations)
        self._classes: dict[str, type[Method]] = {}
        self._reserved_names = {*locations, *addons}

    def __getitem__(self, name: str) -> type[Method]:
        if is_file_reference(name):
            return load_from_file(name, self._reserved_names)
        if name not in self._classes and name in self._locations:
            module, _, cls = self._locations[name].partition(".")
            self._classes[name] = getattr(import_module(f"feddbe.methods.{module}"), cls)
        if name not in self._classes and name in self._installed():
            self._classes[name] = from_package(name, self._reserved_names)
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[Method]) -> None:
        check_class(cls, getattr(cls, "__name__", str(cls)), self._reserved_names)
        if cls.name != name:
            raise InvalidInputError(f"{cls.__name__} has name = '{cls.name}', not '{name}'")
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        known = name in self._locations or name in self._classes
        return known or (isinstance(name, str) and (is_file_reference(name) or name in self._installed()))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._locations, *self._installed(), *self._classes]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def builtin(self) -> Collection[str]:
        """Names of feddbe's own methods."""
        return self._locations.keys()

    def user_defined(self, cls: type[Method]) -> bool:
        """Return whether this program registered the class; other processes cannot find it by name."""
        return self._classes.get(cls.name) is cls and cls.name not in {*self._locations, *self._installed()}

    def _installed(self) -> Mapping[str, EntryPoint]:
        for name in installed_packages().keys() & self._reserved_names:
            raise InvalidInputError(
                f"{owning_package(name)} has the name of a built-in method; uninstall the package"
            )
        return installed_packages()


_GROUP = "feddbe.methods"
_FILES: dict[type[Method], UserObject] = {}
"""User files of the classes that were loaded from files."""


def load_from_file(text: str, reserved_names: Collection[str], sha256: str = "") -> type[Method]:
    """Return the class that `FILE.py:CLASS` names; its name must not be reserved."""
    user_object = user_code.load_object("method", "class", text, inspect.isclass, sha256)
    cls = check_class(user_object.value, f"{user_object.name} in '{user_object.path}'", reserved_names)
    _FILES[cls] = user_object
    copyreg.pickle(cls, _pickle_method)  # its module is unknown in other processes
    return cls


def source_file(cls: type[Method]) -> UserObject | None:
    return _FILES.get(cls)


def _pickle_method(method: Method) -> tuple[Any, ...]:
    return _unpickle_method, (*_FILES[type(method)].reload, dataclasses.asdict(method))


def _unpickle_method(text: str, sha256: str, options: Mapping[str, Any]) -> Method:
    """Rebuild a method of a user's file in another process; the file must be unchanged."""
    return load_from_file(text, (), sha256)(**options)


@cache
def installed_packages() -> dict[str, EntryPoint]:
    """Return the entry points of installed methods by name."""
    return {point.name: point for point in entry_points(group=_GROUP)}


def owning_package(name: str) -> str:
    """Describe an installed method and its package."""
    point = installed_packages()[name]
    return f"method '{name}' of the package {point.dist.name if point.dist else '?'} ({point.value})"


def package_version(cls: type[Method]) -> dict[str, str]:
    """Return name and version of the installed package of this method, or an empty dictionary."""
    point = installed_packages().get(cls.name)
    if point is None or point.dist is None or cls.__module__.split(".")[0] != point.module.split(".")[0]:
        return {}
    return {point.dist.name: point.dist.version}


def from_package(name: str, reserved_names: Collection[str]) -> type[Method]:
    """Return the class that an installed package registers under this name."""
    point, where = installed_packages()[name], owning_package(name)
    try:
        loaded = point.load()
    except Exception as error:  # foreign code may raise anything
        raise InvalidInputError(
            f"{where} cannot be imported: {type(error).__name__}: {one_line(error)}"
        ) from error
    cls = check_class(loaded, where, reserved_names)
    if cls.name != name:
        raise InvalidInputError(f"{where} has name = '{cls.name}'; it must be '{name}'")
    return cls


def check_class(cls: Any, where: str, reserved_names: Collection[str]) -> type[Method]:
    """Return the class if it can be used as a method.

    Raises:
        BadInput: It cannot; the message names the problem and the remedy.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise InvalidInputError(
            f"{where} is not a method: it must be a subclass of feddbe.Method (docs/writing_a_method.md)"
        )
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise InvalidInputError(f"{where} is not a dataclass; write @dataclass(frozen=True) above it")
    if cls.name in reserved_names:
        raise InvalidInputError(
            f"{where} has name = '{cls.name}', which is taken; give it its own: name: ClassVar[str] = ..."
        )
    if not cls.name.isidentifier() or cls.name != cls.name.lower():
        raise InvalidInputError(f"{where} has name = '{cls.name}'; allowed: small letters, digits and _")
    for needed in ("train", "combine"):
        if getattr(cls, needed) is getattr(Method, needed):
            raise InvalidInputError(f"{where} has no {needed}(...) (docs/writing_a_method.md)")
    for field in dataclasses.fields(cls):
        if "meaning" not in field.metadata:
            raise InvalidInputError(
                f"{where}: '{field.name}' is not an option; write {field.name}: TYPE = parameter(DEFAULT, "
                "MEANING), or ClassVar[TYPE] if it is not meant to be one"
            )
        try:
            describe_allowed(field)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None
    return cls


def source_sha256(cls: type[Method]) -> str:
    """Return the SHA-256 of a method's source code outside feddbe, or an empty text."""
    user_object, digest = _FILES.get(cls), hashlib.sha256()
    parts = [user_object.sha256] if user_object else []
    for base in cls.__mro__:
        if base is object or base.__module__.split(".")[0] == "feddbe":
            continue
        if not user_object or base.__module__ not in user_object.modules:
            parts.append(_source(base))
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
"""Name -> module and class, in the order of tables; plus methods from outside feddbe."""


class Description(TypedDict):
    """Description of a method or an add-on for users."""

    name: str
    family: str
    addons: list[str]
    parameters: list[dict[str, Any]]
    facts: dict[str, str]
    """Sizes of messages and kept state in models, and the evaluated model."""


@dataclass(frozen=True)
class MethodName:
    """A method's name after parsing: the method and its add-ons, with the options in their brackets."""

    text: str
    """As the user typed it."""
    parts: tuple[tuple[str, Mapping[str, Any]], ...]
    """The method, then its add-ons: name and options."""

    @property
    def base(self) -> str:
        """The method's name without add-ons."""
        return METHODS[self.parts[0][0]].name

    @property
    def options_in_brackets(self) -> set[str]:
        """The hyper-parameters that the name states, as in `mr kappa`."""
        return {
            f"{part.name} {field.name}"
            for name, options in self.parts
            for part in ADDONS.get(name) or (METHODS[name],)
            for field in dataclasses.fields(part)
            if field.name in options
        }

    def build(self, defaults: Defaults | None = None, *, force: bool = False) -> Method:
        """Return the method.

        Args:
            defaults: Values that win over a part's own defaults and lose against those in brackets.
            force: Allow an add-on that the method refuses.

        Raises:
            BadInput: An option is unknown or out of range, or an add-on does not fit the method.
        """
        (name, options), *rest = self.parts
        method = parameters.instantiate(name, [METHODS[name]], options, defaults)[0]
        addons: list[AddOn] = []
        for addon, addon_options in rest:
            classes = ADDONS[addon]
            for part in parameters.instantiate(
                "+".join(c.name for c in classes), classes, addon_options, defaults
            ):
                if any(part.name == a.name for a in addons):
                    raise InvalidInputError(f"'{self.text}' has {part.name} twice (dbe = prbm + mr)")
                reason = method.unsupported_addons.get(part.name) or (
                    "" if force else method.discouraged_addons.get(part.name)
                )
                if reason:
                    raise InvalidInputError(f"{method.name} does not support +{part.name}: {reason}")
                addons.append(part)
        return Composed(method, tuple(addons)) if addons else method


def parse_method(text: str) -> Method:
    """Return the method that `text` names, with its own defaults."""
    return parse_name(text).build()


def hyperparameters(method: Method) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of a method and its add-ons: part -> option -> value."""
    return {part.name: dataclasses.asdict(part) for part in _parts(method)}


def identity(method: Method) -> dict[str, Any]:
    """Return the settings by which methods differ: hyperparameters, and source code outside feddbe."""
    identifying: dict[str, Any] = {"method_options": hyperparameters(method)}
    source = source_sha256(type(_inner(method)))
    return identifying | ({"method_source": source} if source else {})


def stored_source(method: Method) -> StoredSource | None:
    """Return the content of the user's file that defines the method, or None."""
    user_object = source_file(type(_inner(method)))
    return user_object.source if user_object else None


def package_versions(method: Method) -> dict[str, str]:
    """Return name and version of the installed package that defines the method, if any."""
    return package_version(type(_inner(method)))


def is_in_memory(method: Method) -> bool:
    """Return whether the method cannot be built from its name in another process."""
    return METHODS.user_defined(type(_inner(method)))


def format_name(method: Method) -> str:
    """Return the text that names this method, and register its class.

    An option at its default is omitted, unless the default depends on model or variant.
    """
    if not isinstance(method, Method):
        raise InvalidInputError(f"'{method}' is not a method; give its name, or an instance, as in FedAvg()")
    inner, words = _inner(method), list[str]()
    cls = type(inner)
    if (file := source_file(cls)) is None and METHODS.get(cls.name) is not cls:
        METHODS[cls.name] = cls
    for part in _parts(method):
        options = [
            f"{field.name}={parameters.format_value(value)}"
            for field in dataclasses.fields(part)
            if (value := getattr(part, field.name)) != field.default
            or field.name in defaults.part_defaults(part.name)
        ]
        name = f"{file.path}:{file.name}" if file and part is inner else part.name
        words.append(name + (f"({','.join(options)})" if options else ""))
    return "+".join(words)


def _inner(method: Method) -> Method:
    return method.inner if isinstance(method, Composed) else method


def _parts(method: Method) -> tuple[Method | AddOn, ...]:
    return (method.inner, *method.addons) if isinstance(method, Composed) else (method,)


def describe_methods(names: Sequence[str] = ()) -> list[Description]:
    """Return descriptions of these methods and add-ons, or of all."""
    for name in names:
        if name not in METHODS and name not in ADDONS:
            raise unknown_name("method or add-on", name, [*METHODS, *ADDONS])
    return [
        Description(
            name=name,
            family=parts[0].family if issubclass(parts[0], Method) else "add-on",
            addons=supported_addons(parts[0]) if issubclass(parts[0], Method) else [],
            parameters=[
                {
                    "name": field.name,
                    "part": part.name,
                    "default": field.default,
                    "allowed": describe_allowed(field),
                    "search": field.metadata["search"],
                    "search_rule": field.metadata["search_rule"],
                    "meaning": field.metadata["meaning"],
                }
                for part in parts
                for field in dataclasses.fields(part)
            ],
            facts=parts[0].description._asdict() if issubclass(parts[0], Method) else {},
        )
        for name in names or [*METHODS, *ADDONS]
        for parts in [ADDONS.get(name) or (METHODS[name],)]
    ]


def supported_addons(method: type[Method]) -> list[str]:
    """Return the add-ons that a method supports."""
    refused = method.discouraged_addons.keys() | method.unsupported_addons.keys()
    return [name for name, parts in ADDONS.items() if not {p.name for p in parts} & refused]


def file_reference(text: str) -> str:
    """Return the `FILE.py:CLASS` at the start of a method's name, or an empty text."""
    file = re.match(r"(.+?\.py(?::\w*)?)(?=\s*(?:[(+]|$))", text.lstrip())
    return file[1] if file else ""


def parse_name(text: str) -> MethodName:
    """Parse `a(x=1)+b(y=2)`: a method, then add-ons. Names of feddbe's own methods ignore case."""
    name = file_reference(text)
    rest = text.lstrip()[len(name) :]
    parts: list[tuple[str, Mapping[str, Any]]] = []
    for piece in re.split(r"\+(?![^(]*\))", rest):  # a plus outside brackets
        ours = not name and piece.partition("(")[0].strip().lower() in METHODS.builtin
        part = parameters.parse_spec(piece.lower() if parts or ours else piece)
        if part is None or (name and not parts and part[0]):
            raise InvalidInputError(f"cannot read method '{text}'; write it like fedavg+dbe(kappa=5,mu=0.1)")
        kind, known = ("add-on", ADDONS) if parts else ("method", METHODS)
        part = (part[0] or name, part[1]) if not parts else part
        if part[0] not in known:
            raise unknown_name(kind, part[0], known)
        parts.append(part)
    return MethodName(text, tuple(parts))
