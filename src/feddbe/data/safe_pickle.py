"""Pickles of plain values and numpy arrays, read without executing anything that they name.

CIFAR-100 and PFLlib publish pickles. A pickle is a program that calls functions by name. Even numpy's own
functions are not safe: they trust the flags of a data type and the size of an array. Therefore every name is
replaced by a placeholder that only records its arguments. The result is built afterwards from checked parts:
None, bool, int, float, str, bytes, list, tuple, dict and arrays of numbers.
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

_NUMBER_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_OBJECT_TYPES = {"O4", "O8"}
_MAX_GROWTH = 16
"""Maximum ratio of values to bytes: a value that occurs twice is written once."""
_PUT, _LONG_BINPUT = b"p", b"r"
_LINE_OPCODES = dict.fromkeys((b"I", b"L", b"F", b"S", b"V", b"g", b"P"), 1) | {b"c": 2, b"i": 2}
"""Opcodes with the number of lines that follow."""
_COUNTED_OPCODES = {
    **dict.fromkeys((b"U", b"\x8c", b"C", b"\x8a"), 1),
    **dict.fromkeys((b"T", b"X", b"B", b"\x8b"), 4),
    **dict.fromkeys((b"\x8d", b"\x8e", b"\x96"), 8),
}
"""Opcodes followed by a length and that number of bytes, with the size of the length."""
_SET_OPCODES = (b"\x8f", b"\x90", b"\x91")
_FIXED_OPCODES = re.compile(
    rb"(?:[()0-2NQRabdelotsu}\]\x81\x85-\x89\x92-\x94\x97\x98]|[Kqh\x80\x82].|[M\x83]..|[Jj\x84].{4}|[G\x95].{8})++",
    re.DOTALL,
)
"""A sequence of opcodes of fixed length: all others except STOP."""
_BYTE_ORDERS = ("<", ">", "|", "=")


def load(stream: IO[bytes], *, encoding: str = "ASCII") -> Any:
    """Return the value pickled in `stream`; its arrays are read-only.

    Memory is proportional to the size of the pickle. CPython's unpickler trusts the memo indices in a pickle,
    so they are checked first, and nested values are counted as often as they occur.

    Args:
        stream: The pickle.
        encoding: Encoding of Python 2's strings; `bytes` leaves them unchanged.

    Raises:
        InvalidInputError: The pickle is damaged or contains other values.
    """
    try:
        content = stream.read()
        _check_opcodes(content)
        recorded = _Unpickler(BytesIO(content), encoding=encoding).load()
        return _ValueBuilder(_MAX_GROWTH * len(content)).build(recorded)
    except Exception as error:  # with damaged bytes, the unpickler raises any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        name = getattr(stream, "name", None) or "a pickle"
        raise InvalidInputError(
            f"cannot read {name}: {reason[:200]}; read are only plain values and arrays of numbers"
        ) from None


class _UnsafePickleError(Exception):
    """Error for a pickle with other content than plain values and arrays of numbers."""


def _check_opcodes(content: bytes) -> None:
    """Raise an error for memo indices and lengths that a pickle of this size cannot need.

    A regular expression skips sequences of opcodes of fixed length: a text of 200 words is 200 opcodes.
    The check ends at an unknown opcode, at which the unpickler stops, too.
    """
    position = 0
    while position < len(content):
        fixed = _FIXED_OPCODES.match(content, position)
        if fixed:
            position = fixed.end()
            continue
        opcode = content[position : position + 1]
        position += 1
        if opcode == _PUT:
            end = content.find(b"\n", position)
            if end < 0:
                return
            _check_memo_index(int(content[position:end]), position)
            position = end + 1
        elif opcode == _LONG_BINPUT:
            end = position + 4
            _check_memo_index(int.from_bytes(content[position:end], "little"), position)
            position = end
        elif opcode in _LINE_OPCODES:
            for _ in range(_LINE_OPCODES[opcode]):
                position = content.find(b"\n", position) + 1 or len(content)
        elif opcode in _COUNTED_OPCODES:
            width = _COUNTED_OPCODES[opcode]
            position += width + int.from_bytes(content[position : position + width], "little")
            if position > len(content):
                raise _UnsafePickleError("pickle data was truncated")
        elif opcode in _SET_OPCODES:
            raise _UnsafePickleError("it holds set where a value should be")
        else:
            return


def _check_memo_index(index: int, position: int) -> None:
    if index > position:
        raise _UnsafePickleError(f"it stores a value at index {index} of its memory")


class _Placeholder:
    """Replacement of a name in a pickle; only some subclasses can be called or accept a state."""

    def __call__(self, *args: Any) -> Any:
        raise _UnsafePickleError("it calls what is not a function")

    def __setstate__(self, state: Any) -> None:
        raise _UnsafePickleError("it changes what is not an array")


class _NdArray(_Placeholder):
    """The name `numpy.ndarray`, which only occurs as an argument."""


class _Reconstruct(_Placeholder):
    """The function that creates an array, whose content is in the state that follows."""

    def __call__(self, *args: Any) -> _Array:
        if not args or not isinstance(args[0], _NdArray):
            raise _UnsafePickleError("it makes an array that is not a numpy.ndarray")
        return _Array()


class _MakeDtype(_Placeholder):
    def __call__(self, *args: Any) -> _Dtype:
        return _Dtype(_decode_text(args[0]) if args else "")


class _Encode(_Placeholder):
    """The function that encodes Python 3's bytes in old protocols, stored as text of the same code points."""

    def __call__(self, *args: Any) -> bytes:
        if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
            raise _UnsafePickleError("it encodes something else than latin1 text")
        return args[0].encode("latin1")


