"""The contract that every method must fulfil, as checks: `feddbe.testing.check(MyProx)`."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from feddbe import seeds
from feddbe.config.options import Config
from feddbe.config.parameters import format_value, value_type
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.data.registry import dataset_from_object, load_dataset
from feddbe.errors import FeddbeError, InvalidInputError
from feddbe.methods.base import Method, Names, undeclared_names
from feddbe.methods.registry import METHODS, format_name, parse_method, supported_addons
from feddbe.metrics.client_values import ALL
from feddbe.models.registry import ModelSource
from feddbe.results.document import RoundResult
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RUN_FILE, RunStore
from feddbe.simulation import engines, loop
from feddbe.simulation.client import ClientResult, ClientTask
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.state import State, decode, matches_pattern


class Problem(NamedTuple):
    """Data and model with which methods are checked."""

    dataset: Dataset | None = None
    """Data from which small clients are built; None: digits."""
    model: ModelSource | None = None
    """Model; None: a perceptron for digits, and the default model for other data."""


DIGITS = Problem()


def make_dataset(sizes: Sequence[int] = (60, 44, 28), problem: Problem = DIGITS) -> Dataset:
    """Return a data set with a client column: sizes[i] samples for client i."""
    n = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    whole = problem.dataset
    if whole is None:
        whole = digits.load()
        return Dataset("tiny", whole.x[:n], whole.y[:n], whole.classes, whole.scale, whole.shift, client)
    # a permutation, because data in files is often sorted by label
    indices = np.random.RandomState(0).permutation(len(whole))[np.arange(n) % len(whole)]
    return dataclasses.replace(
        whole,
        x=whole.x[indices],
        y=whole.y[indices],
        client=client,
        split=None,
        client_names=(),
        known_sha256={},
    )


def make_experiment(
    name: str, dataset: Dataset | None = None, problem: Problem = DIGITS, **options: Any
) -> Experiment:
    """Return two rounds of this method, by default with three clients."""
    config: dict[str, Any] = {"partition": "natural", "rounds": 2}
    if problem == DIGITS:
        config |= {"model": "mlp", "lr": 0.1}
    dataset = dataset or make_dataset(problem=problem)
    return resolve(name, Config(**config | options), dataset=dataset, model=problem.model)


class Outcome(NamedTuple):
    """Result of a run: the states and the results of all rounds."""

    server: State
    clients: dict[int, State]
    rounds: list[RoundResult]


def run_recorded(experiment: Experiment, folder: Path, engine: Engine) -> Outcome:
    """Start or resume the run in `folder` with this engine and return its outcome."""
    if RunStore.is_run(folder):
        store = RunStore.open(folder)
    else:
        store = RunStore.create(
            folder, {"config_hash": experiment.config_hash}, loop.initial_server_state(experiment)
        )
    try:
        loop.run_experiment(experiment, store, engine)
        return Outcome(store.server_state(), dict(store.private_states()), store.round_results())
    finally:
        store.close()


def run_outcome(experiment: Experiment, folder: Path, engine: str = "serial") -> Outcome:
    """Start or resume the run in `folder` with the engine of this name and return its outcome."""
    with closing(engines.create_engine(engine, experiment.task, experiment.method)) as instance:
        return run_recorded(experiment, folder, instance)


def client_values(
    store: RunStore, round_: int, name: str = "accuracy", moment: str = "before"
) -> dict[int, float | None]:
    """Return the value of a metric for each client."""
    records = [record for record in store.records(round_) if (record.moment, record.name) == (moment, name)]
    return {record.client: record.value for record in records if record.client != ALL}


def read_states(folder: Path) -> list[tuple[Any, ...]]:
    """Return all states in a run's file: the server's, the clients', and those of the best round."""
    query = "SELECT kind, client, round, crc, state FROM states ORDER BY kind, client"
    with closing(sqlite3.connect(folder / RUN_FILE)) as db:
        return db.execute(query).fetchall()


def are_identical(a: State, b: State) -> bool:
    """Return True if names, types and all bits are equal."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class MessageRecorder(SerialEngine):
    """A serial engine that records every message and every private state."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment.task, experiment.method)
        self.messages: list[State] = []
        self.private: list[State] = []

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        self.messages += [messages.message_for(task.client) for task in tasks]
        for result in super().run(tasks, messages, _RecordedStates(states, self.private)):
            self.messages.append(result.upload)
            yield result


class _RecordedStates(ClientStates):
    """Client states that append every written state to a list."""

    def __init__(self, inner: ClientStates, written: list[State]) -> None:
        self.inner = inner
        self.written = written

    def read(self, client: int) -> bytes | None:
        return self.inner.read(client)

    def write_pending(self, client: int, state: bytes) -> None:
        self.written.append(decode(state))
        self.inner.write_pending(client, state)

    def version(self, client: int) -> Hashable:
        return self.inner.version(client)


