"""Search hyper-parameters on validation data: Optuna chooses, runs answer.

The test data take no part, not even to be looked at: runs have a split of the training data alone, of which
the last share of every client's is what they are tested on. Every trial is a run in a folder and can be
continued; the search itself is in `tune.sqlite` there, and goes on from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe import methods, paths, seeds
from feddbe.callbacks.base import Callback, StudyCallback
from feddbe.config.options import Config, RunRequest
from feddbe.config.parameters import format_value, parse_number_or_text
from feddbe.data.split import Split
from feddbe.errors import DivergenceError, InvalidInputError, unknown_name
from feddbe.paths import expand_path
from feddbe.runs import folders, store
from feddbe.runs.experiment import Experiment, resolve
from feddbe.studies import runner
from feddbe.studies.paper import published_accuracy
from feddbe.studies.runner import RunSpec

if TYPE_CHECKING:
    from optuna import Study
    from optuna import Trial as Asking


VALIDATION = 0.2
"""Share of the training data, unless another is asked for."""
_FILE, _SPLIT = "tune.sqlite", "split.npz"


@dataclass(frozen=True)
class Trial:
    """One choice of values, and the best validation accuracy with it: of a method that fine-tunes after the
    last round, the one after that."""

    values: dict[str, Any]
    accuracy: float | None
    """None: it was stopped because others had been better by then."""
    note: str = ""


@dataclass(frozen=True)
class TuneResult:
    """What came of a search."""

    method: str
    space: Space
    trials: list[Trial]
    published: dict[str, Any]
    """The values without a search: those of the paper where it gives any. They are the first trial."""
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    is_fine_tuned: bool = False
    """Whether accuracies are those after the fine-tuning that follows the last round."""

    @property
    def best(self) -> Trial:
        """Of equal ones the first."""
        return max(self.trials, key=lambda trial: -1.0 if trial.accuracy is None else trial.accuracy)

    @property
    def first(self) -> Trial:
        return next(trial for trial in self.trials if trial.values == self.published)

    def best_name(self, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The method with these values in its brackets, and those that are options of a run."""
        return name_with_values(self.method, values)


def tune(
    asked: RunRequest, *, trials: int = 20, space: Sequence[str] = (), callback: Callback | None = None
) -> TuneResult:
    """Search for the best values of one method; a search that was stopped goes on."""
    optuna = _optuna()
    (method,), options, _ = asked
    if trials < 1:
        raise InvalidInputError(f"trials = {trials}; allowed: a whole number >= 1")
    if "(" in method:
        raise InvalidInputError(
            f"'{method}': what is searched has no values yet; fix others by --space NAME=VALUE"
        )
    share = options.validation if "validation" in asked.origins else VALIDATION
    if not share:
        raise InvalidInputError(
            "validation = 0; a search needs validation data: it must not look at test data"
        )
    name = f"tune-{Path(options.data.partition('(')[0]).stem}-{folders.slug(method)}"
    folder = expand_path(options.out) if options.out else paths.RUNS_DIR / name
    experiment = resolve(method, dataclasses.replace(options, validation=share))
    chosen = search_space(experiment, space)
    first = {key: published_values(experiment, key) for key in chosen}
    store.make_folder(folder)
    with store.exclusive(folder):
        found = _study(optuna, folder, _identify(experiment, chosen), first)
        base = _options(options, experiment.task.split, folder)
        search = _Search(optuna, found, experiment, base, chosen, folder, callback or Callback())
        while len(search.finished()) < min(trials, math.prod(map(len, chosen.values()))):
            search.one()
        told = [search.trial(trial) for trial in search.finished()]
    return TuneResult(method, chosen, told, first, folder, base, search.is_fine_tuned)


