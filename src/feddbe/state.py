"""State: a flat dictionary of named tensors, the only thing that is stored or sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from feddbe.errors import FeddbeError, StoreError, truncate

State = dict[str, Tensor]
"""Parameters have the model's names; other entries are `prbm`, `mean` or have a prefix (`buffer/...`)."""


def encode(state: Mapping[str, Tensor]) -> bytes:
    """Return the state as safetensors bytes."""
    header, pieces, size = {}, list[memoryview](), 0
    for name in sorted(state, key=lambda name: (-state[name].element_size(), name)):  # for alignment
        tensor = state[name]
        pieces.append(as_bytes(tensor))
        offsets = [size, size + tensor.nbytes]
        size += tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    # Not the library's `serialize`: its copies, each in new memory, take ten times as long.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without copying if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def decode(data: bytes) -> State:
    """Return the state of safetensors bytes, sorted by name.

    Raises:
        StoreError: The bytes are a receipt of a state that a client stores elsewhere.
    """
    if receipt := Receipt.decode(data):
        raise StoreError(
            f"only the receipt of a state of round {receipt.round} is stored here; the client has the state. "
            "Continue the run with the engine that began it"
        )
    return dict(sorted(safetensors.torch.load(data).items()))


class Receipt(NamedTuple):
    """Placeholder for the state of a client that stores it elsewhere."""

    round: int
    """Round in which the client computed the state."""
    sha256: str

    def encode(self) -> bytes:
        """Return bytes that cannot be mistaken for a state: as its header size they would be absurd."""
        return f"receipt {self.round} {self.sha256}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Receipt | None:
        """Return the receipt, or None if the bytes are a state."""
        if not data.startswith(b"receipt "):
            return None
        _, round, digest = data.decode().split()
        return cls(int(round), digest)


def nbytes(state: Mapping[str, Tensor]) -> int:
    """Return the size of the state's values in bytes."""
    return sum(t.nbytes for t in state.values())


def sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, equal exactly for equal bits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def matches_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name equals a pattern, or begins with a pattern that ends with a slash."""
    return any(name.startswith(p) if p.endswith("/") else name == p for p in patterns)


def drop_keys(state: Mapping[str, Tensor], patterns: Iterable[str]) -> State:
    """Return the entries that match none of the patterns."""
    names, prefixes = _divided(tuple(patterns))
    return {name: t for name, t in state.items() if name not in names and not name.startswith(prefixes)}


@cache
def _divided(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    return frozenset(patterns), tuple(pattern for pattern in patterns if pattern.endswith("/"))


def to_device(state: State, device: torch.device) -> State:
    """Return the state on this device, without copying if it is there already."""
    if all(t.device == device for t in state.values()):
        return state
    return {name: t.to(device) for name, t in state.items()}


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> State:
    """Return the entries whose names start with the prefix, without the prefix."""
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def add_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """Return the entries with the prefix added to their names."""
    return {prefix + name: t for name, t in state.items()}


def sum_by_name(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the values in the order of names.

    The order of a dictionary depends on its origin, and the last bits of a sum on its order.
    """
    return torch.stack([parts[name] for name in sorted(parts)]).sum(0)


def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """Return sum_i w_i s_i / sum_i w_i for each entry.

    The sum runs in the given order, so that its bits are reproducible.
    Integer entries (BatchNorm's counters) are averaged as floats and rounded.
    """
    total = float(sum(weights))
    kinds = {n: t.dtype if t.is_floating_point() else torch.float64 for n, t in states[0].items()}
    sums = {
        n: states[0][n].to(kind) * (weights[0] / total) for n, kind in kinds.items()
    }  # not from 0: 0 + -0 is not -0
    for state, weight in zip(states[1:], weights[1:], strict=True) if sums else ():
        addends = [state[n].to(kind) for n, kind in kinds.items()]
        torch._foreach_add_(
            list(sums.values()), addends, alpha=weight / total
        )  # a single call for all tensors
    return {
        n: mean if states[0][n].is_floating_point() else mean.round().to(states[0][n].dtype)
        for n, mean in sums.items()
    }


Layout = Mapping[str, str]
"""Name of a tensor -> its shape and type in words; a plain value, which a run stores."""


def layout_of(state: State) -> dict[str, str]:
    """Return the layout of a state."""
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()}


def check_stored(state: State, wanted: Layout, folder: Path) -> None:
    """Refuse a stored server state that lacks part of what its run began with; a method may add to it."""
    if misfit := _misfit(state, wanted):
        raise StoreError(
            f"the server's state in '{folder}' is of another model: it should have {misfit}; restore it "
            "from a copy or start again"
        )


def check_aggregated(state: State, wanted: Layout, method: str, round_: int) -> None:
    """Refuse what a method made of the server's state if part of what it began with is lost.

    Training would continue without that part, and the run could not be resumed.
    """
    if misfit := _misfit(state, wanted):
        function = "combine" if round_ else "prepared"
        raise FeddbeError(
            f"{method}: {function} loses part of the server's state in round {round_}: it should have "
            f"{misfit}; return all that server_init begins with, as in server | {{...}}; the round is "
            "not written"
        )


def _misfit(state: State, wanted: Layout) -> str:
    """Name the first tensor that is missing or has another shape or type."""
    there = layout_of(state)
    for name, form in wanted.items():
        if there.get(name) != form:
            return f"'{truncate(name)}' of {truncate(form)}, and has {there.get(name, 'none')}"
    return ""
