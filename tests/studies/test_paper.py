"""The experiments as files: every cell of the paper is in exactly one of them, and all can be resolved."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files

import pytest

from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.methods.registry import parse_method
from feddbe.studies import paper
from feddbe.studies.paper import NAMES, PaperStudy, load_paper_values, load_study
from feddbe.studies.runner import RunSpec

CELLS = 488
TABLES = [name for name in NAMES if not load_study(name).figure]


def claimed(study: PaperStudy) -> list[tuple[str, str, str]]:
    slots = [slot for slot in study.table_cells if slot.paper_value]
    return [(study.table, slot.row.name, slot.column.key) for slot in slots]


def test_experiment_files_match_the_names() -> None:
    folder = files("feddbe.studies") / "paper_tables"
    names = {path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")}
    assert names == {*NAMES, "settings"}


def test_every_cell_of_the_paper_is_in_exactly_one_experiment_or_left_out_with_a_reason() -> None:
    studies = [load_study(name) for name in TABLES]
    left_out = [
        (study.table, row, column)
        for study in studies
        for row, why in study.left_out.items()
        for column in load_paper_values()[study.table][row]
        if why
    ]
    counts = Counter([cell for study in studies for cell in claimed(study)] + left_out)
    all_cells = {
        (t, r, c) for t, rows in load_paper_values().items() for r, columns in rows.items() for c in columns
    }
    assert len(all_cells) == CELLS
    assert set(counts) == all_cells
    assert set(counts.values()) == {1}
    assert len(left_out) == 6


def number(table: str, row: str, column: str) -> float:
    value = load_paper_values()[table][row][column].value
    assert value is not None
    return value


def test_paper_values_are_consistent() -> None:
    """What it derives from others, and what it prints twice: a digit that slipped would show."""
    table_1, table_5 = "T1_split_cnn_tiny", "T5_pFL"
    for row, columns in load_paper_values()[table_1].items():
        for column in (c for c in columns if "rel_change" in c):
            ours, plain = (number(table_1, r, column.replace("_rel_change", "")) for r in (row, "FedAvg"))
            assert number(table_1, row, column) == pytest.approx(100 * (ours / plain - 1), abs=0.01)
        if "accuracy_gain" in columns:
            gain = number(table_1, row, "accuracy") - number(table_1, "FedAvg", "accuracy")
            assert number(table_1, row, "accuracy_gain") == pytest.approx(gain)
    for row in load_paper_values()["T6b_pFL_plus_MR_tiny_cnn"]:
        gain = number("T6b_pFL_plus_MR_tiny_cnn", row, "accuracy")
        gain -= number(table_5, row.removesuffix("+MR"), "practical/TINY")
        assert number("T6b_pFL_plus_MR_tiny_cnn", row, "improvement") == pytest.approx(gain)
    for row in load_paper_values()["T6c_overhead_tiny_resnet18"]:
        rounds = number("T8a_iterations_tiny_resnet18", row, "iterations")
        minutes = number("T6c_overhead_tiny_resnet18", row, "time_per_iteration")
        assert number("T6c_overhead_tiny_resnet18", row, "total_time") == pytest.approx(
            rounds * minutes, abs=0.75
        )
        assert number("T8c_local_epochs_fmnist", row, "E=1") == number(table_5, row, "practical/FMNIST")
    same = number("T3_noise_tiny", "FedAvg+DBE", "no noise")
    assert same == number("T2_ablation_tiny", "+DBE", "4-layer CNN/Accuracy")
    assert same == number("T1_split_cnn_tiny", "FC1->DBE->FC2", "accuracy")
    assert load_paper_values()["T9_HAR"]["FedAvg"]["accuracy"] == (87.2, 0.27)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_configuration_with_the_published_settings(name: str, small: bool) -> None:
    study = load_study(name, trials=2, small=small)
    assert study.table_cells
    for slot in study.table_cells:
        assert slot.column.read.startswith("mdl@") or slot.column.read in paper.READINGS
        for cell in (*slot.run_specs, *slot.baseline_specs):
            names, config, _ = cell.request()
            parse_method(names[0])
            assert isinstance(config, Config)
            assert (config.variant, config.eval_after, config.metrics) == ("official", True, "accuracy")
            assert (config.partition_seed, config.patience, config.lr) == (1, None, None)
            assert config.rounds == (20 if small else 2000)
    trials = [cell.seed for slot in study.table_cells[:1] for cell in slot.run_specs]
    assert trials == [0, 1]


def test_a_dash_in_the_paper_is_not_run() -> None:
    (slot,) = [slot for slot in load_study("clients-100").table_cells if slot.row.name == "APPLE"]
    assert slot.paper_value == (None, None)
    assert slot.run_specs == ()


def test_tables_share_runs() -> None:
    def cells(name: str, only: str) -> list[RunSpec]:
        return [cell for slot in load_study(name).select([only]).table_cells for cell in slot.run_specs]

    assert (
        cells("epochs", "fedavg/e=1")[0].request().config
        == cells("practical", "fedavg/fmnist")[0].request().config
    )
    assert cells("overhead", "ditto/total") == cells("iterations", "ditto/rounds")
    assert cells("iterations", "ditto/rounds") == cells("practical", "ditto/tiny-resnet")


def test_fewer_rounds_and_other_data_are_noted() -> None:
    study = load_study("ablation", rounds=100, data="fmnist").select(["CNN"])
    assert {cell.options["rounds"] for slot in study.table_cells for cell in slot.run_specs} == {100}
    assert {cell.options["data"] for slot in study.table_cells for cell in slot.run_specs} == {"fmnist"}
    assert study.rounds == 2000
    assert [column.replaced for column in study.columns] == ["fmnist instead of tiny_imagenet"]
    more = load_study("practical", rounds=5000)
    assert {cell.options["rounds"] for slot in more.table_cells for cell in slot.run_specs} == {2000}


def test_equal_columns_are_merged_at_the_small_scale() -> None:
    assert [column.title for column in load_study("practical", small=True).columns] == ["FMNIST", "AG News"]
    assert [column.title for column in load_study("pathological", small=True).columns] == ["FMNIST"]
    assert [row.name for row in load_study("splitting-resnet", small=True).rows] == [
        "FedAvg",
        "CONV->DBE->B1",
        "B4->DBE->POOL",
        "POOL->DBE->FC",
    ]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["FedAvg/FMNIST"], {"FedAvg/FMNIST"}),
        (["fedavg*/fmnist"], {"FedAvg/FMNIST", "FedAvg+DBE/FMNIST"}),
        (["Ditto"], {f"Ditto/{c}" for c in ("FMNIST", "Cifar100", "TINY", "TINY-ResNet", "AG News")}),
        (["APPLE/tiny", "AG News"], None),
    ],
)
def test_select(words: list[str], names: set[str] | None) -> None:
    study = load_study("practical").select(words)
    selected = {slot.name for slot in study.table_cells}
    if names is None:
        assert len(selected) == 13
    else:
        assert selected == names
        assert {row.name for row in study.rows} == {name.partition("/")[0] for name in names}
        assert {column.title for column in study.columns} == {name.partition("/")[2] for name in names}


def test_unknown_pattern_is_rejected() -> None:
    with pytest.raises(
        InvalidInputError, match=r"unknown cell of practical 'FedAvg\+DB'; did you mean 'FedAvg\+DBE'"
    ):
        load_study("practical").select(["FedAvg+DB"])


def test_unknown_names_are_one_line_errors() -> None:
    with pytest.raises(InvalidInputError, match="unknown experiment 'abl'"):
        load_study("abl")
    with pytest.raises(InvalidInputError, match="trials = 0"):
        load_study("har", trials=0)
