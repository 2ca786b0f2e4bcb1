"""The data that options name, who holds which rows of it, and what follows from that: columns standardised by
training rows, images with each client's look."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe import data
from feddbe.config.defaults import DefaultLayers
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split, load_split, partition
from feddbe.errors import InvalidInputError
from feddbe.paths import expand_path


class FederatedData(NamedTuple):
    """The data, who holds which rows, and the options with partition and number of clients filled in."""

    dataset: Dataset
    split: Split
    options: Config


def load_federated_data(config: Config, dataset: Dataset | None = None) -> FederatedData:
    """The data that the options name, or the one in memory, divided among clients."""
    directory = expand_path(config.data_dir) if config.data_dir else None
    found = data.find_dataset(config.data, DefaultLayers(config.variant, "").part_settings())
    if dataset is None:
        dataset = data.load_dataset(str(found or config.data), directory)
    elif found:
        dataset = found.options.arrange(dataset)
    config = dataclasses.replace(config, data=str(found or config.data))
    given = dataset.split if config.partition is None else None
    if config.split is not None:
        given = load_split(expand_path(config.split), len(dataset))
        if config.partition is not None:
            raise InvalidInputError("--split and --partition exclude each other: the file is the partition")
    if given is not None:
        if config.clients not in (None, given.clients):
            raise InvalidInputError(
                f"clients = {config.clients}; '{config.split or config.data}' has {given.clients}"
            )
        return _ready(dataset, given, dataclasses.replace(config, clients=given.clients))
    chosen = DefaultLayers(config.variant, dataset.name)
    spec = config.partition or ("natural" if dataset.client is not None else str(chosen["partition"]))
    clients = config.clients
    if clients is None and spec != "natural":
        clients = chosen["clients"]
    split = partition(dataset.y.numpy(), spec, clients, config.partition_seed, dataset.client)
    return _ready(dataset, split, dataclasses.replace(config, partition=spec, clients=split.clients))


def _ready(dataset: Dataset, split: Split, config: Config) -> FederatedData:
    """What could not be done before it was known who trains on what.

    The columns of a table are standardised by the training rows of the clients that train: test rows,
    validation rows and newcomers are not known when a model is trained.
    """
    if config.validation:
        split = split.with_validation(config.validation)
    if config.partition != "natural" and dataset.client_names:  # those of other clients
        dataset = dataclasses.replace(dataset, client_names=())
    members = max(1, split.clients - config.new_clients)
    dataset = dataset.fit_preprocessing(split.train[:members].flat)
    if config.shift is not None:
        from feddbe.data.shift import shift_images

        dataset = shift_images(dataset, split, config.shift, config.partition_seed)
    return FederatedData(dataset, split, config)


def label_counts(dataset: Dataset, split: Split) -> npt.NDArray[np.int64]:
    """(clients x classes) samples of each label: training, validation and test samples together."""
    y = dataset.y.numpy()
    counts = split.train.counts(y, dataset.classes) + split.test.counts(y, dataset.classes)
    if split.validation:
        counts += split.validation.counts(y, dataset.classes)
    return counts
