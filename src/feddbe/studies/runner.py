"""Missing runs of a study, started or resumed in parallel.

Existing runs are recognized by their configuration's hash, independent of the names of their folders. A run
is written after every round, so a study can be stopped or killed at any time and resumed.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from feddbe import data
from feddbe.callbacks.base import Callback, StudyCallback
from feddbe.config.options import Config, RunRequest, parse_options
from feddbe.config.parameters import format_value
from feddbe.data.dataset import Dataset
from feddbe.errors import DataMissingError, DivergenceError, FeddbeError, InvalidInputError, StoreError
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path
from feddbe.results.document import RunDocument, has_completed, last_round, status_note, truncate_run
from feddbe.runs import folders
from feddbe.runs.build_document import load_document
from feddbe.runs.experiment import Experiment
from feddbe.runs.reopen import describe_changed_inputs
from feddbe.runs.start import resolve_request, run_or_resume
from feddbe.runs.store import RUN_FILE, RunStore
from feddbe.runs.timing import BATCHES, TEST_SAMPLES, estimate_cost, time_clients
from feddbe.simulation.engines.base import as_portable
from feddbe.simulation.engines.pool import available_cores, end_with_parent
from feddbe.training import backends


@dataclass(frozen=True)
class RunSpec:
    """A method and options of `Config` by name; all other options have their defaults."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return int(self.options.get("seed", 0))

    def request(self, **overrides: Any) -> RunRequest:
        """Return the request of this run; `overrides` replace its own options."""
        return parse_options([self.method], {**self.options, **overrides})

    def __str__(self) -> str:
        """Return the method and the explicit options, as in `fedavg, lr 0.1, seed 2`."""
        options = {**self.options, "seed": self.seed}
        return ", ".join([self.method, *(f"{key} {format_value(value)}" for key, value in options.items())])

    def __hash__(self) -> int:
        return hash((self.method, repr(sorted(self.options.items()))))


def expand_grid(
    methods: Sequence[str], options: Mapping[str, Any] | None = None, seeds: Sequence[int] = (0,)
) -> list[RunSpec]:
    """Return a run for every method, combination of values and seed; seeds vary first, then the last option.

    Args:
        methods: Names of methods.
        options: Options by name. A list is a list of values; any other value holds for all runs.
        seeds: Seeds of each combination.
    """
    for name, values in {"method": methods, "seed": seeds, **(options or {})}.items():
        if isinstance(values, list | tuple) and not values:
            raise InvalidInputError(f"{name} = []; a list of values needs at least one")
    lists = {
        key: list(value) if isinstance(value, list | tuple) else [value]
        for key, value in (options or {}).items()
    }
    return [
        RunSpec(method, dict(zip(lists, values, strict=True)) | {"seed": seed})
        for method in methods
        for values in itertools.product(*lists.values())
        for seed in seeds
    ]


@dataclass(frozen=True)
class PlannedRun:
    """A requested run and its present state in the study's folder."""

    spec: RunSpec
    experiment: Experiment | None
    """The resolved experiment; None if it is impossible, see `skip_reason`."""
    folder: Path
    """The folder of the run, which may not exist yet."""
    document: RunDocument | None = None
    """The existing run, truncated to the requested rounds."""
    skip_reason: str = ""
    """The reason not to run it: missing data, an unsupported method, or divergence."""
    is_data_missing: bool = False
    """True if the run is skipped because its data is not on this machine."""

    @property
    def is_done(self) -> bool:
        """True if no more rounds are needed."""
        if self.experiment is None or self.document is None:
            return False
        options = self.experiment.options
        return bool(has_completed(self.document, options.rounds or 0, options.patience))

    @property
    def is_missing(self) -> bool:
        """True if there are rounds to run."""
        return not self.skip_reason and not self.is_done


def plan_runs(
    specs: Sequence[RunSpec],
    folder: Path,
    *,
    on_message: Callable[[str], None] = lambda text: None,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
) -> list[PlannedRun]:
    """Resolve all runs and look up their present states; nothing is run or written.

    Args:
        specs: The requested runs.
        folder: Folder of the study.
        on_message: Called with a message for each corrupt run in the folder.
        dataset: Data of all runs, if passed as a Python object.
        model: Model of all runs, if passed as a Python object.

    Returns:
        A plan for each spec, in the order of `specs`.
    """
    folder_by_hash = _find_runs(folder, on_message)
    loaded: dict[tuple[str, str | None], Dataset] = {}
    plans: dict[int, PlannedRun] = {}
    for group in _group_by_options(specs):
        experiments: Sequence[Experiment | InvalidInputError]
        try:
            experiments = _resolve_group([specs[i] for i in group], loaded, dataset, model)
        except InvalidInputError as error:
            experiments = [error] * len(group)
        for index, experiment in zip(group, experiments, strict=True):
            plans[index] = _plan_run(specs[index], experiment, folder, folder_by_hash)
    resolved = [planned.experiment for planned in plans.values() if planned.experiment]
    for note in describe_changed_inputs(resolved, folder_by_hash.values()):
        on_message(note)
    return [plans[index] for index in range(len(specs))]


