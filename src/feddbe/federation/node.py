"""A node: one client's data and private states, and a reply to every message of the server.

The node decides what it executes: built-in methods and models, or files that its owner named, compared by
content. Method, model, seed and form of the inputs are fixed for each run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from feddbe import data, methods, models
from feddbe.config import user_code
from feddbe.config.options import Config
from feddbe.config.user_code import StoredSource, is_file_reference
from feddbe.data.federated import FederatedData, load_federated_data
from feddbe.data.registry import find_builtin_dataset
from feddbe.data.split import Indices, RaggedArray, Split
from feddbe.errors import FeddbeError, InvalidInputError, truncate
from feddbe.export import ClientModel, make_client_model
from feddbe.federation import protocol
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.private_store import PrivateStore, make_private_folder, write_private_file
from feddbe.federation.protocol import (
    MARGIN,
    MAX_SAMPLES,
    DataMismatchError,
    InitialModelError,
    Message,
    NotAllowedError,
    ProtocolError,
)
from feddbe.methods.base import Method
from feddbe.methods.registry import METHODS, hyperparameters, parse_name
from feddbe.metrics.builtin import majority_accuracy
from feddbe.models.registry import ModelSource, load_builder
from feddbe.paths import expand_path, read_json_file
from feddbe.runs.experiment import Experiment, make_training
from feddbe.simulation.client import ClientTask, build_inference_model, run_client
from feddbe.simulation.engines.ray import versions
from feddbe.simulation.loop import deterministic_section
from feddbe.state import Receipt, decode, nbytes, sha256
from feddbe.training import backends
from feddbe.training.task import Task

LOG = logging.getLogger("feddbe.federation")
SETTINGS_FILE = "node.json"
_SERVER_OPTIONS = frozenset(
    {
        "method", "data", "data_dir", "partition", "partition_seed", "clients", "min_samples", "split",
        "shift", "patience", "metrics", "eval", "engine", "device", "min_replies", "worker_timeout",
        "keep_best", "out", "resume", "json", "quiet",
    }
)  # fmt: skip
"""Options of a run that the server does not send: its own files, and decisions of the round loop."""


@dataclass(frozen=True)
class NodeSummary:
    """All facts about its data that a node reports."""

    train: int
    test: int
    majority_hits: int
    """Test samples that have the most frequent training label, for the majority accuracy in tables."""
    fingerprint: str
    """Hash with a secret key, by which a change of the data is noticed."""

    @classmethod
    def from_data(cls, federated: FederatedData, secret: bytes) -> NodeSummary:
        """Return the summary.

        The `secret` is the node's own: a plain hash would let the server test guesses.
        """
        dataset, split, _ = federated
        train, test = len(split.train[0]), len(split.test[0])
        content = f"{dataset.sha256()} {split.index_sha256()}"
        fingerprint = hmac.new(secret, content.encode(), hashlib.sha256).hexdigest()
        return cls(train, test, round(majority_accuracy(dataset, split) * test), fingerprint)

    @classmethod
    def from_json(cls, values: Any) -> NodeSummary:
        """Return the summary in a message, which is not trusted.

        Raises:
            ProtocolError: The value is not a summary.
        """
        try:
            summary = cls(**values)
            counts = (summary.train, summary.test, summary.majority_hits)
            is_valid = all(type(count) is int and 0 <= count <= MAX_SAMPLES for count in counts)
            is_valid &= summary.train >= 1 and summary.majority_hits <= summary.test
            is_valid &= len(bytes.fromhex(summary.fingerprint)) == 32
        except (TypeError, ValueError) as error:
            raise ProtocolError("its summary does not have the right form") from error
        if not is_valid:
            raise ProtocolError("its summary does not have the right form")
        return summary


def make_recipe(experiment: Experiment, spec: DataSpec, client: int) -> dict[str, Any]:
    """Return the values from which a node builds its task, as JSON.

    The node learns the sizes of other clients only if the method needs them; otherwise they are 1.
    """
    task = experiment.task
    split = task.dataset.split
    assert split is not None
    is_shown = experiment.method.uses_sample_counts
    sizes = {
        part: [int(n) if is_shown or k == client else 1 for k, n in enumerate(indices.sizes)]
        for part, indices in (("train", split.train), ("test", split.test))
    }
    options = dataclasses.asdict(experiment.options)
    return {
        "method": experiment.name,
        "method_options": hyperparameters(experiment.method),
        "options": {key: value for key, value in options.items() if key not in _SERVER_OPTIONS},
        "sources": {kind: source._asdict() for kind, source in experiment.sources.items()},
        "sizes": sizes,
        "data_spec": spec.sha256,
        "initial_model": sha256(task.model.parameters),
    }


def _recipe_identity(recipe: Mapping[str, Any]) -> str:
    """Return a hash of the values that must not change during a run."""
    keys = ("method", "method_options", "sources", "data_spec", "initial_model")
    fixed = [recipe[key] for key in keys] + [recipe["options"][key] for key in ("model", "cut", "seed")]
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


class Node:
    """A client of a federation on its own machine."""

    def __init__(
        self,
        folder: Path,
        data_name: str,
        spec: DataSpec,
        methods: Collection[str] = (),
        allowed_files: Sequence[str] = (),
    ) -> None:
        """Load the data and open the private states.

        Args:
            folder: State folder of the node, which only its owner can read.
            data_name: The node's own data, any that feddbe reads.
            spec: Form of the federation's data.
            methods: Methods that the owner allows; empty: all built-in ones.
            allowed_files: Files with methods or models that the owner allows.

        Raises:
            DataMismatchError: The data does not have the form of the federation's data.
        """
        for name in methods:
            if name not in METHODS.builtin and not is_file_reference(name):
                raise InvalidInputError(
                    f"--methods {name}; built-in methods are {', '.join(sorted(METHODS.builtin))}"
                )
        for file in allowed_files:
            user_code.content_sha256("owner", expand_path(user_code.split_reference(file)[0]))
        self.spec = spec
        self.methods = frozenset(methods)
        self.allowed_files = tuple(allowed_files)
        options = Config(data=data_name, partition="iid", clients=1)
        self.federated = load_federated_data(options, spec.conform(data.load_dataset(data_name)))
        make_private_folder(folder)
        self.summary = NodeSummary.from_data(self.federated, _read_secret(folder / "secret"))
        self.store = PrivateStore(folder)
        self._task: tuple[str, Task, Method] | None = None
        self._last_reply: tuple[bytes, Message] | None = None

    def reply_to(self, message: Message) -> Message:
        """Return the reply to a message; an error is logged, and only its type is sent.

        The last result is cached, so that a repeated task costs nothing.
        """
        key = hashlib.sha256(message.header + b"\0" + message.body).digest()
        if self._last_reply and self._last_reply[0] == key:
            return self._last_reply[1]
        try:
            header = message.read("describe", "task", "keep_model")
            if header["kind"] == "describe":
                summary = dataclasses.asdict(self.summary)
                return Message.build("summary", {"summary": summary, "versions": versions()})
            if header["kind"] == "keep_model":
                return self._keep_model(header, message.body)
            self._last_reply = key, self._run_task(header, message.body)
            return self._last_reply[1]
        except FeddbeError as error:
            LOG.error("request refused: %s", truncate(error, 1000))
            return protocol.error_message(error)
        except Exception as error:
            LOG.exception("request failed")
            return protocol.error_message(error)

    def max_body(self, header: bytes) -> int:
        """Return the bytes of the largest allowed body of a message: it follows from the run's model."""
        try:
            fields = Message(header).read("task", "keep_model")
            client = fields["task"]["client"] if fields["kind"] == "task" else fields["client"]
            task, method = self._build_task(fields["run"], fields["recipe"], client)
            size = nbytes(task.model.parameters) + nbytes(task.model.buffers)
            others = task.split.clients if method.keeps_uploads else 0  # whose models are in the message
            return (4 + others) * size + MARGIN
        except Exception:
            return MARGIN

    def _run_task(self, header: Mapping[str, Any], body: bytes) -> Message:
        client_task = protocol.read_task(header)
        run, base = header["run"], _read_receipt(header["base"])
        task, method = self._build_task(run, header["recipe"], client_task.client)
        private = self.store.read(run, base)
        with deterministic_section():
            result = run_client(task, method, client_task, decode(body), private)
        receipt = None
        if result.private:
            keep = [int(round_) for round_ in header["keep"]]
            receipt = self.store.write(run, base, keep, client_task.round, result.private)
        return protocol.result_message(result, receipt)

    def _build_task(self, run: str, recipe: Mapping[str, Any], client: int) -> tuple[Task, Method]:
        """Check the server's request before anything is built from it; return the task and the method."""
        if not isinstance(run, str) or not re.fullmatch(r"[\w.-]{1,64}", run, re.ASCII):
            raise ProtocolError("the identifier of the run does not have the right form")
        key = f"{run} {client} {json.dumps(recipe, sort_keys=True)}"
        if self._task is None or self._task[0] != key:
            if recipe["data_spec"] != self.spec.sha256:
                raise DataMismatchError("data.json of the federation is not that of this node's invitation")
            method_name, model = self._require_allowed(recipe)
            self.store.register_run(run, client, recipe["method"], _recipe_identity(recipe))
            task, method = build_task(recipe, client, self.federated, method_name, model)
            sends, keeps = (", ".join(names) or "nothing" for names in (method.sends, method.keeps))
            LOG.info("run %s: %s; this node sends %s and keeps %s", run, recipe["method"], sends, keeps)
            backends.warm_up_kernels(task, LOG.info)
            self._task = key, task, method
        return self._task[1:]

    def _require_allowed(self, recipe: Mapping[str, Any]) -> tuple[str, ModelSource]:
        """Return the method's name and the model's source, with references to the owner's own files.

        Raises:
            NotAllowedError: The method or model is not built in, and the owner did not name its file.
        """
        method, model = str(recipe["method"]), str(recipe["options"]["model"])
        base_name = method.partition("+")[0].partition("(")[0].strip().lower()
        source: ModelSource = model
        if is_file_reference(model):
            source = load_builder(self._find_allowed_file("model", model, recipe))
        reference = methods.file_reference(method)
        if reference:
            method = method.replace(reference, self._find_allowed_file("method", reference, recipe), 1)
        elif base_name not in METHODS.builtin or (self.methods and base_name not in self.methods):
            allowed = ", ".join(sorted(self.methods or METHODS.builtin))
            raise NotAllowedError(f"the server requests method '{method}'; allowed here: {allowed}")
        return method, source

    def _find_allowed_file(self, kind: str, reference: str, recipe: Mapping[str, Any]) -> str:
        """Return the owner's `FILE.py:NAME` whose content is that of the server's file."""
        stored = StoredSource.from_json(recipe["sources"], kind)
        _, name = user_code.split_reference(reference)
        for allowed in self.allowed_files:
            path = expand_path(user_code.split_reference(allowed)[0])
            if stored and user_code.content_sha256(kind, path) == stored.sha256:
                user_code.check_content(kind, path, stored)
                return f"{path}:{name}" if name else str(path)
        raise NotAllowedError(
            f"the server requests the {kind} '{reference}', a Python file; "
            f"allowed here by --allow-file: {', '.join(self.allowed_files) or 'none'}"
        )

    def _keep_model(self, header: Mapping[str, Any], body: bytes) -> Message:
        keys = ("run", "client", "recipe", "round", "base", "adapt_epochs")
        description = {key: header[key] for key in keys}
        epochs = 0 if header["adapt_epochs"] is None else header["adapt_epochs"]
        if not all(type(n) is int and 0 <= n < 2**31 for n in (header["round"], epochs)):
            raise ProtocolError("a field of the model does not have the right form")
        self._build_task(header["run"], header["recipe"], header["client"])
        self.store.read(header["run"], _read_receipt(header["base"]))
        decode(body)
        self.store.keep_model(header["run"], json.dumps(description), body)
        LOG.info("the model of run %s, round %s, is stored", header["run"], header["round"])
        return Message.build("kept", {})

    def last_run(self) -> str:
        """Return the identifier of the last run."""
        runs = self.store.runs()
        if not runs:
            raise InvalidInputError("this node has taken part in no run yet")
        return runs[-1].run

    def load_model(self, run: str) -> ClientModel:
        """Return this client's model of the best round of a run that has ended, without the server."""
        text, message = self.store.model(run)
        stored = json.loads(text)
        client = stored["client"]
        task, method = self._build_task(run, stored["recipe"], client)
        client_task = ClientTask(client, stored["round"] + 1, adapt_epochs=stored["adapt_epochs"])
        private = self.store.read(run, _read_receipt(stored["base"]))
        with deterministic_section():
            trainer, state = build_inference_model(task, method, client_task, decode(message), private)
        description = {
            "run": run, "method": stored["recipe"]["method"], "data": self.federated.options.data,
            "model": stored["recipe"]["options"]["model"], "client": client, "client_name": str(client),
            "round": stored["round"], "labels": list(self.spec.labels), "remark": "",
        }  # fmt: skip
        return make_client_model(trainer, state, method, self.spec.preprocessing, description)


