"""The command line. It holds no logic: it reads options, calls what Python users call, and shows."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddbe import config
from feddbe.errors import Diverged, FeddbeError, StoreError, unknown
from feddbe.usage import Command, group, misuse, with_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from feddbe.terminal import RunRow

# Commands import what they need: torch takes seconds, and who asks for help should not wait for it.

__all__ = ["app", "main"]

app = group("Personalized federated learning with the Domain Bias Eliminator.")
data_app = group("Data sets and how they are divided among clients.")
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
        return _complain(misuse(error), 2)


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


app.command("run", cls=Command)(with_options(_run))
app.command("compare", cls=Command)(with_options(_compare))


def _carry_out(
    given: list[str], methods: list[str], options: dict[str, Any], settings: list[str], *, single: bool
) -> int:
    from feddbe import api, terminal
    from feddbe.progress import Bars
    from feddbe.training.trainers import fasttext

    names, chosen = config.read(methods, options, settings)
    watch = Bars()
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
        if documents[0]["config"]["model"] == "fasttext" and not fasttext.available():
            print("\nfastText trains several times faster with numba: pip install 'feddbe[text]'")
    return 0


@app.command("runs", cls=Command)
def _runs(
    where: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="where to look [runs]", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """List the runs below a folder."""
    from feddbe import folders, terminal

    folder = where or folders.RUNS
    rows = [_row(path, folder) for path in folders.listing(folder)]
    if json:
        _print_json({"runs": rows})
    elif rows:
        _print(terminal.runs_table(rows))
    else:
        print(f"no runs in {folder}/; start one with: feddbe run fedavg+dbe")
    return 0


def _row(path: Path, root: Path) -> RunRow:
    from feddbe import api

    name = str(path.relative_to(root)) if path != root else path.name
    try:
        document = api.load(path, hashes=False)
    except StoreError:
        nothing: RunRow = {
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


@app.command("show", cls=Command)
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
    from feddbe import api, folders, terminal
    from feddbe.document import at

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


@app.command("methods", cls=Command)
def _methods(json: Json = False) -> int:
    """List methods, add-ons and their hyper-parameters."""
    from feddbe import listing
    from feddbe.methods import describe

    if json:
        _print_json({"methods": describe()})
    else:
        _print(listing.methods_table(describe()))
    return 0


DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="where data files are looked for first", show_default=False),
]


@data_app.command("list", cls=Command)
def _data_list(data_dir: DataDir = None, json: Json = False) -> int:
    """List the data sets that are known by name, and where they are."""
    from feddbe import data

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


@data_app.command("get", cls=Command)
def _data_get(
    name: Annotated[str, typer.Argument(help="data set", show_default=False)], data_dir: DataDir = None
) -> int:
    """Download a data set from its publisher, unless it is there."""
    from rich.console import Console
    from rich.progress import Progress

    from feddbe import data

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
    from feddbe import pictures, terminal
    from feddbe.experiment import label_counts, load_data

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


data_app.command("show", cls=Command)(
    with_options(_data_show, "data_dir", "partition", "partition_seed", "split", "clients", "json")
)


@data_app.command("plots", cls=Command)
def _data_plots(
    folder: Annotated[Path, typer.Argument(help="where the pictures go", show_default=False)],
    data_dir: DataDir = None,
) -> int:
    """Draw who holds what in the paper's settings, for all data sets that are here."""
    from feddbe import api

    folder.mkdir(parents=True, exist_ok=True)
    for name, path in api.draw_paper_splits(folder, data_dir):
        print(path or f"{name} is not here: feddbe data get {name}")
    return 0


# Output


def _print(*shown: RenderableType) -> None:
    """On standard output, without the blanks that rich leaves at the ends of lines."""
    from rich.console import Console

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
