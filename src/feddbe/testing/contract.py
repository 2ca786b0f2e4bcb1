"""The tests of every method of feddbe, for yours: `feddbe.testing.check(MyProx)`."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from feddbe import seeds
from feddbe.config.options import Config
from feddbe.config.parameters import format_value, value_type
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.errors import FeddbeError, InvalidInputError
from feddbe.methods.base import Method, Names, undeclared_names
from feddbe.methods.registry import METHODS, format_name, parse_method, supported_addons
from feddbe.metrics.records import ALL
from feddbe.results.document import RoundResult
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import FILE, RunStore
from feddbe.simulation import engines, loop
from feddbe.simulation.client import ClientResult, ClientTask
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine
from feddbe.simulation.engines.registry import Serial
from feddbe.state import State, decode, matches_pattern


def make_samples(sizes: Sequence[int] = (60, 44, 28)) -> Dataset:
    """The first digits, with a client column: sizes[i] samples for client i."""
    whole = digits.load()
    n = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset("tiny", whole.x[:n], whole.y[:n], whole.classes, whole.scale, whole.shift, client)


def make_experiment(name: str, dataset: Dataset | None = None, **options: Any) -> Experiment:
    """Two rounds of this method among the three clients."""
    chosen = {"partition": "natural", "model": "mlp", "rounds": 2, "lr": 0.1, **options}
    return resolve(name, Config(**chosen), dataset=dataset or make_samples())


class Outcome(NamedTuple):
    """What a run leaves."""

    server: State
    clients: dict[int, State]
    entries: list[RoundResult]


def run_recorded(experiment: Experiment, folder: Path, engine: Engine) -> Outcome:
    """Begin the run in `folder`, or continue it, with this engine."""
    if RunStore.is_run(folder):
        store = RunStore.open(folder)
    else:
        store = RunStore.create(
            folder, {"config_hash": experiment.config_hash}, loop.initial_server_state(experiment)
        )
    try:
        loop.run_experiment(experiment, store, engine)
        return Outcome(store.server_state(), dict(store.clients()), store.round_results())
    finally:
        store.close()


def run_outcome(experiment: Experiment, folder: Path, engine: str = "serial") -> Outcome:
    """The same with an engine made for it."""
    made = engines.create_engine(engine, experiment.task, experiment.method)
    try:
        return run_recorded(experiment, folder, made)
    finally:
        made.close()


def stored_records(
    store: RunStore, round: int, name: str = "accuracy", moment: str = "before"
) -> dict[int, float | None]:
    """What each client measured."""
    rows = [row for row in store.records(round) if (row.moment, row.name) == (moment, name)]
    return {row.client: row.value for row in rows if row.client != ALL}


def stored_states(folder: Path) -> list[tuple[Any, ...]]:
    """All states in a run's file as they lie there: the server's, the clients', those of the best entry."""
    db = sqlite3.connect(folder / FILE)
    found = db.execute("SELECT kind, client, round, crc, state FROM states ORDER BY kind, client").fetchall()
    db.close()
    return found


def are_identical(a: State, b: State) -> bool:
    """Names, types and all bits equal."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class MessageRecorder(Serial):
    """The serial engine, which remembers every message and every private state."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment.task, experiment.method)
        self.messages: list[State] = []
        self.private: list[State] = []

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        self.messages += [messages.message_for(job.client) for job in tasks]
        for reply in super().run(tasks, messages, _Tap(states, self.private.append)):
            self.messages.append(reply.upload)
            yield reply


class _Tap(ClientStates):
    def __init__(self, inner: ClientStates, tell: Callable[[State], None]) -> None:
        self.inner, self.tell = inner, tell

    def read(self, client: int) -> bytes | None:
        return self.inner.read(client)

    def write_pending(self, client: int, state: bytes) -> None:
        self.tell(decode(state))
        self.inner.write_pending(client, state)

    def version(self, client: int) -> Hashable:
        return self.inner.version(client)


