"""The experiments as files: every cell of the paper is in exactly one of them, and all can be resolved."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files

import pytest

from feddbe.config.options import Config
from feddbe.errors import BadInput
from feddbe.methods.registry import parse
from feddbe.studies import paper
from feddbe.studies.paper import NAMES, Study, printed, read
from feddbe.studies.runner import Cell

CELLS = 488
TABLES = [name for name in NAMES if not read(name).figure]


def claimed(study: Study) -> list[tuple[str, str, str]]:
    slots = [slot for slot in study.slots if slot.printed]
    return [(study.table, slot.row.name, slot.column.key) for slot in slots]


def test_there_is_a_file_for_each_name_and_no_other() -> None:
    place = files("feddbe.studies") / "experiments"
    found = {path.name.removesuffix(".toml") for path in place.iterdir() if path.name.endswith(".toml")}
    assert found == {*NAMES, "settings"}


def test_every_cell_of_the_paper_is_in_exactly_one_experiment_or_left_out_with_a_reason() -> None:
    studies = [read(name) for name in TABLES]
    left_out = [
        (study.table, row, column)
        for study in studies
        for row, why in study.left_out.items()
        for column in printed()[study.table][row]
        if why
    ]
    counts = Counter([cell for study in studies for cell in claimed(study)] + left_out)
    every = {(t, r, c) for t, rows in printed().items() for r, columns in rows.items() for c in columns}
    assert len(every) == CELLS
    assert set(counts) == every
    assert set(counts.values()) == {1}
    assert len(left_out) == 6


def number(table: str, row: str, column: str) -> float:
    value = printed()[table][row][column].value
    assert value is not None
    return value


def test_the_papers_numbers_agree_with_each_other() -> None:
    """What it derives from others, and what it prints twice: a digit that slipped would show."""
    one, five = "T1_split_cnn_tiny", "T5_pFL"
    for row, columns in printed()[one].items():
        for column in (c for c in columns if "rel_change" in c):
            ours, plain = (number(one, r, column.replace("_rel_change", "")) for r in (row, "FedAvg"))
            assert number(one, row, column) == pytest.approx(100 * (ours / plain - 1), abs=0.01)
        if "accuracy_gain" in columns:
            gain = number(one, row, "accuracy") - number(one, "FedAvg", "accuracy")
            assert number(one, row, "accuracy_gain") == pytest.approx(gain)
    for row in printed()["T6b_pFL_plus_MR_tiny_cnn"]:
        gain = number("T6b_pFL_plus_MR_tiny_cnn", row, "accuracy")
        gain -= number(five, row.removesuffix("+MR"), "practical/TINY")
        assert number("T6b_pFL_plus_MR_tiny_cnn", row, "improvement") == pytest.approx(gain)
    for row in printed()["T6c_overhead_tiny_resnet18"]:
        rounds = number("T8a_iterations_tiny_resnet18", row, "iterations")
        minutes = number("T6c_overhead_tiny_resnet18", row, "time_per_iteration")
        assert number("T6c_overhead_tiny_resnet18", row, "total_time") == pytest.approx(
            rounds * minutes, abs=0.75
        )
        assert number("T8c_local_epochs_fmnist", row, "E=1") == number(five, row, "practical/FMNIST")
    same = number("T3_noise_tiny", "FedAvg+DBE", "no noise")
    assert same == number("T2_ablation_tiny", "+DBE", "4-layer CNN/Accuracy")
    assert same == number("T1_split_cnn_tiny", "FC1->DBE->FC2", "accuracy")
    assert printed()["T9_HAR"]["FedAvg"]["accuracy"] == (87.2, 0.27)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_configuration_with_the_published_settings(name: str, small: bool) -> None:
    study = read(name, trials=2, small=small)
    assert study.slots
    for slot in study.slots:
        assert slot.column.read.startswith("mdl@") or slot.column.read in paper.READINGS
        for cell in (*slot.cells, *slot.base):
            names, config, _ = cell.asked()
            parse(names[0])
            assert isinstance(config, Config)
            assert (config.variant, config.eval_after, config.measure) == ("official", False, "accuracy")
            assert (config.partition_seed, config.patience) == (1, 100)
            assert config.rounds == (20 if small else 2000)
            if not small and names != ["apple"]:  # it has rates of its own
                assert (config.lr == 0.005) == ((config.model, config.data) == ("cnn", "tiny_imagenet"))
    trials = [cell.seed for slot in study.slots[:1] for cell in slot.cells]
    assert trials == [0, 1]


def test_a_dash_in_the_paper_is_not_run() -> None:
    (slot,) = [slot for slot in read("clients-100").slots if slot.row.name == "APPLE"]
    assert slot.printed == (None, None)
    assert slot.cells == ()


def test_tables_share_cells() -> None:
    def cells(name: str, only: str) -> list[Cell]:
        return [cell for slot in read(name).only([only]).slots for cell in slot.cells]

    assert (
        cells("epochs", "fedavg/e=1")[0].asked().config
        == cells("practical", "fedavg/fmnist")[0].asked().config
    )
    assert cells("overhead", "ditto/total") == cells("iterations", "ditto/rounds")
    assert cells("iterations", "ditto/rounds") == cells("practical", "ditto/tiny-resnet")


def test_rounds_can_be_fewer_and_data_another_and_both_are_said() -> None:
    study = read("ablation", rounds=100, data="fmnist").only(["CNN"])
    assert {cell.options["rounds"] for slot in study.slots for cell in slot.cells} == {100}
    assert {cell.options["data"] for slot in study.slots for cell in slot.cells} == {"fmnist"}
    assert study.rounds == 2000
    assert [column.replaced for column in study.columns] == ["fmnist instead of tiny_imagenet"]
    more = read("practical", rounds=5000)
    assert {cell.options["rounds"] for slot in more.slots for cell in slot.cells} == {2000}


def test_on_a_small_scale_columns_that_are_the_same_are_one() -> None:
    assert [column.title for column in read("practical", small=True).columns] == ["FMNIST", "AG News"]
    assert [column.title for column in read("pathological", small=True).columns] == ["FMNIST"]
    assert [row.name for row in read("splitting-resnet", small=True).rows] == [
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
    study = read("practical").only(words)
    found = {slot.name for slot in study.slots}
    if names is None:
        assert len(found) == 13
    else:
        assert found == names
        assert {row.name for row in study.rows} == {name.partition("/")[0] for name in names}
        assert {column.title for column in study.columns} == {name.partition("/")[2] for name in names}


def test_what_is_only_wanted_must_be_there() -> None:
    with pytest.raises(BadInput, match=r"unknown cell of practical 'FedAvg\+DB'; did you mean 'FedAvg\+DBE'"):
        read("practical").only(["FedAvg+DB"])


def test_wrong_names_are_one_line() -> None:
    with pytest.raises(BadInput, match="unknown experiment 'abl'"):
        read("abl")
    with pytest.raises(BadInput, match="trials = 0"):
        read("har", trials=0)


def test_methods_have_their_hyper_parameters_and_rates_where_the_settings_say_so() -> None:
    def first(name: str, only: str) -> tuple[str, float | None]:
        cell = read(name).only([only]).slots[0].cells[0]
        return cell.method, cell.options.get("lr")

    assert first("practical", "pfedme/fmnist") == ("pfedme(lr_p=0.01)", 0.1)
    assert first("practical", "apple/fmnist") == ("apple", 0.005)
    assert first("practical", "per-fedavg/fmnist") == ("perfedavg(alpha=0.02)", 0.05)
    assert first("practical", "fedavg/cifar100") == ("fedavg", 0.1)
    assert first("practical", "pfedme/tiny") == ("pfedme", 0.005)
    assert first("practical", "fedavg+dbe/ag news") == ("fedavg+dbe", 0.5)
    common = paper.settings()
    rates = [one for rate in common["lr"].values() for one in (rate, *rate.get("on", {}).values())]
    assert all(rate["how"] for rate in rates)
    assert all(one["how"] for method in common["methods"].values() for one in method.values())
