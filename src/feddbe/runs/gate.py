"""The gate between a run's file and this process.

A run folder may come from anybody. It can name files of code (a model, a method), and an engine on another
machine. Nothing that a stored run names is resolved before `admit`: a file is executed only if the user names
it in the command or says that the run is their own, and only if its content is what the run stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddbe import engines, methods
from feddbe.errors import BadInput, short
from feddbe.options import from_file
from feddbe.options.config import Config
from feddbe.options.from_file import Source, names_file
from feddbe.options.permission import Permission
from feddbe.paths import expand
from feddbe.runs.sqlite_file import damaged
from feddbe.runs.store import Store

__all__ = ["admit"]


def admit(store: Store, allowed: Permission, given: Mapping[str, Any]) -> tuple[str, Config]:
    """Return method and options of a stored run, with what is `given` now in place of what it has.

    Nothing is executed here. A file that the user named replaces the path that the run has.

    Args:
        store: The run.
        allowed: What the user allows it to do.
        given: Options that come from the user.

    Raises:
        BadInput: The run names code that is not allowed, or whose content is not what the run stored.
        Damaged: The stored configuration cannot be read.
    """
    settings = store.meta("config")
    match settings:
        case {"method": str(method), "method_options": dict(parts)} if parts:
            pass
        case _:
            raise damaged(store.folder, "what is written about it: config")
    names = {field.name for field in dataclasses.fields(Config)} - {"method"}
    stored = {key: settings[key] for key in names & settings.keys() if settings[key] is not None}
    options = Config(**stored | dict(given))
    if file := methods.file_in(method):
        admitted = _admit_file("method", file, store, allowed)
        method = method.replace(file, admitted, 1)
        if methods.file_in(method) != admitted:
            raise BadInput(f"cannot use the path '{short(admitted)}' in a method's name; rename it")
    if "model" not in given and options.model and names_file(options.model):
        options = dataclasses.replace(options, model=_admit_file("model", options.model, store, allowed))
    if "engine" not in given and not allowed.trust and not engines.find(options.engine).is_local():
        raise BadInput(
            f"the run in '{store.folder}' names an engine on other machines, '{short(options.engine)}'; say "
            "which one yourself (--engine), or --trust if the run is your own"
        )
    return method, options


def _admit_file(kind: str, text: str, store: Store, allowed: Permission) -> str:
    """Return the `FILE.py:NAME` that may be executed in place of what the run names."""
    shown, (file, name) = short(text), from_file.split_name(text)
    if not allowed.code and not allowed.trust:
        raise BadInput(
            f"the {kind} of '{store.folder}' is code in a file, '{shown}', which is not executed for a "
            "stored run: name it, --code FILE.py, or say that the run is your own, --trust (in Python code=, "
            "trust=True)"
        )
    stored = Source.from_json(store.meta("sources"), kind)
    if stored is None:
        raise BadInput(
            f"'{store.folder}' does not store the content of its {kind}'s file '{shown}', so that it cannot "
            "be compared; name method and model in the command"
        )
    path = _named_file(kind, name, stored, allowed)
    if path is None and not allowed.trust:
        raise BadInput(
            f"--code {short(', '.join(allowed.code))}: this is not the {kind}'s file that '{store.folder}' "
            f"began with ('{shown}', sha256 {short(stored.sha256[:12])}); name that one, too"
        )
    path = path or expand(file)
    from_file.check_content(kind, path, stored)
    return f"{path}:{name}"


def _named_file(kind: str, name: str, stored: Source, allowed: Permission) -> Path | None:
    """Return the file among those that the user named which has the stored content."""
    for text in allowed.code:
        file, only = from_file.split_name(text)
        path = expand(file)
        if only in ("", name) and from_file.content_sha256(kind, path) == stored.sha256:
            return path
    return None
