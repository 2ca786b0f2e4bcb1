"""Attacks: strangers, malicious nodes, malicious servers, and a search for private tensors on the wire."""

from __future__ import annotations

import json
import os
import queue
import socket
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("grpc", reason="needs feddbe[federation]")
pytest.importorskip("cryptography", reason="needs feddbe[federation]")

import grpc

from feddbe.data.registry import load_dataset
from feddbe.errors import InvalidInputError
from feddbe.federation.certificates import Invitation
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.grpc_transport import METHOD, SERVICE, DirectServer, serve_node, to_frames
from feddbe.federation.operator_folder import FederationFolder
from feddbe.federation.protocol import MARGIN, Message
from feddbe.methods.registry import parse_name
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask
from feddbe.state import as_bytes, decode, encode
from tests.real_federation.nodes import NAMES, LocalFederation, kind_and_type, make_files
from tests.real_federation.processes import Federation, free_port, run_options
from tests.waiting import PATIENCE, wait_until

needs_minutes = pytest.mark.skipif("FEDDBE_CASES" not in os.environ, reason="starts processes: make test-all")
PATH = f"/{SERVICE}/{METHOD}"
SILENT_CONNECTIONS = 500


# --- strangers and malicious nodes


@dataclass(frozen=True)
class Site:
    """A listening server, the invitation of 'anna', that of a removed node, and one of another federation."""

    folder: FederationFolder
    server: DirectServer
    anna: Invitation
    removed: Invitation
    foreign: Invitation


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, spec: DataSpec) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    port = free_port()
    folder, other = (
        FederationFolder.create(root / name, "127.0.0.1", port, "127.0.0.1", spec) for name in ("f", "g")
    )
    anna, removed = (Invitation.read(folder.invite(name, root)) for name in ("anna", "bert"))
    folder.remove("bert")
    foreign = Invitation.read(other.invite("cleo", root))
    with closing(DirectServer(folder)) as server:
        yield Site(folder, server, anna, removed, foreign)


class Outcome(NamedTuple):
    """The end of a connection."""

    code: str
    """gRPC's code."""
    details: str


class Stream:
    """A connection to a server that sends any frames; without a key, it presents no certificate."""

    def __init__(self, channel: grpc.Channel, path: str) -> None:
        self.outbox = queue.SimpleQueue[bytes | None]()
        self._call = channel.stream_stream(path)(iter(self.outbox.get, None), timeout=PATIENCE)

    def send(self, frames: Iterable[bytes]) -> None:
        """Send frames."""
        for frame in frames:
            self.outbox.put(frame)

    def outcome(self) -> Outcome:
        """Return how the server ends the connection."""
        try:
            messages = len(list(self._call))
        except grpc.RpcError as error:
            return Outcome(error.code().name, str(error.details()))
        return Outcome("OK", f"{messages} frames")

    @classmethod
    @contextmanager
    def open(cls, invitation: Invitation, path: str = PATH) -> Iterator[Stream]:
        """Open a connection, which the server need not accept."""
        key, certificate = invitation.key or None, invitation.certificate or None
        credentials = grpc.ssl_channel_credentials(invitation.authority, key, certificate)
        with grpc.secure_channel(invitation.server, credentials) as channel:
            stream = cls(channel, path)
            try:
                yield stream
            finally:
                stream.outbox.put(None)


@contextmanager
def connect(site: Site) -> Iterator[Stream]:
    """Open the connection of 'anna', which the server lists while it is open."""
    with Stream.open(site.anna) as stream:
        wait_until(lambda: "anna" in site.server.nodes(), "the connection")
        yield stream
    wait_until(lambda: not site.server.nodes(), "the end of the connection")


def refuse(invitation: Invitation, path: str = PATH) -> Outcome:
    """Return how the server refuses a connection."""
    with Stream.open(invitation, path) as stream:
        return stream.outcome()


