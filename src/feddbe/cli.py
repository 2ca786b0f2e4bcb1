"""The command line. It holds no logic: it reads options, calls what Python users call, and shows."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from feddbe import api, config, data, folders, pictures, terminal
from feddbe.config import Config
from feddbe.document import RunDocument
from feddbe.errors import BadInput, FeddbeError, unknown
from feddbe.experiment import label_counts, load_data
from feddbe.loop import Watch
from feddbe.methods import describe

__all__ = ["app", "main"]

app = typer.Typer(
    help="Personalized federated learning with the Domain Bias Eliminator.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets and how they are divided among clients.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 is bad input, 3 diverged, 130 Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(given, prog_name="feddbe", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except FeddbeError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except BrokenPipeError:  # `feddbe show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'file'}: {error.strerror or error}", 2)
    except Exception as error:
        # click's own errors (an unknown option, a missing argument); typer may carry click inside it
        if not hasattr(error, "format_message"):
            raise
        return _complain(" ".join(error.format_message().split()), 2)


def _complain(text: str, code: int) -> int:
    print(f"feddbe: {text}", file=sys.stderr)
    return code


def _with_options(function: Callable[..., int], *names: str) -> Callable[..., int]:
    """Give a command the options of `Config` (all, or those named); None where the user gave none."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "options"]
    for field in dataclasses.fields(Config):
        if field.name == "method" or (names and field.name not in names):
            continue
        kind = {"str": str, "int": int, "float": float, "bool": bool}[str(field.type).split(" ")[0]]
        text = field.metadata["meaning"]
        if field.metadata["choices"] and field.default is not None:
            text += f" ({', '.join(field.metadata['choices'])})"
        if field.default not in (None, False):
            text += f" [{field.default}]"
        option = typer.Option(f"--{field.name.replace('_', '-')}", help=text, show_default=False)
        own.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )

    def command(**given: Any) -> int:
        fixed = {p.name for p in inspect.signature(function).parameters.values()}
        options = {key: value for key, value in given.items() if key not in fixed}
        return function(**{key: given[key] for key in given if key in fixed}, options=options)

    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__doc__ = function.__doc__
    return command


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE: any option, over those of a file", show_default=False),
]


def _run(
    method: Annotated[str, typer.Argument(help="a method, or FILE.toml", show_default=False)],
    options: dict[str, Any],
    settings: Settings = None,
) -> int:
    """Run one method: feddbe run fedavg+dbe --rounds 20"""
    return _carry_out([method], options, settings or [], single=True)


def _compare(
    methods: Annotated[list[str], typer.Argument(help="methods, or FILE.toml", show_default=False)],
    options: dict[str, Any],
    settings: Settings = None,
) -> int:
    """Run several methods on the same data and show them side by side."""
    return _carry_out(methods, options, settings or [], single=False)


app.command("run")(_with_options(_run))
app.command("compare")(_with_options(_compare))


def _carry_out(methods: list[str], options: dict[str, Any], settings: list[str], *, single: bool) -> int:
    names, chosen = config.read(methods, options, settings)
    if single and len(names) > 1:
        raise BadInput(f"run takes one method, not {len(names)}; compare takes several")
    with _Bars() as watch:
        try:
            documents = api.carry_out(names, chosen, single=single, watch=watch)
        except KeyboardInterrupt:
            return _complain(watch.stopped(single=single), 130)
    folder = Path(documents[0]["folder"])
    folder = folder if single else folder.parent
    paths = api.draw(folder, documents)
    if chosen.json:
        _print_json(documents[0] if single else {"runs": documents})
        return 0
    Console().print(terminal.results_table(documents))
    for path in (*paths, folder):
        print(path)
    return 0


class _Bars(Watch):
    """Progress on standard error if that is a terminal; without one, nothing is shown."""

    def __init__(self) -> None:
        # no thread of its own refreshes it: workers are forked from this process
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            disable=not sys.stderr.isatty(),
            transient=True,
            expand=True,
        )
        self._folder: Path | None = None
        self._done = 0

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._folder, self._done = folder, done
        self._rounds = self._bars.add_task(name, total=rounds, completed=done, accuracy="")
        self._bars.refresh()

    def client(self, done: int, of: int) -> None:
        self._bars.update(self._rounds, completed=self._done + done / of if of else self._done)
        self._bars.refresh()

    def round(self, done: int, accuracy: float | None) -> None:
        self._done = done
        shown = "" if accuracy is None else f"{100 * accuracy:.2f} %"
        self._bars.update(self._rounds, completed=done, accuracy=shown)
        self._bars.refresh()

    def stopped(self, *, single: bool) -> str:
        """What to say after Ctrl-C."""
        if self._folder is None:
            return "stopped before anything was written"
        given = [word for word in sys.argv[1:] if word != "--resume"]
        if not any(word.split("=")[0] == "--out" for word in given):
            given += ["--out", str(self._folder if single else self._folder.parent)]
        again = shlex.join(["feddbe", *given, "--resume"])
        return f"stopped after round {self._done}, which is kept; continue with: {again}"


