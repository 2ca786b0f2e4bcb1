"""Records of a run: metrics of clients, costs, the best round, the backends that trained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from feddbe import metrics, seeds
from feddbe.callbacks.base import Callback
from feddbe.methods.base import Method
from feddbe.metrics.client_values import ALL, MetricValues, Record, round_records
from feddbe.metrics.representations.points import Points, make_points
from feddbe.results.document import build_round_result, selection_accuracy
from feddbe.simulation.client import ClientResult, MissingClient
from feddbe.simulation.engines.base import peak_memory_mb
from feddbe.state import State, nbytes
from feddbe.training.task import Task

if TYPE_CHECKING:
    from feddbe.runs.store import RunStore


EVALUATION_MOMENTS = ("before", "adapted", "after", "validation")


class Recorder:
    """Writer of a run's records, with the values of them that the loop needs."""

    def __init__(self, store: RunStore, method: Method, metric_names: str, callbacks: Callback) -> None:
        self.store = store
        self.callbacks = callbacks
        self.moment = "adapted" if method.adapts == "each" else "before"
        """Moment at which a client's model is deployed, and therefore evaluated."""
        self.metrics = metrics.parse_metrics(metric_names)
        self.layers = ("z_g",) if metrics.required_inputs(self.metrics) & metrics.POOLED_INPUTS else ()
        """Layers whose representations clients send, for pooled metrics."""
        self.contacted = store.participants()
        """Clients that took part in a round, and therefore have the constants."""
        self.accuracy = {
            result["round"]: selection_accuracy(result)
            for result in store.round_results()
            if result["accuracy"]
        }
        """Accuracy by which the best round is selected, per evaluated round."""
        self.trainers: set[str] = set(store.meta("trainers") or ())
        last = store.last_round()
        self._unreported = [record for record in store.aggregate_records() if record.round == last]
        """Records over all clients of rounds that are not evaluated yet."""
        self._costs = dict[int, MetricValues]()
        """Metrics of each client's training in the last round."""
        self._next_memory_check = 0.0

    @property
    def latest_accuracy(self) -> float | None:
        return list(self.accuracy.values())[-1] if self.accuracy else None

    def is_evaluated(self, round_: int) -> bool:
        return round_ in self.accuracy

    def record_clients(self, round_: int, results: Sequence[ClientResult], constant: State) -> None:
        """Write the metrics of each client's training; constants are sent, and counted, once."""
        known_bytes = nbytes(constant)
        self._costs = {}
        for result in results:
            bytes_down = result.training_metrics["bytes_down"][0]
            if result.client in self.contacted:
                bytes_down -= known_bytes
            self._costs[result.client] = result.training_metrics | {"bytes_down": (bytes_down, 1)}
        self._write(
            round_records(round_, {client: {"training": numbers} for client, numbers in self._costs.items()})
        )

    def record_round(
        self,
        round_: int,
        results: Sequence[ClientResult],
        missing: Sequence[MissingClient],
        *,
        seconds: float,
    ) -> None:
        """Write the totals of a round, and note backends and memory."""
        self._record_backends(results)
        self._note_memory()
        totals = {"seconds": seconds, "missing": len(missing)}
        for name in ("bytes_up", "bytes_down"):
            totals[name] = sum(int(numbers[name][0]) for numbers in self._costs.values())
        self._write(Record(round_, ALL, "round", name, value, len(results)) for name, value in totals.items())

    def record_evaluation(self, round_: int, results: Sequence[ClientResult], *, is_replaced: bool) -> None:
        """Write the metrics of the model after this round; retain its state if it is the best.

        Args:
            round_: The round whose model was evaluated.
            results: The clients' results.
            is_replaced: True if another server state replaces it in the same transaction.
        """
        records = round_records(round_, {result.client: result.metrics for result in results})
        pooled = pooled_records(round_, results, self.metrics) if self.layers else []
        # If an earlier run ended with this round and was extended, its evaluation is replaced.
        self.store.drop_records(round_, EVALUATION_MOMENTS)
        self._write([*records, *pooled])
        self.store.set_meta("moment", self.moment)
        by_moment = {r.moment: r.value for r in records if (r.client, r.name) == (ALL, "accuracy")}
        accuracy = by_moment.get("validation", by_moment.get(self.moment))
        if accuracy is not None:
            if accuracy > max(self.accuracy.values(), default=-1.0):
                self.store.promote_to_best(move=is_replaced)
            self.accuracy[round_] = accuracy

    def record_new_clients(
        self, round_: int, results: Sequence[ClientResult], epochs: int, adaptation: str
    ) -> None:
        """Write the metrics of clients that joined after the last round."""
        by_client = {}
        for result in results:
            by_client[result.client] = {
                f"newcomers {moment}": values for moment, values in result.metrics.items()
            }
        self.store.write_records(round_records(round_, by_client))
        description = {"round": round_, "clients": len(results), "epochs": epochs, "adaptation": adaptation}
        self.store.set_meta("new_clients", description)

    def notify_evaluation(self, round_: int) -> None:
        """Pass an evaluated round, already committed, to the callbacks."""
        records = [record for record in self._unreported if record.round == round_]
        if records:
            self.callbacks.on_evaluation(build_round_result(round_, self.store.meta("moment"), records))
        self._unreported = [record for record in self._unreported if record.round > round_]

    def _write(self, records: Iterable[Record]) -> None:
        new = list(records)
        self.store.write_records(new)
        self._unreported += [record for record in new if record.client == ALL]

    def _record_backends(self, results: Sequence[ClientResult]) -> None:
        """Record which backends trained, and add a note if a faster one was rejected."""
        reasons = dict[str, str]()
        for result in results:
            reasons |= result.trainers
        new = reasons.keys() - self.trainers
        if new:
            self.trainers |= new
            self.store.set_meta("trainers", sorted(self.trainers))
            notes = [f"{name} trains, {reasons[name]}" for name in sorted(new) if reasons[name]]
            self.store.set_meta("remarks", [*(self.store.meta("remarks") or []), *notes])

    def _note_memory(self) -> None:
        """Record the peak memory; usage is highest here, because all uploads are in memory.

        The checks take at most a hundredth of the time.
        """
        started = time.monotonic()
        if started >= self._next_memory_check:
            peak = max(peak_memory_mb(), self.store.meta("peak_rss_mb") or 0.0)
            self.store.set_meta("peak_rss_mb", peak)
            self._next_memory_check = started + 100 * (time.monotonic() - started)


