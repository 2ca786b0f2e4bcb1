"""The functions for Python users; the command line calls the same ones."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import numpy as np

from feddbe.callbacks.base import Callback, CallbackList
from feddbe.callbacks.display import StudyBars, default_callback
from feddbe.callbacks.tracking import CallbackSpec, make_callback, replay_documents
from feddbe.config.options import (
    NOT_TUNED,
    CompareOptions,
    RawOptions,
    RunOptions,
    collect_options,
    parse_options,
    parse_sweep,
)
from feddbe.config.user_code import make_permission
from feddbe.data.dataset import Dataset
from feddbe.data.registry import dataset_from_object
from feddbe.errors import InvalidInputError, unknown_name
from feddbe.methods.base import Method
from feddbe.methods.registry import format_name
from feddbe.metrics.representations import registry
from feddbe.models.registry import ModelSource
from feddbe.paths import RUNS_DIR, expand_path
from feddbe.reporting import build_figures, matplotlib_backend
from feddbe.reporting.build_tables import RunRecord, run_record
from feddbe.reporting.figure import Figure
from feddbe.reporting.html.page import write_report
from feddbe.reporting.paper_table import PaperTable
from feddbe.reporting.run_objects import Run, Runs, Sweep, summary_table
from feddbe.results.document import RunDocument, accuracy_curve, new_clients_curve
from feddbe.results.fairness import Fairness, Overhead, compute_fairness, compute_overhead, requested_result
from feddbe.runs import analysis, folders
from feddbe.runs.analysis import AnalysisRequest
from feddbe.runs.build_document import (
    client_accuracies,
    count_private_values,
    divergence_error,
    load_document,
)
from feddbe.runs.start import run_requests
from feddbe.runs.store import RunStore, sharing_stores
from feddbe.studies import reproduce as paper_studies
from feddbe.studies import study_record, sweep
from feddbe.studies import tune as studies_tune
from feddbe.studies.tune import TuneResult

RunNames = str | Path | Run | Sequence[str | Path | Run]
"""Folders of runs, comparisons or studies, names in `runs/`, or the runs themselves."""


def run(
    method: str | Method | None = None,
    *,
    data: Any = None,
    model: ModelSource | None = None,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Unpack[RunOptions],
) -> Run:
    """Run one method and return its results.

    Args:
        method: A name, as in `fedavg+dbe(kappa=5)`, or an instance, as in `FedAvg()`. Without a method, the
            run in `out` is resumed (`resume=True`).
        data: A name or path, (x, y), (x, y, client), a pandas frame, a torch Dataset or a `Dataset`.
        model: A name, an `nn.Module`, a pair (features, classifier), or a function of (shape of one input,
            number of classes) that returns a module.
        callback: Receives the events of the run, in addition to the progress (`feddbe.callbacks`). Also a
            text such as `wandb:PROJECT`, `mlflow:EXPERIMENT` or `tensorboard`, or a list.
        code: With `resume`: files with the run's model or method. They are executed if their content is the
            one that the run stored.
        trust: With `resume`: True executes the files that the run names, because the run is your own.
        **options: The options of the command line, with underscores.

    Returns:
        The run's document; it is also stored in the run's folder, `out`.

    Raises:
        InvalidInputError: An option, the data or the model is not valid.
        DivergenceError: Training diverged. `load_run` returns the rounds before.
    """
    raw, dataset, module = _collect([method] if method else [], data, model, options)
    with _callbacks(callback, quiet=raw.values.get("quiet") is True) as callbacks:
        (document,) = run_requests(
            raw,
            single=True,
            dataset=dataset,
            model=module,
            callback=callbacks,
            allowed=make_permission(code, trust=trust),
        )
    error = divergence_error(document)
    if error is not None:
        raise error
    return Run(document)


def compare(
    methods: Sequence[str | Method] = (),
    *,
    data: Any = None,
    model: ModelSource | None = None,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Unpack[CompareOptions],
) -> Runs:
    """Run several methods on the same data, split, model and seed.

    With several seeds or values, runs are executed in parallel. Runs that exist in `out` are not repeated.
    The comparison is recorded as a study, which `load_study` returns again.

    Args:
        methods: Names or instances of methods.
        data: As in `run`.
        model: As in `run`.
        callback: As in `run`. With several seeds or values, it receives the runs when all are finished.
        code: As in `run`.
        trust: As in `run`.
        **options: The options of the command line, with underscores. `seeds` and `partition_seeds` are a
            number of seeds or a list. A list of values, as in `lr=[0.01, 0.1]`, is a sweep. `name` is the
            name of the study.

    Returns:
        The runs in the order of the methods. A run that diverged has `diverged` set. A sweep is a `Sweep`,
        whose `chosen` runs were selected on validation data.

    Raises:
        InvalidInputError: An option, the data or the model is not valid.
        StoreError: A run in `out` cannot be read.
    """
    raw, dataset, module = _collect(methods, data, model, options)
    quiet = raw.values.get("quiet") is True
    spec = parse_sweep(raw)
    if spec is None:
        with _callbacks(callback, quiet=quiet) as callbacks:
            documents = run_requests(
                sweep.name_folder(raw),
                single=False,
                dataset=dataset,
                model=module,
                callback=callbacks,
                allowed=make_permission(code, trust=trust),
            )
        sweep.record_comparison(raw, documents)
        return Runs(map(Run, documents))
    callbacks = make_callback(callback)
    display = StudyBars(quiet=quiet)
    spec = sweep.require_validation(spec, display.on_message)
    plans = sweep.plan_sweep(spec, display.on_message, dataset=dataset, model=module)
    sweep.record_sweep(spec, plans)
    display.runs = len({planned.folder for planned in plans if planned.is_missing})
    with display.bars:
        documents = sweep.sweep_documents(*sweep.run_sweep(plans, display))
    with callbacks:
        replay_documents(documents, callbacks)
    return (Sweep if spec.is_grid else Runs)(map(Run, documents))


def _collect(
    methods: Sequence[str | Method],
    data: Any,
    model: ModelSource | list[str] | None,
    options: RunOptions | CompareOptions,
) -> tuple[RawOptions, Dataset | None, ModelSource | None]:
    """Return methods and options as values, and data and model if they are Python objects."""
    dataset = dataset_from_object(data)
    values: dict[str, Any] = {**options}
    names = [method if isinstance(method, str) else format_name(method) for method in methods]
    if data is not None:
        source = data if isinstance(data, list) else str(data)
        values["data"] = dataset.name if dataset else source
    if isinstance(model, str | list):
        return collect_options(names, values | {"model": model}), dataset, None
    return collect_options(names, values), dataset, model


def _callbacks(callback: CallbackSpec | Sequence[CallbackSpec] | None, *, quiet: bool) -> CallbackList:
    return CallbackList([make_callback(callback), default_callback(quiet=quiet)])


def load(folder: str | Path, *, hashes: bool = True) -> Run | Runs:
    """Return an existing run or study; `load_run` and `load_study` return one of the two types.

    Args:
        folder: The folder of a run or study, or its name in `runs/`.
        hashes: Compute the hashes of the states, which may be large.

    Returns:
        A `Run`, as `load_run` returns it. For a study, `Runs` or a `Sweep`, as `load_study` returns them.

    Raises:
        InvalidInputError: The run does not exist, or the folder has several studies.
        StoreError: A file cannot be read, or no run of the study exists.
    """
    study_folder = study_record.find_study(str(folder))
    if study_folder is None:
        return load_run(folder, hashes=hashes)
    return _load_study(study_folder, hashes=hashes)


def load_run(folder: str | Path, *, hashes: bool = True) -> Run:
    """Return an existing run.

    Args:
        folder: The folder of a run, or its name in `runs/`.
        hashes: Compute the hashes of the states, which may be large.

    Returns:
        The run that `run` returned.

    Raises:
        InvalidInputError: The folder is not that of a run.
        StoreError: The run's file cannot be read.
    """
    return Run(load_document(folders.resolve_run(str(folder)), hashes=hashes))


def load_study(folder: str | Path, *, hashes: bool = True) -> Runs:
    """Return the runs of a study.

    Args:
        folder: The folder of a study, or its name.
        hashes: Compute the hashes of the states, which may be large.

    Returns:
        The `Runs` or the `Sweep` that `compare` returned, cut to the study's rounds. A warning names each run
        of the study that is missing or was changed.

    Raises:
        InvalidInputError: The folder is not that of a study, or has several studies.
        StoreError: A file cannot be read, or no run of the study exists.
    """
    study_folder = study_record.find_study(str(folder))
    if study_folder is None:
        existing = ", ".join(map(str, study_record.all_studies()[:8])) or f"none in {RUNS_DIR}/"
        raise InvalidInputError(f"'{folder}' is not the folder of a study; existing studies: {existing}")
    return _load_study(study_folder, hashes=hashes)


def _load_study(folder: Path, *, hashes: bool) -> Runs:
    """Return the runs of the study in a folder, with warnings at the line of the user's call."""
    study = study_record.open_study(folder, hashes=hashes)
    for problem in study.problems:
        warnings.warn(problem, stacklevel=3)
    is_sweep = study.record.purpose is study_record.Purpose.SWEEP
    return (Sweep if is_sweep else Runs)(map(Run, study.documents))


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    callback: Callback | None = None,
) -> Path:
    """Write one HTML page about runs and studies.

    The page is a single file that opens without a network. The same runs give the same bytes.

    Args:
        runs: Folders of runs, comparisons or studies, or names in `runs/`.
        out: Path of the page, with the suffix `.html`; by default `report.html` in the first folder.
        callback: Receives a message for each run of a study that is missing or was changed; without a
            callback, it is a warning.

    Returns:
        The path of the page.

    Raises:
        InvalidInputError: No run is given, the suffix is unknown, or the file cannot be written.
        StoreError: A run cannot be read.
    """
    names = _list_names(runs)
    if not names:
        raise InvalidInputError("a report needs at least one run: got none. Name the folders of runs.")
    sweeps = {}
    paper_tables = {}
    for study_folder in filter(None, map(study_record.find_study, names)):
        command = shlex.join(["feddbe", "show", str(study_folder)])
        study = study_record.open_study(study_folder)
        if study.record.purpose is study_record.Purpose.SWEEP:
            sweeps[command] = summary_table(study.documents, is_sweep=True)
        elif study.record.purpose is study_record.Purpose.PAPER_TABLE:
            paper_study = paper_studies.reopen_study(study.record, study_folder)
            plans = paper_studies.plan_studies([paper_study], study_folder.parent)
            if not paper_study.figure:
                paper_tables[command] = paper_studies.compare_with_paper(paper_study, plans)
    documents = study_record.load_documents(names, callback.on_message if callback else warnings.warn)
    folder_paths = [Path(document["folder"]) for document in documents]
    path = Path(out) if out else study_record.output_folder(names[0]) / "report.html"
    return write_report(folder_paths, path, studies=paper_tables, sweeps=sweeps, documents=documents)


