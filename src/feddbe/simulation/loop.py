"""The loop between a method and an engine, written to the run's file after every round.

Entry t is what clients deploy after t aggregations. They evaluate it in the call of round t + 1, before they
train (those that do not take part, in a call of their own): a round is one exchange. The last entry is
evaluated in a call without training.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from feddbe import metrics, seeds
from feddbe.callbacks.base import Watch
from feddbe.errors import FeddbeError
from feddbe.methods.base import Method, Upload
from feddbe.metrics.memory import used_mb
from feddbe.metrics.records import ALL, Numbers, Row, rows
from feddbe.metrics.registry import parse
from feddbe.metrics.representations.points import Points, points
from feddbe.results.document import entry, score
from feddbe.simulation.client import BUFFER, Job, Missing, Reply
from feddbe.simulation.engines.base import Engine, Messages
from feddbe.simulation.layout import check_combined, check_stored, layout_of
from feddbe.simulation.participation import who_evaluates, who_prepares
from feddbe.state import State, add_prefix, matches, nbytes, weighted_mean, without
from feddbe.training.task import Context, Task

if TYPE_CHECKING:
    from feddbe.runs.experiment import Experiment
    from feddbe.runs.store import Store

__all__ = [
    "Loop",
    "Watch",
    "apart",
    "asks",
    "chosen_rows",
    "constants",
    "pooled",
    "rows_of",
    "run",
    "sent",
    "start",
    "steady",
]

MOMENTS = ("before", "adapted", "after", "validation")
"""When an entry is measured; the last two are on other than test data."""


def run(experiment: Experiment, store: Store, engine: Engine, watch: Watch | None = None) -> None:
    """Carry the run in `store` on to the number of rounds that the experiment asks for."""
    loop = Loop(experiment, store, engine, watch or Watch())
    with steady():
        loop.watch.begin(experiment.name, store.folder, max(0, store.last_round()), experiment.task.rounds)
        if store.last_round() < 0:
            loop.exchange(0)
        while store.last_round() < experiment.task.rounds and not loop.impatient():
            loop.exchange(store.last_round() + 1)
        loop.evaluate_last()


def start(experiment: Experiment) -> State:
    """The server's state before anything happened."""
    state = experiment.method.server_init(Context(experiment.task, 0))
    if experiment.options.bn_buffers == "average":
        state |= add_prefix(BUFFER, experiment.task.model.buffers)
    return state


