"""Help texts: width, defaults and known names; faults of the machine in one line."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from feddbe import data, models
from feddbe.cli.base import explain_fault
from feddbe.config.parameters import describe_signature
from tests.cli.shell import Shell, list_tree


@pytest.mark.parametrize("command", ["", "run", "compare", "runs", "show", "methods", "data", "data show"])
@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_terminal_and_is_not_truncated(
    command: str, columns: int, shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = shell(f"{command} --help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: feddbe {command}".rstrip())
    assert max(map(len, out.splitlines())) <= columns
    assert "..." not in out.partition("\n")[2]
    assert list_tree(tmp_path) == {}


def test_help_lists_known_names_choices_and_defaults(shell: Shell) -> None:
    text = " ".join(shell("run --help").out.split())
    datasets = [describe_signature(name, entry.options) for name, entry in data.BUILTIN_DATASETS.items()]
    model_names = [describe_signature(name, entry.options) for name, entry in models.MODELS.items()]
    for part in (
        f"names: {', '.join(datasets)} [default: digits]",
        f"names: {', '.join(model_names)} --cut",
        "har(layout=channels|scrambled)",
        "fasttext(rep=linear|logsoftmax)",
        "[default: dirichlet:0.1, har natural, ag_news dirichlet:1]",
        "number of clients N [default: 20]",
        "[default: 100, digits 40]",
        "seed of the partition; 1 is the published split [default: 1]",
        "[default: cnn 0.1, cnn_small 0.1, fasttext 0.5, har_cnn 0.1, mlp 0.1, resnet18 0.1]",
        "--variant [default|paper|official|early-2023]",
        "--short-batch [keep|refuse]",
        "--batch-order [shuffled|fixed]",
        "--last-test-batch [keep|drop]",
        "take part in a round [default: 1.0]",
        "--keep-best / --no-keep-best",
    ):
        assert part in text


def test_help_is_printed_without_a_command(shell: Shell) -> None:
    assert shell("") == shell("--help")
    assert shell("data") == shell("data --help")


@pytest.mark.parametrize(
    ("limit", "line"), [(700 * 2**20, "not enough memory: the limit is 700 MB"), (-1, None)]
)
def test_system_error_under_a_memory_limit_names_memory(
    limit: int, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that gets no memory may end in a SystemError; without a limit it is a fault of a program."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    explanation = explain_fault(SystemError("error return without exception set"))
    assert explanation is None if line is None else explanation is not None and explanation.startswith(line)
