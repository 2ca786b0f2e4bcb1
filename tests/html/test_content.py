"""What is on the page is what is in the runs' files, honestly thinned out, with the commands behind it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddbe
from feddbe.callbacks.base import Callback
from feddbe.cli.command import config_options
from feddbe.config.options import parse_options as options_read
from feddbe.errors import InvalidInputError
from feddbe.reporting.build_figures import spread_evenly, thin
from feddbe.reporting.figure import Axis, Curves, Figure, Scatter, Series
from feddbe.reporting.html.blocks import ReportRun, ReportRuns, figure_block, number, read_runs
from feddbe.reporting.html.overview import measuring, running
from feddbe.reporting.html.page import as_json, page_content, render, write_report
from feddbe.reporting.matplotlib_backend import COLORS
from feddbe.reporting.tables import seeds_table
from feddbe.runs.analysis import AnalysisRequest
from feddbe.runs.execution import resolve_request
from feddbe.runs.store import RunStore
from feddbe.runs.summary import client_accuracies
from tests.documents import document
from tests.html.conftest import SMALL


@pytest.fixture(scope="module")
def sources(runs: Path) -> ReportRuns:
    return read_runs(sorted(path.parent for path in runs.rglob("run.sqlite")))


@pytest.fixture(scope="module")
def found(runs: ReportRuns) -> dict[str, Any]:
    return page_content(runs)


def blocks(found: dict[str, Any]) -> dict[str, Any]:
    return {block["id"]: block for section in found["sections"] for block in section["blocks"]}


def made_up(*documents: Any, labels: Any = None) -> ReportRuns:
    about: dict[str, Any] = {"begun": "", "versions": {}, "machine": "", "git_commit": None}
    settings = {"rounds": 3, "patience": None, "partition": "iid"}
    for index, one in enumerate(documents):
        one["config"] = settings | one["config"]
        one["folder"] = f"run{index}"
    return ReportRuns.from_runs([ReportRun(one, labels, about) for one in documents])


def test_sections_are_there_where_there_is_something(found: dict[str, Any]) -> None:
    assert [section["id"] for section in found["sections"]] == [
        "summary", "curves", "clients", "fairness", "new_clients", "data", "discrepancy", "tsne",
        "probe", "mdl-quick", "overhead", "configuration", "versions",
    ]  # fmt: skip
    assert all(section["blocks"] for section in found["sections"])
    assert found["palette"]["lines"] == list(COLORS)


def test_sections_without_data_are_not_there(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=1, **SMALL)
    ids = {section["id"] for section in page_content(read_runs([tmp_path / "run"]))["sections"]}
    assert not ids & {"new_clients", "mdl", "discrepancy", "tsne"}
    assert "seeds" not in blocks(page_content(read_runs([tmp_path / "run"])))


class Stops(Callback):
    """Ctrl-C after so many rounds; -1: before anything was done."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        if self.after < 0:
            raise KeyboardInterrupt

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if done >= self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("after", "far"), [(-1, "0 of 3"), (0, "0 of 3"), (1, "1 of 3")])
def test_a_run_that_was_stopped(after: int, far: str, tmp_path: Path) -> None:
    """Also one of which nothing was evaluated, or nothing done."""
    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg+dbe", out=str(tmp_path / "run"), rounds=3, callback=Stops(after), **SMALL)
    shown = page_content(read_runs([tmp_path / "run"]))
    assert shown["about"] == "1 run, 1 not finished"
    table = blocks(shown)["runs"]
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["rounds"]["text"] == far
    assert row["best weighted"]["text"] == ("-" if after < 1 else row["last weighted"]["text"])
    assert ("heat" in blocks(shown)) == (after == 1)
    as_json(shown)


def test_moments_are_told_apart(tmp_path: Path) -> None:
    for method in ("fedavg", "perfedavg"):
        feddbe.run(method, out=str(tmp_path / method), rounds=1, **SMALL)
    caption = blocks(page_content(read_runs([tmp_path / "fedavg", tmp_path / "perfedavg"])))["learning"][
        "caption"
    ]
    assert "(before local training: fedavg; after adapting to the client: perfedavg)" in caption