def list_runs(folder: str | Path = RUNS_DIR) -> list[RunRecord]:
    """List the runs below a folder.

    Args:
        folder: Folder to search.

    Returns:
        A record for each run: name, method, data, rounds, accuracies and state. A run that cannot be read has
        only a name and a state. A run of a sweep has no accuracies: the study has those of the chosen values.
    """
    root = Path(folder)
    records = [run_record(path, root) for path in folders.list_runs(root)]
    sweep_runs = {str(path.relative_to(root)) for path in study_record.runs_of_sweeps(root)}
    for run in records:
        if run["name"] in sweep_runs:
            run["best"] = run["last"] = None
    return records


def fairness(runs: RunNames, *, round: str | None = None) -> list[Fairness]:
    """Compare the clients' accuracies of each run with those of `local` and `fedavg`.

    Args:
        runs: Folders, or names in `runs/`; also the runs themselves.
        round: `best` or `last`; by default the last, or the best if it was chosen on validation data.

    Returns:
        A dictionary for each run: accuracy by client, its spread, and how many clients gain or lose.

    Raises:
        InvalidInputError: A run does not exist, or `round` is unknown.
        StoreError: A run cannot be read.
    """
    if round not in (None, "best", "last"):
        raise unknown_name("round", round, ("best", "last"))
    documents = _load_documents(runs)
    accuracies = [
        client_accuracies(Path(document["folder"]), requested_result(document, round))
        for document in documents
    ]
    return compute_fairness(documents, accuracies, round)


