"""Small IDX files, right and wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from feddbe.data.io.formats import read_idx
from feddbe.errors import BadInput

VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
BYTES = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(range(24))


@pytest.mark.parametrize("content", [BYTES, gzip.compress(BYTES, mtime=0)], ids=["plain", "gz"])
def test_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"  # told apart by content, not by name
    path.write_bytes(content)
    assert np.array_equal(read_idx(path, 100), VALUES)
    assert read_idx(path, 100).dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file of bytes: it starts with nothing"),
        (BYTES[:3], "starts with 000008, expected 000008 and the number of axes"),
        (BYTES[:10], "starts with 00000803"),
        (b"\0\0\x08\0", "starts with 00000800"),
        (b"\0\0\x0d\x01" + struct.pack(">I", 0), "starts with 00000d01"),
        (b"<html>404</html>", "starts with 3c68746d"),
        (BYTES[:-1], r"has 39 bytes, but its header announces \(2, 3, 4\), which takes 40"),
        (BYTES + b"\0", "has 41 bytes, .* which takes 40"),
        (b"\0\0\x08\x04" + b"\xff" * 16, "has 20 bytes"),
        (gzip.compress(BYTES, mtime=0)[:-9], "cannot read .*fetch the file again"),
        (gzip.compress(BYTES, mtime=0)[:5], "cannot read"),
        (gzip.compress(BYTES, mtime=0)[:10] + b"\xff" * 30, "cannot read"),
        (gzip.compress(BYTES, mtime=0) + b"garbage", "cannot read"),
    ],
)
def test_refuses(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        read_idx(path, 100)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*absent.*No such file"):
        read_idx(tmp_path / "absent", 100)
