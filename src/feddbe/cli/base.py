"""Building blocks of commands: help in sections, options from `Config`, errors in one line, output."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import click

from feddbe.config import defaults
from feddbe.config.options import SECTIONS, Config
from feddbe.config.parameters import parse_number_or_text, value_type
from feddbe.errors import InvalidInputError, replace_controls, unknown_name

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


_OPTIONS_WITH_NAMES = ("data", "model")
_NAMES = "<names>"
"""Placeholder of the known names in a help text; they are inserted when the help is printed."""


_TERM_WIDTH = 30
"""Longest option that has its help text in the same line; click's own limit."""


class Argument(click.Argument):
    """An argument with a help text."""

    def __init__(self, *args: Any, help: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help_text = help


class Choice(click.Choice[str]):
    """A list of values; an error names the nearest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            raise unknown_name(param.opts[-1].lstrip("-") if param else "value", str(value), self.choices)
        return value


class _ConfigChoice(click.Choice[str]):
    """A list of values that `Config` checks, since a sweep may give several."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


class Option(click.Option):
    """An option with a section of the help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help has sections; an option given twice is an error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for param, count in Counter(order).items():
            if count > 1 and isinstance(param, click.Option) and not param.multiple:
                hint = "; several seeds are --seeds 0,1,2" if param.name == "seed" else ""
                raise InvalidInputError(f"{param.opts[0]} is given {count} times; give it once{hint}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        _require_address_space()
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, Argument):
                term = param.metavar or (param.name or "").upper()
                sections.setdefault("Arguments", []).append((term.strip("[]."), param.help_text))
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                term, text = record
                if _NAMES in text:
                    text = text.replace(_NAMES, _known_names(str(param.name)))
                sections.setdefault(getattr(param, "section", "Options"), []).append((term, text))
        terms = [term for rows in sections.values() for term, _ in rows]
        width = min(_TERM_WIDTH, max(map(len, terms)))  # one column for all sections
        for section in ("Arguments", *SECTIONS, "Options"):
            if section in sections:
                with formatter.section(section):
                    formatter.write_dl([(term.ljust(width), text) for term, text in sections[section]])


@click.pass_context
def _print_help_without_command(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


class Group(click.Group):
    """A group of commands; without a command it prints its help."""

    command_class = Command

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help=help, invoke_without_command=True, callback=_print_help_without_command)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise unknown_name("command", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # click would truncate long lines
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])


def config_options(*names: str) -> list[click.Parameter]:
    """Return the options of `Config` with these names, or all; an option that is not given is None."""
    fields = [field for field in dataclasses.fields(Config) if field.name != "method"]
    return [_build_option(field) for field in fields if not names or field.name in names]


def _build_option(field: dataclasses.Field[Any]) -> Option:
    kind = value_type(field)[0]
    name = field.name.replace("_", "-")
    metadata = field.metadata
    number = {"int": "N", "float": "X"}.get(kind)
    metavar: str | None = number or metadata["metavar"] or "NAME"
    value_parser: Any = parse_number_or_text if number else str
    if kind == "bool":
        metavar, value_parser = None, bool
    elif metadata["choices"]:
        metavar, value_parser = None, _ConfigChoice(metadata["choices"])
    names = f"; names: {_NAMES}" if field.name in _OPTIONS_WITH_NAMES else ""
    short_names = ["-o"] if field.name == "out" else []
    return Option(
        [*short_names, f"--{name}/--no-{name}" if field.default is True else f"--{name}"],
        section=metadata["section"],
        help=metadata["meaning"] + names + _default_text(field),
        default=None,
        is_flag=kind == "bool",
        metavar=metavar,
        type=value_parser,
    )


def _default_text(field: dataclasses.Field[Any]) -> str:
    """Return an option's default, general and by data set and model, as in ` [default: 100, digits 40]`."""
    if field.default is False:
        return ""
    if field.default is True:
        return f" [default: --{field.name.replace('_', '-')}]"
    general = defaults.GENERAL.get(field.name) if field.default is None else field.default
    values = [] if general is None else [str(general)]
    for layers in (defaults.PER_DATA, defaults.PER_MODEL):
        for name, layer in layers.items():
            if field.name in layer and name != "own":
                values.append(f"{name} {layer[field.name]}")
    return f" [default: {', '.join(values)}]" if values else ""


def _known_names(option: str) -> str:
    from feddbe import data, models  # imports torch, which takes seconds
    from feddbe.config.parameters import describe_signature

    entries = data.BUILTIN_DATASETS if option == "data" else models.MODELS
    return ", ".join(describe_signature(name, entry.options) for name, entry in entries.items())


def opening_runs_once(command: click.Command) -> click.Command:
    """Return a command that opens each run's file once, except if it follows runs in progress (`live`)."""
    callback = command.callback
    assert callback

    @functools.wraps(callback)
    def run_command(**options: Any) -> Any:
        from feddbe.runs.store import sharing_stores

        if options.get("live"):
            return callback(**options)
        with sharing_stores():
            return callback(**options)

    command.callback = run_command
    return command


def explain_error(error: click.ClickException) -> str:
    """Return one line for an error of click."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context:
        options = [name for param in context.command.get_params(context) for name in param.opts]
        return str(
            unknown_name("option", error.option_name, [name for name in options if name.startswith("--")])
        )
    text = error.format_message().rstrip(".")
    return f"{text[:1].lower()}{text[1:]}" + (f"; see {context.command_path} --help" if context else "")


_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory")
"""Parts of messages of the loader and of torch."""
_MIN_ADDRESS_SPACE = 640 * 2**20
"""Bytes with which libraries can be loaded; with less, they end the process themselves."""


def explain_fault(error: Exception) -> str | None:
    """Return one line for an error of the machine, or None for another one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    is_limited = limit != resource.RLIM_INFINITY
    lacks_memory = isinstance(error, MemoryError) or any(text in str(error).lower() for text in _NO_MEMORY)
    # An extension module whose allocation fails while it is imported may raise SystemError instead.
    if lacks_memory or (is_limited and isinstance(error, SystemError)):
        reason = f": the limit is {limit >> 20} MB (ulimit -v)" if is_limited else ""
        return f"not enough memory{reason}; close other programs, or raise the limit"
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: the limit is {limit} (ulimit -n); raise it"
    return f"{error.filename or 'output'}: {error.strerror or error}"


def _require_address_space() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _MIN_ADDRESS_SPACE:
        raise InvalidInputError(
            f"not enough memory: the limit is {limit >> 20} MB (ulimit -v); at least "
            f"{_MIN_ADDRESS_SPACE >> 20} MB are needed"
        )


AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON document")
CODE = click.option(
    "--code", multiple=True, metavar="FILE.py",
    help="file with the run's model or method; executed if it has not changed since; may be repeated",
)  # fmt: skip
TRUST = click.option(
    "--trust", is_flag=True, help="execute the code files that the run names; only for your own runs"
)
CALLBACK_HELP = "tracker: wandb:PROJECT, mlflow:EXPERIMENT or tensorboard[:FOLDER]; may be repeated"
ROUND = click.option(
    "--round", "round_", default="best", type=Choice(("best", "last")), help="round to use [default: best]"
)


def print_error(text: str, code: int) -> int:
    """Print one line on standard error, with control characters replaced by ?, and return the exit code."""
    line = re.sub(r"\s*[\r\n]+\s*", " ", text)
    print("feddbe:", replace_controls(line), file=sys.stderr)
    return code


def print_text(text: str = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Print lines on standard output, with control characters replaced by ?.

    Args:
        text: The lines, which may have names from files.
        end: Text after the last line.
        file: Another stream.
    """
    print(replace_controls(text, keep="\n\t"), end=end, file=file, flush=True)


def print_note(text: str) -> None:
    """Print a note on standard error."""
    print_error(text, 0)


@dataclasses.dataclass(frozen=True)
class _Printable:
    """A renderable with control characters replaced; colors are added afterwards."""

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.renderable, options):
            yield segment._replace(text=replace_controls(segment.text, keep="\n"))


def print_renderable(*renderables: RenderableType) -> None:
    """Print on standard output, without the blanks that rich leaves at the ends of lines."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        for renderable in renderables:
            console.print(_Printable(renderable))
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def print_json(document: Any) -> None:
    """Print a JSON document with one line per key, and one line per item of a list of objects."""

    def format_value_as_json(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "]"
        return json.dumps(value)

    lines = [f"{json.dumps(key)}: {format_value_as_json(value)}" for key, value in document.items()]
    print("{" + ",\n ".join(lines) + "}")


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
