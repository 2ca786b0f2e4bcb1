"""Archives are unpacked whole or not at all, and nothing of them lands elsewhere."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from feddbe.data.extract import extract
from feddbe.errors import BadInput

FILES = {"top/one.txt": b"one", "top/deep/two.bin": bytes(5000), "three": b""}


def tar(path: Path, members: dict[str, bytes], *, kind: bytes = tarfile.REGTYPE, link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo("top")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, link
            archive.addfile(info, io.BytesIO(content))
    return path


def zip_(path: Path, members: dict[str, bytes], *, mode: int = stat.S_IFREG) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/", b"")
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


def below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()
    }


@pytest.mark.parametrize("make", [tar, zip_])
def test_all_files_and_only_once(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", FILES)
    assert extract(archive, tmp_path / "out", 5003) == tmp_path / "out"
    assert below(tmp_path / "out") == FILES
    (tmp_path / "out" / "three").write_text("mine")
    extract(archive, tmp_path / "out", 5003)
    assert (tmp_path / "out" / "three").read_text() == "mine", "what is there is kept"


@pytest.mark.parametrize(
    "name", ["../out.txt", "a/../../out.txt", "/tmp/out.txt", "..\\out.txt", "C:out.txt"]
)
@pytest.mark.parametrize("make", [tar, zip_])
def test_no_member_leaves_the_folder(tmp_path: Path, make: type, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    archive = make(tmp_path / "archive", {"good": b"1", name: b"evil"})
    with pytest.raises(BadInput, match=r"has a member .* that leads out of its folder"):
        extract(archive, inside / "out", 1000)
    assert not list(inside.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "inside"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_no_links_and_devices_from_tar(tmp_path: Path, kind: bytes) -> None:
    archive = tar(tmp_path / "archive", {"link": b""}, kind=kind, link="/etc")
    with pytest.raises(BadInput, match=r"'link'; only plain files"):
        extract(archive, tmp_path / "out", 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_no_links_from_zip(tmp_path: Path) -> None:
    archive = zip_(tmp_path / "archive", {"link": b"/etc"}, mode=stat.S_IFLNK)
    with pytest.raises(BadInput, match=r"a link, 'link'; only plain files"):
        extract(archive, tmp_path / "out", 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize("make", [tar, zip_])
def test_the_size_is_bounded_in_all(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", FILES)
    with pytest.raises(BadInput, match="more than the 5002 bytes"):
        extract(archive, tmp_path / "out", 5002)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize("make", [tar, zip_])
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, make: type) -> None:
    archive = make(tmp_path / "archive", {"big": os.urandom(100_000), "bigger": os.urandom(200_000)})
    os.truncate(archive, 150_000)
    with pytest.raises(BadInput, match=r"cannot read .*archive: .*; fetch it again$"):
        extract(archive, tmp_path / "out", 1_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_no_archive_at_all(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"<html>not found</html>")
    with pytest.raises(BadInput, match=r"cannot read .*archive: .*; fetch it again$"):
        extract(tmp_path / "archive", tmp_path / "out", 1000)


def test_a_place_that_cannot_be_written_is_not_the_archives_fault(tmp_path: Path) -> None:
    archive = zip_(tmp_path / "archive", FILES)
    with pytest.raises(BadInput, match=r"cannot write .*out: .*; choose another --data-dir"):
        extract(archive, archive / "out", 5003)
