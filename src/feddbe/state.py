"""States: flat dictionaries of named tensors, the only values that are stored or sent."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from feddbe.errors import CorruptRunError, FeddbeError, StoreError, one_line, truncate

State = dict[str, Tensor]
"""Parameters have the model's names; other entries are `prbm`, `mean` or have a prefix (`buffer/...`)."""


def encode(state: Mapping[str, Tensor]) -> bytes:
    """Return the state as safetensors bytes."""
    header = {}
    buffers: list[memoryview] = []
    size = 0
    for name in sorted(state, key=lambda name: (-state[name].element_size(), name)):  # for alignment
        tensor = state[name]
        buffers.append(as_bytes(tensor))
        offsets = [size, size + tensor.nbytes]
        size += tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    # safetensors' own `serialize` copies every tensor into new memory, which takes ten times as long.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *buffers])


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
        CorruptRunError: The bytes are not a state.
    """
    receipt = Receipt.decode(data)
    if receipt is not None:
        raise StoreError(
            f"only the receipt of a state of round {receipt.round} is stored here; the client has the state. "
            "Resume the run with the engine that started it"
        )
    try:
        return dict(sorted(safetensors.torch.load(data).items()))
    except Exception as error:  # with damaged bytes, safetensors and torch raise any exception
        raise CorruptRunError(f"bytes that are not a state ({one_line(error)})") from error


class Receipt(NamedTuple):
    """Placeholder for the state of a client that stores it elsewhere."""

    round: int
    """Round in which the client computed the state."""
    sha256: str

    def encode(self) -> bytes:
        """Return bytes that cannot be mistaken for a state: as its header size, they are far too large."""
        return f"receipt {self.round} {self.sha256}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Receipt | None:
        """Return the receipt, or None if the bytes are a state."""
        if not data.startswith(b"receipt "):
            return None
        match = re.fullmatch(rb"receipt ([0-9]{1,18}) ([0-9a-f]{1,64})", data)
        if match is None:
            raise CorruptRunError("bytes that are not a receipt")
        return cls(int(match[1]), match[2].decode())


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
    """Return True if a name equals a pattern, or begins with a pattern that ends with a slash."""
    return any(name.startswith(p) if p.endswith("/") else name == p for p in patterns)


def drop_keys(state: Mapping[str, Tensor], patterns: Iterable[str]) -> State:
    """Return the entries that match none of the patterns."""
    names, prefixes = _split_patterns(tuple(patterns))
    return {name: t for name, t in state.items() if name not in names and not name.startswith(prefixes)}


@cache
def _split_patterns(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
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

    The sum runs in the order of `states`, so that its bits are reproducible.
    Integer entries (BatchNorm's counters) are averaged as floats and rounded.
    """
    first, total = states[0], float(sum(weights))
    dtypes = {name: t.dtype if t.is_floating_point() else torch.float64 for name, t in first.items()}
    # The sum starts with the first state and not with 0, because 0 + -0 is not -0.
    sums = {name: first[name].to(dtype) * (weights[0] / total) for name, dtype in dtypes.items()}
    for state, weight in zip(states[1:], weights[1:], strict=True) if sums else ():
        addends = [state[name].to(dtype) for name, dtype in dtypes.items()]
        torch._foreach_add_(list(sums.values()), addends, alpha=weight / total)  # all tensors in one call
    return {
        name: mean if first[name].is_floating_point() else mean.round().to(first[name].dtype)
        for name, mean in sums.items()
    }


Layout = Mapping[str, str]
"""Name of a tensor -> its shape and type as text; a run stores this mapping."""


def describe_layout(state: State) -> dict[str, str]:
    """Return the layout of a state."""
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()}


def check_stored_layout(state: State, expected: Layout, folder: Path) -> None:
    """Raise an error if a stored server state lacks an entry of its run's initial state.

    Additional entries are allowed, because a method may add them.
    """
    mismatch = _describe_mismatch(state, expected)
    if mismatch:
        raise StoreError(
            f"the server's state in '{folder}' belongs to another model: expected {mismatch}; restore it "
            "from a copy or start the run again"
        )


def check_kept_state_layout(state: State, expected: Layout, method: str, client: str) -> None:
    """Raise an error if a client's stored state lacks an entry with which the method starts.

    Args:
        state: The client's state.
        expected: Layout of the state with which the method starts.
        method: Name of the method, for the error message.
        client: The client as messages call it, as in `client 'Ulm'`.

    Raises:
        CorruptRunError: An entry is missing, or has another shape or type.
    """
    mismatch = _describe_mismatch(state, expected)
    if mismatch:
        raise CorruptRunError(
            f"the stored state of {client} does not fit {method}: expected {mismatch}; restore the "
            "run from a copy or start it again"
        )


def check_aggregated_layout(state: State, expected: Layout, method: str, round_: int) -> None:
    """Raise an error if a method's new server state lacks an entry of the initial one.

    Training would continue without that entry, and the run could not be resumed.
    """
    mismatch = _describe_mismatch(state, expected)
    if mismatch:
        function = "aggregate" if round_ else "server_setup"
        raise FeddbeError(
            f"{method}: {function} loses part of the server's state in round {round_}: expected {mismatch}; "
            "return every entry of server_init, as in server | {...}; the round is not written"
        )


def _describe_mismatch(state: State, expected: Layout) -> str:
    """Describe the first tensor that is missing or has another shape or type; empty if there is none."""
    actual = describe_layout(state)
    for name, layout in expected.items():
        if actual.get(name) != layout:
            return f"'{truncate(name)}' of {truncate(layout)}, got {actual.get(name, 'none')}"
    return ""