def test_invited_node_is_let_in(site: Site) -> None:
    """The control of all tests of strangers."""
    with connect(site):
        assert list(site.server.nodes()) == ["anna"]


def test_strangers_do_not_pass_the_handshake(site: Site) -> None:
    server_key, server_certificate = (
        (site.folder.path / name).read_bytes() for name in ("server.key", "server.pem")
    )
    strangers = {
        "no certificate": replace(site.anna, key=b"", certificate=b""),
        "another authority": replace(site.foreign, authority=site.anna.authority),
        "false server": replace(site.anna, authority=site.foreign.authority),
    }
    codes = {name: refuse(stranger).code for name, stranger in strangers.items()}
    assert codes == dict.fromkeys(strangers, "UNAVAILABLE")
    impostor = replace(site.anna, key=server_key, certificate=server_certificate)
    assert refuse(impostor).code in ("UNAVAILABLE", "PERMISSION_DENIED")
    assert site.server.nodes() == {}


def test_removed_node_is_refused(site: Site) -> None:
    assert refuse(site.removed) == ("PERMISSION_DENIED", "this invitation was revoked")


def test_other_methods_of_the_service_do_not_exist(site: Site) -> None:
    assert refuse(site.anna, f"/{SERVICE}/Control").code == "UNIMPLEMENTED"


def test_plain_http_gets_no_reply(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.folder.port), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
        received = b""
        try:
            while part := plain.recv(1000):
                received += part
        except ConnectionError:
            pass
    assert b"HTTP" not in received
    assert len(received) < 100, "at most an alert of TLS"


def test_silent_connections_do_not_keep_nodes_out_and_end(site: Site) -> None:
    with ExitStack() as stack:
        address = ("127.0.0.1", site.folder.port)
        silent = [
            stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
            for _ in range(SILENT_CONNECTIONS)
        ]
        with connect(site):
            assert silent[-1].recv(1) == b"", "the server ends it"


def receive_all(server: DirectServer) -> list[tuple[str, Message | str]]:
    """Return all replies that have arrived."""
    replies = [server.receive(0) for _ in range(server._inbox.qsize())]
    return [reply for reply in replies if reply is not None]


def start_frame(number: int, body_size: int) -> bytes:
    """Return the first frame of a message that announces a body."""
    return struct.pack("<BQIQ", 1, number, 2, body_size) + b"{}"


UNASKED = 10**6
"""First of the numbers that no request has."""


@pytest.mark.parametrize(
    "frames",
    [
        [os.urandom(1000).replace(b"\1", b"\2", 1)],
        [b""],
        [b"\xff" * 21],
        [bytes(10 * 2**20)],
        [start_frame(UNASKED, 2**40), start_frame(UNASKED + 1, 0)],
    ],
    ids=["random", "empty", "wrong lengths", "10 MB", "announced 1 TB"],
)
def test_garbage_ends_the_connection(site: Site, frames: list[bytes]) -> None:
    with connect(site) as stream:
        stream.send(frames)
        assert stream.outcome().code == "RESOURCE_EXHAUSTED"
    assert receive_all(site.server) == []


@pytest.mark.parametrize(
    "messages", [[Message(b"{}", bytes(10 * 2**20))], [Message(b"{}")] * 5000], ids=["10 MB", "5000"]
)
def test_unasked_messages_are_dropped(site: Site, messages: list[Message]) -> None:
    """The reply that follows them on the same connection arrives, and nothing else does."""
    reply = Message(b"{}", b"the reply")
    with connect(site) as stream:
        identifier = site.server.send("anna", Message.build("describe", {}), MARGIN)
        assert identifier is not None
        for number, message in enumerate(messages, UNASKED):
            stream.send(to_frames(number, message))
        stream.send(to_frames(int(identifier), reply))
        assert wait_until(lambda: receive_all(site.server), "the reply") == [(identifier, reply)]


