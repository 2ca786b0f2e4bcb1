"""The table of options in docs/options.md is what `Config` says of itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from feddbe.config.options import SECTIONS, Config
from feddbe.config.parameters import describe_allowed, format_value

REFERENCE = Path(__file__).parents[2] / "docs" / "options.md"
IDENTITY = {"yes": "yes", "content": "by content", "seed": "as a repetition", "no": ""}


def table() -> str:
    rows = ["| option | meaning | takes | default | another run |", "|---|---|---|---|---|"]
    for section in SECTIONS:
        for field in dataclasses.fields(Config):
            about = field.metadata
            if about["section"] == section:
                default = format_value(field.default) if field.default not in (None, "") else ""
                cells = [f"`{field.name}`", about["meaning"], describe_allowed(field), default]
                rows.append(f"| {' | '.join([*cells, IDENTITY[about['identity']]])} |")
    return "\n".join(rows)


def test_the_table_of_options() -> None:
    assert table() in REFERENCE.read_text(encoding="utf-8"), f"it should be:\n{table()}"
