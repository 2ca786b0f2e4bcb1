"""Run what is missing of a study: cells whose runs are in a folder already are known by their configuration's
hash, whatever their folders are called; others are begun or continued, several side by side.

A run is written after every round and can be continued, so a study can be stopped, or killed, at any time."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
from feddbe.runs.execution import resolve_request, run_or_resume
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import FILE, RunStore
from feddbe.runs.summary import load_document
from feddbe.runs.timing import BATCHES, TESTED, estimate_cost, time_clients
from feddbe.simulation.engines.base import as_portable
from feddbe.simulation.engines.pool import available_cores, end_with_parent
from feddbe.training import backends


@dataclass(frozen=True)
class RunSpec:
    """One run to be: a method, and options of `Config` by name; what is not given has its default."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """The trial that it is."""
        return int(self.options.get("seed", 0))

    def request(self, **more: Any) -> RunRequest:
        """As it would be asked for; `more` wins over its own options."""
        return parse_options([self.method], {**self.options, **more})

    def __str__(self) -> str:
        """The method and the options that were given, as in `fedavg, lr 0.1, seed 2`."""
        told = {**self.options, "seed": self.seed}
        return ", ".join([self.method, *(f"{key} {format_value(value)}" for key, value in told.items())])

    def __hash__(self) -> int:
        return hash((self.method, repr(sorted(self.options.items()))))


def run_grid(
    methods: Sequence[str], options: Mapping[str, Any] | None = None, seeds: Sequence[int] = (0,)
) -> list[RunSpec]:
    """Every method with every combination of values, each with every seed; the last option varies first, and
    seeds before that.

    An option whose value is a list has these values, one after the other; all others are the same for all.
    """
    for what, values in {"method": methods, "seed": seeds, **(options or {})}.items():
        if isinstance(values, list | tuple) and not values:
            raise InvalidInputError(f"{what} = []; a list of values needs at least one")
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


Remark = Callable[[str], None]


@dataclass(frozen=True)
class PlannedRun:
    """A cell and what there is of it."""

    spec: RunSpec
    experiment: Experiment | None
    """With all choices made; None: it cannot be, `refused` says why."""
    folder: Path
    """Where its run is, or will be."""
    document: RunDocument | None = None
    """The run, as far as it has been carried on, and no further than the cell asks for."""
    skip_reason: str = ""
    """Why there is nothing to carry on: the data is not here, the method does not take it, it diverged."""
    is_data_missing: bool = False
    """Whether the reason is that the data is not on this machine."""

    @property
    def is_done(self) -> bool:
        """Whether it needs no more rounds."""
        asked = self.experiment and self.experiment.options
        return bool(
            asked and self.document and has_completed(self.document, asked.rounds or 0, asked.patience)
        )

    @property
    def is_missing(self) -> bool:
        """Whether there is something to run."""
        return not self.skip_reason and not self.is_done


def plan_runs(
    cells: Sequence[RunSpec],
    folder: Path,
    *,
    remark: Remark = lambda text: None,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
) -> list[PlannedRun]:
    """What each cell is and what there is of it in `folder`, in their order. Nothing is run or written.

    `remark` is told of runs there that are damaged. `dataset` and `model`: of all cells, if they were given
    as Python objects.
    """
    there = _runs_in(folder, remark)
    loaded: dict[tuple[str, str | None], Dataset] = {}
    found: list[PlannedRun | None] = [None] * len(cells)
    for group in _alike(cells):
        try:
            some = [cells[i] for i in group]
            experiments: Sequence[Experiment | InvalidInputError] = _resolve(some, loaded, dataset, model)
        except InvalidInputError as error:
            experiments = [error] * len(group)
        for index, experiment in zip(group, experiments, strict=True):
            found[index] = _planned(cells[index], experiment, folder, there)
    return [planned for planned in found if planned]


def run_missing(plans: Sequence[PlannedRun], board: StudyCallback | None = None) -> dict[Path, FeddbeError]:
    """Carry on what is missing, each run once; by the place of a run that failed, why.

    With cores to spare, runs go side by side, each on one of them; one alone has all.
    """
    board = board or StudyCallback()
    by_rounds = sorted((p for p in plans if p.is_missing and p.experiment), key=_rounds)
    wanted = {planned.folder: planned for planned in by_rounds}  # of equal cells the one with most rounds
    missing = [planned for planned in plans if wanted.get(planned.folder) is planned]
    work = [(planned.experiment, planned.folder) for planned in missing if planned.experiment]
    failed: dict[Path, FeddbeError] = {}
    if len(work) > 1 and available_cores() > 1:
        with closing(
            run_parallel(work, available_cores(), lambda i: board.run_callback(missing[i].folder))
        ) as ended:
            for index, error in ended:
                board.on_run_end(missing[index].folder, error)
                if error:
                    failed[missing[index].folder] = error
        return failed
    for experiment, place in work:
        failure: FeddbeError | None = None
        try:
            run_or_resume(experiment, place, board.run_callback(place))
        except FeddbeError as error:
            failure = failed[place] = error
        board.on_run_end(place, failure)
    return failed


def refresh_plans(plans: Iterable[PlannedRun]) -> list[PlannedRun]:
    """The same, with what there is of their runs by now."""
    return [
        planned if planned.experiment is None else _look(planned.spec, planned.experiment, planned.folder)
        for planned in plans
    ]


def _rounds(planned: PlannedRun) -> int:
    return planned.experiment.options.rounds or 0 if planned.experiment else 0


def _alike(cells: Sequence[RunSpec]) -> Iterable[list[int]]:
    """Cells with the same options, of which data, split and model are made once."""
    groups: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault(repr(sorted(cell.options.items())), []).append(index)
    return groups.values()


def _resolve(
    cells: Sequence[RunSpec],
    loaded: dict[tuple[str, str | None], Dataset],
    dataset: Dataset | None,
    model: ModelSource | None,
) -> list[Experiment | InvalidInputError]:
    """The experiments of cells that have the same options; or of one alone, why it cannot be."""
    names = list(dict.fromkeys(cell.method for cell in cells))
    _, options, origins = cells[0].request(resume=True)
    held = _load(options, loaded) if dataset is None else dataset
    try:
        found = resolve_request(RunRequest(names, options, origins), single=False, dataset=held, model=model)
    except InvalidInputError as error:
        if len(names) == 1:
            return [error] * len(cells)
        return [one for cell in cells for one in _resolve([cell], loaded, dataset, model)]
    by_name = dict(zip(names, found, strict=True))
    return [by_name[cell.method] for cell in cells]


def _load(options: Config, loaded: dict[tuple[str, str | None], Dataset]) -> Dataset:
    """The data as it is read, before it is arranged; each once."""
    known = data.find_dataset(options.data)
    where = known.name if known else options.data, options.data_dir
    if where not in loaded:
        directory = expand_path(options.data_dir) if options.data_dir else None
        loaded[where] = (
            data.BUILTIN_DATASETS[known.name].load(directory)
            if known
            else data.load_dataset(where[0], directory)
        )
    return loaded[where]


def _runs_in(folder: Path, remark: Remark) -> dict[str, Path]:
    """Configuration's hash -> folder of its run; of several, that with the most rounds."""
    found: dict[str, tuple[int, Path]] = {}
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            store = RunStore.open(path.parent)
        except StoreError as error:
            remark(f"passed over: {error}")
            continue
        key, rounds = store.meta("config_hash"), store.last_round()
        store.close()
        found[key] = max(found.get(key, (-2, path.parent)), (rounds, path.parent))
    return {key: place for key, (_, place) in found.items()}


