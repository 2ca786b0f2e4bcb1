"""What is at the places of a model in one pass: at its cuts, at z_g and z around the translation, at the end.

The two halves of a model are walked through in the order in which they compute, and what is wanted is copied
on the way (a layer may write into its input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx, nn

from feddbe.models.cuts import PLACES, layers_of

__all__ = ["walk"]

Keep = Callable[[str, Tensor], None]


def walk(half: nn.Module, x: Tensor, names: Iterable[Iterable[str]], keep: Keep) -> Tensor:
    """The half's output for `x`; `keep` is told each place and what is there. `names`: of a row of layers,
    the places after each of them (a traced half has them in its graph)."""
    if isinstance(half, fx.GraphModule):
        out: Tensor = _Walk(half, keep).run(x)
        return out
    for layer, places in zip(layers_of(half), names, strict=True):
        x = layer(x)
        for place in places:
            keep(place, x)
    return x


class _Walk(fx.Interpreter):
    """Computes a graph node by node."""

    def __init__(self, half: fx.GraphModule, keep: Keep) -> None:
        super().__init__(half)
        self.keep = keep

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        for place in n.meta.get(PLACES, ()):
            self.keep(place, found)
        return found
