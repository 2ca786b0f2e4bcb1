"""New clients after each epoch: the table and the picture show the numbers of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import feddbe
from feddbe.errors import InvalidInputError
from feddbe.reporting.build_figures import adaptation_curves
from feddbe.reporting.build_tables import new_clients_table
from feddbe.reporting.matplotlib_backend import render
from feddbe.results.document import RunDocument
from tests.documents import _accuracy, document
from tests.small_runs import make_dataset


def new_clients_run(method: str, curve: list[float], adaptation: str = "full", **config: Any) -> RunDocument:
    """Return a run whose new clients have the accuracy curve[e] after e epochs."""
    run = document(method, [0.1, 0.5], adaptation=adaptation, **config)
    before, *after = map(_accuracy, curve)
    run["new_clients"] = {
        "adaptation": adaptation, "round": 1, "clients": 2, "epochs": len(after),
        "before": before, "adapted": after[-1], "by_epoch": after,
    }  # fmt: skip
    return run


def print_table(documents: list[RunDocument], width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(new_clients_table(documents))
    return captured.get().splitlines()


def test_table_has_a_record_per_run_and_a_column_per_epoch() -> None:
    plain = new_clients_run("fedavg", [0.1, 0.25, 0.5])
    cheap = new_clients_run("fedavg+dbe", [0.2, 0.75], "prbm")
    lines = print_table([plain, document("fedprox", [0.1]), cheap])
    assert lines[0].split() == ["new", "clients,", "epoch", "0", "1", "2"]
    assert [line.split() for line in lines[2:4]] == [
        ["fedavg", "10.00", "25.00", "50.00"],
        ["fedavg+dbe", "20.00", "75.00", "-"],
    ]
    assert "Prbm: only p_i was trained." in " ".join(" ".join(lines).split())
    assert new_clients_table([document("fedprox", [0.1])]) is None


@pytest.mark.parametrize(("epochs", "last"), [(7, "7"), (10, "10"), (300, "300")])
def test_table_has_the_first_and_the_last_epoch_and_fits(epochs: int, last: str) -> None:
    run = new_clients_run("fedavg+dbe(kappa=5,mu=0.1)", [e / epochs for e in range(epochs + 1)])
    lines = print_table([run])
    head = lines[0].split()
    assert head[:5] == ["new", "clients,", "epoch", "0", "1"]
    assert (head[-1], lines[2].split()[-1]) == (last, "100.00")
    assert max(map(len, lines)) <= 80


def test_the_picture_has_the_mean_and_the_band_over_seeds() -> None:
    curves = ([0.1, 0.2, 0.4], [0.3, 0.4, 0.8])
    runs = [new_clients_run("fedavg", curve, seed=seed) for seed, curve in enumerate(curves)]
    figure = render(adaptation_curves([*runs, new_clients_run("fedavg+dbe", [0.5, 0.6, 0.3], "newton")]))
    axes = figure.axes[0]
    lines = [line for line in axes.lines if line.get_linestyle() != "None"]
    assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[0, 1, 2]] * 2
    assert np.asarray(lines[0].get_ydata()).tolist() == pytest.approx([20, 30, 60])
    assert len(axes.collections) == 2, "the band and its key"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "fedavg (2 seeds): 60.00 % after 2 epochs",
        "fedavg+dbe, newton: 30.00 % after 2 epochs",
        "band: lower to higher of 2 seeds",
    ]
    marks = [np.asarray(line.get_xdata()).tolist() for line in axes.lines if line not in lines]
    assert marks == [[2], [2]], "the last, not the best"


def test_runs_without_new_clients_raise_an_error() -> None:
    with pytest.raises(InvalidInputError, match="nothing to draw"):
        render(adaptation_curves([document("fedavg", [0.1])]))


def test_draw_writes_a_picture_of_new_clients(tmp_path: Path) -> None:
    options: dict[str, Any] = {"partition": "natural", "model": "mlp", "rounds": 1, "adapt_epochs": 2}
    run = feddbe.run("fedavg+dbe", data=make_dataset([40, 28]), new_clients=1, out=str(tmp_path), **options)
    assert run["new_clients"]
    assert len(run["new_clients"]["by_epoch"]) == 2
    drawn = feddbe.draw(tmp_path, [run])
    assert [path.name for path in drawn] == ["curves.png", "new_clients.png", "data.png"]
    assert drawn[1].stat().st_size > 10_000
