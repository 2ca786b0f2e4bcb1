"""The paper's figures: learning curves, t-SNE, who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddbe import api
from feddbe.errors import BadInput
from feddbe.options.config import Config
from feddbe.results.document import RunDocument
from feddbe.runs import folders
from feddbe.runs.experiment import label_counts, load_data
from feddbe.runs.watch import Watch
from feddbe.show import pictures
from feddbe.studies.catalogue import Column, Study
from feddbe.studies.reproduce import Plans

__all__ = ["draw", "measure"]


def measure(study: Study, plans: Plans, watch: Watch | None = None) -> None:
    """What a picture of representations needs."""
    if study.figure == "tsne":
        for column in study.columns:
            for document in _documents(study, column, plans):
                api.measure(document["folder"], what="tsne", at="z_g,z", watch=watch, quiet=True)


def draw(study: Study, plans: Plans, folder: Path) -> dict[str, Path | str]:
    """A picture for each column: its path in `folder`, or why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path | str] = {}
    for column in study.columns:
        path = folder / f"{study.name}-{folders.slug(column.title.replace(' ', '-'))}.png"
        if study.figure == "distributions":
            found[column.title] = _bubbles(path, column.options)
        elif not (documents := _documents(study, column, plans)):
            cells = [cell for slot in study.slots if slot.column is column for cell in slot.cells]
            found[column.title] = next((plans[c].refused for c in cells if plans[c].refused), "not run")
        elif study.figure == "curves":
            pictures.curves(path, documents)
            found[column.title] = path
        else:
            tsne: list[Any] = [
                {**d, "measured": [one for one in d["measured"] if one["what"] == "tsne"]} for d in documents
            ]
            drawn = api.draw_measured(folder, tsne)
            found[column.title] = drawn[0].replace(path) if drawn else "not measured"
    return found


def _documents(study: Study, column: Column, plans: Plans) -> list[RunDocument]:
    """Runs of one column that have something to show; of t-SNE those of the first trial."""
    slots = [slot for slot in study.slots if slot.column is column]
    cells = [cell for slot in slots for cell in (slot.cells[:1] if study.figure == "tsne" else slot.cells)]
    return [found for cell in cells if (found := plans[cell].found) and found["best"]]


def _bubbles(path: Path, options: Mapping[str, Any]) -> Path | str:
    wanted = ("data", "partition", "partition_seed", "clients", "variant")
    try:
        held = load_data(Config(**{key: options[key] for key in wanted if key in options}))
    except BadInput as error:
        return str(error)
    title = f"{options['data']}, {held.options.partition}, {held.split.clients} clients"
    pictures.bubbles(path, label_counts(held.dataset, held.split), title)
    return path
