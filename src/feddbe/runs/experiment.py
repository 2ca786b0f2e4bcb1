"""Experiments: options resolved to data, split, model and method, and the hash that identifies a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddbe import data, methods, models
from feddbe.config.defaults import ResolvedDefaults, Setting
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
    """A run with all options resolved."""

    name: str
    """The method as the user named it."""
    options: Config
    task: Task
    method: Method
    config: dict[str, Any]
    """All options and hyperparameters, as stored with the run."""
    config_hash: str
    majority_accuracy: float
    notes: list[str]
    """Notes for readers of the results."""
    settings: dict[str, Setting]
    """Every value and where it came from: of options, and of names' own options, as in `mr kappa`."""
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    """Hashes of the contents on which results depend: of `data`, `partition`, and code outside feddbe."""
    sources: dict[str, StoredSource] = dataclasses.field(default_factory=dict)
    """Content of the user's files that define `model` and `method`."""
    in_memory: frozenset[str] = frozenset()
    """Components passed as Python objects (`data`, `model`, `method`).

    With any of them, the experiment cannot be rebuilt from its options.
    """


def resolve(
    name: str, options: Config, *, dataset: Dataset | None = None, model: ModelSource | None = None
) -> Experiment:
    """Return the experiment of one method; see `resolve_all`."""
    return resolve_all([name], options, dataset=dataset, model=model)[0]


def resolve_all(
    names: Sequence[str],
    options: Config,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    origins: Mapping[str, str] | None = None,
) -> list[Experiment]:
    """Fill in all defaults, load the data, and build the model and the methods.

    Args:
        names: Methods; all share the same data, split and model, which are built once.
        options: Options from the user.
        dataset: Data that was passed as a Python object.
        model: Model that was passed as a Python object.
        origins: Origin of each option that the user set, for error messages and previews.

    Returns:
        An experiment for each method.
    """
    parsed = [parse_name(name) for name in names]
    for method in parsed:
        method.build(force=options.force)  # an unknown name is reported before the data is loaded
    changed = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]
    all_origins = dict.fromkeys(changed, "given") | dict(origins or {})
    objects = {"data": dataset, "model": None if isinstance(model, str) else model}
    in_memory = frozenset(name for name, value in objects.items() if value is not None)
    federated = load_federated_data(options, dataset)
    common = _resolve_common(options, all_origins, federated, model, in_memory)
    return [_resolve_one(method, common) for method in parsed]


@dataclass(frozen=True)
class _Common:
    """Everything except the method, shared by the methods of a comparison."""

    requested: Config
    origins: dict[str, str]
    task: Task
    """The task with the default learning rate of methods that do not define one."""
    options: Config
    model: ParsedName[Parameters] | None
    """None for a user's model."""
    content: dict[str, Any]
    """Hashed content of data, split and model."""
    majority_accuracy: float
    source: StoredSource | None
    """Content of the file that defines the model."""
    in_memory: frozenset[str]

    @property
    def model_name(self) -> str:
        return self.model.name if self.model else "own"


