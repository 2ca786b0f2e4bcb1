"""Methods by name.

Method classes are built in (imported on first use), installed by packages (entry points), defined in users'
files (`my_method.py:MyProx`), or registered by a program.
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
from feddbe.methods.base import BODY, HEAD, MODEL, AddOn, Method


class MethodRegistry(MutableMapping[str, type[Method]]):
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
        if name not in self._classes and name in self._check_installed():
            self._classes[name] = load_from_package(name, self._reserved_names)
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[Method]) -> None:
        check_class(cls, getattr(cls, "__name__", str(cls)), self._reserved_names)
        if cls.name != name:
            raise InvalidInputError(f"{cls.__name__} has name = '{cls.name}', not '{name}'")
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        if name in self._locations or name in self._classes:
            return True
        return isinstance(name, str) and (is_file_reference(name) or name in self._check_installed())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._locations, *self._check_installed(), *self._classes]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def builtin(self) -> Collection[str]:
        """Names of the built-in methods."""
        return self._locations.keys()

    def is_user_defined(self, cls: type[Method]) -> bool:
        """Return True if this program registered the class; other processes cannot find it by name."""
        return self._classes.get(cls.name) is cls and cls.name not in {
            *self._locations,
            *self._check_installed(),
        }

    def _check_installed(self) -> Mapping[str, EntryPoint]:
        for name in installed_methods().keys() & self._reserved_names:
            raise InvalidInputError(
                f"{describe_installed(name)} has the name of a built-in method; uninstall the package"
            )
        return installed_methods()


_ENTRY_POINT_GROUP = "feddbe.methods"
_USER_FILES: dict[type[Method], UserObject] = {}
"""User files of the classes that were loaded from files."""


def load_from_file(text: str, reserved_names: Collection[str], sha256: str = "") -> type[Method]:
    """Return the class that `FILE.py:CLASS` names; its name must not be reserved."""
    user_object = user_code.load_object("method", "class", text, inspect.isclass, sha256)
    cls = check_class(user_object.value, f"{user_object.name} in '{user_object.path}'", reserved_names)
    _USER_FILES[cls] = user_object
    copyreg.pickle(cls, _pickle_method)  # its module is unknown in other processes
    return cls


def source_file(cls: type[Method]) -> UserObject | None:
    """Return the user's file from which the class was loaded, or None."""
    return _USER_FILES.get(cls)


def _pickle_method(method: Method) -> tuple[Any, ...]:
    return _unpickle_method, (*_USER_FILES[type(method)].reload, dataclasses.asdict(method))


def _unpickle_method(text: str, sha256: str, options: Mapping[str, Any]) -> Method:
    """Rebuild a method of a user's file in another process; the file must be unchanged."""
    return load_from_file(text, (), sha256)(**options)


@cache
def installed_methods() -> dict[str, EntryPoint]:
    """Return the entry points of installed methods by name."""
    return {point.name: point for point in entry_points(group=_ENTRY_POINT_GROUP)}


def describe_installed(name: str) -> str:
    """Return a description of an installed method and its package for error messages."""
    point = installed_methods()[name]
    package = point.dist.name if point.dist else "?"
    return f"method '{name}' of the package {package} ({point.value})"


def package_version(cls: type[Method]) -> dict[str, str]:
    """Return name and version of the installed package of this method, or an empty dictionary."""
    point = installed_methods().get(cls.name)
    if point is None or point.dist is None:
        return {}
    if cls.__module__.split(".")[0] != point.module.split(".")[0]:
        return {}
    return {point.dist.name: point.dist.version}


def load_from_package(name: str, reserved_names: Collection[str]) -> type[Method]:
    """Return the class that an installed package registers under this name."""
    point = installed_methods()[name]
    subject = describe_installed(name)
    try:
        loaded = point.load()
    except Exception as error:  # foreign code may raise anything
        raise InvalidInputError(
            f"{subject} cannot be imported: {type(error).__name__}: {one_line(error)}"
        ) from error
    cls = check_class(loaded, subject, reserved_names)
    if cls.name != name:
        raise InvalidInputError(f"{subject} has name = '{cls.name}'; it must be '{name}'")
    return cls


