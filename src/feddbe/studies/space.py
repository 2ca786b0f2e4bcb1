"""What a search over hyper-parameters chooses from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from feddbe import methods
from feddbe.errors import BadInput, unknown
from feddbe.options.grammar import written
from feddbe.options.limits import number_or_text
from feddbe.runs.experiment import Experiment

__all__ = ["LR", "Space", "named", "published", "space_of"]

Space = dict[str, list[Any]]
"""Name of an option (`kappa`, `lr`) -> values to choose from."""
LR = (0.005, 0.01, 0.05, 0.1)
"""Learning rates worth trying; the paper gives none."""


def space_of(experiment: Experiment, given: Sequence[str] = ()) -> Space:
    """What is searched: `given` as in `kappa=1,5,50`; without, all that the method's parts name values worth
    trying for, and the learning rate where the method has a use for it; the published values are among
    them."""
    parameters = {
        parameter["name"]: parameter for part in _parts(experiment) for parameter in part["parameters"]
    }
    found: Space = {}
    if given:
        found = dict(_given(item, [*parameters, "lr"]) for item in given)
        parameters = {}
    for name, parameter in parameters.items():
        words = parameter["search"].split()
        if words and "%" not in words:  # a rule, no list
            found[name] = [number_or_text(word) for word in words]
    if experiment.config["lr"] is not None and not given:
        found["lr"] = list(LR)
    return {key: _with(values, published(experiment, key)) for key, values in found.items()}


def _with(values: Sequence[Any], published: Any) -> list[Any]:
    """The values and the published one, numbers by size."""
    every = list(dict.fromkeys([*values, published]))
    numbers = sorted(value for value in every if isinstance(value, int | float))
    return [*numbers, *(value for value in every if not isinstance(value, int | float))]


def _parts(experiment: Experiment) -> list[methods.Description]:
    name = experiment.name.lower()
    used = [part.partition("(")[0].strip() for part in name.split("+")]
    return [part for part in methods.describe() if part["name"] in used]


def _given(item: str, known: Sequence[str]) -> tuple[str, list[Any]]:
    key, equals, text = (word.strip() for word in item.partition("="))
    values = [number_or_text(word.strip()) for word in text.split(",") if word.strip()]
    if not equals or not values:
        raise BadInput(f"--space {item}: write it as --space kappa=1,5,50")
    if key not in known:
        raise unknown("hyper-parameter", key, known)
    return key, values


def named(method: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method with these values in its brackets, and those that are options of a run."""
    own = {key: value for key, value in values.items() if key != "lr"}
    name, _, addons = method.partition("+")
    parts = [name, *addons.split("+")] if addons else [name]
    known = {part["name"]: {p["name"] for p in part["parameters"]} for part in methods.describe()}
    for index, part in reversed(list(enumerate(parts))):  # of two that have it, the add-on
        mine = {key: own.pop(key) for key in list(own) if key in known[part.lower()]}
        if mine:
            parts[index] = f"{part}({','.join(f'{key}={written(value)}' for key, value in mine.items())})"
    return "+".join(parts), {"lr": values["lr"]} if "lr" in values else {}


def published(experiment: Experiment, key: str) -> Any:
    """The value that a run has without a search."""
    if key == "lr":
        return experiment.config["lr"]
    for options in reversed(experiment.config["method_options"].values()):
        if key in options:
            return options[key]
    raise unknown("hyper-parameter", key, ())
