"""Models and methods in users' Python files, named as `FILE.py:NAME`.

The file is executed like a script. Its content identifies a run, together with the modules that it imports
from its folder; its path does not. A run cannot be resumed with an edited file.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import machinery
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from feddbe.errors import InvalidInputError, one_line, truncate, unknown_name
from feddbe.paths import expand_path


class StoredSource(NamedTuple):
    """A user's file by content, as a run stores it."""

    sha256: str
    """SHA-256 of the file."""
    modules: dict[str, str]
    """SHA-256 of each module that it imports from its folder, by the path relative to that folder."""

    @classmethod
    def from_json(cls, stored: Any, kind: str) -> StoredSource | None:
        """Return the stored source of a run's `model` or `method`, or None if it has none."""
        match stored.get(kind) if isinstance(stored, dict) else None:
            case {"sha256": str(sha256), "modules": dict(modules)}:
                return cls(sha256, {str(path): str(digest) for path, digest in modules.items()})
        return None


class UserObject(NamedTuple):
    """An object in a user's file."""

    path: Path
    name: str
    value: Any
    source: StoredSource
    sha256: str
    """SHA-256 of the file, the name and the modules that the file imports from its folder."""
    modules: frozenset[str] = frozenset()
    """Names of these modules."""

    @property
    def reload(self) -> tuple[str, str]:
        """The reference by absolute path, for other processes on this machine, and the hash."""
        return f"{self.path.resolve()}:{self.name}", self.sha256


def is_file_reference(text: str) -> bool:
    """Return True for `FILE.py` and `FILE.py:NAME`."""
    return re.search(r"\.py(:|$)", text) is not None


def split_reference(text: str) -> tuple[str, str]:
    """Return file and name of `FILE.py:NAME`; the name may be empty."""
    if text.endswith(".py"):
        return text, ""
    file, _, name = text.rpartition(":")
    return file, name


def load_object(
    kind: str, object_kind: str, text: str, is_valid: Callable[[Any], bool], sha256: str = ""
) -> UserObject:
    """Execute a user's file and return the object that `FILE.py:NAME` names.

    Args:
        kind: `model` or `method`, for error messages.
        object_kind: `function` or `class`, for error messages.
        text: The reference.
        is_valid: Returns True for objects of this kind.
        sha256: Expected hash, if it must be the object of an earlier call.
    """
    file, name = split_reference(text)
    path = expand_path(file)
    content = _read_file(kind, path)
    module, local_modules = _execute_file(content, path)
    digest = _hash_source(content, name, local_modules)
    if sha256 not in ("", digest):
        raise InvalidInputError(f"the {kind}'s file '{path}' is not the one that the run began with")
    candidates = {
        name
        for name, value in vars(module).items()
        if is_valid(value) and getattr(value, "__module__", None) == module.__name__
    }
    if not name:
        names = ", ".join(sorted(candidates)) or "none"
        raise InvalidInputError(
            f"{kind} '{text}': name its {object_kind} too, as in FILE.py:{object_kind.upper()}; "
            f"the file has: {names}"
        )
    value = getattr(module, name, None)
    if value is None or not is_valid(value):
        raise unknown_name(f"{object_kind} in '{path}':", name, candidates)
    modules = frozenset({module.__name__, *local_modules.modules})
    return UserObject(path, name, value, _describe_source(content, local_modules), digest, modules)


def check_content(kind: str, path: Path, stored: StoredSource) -> None:
    """Raise an error if the file, or a module that it imports, differs from what a run stored.

    Nothing is executed.
    """
    content = _read_file(kind, path)
    local_modules = LocalModules(path.parent)
    local_modules.scan(content)
    current = _describe_source(content, local_modules)
    if current.sha256 != stored.sha256:
        raise InvalidInputError(
            f"the {kind}'s file '{path}' is not the one that the run began with (sha256 "
            f"{current.sha256[:12]}, not {truncate(stored.sha256[:12])}); copy it from where the run began"
        )
    modules = current.modules | local_modules.hash_files(stored.modules.keys() - current.modules.keys())
    for module in sorted(modules.keys() | stored.modules.keys()):
        if modules.get(module) != stored.modules.get(module):
            raise InvalidInputError(
                f"'{truncate(module)}', which the {kind}'s file '{path}' imports, is not the one that the "
                "run began with; copy it from where the run began"
            )


