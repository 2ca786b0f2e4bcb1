"""Errors that feddbe raises deliberately, and helpers for their messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FeddbeError(Exception):
    """Base class of all errors for users: one line with the problem and the remedy."""

    exit_code = 2


class InvalidInputError(FeddbeError):
    """An invalid value; nothing has been written."""


class DataMissingError(InvalidInputError):
    """A data set's files are not on this machine but can be downloaded."""


class StoreError(FeddbeError):
    """A run's file cannot be read or written."""


class CorruptRunError(StoreError):
    """A run's file is corrupt."""


class DivergenceError(FeddbeError):
    """A client's loss or update is not finite; the last complete round is kept."""

    exit_code = 3

    def __init__(self, client: int, round: int, what: str, value: float) -> None:
        super().__init__(client, round, what, value)  # all arguments, so that it can be pickled
        self.client, self.round, self.what, self.value = client, round, what, value

    def __str__(self) -> str:
        return (
            f"training diverged: {self.what} = {self.value} at client {self.client} in round {self.round}; "
            "the last good round is kept (try a smaller lr)"
        )


def unknown_name(kind: str, value: str, allowed: Iterable[str]) -> InvalidInputError:
    """Return the error for a name that is not in `allowed`, with the closest allowed name."""
    names = sorted(allowed)
    near = get_close_matches(value[:100], names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return InvalidInputError(f"unknown {kind} '{truncate(value)}'; {hint}allowed: {', '.join(names)}")


def one_line(error: BaseException) -> str:
    """Return the first line of a foreign error's message, or its class name."""
    return truncate((str(error).strip().splitlines() or [type(error).__name__])[0], 500)


def truncate(text: object, most: int = 200) -> str:
    """Return foreign text for an error message: shortened, unprintable characters replaced."""
    whole = str(text)
    if len(whole) > most:
        whole = f"{whole[: most * 3 // 4]} ... {whole[-most // 4 :]}"
    return "".join(letter if letter.isprintable() else "?" for letter in whole)
