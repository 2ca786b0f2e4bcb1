"""The server of a federation as a data set: its rows are on the nodes, and its engine sends tasks to them.

`load` opens the federation for the rest of the process, so that all runs of a comparison, a sweep or a script
use the same connections.
"""

from __future__ import annotations

import atexit
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.data.split import RaggedArray, Split
from feddbe.errors import FeddbeError, InvalidInputError
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.engine import FederationEngine, send_models
from feddbe.federation.node import NodeSummary
from feddbe.federation.operator_folder import FederationFolder, require_node_name
from feddbe.federation.protocol import MARGIN, Message, NodeError, NotAllowedError, Transport, check_metrics
from feddbe.metrics import parse_metrics
from feddbe.paths import expand_path
from feddbe.runs import folders
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RunStore
from feddbe.simulation.engines.base import TimeoutPolicy

PREFIX = "federation:"
NAME = "federation"
"""Name of the data set, independent of the folder's."""
_REPORT_SECONDS = 60.0
"""Seconds between reports of the nodes that a run is waiting for."""


@dataclass(frozen=True)
class FederationData:
    """Rows on the nodes of a federation (`data.dataset.RemoteData`)."""

    transport: Transport
    spec: DataSpec
    summaries: Mapping[str, NodeSummary]
    on_run: Callable[[Path], None] = lambda folder: None
    """Called with the folder of each run that begins."""

    @property
    def majority_hits(self) -> tuple[int, ...]:
        return tuple(self.summaries[name].majority_hits for name in sorted(self.summaries))

    def describe(self) -> dict[str, Any]:
        return {name: asdict(summary) for name, summary in self.summaries.items()}

    def create_engine(
        self, experiment: Experiment, folder: Path, timeouts: TimeoutPolicy
    ) -> FederationEngine:
        engine = FederationEngine(self.transport, experiment, self.spec, self.summaries, timeouts)
        self.on_run(folder)
        return engine

    def finish_run(self, experiment: Experiment, store: RunStore, on_message: Callable[[str], None]) -> None:
        send_models(self.transport, experiment, self.spec, store, on_message)

    def dataset(self) -> Dataset:
        """Return the data set without rows: clients in the order of their names, with their sizes."""
        names = sorted(self.summaries)
        summaries = [self.summaries[name] for name in names]
        fingerprints = " ".join(summary.fingerprint for summary in summaries)
        content = hashlib.sha256(f"{self.spec.sha256} {fingerprints}".encode()).hexdigest()
        train = RaggedArray.from_sizes(summary.train for summary in summaries)
        test = RaggedArray.from_sizes(summary.test for summary in summaries)
        preprocessing = self.spec.preprocessing
        return Dataset(
            NAME,
            self.spec.empty_inputs(),
            torch.empty(0, dtype=torch.int64),
            len(self.spec.labels),
            preprocessing.scale,
            preprocessing.shift,
            split=Split(train, test),
            num_words=preprocessing.words,
            note="the rows are on the nodes",
            label_names=self.spec.labels,
            client_names=tuple(names),
            preprocessing=preprocessing,
            remote=self,
            known_sha256={"x": content, "y": content},
        )


def collect_summaries(
    transport: Transport,
    names: Sequence[str],
    known: Mapping[str, NodeSummary],
    seconds: float | None,
    on_message: Callable[[str], None],
) -> dict[str, NodeSummary]:
    """Return a summary of each node's data.

    Args:
        transport: Carrier of messages.
        names: Names of the nodes.
        known: Earlier summaries, used for nodes that do not connect in time.
        seconds: Seconds to wait for nodes that are not connected; None: no limit.
        on_message: Receives the names of missing nodes, and errors.

    Raises:
        InvalidInputError: A node did not connect, and is not known from earlier.
    """
    summaries: dict[str, NodeSummary] = {}
    requests: dict[str, str] = {}
    connections: dict[str, float] = {}
    """Connections on which nodes were asked; on another one a node may have other data."""
    started = time.monotonic()
    next_report = started + 1
    while len(summaries) < len(names):
        connected = transport.nodes()
        lost = {name for name, since in connections.items() if connected.get(name) != since}
        requests = {identifier: name for identifier, name in requests.items() if name not in lost}
        for name in lost & connected.keys():
            summaries.pop(name, None)
        waiting = [name for name in names if name not in summaries and name not in requests.values()]
        for name in waiting:
            identifier = transport.send(name, Message.build("describe", {}), MARGIN)
            if identifier is not None and name in connected:
                requests[identifier] = name
                connections[name] = connected[name]
        moment = time.monotonic()
        if seconds is not None and moment - started >= seconds:
            break
        if moment >= next_report:
            missing = [name for name in names if name not in summaries]
            limit_hint = "; --worker-timeout sets a limit" if seconds is None else ""
            on_message(f"waiting for {', '.join(missing)} to connect{limit_hint}")
            next_report = moment + _REPORT_SECONDS
        limit = next_report if seconds is None else min(next_report, started + seconds)
        received = transport.receive(max(0.0, limit - moment))
        replying_node = requests.pop(received[0], None) if received else None
        if received and replying_node:
            summaries[replying_node] = _read_summary(replying_node, received[1])
    for name in names:
        if name not in summaries and name not in known:
            raise InvalidInputError(
                f"node '{name}' never connected (waited {seconds:g} s); start it, or remove it"
            )
    return {name: summaries.get(name) or known[name] for name in names}


