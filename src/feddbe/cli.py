"""The command line. It holds no logic: it reads options, calls what Python users call, and shows."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from typer.core import TyperCommand, TyperGroup

from feddbe import api, config, data, defaults, folders, listing, models, pictures, terminal
from feddbe.config import Config
from feddbe.document import at
from feddbe.errors import Diverged, FeddbeError, StoreError, unknown
from feddbe.experiment import label_counts, load_data
from feddbe.loop import Watch
from feddbe.methods import describe
from feddbe.options import number_or_text

__all__ = ["app", "main"]

_SECTIONS = {
    "Data": ("data", "data_dir", "partition", "partition_seed", "clients", "split", "har_layout"),
    "Model": ("model", "cut", "fasttext_rep"),
    "Training": (
        "rounds", "patience", "epochs", "batch", "lr", "join", "seed", "variant", "short_batch", "bn_buffers",
        "force",
    ),
    "Evaluation": ("eval", "eval_after", "train_loss", "validation", "newcomers", "adapt_epochs"),
    "Run": ("engine", "out", "resume", "json"),
}  # fmt: skip
"""The options of `Config` in the order in which help lists them."""
_VALUES = {"data": "NAME|FILE", "data_dir": "DIR", "split": "FILE", "eval": "WHO", "out": "DIR"}
"""What help calls the value of an option whose type does not say enough."""
_NAMES = {"data": tuple(data.SOURCES), "model": tuple(models.MODELS)}
"""Names that an option takes besides files."""


# How typer is used: help in sections, and our own sentences for what the user got wrong.


class _Command(TyperCommand):
    """A command whose help lists the options by section."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                words = (param.make_metavar(ctx).strip("[]."), str(getattr(param, "help", None) or ""))
                sections.setdefault("Arguments", []).append(words)
            elif row := param.get_help_record(ctx):
                sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(row)
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


def _typer(help: str) -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        help=help,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


app = _typer("Personalized federated learning with the Domain Bias Eliminator.")
data_app = _typer("Data sets and how they are divided among clients.")
app.add_typer(data_app, name="data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 is bad input, 3 diverged, 130 Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        # not command.main, which has its own ideas about Ctrl-C and broken pipes
        with command.make_context("feddbe", list(given), obj=given) as context:
            code = command.invoke(context)
        sys.stdout.flush()
        return int(code or 0)
    except typer.Exit as done:  # --help
        return done.exit_code
    except FeddbeError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except BrokenPipeError:  # `feddbe show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _complain(_misuse(error), 2)


def _misuse(error: Any) -> str:
    """A sentence for click's own errors; by their looks, because typer may carry click inside it."""
    context = getattr(error, "ctx", None)
    if hasattr(error, "option_name") and hasattr(error, "possibilities") and context:
        options = [name for param in context.command.get_params(context) for name in param.opts]
        return str(unknown("option", error.option_name, [name for name in options if name.startswith("--")]))
    text = str(error.format_message()).rstrip(".")
    return f"{text[:1].lower()}{text[1:]}" + (f"; see {context.command_path} --help" if context else "")


def _complain(text: str, code: int) -> int:
    line = re.sub(r"\s*[\r\n]+\s*", " ", text)
    print(f"feddbe: {line}", file=sys.stderr)
    return code


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.callback()
def _top(
    context: typer.Context,
    version_: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version_:
        print(f"feddbe {version('feddbe')}")
        raise typer.Exit
    _help_if_alone(context)


@data_app.callback()
def _data(context: typer.Context) -> None:
    _help_if_alone(context)


# The options of a run


def _option(field: dataclasses.Field[Any], section: str) -> inspect.Parameter:
    """An option of `Config` as typer wants it; None where the user gave none."""
    kind = str(field.type).split(" ")[0]
    names = field.metadata["choices"] or _NAMES.get(field.name, ())
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


def _with_options(function: Callable[..., int], *names: str) -> Callable[..., int]:
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


Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
_METHOD = "as in fedavg+dbe(kappa=5,mu=0.1), or a file with options"
Method = Annotated[list[str] | None, typer.Argument(metavar="[METHOD|FILE.toml]", help=_METHOD)]
Methods = Annotated[list[str] | None, typer.Argument(metavar="[METHOD|FILE.toml]...", help=_METHOD)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="any option, over that of a file; may be repeated",
        show_default=False,
        rich_help_panel="Run",
    ),
]


# Commands


def _run(
    context: typer.Context, options: dict[str, Any], methods: Method = None, settings: Settings = None
) -> int:
    """Run one method: feddbe run fedavg+dbe --rounds 20"""
    return _carry_out(context.obj, methods or [], options, settings or [], single=True)


def _compare(
    context: typer.Context, options: dict[str, Any], methods: Methods = None, settings: Settings = None
) -> int:
    """Run several methods on the same data and show them side by side."""
    return _carry_out(context.obj, methods or [], options, settings or [], single=False)


app.command("run", cls=_Command)(_with_options(_run))
app.command("compare", cls=_Command)(_with_options(_compare))


def _carry_out(
    given: list[str], methods: list[str], options: dict[str, Any], settings: list[str], *, single: bool
) -> int:
    names, chosen = config.read(methods, options, settings)
    watch = _Bars()
    try:
        with watch.bars:
            documents = api.carry_out(names, chosen, single=single, watch=watch)
    except KeyboardInterrupt:
        return _complain(watch.stopped(given, single=single), 130)
    except Diverged as error:
        names, folder = error.__notes__, watch.root(single=single)
        return _complain(f"{', '.join(names)}: {error}; see feddbe show {folder}", error.exit_code)
    folder = watch.root(single=single)
    if chosen.json:
        _print_json(documents[0] if single else {"runs": documents})
    else:
        _print(terminal.results_table(documents))
    curves, *distribution = api.draw(folder, documents)
    if not chosen.json:
        print(f"\ncurves  {curves}")
        for path in distribution:
            print(f"data    {path}")
        print(f"run     {folder}")
    return 0


class _Lines(Progress):
    """Bars that leave room for the ^C which a terminal writes: it must not begin a new line."""

    def get_renderable(self) -> RenderableType:
        return _Narrow(super().get_renderable())


@dataclasses.dataclass(frozen=True)
class _Narrow:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(options.max_width - 3))


