"""The experiments as files: every cell of the paper is in exactly one of them, and all can be resolved."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files

import pytest

from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.methods.registry import parse_method
from feddbe.studies import paper
from feddbe.studies.paper import NAMES, PaperStudy, load_study, paper_values
from feddbe.studies.runner import RunSpec

CELLS = 488
TABLES = [name for name in NAMES if not load_study(name).figure]


def claimed(study: PaperStudy) -> list[tuple[str, str, str]]:
    slots = [slot for slot in study.table_cells if slot.paper_value]
    return [(study.table, slot.row.name, slot.column.key) for slot in slots]


def test_there_is_a_file_for_each_name_and_no_other() -> None:
    place = files("feddbe.studies") / "experiments"
    found = {path.name.removesuffix(".toml") for path in place.iterdir() if path.name.endswith(".toml")}
    assert found == {*NAMES, "settings"}


def test_every_cell_of_the_paper_is_in_exactly_one_experiment_or_left_out_with_a_reason() -> None:
    studies = [load_study(name) for name in TABLES]
    left_out = [
        (study.table, row, column)
        for study in studies
        for row, why in study.left_out.items()
        for column in paper_values()[study.table][row]
        if why
    ]
    counts = Counter([cell for study in studies for cell in claimed(study)] + left_out)
    every = {(t, r, c) for t, rows in paper_values().items() for r, columns in rows.items() for c in columns}
    assert len(every) == CELLS
    assert set(counts) == every
    assert set(counts.values()) == {1}
    assert len(left_out) == 6


def number(table: str, row: str, column: str) -> float:
    value = paper_values()[table][row][column].value
    assert value is not None
    return value


def test_the_papers_numbers_agree_with_each_other() -> None:
    """What it derives from others, and what it prints twice: a digit that slipped would show."""
    one, five = "T1_split_cnn_tiny", "T5_pFL"
    for row, columns in paper_values()[one].items():
        for column in (c for c in columns if "rel_change" in c):
            ours, plain = (number(one, r, column.replace("_rel_change", "")) for r in (row, "FedAvg"))
            assert number(one, row, column) == pytest.approx(100 * (ours / plain - 1), abs=0.01)
        if "accuracy_gain" in columns:
            gain = number(one, row, "accuracy") - number(one, "FedAvg", "accuracy")
            assert number(one, row, "accuracy_gain") == pytest.approx(gain)
    for row in paper_values()["T6b_pFL_plus_MR_tiny_cnn"]:
        gain = number("T6b_pFL_plus_MR_tiny_cnn", row, "accuracy")
        gain -= number(five, row.removesuffix("+MR"), "practical/TINY")
        assert number("T6b_pFL_plus_MR_tiny_cnn", row, "improvement") == pytest.approx(gain)
    for row in paper_values()["T6c_overhead_tiny_resnet18"]:
        rounds = number("T8a_iterations_tiny_resnet18", row, "iterations")
        minutes = number("T6c_overhead_tiny_resnet18", row, "time_per_iteration")
        assert number("T6c_overhead_tiny_resnet18", row, "total_time") == pytest.approx(
            rounds * minutes, abs=0.75
        )
        assert number("T8c_local_epochs_fmnist", row, "E=1") == number(five, row, "practical/FMNIST")
    same = number("T3_noise_tiny", "FedAvg+DBE", "no noise")
    assert same == number("T2_ablation_tiny", "+DBE", "4-layer CNN/Accuracy")
    assert same == number("T1_split_cnn_tiny", "FC1->DBE->FC2", "accuracy")
    assert paper_values()["T9_HAR"]["FedAvg"]["accuracy"] == (87.2, 0.27)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_configuration_with_the_published_settings(name: str, small: bool) -> None:
    study = load_study(name, trials=2, small=small)
    assert study.table_cells
    for slot in study.table_cells:
        assert slot.column.read.startswith("mdl@") or slot.column.read in paper.READINGS
        for cell in (*slot.run_specs, *slot.base):
            names, config, _ = cell.request()
            parse_method(names[0])
            assert isinstance(config, Config)
            assert (config.variant, config.eval_after, config.metrics) == ("official", False, "accuracy")
            assert (config.partition_seed, config.patience) == (1, 100)
            assert config.rounds == (20 if small else 2000)
            if not small and names != ["apple"]:  # it has rates of its own
                assert (config.lr == 0.005) == ((config.model, config.data) == ("cnn", "tiny_imagenet"))
    trials = [cell.seed for slot in study.table_cells[:1] for cell in slot.run_specs]
    assert trials == [0, 1]


def test_a_dash_in_the_paper_is_not_run() -> None:
    (slot,) = [slot for slot in load_study("clients-100").table_cells if slot.row.name == "APPLE"]
    assert slot.paper_value == (None, None)
    assert slot.run_specs == ()


def test_tables_share_cells() -> None:
    def cells(name: str, only: str) -> list[RunSpec]:
        return [cell for slot in load_study(name).only([only]).table_cells for cell in slot.run_specs]

    assert (
        cells("epochs", "fedavg/e=1")[0].request().config
        == cells("practical", "fedavg/fmnist")[0].request().config
    )
    assert cells("overhead", "ditto/total") == cells("iterations", "ditto/rounds")
    assert cells("iterations", "ditto/rounds") == cells("practical", "ditto/tiny-resnet")


def test_rounds_can_be_fewer_and_data_another_and_both_are_said() -> None:
    study = load_study("ablation", rounds=100, data="fmnist").only(["CNN"])
    assert {cell.options["rounds"] for slot in study.table_cells for cell in slot.run_specs} == {100}
    assert {cell.options["data"] for slot in study.table_cells for cell in slot.run_specs} == {"fmnist"}
    assert study.rounds == 2000
    assert [column.replaced for column in study.columns] == ["fmnist instead of tiny_imagenet"]
    more = load_study("practical", rounds=5000)
    assert {cell.options["rounds"] for slot in more.table_cells for cell in slot.run_specs} == {2000}


def test_on_a_small_scale_columns_that_are_the_same_are_one() -> None:
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
def test_only(words: list[str], names: set[str] | None) -> None:
    study = load_study("practical").only(words)
    found = {slot.name for slot in study.table_cells}
    if names is None:
        assert len(found) == 13
    else:
        assert found == names
        assert {row.name for row in study.rows} == {name.partition("/")[0] for name in names}
        assert {column.title for column in study.columns} == {name.partition("/")[2] for name in names}


def test_what_is_only_wanted_must_be_there() -> None:
    with pytest.raises(
        InvalidInputError, match=r"unknown cell of practical 'FedAvg\+DB'; did you mean 'FedAvg\+DBE'"
    ):
        load_study("practical").only(["FedAvg+DB"])


def test_wrong_names_are_one_line() -> None:
    with pytest.raises(InvalidInputError, match="unknown experiment 'abl'"):
        load_study("abl")
    with pytest.raises(InvalidInputError, match="trials = 0"):
        load_study("har", trials=0)


def test_methods_have_their_hyper_parameters_and_rates_where_the_settings_say_so() -> None:
    def first(name: str, only: str) -> tuple[str, float | None]:
        cell = load_study(name).only([only]).table_cells[0].run_specs[0]
        return cell.method, cell.options.get("lr")

    assert first("practical", "pfedme/fmnist") == ("pfedme(lr_p=0.01)", 0.1)
    assert first("practical", "apple/fmnist") == ("apple", 0.005)
    assert first("practical", "per-fedavg/fmnist") == ("perfedavg(alpha=0.02)", 0.05)
    assert first("practical", "fedavg/cifar100") == ("fedavg", 0.1)
    assert first("practical", "pfedme/tiny") == ("pfedme", 0.005)
    assert first("practical", "fedavg+dbe/ag news") == ("fedavg+dbe", 0.5)
    common = paper.load_settings()
    rates = [one for rate in common["lr"].values() for one in (rate, *rate.get("on", {}).values())]
    assert all(rate["how"] for rate in rates)
    assert all(one["how"] for method in common["methods"].values() for one in method.values())
