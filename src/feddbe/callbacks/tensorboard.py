"""Curves in TensorBoard while runs go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from feddbe.callbacks.base import Callback
from feddbe.errors import InvalidInputError
from feddbe.paths import RUNS_DIR
from feddbe.results.document import RoundResult

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes each round's numbers to event files below `folder`, a run to a subfolder; look at them with
    `tensorboard --logdir FOLDER`. A run that is carried on goes on there.

    Scalars are `accuracy/weighted` and its other readings, `auc`, `train_loss`, `seconds`, `bytes_up` and
    `bytes_down`, and what else was measured as MOMENT/NAME/READING; the step is the round.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidInputError(
                "TensorBoard is not installed; pip install 'feddbe[tensorboard]'"
            ) from error
        self._make = SummaryWriter
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._close()
        self._writer = self._make(str(self._folder.joinpath(*_place(folder))))

    def on_evaluation(self, result: RoundResult) -> None:
        if self._writer is not None:
            for name, value in _scalars(result):
                self._writer.add_scalar(name, value, result["round"])
            self._writer.flush()  # so that it is seen now, and not lost if the process is killed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _place(folder: Path) -> list[str]:
    """A run's own subfolder: its folder's name, after that of the comparison which it is in."""
    return [part for part in folder.parts[-2:] if part not in (folder.anchor, RUNS_DIR.name)]


def _scalars(result: RoundResult) -> Iterator[tuple[str, float]]:
    numbers = {
        "auc": result["auc"], "train_loss": result["train_loss"], "seconds": result["seconds"],
        "bytes_up": result["bytes_up"], "bytes_down": result["bytes_down"],
    }  # fmt: skip
    for reading, value in (result["accuracy"] or {}).items():
        numbers[f"accuracy/{reading}"] = float(str(value))
    for moment, measures in result["metrics"].items():
        for name, readings in measures.items():
            numbers |= {f"{moment}/{name}/{reading}": value for reading, value in readings.items()}
    yield from ((name, value) for name, value in numbers.items() if value is not None)