def check_method(
    method: type[Method] | Method | str,
    *,
    engines: Sequence[str] = ("pool(workers=2)",),
    addons: Sequence[str] | None = None,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
    rounds: int = 2,
) -> list[str]:
    """Try what feddbe promises of every method, among a few small clients with digits and a perceptron, and
    return what was tried, in a line for each combination. What does not hold is an `AssertionError` of one
    line.

    `method`: a class, an instance with other options than the defaults, or a name, as in `my.py:MyProx`. It
    is tried alone and with `addons`; by default with each that it takes. `engines`: each must give the bits
    of serial. Of its options another value must change something within so many `rounds`: `beside` has what
    must be set for one to act (option -> options), `values` the other values to try (option -> values).
    """
    made = _instance(method)
    name = format_name(made)
    with tempfile.TemporaryDirectory(prefix="feddbe-check-") as folder:
        tried = []
        for addon in ("", *(supported_addons(type(made)) if addons is None else addons)):
            spec = f"{name}+{addon}" if addon else name
            words = _told(spec, _one(spec, engines, Path(folder) / f"with {addon}"))
            tried.append(f"{spec}: {', '.join(words)}")
        acting = _told(name, _options(made, Path(folder), beside or {}, values or {}, rounds))
        return [*tried, f"{name}: options that act: {', '.join(acting) or 'it has none'}"]


def _told(spec: str, tries: Iterator[str]) -> list[str]:
    """What was tried. A run that ends in an error, as one that diverges does, is one that fails."""
    done = list[str]()
    try:
        for words in tries:
            done.append(words)
    except InvalidInputError:
        raise
    except FeddbeError as error:
        after = f" (after: {', '.join(done)})" if done else ""
        raise AssertionError(f"{spec}: {error}{after}") from error
    return done


def _instance(method: type[Method] | Method | str) -> Method:
    if isinstance(method, str):
        if method not in METHODS:
            raise InvalidInputError(
                f"'{method}' is not the name of a method; as in fedavg or my_method.py:MyProx"
            )
        return METHODS[method]()
    return method() if isinstance(method, type) and issubclass(method, Method) else method


def _one(spec: str, engines: Sequence[str], folder: Path) -> Iterator[str]:
    """Of a method with or without an add-on, what was tried."""
    for number, engine in enumerate(engines):
        check_engines(spec, folder / f"engine-{number}", engine)
        yield f"same bits on {engine}"
    check_resume(spec, folder / "continued")
    yield "when continued after each round"
    if CAN_KILL:
        check_kill(spec, folder / "kill")
        yield "after kill -9"
    check_secrets(spec, folder / "secrets")
    yield "no secret sent"
    check_partial_participation(spec, folder / "part")
    yield "part of the clients"
    for sizes in ((60, 4), (40,)):
        check_small_clients(spec, folder / f"few-{len(sizes)}", sizes)
    yield "few samples"


def _options(
    method: Method,
    folder: Path,
    beside: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Sequence[Any]],
    rounds: int,
) -> Iterator[str]:
    """Every option does something."""
    cls = type(method)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for given in sorted({*beside, *values} - fields.keys()):
        raise InvalidInputError(f"{cls.name} has no option '{given}'; it has: {', '.join(fields) or 'none'}")
    for key, field in fields.items():
        base = dataclasses.replace(method, **beside.get(key, {}))
        now = getattr(base, key)

        def taken(value: Any, base: Method = base, key: str = key) -> bool:
            try:
                return bool(dataclasses.replace(base, **{key: value}))
            except InvalidInputError:
                return False

        chosen = values[key] if key in values else other_values(field, now, taken)
        if not chosen and key not in values:
            raise AssertionError(
                f"{cls.name}: which values {key} takes is not known; say values={{'{key}': [...]}}"
            )
        plain = run_outcome(make_experiment(format_name(base), rounds=rounds), folder / key)
        for value in chosen:
            e = make_experiment(format_name(dataclasses.replace(base, **{key: value})), rounds=rounds)
            if not check_hyperparameters(plain, run_outcome(e, folder / f"{key}-{value}")):
                raise AssertionError(
                    f"{cls.name}: {key} = {format_value(value)} changes nothing against {format_value(now)} in "
                    f"{rounds} rounds; if it acts only beside others, say so: beside={{'{key}': {{...}}}}"
                )
            yield f"{key} ({format_value(now)}, {format_value(value)})"


