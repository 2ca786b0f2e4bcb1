"""From options to what is run: data, split, model and method, and the hash that tells runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddbe import data, methods, models
from feddbe.config.defaults import DefaultLayers, Setting
from feddbe.config.options import Config, identity_of_key
from feddbe.config.parameters import Parameters, ParsedName
from feddbe.config.user_code import StoredSource, is_file_reference
from feddbe.data.dataset import Dataset
from feddbe.data.federated import FederatedData, load_federated_data
from feddbe.data.split import Split
from feddbe.errors import InvalidInputError
from feddbe.methods import new_clients
from feddbe.methods.base import Method
from feddbe.methods.registry import MethodName, hyperparameters, parse_name
from feddbe.metrics.builtin import majority_accuracy
from feddbe.models.registry import ModelFromFile, ModelSource, load_builder
from feddbe.state import sha256
from feddbe.training.task import LearningRateDecay, Optimizer, Task, Training


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
    majority_accuracy: float
    notes: list[str]
    """What a reader of its results must know."""
    settings: dict[str, Setting]
    """Every value and where it came from: of options, and of names' own options, as in `mr kappa`."""
    sources: dict[str, StoredSource] = dataclasses.field(default_factory=dict)
    """Content of the user's files that `model` and `method` are from."""
    in_memory: str = ""
    """What of it was given as a Python object, so that no other process can make it from its options."""


def resolve(
    name: str, options: Config, *, dataset: Dataset | None = None, model: ModelSource | None = None
) -> Experiment:
    """Fill in every default, load the data, build the model and the method."""
    return resolve_all([name], options, dataset=dataset, model=model)[0]


def resolve_all(
    names: Sequence[str],
    options: Config,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    origins: Mapping[str, str] | None = None,
) -> list[Experiment]:
    """One experiment for each method, on the same data, split and model, which are made once.

    `origins`: where the options came from that were given.
    """
    parsed = [parse_name(name) for name in names]
    for method in parsed:
        method.build(force=options.force)  # reports a wrong name before the data is loaded
    changed = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]
    given = dict.fromkeys(changed, "given") | dict(origins or {})
    objects = {"data": dataset, "model": None if isinstance(model, str) else model}
    in_memory = " and ".join(what for what, one in objects.items() if one is not None)
    common = _prepare(options, given, load_federated_data(options, dataset), model, in_memory)
    return [_resolve_one(method, common) for method in parsed]


@dataclass(frozen=True)
class _Common:
    """What the methods of a comparison share."""

    asked: Config
    given: dict[str, str]
    task: Task
    """With the learning rate that a method without one of its own has."""
    options: Config
    model: ParsedName[Parameters] | None
    """None: the user's own."""
    content: dict[str, Any]
    """What is hashed of data, split and model."""
    floor: float
    source: StoredSource | None
    """Content of the file that the model is from."""
    in_memory: str

    @property
    def kind(self) -> str:
        return self.model.name if self.model else "own"


def _prepare(
    asked: Config, given: dict[str, str], held: FederatedData, model: ModelSource | None, in_memory: str
) -> _Common:
    """Everything but the method."""
    dataset, split, options = held
    source = model or options.model or models.default_model(tuple(dataset.x.shape[1:]), dataset.num_words)
    if isinstance(source, str) and is_file_reference(source):
        source = load_builder(source)
    named = (
        models.parse_model(source, DefaultLayers(options.variant, "").part_settings())
        if isinstance(source, str)
        else None
    )
    chosen = DefaultLayers(options.variant, dataset.name, named.name if named else "own")
    first = int(dataset.x.argmax()) // dataset.x[0].numel() if dataset.num_words else 0  # has the last word
    sample = dataset.inputs(dataset.x[first : first + 1])
    cut = options.cut or chosen["cut"]
    built = models.build_model(
        str(named) if named else source, sample, dataset.classes, cut, options.seed, words=dataset.num_words
    )
    rounds = int(chosen["rounds"]) if options.rounds is None else options.rounds
    options = dataclasses.replace(
        options,
        lr=chosen["lr"] if options.lr is None else options.lr,
        lr_decay=_decay(options.lr_decay, rounds),
        rounds=rounds,
        short_batch=options.short_batch or chosen["short_batch"],
        model=options.model if isinstance(source, ModelFromFile) else str(named or "own"),
        cut=built.cut,
    )
    check_short(options, split)
    content: dict[str, Any] = {"data": dataset.sha256(), "split": split.index_sha256() | {"parts": None}}
    content["sizes"] = [part.sizes.tolist() for part in (split.train, split.test)]
    content["model"] = str(named or "own")
    if named is None:
        content |= {"module": str(built.module), "theta0": sha256(built.parameters)}
    file = source.user_object if isinstance(source, ModelFromFile) else None
    if file:
        content["file"] = file.sha256
    task = Task(
        built, dataset, split, _training(options), options.seed, options.rounds or 0, options.new_clients
    )
    floor = majority_accuracy(dataset, split, task.members)
    return _Common(
        asked, given, task, options, named, content, floor, file.source if file else None, in_memory
    )


