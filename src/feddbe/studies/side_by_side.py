"""Runs side by side: a process each, with one torch thread and the serial engine, so that their results are
those of any other way to run them.

Ctrl-C and SIGTERM are for the parent, which then ends its children in good order: each gives up the round in
flight and leaves what is written. If the parent is killed, they end with it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from feddbe import api
from feddbe.engines.base import portable
from feddbe.engines.worker import end_with_parent
from feddbe.errors import FeddbeError
from feddbe.runs.experiment import Experiment
from feddbe.runs.watch import Watch
from feddbe.training import passes

__all__ = ["carry_on_all"]

PATIENCE = 20.0
"""Seconds that a child has to give up its round."""
# As in the pool: a forked child shares the data without a copy; elsewhere than on Linux forking is not safe.
_START: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_Child = tuple[BaseProcess, int]


def carry_on_all(
    work: Sequence[tuple[Experiment, Path]], jobs: int, watch: Callable[[int], Watch]
) -> Generator[tuple[int, FeddbeError | None], None, None]:
    """Carry these runs on, at most `jobs` at a time, in their order: each one's number when it has ended, and
    what kept it from its end. `watch` gives who is told of a run that begins."""
    models = {experiment.options.model: experiment.task for experiment, _ in work}
    for task in models.values():  # compile before there are processes that all would
        passes.get_ready(task, lambda text: None)
    waiting, running = deque(range(len(work))), dict[Connection, _Child]()
    watches: dict[int, Watch] = {}
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


def _hear(pipe: Connection, process: BaseProcess, watch: Watch) -> tuple[bool, Exception | None]:
    """One message of a child: whether it was its last, and the error that it ended with."""
    try:
        what, values = pipe.recv()
    except (EOFError, OSError):
        process.join()
        return True, FeddbeError(f"its process ended without a word (exit code {process.exitcode})")
    if what == "end":
        return True, values
    getattr(watch, what)(*values)
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


class _Teller(Watch):
    """Sends what it is told to the parent; what each client does is not worth a message."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._send("begin", name, folder, done, rounds)

    def round(self, done: int, accuracy: float | None) -> None:
        self._send("round", done, accuracy)

    def remark(self, text: str) -> None:
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
        api.carry_on(dataclasses.replace(experiment, options=options), place, _Teller(pipe))
    except KeyboardInterrupt:
        return
    except FeddbeError as error:
        failure = error
    except Exception as error:
        error.add_note(f"in {experiment.name}, '{place}':\n{traceback.format_exc()}")
        failure = portable(error)
    with suppress(OSError):  # nobody listens any more
        pipe.send(("end", failure))


def _give_up(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
