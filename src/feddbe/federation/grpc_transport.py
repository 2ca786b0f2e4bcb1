"""Messages over gRPC: every node keeps one stream open to the server, with mutual TLS.

The process of a run listens while it lasts; nodes connect, and connect again whenever the connection ends.
Nothing is queued on disk, because a lost task is sent again. gRPC's own threads keep a stream alive, so that
a node stays connected while it holds Python's lock for minutes. Only public functions of grpcio are used.

A message is sent in frames of at most a megabyte, so that its receiver rejects a message that is too large by
its first frame.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # a run starts `git`, which needs no handlers of gRPC
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a line for each failed handshake

import grpc
import grpc.aio

from feddbe.errors import InvalidInputError, truncate
from feddbe.federation.certificates import Invitation, fingerprint
from feddbe.federation.node import Node
from feddbe.federation.operator_folder import FederationFolder
from feddbe.federation.protocol import MAX_HEADER, Message, ProtocolError

SERVICE, METHOD = "feddbe.Federation", "Connect"
FRAME = 2**20
"""Bytes of a body in one frame."""
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 8_000),  # otherwise 60 s, whatever keepalive_timeout_ms says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # otherwise the server ends the connection
    ("grpc.max_receive_message_length", FRAME + MAX_HEADER + 1024),
]
HANDSHAKE_SECONDS = 10
"""Seconds in which a client must present its certificate, so that silent connections end."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Seconds between attempts of a node to connect."""
LOG = logging.getLogger("feddbe.federation")

_START = struct.Struct("<BQIQ")
"""First bytes of a message: 1, its number, and the lengths of header and body. Other frames begin with 0."""


def to_frames(number: int, message: Message) -> Iterator[bytes]:
    """Yield a message in frames."""
    header, body = message
    yield _START.pack(1, number, len(header), len(body)) + header + body[:FRAME]
    for start in range(FRAME, len(body), FRAME):
        yield b"\0" + body[start : start + FRAME]


@dataclass
class FrameReader:
    """Reader of the frames of one stream.

    Args:
        max_body: Function of a message's number and header that returns the bytes of the largest allowed
            body; None: the message was not requested, and its frames are dropped.
    """

    max_body: Callable[[int, bytes], int | None]
    _number: int = 0
    _header: bytes = b""
    _parts: list[bytes] = field(default_factory=list)
    _missing: int = 0
    """Bytes of the present body that have not arrived."""
    _is_dropped: bool = False

    def read(self, frame: bytes) -> tuple[int, Message] | None:
        """Return the message that this frame completes, or None.

        Raises:
            ProtocolError: The frame is malformed, or its message is too large.
        """
        if frame[:1] == b"\1":
            self._start(frame)
        elif frame[:1] == b"\0" and self._missing:
            self._append(frame[1:])
        else:
            raise ProtocolError("a frame is malformed")
        if self._missing or self._is_dropped:
            return None
        return self._number, Message(self._header, b"".join(self._parts))

    def _start(self, frame: bytes) -> None:
        if self._missing or len(frame) < _START.size:
            raise ProtocolError("a frame is malformed")
        _, self._number, header_size, body_size = _START.unpack_from(frame)
        start = _START.size + header_size
        if header_size > MAX_HEADER or start > len(frame):
            raise ProtocolError("a frame is malformed")
        self._header = frame[_START.size : start]
        limit = self.max_body(self._number, self._header)
        self._is_dropped = limit is None
        if limit is not None and body_size > limit:
            raise ProtocolError(f"its message has {body_size:,} bytes; at most {limit:,} are allowed")
        self._parts, self._missing = [], body_size
        self._append(frame[start:])

    def _append(self, part: bytes) -> None:
        if len(part) > self._missing:
            raise ProtocolError("a frame is malformed")
        self._missing -= len(part)
        if not self._is_dropped:
            self._parts.append(part)


class _Stream:
    """The server's end of a node's connection."""

    def __init__(self) -> None:
        self.since = time.time()
        self.frames: asyncio.Queue[Iterator[bytes] | None] = asyncio.Queue()
        """Messages to send; None ends the connection, because a newer one replaces it."""


@dataclass(frozen=True)
class _SentRequest:
    """A request that waits for its reply."""

    node: str
    max_reply: int


