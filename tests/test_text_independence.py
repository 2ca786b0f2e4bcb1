"""Behavior does not depend on texts for users: code compares codes and enums, never sentences."""

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
from feddbe.reporting import build_figures, build_tables
from feddbe.reporting.figure import Curves
from feddbe.results import curves
from feddbe.results.repetitions import group_seeds
from feddbe.results.statistics import Reason
from feddbe.runs import store
from feddbe.runs.experiment import resolve
from feddbe.studies import paper, reproduce, tune
from feddbe.training import backends
from tests.documents import document
from tests.reporting.test_new_clients import new_clients_run
from tests.small_runs import experiment, run_outcome
from tests.training.compiled.test_backend import make_plan

SOURCES = Path(feddbe.__file__).parent
TEXT = "text"
TEXT_METHODS = ("startswith", "endswith", "removeprefix", "removesuffix", "split", "partition", "rpartition")
PYTHON_TEXTS = {"<frozen importlib"}
"""Texts that Python writes."""


def find_sentences(node: ast.expr) -> Iterator[str]:
    """Yield the texts with several words in a constant, tuple, list or set."""
    for part in node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            words = part.value.split()
            if len(words) > 1 or (words and part.value != part.value.strip()):
                yield part.value


def find_compared_sentences(tree: ast.AST) -> Iterator[str]:
    """Yield the sentences that code compares, searches or removes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for operand in (node.left, *node.comparators):
                yield from find_sentences(operand)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in TEXT_METHODS
        ):
            for argument in node.args:
                yield from (text for text in find_sentences(argument) if any(map(str.isalpha, text)))


def test_no_module_compares_sentences() -> None:
    sentences = {}
    for path in SOURCES.rglob("*.py"):
        texts = {*find_compared_sentences(ast.parse(path.read_text()))} - PYTHON_TEXTS
        if texts:
            sentences[str(path)] = texts
    assert sentences == {}
    assert list(
        find_compared_sentences(ast.parse('x.startswith("not "); x == "not here"; x in ("a", "b c")'))
    )


def test_scripts_of_the_report_do_not_search_in_names() -> None:
    for path in (SOURCES / "reporting/html/assets").glob("*.js"):
        assert '.includes("' not in path.read_text(), path


def test_verification_is_judged_by_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_outcome(experiment("fedavg"), tmp_path)
    assert store.verify_run(tmp_path).is_intact
    monkeypatch.setattr(store.RunStore, "meta", lambda self, key: None)
    skipped = store.verify_run(tmp_path)
    for status, is_intact in ((store.PartStatus.SKIPPED, True), (store.PartStatus.DAMAGED, False)):
        parts = {**skipped.parts, "model": store.Part(status, TEXT)}
        result = dataclasses.replace(skipped, parts=parts)
        assert (result.is_intact, result.texts(status)) == (is_intact, [TEXT])
    assert skipped.parts["model"].status is store.PartStatus.SKIPPED


def test_backend_may_reject_a_plan_with_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.all_backends()["compiled"], "unsupported_reason", lambda plan: TEXT)
    plan = make_plan("perceptron")
    assert backends.select_backend(plan).name == "autograd"
    with pytest.raises(InvalidInputError, match=f"does not support this: {TEXT}; use auto"):
        backends.select_backend(plan, "compiled")


def test_lock_is_recognized_by_its_error_code(tmp_path: Path) -> None:
    for code, is_locked in (
        (sqlite3.SQLITE_BUSY, True),
        (sqlite3.SQLITE_LOCKED, True),
        (sqlite3.SQLITE_FULL, False),
    ):
        error = sqlite3.OperationalError(TEXT)
        error.sqlite_errorcode = code
        with pytest.raises(StoreError) as raised, store.translate_errors(tmp_path):
            raise error
        assert not isinstance(raised.value, CorruptRunError)
        assert ("another process is writing" in str(raised.value)) is is_locked


@pytest.mark.parametrize(("other_adaptations", "is_added"), [((), True), (("full",), False)])
def test_adaptation_is_added_to_the_name_unless_runs_differ_in_it(
    other_adaptations: tuple[str, ...], is_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the curve itself does not matter."""
    runs = [
        new_clients_run("fedavg", [0.1, 0.2], adaptation) for adaptation in ("newton", *other_adaptations)
    ]
    mean_curves = curves.mean_curves

    def rename_curves(*arguments: Any) -> list[Any]:
        prefix = "adapt" if is_added else TEXT
        return [
            dataclasses.replace(curve, name=f"{prefix}{index}")
            for index, curve in enumerate(mean_curves(*arguments))
        ]

    monkeypatch.setattr(build_figures, "mean_curves", rename_curves)
    (panel,) = build_figures.adaptation_curves(runs).panels
    assert isinstance(panel, Curves)
    assert panel.series[0].name == ("adapt0, newton" if is_added else f"{TEXT}0")


def test_search_rule_in_words_is_not_searched() -> None:
    (description,) = registry.describe_methods(["apple"])
    parameters = {parameter["name"]: parameter for parameter in description["parameters"]}
    assert parameters["rounds_l"]["search_rule"]
    assert not parameters["rounds_l"]["search"]
    options = {"data": "digits", "partition": "iid", "clients": 3, "model": "mlp"}
    experiment = resolve("apple", feddbe.config.options.Config(**options))  # type: ignore[arg-type]
    assert "rounds_l" not in tune.build_search_space(experiment)


def test_state_of_a_cell_does_not_depend_on_the_skip_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEDDBE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    study = paper.load_study("har", trials=1).select(["FedAvg"])
    cell = next(cell for cell in study.table_cells if cell.run_specs)
    plans = reproduce.plan_studies([study], tmp_path)
    plans = {spec: dataclasses.replace(planned, skip_reason=TEXT) for spec, planned in plans.items()}
    assert reproduce._status(cell, plans) == "no data"
    plans = {spec: dataclasses.replace(planned, is_data_missing=False) for spec, planned in plans.items()}
    assert reproduce._status(cell, plans) == "refused"


def test_table_explains_missing_verdicts_by_their_reason() -> None:
    runs = [document(method, [0.1, 0.5], seed=0) for method in ("fedavg", "fedprox")]
    groups = group_seeds(runs)
    assert [group.verdict.reason for group in groups] == [Reason.BASELINE, Reason.FEW_PAIRS]
    assert Reason.FEW_PAIRS in build_tables._judgment_note(groups)
    assert Reason.BASELINE not in build_tables._judgment_note(groups)


def test_unit_of_a_curve_is_separate_from_its_name() -> None:
    series = [
        curves.MetricSeries(name, name, name, unit, lambda run: [(1, 50.0)])
        for name, unit in ((TEXT, "%"), ("in %", ""))
    ]
    panels = build_figures.metric_curves([document("fedavg", [0.1, 0.5])], series).panels
    assert [panel.y_axis.unit for panel in panels if isinstance(panel, Curves)] == ["%", ""]