CAN_KILL = sys.platform == "linux"
"""Whether `survives_a_kill` can be tried here."""
_PURE = "what it does may depend on its arguments only, and on local.stream or ctx.stream where it is random"


def check_engines(name: str, folder: Path, engine: str) -> None:
    """Wherever clients work, whoever is first: server, clients and accuracies as one after another."""
    e = make_experiment(name, participation=_share(name))
    serial, other = run_outcome(e, folder / "serial"), run_outcome(e, folder / "other", engine)
    if what := _difference(serial, other):
        raise AssertionError(f"{name}: on {engine} {what} is not what it is on serial; {_PURE}")


def check_resume(name: str, folder: Path) -> None:
    """A run continued after each round is the same run: nothing is carried in memory from round to round that
    is not in the file, and all states are in it, the last ones and those of the best entry."""
    whole = run_outcome(make_experiment(name, rounds=3, participation=_share(name)), folder / "whole")
    for rounds in range(4):
        parts = run_outcome(
            make_experiment(name, rounds=rounds, participation=_share(name)), folder / "parts"
        )
    if what := _difference(whole, parts):
        raise AssertionError(f"{name}: continued after each round, {what} is another; {_PURE}")
    _require(
        stored_states(folder / "whole") == stored_states(folder / "parts"),
        f"{name}: continued, the best round differs",
    )


def check_kill(name: str, folder: Path) -> None:
    """kill -9 in the middle of the second round: the run continues, in a process that knows nothing of it."""
    e = make_experiment(name, rounds=3, participation=_share(name))
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(name, folder / "killed"))
    child.start()
    child.join()
    _require(child.exitcode == -signal.SIGKILL, f"{name}: a run in another process failed ({child.exitcode})")
    killed = run_outcome(e, folder / "killed")
    if what := _difference(run_outcome(e, folder / "whole"), killed):
        raise AssertionError(f"{name}: killed and continued, {what} is another; {_PURE}")


class _Deadly(Serial):
    """Ends its process in round 2, after the first reply."""

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for reply in super().run(tasks, messages, states):
            if tasks[0].round == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield reply


def _killed(name: str, folder: Path) -> None:
    e = make_experiment(name, rounds=3, participation=_share(name))
    engine: Engine = _Deadly(e.task, e.method)
    run_recorded(e, folder, engine)


def check_secrets(name: str, folder: Path) -> None:
    """That names are as declared is checked in every call; here are the values."""
    e = make_experiment(name)
    recorder = MessageRecorder(e)
    run_recorded(e, folder, recorder)
    for leak in find_leaks(recorder, e.method.secret):
        raise AssertionError(f"{name}: a secret is sent: {leak}")
    for secret in undeclared_names(e.method.secret, e.method.keeps, e.task.model):
        raise AssertionError(f"{name}: '{secret}' is secret, but not in what it keeps")
    kept = {n for state in recorder.private for n in state}
    for pattern in e.method.keeps:
        does = any(matches_pattern(n, [pattern]) for n in kept)
        _require(does, f"{name}: it says that it keeps '{pattern}', and does not")


def find_leaks(recorder: MessageRecorder, secret: Names) -> list[str]:
    """Secret names, and secret values of eight entries or more, that occur in any message."""
    found = [n for message in recorder.messages for n in message if matches_pattern(n, secret)]
    secrets = {
        f"{name} of state {i}": t.contiguous().numpy().tobytes()
        for i, state in enumerate(recorder.private)
        for name, t in state.items()
        if matches_pattern(name, secret) and t.numel() >= 8
    }
    for message in recorder.messages:
        for sent, tensor in message.items():
            data = tensor.contiguous().numpy().tobytes()
            found += [f"{name} in {sent}" for name, secret in secrets.items() if secret in data]
    return found