def test_oversized_reply_is_one_sentence(site: Site) -> None:
    """The node's reply has one byte more than the limit allows, while gRPC may still send the request."""
    for _ in range(50):
        with connect(site) as stream:
            identifier = site.server.send("anna", Message.build("describe", {}), 1000)
            assert identifier is not None
            stream.send([start_frame(int(identifier), 1001)])
            sentence = "its message has 1,001 bytes; at most 1,000 are allowed"
            assert stream.outcome() == ("RESOURCE_EXHAUSTED", sentence)
        assert receive_all(site.server) == [(identifier, sentence)]


# --- a malicious server


@pytest.mark.parametrize("fields", [{"layers": ("z_g",)}, {"sample_indices": (0,)}, {"metrics": ("drift",)}])
def test_node_never_sends_representations(
    fields: dict[str, Any], files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    assert kind_and_type(federation.request()) == ("result", None)
    reply = federation.request(ClientTask(0, 1, "none", evaluate=True, **fields))
    assert kind_and_type(reply) == ("error", "NotAllowedError")
    assert not reply.body


@pytest.mark.parametrize("kind", ["model", "method"])
def test_server_cannot_name_a_python_file(
    kind: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    federation = LocalFederation(files, spec, tmp_path)
    reference = f"{script}:thing"
    if kind == "model":
        reply = federation.request(model=reference)
    else:
        reply = federation.request(recipe={"method": reference})
    assert kind_and_type(reply) == ("error", "NotAllowedError")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["prbm", "personal/0.weight", "others/1/0.weight"])
def test_node_accepts_only_tensors_that_the_method_receives(
    name: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    message = federation.build_request(method="scaffold+prbm")
    changed = Message(message.header, encode(decode(message.body) | {name: torch.zeros(3)}))
    assert kind_and_type(federation.nodes["anna"].reply_to(changed)) == ("error", "FeddbeError")
    assert kind_and_type(federation.nodes["anna"].reply_to(message)) == ("result", None)


@pytest.mark.parametrize("run", ["../run", "a/b", "\x1b[2J", "", "r" * 65, 7, ["r"]])
def test_identifier_of_a_run_is_a_word(
    run: Any, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    assert kind_and_type(federation.request(run=run)) == ("error", "ProtocolError")
    assert federation.nodes["anna"].store.runs() == []


def test_only_a_model_that_can_be_exported_is_stored(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    task = federation.build_request()
    fields = json.loads(task.header)
    model = {key: fields[key] for key in ("run", "recipe", "base")} | {"client": 0, "adapt_epochs": None}
    for change in ({"round": "1"}, {"round": -1}, {"round": 1, "adapt_epochs": "2"}):
        message = Message.build("keep_model", model | change, task.body)
        assert kind_and_type(federation.nodes["anna"].reply_to(message)) == ("error", "ProtocolError")
    message = Message.build("keep_model", model | {"round": 1}, task.body)
    assert kind_and_type(federation.nodes["anna"].reply_to(message)) == ("kept", None)
    assert federation.nodes["anna"].load_model("r").description["round"] == 1


def test_text_of_a_server_does_not_control_the_terminal(site: Site, tmp_path: Path) -> None:
    """The name in an invitation, and the reason for which a server ends a connection."""

    def refuse(requests: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "gone \x1b[2J")

    key, certificate = ((site.folder.path / name).read_bytes() for name in ("server.key", "server.pem"))
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.stream_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    path = tmp_path / "x.invitation"
    replace(site.anna, name="anna\x1b[2J", server=f"127.0.0.1:{port}").write(path)
    local = LocalFederation(make_files(tmp_path), site.anna.data_spec, tmp_path)
    try:
        with pytest.raises(InvalidInputError, match=r"^the server refuses 'anna\?\[2J': gone \?\[2J$"):
            serve_node(Invitation.read(path), local.nodes["anna"])
    finally:
        server.stop(None)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "local"}, "NotAllowedError"),
    "hyperparameter": ({"method": "ditto(lam=7)"}, "NotAllowedError"),
    "model": ({"model": "linear"}, "NotAllowedError"),
    "cut": ({"cut": "0"}, "NotAllowedError"),
    "seed": ({"seed": 3}, "NotAllowedError"),
    "initial model": ({"recipe": {"initial_model": "0" * 64}}, "NotAllowedError"),
    "client": ({"task": ClientTask(1, 2)}, "NotAllowedError"),
    "input form": ({"recipe": {"data_spec": "0" * 64}}, "DataMismatchError"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_run_keeps_its_method_model_seed_and_client(
    kind: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    change, expected = CHANGES[kind]
    federation = LocalFederation(files, spec, tmp_path)
    receipt = json.loads(federation.request(method="ditto").header)["receipt"]
    task = ClientTask(0, 2, "train")
    assert kind_and_type(federation.request(task, "ditto", base=receipt)) == ("result", None)
    reply = federation.request(**{"task": task, "method": "ditto", "base": receipt, **change})
    assert kind_and_type(reply) == ("error", expected)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    opened = Federation(tmp_path)
    yield opened
    opened.close()


def ask(server: DirectServer, message: Message) -> Message | str:
    """Return the reply of 'anna' over the real connection."""
    identifier = wait_until(lambda: server.send("anna", message, MARGIN), "the connection")
    received = wait_until(lambda: server.receive(0.2), "the reply")
    assert received[0] == identifier
    reply: Message | str = received[1]
    return reply


@needs_minutes
def test_real_node_refuses_a_malicious_server(federation: Federation) -> None:
    """The node stays connected after each refusal, and its connection ends after an oversized message."""
    local = LocalFederation(federation.files, federation.spec, federation.root / "local")
    node = federation.join("anna")
    honest = local.build_request()
    evil = {
        "representations": local.build_request(ClientTask(0, 1, "none", evaluate=True, layers=("z_g",))),
        "file": local.build_request(model="example.py:build"),
        "method": local.build_request(method="ditto"),
        "model": local.build_request(model="linear"),
        "seed": local.build_request(seed=3),
    }
    with closing(DirectServer(federation.folder)) as server:
        reply = ask(server, honest)
        assert isinstance(reply, Message)
        assert kind_and_type(reply) == ("result", None)
        connected = server.nodes()["anna"]
        for message in evil.values():
            refusal = ask(server, message)
            assert isinstance(refusal, Message)
            assert kind_and_type(refusal) == ("error", "NotAllowedError")
            assert b"example.py" not in refusal.header
        assert server.nodes()["anna"] == connected
        server.send("anna", Message.build("describe", {}, bytes(MARGIN + 1)), MARGIN)
        sentence = f"its message has {MARGIN + 1:,} bytes; at most {MARGIN:,} are allowed"
        wait_until(lambda: sentence in federation.output(node), "the refusal")
        wait_until(lambda: server.nodes().get("anna", connected) != connected, "the next connection")
        assert ask(server, honest) == reply
    assert node.poll() is None


@needs_minutes
def test_node_process_refuses_a_false_server(federation: Federation) -> None:
    """Another authority listens on the server's address."""
    false_folder = FederationFolder.create(
        federation.root / "false", "127.0.0.1", federation.port, "127.0.0.1", federation.spec
    )
    with closing(DirectServer(false_folder)) as server:
        node = federation.join("anna")
        wait_until(lambda: "not connected to" in federation.output(node), "an attempt")
        time.sleep(2)
        assert server.nodes() == {}


@needs_minutes
def test_removed_node_process_ends_with_a_sentence(federation: Federation) -> None:
    federation.folder.remove("anna")
    with closing(DirectServer(federation.folder)):
        status, out = federation.finish(federation.join("anna"))
    assert status == 2
    assert out.splitlines()[-1] == "feddbe: the server refuses 'anna': this invitation was revoked"


# --- bytes on the wire

PIECE = 32
"""Bytes of each piece of a tensor that is searched; HTTP/2 splits longer ones."""


def cut_pieces(content: bytes) -> list[bytes]:
    """Return the pieces of a tensor that identify it."""
    pieces = [content[start : start + PIECE] for start in range(0, len(content) - PIECE + 1, PIECE)]
    return [piece for piece in pieces if len(set(piece)) > PIECE // 3]


def read_private_tensors(federation: Federation, name: str, secret: Sequence[str]) -> dict[str, bytes]:
    """Return the secret tensors in a node's file, and its samples as stored and as inputs of the model."""
    contents: dict[str, bytes] = {}
    with closing(sqlite3.connect(federation.root / f"state-{name}" / "private.sqlite")) as database:
        for run, round_, blob in database.execute("SELECT run, round, state FROM states"):
            state = {key: tensor for key, tensor in decode(blob).items() if key.startswith(tuple(secret))}
            for key, tensor in state.items():
                contents[f"{run} {round_} {key}"] = bytes(as_bytes(tensor))
    dataset = load_dataset(str(federation.files[name]))
    contents["stored samples"] = dataset.x.numpy().tobytes()
    inputs = dataset.x.numpy().astype(np.float32) * dataset.scale + dataset.shift
    contents["inputs"] = inputs.astype(np.float32).tobytes()
    contents["secret"] = (federation.root / f"state-{name}" / "secret").read_bytes()
    return contents


@needs_minutes
def test_no_private_tensor_crosses_the_wire(federation: Federation) -> None:
    """All bytes inside TLS are searched; the shared tensors of each round must be there."""
    server_port = free_port()
    settings = federation.root / "f" / "federation.toml"
    settings.write_text(settings.read_text().replace(f"port = {federation.port}", f"port = {server_port}"))
    output_dir = federation.root / "wire"
    output_dir.mkdir()
    words = ["f", str(federation.port), str(server_port), "wire", *(f"{name}.invitation" for name in NAMES)]
    federation.start(*words, module="tests.real_federation.relay")
    federation.join_all()
    methods = ("ditto", "scaffold+dbe")
    words = ["compare", *methods, "--data", "federation:f", *run_options(), "--out", "both", "--quiet"]
    federation.call(*words)
    records = {path.name: path.read_bytes() for path in output_dir.iterdir()}
    assert records.keys() == {f"{name}-to-{side}" for name in NAMES for side in ("server", "node")}

    wire = b"".join(records.values())
    for folder in (federation.root / "both").iterdir():
        if RunStore.is_run(folder):
            with closing(RunStore.open(folder)) as store:
                shared = {key: bytes(as_bytes(tensor)) for key, tensor in store.server_state().items()}
            pieces = [piece for content in shared.values() for piece in cut_pieces(content)]
            present = sum(piece in wire for piece in pieces)
            assert present > 0.9 * len(pieces) > 0, "the last model was sent"

    # A hidden unit that no sample activates keeps its initial parameters, which all clients know.
    local = LocalFederation(federation.files, federation.spec, federation.root / "local")
    initial = local.experiment("ditto").task.model.parameters.values()
    known = {piece for tensor in initial for piece in cut_pieces(bytes(as_bytes(tensor)))}
    secret = [name for method in methods for name in parse_name(method).build().secret]
    assert secret == ["personal/", "prbm"]
    for name in NAMES:
        private = read_private_tensors(federation, name, secret)
        assert all(any(f" {prefix}" in key for key in private) for prefix in secret)
        pieces_by_name = {key: set(cut_pieces(content)) - known for key, content in private.items()}
        assert sum(map(len, pieces_by_name.values())) > 1000
        leaks = {key: sum(piece in wire for piece in pieces) for key, pieces in pieces_by_name.items()}
        assert {key: count for key, count in leaks.items() if count} == {}
