"""How the command line uses typer: help in sections, options from `Config`, and our own sentences for what
the user got wrong."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from feddbe import defaults
from feddbe.config import Config
from feddbe.errors import unknown
from feddbe.options import number_or_text

__all__ = ["Command", "group", "misuse", "with_options"]

_SECTIONS = {
    "Data": ("data", "data_dir", "partition", "partition_seed", "clients", "split", "har_layout"),
    "Model": ("model", "cut", "fasttext_rep"),
    "Training": (
        "rounds", "patience", "epochs", "batch", "lr", "join", "seed", "variant", "short_batch", "bn_buffers",
        "force",
    ),
    "Evaluation": ("measure", "eval", "eval_after", "train_loss", "validation", "newcomers", "adapt_epochs"),
    "Run": ("engine", "min_replies", "out", "resume", "json"),
}  # fmt: skip
"""The options of `Config` in the order in which help lists them."""
_VALUES = {"data": "NAME|FILE", "data_dir": "DIR", "split": "FILE", "eval": "WHO", "out": "DIR"}
"""What help calls the value of an option whose type does not say enough."""
_NAMED, _NAMES = ("data", "model"), "<names>"
"""Options that take names besides files, and what stands for these until somebody asks for help."""


class Command(TyperCommand):
    """A command whose help lists the options by section."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                words = (param.make_metavar(ctx).strip("[]."), str(getattr(param, "help", None) or ""))
                sections.setdefault("Arguments", []).append(words)
            elif row := param.get_help_record(ctx):
                term, text = row
                text = text.replace(_NAMES, _names(str(param.name))) if _NAMES in text else text
                sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(
                    (term, text)
                )
        width = max(len(term) for rows in sections.values() for term, _ in rows)  # one column for all
        for section in ("Arguments", *_SECTIONS, "Options"):
            if section in sections:
                with formatter.section(section):
                    formatter.write_dl([(term.ljust(width), text) for term, text in sections[section]])


class _Group(TyperGroup):
    """A group of commands; without one it shows its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):  # click would cut what does not fit in one line
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])


def group(help: str) -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        help=help,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def _option(field: dataclasses.Field[Any], section: str) -> inspect.Parameter:
    """An option of `Config` as typer wants it; None where the user gave none."""
    kind = str(field.type).split(" ")[0]
    names = field.metadata["choices"] or ([_NAMES] if field.name in _NAMED else [])
    choices = f": {', '.join(names)}" if names else ""
    value = {"int": "N", "float": "X"}.get(kind) or _VALUES.get(field.name, "NAME")
    name = field.name.replace("_", "-")
    option = typer.Option(
        f"--{name}/--no-{name}" if field.default is True else f"--{name}",
        help=field.metadata["meaning"] + choices + _default(field),
        show_default=False,
        rich_help_panel=section,
        metavar=None if kind == "bool" else value,
        parser=number_or_text if kind in ("int", "float") else None,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(bool | None if kind == "bool" else str | None), option],
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
    from feddbe import data, models  # seconds

    return ", ".join(data.SOURCES if option == "data" else models.MODELS)


def with_options(function: Callable[..., int], *names: str) -> Callable[..., int]:
    """Give a command the options of `Config`: all, or those named."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "options"]
    fields = {field.name: field for field in dataclasses.fields(Config)}
    options = [
        _option(fields[name], section)
        for section, members in _SECTIONS.items()
        for name in members
        if not names or name in names
    ]

    def command(**given: Any) -> int:
        chosen = {option.name: given.pop(option.name) for option in options}
        return function(**given, options=chosen)

    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__doc__ = function.__doc__
    return command


def misuse(error: Any) -> str:
    """A sentence for click's own errors; by their looks, because typer may carry click inside it."""
    context = getattr(error, "ctx", None)
    if hasattr(error, "option_name") and hasattr(error, "possibilities") and context:
        options = [name for param in context.command.get_params(context) for name in param.opts]
        return str(unknown("option", error.option_name, [name for name in options if name.startswith("--")]))
    text = str(error.format_message()).rstrip(".")
    return f"{text[:1].lower()}{text[1:]}" + (f"; see {context.command_path} --help" if context else "")
