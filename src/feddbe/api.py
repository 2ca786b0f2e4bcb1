"""Runs in a few lines of Python; the command line calls the same functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from feddbe.callbacks.base import Callback, CallbackList
from feddbe.callbacks.display import default_callback
from feddbe.config.options import RawOptions, parse_sweep
from feddbe.config.options import collect_options as options_given
from feddbe.config.user_code import require_permission
from feddbe.data.dataset import Dataset
from feddbe.data.registry import is_in_memory
from feddbe.errors import DivergenceError, InvalidInputError
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
    callback: Callback | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Any,
) -> Run:
    """Run one method and return the document that describes it (also in the run's folder, `out`).

    `options` are those of the command line, with underscores; `method` may be a name or an instance, as in
    `FedAvg()`; `model` a name, an `nn.Module`, a pair (features, classifier), or a function of (shape of one
    input, classes) that makes a module; `data` a name or path, (x, y), (x, y, client), a pandas frame, a
    torch Dataset or a `Dataset`. Without a method, the run in `out` goes on (`resume=True`); its model's and
    method's files are executed only if `code` names them or `trust` says that the run is your own, and if
    they have the content that it began with. `watch` is told how it goes on (`feddbe.callbacks`), besides the
    bars that a terminal or a notebook shows unless it is `quiet`. Training that diverges raises `Diverged`;
    `load` has what came before.
    """
    given, dataset, module = _collect([method] if method else [], data, model, options)
    with _callbacks(callback, quiet=given.values.get("quiet") is True) as callbacks:
        (document,) = run_requests(
            given,
            single=True,
            dataset=dataset,
            model=module,
            callback=callbacks,
            allowed=require_permission(code, trust=trust),
        )
    if mark := document["diverged"]:
        raise DivergenceError(mark["client"], mark["round"], mark["what"], float(mark["value"]))
    return Run(document)


def compare(
    methods: Sequence[str | Method] = (),
    *,
    data: Any = None,
    model: ModelSource | None = None,
    callback: Callback | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Any,
) -> Runs:
    """Run several methods on the same data, split, model and seed, one folder each in a common one.

    `seeds` (how many, or a list) runs each with these seeds; a list of values (`lr=[0.01, 0.1]`, or in a
    method's brackets) with each of them, and a `Sweep` is returned, which has the ones that were chosen on
    validation data. Then what is in the folder `out` already is not run again, and runs go side by side. The
    document of one that diverged says so in `diverged`. `code` and `trust`: as in `run`.
    """
    given, dataset, module = _collect(methods, data, model, options)
    quiet = given.values.get("quiet") is True
    wanted = parse_sweep(given)
    if wanted is None:
        with _callbacks(callback, quiet=quiet) as callbacks:
            documents = run_requests(
                given,
                single=False,
                dataset=dataset,
                model=module,
                callback=callbacks,
                allowed=require_permission(code, trust=trust),
            )
        return Runs(map(Run, documents))
    if callback is not None:
        raise InvalidInputError(
            "watch: several seeds or values run side by side, which nobody can watch as one run"
        )
    plans = sweep.plan_sweep(sweep.with_validation(wanted), dataset=dataset, model=module)
    with default_callback(quiet=quiet) as display:
        documents = sweep.sweep_documents(*sweep.run_sweep(plans, sweep.RunCounter(plans, display)))
    return (Sweep if wanted.is_grid else Runs)(map(Run, documents))


def _collect(
    methods: Sequence[str | Method], data: Any, model: ModelSource | list[str] | None, options: dict[str, Any]
) -> tuple[RawOptions, Dataset | None, ModelSource | None]:
    """Return methods and options as values, and data and model if they are Python objects."""
    dataset = is_in_memory(data)
    names = [method if isinstance(method, str) else format_name(method) for method in methods]
    if data is not None:
        source = data if isinstance(data, list) else str(data)
        options = options | {"data": dataset.name if dataset else source}
    if isinstance(model, str | list):
        return options_given(names, options | {"model": model}), dataset, None
    return options_given(names, options), dataset, model


def _callbacks(callback: Callback | None, *, quiet: bool) -> CallbackList:
    return CallbackList([*filter(None, [callback]), default_callback(quiet=quiet)])


def load(folder: str | Path, *, hashes: bool = True) -> Run:
    """The document of a run that exists; without `hashes` its states, which may be large, are not read."""
    return Run(summary.load_document(folders.resolve_run(str(folder)), hashes=hashes))


def draw(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """The learning curves, those of newcomers if there are any, and the data distribution as pictures in
    `folder`."""
    place, runs = Path(folder), cast(Sequence[RunDocument], documents)
    figures = []
    if any(map(accuracy_curve, runs)):  # one may have diverged at once
        figures.append(build_figures.learning_curves(runs))
    if any(map(new_clients_curve, runs)):
        figures.append(build_figures.adaptation_curves(runs))
    store = RunStore.open(Path(runs[0]["folder"]))
    labels = store.meta("labels")
    names = store.meta("label_names") or (), store.meta("client_names") or ()
    store.close()
    if labels is not None:
        about = runs[0]["config"]
        title = f"{about['data']}, {about['partition'] or 'split from a file'}, {about['clients']} clients"
        figures.append(build_figures.client_distribution(np.array(labels), title, *names))
    if (extra := build_figures.selected_metric_curves(runs)) is not None:
        figures.append(extra)
    return _draw_all(place, figures)


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
    callback: Callback | None = None,
    quiet: bool = False,
) -> Runs:
    """Measure the representations in runs or comparisons that exist, and return their documents.

    Nothing is run again but what clients did in that one round. What is in a run's file already is not taken
    twice. `data` and `model`: those of the runs, if they were given as Python objects. Code in files is
    executed only if `code` names the files or `trust` says that the runs are your own, and if its content is
    the same.
    """
    question = AnalysisRequest(
        tuple(registry.parse_analyses(analyses)),
        round,
        _names(moment),
        _names(layers),
        samples,
        quick,
        per_client,
    )
    names = [runs] if isinstance(runs, str | Path) else runs
    allowed = require_permission(code, trust=trust)
    with sharing_stores(), _callbacks(callback, quiet=quiet) as told:
        found = folders.iterate_runs(map(str, names))
        for folder in found:
            analysis.run_analyses(
                folder, question, dataset=is_in_memory(data), model=model, allowed=allowed, callback=told
            )
        return Runs(load(folder, hashes=False) for folder in found)


def draw_analyses(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """What was measured of representations as pictures in `folder`."""
    runs = cast(Sequence[RunDocument], documents)
    return _draw_all(Path(folder), build_figures.analysis_figures(runs, analysis.load_embedding).values())


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