def pooled_indices(task: Task, client: int) -> tuple[int, ...]:
    """Return the indices of a client's test samples for pooled metrics, equal in every round."""
    order = seeds.make_rng(task.seed, "pooled", 0, client).permutation(len(task.split.test[client]))
    return tuple(sorted(order[: metrics.POOLED_SAMPLES].tolist()))


def pool_representations(results: Sequence[ClientResult], moment: str, layer: str) -> Points | None:
    """Return the clients' representations at a layer and moment, in client order; None if there are none."""
    name = f"{moment}/{layer}"
    senders = [
        result for result in results if name in result.representations and len(result.representations["y"])
    ]
    if not senders:
        return None
    labels = [result.representations["y"].numpy() for result in senders]
    x = np.concatenate([result.representations[name].numpy() for result in senders])
    clients = np.repeat([result.client for result in senders], [len(y) for y in labels])
    return make_points(x, np.concatenate(labels), clients)


def pooled_records(round_: int, results: Sequence[ClientResult], names: Iterable[str]) -> list[Record]:
    """Return the records of pooled metrics, at each moment at which clients sent z_g."""
    records = list[Record]()
    for moment in ("before", "adapted", "after"):
        representations = pool_representations(results, moment, "z_g")
        if representations is None:
            continue
        by_client = metrics.compute_pooled(names, representations)
        overall = by_client.pop(ALL, {})
        records += round_records(round_, {client: {moment: numbers} for client, numbers in by_client.items()})
        for name, (value, weight) in overall.items():
            records.append(Record(round_, ALL, moment, name, float(value), weight))
    return records
