"""Tests of downloads from local servers: intact, interrupted and failing ones."""

from __future__ import annotations

import hashlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from filelock import FileLock

from feddbe.data.files import Verification, cache_folders, download, search_folders, verify
from feddbe.errors import InvalidInputError
from tests.waiting import PATIENCE

BODY = bytes(range(256)) * 4096  # 1 MiB: several chunks
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Server of BODY with configurable failures."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file.bin"
        self.requests = 0
        """Number of requests."""
        self.sends_length = True
        """True to send Content-Length."""
        self.status: dict[int, int] = {}
        """Request number -> status other than 200."""
        self.truncate_at: Callable[[int, int], int | None] = lambda request, size: None
        """(request number, bytes to send) -> bytes after which the connection is closed, or None."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        number = self.server.requests
        self.server.requests += 1
        if number in self.server.status:
            self.send_error(self.server.status[number])
            return
        self.send_response(200)
        if self.server.sends_length:
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: self.server.truncate_at(number, len(BODY))])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "file.bin"


def check_downloaded(target: Path) -> None:
    """Check the file, its checksum, and that no partial file is left."""
    assert target.read_bytes() == BODY
    assert (target.parent / "file.bin.sha256").read_text() == f"{SHA256}  file.bin\n"
    assert list_names(target) == ["file.bin", "file.bin.sha256"]


def list_names(target: Path) -> list[str]:
    """Return the names in the folder, except the lock, which waiting processes have open."""
    return sorted(path.name for path in target.parent.iterdir() if path.name != ".file.bin.lock")


@pytest.mark.parametrize("checksum", [None, f"md5:{MD5}", f"sha256:{SHA256}"])
def test_download_stores_file_and_checksum(server: Server, target: Path, checksum: str | None) -> None:
    download(server.url, target, checksum)
    assert server.requests == 1
    check_downloaded(target)


def test_missing_published_checksum_is_logged(
    server: Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    download(server.url, target, f"md5:{MD5}")
    assert not caplog.records
    target.unlink()
    download(server.url, target)
    (record,) = caplog.records
    assert (
        f"file.bin is not verified, its publisher gives no checksum; its SHA-256 {SHA256}"
        in record.getMessage()
    )


def test_progress_is_reported(server: Server, target: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    download(server.url, target, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) > 1
    assert sorted(calls) == calls
    assert calls[-1] == (len(BODY), len(BODY))


def test_download_without_content_length(server: Server, target: Path) -> None:
    server.sends_length = False
    totals: list[int | None] = []
    download(server.url, target, f"md5:{MD5}", lambda _, total: totals.append(total))
    assert set(totals) == {None}
    check_downloaded(target)


def test_partial_file_of_killed_process_is_not_used(server: Server, target: Path) -> None:
    target.parent.mkdir()
    (target.parent / "file.bin.part").write_bytes(b"of an older version")
    download(server.url, target)
    assert server.requests == 1
    check_downloaded(target)


def test_interrupted_download_is_retried(server: Server, target: Path) -> None:
    server.truncate_at = lambda request, size: size // 2 if request == 0 else None
    download(server.url, target)
    assert server.requests == 2
    check_downloaded(target)


def test_download_fails_after_three_interruptions(server: Server, target: Path) -> None:
    server.truncate_at = lambda request, size: 1000
    with pytest.raises(InvalidInputError, match=f"connection ended after 1000 of {len(BODY)} bytes"):
        download(server.url, target, f"md5:{MD5}")
    assert server.requests == 3
    assert list_names(target) == []


def test_server_error_is_retried(server: Server, target: Path) -> None:
    server.status = {0: 503}
    download(server.url, target, f"md5:{MD5}")
    assert server.requests == 2
    check_downloaded(target)


def test_wrong_checksum_removes_partial_file(server: Server, target: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        download(server.url, target, f"md5:{'0' * 32}")
    message = str(caught.value)
    assert "\n" not in message
    assert f"file.bin from {server.url} has the checksum md5:{MD5}, expected md5:{'0' * 32}" in message
    assert list_names(target) == []


def test_wrong_checksum_keeps_older_file(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"older")
    with pytest.raises(InvalidInputError, match="has the checksum"):
        download(server.url, target, f"md5:{'0' * 32}")
    assert target.read_bytes() == b"older"


def test_intact_file_is_not_downloaded_again(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(BODY)
    download(server.url, target, f"md5:{MD5}")
    assert server.requests == 0
    assert target.read_bytes() == BODY


def download_after_barrier(url: str, target: Path, checksum: str | None, barrier: Barrier) -> None:
    barrier.wait(PATIENCE)
    download(url, target, checksum)


@pytest.mark.parametrize("checksum", [None, f"md5:{MD5}"])
def test_concurrent_processes_download_once(server: Server, target: Path, checksum: str | None) -> None:
    server.truncate_at = lambda request, size: time.sleep(
        0.3
    )  # time for the other processes to send requests
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=download_after_barrier, args=(server.url, target, checksum, barrier))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert server.requests == 1
    check_downloaded(target)


def test_second_process_waits_and_logs_it(
    server: Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target.parent.mkdir()
    lock = FileLock(target.parent / ".file.bin.lock")
    with ThreadPoolExecutor() as threads:
        with lock:
            second = threads.submit(download, server.url, target, f"md5:{MD5}")
            while "another process downloads" not in caplog.text:
                assert not second.done()
                time.sleep(0.01)
            target.write_bytes(BODY)
        second.result(60)
    assert server.requests == 0


def test_force_downloads_intact_file_again(server: Server, target: Path) -> None:
    download(server.url, target, f"md5:{MD5}")
    (target.parent / "file.bin.part").write_bytes(BODY[:10])
    download(server.url, target, f"md5:{MD5}", force=True)
    assert server.requests == 2
    check_downloaded(target)


@pytest.mark.parametrize("checksum", [None, f"md5:{MD5}"])
def test_verify_detects_damage_of_downloaded_file(server: Server, target: Path, checksum: str | None) -> None:
    download(server.url, target, checksum)
    assert verify(target, checksum) == (Verification.VERIFIED if checksum else Verification.UNCHANGED)
    target.write_bytes(BODY[:-1] + b"!")
    with pytest.raises(
        InvalidInputError, match=r"file.bin is damaged: it has the checksum .*; fetch it again with --force"
    ):
        verify(target, checksum)
    download(server.url, target, checksum)
    check_downloaded(target)


def test_verify_file_from_another_source(target: Path) -> None:
    """A file from another source, such as Debian, may be packed differently."""
    target.parent.mkdir()
    target.write_bytes(b"packed differently")
    assert verify(target, f"md5:{MD5}") == Verification.OTHER_CHECKSUM
    assert verify(target, None) == Verification.NO_CHECKSUM


def test_http_404_is_not_retried(server: Server, target: Path) -> None:
    server.status = {0: 404}
    with pytest.raises(InvalidInputError) as caught:
        download(server.url, target, f"md5:{MD5}")
    assert server.requests == 1, "a retry would not help"
    message = str(caught.value)
    assert "\n" not in message
    assert f"cannot fetch {server.url} (the server answers 404 Not Found)" in message
    assert message.endswith(f"fetch file.bin from there by other means and put it at {target}")
    assert list_names(target) == []


def test_refused_connection_is_an_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"
        with pytest.raises(
            InvalidInputError
        ) as caught:  # bound but not listening: no other process can use the port
            download(url, target)
    message = str(caught.value)
    assert "\n" not in message
    assert f"cannot fetch {url}" in message
    assert "refused" in message
    assert message.endswith(f"fetch file.bin from there by other means and put it at {target}")


def test_unwritable_folder_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidInputError, match=r"cannot write .*file.bin: .*; choose another --data-dir"):
        download(server.url, tmp_path / "file" / "file.bin")


def test_search_and_cache_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDDBE_DATA", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cache = tmp_path / ".cache" / "feddbe"
    assert search_folders("set", None) == [cache, cache / "set"]
    assert cache_folders("set", None)[0] == cache / "set"
    monkeypatch.setenv("FEDDBE_DATA", "~/env")
    assert search_folders("set", Path("~/a")) == [
        *(tmp_path / "a", tmp_path / "a" / "set"),
        *(tmp_path / "env", tmp_path / "env" / "set"),
        *(cache, cache / "set"),
    ]
    assert cache_folders("set", None)[0] == tmp_path / "env" / "set"
    assert cache_folders("set", Path("~/a"))[0] == tmp_path / "a" / "set"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert search_folders("set", None)[-1] == tmp_path / "xdg" / "feddbe" / "set"
