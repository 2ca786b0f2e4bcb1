"""States between processes of one machine. A large one is laid into memory that both can map, and only its
descriptor is sent: no bytes go through the pipe, and the receiver copies nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from feddbe.state import State, decode, encode, nbytes

__all__ = ["Parcel", "pack", "receive", "send"]

LARGE = 2**20
"""Bytes from which a parcel has memory of its own. Below, the pipe is as fast, and there may be many."""
_SHARES = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
"""Whether this system has memory with a descriptor that can be opened again."""
_ALIGNED = 64
"""Where tensors begin, as torch has it: the last bits of a product depend on it."""


class Parcel(NamedTuple):
    """A state ready to be sent, to several receivers if need be; its memory is kept until the end of a `with`
    block, and by those who received it."""

    data: bytes = b""
    """Its safetensors bytes, if it is small."""
    places: Sequence[tuple[str, torch.dtype, torch.Size, int]] = ()
    """Names, types, shapes and places in the memory, if it is large."""
    size: int = 0
    memory: int = -1
    """The descriptor of the memory, which goes after the message."""

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        if self.places:
            os.close(self.memory)


def pack(state: Mapping[str, Tensor]) -> Parcel:
    """A copy of the state."""
    if not state or nbytes(state) < LARGE or not _SHARES:
        return Parcel(encode(state))
    places, size = [], 0
    for name, tensor in state.items():
        places.append((name, tensor.dtype, tensor.shape, size))
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    parcel = Parcel(places=places, size=size, memory=os.memfd_create("feddbe"))
    with open(parcel.memory, "wb", closefd=False) as file:  # faster than to map and fill it
        for name, _, _, place in places:
            file.seek(place)
            file.write(state[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.truncate(size)
    return parcel


def send(pipe: Connection, parcel: Parcel) -> None:
    """To the `receive` at the other end."""
    pipe.send(parcel)
    if parcel.places:
        reduction.send_handle(pipe, parcel.memory, None)


def receive(pipe: Connection) -> State:
    """The state, which is the receiver's own: writing into it changes it for no one else."""
    parcel: Parcel = pipe.recv()
    if not parcel.places:
        return decode(parcel.data)
    with parcel._replace(memory=reduction.recv_handle(pipe)) as mine:
        whole = torch.from_file(f"/proc/self/fd/{mine.memory}", size=mine.size, dtype=torch.uint8)
    return {
        name: whole[place : place + dtype.itemsize * shape.numel()].view(dtype).reshape(shape)
        for name, dtype, shape, place in parcel.places
    }
