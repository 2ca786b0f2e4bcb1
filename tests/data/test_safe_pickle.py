"""Tests that pickles of CIFAR-100 and PFLlib are read, and that nothing in a pickle is executed."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddbe.data.safe_pickle import load
from feddbe.errors import InvalidInputError

CIFAR: dict[Any, Any] = {
    "filenames": ["a.png", "b.png"],
    "batch_label": "training batch 1 of 1",
    "fine_labels": [19, 29],
    "data": np.arange(12, dtype=np.uint8).reshape(2, 6)[::-1].copy(),
}
# A dict with one uint8 array of shape (2, 2) as Python 2 and its numpy wrote it: strings, not bytes.
PYTHON_2 = (
    b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
    b"U\x01b\x87Rq\x05(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ"
    b"\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x04\x00\x01\xfe\xfftbs."
)


def is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" or all(map(is_plain, value.flat))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and all(map(is_same, a.flat, b.flat))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize(
    "value",
    [
        CIFAR,
        np.array({"x": np.ones((3, 1, 2, 2), np.float32), "y": np.arange(3)}),
        np.array([[[1, 2, 3], 3], [[4, 5, 6], 3]], dtype=object),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        {"a": [None, True, -(2**70), 1.5, "ä\n", b"\xff", (1, [2])], b"b": np.array(3.0, "f2"), 3: {}},
    ],
)
def test_load_plain_values_and_arrays(value: Any, protocol: int) -> None:
    assert is_same(load(io.BytesIO(pickle.dumps(value, protocol))), value)


def test_load_empty_array() -> None:
    assert load(io.BytesIO(pickle.dumps(np.zeros((0, 3)), 4))).shape == (0, 3)


@pytest.mark.parametrize(("encoding", "key"), [("latin1", "data"), ("bytes", b"data")])
@pytest.mark.parametrize("old", [b"numpy.core.", b"numpy._core."])
def test_load_python_2_pickle(encoding: str, key: Any, old: bytes) -> None:
    value = load(io.BytesIO(PYTHON_2.replace(b"numpy.core.", old)), encoding=encoding)
    assert list(value) == [key]
    assert value[key].dtype == np.uint8
    assert value[key].tolist() == [[0, 1], [254, 255]]


def test_shared_value_is_built_once() -> None:
    shared = np.arange(3)
    value = load(io.BytesIO(pickle.dumps([shared, [shared]])))
    assert value[0] is value[1][0]


@pytest.mark.parametrize("inner", [[1], "a" * 100, np.arange(9)], ids=["list", "text", "array"])
def test_nested_values_are_counted_as_often_as_they_occur(inner: Any) -> None:
    """numpy would create 2^28 values from these few bytes."""
    value = inner
    for _ in range(28):
        value = [value, value]
    content = pickle.dumps(value)
    assert len(content) < 600
    assert "it unpacks to far more than it holds" in load_error(content)


@pytest.mark.parametrize(
    "content",
    [
        b"Nr\xff\xff\xff\x0f0N.",
        b"Np268435455\n0N.",
        b"\x80\x04]\x94K\x01a0]r\xff\xff\xff\x0f.",
    ],
)
def test_high_memo_index_is_rejected(content: bytes) -> None:
    """CPython's memo grows to the largest index: 4 GB here."""
    tracemalloc.start()
    try:
        assert "it stores a value at index 268435455 of its memory" in load_error(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(5))
def test_high_memo_index_is_detected_after_every_opcode(protocol: int) -> None:
    """A high memo index is detected after all opcodes of plain values."""
    values = [
        None,
        True,
        1,
        300,
        70_000,
        2**40,
        2**3000,
        1.5,
        "a",
        "b" * 300,
        b"c",
        b"d" * 300,
        (1, 2, 3, 4),
        CIFAR,
    ]
    content = pickle.dumps(values, protocol)
    load(io.BytesIO(content))
    assert "of its memory" in load_error(content[:-1] + b"r\xff\xff\xff\x0f.")


