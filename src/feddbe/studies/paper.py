"""The paper's tables and figures: each a file in `experiments/` that says which runs it is made of, and the
numbers that the paper prints.

A slot is a place in a table. Its runs, one per trial, have the options of all experiments, of this one, of
the column and of the row, each over those before it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.results.document import Accuracy, AnalysisDocument, RunDocument
from feddbe.results.fairness import compute_overhead
from feddbe.runs.store import RunStore
from feddbe.studies.runner import RunSpec

NAMES = (
    "splitting-cnn", "splitting-resnet", "ablation", "noise", "traditional", "pathological", "practical",
    "clients-100", "heterogeneity", "personalized-mr", "overhead", "iterations", "new-clients", "epochs", "har",
    "convergence", "tsne", "distributions",
)  # fmt: skip
"""In the order in which the paper has them."""
_CELL = files("feddbe.studies") / "experiments"
_OURS = {"title", "read", "against", "relative", "small", "method", "name"}
"""Keys of rows and columns that are no options of a run."""


class PaperValue(NamedTuple):
    """What the paper prints; None is a dash."""

    value: float | None
    std: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """A line of a table: a method, and options of its own."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperColumn:
    """A setting, and what is read of its runs."""

    key: str
    """Its name in the paper's numbers."""
    title: str
    read: str = "accuracy"
    """One of `values.READINGS`."""
    against: str = ""
    """The method whose value is taken off: its name, or `plain`, the row's without add-ons."""
    relative: bool = False
    """In percent of that value."""
    method: str = ""
    """Instead of the row's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    replaced: str = ""
    """The data, or the model, on which it is not as published, and the published one."""


@dataclass(frozen=True)
class TableCell:
    """A place in a table."""

    row: PaperRow
    column: PaperColumn
    paper_value: PaperValue | None
    """None: the paper does not have this place."""
    run_specs: tuple[RunSpec, ...]
    """One for each trial; none where the paper has a dash."""
    base: tuple[RunSpec, ...] = ()
    """Those that they are compared with, in the same order."""

    @property
    def name(self) -> str:
        return f"{self.row.name}/{self.column.title}"


@dataclass(frozen=True)
class PaperStudy:
    """One table or figure."""

    name: str
    title: str
    table: str
    """Its name in the paper's numbers; nothing for a figure."""
    figure: str
    """`curves`, `tsne` or `distributions`; nothing for a table."""
    rows: tuple[PaperRow, ...]
    columns: tuple[PaperColumn, ...]
    left_out: Mapping[str, str]
    """Lines of the paper's table that are not run, and why."""
    note: str
    rounds: int
    """As published."""
    table_cells: tuple[TableCell, ...]
    is_small: bool = False
    """Whether it is the small scale: digits, a small model, and the quick MDL."""

    def only(self, words: Sequence[str]) -> PaperStudy:
        """With those slots that one of the words names: a line, a column, or LINE/COLUMN; * stands for
        anything."""
        kept = [slot for slot in self.table_cells if not words or any(_meant(slot, word) for word in words)]
        for word in words:
            if not any(_meant(slot, word) for slot in self.table_cells):
                names = {name for slot in self.table_cells for name in (slot.row.name, slot.column.title)}
                raise unknown_name(f"cell of {self.name}", word, names)
        rows = tuple(row for row in self.rows if any(slot.row is row for slot in kept))
        columns = tuple(column for column in self.columns if any(slot.column is column for slot in kept))
        return PaperStudy(**{**vars(self), "rows": rows, "columns": columns, "slots": tuple(kept)})


def _meant(cell: TableCell, word: str) -> bool:
    pattern = word.lower().replace("[", "[[]")
    names = (cell.name, cell.row.name, cell.column.title)
    return any(fnmatchcase(name.lower(), pattern) for name in names)


@cache
def load_settings() -> dict[str, Any]:
    """What all experiments share."""
    return tomllib.loads((_CELL / "settings.toml").read_text(encoding="utf-8"))


