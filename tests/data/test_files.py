"""The downloader against servers on this machine: good ones, forgetful ones and ones that hang up."""

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

BODY = bytes(range(256)) * 4096  # 1 MiB: several chunks
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves BODY; the fields say how badly."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file.bin"
        self.asked = 0
        """Requests so far."""
        self.announce = True
        """Send Content-Length."""
        self.status: dict[int, int] = {}
        """Request number -> another status than 200."""
        self.cut: Callable[[int, int], int | None] = lambda request, size: None
        """(request number, bytes to send) -> bytes after which to hang up."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        number = self.server.asked
        self.server.asked += 1
        if number in self.server.status:
            self.send_error(self.server.status[number])
            return
        self.send_response(200)
        if self.server.announce:
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: self.server.cut(number, len(BODY))])

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


def check(target: Path) -> None:
    """The file, its sum, and no part left over."""
    assert target.read_bytes() == BODY
    assert (target.parent / "file.bin.sha256").read_text() == f"{SHA256}  file.bin\n"
    assert names(target) == ["file.bin", "file.bin.sha256"]


def names(target: Path) -> list[str]:
    """What is beside the file; its lock stays, as who waits for it has it open."""
    return sorted(path.name for path in target.parent.iterdir() if path.name != ".file.bin.lock")


@pytest.mark.parametrize("checksum", [None, f"md5:{MD5}", f"sha256:{SHA256}"])
def test_whole(server: Server, target: Path, checksum: str | None) -> None:
    download(server.url, target, checksum)
    assert server.asked == 1
    check(target)


def test_without_a_published_sum_it_is_said(
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


def test_progress(server: Server, target: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    download(server.url, target, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 1
    assert sorted(seen) == seen
    assert seen[-1] == (len(BODY), len(BODY))


def test_length_unknown(server: Server, target: Path) -> None:
    server.announce = False
    seen: list[int | None] = []
    download(server.url, target, f"md5:{MD5}", lambda _, total: seen.append(total))
    assert set(seen) == {None}
    check(target)


def test_what_a_killed_process_left_is_not_used(server: Server, target: Path) -> None:
    target.parent.mkdir()
    (target.parent / "file.bin.part").write_bytes(b"of an older version")
    download(server.url, target)
    assert server.asked == 1
    check(target)


def test_cut_half_way_is_fetched_again(server: Server, target: Path) -> None:
    server.cut = lambda request, size: size // 2 if request == 0 else None
    download(server.url, target)
    assert server.asked == 2
    check(target)


def test_gives_up_when_it_is_always_cut(server: Server, target: Path) -> None:
    server.cut = lambda request, size: 1000
    with pytest.raises(InvalidInputError, match=f"connection ended after 1000 of {len(BODY)} bytes"):
        download(server.url, target, f"md5:{MD5}")
    assert server.asked == 3
    assert names(target) == []


def test_busy_server_is_asked_again(server: Server, target: Path) -> None:
    server.status = {0: 503}
    download(server.url, target, f"md5:{MD5}")
    assert server.asked == 2
    check(target)


def test_wrong_sum_removes_the_part(server: Server, target: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        download(server.url, target, f"md5:{'0' * 32}")
    message = str(caught.value)
    assert "\n" not in message
    assert f"file.bin from {server.url} has the checksum md5:{MD5}, expected md5:{'0' * 32}" in message
    assert names(target) == []


def test_wrong_sum_leaves_an_older_file_alone(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"older")
    with pytest.raises(InvalidInputError, match="has the checksum"):
        download(server.url, target, f"md5:{'0' * 32}")
    assert target.read_bytes() == b"older"


def test_a_file_that_is_right_is_not_fetched_again(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(BODY)
    download(server.url, target, f"md5:{MD5}")
    assert server.asked == 0
    assert target.read_bytes() == BODY


def fetch_in_a_process(url: str, target: Path, checksum: str | None, barrier: Barrier) -> None:
    barrier.wait(60)
    download(url, target, checksum)


@pytest.mark.parametrize("checksum", [None, f"md5:{MD5}"])
def test_of_many_at_once_one_fetches_and_the_others_find_it(
    server: Server, target: Path, checksum: str | None
) -> None:
    server.cut = lambda request, size: time.sleep(0.3)  # the others ask meanwhile, if they may
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=fetch_in_a_process, args=(server.url, target, checksum, barrier))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert server.asked == 1
    check(target)


def test_who_comes_second_waits_and_says_so(
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
    assert server.asked == 0


def test_again_fetches_what_is_there_and_forgets_the_part(server: Server, target: Path) -> None:
    download(server.url, target, f"md5:{MD5}")
    (target.parent / "file.bin.part").write_bytes(BODY[:10])
    download(server.url, target, f"md5:{MD5}", force=True)
    assert server.asked == 2
    check(target)


@pytest.mark.parametrize("checksum", [None, f"md5:{MD5}"])
def test_verify_finds_damage_to_what_was_downloaded(
    server: Server, target: Path, checksum: str | None
) -> None:
    download(server.url, target, checksum)
    assert verify(target, checksum) == (Verification.VERIFIED if checksum else Verification.UNCHANGED)
    target.write_bytes(BODY[:-1] + b"!")
    with pytest.raises(
        InvalidInputError, match=r"file.bin is damaged: it has the checksum .*; fetch it again with --force"
    ):
        verify(target, checksum)
    download(server.url, target, checksum)
    check(target)


def test_verify_knows_what_it_does_not_know(target: Path) -> None:
    """A file from elsewhere, such as Debian's, may be packed otherwise."""
    target.parent.mkdir()
    target.write_bytes(b"packed otherwise")
    assert verify(target, f"md5:{MD5}") == Verification.OTHER_CHECKSUM
    assert verify(target, None) == Verification.NO_CHECKSUM


def test_404(server: Server, target: Path) -> None:
    server.status = {0: 404}
    with pytest.raises(InvalidInputError) as caught:
        download(server.url, target, f"md5:{MD5}")
    assert server.asked == 1, "asking again would not help"
    message = str(caught.value)
    assert "\n" not in message
    assert f"cannot fetch {server.url} (the server answers 404 Not Found)" in message
    assert message.endswith(f"fetch file.bin from there by other means and put it at {target}")
    assert names(target) == []


def test_connection_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"
        with pytest.raises(
            InvalidInputError
        ) as caught:  # bound but not listening: nobody else can take the port
            download(url, target)
    message = str(caught.value)
    assert "\n" not in message
    assert f"cannot fetch {url}" in message
    assert "refused" in message
    assert message.endswith(f"fetch file.bin from there by other means and put it at {target}")


def test_no_place_to_write(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidInputError, match=r"cannot write .*file.bin: .*; choose another --data-dir"):
        download(server.url, tmp_path / "file" / "file.bin")


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
