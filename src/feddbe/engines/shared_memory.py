"""States between processes of one machine. A large one is laid into memory that both can map, and only its
descriptor is sent: no bytes go through the pipe, and the receiver copies nothing."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddbe.state import State, nbytes

__all__ = ["Parcel", "pack", "receive", "send"]

LARGE = 2**20
"""Bytes from which a parcel has memory of its own. Below, the pipe is as fast, and there may be many."""
_SHARES = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
"""Whether this system has memory with a descriptor that can be opened again."""
_ALIGNED = 64
"""Where tensors begin, as torch has it: the last bits of a product depend on it."""
_TYPES = {dtype: name for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
"""By their names types are pickled ten times as fast."""


class Parcel(NamedTuple):
    """A state ready to be sent, to several receivers if need be; its memory is kept until the end of a `with`
    block, and by those who received it."""

    places: Sequence[tuple[str, str, tuple[int, ...], int]] = ()
    """Names, types, shapes and places among the bytes."""
    data: bytearray = bytearray()
    """The bytes, if they are few."""
    size: int = 0
    memory: int = -1
    """The descriptor of the memory with the bytes, if they are many; it goes after the message."""

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        if self.memory >= 0:
            os.close(self.memory)

    def unpack(self) -> State:
        """The state, which is the receiver's own: writing into it changes it for no one else."""
        held: Any = self.data
        if self.memory >= 0:
            path = f"/proc/self/fd/{self.memory}"
            held = torch.from_file(path, size=self.size, dtype=torch.uint8).numpy()
        found = {}
        for name, kind, shape, place in self.places:
            n, dtype = math.prod(shape), getattr(torch, kind)
            some = torch.frombuffer(held, dtype=dtype, count=n, offset=place) if n else torch.empty(0)
            found[name] = some.to(dtype).view(shape)
        return found


def pack(state: Mapping[str, Tensor]) -> Parcel:
    """A copy of the state."""
    places, size, given = [], 0, {name: tensor.detach().contiguous() for name, tensor in state.items()}
    for name, tensor in given.items():
        places.append((name, _TYPES[tensor.dtype], tuple(tensor.shape), size))
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    pieces = zip((place for *_, place in places), map(_bytes, given.values()), strict=True)
    if nbytes(state) < LARGE or not _SHARES or not state:
        data = bytearray(size)
        for place, piece in pieces:
            data[place : place + len(piece)] = piece
        return Parcel(places, data)
    parcel = Parcel(places, size=size, memory=os.memfd_create("feddbe"))
    with open(parcel.memory, "wb", closefd=False) as file:  # faster than to map and fill it
        for place, piece in pieces:
            file.seek(place)
            file.write(piece)
        file.truncate(size)
    return parcel


def _bytes(tensor: Tensor) -> memoryview:
    """Those of a contiguous tensor, where they lie."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def send(pipe: Connection, message: object, parcels: Sequence[Parcel] = ()) -> None:
    """To the `receive` at the other end."""
    pipe.send((message, parcels))
    for parcel in parcels:
        if parcel.memory >= 0:
            reduction.send_handle(pipe, parcel.memory, None)


def receive(pipe: Connection) -> tuple[Any, list[State]]:
    """The message, and the states in its parcels."""
    message, parcels = pipe.recv()
    return message, list(_open(pipe, parcels))


def _open(pipe: Connection, parcels: Sequence[Parcel]) -> Iterator[State]:
    for parcel in parcels:
        here = parcel.memory >= 0
        with parcel._replace(memory=reduction.recv_handle(pipe)) if here else parcel as mine:
            yield mine.unpack()