class _Search:
    """A search that goes on."""

    def __init__(
        self, optuna: Any, study: Study, experiment: Experiment, base: Mapping[str, Any], space: Space,
        folder: Path, callback: Callback,
    ) -> None:  # fmt: skip
        self.optuna, self.study, self.method, self.base = optuna, study, experiment.name, base
        self.space, self.folder, self.watch = space, folder, callback
        self.is_fine_tuned = experiment.method.adapts == "last"

    def finished(self) -> list[Any]:
        """Trials that came to an end, in their order."""
        return [trial for trial in self.study.trials if trial.state.name in ("COMPLETE", "PRUNED")]

    def one(self) -> None:
        """One trial. What is chosen depends on the seed and the trials so far, not on who did them when."""
        trial, choice = self._choose()
        method, options = name_with_values(self.method, choice)
        cell = RunSpec(method, {**self.base, **options})
        (planned,) = runner.plan_runs([cell], self.folder)
        if planned.experiment is None:
            raise InvalidInputError(planned.skip_reason)
        try:
            failed = {} if planned.skip_reason else runner.run_missing([planned], _Board(self, trial))
        except self.optuna.TrialPruned:
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
            return
        for error in failed.values():
            if not isinstance(error, DivergenceError):
                raise error
        (planned,) = runner.refresh_plans([planned])
        if planned.skip_reason:  # it diverged, and is worth nothing
            trial.set_user_attr("note", "diverged")
        accuracy = planned.document and not planned.skip_reason and published_accuracy(planned.document)
        self.study.tell(trial, accuracy["weighted"] if accuracy else 0.0)

    def _choose(self) -> tuple[Asking, dict[str, Any]]:
        """What Optuna proposes; where that was tried already, something at random that was not."""
        tried = [trial.params for trial in self.finished()]
        seed = int(self.base.get("seed") or 0)
        draws = seeds.make_rng(seed, "tune", len(tried))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=draws.randint(2**31))
        trial, values = self._ask()
        if values not in tried:
            return trial, values
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        while values in tried:
            values = {key: those[draws.randint(len(those))] for key, those in self.space.items()}
        self.study.enqueue_trial(values)
        return self._ask()

    def _ask(self) -> tuple[Asking, dict[str, Any]]:
        trial = self.study.ask()
        return trial, {key: trial.suggest_categorical(key, those) for key, those in self.space.items()}

    def trial(self, found: Any) -> Trial:
        pruned = found.state.name == "PRUNED"
        note = "stopped early" if pruned else found.user_attrs.get("note", "")
        return Trial({key: found.params[key] for key in self.space}, None if pruned else found.value, note)


class _Board(StudyCallback):
    """Hands each round's accuracy to the pruner."""

    def __init__(self, search: _Search, trial: Asking) -> None:
        self.search, self.trial = search, trial

    def run_callback(self, folder: Path) -> Callback:
        return _Pruning(self.search, self.trial)


class _Pruning(Callback):
    """Ends a run that is below the median of the others at the same round."""

    def __init__(self, search: _Search, trial: Asking) -> None:
        self.search, self.told = search, -1
        self.running = trial

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        number = len(self.search.finished()) + 1
        self.search.watch.on_run_begin(f"{number}: {name}", folder, done, rounds)

    def on_client_end(self, done: int, of: int) -> None:
        self.search.watch.on_client_end(done, of)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.search.watch.on_round_end(done, accuracy)
        if self.search.is_fine_tuned:  # what it is worth is known after the last round only
            return
        if accuracy is not None and done > self.told:
            self.told = done
            self.running.report(accuracy, done)
            if self.running.should_prune():
                raise self.search.optuna.TrialPruned

    def on_message(self, text: str) -> None:
        self.search.watch.on_message(text)