def _resolve_one(parsed: MethodName, common: _Common) -> Experiment:
    """The experiment of one method."""
    options, task, given = common.options, common.task, common.given
    name = parsed.text
    chosen = DefaultLayers(options.variant, task.dataset.name, common.kind, parsed.base)
    parts = chosen.part_settings()
    if parts.get("mr", {}).get("init_epochs") == "epochs":
        parts["mr"]["init_epochs"] = options.local_epochs
    method = parsed.build(parts, force=options.force)
    check_members(name, method, options, task.split)
    check_optimiser(name, method, options, task)
    remarks = []
    if common.asked.lr is None and chosen["lr"] != options.lr:
        remarks.append(f"lr {chosen['lr']:g} by default, where other methods have {options.lr:g}")
        options = dataclasses.replace(options, lr=chosen["lr"])
        task = dataclasses.replace(task, training=dataclasses.replace(task.training, lr=chosen["lr"]))
    if common.kind == "own" and common.asked.lr is None:
        remarks.append(
            f"lr {options.lr:g} is a guess for a model of your own, and slow for many: try --lr 0.1, or let "
            "feddbe tune choose it on validation data"
        )
    unused = method.ignored_options(task)
    remarks += [f"{key} does nothing: {why}" for key, why in unused.items() if key in given]
    config = dataclasses.asdict(options) | {"method": name, "method_options": hyperparameters(method)}
    config |= dict.fromkeys(unused)
    remarks += method.notes(task)
    told = [key for key in dataclasses.asdict(options) if identity_of_key(key) in ("yes", "seed")]
    hashed = {key: config[key] for key in told} | methods.method_identity(method)
    digest = hashlib.sha256(json.dumps(hashed | common.content, sort_keys=True).encode()).hexdigest()
    sources = {"model": common.source, "method": methods.stored_source(method)}
    return Experiment(
        name=name,
        options=options,
        task=task,
        method=method,
        config=config,
        config_hash=digest,
        majority_accuracy=common.floor,
        notes=remarks,
        settings=_settings(parsed, common, config, chosen),
        sources={kind: source for kind, source in sources.items() if source},
        in_memory=" and ".join(filter(None, [common.in_memory, "method" * methods.is_in_memory(method)])),
    )


def _settings(
    parsed: MethodName, common: _Common, config: Mapping[str, Any], chosen: DefaultLayers
) -> dict[str, Setting]:
    """Where each value came from; what is given wins, then what the layers of defaults say."""
    data_set, model = (
        f"data set {common.task.dataset.name}",
        f"model {common.kind}",
    )
    origins = {"model": data_set, "cut": model} | {k: default.origin for k, default in chosen.options.items()}
    if common.options.partition in (None, "natural"):  # the data came divided
        origins |= {"partition": data_set, "clients": data_set}
    origins |= {"method": "given"} | common.given
    parts, brackets = dict(config["method_options"]), parsed.explicit_options
    for named in (data.find_builtin_dataset(common.asked.data, chosen.part_settings()), common.model):
        if named:
            parts[named.name] = dataclasses.asdict(named.options)
            brackets |= {f"{named.name} {key}" for key in named.explicit_options}
    found = {key: (value, origins.get(key)) for key, value in config.items() if key != "method_options"}
    for part, options in parts.items():
        layers = chosen.parts.get(part, {})
        for key, value in options.items():
            origin = layers[key].origin if key in layers else None
            found[f"{part} {key}"] = value, "given" if f"{part} {key}" in brackets else origin
    return {key: Setting(value, origin or "general default") for key, (value, origin) in found.items()}


