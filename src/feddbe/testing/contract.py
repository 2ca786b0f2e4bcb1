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
from feddbe.config.parameters import kind_of, written
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.errors import BadInput, FeddbeError
from feddbe.methods.base import Method, Names, refused
from feddbe.methods.registry import METHODS, parse, spelled, takes
from feddbe.metrics.records import ALL
from feddbe.results.document import Entry
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import FILE, Store
from feddbe.simulation import engines, loop
from feddbe.simulation.client import Job, Reply
from feddbe.simulation.engines.base import ClientStates, Engine, Messages
from feddbe.simulation.engines.registry import Serial
from feddbe.state import State, decode, matches


def samples(sizes: Sequence[int] = (60, 44, 28)) -> Dataset:
    """The first digits, with a client column: sizes[i] samples for client i."""
    whole = digits.load()
    n = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset("tiny", whole.x[:n], whole.y[:n], whole.classes, whole.scale, whole.shift, client)


def experiment(name: str, dataset: Dataset | None = None, **options: Any) -> Experiment:
    """Two rounds of this method among the three clients."""
    chosen = {"partition": "natural", "model": "mlp", "rounds": 2, "lr": 0.1, **options}
    return resolve(name, Config(**chosen), dataset=dataset or samples())


class Outcome(NamedTuple):
    """What a run leaves."""

    server: State
    clients: dict[int, State]
    entries: list[Entry]


def carry_out(experiment: Experiment, folder: Path, engine: Engine) -> Outcome:
    """Begin the run in `folder`, or continue it, with this engine."""
    if Store.is_run(folder):
        store = Store.open(folder)
    else:
        store = Store.create(
            folder, {"config_hash": experiment.config_hash}, loop.initial_server_state(experiment)
        )
    try:
        loop.run_experiment(experiment, store, engine)
        return Outcome(store.server(), dict(store.clients()), store.entries())
    finally:
        store.close()


def outcome(experiment: Experiment, folder: Path, engine: str = "serial") -> Outcome:
    """The same with an engine made for it."""
    made = engines.make(engine, experiment.task, experiment.method)
    try:
        return carry_out(experiment, folder, made)
    finally:
        made.close()


def measured(
    store: Store, round: int, name: str = "accuracy", moment: str = "before"
) -> dict[int, float | None]:
    """What each client measured."""
    rows = [row for row in store.rows(round) if (row.moment, row.name) == (moment, name)]
    return {row.client: row.value for row in rows if row.client != ALL}


def states(folder: Path) -> list[tuple[Any, ...]]:
    """All states in a run's file as they lie there: the server's, the clients', those of the best entry."""
    db = sqlite3.connect(folder / FILE)
    found = db.execute("SELECT kind, client, round, crc, state FROM states ORDER BY kind, client").fetchall()
    db.close()
    return found


def same_bits(a: State, b: State) -> bool:
    """Names, types and all bits equal."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class Recorder(Serial):
    """The serial engine, which remembers every message and every private state."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment.task, experiment.method)
        self.messages: list[State] = []
        self.private: list[State] = []

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        self.messages += [messages.to(job.client) for job in jobs]
        for reply in super().run(jobs, messages, _Tap(states, self.private.append)):
            self.messages.append(reply.up)
            yield reply


class _Tap(ClientStates):
    def __init__(self, inner: ClientStates, tell: Callable[[State], None]) -> None:
        self.inner, self.tell = inner, tell

    def read(self, client: int) -> bytes | None:
        return self.inner.read(client)

    def stage(self, client: int, state: bytes) -> None:
        self.tell(decode(state))
        self.inner.stage(client, state)

    def stamp(self, client: int) -> Hashable:
        return self.inner.stamp(client)


