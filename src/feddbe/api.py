"""Runs in a few lines of Python; the command line calls the same functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddbe import engines, measures
from feddbe.data import SOURCES
from feddbe.data.dataset import Dataset
from feddbe.errors import BadInput, Diverged
from feddbe.methods import Method, spelled
from feddbe.models import ModelSource
from feddbe.options import config, defaults
from feddbe.options.config import Asked, Config
from feddbe.paths import expand
from feddbe.representations import readings
from feddbe.results.document import RunDocument, adapting
from feddbe.runs import folders, lock, measuring, provenance, rounds, schedule, summary
from feddbe.runs.experiment import Experiment, label_counts, load_data, resolve_all
from feddbe.runs.measuring import Question
from feddbe.runs.revisit import differences
from feddbe.runs.rounds import Watch
from feddbe.runs.store import Store
from feddbe.show import pictures, represented

__all__ = [
    "carry_out",
    "compare",
    "draw",
    "draw_measured",
    "draw_paper_splits",
    "load",
    "measure",
    "resolve",
    "run",
]


def run(
    method: str | Method,
    *,
    data: str | Dataset = "digits",
    model: ModelSource | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> RunDocument:
    """Run one method and return the document that describes it (also in the run's folder, `out`).

    `options` are those of the command line, with underscores; `method` may be a name or an instance, as in
    `FedAvg()`; `model` a name, an `nn.Module`, a pair (features, classifier), or a function of (shape of one
    input, classes) that makes a module.
    """
    return compare([method], data=data, model=model, watch=watch, _single=True, **options)[0]


def compare(
    methods: Sequence[str | Method],
    *,
    data: str | Dataset = "digits",
    model: ModelSource | None = None,
    watch: Watch | None = None,
    _single: bool = False,
    **options: Any,
) -> list[RunDocument]:
    """Run several methods on the same data, split, model and seed, one folder each in a common one."""
    dataset = data if isinstance(data, Dataset) else None
    given = options | {"data": dataset.name if dataset else data}
    if isinstance(model, str):
        given, model = given | {"model": model}, None
    asked = config.read([one if isinstance(one, str) else spelled(one) for one in methods], given)
    return carry_out(asked, single=_single, dataset=dataset, model=model, watch=watch)


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

    A method that diverges does not keep the others from running; then `Diverged` is raised, with the names of
    those that did as notes.
    """
    experiments = resolve(asked, single=single, dataset=dataset, model=model)
    watch = watch or Watch()
    places = _places(experiments, asked.config, watch, single=single)
    documents, diverged = [], dict[str, Diverged]()
    with folders.none_left_empty(places, made=not asked.config.out):
        for experiment, place in zip(experiments, places, strict=True):
            try:
                documents.append(_one(experiment, place, watch, hashes=hashes))
            except Diverged as error:
                diverged[experiment.name] = error
        if diverged:
            first = next(iter(diverged.values()))
            for name in diverged:
                first.add_note(name)
            raise first
    return documents


def resolve(
    asked: Asked, *, single: bool, dataset: Dataset | None = None, model: ModelSource | None = None
) -> list[Experiment]:
    """What was asked for, with every choice made; nothing is run or written."""
    names, options, origins = asked
    if single and len(names) > 1:
        raise BadInput(f"run takes one method, not {len(names)} ({', '.join(names)}); compare takes several")
    engines.find(options.engine)
    schedule.who_evaluates(options.eval, 0, 0, 1, [])
    measures.parse(options.measure)
    found = resolve_all(names, options, dataset=dataset, model=model, origins=origins)
    if len({folders.slug(name) for name in names}) < len(names):
        raise BadInput(f"the same method twice: {', '.join(names)}")
    return found


def load(folder: str | Path, *, hashes: bool = True) -> RunDocument:
    """The document of a run that exists; without `hashes` its states, which may be large, are not read."""
    store = Store.open(folders.find(str(folder)))
    try:
        return summary.document(store, hashes=hashes)
    finally:
        store.close()


def draw(folder: str | Path, documents: Sequence[RunDocument]) -> list[Path]:
    """The learning curves, those of newcomers if there are any, and the data distribution as pictures in
    `folder`."""
    paths = [Path(folder) / "curves.png"]
    pictures.curves(paths[0], documents)
    if any(adapting(document) for document in documents):
        paths.append(Path(folder) / "newcomers.png")
        pictures.adaptation(paths[1], documents)
    store = Store.open(Path(documents[0]["folder"]))
    labels = store.meta("labels")
    store.close()
    if labels is None:
        return [*paths, *represented.draw_rounds(Path(folder), documents)]
    paths.append(Path(folder) / "data.png")
    about = documents[0]["config"]
    title = f"{about['data']}, {about['partition'] or 'split from a file'}, {about['clients']} clients"
    pictures.bubbles(paths[-1], np.array(labels), title)
    return [*paths, *represented.draw_rounds(Path(folder), documents)]


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
    data: Dataset | None = None,
    model: ModelSource | None = None,
    watch: Watch | None = None,
) -> list[RunDocument]:
    """Measure the representations in runs or comparisons that exist, and return their documents.

    Nothing is run again but what clients did in that one round. What is in a run's file already is not taken
    twice. `data` and `model`: those of the runs, if they were given as Python objects.
    """
    question = Question(tuple(readings.parse(what)), round, _names(moment), _names(at), n, quick, per_client)
    names = [runs] if isinstance(runs, str | Path) else runs
    found = list(dict.fromkeys(folder for name in names for folder in folders.find_all(str(name))))
    for folder in found:
        measuring.answer(folder, question, dataset=data, model=model, watch=watch)
    return [load(folder, hashes=False) for folder in found]


