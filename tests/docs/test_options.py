"""The table of options in docs/options.md, which is derived from `Config`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from feddbe.config.options import SECTIONS, Config
from feddbe.config.parameters import describe_allowed, format_value

REFERENCE = Path(__file__).parents[2] / "docs" / "options.md"
IDENTITY = {"yes": "yes", "content": "by content", "seed": "as a repetition", "no": ""}


def build_table() -> str:
    """Return the table in Markdown."""
    rows = ["| option | meaning | takes | default | another run |", "|---|---|---|---|---|"]
    for section in SECTIONS:
        for field in dataclasses.fields(Config):
            metadata = field.metadata
            if metadata["section"] == section:
                default = format_value(field.default) if field.default not in (None, "") else ""
                cells = [f"`{field.name}`", metadata["meaning"], describe_allowed(field), default]
                rows.append(f"| {' | '.join([*cells, IDENTITY[metadata['identity']]])} |")
    return "\n".join(rows)


def test_page_contains_the_table_of_options() -> None:
    table = build_table()
    assert table in REFERENCE.read_text(encoding="utf-8"), f"expected:\n{table}"