def test_numbers_are_those_of_the_documents(found: dict[str, Any], runs: ReportRuns) -> None:
    table = blocks(found)["runs"]
    best = table["columns"].index("best weighted")
    for row, one in zip(table["rows"], runs.documents, strict=True):
        assert one["best"] is not None
        assert one["best"]["accuracy"] is not None
        assert row[best]["value"] == pytest.approx(one["best"]["accuracy"]["weighted"], abs=1e-4)
        assert row[best]["text"] == f"{100 * one['best']['accuracy']['weighted']:.2f}"
    heat = blocks(found)["heat"]["panels"][0]
    entry = runs.documents[0]["rounds"][2]
    there = client_accuracies(runs.runs[0].folder, entry)
    column = heat["columns"].index("2")
    shown = {int(client): row[column] for client, row in zip(heat["rows"], heat["values"], strict=True)}
    assert shown == {client: round(100 * value, 1) for client, value in there.items()}
    assert blocks(found)["labels"]["panels"][0]["counts"] == runs.runs[0].labels


def test_seeds_are_one_line_with_a_band(found: dict[str, Any], runs: ReportRuns) -> None:
    panel = blocks(found)["learning"]["panels"][0]
    first, _ = panel["series"]
    assert panel["band"] == "band: lower to higher of two seeds"
    curves = [[e["accuracy"]["weighted"] for e in d["rounds"] if e["accuracy"]] for d in runs.documents[::2]]
    assert first["y"] == pytest.approx((100 * np.mean(curves, axis=0)).tolist(), abs=1e-3)
    assert first["low"] == pytest.approx((100 * np.min(curves, axis=0)).tolist(), abs=1e-3)
    seeds = blocks(found)["seeds"]
    assert [row[1]["value"] for row in seeds["rows"]] == [2, 2]
    assert seeds["rows"][0][-1] == "baseline"
    assert seeds["rows"][1][-1] == "fewer than 3 seeds"


def test_curves_have_common_points_on_the_page() -> None:
    """A curve has no value where it has no point; an edge of a band is there only where it has one."""
    one = Series("a", 0, (0, 2), (1.0, 3.0), (0.5, 2.5), (1.5, 3.5))
    other = Series("b", 1, (1, 2), (5.00004, float("inf")))
    block = figure_block(
        Figure("x", "", (Curves("c", Axis("round"), Axis("loss"), (one, other)),), "caption")
    )
    (panel,) = block["panels"]
    assert panel["x"] == [0, 1, 2]
    assert [series["y"] for series in panel["series"]] == [[1.0, None, 3.0], [None, 5.0, None]]
    assert panel["series"][0]["low"] == [0.5, None, 2.5]
    assert panel["series"][1]["low"] is None
    assert panel["x_axis"] == {"label": "round", "unit": ""}
    assert (block["kind"], block["caption"]) == ("curves", "caption")
    assert "a goes from 1 to 3" in block["text"]


def test_points_are_in_a_square_on_the_page() -> None:
    panel = Scatter("p", (-1.0, 3.0), (0.0, 1.0), (0, 1), (5, 6))
    (content,) = figure_block(Figure("x", "", (panel,)))["panels"]
    assert (content["x"], content["y"]) == ([0, 1000], [375, 625])
    assert (content["labels"], content["clients"]) == ([0, 1], [5, 6])


def test_one_seed_shows_no_improvement() -> None:
    one = [document("fedavg", [0.1, 0.5], seed=s) for s in (0, 1)]
    other = [document("fedavg+dbe", [0.1, 0.9], seed=1), document("ditto", [0.1, 0.9], seed=7)]
    rows = blocks(content_of(made_up(*one, *other)))["seeds"]["rows"]
    assert {row[0]: row[-1] for row in rows} == {
        "fedavg": "baseline",
        "fedavg+dbe": "fewer than 3 seeds",
        "ditto": "no seed in common",
    }


