"""The page shows the numbers of the runs, with notes on omissions and the commands for them."""

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
from feddbe.cli.base import config_options
from feddbe.config.options import parse_options
from feddbe.errors import InvalidInputError
from feddbe.reporting.build_figures import spread_evenly, thin_rounds
from feddbe.reporting.build_tables import seeds_table
from feddbe.reporting.figure import Axis, Curves, Figure, Scatter, Series
from feddbe.reporting.html.blocks import ReportRun, ReportRuns, figure_block, read_runs, to_json_number
from feddbe.reporting.html.page import encode_json, page_content, render, write_report
from feddbe.reporting.html.sections import analysis_commands, rerun_command
from feddbe.reporting.matplotlib_backend import COLORS
from feddbe.runs.analysis import AnalysisRequest
from feddbe.runs.build_document import client_accuracies
from feddbe.runs.start import resolve_request
from feddbe.runs.store import RunStore
from tests.documents import document
from tests.html.conftest import SMALL


@pytest.fixture(scope="module")
def report_runs(runs: Path) -> ReportRuns:
    return read_runs(sorted(path.parent for path in runs.rglob("run.sqlite")))


@pytest.fixture(scope="module")
def content(report_runs: ReportRuns) -> dict[str, Any]:
    return page_content(report_runs)


def column(table: dict[str, Any], title: str) -> list[Any]:
    """Return the cells of a column."""
    index = table["columns"].index(title)
    return [row[index] for row in table["rows"]]


def blocks(content: dict[str, Any]) -> dict[str, Any]:
    return {block["id"]: block for section in content["sections"] for block in section["blocks"]}


def build_report_runs(*documents: Any, labels: Any = None) -> ReportRuns:
    environment: dict[str, Any] = {"begun": "", "versions": {}, "machine": "", "git_commit": None}
    settings = {"rounds": 3, "patience": None, "partition": "iid"}
    for index, run in enumerate(documents):
        run["config"] = settings | run["config"]
        run["folder"] = f"run{index}"
    return ReportRuns.from_runs([ReportRun(run, labels, environment) for run in documents])


def test_sections_of_complete_runs(content: dict[str, Any]) -> None:
    assert [section["id"] for section in content["sections"]] == [
        "summary", "curves", "clients", "fairness", "new_clients", "data", "discrepancy", "tsne",
        "probe-all", "mdl-quick", "overhead", "configuration", "versions",
    ]  # fmt: skip
    assert all(section["blocks"] for section in content["sections"])
    assert content["palette"]["lines"] == list(COLORS)


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=1, **SMALL)
    ids = {section["id"] for section in page_content(read_runs([tmp_path / "run"]))["sections"]}
    assert not ids & {"new_clients", "mdl", "discrepancy", "tsne"}
    assert "seeds" not in blocks(page_content(read_runs([tmp_path / "run"])))