class Loop:
    """A run in progress; between rounds only the server's state is in memory."""

    def __init__(self, experiment: Experiment, store: Store, engine: Engine, watch: Watch) -> None:
        self.options, self.store, self.engine, self.watch = experiment.options, store, engine, watch
        self.task, self.method = experiment.task, experiment.method
        self.members = self.task.members
        store.verify()
        self.server = store.server()
        self.layout = layout_of(start(experiment))
        """What the server's state has in every round."""
        check_stored(self.server, self.layout, store.folder)
        self.contacted = store.contacted()
        self.accuracy = {e["round"]: score(e) for e in store.entries() if e["accuracy"]}
        """What the best round is chosen by."""
        self.trainers: set[str] = set(store.meta("trainers") or ())
        self.measures = parse(self.options.measure, ("accuracy",))
        self.places = ("z_g",) if asks(self.measures) else ()
        """What clients show of their models, for pooled measures."""
        self.missing: list[Missing] = []
        """Who did not answer in the last call."""
        self._look_again = 0.0
        last = store.last_round()
        self._untold = [row for row in store.overall() if row.round == last]
        """Of all clients, what has been measured of entries that are not evaluated yet."""

    def exchange(self, round: int) -> None:
        """One round in one transaction. Round 0 is the preparation from theta^0: all clients, or none."""
        start, ctx, store = time.perf_counter(), self._context(round), self.store
        cohort = self._cohort(round)
        with store.transaction(round):
            replies = self._call(ctx, cohort, "train" if round else "prepare")
            missing = len(self.missing)
            if round:
                self._write_evaluation(round - 1, replies, moves=True)
            working = set(cohort)
            replies = [reply for reply in replies if reply.client in working]
            trained = self._net(replies)
            self._write(rows(round, {client: {"training": its} for client, its in trained.items()}))
            new = self._combined(ctx, replies) if replies else self.server
            for reply in replies if self.method.keeps_uploads else ():
                store.keep_upload(reply.client, apart(reply.up)[0])
            store.write_server("last", new)
            self._note_trainers(replies)
            self._watch_memory()
            totals = {n: sum(int(its[n][0]) for its in trained.values()) for n in ("bytes_up", "bytes_down")}
            whole = {"seconds": time.perf_counter() - start, "missing": missing, **totals}
            self._write(Row(round, ALL, "round", n, v, len(replies)) for n, v in whole.items())
        self.server = new
        self.contacted.update(reply.client for reply in replies if round)
        self.watch.round(round, self._latest())
        self._tell(round - 1)

    def evaluate_last(self) -> None:
        """The evaluation that the next round would do, unless it was done already; and what comes after the
        last round: fine-tuning where the method has it, and newcomers."""
        round = self.store.last_round()
        if round not in self.accuracy:
            with self.store.transaction(round):
                ctx = self._context(round + 1)
                self._write_evaluation(round, self._call(ctx, self._cohort(round + 1), "none"))
                self._write_newcomers(ctx)
            self._tell(round)
        self.watch.round(round, self._latest())

    def impatient(self) -> bool:
        """The published stopping rule: more than `patience` evaluations since the best accuracy, itself
        counted."""
        if self.options.patience is None:
            return False
        seen = list(self.accuracy.values())
        return bool(seen) and len(seen) - seen.index(max(seen)) > self.options.patience

    def _cohort(self, round: int) -> list[int]:
        if round == 0:
            return who_prepares(self.method, self.task.seed, self.members)
        return seeds.cohort(self.task.seed, round, self.members, self.options.join)

    def _context(self, round: int) -> Context:
        return Context(self.task, round, self.store.upload if self.method.keeps_uploads else None)

    def _call(
        self, ctx: Context, cohort: list[int], work: Literal["prepare", "train", "none"]
    ) -> list[Reply]:
        """One job for each client that takes part or evaluates."""
        task, options = self.task, self.options
        asked = (
            ()
            if work == "prepare"
            else who_evaluates(options.eval, task.seed, ctx.round, self.members, cohort)
        )
        adapt = {"each": 0, "last": options.adapt_epochs if work == "none" else None}.get(self.method.adapts)
        evaluating, working = set(asked), set(cohort if work != "none" else ())
        again = evaluating & working if options.eval_after and work == "train" else set[int]()
        jobs = [
            Job(
                client,
                ctx.round,
                work if client in working else "none",
                evaluate=client in evaluating,
                adapt=adapt,
                after=client in again,
                measures=self.measures,
                places=self.places,
                rows=chosen_rows(task, client) if self.places else None,
            )
            for client in sorted(evaluating | working)
        ]
        return self._ask(ctx, jobs, prepare=work == "prepare")

    def _ask(self, ctx: Context, jobs: Sequence[Job], *, prepare: bool = False) -> list[Reply]:
        """Send these jobs out with this round's messages; the replies in client order, if they are enough."""
        messages = sent(self.method, ctx, self.server, prepare=prepare)
        replies: list[Reply] = []
        self.missing = []
        for answer in self.engine.run(jobs, messages, self.store):
            if isinstance(answer, Missing):
                self.missing.append(answer)
            else:
                replies.append(answer)
            self.watch.client(len(replies) + len(self.missing), len(jobs))
        self._check_enough(ctx.round, jobs)
        return sorted(replies, key=lambda reply: reply.client)

    def _check_enough(self, round: int, jobs: Sequence[Job]) -> None:
        """Whether to go on without those who are missing. Those who only evaluate are not counted in a round
        in which others work."""
        if not self.missing:
            return
        least, first = self.options.min_replies, self.missing[0]
        working = {job.client for job in jobs if job.work != "none"}
        asked = (working if least else None) or {job.client for job in jobs}
        absent = asked & {missing.client for missing in self.missing}
        why = f"client {first.client} did not answer in round {round} ({first.reason})"
        if self.method.needs_all and absent & working:
            raise FeddbeError(f"{why}; {self.method.base} cannot go on without: {self.method.needs_all}")
        if least is None or len(asked) - len(absent) < min(least, len(asked)):
            raise FeddbeError(
                f"{why}: {len(asked) - len(absent)} of {len(asked)} answered, needed are "
                f"{'all' if least is None else least} (--min-replies); the round is not written, "
                "--resume continues"
            )

    def _combined(self, ctx: Context, replies: list[Reply]) -> State:
        """The server's state after this round; BatchNorm statistics, where sent, are averaged too."""
        server, _ = apart(self.server)
        samples = self.task.samples
        split = [apart(reply.up) for reply in replies]
        uploads = [Upload(r.client, samples[r.client], up) for r, (up, _) in zip(replies, split, strict=True)]
        combine = self.method.combine if ctx.round else self.method.prepared
        weights = [samples[reply.client] for reply in replies]
        new = combine(ctx, server, uploads) | weighted_mean([buffers for _, buffers in split], weights)
        check_combined(new, self.layout, self.method.base, ctx.round)
        return new

    def _net(self, replies: Sequence[Reply]) -> dict[int, Numbers]:
        """What each client's training came to; what is constant is sent to a client once."""
        known = nbytes(constants(self.method, self.server))
        return {
            r.client: r.trained
            | {"bytes_down": (r.trained["bytes_down"][0] - known * (r.client in self.contacted), 1)}
            for r in replies
        }

    def _write_evaluation(self, entry: int, replies: list[Reply], *, moves: bool = False) -> None:
        """What clients measured of this entry, each and over all; the best entry's server state is kept
        (`moves`: another one takes its place in this transaction)."""
        when = "adapted" if self.method.adapts == "each" else "before"
        found = rows(entry, {reply.client: reply.measured for reply in replies})
        self.store.drop_rows(entry, MOMENTS)  # of a run that ended here once and now goes on
        self._write([*found, *(rows_of(entry, replies, self.measures) if self.places else ())])
        self.store.set_meta("when", when)
        accuracy = {row.moment: row.value for row in found if (row.client, row.name) == (ALL, "accuracy")}
        if (score := accuracy.get("validation", accuracy.get(when))) is not None:
            if score > max(self.accuracy.values(), default=-1.0):
                self.store.last_is_best(moves=moves)
            self.accuracy[entry] = score

    def _write(self, found: Iterable[Row]) -> None:
        new = list(found)
        self.store.write_rows(new)
        self._untold += [row for row in new if row.client == ALL]

    def _tell(self, round: int) -> None:
        """This entry is evaluated and written."""
        if mine := [row for row in self._untold if row.round == round]:
            self.watch.entry(entry(round, self.store.meta("when"), mine))
        self._untold = [row for row in self._untold if row.round > round]

    def _write_newcomers(self, ctx: Context) -> None:
        """Those who join now receive what the last round left, and adapt; they look after every epoch."""
        epochs, way = self.options.adapt_epochs, self.options.adapt
        jobs = [
            Job(
                client, ctx.round, evaluate=True, adapt=epochs, newcomer=True, way=way, measures=self.measures
            )
            for client in range(self.members, self.task.split.clients)
        ]
        if jobs:
            entry, replies = ctx.round - 1, self._ask(ctx, jobs)
            measured = {r.client: {f"newcomers {when}": n for when, n in r.measured.items()} for r in replies}
            self.store.write_rows(rows(entry, measured))
            self.store.set_meta(
                "newcomers", {"round": entry, "clients": len(replies), "epochs": epochs, "way": way}
            )

    def _note_trainers(self, replies: Sequence[Reply]) -> None:
        """Who trains, and as a remark why nobody who is faster."""
        used = dict(item for reply in replies for item in reply.trainers.items())
        if new := used.keys() - self.trainers:
            self.trainers |= new
            self.store.set_meta("trainers", sorted(self.trainers))
            told = [f"{name} trains, {used[name]}" for name in sorted(new) if used[name]]
            self.store.set_meta("remarks", [*(self.store.meta("remarks") or []), *told])

    def _latest(self) -> float | None:
        return list(self.accuracy.values())[-1] if self.accuracy else None

    def _watch_memory(self) -> None:
        """Now, with all uploads in memory, is when most is in use. Looking takes a hundredth of the time."""
        began = time.monotonic()
        if began >= self._look_again:
            self.store.set_meta("peak_rss_mb", max(used_mb(), self.store.meta("peak_rss_mb") or 0.0))
            self._look_again = began + 100 * (time.monotonic() - began)