def check(
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
    name = spelled(made)
    with tempfile.TemporaryDirectory(prefix="feddbe-check-") as folder:
        tried = []
        for addon in ("", *(takes(type(made)) if addons is None else addons)):
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
    except BadInput:
        raise
    except FeddbeError as error:
        after = f" (after: {', '.join(done)})" if done else ""
        raise AssertionError(f"{spec}: {error}{after}") from error
    return done


def _instance(method: type[Method] | Method | str) -> Method:
    if isinstance(method, str):
        if method not in METHODS:
            raise BadInput(f"'{method}' is not the name of a method; as in fedavg or my_method.py:MyProx")
        return METHODS[method]()
    return method() if isinstance(method, type) and issubclass(method, Method) else method


def _one(spec: str, engines: Sequence[str], folder: Path) -> Iterator[str]:
    """Of a method with or without an add-on, what was tried."""
    for number, engine in enumerate(engines):
        engines_agree(spec, folder / f"engine-{number}", engine)
        yield f"same bits on {engine}"
    continues(spec, folder / "continued")
    yield "when continued after each round"
    if CAN_KILL:
        survives_a_kill(spec, folder / "kill")
        yield "after kill -9"
    keeps_secrets(spec, folder / "secrets")
    yield "no secret sent"
    part_of_the_clients(spec, folder / "part")
    yield "part of the clients"
    for sizes in ((60, 4), (40,)):
        few(spec, folder / f"few-{len(sizes)}", sizes)
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
        raise BadInput(f"{cls.name} has no option '{given}'; it has: {', '.join(fields) or 'none'}")
    for key, field in fields.items():
        base = dataclasses.replace(method, **beside.get(key, {}))
        now = getattr(base, key)

        def taken(value: Any, base: Method = base, key: str = key) -> bool:
            try:
                return bool(dataclasses.replace(base, **{key: value}))
            except BadInput:
                return False

        chosen = values[key] if key in values else others(field, now, taken)
        if not chosen and key not in values:
            raise AssertionError(
                f"{cls.name}: which values {key} takes is not known; say values={{'{key}': [...]}}"
            )
        plain = outcome(experiment(spelled(base), rounds=rounds), folder / key)
        for value in chosen:
            e = experiment(spelled(dataclasses.replace(base, **{key: value})), rounds=rounds)
            if not moved(plain, outcome(e, folder / f"{key}-{value}")):
                raise AssertionError(
                    f"{cls.name}: {key} = {written(value)} changes nothing against {written(now)} in "
                    f"{rounds} rounds; if it acts only beside others, say so: beside={{'{key}': {{...}}}}"
                )
            yield f"{key} ({written(now)}, {written(value)})"


CAN_KILL = sys.platform == "linux"
"""Whether `survives_a_kill` can be tried here."""
_PURE = "what it does may depend on its arguments only, and on local.stream or ctx.stream where it is random"


def engines_agree(name: str, folder: Path, engine: str) -> None:
    """Wherever clients work, whoever is first: server, clients and accuracies as one after another."""
    e = experiment(name, join=_share(name))
    serial, other = outcome(e, folder / "serial"), outcome(e, folder / "other", engine)
    if what := _difference(serial, other):
        raise AssertionError(f"{name}: on {engine} {what} is not what it is on serial; {_PURE}")


def continues(name: str, folder: Path) -> None:
    """A run continued after each round is the same run: nothing is carried in memory from round to round that
    is not in the file, and all states are in it, the last ones and those of the best entry."""
    whole = outcome(experiment(name, rounds=3, join=_share(name)), folder / "whole")
    for rounds in range(4):
        parts = outcome(experiment(name, rounds=rounds, join=_share(name)), folder / "parts")
    if what := _difference(whole, parts):
        raise AssertionError(f"{name}: continued after each round, {what} is another; {_PURE}")
    _require(
        states(folder / "whole") == states(folder / "parts"), f"{name}: continued, the best round differs"
    )


def survives_a_kill(name: str, folder: Path) -> None:
    """kill -9 in the middle of the second round: the run continues, in a process that knows nothing of it."""
    e = experiment(name, rounds=3, join=_share(name))
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(name, folder / "killed"))
    child.start()
    child.join()
    _require(child.exitcode == -signal.SIGKILL, f"{name}: a run in another process failed ({child.exitcode})")
    killed = outcome(e, folder / "killed")
    if what := _difference(outcome(e, folder / "whole"), killed):
        raise AssertionError(f"{name}: killed and continued, {what} is another; {_PURE}")


class _Deadly(Serial):
    """Ends its process in round 2, after the first reply."""

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        for reply in super().run(jobs, messages, states):
            if jobs[0].round == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield reply


def _killed(name: str, folder: Path) -> None:
    e = experiment(name, rounds=3, join=_share(name))
    engine: Engine = _Deadly(e.task, e.method)
    carry_out(e, folder, engine)