def check_class(cls: Any, subject: str, reserved_names: Collection[str]) -> type[Method]:
    """Return the class if it can be used as a method.

    Args:
        cls: Any object that should be a method class.
        subject: Description of the class for error messages.
        reserved_names: Names that the class must not have.

    Raises:
        InvalidInputError: The class cannot be used; the message has the problem and the remedy.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise InvalidInputError(
            f"{subject} is not a method: it must be a subclass of feddbe.Method (docs/writing_a_method.md)"
        )
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise InvalidInputError(f"{subject} is not a dataclass; write @dataclass(frozen=True) above it")
    if cls.name in reserved_names:
        raise InvalidInputError(
            f"{subject} has name = '{cls.name}', which is reserved; choose another one: "
            "name: ClassVar[str] = ..."
        )
    if not cls.name.isidentifier() or cls.name != cls.name.lower():
        raise InvalidInputError(f"{subject} has name = '{cls.name}'; allowed: lowercase letters, digits, _")
    for required in ("train", "aggregate"):
        if getattr(cls, required) is getattr(Method, required):
            raise InvalidInputError(f"{subject} has no {required}(...) (docs/writing_a_method.md)")
    for field in dataclasses.fields(cls):
        if "meaning" not in field.metadata:
            raise InvalidInputError(
                f"{subject}: '{field.name}' is not an option; write {field.name}: TYPE = parameter(DEFAULT, "
                "MEANING), or ClassVar[TYPE] if it is not a hyperparameter"
            )
        try:
            describe_allowed(field)
        except InvalidInputError as error:
            raise InvalidInputError(f"{subject}: {error}") from None
    return cls


def source_sha256(cls: type[Method]) -> str:
    """Return the SHA-256 of a method's source code outside feddbe, or an empty text."""
    user_object = _USER_FILES.get(cls)
    sources = [user_object.sha256] if user_object else []
    for base in cls.__mro__:
        if base is object or base.__module__.split(".")[0] == "feddbe":
            continue
        if not user_object or base.__module__ not in user_object.modules:
            sources.append(_class_source(base))
    if not sources:
        return ""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.encode() + b"\0")
    return digest.hexdigest()


def _class_source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # typed into an interpreter
        return f"{cls.__module__}.{cls.__qualname__}"


