"""Messages over a stock Flower deployment: the same engine and node as a ServerApp and a ClientApp.

Only Flower's documented interface is used. A message of the protocol is a Flower message with two records, so
that a body for many nodes is uploaded to the SuperLink once. Flower starts a process for each message on a
node, and a node executes the app that the SuperLink sends (docs/federation.md).
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from feddbe.errors import FeddbeError, InvalidInputError
from feddbe.federation import protocol
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.operator_folder import FederationFolder
from feddbe.federation.protocol import MAX_HEADER, Message
from feddbe.paths import read_json_file

try:
    from flwr.app import ConfigRecord, Context, RecordDict
    from flwr.app import Message as FlowerMessage
except ImportError as error:
    raise InvalidInputError("flwr is not installed; install feddbe[flower]") from error

APP = "flower"
"""Folder of the app in that of the federation."""
POLL_SECONDS = 0.2
"""Seconds between questions to the SuperLink for replies."""
NODES_SECONDS = 2.0
"""Seconds between questions to the SuperLink for its nodes."""
LOCK_SECONDS = 60.0
"""Seconds in which the process of an earlier message may end; it continues when its SuperNode is killed."""
LOG = logging.getLogger("feddbe.federation")

_REASONS = {
    1: "its app could not be loaded; is feddbe[flower] installed there?",
    2: "its app raised an error",
    3: "the message expired",
    4: "the reply expired",
    5: "its SuperNode is gone",
    7: "its SuperNode refused the app",
    8: "the process of its app died",
}
"""Reasons by the code of Flower's error. The text of the error may quote data, and is not read."""

_PYPROJECT = """\
[project]
name = "feddbe-federation"
version = "1.0.0"
description = "Runs of feddbe, whose code is installed on every machine"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41,<1.43"]

[tool.flwr.app]
publisher = "feddbe"
fab-format-version = 1
flwr-version-target = "{version}"

[tool.flwr.app.components]
serverapp = "feddbe_federation.server_app:app"
clientapp = "feddbe_federation.client_app:app"

[tool.flwr.app.config]
folder = {folder}
nodes = ""
command = "run fedavg+dbe"
"""
_SERVER_APP = """\
from feddbe.cli.main import main
from feddbe.federation.flower import make_server_app

app = make_server_app(main)
"""
_CLIENT_APP = """\
from pathlib import Path

from feddbe.federation.flower import make_client_app

app = make_client_app(Path(__file__).with_name("data.json"))
"""


def write_app(folder: FederationFolder) -> Path:
    """Write the app that `flwr run` starts into the federation's folder, and return its folder.

    Raises:
        InvalidInputError: The folder cannot be written.
    """
    from importlib.metadata import version

    app = folder.path / APP
    package = app / "feddbe_federation"
    pyproject = _PYPROJECT.format(version=version("flwr"), folder=json.dumps(str(folder.path.resolve())))
    files = {
        app / "pyproject.toml": pyproject,
        app / "LICENSE": "Apache-2.0\n",
        package / "__init__.py": "",
        package / "server_app.py": _SERVER_APP,
        package / "client_app.py": _CLIENT_APP,
        package / "data.json": json.dumps(folder.data_spec().to_json()),
    }
    try:
        package.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write '{error.filename}': {error.strerror}") from None
    return app


# --- the server


@dataclass(frozen=True)
class _SentRequest:
    """A request that waits for its reply."""

    node: str
    node_id: int
    max_reply: int


