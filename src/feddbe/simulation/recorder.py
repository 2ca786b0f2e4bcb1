"""Records of a run: metrics of clients, costs, the best round, the backends that trained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from feddbe import metrics, seeds
from feddbe.callbacks.base import Callback
from feddbe.methods.base import Method
from feddbe.metrics.records import ALL, MetricValues, Record, client_records
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
    """Writes the records of a run to its store and keeps what the loop needs of them."""

    def __init__(self, store: RunStore, method: Method, metric_names: str, callbacks: Callback) -> None:
        self.store, self.callbacks = store, callbacks
        self.moment = "adapted" if method.adapts == "each" else "before"
        """The moment at which a client's model is deployed, and so judged."""
        self.metrics = metrics.parse_metrics(metric_names)
        self.layers = ("z_g",) if metrics.required_inputs(self.metrics) & metrics.POOLED_INPUTS else ()
        """Layers whose representations clients send, for pooled metrics."""
        self.contacted = store.participants()
        """Clients that took part in a round, and so know the constants."""
        self.accuracy = {e["round"]: selection_accuracy(e) for e in store.round_results() if e["accuracy"]}
        """Per evaluated round, what the best one is chosen by."""
        self.trainers: set[str] = set(store.meta("trainers") or ())
        last = store.last_round()
        self._unreported = [record for record in store.aggregate_records() if record.round == last]
        """Records over all clients of rounds that are not evaluated yet."""
        self._costs = dict[int, MetricValues]()
        """What each client's training of the last round resulted in."""
        self._next_memory_check = 0.0

    @property
    def latest_accuracy(self) -> float | None:
        return list(self.accuracy.values())[-1] if self.accuracy else None

    def is_evaluated(self, round_: int) -> bool:
        return round_ in self.accuracy

    def record_clients(self, round_: int, results: Sequence[ClientResult], constant: State) -> None:
        """Write what each client's training resulted in; constants are sent, and counted, once."""
        known_bytes = nbytes(constant)
        self._costs = {}
        for result in results:
            bytes_down = result.training_metrics["bytes_down"][0]
            if result.client in self.contacted:
                bytes_down -= known_bytes
            self._costs[result.client] = result.training_metrics | {"bytes_down": (bytes_down, 1)}
        self._write(
            client_records(round_, {client: {"training": numbers} for client, numbers in self._costs.items()})
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
        self._note_trainers(results)
        self._note_memory()
        totals = {"seconds": seconds, "missing": len(missing)}
        for name in ("bytes_up", "bytes_down"):
            totals[name] = sum(int(numbers[name][0]) for numbers in self._costs.values())
        self._write(Record(round_, ALL, "round", name, value, len(results)) for name, value in totals.items())

    def record_evaluation(self, round_: int, results: Sequence[ClientResult], *, is_replaced: bool) -> None:
        """Write what clients measured of the model after this round; keep its state if it is the best.

        Args:
            round_: The round whose model was evaluated.
            results: The clients' results.
            is_replaced: Whether another server state takes its place in the same transaction.
        """
        records = client_records(round_, {result.client: result.metrics for result in results})
        self.store.drop_records(round_, EVALUATION_MOMENTS)  # a run that ended here once and was extended
        self._write([*records, *(pooled_records(round_, results, self.metrics) if self.layers else ())])
        self.store.set_meta("moment", self.moment)
        accuracy = {r.moment: r.value for r in records if (r.client, r.name) == (ALL, "accuracy")}
        judged = accuracy.get("validation", accuracy.get(self.moment))
        if judged is not None:
            if judged > max(self.accuracy.values(), default=-1.0):
                self.store.promote_to_best(moves=is_replaced)
            self.accuracy[round_] = judged

    def record_new_clients(
        self, round_: int, results: Sequence[ClientResult], epochs: int, adaptation: str
    ) -> None:
        """Write what clients measured that joined after the last round."""
        measured = {r.client: {f"newcomers {when}": n for when, n in r.metrics.items()} for r in results}
        self.store.write_records(client_records(round_, measured))
        facts = {"round": round_, "clients": len(results), "epochs": epochs, "adaptation": adaptation}
        self.store.set_meta("new_clients", facts)

    def notify_evaluation(self, round_: int) -> None:
        """Pass an evaluated round, which is committed by now, to the callbacks."""
        records = [record for record in self._unreported if record.round == round_]
        if records:
            self.callbacks.on_evaluation(build_round_result(round_, self.store.meta("moment"), records))
        self._unreported = [record for record in self._unreported if record.round > round_]

    def _write(self, records: Iterable[Record]) -> None:
        new = list(records)
        self.store.write_records(new)
        self._unreported += [record for record in new if record.client == ALL]

    def _note_trainers(self, results: Sequence[ClientResult]) -> None:
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
            self.store.set_meta("peak_rss_mb", max(peak_memory_mb(), self.store.meta("peak_rss_mb") or 0.0))
            self._next_memory_check = began + 100 * (time.monotonic() - began)


def pooled_indices(task: Task, client: int) -> tuple[int, ...]:
    """Return the test samples of a client that pooled metrics see, the same in every round."""
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
    x = np.concatenate([result.representations[name].numpy() for result in senders])
    y = np.concatenate([result.representations["y"].numpy() for result in senders])
    clients = np.repeat(
        [result.client for result in senders], [len(result.representations["y"]) for result in senders]
    )
    return make_points(x, y, clients)


def pooled_records(round_: int, results: Sequence[ClientResult], names: Iterable[str]) -> list[Record]:
    """Return the records of pooled metrics, at each moment at which clients sent z_g."""
    records = list[Record]()
    for moment in ("before", "adapted", "after"):
        representations = pool_representations(results, moment, "z_g")
        if representations is None:
            continue
        by_client = metrics.compute_pooled(names, representations)
        overall = by_client.pop(ALL, {})
        records += client_records(
            round_, {client: {moment: numbers} for client, numbers in by_client.items()}
        )
        records += [Record(round_, ALL, moment, name, float(v), w) for name, (v, w) in overall.items()]
    return records