@cache
def paper_values() -> dict[str, dict[str, dict[str, PaperValue]]]:
    """The paper's numbers: table, row, column."""
    tables = json.loads((_CELL / "paper.json").read_text(encoding="utf-8"))
    return {
        table: {
            row: {c: PaperValue(*(v if isinstance(v, list) else [v])) for c, v in values.items()}
            for row, values in rows.items()
        }
        for table, rows in tables.items()
    }


def load_study(
    name: str, *, trials: int = 3, rounds: int | None = None, data: str | None = None, small: bool = False
) -> PaperStudy:
    """The experiment of this name. `rounds`: at most so many; `data`: instead of the published; `small`: on
    digits, with a small model."""
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    if trials < 1:
        raise InvalidInputError(f"trials = {trials}; allowed: a whole number >= 1")
    found = tomllib.loads((_CELL / f"{name}.toml").read_text(encoding="utf-8"))
    common = load_settings()
    instead = {**common["small"], **found.get("small", {})} if small else {"data": data} if data else {}
    published = {**common["published"], **found.get("options", {})}
    rows = tuple(_rows(found["rows"], small))
    columns = tuple(_columns(found["columns"], published, instead, small))
    numbers = paper_values().get(found.get("table", ""), {})
    slots = []
    for row in rows:
        for column in columns:
            known = numbers.get(row.name, {}).get(column.key)
            if known or not numbers or row.name in found.get("extra", ()):
                dash = known is not None and known.value is None
                cells, base = ((), ()) if dash else _cells(row, column, range(trials), rounds)
                slots.append(TableCell(row, column, known, cells, base))
    used = [column for column in columns if any(slot.column is column for slot in slots)]
    return PaperStudy(
        name, found["title"], found.get("table", ""), found.get("figure", ""), rows, tuple(used),
        found.get("left_out", {}), found.get("note_small", "") if small else "",
        instead.get("rounds", published["rounds"]), tuple(slots), small,
    )  # fmt: skip


def _rows(given: Sequence[Any], small: bool) -> Iterator[PaperRow]:
    """A name stands for the method that it is; more is said in a table."""
    for one in given:
        about: dict[str, Any] = {"name": one} if isinstance(one, str) else dict(one)
        if (other := about.pop("small", {})) is False and small:
            continue
        about |= other if small and other else {}
        method = about.get("method", about["name"].lower().replace("-", ""))
        yield PaperRow(about["name"], method, {k: v for k, v in about.items() if k not in _OURS})


def _columns(
    given: Mapping[str, Any], published: Mapping[str, Any], instead: Mapping[str, Any], small: bool
) -> Iterator[PaperColumn]:
    """Of columns that are the same with the options that stand in for the published ones, the first."""
    seen = []
    for key, one in given.items():
        about = dict(one)
        if (other := about.pop("small", {})) is False and small:
            continue
        about |= other if small and other else {}
        own = {**published, **{k: v for k, v in about.items() if k not in _OURS}}
        options = {**own, **instead}
        others = [k for k in ("data", "model") if k in own and own[k] != options[k]]
        replaced = ", ".join(f"{options[k]} instead of {own[k]}" for k in others)
        ours = {k: about[k] for k in ("read", "against", "relative", "method") if k in about}
        if (ours, options) not in seen:
            seen.append((ours, options))
            yield PaperColumn(key, about.get("title", key), options=options, replaced=replaced, **ours)


def _cells(
    row: PaperRow, column: PaperColumn, trials: Sequence[int], rounds: int | None
) -> tuple[tuple[RunSpec, ...], tuple[RunSpec, ...]]:
    """The runs of a slot, and those that they are compared with."""
    method = column.method or row.method
    plain = {"": "", "plain": method.partition("+")[0]}.get(column.against, column.against)
    cells = [_cell(method, {**column.options, **row.options}, seed, rounds) for seed in trials]
    base = [_cell(plain, column.options, seed, rounds) for seed in trials if plain]
    return tuple(cells), tuple(base)