def _planned(
    spec: RunSpec, experiment: Experiment | InvalidInputError, folder: Path, there: dict[str, Path]
) -> PlannedRun:
    if isinstance(experiment, InvalidInputError):
        is_data_missing = isinstance(experiment, DataMissingError)
        return PlannedRun(spec, None, folder, skip_reason=str(experiment), is_data_missing=is_data_missing)
    stem, digest = Path(experiment.task.dataset.name).stem, experiment.config_hash
    name = f"{stem}-{folders.slug(spec.method)}-seed{spec.seed}-{digest[:8]}"
    return _look(spec, experiment, there.get(digest, folder / name))


def _look(spec: RunSpec, experiment: Experiment, place: Path) -> PlannedRun:
    if not RunStore.is_run(place):
        return PlannedRun(spec, experiment, place)
    stored = load_document(place, hashes=False)
    rounds, patience = experiment.options.rounds or 0, experiment.options.patience
    found = truncate_run(stored, rounds, patience)
    ends_with_more = experiment.method.adapts == "last" or experiment.options.new_clients > 0
    if ends_with_more and len(found["rounds"]) < len(stored["rounds"]):
        problem = (
            f"'{place}' has {last_round(stored)} rounds, and was fine-tuned or joined by newcomers after the "
            f"last, not after {last_round(found)}; ask for as many rounds, or choose another --out"
        )
        return PlannedRun(spec, None, place, skip_reason=problem)
    return PlannedRun(spec, experiment, place, found, status_note(found))


PATIENCE = 20.0
"""Seconds that a child has to give up its round."""
# As in the pool: a forked child shares the data without a copy; elsewhere than on Linux forking is not safe.
_START: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_Child = tuple[BaseProcess, int]


