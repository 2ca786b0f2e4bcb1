"""Each measure of representations as named numbers, as a run's file keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from feddbe.errors import BadInput, unknown
from feddbe.metrics.representations.discrepancy import Discrepancy, discrepancy
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.mdl import FULL, QUICK, Settings, in_parts, mdl
from feddbe.metrics.representations.points import Points
from feddbe.metrics.representations.tsne import tsne
from feddbe.state import State

Readings = dict[str, float | None]
"""By the reading's name; the measure's own number has an empty one."""
EPSILONS = (1.0, 0.5, 0.1)
"""Nats per sample at which surplus description length and sample complexity are written down."""
_OF_CLIENTS = tuple(field.name for field in dataclasses.fields(Discrepancy)[1:-1])
"""The columns of a discrepancy that have a number of each client."""


class Taken(NamedTuple):
    """What came of a measure: of all clients together, of each, and what is no number."""

    overall: Readings
    clients: Mapping[int, Readings] = {}
    state: State = {}  # noqa: RUF012  (never written to)


def _mdl(points: Points, classes: int, settings: Mapping[str, Any]) -> Taken:
    found = mdl(points, classes=classes, settings=Settings(**settings))
    read: Readings = {
        "": found.nats, "bits": found.bits, "std": found.spread, "validation_loss": found.validation_loss,
    }  # fmt: skip
    for size, losses in zip(found.sizes, found.losses, strict=True):
        read |= {f"loss:{size}": float(np.mean(losses)), f"loss_std:{size}": float(np.std(losses, ddof=1))}
    for eps in EPSILONS:
        read |= {f"sdl:{eps:g}": found.sdl(eps), f"esc:{eps:g}": found.esc(eps)}
    return Taken(read)


def _probe(points: Points, classes: int, settings: Mapping[str, Any]) -> Taken:
    return Taken({"": linear_probe(points, **settings)})


def _discrepancy(points: Points, classes: int, settings: Mapping[str, Any]) -> Taken:
    found = discrepancy(points, **settings)
    clients: dict[int, Readings] = {
        int(client): {name: float(getattr(found, name)[index]) for name in _OF_CLIENTS}
        for index, client in enumerate(found.client)
    }
    return Taken({**found.overall()}, clients)


def _tsne(points: Points, classes: int, settings: Mapping[str, Any]) -> Taken:
    return Taken(
        {}, state={key: torch.from_numpy(a) for key, a in tsne(points, **settings)._asdict().items()}
    )


class _Measure(NamedTuple):
    take: Callable[[Points, int, Mapping[str, Any]], Taken]
    settings: Mapping[str, Any]
    quick: Mapping[str, Any] | None = None
    """With less work, where there is such a way."""
    each: bool = False
    """Whether it can be taken of each client alone."""
    shared: bool = False
    """Whether each client's model sees the samples of all clients, not its own alone."""


def _of_all(settings: Settings) -> dict[str, Any]:
    """Which samples are kept has been chosen before."""
    return dataclasses.asdict(dataclasses.replace(settings, n=None))


_DISCREPANCY = {"seed": 0, "folds": 5, "most": 500, "draws": 20}
MEASURES = {
    "mdl": _Measure(_mdl, _of_all(FULL), _of_all(QUICK), each=True),
    "probe": _Measure(_probe, {"seed": 0}, each=True),
    "discrepancy": _Measure(_discrepancy, _DISCREPANCY),
    "discrepancy-shared": _Measure(_discrepancy, _DISCREPANCY, shared=True),
    "tsne": _Measure(_tsne, {"seed": 0, "n": 2000}),
}


def parse(what: str) -> list[str]:
    """The names in `mdl,tsne`."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    for name in names:
        if name not in MEASURES:
            raise unknown("measure of representations", name, MEASURES)
    if not names:
        raise BadInput(f"nothing to measure; choose of {', '.join(sorted(MEASURES))}")
    return list(dict.fromkeys(names))


def settings_of(name: str, *, quick: bool) -> tuple[dict[str, Any], bool]:
    """With what a measure is taken, and whether that is its quick way."""
    measure = MEASURES[name]
    quickly = quick and measure.quick is not None
    return dict((measure.quick if quickly else None) or measure.settings), quickly


def take(
    name: str, points: Points, classes: int, settings: Mapping[str, Any], *, each: bool = False
) -> Taken:
    """The measure of these points, of `classes` possible labels; `each`: of every client's alone. A client
    that has too few is left out."""
    function = MEASURES[name].take
    if not each:
        return function(points, classes, settings)
    found: dict[int, Readings] = {}
    why: BadInput | None = None
    for client in in_parts(np.unique(points.client).tolist()):
        try:
            found[client] = function(points.of(points.client == client), classes, settings).overall
        except BadInput as error:
            why = error
    if not found:
        raise BadInput(f"{name} of single clients: {why}")
    shared = set.intersection(*(set(read) for read in found.values()))
    means = {key: [v for read in found.values() if (v := read[key]) is not None] for key in sorted(shared)}
    return Taken({key: float(np.mean(values)) for key, values in means.items() if values}, found)


def combine_models(taken: Sequence[Taken]) -> Taken:
    """Return the discrepancies under each client's own model as the measurement of all clients."""
    clients = {client: read for one in taken for client, read in one.clients.items()}
    return Taken({**as_discrepancy(clients).overall()}, clients)


def as_discrepancy(clients: Mapping[int, Mapping[str, Any]]) -> Discrepancy:
    """Back from its readings."""
    columns: Any = {name: np.array([read[name] for read in clients.values()]) for name in _OF_CLIENTS}
    return Discrepancy(client=np.array(list(clients)), left_out=(), **columns)


def as_points(state: State) -> Points:
    """Back from the state that t-SNE leaves."""
    return Points(*(state[key].numpy() for key in Points._fields))
