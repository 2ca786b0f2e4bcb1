"""Fairness and overhead as tables: a line or two per method, from 60 columns on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from feddbe.results.document import moment
from feddbe.results.fairness import BASELINES, Fairness, Paired
from feddbe.results.overhead import Overhead
from feddbe.show.cells import Name, caption, in_bytes, in_seconds, percent, plain_table

__all__ = ["fairness_table", "missing_baselines", "overhead_table"]

_Number = Literal["mean", "std", "worst_tenth", "lowest", "median"]


def fairness_table(runs: Sequence[Fairness]) -> RenderableType:
    """How clients' accuracies are spread, and how many are better and worse off than with a baseline."""
    return _Fairness(tuple(runs))


@dataclass(frozen=True)
class _Fairness:
    """A class because what there is room for depends on the console's width."""

    runs: tuple[Fairness, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = [baseline for baseline in BASELINES if any(baseline in run["paired"] for run in self.runs)]
        titles: dict[_Number, str] = {
            "mean": "mean",
            "std": "std",
            "worst_tenth": "worst\ntenth",
            "lowest": "lowest",
        }
        if options.max_width >= 76:
            titles["median"] = "median"
        table = _table(["round", *titles.values(), *(f"against\n{baseline}" for baseline in known)])
        for run in self.runs:
            numbers = [percent(run["spread"][key]) for key in titles]
            pairs = [_pairs(run["paired"].get(baseline)) for baseline in known]
            table.add_row(Name(run["name"], "bold"), f"@{run['round']}", *numbers, *pairs)
        whens = " or ".join(dict.fromkeys(moment(run["when"]) for run in self.runs))
        counts = sorted({run["spread"]["clients"] for run in self.runs})
        table.caption = caption(
            f"Accuracy in % {whens}, over {' or '.join(map(str, counts))} clients, each counted once. "
            "Worst tenth: the mean of the lowest tenth."
            + (" Against: clients better/equal/worse off than with it." if known else "")
        )
        yield table


def _pairs(found: Paired | None) -> str:
    return f"{found['better']}/{found['equal']}/{found['worse']}" if found else ""


def missing_baselines(runs: Sequence[Fairness]) -> str:
    """One line about the baselines that no run could be compared with; nothing if there are none."""
    known = {baseline for run in runs for baseline in run["paired"]}
    those = [baseline for baseline in BASELINES if baseline not in known and not _only(runs, baseline)]
    if not those:
        return ""
    return f"no run of {' or '.join(those)} with the same clients among these: no comparison with it"


def _only(runs: Sequence[Fairness], baseline: str) -> bool:
    """Whether all runs are of the baseline itself."""
    return all(run["method"].split("(")[0] == baseline for run in runs)


def overhead_table(costs: Sequence[Overhead], names: Sequence[str]) -> RenderableType:
    """What each method costs."""
    table = _table(["s per\nround", "best\nround", "s to\nbest", "up", "down", "keeps", "mem-\nory"])
    for cost, name in zip(costs, names, strict=True):
        best = "-" if cost["best"] is None else f"{cost['best']}\nof {cost['rounds']}"
        until = "-" if cost["seconds_to_best"] is None else in_seconds(cost["seconds_to_best"])
        table.add_row(
            Name(name, "bold"),
            in_seconds(cost["seconds"]),
            best,
            until,
            f"{in_bytes(cost['up'])}\n{in_bytes(cost['total_up'])}",
            f"{in_bytes(cost['down'])}\n{in_bytes(cost['total_down'])}",
            "-" if cost["kept"] is None else f"{cost['kept']:,}",
            in_bytes(1e6 * cost["memory_mb"]),
        )
    table.caption = caption(
        "Up and down: bytes per client and round, and below them all of the run, preparation included. "
        "Keeps: numbers that a client keeps between rounds. Memory: the most that was in use in a round. "
        "Seconds include evaluation, those to the best round the preparation."
    )
    return table


def _table(columns: Sequence[str]) -> Table:
    table = plain_table(gap=1)
    table.add_column("method", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
