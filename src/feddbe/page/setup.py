"""The last part of a page: what the runs cost, their settings, and with what they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from feddbe.options.grammar import written
from feddbe.page.blocks import Block, cell, facts, section, table
from feddbe.page.commands import of_all, of_each
from feddbe.page.sources import Source, Sources
from feddbe.results.overhead import overhead
from feddbe.runs import per_client
from feddbe.show.cells import in_bytes, in_seconds

__all__ = ["configuration", "costs", "versions"]

_ACROSS = 6
"""Runs that fit beside each other."""
_NOT_SETTINGS = ("method", "method_options", "out", "resume", "json", "quiet")


def costs(sources: Sources) -> list[Block]:
    """Time, traffic, what clients keep, memory."""
    rows = []
    for run, name in zip(sources.runs, sources.names, strict=True):
        cost = overhead(run.document, per_client.kept(run.folder))
        sizes = [(in_bytes(cost[key]), cost[key]) for key in ("up", "down", "total_up", "total_down")]
        times = [cost["seconds"] if cost["rounds"] else None, cost["preparation"], cost["seconds_to_best"]]
        rows.append(
            [
                name,
                *(cell("-" if value is None else in_seconds(value), value) for value in times),
                *(cell(text, value) for text, value in sizes),
                cell("-" if cost["kept"] is None else f"{cost['kept']:,}", cost["kept"]),
                cell(in_bytes(1e6 * cost["memory_mb"]), cost["memory_mb"]),
            ]
        )
    words = (
        "Seconds of the median round, evaluation included, of the preparation, and until the best round. "
        "Bytes per client and round, and of the whole run, preparation included. Keeps: numbers that a "
        "client keeps between rounds. Memory: the most that was in use in a round."
    )
    columns = [
        "run", "s per round", "s preparation", "s to best", "up", "down", "all up", "all down", "keeps",
        "memory",
    ]  # fmt: skip
    return section(
        "overhead", "Overhead", [table("overhead", words, columns, rows)], of_all(sources, "overhead", "all")
    )


def configuration(sources: Sources) -> list[Block]:
    """Settings in which the runs differ first, then those that all have."""
    every = [_settings(run) for run in sources.runs]
    blocks = _compared("settings", sources.names, every, "setting")
    return section("configuration", "Configuration", blocks, of_each(sources, "show"))


def _settings(run: Source) -> dict[str, Any]:
    """Options and hyper-parameters, these as in `mr kappa`; and where the run is."""
    config = run.document["config"]
    found = {key: value for key, value in config.items() if key not in _NOT_SETTINGS}
    for part, options in config.get("method_options", {}).items():
        found |= {f"{part} {key}": value for key, value in options.items()}
    return found | {"folder": run.document["folder"]}


def versions(sources: Sources) -> list[Block]:
    """With what, where and when runs were begun, and who trained."""
    every = [
        {
            **(run.about["versions"] or {}),
            "machine": run.about["machine"],
            "git commit": run.about["git_commit"],
            "begun": run.about["begun"],
            "trained by": ", ".join(run.document["trainers"]) or None,
            "configuration hash": run.document["config_hash"][:12],
        }
        for run in sources.runs
    ]
    return section("versions", "Versions", _compared("versions", sources.names, every, "what"))


def _compared(id: str, names: Sequence[str], every: Sequence[Mapping[str, Any]], what: str) -> list[Block]:
    """A table of what differs, with the runs across where there is room, and what is the same."""
    keys = list(dict.fromkeys(key for one in every for key in one))
    shown = [{key: _shown(one.get(key)) for key in keys} for one in every]
    differ = [key for key in keys if any(one[key] != shown[0][key] for one in shown)]
    same = [[key, shown[0][key]] for key in keys if key not in differ and shown[0][key] != "-"]
    if len(names) <= _ACROSS:
        columns, rows = [what, *names], [[key, *(one[key] for one in shown)] for key in differ]
    else:
        columns = ["run", *differ]
        rows = [[name, *(one[key] for key in differ)] for name, one in zip(names, shown, strict=True)]
    blocks = [table(f"{id}-differ", "In what the runs differ.", columns, rows)] if differ else []
    words = "The same in all runs" if len(names) > 1 else ""
    return [*blocks, *([facts(id, words, same)] if same else [])]


def _shown(value: Any) -> str:
    return "-" if value is None else written(value)
