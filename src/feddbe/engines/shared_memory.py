"""States between processes of one machine. Large ones lie on a desk, memory that both have since one was
forked from the other: the sender lays them there and says where, the receiver takes copies before it answers.
The memory is used again and again, because most of the time that new memory takes is the system's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from feddbe.state import bytes_of

__all__ = ["LARGE", "Items", "Parcel", "desk", "pack", "receive", "send"]

Items = dict[str, Any]
"""A state, with bytes among its tensors if need be."""
LARGE = 2**18
"""Bytes from which a parcel lies on a desk. Below, the pipe is as fast."""
NONE = -1
"""No desk: all goes through the pipe."""
_ALIGNED = 64
"""Where tensors begin, as torch has it: the last bits of a product depend on it."""
_TYPES = {dtype: name for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
"""By their names types are pickled ten times as fast."""


class Parcel(NamedTuple):
    """A state ready to be sent."""

    places: Sequence[tuple[str, str, tuple[int, ...], int]] = ()
    """Names, types, shapes and places among the bytes."""
    data: bytearray | None = bytearray()
    """The bytes, if they are few; None: they are on the desk."""
    size: int = 0
    at: int = 0
    """Where on the desk."""

    def unpack(self, desk: int) -> Items:
        """The state, which is the receiver's own."""
        held: Any = self.data
        if held is None:
            held = torch.empty(self.size, dtype=torch.uint8).numpy()
            _move(lambda rest, at: os.preadv(desk, [rest], at), memoryview(held), self.at)
        found: Items = {}
        for name, kind, shape, place in self.places:
            n = math.prod(shape)
            if kind == "bytes":
                found[name] = bytes(memoryview(held)[place : place + n])
                continue
            dtype = getattr(torch, kind)
            some = torch.frombuffer(held, dtype=dtype, count=n, offset=place) if n else torch.empty(0)
            found[name] = some.to(dtype).view(shape)
        return found


def desk() -> int:
    """A new one, to be closed by `os.close`; NONE, if this system has no such memory."""
    return os.memfd_create("feddbe") if hasattr(os, "memfd_create") else NONE


def pack(state: Mapping[str, Any], desk: int = NONE, at: int = 0) -> Parcel:
    """A copy of the state, if it is large on the desk from `at` on."""
    places, pieces, size = [], list[memoryview](), 0
    for name, value in state.items():
        if isinstance(value, bytes):
            kind, shape, piece = "bytes", (len(value),), memoryview(value)
        else:
            kind, shape, piece = _TYPES[value.dtype], tuple(value.shape), bytes_of(value)
        places.append((name, kind, shape, size))
        pieces += [piece, memoryview(bytes(-len(piece) % _ALIGNED))]
        size += len(piece) + len(pieces[-1])
    if size < LARGE or desk == NONE:
        return Parcel(places, bytearray().join(pieces), size)
    end = at
    for piece in pieces:
        _move(lambda rest, to: os.pwrite(desk, rest, to), piece, end)
        end += len(piece)
    return Parcel(places, None, size, at)


def _move(some: Callable[[memoryview, int], int], piece: memoryview, at: int) -> None:
    """All of it: one call of the system moves no more than two gigabytes."""
    while piece:
        if not (moved := some(piece, at)):
            raise EOFError("a desk holds less than was said")
        piece, at = piece[moved:], at + moved


def send(pipe: Connection, desk: int, message: object, states: Sequence[Mapping[str, Any]] = ()) -> None:
    """To the `receive` at the other end."""
    parcels, at = list[Parcel](), 0
    for state in states:
        parcels.append(pack(state, desk, at))
        at += parcels[-1].size
    pipe.send((message, parcels))


def receive(pipe: Connection, desk: int) -> tuple[Any, list[Items]]:
    """The message, and the states that came with it."""
    message, parcels = pipe.recv()
    return message, [parcel.unpack(desk) for parcel in parcels]
