"""Hyper-parameter search on validation data with Optuna.

Test data is never used: the runs have a split of the training data alone, and are tested on the last share
of each client's. Every trial is a run in a folder and can be resumed. The search is in `tune.sqlite` there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe import data, methods, paths, seeds
from feddbe.callbacks.base import Callback, StudyCallback
from feddbe.config.options import Config, RunRequest
from feddbe.config.parameters import format_value, parse_number_or_text
from feddbe.data.split import Split
from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError, StoreError, one_line, unknown_name
from feddbe.paths import expand_path
from feddbe.runs import folders, store
from feddbe.runs.build_document import load_document
from feddbe.runs.experiment import Experiment, resolve
from feddbe.studies import runner
from feddbe.studies.paper import published_accuracy
from feddbe.studies.runner import RunSpec
from feddbe.studies.study_record import (
    RECORD_FILE,
    Purpose,
    SearchResult,
    StudyRecord,
    as_study_run,
    save_record,
)  # fmt: skip

if TYPE_CHECKING:
    from optuna import Study
    from optuna import Trial as OptunaTrial


VALIDATION = 0.2
"""Default share of the training data that is held out."""
_SEARCH_FILE = "tune.sqlite"
_SPLIT_FILE = "split.npz"


@dataclass(frozen=True)
class Trial:
    """A combination of values and its best validation accuracy.

    For a method that fine-tunes after the last round, it is the accuracy after that.
    """

    values: dict[str, Any]
    accuracy: float | None
    """None if the trial was pruned."""
    note: str = ""


@dataclass(frozen=True)
class TuneResult:
    """Result of a search."""

    method: str
    space: Space
    trials: list[Trial]
    published: dict[str, Any]
    """The values of the first trial: those of the paper, or the defaults."""
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of all runs; the split has the validation data as test data."""
    is_fine_tuned: bool = False
    """True if accuracies are measured after the fine-tuning that follows the last round."""
    validation: float = VALIDATION
    """Share of the training data on which runs are tested."""

    @property
    def best(self) -> Trial:
        """The trial with the best accuracy; of equal ones the first."""
        return max(self.trials, key=lambda trial: -1.0 if trial.accuracy is None else trial.accuracy)

    @property
    def published_trial(self) -> Trial:
        return next(trial for trial in self.trials if trial.values == self.published)

    def to_json(self) -> SearchResult:
        """Return the part of the result that is not in the runs, as JSON values."""
        return {
            "space": self.space,
            "trials": [
                {"values": trial.values, "accuracy": trial.accuracy, "note": trial.note}
                for trial in self.trials
            ],
            "published": self.published,
            "is_fine_tuned": self.is_fine_tuned,
        }

    @classmethod
    def from_record(cls, record: StudyRecord, folder: Path) -> TuneResult:
        """Return the result of a recorded search.

        Raises:
            StoreError: The record has no result of a search.
        """
        result = record.result
        if result is None:
            raise StoreError(f"'{folder}' has no result of a search; repeat the command")
        trials = [Trial(**trial) for trial in result["trials"]]
        tried = [trial.values for trial in trials]
        if result["published"] not in tried or any(
            values.keys() != result["space"].keys() for values in tried
        ):
            raise StoreError(
                f"'{folder / RECORD_FILE}' has trials that do not fit its search; repeat the command"
            )
        return cls(
            record.methods[0],
            result["space"],
            trials,
            result["published"],
            folder,
            record.options,
            result["is_fine_tuned"],
            record.validation or VALIDATION,
        )

    def method_with(self, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the method with these values in brackets, and the values that are options of a run."""
        return insert_values(self.method, values)


def tune(
    request: RunRequest, *, trials: int = 20, space: Sequence[str] = (), callback: Callback | None = None
) -> TuneResult:
    """Search for the best values of one method; a stopped search continues.

    Args:
        request: One method and its options.
        trials: Total number of trials, including those of earlier calls.
        space: Values to choose from, as in `kappa=1,5,50`; by default those that the method suggests.
        callback: Notified of the progress of each run.
    """
    optuna = _import_optuna()
    (method,), options, _ = request
    if trials < 1:
        raise InvalidInputError(f"trials = {trials}; allowed: a whole number >= 1")
    if "(" in method:
        raise InvalidInputError(
            f"'{method}': a searched method cannot have values in brackets; fix them by --space NAME=VALUE"
        )
    if data.is_remote(options.data):
        raise InvalidInputError(f"'{options.data}' has no rows here to split; tune on data of this machine")
    share = options.validation if "validation" in request.origins else VALIDATION
    if not share:
        raise InvalidInputError("validation = 0; a search needs validation data: it must not use test data")
    name = f"tune-{Path(options.data.partition('(')[0]).stem}-{folders.slug(method)}"
    folder = expand_path(options.out) if options.out else paths.RUNS_DIR / name
    experiment = resolve(method, dataclasses.replace(options, validation=share))
    search_space = build_search_space(experiment, space)
    published = {key: published_value(experiment, key) for key in search_space}
    combinations = math.prod(map(len, search_space.values()))
    store.make_folder(folder)
    with store.exclusive(folder):
        with _reading_search(folder / _SEARCH_FILE):
            study = _open_optuna_study(optuna, folder, _identify(experiment, search_space), published)
            _check_trials(study, search_space)
        run_options = _run_options(options, experiment.task.split, folder)
        search = _Tuner(optuna, study, experiment, run_options, search_space, folder, callback or Callback())
        while len(search.finished()) < min(trials, combinations):
            search.run_trial()
        results = [search.summarize(trial) for trial in search.finished()]
    result = TuneResult(
        method, search_space, results, published, folder, run_options, search.is_fine_tuned, share
    )
    _save_record(result, request)
    return result


def _save_record(result: TuneResult, request: RunRequest) -> None:
    """Write the record of the search; all runs in its folder belong to it."""
    options = {key: getattr(request.config, key) for key in request.origins}
    runs = [load_document(folder, hashes=False) for folder in folders.resolve_runs(str(result.folder))]
    record = StudyRecord(
        name="",
        purpose=Purpose.TUNING,
        methods=(result.method,),
        options=options,
        seeds=(request.config.seed,),
        partition_seeds=(),
        baseline=result.method,
        validation=result.validation,
        runs=tuple(map(as_study_run, runs)),
        result=result.to_json(),
    )
    save_record(record, result.folder)


class _Tuner:
    """A search in progress."""

    def __init__(
        self, optuna: Any, study: Study, experiment: Experiment, run_options: Mapping[str, Any], space: Space,
        folder: Path, callback: Callback,
    ) -> None:  # fmt: skip
        self.optuna = optuna
        self.study = study
        self.method = experiment.name
        self.run_options = run_options
        self.space = space
        self.folder = folder
        self.callback = callback
        self.is_fine_tuned = experiment.method.adapts == "last"

    def finished(self) -> list[Any]:
        """Return the complete and pruned trials in order."""
        return [trial for trial in self.study.trials if trial.state.name in ("COMPLETE", "PRUNED")]

    def run_trial(self) -> None:
        """Run one trial; its values depend only on the seed and the trials before it."""
        trial, values = self._choose_values()
        method, options = insert_values(self.method, values)
        spec = RunSpec(method, {**self.run_options, **options})
        (planned,) = runner.plan_runs([spec], self.folder)
        if planned.experiment is None:
            raise InvalidInputError(planned.skip_reason)
        errors: Mapping[Path, Exception] = {}
        try:
            if not planned.skip_reason:
                errors = runner.run_missing([planned], _PruningStudyCallback(self, trial))
        except self.optuna.TrialPruned:
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
            return
        for error in errors.values():
            if not isinstance(error, DivergenceError):
                raise error
        (planned,) = runner.refresh_plans([planned])
        accuracy = None
        if planned.skip_reason:
            trial.set_user_attr("note", "diverged")
        elif planned.document:
            accuracy = published_accuracy(planned.document)
        self.study.tell(trial, accuracy["weighted"] if accuracy else 0.0)

    def _choose_values(self) -> tuple[OptunaTrial, dict[str, Any]]:
        """Return Optuna's proposal or, if it was tried already, an untried random combination."""
        tried = [trial.params for trial in self.finished()]
        seed = int(self.run_options.get("seed") or 0)
        rng = seeds.make_rng(seed, "tune", len(tried))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=rng.randint(2**31))
        trial, values = self._ask()
        if values not in tried:
            return trial, values
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        while values in tried:
            values = {key: choices[rng.randint(len(choices))] for key, choices in self.space.items()}
        self.study.enqueue_trial(values)
        return self._ask()

    def _ask(self) -> tuple[OptunaTrial, dict[str, Any]]:
        trial = self.study.ask()
        return trial, {key: trial.suggest_categorical(key, choices) for key, choices in self.space.items()}

    def summarize(self, trial: Any) -> Trial:
        """Return the result of a finished trial of Optuna."""
        values = {key: trial.params[key] for key in self.space}
        if trial.state.name == "PRUNED":
            return Trial(values, None, "stopped early")
        return Trial(values, trial.value, trial.user_attrs.get("note", ""))


