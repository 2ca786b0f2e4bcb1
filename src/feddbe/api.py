"""The functions for Python users; the command line calls the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from feddbe.callbacks.base import CallbackList
from feddbe.callbacks.display import default_callback
from feddbe.callbacks.tracking import CallbackSpec, make_callback, replay_documents
from feddbe.config.options import RawOptions, collect_options, parse_sweep
from feddbe.config.user_code import make_permission
from feddbe.data.dataset import Dataset
from feddbe.data.registry import dataset_from_object
from feddbe.errors import DivergenceError
from feddbe.methods.base import Method
from feddbe.methods.registry import format_name
from feddbe.metrics.representations import registry
from feddbe.models.registry import ModelSource
from feddbe.reporting import build_figures, matplotlib_backend
from feddbe.reporting.figure import Figure
from feddbe.reporting.run import Run, Runs, Sweep
from feddbe.results.document import RunDocument, accuracy_curve, new_clients_curve
from feddbe.runs import analysis, folders, summary
from feddbe.runs.analysis import AnalysisRequest
from feddbe.runs.execution import run_requests
from feddbe.runs.store import RunStore, sharing_stores
from feddbe.studies import sweep


def run(
    method: str | Method | None = None,
    *,
    data: Any = None,
    model: ModelSource | None = None,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Any,
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
        DivergenceError: Training diverged. `load` returns the rounds before.
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
    mark = document["diverged"]
    if mark:
        raise DivergenceError(mark["client"], mark["round"], mark["what"], float(mark["value"]))
    return Run(document)


def compare(
    methods: Sequence[str | Method] = (),
    *,
    data: Any = None,
    model: ModelSource | None = None,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Any,
) -> Runs:
    """Run several methods on the same data, split, model and seed.

    With several seeds or values, runs are executed in parallel. Runs that exist in `out` are not repeated.

    Args:
        methods: Names or instances of methods.
        data: As in `run`.
        model: As in `run`.
        callback: As in `run`. With several seeds or values, it receives the runs when all are finished.
        code: As in `run`.
        trust: As in `run`.
        **options: The options of the command line, with underscores. `seeds` is a number of seeds or a list.
            A list of values, as in `lr=[0.01, 0.1]`, is a sweep.

    Returns:
        The runs in the order of the methods. A run that diverged has `diverged` set. A sweep is a `Sweep`,
        whose `chosen` runs were selected on validation data.
    """
    raw, dataset, module = _collect(methods, data, model, options)
    quiet = raw.values.get("quiet") is True
    spec = parse_sweep(raw)
    if spec is None:
        with _callbacks(callback, quiet=quiet) as callbacks:
            documents = run_requests(
                raw,
                single=False,
                dataset=dataset,
                model=module,
                callback=callbacks,
                allowed=make_permission(code, trust=trust),
            )
        return Runs(map(Run, documents))
    callbacks = make_callback(callback)
    plans = sweep.plan_sweep(sweep.require_validation(spec), dataset=dataset, model=module)
    with default_callback(quiet=quiet) as display:
        documents = sweep.sweep_documents(*sweep.run_sweep(plans, sweep.RunCounter(plans, display)))
    with callbacks:
        replay_documents(documents, callbacks)
    return (Sweep if spec.is_grid else Runs)(map(Run, documents))


def _collect(
    methods: Sequence[str | Method], data: Any, model: ModelSource | list[str] | None, options: dict[str, Any]
) -> tuple[RawOptions, Dataset | None, ModelSource | None]:
    """Return methods and options as values, and data and model if they are Python objects."""
    dataset = dataset_from_object(data)
    names = [method if isinstance(method, str) else format_name(method) for method in methods]
    if data is not None:
        source = data if isinstance(data, list) else str(data)
        options = options | {"data": dataset.name if dataset else source}
    if isinstance(model, str | list):
        return collect_options(names, options | {"model": model}), dataset, None
    return collect_options(names, options), dataset, model


def _callbacks(callback: CallbackSpec | Sequence[CallbackSpec] | None, *, quiet: bool) -> CallbackList:
    return CallbackList([make_callback(callback), default_callback(quiet=quiet)])


def load(folder: str | Path, *, hashes: bool = True) -> Run:
    """Return the document of an existing run.

    Args:
        folder: The run's folder, or its name in `runs/`.
        hashes: Compute the hashes of the states, which may be large.
    """
    return Run(summary.load_document(folders.resolve_run(str(folder)), hashes=hashes))


def draw(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """Draw learning curves, new clients, the data distribution and selected metrics as PNG files.

    Args:
        folder: Output folder.
        documents: The runs to draw.

    Returns:
        The paths of the figures.
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
    quick: bool = False,
    per_client: bool = False,
    data: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    callback: CallbackSpec | Sequence[CallbackSpec] | None = None,
    quiet: bool = False,
) -> Runs:
    """Analyze the representations in existing runs or comparisons.

    Only the clients' work of the selected round is repeated. Results are stored in the run and not repeated.

    Args:
        runs: Folders, or names in `runs/`.
        analyses: Names of analyses, as in `mdl,probe`.
        round: `best` or `last`.
        moment: `before`, `after` or `adapted`, or several.
        layers: Layers of the model, as in `conv1,z_g`.
        samples: Number of test samples over all clients; None for all.
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
    """
    request = AnalysisRequest(
        tuple(registry.parse_analyses(analyses)),
        round,
        _split_names(moment),
        _split_names(layers),
        samples,
        quick,
        per_client,
    )
    names = [runs] if isinstance(runs, str | Path) else runs
    permission = make_permission(code, trust=trust)
    with sharing_stores(), _callbacks(callback, quiet=quiet) as callbacks:
        run_folders = folders.resolve_all_runs(map(str, names))
        for folder in run_folders:
            analysis.run_analyses(
                folder,
                request,
                dataset=dataset_from_object(data),
                model=model,
                allowed=permission,
                callback=callbacks,
            )
        return Runs(load(folder, hashes=False) for folder in run_folders)


def draw_analyses(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """Draw the results of analyses as PNG files in `folder`, and return the paths."""
    runs = cast(Sequence[RunDocument], documents)
    return _draw_all(Path(folder), build_figures.analysis_figures(runs, analysis.load_embedding).values())


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