class StopAfter(Callback):
    """Callback that raises KeyboardInterrupt after a number of rounds; -1: before the start."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        if self.after < 0:
            raise KeyboardInterrupt

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if done >= self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("after", "progress"), [(-1, "0 of 3"), (0, "0 of 3"), (1, "1 of 3")])
def test_an_interrupted_run_is_shown(after: int, progress: str, tmp_path: Path) -> None:
    """The run may have no evaluated round, or no round."""
    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg+dbe", out=str(tmp_path / "run"), rounds=3, callback=StopAfter(after), **SMALL)
    content = page_content(read_runs([tmp_path / "run"]))
    assert content["about"] == "1 run, 1 not finished"
    table = blocks(content)["runs"]
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["rounds"]["text"] == progress
    assert row["best weighted"]["text"] == ("-" if after < 1 else row["last weighted"]["text"])
    assert ("heat" in blocks(content)) == (after == 1)
    encode_json(content)


def test_caption_distinguishes_moments(tmp_path: Path) -> None:
    for method in ("fedavg", "perfedavg"):
        feddbe.run(method, out=str(tmp_path / method), rounds=1, **SMALL)
    caption = blocks(page_content(read_runs([tmp_path / "fedavg", tmp_path / "perfedavg"])))["learning"][
        "caption"
    ]
    assert "(before local training: fedavg; after adapting to the client: perfedavg)" in caption


def test_numbers_are_those_of_the_documents(content: dict[str, Any], report_runs: ReportRuns) -> None:
    table = blocks(content)["runs"]
    best = table["columns"].index("best weighted")
    for row, run in zip(table["rows"], report_runs.documents, strict=True):
        assert run["best"] is not None
        assert run["best"]["accuracy"] is not None
        assert row[best]["value"] == pytest.approx(run["best"]["accuracy"]["weighted"], abs=1e-4)
        assert row[best]["text"] == f"{100 * run['best']['accuracy']['weighted']:.2f}"
    heat = blocks(content)["heat"]["panels"][0]
    result = report_runs.documents[0]["rounds"][2]
    accuracies = client_accuracies(report_runs.runs[0].folder, result)
    index = heat["columns"].index("2")
    drawn = {int(client): row[index] for client, row in zip(heat["rows"], heat["values"], strict=True)}
    assert drawn == {client: round(100 * value, 1) for client, value in accuracies.items()}
    assert blocks(content)["labels"]["panels"][0]["counts"] == report_runs.runs[0].labels


def test_seeds_are_one_curve_with_a_band(content: dict[str, Any], report_runs: ReportRuns) -> None:
    panel = blocks(content)["learning"]["panels"][0]
    first, _ = panel["series"]
    assert panel["band"] == "band: lower to higher of 2 seeds"
    curves = [
        [result["accuracy"]["weighted"] for result in run["rounds"] if result["accuracy"]]
        for run in report_runs.documents[::2]
    ]
    assert first["y"] == pytest.approx((100 * np.mean(curves, axis=0)).tolist(), abs=1e-3)
    assert first["low"] == pytest.approx((100 * np.min(curves, axis=0)).tolist(), abs=1e-3)
    seeds = blocks(content)["seeds"]
    assert [row[1]["value"] for row in seeds["rows"]] == [2, 2]
    assert column(seeds, "reason for no verdict") == ["baseline", "fewer than 3 pairs"]


def test_curves_have_common_points_on_the_page() -> None:
    """A curve without a point at a common x has no value there, nor have the edges of its band."""
    first = Series("a", 0, (0, 2), (1.0, 3.0), (0.5, 2.5), (1.5, 3.5))
    second = Series("b", 1, (1, 2), (5.00004, float("inf")))
    block = figure_block(
        Figure("x", "", (Curves("c", Axis("round"), Axis("loss"), (first, second)),), "caption")
    )
    (panel,) = block["panels"]
    assert panel["x"] == [0, 1, 2]
    assert [series["y"] for series in panel["series"]] == [[1.0, None, 3.0], [None, 5.0, None]]
    assert panel["series"][0]["low"] == [0.5, None, 2.5]
    assert panel["series"][1]["low"] is None
    assert panel["x_axis"] == {"label": "round", "unit": ""}
    assert (block["kind"], block["caption"]) == ("curves", "caption")
    assert "a from 1 to 3" in block["text"]


def test_points_are_in_a_square_on_the_page() -> None:
    panel = Scatter("p", (-1.0, 3.0), (0.0, 1.0), (0, 1), (5, 6))
    (content,) = figure_block(Figure("x", "", (panel,)))["panels"]
    assert (content["x"], content["y"]) == ([0, 1000], [375, 625])
    assert (content["labels"], content["clients"]) == ([0, 1], [5, 6])


def test_few_seeds_have_no_verdict() -> None:
    fedavg = [document("fedavg", [0.1, 0.5], seed=s) for s in (0, 1)]
    others = [document("fedavg+dbe", [0.1, 0.9], seed=1), document("ditto", [0.1, 0.9], seed=7)]
    table = blocks(build_overview(build_report_runs(*fedavg, *others)))["seeds"]
    reasons = dict(zip(column(table, "method"), column(table, "reason for no verdict"), strict=True))
    assert reasons == {
        "fedavg": "baseline",
        "fedavg+dbe": "fewer than 3 pairs",
        "ditto": "no seed and partition in common",
    }


def test_the_page_counts_the_seeds_that_the_terminal_counts() -> None:
    """Both exclude a diverged seed from the mean."""
    runs = [document("fedavg", [0.1, value], seed=seed) for seed, value in enumerate((0.5, 0.6, 0.3))]
    runs += [document("fedavg+dbe", [0.1, 0.7], seed=seed) for seed in range(3)]
    runs[2]["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    page = blocks(build_overview(build_report_runs(*runs)))["seeds"]
    terminal = seeds_table(runs).records
    counts = [cell["text"] for cell in column(page, "seeds")]
    assert counts == [str(record["counted"]) for record in terminal] == ["2 of 3", "3"]
    accuracies = [cell["text"] for cell in column(page, "accuracy")]
    assert accuracies == [record["accuracy"].format() for record in terminal]
    assert accuracies[0] == "55.00 ± 63.53"


def test_the_first_experiment_is_the_baseline_on_the_page_too() -> None:
    runs = [document(method, [0.1, 0.5], seed=seed) for method in ("ditto", "fedavg") for seed in (0, 1)]
    page = blocks(build_overview(build_report_runs(*runs)))["seeds"]
    assert "difference to ditto" in page["columns"]
    assert column(page, "reason for no verdict") == ["baseline", "fewer than 3 pairs"]


def build_overview(runs: ReportRuns) -> dict[str, Any]:
    """Return the sections that do not read files of runs."""
    from feddbe.reporting.html.sections import learning_section, summary_section

    return {"sections": [*summary_section(runs), *learning_section(runs)]}


def test_a_copy_of_a_run_is_not_another_seed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "s0" / "fedavg", tmp_path / "copy")
    content = page_content(read_runs([runs / "s0" / "fedavg", tmp_path / "copy"]))
    lines = blocks(content)["learning"]["panels"][0]["series"]
    assert [line["low"] for line in lines] == [None, None]
    assert len({line["name"] for line in lines}) == 2


def test_many_rounds_are_thinned_with_a_note() -> None:
    curve = [0.1 + 0.8 * t / 2500 for t in range(2001)]
    curve[777] = 0.99
    block = blocks(build_overview(build_report_runs(document("fedavg", curve))))["learning"]
    (panel, *_) = block["panels"]
    assert len(panel["x"]) < 410
    assert {0, 777, 2000} <= set(panel["x"])
    (line,) = panel["series"]
    assert line["mark"] == {"x": 777, "y": 99, "text": "best 99.00 % in round 777"}
    assert panel["note"] == "Every 6th round is drawn, with the best and the last."


@pytest.mark.parametrize("count", [1, 7, 120, 121, 2000])
def test_thinning_keeps_the_ends(count: int) -> None:
    items = list(range(count))
    kept, step = thin_rounds(items, 120, [count // 2])
    assert {0, count // 2, count - 1} <= set(kept)
    assert len(kept) <= 122
    assert (step > 1) == (count > 120)
    chosen = spread_evenly(items, 120)
    assert chosen[0] == 0
    assert chosen[-1] == count - 1
    assert len(set(chosen)) == min(count, 120)


def test_many_clients_are_thinned_with_a_note(tmp_path: Path) -> None:
    x = np.random.RandomState(0).randn(1200, 4).astype(np.float32)
    np.savez(tmp_path / "many.npz", x=x, y=np.arange(1200) % 2)
    small = SMALL | {"clients": 300, "partition": "iid", "data": str(tmp_path / "many.npz")}
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=1, participation=0.05, **small)
    content = blocks(page_content(read_runs([tmp_path / "run"])))
    heat, bubbles = content["heat"]["panels"][0], content["labels"]["panels"][0]
    assert len(heat["rows"]) == len(bubbles["columns"]) == 100
    assert all("100 of 300 clients" in panel["note"] for panel in (heat, bubbles))
    assert heat["rows"][-1] == bubbles["columns"][-1] == "299"


def test_heat_map_notes_clients_that_were_not_evaluated(tmp_path: Path) -> None:
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=2, participation=0.5, eval="cohort", **SMALL)
    (heat,) = blocks(page_content(read_runs([tmp_path / "run"])))["heat"]["panels"]
    assert len(heat["rows"]) == 2
    assert heat["note"] == "the 2 clients that were evaluated in the compared round"


def test_numbers_that_are_not_finite_become_null() -> None:
    assert [to_json_number(value) for value in (float("nan"), float("inf"), None, 1.23456)] == [
        None,
        None,
        None,
        1.2346,
    ]
    with pytest.raises(ValueError, match="JSON"):
        encode_json({"x": float("nan")})


# Commands


def parse_command(line: str) -> Any:
    """Return the request that the command line builds from a `feddbe run` command."""
    words = shlex.split(line)
    assert words[:2] == ["feddbe", "run"]
    import click

    command = click.Command("run", params=[click.Argument(["methods"], nargs=-1), *config_options()])
    values = command.make_context("run", words[2:]).params
    return parse_options(list(values.pop("methods")), values)


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
def test_rerun_command_has_the_same_config_hash(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The command builds an experiment with the same configuration."""
    feddbe.run(method, out=str(tmp_path / "run"), rounds=0, **(SMALL | options))
    (run,) = read_runs([tmp_path / "run"]).runs
    line = rerun_command(run)
    assert line is not None
    (experiment,) = resolve_request(parse_command(line), single=True)
    assert experiment.config_hash == run.document["config_hash"]
    assert experiment.options.rounds == 0


