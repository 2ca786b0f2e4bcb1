"""The terminal chart follows the curves and the width, with and without Unicode."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from feddbe.reporting import terminal
from feddbe.reporting.build_figures import learning_curves
from feddbe.reporting.figure import Axis, Curves, Figure, Series
from feddbe.results.document import RunDocument
from tests.documents import document
from tests.reporting.test_build_tables import LONG, lines, words

CURVE = document(LONG, [0.07 + 0.9 * t / 1999 for t in range(2000)], majority_accuracy=0.214)


def chart(documents: Sequence[RunDocument]) -> terminal.CurveChart:
    return terminal.CurveChart(learning_curves(documents))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_longer_than_the_console(width: int, encoding: str) -> None:
    assert max(map(len, lines(chart([CURVE]), width, encoding))) <= width


def test_brackets_in_a_name_are_not_markup() -> None:
    assert "[bold]x[/bold]" in words(chart([document("[bold]x[/bold]", [0.1, 0.5])]))


def test_values_that_are_not_percentages_have_round_limits() -> None:
    series = Series("a", 0, (0, 1, 2), (0.31, 0.36, 0.34))
    panel = Curves("x", Axis("round"), Axis("client drift", "standard deviations"), (series,))
    printed = lines(terminal.CurveChart(Figure("x", "title", (panel,))))
    assert [line[:5].strip() for line in printed if "┤" in line] == ["0.36", "0.335", "0.31"]


def plot_rows(printed: list[str]) -> list[str]:
    """Return the rows of the plot, without the labels and the axis on their left."""
    return [
        line[5:] for line in printed if re.match(r"[ \d]{3} [│┤|+]", line) and not line.startswith("    +--")
    ]


def test_a_rising_curve_crosses_the_reference_line_in_ascii() -> None:
    """A straight line from 0 to 100 % over 9 rows has about equally many columns in each row."""
    straight = document("fedavg", [0.0, 0.25, 0.5, 0.75, 1.0], majority_accuracy=0.25)
    rows = plot_rows(lines(chart([straight]), 77, "ascii"))
    assert len(rows) == 9
    starts = [re.search(r"[*O]", line) for line in rows]
    columns = [start.start() for start in starts if start]
    assert len(columns) == 9
    assert columns == sorted(columns, reverse=True)
    assert columns[4] == pytest.approx(36, abs=5)
    assert rows[0].rstrip().endswith("O")
    dotted = [line.count(".") for line in rows]
    assert dotted[6] > 55  # 25 % is the third row from below
    assert sum(dotted) == dotted[6]


@pytest.mark.parametrize("width", [60, 100])
def test_the_curve_follows_the_width(width: int) -> None:
    printed = lines(chart([CURVE]), width)
    assert max(map(len, printed)) == width
    assert 14 <= len(printed) <= 17
    text = " ".join(" ".join(printed).split())
    assert "test accuracy (%). Model before local training, weighted by samples." in text
    assert "best 97.00 % in round 1999" in text
    assert "majority class of each client: 21.40 %" in text
    assert re.search(r"^ +0 +round +1999$", printed[-3])


def test_the_curve_uses_braille_with_unicode() -> None:
    printed = "".join(plot_rows(lines(chart([CURVE]))))
    assert any("\u2801" <= char <= "\u28ff" for char in printed)
    assert printed.count("◆") == 1
    assert printed.count("┈") > 60
    assert "*" not in printed


def test_braille_dots_have_their_bits() -> None:
    """U+2800 + bits; dots 1..3 and 7 are the left column downwards, 4..6 and 8 the right one."""
    left = [terminal._UNICODE.char({(0, row)}) for row in range(4)]
    right = [terminal._UNICODE.char({(1, row)}) for row in range(4)]
    assert "".join(left + right) == "⠁⠂⠄⡀⠈⠐⠠⢀"
    assert terminal._UNICODE.char({(0, 0), (1, 3)}) == "⢁"


@pytest.mark.parametrize("curve", [[0.5], [1.0, 1.0], [0.0], [None, 0.3, None]])
@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("width", [20, 60])
def test_short_and_flat_curves_have_their_mark(curve: list[float | None], floor: float, width: int) -> None:
    printed = plot_rows(lines(chart([document("fedavg", curve, majority_accuracy=floor)]), width))
    assert len(printed) == 9
    assert sum(line.count("◆") for line in printed) == 1


def test_equal_accuracies_of_one_hundred_stay_on_the_scale() -> None:
    printed = lines(chart([document("fedavg", [1.0, 1.0], majority_accuracy=1.0)]))
    assert [int(line[:3]) for line in printed if "┤" in line] == [100, 95, 90]


def test_several_curves_are_distinguished_by_letters() -> None:
    runs = [document(name, [0.1, level]) for name, level in (("moon", 0.5), ("fedavg", 0.9), ("apfl", 0.7))]
    printed = lines(chart(runs), 60)
    assert printed[0] == "digits, 20 clients, 1 round, seed 0"
    assert [line.split()[:2] for line in printed if "best" in line] == [
        ["A", "moon:"], ["B", "fedavg:"], ["C", "apfl:"],
    ]  # fmt: skip
    ends = [line.rstrip()[-1] for line in plot_rows(printed) if line.rstrip()[-1:] in tuple("ABC")]
    assert ends == ["B", "C", "A"], "from the highest to the lowest"
    ascii_lines = "".join(plot_rows(lines(chart(runs), 60, "ascii")))
    assert all(ascii_lines.count(letter) > 5 for letter in "abc")


def test_a_curve_that_diverged_ends_with_a_cross() -> None:
    run = document("fedprox", [0.1, 0.5, 0.3, None], rounds=40)
    run["diverged"] = {"round": 4, "client": 1, "what": "loss", "value": "nan"}
    never = document("moon", [None])
    never["diverged"] = {"round": 1, "client": 0, "what": "loss", "value": "inf"}
    printed = lines(chart([document("fedavg", [0.2] * 41), run, never]))
    assert "".join(plot_rows(printed)).count("×") == 1
    text = " ".join(" ".join(printed).split())
    assert "B fedprox: best 50.00 % in round 1, × diverged in round 4" in text
    assert "moon, × diverged in round 1" in text
    assert words(chart([never])) == "moon: diverged in round 1"
    rising = document("fedprox", [0.1, 0.5, None])
    rising["diverged"] = run["diverged"]
    single = lines(chart([rising]))
    assert sum(line.count("×") for line in plot_rows(single)) == 1
    assert "× diverged in round 4" in " ".join(single)


def test_seeds_are_a_mean_and_a_band() -> None:
    runs = [document("fedavg", [0.1, 0.2 + 0.3 * seed, 0.9], seed=seed) for seed in range(3)]
    printed = lines(chart(runs), 80)
    assert printed[0] == "fedavg (3 seeds): digits, 20 clients, 2 rounds, seeds 0 to 2"
    assert sum(line.count("░") for line in plot_rows(printed)) > 50
    assert any("band: 95 % interval of the mean over 3 seeds" in line for line in printed)
    assert "░" not in "".join(lines(chart(runs[:1])))


def test_a_run_without_evaluation_is_named() -> None:
    assert lines(chart([document("fedavg", [None])])) == ["fedavg: no round has been evaluated yet"]