def run_parallel(
    work: Sequence[tuple[Experiment, Path]], jobs: int, watch: Callable[[int], Callback]
) -> Generator[tuple[int, FeddbeError | None], None, None]:
    """Carry these runs on, at most `jobs` at a time, in their order: each one's number when it has ended, and
    what kept it from its end. `watch` gives who is told of a run that begins."""
    models = {experiment.options.model: experiment.task for experiment, _ in work}
    for task in models.values():  # compile before there are processes that all would
        backends.warm_up_kernels(task, lambda text: None)
    waiting, running = deque(range(len(work))), dict[Connection, _Child]()
    watches: dict[int, Callback] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index = waiting.popleft()
                watches[index] = watch(index)
                pipe, process = _start(*work[index], list(running))
                running[pipe] = process, index
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process, index = running[ready]
                ended, error = _hear(ready, process, watches[index])
                if ended:
                    del running[ready]
                    ready.close()
                    process.join()
                    if error is not None and not isinstance(error, FeddbeError):
                        raise error
                    yield index, error
    finally:
        _end(running)


def _start(
    experiment: Experiment, place: Path, others: Sequence[Connection]
) -> tuple[Connection, BaseProcess]:
    ours, theirs = _START.Pipe(duplex=False)
    # a forked child also has our ends of all pipes: one that it keeps would not close when we end
    inherited = [ours, *others] if _START.get_start_method() == "fork" else []
    process = _START.Process(
        target=_work, args=(experiment, place, theirs, inherited), name="feddbe-run", daemon=True
    )
    process.start()
    theirs.close()
    return ours, process


def _hear(pipe: Connection, process: BaseProcess, callback: Callback) -> tuple[bool, Exception | None]:
    """One message of a child: whether it was its last, and the error that it ended with."""
    try:
        what, values = pipe.recv()
    except (EOFError, OSError):
        process.join()
        return True, FeddbeError(f"its process ended without a word (exit code {process.exitcode})")
    if what == "end":
        return True, values
    getattr(callback, what)(*values)
    return False, None


def _end(running: dict[Connection, _Child]) -> None:
    """Ask all to give up, and wait for them."""
    for process, _ in running.values():
        process.terminate()
    for pipe, (process, _) in running.items():
        pipe.close()
        process.join(PATIENCE)
        if process.is_alive():  # it hangs; a kill does no more harm to its run
            process.kill()
            process.join()


class _Teller(Callback):
    """Sends what it is told to the parent; what each client does is not worth a message."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._send("begin", name, folder, done, rounds)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self._send("round", done, accuracy)

    def on_message(self, text: str) -> None:
        self._send("remark", text)

    def _send(self, what: str, *values: object) -> None:
        self.pipe.send((what, values))


def _work(experiment: Experiment, place: Path, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """A child: one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure: Exception | None = None
    try:
        signal.signal(signal.SIGTERM, _give_up)
        end_with_parent()
        for other in inherited:
            other.close()
        torch.set_num_threads(1)
        options = dataclasses.replace(experiment.options, engine="serial")
        run_or_resume(dataclasses.replace(experiment, options=options), place, _Teller(pipe))
    except KeyboardInterrupt:
        return
    except FeddbeError as error:
        failure = error
    except Exception as error:
        error.add_note(f"in {experiment.name}, '{place}':\n{traceback.format_exc()}")
        failure = as_portable(error)
    with suppress(OSError):  # nobody listens any more
        pipe.send(("end", failure))


def _give_up(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


_SAME = ("data", "model", "local_epochs", "participation", "clients", "new_clients")
"""What, with the method, decides how long a round takes, nearly."""


class RemainingTime:
    """Times a round of each kind of run once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], float] = {}

    def left(self, plans: Iterable[PlannedRun]) -> float:
        """Seconds until the last of these runs would end here, side by side; none may stop early."""
        missing = {planned.folder: planned for planned in plans if planned.is_missing}
        each = [self._left(planned) for planned in missing.values()]
        return sum(each) / max(1, min(available_cores(), len(each)))

    def _left(self, planned: PlannedRun) -> float:
        assert planned.experiment
        rounds, found = planned.experiment.options.rounds or 0, planned.document
        if found and len(found["rounds"]) > 1:
            return max(0, rounds - found["rounds"][-1]["round"]) * found["cost"]["seconds"]
        return rounds * self._round(planned)

    def _round(self, planned: PlannedRun) -> float:
        experiment = planned.experiment
        assert experiment
        options = dataclasses.replace(experiment.options, engine="serial")
        kind = (planned.spec.method.partition("(")[0], *(getattr(options, key) for key in _SAME))
        if kind not in self._known:
            alone = dataclasses.replace(experiment, options=options)
            try:
                timed = estimate_cost(alone, time_clients(alone, BATCHES, TESTED))
                self._known[kind] = timed["seconds_per_round"]
            except DivergenceError:  # then the run will, as soon
                self._known[kind] = 0.0
        return self._known[kind]
