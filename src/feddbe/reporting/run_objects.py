"""Runs for Python users: documents with curves, data frames and tables for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from feddbe.errors import unknown_name
from feddbe.reporting.build_tables import (
    chosen_runs,
    has_repetitions,
    results_table,
    rounds_table,
    seeds_table,
    sweep_table,
)
from feddbe.reporting.table import Table, format_percent, to_html
from feddbe.results.document import RunDocument, run_title, status_note
from feddbe.runs.build_document import ClientRecord, client_records

if TYPE_CHECKING:
    from pandas import DataFrame


def summary_table(documents: Sequence[RunDocument], *, is_sweep: bool = False) -> Table:
    """Return the table of a study.

    Args:
        documents: The runs; the first is of the baseline.
        is_sweep: True if the runs are a grid of values, of which some are chosen on validation data.

    Returns:
        A record for each setting of a sweep; otherwise a record for each method, with means if an experiment
        has several seeds.
    """
    if is_sweep:
        return sweep_table(documents)
    return seeds_table(documents) if has_repetitions(documents) else results_table(documents)


class Run(dict[str, Any]):
    """The document of a run (`RunDocument`), a dictionary that can be written as JSON.

    A notebook displays it as a table.
    """

    @property
    def document(self) -> RunDocument:
        """This run with the type that type checkers know."""
        return cast(RunDocument, self)

    def curve(self, statistic: str = "weighted") -> list[tuple[int, float]]:
        """Return the learning curve.

        Args:
            statistic: Of the accuracy over clients: `weighted`, `mean`, `worst_tenth` or `std`.

        Returns:
            Round and test accuracy, as a fraction of one, of each evaluated round.

        Raises:
            InvalidInputError: The statistic is unknown.
        """
        statistics = ("weighted", "mean", "worst_tenth", "std")
        if statistic not in statistics:
            raise unknown_name("statistic", statistic, statistics)
        return [
            (result["round"], result["accuracy"][statistic])
            for result in self["rounds"]
            if result["accuracy"]
        ]

    def clients(self) -> list[ClientRecord]:
        """Return each client's name, test samples, and accuracy in the best and in the last round."""
        return client_records(self.document)

    def to_pandas(self) -> DataFrame:
        """Return a frame with a row per round; `DataFrame(run.clients())` has a row per client."""
        return rounds_table(self.document).to_pandas().set_index("round")

    def __repr__(self) -> str:
        """Return one line; `dict(run)` shows everything."""
        parts = [f"{self['method']}: {run_title([self.document])}"]
        best = self["best"]
        if best and best["accuracy"]:
            parts.append(f"best {format_percent(best['accuracy']['weighted'])} % in round {best['round']}")
        status = status_note(self.document)
        if status:
            parts.append(status)
        return f"<Run {', '.join(parts)}, {self['folder']!r}>"

    def _repr_html_(self) -> str:
        return to_html(results_table([self.document]))


class Runs(list[Run]):
    """A list of runs.

    A notebook displays it as one table, with means and intervals if there are several seeds.
    """

    @property
    def documents(self) -> Sequence[RunDocument]:
        """The runs with the type that type checkers know."""
        return [run.document for run in self]

    @property
    def chosen(self) -> Runs:
        """The runs with the values that are best on validation data; all runs, if no values are compared."""
        return self

    def to_pandas(self) -> DataFrame:
        """Return a frame with a row per run: settings as columns, accuracies as fractions of one."""
        return results_table(self.documents).to_pandas()

    def summary(self) -> DataFrame:
        """Return the table of the command line as a frame, with all digits and accuracies as fractions.

        With several seeds it has a row per method: means, half-widths of intervals, differences, verdicts.
        """
        return self._summary_table().to_pandas()

    def _summary_table(self) -> Table:
        return summary_table(self.documents)

    def _repr_html_(self) -> str:
        return to_html(self._summary_table())


class Sweep(Runs):
    """The runs of a grid of values; a notebook displays it as a table of the grid.

    Its `summary` has a row per combination of values. Test accuracies are those of the chosen ones only.
    """

    def __repr__(self) -> str:
        """Return the number of runs, and the chosen ones; test accuracies of others are not shown."""
        return f"<Sweep of {len(self)} runs, chosen: {self.chosen!r}>"

    @property
    def chosen(self) -> Runs:
        """The runs of each method with the values that are best on validation data."""
        chosen_ids = {id(document) for document in chosen_runs(self.documents)}
        return Runs(run for run in self if id(run) in chosen_ids)

    def to_pandas(self) -> DataFrame:
        """Return a frame with a row per run of the chosen values."""
        return self.chosen.to_pandas()

    def _summary_table(self) -> Table:
        return summary_table(self.documents, is_sweep=True)