def draw_measured(folder: str | Path, documents: Sequence[RunDocument]) -> list[Path]:
    """What was measured of representations as pictures in `folder`."""
    return represented.draw(Path(folder), documents, measuring.layout)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def draw_paper_splits(folder: Path, data_dir: Path | None = None) -> Iterator[tuple[str, Path | None]]:
    """Who holds what in the paper's settings: (data set, picture in `folder`), or None if it is not here."""
    for source in SOURCES.values():
        for spec in defaults.PAPER_SPLITS.get(source.name, ()):
            if source.found(data_dir) is None:
                yield source.name, None
                break
            options = Config(data=source.name, data_dir=str(data_dir) if data_dir else None, partition=spec)
            dataset, split, _ = load_data(options)
            path = folder / f"{source.name}-{spec.replace(':', '-')}.png"
            title = ", ".join(filter(None, [source.name, spec, f"{split.clients} clients", dataset.note]))
            pictures.bubbles(path, label_counts(dataset, split), title)
            yield source.name, path


def _places(experiments: Sequence[Experiment], options: Config, watch: Watch, *, single: bool) -> list[Path]:
    """The folder of each run; checked before any of them begins."""
    slugs = [folders.slug(experiment.name) for experiment in experiments]
    data = Path(experiments[0].task.dataset.name).stem
    if options.out:
        root = expand(options.out)
    elif options.resume:
        hashes = [experiment.config_hash for experiment in experiments]
        wanted = dict(zip(["."] if single else slugs, hashes, strict=True))
        root = folders.newest(wanted, remark=watch.remark)
    else:
        root = folders.numbered(f"{data}-{slugs[0]}" if single else f"compare-{data}")
    places = [root] if single else [root / slug for slug in slugs]
    held = [Store.is_run(place) for place in places]
    if options.resume and not any(held):
        raise BadInput(f"--resume: no run in '{root}'; start it without --resume")
    for experiment, place in zip(experiments, places, strict=True):
        if Store.is_run(place):
            _check_same(experiment, place, resume=options.resume)
    return places


def _check_same(experiment: Experiment, place: Path, *, resume: bool) -> None:
    """A folder holds one run: refuse another one, and refuse to begin the same one again."""
    store = Store.open(place)
    there, same = store.meta("config"), store.meta("config_hash") == experiment.config_hash
    store.close()
    if not same:
        shown = differences(there, experiment.config)
        raise BadInput(f"'{place}' holds a run with another configuration ({shown}); choose another --out")
    if not resume:
        raise BadInput(
            f"'{place}' holds this run already; continue it with --resume, or choose another --out"
        )


def _one(experiment: Experiment, place: Path, watch: Watch, *, hashes: bool) -> RunDocument:
    """Begin or continue one run, which nobody else does meanwhile."""
    options = experiment.options
    waiting = engines.Waiting(options.worker_timeout, remark=watch.remark)
    engine = engines.make(options.engine, experiment.task, experiment.method, waiting)
    try:
        lock.make_folder(place)
        with lock.alone(place):
            return _alone(experiment, place, engine, watch, hashes=hashes)
    finally:
        engine.close()


def _alone(
    experiment: Experiment, place: Path, engine: engines.Engine, watch: Watch, *, hashes: bool
) -> RunDocument:
    begun = Store.is_run(place)
    if begun:  # by another process, since we looked
        _check_same(experiment, place, resume=experiment.options.resume)
        store = Store.open(place)
    else:
        store = Store.create(place, provenance.describe(experiment), rounds.start(experiment))
    try:
        if begun:
            _go_on(experiment, store, watch)
        rounds.run(experiment, store, engine, watch)
        return summary.document(store, hashes=hashes)
    finally:
        store.close()


def _go_on(experiment: Experiment, store: Store, watch: Watch) -> None:
    """Say, and write, what is new about a run that is carried on."""
    recorded, known = store.meta("versions"), store.meta("remarks") or []
    others = provenance.other_versions(recorded) if recorded else ""
    news = [text for text in (store.meta("lost"), others, _other_trainer(experiment, store)) if text]
    for text in news:
        watch.remark(text)
    with store.transaction(store.last_round()):
        store.set_meta("config", experiment.config)  # it may have been extended, or moved
        if news:
            store.set_meta("remarks", [*known, *(text for text in news if text not in known)])
            store.set_meta("lost", None)


def _other_trainer(experiment: Experiment, store: Store) -> str:
    then, now = store.meta("config").get("trainer", "auto"), experiment.options.trainer
    return "" if then == now else f"carried on with trainer {now}, before with {then}: the last bits differ"
