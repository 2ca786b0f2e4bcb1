"""Methods that are not feddbe's: from a user's file (`my_method.py:MyProx`), from an installed package (entry
point `feddbe.methods`), or a class given from Python.

What they do is part of a run's identity, so their source is hashed: of a file all of it and the modules that
it imports from its folder, of other classes theirs and that of what they inherit from outside of feddbe. The
version of a package that brings a method is written down with the run.
"""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
import inspect
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from feddbe.errors import BadInput, one_line
from feddbe.methods.base import Method
from feddbe.options import allowed, from_file
from feddbe.options.from_file import Found

__all__ = [
    "checked", "file_of", "from_package", "in_file", "owner", "package_version", "packages", "source_sha256",
]  # fmt: skip

_GROUP = "feddbe.methods"
_FILES: dict[type[Method], Found] = {}
"""Where classes are from that are from files."""


def in_file(text: str, taken: Collection[str], sha256: str = "") -> type[Method]:
    """The class that `FILE.py:CLASS` names; its name must be none of those `taken`."""
    found = from_file.load("method", "class", text, inspect.isclass, sha256)
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
