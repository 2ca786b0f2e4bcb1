"""Options of a run from the command line, TOML files and Python, and their precedence."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from feddbe.config.options import (
    SECTIONS,
    STUDY_OPTIONS,
    Config,
    identifying_settings,
    identity_of_key,
    parse_options,
)
from feddbe.errors import InvalidInputError


def write_toml(folder: Path, text: str, name: str = "run.toml") -> str:
    """Write a TOML file and return its path."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def assert_error(message: str, *arguments: Any, **named: Any) -> None:
    """Assert that `parse_options` raises exactly this message."""
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        parse_options(*arguments, **named)


def test_options_have_these_defaults() -> None:
    """None means that the default depends on data and model."""
    assert vars(Config()) == {
        "method": "", "data": "digits", "data_dir": None, "partition": None, "partition_seed": 1,
        "min_samples": 0, "split": None, "clients": None, "shift": None, "model": None, "cut": None,
        "rounds": None, "patience": None, "local_epochs": 1, "batch_size": 10, "lr": None,
        "lr_decay": None, "optimizer": "sgd",
        "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None, "participation": 1.0, "seed": 0,
        "variant": "default",
        "metrics": "accuracy,auc,loss", "eval": "all", "eval_after": True,
        "validation": 0.0, "new_clients": 0, "adapt_epochs": 10, "adaptation": "full",
        "bn_buffers": "local", "short_batch": None, "batch_order": None, "last_test_batch": None,
        "engine": "auto", "device": "cpu", "trainer": "auto",
        "min_replies": None, "worker_timeout": None, "keep_best": True, "out": None,
        "resume": False, "force": False, "json": False, "quiet": False,
    }  # fmt: skip


def test_every_option_has_a_section_and_an_identity() -> None:
    for field in dataclasses.fields(Config):
        assert field.metadata.get("section") in SECTIONS, field.name
        assert field.metadata.get("identity") in ("yes", "content", "seed", "no"), field.name
    not_identifying = {
        field.name for field in dataclasses.fields(Config) if identity_of_key(field.name) == "no"
    }
    assert not_identifying == {
        "data_dir", "rounds", "patience", "force", "metrics", "engine", "device", "trainer", "min_replies",
        "worker_timeout", "keep_best", "out", "resume", "json", "quiet"
    }  # fmt: skip
    assert [f.name for f in dataclasses.fields(Config) if identity_of_key(f.name) == "seed"] == ["seed"]


def test_identifying_settings_leave_out_how_a_run_is_executed() -> None:
    config = {"lr": 0.1, "seed": 3, "resume": True, "rounds": 5, "data": "digits", "unknown": 1}
    config["method_options"] = {"mr": {"kappa": 5.0}}
    expected = {"lr": 0.1, "data": "digits", "unknown": 1, "mr kappa": 5.0}
    assert identifying_settings(config, seed=False) == expected
    assert identifying_settings(config) == expected | {"seed": 3}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", 0, "lr = 0; allowed: a number > 0"),
        ("lr", "fast", "lr = 'fast'; allowed: a number > 0"),
        ("participation", 1.5, "participation = 1.5; allowed: a number > 0 and <= 1"),
        ("participation", 0, "participation = 0; allowed: a number > 0 and <= 1"),
        ("clients", 0, "clients = 0; allowed: a whole number >= 1"),
        ("rounds", -1, "rounds = -1; allowed: a whole number >= 0"),
        ("local_epochs", 0, "local_epochs = 0; allowed: a whole number >= 1"),
        ("batch_size", 0, "batch_size = 0; allowed: a whole number >= 1"),
        ("batch_size", 2.5, "batch_size = 2.5; allowed: a whole number >= 1"),
        ("patience", 0, "patience = 0; allowed: a whole number >= 1"),
        ("seed", -1, "seed = -1; allowed: a whole number >= 0"),
        ("partition_seed", -1, "partition_seed = -1; allowed: a whole number >= 0"),
        ("resume", "yes", "resume = 'yes'; allowed: true, false"),
        (
            "variant", "offical",
            "unknown variant 'offical'; did you mean 'official'? "
            "allowed: default, early-2023, official, paper",
        ),
        ("bn_buffers", "shared", "unknown bn_buffers 'shared'; allowed: average, local"),
        ("short_batch", "keeps", "unknown short_batch 'keeps'; did you mean 'keep'? allowed: keep, refuse"),
    ],
)  # fmt: skip
def test_invalid_value_is_named_with_the_allowed_ones(
    option: str, value: Any, message: str, tmp_path: Path
) -> None:
    """The message does not depend on the origin of the value."""
    assert_error(message, ["fedavg"], {option: value})
    literal = f"'{value}'" if isinstance(value, str) else value
    assert_error(message, [write_toml(tmp_path, f'method = "fedavg"\n{option} = {literal}')])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rounds", 0),
        ("participation", 1),
        ("lr", 1e-9),
        ("seed", 0),
        ("local_epochs", 1),
        ("short_batch", "keep"),
    ],
)
def test_values_at_the_limits_are_valid(option: str, value: Any) -> None:
    assert getattr(parse_options(["fedavg"], {option: value})[1], option) == value