def overhead(runs: RunNames) -> list[Overhead]:
    """Compute the cost of each run.

    Args:
        runs: Folders, or names in `runs/`; also the runs themselves.

    Returns:
        A dictionary for each run: seconds, bytes, size of the state that clients keep, memory.

    Raises:
        InvalidInputError: A run does not exist.
        StoreError: A run cannot be read.
    """
    return [
        compute_overhead(document, count_private_values(Path(document["folder"])))
        for document in _load_documents(runs)
    ]


def _load_documents(runs: RunNames) -> list[RunDocument]:
    """Return the documents, each run once; runs of a study stay cut to its rounds, as on the command line."""
    if isinstance(runs, str | Path | Run):
        runs = [runs]
    elif isinstance(runs, Sweep):
        runs = runs.chosen
    documents: dict[str, RunDocument] = {}
    for run in runs:
        named = (
            [run.document] if isinstance(run, Run) else study_record.load_documents([str(run)], warnings.warn)
        )
        for document in named:
            documents.setdefault(document["folder"], document)
    return list(documents.values())


def tune(
    method: str,
    *,
    trials: int = 20,
    space: Sequence[str] = (),
    data: str | None = None,
    model: str | None = None,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    **options: Unpack[RunOptions],
) -> TuneResult:
    """Search the hyperparameters of a method on validation data; a stopped search continues.

    Args:
        method: A name without parentheses, as in `fedavg+dbe`.
        trials: Total number of trials, including those of earlier calls.
        space: Values to search, as in `["kappa=1,5,50"]`; by default the paper's grids.
        data: As in `run`, a name or path.
        model: As in `run`, a name or path.
        callback: As in `run`.
        **options: The options of `run`, except `split`, `resume`, `new_clients`, `adaptation`, `keep_best`.

    Returns:
        The trials, of which `best` has the highest validation accuracy.

    Raises:
        InvalidInputError: An option, the space or the data is not valid.
        StoreError: A trial in `out` cannot be read.
    """
    for name in options.keys() & NOT_TUNED:
        raise InvalidInputError(f"{name}: a search does not have this option; leave it out")
    request = parse_options([method], {**options, "data": data, "model": model})
    with _callbacks(callback, quiet=request.config.quiet) as callbacks:
        return studies_tune.tune(request, trials=trials, space=space, callback=callbacks)


