"""`feddbe data`: data sets and how they are divided among clients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from feddbe.cli.command import AS_JSON, Argument, Group, config_options, print_json, print_renderable
from feddbe.config.options import parse_options
from feddbe.errors import unknown_name

group = Group("data", "Data sets and how they are divided among clients.")
_DATA_DIR = click.option("--data-dir", metavar="DIR", type=Path, help="where data files are looked for first")


@group.command("list")
@_DATA_DIR
@AS_JSON
def _list(data_dir: Path | None, as_json: bool) -> int:
    """List the data sets that are known by name, and where they are."""
    from feddbe import data

    rows = [
        {"name": source.name, "description": source.description, "found": source.locate(data_dir)}
        for source in data.BUILTIN_DATASETS.values()
    ]
    if as_json:
        print_json({"data": rows})
        return 0
    names, words = (max(len(row[key] or "") for row in rows) for key in ("name", "description"))
    for row in rows:
        place = row["found"] or f"feddbe data get {row['name']}"
        print(f"{row['name']:<{names}}  {row['description']:<{words}}  {place}")
    return 0


@group.command("get")
@click.argument("name", cls=Argument, help="data set")
@click.option("--force", is_flag=True, help="fetch it anew, also if it is there")
@_DATA_DIR
def _get(name: str, again: bool, data_dir: Path | None) -> int:
    """Download a data set from its publisher; if it is there, verify it."""
    from rich.console import Console
    from rich.progress import Progress

    from feddbe import data

    if name not in data.BUILTIN_DATASETS:
        raise unknown_name("data set", name, data.BUILTIN_DATASETS)
    source = data.BUILTIN_DATASETS[name]
    place = source.locate(data_dir)
    if not source.is_downloadable:
        print(f"{name}: {place}")
        return 0
    if place is None or again:
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
            task = bars.add_task(name)
            source.download(data_dir, lambda done, of: bars.update(task, completed=done, total=of), again)
        place = source.locate(data_dir)  # not where it was put: another place may come first
    print(f"{name}: {place} ({source.checksum_status(data_dir)})")
    return 0


@group.command(
    "show",
    params=config_options("data_dir", "partition", "partition_seed", "split", "clients", "shift", "json"),
)
@click.argument("name", cls=Argument, help="data set, or your own file or folder")
@click.option("--save", metavar="FILE", type=Path, help="write the partition to this .npz")
@click.option("--plot", metavar="FILE", type=Path, help="draw it: .png, .svg or .pdf")
def _show(name: str, save: Path | None, plot: Path | None, **options: Any) -> int:
    """Show how a data set is divided among clients."""
    from feddbe.data.federated import label_counts, load_federated_data
    from feddbe.reporting import tables
    from feddbe.reporting.build_figures import client_distribution
    from feddbe.reporting.matplotlib_backend import draw

    asked = parse_options(["data show"], {**options, "data": name})
    dataset, split, chosen = load_federated_data(asked.config)
    labels = label_counts(dataset, split)
    title = f"{Path(name).name}, {chosen.partition or chosen.split or 'as given'}, {split.clients} clients"
    if plot is not None:
        draw(plot, client_distribution(labels, title, dataset.label_names, dataset.client_names))
    if save is not None:
        split.save(save)
    if chosen.json:
        rows: list[dict[str, Any]] = [
            {"train": len(train), "test": len(test), "labels": counts.tolist()}
            for train, test, counts in zip(split.train, split.test, labels, strict=True)
        ]
        for key, told in (("name", dataset.client_names), ("look", dataset.shift_labels)):
            for row, name in zip(rows, told, strict=False):
                row[key] = name
        about: dict[str, Any] = {"note": dataset.note} if dataset.note else {}
        about |= {"label_names": list(dataset.labels)} if dataset.label_names else {}
        print_json({"clients": rows, "index_sha256": split.index_sha256(), **about})
        return 0
    if dataset.note:
        print(f"{dataset.name}: {dataset.note}")
    table = tables.split_table(
        split.train.sizes, split.test.sizes, labels, label_names=dataset.label_names,
        client_names=dataset.client_names, shift_labels=dataset.shift_labels,
    )  # fmt: skip
    print_renderable(table)
    for path in filter(None, (save, plot)):
        print(path)
    return 0
