"""TensorBoard curves, written while runs proceed."""

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
    """Event files with the metrics of each round, in a subfolder of `folder` per run.

    `tensorboard --logdir FOLDER` shows them. A resumed run continues its curves. Scalars are
    `accuracy/weighted` and the other aggregates of accuracy, `auc`, `train_loss`, `seconds`, `bytes_up`,
    `bytes_down`, and all other metrics as MOMENT/NAME/AGGREGATE; the step is the round.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidInputError(
                "TensorBoard is not installed; pip install 'feddbe[tensorboard]'"
            ) from error
        self._create_writer = SummaryWriter
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._close()
        self._writer = self._create_writer(str(self._folder.joinpath(*_subfolder(folder))))

    def on_evaluation(self, result: RoundResult) -> None:
        if self._writer is not None:
            for name, value in _scalars(result):
                self._writer.add_scalar(name, value, result["round"])
            self._writer.flush()  # visible at once, and not lost if the process is killed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _subfolder(folder: Path) -> list[str]:
    """Return the path parts of a run: the names of its comparison's folder, if any, and of its folder."""
    return [part for part in folder.parts[-2:] if part not in (folder.anchor, RUNS_DIR.name)]


def _scalars(result: RoundResult) -> Iterator[tuple[str, float]]:
    """Yield names and values of all scalars that the round has."""
    scalars = {
        "auc": result["auc"], "train_loss": result["train_loss"], "seconds": result["seconds"],
        "bytes_up": result["bytes_up"], "bytes_down": result["bytes_down"],
    }  # fmt: skip
    for aggregate, value in (result["accuracy"] or {}).items():
        scalars[f"accuracy/{aggregate}"] = float(str(value))
    for moment, metrics in result["metrics"].items():
        for name, aggregates in metrics.items():
            scalars |= {f"{moment}/{name}/{aggregate}": value for aggregate, value in aggregates.items()}
    for name, value in scalars.items():
        if value is not None:
            yield name, value