def test_the_page_counts_the_seeds_that_the_terminal_counts() -> None:
    """A seed that diverged is in no mean, here and there."""
    runs = [document("fedavg", [0.1, value], seed=seed) for seed, value in enumerate((0.5, 0.6, 0.3))]
    runs += [document("fedavg+dbe", [0.1, 0.7], seed=seed) for seed in range(3)]
    runs[2]["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    page = blocks(content_of(made_up(*runs)))["seeds"]["rows"]
    terminal = seeds_table(runs).records
    assert [row[1]["text"] for row in page] == [str(row["counted"]) for row in terminal] == ["2 of 3", "3"]
    assert [row[2]["text"] for row in page] == [row["best"].shown() for row in terminal]
    assert page[0][2]["text"] == "55.00 ± 63.53"


def test_the_first_experiment_is_the_baseline_on_the_page_too() -> None:
    runs = [document(method, [0.1, 0.5], seed=seed) for method in ("ditto", "fedavg") for seed in (0, 1)]
    page = blocks(content_of(made_up(*runs)))["seeds"]
    assert "best less ditto" in page["columns"]
    assert [row[-1] for row in page["rows"]] == ["baseline", "fewer than 3 seeds"]


def content_of(runs: ReportRuns) -> dict[str, Any]:
    """Only the first sections: there are no files."""
    from feddbe.reporting.html.overview import learning_section, summary_section

    return {"sections": [*summary_section(runs), *learning_section(runs)]}


def test_a_copy_of_a_run_is_not_another_seed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "s0" / "fedavg", tmp_path / "copy")
    shown = page_content(read_runs([runs / "s0" / "fedavg", tmp_path / "copy"]))
    lines = blocks(shown)["learning"]["panels"][0]["series"]
    assert [line["low"] for line in lines] == [None, None]
    assert len({line["name"] for line in lines}) == 2


def test_many_rounds_are_thinned_and_it_is_said() -> None:
    curve = [0.1 + 0.8 * t / 2500 for t in range(2001)]
    curve[777] = 0.99
    block = blocks(content_of(made_up(document("fedavg", curve))))["learning"]
    (panel, *_) = block["panels"]
    assert len(panel["x"]) < 410
    assert {0, 777, 2000} <= set(panel["x"])
    (line,) = panel["series"]
    assert line["mark"] == {"x": 777, "y": 99, "text": "best 99.00 % in round 777"}
    assert panel["note"] == "Every 6th round is drawn, with the best and the last."