def run_missing(
    plans: Sequence[PlannedRun], callback: StudyCallback | None = None
) -> dict[Path, FeddbeError]:
    """Run or resume each missing run once.

    Several runs are executed in parallel, each on one core; a single run uses all cores. Runs whose data
    other machines hold are executed in turn.

    Returns:
        The error of each run that failed, by the run's folder.
    """
    callback = callback or StudyCallback()
    runs = _unique_missing_runs(plans)
    errors: dict[Path, FeddbeError] = {}
    are_local = all(experiment.task.dataset.remote is None for experiment, _ in runs)
    if len(runs) > 1 and available_cores() > 1 and are_local:
        with closing(_ParallelRuns(runs, available_cores(), callback)) as parallel_runs:
            for folder, error in parallel_runs.execute():
                callback.on_run_end(folder, error)
                if error:
                    errors[folder] = error
        return errors
    for experiment, folder in runs:
        try:
            run_or_resume(experiment, folder, callback.run_callback(folder))
        except FeddbeError as error:
            errors[folder] = error
        callback.on_run_end(folder, errors.get(folder))
    return errors


def refresh_plans(plans: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the plans with the present states of their runs."""
    return [
        planned
        if planned.experiment is None
        else _load_plan(planned.spec, planned.experiment, planned.folder)
        for planned in plans
    ]


def _unique_missing_runs(plans: Sequence[PlannedRun]) -> list[tuple[Experiment, Path]]:
    """Return the missing runs in order; of plans that share a folder, the one with most rounds."""
    longest: dict[Path, Experiment] = {}
    for planned in plans:
        if planned.is_missing and planned.experiment:
            known = longest.get(planned.folder)
            if known is None or (planned.experiment.options.rounds or 0) >= (known.options.rounds or 0):
                longest.pop(planned.folder, None)  # its position is that of the longest
                longest[planned.folder] = planned.experiment
    return [(experiment, folder) for folder, experiment in longest.items()]


def _group_by_options(specs: Sequence[RunSpec]) -> Iterable[list[int]]:
    """Group the indices of specs with equal options, whose data, split and model are built once."""
    groups: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault(repr(sorted(spec.options.items())), []).append(index)
    return groups.values()


def _resolve_group(
    specs: Sequence[RunSpec],
    loaded: dict[tuple[str, str | None], Dataset],
    dataset: Dataset | None,
    model: ModelSource | None,
) -> list[Experiment | InvalidInputError]:
    """Resolve specs with equal options; a spec that cannot be resolved gives its error."""
    names = list(dict.fromkeys(spec.method for spec in specs))
    _, options, origins = specs[0].request(resume=True)
    raw_dataset = _load_dataset(options, loaded) if dataset is None else dataset
    request = RunRequest(names, options, origins)
    try:
        experiments = resolve_request(request, single=False, dataset=raw_dataset, model=model)
    except InvalidInputError as error:
        if len(names) == 1:
            return [error] * len(specs)
        return [result for spec in specs for result in _resolve_group([spec], loaded, dataset, model)]
    by_name = dict(zip(names, experiments, strict=True))
    return [by_name[spec.method] for spec in specs]


def _load_dataset(options: Config, loaded: dict[tuple[str, str | None], Dataset]) -> Dataset:
    """Return the data set before it is partitioned; each is loaded once."""
    builtin = data.find_builtin_dataset(options.data)
    name = builtin.name if builtin else options.data
    key = name, options.data_dir
    if key not in loaded:
        data_dir = expand_path(options.data_dir) if options.data_dir else None
        if data.is_remote(name):
            loaded[key] = data.load_remote(options)
        elif builtin:
            loaded[key] = data.BUILTIN_DATASETS[name].load(data_dir)
        else:
            loaded[key] = data.load_dataset(name, data_dir)
    return loaded[key]


def _find_runs(folder: Path, on_message: Callable[[str], None]) -> dict[str, Path]:
    """Return the folder of each run by configuration hash; of equal runs the one with most rounds."""
    longest: dict[str, tuple[int, Path]] = {}
    for path in sorted(folder.glob(f"*/{RUN_FILE}")):
        try:
            store = RunStore.open(path.parent)
        except StoreError as error:
            on_message(f"skipped: {error}")
            continue
        config_hash = store.meta("config_hash")
        rounds = store.last_round()
        store.close()
        longest[config_hash] = max(longest.get(config_hash, (-2, path.parent)), (rounds, path.parent))
    return {config_hash: run_folder for config_hash, (_, run_folder) in longest.items()}


def _plan_run(
    spec: RunSpec,
    experiment: Experiment | InvalidInputError,
    folder: Path,
    folder_by_hash: Mapping[str, Path],
) -> PlannedRun:
    if isinstance(experiment, InvalidInputError):
        is_data_missing = isinstance(experiment, DataMissingError)
        return PlannedRun(spec, None, folder, skip_reason=str(experiment), is_data_missing=is_data_missing)
    stem = Path(experiment.task.dataset.name).stem
    config_hash = experiment.config_hash
    name = f"{stem}-{folders.slug(spec.method)}-seed{spec.seed}-{config_hash[:8]}"
    return _load_plan(spec, experiment, folder_by_hash.get(config_hash, folder / name))


def _load_plan(spec: RunSpec, experiment: Experiment, folder: Path) -> PlannedRun:
    """Return the plan with the document of the run in `folder`, if there is one."""
    if not RunStore.is_run(folder):
        return PlannedRun(spec, experiment, folder)
    stored = load_document(folder, hashes=False)
    document = truncate_run(stored, experiment.options.rounds or 0, experiment.options.patience)
    depends_on_last_round = experiment.method.adapts == "last" or experiment.options.new_clients > 0
    if depends_on_last_round and len(document["rounds"]) < len(stored["rounds"]):
        problem = (
            f"'{folder}' has {last_round(stored)} rounds; fine-tuning or new clients followed the last "
            f"round, not round {last_round(document)}. Request as many rounds, or choose another --out"
        )
        return PlannedRun(spec, None, folder, skip_reason=problem)
    return PlannedRun(spec, experiment, folder, document, status_note(document))


SHUTDOWN_SECONDS = 20.0
"""Seconds that a child process has to abandon its round before it is killed."""
# As in the pool: a forked child shares the data without a copy. Forking is safe on Linux only.
_PROCESSES: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass(frozen=True)
class _ChildProcess:
    """A process that executes one run, and the parent's end of the pipe on which it reports."""

    process: BaseProcess
    pipe: Connection
    folder: Path
    callback: Callback


@dataclass(frozen=True)
class _HookCall:
    """Message of a child: the name of a hook of `Callback`, and its arguments."""

    hook: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class _RunEnd:
    """Last message of a child; `error` is None if the run is complete."""

    error: Exception | None


class _ParallelRuns:
    """Runs in child processes, one per run, at most `jobs` at a time.

    `concurrent.futures` does not fit: if a worker of a `ProcessPoolExecutor` dies, it terminates all others.
    An executor per run would fork while the threads of other executors run.
    """

    def __init__(self, runs: Sequence[tuple[Experiment, Path]], jobs: int, callback: StudyCallback) -> None:
        self.jobs = jobs
        self.callback = callback
        self.waiting = deque(runs)
        self.running: list[_ChildProcess] = []

    def execute(self) -> Iterator[tuple[Path, FeddbeError | None]]:
        """Execute all runs; yield the folder and the error, or None, of each run when it ends."""
        tasks = {experiment.options.model: experiment.task for experiment, _ in self.waiting}
        for task in tasks.values():  # compile once, before the processes would do it at the same time
            backends.warm_up_kernels(task, lambda text: None)
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.jobs:
                self.running.append(self._start(*self.waiting.popleft()))
            ready_pipes = wait([child.pipe for child in self.running])
            for child in [child for child in self.running if child.pipe in ready_pipes]:
                message = _receive(child)
                if isinstance(message, _HookCall):
                    getattr(child.callback, message.hook)(*message.arguments)
                    continue
                self.running.remove(child)
                child.pipe.close()
                child.process.join()
                if message.error is not None and not isinstance(message.error, FeddbeError):
                    raise message.error
                yield child.folder, message.error

    def _start(self, experiment: Experiment, folder: Path) -> _ChildProcess:
        callback = self.callback.run_callback(folder)
        receiver, sender = _PROCESSES.Pipe(duplex=False)
        # A forked child inherits the parent's ends of all pipes; open, they would hide the parent's end.
        inherited: list[Connection] = []
        if _PROCESSES.get_start_method() == "fork":
            inherited = [receiver, *(child.pipe for child in self.running)]
        process = _PROCESSES.Process(
            target=_run_in_child, args=(experiment, folder, sender, inherited), name="feddbe-run", daemon=True
        )
        process.start()
        sender.close()
        return _ChildProcess(process, receiver, folder, callback)

    def close(self) -> None:
        """Stop all running children; their complete rounds are kept."""
        for child in self.running:
            child.process.terminate()
        for child in self.running:
            child.pipe.close()
            child.process.join(SHUTDOWN_SECONDS)
            if child.process.is_alive():  # it hangs; a kill does no more harm to its run
                child.process.kill()
                child.process.join()


def _receive(child: _ChildProcess) -> _HookCall | _RunEnd:
    """Return the child's next message; a child that died without its last message has failed."""
    try:
        message: _HookCall | _RunEnd = child.pipe.recv()
    except (EOFError, OSError):
        child.process.join()
        exit_code = child.process.exitcode
        return _RunEnd(FeddbeError(f"worker process exited unexpectedly (exit code {exit_code})"))
    return message


class _PipeCallback(Callback):
    """Sends hook calls to the parent process, except those of single clients, which are too many."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.pipe.send(_HookCall("on_run_begin", (name, folder, done, rounds)))

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.pipe.send(_HookCall("on_round_end", (done, accuracy)))

    def on_message(self, text: str) -> None:
        self.pipe.send(_HookCall("on_message", (text,)))


def _run_in_child(
    experiment: Experiment, folder: Path, pipe: Connection, inherited: Sequence[Connection]
) -> None:
    """Execute one run on one core and report to the parent; the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure: Exception | None = None
    try:
        signal.signal(signal.SIGTERM, _raise_interrupt)
        end_with_parent()
        for connection in inherited:
            connection.close()
        torch.set_num_threads(1)
        run_or_resume(_with_serial_engine(experiment), folder, _PipeCallback(pipe))
    except KeyboardInterrupt:
        return
    except FeddbeError as error:
        failure = error
    except Exception as error:
        error.add_note(f"in {experiment.name}, '{folder}':\n{traceback.format_exc()}")
        failure = as_portable(error)
    with suppress(OSError):  # the parent has closed the pipe
        pipe.send(_RunEnd(failure))


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _with_serial_engine(experiment: Experiment) -> Experiment:
    options = dataclasses.replace(experiment.options, engine="serial")
    return dataclasses.replace(experiment, options=options)


_COST_OPTIONS = ("data", "model", "local_epochs", "participation", "clients", "new_clients")
"""Options that, with the method, determine approximately how long a round takes."""


class RemainingTimeEstimator:
    """Estimate of the remaining time of a study; each kind of round is timed once."""

    def __init__(self) -> None:
        self._seconds_per_round: dict[tuple[object, ...], float] = {}

    def estimate_seconds(self, plans: Iterable[PlannedRun]) -> float:
        """Return the seconds until all runs end if they are executed in parallel and none stops early."""
        missing = {planned.folder: planned for planned in plans if planned.is_missing}
        seconds = [self._run_seconds(planned) for planned in missing.values()]
        return sum(seconds) / max(1, min(available_cores(), len(seconds)))

    def _run_seconds(self, planned: PlannedRun) -> float:
        assert planned.experiment
        rounds = planned.experiment.options.rounds or 0
        document = planned.document
        if document and len(document["rounds"]) > 1:
            remaining = max(0, rounds - document["rounds"][-1]["round"])
            return remaining * document["cost"]["seconds"]
        return rounds * self._round_seconds(planned.spec.method, planned.experiment)

    def _round_seconds(self, method: str, experiment: Experiment) -> float:
        serial = _with_serial_engine(experiment)
        kind = (method.partition("(")[0], *(getattr(serial.options, key) for key in _COST_OPTIONS))
        if kind not in self._seconds_per_round:
            try:
                estimate = estimate_cost(serial, time_clients(serial, BATCHES, TEST_SAMPLES))
                self._seconds_per_round[kind] = estimate["seconds_per_round"]
            except DivergenceError:  # the run will diverge as early
                self._seconds_per_round[kind] = 0.0
        return self._seconds_per_round[kind]
