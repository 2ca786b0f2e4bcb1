"""The page, served while runs go on: to this machine only, and nothing can be changed by it.

A run's file may be read while another process writes it. The page asks for news every second; it is made anew
only when a file has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from feddbe.errors import InvalidInputError, StoreError
from feddbe.reporting.html.blocks import ReportRun, ReportRuns, read_runs
from feddbe.reporting.html.page import as_json, page_content, render
from feddbe.runs.store import RUN_FILE

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # a page's own policy cannot say that
}

Folders = Callable[[], Sequence[Path]]
"""Where the runs are by now: there may be more later."""


def serve(folders: Folders, port: int = 0, told: Callable[[str], None] = print) -> None:
    """Until it is interrupted; `told` is told the address. Port 0: one that is free."""
    try:
        server = _server(folders, port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"port = {port}; cannot listen on it: {why}; choose another, or 0 for a free one"
        ) from error
    with server:
        told(f"http://{HOST}:{server.server_port}/")
        server.serve_forever(poll_interval=0.1)


def _server(folders: Folders, port: int) -> ThreadingHTTPServer:
    news = _News(folders)

    class Handler(_Handler):
        pages = news

    return _Quiet((HOST, port), Handler)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that went away in the middle is no news."""


class _News:
    """The content, made anew when a run's file has changed; one thread makes it, the others wait."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._seen: list[object] | None = None
        self._content: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        with self._lock:
            places = list(self._folders())
            now: list[object] = [_state(place) for place in places]
            if now != self._seen:
                sources, failed = _readable(places)
                self._content = page_content(sources, failed)
                self._seen = None if failed else now
            return self._content


def _readable(places: Sequence[Path]) -> tuple[ReportRuns, list[str]]:
    """The runs that can be read, and what is wrong with the others: one may be just being made."""
    found, failed = list[ReportRun](), list[str]()
    for place in places:
        try:
            found += read_runs([place]).runs
        except StoreError as error:
            failed.append(str(error))
    return ReportRuns.from_runs(found), failed


def _state(folder: Path) -> tuple[object, ...]:
    """What changes when a run's file does: a round goes to its WAL first."""
    found: list[object] = [folder]
    for name in (RUN_FILE, f"{RUN_FILE}-wal"):
        try:
            stat = (folder / name).stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


class _Handler(BaseHTTPRequestHandler):
    """Two addresses, to be read only. Other names of this machine are refused: a page elsewhere could use one
    that its owner points here (DNS rebinding)."""

    pages: _News
    server: ThreadingHTTPServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        allowed = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in allowed:
            self._answer(421, "text/plain", "this address is served by its own name only\n")
        elif self.path == "/":
            self._answer(200, "text/html", render(self.pages.get(), live=True))
        elif self.path == "/content.json":
            text = as_json(self.pages.get())
            known = f'"{sha256(text.encode()).hexdigest()[:32]}"'
            same = self.headers.get("If-None-Match") == known
            self._answer(304 if same else 200, "application/json", "" if same else text, known)
        else:
            self._answer(404, "text/plain", "there are / and /content.json only\n")

    def _answer(self, code: int, kind: str, text: str, known: str = "") -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if known:
            self.send_header("ETag", known)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody wants to read a line per second."""
