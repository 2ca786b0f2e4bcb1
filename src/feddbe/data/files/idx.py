"""The IDX format of the MNIST family: two zero bytes, type, rank, big-endian sizes, then the values."""

from __future__ import annotations

import gzip
from math import prod
from pathlib import Path
from zlib import error as ZlibError

import numpy as np
import numpy.typing as npt

from feddbe.errors import BadInput

__all__ = ["read_idx"]

_UBYTE = b"\0\0\x08"


def read_idx(path: Path, limit: int) -> npt.NDArray[np.uint8]:
    """The (read-only) array of bytes in an IDX file, gzipped or not; every byte must be accounted for.

    More than `limit` bytes are not unpacked.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            raw = file.read(limit + 1)
    except (OSError, EOFError, ZlibError) as error:
        raise BadInput(f"cannot read {path}: {error}; fetch the file again") from None
    if len(raw) > limit:
        raise BadInput(f"{path} has more than the {limit} bytes that were expected; fetch the file again")
    rank = raw[3] if len(raw) > 3 else 0
    start = 4 + 4 * rank
    if not raw.startswith(_UBYTE) or rank == 0 or len(raw) < start:
        raise BadInput(
            f"{path} is not an IDX file of bytes: it starts with {raw[:4].hex() or 'nothing'}, expected "
            "000008 and the number of axes; fetch the file again"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", rank, offset=4))
    if len(raw) != start + prod(shape):
        raise BadInput(
            f"{path} has {len(raw)} bytes, but its header announces {shape}, which takes "
            f"{start + prod(shape)}; fetch the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
