"""Tables of the paper beside ours, where runs were made for them."""

from __future__ import annotations

from collections.abc import Mapping

from feddbe.page.blocks import Block, cell, command, section, table
from feddbe.show.compared import Compared, one_line

__all__ = ["studied"]


def studied(found: Mapping[str, Compared]) -> list[Block]:
    """One section of them all; the keys are the commands that print them."""
    blocks, commands = list[Block](), list[Block]()
    for line, compared in found.items():
        letters = compared.letters()
        rows = []
        for row in compared.rows:
            places = [compared.at(row, column) for column in compared.columns]
            numbers = [place.ours.mean if place and place.ours else None for place in places]
            texts = [one_line(place, letters) for place in places]
            rows.append([row, *map(cell, texts, numbers)])
        columns, heading = ["method", *compared.columns], f"{compared.name}: {compared.title}"
        blocks.append(table(f"study-{compared.name}", compared.legend(), columns, rows, heading=heading))
        commands.append(command(compared.name, line))
    return section("studies", "The paper's tables", blocks, commands)
