"""Errors that feddbe raises deliberately, and helpers for their messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FeddbeError(Exception):
    """Base class of all errors for users: one line with the problem and the remedy."""

    exit_code = 2


class InvalidInputError(FeddbeError):
    """Error for an invalid value; nothing has been written."""


class DataMissingError(InvalidInputError):
    """Error for files of a data set that are not on this machine but can be downloaded."""


class StoreError(FeddbeError):
    """Error for a run's file that cannot be read or written."""


class CorruptRunError(StoreError):
    """Error for a run's file that is corrupt."""


class DivergenceError(FeddbeError):
    """Error for a client's loss or update that is not finite; the last complete round is stored."""

    exit_code = 3

    def __init__(self, client: int, round_: int, quantity: str, value: float) -> None:
        super().__init__(client, round_, quantity, value)  # all arguments, so that it can be pickled
        self.client = client
        self.round = round_
        self.quantity = quantity
        self.value = value
        self.client_name = f"client {client}"

    def __str__(self) -> str:
        return (
            f"training diverged: {self.quantity} = {self.value} at {self.client_name} in round "
            f"{self.round}; the last good round is kept (try a smaller lr)"
        )


def unknown_name(kind: str, value: str, allowed: Iterable[str]) -> InvalidInputError:
    """Return the error for a name that is not in `allowed`, with the closest allowed name."""
    names = sorted(allowed)
    closest = get_close_matches(value[:100], names, n=1)
    hint = f"did you mean '{closest[0]}'? " if closest else ""
    return InvalidInputError(f"unknown {kind} '{truncate(value)}'; {hint}allowed: {', '.join(names)}")


def one_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's class name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return truncate(lines[0], 500)


def truncate(text: object, max_length: int = 200) -> str:
    """Return external text for an error message: shortened, unprintable characters replaced."""
    shortened = str(text)
    if len(shortened) > max_length:
        shortened = f"{shortened[: max_length * 3 // 4]} ... {shortened[-max_length // 4 :]}"
    return replace_controls(shortened)


def replace_controls(text: str, keep: str = "") -> str:
    """Return a text with control characters replaced by ?, except those in `keep`.

    Names in files can have characters that move the cursor, change colors or reverse the order of letters.
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)
