"""From options to what is run: data, split, model and method, and the hash that tells runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddbe import data, defaults, models
from feddbe.config import Config
from feddbe.data.dataset import Dataset
from feddbe.data.partition import Split, load_split, partition
from feddbe.errors import BadInput, unknown
from feddbe.measures.accuracy import majority_floor
from feddbe.methods import Method, hyper_parameters, parse
from feddbe.models import ModelSource
from feddbe.models.own import FromFile, from_file, names_file
from feddbe.state import sha256
from feddbe.task import Task, Training

__all__ = ["Experiment", "label_counts", "load_data", "resolve"]

_NOT_IN_HASH = {"rounds", "patience", "engine", "measure", "min_replies", "out", "resume", "force", "json"}
_NOT_IN_HASH |= {"method", "data", "data_dir", "split", "partition", "partition_seed", "har_layout", "model"}
"""A run can be extended, moved, and done elsewhere; the method is hashed by its parts, data by content, a
model by its kind, and a user's own by content too."""


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
    remarks: list[str]
    """What a reader of its results must know."""
    in_memory: str = ""
    """What of it was given as a Python object, so that no other process can make it from its options."""


def load_data(config: Config, dataset: Dataset | None = None) -> tuple[Dataset, Split, Config]:
    """The data, who holds which rows, and the options with partition and number of clients filled in."""
    directory = Path(config.data_dir).expanduser() if config.data_dir else None
    dataset = dataset or data.load(config.data, directory)
    chosen = {
        **defaults.GENERAL,
        **defaults.PER_DATA.get(dataset.name, {}),
        **defaults.VARIANTS[config.variant],
    }
    dataset, config = _laid_out(dataset, config, chosen["har_layout"])
    given = dataset.split if config.partition is None else None
    if config.split is not None:
        given = load_split(Path(config.split).expanduser(), len(dataset))
        if config.partition is not None:
            raise BadInput("--split and --partition exclude each other: the file is the partition")
    if given is not None:
        if config.clients not in (None, given.clients):
            raise BadInput(f"clients = {config.clients}; '{config.split or config.data}' has {given.clients}")
        return dataset, _held_out(given, config), dataclasses.replace(config, clients=given.clients)
    if dataset.client is not None:
        chosen["partition"] = "natural"
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
    objects = {"data": dataset, "model": None if isinstance(model, str) else model}
    first = parse(name, force=options.force)  # a wrong name should not have to wait for the data
    given = {f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default}
    dataset, split, options = load_data(options, dataset)
    source = model or options.model or models.fitting(tuple(dataset.x.shape[1:]), dataset.tokens)
    if isinstance(source, str) and names_file(source):
        source = from_file(source)
    kind = source if isinstance(source, str) else "own"
    if kind not in defaults.PER_MODEL:
        raise unknown("model", kind, [*models.MODELS, "FILE.py:FUNCTION"])
    layers = [
        defaults.GENERAL,
        defaults.PER_MODEL[kind],
        defaults.PER_DATA.get(dataset.name, {}),
        defaults.VARIANTS[options.variant],
        defaults.OF_VARIANT.get(options.variant, {}).get(kind, {}),
    ]
    chosen = {key: value for layer in layers for key, value in layer.items()}
    remarks = []
    own_rate = defaults.OF_METHOD.get(first.base, {}).get(kind)
    if own_rate is not None and options.lr is None:
        remarks.append(f"lr {own_rate:g} by default, where other methods have {chosen['lr']:g}")
        chosen["lr"] = own_rate
    representation = _representation(options, kind, chosen)
    built = models.build(
        source,
        dataset.inputs(dataset.x[:1]),
        dataset.classes,
        options.cut or chosen.get("cut"),
        options.seed,
        words=dataset.tokens,
        representation=representation or "linear",
    )
    lr = chosen["lr"] if options.lr is None else options.lr
    rounds = chosen["rounds"] if options.rounds is None else options.rounds
    options = dataclasses.replace(
        options,
        lr=lr,
        rounds=rounds,
        short_batch=options.short_batch or chosen["short_batch"],
        model=options.model if isinstance(source, FromFile) else kind,
        cut=built.cut,
        fasttext_rep=representation,
    )
    _check_short(options, split)
    parts: dict[str, dict[str, Any]] = {}
    for part, values in (item for layer in layers for item in layer.items() if isinstance(item[1], dict)):
        parts.setdefault(part, {}).update(values)
    if parts.get("mr", {}).get("init_epochs") == "epochs":
        parts["mr"]["init_epochs"] = options.epochs
    method = parse(name, parts, force=options.force)
    _check_members(method, options, split)

    training = Training(lr, options.batch, options.epochs, options.bn_buffers)
    task = Task(built, dataset, split, training, options.seed, rounds, options.newcomers)
    unused = method.unused(task)
    remarks += [f"{key} does nothing: {why}" for key, why in unused.items() if key in given]
    config = dataclasses.asdict(options) | {"method": name, "method_options": hyper_parameters(method)}
    config |= dict.fromkeys(unused)
    hashed = {key: value for key, value in config.items() if key not in _NOT_IN_HASH}
    hashed |= {"data": dataset.sha256(), "split": split.index_sha256() | {"parts": None}}
    hashed["sizes"] = [[len(rows) for rows in part] for part in (split.train, split.test)]
    hashed["model"] = kind
    if kind == "own":
        hashed |= {"module": str(built.module), "theta0": sha256(built.parameters)}
    if isinstance(source, FromFile):
        hashed["file"] = source.sha256
    return Experiment(
        name=name,
        options=options,
        task=task,
        method=method,
        config=config,
        config_hash=hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest(),
        floor=majority_floor(dataset, split, task.members),
        remarks=remarks,
        in_memory=" and ".join(what for what, one in objects.items() if one is not None),
    )


def _representation(options: Config, kind: str, chosen: Mapping[str, Any]) -> str | None:
    """fastText's choice; for other models there is none."""
    if kind == "fasttext":
        return options.fasttext_rep or str(chosen["fasttext_rep"])
    if options.fasttext_rep is not None:
        raise BadInput(f"fasttext_rep = {options.fasttext_rep}; the model is '{kind}', not fasttext")
    return None


def _laid_out(dataset: Dataset, config: Config, default: str) -> tuple[Dataset, Config]:
    """HAR's windows as `har_layout` says; for other data there is no such choice."""
    if dataset.name != "har":
        if config.har_layout is not None:
            raise BadInput(f"har_layout = {config.har_layout}; the data is '{dataset.name}', not har")
        return dataset, config
    from feddbe.data import har  # here: a reader, which a client has no use for

    layout = config.har_layout or default
    laid_out = har.scrambled(dataset) if layout == "scrambled" else dataset
    return laid_out, dataclasses.replace(config, har_layout=layout)


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
