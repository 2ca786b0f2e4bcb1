"""Runs in a few lines of Python; the command line calls the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from feddbe import metrics
from feddbe.callbacks.base import Several, Watch
from feddbe.callbacks.display import progress
from feddbe.config.options import Asked, Given
from feddbe.config.options import given as options_given
from feddbe.config.user_code import NOTHING, Permission, permit
from feddbe.data.dataset import Dataset
from feddbe.data.registry import in_memory
from feddbe.errors import BadInput, Diverged
from feddbe.methods.base import Method
from feddbe.methods.registry import spelled
from feddbe.metrics.representations import registry
from feddbe.models.registry import ModelSource
from feddbe.reporting import figures, representations
from feddbe.reporting.run import Run, Runs
from feddbe.results.document import RunDocument, adapting, cut, points
from feddbe.runs import analysis, folders, summary
from feddbe.runs.analysis import Question
from feddbe.runs.execution import again, carry_on, places
from feddbe.runs.experiment import Experiment, resolve_all
from feddbe.runs.store import Store
from feddbe.simulation import engines, participation


def run(
    method: str | Method | None = None,
    *,
    data: Any = None,
    model: ModelSource | None = None,
    watch: Watch | None = None,
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
    (found,) = compare(
        [method] if method else [],
        data=data,
        model=model,
        watch=watch,
        code=code,
        trust=trust,
        _single=True,
        **options,
    )
    if mark := found.document["diverged"]:
        raise Diverged(mark["client"], mark["round"], mark["what"], float(mark["value"]))
    return found


def compare(
    methods: Sequence[str | Method] = (),
    *,
    data: Any = None,
    model: ModelSource | None = None,
    watch: Watch | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    _single: bool = False,
    **options: Any,
) -> Runs:
    """Run several methods on the same data, split, model and seed, one folder each in a common one.

    The document of one that diverged says so in `diverged`.
    """
    dataset = in_memory(data)
    options |= {} if data is None else {"data": dataset.name if dataset else str(data)}
    if isinstance(model, str):
        options, model = options | {"model": model}, None
    given = options_given([one if isinstance(one, str) else spelled(one) for one in methods], options)
    with Several([*filter(None, [watch]), progress(quiet=given.values.get("quiet") is True)]) as told:
        found = carry_out_all(
            given,
            single=_single,
            dataset=dataset,
            model=model,
            watch=told,
            allowed=permit(code, trust=trust),
        )
    return Runs(Run(document) for document in found)


def carry_out_all(
    given: Given,
    *,
    single: bool,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    watch: Watch | None = None,
    hashes: bool = True,
    allowed: Permission = NOTHING,
) -> list[RunDocument]:
    """Run the requested methods; without a method, resume all runs in `out`."""
    requests = wanted(given, single=single, allowed=allowed)
    if model is None and any(request.config.model == "own" for request in requests):
        raise BadInput(f"the model of '{requests[0].config.out}' came from Python; give it again as model=")
    is_single = single or not given.names
    documents = list[RunDocument]()
    for request in requests:
        documents += carry_out(
            request, single=is_single, dataset=dataset, model=model, watch=watch, hashes=hashes
        )
    return documents


def wanted(given: Given, *, single: bool, allowed: Permission = NOTHING) -> list[Asked]:
    """What is to be run: what was given, or what the runs in `out` that go on were asked to be."""
    if given.names or not (given.values.get("resume") and given.values.get("out")):
        return [given.asked()]
    found = again(given, allowed)
    if single and len(found) > 1:
        out = given.values["out"]
        raise BadInput(f"'{out}' holds {len(found)} runs; compare --resume --out {out} continues them all")
    return found


def carry_out(
    asked: Asked,
    *,
    single: bool,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    watch: Watch | None = None,
    hashes: bool = True,
) -> list[RunDocument]:
    """All methods are resolved first, so that a mistake in the last is found before the first one runs.
    Without `hashes` the states, which may be many, are not read once more at the end.

    A method that diverges does not keep the others from running; its document says so.
    """
    experiments = resolve(asked, single=single, dataset=dataset, model=model)
    watch = watch or Watch()
    where = places(experiments, asked.config, watch, single=single)
    documents = []
    with folders.none_left_empty(where, made=not asked.config.out):
        for experiment, place in zip(experiments, where, strict=True):
            try:
                documents.append(carry_on(experiment, place, watch, hashes=hashes))
            except Diverged:
                documents.append(summary.load(place, hashes=hashes))
    if not single and "rounds" in asked.origins:  # one that was there may have more
        rounds, patience = experiments[0].options.rounds or 0, asked.config.patience
        documents = [cut(document, rounds, patience) for document in documents]
    return documents


def resolve(
    asked: Asked, *, single: bool, dataset: Dataset | None = None, model: ModelSource | None = None
) -> list[Experiment]:
    """What was asked for, with every choice made; nothing is run or written."""
    names, options, origins = asked
    if single and len(names) > 1:
        raise BadInput(f"run takes one method, not {len(names)} ({', '.join(names)}); compare takes several")
    engines.find(options.engine)
    participation.who_evaluates(options.eval, 0, 0, 1, [])
    metrics.parse(options.measure)
    found = resolve_all(names, options, dataset=dataset, model=model, origins=origins)
    if len({folders.slug(name) for name in names}) < len(names):
        raise BadInput(f"the same method twice: {', '.join(names)}")
    return found


def load(folder: str | Path, *, hashes: bool = True) -> Run:
    """The document of a run that exists; without `hashes` its states, which may be large, are not read."""
    return Run(summary.load(folders.find(str(folder)), hashes=hashes))


def draw(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """The learning curves, those of newcomers if there are any, and the data distribution as pictures in
    `folder`."""
    place, runs = Path(folder), cast(Sequence[RunDocument], documents)
    paths = []
    if any(map(points, runs)):  # one may have diverged at once
        paths.append(place / "curves.png")
        figures.curves(paths[-1], runs)
    if any(map(adapting, runs)):
        paths.append(place / "newcomers.png")
        figures.adaptation(paths[-1], runs)
    store = Store.open(Path(runs[0]["folder"]))
    labels = store.meta("labels")
    names = store.meta("label_names") or (), store.meta("client_names") or ()
    store.close()
    if labels is not None:
        paths.append(place / "data.png")
        about = runs[0]["config"]
        title = f"{about['data']}, {about['partition'] or 'split from a file'}, {about['clients']} clients"
        figures.bubbles(paths[-1], np.array(labels), title, *names)
    return [*paths, *representations.draw_rounds(place, runs)]


def measure(
    runs: str | Path | Sequence[str | Path],
    *,
    what: str = "mdl",
    round: str = "best",
    moment: str = "before,after",
    at: str = "z_g",
    n: int | None = 1000,
    quick: bool = False,
    per_client: bool = False,
    data: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    watch: Watch | None = None,
    quiet: bool = False,
) -> Runs:
    """Measure the representations in runs or comparisons that exist, and return their documents.

    Nothing is run again but what clients did in that one round. What is in a run's file already is not taken
    twice. `data` and `model`: those of the runs, if they were given as Python objects. Code in files is
    executed only if `code` names the files or `trust` says that the runs are your own, and if its content is
    the same.
    """
    question = Question(tuple(registry.parse(what)), round, _names(moment), _names(at), n, quick, per_client)
    names = [runs] if isinstance(runs, str | Path) else runs
    allowed = permit(code, trust=trust)
    found = folders.each(map(str, names))
    with Several([*filter(None, [watch]), progress(quiet=quiet)]) as told:
        for folder in found:
            analysis.answer(
                folder, question, dataset=in_memory(data), model=model, allowed=allowed, watch=told
            )
    return Runs(load(folder, hashes=False) for folder in found)


def draw_measured(folder: str | Path, documents: Sequence[RunDocument] | Sequence[Run]) -> list[Path]:
    """What was measured of representations as pictures in `folder`."""
    return representations.draw(Path(folder), cast(Sequence[RunDocument], documents), analysis.layout)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
