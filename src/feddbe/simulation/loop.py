"""The federated round loop: sample, broadcast, run clients, aggregate, record.

A round is one transaction of the run's store. If the process is killed, the store holds the last complete
round, and `run_experiment` continues from there with identical results.

The model after round t is evaluated in round t + 1, by the same call that trains it: a round is a single
exchange with each client. The model after the last round is evaluated by `RoundLoop.evaluate_final`.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

from feddbe import seeds
from feddbe.callbacks.base import Callback
from feddbe.errors import FeddbeError, InvalidInputError
from feddbe.methods.base import Method, Upload
from feddbe.results.document import run_id
from feddbe.simulation.client import BUFFER, ClientResult, ClientTask, MissingClient
from feddbe.simulation.engines.base import Broadcasts, Engine
from feddbe.simulation.recorder import Recorder, pooled_indices
from feddbe.state import (
    State,
    add_prefix,
    check_aggregated_layout,
    check_stored_layout,
    describe_layout,
    drop_keys,
    matches_pattern,
    weighted_mean,
)
from feddbe.training.task import Context, Task

if TYPE_CHECKING:
    from feddbe.runs.experiment import Experiment
    from feddbe.runs.store import RunStore


def run_experiment(
    experiment: Experiment, store: RunStore, engine: Engine, callbacks: Callback | None = None
) -> None:
    """Train until the experiment's number of rounds is complete or its patience is exhausted.

    Args:
        experiment: Method, model, data and options, all resolved.
        store: The run's file. A store with complete rounds is resumed after the last of them.
        engine: Executes clients: in this process, in worker processes or on Ray.
        callbacks: Notified at the start, after each client, after each round and after each evaluation.

    Raises:
        DivergenceError: A loss or parameter is no longer finite. Complete rounds are kept.
        FeddbeError: Fewer clients replied than `--min-replies` requires, or a method breaks its contract.
    """
    loop = RoundLoop(experiment, store, engine, callbacks or Callback())
    with deterministic_section():
        loop.callbacks.on_run_config(
            experiment.config, run_id(experiment.config_hash, store.meta("begun") or "")
        )
        loop.callbacks.on_run_begin(
            experiment.name, store.folder, max(0, loop.completed_rounds), experiment.task.rounds
        )
        is_resumed = loop.is_set_up
        if not is_resumed:
            loop.run_setup()
        while loop.completed_rounds < experiment.task.rounds and not loop.patience_exhausted():
            with store.computing_with_states() if is_resumed else nullcontext():
                loop.run_round(loop.completed_rounds + 1)
            is_resumed = False
        with store.computing_with_states() if is_resumed else nullcontext():
            loop.evaluate_final()


class RoundLoop:
    """A run in progress: the server state in memory, everything else in the store."""

    def __init__(self, experiment: Experiment, store: RunStore, engine: Engine, callbacks: Callback) -> None:
        self.options = experiment.options
        self.task = experiment.task
        self.method = experiment.method
        self.members = self.task.members
        self.store = store
        self.engine = engine
        self.callbacks = callbacks
        store.verify()
        self.server_state = store.server_state()
        self.layout = describe_layout(initial_server_state(experiment))
        """Names, shapes and types of the server state, equal in every round."""
        check_stored_layout(self.server_state, self.layout, store.folder)
        self.recorder = Recorder(store, self.method, self.options.metrics, callbacks)

    @property
    def completed_rounds(self) -> int:
        """The last complete round; -1 before the setup."""
        return self.store.last_round()

    @property
    def is_set_up(self) -> bool:
        """True if the setup, which is round 0, is complete."""
        return self.completed_rounds >= 0

    def run_setup(self) -> None:
        """Run round 0 and commit it: the number of clients that the method needs start from theta^0."""
        started = time.perf_counter()
        context = self._context(0)
        with self.store.transaction(0):
            cohort = self._sample_cohort(0)
            tasks = [ClientTask(client, 0, "prepare", metrics=self.recorder.metrics) for client in cohort]
            broadcast = build_broadcast(self.method, context, self.server_state, is_setup=True)
            results, missing = self._run_clients(tasks, broadcast)
            server_state = self._aggregate(context, results)
            self._record_training(0, results, missing, server_state, started)
        self._finish_round(0, results, server_state)

    def run_round(self, round_: int) -> None:
        """Run one round and commit it."""
        started = time.perf_counter()
        context = self._context(round_)
        with self.store.transaction(round_):
            # 1. Sample: the cohort trains, the evaluators report metrics of the model that they receive.
            cohort = self._sample_cohort(round_)
            evaluators = self._sample_evaluators(round_, cohort)

            # 2. Broadcast: build each client's message from the server state.
            broadcast = build_broadcast(self.method, context, self.server_state)

            # 3. Run the clients. Each evaluates the model it received, then trains it if in the cohort.
            tasks = self._client_tasks(round_, cohort, evaluators)
            results, missing = self._run_clients(tasks, broadcast)
            training_clients = set(cohort)
            trained = [result for result in results if result.client in training_clients]

            # 4. Aggregate the uploads into the next server state.
            server_state = self._aggregate(context, trained)

            # 5. Record the evaluation of the previous round, this round's training and the new state.
            self.recorder.record_evaluation(round_ - 1, results, is_replaced=True)
            self._record_training(round_, trained, missing, server_state, started)
        self._finish_round(round_, trained, server_state)
        self.recorder.notify_evaluation(round_ - 1)

    def evaluate_final(self) -> None:
        """Evaluate the model after the last round, unless that was done already.

        If the method has fine-tuning, or the run has new clients, they follow here.
        """
        last = self.completed_rounds
        if not self.recorder.is_evaluated(last):
            context = self._context(last + 1)
            with self.store.transaction(last):
                evaluators = self._sample_evaluators(last + 1, self._sample_cohort(last + 1))
                broadcast = build_broadcast(self.method, context, self.server_state)
                tasks = self._client_tasks(last + 1, (), evaluators)
                results, _ = self._run_clients(tasks, broadcast)
                self.recorder.record_evaluation(last, results, is_replaced=False)
                self._evaluate_new_clients(last + 1, broadcast)
            self.recorder.notify_evaluation(last)
        self.callbacks.on_round_end(last, self.recorder.latest_accuracy)

    def patience_exhausted(self) -> bool:
        """Return True if the best accuracy is more than `patience` evaluations old, itself included.

        This is the published stopping rule.
        """
        if self.options.patience is None or not self.recorder.accuracy:
            return False
        accuracies = list(self.recorder.accuracy.values())
        return len(accuracies) - accuracies.index(max(accuracies)) > self.options.patience

    def _context(self, round_: int) -> Context:
        return Context(self.task, round_, self.store.upload if self.method.keeps_uploads else None)

    def _sample_cohort(self, round_: int) -> list[int]:
        if round_ == 0:
            return setup_participants(self.method, self.task.seed, self.members)
        return seeds.sample_cohort(self.task.seed, round_, self.members, self.options.participation)

    def _sample_evaluators(self, round_: int, cohort: list[int]) -> Sequence[int]:
        return sample_evaluators(self.options.eval, self.task.seed, round_, self.members, cohort)

    def _client_tasks(
        self, round_: int, cohort: Collection[int], evaluators: Collection[int]
    ) -> list[ClientTask]:
        """Return one task for each client that trains or evaluates; no cohort is the final evaluation."""
        is_final = not cohort
        adapt_epochs = None
        if self.method.adapts == "each":
            adapt_epochs = 0
        elif self.method.adapts == "last" and is_final:
            adapt_epochs = self.options.adapt_epochs
        training, evaluating = set(cohort), set(evaluators)
        tasks = []
        for client in sorted(training | evaluating):
            trains, evaluates = client in training, client in evaluating
            work: Literal["train", "none"] = "train" if trains else "none"
            tasks.append(
                ClientTask(
                    client,
                    round_,
                    work,
                    evaluate=evaluates,
                    adapt_epochs=adapt_epochs,
                    evaluate_after=self.options.eval_after and trains and evaluates,
                    metrics=self.recorder.metrics,
                    layers=self.recorder.layers,
                    sample_indices=pooled_indices(self.task, client) if self.recorder.layers else None,
                )
            )
        return tasks

    def _run_clients(
        self, tasks: Sequence[ClientTask], broadcast: Broadcasts
    ) -> tuple[list[ClientResult], list[MissingClient]]:
        """Execute the tasks; return the results in client order, and the clients that did not reply.

        Sums run over the results, so their order must not depend on which client finishes first.
        """
        results, missing = list[ClientResult](), list[MissingClient]()
        for result in self.engine.run(tasks, broadcast, self.store):
            if isinstance(result, MissingClient):
                missing.append(result)
            else:
                results.append(result)
            self.callbacks.on_client_end(len(results) + len(missing), len(tasks))
        if missing:
            require_enough_replies(self.task, tasks, missing, self.options.min_replies, self.method)
        return sorted(results, key=lambda result: result.client), missing

    def _aggregate(self, context: Context, results: list[ClientResult]) -> State:
        """Return the next server state; BatchNorm statistics, if clients send them, are averaged too."""
        if not results:
            return self.server_state
        method_state, _ = split_buffers(self.server_state)
        samples = self.task.samples
        uploads, buffers = list[Upload](), list[State]()
        for result in results:
            upload, statistics = split_buffers(result.upload)
            uploads.append(Upload(result.client, samples[result.client], upload))
            buffers.append(statistics)
        aggregate = self.method.aggregate if context.round else self.method.server_setup
        averaged = weighted_mean(buffers, [upload.samples for upload in uploads])
        server_state = aggregate(context, method_state, uploads) | averaged
        check_aggregated_layout(server_state, self.layout, self.method.base_name, context.round)
        return server_state

    def _record_training(
        self,
        round_: int,
        results: list[ClientResult],
        missing: list[MissingClient],
        server_state: State,
        started: float,
    ) -> None:
        """Write the metrics of training, the uploads that are kept, and the new server state."""
        self.recorder.record_clients(round_, results, constants(self.method, self.server_state))
        if self.method.keeps_uploads:
            for result in results:
                self.store.keep_upload(result.client, split_buffers(result.upload)[0])
        self.store.write_server_state("last", server_state)
        self.recorder.record_round(round_, results, missing, seconds=time.perf_counter() - started)

    def _finish_round(self, round_: int, results: list[ClientResult], server_state: State) -> None:
        """Adopt the committed server state and notify the callbacks."""
        self.server_state = server_state
        if round_:
            self.recorder.contacted.update(result.client for result in results)
        self.callbacks.on_round_end(round_, self.recorder.latest_accuracy)

    def _evaluate_new_clients(self, round_: int, broadcast: Broadcasts) -> None:
        """Let new clients adapt the model after the last round, evaluated after every epoch."""
        epochs, adaptation = self.options.adapt_epochs, self.options.adaptation
        tasks = [
            ClientTask(
                client,
                round_,
                evaluate=True,
                adapt_epochs=epochs,
                is_new_client=True,
                adaptation=adaptation,
                metrics=self.recorder.metrics,
            )
            for client in range(self.members, self.task.split.clients)
        ]
        if tasks:
            results, _ = self._run_clients(tasks, broadcast)
            self.recorder.record_new_clients(round_ - 1, results, epochs, adaptation)


def require_enough_replies(
    task: Task,
    tasks: Sequence[ClientTask],
    missing: Sequence[MissingClient],
    min_replies: int | None,
    method: Method,
) -> None:
    """Check that the round can be completed without the missing clients.

    Clients that only evaluate are not counted in a round in which others work.

    Args:
        task: The data, whose clients may have names.
        tasks: Tasks of the round.
        missing: Clients that did not reply, at least one.
        min_replies: Number of replies that completes a round; None: all.
        method: The federated method, which may need all clients.

    Raises:
        FeddbeError: Too few clients replied.
    """
    working = {client_task.client for client_task in tasks if client_task.work != "none"}
    expected = {client_task.client for client_task in tasks}
    if min_replies and working:
        expected = working
    absent = expected & {client.client for client in missing}
    replied = len(expected) - len(absent)
    first = missing[0]
    name = task.dataset.describe_client(first.client)
    reason = f"{name} did not reply in round {tasks[0].round} ({first.reason})"
    if method.needs_all_clients and absent & working:
        raise FeddbeError(f"{reason}; {method.base_name} needs all clients: {method.needs_all_clients}")
    if min_replies is None or replied < min(min_replies, len(expected)):
        required = "all" if min_replies is None else min_replies
        raise FeddbeError(
            f"{reason}: {replied} of {len(expected)} replied, required: {required} (--min-replies); "
            "the round is not written, --resume continues"
        )


def initial_server_state(experiment: Experiment) -> State:
    """Return the server state before the setup."""
    state = experiment.method.server_init(Context(experiment.task, 0))
    if experiment.options.bn_buffers == "average":
        state |= add_prefix(BUFFER, experiment.task.model.buffers)
    return state


def build_broadcast(
    method: Method, context: Context, server_state: State, *, is_setup: bool = False
) -> Broadcasts:
    """Return the messages to the clients in this round, or in the setup."""
    method_state, buffers = split_buffers(server_state)
    if is_setup:
        return Broadcasts(context.task.model.parameters | buffers)
    shared = constants(method, method_state) | buffers
    if method.has_uniform_broadcast:
        return Broadcasts(method.broadcast(context, method_state, -1) | shared)
    return Broadcasts(shared, lambda client: method.broadcast(context, method_state, client))


def split_buffers(state: State) -> tuple[State, State]:
    """Return the part of the state that the method sees, and the averaged BatchNorm statistics."""
    return drop_keys(state, [BUFFER]), {name: t for name, t in state.items() if name.startswith(BUFFER)}


def constants(method: Method, server_state: State) -> State:
    """Return the part of the server state that each client receives once."""
    return {name: t for name, t in server_state.items() if matches_pattern(name, method.constant)}


@contextmanager
def deterministic_section() -> Iterator[None]:
    """Use one torch thread inside the block, and exclude existing objects from garbage collection.

    The last bits of sums depend on the number of threads. Scanning the existing objects, most of them
    torch's, takes a third of the time of a small round.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def setup_participants(method: Method, seed: int, clients: int) -> list[int]:
    """Return the clients of the setup: none, all, or the number that the method needs."""
    if not method.has_setup:
        return []
    return seeds.sample_clients(seeds.make_rng(seed, "prepare"), clients, method.setup_clients or clients)


def sample_evaluators(
    spec: str, seed: int, round_: int, clients: int, cohort: Sequence[int]
) -> Sequence[int]:
    """Return the clients that evaluate in this round: `all`, the `cohort`, or a new sample `sample:M`."""
    if spec == "all":
        return range(clients)
    if spec == "cohort":
        return cohort
    match = re.fullmatch(r"sample:([1-9][0-9]*)", spec)
    if match is None:
        raise InvalidInputError(f"eval = '{spec}'; allowed: all, cohort, sample:M with M >= 1")
    return seeds.sample_clients(seeds.make_rng(seed, "evaluate", round_), clients, int(match[1]))
