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
from feddbe.methods import Method, options, parse
from feddbe.models import ModelSource
from feddbe.state import sha256
from feddbe.task import Task, Training

__all__ = ["Experiment", "label_counts", "load_data", "resolve"]

_NOT_IN_HASH = {"rounds", "patience", "engine", "out", "resume", "force", "json", "data_dir", "data", "split"}
"""A run can be extended, moved, and done elsewhere; data and split are hashed by content."""


@dataclass(frozen=True)
class Experiment:
    """A run to be: all choices made."""

    name: str
    """The method as the user named it."""
    task: Task
    method: Method
    config: dict[str, Any]
    config_hash: str
    floor: float
    rounds: int
    patience: int | None
    join: float
    eval: str
    eval_after: bool
    train_loss: str


def load_data(config: Config, dataset: Dataset | None = None) -> tuple[Dataset, Split, Config]:
    """The data, who holds which rows, and the options with the number of clients and the partition filled in."""
    directory = Path(config.data_dir).expanduser() if config.data_dir else None
    dataset = dataset or data.load(config.data, directory)
    chosen = {**defaults.GENERAL, **defaults.PER_DATA.get(dataset.name, {})}
    if config.split is not None:
        split = load_split(Path(config.split).expanduser(), len(dataset))
        if config.partition is not None:
            raise BadInput("--split and --partition exclude each other: the file is the partition")
        if config.clients not in (None, split.clients):
            raise BadInput(f"clients = {config.clients}; '{config.split}' has {split.clients}")
        return dataset, split, dataclasses.replace(config, clients=split.clients)
    spec = config.partition or chosen["partition"]
    clients = config.clients
    if clients is None and spec != "natural":
        clients = chosen["clients"]
    split = partition(dataset.y.numpy(), spec, clients, config.partition_seed, dataset.client)
    return dataset, split, dataclasses.replace(config, partition=spec, clients=split.clients)


def resolve(
    name: str, config: Config, *, dataset: Dataset | None = None, model: ModelSource | None = None
) -> Experiment:
    """Fill in every default, load the data, build the model and the method."""
    settings = defaults.VARIANTS[config.variant]
    parse(name, force=config.force)  # a wrong name should not have to wait for the data
    dataset, split, config = load_data(config, dataset)
    shape = tuple(dataset.x.shape[1:])
    source = model or config.model or models.fitting(shape)
    kind = source if isinstance(source, str) else "own"
    built = models.build(source, dataset.inputs(dataset.x[:1]), dataset.classes, config.cut, config.seed)
    layers = [defaults.GENERAL, defaults.PER_MODEL[kind], defaults.PER_DATA.get(dataset.name, {}), settings]
    chosen = {key: value for layer in layers for key, value in layer.items()}
    mr = {key: value for layer in layers for key, value in layer.get("mr", {}).items()}
    if mr.get("init_epochs") == "epochs":
        mr["init_epochs"] = config.epochs
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    filled = {key: chosen[key] for key in ("rounds", "lr", "short_batch") if given[key] is None}
    config = dataclasses.replace(config, **filled, model=kind, cut=built.cut)
    assert config.rounds is not None and config.lr is not None  # filled in above
    method = parse(name, {"mr": mr}, force=config.force)
    _check_short(config, split)
    task = Task(
        built,
        dataset,
        split,
        Training(config.lr, config.batch, config.epochs, config.bn_buffers),
        seed=config.seed,
        rounds=config.rounds,
    )
    record = dataclasses.asdict(config) | {"method": name, "method_options": options(method)}
    hashed = {key: value for key, value in record.items() if key not in _NOT_IN_HASH | {"method"}}
    hashed |= {
        "parts": [part for part in name.split("(")[:1]],
        "data": dataset.sha256(),
        "split": split.index_sha256()["train"],
        "test": split.index_sha256()["test"],
    }
    if kind == "own":
        hashed["theta0"] = sha256(built.parameters)
    return Experiment(
        name=name,
        task=task,
        method=method,
        config=record,
        config_hash=hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest(),
        floor=majority_floor(dataset, split),
        rounds=config.rounds,
        patience=config.patience,
        join=config.join,
        eval=config.eval,
        eval_after=config.eval_after,
        train_loss=config.train_loss,
    )


def label_counts(dataset: Dataset, split: Split) -> npt.NDArray[np.int64]:
    """(clients x classes) samples of each label, train and test together."""
    y = dataset.y.numpy()
    rows = [
        np.bincount(y[np.concatenate([train, test])], minlength=dataset.classes)
        for train, test in zip(split.train, split.test, strict=True)
    ]
    return np.stack(rows).astype(np.int64)


def _check_short(config: Config, split: Split) -> None:
    if config.short_batch == "refuse":
        for client, rows in enumerate(split.train):
            if len(rows) < config.batch:
                raise BadInput(
                    f"client {client} has {len(rows)} training samples, fewer than a batch of {config.batch}; "
                    "short_batch=keep trains it on one short batch"
                )
