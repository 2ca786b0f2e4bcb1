"""What is sent arrives: small through the pipe, large as memory."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from feddbe.engines import shared_memory
from feddbe.engines.shared_memory import pack, receive, send
from tests.federation import same_bits

STATE = {
    "matrix": torch.randn(7, 5),
    "across": torch.arange(12.0).reshape(3, 4).T,
    "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "number": torch.tensor(3),
    "nothing": torch.zeros(0, 4),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "double": torch.randn(3, dtype=torch.float64),
}


def sent(state: dict[str, Tensor], times: int = 1) -> list[dict[str, Tensor]]:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, pack(state) as whole:
        for _ in range(times):
            send(ours, None, [whole])
        return [state for _ in range(times) for state in receive(theirs)[1]]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    if kind == "large":
        if not shared_memory._SHARES:
            pytest.skip("this system has no memory files")
        monkeypatch.setattr(shared_memory, "LARGE", 0)
    return kind


def test_all_kinds_of_tensors_arrive(size: str) -> None:
    (found,) = sent(STATE)
    assert same_bits(found, STATE)
    with pack(STATE) as parcel:
        assert (parcel.memory >= 0) == (size == "large")


def test_no_tensors_arrive_too(size: str) -> None:
    assert sent({}) == [{}]


def test_receivers_do_not_see_each_others_changes(size: str) -> None:
    first, second = sent(STATE, times=2)
    first["matrix"].zero_()
    assert torch.equal(second["matrix"], STATE["matrix"])


@pytest.mark.skipif(not shared_memory._SHARES, reason="this system has no memory files")
def test_large_ones_are_aligned_and_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LARGE", 0)
    before = descriptors()
    kept = [sent(STATE)[0] for _ in range(20)]
    assert descriptors() == before
    assert all(tensor.data_ptr() % 64 == 0 for state in kept for tensor in state.values() if tensor.numel())
    assert all(same_bits(state, STATE) for state in kept)


@pytest.mark.skipif(not shared_memory._SHARES, reason="this system has no memory files")
def test_a_megabyte_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    with pack({"a": torch.zeros(2**18)}) as large, pack({"a": torch.zeros(2**18 - 1)}) as small:
        assert large.memory >= 0 > small.memory
    monkeypatch.setattr(shared_memory, "_SHARES", False)
    assert pack({"a": torch.zeros(2**18)}).memory < 0