def _cell(method: str, options: Mapping[str, Any], seed: int, rounds: int | None) -> RunSpec:
    """With the learning rate of its model and the hyper-parameters of its method on this data."""
    common, base = load_settings(), method.partition("+")[0]
    rate = common["lr"].get(options.get("model"), {})
    rate = {**rate, **rate.get("on", {}).get(options["data"], {})}
    own = rate.get("methods", {}).get(base, rate.get("value"))
    given = common["methods"].get(base, {}).get(options["data"], {}).get("options")
    if given and "(" not in method:
        method = method.replace(base, f"{base}({given})", 1)
    chosen = {**options, "seed": seed, **({} if own is None else {"lr": own})}
    if rounds is not None:
        chosen["rounds"] = min(rounds, options["rounds"])
    return RunSpec(method, chosen)


Reading = Callable[[RunDocument], float | None]


def compute_value(read: str, document: RunDocument) -> float | None:
    """What is read of this run; None if it does not have it (yet)."""
    if read.startswith("mdl@"):
        found = mdl_of(read, document)
        return found and found["overall"]["value"]  # nats
    return READINGS[read](document)


def decimal_places(reads: Iterable[str]) -> list[str]:
    """Where MDL is to be measured for these readings."""
    return list(dict.fromkeys(read.removeprefix("mdl@") for read in reads if read.startswith("mdl@")))


def is_accuracy(read: str) -> bool:
    """Whether more of it is better."""
    return read in ("accuracy", "best", "new-clients")


def is_chosen_on_test(read: str, document: RunDocument) -> bool:
    """Return whether the reading is of a round that was chosen by test accuracy."""
    of_best_round = read == "best" or (read == "accuracy" and _tuned(document) is None)
    return of_best_round and not (document["best"] and document["best"]["validation"])


def published_accuracy(document: RunDocument) -> Accuracy | None:
    """Return the accuracy as published: of the best round; of a method that fine-tunes after the last round
    (FedBABU), after that."""
    return _tuned(document) or (document["best"] and document["best"]["accuracy"])


def _accuracy(document: RunDocument) -> float | None:
    """In percent, as published."""
    return _percent(published_accuracy(document))


def _tuned(document: RunDocument) -> Accuracy | None:
    """Return the accuracy after the fine-tuning that follows the last round, if the method has it."""
    last = document["last"]
    return last["adapted"] if last and last["moment"] != "adapted" else None


def _best(document: RunDocument) -> float | None:
    return _percent(document["best"] and document["best"]["accuracy"])


def _new_clients_accuracy(document: RunDocument) -> float | None:
    """After they have adapted, in percent."""
    return _percent(document["new_clients"] and document["new_clients"]["adapted"])


def _iterations(document: RunDocument) -> float | None:
    """The round of the best accuracy: the paper's are too few to be the one where it stopped."""
    return document["best"] and document["best"]["round"]


def _minutes(document: RunDocument) -> float | None:
    return document["cost"]["seconds"] / 60 if len(document["rounds"]) > 1 else None


def _minutes_to_best(document: RunDocument) -> float | None:
    seconds = compute_overhead(document, None)["seconds_to_best"]
    return None if seconds is None else seconds / 60


def _prbm(document: RunDocument) -> float | None:
    """Numbers in p_i; a run has clients' states after its first round."""
    if "prbm" not in document["config"]["method_options"]:
        return 0
    store = RunStore.open(Path(document["folder"]))
    try:
        return next((state["prbm"].numel() for _, state in store.clients()), None)
    finally:
        store.close()


def mdl_of(read: str, document: RunDocument) -> AnalysisDocument | None:
    """The measurement that an `mdl@PLACE` is: of the best round, before local training; the full measure
    rather than the quick one."""
    best = document["best"]
    wanted = ("mdl", read.partition("@")[2], "before", False, best and best["round"])
    found = [
        one
        for one in document["analyses"]
        if (one["analysis"], one["layer"], one["moment"], one["per_client"], one["round"]) == wanted
    ]
    return min(found, key=lambda one: one["quick"], default=None)


def _percent(accuracy: Accuracy | None) -> float | None:
    return 100 * accuracy["weighted"] if accuracy else None


READINGS: Mapping[str, Reading] = {
    "accuracy": _accuracy,
    "best": _best,
    "new-clients": _new_clients_accuracy,
    "iterations": _iterations,
    "minutes": _minutes,
    "minutes_to_best": _minutes_to_best,
    "prbm": _prbm,
}
"""Besides `mdl@PLACE`."""