def check_partial_participation(name: str, folder: Path) -> None:
    """One of ten per round; eight clients never take part and are evaluated all the same. A method that needs
    all of them says so."""
    ten = make_samples([24] * 10)
    if parse_method(name).needs_all_clients:
        try:
            make_experiment(name, ten, participation=0.1)
        except InvalidInputError as error:
            _require(parse_method(name).needs_all_clients in str(error), f"{name}: {error}")
            return
        raise AssertionError(f"{name} needs all clients, and is run with a tenth of them")
    ran = run_outcome(make_experiment(name, ten, participation=0.1), folder)
    joined = {c for t in (1, 2) for c in seeds.sample_cohort(0, t, 10, 0.1)}
    for client in sorted(ran.clients.keys() - joined):
        raise AssertionError(f"{name}: client {client} never took part, and has a state")
    store = RunStore.open(folder)
    tested = [stored_records(store, entry).keys() for entry in range(3)]
    store.close()
    _require(all(who == set(range(10)) for who in tested), f"{name}: not every client is evaluated")


def check_small_clients(name: str, folder: Path, sizes: Sequence[int]) -> None:
    """A client with less than a batch, or one client alone."""
    ran = run_outcome(make_experiment(name, make_samples(sizes)), folder)
    for key, tensor in ran.server.items():
        finite = bool(torch.isfinite(tensor).all())
        _require(finite, f"{name}: '{key}' is not finite, with clients of {(*sizes,)} samples")
    _require(all(entry["accuracy"] for entry in ran.entries), f"{name}: a round has no accuracy")


def check_hyperparameters(one: Outcome, other: Outcome) -> bool:
    """Whether two runs left different states: an option that does nothing would pass all other checks."""
    return not are_identical(one.server, other.server) or any(
        not are_identical(one.clients[c], other.clients[c]) for c in one.clients
    )


def other_values(
    field: dataclasses.Field[Any], now: Any, taken: Callable[[Any], bool] = lambda value: True
) -> list[Any]:
    """Other values of an option than the one in force: all choices, or one that is `taken`."""
    if field.metadata["choices"]:
        return [c for c in field.metadata["choices"] if c != now]
    tries: list[Any] = []
    if now is None:
        tries = [2, 1] if value_type(field)[0] == "int" else [0.01, 0.5]
    elif isinstance(now, bool):
        tries = [not now]
    elif isinstance(now, int | float):
        tries = [now + 1, now - 1, 2, 1] if isinstance(now, int) else [now / 2, 0.25, 0.5, 1.0]
    return [value for value in tries if value != now and taken(value)][:1]


def _require(holds: bool, otherwise: str) -> None:
    """Not by a statement that python -O leaves out."""
    if not holds:
        raise AssertionError(otherwise)


def _share(name: str) -> float:
    """Two of three clients take part, where a method can do with less than all."""
    return 1.0 if parse_method(name).needs_all_clients else 0.67


def _difference(wanted: Outcome, found: Outcome) -> str:
    """The first thing that is not as it should be, in words."""
    pairs: list[tuple[str, State, State]] = [("the server's state", wanted.server, found.server)]
    for client in sorted(wanted.clients.keys() | found.clients.keys()):
        a, b = wanted.clients.get(client, {}), found.clients.get(client, {})
        pairs.append((f"the state of client {client}", a, b))
    for what, a, b in pairs:
        if not are_identical(a, b):
            names = [n for n in a if n not in b or not torch.equal(a[n], b[n])] or sorted(b.keys() - a.keys())
            return f"{what} ('{names[0]}')" if names else what
    timeless = [[{**entry, "seconds": 0} for entry in o.entries] for o in (wanted, found)]
    return "" if timeless[0] == timeless[1] else "what clients measured"
