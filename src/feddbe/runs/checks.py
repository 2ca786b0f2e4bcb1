"""Whether an experiment is possible: enough clients, and a way of training that the method allows."""

from __future__ import annotations

import numpy as np

from feddbe.data.split import Split
from feddbe.errors import BadInput
from feddbe.methods import Method, newcomers
from feddbe.options.config import Config
from feddbe.training.task import Task

__all__ = ["check_members", "check_optimiser", "check_short"]


def check_members(name: str, method: Method, config: Config, split: Split) -> None:
    """Whether enough clients take part."""
    if config.newcomers >= split.clients:
        raise BadInput(f"newcomers = {config.newcomers}; of {split.clients} clients at least one must train")
    if config.adapt != "full" and not config.newcomers:
        raise BadInput(
            f"adapt = {config.adapt}; it is about newcomers, of which there are none (--newcomers)"
        )
    if reason := newcomers.refuse(config.adapt, method):
        raise BadInput(f"adapt = {config.adapt}; not for {name}: {reason}")
    if method.needs_all and (config.join < 1 or config.newcomers):
        raise BadInput(f"{name} needs join = 1 and no newcomers: {method.needs_all}")


def check_optimiser(name: str, method: Method, config: Config, task: Task) -> None:
    """Whether the method's mathematics allow this way of training."""
    for key, reason in method.keeps_to.items():
        if getattr(config, key) != getattr(Config, key):
            raise BadInput(f"{key} = {getattr(config, key)}; not for {name}: {reason}")
    if config.lr_decay and "lr" in (unused := method.unused(task)):
        raise BadInput(f"lr_decay = {config.lr_decay}; not for {name}: {unused['lr']}")


def check_short(config: Config, split: Split) -> None:
    if config.short_batch == "refuse":
        for client in np.flatnonzero(split.train.sizes < config.batch)[:1]:
            raise BadInput(
                f"client {client} has {len(split.train[client])} training samples, a batch has "
                f"{config.batch}; short_batch=keep trains it on one short batch"
            )