def _resolve_common(
    requested: Config,
    origins: dict[str, str],
    federated: FederatedData,
    model: ModelSource | None,
    in_memory: frozenset[str],
) -> _Common:
    dataset, split, options = federated
    source = model or options.model or models.default_model(tuple(dataset.x.shape[1:]), dataset.num_words)
    if isinstance(source, str) and is_file_reference(source):
        source = load_builder(source)
    builtin: ParsedName[Parameters] | None = None
    if isinstance(source, str):
        builtin = models.parse_model(source, ResolvedDefaults(options.variant, "").part_settings())
    model_text = str(builtin) if builtin else "own"
    defaults = ResolvedDefaults(options.variant, dataset.name, builtin.name if builtin else "own")
    cut = options.cut or defaults["cut"]
    built = models.build_model(
        model_text if builtin else source,
        dataset.example(),
        dataset.classes,
        cut,
        options.seed,
        words=dataset.num_words,
    )
    rounds = int(defaults["rounds"]) if options.rounds is None else options.rounds
    options = dataclasses.replace(
        options,
        lr=defaults["lr"] if options.lr is None else options.lr,
        lr_decay=_decay_with_length(options.lr_decay, rounds),
        rounds=rounds,
        batch_order=options.batch_order or defaults["batch_order"],
        short_batch=options.short_batch or defaults["short_batch"],
        model=options.model if isinstance(source, ModelFromFile) else model_text,
        cut=built.cut,
    )
    check_batch_size(options, split, dataset.client_names)
    file = source.user_object if isinstance(source, ModelFromFile) else None
    content: dict[str, Any] = {
        "data": dataset.sha256(),
        "split": split.index_sha256() | {"parts": None},
        "sizes": [part.sizes.tolist() for part in (split.train, split.test)],
        "model": model_text,
    }
    if builtin is None:
        content |= {"module": str(built.module), "theta0": sha256(built.parameters)}
    if file:
        content["file"] = file.sha256
    task = Task(built, dataset, split, make_training(options), options.seed, rounds, options.new_clients)
    return _Common(
        requested=requested,
        origins=origins,
        task=task,
        options=options,
        model=builtin,
        content=content,
        majority_accuracy=majority_accuracy(dataset, split, task.members),
        source=file.source if file else None,
        in_memory=in_memory,
    )


def _resolve_one(parsed: MethodName, common: _Common) -> Experiment:
    """Return the experiment of one method."""
    options = common.options
    task = common.task
    name = parsed.text
    defaults = ResolvedDefaults(options.variant, task.dataset.name, common.model_name, parsed.base)
    parts = defaults.part_settings()
    if parts.get("mr", {}).get("init_epochs") == "epochs":
        parts["mr"]["init_epochs"] = options.local_epochs
    method = parsed.build(parts, force=options.force)
    check_participation(name, method, options, task.split)
    check_training_options(name, method, options, task)
    notes = []
    if common.requested.lr is None and defaults["lr"] != options.lr:
        notes.append(f"lr {defaults['lr']:g} by default, where other methods have {options.lr:g}")
        options = dataclasses.replace(options, lr=defaults["lr"])
        task = dataclasses.replace(task, training=dataclasses.replace(task.training, lr=defaults["lr"]))
    if common.model_name == "own" and common.requested.lr is None:
        notes.append(
            f"lr {options.lr:g} is a guess for a user's model, and often too small: try --lr 0.1, or let "
            "feddbe tune choose it on validation data"
        )
    ignored = method.ignored_options(task)
    notes += [f"{key} has no effect: {reason}" for key, reason in ignored.items() if key in common.origins]
    notes += method.notes(task)
    option_values = dataclasses.asdict(options)
    config = option_values | {"method": name, "method_options": hyperparameters(method)}
    config |= dict.fromkeys(ignored)
    identity = {key: config[key] for key in option_values if identity_of_key(key) in ("yes", "seed")}
    identity |= methods.method_identity(method)
    identity |= common.content
    sources = {"model": common.source, "method": methods.stored_source(method)}
    in_memory = common.in_memory | ({"method"} if methods.is_in_memory(method) else set())
    return Experiment(
        name=name,
        options=options,
        task=task,
        method=method,
        config=config,
        config_hash=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        majority_accuracy=common.majority_accuracy,
        notes=notes,
        settings=_settings(parsed, common, config, defaults),
        inputs=_hash_inputs(common.content, methods.method_identity(method)),
        sources={kind: source for kind, source in sources.items() if source},
        in_memory=in_memory,
    )


