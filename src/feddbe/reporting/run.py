"""A run as Python users hold it: its document, with ways to look at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from feddbe.errors import unknown_name
from feddbe.reporting.formatting import format_percent
from feddbe.reporting.table import to_html
from feddbe.reporting.tables import (
    chosen_runs,
    has_repetitions,
    results_table,
    rounds_table,
    seeds_table,
    sweep_table,
)
from feddbe.results.document import RunDocument, run_title, status_note
from feddbe.runs import summary

if TYPE_CHECKING:
    from pandas import DataFrame


class Run(dict[str, Any]):
    """The document that describes a run (`RunDocument`), a dictionary that can be written as JSON.

    In a notebook it shows itself as a table.
    """

    @property
    def document(self) -> RunDocument:
        """The same, for type checkers."""
        return cast(RunDocument, self)

    def curve(self, reading: str = "weighted") -> list[tuple[int, float]]:
        """(round, test accuracy as a fraction of one) of every evaluated entry; `reading` may also be `mean`,
        `worst_tenth` or `std` over clients."""
        if reading not in (known := ("weighted", "mean", "worst_tenth", "std")):
            raise unknown_name("reading", reading, known)
        return [(e["round"], e["accuracy"][reading]) for e in self["rounds"] if e["accuracy"]]

    def clients(self) -> list[summary.ClientRecord]:
        """Each client's name, test samples, and accuracy in the best and in the last round."""
        return summary.client_records(self.document)

    def to_pandas(self) -> DataFrame:
        """A frame with a row per round; `DataFrame(run.clients())` is the one with a row per client."""
        return rounds_table(self.document).to_pandas().set_index("round")

    def __repr__(self) -> str:
        """In a line; `dict(run)` shows all of it."""
        best, words = self["best"], [f"{self['method']}: {run_title([self.document])}"]
        if best and best["accuracy"]:
            words.append(f"best {format_percent(best['accuracy']['weighted'])} % in round {best['round']}")
        return f"<Run {', '.join(filter(None, [*words, status_note(self.document)]))}, {self['folder']!r}>"

    def _repr_html_(self) -> str:
        return to_html(results_table([self.document]))


class Runs(list[Run]):
    """Runs that were asked for together; in a notebook they show themselves as one table, with means and
    intervals where there are several seeds."""

    @property
    def documents(self) -> Sequence[RunDocument]:
        """The same, for type checkers."""
        return [run.document for run in self]

    def _repr_html_(self) -> str:
        runs = self.documents
        return to_html(seeds_table(runs) if has_repetitions(runs) else results_table(runs))


class Sweep(Runs):
    """The runs of a grid of values; in a notebook they show themselves as a table over it."""

    @property
    def chosen(self) -> Runs:
        """Of each method the runs with the values that are best on validation data."""
        those = {id(document) for document in chosen_runs(self.documents)}
        return Runs(run for run in self if id(run) in those)

    def _repr_html_(self) -> str:
        return to_html(sweep_table(self.documents))