def test_python_objects_have_no_rerun_command(tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    feddbe.run("fedavg", out=str(tmp_path / "run"), rounds=0, **(SMALL | {"model": net}))
    assert rerun_command(read_runs([tmp_path / "run"]).runs[0]) is None


def test_analysis_command_requests_the_same_analyses(runs: Path, report_runs: ReportRuns) -> None:
    """All requested analyses are in the store already."""
    from feddbe.metrics.representations import registry
    from feddbe.runs.analysis import _missing_items

    run = report_runs.documents[0]
    for block in analysis_commands((run, analysis) for analysis in run["analyses"]):
        words = shlex.split(block["command"])
        assert words[:2] == ["feddbe", "analyze"]
        options = dict(zip(words[3:-1:2], words[4::2], strict=False))
        request = AnalysisRequest(
            tuple(registry.parse_analyses(options["--analyses"])), options["--round"],
            tuple(options["--moment"].split(",")), tuple(options["--layers"].split(",")),
            int(options["--samples"]), "--quick" in words, "--per-client" in words,
            options["--on"],
        )  # fmt: skip
        store = RunStore.open(Path(words[2]))
        assert _missing_items(store, request) == []
        store.close()


# The file


def test_file_is_self_contained_and_reproducible(report_runs: ReportRuns, tmp_path: Path) -> None:
    folders = [run.folder for run in report_runs.runs]
    first = write_report(folders, tmp_path / "a.html").read_bytes()
    assert first == feddbe.report(folders, tmp_path / "b.html").read_bytes()
    text = first.decode()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "connect-src 'none'" in text
    assert "unsafe" not in text.split("</head>")[0].split("<style>")[0]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".html"] == []


def test_no_text_ends_its_script_element() -> None:
    text = render({"title": "</title><script>", "x": "</script><!--<script>\u2028"})
    head, body = text.split('id="content">')
    assert "&lt;/title&gt;&lt;script&gt;" in head
    inside = body.split("</script>")[0]
    assert "<" not in inside
    assert json.loads(inside)["x"] == "</script><!--<script>\u2028"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: write_report([], folder / "x.html"), "needs at least one run"),
        (lambda folder: write_report([folder], folder / "x.png"), "unknown kind of report '.png'"),
        (lambda folder: write_report([folder], folder / "x.html"), "contains no run"),
    ],
)
def test_errors_are_one_line(call: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidInputError, feddbe.StoreError), match=re.escape(words)):
        call(tmp_path)


def test_a_missing_output_folder_is_an_error(report_runs: ReportRuns, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot write the report"):
        write_report([report_runs.runs[0].folder], tmp_path / "nowhere" / "x.html")
