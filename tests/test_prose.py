"""No text that a user reads decides anything: with a constant in its place, everything behaves the same."""

from __future__ import annotations

import ast
import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.errors import CorruptRunError, InvalidInputError, StoreError
from feddbe.methods import registry
from feddbe.reporting import build_figures, tables
from feddbe.reporting.figure import Curves
from feddbe.results import curves
from feddbe.results.seeds import group_seeds
from feddbe.results.statistics import Reason
from feddbe.runs import store
from feddbe.runs.experiment import resolve
from feddbe.studies import paper, reproduce, tune
from feddbe.training import backends
from tests.documents import document
from tests.federation import experiment, run_outcome
from tests.reporting.test_new_clients import new_clients_run
from tests.training.trainers.test_compiled import plan_of

SOURCES = Path(feddbe.__file__).parent
TEXT = "text"
CUTS = ("startswith", "endswith", "removeprefix", "removesuffix", "split", "partition", "rpartition")
NOT_OURS = {"<frozen importlib"}
"""Texts that Python writes."""


def sentences(node: ast.expr) -> Iterator[str]:
    """Texts of several words in a constant, or in a tuple, list or set of them."""
    for part in node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            words = part.value.split()
            if len(words) > 1 or (words and part.value != part.value.strip()):
                yield part.value


def decided_by(tree: ast.AST) -> Iterator[str]:
    """Sentences that are compared with something, looked for in something or cut out of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for operand in (node.left, *node.comparators):
                yield from sentences(operand)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CUTS:
            for argument in node.args:
                yield from (text for text in sentences(argument) if any(map(str.isalpha, text)))


def test_no_module_compares_sentences() -> None:
    paths = list(SOURCES.rglob("*.py"))
    found = {str(path): {*decided_by(ast.parse(path.read_text()))} - NOT_OURS for path in paths}
    assert {path: texts for path, texts in found.items() if texts} == {}
    assert list(decided_by(ast.parse('x.startswith("not "); x == "not here"; x in ("a", "b c")')))


def test_no_script_of_the_page_looks_into_names() -> None:
    for path in (SOURCES / "reporting/html/assets").glob("*.js"):
        assert '.includes("' not in path.read_text(), path


def test_a_check_is_judged_by_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_outcome(experiment("fedavg"), tmp_path)
    whole = store.verify_run(tmp_path)
    assert whole.is_intact
    monkeypatch.setattr(store.RunStore, "meta", lambda self, key: None)
    skipped = store.verify_run(tmp_path)
    for part, is_whole in ((store.PartStatus.SKIPPED, True), (store.PartStatus.DAMAGED, False)):
        parts = {**skipped.parts, "model": store.Part(part, TEXT)}
        checked = dataclasses.replace(skipped, parts=parts)
        assert (checked.is_intact, checked.texts(part)) == (is_whole, [TEXT])
    assert skipped.parts["model"].status is store.PartStatus.SKIPPED


def test_a_backend_may_refuse_in_any_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.all_backends()["compiled"], "refuses", lambda plan: TEXT)
    plan = plan_of("perceptron")
    assert backends.select_trainer(plan).name == "autograd"
    with pytest.raises(InvalidInputError, match=f"does not support this: {TEXT}; use auto"):
        backends.select_trainer(plan, "compiled")


def test_a_lock_is_known_by_its_code(tmp_path: Path) -> None:
    for code, locked in (
        (sqlite3.SQLITE_BUSY, True),
        (sqlite3.SQLITE_LOCKED, True),
        (sqlite3.SQLITE_FULL, False),
    ):
        error = sqlite3.OperationalError(TEXT)
        error.sqlite_errorcode = code
        with pytest.raises(StoreError) as raised, store.translate_errors(tmp_path):
            raise error
        assert not isinstance(raised.value, CorruptRunError)
        assert ("another process is writing" in str(raised.value)) is locked


@pytest.mark.parametrize(("others", "said"), [((), True), (("full",), False)])
def test_how_newcomers_adapt_is_added_unless_settings_say_it(
    others: tuple[str, ...], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`said`: whether the picture adds it to the line's name, whatever that is."""
    runs = [new_clients_run("fedavg", [0.1, 0.2], way) for way in ("newton", *others)]
    plain = curves.mean_curves

    def renamed(*given: Any) -> list[Any]:
        return [
            dataclasses.replace(curve, name=f"adapt{i}" if said else f"{TEXT}{i}")
            for i, curve in enumerate(plain(*given))
        ]

    monkeypatch.setattr(build_figures, "mean_curves", renamed)
    (panel,) = build_figures.adaptation_curves(runs).panels
    assert isinstance(panel, Curves)
    assert panel.series[0].name == ("adapt0, newton" if said else f"{TEXT}0")


def test_a_rule_in_words_is_not_searched() -> None:
    described = {p["name"]: p for p in registry.describe_methods(["apple"])[0]["parameters"]}
    assert described["rounds_l"]["search_rule"]
    assert not described["rounds_l"]["search"]
    options = {"data": "digits", "partition": "iid", "clients": 3, "model": "mlp"}
    experiment = resolve("apple", feddbe.config.options.Config(**options))  # type: ignore[arg-type]
    assert "rounds_l" not in tune.build_search_space(experiment)


def test_missing_data_are_found_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDDBE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    study = paper.load_study("har", trials=1).select(["FedAvg"])
    slot = next(slot for slot in study.table_cells if slot.run_specs)
    plans = reproduce.plan_studies([study], tmp_path)
    plans = {cell: dataclasses.replace(planned, skip_reason=TEXT) for cell, planned in plans.items()}
    assert reproduce._status(slot, plans) == "no data"
    plans = {cell: dataclasses.replace(planned, is_data_missing=False) for cell, planned in plans.items()}
    assert reproduce._status(slot, plans) == "refused"


def test_a_table_names_what_was_not_judged_by_its_reason() -> None:
    runs = [document(method, [0.1, 0.5], seed=0) for method in ("fedavg", "fedprox")]
    assert [one.verdict.reason for one in group_seeds(runs)] == [Reason.BASELINE, Reason.FEW_PAIRS]
    assert Reason.FEW_PAIRS in tables._judgment_note(group_seeds(runs))
    assert Reason.BASELINE not in tables._judgment_note(group_seeds(runs))


def test_a_curve_has_its_unit_apart_from_its_name() -> None:
    metrics = [
        curves.MetricSeries(name, name, name, unit, lambda run: [(1, 50.0)])
        for name, unit in ((TEXT, "%"), ("in %", ""))
    ]
    panels = build_figures.metric_curves([document("fedavg", [0.1, 0.5])], metrics).panels
    assert [panel.y_axis.unit for panel in panels if isinstance(panel, Curves)] == ["%", ""]