class Reduced:
    """Pickled as a call of `function`, then a state."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def load_error(content: bytes, encoding: str = "ASCII") -> str:
    with pytest.raises(InvalidInputError) as caught:
        load(io.BytesIO(content), encoding=encoding)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [{"x": v}], lambda v: np.array([v, 1], object)])
@pytest.mark.parametrize(
    "make",
    [
        lambda file: Reduced(os.system, f"touch {file}"),
        lambda file: Reduced(builtins.eval, f"open({str(file)!r}, 'w')"),
        lambda file: Reduced(builtins.exec, f"open({str(file)!r}, 'w')"),
        lambda file: Reduced(builtins.open, str(file), "w"),
        lambda file: Reduced(Path.touch, file),
        lambda file: Reduced(np.save, str(file), 1),
        lambda file: Reduced(np.ones(3).tofile, str(file)),
        lambda file: Reduced(builtins.getattr, os, "system"),
    ],
)
def test_nothing_is_executed(tmp_path: Path, make: Any, wrap: Any, protocol: int) -> None:
    file = tmp_path / "sprung"
    try:
        content = pickle.dumps(wrap(make(file)), protocol)
    except TypeError:  # a module cannot be pickled: written by hand
        content = b"cbuiltins\ngetattr\n(cos\nenviron\nVclear\ntR(tR."
    assert "which is never called" in load_error(content)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        b"numpy.f2py\ncompile", b"numpy.testing._private.utils\nrunstring", b"numpy\nload", b"numpy\nmemmap",
        b"numpy\nvectorize", b"numpy.core.multiarray\nscalar", b"numpy._core.multiarray\nfromfile",
        b"numpy.core\nmultiarray", b"numpy\nndarray.tofile", b"_codecs\ndecode", b"codecs\nencode",
        b"copyreg\n_reconstructor", b"builtins\nset", b" \n ", b"numpy\ndtype.__class__",
    ],
)  # fmt: skip
def test_other_names_are_rejected(name: bytes) -> None:
    before = set(sys.modules)
    assert "which is never called" in load_error(b"c" + name + b"\n.")
    module, attribute = name.split(b"\n")[:2]
    stacked = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(attribute)]) + attribute
    assert "which is never called" in load_error(stacked + b"\x93)R.")
    assert set(sys.modules) == before  # not even imported


def pickle_array(state: bytes, subtype: bytes = b"cnumpy\nndarray\n") -> bytes:
    return b"cnumpy.core.multiarray\n_reconstruct\n(" + subtype + b"(I0\ntVb\ntR" + state


DTYPE = b"cnumpy\ndtype\n(Vu1\nI0\nI1\ntR(I3\nV|\nNNNI-1\nI-1\nI0\ntb"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle_array(b"."), "without proper content"),
        (pickle_array(b"}b."), "without proper content"),
        (pickle_array(b"(I1\n(I2\nt" + DTYPE + b"I00\nVabc\ntb."), "size is not that of its content"),
        (pickle_array(b"(I1\n(I1000000000000\nt" + DTYPE + b"I00\nVabc\ntb."), "size is not that"),
        (pickle_array(b"(I1\n(I-1\nI-3\nt" + DTYPE + b"I00\nVabc\ntb."), "impossible shape"),
        (pickle_array(b"(I1\n(F3.0\nt" + DTYPE + b"I00\nVabc\ntb."), "impossible shape"),
        (pickle_array(b"(I1\n(I3\nt" + DTYPE + b"I00\n(lp1\ntb."), "size is not that"),
        (pickle_array(b"(I1\n(I3\ntVu1\nI00\nVabc\ntb."), "without proper content"),
        (pickle_array(b".", subtype=b"cnumpy\ndtype\n"), "not a numpy.ndarray"),
        (pickle_array(b".", subtype=b"Vndarray\n"), "not a numpy.ndarray"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(tR.", "not a numpy.ndarray"),
        # types: text, records; objects with the flags of numbers, and the reverse
        (b"cnumpy\ndtype\n(VU5\ntR.", "array of type 'U5'"),
        (b"cnumpy\ndtype\n(VV8\ntR.", "array of type 'V8'"),
        (b"cnumpy\ndtype\n((lVu1,u1\natR.", "array of type ''"),
        (b"cnumpy\ndtype\n(tR.", "array of type ''"),
        (b"cnumpy\ndtype\n(Vu1\ntR(I3\nV|\nNN(dI-1\nI-1\nI0\ntb.", "unusual type"),
        (b"cnumpy\ndtype\n(Vu1\ntR}b.", "unusual type"),
        (
            pickle_array(b"(I1\n(I1\nt" + DTYPE.replace(b"u1", b"O8") + b"I00\nVabcdefgh\ntb."),
            "size is not that",
        ),
        # bytes
        (b"c_codecs\nencode\n(Vabc\nVrot13\ntR.", "else than latin1"),
        (b"c_codecs\nencode\n(Vabc\ntR.", "else than latin1"),
        (b"c_codecs\nencode\n(]Vlatin1\ntR.", "else than latin1"),
        # states of objects without one: they must not affect the next pickle
        (b"cnumpy\nndarray\n}b.", "changes what is not an array"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(N}V__call__\nNstb.", "changes what is not an array"),
        (b"cnumpy\nndarray\n(tR.", "calls what is not a function"),
        (b"(icopyreg\n__newobj__\n.", "which is never called"),
        (b"(inumpy\nndarray\n.", "calls what is not a function"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        # objects that are not values
        (b"cnumpy\nndarray\n.", "it holds ndarray where"),
        (DTYPE + b".", "it holds dtype where"),
        (b"\x80\x04\x8f.", "it holds set where"),
        (b"}(V1\ntI1\ns.", "it holds dict where"),
        (b"(lp0\ng0\na.", "contains itself"),
        (b"Psomething\n.", "outside of it"),
        # damage
        (b"", "Ran out of input"),
        (b"hello", "cannot read"),
        (PYTHON_2, "codec can't decode"),
        (PYTHON_2[:-3], "cannot read"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "cannot read"),
        (b"(l" * 100_000 + b"a" * 99_999 + b".", "recursion"),
    ],
)
def test_misused_names_and_damage_are_rejected(content: bytes, message: str) -> None:
    assert message in load_error(content)


def test_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(pickle.dumps(os.system))
    with (
        (tmp_path / "train").open("rb") as file,
        pytest.raises(InvalidInputError, match=r"cannot read .*/train: it asks for 'posix.system'"),
    ):
        load(file)


@given(st.data())
def test_any_damage_is_an_error_or_gives_plain_values(data: st.DataObject) -> None:
    content = bytearray(pickle.dumps(CIFAR, data.draw(st.sampled_from([0, 2, 4]))))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    message, value = "", None
    try:
        value = load(io.BytesIO(content))
    except InvalidInputError as error:
        message = str(error)
    assert "\n" not in message
    assert is_plain(value)