def _hash_inputs(content: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each input of a run; built-in models and methods have none."""
    partition = json.dumps([content["split"], content["sizes"]], sort_keys=True)
    inputs = {"data": content["data"], "partition": hashlib.sha256(partition.encode()).hexdigest()}
    if "theta0" in content:
        model = f"{content['module']} {content['theta0']} {content.get('file', '')}"
        inputs["model"] = hashlib.sha256(model.encode()).hexdigest()
    if "method_source" in method:
        inputs["method"] = method["method_source"]
    return inputs


def _settings(
    parsed: MethodName, common: _Common, config: Mapping[str, Any], defaults: ResolvedDefaults
) -> dict[str, Setting]:
    """Return each value with its origin: the user, or a layer of defaults."""
    from_data = f"data set {common.task.dataset.name}"
    origins = {"model": from_data, "cut": f"model {common.model_name}"}
    origins |= {key: default.origin for key, default in defaults.options.items()}
    if common.options.partition in (None, "natural"):  # the data has its own partition
        origins |= {"partition": from_data, "clients": from_data}
    origins |= {"method": "given"} | common.origins
    parts = dict(config["method_options"])
    explicit = parsed.explicit_options
    for component in (
        data.find_builtin_dataset(common.requested.data, defaults.part_settings()),
        common.model,
    ):
        if component:
            parts[component.name] = dataclasses.asdict(component.options)
            explicit |= {f"{component.name} {key}" for key in component.explicit_options}
    settings = {
        key: Setting(value, origins.get(key) or "general default")
        for key, value in config.items()
        if key != "method_options"
    }
    for part, options in parts.items():
        layers = defaults.parts.get(part, {})
        for key, value in options.items():
            origin = "general default"
            if f"{part} {key}" in explicit:
                origin = "given"
            elif key in layers:
                origin = layers[key].origin or origin
            settings[f"{part} {key}"] = Setting(value, origin)
    return settings


def make_training(options: Config) -> Training:
    """Return the settings of local training."""
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
        is_shuffled=options.batch_order == "shuffled",
    )


def _decay_with_length(text: str | None, rounds: int) -> str | None:
    """Return the decay with its length, so that a run resumed with more rounds keeps its hash."""
    return str(LearningRateDecay.parse(text, rounds)) if text else None


def check_participation(name: str, method: Method, config: Config, split: Split) -> None:
    """Raise an error if too few clients would train, or the adaptation does not fit."""
    if config.new_clients >= split.clients:
        raise InvalidInputError(
            f"new_clients = {config.new_clients}; at least one of {split.clients} clients must train"
        )
    if config.adaptation != "full" and not config.new_clients:
        raise InvalidInputError(
            f"adaptation = {config.adaptation}; there are no new clients to adapt: set --new-clients"
        )
    reason = new_clients.check_adaptation(config.adaptation, method)
    if reason:
        raise InvalidInputError(f"adaptation = {config.adaptation}; not for {name}: {reason}")
    if method.needs_all_clients and (config.participation < 1 or config.new_clients):
        raise InvalidInputError(
            f"{name} needs participation = 1 and no new clients: {method.needs_all_clients}"
        )


def check_training_options(name: str, method: Method, config: Config, task: Task) -> None:
    """Raise an error if the method does not allow these training options."""
    for key, reason in method.fixed_options.items():
        if getattr(config, key) != getattr(Config, key):
            raise InvalidInputError(f"{key} = {getattr(config, key)}; not for {name}: {reason}")
    ignored = method.ignored_options(task)
    if config.lr_decay and "lr" in ignored:
        raise InvalidInputError(f"lr_decay = {config.lr_decay}; not for {name}: {ignored['lr']}")


def check_batch_size(config: Config, split: Split, client_names: Sequence[str] = ()) -> None:
    """Raise an error if a client has less than a batch and `short_batch` is `refuse`."""
    if config.short_batch != "refuse":
        return
    small_clients = np.flatnonzero(split.train.sizes < config.batch_size)
    if len(small_clients):
        client = small_clients[0]
        name = f"'{client_names[client]}'" if client_names else client
        raise InvalidInputError(
            f"client {name} has {len(split.train[client])} training samples, a batch has "
            f"{config.batch_size}; short_batch=keep trains it on one short batch"
        )