def keeps_secrets(name: str, folder: Path) -> None:
    """That names are as declared is checked in every call; here are the values."""
    e = experiment(name)
    recorder = Recorder(e)
    carry_out(e, folder, recorder)
    for leak in leaks(recorder, e.method.secret):
        raise AssertionError(f"{name}: a secret is sent: {leak}")
    for secret in refused(e.method.secret, e.method.keeps, e.task.model):
        raise AssertionError(f"{name}: '{secret}' is secret, but not in what it keeps")
    kept = {n for state in recorder.private for n in state}
    for pattern in e.method.keeps:
        does = any(matches(n, [pattern]) for n in kept)
        _require(does, f"{name}: it says that it keeps '{pattern}', and does not")


def leaks(recorder: Recorder, secret: Names) -> list[str]:
    """Secret names, and secret values of eight entries or more, that occur in any message."""
    found = [n for message in recorder.messages for n in message if matches(n, secret)]
    secrets = {
        f"{name} of state {i}": t.contiguous().numpy().tobytes()
        for i, state in enumerate(recorder.private)
        for name, t in state.items()
        if matches(name, secret) and t.numel() >= 8
    }
    for message in recorder.messages:
        for sent, tensor in message.items():
            data = tensor.contiguous().numpy().tobytes()
            found += [f"{name} in {sent}" for name, secret in secrets.items() if secret in data]
    return found


def part_of_the_clients(name: str, folder: Path) -> None:
    """One of ten per round; eight clients never take part and are evaluated all the same. A method that needs
    all of them says so."""
    ten = samples([24] * 10)
    if parse(name).needs_all:
        try:
            experiment(name, ten, join=0.1)
        except BadInput as error:
            _require(parse(name).needs_all in str(error), f"{name}: {error}")
            return
        raise AssertionError(f"{name} needs all clients, and is run with a tenth of them")
    ran = outcome(experiment(name, ten, join=0.1), folder)
    joined = {c for t in (1, 2) for c in seeds.cohort(0, t, 10, 0.1)}
    for client in sorted(ran.clients.keys() - joined):
        raise AssertionError(f"{name}: client {client} never took part, and has a state")
    store = Store.open(folder)
    tested = [measured(store, entry).keys() for entry in range(3)]
    store.close()
    _require(all(who == set(range(10)) for who in tested), f"{name}: not every client is evaluated")


def few(name: str, folder: Path, sizes: Sequence[int]) -> None:
    """A client with less than a batch, or one client alone."""
    ran = outcome(experiment(name, samples(sizes)), folder)
    for key, tensor in ran.server.items():
        finite = bool(torch.isfinite(tensor).all())
        _require(finite, f"{name}: '{key}' is not finite, with clients of {(*sizes,)} samples")
    _require(all(entry["accuracy"] for entry in ran.entries), f"{name}: a round has no accuracy")


def moved(one: Outcome, other: Outcome) -> bool:
    """Whether two runs left different states: an option that does nothing would pass all other checks."""
    return not same_bits(one.server, other.server) or any(
        not same_bits(one.clients[c], other.clients[c]) for c in one.clients
    )


def others(
    field: dataclasses.Field[Any], now: Any, taken: Callable[[Any], bool] = lambda value: True
) -> list[Any]:
    """Other values of an option than the one in force: all choices, or one that is `taken`."""
    if field.metadata["choices"]:
        return [c for c in field.metadata["choices"] if c != now]
    tries: list[Any] = []
    if now is None:
        tries = [2, 1] if kind_of(field)[0] == "int" else [0.01, 0.5]
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
    return 1.0 if parse(name).needs_all else 0.67


def _difference(wanted: Outcome, found: Outcome) -> str:
    """The first thing that is not as it should be, in words."""
    pairs: list[tuple[str, State, State]] = [("the server's state", wanted.server, found.server)]
    for client in sorted(wanted.clients.keys() | found.clients.keys()):
        a, b = wanted.clients.get(client, {}), found.clients.get(client, {})
        pairs.append((f"the state of client {client}", a, b))
    for what, a, b in pairs:
        if not same_bits(a, b):
            names = [n for n in a if n not in b or not torch.equal(a[n], b[n])] or sorted(b.keys() - a.keys())
            return f"{what} ('{names[0]}')" if names else what
    timeless = [[{**entry, "seconds": 0} for entry in o.entries] for o in (wanted, found)]
    return "" if timeless[0] == timeless[1] else "what clients measured"
