"""Everything that feddbe raises on purpose, and the sentence that names a wrong value."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FeddbeError(Exception):
    """Base of all errors meant for a person: one line that says what is wrong and what to do."""

    exit_code = 2


class BadInput(FeddbeError):
    """A value that cannot be used; nothing has been written."""


class DataMissingError(BadInput):
    """The files of a data set are not on this machine; they can be downloaded."""


class StoreError(FeddbeError):
    """The run's file cannot be read or written."""


class Damaged(StoreError):
    """The run's file is not what was written."""


class Diverged(FeddbeError):
    """A client's loss or update is not finite; the last good round is kept."""

    exit_code = 3

    def __init__(self, client: int, round: int, what: str, value: float) -> None:
        super().__init__(client, round, what, value)  # all of them, so that it survives pickling
        self.client, self.round, self.what, self.value = client, round, what, value

    def __str__(self) -> str:
        return (
            f"training diverged: {self.what} = {self.value} at client {self.client} in round {self.round}; "
            "the last good round is kept (try a smaller lr)"
        )


def unknown(kind: str, value: str, allowed: Iterable[str]) -> BadInput:
    """The error for a name that is not in `allowed`, with the nearest one that is."""
    names = sorted(allowed)
    near = get_close_matches(value[:100], names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return BadInput(f"unknown {kind} '{short(value)}'; {hint}allowed: {', '.join(names)}")


def one_line(error: BaseException) -> str:
    """What somebody else's error says first; its kind if it says nothing."""
    return short((str(error).strip().splitlines() or [type(error).__name__])[0], 500)


def short(text: object, most: int = 200) -> str:
    """Somebody else's text as it is quoted in an error: what cannot be printed as ?, its middle left out."""
    whole = str(text)
    if len(whole) > most:
        whole = f"{whole[: most * 3 // 4]} ... {whole[-most // 4 :]}"
    return "".join(letter if letter.isprintable() else "?" for letter in whole)