def check(
    method: type[Method] | Method | str,
    *,
    model: ModelSource | None = None,
    data: Any = None,
    engines: Sequence[str] = ("pool(workers=2)",),
    addons: Sequence[str] | None = None,
    prerequisites: Mapping[str, Mapping[str, Any]] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
    rounds: int = 2,
) -> list[str]:
    """Check the guarantees that feddbe gives for every method, with a few small clients.

    Args:
        method: A class, an instance with other options than the defaults, or a name as in `my.py:MyProx`.
        model: A model as in `feddbe.run`; by default a perceptron, or the default model for `data`.
        data: Data as in `feddbe.run`, of which each client gets a few samples; by default digits.
        engines: Engines that must give the same bits as serial.
        addons: Add-ons with which the method is checked, besides alone; by default all that it supports.
        prerequisites: Options that must be set for an option to have an effect, by option.
        values: Other values of an option that are tried, by option.
        rounds: Number of rounds within which another value of an option must change the states.

    Returns:
        A line for each combination with the checks that passed.

    Raises:
        AssertionError: A guarantee does not hold; the message is one line.
    """
    instance = _instance(method)
    name = format_name(instance)
    dataset = load_dataset(data) if isinstance(data, str | Path) else dataset_from_object(data)
    problem = Problem(dataset, model)
    names_of_addons = supported_addons(type(instance)) if addons is None else addons
    lines = []
    with tempfile.TemporaryDirectory(prefix="feddbe-check-") as root:
        folder = Path(root)
        for addon in ("", *names_of_addons):
            spec = f"{name}+{addon}" if addon else name
            passed = _collect(spec, _check_combination(spec, engines, folder / f"with {addon}", problem))
            lines.append(f"{spec}: {', '.join(passed)}")
        options = _collect(
            name, _check_options(instance, folder, prerequisites or {}, values or {}, rounds, problem)
        )
    lines.append(f"{name}: options that act: {', '.join(options) or 'it has none'}")
    return lines


def _collect(spec: str, checks: Iterator[str]) -> list[str]:
    """Return the passed checks; a run that ends in an error, such as divergence, is a failed check."""
    passed: list[str] = []
    try:
        for check in checks:
            passed.append(check)
    except InvalidInputError:
        raise
    except FeddbeError as error:
        after = f" (after: {', '.join(passed)})" if passed else ""
        reason = str(error).removeprefix(f"{spec}: ")
        raise AssertionError(f"{spec}: {reason}{after}") from error
    return passed


def _instance(method: type[Method] | Method | str) -> Method:
    if isinstance(method, str):
        if method not in METHODS:
            raise InvalidInputError(
                f"'{method}' is not the name of a method; as in fedavg or my_method.py:MyProx"
            )
        return METHODS[method]()
    return method() if isinstance(method, type) and issubclass(method, Method) else method


def _check_combination(spec: str, engines: Sequence[str], folder: Path, problem: Problem) -> Iterator[str]:
    """Check a method with or without an add-on; yield the passed checks."""
    for number, engine in enumerate(engines):
        check_engines(spec, folder / f"engine-{number}", engine, problem)
        yield f"same bits on {engine}"
    check_resume(spec, folder / "resumed", problem)
    yield "when resumed after each round"
    if CAN_KILL:
        check_kill(spec, folder / "kill", problem)
        yield "after kill -9"
    check_secrets(spec, folder / "secrets", problem)
    yield "no secret sent"
    check_partial_participation(spec, folder / "part", problem)
    yield "part of the clients"
    for sizes in ((60, 4), (40,)):
        check_small_clients(spec, folder / f"few-{len(sizes)}", sizes, problem)
    yield "few samples"


def _check_options(
    method: Method,
    folder: Path,
    prerequisites: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Sequence[Any]],
    rounds: int,
    problem: Problem,
) -> Iterator[str]:
    """Check that every option of the method has an effect; yield each with its values."""
    cls = type(method)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in sorted({*prerequisites, *values} - fields.keys()):
        raise InvalidInputError(f"{cls.name} has no option '{key}'; it has: {', '.join(fields) or 'none'}")
    for key, field in fields.items():
        base = dataclasses.replace(method, **prerequisites.get(key, {}))
        current = getattr(base, key)

        def is_allowed(value: Any, base: Method = base, key: str = key) -> bool:
            try:
                return bool(dataclasses.replace(base, **{key: value}))
            except InvalidInputError:
                return False

        other_values = values[key] if key in values else list_other_values(field, current, is_allowed)
        if not other_values and key not in values:
            raise AssertionError(
                f"{cls.name}: the allowed values of {key} are not known; pass values={{'{key}': [...]}}"
            )
        base_outcome = run_outcome(
            make_experiment(format_name(base), problem=problem, rounds=rounds), folder / key
        )
        for value in other_values:
            changed = dataclasses.replace(base, **{key: value})
            experiment = make_experiment(format_name(changed), problem=problem, rounds=rounds)
            outcome = run_outcome(experiment, folder / f"{key}-{value}")
            if not outcomes_differ(base_outcome, outcome):
                raise AssertionError(
                    f"{cls.name}: {key} = {format_value(value)} changes nothing against "
                    f"{format_value(current)} in {rounds} rounds; if it acts only with other options, pass "
                    f"prerequisites={{'{key}': {{...}}}}"
                )
            yield f"{key} ({format_value(current)}, {format_value(value)})"


