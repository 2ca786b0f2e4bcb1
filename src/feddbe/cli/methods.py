"""`feddbe methods`: each hyper-parameter with its default, what it takes and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.command import AS_JSON, Argument, Command, print_json, print_renderable
from feddbe.config import defaults
from feddbe.config.parameters import format_value

if TYPE_CHECKING:
    from rich.console import RenderableType

    from feddbe.methods.registry import MethodInfo


@click.command("methods", cls=Command)
@click.argument(
    "names", cls=Argument, nargs=-1, metavar="[METHOD]...", help="only these, also own ones: FILE.py:CLASS"
)
@AS_JSON
def methods(names: list[str], as_json: bool) -> int:
    """List methods, add-ons and their hyper-parameters."""
    from feddbe.methods.registry import describe_methods

    if as_json:
        print_json({"methods": describe_methods(names)})
    else:
        print_renderable(*_listed(describe_methods(names)))
    return 0


def _listed(described: Sequence[MethodInfo]) -> Iterator[RenderableType]:
    """Methods, then add-ons; a parameter has its default beside its name and its meaning below."""
    from rich.text import Text

    for heading, addons in (("Methods", False), ("Add-ons", True)):
        these = [one for one in described if (one["family"] == "add-on") == addons]
        if these:
            yield Text(heading, style="bold underline")
            for one in these:
                yield Text()
                yield from _one(one, _parts(one, described))
            yield Text()
    yield Text(
        "Write them as fedavg+dbe(kappa=5,mu=0.1). Down and up are the messages of a round, kept what "
        "a client keeps to itself, in models; f and h are the model's parts, N is the number of clients.",
        style="dim",
    )


def _one(one: MethodInfo, parts: list[str]) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    addon = one["family"] == "add-on"
    about = f"  {' and '.join(f'+{part}' for part in parts)}" if addon else f"  {one['family']}"
    yield Text.assemble((f"+{one['name']}" if addon else one["name"], "bold"), about.rstrip())
    if one["addons"]:
        yield Text(f"  takes {', '.join('+' + name for name in one['addons'])}")
    if facts := one["facts"]:
        sent = f"down {facts['down']}, up {facts['up']}, kept {facts['keeps']}"
        yield Text(f"  {sent}; evaluated: {facts['evaluated']}")
    if parts or not one["parameters"]:
        yield Text(f"  {'the parameters of both' if parts else 'no parameters of its own'}", style="dim")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for parameter in one["parameters"]:
        words = Text(parameter["meaning"])
        about = f"\n{parameter['allowed']}; default {format_default(parameter)}"
        if tried := parameter["search"] or parameter["search_rule"]:
            about += f"; try {tried}"
        words.append(about, style="dim")
        table.add_row(parameter["name"], words)
    yield Padding(table, (0, 0, 0, 2))


def _parts(one: MethodInfo, described: Sequence[MethodInfo]) -> list[str]:
    """The add-ons that this one consists of, if its parameters are theirs."""
    own = {parameter["name"] for parameter in one["parameters"]}
    others = {
        other["name"]: {parameter["name"] for parameter in other["parameters"]}
        for other in described
        if other["family"] == "add-on" and other["name"] != one["name"]
    }
    inside = [name for name, theirs in others.items() if theirs and theirs < own]
    return inside if own and set().union(*(others[name] for name in inside)) == own else []


def format_default(parameter: dict[str, Any]) -> str:
    """The default, and where models have others, theirs."""
    name, chosen = parameter["name"], dict[str, list[str]]()
    for model, layer in defaults.PER_MODEL.items():
        value = layer.get(parameter["part"], {}).get(name, parameter["default"])
        chosen.setdefault(format_value(value), []).append(model)
    if len(chosen) == 1:
        return next(iter(chosen))
    return "; ".join(f"{value} for {', '.join(models)}" for value, models in chosen.items())
