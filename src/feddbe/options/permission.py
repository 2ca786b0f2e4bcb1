"""Permission: what a user allows a stored run to do. A run folder may come from anybody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NOTHING", "Permission", "permit"]


@dataclass(frozen=True)
class Permission:
    """What the user allows a stored run to do."""

    code: tuple[str, ...] = ()
    """Files that may be executed, named in the command: FILE.py or FILE.py:NAME."""
    trust: bool = False
    """Whether the user says that the run is their own."""


NOTHING = Permission()


def permit(code: str | Path | Iterable[str | Path] = (), *, trust: bool = False) -> Permission:
    """Return what a user allows, from the arguments of a public function."""
    files = [code] if isinstance(code, str | Path) else code
    return Permission(tuple(map(str, files)), trust)
