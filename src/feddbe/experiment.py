"""From options to what is run: data, split, model and method, and the hash that tells runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddbe import data, defaults, models
from feddbe.config import Config
from feddbe.data.dataset import Dataset
from feddbe.data.partition import Split, load_split, partition
from feddbe.errors import BadInput
from feddbe.evaluate.accuracy import majority_floor
from feddbe.methods import Method, hyper_parameters, parse
from feddbe.models import ModelSource
from feddbe.state import sha256
from feddbe.task import Task, Training

__all__ = ["Experiment", "label_counts", "load_data", "resolve"]

_NOT_IN_HASH = {"rounds", "patience", "engine", "out", "resume", "force", "json"}
_NOT_IN_HASH |= {"method", "data", "data_dir", "split", "partition", "partition_seed"}
"""A run can be extended, moved, and done elsewhere; the method is hashed by its parts, data by content."""


@dataclass(frozen=True)
class Experiment:
    """A run to be: all choices made."""

    name: str
    """The method as the user named it."""
    options: Config
    task: Task
    method: Method
    config: dict[str, Any]
    """All options and hyper-parameters, as stored with the run."""
    config_hash: str
    floor: float


def load_data(config: Config, dataset: Dataset | None = None) -> tuple[Dataset, Split, Config]:
    """The data, who holds which rows, and the options with partition and number of clients filled in."""
    directory = Path(config.data_dir).expanduser() if config.data_dir else None
    dataset = dataset or data.load(config.data, directory)
    chosen = {**defaults.GENERAL, **defaults.PER_DATA.get(dataset.name, {})}
    if config.split is not None:
        split = load_split(Path(config.split).expanduser(), len(dataset))
        if config.partition is not None:
            raise BadInput("--split and --partition exclude each other: the file is the partition")
        if config.clients not in (None, split.clients):
            raise BadInput(f"clients = {config.clients}; '{config.split}' has {split.clients}")
        return dataset, _held_out(split, config), dataclasses.replace(config, clients=split.clients)
    spec = config.partition or chosen["partition"]
    clients = config.clients
    if clients is None and spec != "natural":
        clients = chosen["clients"]
    split = partition(dataset.y.numpy(), spec, clients, config.partition_seed, dataset.client)
    return (
        dataset,
        _held_out(split, config),
        dataclasses.replace(config, partition=spec, clients=split.clients),
    )


def resolve(
    name: str, options: Config, *, dataset: Dataset | None = None, model: ModelSource | None = None
) -> Experiment:
    """Fill in every default, load the data, build the model and the method."""
    parse(name, force=options.force)  # a wrong name should not have to wait for the data
    dataset, split, options = load_data(options, dataset)
    source = model or options.model or models.fitting(tuple(dataset.x.shape[1:]))
    kind = source if isinstance(source, str) else "own"
    built = models.build(source, dataset.inputs(dataset.x[:1]), dataset.classes, options.cut, options.seed)
    layers = [
        defaults.GENERAL,
        defaults.PER_MODEL[kind],
        defaults.PER_DATA.get(dataset.name, {}),
        defaults.VARIANTS[options.variant],
    ]
    chosen = {key: value for layer in layers for key, value in layer.items()}
    lr = chosen["lr"] if options.lr is None else options.lr
    rounds = chosen["rounds"] if options.rounds is None else options.rounds
    options = dataclasses.replace(
        options,
        lr=lr,
        rounds=rounds,
        short_batch=options.short_batch or chosen["short_batch"],
        model=kind,
        cut=built.cut,
    )
    _check_short(options, split)
    mr = {key: value for layer in layers for key, value in layer.get("mr", {}).items()}
    if mr.get("init_epochs") == "epochs":
        mr["init_epochs"] = options.epochs
    method = parse(name, {"mr": mr}, force=options.force)
    _check_members(method, options, split)

    training = Training(lr, options.batch, options.epochs, options.bn_buffers)
    config = dataclasses.asdict(options) | {"method": name, "method_options": hyper_parameters(method)}
    hashed = {key: value for key, value in config.items() if key not in _NOT_IN_HASH}
    hashed |= {"data": dataset.sha256(), "split": split.index_sha256() | {"parts": None}}
    hashed["sizes"] = [[len(rows) for rows in part] for part in (split.train, split.test)]
    if kind == "own":
        hashed |= {"module": str(built.module), "theta0": sha256(built.parameters)}
    return Experiment(
        name=name,
        options=options,
        task=Task(built, dataset, split, training, options.seed, rounds),
        method=method,
        config=config,
        config_hash=hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest(),
        floor=majority_floor(dataset, split),
    )


def label_counts(dataset: Dataset, split: Split) -> npt.NDArray[np.int64]:
    """(clients x classes) samples of each label, train and test together."""
    y = dataset.y.numpy()
    rows = [
        np.bincount(y[np.concatenate([train, test])], minlength=dataset.classes)
        for train, test in zip(split.train, split.test, strict=True)
    ]
    return np.stack(rows).astype(np.int64)


def _held_out(split: Split, config: Config) -> Split:
    return split.held_out(config.validation) if config.validation else split


def _check_members(method: Method, config: Config, split: Split) -> None:
    """Whether enough clients take part."""
    if config.newcomers >= split.clients:
        raise BadInput(f"newcomers = {config.newcomers}; of {split.clients} clients at least one must train")
    if method.needs_all and (config.join < 1 or config.newcomers):
        raise BadInput(f"{config.method or method.name} needs join = 1 and no newcomers: {method.needs_all}")


def _check_short(config: Config, split: Split) -> None:
    if config.short_batch == "refuse":
        for client, rows in enumerate(split.train):
            if len(rows) < config.batch:
                raise BadInput(
                    f"client {client} has {len(rows)} training samples, a batch has {config.batch}; "
                    "short_batch=keep trains it on one short batch"
                )
