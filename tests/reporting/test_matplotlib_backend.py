"""Pictures show the numbers of a figure, and a failed write leaves the old file unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from PIL import Image

from feddbe.errors import InvalidInputError
from feddbe.reporting import figure as figures
from feddbe.reporting.build_figures import client_distribution, client_heat_map, learning_curves
from feddbe.reporting.matplotlib_backend import draw, render
from feddbe.results.document import RunDocument
from tests.documents import document

RISING = [0.1, 0.5, 0.9, 0.8]


def render_curves(documents: Sequence[RunDocument]) -> Figure:
    return render(learning_curves(documents))


def find_marked_points(axes: Axes) -> list[list[float]]:
    """Return the marked points, without crosses."""
    single = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_marker() != "X"]
    return [[round(value, 6) for value in np.asarray(line.get_xydata())[0]] for line in single]


def find_lines(figure: Figure) -> tuple[Axes, list[Line2D], list[Line2D]]:
    """Return the axes, the curves and the reference lines (dashed and gray)."""
    axes = figure.axes[0]
    references = [
        line for line in axes.lines if line.get_linestyle() == "--" and line.get_color() == "#6b6b6b"
    ]
    lines = [line for line in axes.lines if line not in references and line.get_linestyle() != "None"]
    return axes, lines, references


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def to_floats(values: object) -> list[float]:
    return [float(value) for value in np.asarray(values).tolist()]


def test_a_line_per_run_in_percent_with_the_best_round_marked() -> None:
    figure = render_curves([document("fedavg", RISING), document("fedavg+dbe", [0.1, 0.6, 0.7, 0.95])])
    axes, lines, references = find_lines(figure)
    assert [to_floats(line.get_xdata()) for line in lines] == [[0, 1, 2, 3]] * 2
    assert to_floats(lines[0].get_ydata()) == pytest.approx([10, 50, 90, 80])
    assert find_marked_points(axes) == [[2, 90], [3, 95]]
    assert lines[0].get_color() != lines[1].get_color()
    assert lines[0].get_linestyle() != lines[1].get_linestyle()
    assert [to_floats(reference.get_ydata()) for reference in references] == [[20, 20]]
    assert legend_texts(figure) == [
        "fedavg: best 90.00 % in round 2",
        "fedavg+dbe: best 95.00 % in round 3",
        "majority class of each client: 20.00 %",
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy (%)")
    caption = "Model before local training, weighted by samples."
    assert figure.legends[0].get_title().get_text() == caption


def test_rounds_that_were_not_evaluated_are_skipped() -> None:
    _, (line,), _ = find_lines(render_curves([document("fedavg", [0.1, None, 0.9, None, 0.5])]))
    assert to_floats(line.get_xdata()) == [0, 2, 4]
    assert to_floats(line.get_ydata()) == pytest.approx([10, 90, 50])


def test_seeds_become_a_mean_and_a_band() -> None:
    low, high = document("fedavg", [0.1, 0.4], seed=0), document("fedavg", [0.3, 0.8], seed=1)
    figure = render_curves([low, high])
    axes, (line,), _ = find_lines(figure)
    assert to_floats(line.get_ydata()) == pytest.approx([20, 60])
    band = axes.collections[0]
    assert isinstance(band, FillBetweenPolyCollection)
    corners = {(x, round(y, 6)) for x, y in np.asarray(band.get_paths()[0].vertices).tolist()}
    assert corners == {(0, 10), (0, 30), (1, 40), (1, 80)}
    assert legend_texts(figure)[0] == "fedavg (2 seeds): 60.00 % in round 1"
    assert legend_texts(figure)[-1] == "band: lower to higher of 2 seeds"


def test_a_resumed_seed_stays_in_its_group() -> None:
    """Folder, engine and number of rounds do not make it another experiment."""
    seeds = [document("fedavg", RISING, seed=s, resume=s == 2, out=f"{s}", force=s == 1) for s in range(3)]
    figure = render_curves(seeds)
    assert legend_texts(figure)[0].startswith("fedavg (3 seeds): ")


def test_runs_that_are_not_one_experiment_are_not_averaged() -> None:
    """A run that stopped early would make the mean jump; another lr is another experiment."""
    early = render_curves([document("fedavg", RISING), document("fedavg", RISING[:2], seed=1)])
    assert [name.split(":")[0] for name in legend_texts(early)[:2]] == ["fedavg, seed 0", "fedavg, seed 1"]
    other = render_curves([document("fedavg", RISING, lr=0.1), document("fedavg", RISING, lr=0.5)])
    assert [name.split(":")[0] for name in legend_texts(other)[:2]] == ["fedavg, lr 0.1", "fedavg, lr 0.5"]


def test_caption_or_legend_names_the_moment() -> None:
    after = render_curves([document("fedfomo", RISING, moment="after")])
    assert "after local training" in after.legends[0].get_title().get_text()
    mixed = render_curves([document("fedavg", RISING), document("fedfomo", RISING, moment="after")])
    assert "before local training" not in mixed.legends[0].get_title().get_text()
    assert [name.split(":")[0] for name in legend_texts(mixed)[:2]] == [
        "fedavg, before local training",
        "fedfomo, after local training",
    ]


@pytest.mark.parametrize("methods", [1, 3, 13])
@pytest.mark.parametrize("name", ["m", "fedprox+dbe(kappa=50,mu=1)", "a name of many words " * 6])
def test_the_legend_covers_no_line_and_everything_is_inside(methods: int, name: str) -> None:
    figure = render_curves([document(f"{name}{i}", RISING) for i in range(methods)])
    figure.draw_without_rendering()
    axes, (legend,) = figure.axes[0], figure.legends
    below = axes.get_tightbbox()
    assert below is not None
    box, paper = legend.get_window_extent(), figure.bbox
    assert box.y1 <= below.y0 + 1
    assert axes.bbox.height > 230
    for part in (box, axes.yaxis.label.get_window_extent(), axes.xaxis.label.get_window_extent()):
        assert part.x0 >= paper.x0
        assert part.x1 <= paper.x1
        assert part.y0 >= paper.y0
        assert part.y1 <= paper.y1


def test_a_diverged_method_has_a_cross_and_a_legend_text() -> None:
    run, never = document("fedprox", [0.1, 0.5, None], rounds=2), document("moon", [None], rounds=2)
    run["diverged"] = {"round": 2, "client": 1, "what": "loss", "value": "nan"}
    never["diverged"] = {"round": 1, "client": 1, "what": "loss", "value": "nan"}
    figure = render_curves([document("fedavg", RISING[:3]), run, never])
    assert legend_texts(figure)[1:3] == [
        "fedprox: best 50.00 % in round 1, diverged in round 2", "moon: diverged in round 1",
    ]  # fmt: skip
    crosses = [line.get_xydata() for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert [np.asarray(points).tolist() for points in crosses] == [[[1.0, 50.0]], []]
    assert figure.get_suptitle() == "digits, 20 clients, 2 rounds, seed 0"


def test_runs_without_evaluation_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no run has an evaluated round"):
        draw(tmp_path / "c.png", learning_curves([document("fedavg", [None, None])]))
    assert not list(tmp_path.iterdir())


def test_a_heat_map_without_values_is_empty() -> None:
    panel = client_heat_map("run", clients=[0, 1], rounds=[1, 2], accuracies=[{}, {}], note="")
    axes = render(figures.Figure("clients", "", (panel,))).axes[0]
    numbers = axes.images[0].get_array()
    assert numbers is not None
    assert np.ma.getmaskarray(np.ma.masked_invalid(numbers)).all()
    assert not axes.texts


def test_letters_that_no_font_has_are_drawn_without_a_warning(tmp_path: Path) -> None:
    """A warning is an error in tests."""
    draw(tmp_path / "c.png", learning_curves([document("a \u6f22 b", RISING)]))
    assert (tmp_path / "c.png").is_file()


def test_dollar_signs_are_not_parsed_as_math(tmp_path: Path) -> None:
    draw(tmp_path / "c.png", learning_curves([document(r"a $\frac$ b", RISING)]))
    draw(tmp_path / "b.png", client_distribution(np.eye(3, dtype=np.int64), r"a $\frac$ b"))
    assert len(list(tmp_path.iterdir())) == 2


# Bubbles


def render_bubbles(labels: NDArray[np.int64]) -> tuple[Figure, PathCollection, list[PathCollection]]:
    figure = render(client_distribution(labels, "title"))
    grid, key = ([c for c in axes.collections if isinstance(c, PathCollection)] for axes in figure.axes)
    return figure, grid[0], key


def test_bubbles_are_at_client_and_label_with_areas_in_proportion() -> None:
    labels = np.array([[0, 10, 0], [40, 0, 5]])
    figure, grid, key = render_bubbles(labels)
    assert np.asarray(grid.get_offsets()).tolist() == [[1, 0], [0, 1], [1, 2]], "small ones last, on top"
    areas = grid.get_sizes()
    assert areas / areas[0] == pytest.approx(np.array([1, 1 / 4, 1 / 8]))
    axes, side = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "label")
    key_areas = {
        text.get_text(): bubble.get_sizes()[0] for text, bubble in zip(side.texts[1:], key, strict=True)
    }
    assert key_areas == {
        "20": pytest.approx(areas[0] / 2),
        "5": pytest.approx(areas[2]),
        "1": pytest.approx(areas[0] / 40),
    }


@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 2), (20, 10), (100, 10), (20, 100), (20, 200), (100, 100), (1000, 2)]
)
def test_bubbles_of_an_even_split_do_not_overlap(shape: tuple[int, int]) -> None:
    """The diameter (the root of scatter's area) stays below the distance of neighbors, in points."""
    figure, grid, _ = render_bubbles(np.full(shape, 7))
    box = figure.axes[0].get_position()
    width, height = figure.get_size_inches()
    across = 72 * width * box.width / shape[0], 72 * height * box.height / shape[1]
    assert np.sqrt(grid.get_sizes().max()) < min(across)
    assert width <= 10
    assert height <= (8 if shape[1] <= 100 else 14)


@pytest.mark.parametrize("shape", [(20, 100), (20, 200)])
def test_many_labels_can_be_distinguished(shape: tuple[int, int]) -> None:
    """A bubble is large enough, neighbors keep 4 points, and none is on the frame."""
    labels = np.zeros(shape, np.int64)
    labels[np.arange(shape[1]) * shape[0] // shape[1], np.arange(shape[1])] = 500
    figure, grid, _ = render_bubbles(labels)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    points = axes.transData.transform(np.array([[0, 0], [0, 1]])) * 72 / figure.dpi
    assert points[1, 1] - points[0, 1] > 4
    diameter = float(np.sqrt(grid.get_sizes().max()))
    assert diameter > 8
    assert points[0, 1] - diameter / 2 > axes.bbox.y0 * 72 / figure.dpi


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (20, 10), (100, 100)])
def test_tick_labels_do_not_touch_and_the_key_is_inside(shape: tuple[int, int]) -> None:
    figure, _, _ = render_bubbles(np.random.RandomState(0).poisson(30, shape).astype(np.int64))
    figure.draw_without_rendering()
    axes, side = figure.axes
    ticks = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(ticks))
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in side.texts)
    assert all(text.get_window_extent().y0 >= 0 for text in side.texts)


