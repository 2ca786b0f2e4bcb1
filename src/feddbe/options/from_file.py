"""What a user wrote in a Python file of his own, named as `FILE.py:NAME`: a model, a method.

The file is executed, as a script of the user's would be. Its place is not part of a run's identity, its
content is, together with that of the modules that it imports from its folder: a run is not continued with
what was edited.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from feddbe.errors import BadInput, one_line, short, unknown
from feddbe.options.local_modules import LocalModules
from feddbe.paths import expand

__all__ = [
    "Found", "Source", "check_content", "content_sha256", "failed", "load", "names_file", "split_name",
]  # fmt: skip


class Source(NamedTuple):
    """A user's file by content, as a run stores it."""

    sha256: str
    """Of the file."""
    modules: dict[str, str]
    """SHA-256 of each module that it imports from its folder, by the path relative to that folder."""

    @classmethod
    def from_json(cls, stored: Any, kind: str) -> Source | None:
        """Return what a run stored of its `model` or `method`; None if that is not a source."""
        match stored.get(kind) if isinstance(stored, dict) else None:
            case {"sha256": str(sha256), "modules": dict(modules)}:
                return cls(sha256, {str(path): str(digest) for path, digest in modules.items()})
        return None


class Found(NamedTuple):
    """Something in a user's file."""

    path: Path
    name: str
    value: Any
    source: Source
    sha256: str
    """Of the file, the name and the modules that it imports from its folder."""
    modules: frozenset[str] = frozenset()
    """Names of these modules."""

    @property
    def again(self) -> tuple[str, str]:
        """Its name for other processes on this machine, wherever they are, and its hash."""
        return f"{self.path.resolve()}:{self.name}", self.sha256


def names_file(text: str) -> bool:
    """Whether this is a Python file's name, with or without a name in it."""
    return re.search(r"\.py(:|$)", text) is not None


def split_name(text: str) -> tuple[str, str]:
    """Return file and name of `FILE.py:NAME`; the name may be empty."""
    if text.endswith(".py"):
        return text, ""
    file, _, name = text.rpartition(":")
    return file, name


def load(kind: str, what: str, text: str, fits: Callable[[Any], bool], sha256: str = "") -> Found:
    """What `FILE.py:NAME` names: a `kind` (`model`), as `what` (`function`), for which an object `fits`.

    `sha256`: of what was found before, if it must be the same.
    """
    file, name = split_name(text)
    path = expand(file)
    content = _read(kind, path)
    module, local = _executed(content, path)
    digest = _digest(content, name, local)
    if sha256 not in ("", digest):
        raise BadInput(f"the {kind}'s file '{path}' is not the one that the run began with")
    own = {module.__name__, *local.modules}
    there = {
        name
        for name, value in vars(module).items()
        if fits(value) and getattr(value, "__module__", None) == module.__name__
    }
    if not name:
        has = ", ".join(sorted(there)) or "none"
        raise BadInput(f"{kind} '{text}': name its {what} too, as in FILE.py:{what.upper()}; it has: {has}")
    value = getattr(module, name, None)
    if value is None or not fits(value):
        raise unknown(f"{what} in '{path}':", name, there)
    return Found(path, name, value, _source(content, local), digest, frozenset(own))


def check_content(kind: str, path: Path, stored: Source) -> None:
    """Refuse a file whose content, or that of a module which it imports, is not what a run stored.

    Nothing is executed.
    """
    content, local = _read(kind, path), LocalModules(path.parent)
    local.scan(content)
    here = _source(content, local)
    if here.sha256 != stored.sha256:
        raise BadInput(
            f"the {kind}'s file '{path}' is not the one that the run began with (sha256 {here.sha256[:12]}, "
            f"not {short(stored.sha256[:12])}); copy it from where the run began"
        )
    modules = here.modules | local.hashes(stored.modules.keys() - here.modules.keys())
    for module in sorted(modules.keys() | stored.modules.keys()):
        if modules.get(module) != stored.modules.get(module):
            raise BadInput(
                f"'{short(module)}', which the {kind}'s file '{path}' imports, is not the one that the run "
                "began with; copy it from where the run began"
            )


def content_sha256(kind: str, path: Path) -> str:
    """Return the SHA-256 of a user's file."""
    return hashlib.sha256(_read(kind, path)).hexdigest()


def _read(kind: str, path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise BadInput(f"the {kind}'s file '{path}' is not a plain file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the {kind}'s file '{path}': {error.strerror}") from None


def _source(content: bytes, local: LocalModules) -> Source:
    return Source(hashlib.sha256(content).hexdigest(), local.hashes(local.contents))


def _digest(content: bytes, name: str, local: LocalModules) -> str:
    digest = hashlib.sha256(content + b"\0" + name.encode())
    for path, module in sorted(local.hashes(local.contents).items()):
        digest.update(f"\0{path}\0{module}".encode())
    return digest.hexdigest()


def failed(error: BaseException, path: Path) -> str:
    """What comes after `failed`: in which line of a user's file, and what was said."""
    kind, text = type(error).__name__, one_line(error)
    return f"{_line(error, path)}: {kind if text == kind else f'{kind}: {text}'}"


_EXECUTED: dict[str, tuple[ModuleType, LocalModules]] = {}
"""Modules of users' files, by name."""


def _executed(content: bytes, path: Path) -> tuple[ModuleType, LocalModules]:
    """The file as a module, once for each content of it and of what it imports from its folder."""
    local = LocalModules(path.parent)
    local.scan(content)
    name = f"feddbe_own_{_digest(bytes(path.resolve()) + content, '', local)[:16]}"
    if name not in _EXECUTED or not _EXECUTED[name][1].is_current():
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # dataclasses, for one, look there for a class's module
        try:
            local.execute(content, path, vars(module))
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            del sys.modules[name]
            raise BadInput(f"'{path}' cannot be executed{failed(error, path)}") from error
        _EXECUTED[name] = module, local
    return _EXECUTED[name]


def _line(error: BaseException, path: Path) -> str:
    """Where in the user's file it happened, if it did."""
    at: int | None = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            at = trace.tb_lineno  # the innermost one
        trace = trace.tb_next
    return f" in line {at}" if at else ""