class FlowerTransport:
    """The nodes of a Flower deployment (`protocol.Transport`)."""

    def __init__(self, grid: Any) -> None:
        """Use the Grid of a ServerApp."""
        self.grid = grid
        self._node_ids: dict[str, int] = {}
        self._requests: dict[str, _SentRequest] = {}
        self._inbox: list[tuple[str, Message | str]] = []

    def nodes(self) -> Mapping[str, float]:
        infos = {info.name: info for info in self.grid.get_nodes() if info.name}
        self._node_ids = {name: info.node_id for name, info in infos.items()}
        return {
            name: datetime.fromisoformat(info.last_activated_at).timestamp() for name, info in infos.items()
        }

    def send(self, node: str, message: Message, max_reply: int) -> str | None:
        node_id = self._node_ids.get(node)
        if node_id is None:
            return None
        request = FlowerMessage(to_records(message), dst_node_id=node_id, message_type="train")
        identifiers = list(self.grid.push_messages([request]))
        if not identifiers or not identifiers[0]:
            return None
        # a node has one request at a time: replies to earlier ones no longer count
        others = {identifier: other for identifier, other in self._requests.items() if other.node != node}
        self._requests = others | {identifiers[0]: _SentRequest(node, node_id, max_reply)}
        return str(identifiers[0])

    def receive(self, timeout: float) -> tuple[str, Message | str] | None:
        start = time.monotonic()
        connected, next_question = self.nodes(), start + NODES_SECONDS
        while not self._inbox:
            if self._requests:
                for reply in self.grid.pull_messages(list(self._requests)):
                    self._read(reply)
            moment = time.monotonic()
            if self._inbox or moment >= start + timeout:
                break
            if moment >= next_question:
                next_question = moment + NODES_SECONDS
                if self.nodes() != connected:
                    break
            time.sleep(min(POLL_SECONDS, start + timeout - moment))
        return self._inbox.pop(0) if self._inbox else None

    def _read(self, reply: FlowerMessage) -> None:
        """Append a reply to the inbox if it was requested from the node that sent it."""
        identifier = reply.metadata.reply_to_message_id
        request = self._requests.get(identifier)
        if request is None:
            return
        content: Message | str
        if reply.has_error():  # the source of an error is the SuperLink
            content = _REASONS.get(reply.error.code, f"error {reply.error.code} of Flower")
        elif reply.metadata.src_node_id != request.node_id:
            return
        else:
            content = read_records(reply.content, request.max_reply)
        del self._requests[identifier]
        self._inbox.append((identifier, content))


def make_server_app(run_command: Callable[[Sequence[str]], int]) -> Any:
    """Return the ServerApp that runs a command of feddbe with the nodes of the deployment as data.

    Args:
        run_command: The command line: a function of arguments that returns the exit code.
    """
    from flwr.serverapp import ServerApp

    from feddbe.federation.server import open_over

    def run(grid: Any, context: Context) -> None:
        config = context.run_config
        folder, names = Path(config["folder"]), str(config["nodes"]).replace(",", " ").split()
        open_over(folder, FlowerTransport(grid), names)
        command = shlex.split(str(config["command"]))
        code = run_command([*command, "--data", f"federation:{folder}"])
        if code:
            raise FeddbeError(f"feddbe {config['command']} ended with exit code {code}; see the log above")

    app = ServerApp()
    app.main()(run)
    return app


# --- a node


def make_client_app(data_spec: Path) -> Any:
    """Return the ClientApp that replies as a node.

    The node's owner sets `data` and `state` by `flower-supernode --node-config`.

    Args:
        data_spec: The file data.json of the federation.
    """
    from flwr.clientapp import ClientApp

    def reply_to(message: FlowerMessage, context: Context) -> FlowerMessage:
        reply = _reply_as_node(message, context.node_config, data_spec)
        return FlowerMessage(to_records(reply), reply_to=message)

    app = ClientApp()
    app.train()(reply_to)
    return app


def _reply_as_node(message: FlowerMessage, settings: Mapping[str, Any], data_spec: Path) -> Message:
    """Return a node's reply; an error is logged here, and only its type is sent."""
    from feddbe.federation.node import open_node

    try:
        for key in ("data", "state"):
            if key not in settings:
                raise InvalidInputError(
                    f"the node has no '{key}'; start it with: "
                    'flower-supernode --node-config \'data="DATA" state="FOLDER"\''
                )
        spec = DataSpec.from_json(read_json_file(data_spec))
        request = read_records(message.content)
        if isinstance(request, str):
            raise protocol.ProtocolError(request)
        state, data = Path(str(settings["state"])), str(settings["data"])
        with open_node(state, data, spec, wait_seconds=LOCK_SECONDS) as node:
            return node.reply_to(request)
    except Exception as error:
        LOG.exception("request refused")
        return protocol.error_message(error)


# --- messages


def to_records(message: Message) -> RecordDict:
    """Return a message as records of Flower."""
    return RecordDict(
        {"header": ConfigRecord({"bytes": message.header}), "body": ConfigRecord({"bytes": message.body})}
    )


def read_records(records: RecordDict, max_body: int | None = None) -> Message | str:
    """Return the message in the records of Flower, which are not trusted; a text if there is none."""
    try:
        header, body = records["header"]["bytes"], records["body"]["bytes"]
    except (KeyError, TypeError):
        return "its message does not have the right form"
    if not isinstance(header, bytes) or not isinstance(body, bytes) or len(header) > MAX_HEADER:
        return "its message does not have the right form"
    if max_body is not None and len(body) > max_body:
        return f"its message has {len(body):,} bytes; at most {max_body:,} are allowed"
    return Message(header, body)
