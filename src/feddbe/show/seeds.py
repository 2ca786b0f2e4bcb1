"""Experiments over several seeds as a table, and a grid of values with the one that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feddbe.results.document import RunDocument, labels, moment, title
from feddbe.results.extent import last_round
from feddbe.results.repeats import Repeats, chosen, repeats, unequal
from feddbe.results.statistics import Interval
from feddbe.results.verdicts import RULE
from feddbe.show.formats import Column, Grid

__all__ = ["choice", "repeated", "seeds_grid", "sweep_grid"]

_NUMBERS = ("best", "last", "worst_tenth", "validation", "difference")


def repeated(documents: Sequence[RunDocument]) -> bool:
    """Whether some experiment has more than one seed."""
    return any(len(one.runs) > 1 for one in repeats(documents))


def seeds_grid(documents: Sequence[RunDocument]) -> Grid:
    """An experiment to a row: mean and 95 % interval over seeds, and the difference to the first one."""
    found = repeats(documents)
    first = found[0].name
    several = len(found) > 1
    columns = [
        Column("name", "method", text=True), Column("", "seeds"), Column("", "best", _shown),
        Column("", "last", _shown, spare=True), Column("", "worst tenth", _shown, spare=True),
        Column("", f"best less\n{first}" if several else ""),
    ]  # fmt: skip
    rows = []
    for one in found:
        numbers = [one.best, one.last, one.worst_tenth, _difference(one)]
        rows.append([one.name, one.seeds, *numbers, *_plain(one)])
    return Grid([*columns, *_PLAIN], rows, _note(documents, found))


def sweep_grid(documents: Sequence[RunDocument]) -> Grid:
    """A grid's cell to a row: what it has on validation data, and of those that were chosen by it, on test
    data."""
    found = repeats(documents)
    picked = chosen(found)
    if len(picked) > 1:  # methods are compared by the cells that were chosen of them
        found = repeats(documents, picked[0], picked)
    first, several = found[picked[0]].name if picked else "", len(picked) > 1
    columns = [
        Column("name", "method", text=True), Column("", "seeds"), Column("", "validation", _shown),
        Column("chosen", "chosen", lambda value: "*" if value else ""),
        Column("", "test", _shown), Column("", f"test less\n{first}" if several else ""),
    ]  # fmt: skip
    rows = []
    for index, one in enumerate(found):
        mine = index in picked
        tested = [one.best, _difference(one)] if mine else [None, ""]
        rows.append([one.name, one.seeds, one.validation, mine, *tested, *_plain(one, tested=mine)])
    share = documents[0]["config"].get("validation")
    words = (
        f"{title(documents)}. Accuracy in %, mean ± 95 % interval over seeds, in the round that is best on "
        f"validation data: {share:g} of the training data, held out. Values are chosen by that alone; test "
        "data are looked at only for what was chosen."
        + (_judged(found) if several else "")
        + _left_out(documents, found)
    )
    if methods := unequal(found):
        words += f" Nothing is chosen among runs of unequal rounds: {', '.join(methods)}."
    return Grid([*columns, *_PLAIN], rows, words)


def choice(documents: Sequence[RunDocument]) -> list[RunDocument]:
    """The runs of the cells that were chosen."""
    found = repeats(documents)
    return [run for index in chosen(found) for run in found[index].runs]


_PLAIN = [
    *(Column(f"{key}{part}") for key in _NUMBERS for part in ("", "_half")),
    Column("verdict"), Column("n"), Column("diverged"), Column("seeds"),
]  # fmt: skip
"""For programs: means and half intervals as fractions of one, as in all other tables for them."""


def _plain(one: Repeats, *, tested: bool = True) -> list[Any]:
    found: list[Any] = []
    for key in _NUMBERS:
        value: Interval | None = getattr(one, key) if tested or key == "validation" else None
        found += [None, None] if value is None else [value.mean / 100, value.half / 100]
    seeds = " ".join(str(run["config"].get("seed")) for run in one.runs)
    return [*found, one.verdict.outcome if tested else "", len(one.counted), one.diverged, seeds]


def _shown(value: Interval | None) -> str:
    return "-" if value is None else value.shown()


def _difference(one: Repeats) -> str:
    return (
        "" if one.difference is None else f"{one.difference.shown(sign=True)} {one.verdict.outcome}".strip()
    )


def _note(documents: Sequence[RunDocument], found: Sequence[Repeats]) -> str:
    whens = " or ".join(dict.fromkeys(moment(d["last"]["when"]) for d in documents if d["last"]))
    shares = {d["config"].get("validation") or 0.0 for d in documents}
    on = {f"on {share:g} of the training data, held out" if share else "on test data" for share in shares}
    return (
        f"{title(documents)}. Test accuracy in % {whens}, weighted by samples: mean ± 95 % interval over "
        f"seeds (Student's t). The best round is chosen {' or '.join(sorted(on))}."
        + (_judged(found) if len(found) > 1 else "")
        + _left_out(documents, found)
    )


def _judged(found: Sequence[Repeats]) -> str:
    """By which rule differences are judged, and why some are not."""
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.verdict.reason not in ("", "baseline", "not compared", "not significant"):
            reasons.setdefault(one.verdict.reason, []).append(one.name)
    unjudged = [f" Not judged, {reason}: {', '.join(names)}." for reason, names in reasons.items()]
    return f" Differences are between runs with equal seed, split and rounds. {RULE}{''.join(unjudged)}"


def _left_out(documents: Sequence[RunDocument], found: Sequence[Repeats]) -> str:
    """Which runs are in no mean, and why."""
    means = {id(run) for one in found for run in one.counted}
    named = [
        (run, name) for run, name in zip(documents, labels(documents), strict=True) if id(run) not in means
    ]
    ended = [name for run, name in named if run["diverged"]]
    short = [
        f"{name} (round {last_round(run)})" for run, name in named if run["best"] and not run["diverged"]
    ]
    words = {"Diverged": ended, "Shorter": short}
    return "".join(f" {why}, and counted in no mean: {'; '.join(who)}." for why, who in words.items() if who)