class _Bars(Watch):
    """A bar for each run on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self.bars = _Lines(
            TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}", table_column=Column(width=8, justify="right")),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left"),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread of its own: workers are forked from this process
            disable=not sys.stderr.isatty(),
            transient=True,
            expand=True,
        )
        self._folder: Path | None = None
        self._done = 0

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._folder, self._done = folder, done
        self._rounds = self.bars.add_task(name, total=rounds, completed=done, accuracy="")
        self.bars.refresh()

    def client(self, done: int, of: int) -> None:
        self.bars.update(self._rounds, completed=self._done + done / of)
        self.bars.refresh()

    def round(self, done: int, accuracy: float | None) -> None:
        self._done = done
        shown = "" if accuracy is None else f"{100 * accuracy:.2f} %"
        self.bars.update(self._rounds, completed=done, accuracy=shown)
        self.bars.refresh()

    def root(self, *, single: bool) -> Path:
        """The folder of the run, or of the comparison that it belongs to."""
        folder = self._folder or folders.RUNS
        return folder if single else folder.parent

    def stopped(self, given: Sequence[str], *, single: bool) -> str:
        """What to say after Ctrl-C: how far it is, by what was written, and how to go on."""
        if self._folder is None:
            return "stopped before anything was written"
        rounds = api.load(self._folder, hashes=False)["rounds"]
        far = f"after round {rounds[-1]['round']}, which is kept" if rounds else "before the first round"
        words = [word for word in given if word != "--resume"]
        if not any(word.split("=")[0] == "--out" for word in words):
            words += ["--out", str(self.root(single=single))]
        return f"stopped {far}; continue with: {shlex.join(['feddbe', *words, '--resume'])}"


@app.command("runs", cls=_Command)
def _runs(
    folder: Annotated[Path, typer.Argument(help="where to look [runs]", show_default=False)] = folders.RUNS,
    json: Json = False,
) -> int:
    """List the runs below a folder."""
    rows = [_row(path, folder) for path in folders.listing(folder)]
    if json:
        _print_json({"runs": rows})
    elif rows:
        _print(terminal.runs_table(rows))
    else:
        print(f"no runs in {folder}/; start one with: feddbe run fedavg+dbe")
    return 0


def _row(path: Path, root: Path) -> terminal.RunRow:
    name = str(path.relative_to(root)) if path != root else path.name
    try:
        document = api.load(path, hashes=False)
    except StoreError:
        nothing: terminal.RunRow = {
            "name": name, "method": "-", "data": "-", "rounds": 0, "best": None, "last": None,
            "state": "unreadable",
        }  # fmt: skip
        return nothing
    best, last, settings = document["best"], document["last"], document["config"]
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    evaluated = last is not None and last["round"] == done
    finished = evaluated and (done >= settings["rounds"] or settings["patience"] is not None)
    return {
        "name": name,
        "method": document["method"],
        "data": Path(settings["data"]).name,
        "rounds": done,
        "best": best["accuracy"]["weighted"] if best and best["accuracy"] else None,
        "last": last["accuracy"]["weighted"] if last and last["accuracy"] else None,
        "state": "done" if finished else f"{settings['rounds']} wanted",
    }


@app.command("show", cls=_Command)
def _show(
    run: Annotated[
        str, typer.Argument(help="folder of a run or a comparison, or its name in runs/", show_default=False)
    ],
    when: Annotated[
        str, typer.Option(help="moment: published, before, adapted or after", show_default=False)
    ] = "published",
    json: Json = False,
) -> int:
    """Show a run or a comparison: table and learning curves."""
    if when not in (moments := ("published", "before", "adapted", "after")):
        raise unknown("moment", when, moments)
    documents = [api.load(folder, hashes=json) for folder in folders.find_all(run)]
    if when != "published":
        documents = [at(document, when) for document in documents]
    if json:
        _print_json(documents[0] if len(documents) == 1 else {"runs": documents})
    else:
        _print(terminal.results_table(documents), *(terminal.curve(document) for document in documents))
    return 0


@app.command("methods", cls=_Command)
def _methods(json: Json = False) -> int:
    """List methods, add-ons and their hyper-parameters."""
    if json:
        _print_json({"methods": describe()})
    else:
        _print(listing.methods_table(describe()))
    return 0


DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="where data files are looked for first", show_default=False),
]


@data_app.command("list", cls=_Command)
def _data_list(data_dir: DataDir = None, json: Json = False) -> int:
    """List the data sets that are known by name, and where they are."""
    rows = [
        {"name": source.name, "description": source.description, "found": source.found(data_dir)}
        for source in data.SOURCES.values()
    ]
    if json:
        _print_json({"data": rows})
        return 0
    names, words = (max(len(row[key] or "") for row in rows) for key in ("name", "description"))
    for row in rows:
        place = row["found"] or f"feddbe data get {row['name']}"
        print(f"{row['name']:<{names}}  {row['description']:<{words}}  {place}")
    return 0


@data_app.command("get", cls=_Command)
def _data_get(
    name: Annotated[str, typer.Argument(help="data set", show_default=False)], data_dir: DataDir = None
) -> int:
    """Download a data set from its publisher, unless it is there."""
    if name not in data.SOURCES:
        raise unknown("data set", name, data.SOURCES)
    source = data.SOURCES[name]
    place = source.found(data_dir)
    if place is None and source.get is not None:
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
            task = bars.add_task(name)
            place = str(source.get(data_dir, lambda done, of: bars.update(task, completed=done, total=of)))
    print(f"{name}: {place}")
    return 0


def _data_show(
    name: Annotated[str, typer.Argument(help="data set, or your own file or folder", show_default=False)],
    options: dict[str, Any],
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write the partition to this .npz", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="draw it: .png, .svg or .pdf", show_default=False),
    ] = None,
) -> int:
    """Show how a data set is divided among clients."""
    _, chosen = config.read(["data show"], {**options, "data": name})
    dataset, split, chosen = load_data(chosen)
    labels = label_counts(dataset, split)
    title = f"{Path(name).name}, {chosen.partition or chosen.split or 'as given'}, {split.clients} clients"
    if plot is not None:
        pictures.bubbles(plot, labels, title)
    if save is not None:
        split.save(save)
    if chosen.json:
        rows = [
            {"train": len(train), "test": len(test), "labels": counts.tolist()}
            for train, test, counts in zip(split.train, split.test, labels, strict=True)
        ]
        note = {"note": dataset.note} if dataset.note else {}
        _print_json({"clients": rows, "index_sha256": split.index_sha256(), **note})
        return 0
    if dataset.note:
        print(f"{dataset.name}: {dataset.note}")
    _print(terminal.split_table([*map(len, split.train)], [*map(len, split.test)], labels))
    for path in filter(None, (save, plot)):
        print(path)
    return 0


data_app.command("show", cls=_Command)(
    _with_options(_data_show, "data_dir", "partition", "partition_seed", "split", "clients", "json")
)


@data_app.command("plots", cls=_Command)
def _data_plots(
    folder: Annotated[Path, typer.Argument(help="where the pictures go", show_default=False)],
    data_dir: DataDir = None,
) -> int:
    """Draw who holds what in the paper's settings, for all data sets that are here."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in api.draw_paper_splits(folder, data_dir):
        print(path or f"{name} is not here: feddbe data get {name}")
    return 0


# Output


def _print(*shown: RenderableType) -> None:
    """On standard output, without the blanks that rich leaves at the ends of lines."""
    console = Console()
    with console.capture() as captured:
        console.print(*shown, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _print_json(document: Any) -> None:
    """One key to a line, and one item to a line where the value is a list of objects: it can be grepped."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "]"
        return json.dumps(value)

    rows = [f"{json.dumps(key)}: {lines(value)}" for key, value in document.items()]
    print("{" + ",\n ".join(rows) + "}")


if __name__ == "__main__":
    sys.exit(main())