CAN_KILL = sys.platform == "linux"
"""True if `check_kill` works on this system."""
_PURE = "results may depend on arguments only, and on trainer.rng or ctx.rng for random numbers"


def check_engines(name: str, folder: Path, engine: str, problem: Problem = DIGITS) -> None:
    """Check that states and results are the same on another engine as on serial."""
    experiment = make_experiment(name, problem=problem, participation=_participation(name))
    serial = run_outcome(experiment, folder / "serial")
    other = run_outcome(experiment, folder / "other", engine)
    difference = _find_difference(serial, other)
    if difference:
        raise AssertionError(f"{name}: on {engine} {difference} differs from serial; {_PURE}")


def check_resume(name: str, folder: Path, problem: Problem = DIGITS) -> None:
    """Check that a run resumed after each round is the same run.

    All state must be in the file, both the last one and that of the best round; none may be in memory only.
    """
    share = _participation(name)
    uninterrupted = run_outcome(
        make_experiment(name, problem=problem, rounds=3, participation=share), folder / "whole"
    )
    for rounds in range(4):
        resumed = run_outcome(
            make_experiment(name, problem=problem, rounds=rounds, participation=share), folder / "parts"
        )
    difference = _find_difference(uninterrupted, resumed)
    if difference:
        raise AssertionError(f"{name}: resumed after each round, {difference} differs; {_PURE}")
    _require(
        read_states(folder / "whole") == read_states(folder / "parts"),
        f"{name}: resumed, the best round differs",
    )


def check_kill(name: str, folder: Path, problem: Problem = DIGITS) -> None:
    """Check that a run killed in the middle of round 2 resumes in another process with the same result."""
    experiment = make_experiment(name, problem=problem, rounds=3, participation=_participation(name))
    child = multiprocessing.get_context("fork").Process(
        target=_run_until_killed, args=(experiment, folder / "killed")
    )
    child.start()
    child.join()
    _require(child.exitcode == -signal.SIGKILL, f"{name}: a run in another process failed ({child.exitcode})")
    resumed = run_outcome(experiment, folder / "killed")
    difference = _find_difference(run_outcome(experiment, folder / "whole"), resumed)
    if difference:
        raise AssertionError(f"{name}: killed and resumed, {difference} differs; {_PURE}")


class _KillingEngine(SerialEngine):
    """A serial engine that kills its process in round 2, after the first result."""

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for result in super().run(tasks, messages, states):
            if tasks[0].round == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield result


def _run_until_killed(experiment: Experiment, folder: Path) -> None:
    """Run in a forked process; the experiment is the parent's, because OpenMP may not start twice."""
    engine: Engine = _KillingEngine(experiment.task, experiment.method)
    run_recorded(experiment, folder, engine)


def check_secrets(name: str, folder: Path, problem: Problem = DIGITS) -> None:
    """Check that no value of a secret is sent; names of messages are checked in every call."""
    experiment = make_experiment(name, problem=problem)
    method = experiment.method
    recorder = MessageRecorder(experiment)
    run_recorded(experiment, folder, recorder)
    for leak in find_leaks(recorder, method.secret):
        raise AssertionError(f"{name}: a secret is sent: {leak}")
    for secret in undeclared_names(method.secret, method.keeps, experiment.task.model):
        raise AssertionError(f"{name}: '{secret}' is secret, but not declared in keeps")
    kept = {key for state in recorder.private for key in state}
    for pattern in method.keeps:
        is_kept = any(matches_pattern(key, [pattern]) for key in kept)
        _require(is_kept, f"{name}: it declares that it keeps '{pattern}', but does not")