def test_file_sets_options(tmp_path: Path) -> None:
    names, config, _ = parse_options(
        [
            write_toml(
                tmp_path,
                """
                method = "fedavg+dbe(kappa=5)"  # as on the command line
                data = "fmnist"
                partition-seed = 7
                lr = 0.05
                rounds = 1_000
                participation = 1
                eval-after = true
                """,
            )
        ]
    )
    assert names == ["fedavg+dbe(kappa=5)"]
    assert config == Config(
        data="fmnist", partition_seed=7, lr=0.05, rounds=1000, participation=1.0, eval_after=True
    )  # fmt: skip
    assert type(config.participation) is float


def test_files_and_methods_are_combined(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "seed = 3")
    assert parse_options(["fedavg", path, "fedavg+dbe"])[:2] == (["fedavg", "fedavg+dbe"], Config(seed=3))
    with_method = write_toml(tmp_path, 'method = "fedavg+mr"\nlr = 0.5', "other.toml")
    assert parse_options([path, with_method, "fedavg"])[:2] == (
        ["fedavg+mr", "fedavg"],
        Config(seed=3, lr=0.5),
    )


def test_later_files_override_earlier_ones(tmp_path: Path) -> None:
    first = write_toml(tmp_path, "seed = 1\nlr = 0.1", "1.toml")
    second = write_toml(tmp_path, "seed = 2", "2.toml")
    assert parse_options([first, second, "fedavg"])[1] == Config(seed=2, lr=0.1)
    assert parse_options([second, first, "fedavg"])[1] == Config(seed=1, lr=0.1)


def test_options_override_files(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "seed = 1\nbatch-size = 1\nlocal-epochs = 1\nlr = 1.0")
    _, config, _ = parse_options([path, "fedavg"], {"seed": 3, "lr": None})
    assert (config.seed, config.batch_size, config.local_epochs, config.lr) == (3, 1, 1, 1.0)


def test_origins_name_the_file_or_given(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "seed = 1\nbatch-size = 1\nlocal-epochs = 1\nlr = 1.0")
    origins = parse_options([path, "fedavg"], {"seed": 0, "lr": None}).origins
    assert origins == {"seed": "given", "batch_size": path, "local_epochs": path, "lr": path}


def test_method_option_overrides_the_file(tmp_path: Path) -> None:
    path = write_toml(tmp_path, 'method = "fedavg"')
    assert parse_options([path], {"method": "fedavg+dbe(kappa=5,mu=0.1)"})[0] == [
        "fedavg+dbe(kappa=5,mu=0.1)"
    ]
    assert parse_options([path], {"method": "fedavg+mr"})[0] == ["fedavg+mr"]
    assert parse_options([], {"method": "fedavg"})[:2] == (["fedavg"], Config())


