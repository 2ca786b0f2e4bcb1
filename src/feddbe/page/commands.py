"""The command behind a number: what one would type to get a run, or to see a part of it, again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from feddbe import data
from feddbe.options.config import Config
from feddbe.options.grammar import written
from feddbe.page.blocks import Block, command
from feddbe.page.sources import Source, Sources
from feddbe.results.document import Measurement, RunDocument

__all__ = ["holding", "line", "measuring", "of_all", "of_each", "running"]

_ELSEWHERE = ("method", "engine", "worker_timeout", "out", "resume", "json", "quiet")
"""Options that say where and how something is done, not what."""


def running(source: Source) -> str | None:
    """The line that runs the same again, with every option that is not the general default; None: its data or
    model was a Python object, which has no name there."""
    config = source.document["config"]
    if config.get("model") == "own" or not _has_name(str(config["data"])):
        return None
    return line(source.document["method"], config)


def line(method: str, config: Mapping[str, Any]) -> str:
    """The line that runs this method with these options."""
    told = [field.name for field in dataclasses.fields(Config) if field.name not in _ELSEWHERE]
    return shlex.join(["feddbe", "run", method, *_options(config, told)])


def holding(source: Source) -> str | None:
    """The line that shows who holds what; None as above."""
    config = source.document["config"]
    if not _has_name(str(config["data"])):
        return None
    told = ["data_dir", "partition", "partition_seed", "split", "clients", "shift"]
    return shlex.join(["feddbe", "data", "show", str(config["data"]), *_options(config, told)])


def _options(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those that are not the general default; data and seed in any case, for who reads them."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    values = {name: config.get(name, defaults[name]) for name in names}
    told = {name: v for name, v in values.items() if v != defaults[name] or name in ("data", "seed")}
    return [word for name, value in told.items() for word in _option(name, value)]


def _option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if value is None:  # an option that this run could not use
        return []
    return [f"--{flag}", written(value)]


def _has_name(name: str) -> bool:
    """Whether the command line finds data by this name; a file may be on another machine, or gone."""
    return name.split("(")[0] in data.SOURCES or any(sign in name for sign in "/.:") or Path(name).exists()


def of_all(sources: Sources, verb: str, what: str) -> list[Block]:
    """One line for all runs: `feddbe fairness RUN...`."""
    return [command(what, shlex.join(["feddbe", verb, *(str(run.folder) for run in sources.runs)]))]


def of_each(sources: Sources, verb: str) -> list[Block]:
    """A line for each run: `feddbe show RUN`."""
    return [
        command(f"{verb} {run.folder}", shlex.join(["feddbe", verb, str(run.folder)])) for run in sources.runs
    ]


def measuring(found: Iterable[tuple[RunDocument, Measurement]]) -> list[Block]:
    """What takes these measurements, a line for each run; those of the same settings in one."""
    asked: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for document, one in found:
        best = document["best"]
        which = "best" if best and best["round"] == one["round"] else "last"
        n = one["settings"].get("samples")
        flags = ["--quick"] * one["quick"] + ["--per-client"] * one["per_client"]
        key = (document["folder"], which, "all" if n is None else str(n), *flags)
        lists = asked.setdefault(key, {"what": {}, "moment": {}, "at": {}})
        for name, value in (("what", one["what"]), ("moment", one["moment"]), ("at", one["place"])):
            lists[name][value] = None
    lines = []
    for (folder, which, n, *flags), lists in asked.items():
        chosen = [word for option, names in lists.items() for word in (f"--{option}", ",".join(names))]
        words = ["feddbe", "measure", folder, *chosen, "--round", which, "--n", n, *flags]
        lines.append(command(f"measure {folder}", shlex.join(words)))
    return lines
