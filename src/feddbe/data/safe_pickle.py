"""Pickles of plain values and numpy arrays, read without executing anything that they name.

CIFAR-100 and PFLlib publish pickles. A pickle is a program that calls what it names, and even numpy's own
functions are no safe thing to call: they trust the flags of a data type and the size of an array. So every
name here stands for an object of this module that only notes what it was given. What comes out is made
afterwards, of checked parts: None, bool, int, float, str, bytes, list, tuple, dict and arrays of numbers.
"""

from __future__ import annotations

import pickle
import re
from io import BytesIO
from math import prod
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from feddbe.errors import InvalidInputError

_NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_OBJECTS = {"O4", "O8"}
_GROWTH = 16
"""How much more values there may be than bytes: what occurs twice is written once."""
_PUT, _LONG_BINPUT = b"p", b"r"
_LINES = dict.fromkeys((b"I", b"L", b"F", b"S", b"V", b"g", b"P"), 1) | {b"c": 2, b"i": 2}
"""Opcodes followed by so many lines."""
_COUNTED = {
    **dict.fromkeys((b"U", b"\x8c", b"C", b"\x8a"), 1),
    **dict.fromkeys((b"T", b"X", b"B", b"\x8b"), 4),
    **dict.fromkeys((b"\x8d", b"\x8e", b"\x96"), 8),
}
"""Opcodes followed by a length of so many bytes, and then by that many."""
_SETS = (b"\x8f", b"\x90", b"\x91")
_FIXED = re.compile(
    rb"(?:[()0-2NQRabdelotsu}\]\x81\x85-\x89\x92-\x94\x97\x98]|[Kqh\x80\x82].|[M\x83]..|[Jj\x84].{4}|[G\x95].{8})++",
    re.DOTALL,
)
"""A run of the others; all but STOP are in one of these."""
_ORDERS = ("<", ">", "|", "=")


def load(stream: IO[bytes], *, encoding: str = "ASCII") -> Any:
    """The value pickled in `stream`, arrays read-only.

    `encoding` is that of Python 2's strings; `bytes` leaves them as they are. Memory is taken only in
    proportion to the bytes of the pickle: CPython's unpickler believes the numbers that a pickle gives to its
    own parts, so these are looked through first, and what is nested is counted as often as it occurs.
    """
    try:
        content = stream.read()
        _look_through(content)
        noted = _Unpickler(BytesIO(content), encoding=encoding).load()
        return _Result(_GROWTH * len(content)).of(noted)
    except Exception as error:  # damaged bytes can make the unpickler raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        where = getattr(stream, "name", None) or "a pickle"
        raise InvalidInputError(
            f"cannot read {where}: {reason[:200]}; read are only plain values and arrays of numbers"
        ) from None


class _Refused(Exception):
    """What a pickle asks for and does not get."""


def _look_through(content: bytes) -> None:
    """Refuse numbers of places and lengths that a pickle of this size cannot need.

    By regular expression, a run of opcodes of fixed length at a time: a text of 200 words is 200 opcodes.
    What is not understood here ends it: the unpickler stops there too.
    """
    at = 0
    while at < len(content):
        if found := _FIXED.match(content, at):
            at = found.end()
            continue
        code, at = content[at : at + 1], at + 1
        if code in (_PUT, _LONG_BINPUT):
            end = content.find(b"\n", at) if code == _PUT else at + 4
            if end < 0:
                return
            place = int(content[at:end]) if code == _PUT else int.from_bytes(content[at:end], "little")
            if place > at:
                raise _Refused(f"it puts a value at place {place} of its memory")
            at = end + (code == _PUT)
        elif code in _LINES:
            for _ in range(_LINES[code]):
                at = content.find(b"\n", at) + 1 or len(content)
        elif code in _COUNTED:
            width = _COUNTED[code]
            at += width + int.from_bytes(content[at : at + width], "little")
            if at > len(content):
                raise _Refused("pickle data was truncated")
        elif code in _SETS:
            raise _Refused("it holds set where a value should be")
        else:
            return


class _Noted:
    """What a name in a pickle gives: it can be called and takes a state only where a subclass says so."""

    def __call__(self, *given: Any) -> Any:
        raise _Refused("it calls what is not a function")

    def __setstate__(self, state: Any) -> None:
        raise _Refused("it changes what is no array")


