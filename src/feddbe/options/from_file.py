"""What a user wrote in a Python file of his own, named as `FILE.py:NAME`: a model, a method.

The file is executed, as a script of the user's would be. Its place is not part of a run's identity, its
content is: a run is not continued with what was edited.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from feddbe.errors import BadInput, one_line, unknown
from feddbe.paths import expand

__all__ = ["Found", "failed", "load", "names_file"]


class Found(NamedTuple):
    """Something in a user's file."""

    path: Path
    name: str
    value: Any
    sha256: str
    """Of the file and the name."""

    @property
    def again(self) -> tuple[str, str]:
        """Its name for other processes on this machine, wherever they are, and its hash."""
        return f"{self.path.resolve()}:{self.name}", self.sha256


def names_file(text: str) -> bool:
    """Whether this is a Python file's name, with or without a name in it."""
    return re.search(r"\.py(:|$)", text) is not None


def load(kind: str, what: str, text: str, fits: Callable[[Any], bool], sha256: str = "") -> Found:
    """What `FILE.py:NAME` names: a `kind` (`model`), as `what` (`function`), for which an object `fits`.

    `sha256`: of what was found before, if it must be the same.
    """
    place, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    path = expand(place)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the {kind}'s file '{path}': {error.strerror}") from None
    digest = hashlib.sha256(content + b"\0" + name.encode()).hexdigest()
    if sha256 not in ("", digest):
        raise BadInput(f"the {kind}'s file '{path}' is not the one that the run began with")
    module = _executed(content, path)
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
    return Found(path, name, value, digest)


def failed(error: BaseException, path: Path) -> str:
    """What comes after `failed`: in which line of a user's file, and what was said."""
    kind, text = type(error).__name__, one_line(error)
    return f"{_line(error, path)}: {kind if text == kind else f'{kind}: {text}'}"


def _executed(content: bytes, path: Path) -> ModuleType:
    """The file as a module, once for each content; what lies beside it can be imported by it."""
    name = f"feddbe_own_{hashlib.sha256(bytes(path.resolve()) + content).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses, for one, look there for a class's module
    sys.path.append(str(path.parent.resolve()))
    try:
        # not by importlib, whose cache of bytecode may be older than the content that was hashed
        exec(compile(content, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        del sys.modules[name]
        raise BadInput(f"'{path}' cannot be executed{failed(error, path)}") from error
    finally:
        sys.path.pop()
    return module


def _line(error: BaseException, path: Path) -> str:
    """Where in the user's file it happened, if it did."""
    at: int | None = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            at = trace.tb_lineno  # the innermost one
        trace = trace.tb_next
    return f" in line {at}" if at else ""
