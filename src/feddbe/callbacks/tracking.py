"""Experiment trackers: Weights & Biases, MLflow and TensorBoard, while runs proceed or from finished runs.

Servers, keys and offline modes are those of the packages, set by their environment variables.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from feddbe.callbacks.base import Callback, CallbackList
from feddbe.errors import InvalidInputError
from feddbe.paths import RUNS_DIR, expand_path
from feddbe.results.document import RoundResult, RunDocument, run_id

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TRACKERS = ("wandb:PROJECT", "mlflow:EXPERIMENT", "tensorboard", "tensorboard:FOLDER")
"""Texts that name a tracker."""
CallbackSpec = Callback | str
"""A callback, or one of `TRACKERS`."""


def make_callback(specs: CallbackSpec | Sequence[CallbackSpec] | None) -> CallbackList:
    """Return callbacks and trackers as one callback.

    Args:
        specs: Callbacks, or texts such as `wandb:PROJECT`.

    Raises:
        InvalidInputError: A text is not one of `TRACKERS`, or its package is not installed.
    """
    if specs is None:
        return CallbackList([])
    if isinstance(specs, str | Callback):
        specs = [specs]
    return CallbackList([_make_tracker(spec) for spec in specs])


def _make_tracker(spec: CallbackSpec) -> Callback:
    """Return the tracker that a text names; a callback is returned unchanged."""
    if isinstance(spec, Callback):
        return spec
    name, _, argument = spec.partition(":")
    match name, argument:
        case "wandb", project if project:
            return WandB(project)
        case "mlflow", experiment if experiment:
            return MLflow(experiment)
        case "tensorboard", folder:
            return TensorBoard(folder or RUNS_DIR / "tensorboard")
        case _:
            raise InvalidInputError(f"callback = '{spec}'; allowed: {', '.join(TRACKERS)}")


def replay(run: Mapping[str, Any], callback: CallbackSpec | Sequence[CallbackSpec]) -> None:
    """Pass a finished run to callbacks or trackers, as if it proceeded now.

    W&B and MLflow continue the run that they have, and skip rounds that they have.

    Args:
        run: The run, as `feddbe.load_run` returns it.
        callback: Callbacks, or texts such as `wandb:PROJECT`.
    """
    with make_callback(callback) as callbacks:
        replay_documents([cast(RunDocument, run)], callbacks)


def replay_documents(documents: Sequence[RunDocument], callback: Callback) -> None:
    """Pass finished runs to a callback that is already entered."""
    for document in documents:
        callback.on_run_config(document["config"], run_id(document["config_hash"], document["begun"]))
        rounds = document["rounds"][-1]["round"] if document["rounds"] else 0
        callback.on_run_begin(document["method"], Path(document["folder"]), 0, rounds)
        for result in document["rounds"]:
            if result["accuracy"]:
                callback.on_evaluation(result)


class _Tracker(Callback):
    """Base class of trackers, which have one open run at a time."""

    _config: Mapping[str, Any] = {}
    _run_id = ""

    def on_run_config(self, config: Mapping[str, Any], run_id: str) -> None:
        self._config = config
        self._run_id = run_id

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._close(has_failed=False)
        self._open(name, folder, done)

    def on_evaluation(self, result: RoundResult) -> None:
        self._log(dict(_scalars(result)), result["round"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(has_failed=kind is not None)

    def _open(self, name: str, folder: Path, done: int) -> None:
        raise NotImplementedError

    def _log(self, scalars: Mapping[str, float], round_: int) -> None:
        raise NotImplementedError

    def _close(self, *, has_failed: bool) -> None:
        """End the open run, if there is one."""
        raise NotImplementedError


class WandB(_Tracker):
    """A run of Weights & Biases for each run, with its options as configuration.

    A resumed run continues its curves. The step is the round; scalars are those of `TensorBoard`.
    """

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing_package("W&B", "wandb") from error
        self._wandb: Any = wandb
        self._project = project
        self._run: Any = None

    def _open(self, name: str, folder: Path, done: int) -> None:
        self._run = self._wandb.init(
            project=self._project,
            name=name,
            group=_run_path(folder)[0],
            id=self._run_id,
            resume="allow",
            reinit="create_new",
            config=dict(self._config),
            settings=self._wandb.Settings(console="off"),  # workers are forked, and must not write to it
        )

    def _log(self, scalars: Mapping[str, float], round_: int) -> None:
        self._run.log(dict(scalars), step=round_, commit=True)

    def _close(self, *, has_failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(has_failed))
        self._run = None


class MLflow(_Tracker):
    """A run of an MLflow experiment for each run, with its options as parameters.

    A resumed run continues its curves. The step is the round; scalars are those of `TensorBoard`.
    """

    _TAG = "feddbe.run_id"

    def __init__(self, experiment: str) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise _missing_package("MLflow", "mlflow") from error
        self._mlflow: Any = mlflow
        self._experiment = experiment
        self._client: Any = None
        self._run = ""
        self._logged_rounds: set[int] = set()

    def _open(self, name: str, folder: Path, done: int) -> None:
        self._client = self._mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        )
        existing = self._client.search_runs(
            [experiment_id], f"tags.`{self._TAG}` = '{self._run_id}'", max_results=1
        )
        if existing:
            self._run = existing[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            history = self._client.get_metric_history(self._run, "seconds")
            self._logged_rounds = {metric.step for metric in history}
            return
        tags = {self._TAG: self._run_id, "folder": str(folder)}
        self._run = self._client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        self._logged_rounds = set()
        for key, value in self._config.items():
            self._client.log_param(self._run, key, str(value)[:500])

    def _log(self, scalars: Mapping[str, float], round_: int) -> None:
        if round_ in self._logged_rounds:
            return
        milliseconds = int(1000 * time.time())
        metrics = [
            self._mlflow.entities.Metric(name, value, milliseconds, round_) for name, value in scalars.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)
        self._logged_rounds.add(round_)

    def _close(self, *, has_failed: bool) -> None:
        if self._run:
            self._client.set_terminated(self._run, "FAILED" if has_failed else "FINISHED")
        self._run = ""


class TensorBoard(_Tracker):
    """Event files with the metrics of each round, in a subfolder of `folder` per run.

    `tensorboard --logdir FOLDER` shows them. A resumed run continues its curves. Scalars are
    `accuracy/weighted` and the other aggregates of accuracy, `auc`, `train_loss`, `seconds`, `bytes_up`,
    `bytes_down`, and all other metrics as MOMENT/NAME/AGGREGATE; the step is the round.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing_package("TensorBoard", "tensorboard") from error
        self._create_writer = SummaryWriter
        self._folder = expand_path(str(folder))
        self._writer: SummaryWriter | None = None

    def _open(self, name: str, folder: Path, done: int) -> None:
        path = self._folder.joinpath(*_run_path(folder))
        purge_step = None if done else 0  # a run from its start replaces earlier curves
        self._writer = self._create_writer(str(path), purge_step=purge_step)

    def _log(self, scalars: Mapping[str, float], round_: int) -> None:
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, round_)
            self._writer.flush()  # visible at once, and not lost if the process is killed

    def _close(self, *, has_failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _missing_package(name: str, extra: str) -> InvalidInputError:
    return InvalidInputError(f"{name} is not installed; pip install 'feddbe[{extra}]'")


def _run_path(folder: Path) -> list[str]:
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