@contextmanager
def open_node(
    folder: Path,
    data_name: str,
    spec: DataSpec,
    methods: Collection[str] = (),
    allowed_files: Sequence[str] = (),
    *,
    wait_seconds: float = 0.0,
) -> Iterator[Node]:
    """Open a node in its state folder, which one process at a time can use.

    The arguments are those of `Node`, and the seconds in which another process may end.

    Raises:
        InvalidInputError: Another process uses the folder.
    """
    make_private_folder(folder)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise InvalidInputError(f"another process uses the state folder '{folder}'; choose another") from None
    try:
        node = Node(folder, data_name, spec, methods, allowed_files)
        settings = {
            "data": _absolute_data_name(data_name),
            "spec": spec.to_json(),
            "allowed_files": [
                str(expand_path(user_code.split_reference(file)[0]).absolute()) for file in allowed_files
            ],
        }
        write_private_file(folder / SETTINGS_FILE, json.dumps(settings).encode())
        with closing(node.store):
            yield node
    finally:
        lock.release()


@contextmanager
def reopen_node(folder: Path) -> Iterator[Node]:
    """Open a node that took part before, with the data that it had; it may be taking part at the same time.

    Raises:
        InvalidInputError: The folder is not the state folder of a node.
    """
    try:
        settings = read_json_file(folder / SETTINGS_FILE)
        spec, files = DataSpec.from_json(settings["spec"]), settings["allowed_files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidInputError(f"'{folder}' is not the state folder of a node") from None
    node = Node(folder, settings["data"], spec, allowed_files=files)
    with closing(node.store):
        yield node


def build_task(
    recipe: Mapping[str, Any], client: int, federated: FederatedData, method_name: str, model: ModelSource
) -> tuple[Task, Method]:
    """Return the node's task, with its own rows and the sizes of the others, and the method.

    Args:
        recipe: The server's values, see `make_recipe`.
        client: Number of this client.
        federated: The node's data as one client.
        method_name: The method, in a file of this machine if it is not built in.
        model: The model, as `method_name`.

    Raises:
        DataMismatchError: The node has other numbers of samples than at the run's start.
        InitialModelError: The initial model differs from the server's.
    """
    try:
        options = Config(**recipe["options"])
        method = parse_name(method_name).build(recipe["method_options"], force=True)
        sizes = {part: [int(n) for n in recipe["sizes"][part]] for part in ("train", "test")}
        parts = {"train": federated.split.train[0], "test": federated.split.test[0]}
        for part, indices in parts.items():
            if sizes[part][client] != len(indices):
                raise DataMismatchError(
                    f"the run began with {sizes[part][client]} {part} samples; got {len(indices)}"
                )
            others = sizes[part][:client] + sizes[part][client + 1 :]
            largest = MAX_SAMPLES if method.uses_sample_counts else 1
            if not all(0 <= n <= largest for n in others) or sum(others) > MAX_SAMPLES:
                raise ProtocolError("the recipe of the run has sizes of clients that are not allowed")
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ProtocolError("the recipe of the run does not have the right form") from error
    split = Split(*(_insert_rows(sizes[part], client, parts[part]) for part in ("train", "test")))
    if options.last_test_batch == "drop":
        split = split.with_whole_test_batches(options.batch_size)
    if options.validation:
        split = split.with_validation(options.validation)
    dataset = federated.dataset
    split_model = models.build_model(
        model, dataset.example(), dataset.classes, options.cut, options.seed, words=dataset.num_words
    )
    if sha256(split_model.parameters) != recipe["initial_model"]:
        raise InitialModelError(
            "the initial model differs from the server's: other versions of torch or feddbe"
        )
    task = Task(
        split_model,
        dataset,
        split,
        make_training(options),
        options.seed,
        options.rounds or 0,
        options.new_clients,
    )
    return task, method


def _insert_rows(sizes: list[int], client: int, indices: Indices) -> RaggedArray:
    """Return arrays of these sizes with the client's indices; those of the others are `REMOTE`."""
    arrays = RaggedArray.from_sizes(sizes)
    start = sum(sizes[:client])
    flat = arrays.flat.copy()
    flat[start : start + len(indices)] = indices
    return RaggedArray(flat, np.array(sizes, np.int64))


def _absolute_data_name(data_name: str) -> str:
    """Return the name of the data with an absolute path, so that `export` can start in any folder."""
    location, mark, query = data_name.partition("?")
    path = expand_path(location)
    is_path = find_builtin_dataset(data_name) is None and path.exists()
    return f"{path.absolute()}{mark}{query}" if is_path else data_name


def _read_secret(path: Path) -> bytes:
    """Return the key of this node's fingerprints, which outlives invitations."""
    if not path.exists():
        write_private_file(path, secrets.token_bytes(32))
    return path.read_bytes()


def _read_receipt(value: Any) -> Receipt | None:
    return None if value is None else Receipt(int(value[0]), str(value[1]))