def _training(options: Config) -> Training:
    if options.optimizer == "adam" and options.momentum:
        raise InvalidInputError(f"momentum = {options.momentum:g} is an option of SGD; Adam has its own")
    return Training(
        options.lr or 0.0,
        options.batch_size,
        options.local_epochs,
        options.bn_buffers,
        options.trainer,
        options.device,
        Optimizer(options.optimizer, options.momentum, options.weight_decay, options.clip_norm),
        LearningRateDecay.parse(options.lr_decay, 0) if options.lr_decay else None,
    )


def _decay(text: str | None, rounds: int) -> str | None:
    """With its length: a run that is carried on further is not another run than the one that was begun."""
    return str(LearningRateDecay.parse(text, rounds)) if text else None


@dataclass(frozen=True)
class Recipe:
    """A small value that can be pickled, from which any process on any machine with the same files builds the
    same task and method."""

    method: str
    """As the user named it."""
    options: Config
    """With every default filled in."""
    config_hash: str
    """Of what is to be built: data and a model's file are in it by content."""

    @classmethod
    def of(cls, experiment: Experiment) -> Recipe | None:
        """None for what was made from Python objects (`Experiment.in_memory` says which): there is no name by
        which another process could find them."""
        if experiment.in_memory:
            return None
        return cls(experiment.name, experiment.options, experiment.config_hash)

    def build(self) -> tuple[Task, Method]:
        """The task and the method, if this machine has what they were made from."""
        built = resolve(self.method, self.options)
        if built.config_hash != self.config_hash:
            raise InvalidInputError(
                f"'{self.options.data}' with model '{self.options.model}' is something else on this machine "
                f"(configuration {built.config_hash[:12]}, not {self.config_hash[:12]}); copy the files of "
                "data and model from where the run began"
            )
        return built.task, built.method


def check_members(name: str, method: Method, config: Config, split: Split) -> None:
    """Whether enough clients take part."""
    if config.new_clients >= split.clients:
        raise InvalidInputError(
            f"newcomers = {config.new_clients}; of {split.clients} clients at least one must train"
        )
    if config.adaptation != "full" and not config.new_clients:
        raise InvalidInputError(
            f"adapt = {config.adaptation}; it is about newcomers, of which there are none (--new-clients)"
        )
    if reason := new_clients.check_adaptation(config.adaptation, method):
        raise InvalidInputError(f"adapt = {config.adaptation}; not for {name}: {reason}")
    if method.needs_all_clients and (config.participation < 1 or config.new_clients):
        raise InvalidInputError(f"{name} needs join = 1 and no newcomers: {method.needs_all_clients}")


def check_optimiser(name: str, method: Method, config: Config, task: Task) -> None:
    """Whether the method's mathematics allow this way of training."""
    for key, reason in method.fixed_options.items():
        if getattr(config, key) != getattr(Config, key):
            raise InvalidInputError(f"{key} = {getattr(config, key)}; not for {name}: {reason}")
    if config.lr_decay and "lr" in (unused := method.ignored_options(task)):
        raise InvalidInputError(f"lr_decay = {config.lr_decay}; not for {name}: {unused['lr']}")


def check_short(config: Config, split: Split) -> None:
    if config.short_batch == "refuse":
        for client in np.flatnonzero(split.train.sizes < config.batch_size)[:1]:
            raise InvalidInputError(
                f"client {client} has {len(split.train[client])} training samples, a batch has "
                f"{config.batch_size}; short_batch=keep trains it on one short batch"
            )