def reproduce(
    names: str | Sequence[str],
    *,
    trials: int | None = None,
    only: Sequence[str] = (),
    rounds: int | None = None,
    data: str | None = None,
    scale: Literal["published", "small"] = "published",
    out: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, PaperTable]:
    """Run the missing runs of the paper's tables and figures, and return the tables.

    Args:
        names: Names of experiments, as in `practical`; `feddbe reproduce --list` prints them.
        trials: Number of trials, with seeds 0 to N - 1; by default 3, or 1 if `scale` is `small`.
        only: Rows, columns or ROW/COLUMN of the tables; `*` matches anything.
        rounds: Maximum number of rounds.
        data: Other data than the published.
        scale: `published`, or `small`: on digits, in minutes.
        out: Folder of the runs.
        quiet: Hide the progress.

    Returns:
        By name, the tables with our numbers next to the paper's. Figures are drawn into `out/figures`.

    Raises:
        InvalidInputError: An experiment, row or column is unknown, or its data is missing.
        StoreError: A run cannot be read.
    """
    small = scale == "small"
    experiments = paper_studies.load_studies(
        [names] if isinstance(names, str) else names,
        trials=trials, only=only, rounds=rounds, data=data, small=small,
    )  # fmt: skip
    folder = expand_path(str(out)) if out else paper_studies.study_folder(small=small)
    plans = paper_studies.plan_studies(experiments, folder)
    for study in experiments:
        paper_studies.record_study(study, plans, folder)
    bars = StudyBars(sum(planned.is_missing for planned in plans.values()), quiet=quiet)
    with bars.bars:
        plans = paper_studies.run_studies(experiments, plans, bars)
    tables = {}
    for study in experiments:
        if study.figure:
            paper_studies.draw_study(study, plans, folder / "figures")
        else:
            tables[study.name] = paper_studies.compare_with_paper(study, plans)
    return tables