def _read_summary(name: str, reply: Message | str) -> NodeSummary:
    try:
        if isinstance(reply, str):
            raise NodeError(reply)
        return NodeSummary.from_json(reply.read("summary").get("summary"))
    except FeddbeError as error:
        raise InvalidInputError(f"node '{name}' cannot take part: {error}") from None


# --- the open federations of this process


@dataclass(frozen=True)
class _OpenFederation:
    """A federation whose nodes reach this process."""

    folder: FederationFolder
    transport: Transport
    runs: list[Path]
    """Folder of the present run, if there is one."""
    names: Sequence[str] = ()
    """Names of the nodes over another carrier; empty: the invited ones."""

    def write_status(self) -> None:
        """Store the connected nodes and the folder of the run."""
        self.folder.write_status(self.transport.nodes(), self.runs[0] if self.runs else None)

    def begin_run(self, folder: Path) -> None:
        """Store the folder of a run that begins."""
        self.runs[:] = [folder]
        self.write_status()


_open: dict[Path, _OpenFederation] = {}
_resources = ExitStack()
atexit.register(_resources.close)


def open_federation(path: Path) -> _OpenFederation:
    """Return the federation in this folder; the first call listens on its address until the process ends.

    Raises:
        InvalidInputError: The folder is not a federation, another run uses it, or the port is in use.
    """
    key = path.resolve()
    if key not in _open:
        try:
            from feddbe.federation.grpc_transport import DirectServer
        except ImportError as error:
            raise InvalidInputError(
                f"a federation needs {error.name}; install it with: pip install 'feddbe[federation]'"
            ) from None
        folder = FederationFolder.open(path)
        with ExitStack() as resources:  # they are released if listening fails
            resources.enter_context(folder.exclusive())
            transport = DirectServer(folder)
            resources.callback(transport.close)
            _resources.push(resources.pop_all())
        federation = _OpenFederation(folder, transport, [])
        transport.on_change = federation.write_status
        _open[key] = federation
    return _open[key]


def open_over(path: Path, transport: Transport, names: Sequence[str]) -> None:
    """Open the federation in this folder over another carrier, until the process ends.

    Args:
        path: Folder of the federation.
        transport: Carrier of messages.
        names: Names of the nodes that take part.

    Raises:
        InvalidInputError: The folder is not a federation, another run uses it, or a name is not allowed.
    """
    folder = FederationFolder.open(path)
    if not names:
        raise InvalidInputError("nodes is empty; expected the names of the nodes that take part")
    for name in names:
        require_node_name(name)
    _resources.enter_context(folder.exclusive())
    _open[path.resolve()] = _OpenFederation(folder, transport, [], names)


def load(config: Config) -> Dataset:
    """Return the data set of `--data federation:DIR`.

    A new run waits for all invited nodes, at most `--worker-timeout` seconds. A resumed run has the nodes
    with which it began, and does not wait for those that are away.

    Raises:
        InvalidInputError: The folder is not a federation, or in use, or a metric needs samples.
    """
    try:
        check_metrics(parse_metrics(config.metrics))
    except NotAllowedError as error:
        raise InvalidInputError(f"metrics = {config.metrics}; {error}") from None
    path = expand_path(config.data.removeprefix(PREFIX))
    FederationFolder.open(path)  # an error, before this process listens
    stored = _stored_summaries(config)
    federation = open_federation(path)
    folder = federation.folder
    if stored:
        rows = FederationData(federation.transport, folder.data_spec(), stored, federation.begin_run)
        return rows.dataset()
    names = federation.names or folder.node_names()
    if not names:
        raise InvalidInputError(f"'{path}' has no nodes; invite one: feddbe federation invite {path} NAME")
    last_known = {name: folder.read_summary(name) for name in names}
    known = {name: summary for name, summary in last_known.items() if summary}
    summaries = collect_summaries(federation.transport, names, known, config.worker_timeout, _print_note)
    for name, summary in summaries.items():
        folder.write_summary(name, summary)
    rows = FederationData(federation.transport, folder.data_spec(), summaries, federation.begin_run)
    return rows.dataset()


def _stored_summaries(config: Config) -> dict[str, NodeSummary]:
    """Return the summaries that a run stored if it is resumed; empty for a new run."""
    if not (config.resume and config.out):
        return {}
    for folder in folders.list_runs(expand_path(config.out)):
        with closing(RunStore.open(folder)) as store:
            stored = store.meta("remote") or {}
            return {name: NodeSummary.from_json(summary) for name, summary in stored.items()}
    return {}


def _print_note(text: str) -> None:
    print("feddbe:", text, file=sys.stderr, flush=True)
