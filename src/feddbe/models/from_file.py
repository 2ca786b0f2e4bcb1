"""A user's model from a Python file: `my_models.py:build`, where build(shape, classes) makes the model, or a
function of fewer or more of (shape, classes, words): `signature.py`.

The file is executed, as a script of the user's would be. Its place is not part of a run's identity, its
content is: a run is not continued with a model that was edited.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from feddbe.errors import BadInput, one_line, unknown
from feddbe.models.cuts import Halves
from feddbe.models.signature import asked
from feddbe.paths import expand

__all__ = ["FromFile", "from_file", "names_file"]


@dataclass(frozen=True)
class FromFile:
    """A function in a user's file, called like any other builder; what goes wrong in it becomes one line."""

    path: Path
    function: str
    call: Callable[..., Any]
    sha256: str
    """Of the file and the function's name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (f"{self.path.resolve()}:{self.function}", self.sha256)

    def __call__(self, shape: tuple[int, ...], classes: int, words: int = 0) -> nn.Module | Halves:
        try:
            places, names = asked(self.call, shape, classes, words)
        except BadInput as error:
            raise BadInput(f"in '{self.path}': {error}") from None
        shown = ", ".join([*map(str, places), *(f"{name}={value}" for name, value in names.items())])
        where = f"{self.function}({shown}) in '{self.path}'"
        try:
            made = self.call(*places, **names)
        except Exception as error:  # a user's code may raise anything
            raise BadInput(f"{where} failed{_line(error, self.path)}: {_said(error)}") from error
        pair = isinstance(made, tuple) and len(made) == 2 and all(isinstance(m, nn.Module) for m in made)
        if not pair and not isinstance(made, nn.Module):
            raise BadInput(
                f"{where} returned {type(made).__name__}; expected an nn.Module or a pair of them "
                "(features, classifier)"
            )
        return made  # type: ignore[no-any-return]


def names_file(model: str) -> bool:
    """Whether this is a Python file's name, with or without a function, rather than a model's."""
    return re.search(r"\.py(:|$)", model) is not None


def from_file(model: str) -> FromFile:
    """The builder that `FILE.py:FUNCTION` names."""
    place, _, function = model.rpartition(":") if not model.endswith(".py") else (model, "", "")
    path = expand(place)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the model's file '{path}': {error.strerror}") from None
    digest = hashlib.sha256(content + b"\0" + function.encode()).hexdigest()
    module = _executed(content, path, f"feddbe_own_{digest[:16]}")
    functions = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    }
    if not function:
        has = ", ".join(sorted(functions)) or "none"
        raise BadInput(f"model '{model}': name its function too, as in FILE.py:FUNCTION; it has: {has}")
    call = getattr(module, function, None)
    if not callable(call):
        raise unknown(f"function in '{path}':", function, functions)
    return FromFile(path, function, call, digest)


def _again(model: str, sha256: str) -> FromFile:
    """The same builder in another process; the file must not have changed."""
    found = from_file(model)
    if found.sha256 != sha256:
        raise BadInput(f"the model's file '{found.path}' is not the one that the run began with")
    return found


def _executed(content: bytes, path: Path, name: str) -> ModuleType:
    """The file as a module; what lies beside it can be imported by it."""
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses, for one, look there for a class's module
    sys.path.append(str(path.parent.resolve()))
    try:
        # not by importlib, whose cache of bytecode may be older than the content that was hashed
        exec(compile(content, path, "exec"), vars(module))
    except Exception as error:  # a user's code may raise anything
        del sys.modules[name]
        raise BadInput(f"'{path}' cannot be executed{_line(error, path)}: {_said(error)}") from error
    finally:
        sys.path.pop()
    return module


def _line(error: Exception, path: Path) -> str:
    """Where in the user's file it happened, if it did."""
    at: int | None = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            at = trace.tb_lineno  # the innermost one
        trace = trace.tb_next
    return f" in line {at}" if at else ""


def _said(error: Exception) -> str:
    kind, text = type(error).__name__, one_line(error)
    return kind if text == kind else f"{kind}: {text}"
