"""Data of a run: the data set that the options name, divided among clients, standardized and shifted."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe import data
from feddbe.config.defaults import ResolvedDefaults
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split, load_split, partition
from feddbe.errors import InvalidInputError
from feddbe.paths import expand_path


class FederatedData(NamedTuple):
    """Data set, split, and the options with the partition and the number of clients filled in."""

    dataset: Dataset
    split: Split
    options: Config


def load_federated_data(config: Config, dataset: Dataset | None = None) -> FederatedData:
    """Load the data of a run and divide it among clients.

    Args:
        config: Options of the run.
        dataset: A data set in memory, used instead of the one that the options name.

    Raises:
        InvalidInputError: The data cannot be loaded, or not divided as requested.
    """
    data_dir = expand_path(config.data_dir) if config.data_dir else None
    builtin = data.find_builtin_dataset(config.data, ResolvedDefaults(config.variant, "").part_settings())
    if dataset is None and data.is_remote(config.data):
        _check_remote_options(config)
        dataset = data.load_remote(config)
    elif dataset is None:
        dataset = data.load_dataset(str(builtin or config.data), data_dir)
    elif builtin:
        dataset = builtin.options.apply(dataset)
    dataset.check_classes()
    config = dataclasses.replace(config, data=str(builtin or config.data))
    if config.min_samples:
        dataset = _leave_out_small_clients(dataset, config)
    split = dataset.split if config.partition is None else None
    if config.split is not None:
        split = load_split(expand_path(config.split), len(dataset))
        if config.partition is not None:
            raise InvalidInputError("--split and --partition exclude each other: the file is the partition")
    if split is not None:
        if config.clients not in (None, split.clients):
            raise InvalidInputError(
                f"clients = {config.clients}; '{config.split or config.data}' has {split.clients}"
            )
        return _apply_options(dataset, split, dataclasses.replace(config, clients=split.clients))
    defaults = ResolvedDefaults(config.variant, dataset.name)
    spec = config.partition or ("natural" if dataset.client is not None else str(defaults["partition"]))
    clients = config.clients
    if clients is None and spec != "natural":
        clients = defaults["clients"]
    split = partition(
        dataset.y.numpy(), spec, clients, config.partition_seed, dataset.client, dataset.client_names
    )
    return _apply_options(dataset, split, dataclasses.replace(config, partition=spec, clients=split.clients))


def _check_remote_options(config: Config) -> None:
    """Raise an error if an option would change the rows, which only their owners can."""
    for key in ("partition", "split", "shift", "min_samples"):
        if getattr(config, key) != getattr(Config, key):
            raise InvalidInputError(
                f"{key} = {getattr(config, key)}; '{config.data}' is divided among its nodes: leave it out"
            )


def _leave_out_small_clients(dataset: Dataset, config: Config) -> Dataset:
    """Return the data set without natural clients that have fewer than `min_samples` samples."""
    if dataset.client is None or config.split is not None:
        reason = "has no client column" if dataset.client is None else "has a --split with fixed clients"
        raise InvalidInputError(f"min_samples = {config.min_samples}; '{config.data}' {reason}")
    numbers, position, sizes = np.unique(dataset.client, return_inverse=True, return_counts=True)
    is_kept = sizes >= config.min_samples
    if is_kept.all():
        return dataset
    if not is_kept.any():
        raise InvalidInputError(
            f"min_samples = {config.min_samples}; the largest client has {sizes.max()} samples"
        )
    rows = np.flatnonzero(is_kept[position])
    new_numbers = np.cumsum(is_kept) - 1
    note = (
        f"{int((~is_kept).sum()):,} of {len(sizes):,} clients were left out: they have fewer than "
        f"{config.min_samples} samples"
    )
    return dataclasses.replace(
        dataset,
        x=dataset.x[rows],
        y=dataset.y[rows],
        client=new_numbers[position][rows],
        client_names=tuple(dataset.client_names[k] for k in numbers[is_kept]) if dataset.client_names else (),
        note="; ".join(filter(None, [dataset.note, note])),
        known_sha256={},
    )


def _apply_options(dataset: Dataset, split: Split, config: Config) -> FederatedData:
    """Apply the options that need the split: test batches, validation, standardization and feature shift.

    The columns of a table are standardized by the training samples of the clients that train. Test samples,
    validation samples and new clients are unknown when a model is trained.
    """
    defaults = ResolvedDefaults(config.variant, dataset.name)
    config = dataclasses.replace(
        config, last_test_batch=config.last_test_batch or defaults["last_test_batch"]
    )
    if config.last_test_batch == "drop":
        split = split.with_whole_test_batches(config.batch_size)
    if config.validation:
        split = split.with_validation(config.validation)
    has_own_split = config.partition is None and config.split is None
    if config.partition != "natural" and not has_own_split and dataset.client_names:
        # the names are those of other clients
        dataset = dataclasses.replace(dataset, client_names=())
    training_clients = max(1, split.clients - config.new_clients)
    dataset = dataset.fit_preprocessing(split.train[:training_clients].flat)
    if config.shift is not None:
        from feddbe.data.shift import shift_images

        dataset = shift_images(dataset, split, config.shift, config.partition_seed)
    return FederatedData(dataset, split, config)


def label_counts(dataset: Dataset, split: Split) -> npt.NDArray[np.int64]:
    """Return (clients x classes) counts of training, validation and test samples together."""
    y = dataset.y.numpy()
    counts = split.train.histogram(y, dataset.classes) + split.test.histogram(y, dataset.classes)
    if split.validation:
        counts += split.validation.histogram(y, dataset.classes)
    return counts