@pytest.mark.parametrize("count", [1, 7, 120, 121, 2000])
def test_thinning_keeps_the_ends(count: int) -> None:
    items = list(range(count))
    kept, step = thin(items, 120, [count // 2])
    assert {0, count // 2, count - 1} <= set(kept)
    assert len(kept) <= 122
    assert (step > 1) == (count > 120)
    chosen = spread_evenly(items, 120)
    assert chosen[0] == 0
    assert chosen[-1] == count - 1
    assert len(set(chosen)) == min(count, 120)


def test_many_clients_are_a_sample_and_it_is_said(tmp_path: Path) -> None:
    x = np.random.RandomState(0).randn(1200, 4).astype(np.float32)
    np.savez(tmp_path / "many.npz", x=x, y=np.arange(1200) % 2)
    small = SMALL | {"clients": 300, "partition": "iid", "data": str(tmp_path / "many.npz")}
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=1, participation=0.05, **small)
    shown = blocks(page_content(read_runs([tmp_path / "run"])))
    heat, bubbles = shown["heat"]["panels"][0], shown["labels"]["panels"][0]
    assert len(heat["rows"]) == len(bubbles["columns"]) == 100
    assert all("100 of 300 clients" in panel["note"] for panel in (heat, bubbles))
    assert heat["rows"][-1] == bubbles["columns"][-1] == "299"


def test_clients_that_are_not_in_the_heat_map_are_told(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=2, participation=0.5, eval="cohort", **SMALL)
    (heat,) = blocks(page_content(read_runs([tmp_path / "run"])))["heat"]["panels"]
    assert len(heat["rows"]) == 2
    assert heat["note"] == "the 2 clients that were evaluated in the best round"


def test_what_is_not_finite_becomes_nothing() -> None:
    assert [number(value) for value in (float("nan"), float("inf"), None, 1.23456)] == [
        None,
        None,
        None,
        1.2346,
    ]
    with pytest.raises(ValueError, match="JSON"):
        as_json({"x": float("nan")})


# Commands


def parsed(line: str) -> Any:
    """The options that a line gives to `feddbe run`, read as the command line reads them."""
    words = shlex.split(line)
    assert words[:2] == ["feddbe", "run"]
    import click

    command = click.Command("run", params=[click.Argument(["methods"], nargs=-1), *config_options()])
    values = command.make_context("run", words[2:]).params
    return options_read(list(values.pop("methods")), values)


OTHER: list[dict[str, Any]] = [
    {},
    {
        "lr": 0.123456789,
        "eval_after": False,
        "batch_size": 7,
        "validation": 0.25,
        "participation": 0.5,
        "seed": 3,
    },
    {"variant": "official", "eval": "sample:2", "cut": "fc1", "quiet": True},
]


@pytest.mark.parametrize("method", ["fedavg+dbe(kappa=0.5)", "scaffold", "pfedme"])
@pytest.mark.parametrize("options", OTHER)
def test_the_command_runs_the_same_again(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Its configuration has the same hash."""
    feddbe.run(method, out=str(tmp_path / "run"), rounds=0, **(SMALL | options))
    (run,) = read_runs([tmp_path / "run"]).runs
    line = running(run)
    assert line is not None
    (again,) = resolve_request(parsed(line), single=True)
    assert again.config_hash == run.document["config_hash"]
    assert again.options.rounds == 0


def test_python_objects_have_no_command(tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=0, **(SMALL | {"model": net}))
    assert running(read_runs([tmp_path / "run"]).runs[0]) is None


def test_the_command_measures_the_same_again(runs: Path, sources: ReportRuns) -> None:
    """All that it asks for is there already."""
    from feddbe.metrics.representations import registry
    from feddbe.runs.analysis import _missing_items

    measured = sources.documents[0]
    for line in measuring((measured, one) for one in measured["analyses"]):
        words = shlex.split(line["line"])
        given = dict(zip(words[3:-1:2], words[4::2], strict=False))
        question = AnalysisRequest(
            tuple(registry.parse_analyses(given["--analyses"])), given["--round"], tuple(given["--moment"].split(",")),
            tuple(given["--layers"].split(",")), int(given["--samples"]), "--quick" in words, "--per-client" in words,
        )  # fmt: skip
        store = RunStore.open(Path(words[2]))
        assert _missing_items(store, question) == []
        store.close()


# The file


def test_the_file_needs_nothing_else_and_is_the_same_each_time(runs: ReportRuns, tmp_path: Path) -> None:
    folders = [run.folder for run in runs.runs]
    first = write_report(folders, tmp_path / "a.html").read_bytes()
    assert first == feddbe.report(folders, tmp_path / "b.html").read_bytes()
    text = first.decode()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "connect-src 'none'" in text
    assert "unsafe" not in text.split("</head>")[0].split("<style>")[0]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".html"] == []


def test_no_text_ends_the_script_it_stands_in() -> None:
    text = render({"title": "</title><script>", "x": "</script><!--<script>\u2028"})
    head, body = text.split('id="content">')
    assert "&lt;/title&gt;&lt;script&gt;" in head
    inside = body.split("</script>")[0]
    assert "<" not in inside
    assert json.loads(inside)["x"] == "</script><!--<script>\u2028"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: write_report([], folder / "x.html"), "no run"),
        (lambda folder: write_report([folder], folder / "x.png"), "unknown kind of report '.png'"),
        (lambda folder: write_report([folder], folder / "x.html"), "contains no run"),
    ],
)
def test_mistakes_are_one_line(call: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidInputError, feddbe.StoreError), match=re.escape(words)):
        call(tmp_path)


def test_a_folder_that_is_not_there(runs: ReportRuns, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot write the report"):
        write_report([runs.runs[0].folder], tmp_path / "nowhere" / "x.html")
