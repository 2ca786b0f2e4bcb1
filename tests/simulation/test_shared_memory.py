"""What is sent arrives: small through the pipe, large over the desk."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator

import pytest
import torch

from feddbe.simulation.engines import pool
from feddbe.simulation.engines.pool import Items, pack, receive, send
from tests.federation import are_identical

STATE = {
    "matrix": torch.randn(7, 5),
    "across": torch.arange(12.0).reshape(3, 4).T,
    "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "number": torch.tensor(3),
    "nothing": torch.zeros(0, 4),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "double": torch.randn(3, dtype=torch.float64),
}


HAS = pytest.mark.skipif(pool.make_buffer() == pool.NONE, reason="this system has no memory files")


@pytest.fixture(params=["small", pytest.param("large", marks=HAS), "no desk"])
def desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param == "no desk":
        yield pool.NONE
        return
    monkeypatch.setattr(pool, "LARGE", 0 if request.param == "large" else 2**20)
    found = pool.make_buffer()
    yield found
    os.close(found)


def sent(desk: int, *states: Items) -> list[Items]:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        send(ours, desk, "some", states)
        message, found = receive(theirs, desk)
        assert message == "some"
        return found


def test_all_kinds_of_tensors_arrive_and_bytes_among_them(desk: int) -> None:
    first, second = sent(desk, {**STATE, "kept": b"a state", "none": b""}, STATE)
    assert (first.pop("kept"), first.pop("none")) == (b"a state", b"")
    assert are_identical(first, STATE)
    assert are_identical(second, STATE)


def test_no_tensors_arrive_too(desk: int) -> None:
    assert sent(desk, {}, {}) == [{}, {}]
    assert sent(desk) == []


def test_what_arrived_is_the_receivers_own(desk: int) -> None:
    """Neither what comes next, nor what another takes from there, changes it."""
    message = pickle.dumps(pack(STATE, desk))
    first, second = (pickle.loads(message).unpack(desk) for _ in range(2))
    first["matrix"].zero_()
    sent(desk, {name: torch.zeros_like(tensor) for name, tensor in STATE.items()})
    assert are_identical(second, STATE)


@HAS
def test_large_ones_are_aligned_and_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LARGE", 0)
    desk = pool.make_buffer()
    assert pack(STATE, desk).data is None
    found = sent(desk, STATE, STATE)
    assert all(tensor.data_ptr() % 64 == 0 for state in found for tensor in state.values() if tensor.numel())
    os.ftruncate(desk, 100)
    with pytest.raises(EOFError, match="less than was said"):
        pack(STATE, desk)._replace(offset=10_000).unpack(desk)
    os.close(desk)


@HAS
def test_a_quarter_of_a_megabyte_is_large() -> None:
    desk = pool.make_buffer()
    large, small = (pack({"a": torch.zeros(n)}, desk) for n in (2**16, 2**16 - 16))
    os.close(desk)
    assert large.data is None
    assert small.data is not None
    assert pack({"a": torch.zeros(2**16)}).data is not None
