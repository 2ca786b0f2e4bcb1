"""`feddbe data`: data sets and their partitions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from feddbe.cli.base import (
    AS_JSON,
    Argument,
    Group,
    config_options,
    print_json,
    print_renderable,
    print_text,
)
from feddbe.config.options import parse_options
from feddbe.errors import InvalidInputError, unknown_name

group = Group("data", "List, download and inspect data sets and their partitions.")
_DATA_DIR = click.option(
    "--data-dir", metavar="DIR", type=Path, help="folder that is searched first for data files"
)


@group.command("list")
@_DATA_DIR
@AS_JSON
def _list(data_dir: Path | None, as_json: bool) -> int:
    """List the built-in data sets and their locations."""
    from feddbe import data

    rows = [
        {"name": entry.name, "description": entry.description, "location": entry.locate(data_dir)}
        for entry in data.BUILTIN_DATASETS.values()
    ]
    if as_json:
        print_json({"data": rows})
        return 0
    name_width, description_width = (
        max(len(row[key] or "") for row in rows) for key in ("name", "description")
    )
    for row in rows:
        location = row["location"] or f"feddbe data get {row['name']}"
        print_text(f"{row['name']:<{name_width}}  {row['description']:<{description_width}}  {location}")
    return 0


@group.command("get")
@click.argument("name", cls=Argument, help="data set")
@click.option("--force", is_flag=True, help="download again, even if the files exist")
@_DATA_DIR
def _get(name: str, force: bool, data_dir: Path | None) -> int:
    """Download a data set from its publisher, or verify existing files."""
    from rich.console import Console
    from rich.progress import Progress

    from feddbe import data

    if name not in data.BUILTIN_DATASETS:
        raise unknown_name("data set", name, data.BUILTIN_DATASETS)
    entry = data.BUILTIN_DATASETS[name]
    location = entry.locate(data_dir)
    if not entry.is_downloadable:
        print_text(f"{name}: {location}")
        return 0
    if location is None or force:
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
            task = bars.add_task(name)
            entry.download(
                data_dir, lambda done, total: bars.update(task, completed=done, total=total), force
            )
        location = entry.locate(data_dir)  # another folder may come before the one of the download
    print_text(f"{name}: {location} ({entry.checksum_status(data_dir)})")
    return 0


@group.command(
    "show",
    params=config_options(
        "data_dir", "partition", "partition_seed", "split", "clients", "min_samples", "shift", "json"
    ),
)
@click.argument("name", cls=Argument, help="data set, file or folder")
@click.option("--save", metavar="FILE", type=Path, help="save the partition as .npz")
@click.option("--plot", metavar="FILE", type=Path, help="draw the partition: .png, .svg or .pdf")
def _show(name: str, save: Path | None, plot: Path | None, **options: Any) -> int:
    """Show how a data set is partitioned among clients."""
    from feddbe import data
    from feddbe.data.federated import label_counts, load_federated_data
    from feddbe.reporting import build_tables
    from feddbe.reporting.build_figures import client_distribution
    from feddbe.reporting.matplotlib_backend import draw

    if data.is_remote(name):
        raise InvalidInputError(f"'{name}' has no rows here: they are on its nodes")
    request = parse_options(["data show"], {**options, "data": name})
    dataset, split, resolved = load_federated_data(request.config)
    labels = label_counts(dataset, split)
    title = (
        f"{Path(name).name}, {resolved.partition or resolved.split or 'as given'}, {split.clients} clients"
    )
    if plot is not None:
        draw(plot, client_distribution(labels, title, dataset.label_names, dataset.client_names))
    if save is not None:
        if resolved.min_samples:
            raise InvalidInputError(
                f"min_samples = {resolved.min_samples}; a saved partition is that of all rows. "
                "Leave out --save or --min-samples"
            )
        split.save(save)
    if resolved.json:
        rows: list[dict[str, Any]] = [
            {"train": len(train), "test": len(test), "labels": counts.tolist()}
            for train, test, counts in zip(split.train, split.test, labels, strict=True)
        ]
        for key, texts in (("name", dataset.client_names), ("shift", dataset.shift_labels)):
            for row, text in zip(rows, texts, strict=False):
                row[key] = text
        description: dict[str, Any] = {"note": dataset.note} if dataset.note else {}
        description |= {"label_names": list(dataset.labels)} if dataset.label_names else {}
        print_json({"clients": rows, "index_sha256": split.index_sha256(), **description})
        return 0
    if dataset.note:
        print_text(f"{dataset.name}: {dataset.note}")
    table = build_tables.split_table(
        split.train.sizes, split.test.sizes, labels, label_names=dataset.label_names,
        client_names=dataset.client_names, shift_labels=dataset.shift_labels,
    )  # fmt: skip
    print_renderable(table)
    for path in filter(None, (save, plot)):
        print_text(str(path))
    return 0
