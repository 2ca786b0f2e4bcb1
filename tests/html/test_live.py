"""The live server: local, read-only, for its own host names, and up to date with the runs."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.errors import InvalidInputError, StoreError
from feddbe.reporting.html.live import HOST, _create_server, _LiveContent, serve
from feddbe.runs import folders
from feddbe.runs.store import RUN_FILE
from tests.html.conftest import SMALL


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Return the port that serves the runs in `tmp_path`."""
    server = _create_server(lambda: folders.list_runs(tmp_path), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def request(
    port: int, path: str = "/content.json", verb: str = "GET", **headers: str
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    try:
        connection.request(verb, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_server_listens_on_one_address(port: int) -> None:
    """127.0.0.2 is this machine, too: a server on all addresses would accept the connection."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert request(port)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:{port}", ""])
def test_other_host_names_are_rejected(host: str, port: int) -> None:
    """The owner of a foreign name can point it to this machine (DNS rebinding)."""
    status, _, body = request(port, "/", Host=host.format(port=port))
    assert status == 421
    assert b"<" not in body
    assert request(port, "/", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_allowed(verb: str, port: int) -> None:
    assert request(port, "/", verb)[0] == 501


@pytest.mark.parametrize("path", ["/../secret", "/run.sqlite", "/content.json?x=1", "/%2e%2e/"])
def test_other_paths_are_not_found(path: str, port: int) -> None:
    assert request(port, path)[0] == 404


def test_silent_connections_do_not_block_the_page(port: int) -> None:
    silent = [socket.create_connection((HOST, port), timeout=5) for _ in range(300)]
    try:
        for connection in silent:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")  # a request that does not end
        assert request(port)[0] == 200
    finally:
        for connection in silent:
            connection.close()


def test_headers_allow_updates_and_forbid_frames(port: int) -> None:
    status, headers, body = request(port, "/")
    assert status == 200
    assert b"connect-src 'self'" in body
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cache-Control"] == "no-store"


def test_content_follows_new_and_resumed_runs(port: int, tmp_path: Path) -> None:
    status, headers, body = request(port)
    assert json.loads(body)["title"] == "No run yet"
    assert request(port, **{"If-None-Match": headers["ETag"]})[0] == 304
    for rounds in (1, 3):
        feddbe.run("fedavg", out=str(tmp_path / "a"), rounds=rounds, resume=rounds > 1, **SMALL)
        status, new_headers, body = request(port, **{"If-None-Match": headers["ETag"]})
        assert status == 200
        assert new_headers["ETag"] != headers["ETag"]
        headers = new_headers
        content = json.loads(body)
        assert content["sections"][0]["blocks"][0]["rows"][0][2]["value"] == rounds
    assert request(port, **{"If-None-Match": headers["ETag"]})[0] == 304


def test_a_corrupt_run_is_reported_and_the_others_are_shown(port: int, tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "a"), rounds=1, **SMALL)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / RUN_FILE).write_bytes(b"no database" * 99)
    content = json.loads(request(port)[2])
    assert [row[0] for row in content["sections"][0]["blocks"][0]["rows"]] == ["fedavg"]
    (failed,) = content["failed"]
    assert "is damaged" in failed


def test_folders_that_cannot_be_listed_are_reported() -> None:
    """A study's record may be damaged while the server runs."""

    def list_folders() -> list[Path]:
        raise StoreError("'study.json' is not a study's record")

    content = _LiveContent(list_folders).get()
    assert content["failed"] == ["'study.json' is not a study's record"]


@pytest.mark.parametrize("wrong", [-1, 70_000])
def test_an_invalid_port_is_an_error(wrong: int) -> None:
    with pytest.raises(InvalidInputError, match=f"port = {wrong}"):
        serve(list, wrong)


def test_a_port_in_use_is_an_error(port: int) -> None:
    with pytest.raises(InvalidInputError, match=f"port = {port}; cannot listen on it"):
        serve(list, port)