def sent(method: Method, ctx: Context, server: State, *, prepare: bool = False) -> Messages:
    """What clients are sent in this round, or for the preparation from theta^0."""
    own, buffers = apart(server)
    fixed = constants(method, own) | buffers
    if prepare:
        return Messages(ctx.task.model.parameters | buffers)
    if method.same_for_all:
        return Messages(method.down(ctx, own, -1) | fixed)
    return Messages(fixed, lambda client: method.down(ctx, own, client))


def apart(state: State) -> tuple[State, State]:
    """What a method sees, and the averaged BatchNorm statistics, which it does not."""
    return without(state, [BUFFER]), {name: t for name, t in state.items() if name.startswith(BUFFER)}


def constants(method: Method, server: State) -> State:
    """What is sent to a client once."""
    return {name: t for name, t in server.items() if matches(name, method.constant)}


@contextmanager
def steady() -> Iterator[None]:
    """One thread: sums depend on their number in the last bits, and results must not depend on the machine.
    And no search for garbage among what is there already, most of it torch's: that is a third of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def asks(names: Iterable[str]) -> bool:
    """Whether one of these measures is a pooled one."""
    return bool(metrics.asked(names) & metrics.POOLED)


def chosen_rows(task: Task, client: int) -> tuple[int, ...]:
    """The test samples of a client that pooled measures see, the same in every round."""
    order = seeds.stream(task.seed, "pooled", 0, client).permutation(len(task.split.test[client]))
    return tuple(sorted(order[: metrics.POOLED_ROWS].tolist()))


def pooled(replies: Sequence[Reply], moment: str, place: str) -> Points | None:
    """What clients have shown of one place at one moment, in client order; None if nobody has."""
    name = f"{moment}/{place}"
    found = [reply for reply in replies if name in reply.seen and len(reply.seen["y"])]
    if not found:
        return None
    x, y = (np.concatenate([reply.seen[key].numpy() for reply in found]) for key in (name, "y"))
    return points(x, y, np.repeat([reply.client for reply in found], [len(r.seen["y"]) for r in found]))


def rows_of(entry: int, replies: Sequence[Reply], names: Iterable[str]) -> list[Row]:
    """The pooled measures of an entry, at each moment at which clients have shown z_g."""
    lines = []
    for moment in ("before", "adapted", "after"):
        if (seen := pooled(replies, moment, "z_g")) is not None:
            found = metrics.pool(names, seen)
            overall = found.pop(ALL, {})
            lines += rows(entry, {client: {moment: numbers} for client, numbers in found.items()})
            lines += [Row(entry, ALL, moment, name, float(v), w) for name, (v, w) in overall.items()]
    return lines
