"""Begin runs or carry them on, each in its folder, which nobody else does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from feddbe.callbacks.base import Watch
from feddbe.config.options import Asked, Config, Given
from feddbe.config.user_code import Permission
from feddbe.errors import BadInput, Diverged
from feddbe.paths import expand
from feddbe.results.document import RunDocument
from feddbe.runs import folders, provenance, summary
from feddbe.runs.experiment import Experiment
from feddbe.runs.replay import admit, differences
from feddbe.runs.store import Store, alone, make_folder
from feddbe.simulation import engines, loop
from feddbe.simulation.engines import base


def again(given: Given, allowed: Permission) -> list[Asked]:
    """What the runs in the folder `out` were asked to be, one by one, with what is given now over it; code in
    files must be `allowed`."""
    found = []
    for folder in folders.find_all(str(given.values["out"])):
        store = Store.open(folder)
        try:
            now = {"json": False, "quiet": False, **given.values, "out": str(folder)}
            method, options = admit(store, allowed, now)
            origins = dict.fromkeys(store.meta("config"), f"the run in '{folder}'") | given.origins
        finally:
            store.close()
        found.append(Asked([method], options, origins))
    return found


def places(experiments: Sequence[Experiment], options: Config, watch: Watch, *, single: bool) -> list[Path]:
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
    found = [root] if single else [root / slug for slug in slugs]
    held = [Store.is_run(place) for place in found]
    if options.resume and not any(held):
        raise BadInput(f"--resume: no run in '{root}'; start it without --resume")
    for experiment, place in zip(experiments, found, strict=True):
        if Store.is_run(place):
            _check_same(experiment, place, resume=options.resume)
    return found


def _check_same(experiment: Experiment, place: Path, *, resume: bool) -> None:
    """A folder holds one run: refuse another one, and refuse to begin the same one again."""
    store = Store.open(place)
    same = store.meta("config_hash") == experiment.config_hash
    shown = "" if same else differences(store, experiment)
    store.close()
    if not same:
        raise BadInput(f"'{place}' holds a run with another configuration ({shown}); choose another --out")
    if not resume:
        raise BadInput(
            f"'{place}' holds this run already; continue it with --resume, or choose another --out"
        )


def carry_on(experiment: Experiment, place: Path, watch: Watch, *, hashes: bool = False) -> RunDocument:
    """Begin or continue one run in this folder. One that diverges raises `Diverged`, and its document says so
    from then on."""
    options = experiment.options
    waiting = base.Waiting(options.worker_timeout, remark=watch.remark)
    engine = engines.make(options.engine, experiment.task, experiment.method, waiting)
    try:
        make_folder(place)
        with alone(place):
            return _alone(experiment, place, engine, watch, hashes=hashes)
    finally:
        engine.close()


def _alone(
    experiment: Experiment, place: Path, engine: base.Engine, watch: Watch, *, hashes: bool
) -> RunDocument:
    begun = Store.is_run(place)
    if begun:  # by another process, since we looked
        _check_same(experiment, place, resume=experiment.options.resume)
        store = Store.open(place)
    else:
        start = loop.initial_server_state(experiment)
        store = Store.create(place, provenance.describe(experiment, start), start)
    try:
        if begun:
            _go_on(experiment, store, watch)
        loop.run_experiment(experiment, store, engine, watch)
        return summary.document(store, hashes=hashes)
    except Diverged as error:
        with store.transaction(store.last_round()):
            store.set_meta("diverged", summary.divergence(error))
        raise
    finally:
        store.close()


def _go_on(experiment: Experiment, store: Store, watch: Watch) -> None:
    """Say, and write, what is new about a run that is carried on."""
    recorded, known = store.meta("versions"), store.meta("remarks") or []
    others = provenance.other_versions(recorded, experiment) if recorded else ""
    news = [text for text in (others, _other_trainer(experiment, store)) if text]
    for text in news:
        watch.remark(text)
    if mark := summary.diverged(store):
        watch.remark(f"{experiment.name} diverged in round {mark['round']}, which is tried once more")
    with store.transaction(store.last_round()):
        store.set_meta("config", experiment.config)  # it may have been extended, or moved
        if news:
            store.set_meta("remarks", [*known, *(text for text in news if text not in known)])


def _other_trainer(experiment: Experiment, store: Store) -> str:
    then, now = store.meta("config").get("trainer", "auto"), experiment.options.trainer
    return "" if then == now else f"carried on with trainer {now}, before with {then}: the last bits differ"
