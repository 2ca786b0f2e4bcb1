"""Messages of the pool: small states go through the pipe, large ones through shared memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator

import pytest
import torch

from feddbe.simulation.engines import pool
from feddbe.simulation.engines.pool import Payload, pack, receive_message, send_message
from tests.small_runs import are_identical

STATE = {
    "matrix": torch.randn(7, 5),
    "across": torch.arange(12.0).reshape(3, 4).T,
    "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "number": torch.tensor(3),
    "nothing": torch.zeros(0, 4),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "double": torch.randn(3, dtype=torch.float64),
}


needs_memory_files = pytest.mark.skipif(
    pool.make_buffer() == pool.NO_BUFFER, reason="this system has no memory files"
)


@pytest.fixture(params=["small", pytest.param("large", marks=needs_memory_files), "no buffer"])
def buffer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param == "no buffer":
        yield pool.NO_BUFFER
        return
    monkeypatch.setattr(pool, "LARGE_BYTES", 0 if request.param == "large" else 2**20)
    descriptor = pool.make_buffer()
    yield descriptor
    os.close(descriptor)


def send_and_receive(buffer: int, *states: Payload) -> list[Payload]:
    sender, receiver = multiprocessing.Pipe()
    with sender, receiver:
        send_message(sender, buffer, "message", states)
        message, received = receive_message(receiver, buffer)
        assert message == "message"
        return received


def test_tensors_of_all_types_and_bytes_are_received(buffer: int) -> None:
    first, second = send_and_receive(buffer, {**STATE, "kept": b"a state", "none": b""}, STATE)
    assert (first.pop("kept"), first.pop("none")) == (b"a state", b"")
    assert are_identical(first, STATE)
    assert are_identical(second, STATE)


def test_empty_states_are_received(buffer: int) -> None:
    assert send_and_receive(buffer, {}, {}) == [{}, {}]
    assert send_and_receive(buffer) == []


def test_received_state_is_a_copy(buffer: int) -> None:
    """Later messages and changes by another receiver do not affect it."""
    message = pickle.dumps(pack(STATE, buffer))
    first, second = (pickle.loads(message).unpack(buffer) for _ in range(2))
    first["matrix"].zero_()
    send_and_receive(buffer, {name: torch.zeros_like(tensor) for name, tensor in STATE.items()})
    assert are_identical(second, STATE)


@needs_memory_files
def test_large_state_is_aligned_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LARGE_BYTES", 0)
    buffer = pool.make_buffer()
    assert pack(STATE, buffer).data is None
    received = send_and_receive(buffer, STATE, STATE)
    assert all(
        tensor.data_ptr() % 64 == 0 for state in received for tensor in state.values() if tensor.numel()
    )
    os.ftruncate(buffer, 100)
    with pytest.raises(EOFError, match="fewer bytes than announced"):
        pack(STATE, buffer)._replace(offset=10_000).unpack(buffer)
    os.close(buffer)


@needs_memory_files
def test_large_state_threshold_is_256_kib() -> None:
    buffer = pool.make_buffer()
    large, small = (pack({"a": torch.zeros(n)}, buffer) for n in (2**16, 2**16 - 16))
    os.close(buffer)
    assert large.data is None
    assert small.data is not None
    assert pack({"a": torch.zeros(2**16)}).data is not None
