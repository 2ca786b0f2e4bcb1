"""Recipe: what another process needs to build a task for itself, instead of being sent the data."""

from __future__ import annotations

from dataclasses import dataclass

from feddbe.errors import BadInput
from feddbe.methods.base import Method
from feddbe.options.config import Config
from feddbe.runs.experiment import Experiment, resolve
from feddbe.training.task import Task

__all__ = ["Recipe"]


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
            raise BadInput(
                f"'{self.options.data}' with model '{self.options.model}' is something else on this machine "
                f"(configuration {built.config_hash[:12]}, not {self.config_hash[:12]}); copy the files of "
                "data and model from where the run began"
            )
        return built.task, built.method