def test_a_client_without_data_and_no_data_at_all() -> None:
    _, grid, _ = render_bubbles(np.array([[0, 0], [0, 3]]))
    assert len(grid.get_sizes()) == 1
    render(client_distribution(np.zeros((3, 3), dtype=np.int64), ""))


@pytest.mark.parametrize("wrong", [np.arange(3), np.zeros((0, 4), dtype=np.int64), np.array([[1, -1]])])
def test_bubbles_require_counts_of_clients_and_classes(tmp_path: Path, wrong: NDArray[np.int64]) -> None:
    with pytest.raises(InvalidInputError, match="clients x classes"):
        draw(tmp_path / "b.png", client_distribution(wrong, ""))
    assert not list(tmp_path.iterdir())


# Files


def test_png_svg_and_pdf_by_suffix(tmp_path: Path) -> None:
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".PNG": b"\x89PNG"}
    for suffix, start in starts.items():
        draw(tmp_path / f"c{suffix}", learning_curves([document("fedavg", RISING)]))
        assert (tmp_path / f"c{suffix}").read_bytes().startswith(start)
    draw(tmp_path / "b.png", client_distribution(np.eye(4, dtype=np.int64), "four"))
    for name in ("c.png", "b.png"):
        with Image.open(tmp_path / name) as image:
            image.load()
            assert min(image.size) > 200
            assert len(set(image.convert("L").tobytes())) > 10


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    for suffix in (".svg", ".pdf"):
        for name in ("a", "b"):
            draw(tmp_path / f"{name}{suffix}", learning_curves([document("fedavg", RISING)]))
        first = (tmp_path / f"a{suffix}").read_bytes()
        assert first == (tmp_path / f"b{suffix}").read_bytes()
        assert b"CreationDate" not in first


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "c.png"
    draw(path, learning_curves([document("fedavg", RISING)]))
    old = path.read_bytes()

    def half(figure: Figure, name: Path, **settings: object) -> None:
        Path(name).write_bytes(b"half")
        raise failure

    monkeypatch.setattr(Figure, "savefig", half)
    expected = InvalidInputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        draw(path, learning_curves([document("fedavg", RISING[::-1])]))
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot write the picture .*nowhere.c\.png.*No such file"):
        draw(tmp_path / "nowhere" / "c.png", learning_curves([document("fedavg", RISING)]))
    with pytest.raises(
        InvalidInputError, match=r"unknown picture format '\.gif'.*allowed: \.pdf, \.png, \.svg"
    ):
        draw(tmp_path / "c.gif", learning_curves([document("fedavg", RISING)]))
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_loaded_late_and_pyplot_never(tmp_path: Path) -> None:
    """Check in a new process, because other tests may have imported either."""
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from feddbe.reporting.build_figures import client_distribution
from feddbe.reporting.matplotlib_backend import draw
assert "matplotlib" not in sys.modules
import numpy
draw(Path({str(tmp_path / "b.png")!r}), client_distribution(numpy.eye(2, dtype=int), ""))
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_leftover_temporary_files_are_removed(tmp_path: Path) -> None:
    """Young files may belong to another process, and other names to other programs."""
    old, young, other = (tmp_path / f".{name}.tmp" for name in ("d.png.0123abcd", "d.png.abcd0123", "x"))
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    draw(tmp_path / "d.png", client_distribution(np.ones((2, 2), dtype=np.int64), ""))
    assert {path.name for path in tmp_path.iterdir()} == {"d.png", young.name, other.name}


def test_very_many_clients_are_thinned() -> None:
    """100,000 clients take seconds, and the picture notes the selection."""
    labels = np.tile(np.eye(10, dtype=np.int64), (10_000, 1))
    canvas = render(client_distribution(labels, "many"))
    (grid,) = [c for c in canvas.axes[0].collections if isinstance(c, PathCollection)]
    assert len(np.asarray(grid.get_offsets())) == 1000
    assert canvas.texts[0].get_text() == "many; 1000 of 100,000 clients are drawn, evenly by number"