@app.command("runs")
def _runs(
    folder: Annotated[Path, typer.Argument(help="where to look")] = folders.RUNS, json: Json = False
) -> int:
    """List the runs below a folder."""
    documents = [api.load(path) for path in folders.listing(folder)]
    rows = [_row(document, folder) for document in documents]
    if json:
        _print_json({"runs": rows})
    elif rows:
        Console().print(terminal.runs_table(rows))
    else:
        print(f"no runs in {folder}/; start one with: feddbe run fedavg+dbe")
    return 0


def _row(document: RunDocument, root: Path) -> terminal.RunRow:
    best, last, wanted = document["best"], document["last"], document["config"]["rounds"]
    done = document["rounds"][-1]["round"] if document["rounds"] else 0
    return {
        "name": str(Path(document["folder"]).relative_to(root)),
        "method": document["method"],
        "data": Path(document["config"]["data"]).name,
        "rounds": done,
        "best": best["accuracy"]["weighted"] if best and best["accuracy"] else None,
        "last": last["accuracy"]["weighted"] if last and last["accuracy"] else None,
        "state": "done" if done >= wanted and last and last["round"] == done else f"stopped, {wanted} wanted",
    }


@app.command("show")
def _show(
    run: Annotated[str, typer.Argument(help="folder of a run, or its name in runs/", show_default=False)],
    json: Json = False,
) -> int:
    """Show a run: its table and its learning curve."""
    document = api.load(run)
    if json:
        _print_json(document)
        return 0
    console = Console()
    console.print(terminal.results_table([document]))
    console.print(terminal.curve(document))
    return 0


@app.command("methods")
def _methods(json: Json = False) -> int:
    """List methods, add-ons and their hyper-parameters."""
    described = describe()
    if json:
        _print_json(described)
    else:
        Console().print(terminal.methods_table(described))
    return 0


@data_app.command("list")
def _data_list(
    data_dir: Annotated[Path | None, typer.Option(help="where data files are looked for first")] = None,
    json: Json = False,
) -> int:
    """List the data sets that are known by name, and where they are."""
    rows = [
        {"name": source.name, "description": source.description, "found": source.found(data_dir)}
        for source in data.SOURCES.values()
    ]
    if json:
        _print_json({"data": rows})
        return 0
    for row in rows:
        place = row["found"] or f"feddbe data get {row['name']}"
        print(f"{row['name']:<10} {row['description']:<34} {place}")
    return 0


@data_app.command("get")
def _data_get(
    name: Annotated[str, typer.Argument(help="data set", show_default=False)],
    data_dir: Annotated[Path | None, typer.Option(help="where to put it")] = None,
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
    name: Annotated[str, typer.Argument(help="data set, or FILE.npz", show_default=False)],
    options: dict[str, Any],
    save: Annotated[Path | None, typer.Option(help="write the partition to this .npz")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw it into this .png")] = None,
) -> int:
    """Show how a data set is divided among clients."""
    dataset, split, chosen = load_data(
        Config(**{k: v for k, v in options.items() if v is not None}, data=name)
    )
    labels = label_counts(dataset, split)
    if save is not None:
        split.save(save)
    title = f"{Path(name).name}, {chosen.partition or chosen.split}, {split.clients} clients"
    if plot is not None:
        pictures.bubbles(plot, labels, title)
    if chosen.json:
        rows = [
            {"train": len(train), "test": len(test), "labels": counts.tolist()}
            for train, test, counts in zip(split.train, split.test, labels, strict=True)
        ]
        _print_json({"clients": rows, "index_sha256": split.index_sha256()})
        return 0
    Console().print(terminal.split_table([*map(len, split.train)], [*map(len, split.test)], labels))
    for path in filter(None, (save, plot)):
        print(path)
    return 0


data_app.command("show")(
    _with_options(_data_show, "data_dir", "partition", "partition_seed", "split", "clients", "json")
)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    sys.exit(main())