class _PruningStudyCallback(StudyCallback):
    """Study callback of a trial; its run can be pruned."""

    def __init__(self, search: _Tuner, trial: OptunaTrial) -> None:
        self.search = search
        self.trial = trial

    def run_callback(self, folder: Path) -> Callback:
        return _PruningCallback(self.search, self.trial)


class _PruningCallback(Callback):
    """Stops a run whose accuracy is below the median of the other trials at the same round."""

    def __init__(self, search: _Tuner, trial: OptunaTrial) -> None:
        self.search = search
        self.trial = trial
        self.last_reported = -1

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        number = len(self.search.finished()) + 1
        self.search.callback.on_run_begin(f"{number}: {name}", folder, done, rounds)

    def on_client_end(self, done: int, total: int) -> None:
        self.search.callback.on_client_end(done, total)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.search.callback.on_round_end(done, accuracy)
        if self.search.is_fine_tuned:  # the relevant accuracy is known after the last round only
            return
        if accuracy is not None and done > self.last_reported:
            self.last_reported = done
            self.trial.report(accuracy, done)
            if self.trial.should_prune():
                raise self.search.optuna.TrialPruned

    def on_message(self, text: str) -> None:
        self.search.callback.on_message(text)


def _identify(experiment: Experiment, space: Space) -> str:
    """Return the name of a search: a hash of its run (data and split by content), length and space."""
    options = experiment.options
    identity = [experiment.config_hash, options.rounds, options.patience, space]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _reading_search(path: Path) -> Iterator[None]:
    """Convert every error about Optuna's file, which may come from anywhere, into one line."""
    try:
        store.check_files(path)
        if path.exists():
            with closing(sqlite3.connect(path)) as db:  # a view could compute forever
                if db.execute("SELECT 1 FROM sqlite_schema WHERE type IN ('view', 'trigger')").fetchone():
                    raise ValueError("views or triggers")
        yield
    except (FeddbeError, MemoryError, OSError):
        raise
    except Exception as error:  # with a damaged file, SQLAlchemy and Optuna raise any exception
        original = getattr(error, "orig", None) or error  # SQLAlchemy wraps errors of SQLite
        if store.is_environment_error(original):
            raise StoreError(
                f"cannot use '{path}': {one_line(original)}; what was there is intact"
            ) from error
        raise StoreError(
            f"'{path}' is not the file of a search ({type(error).__name__}: {one_line(error)}); remove it "
            "and repeat the command, which uses the finished runs"
        ) from error


