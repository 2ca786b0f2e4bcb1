"""States: encoding, hashes, means."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from feddbe.state import (
    State,
    add_prefix,
    decode,
    drop_keys,
    encode,
    nbytes,
    sha256,
    strip_prefix,
    weighted_mean,
)

DTYPES = ["<f4", "<f8", "<f2", "<i8", "<i4", "u1"]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw any bits in any shape, including NaN, infinity and -0."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    return torch.tensor(np.frombuffer(raw, dtype).reshape(shape))


states = st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), tensors(), max_size=4)


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


@given(states)
def test_encode_and_decode(state: State) -> None:
    state.pop("__metadata__", None)  # reserved by safetensors
    decoded = decode(encode(state))
    assert {name: bits(t) for name, t in decoded.items()} == {name: bits(t) for name, t in state.items()}
    assert sha256(decoded) == sha256(state)


def test_encode_scalars_counters_and_empty_tensors() -> None:
    state = {"loss": torch.tensor(0.5), "buffer/count": torch.tensor(2**53 + 1), "none": torch.zeros(0, 3)}
    decoded = decode(encode(state))
    assert (decoded["loss"].shape, decoded["loss"].item()) == ((), 0.5)
    assert (decoded["buffer/count"].dtype, decoded["buffer/count"].item()) == (torch.int64, 2**53 + 1)
    assert decoded["none"].shape == (0, 3)
    assert decode(encode({})) == {}


def test_memory_layout_and_gradients_do_not_matter() -> None:
    plain = {"w": torch.arange(24.0).reshape(2, 3, 2, 2)}
    for w in (
        plain["w"].contiguous(memory_format=torch.channels_last),
        plain["w"].clone().requires_grad_(),
        torch.stack([plain["w"], -plain["w"]], -1)[..., 0],
    ):
        assert encode({"w": w}) == encode(plain)
        assert sha256({"w": w}) == sha256(plain)


def test_decoded_tensors_are_writable() -> None:
    data = encode({"w": torch.ones(3)})
    decode(data)["w"].add_(1)
    assert decode(data)["w"].tolist() == [1, 1, 1]


# --- hashes

START: State = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3, 4]])}


def test_sha256_ignores_the_order_of_entries() -> None:
    assert sha256(dict(reversed(START.items()))) == sha256(START)
    assert sha256({name: t.clone() for name, t in START.items()}) == sha256(START)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"a": s["a"], "c": s["b"]},
        lambda s: {"a": s["a"]},
        lambda s: {**s, "c": torch.zeros(0)},
        lambda s: {"a": s["a"].view(torch.int32), "b": s["b"]},
        lambda s: {"a": s["a"], "b": s["b"].reshape(2)},
        lambda s: {"a": s["a"], "b": s["b"].reshape(2, 1)},
        lambda s: {"a": s["a"], "b": s["b"].flip(1)},
        lambda s: {"a": s["b"], "b": s["a"]},
    ],
    ids=["name", "one-less", "one-more", "dtype", "flat", "shape", "order", "swapped"],
)
def test_any_change_changes_sha256(change: Callable[[State], State]) -> None:
    assert sha256(change(START)) != sha256(START)


@given(st.integers(0, 63), st.sampled_from(["a", "b"]))
def test_one_bit_changes_sha256(bit: int, name: str) -> None:
    state = {key: t.clone() for key, t in START.items()}
    state[name].view(torch.uint8).flatten()[bit // 8] ^= 1 << bit % 8
    assert sha256(state) != sha256(START)


def test_sha256_of_zero_and_minus_zero_differ() -> None:
    assert sha256({"a": torch.tensor(0.0)}) != sha256({"a": torch.tensor(-0.0)})


def test_sha256_has_not_changed() -> None:
    """SHA-256 of 'a torch.float32 (2,)', a line feed, and the little-endian bytes of 1 and 2; then b."""
    text = b"a torch.float32 (2,)\n" + np.array([1, 2], "<f4").tobytes()
    text += b"b torch.int64 (1, 2)\n" + np.array([3, 4], "<i8").tobytes()
    assert sha256(START) == hashlib.sha256(text).hexdigest()


# --- sizes and parts


def test_nbytes_counts_by_type() -> None:
    """2 x 3 float32 = 24, one int64 = 8, three uint8 = 3, nothing = 0."""
    state = {"w": torch.zeros(2, 3), "n": torch.tensor(5), "e": torch.zeros(0)}
    state["x"] = torch.zeros(3, dtype=torch.uint8)
    assert nbytes(state) == 24 + 8 + 3
    assert nbytes({}) == 0


def test_drop_keys_removes_names_and_prefixes() -> None:
    """A pattern is a name, or a prefix if it ends with a slash: a layer called prbm_net is not PRBM's."""
    state = {name: torch.zeros(1) for name in ("prbm", "prbm_net.weight", "fc.prbm", "mean", "buffer/a", "w")}
    assert list(drop_keys(state, ["prbm"])) == ["prbm_net.weight", "fc.prbm", "mean", "buffer/a", "w"]
    assert list(drop_keys(state, ("prbm", "mean", "buffer/"))) == ["prbm_net.weight", "fc.prbm", "w"]
    assert drop_keys(state, []) == state


