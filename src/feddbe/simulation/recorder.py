"""Records of a run: metrics of clients, costs, the best round, the backends that trained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from feddbe import metrics, seeds
from feddbe.callbacks.base import Watch
from feddbe.methods.base import Method
from feddbe.metrics.records import ALL, Numbers, Row, rows
from feddbe.metrics.representations.points import Points, points
from feddbe.results.document import entry, score
from feddbe.simulation.client import Missing, Reply
from feddbe.simulation.engines.base import used_mb
from feddbe.state import State, nbytes
from feddbe.training.task import Task

if TYPE_CHECKING:
    from feddbe.runs.store import Store


EVALUATION_MOMENTS = ("before", "adapted", "after", "validation")


class Recorder:
    """Writes the records of a run to its store and keeps what the loop needs of them."""

    def __init__(self, store: Store, method: Method, metric_names: str, callbacks: Watch) -> None:
        self.store, self.callbacks = store, callbacks
        self.moment = "adapted" if method.adapts == "each" else "before"
        """The moment at which a client's model is deployed, and so judged."""
        self.metrics = metrics.parse(metric_names)
        self.layers = ("z_g",) if metrics.asked(self.metrics) & metrics.POOLED else ()
        """Layers whose representations clients send, for pooled metrics."""
        self.contacted = store.contacted()
        """Clients that took part in a round, and so know the constants."""
        self.accuracy = {e["round"]: score(e) for e in store.entries() if e["accuracy"]}
        """Per evaluated round, what the best one is chosen by."""
        self.trainers: set[str] = set(store.meta("trainers") or ())
        last = store.last_round()
        self._unreported = [record for record in store.overall() if record.round == last]
        """Records over all clients of rounds that are not evaluated yet."""
        self._costs = dict[int, Numbers]()
        """What each client's training of the last round resulted in."""
        self._next_memory_check = 0.0

    @property
    def latest_accuracy(self) -> float | None:
        return list(self.accuracy.values())[-1] if self.accuracy else None

    def is_evaluated(self, round_: int) -> bool:
        return round_ in self.accuracy

    def record_clients(self, round_: int, results: Sequence[Reply], constant: State) -> None:
        """Write what each client's training resulted in; constants are sent, and counted, once."""
        known_bytes = nbytes(constant)
        self._costs = {}
        for result in results:
            bytes_down = result.trained["bytes_down"][0]
            if result.client in self.contacted:
                bytes_down -= known_bytes
            self._costs[result.client] = result.trained | {"bytes_down": (bytes_down, 1)}
        self._write(rows(round_, {client: {"training": numbers} for client, numbers in self._costs.items()}))

    def record_round(
        self, round_: int, results: Sequence[Reply], missing: Sequence[Missing], *, seconds: float
    ) -> None:
        """Write the totals of a round, and note backends and memory."""
        self._note_trainers(results)
        self._note_memory()
        totals = {"seconds": seconds, "missing": len(missing)}
        for name in ("bytes_up", "bytes_down"):
            totals[name] = sum(int(numbers[name][0]) for numbers in self._costs.values())
        self._write(Row(round_, ALL, "round", name, value, len(results)) for name, value in totals.items())

    def record_evaluation(self, round_: int, results: Sequence[Reply], *, is_replaced: bool) -> None:
        """Write what clients measured of the model after this round; keep its state if it is the best.

        Args:
            round_: The round whose model was evaluated.
            results: The clients' results.
            is_replaced: Whether another server state takes its place in the same transaction.
        """
        records = rows(round_, {result.client: result.measured for result in results})
        self.store.drop_rows(round_, EVALUATION_MOMENTS)  # a run that ended here once and was extended
        self._write([*records, *(pooled_records(round_, results, self.metrics) if self.layers else ())])
        self.store.set_meta("when", self.moment)
        accuracy = {r.moment: r.value for r in records if (r.client, r.name) == (ALL, "accuracy")}
        judged = accuracy.get("validation", accuracy.get(self.moment))
        if judged is not None:
            if judged > max(self.accuracy.values(), default=-1.0):
                self.store.last_is_best(moves=is_replaced)
            self.accuracy[round_] = judged

    def record_new_clients(self, round_: int, results: Sequence[Reply], epochs: int, adaptation: str) -> None:
        """Write what clients measured that joined after the last round."""
        measured = {r.client: {f"newcomers {when}": n for when, n in r.measured.items()} for r in results}
        self.store.write_rows(rows(round_, measured))
        facts = {"round": round_, "clients": len(results), "epochs": epochs, "way": adaptation}
        self.store.set_meta("newcomers", facts)

    def notify_evaluation(self, round_: int) -> None:
        """Pass an evaluated round, which is committed by now, to the callbacks."""
        records = [record for record in self._unreported if record.round == round_]
        if records:
            self.callbacks.entry(entry(round_, self.store.meta("when"), records))
        self._unreported = [record for record in self._unreported if record.round > round_]

    def _write(self, records: Iterable[Row]) -> None:
        new = list(records)
        self.store.write_rows(new)
        self._unreported += [record for record in new if record.client == ALL]

    def _note_trainers(self, results: Sequence[Reply]) -> None:
        """Record which backends trained, and as a remark why a faster one was rejected."""
        used = dict(item for result in results for item in result.trainers.items())
        new = used.keys() - self.trainers
        if new:
            self.trainers |= new
            self.store.set_meta("trainers", sorted(self.trainers))
            remarks = [f"{name} trains, {used[name]}" for name in sorted(new) if used[name]]
            self.store.set_meta("remarks", [*(self.store.meta("remarks") or []), *remarks])

    def _note_memory(self) -> None:
        """Record the peak memory; now, with all uploads in memory, most is in use.

        Measuring takes at most a hundredth of the time.
        """
        began = time.monotonic()
        if began >= self._next_memory_check:
            self.store.set_meta("peak_rss_mb", max(used_mb(), self.store.meta("peak_rss_mb") or 0.0))
            self._next_memory_check = began + 100 * (time.monotonic() - began)


def pooled_indices(task: Task, client: int) -> tuple[int, ...]:
    """Return the test samples of a client that pooled metrics see, the same in every round."""
    order = seeds.stream(task.seed, "pooled", 0, client).permutation(len(task.split.test[client]))
    return tuple(sorted(order[: metrics.POOLED_ROWS].tolist()))


def pool_representations(results: Sequence[Reply], moment: str, layer: str) -> Points | None:
    """Return the clients' representations at a layer and moment, in client order; None if there are none."""
    name = f"{moment}/{layer}"
    senders = [result for result in results if name in result.seen and len(result.seen["y"])]
    if not senders:
        return None
    x = np.concatenate([result.seen[name].numpy() for result in senders])
    y = np.concatenate([result.seen["y"].numpy() for result in senders])
    clients = np.repeat([result.client for result in senders], [len(result.seen["y"]) for result in senders])
    return points(x, y, clients)


def pooled_records(round_: int, results: Sequence[Reply], names: Iterable[str]) -> list[Row]:
    """Return the records of pooled metrics, at each moment at which clients sent z_g."""
    records = list[Row]()
    for moment in ("before", "adapted", "after"):
        representations = pool_representations(results, moment, "z_g")
        if representations is None:
            continue
        by_client = metrics.pool(names, representations)
        overall = by_client.pop(ALL, {})
        records += rows(round_, {client: {moment: numbers} for client, numbers in by_client.items()})
        records += [Row(round_, ALL, moment, name, float(v), w) for name, (v, w) in overall.items()]
    return records