def _check_trials(study: Study, space: Space) -> None:
    """Raise an error if a finished trial has values that are not searched, or an accuracy that is none."""
    for trial in study.trials:
        if trial.state.name in ("COMPLETE", "PRUNED"):
            if any(trial.params[key] not in choices for key, choices in space.items()):
                raise ValueError(f"values of trial {trial.number}")
            if trial.state.name == "COMPLETE" and not 0 <= (trial.value or 0.0) <= 1:
                raise ValueError(f"accuracy of trial {trial.number}")
            if not isinstance(trial.user_attrs.get("note", ""), str):
                raise ValueError(f"note of trial {trial.number}")


def _open_optuna_study(optuna: Any, folder: Path, name: str, published: Mapping[str, Any]) -> Study:
    """Create or resume the search in this folder; the published values are the first trial."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / _SEARCH_FILE}")
    if any(stored_name != name for stored_name in optuna.get_all_study_names(storage)):
        raise InvalidInputError(
            f"'{folder}' contains another search (other method, options, data, split or space); choose "
            "another --out"
        )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=5)
    study: Study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", pruner=pruner, load_if_exists=True
    )
    if not study.trials:
        study.enqueue_trial(dict(published))
    for trial in study.trials:  # left by a kill: it is repeated, and its run is resumed
        if trial.state.name == "RUNNING":
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params or dict(published))
    return study


def _run_options(options: Config, split: Split, folder: Path) -> dict[str, Any]:
    """Return the options of all runs, on a split that has training data only."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    explicit = {
        key: value
        for key, value in values.items()
        if value != Config.__dataclass_fields__[key].default
        and key not in ("method", "out", "resume", "json", "validation", "partition", "clients", "split")
    }
    Split(split.train, split.validation).save(folder / _SPLIT_FILE)
    return {"eval_after": False, "metrics": "accuracy", **explicit, "split": str(folder / _SPLIT_FILE)}


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InvalidInputError("tune needs Optuna; install it with: pip install 'feddbe[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


Space = dict[str, list[Any]]
"""Values to choose from, by name of an option (`kappa`, `lr`)."""
LEARNING_RATES = (0.005, 0.01, 0.05, 0.1)
"""Searched learning rates; the paper gives none."""


def build_search_space(experiment: Experiment, items: Sequence[str] = ()) -> Space:
    """Return the values to search, including the published ones.

    Args:
        experiment: The method that is searched.
        items: Values as in `kappa=1,5,50`. By default those that the method and its add-ons suggest, and the
            learning rate if the method uses it.
    """
    parameters = {
        parameter["name"]: parameter
        for part in _described_parts(experiment)
        for parameter in part["parameters"]
    }
    space: Space = {}
    if items:
        space = dict(_parse_item(item, [*parameters, "lr"]) for item in items)
    else:
        for name, parameter in parameters.items():
            if parameter["search"]:
                space[name] = [parse_number_or_text(word) for word in parameter["search"].split()]
        if experiment.config["lr"] is not None:
            space["lr"] = list(LEARNING_RATES)
    return {key: _sort_values([*values, published_value(experiment, key)]) for key, values in space.items()}


def _sort_values(values: Sequence[Any]) -> list[Any]:
    """Return the values without duplicates, numbers by size before all others."""
    unique = list(dict.fromkeys(values))
    numbers = sorted(value for value in unique if isinstance(value, int | float))
    return [*numbers, *(value for value in unique if not isinstance(value, int | float))]


def _described_parts(experiment: Experiment) -> list[methods.MethodInfo]:
    """Return the descriptions of the method and its add-ons."""
    names = [part.partition("(")[0].strip() for part in experiment.name.lower().split("+")]
    return [part for part in methods.describe_methods() if part["name"] in names]


def _parse_item(item: str, known: Sequence[str]) -> tuple[str, list[Any]]:
    key, equals, text = (word.strip() for word in item.partition("="))
    values = [parse_number_or_text(word.strip()) for word in text.split(",") if word.strip()]
    if not equals or not values:
        raise InvalidInputError(f"--space {item}: write it as --space kappa=1,5,50")
    if key not in known:
        raise unknown_name("hyperparameter", key, known)
    return key, values


def insert_values(method: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the method with these values in brackets, and the values that are options of a run."""
    remaining = {key: value for key, value in values.items() if key != "lr"}
    parts = method.split("+")
    parameters = {
        part["name"]: {parameter["name"] for parameter in part["parameters"]}
        for part in methods.describe_methods()
    }
    for index, part in reversed(list(enumerate(parts))):  # an add-on takes precedence over the method
        if part.lower() not in parameters:  # in a record that was edited
            raise unknown_name("method", part, parameters)
        keys = [key for key in remaining if key in parameters[part.lower()]]
        texts = [f"{key}={format_value(remaining.pop(key))}" for key in keys]
        if texts:
            parts[index] = f"{part}({','.join(texts)})"
    return "+".join(parts), {"lr": values["lr"]} if "lr" in values else {}


def published_value(experiment: Experiment, key: str) -> Any:
    """Return the value that a run has without a search."""
    if key == "lr":
        return experiment.config["lr"]
    for options in reversed(experiment.config["method_options"].values()):
        if key in options:
            return options[key]
    raise unknown_name("hyperparameter", key, ())