def test_add_and_strip_prefix() -> None:
    state = {"buffer/a": torch.zeros(1), "buffer/buffer/b": torch.ones(1), "c": torch.ones(2)}
    assert list(strip_prefix(state, "buffer/")) == ["a", "buffer/b"]
    assert strip_prefix(state, "buffer/")["a"] is state["buffer/a"]
    assert list(add_prefix("x/", state)) == ["x/buffer/a", "x/buffer/buffer/b", "x/c"]
    assert strip_prefix(add_prefix("x/", state), "x/") == state
    assert list(add_prefix("buffer/", strip_prefix(state, "buffer/"))) == ["buffer/a", "buffer/buffer/b"]


# --- means


def test_weighted_mean_matches_values_by_hand() -> None:
    """Weights 1, 3: (1 2 + 3 6) / 4 = 5 and (1 8 + 3 0) / 4 = 2; counters (1 4 + 3 11) / 4 = 9.25."""
    first = {"w": torch.tensor([2.0, 8.0]), "s": torch.tensor(1.0), "n": torch.tensor(4)}
    second = {"w": torch.tensor([6.0, 0.0]), "s": torch.tensor(1.0), "n": torch.tensor(11)}
    mean = weighted_mean([first, second], [1, 3])
    assert mean["w"].tolist() == [5.0, 2.0]
    assert mean["s"].shape == ()
    assert mean["s"].item() == 1.0
    assert (mean["n"].dtype, mean["n"].item()) == (torch.int64, 9)
    assert first["w"].tolist() == [2.0, 8.0]


@pytest.mark.parametrize(("counts", "mean"), [((3, 4), 4), ((3, 3), 3), ((0, 1), 0), ((-3, -4), -4)])
def test_weighted_mean_rounds_counters(counts: tuple[int, int], mean: int) -> None:
    """Halves to the even neighbour: 3.5 -> 4, 0.5 -> 0."""
    averaged = weighted_mean([{"n": torch.tensor(n)} for n in counts], [2, 2])["n"]
    assert averaged.item() == mean


def test_weighted_mean_of_large_counters_is_exact() -> None:
    """2^24 + 1 cannot be represented in float32."""
    assert weighted_mean([{"n": torch.tensor(2**24 + 1)}], [7])["n"].item() == 2**24 + 1


def test_weighted_mean_of_minus_zero() -> None:
    state = {"w": torch.tensor([-0.0])}
    assert sha256(weighted_mean([state], [3])) == sha256(state)


finite = st.floats(-1e6, 1e6, width=32).filter(bool)


@given(st.lists(finite, min_size=1, max_size=5), st.integers(1, 10**6))
def test_weighted_mean_of_one_state_is_bit_exact(values: list[float], weight: int) -> None:
    state = {"w": torch.tensor(values), "n": torch.tensor([3, 5])}
    mean = weighted_mean([state], [weight])
    assert sha256(mean) == sha256(state)
    assert mean["w"].data_ptr() != state["w"].data_ptr()


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.lists(finite, min_size=3, max_size=3)), min_size=1, max_size=6
    )
)
def test_weighted_mean_sums_in_order(
    parts: list[tuple[int, list[float]]],
) -> None:
    weights = [weight for weight, _ in parts]
    values = [{"w": torch.tensor(value)} for _, value in parts]
    mean = weighted_mean(values, weights)["w"]
    expected = np.average([v["w"].double().numpy() for v in values], axis=0, weights=weights)
    scale = max(1.0, max(float(v["w"].abs().max()) for v in values))
    assert np.abs(mean.numpy() - expected).max() <= 1e-5 * scale
    by_hand = torch.zeros(3)
    for value, weight in zip(values, weights, strict=True):
        by_hand = torch.add(by_hand, value["w"], alpha=weight / sum(weights))
    assert torch.equal(mean, by_hand)


def test_weighted_mean_uses_names_of_the_first_state() -> None:
    first, second = {"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}
    assert list(weighted_mean([first, second], [1, 1])) == ["a"]
    with pytest.raises(KeyError):
        weighted_mean([second, first], [1, 1])
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([first, first], [1])


def test_shared_tensors_are_encoded_separately() -> None:
    tensor = torch.arange(6.0)
    decoded = decode(encode({"a": tensor, "b": tensor, "c": tensor[:3]}))
    assert torch.equal(decoded["a"], tensor)
    assert torch.equal(decoded["b"], tensor)
    assert torch.equal(decoded["c"], tensor[:3])