def test_file_may_list_several_methods(tmp_path: Path) -> None:
    path = write_toml(tmp_path, 'method = ["fedavg", "fedavg+dbe"]')
    assert parse_options([path, "fedavg+mr"])[0] == ["fedavg", "fedavg+dbe", "fedavg+mr"]


def test_method_that_is_not_text_becomes_text(tmp_path: Path) -> None:
    """Names are checked later."""
    assert parse_options([write_toml(tmp_path, "method = 5")])[0] == ["5"]
    assert parse_options([write_toml(tmp_path, "method = [5, true]")])[0] == ["5", "True"]


def test_unreadable_file_is_named_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert_error(f"cannot read '{missing}': No such file or directory", [str(missing)])
    (tmp_path / "folder.toml").mkdir()
    folder = str(tmp_path / "folder.toml")
    assert_error(f"cannot read '{folder}': it is not a plain file", [folder])


@pytest.mark.parametrize("content", [b"seed = ", b"seed: 3", b"seed = 1\nseed = 2", b"data = '\xff'"])
def test_invalid_toml_is_named_with_the_reason(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"^'{re.escape(str(path))}' is not valid TOML: [^\n]+$"):
        parse_options(["fedavg", str(path)])


def test_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = write_toml(tmp_path, "partition-sed = 2")
    names = ", ".join(sorted([*vars(Config()), *STUDY_OPTIONS]))
    message = f" 'partition_sed'; did you mean 'partition_seed'? allowed: {names}"
    assert_error(f"unknown key in '{path}':{message}", ["fedavg", path])
    assert_error(f"unknown option{message}", ["fedavg"], {"partition_sed": 2})


def test_toml_table_is_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown key in .*: 'mr'; allowed: "):
        parse_options([write_toml(tmp_path, 'method = "fedavg+mr"\n[mr]\nkappa = 5')])


@pytest.mark.parametrize("key", ["partition_seed", "partition-seed"])
def test_keys_may_have_dashes_or_underscores(key: str, tmp_path: Path) -> None:
    assert parse_options(["fedavg", write_toml(tmp_path, f"{key} = 4")])[1].partition_seed == 4
    assert parse_options(["fedavg"], {key: 4})[1].partition_seed == 4


@pytest.mark.parametrize(
    ("item", "option", "value"),
    [
        ("seed=5", "seed", 5), ("seed = 5", "seed", 5), ("seed=5.0", "seed", 5),
        ("rounds=1e3", "rounds", 1000), ("lr=1e-3", "lr", 0.001), ("lr=1", "lr", 1.0),
        ("resume=true", "resume", True), ("eval-after=false", "eval_after", False),
        ("data='digits'", "data", "digits"), ("data='my data.npz'", "data", "my data.npz"),
        ("out='runs/a=b'", "out", "runs/a=b"), ("out=7", "out", "7"), ("out=2024-01-01", "out", "2024-01-01"),
        ("out=true", "out", "True"),
    ],
)  # fmt: skip
def test_value_is_converted_to_the_type_of_the_option(
    item: str, option: str, value: Any, tmp_path: Path
) -> None:
    parsed = getattr(parse_options(["fedavg", write_toml(tmp_path, item)])[1], option)
    assert parsed == value
    assert type(parsed) is type(value)


def test_missing_method_is_an_error(tmp_path: Path) -> None:
    message = "no method given; name one, as in fedavg+dbe (feddbe methods lists them)"
    assert_error(message)
    assert_error(message, [write_toml(tmp_path, "seed = 1")])
    assert_error(message, [], {"seed": 1})


@pytest.mark.parametrize(
    "content", ["x = " + "[" * 3000 + "]" * 3000, "rounds = " + "9" * 5000, 'out = "\xff"'],
    ids=["nested", "digits", "not UTF-8"],
)  # fmt: skip
def test_file_with_extreme_content_is_answered_with_a_short_message(content: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidInputError, match=r"e\.toml' is not valid TOML: ") as error:
        parse_options([str(tmp_path / "e.toml")])
    assert len(str(error.value)) < 400 + len(str(tmp_path))
