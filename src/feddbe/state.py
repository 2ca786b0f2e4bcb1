"""State: flat named tensors, the only thing that is stored or sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from feddbe.errors import StoreError

State = dict[str, Tensor]
"""Parameters carry the model's own names, other things a prefix: `prbm`, `mean`, `buffer/...`."""


def encode(state: Mapping[str, Tensor]) -> bytes:
    """A state as safetensors bytes."""
    header, pieces, size = {}, list[memoryview](), 0
    for name in sorted(state, key=lambda name: (-state[name].element_size(), name)):  # so each is aligned
        tensor = state[name]
        pieces.append(bytes_of(tensor))
        place = [size, size := size + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
    # not the library's own `serialize`: its copies, each in new memory, take ten times as long
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def bytes_of(tensor: Tensor) -> memoryview:
    """Those of a tensor, where they lie if they lie in a row; they keep it alive."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def decode(data: bytes) -> State:
    """The state in safetensors bytes, in the order of its names (the library has none of its own)."""
    if receipt := Receipt.decode(data):
        raise StoreError(
            f"here is only the receipt of a state of round {receipt.round}, which a client keeps elsewhere; "
            "continue the run with the engine that began it"
        )
    return dict(sorted(safetensors.torch.load(data).items()))


class Receipt(NamedTuple):
    """Stands for the state of a client that keeps it elsewhere."""

    round: int
    """In which the client made it."""
    sha256: str

    def encode(self) -> bytes:
        """Bytes that are those of no state: these begin with the size of a header, which would be absurd."""
        return f"receipt {self.round} {self.sha256}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Receipt | None:
        """None if the bytes are a state's."""
        if not data.startswith(b"receipt "):
            return None
        _, round, digest = data.decode().split()
        return cls(int(round), digest)


def nbytes(state: Mapping[str, Tensor]) -> int:
    """What a message costs: the bytes of its numbers."""
    return sum(t.nbytes for t in state.values())


def sha256(state: Mapping[str, Tensor]) -> str:
    """Over name, dtype, shape and bytes in the order of the names: equal exactly for equal bits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of the patterns: itself, or what begins with it if it ends with a slash."""
    return any(name.startswith(p) if p.endswith("/") else name == p for p in patterns)


def without(state: Mapping[str, Tensor], patterns: Iterable[str]) -> State:
    """The entries that are `matches` by none of the patterns."""
    names, prefixes = _divided(tuple(patterns))
    return {name: t for name, t in state.items() if name not in names and not name.startswith(prefixes)}


@cache
def _divided(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    return frozenset(patterns), tuple(pattern for pattern in patterns if pattern.endswith("/"))


def moved(state: State, device: torch.device) -> State:
    """The state on this device; itself, if it lies there."""
    if all(t.device == device for t in state.values()):
        return state
    return {name: t.to(device) for name, t in state.items()}


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> State:
    """The entries whose names start with the prefix, it being removed."""
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def add_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The same entries with the prefix before their names."""
    return {prefix + name: t for name, t in state.items()}


def sum_by_name(parts: Mapping[str, Tensor]) -> Tensor:
    """The sum of what was computed per name, in the order of the names: a dictionary's own order depends on
    where it came from, and the last bits of a sum on its order."""
    return torch.stack([parts[name] for name in sorted(parts)]).sum(0)


def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """sum_i w_i s_i / sum_i w_i, entry by entry, always in the order given (so its bits are repeatable).

    Integer entries (BatchNorm's counters) are averaged as numbers and rounded.
    """
    total = float(sum(weights))
    kinds = {n: t.dtype if t.is_floating_point() else torch.float64 for n, t in states[0].items()}
    sums = {n: states[0][n].to(kind) * (weights[0] / total) for n, kind in kinds.items()}  # 0 + -0 is no -0
    for state, weight in zip(states[1:], weights[1:], strict=True) if sums else ():
        added = [state[n].to(kind) for n, kind in kinds.items()]
        torch._foreach_add_(list(sums.values()), added, alpha=weight / total)  # one call for all
    return {
        n: mean if states[0][n].is_floating_point() else mean.round().to(states[0][n].dtype)
        for n, mean in sums.items()
    }