def content_sha256(kind: str, path: Path) -> str:
    """Return the SHA-256 of a user's file."""
    return hashlib.sha256(_read_file(kind, path)).hexdigest()


def _read_file(kind: str, path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"the {kind}'s file '{path}' is not a plain file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot read the {kind}'s file '{path}': {error.strerror}") from None


def _describe_source(content: bytes, local: LocalModules) -> StoredSource:
    return StoredSource(hashlib.sha256(content).hexdigest(), local.hash_files(local.contents))


def _hash_source(content: bytes, name: str, local: LocalModules) -> str:
    digest = hashlib.sha256(content + b"\0" + name.encode())
    for path, module in sorted(local.hash_files(local.contents).items()):
        digest.update(f"\0{path}\0{module}".encode())
    return digest.hexdigest()


def describe_failure(error: BaseException, path: Path) -> str:
    """Return the line of the user's file in which an error occurred, and the error."""
    kind, text = type(error).__name__, one_line(error)
    return f"{_format_line(error, path)}: {kind if text == kind else f'{kind}: {text}'}"


_EXECUTED: dict[str, tuple[ModuleType, LocalModules]] = {}
"""Modules of users' files, by name."""


def _execute_file(content: bytes, path: Path) -> tuple[ModuleType, LocalModules]:
    """Return the file as a module, executed once per content of the file and its local imports."""
    local = LocalModules(path.parent)
    local.scan(content)
    name = f"feddbe_own_{_hash_source(bytes(path.resolve()) + content, '', local)[:16]}"
    if name not in _EXECUTED or not _EXECUTED[name][1].is_current():
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # dataclasses look up a class's module there
        try:
            local.execute(content, path, vars(module))
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            del sys.modules[name]
            raise InvalidInputError(f"'{path}' cannot be executed{describe_failure(error, path)}") from error
        _EXECUTED[name] = module, local
    return _EXECUTED[name]


def _format_line(error: BaseException, path: Path) -> str:
    """Return ` in line N` if the error occurred in the user's file, otherwise an empty text."""
    line: int | None = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            line = trace.tb_lineno  # the innermost one
        trace = trace.tb_next
    return f" in line {line}" if line else ""


_LOCK = threading.RLock()
"""Lock that is held while `sys.modules` has a folder's modules under their plain names."""
_INSTALLED = {
    Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")
}
"""Folders whose modules are installed packages, not parts of a user's file in the same folder."""
_NEVER_LOCAL = {"feddbe", *sys.stdlib_module_names}