def draw(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """Draw learning curves, new clients, the data distribution and selected metrics as PNG files.

    Args:
        folder: Output folder.
        documents: The runs to draw.

    Returns:
        The paths of the figures.

    Raises:
        InvalidInputError: A file cannot be written.
        StoreError: A run cannot be read.
    """
    runs = cast(Sequence[RunDocument], documents)
    figures = []
    if any(map(accuracy_curve, runs)):  # a run may have diverged in round 1
        figures.append(build_figures.learning_curves(runs))
    if any(map(new_clients_curve, runs)):
        figures.append(build_figures.adaptation_curves(runs))
    store = RunStore.open(Path(runs[0]["folder"]))
    labels = store.meta("labels")
    names = store.meta("label_names") or (), store.meta("client_names") or ()
    store.close()
    if labels is not None:
        config = runs[0]["config"]
        partition = config["partition"] or "split from a file"
        title = f"{config['data']}, {partition}, {config['clients']} clients"
        figures.append(build_figures.client_distribution(np.array(labels), title, *names))
    selected = build_figures.selected_metric_curves(runs)
    if selected is not None:
        figures.append(selected)
    return _draw_all(Path(folder), figures)


def _draw_all(folder: Path, figures: Iterable[Figure]) -> list[Path]:
    """Draw each figure into a PNG file with its name, and return the paths."""
    paths = []
    for figure in figures:
        paths.append(folder / f"{figure.id}.png")
        matplotlib_backend.draw(paths[-1], figure)
    return paths


def analyze(
    runs: str | Path | Sequence[str | Path],
    *,
    analyses: str = "mdl",
    round: str = "best",
    moment: str = "before,after",
    layers: str = "z_g",
    samples: int | None = 1000,
    on: str | None = None,
    quick: bool = False,
    per_client: bool = False,
    data: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    quiet: bool = False,
) -> Runs:
    """Analyze the representations in existing runs, comparisons or studies.

    Only the clients' work of the selected round is repeated. Results are stored in the run and not repeated.

    Args:
        runs: Folders, or names in `runs/`.
        analyses: Names of analyses, as in `mdl,probe`.
        round: `best` or `last`.
        moment: `before`, `after` or `adapted`, or several.
        layers: Layers of the model, as in `conv1,z_g`.
        samples: Number of test samples over all clients; None for all.
        on: Test samples that each client's model represents, `own` or `all`; None: `all` for mdl and probe,
            `own` for the others.
        quick: Use fewer probes and steps; results are marked.
        per_client: Analyze each client separately.
        data: The runs' data, if it was given as a Python object.
        model: The runs' model, if it was given as a Python object.
        code: Files with the runs' models or methods, executed if their content is the stored one.
        trust: True executes the files that the runs name, because the runs are your own.
        callback: Receives the progress.
        quiet: Hide the progress bar.

    Returns:
        The runs, with the results in `analyses`.

    Raises:
        InvalidInputError: A run does not exist, or an analysis, round, moment or layer is unknown.
        StoreError: A run cannot be read.
    """
    selected = tuple(registry.parse_analyses(analyses))
    moments = _split_names(moment)
    request = AnalysisRequest(selected, round, moments, _split_names(layers), samples, quick, per_client, on)
    names = _list_names(runs)
    permission = make_permission(code, trust=trust)
    with sharing_stores(), _callbacks(callback, quiet=quiet) as callbacks:
        for document in study_record.load_documents(names, callbacks.on_message):
            analysis.run_analyses(
                Path(document["folder"]),
                request,
                dataset=dataset_from_object(data),
                model=model,
                allowed=permission,
                callback=callbacks,
            )
        return Runs(map(Run, study_record.load_documents(names, lambda problem: None)))


def draw_analyses(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """Draw the results of analyses as PNG files in `folder`, and return the paths."""
    runs = cast(Sequence[RunDocument], documents)
    return _draw_all(Path(folder), build_figures.analysis_figures(runs, analysis.load_embedding).values())


def _list_names(runs: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(runs)] if isinstance(runs, str | Path) else [str(name) for name in runs]


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
