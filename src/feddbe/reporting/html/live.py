"""A local, read-only web server for the report, which follows runs in progress.

A run's file can be read while another process writes it. The page asks for changes every second; its content
is built again only if a file has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from feddbe.errors import FeddbeError, InvalidInputError, StoreError, one_line
from feddbe.reporting.html.blocks import ReportRun, ReportRuns, read_runs
from feddbe.reporting.html.page import encode_json, page_content, render
from feddbe.runs.store import RUN_FILE

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # not allowed in the policy of a meta element
}

ListFolders = Callable[[], Sequence[Path]]
"""Returns the folders of the runs that exist at the time of the call."""


def serve(list_folders: ListFolders, port: int = 0, on_start: Callable[[str], None] = print) -> None:
    """Serve the page until the process is interrupted.

    Args:
        list_folders: Returns the folders of runs; called for every request.
        port: Port to listen on; 0: a free one.
        on_start: Called with the address.

    Raises:
        InvalidInputError: The port cannot be used.
    """
    try:
        server = _create_server(list_folders, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"port = {port}; cannot listen on it: {reason}; choose another, or 0 for a free one"
        ) from error
    with server:
        on_start(f"http://{HOST}:{server.server_port}/")
        server.serve_forever(poll_interval=0.1)


def _create_server(list_folders: ListFolders, port: int) -> ThreadingHTTPServer:
    live_content = _LiveContent(list_folders)

    class Handler(_Handler):
        content = live_content

    return _QuietServer((HOST, port), Handler)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be accepted; others retry after a second."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that close a connection early."""


class _LiveContent:
    """The page's content, rebuilt if a run's file has changed; one thread builds it, the others wait."""

    def __init__(self, list_folders: ListFolders) -> None:
        self._list_folders = list_folders
        self._lock = threading.Lock()
        self._versions: list[object] | None = None
        """Versions of the files that the content was built from; None: build it at the next request."""
        self._content: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """Return the current content."""
        with self._lock:
            try:
                folders = list(self._list_folders())
            except FeddbeError as error:
                return page_content(ReportRuns.from_runs([]), [str(error)])
            versions: list[object] = [_file_version(folder) for folder in folders]
            if versions != self._versions:
                self._content = _build_content(folders)
                self._versions = None if self._content["failed"] else versions
            return self._content


def _build_content(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the content for the runs that can be shown, with a message for each other one.

    A run may be incomplete yet, or its file odd in a way that only the page notices. The others are shown.
    """
    runs: list[ReportRun] = []
    failed: list[str] = []
    for folder in folders:
        try:
            runs += read_runs([folder]).runs
        except StoreError as error:
            failed.append(str(error))
    try:
        return page_content(ReportRuns.from_runs(runs), failed)
    except Exception:  # find the run
        readable = []
        for run in runs:
            try:
                page_content(ReportRuns.from_runs([run]))
                readable.append(run)
            except Exception as error:
                failed.append(f"'{run.folder}' cannot be shown: {one_line(error)}")
        return page_content(ReportRuns.from_runs(readable), failed)


def _file_version(folder: Path) -> tuple[object, ...]:
    """Return a value that changes with a run's file or its write-ahead log, which a round changes first."""
    version: list[object] = [folder]
    for name in (RUN_FILE, f"{RUN_FILE}-wal"):
        try:
            stat = (folder / name).stat()
            version.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            version.append(None)
    return tuple(version)


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET requests for the page and its content.

    Requests for other host names are rejected: a foreign page could use a name that its owner points to this
    machine (DNS rebinding).
    """

    content: _LiveContent
    server: ThreadingHTTPServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        allowed_hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in allowed_hosts:
            self._send(421, "text/plain", f"only requests for {HOST} and localhost are answered\n")
        elif self.path == "/":
            self._send(200, "text/html", render(self.content.get(), live=True))
        elif self.path == "/content.json":
            text = encode_json(self.content.get())
            etag = f'"{sha256(text.encode()).hexdigest()[:32]}"'
            is_unchanged = self.headers.get("If-None-Match") == etag
            code, body = (304, "") if is_unchanged else (200, text)
            self._send(code, "application/json", body, etag)
        else:
            self._send(404, "text/plain", "not found; available: / and /content.json\n")

    def _send(self, code: int, content_type: str, text: str, etag: str = "") -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log: the page sends a request every second."""
