"""`feddbe methods`: methods and add-ons with their hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.base import AS_JSON, Argument, Command, print_json, print_renderable
from feddbe.config import defaults
from feddbe.config.parameters import format_value

if TYPE_CHECKING:
    from rich.console import RenderableType

    from feddbe.methods.registry import MethodInfo


@click.command("methods", cls=Command)
@click.argument(
    "names",
    cls=Argument,
    nargs=-1,
    metavar="[METHOD]...",
    help="methods to list, or FILE.py:CLASS [default: all]",
)
@AS_JSON
def methods(names: list[str], as_json: bool) -> int:
    """List methods, add-ons and their hyperparameters."""
    from feddbe.methods.registry import describe_methods

    if as_json:
        print_json({"methods": describe_methods(names)})
    else:
        print_renderable(*_render_methods(describe_methods(names)))
    return 0


def _render_methods(descriptions: Sequence[MethodInfo]) -> Iterator[RenderableType]:
    """Yield the methods, then the add-ons."""
    from rich.text import Text

    addons = [description for description in descriptions if description["family"] == "add-on"]
    methods = [description for description in descriptions if description["family"] != "add-on"]
    for heading, group in (("Methods", methods), ("Add-ons", addons)):
        if group:
            yield Text(heading, style="bold underline")
            for description in group:
                yield Text()
                yield from _render_method(description, _find_parts(description, descriptions))
            yield Text()
    yield Text(
        "Usage: fedavg+dbe(kappa=5,mu=0.1). Names are those of the tensors that a client receives, sends and "
        "keeps; a name with a slash is a group of tensors, body and head are the parts of the model. In a "
        "federation these names are the allow-list of messages. A node also sends metrics, its numbers of "
        "samples, and a hash of what it keeps.",
        style="dim",
    )


def _render_method(description: MethodInfo, parts: list[str]) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if description["family"] == "add-on":
        title, subtitle = f"+{description['name']}", " and ".join(f"+{part}" for part in parts)
    else:
        title, subtitle = description["name"], description["family"]
    yield Text.assemble((title, "bold"), f"  {subtitle}".rstrip())
    if description["addons"]:
        yield Text(f"  supports {', '.join('+' + name for name in description['addons'])}")
    yield from map(Text, _exchange_lines(description["exchange"]))
    if parts or not description["parameters"]:
        yield Text(f"  {'the parameters of both' if parts else 'no parameters'}", style="dim")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for parameter in description["parameters"]:
        limits = f"\n{parameter['allowed']}; default {format_default(parameter)}"
        values_to_try = parameter["search"] or parameter["search_rule"]
        if values_to_try:
            limits += f"; try {values_to_try}"
        text = Text(parameter["meaning"])
        text.append(limits, style="dim")
        table.add_row(parameter["name"], text)
    yield Padding(table, (0, 0, 0, 2))


def _exchange_lines(exchange: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines about messages, kept state and the evaluated model."""
    kept_names = exchange["keeps"] or "nothing"
    if exchange["secret"]:
        kept_names += " (secret)" if exchange["secret"] == kept_names else f" (secret: {exchange['secret']})"
    received, uploaded = exchange["receives"] or "nothing", exchange["sends"] or "nothing"
    yield f"  receives {received}; sends {uploaded}; keeps {kept_names}"
    if "evaluated" in exchange:
        yield f"  evaluated: {exchange['evaluated']}"


def _find_parts(description: MethodInfo, descriptions: Sequence[MethodInfo]) -> list[str]:
    """Return the add-ons of which an add-on consists, if its parameters are exactly theirs."""
    parameters = {parameter["name"] for parameter in description["parameters"]}
    others = {
        other["name"]: {parameter["name"] for parameter in other["parameters"]}
        for other in descriptions
        if other["family"] == "add-on" and other["name"] != description["name"]
    }
    parts = [name for name, names in others.items() if names and names < parameters]
    covered_parameters = set().union(*(others[name] for name in parts))
    return parts if parameters and covered_parameters == parameters else []


def format_default(parameter: dict[str, Any]) -> str:
    """Return the default, or the default of each model if they differ."""
    models_by_value = dict[str, list[str]]()
    for model in defaults.PER_MODEL:
        layers = defaults.ResolvedDefaults("default", "", model, parameter["part"]).part_settings()
        value = layers.get(parameter["part"], {}).get(parameter["name"], parameter["default"])
        models_by_value.setdefault(format_value(value), []).append(model)
    if len(models_by_value) == 1:
        return next(iter(models_by_value))
    return "; ".join(f"{value} for {', '.join(models)}" for value, models in models_by_value.items())