def _identify(experiment: Experiment, space: Space) -> str:
    """Return what names a search: all that a run is (its data and split by content), how long, the space."""
    options = experiment.options
    identity = [experiment.config_hash, options.rounds, options.patience, space]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _study(optuna: Any, folder: Path, name: str, first: Mapping[str, Any]) -> Study:
    """The search in this folder, begun or continued; the published values come first."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / _FILE}")
    if any(one != name for one in optuna.get_all_study_names(storage)):
        raise InvalidInputError(
            f"'{folder}' holds another search (other method, options, data, split or space); choose another "
            "--out"
        )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=5)
    study: Study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", pruner=pruner, load_if_exists=True
    )
    if not study.trials:
        study.enqueue_trial(dict(first))
    for trial in study.trials:  # a kill left it: it is done again, and its run goes on
        if trial.state.name == "RUNNING":
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params or dict(first))
    return study


def _options(options: Config, split: Split, folder: Path) -> dict[str, Any]:
    """Of every run: what was asked for, on a split that has training data only."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    kept = {
        key: value
        for key, value in given.items()
        if value != Config.__dataclass_fields__[key].default
        and key not in ("method", "out", "resume", "json", "validation", "partition", "clients", "split")
    }
    Split(split.train, split.validation).save(folder / _SPLIT)
    return {"eval_after": False, "metrics": "accuracy", **kept, "split": str(folder / _SPLIT)}


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InvalidInputError("tune needs Optuna; install it with: pip install 'feddbe[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


Space = dict[str, list[Any]]
"""Name of an option (`kappa`, `lr`) -> values to choose from."""
LR = (0.005, 0.01, 0.05, 0.1)
"""Learning rates worth trying; the paper gives none."""


def search_space(experiment: Experiment, given: Sequence[str] = ()) -> Space:
    """What is searched: `given` as in `kappa=1,5,50`; without, all that the method's parts name values worth
    trying for, and the learning rate where the method has a use for it; the published values are among
    them."""
    parameters = {
        parameter["name"]: parameter for part in _parts(experiment) for parameter in part["parameters"]
    }
    found: Space = {}
    if given:
        found = dict(_given(item, [*parameters, "lr"]) for item in given)
        parameters = {}
    for name, parameter in parameters.items():
        if parameter["search"]:
            found[name] = [parse_number_or_text(word) for word in parameter["search"].split()]
    if experiment.config["lr"] is not None and not given:
        found["lr"] = list(LR)
    return {key: _with(values, published_values(experiment, key)) for key, values in found.items()}


def _with(values: Sequence[Any], published: Any) -> list[Any]:
    """The values and the published one, numbers by size."""
    every = list(dict.fromkeys([*values, published]))
    numbers = sorted(value for value in every if isinstance(value, int | float))
    return [*numbers, *(value for value in every if not isinstance(value, int | float))]


def _parts(experiment: Experiment) -> list[methods.MethodInfo]:
    name = experiment.name.lower()
    used = [part.partition("(")[0].strip() for part in name.split("+")]
    return [part for part in methods.describe_methods() if part["name"] in used]


def _given(item: str, known: Sequence[str]) -> tuple[str, list[Any]]:
    key, equals, text = (word.strip() for word in item.partition("="))
    values = [parse_number_or_text(word.strip()) for word in text.split(",") if word.strip()]
    if not equals or not values:
        raise InvalidInputError(f"--space {item}: write it as --space kappa=1,5,50")
    if key not in known:
        raise unknown_name("hyper-parameter", key, known)
    return key, values


def name_with_values(method: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method with these values in its brackets, and those that are options of a run."""
    own = {key: value for key, value in values.items() if key != "lr"}
    name, _, addons = method.partition("+")
    parts = [name, *addons.split("+")] if addons else [name]
    known = {part["name"]: {p["name"] for p in part["parameters"]} for part in methods.describe_methods()}
    for index, part in reversed(list(enumerate(parts))):  # of two that have it, the add-on
        mine = {key: own.pop(key) for key in list(own) if key in known[part.lower()]}
        if mine:
            parts[index] = (
                f"{part}({','.join(f'{key}={format_value(value)}' for key, value in mine.items())})"
            )
    return "+".join(parts), {"lr": values["lr"]} if "lr" in values else {}


def published_values(experiment: Experiment, key: str) -> Any:
    """The value that a run has without a search."""
    if key == "lr":
        return experiment.config["lr"]
    for options in reversed(experiment.config["method_options"].values()):
        if key in options:
            return options[key]
    raise unknown_name("hyper-parameter", key, ())