class LocalModules(MetaPathFinder, Loader):
    """The modules of one folder, each with the content of its first reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.contents: dict[str, bytes] = {}
        """Relative path -> content of each module that the source names or imported."""
        self.modules: dict[str, ModuleType] = {}
        """Modules that were executed, by name."""
        self._is_active = False

    def scan(self, content: bytes, package: str = "") -> None:
        """Read all modules of the folder that this source imports, and those that they import in turn.

        Args:
            content: Python source.
            package: Name of the package that its relative imports start from.
        """
        for name in _imported_names(content, package):
            file = self._locate(name)
            if file is None or file.is_dir() or self._relative_path(file) in self.contents:
                continue
            source = self._read_module(file)
            if file.suffix == ".py":
                is_package = file.name == "__init__.py"
                self.scan(source, name if is_package else name.rpartition(".")[0])

    def hash_files(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the SHA-256 of these files in the folder, by their relative paths; others are left out."""
        digests = {}
        for relative in paths:
            content = self.contents.get(relative)
            file = self.folder / relative
            if content is None and ".." not in file.parts and file.is_file() and self.folder in file.parents:
                content = file.read_bytes()
            if content is not None:
                digests[relative] = hashlib.sha256(content).hexdigest()
        return digests

    def is_current(self) -> bool:
        """Return True if all modules that were read are unchanged in the folder."""
        files = {self.folder / relative: content for relative, content in self.contents.items()}
        return all(file.is_file() and file.read_bytes() == content for file, content in files.items())

    def execute(self, content: bytes, path: Path, namespace: dict[str, Any]) -> None:
        """Execute source in this namespace; all its imports, now and later, use the folder's modules."""
        namespace["__builtins__"] = vars(builtins) | {"__import__": self._import}
        with self._activated():
            # not with importlib, whose bytecode cache may be older than the hashed content
            exec(compile(content, path, "exec"), namespace)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        file = self._locate(fullname)
        if file is None:
            return None
        if file.is_dir():
            spec = machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(file)]
            return spec
        self._read_module(file)
        if file.suffix != ".py":  # compiled
            return spec_from_file_location(fullname, file)
        is_package = file.name == "__init__.py"
        spec = machinery.ModuleSpec(fullname, self, origin=str(file), is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [str(file.parent)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        file = Path(str(module.__file__))
        self.execute(self._read_module(file), file, vars(module))

    def _locate(self, name: str) -> Path | None:
        """Return the module's file in the folder, the folder of a namespace package, or None."""
        top, *_ = parts = name.split(".")
        if top in _NEVER_LOCAL or self.folder in _INSTALLED or not all(part.isidentifier() for part in parts):
            return None
        base = self.folder.joinpath(*parts)
        suffixes = (".py", *machinery.EXTENSION_SUFFIXES)
        for file in (base / "__init__.py", *(base.with_name(base.name + suffix) for suffix in suffixes)):
            if file.is_file():
                return file
        if not base.is_dir():
            return None
        elsewhere = machinery.PathFinder.find_spec(top)
        is_namespace = elsewhere is None or elsewhere.origin is None
        return base if is_namespace else None

    def _relative_path(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def _read_module(self, file: Path) -> bytes:
        relative = self._relative_path(file)
        if relative not in self.contents:
            self.contents[relative] = file.read_bytes()
        return self.contents[relative]

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Replace `import` for the folder's modules."""
        loaded = self.modules.get(name) if level == 0 else None
        if loaded and all(hasattr(loaded, part) for part in fromlist or ()):  # an import in a loop is quick
            return loaded if fromlist else self.modules[name.partition(".")[0]]
        if level == 0 and self._locate(name.partition(".")[0]) is None:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        with self._activated():
            return builtins.__import__(name, globals, locals, fromlist or (), level)

    @contextmanager
    def _activated(self) -> Iterator[None]:
        """Put this folder's modules into `sys.modules`, in place of others with the same names.

        The others are restored afterwards, except older versions of the same folder's modules.
        """
        with _LOCK:
            if self._is_active:
                yield
                return
            displaced_modules = self._own_modules()
            for name in displaced_modules:
                del sys.modules[name]
            sys.modules.update(self.modules)
            sys.meta_path.insert(0, self)
            self._is_active = True
            try:
                yield
            finally:
                self._is_active = False
                sys.meta_path.remove(self)
                self.modules = self._own_modules()
                for name, module in displaced_modules.items():
                    if not self._is_older(module):
                        sys.modules[name] = module

    def _own_modules(self) -> dict[str, ModuleType]:
        """Return the entries of `sys.modules` whose names are modules of this folder."""
        entries = {entry.name.partition(".")[0] for entry in self.folder.iterdir()}
        tops = {top for top in entries if self._locate(top) is not None}
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}

    def _is_older(self, module: ModuleType) -> bool:
        loader = getattr(module, "__loader__", None)
        return isinstance(loader, LocalModules) and loader.folder == self.folder and not loader._is_active


@lru_cache(maxsize=256)
def _imported_names(content: bytes, package: str) -> frozenset[str]:
    """Return the dotted names of all modules that this source may import, also inside functions."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):  # executing it raises the error
        return frozenset()
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute_name(node.module or "", node.level, package)
            names.add(origin)
            names.update(f"{origin}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
    parents = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return frozenset(name for name in names | parents if name and "*" not in name)


def _absolute_name(module: str, level: int, package: str) -> str:
    """Return the absolute name of `from ..module import` inside of this package."""
    if level == 0:
        return module
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join(filter(None, [*base, module]))


@dataclass(frozen=True)
class Permission:
    """The user's permission to execute code that a stored run names."""

    code: tuple[str, ...] = ()
    """Files that may be executed, named in the command: FILE.py or FILE.py:NAME."""
    trust: bool = False
    """True if the user declared the run as their own."""


NO_PERMISSION = Permission()


def make_permission(code: str | Path | Iterable[str | Path] = (), *, trust: bool = False) -> Permission:
    """Return the permission from the arguments of a public function."""
    files = [code] if isinstance(code, str | Path) else code
    return Permission(tuple(map(str, files)), trust)
