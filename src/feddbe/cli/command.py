"""Commands of the command line: help in sections, options from `Config`, and our own sentences for what the
user got wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from feddbe.config import defaults
from feddbe.config.options import SECTIONS, Config
from feddbe.config.parameters import parse_number_or_text, value_type
from feddbe.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from rich.console import RenderableType


_NAMED, _NAMES = ("data", "model"), "<names>"
"""Options that take names besides files, and what stands for these until somebody asks for help."""


class Argument(click.Argument):
    """An argument that help explains."""

    def __init__(self, *args: Any, help: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.words = help


class Option(click.Option):
    """An option that help lists in its section."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help lists arguments and options by section, and that takes an option once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for param, times in Counter(order).items():
            if times > 1 and isinstance(param, click.Option) and not param.multiple:
                hint = "; several seeds are --seeds 0,1,2" if param.name == "seed" else ""
                raise InvalidInputError(
                    f"{param.opts[0]} is given {times} times, and only one would count{hint}"
                )
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, Argument):
                term = param.metavar or (param.name or "").upper()
                sections.setdefault("Arguments", []).append((term.strip("[]."), param.words))
            elif row := param.get_help_record(ctx):
                text = row[1].replace(_NAMES, _names(str(param.name))) if _NAMES in row[1] else row[1]
                sections.setdefault(getattr(param, "section", "Options"), []).append((row[0], text))
        width = max(len(term) for rows in sections.values() for term, _ in rows)  # one column for all
        for section in ("Arguments", *SECTIONS, "Options"):
            if section in sections:
                with formatter.section(section):
                    formatter.write_dl([(term.ljust(width), text) for term, text in sections[section]])


@click.pass_context
def _help_if_alone(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


class Group(click.Group):
    """A group of commands; without one it shows its help."""

    command_class = Command

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help=help, invoke_without_command=True, callback=_help_if_alone)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise unknown_name("command", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # click would cut what does not fit in one line
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])


def config_options(*names: str) -> list[click.Parameter]:
    """The options of `Config`, all or those named; None is the value of one that was not given."""
    fields = [f for f in dataclasses.fields(Config) if (f.name in names if names else f.name != "method")]
    return [_option(field) for field in fields]


def _option(field: dataclasses.Field[Any]) -> Option:
    kind, about, name = value_type(field)[0], field.metadata, field.name.replace("_", "-")
    names = about["choices"] or ([_NAMES] if field.name in _NAMED else [])
    choices = f": {', '.join(names)}" if names else ""
    flag, number = kind == "bool", {"int": "N", "float": "X"}.get(kind)
    return Option(
        [f"--{name}/--no-{name}" if field.default is True else f"--{name}"],
        section=about["section"],
        help=about["meaning"] + choices + _default(field),
        default=None,
        is_flag=flag,
        metavar=None if flag else number or about["value"] or "NAME",
        type=bool if flag else parse_number_or_text if number else str,
    )


def _default(field: dataclasses.Field[Any]) -> str:
    """An option's default, with what data sets and models have instead."""
    if isinstance(field.default, bool):
        return ""
    general = defaults.GENERAL.get(field.name) if field.default is None else field.default
    layers = {**defaults.PER_DATA, **{k: v for k, v in defaults.PER_MODEL.items() if k != "own"}}
    special = [f"{name} {layer[field.name]}" for name, layer in layers.items() if field.name in layer]
    known = [*([] if general is None else [str(general)]), *special]
    return f" [{', '.join(known)}]" if known else ""


def _names(option: str) -> str:
    from feddbe import (
        data,
        models,  # seconds
    )
    from feddbe.config.parameters import describe_signature

    known = data.BUILTIN_DATASETS if option == "data" else models.MODELS
    return ", ".join(describe_signature(name, one.options) for name, one in known.items())


def opening_runs_once(command: click.Command) -> click.Command:
    """Let a command that reads runs open each run's file once; one that follows runs (`live`) may not."""
    callback = command.callback
    assert callback

    @functools.wraps(callback)
    def wrapped(**options: Any) -> Any:
        from feddbe.runs.store import sharing_stores

        if options.get("live"):
            return callback(**options)
        with sharing_stores():
            return callback(**options)

    command.callback = wrapped
    return command


def explain_error(error: click.ClickException) -> str:
    """A sentence for click's own errors."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context:
        options = [name for param in context.command.get_params(context) for name in param.opts]
        return str(
            unknown_name("option", error.option_name, [name for name in options if name.startswith("--")])
        )
    text = error.format_message().rstrip(".")
    return f"{text[:1].lower()}{text[1:]}" + (f"; see {context.command_path} --help" if context else "")


AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON document")
CODE = click.option(
    "--code", multiple=True, metavar="FILE.py",
    help="file of the run's own model or method, to execute if its content is the run's; may be repeated",
)  # fmt: skip
TRUST = click.option("--trust", is_flag=True, help="the run is your own: execute the files that it names")


def print_error(text: str, code: int) -> int:
    """One line on standard error; what would move the cursor or colour the terminal is shown as ?."""
    line = re.sub(r"\s*[\r\n]+\s*", " ", text)
    print("feddbe:", "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    return code


def print_renderable(*shown: RenderableType) -> None:
    """On standard output, without the blanks that rich leaves at the ends of lines."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        console.print(*shown, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def print_json(document: Any) -> None:
    """One key to a line, and one item to a line where the value is a list of objects: it can be grepped."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "]"
        return json.dumps(value)

    rows = [f"{json.dumps(key)}: {lines(value)}" for key, value in document.items()]
    print("{" + ",\n ".join(rows) + "}")


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the block as cleanly as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