ADDONS: dict[str, tuple[type[AddOn], ...]] = {"prbm": (PRBM,), "mr": (MR,), "dbe": (PRBM, MR), "ft": (FT,)}
METHODS = MethodRegistry({
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
"""Built-in methods, name -> module and class, in the order of tables; and all external methods."""


class MethodInfo(TypedDict):
    """Description of a method or an add-on for users."""

    name: str
    family: str
    addons: list[str]
    parameters: list[dict[str, Any]]
    exchange: dict[str, str]
    """Names that a client receives, sends, keeps and never sends, and the model that it evaluates."""


@dataclass(frozen=True)
class MethodName:
    """A parsed method name: the method and its add-ons, each with the options in brackets."""

    text: str
    """Name as the user typed it."""
    parts: tuple[tuple[str, Mapping[str, Any]], ...]
    """Name and options of the method, then of its add-ons."""

    @property
    def base(self) -> str:
        """Name of the method without add-ons."""
        return METHODS[self.parts[0][0]].name

    @property
    def explicit_options(self) -> set[str]:
        """Hyperparameters that are set in brackets, as in `mr kappa`."""
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
            defaults: Values that replace the classes' defaults; options in brackets override both.
            force: Allow add-ons that the method discourages.

        Raises:
            InvalidInputError: An option is unknown or out of range, or an add-on does not fit the method.
        """
        (method_name, method_options), *addon_parts = self.parts
        method = parameters.instantiate(method_name, [METHODS[method_name]], method_options, defaults)[0]
        rejected = dict(method.unsupported_addons)
        if not force:
            rejected = {**method.discouraged_addons, **rejected}
        addons: list[AddOn] = []
        for addon_name, addon_options in addon_parts:
            classes = ADDONS[addon_name]
            names = "+".join(cls.name for cls in classes)
            for addon in parameters.instantiate(names, classes, addon_options, defaults):
                if any(addon.name == other.name for other in addons):
                    raise InvalidInputError(f"'{self.text}' has {addon.name} twice (dbe = prbm + mr)")
                if addon.name in rejected:
                    reason = rejected[addon.name]
                    raise InvalidInputError(f"{method.name} does not support +{addon.name}: {reason}")
                addons.append(addon)
        return Composed(method, tuple(addons)) if addons else method


def parse_method(text: str) -> Method:
    """Return the method that `text` names, with its own defaults."""
    return parse_name(text).build()


def hyperparameters(method: Method) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of a method and its add-ons: part -> option -> value."""
    return {part.name: dataclasses.asdict(part) for part in _list_parts(method)}


def method_identity(method: Method) -> dict[str, Any]:
    """Return the settings that identify a method: hyperparameters, and hash of source code outside feddbe."""
    identifying: dict[str, Any] = {"method_options": hyperparameters(method)}
    source = source_sha256(type(_without_addons(method)))
    if source:
        identifying["method_source"] = source
    return identifying


def stored_source(method: Method) -> StoredSource | None:
    """Return the content of the user's file that defines the method, or None."""
    user_object = source_file(type(_without_addons(method)))
    return user_object.source if user_object else None


def package_versions(method: Method) -> dict[str, str]:
    """Return name and version of the installed package that defines the method, if any."""
    return package_version(type(_without_addons(method)))


def is_in_memory(method: Method) -> bool:
    """Return True if the method cannot be built from its name in another process."""
    return METHODS.is_user_defined(type(_without_addons(method)))


def format_name(method: Method) -> str:
    """Return the text that names this method, and register its class.

    An option at its default is omitted, unless the default depends on model or variant.
    """
    if not isinstance(method, Method):
        raise InvalidInputError(
            f"'{method}' is not a method; expected a name, or an instance, as in FedAvg()"
        )
    inner = _without_addons(method)
    cls = type(inner)
    file = source_file(cls)
    if file is None and METHODS.get(cls.name) is not cls:
        METHODS[cls.name] = cls
    texts: list[str] = []
    for part in _list_parts(method):
        options: list[str] = []
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value != field.default or field.name in defaults.part_defaults(part.name):
                options.append(f"{field.name}={parameters.format_value(value)}")
        text = f"{file.path}:{file.name}" if file and part is inner else part.name
        if options:
            text += f"({','.join(options)})"
        texts.append(text)
    return "+".join(texts)


def _without_addons(method: Method) -> Method:
    return method.inner if isinstance(method, Composed) else method


def _list_parts(method: Method) -> tuple[Method | AddOn, ...]:
    return (method.inner, *method.addons) if isinstance(method, Composed) else (method,)


def describe_methods(names: Sequence[str] = ()) -> list[MethodInfo]:
    """Return descriptions of these methods and add-ons, or of all."""
    for name in names:
        if name not in METHODS and name not in ADDONS:
            raise unknown_name("method or add-on", name, [*METHODS, *ADDONS])
    return [_describe_part(name) for name in names or [*METHODS, *ADDONS]]


def _describe_part(name: str) -> MethodInfo:
    if name in ADDONS:
        parts = ADDONS[name]
        return MethodInfo(
            name=name,
            family="add-on",
            addons=[],
            parameters=_describe_parameters(parts),
            exchange=_describe_names(parts),
        )
    method = METHODS[name]
    return MethodInfo(
        name=name,
        family=method.family,
        addons=supported_addons(method),
        parameters=_describe_parameters([method]),
        exchange=_describe_names([method]) | {"evaluated": _describe_evaluated(method)},
    )


_MODEL_PARTS = {MODEL: "model", BODY: "body", HEAD: "head"}


def _describe_names(classes: Sequence[type[Method | AddOn]]) -> dict[str, str]:
    """Return the names that these classes declare, as text; an empty text if there are none."""
    exchange = {}
    constant = {name for cls in classes for name in cls.constant}
    for kind in ("receives", "sends", "keeps", "secret"):
        names = dict.fromkeys(name for cls in classes for name in getattr(cls, kind))
        texts = [_MODEL_PARTS.get(name, name) for name in names]
        if kind == "receives":
            texts = [f"{text} (once)" if text in constant else text for text in texts]
            methods = [cls for cls in classes if issubclass(cls, Method)]
            if any(method.keeps_uploads for method in methods):
                texts[-1] += " (models of other clients)"
            if any(method.uses_sample_counts for method in methods):
                texts.append("sample counts of all clients")
        exchange[kind] = ", ".join(texts)
    return exchange


def _describe_evaluated(method: type[Method]) -> str:
    """Return the model with which a client predicts: the docstring of its hook, and its fine-tuning."""
    first_line = (method.inference_params.__doc__ or "").strip().partition("\n")[0].removesuffix(".")
    verb, _, result = first_line.partition(" ")
    model = result if verb == "Return" else first_line
    if not model:
        model = "built by its inference_params"
    finetuning = {"each": "; fine-tuned before each evaluation", "last": "; fine-tuned after the last round"}
    return model + finetuning.get(method.adapts, "")


def _describe_parameters(classes: Sequence[type[Method | AddOn]]) -> list[dict[str, Any]]:
    return [
        {
            "name": field.name,
            "part": cls.name,
            "default": field.default,
            "allowed": describe_allowed(field),
            "search": field.metadata["search"],
            "search_rule": field.metadata["search_rule"],
            "meaning": field.metadata["meaning"],
        }
        for cls in classes
        for field in dataclasses.fields(cls)
    ]


def supported_addons(method: type[Method]) -> list[str]:
    """Return the add-ons that a method supports."""
    unsupported = method.discouraged_addons.keys() | method.unsupported_addons.keys()
    return [name for name, parts in ADDONS.items() if not {p.name for p in parts} & unsupported]


def file_reference(text: str) -> str:
    """Return the `FILE.py:CLASS` at the start of a method's name, or an empty text."""
    match = re.match(r"(.+?\.py(?::\w*)?)(?=\s*(?:[(+]|$))", text.lstrip())
    return match[1] if match else ""


def parse_name(text: str) -> MethodName:
    """Parse `a(x=1)+b(y=2)`: a method, then add-ons. Names of built-in methods ignore case."""
    error = InvalidInputError(f"cannot read method '{text}'; write it like fedavg+dbe(kappa=5,mu=0.1)")
    file = file_reference(text)
    plus_outside_brackets = r"\+(?![^(]*\))"
    method_text, *addon_texts = re.split(plus_outside_brackets, text.lstrip()[len(file) :])

    is_builtin = not file and method_text.partition("(")[0].strip().lower() in METHODS.builtin
    method = parameters.parse_spec(method_text.lower() if is_builtin else method_text)
    if method is None or (file and method[0]):
        raise error
    name, options = method[0] or file, method[1]
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)

    parts: list[tuple[str, Mapping[str, Any]]] = [(name, options)]
    for addon_text in addon_texts:
        addon = parameters.parse_spec(addon_text.lower())
        if addon is None:
            raise error
        if addon[0] not in ADDONS:
            raise unknown_name("add-on", addon[0], ADDONS)
        parts.append(addon)
    return MethodName(text, tuple(parts))
