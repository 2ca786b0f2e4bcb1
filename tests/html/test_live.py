"""The served page: to this machine only, by its own name only, to be read only; it follows runs."""

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
from feddbe.errors import InvalidInputError
from feddbe.reporting.html.live import HOST, _server, serve
from feddbe.runs import folders
from feddbe.runs.store import RUN_FILE
from tests.html.conftest import SMALL


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where the runs in `tmp_path` are served."""
    server = _server(lambda: folders.list_runs(tmp_path), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str = "/content.json", verb: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    try:
        connection.request(verb, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_it_listens_on_one_address(port: int) -> None:
    """127.0.0.2 is this machine as well: who listens on all addresses would answer there."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert ask(port)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:{port}", ""])
def test_other_names_are_refused(host: str, port: int) -> None:
    """A page elsewhere may have a name that its owner points here."""
    status, _, body = ask(port, "/", Host=host.format(port=port))
    assert status == 421
    assert b"<" not in body
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(verb: str, port: int) -> None:
    assert ask(port, "/", verb)[0] == 501


@pytest.mark.parametrize("path", ["/../secret", "/run.sqlite", "/content.json?x=1", "/%2e%2e/"])
def test_nothing_else_is_served(path: str, port: int) -> None:
    assert ask(port, path)[0] == 404


def test_the_page_may_ask_for_news_and_is_shown_in_no_other(port: int) -> None:
    status, headers, body = ask(port, "/")
    assert status == 200
    assert b"connect-src 'self'" in body
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cache-Control"] == "no-store"


def test_it_follows_runs_that_come_and_go_on(port: int, tmp_path: Path) -> None:
    status, headers, body = ask(port)
    assert json.loads(body)["title"] == "No run yet"
    assert ask(port, **{"If-None-Match": headers["ETag"]})[0] == 304
    for rounds in (1, 3):
        feddbe.run("fedavg", out=str(tmp_path / "a"), rounds=rounds, resume=rounds > 1, **SMALL)
        status, news, body = ask(port, **{"If-None-Match": headers["ETag"]})
        assert status == 200
        assert news["ETag"] != headers["ETag"]
        headers, shown = news, json.loads(body)
        assert shown["sections"][0]["blocks"][0]["rows"][0][2]["value"] == rounds
    assert ask(port, **{"If-None-Match": headers["ETag"]})[0] == 304


def test_what_cannot_be_read_is_said_and_the_rest_is_there(port: int, tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "a"), rounds=1, **SMALL)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / RUN_FILE).write_bytes(b"no database" * 99)
    shown = json.loads(ask(port)[2])
    assert [row[0] for row in shown["sections"][0]["blocks"][0]["rows"]] == ["fedavg"]
    (failed,) = shown["failed"]
    assert "is damaged" in failed


@pytest.mark.parametrize("wrong", [-1, 70_000])
def test_a_port_that_cannot_be_is_one_line(wrong: int) -> None:
    with pytest.raises(InvalidInputError, match=f"port = {wrong}"):
        serve(list, wrong)


def test_a_port_in_use_is_one_line(port: int) -> None:
    with pytest.raises(InvalidInputError, match=f"port = {port}; cannot listen on it"):
        serve(list, port)