class _Dtype(_Placeholder):
    def __init__(self, name: str) -> None:
        if name not in _NUMBER_TYPES | _OBJECT_TYPES:
            raise _UnsafePickleError(f"it has an array of type {name[:20]!r}")
        self.name = name
        self.byte_order = "="

    def __setstate__(self, state: Any) -> None:
        # version, byte order, subarray, names, fields, and numpy's internal values, which are ignored
        match state:
            case (int(), order, None, None, None, *_) if _decode_text(order) in _BYTE_ORDERS:
                self.byte_order = _decode_text(order)
            case _:
                raise _UnsafePickleError("it has an array of an unusual type")


class _Array(_Placeholder):
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_PLACEHOLDERS: dict[tuple[str, str], type[_Placeholder]] = {
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): _MakeDtype,
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
    ("_codecs", "encode"): _Encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLACEHOLDERS:
            raise _UnsafePickleError(f"it asks for {f'{module}.{name}'[:100]!r}, which is never called")
        return _PLACEHOLDERS[module, name]()

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _UnsafePickleError("it refers to something outside of it")


class _ValueBuilder:
    """Builds values from placeholders; a value that occurs twice is built once."""

    def __init__(self, max_size: int) -> None:
        self._built: dict[int, Any] = {}
        self._in_progress: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._size = 0
        self._max_size = max_size

    def build(self, recorded: Any) -> Any:
        """Return the value of a recorded object."""
        if recorded is None or type(recorded) in (bool, int, float):
            return recorded
        if type(recorded) in (str, bytes):
            self._add_size(len(recorded))
            return recorded
        key = id(recorded)
        if key in self._in_progress:
            raise _UnsafePickleError("it has a value that contains itself")
        if key in self._built:
            self._add_size(self._sizes[key])
        else:
            size_before = self._size
            self._in_progress.add(key)
            self._built[key] = self._build_container(recorded)
            self._in_progress.remove(key)
            self._sizes[key] = self._size - size_before
        return self._built[key]

    def _add_size(self, size: int) -> None:
        """Count the size of a value as if nothing in it were shared, as in an array of nested lists."""
        self._size += size
        if self._size > self._max_size:
            raise _UnsafePickleError("it unpacks to far more than it holds")

    def _build_container(self, recorded: Any) -> Any:
        self._add_size(len(recorded) if isinstance(recorded, list | tuple | dict) else 1)
        match recorded:
            case list():
                return [self.build(value) for value in recorded]
            case tuple():
                return tuple(self.build(value) for value in recorded)
            case dict() if all(type(key) in (int, str, bytes) for key in recorded):
                return {key: self.build(value) for key, value in recorded.items()}
            case _Array():
                return self._build_array(recorded.state)
        raise _UnsafePickleError(
            f"it holds {type(recorded).__name__.strip('_').lower()} where a value should be"
        )

    def _build_array(self, state: Any) -> npt.NDArray[Any]:
        match state:
            case (1, tuple(shape), _Dtype() as dtype, bool() | int() as is_fortran, content):
                pass
            case _:
                raise _UnsafePickleError("it has an array without proper content")
        if any(type(side) is not int or side < 0 for side in shape):
            raise _UnsafePickleError("it has an array of an impossible shape")
        if isinstance(content, str):  # Python 2's bytes, read as latin1
            content = content.encode("latin1")
        self._add_size(len(content) if isinstance(content, bytes | list) else 1)
        order: Any = "F" if is_fortran else "C"
        count = prod(shape)
        if dtype.name in _OBJECT_TYPES and type(content) is list and len(content) == count:
            values = np.empty(count, object)
            values[:] = [None] * count
            for i, value in enumerate(content):
                values[i] = self.build(value)
            return values.reshape(shape, order=order)
        if dtype.name in _NUMBER_TYPES and type(content) is bytes:
            number_type = np.dtype(dtype.byte_order + dtype.name)
            if len(content) == count * number_type.itemsize:
                return np.ndarray(shape, number_type, content, order=order)
        raise _UnsafePickleError("it has an array whose size is not that of its content")


def _decode_text(value: Any) -> str:
    """Return a short text of the format, which Python 2 may have written as bytes; empty for other types."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else ""