class DirectServer:
    """The server's side of the streams (`protocol.Transport`)."""

    def __init__(self, folder: FederationFolder) -> None:
        """Listen on the federation's address.

        Raises:
            InvalidInputError: The address is in use, or does not belong to this machine.
        """
        self.folder = folder
        self.on_change: Callable[[], None] = lambda: None
        """Called when a node connects or disconnects."""
        self._streams: dict[str, _Stream] = {}
        self._requests: dict[int, _SentRequest] = {}
        self._inbox: queue.Queue[tuple[str, Message | str] | None] = queue.Queue()
        """Replies, and None for each change of the connections."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="federation", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def _start(self) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        options = [
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),  # otherwise a second run would share the port
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),  # otherwise 120 s
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=1000)
        handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        files = ("server.key", "server.pem", "ca.pem")
        address = self.folder.listen_address
        try:
            key, certificate, authority = ((self.folder.path / name).read_bytes() for name in files)
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], authority, require_client_auth=True
            )
            self._server.add_secure_port(address, credentials)
        except OSError as error:
            raise InvalidInputError(f"cannot read '{error.filename}': {error.strerror}") from None
        except RuntimeError:
            raise InvalidInputError(
                f"cannot listen on {address}: the port is in use, or the address is not this machine's"
            ) from None
        await self._server.start()

    async def _connect(self, requests: object, context: Any) -> None:
        """Serve one node's stream until it ends."""
        (pem,) = context.auth_context()["x509_pem_cert"]
        name = self.folder.find_node(fingerprint(pem))
        if name is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this invitation was revoked")
            return
        stream = _Stream()
        with self._lock:
            previous = self._streams.get(name)
            self._streams[name] = stream
        if previous is not None:  # its process died unnoticed, or two processes use one invitation
            previous.frames.put_nowait(None)
        # otherwise a first frame and an error at the same time would each send it; the error would be lost
        await context.send_initial_metadata(())
        writer = asyncio.ensure_future(_write_frames(stream, context))
        try:
            self._notify()
            await self._read_frames(name, context, writer)
        finally:
            writer.cancel()
            with self._lock:
                if self._streams.get(name) is stream:
                    del self._streams[name]
            self._notify()

    async def _read_frames(self, name: str, context: Any, writer: asyncio.Future[None]) -> None:
        reader = FrameReader(lambda number, header: self._max_reply(name, number))
        while True:
            frame = asyncio.ensure_future(context.read())
            await asyncio.wait([frame, writer], return_when=asyncio.FIRST_COMPLETED)
            if not frame.done():
                frame.cancel()
                reason = "another process connected with the same invitation"
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, reason)
            if frame.result() is grpc.aio.EOF:
                return
            try:
                received = reader.read(frame.result())
            except ProtocolError as error:
                self._fail_requests(name, str(error))
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                return
            if received is not None:
                number, message = received
                with self._lock:
                    is_requested = self._requests.pop(number, None) is not None
                if is_requested:
                    self._inbox.put((str(number), message))

    def _max_reply(self, name: str, number: int) -> int | None:
        """Return the bytes that a node's reply may have; None for a message that it was not asked for."""
        with self._lock:
            request = self._requests.get(number)
        return request.max_reply if request is not None and request.node == name else None

    def _fail_requests(self, name: str, reason: str) -> None:
        with self._lock:
            failed = [number for number, request in self._requests.items() if request.node == name]
            for number in failed:
                del self._requests[number]
        for number in failed:
            self._inbox.put((str(number), reason))

    def _notify(self) -> None:
        self._inbox.put(None)
        self.on_change()

    def nodes(self) -> Mapping[str, float]:
        with self._lock:
            return {name: stream.since for name, stream in self._streams.items()}

    def send(self, node: str, message: Message, max_reply: int) -> str | None:
        with self._lock:
            stream = self._streams.get(node)
            if stream is None:
                return None
            number = next(self._numbers)
            # a node has one request at a time: replies to earlier ones no longer count
            others = {n: request for n, request in self._requests.items() if request.node != node}
            self._requests = others | {number: _SentRequest(node, max_reply)}
        self._loop.call_soon_threadsafe(stream.frames.put_nowait, to_frames(number, message))
        return str(number)

    def receive(self, timeout: float) -> tuple[str, Message | str] | None:
        try:
            return self._inbox.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def close(self) -> None:
        """End all connections and stop listening."""
        self.on_change = lambda: None
        asyncio.run_coroutine_threadsafe(self._server.stop(0.5), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _write_frames(stream: _Stream, context: Any) -> None:
    while True:
        frames = await stream.frames.get()
        if frames is None:
            return
        for frame in frames:
            await context.write(frame)


def serve_node(invitation: Invitation, node: Node) -> None:
    """Connect to the server and reply to its messages; connect again whenever that ends.

    Raises:
        InvalidInputError: The invitation was revoked, or another process uses it.
    """
    credentials = grpc.ssl_channel_credentials(invitation.authority, invitation.key, invitation.certificate)
    pause, reported = FIRST_PAUSE, ""
    while True:
        outbox: queue.Queue[bytes | None] = queue.Queue()
        with grpc.secure_channel(invitation.server, credentials, options=KEEPALIVE) as channel:
            connect = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            reader = FrameReader(lambda number, header: node.max_body(header))
            try:
                for frame in connect(iter(outbox.get, None)):
                    if reported:
                        LOG.info("connected to %s", invitation.server)
                    pause, reported = FIRST_PAUSE, ""
                    received = reader.read(frame)
                    if received is not None:
                        number, message = received
                        for reply_frame in to_frames(number, node.reply_to(message)):
                            outbox.put(reply_frame)
                reason = "the server closed the connection"
            except grpc.RpcError as error:
                code, details = error.code(), truncate(error.details())
                reason = f"{code.name}: {details}"
                if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ALREADY_EXISTS):
                    raise InvalidInputError(f"the server refuses '{invitation.name}': {details}") from None
            except ProtocolError as error:
                reason = str(error)
            finally:
                outbox.put(None)
        if reason != reported:
            LOG.info("not connected to %s (%s); trying again", invitation.server, reason)
        reported = reason
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, pause * 1.5)