def find_leaks(recorder: MessageRecorder, secret: Names) -> list[str]:
    """Return secret names, and secret values, that occur in any message.

    Values of fewer than eight numbers, or of equal ones such as initial zeros, occur by chance.
    """
    leaks = [name for message in recorder.messages for name in message if matches_pattern(name, secret)]
    secrets = {
        f"{name} of state {number}": tensor.contiguous().numpy().tobytes()
        for number, state in enumerate(recorder.private)
        for name, tensor in state.items()
        if matches_pattern(name, secret) and tensor.numel() >= 8 and tensor.max() > tensor.min()
    }
    for message in recorder.messages:
        for key, tensor in message.items():
            content = tensor.contiguous().numpy().tobytes()
            leaks += [f"{name} in {key}" for name, value in secrets.items() if value in content]
    return leaks


def check_partial_participation(name: str, folder: Path, problem: Problem = DIGITS) -> None:
    """Check a run with one of ten clients per round, of which eight never train but are evaluated.

    A method with `needs_all_clients` must be refused with its reason.
    """
    dataset = make_dataset([24] * 10, problem)
    reason = parse_method(name).needs_all_clients
    if reason:
        try:
            make_experiment(name, dataset, problem, participation=0.1)
        except InvalidInputError as error:
            _require(reason in str(error), f"{name}: {error}")
            return
        raise AssertionError(f"{name} needs all clients, and runs with a tenth of them")
    experiment = make_experiment(name, dataset, problem, participation=0.1)
    outcome = run_outcome(experiment, folder)
    participants = {client for round_ in (1, 2) for client in seeds.sample_cohort(0, round_, 10, 0.1)}
    if experiment.method.has_setup and experiment.task.model.buffers:  # statistics of the setup's training
        participants = set(range(10))
    for client in sorted(outcome.clients.keys() - participants):
        raise AssertionError(f"{name}: client {client} never took part, and has a state")
    with closing(RunStore.open(folder)) as store:
        evaluated = [client_values(store, round_).keys() for round_ in range(3)]
    is_complete = all(clients == set(range(10)) for clients in evaluated)
    _require(is_complete, f"{name}: not every client is evaluated")


def check_small_clients(name: str, folder: Path, sizes: Sequence[int], problem: Problem = DIGITS) -> None:
    """Check a run with clients of these sizes: one with less than a batch, or a single client."""
    outcome = run_outcome(make_experiment(name, make_dataset(sizes, problem), problem), folder)
    for key, tensor in outcome.server.items():
        is_finite = bool(torch.isfinite(tensor).all())
        _require(is_finite, f"{name}: '{key}' is not finite, with clients of {(*sizes,)} samples")
    _require(all(result["accuracy"] for result in outcome.rounds), f"{name}: a round has no accuracy")


def outcomes_differ(first: Outcome, second: Outcome) -> bool:
    """Return True if two runs end with different states."""
    return not are_identical(first.server, second.server) or any(
        not are_identical(first.clients[client], second.clients[client]) for client in first.clients
    )


def list_other_values(
    field: dataclasses.Field[Any], current: Any, is_allowed: Callable[[Any], bool] = lambda value: True
) -> list[Any]:
    """Return other values of an option than the current one: all choices, or one allowed number."""
    if field.metadata["choices"]:
        return [choice for choice in field.metadata["choices"] if choice != current]
    candidates: list[Any] = []
    if current is None:
        candidates = [2, 1] if value_type(field)[0] == "int" else [0.01, 0.5]
    elif isinstance(current, bool):
        candidates = [not current]
    elif isinstance(current, int):
        candidates = [current + 1, current - 1, 2, 1]
    elif isinstance(current, float):
        candidates = [current / 2, 0.25, 0.5, 1.0]
    return [value for value in candidates if value != current and is_allowed(value)][:1]


def _require(holds: bool, message: str) -> None:
    """Raise an AssertionError unless `holds`, also with python -O."""
    if not holds:
        raise AssertionError(message)


def _participation(name: str) -> float:
    """Return the participation of two of three clients, or of all if the method needs them."""
    return 1.0 if parse_method(name).needs_all_clients else 0.67


def _find_difference(expected: Outcome, actual: Outcome) -> str:
    """Return the name of the first difference, or nothing."""
    pairs: list[tuple[str, State, State]] = [("the server's state", expected.server, actual.server)]
    for client in sorted(expected.clients.keys() | actual.clients.keys()):
        states = expected.clients.get(client, {}), actual.clients.get(client, {})
        pairs.append((f"the state of client {client}", *states))
    for title, a, b in pairs:
        if not are_identical(a, b):
            changed = [name for name in a if name not in b or not torch.equal(a[name], b[name])]
            names = changed or sorted(b.keys() - a.keys())
            return f"{title} ('{names[0]}')" if names else title
    expected_rounds = [{**result, "seconds": 0} for result in expected.rounds]
    actual_rounds = [{**result, "seconds": 0} for result in actual.rounds]
    return "" if expected_rounds == actual_rounds else "a metric of the clients"