class _NdArray(_Noted):
    """The name `numpy.ndarray`, which only occurs as an argument."""


class _Reconstruct(_Noted):
    """An array that gets its content with the state that follows."""

    def __call__(self, *given: Any) -> _Array:
        if not given or not isinstance(given[0], _NdArray):
            raise _Refused("it makes an array that is no numpy.ndarray")
        return _Array()


class _MakeDtype(_Noted):
    def __call__(self, *given: Any) -> _Dtype:
        return _Dtype(_text(given[0]) if given else "")


class _Encode(_Noted):
    """Python 3's bytes in the old protocols: the text of the same code points."""

    def __call__(self, *given: Any) -> bytes:
        if len(given) != 2 or not isinstance(given[0], str) or given[1] not in ("latin1", "latin-1"):
            raise _Refused("it encodes something else than latin1 text")
        return given[0].encode("latin1")


class _Dtype(_Noted):
    def __init__(self, name: str) -> None:
        if name not in _NUMBERS | _OBJECTS:
            raise _Refused(f"it has an array of type {name[:20]!r}")
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        # version, order, subarray, names, fields, and numpy's own bookkeeping, which nobody should hand it
        match state:
            case (int(), order, None, None, None, *_) if _text(order) in _ORDERS:
                self.order = _text(order)
            case _:
                raise _Refused("it has an array of an unusual type")


class _Array(_Noted):
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KNOWN: dict[tuple[str, str], type[_Noted]] = {
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): _MakeDtype,
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
    ("_codecs", "encode"): _Encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Refused(f"it asks for {f'{module}.{name}'[:100]!r}, which is never called")
        return _KNOWN[module, name]()

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Refused("it refers to something outside of it")


class _Result:
    """What was noted as real values; what occurs twice is made once."""

    def __init__(self, limit: int) -> None:
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._size, self._limit = 0, limit

    def of(self, noted: Any) -> Any:
        if noted is None or type(noted) in (bool, int, float):
            return noted
        if type(noted) in (str, bytes):
            self._grow(len(noted))
            return noted
        key = id(noted)
        if key in self._open:
            raise _Refused("it has a value that contains itself")
        if key in self._made:
            self._grow(self._sizes[key])
        else:
            before = self._size
            self._open.add(key)
            self._made[key] = self._make(noted)
            self._open.remove(key)
            self._sizes[key] = self._size - before
        return self._made[key]

    def _grow(self, size: int) -> None:
        """Count what a value would take if nothing in it were shared, as numpy makes of nested lists."""
        self._size += size
        if self._size > self._limit:
            raise _Refused("it unpacks to far more than it holds")

    def _make(self, noted: Any) -> Any:
        self._grow(len(noted) if isinstance(noted, list | tuple | dict) else 1)
        match noted:
            case list():
                return [self.of(value) for value in noted]
            case tuple():
                return tuple(self.of(value) for value in noted)
            case dict() if all(type(key) in (int, str, bytes) for key in noted):
                return {key: self.of(value) for key, value in noted.items()}
            case _Array():
                return self._array(noted.state)
        raise _Refused(f"it holds {type(noted).__name__.strip('_').lower()} where a value should be")

    def _array(self, state: Any) -> npt.NDArray[Any]:
        match state:
            case (1, tuple(shape), _Dtype() as dtype, bool() | int() as fortran, content):
                pass
            case _:
                raise _Refused("it has an array without proper content")
        if any(type(side) is not int or side < 0 for side in shape):
            raise _Refused("it has an array of an impossible shape")
        if isinstance(content, str):  # Python 2's bytes, read as latin1
            content = content.encode("latin1")
        self._grow(len(content) if isinstance(content, bytes | list) else 1)
        order: Any = "F" if fortran else "C"
        count = prod(shape)
        if dtype.name in _OBJECTS and type(content) is list and len(content) == count:
            values = np.empty(count, object)
            values[:] = [None] * count
            for i, value in enumerate(content):
                values[i] = self.of(value)
            return values.reshape(shape, order=order)
        if dtype.name in _NUMBERS and type(content) is bytes:
            made = np.dtype(dtype.order + dtype.name)
            if len(content) == count * made.itemsize:
                return np.ndarray(shape, made, content, order=order)
        raise _Refused("it has an array whose size is not that of its content")


def _text(value: Any) -> str:
    """A short word of the format, which Python 2 may have left as bytes."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else ""
