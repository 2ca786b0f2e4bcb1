"""Tests of archives: only plain files are read, up to a size, and nothing is unpacked."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from feddbe.data.files import READ_ERRORS, damaged_file_error, iterate_members
from feddbe.errors import InvalidInputError

FILES = {"top/one.txt": b"one", "top/deep/two.bin": bytes(5000), "three": b""}


def write_tar(
    path: Path, members: dict[str, bytes], *, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo("top")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, link
            archive.addfile(info, io.BytesIO(content))
    return path


def write_zip(path: Path, members: dict[str, bytes], *, mode: int = stat.S_IFREG) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/", b"")
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


def read_all(archive: Path, limit: int = 1_000_000) -> dict[str, bytes]:
    try:
        return {name: content.read() for name, content in iterate_members(archive, limit)}
    except READ_ERRORS as error:
        raise damaged_file_error(archive, error) from None


@pytest.mark.parametrize("make", [write_tar, write_zip])
def test_all_files_are_read_without_unpacking(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", FILES)
    assert read_all(archive, 5003) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["archive"], "nothing is written"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_tar_with_link_or_device_is_rejected(tmp_path: Path, kind: bytes) -> None:
    archive = write_tar(tmp_path / "archive", {"link": b""}, kind=kind, link="/etc")
    with pytest.raises(InvalidInputError, match=r"'link'; only plain files"):
        read_all(archive)


def test_zip_with_link_is_rejected(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "archive", {"link": b"/etc"}, mode=stat.S_IFLNK)
    with pytest.raises(InvalidInputError, match=r"a link, 'link'; only plain files"):
        read_all(archive)


@pytest.mark.parametrize("make", [write_tar, write_zip])
def test_total_size_is_limited(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", FILES)
    with pytest.raises(InvalidInputError, match="more than the 5002 bytes"):
        read_all(archive, 5002)


@pytest.mark.parametrize("make", [write_tar, write_zip])
def test_damaged_archive_is_one_line_error(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", {"big": os.urandom(100_000), "bigger": os.urandom(200_000)})
    os.truncate(archive, 150_000)
    with pytest.raises(InvalidInputError, match=r"cannot read .*archive: .*; fetch it again$"):
        read_all(archive)


def test_other_file_is_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"<html>not found</html>")
    with pytest.raises(InvalidInputError, match=r"cannot read .*archive: .*; fetch it again$"):
        read_all(tmp_path / "archive")
