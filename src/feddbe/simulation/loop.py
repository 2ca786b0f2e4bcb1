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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from feddbe import seeds
from feddbe.callbacks.base import Callback
from feddbe.errors import FeddbeError, InvalidInputError
from feddbe.methods.base import Method, Upload
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
from feddbe.training.task import Context

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
        Diverged: A loss or parameter is no longer finite. Complete rounds are kept.
        FeddbeError: Fewer clients replied than `--min-replies` requires, or a method breaks its contract.
    """
    loop = RoundLoop(experiment, store, engine, callbacks or Callback())
    with deterministic_section():
        loop.callbacks.on_run_begin(
            experiment.name, store.folder, max(0, loop.completed_rounds), experiment.task.rounds
        )
        if loop.completed_rounds < 0:
            loop.run_initialization()
        while loop.completed_rounds < experiment.task.rounds and not loop.patience_exhausted():
            loop.run_round(loop.completed_rounds + 1)
        loop.evaluate_final()


class RoundLoop:
    """A run in progress: the server state in memory, everything else in the store."""

    def __init__(self, experiment: Experiment, store: RunStore, engine: Engine, callbacks: Callback) -> None:
        self.options, self.store, self.engine, self.callbacks = experiment.options, store, engine, callbacks
        self.task, self.method = experiment.task, experiment.method
        self.members = self.task.members
        store.verify()
        self.server_state = store.server_state()
        self.layout = describe_layout(initial_server_state(experiment))
        """What the server state has in every round."""
        check_stored_layout(self.server_state, self.layout, store.folder)
        self.recorder = Recorder(store, self.method, self.options.metrics, callbacks)

    @property
    def completed_rounds(self) -> int:
        """The last complete round; -1 before the initialization."""
        return self.store.last_round()

    def run_initialization(self) -> None:
        """Run round 0 and commit it: clients prepare from theta^0, as many as the method needs."""
        started = time.perf_counter()
        context = self._context(0)
        with self.store.transaction(0):
            cohort = self._sample_cohort(0)
            tasks = [ClientTask(client, 0, "prepare", metrics=self.recorder.metrics) for client in cohort]
            broadcast = build_broadcast(self.method, context, self.server_state, prepare=True)
            results, missing = self._run_clients(tasks, broadcast)
            server_state = self._aggregate(context, results)
            self._record_training(0, results, missing, server_state, started)
        self._finish_round(0, results, server_state)

    def run_round(self, round_: int) -> None:
        """Run one round and commit it."""
        started = time.perf_counter()
        context = self._context(round_)
        with self.store.transaction(round_):
            # 1. Sample: the cohort trains, the evaluators measure the model that they receive.
            cohort = self._sample_cohort(round_)
            evaluators = self._sample_evaluators(round_, cohort)

            # 2. Broadcast: what each client receives, built from the server state.
            broadcast = build_broadcast(self.method, context, self.server_state)

            # 3. Run the clients. Each evaluates what it received, then trains it if it is in the cohort.
            tasks = self._client_tasks(round_, cohort, evaluators)
            results, missing = self._run_clients(tasks, broadcast)
            members = set(cohort)
            trained = [result for result in results if result.client in members]

            # 4. Aggregate the uploads into the next server state.
            server_state = self._aggregate(context, trained)

            # 5. Record the evaluation of the previous round, this round's training and the new state.
            self.recorder.record_evaluation(round_ - 1, results, is_replaced=True)
            self._record_training(round_, trained, missing, server_state, started)
        self._finish_round(round_, trained, server_state)
        self.recorder.notify_evaluation(round_ - 1)

    def evaluate_final(self) -> None:
        """Evaluate the model after the last round, unless that was done already.

        Fine-tuning, where the method has it, and new clients come after the last round, too.
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
        """Return whether the best accuracy is more than `patience` evaluations old, itself counted.

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
        for answer in self.engine.run(tasks, broadcast, self.store):
            if isinstance(answer, MissingClient):
                missing.append(answer)
            else:
                results.append(answer)
            self.callbacks.on_client_end(len(results) + len(missing), len(tasks))
        if missing:
            require_enough_replies(tasks, missing, self.options.min_replies, self.method)
        return sorted(results, key=lambda result: result.client), missing

    def _aggregate(self, context: Context, results: list[ClientResult]) -> State:
        """Return the next server state; BatchNorm statistics, if clients send them, are averaged too."""
        if not results:
            return self.server_state
        own_state, _ = split_buffers(self.server_state)
        samples = self.task.samples
        uploads, buffers = list[Upload](), list[State]()
        for result in results:
            upload, statistics = split_buffers(result.upload)
            uploads.append(Upload(result.client, samples[result.client], upload))
            buffers.append(statistics)
        aggregate = self.method.aggregate if context.round else self.method.server_setup
        averaged = weighted_mean(buffers, [upload.samples for upload in uploads])
        server_state = aggregate(context, own_state, uploads) | averaged
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
        """Write what clients trained and kept, and the new server state."""
        self.recorder.record_clients(round_, results, constants(self.method, self.server_state))
        if self.method.keeps_uploads:
            for result in results:
                self.store.keep_upload(result.client, split_buffers(result.upload)[0])
        self.store.write_server_state("last", server_state)
        self.recorder.record_round(round_, results, missing, seconds=time.perf_counter() - started)

    def _finish_round(self, round_: int, results: list[ClientResult], server_state: State) -> None:
        """Take over what was committed, and notify the callbacks."""
        self.server_state = server_state
        if round_:
            self.recorder.contacted.update(result.client for result in results)
        self.callbacks.on_round_end(round_, self.recorder.latest_accuracy)

    def _evaluate_new_clients(self, round_: int, broadcast: Broadcasts) -> None:
        """Let the clients that join now adapt to what the last round left, evaluated after every epoch."""
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
    tasks: Sequence[ClientTask], missing: Sequence[MissingClient], min_replies: int | None, method: Method
) -> None:
    """Raise an error if the round cannot do without the missing clients.

    Clients that only evaluate are not counted in a round in which others work.
    """
    round_, first = tasks[0].round, missing[0]
    working = {task.client for task in tasks if task.work != "none"}
    asked = (working if min_replies else None) or {task.client for task in tasks}
    absent = asked & {client.client for client in missing}
    replied = len(asked) - len(absent)
    reason = f"client {first.client} did not answer in round {round_} ({first.reason})"
    if method.needs_all_clients and absent & working:
        raise FeddbeError(f"{reason}; {method.base_name} cannot go on without: {method.needs_all_clients}")
    if min_replies is None or replied < min(min_replies, len(asked)):
        raise FeddbeError(
            f"{reason}: {replied} of {len(asked)} answered, needed are "
            f"{'all' if min_replies is None else min_replies} (--min-replies); the round is not written, "
            "--resume continues"
        )


def initial_server_state(experiment: Experiment) -> State:
    """Return the server state before the initialization."""
    state = experiment.method.server_init(Context(experiment.task, 0))
    if experiment.options.bn_buffers == "average":
        state |= add_prefix(BUFFER, experiment.task.model.buffers)
    return state


def build_broadcast(
    method: Method, context: Context, server_state: State, *, prepare: bool = False
) -> Broadcasts:
    """Return what clients receive in this round, or, to `prepare`, in the initialization."""
    own_state, buffers = split_buffers(server_state)
    if prepare:
        return Broadcasts(context.task.model.parameters | buffers)
    fixed = constants(method, own_state) | buffers
    if method.has_uniform_broadcast:
        return Broadcasts(method.broadcast(context, own_state, -1) | fixed)
    return Broadcasts(fixed, lambda client: method.broadcast(context, own_state, client))


def split_buffers(state: State) -> tuple[State, State]:
    """Return what a method sees, and the averaged BatchNorm statistics, which it does not."""
    return drop_keys(state, [BUFFER]), {name: t for name, t in state.items() if name.startswith(BUFFER)}


def constants(method: Method, server_state: State) -> State:
    """Return the part of the server state that each client receives once."""
    return {name: t for name, t in server_state.items() if matches_pattern(name, method.constant)}


@contextmanager
def deterministic_section() -> Iterator[None]:
    """Use one torch thread, on which the last bits of sums depend; hide old objects from garbage collection.

    Looking through them, most of them torch's, takes a third of the time of a small round.
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
    """Who takes part before round 1: nobody, all, or as many as the method needs."""
    if not method.has_setup:
        return []
    return seeds.sample_clients(seeds.make_rng(seed, "prepare"), clients, method.setup_clients or clients)


def sample_evaluators(spec: str, seed: int, round: int, clients: int, cohort: Sequence[int]) -> Sequence[int]:
    """Who evaluates in the call of this round: `all`, its `cohort`, or `sample:M` drawn anew each time."""
    if spec == "all":
        return range(clients)
    if spec == "cohort":
        return cohort
    match = re.fullmatch(r"sample:([1-9][0-9]*)", spec)
    if match is None:
        raise InvalidInputError(f"eval = '{spec}'; allowed: all, cohort, sample:M with M >= 1")
    return seeds.sample_clients(seeds.make_rng(seed, "evaluate", round), clients, int(match[1]))
