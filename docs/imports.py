"""Who imports whom, from the code: python -m docs.imports draws docs/images/imports.png."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "feddbe"
ROOMS = [
    "base", "config", "data", "models", "training", "methods", "metrics", "results", "callbacks",
    "simulation", "runs", "reporting", "studies", "api", "export", "testing", "cli",
]  # fmt: skip
"""From the bottom to the top: a room may use those before it."""
_BASE = ("errors", "paths", "seeds", "state")
_OUTSIDE = ("", "__main__")
"""The package itself, which only names what is public."""


@cache
def modules() -> dict[str, Path]:
    """Every module below feddbe by its name there (`data.partition`), and its file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in _OUTSIDE:
            found[name] = path
    return found


def room(module: str) -> str:
    first = module.split(".")[0]
    return "base" if first in _BASE else first


@cache
def uses(module: str) -> frozenset[str]:
    """The modules that it imports, anywhere in it; what only type checkers see does not count."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "feddbe":
            base = node.module.removeprefix("feddbe").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                found.add(inner if inner in modules() else base)
        elif isinstance(node, ast.Import):
            names = [alias.name.removeprefix("feddbe.") for alias in node.names if "feddbe." in alias.name]
            found.update(names)
    return frozenset(found - {"", module})


def between_rooms() -> Counter[tuple[str, str]]:
    """(room, room that it uses) -> how many imports."""
    pairs = ((room(module), room(used)) for module in modules() for used in uses(module))
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def draw(path: Path) -> None:
    """The rooms from the bottom up; a line for each pair, as wide as there are imports."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    edges = between_rooms()
    lines = Counter[str]()
    for module, file in modules().items():
        lines[room(module)] += len(file.read_text(encoding="utf-8").splitlines())
    figure, axes = plt.subplots(figsize=(8, 0.7 * len(ROOMS)))
    for (upper, lower), count in sorted(edges.items()):
        top, bottom = ROOMS.index(upper), ROOMS.index(lower)
        side = 1 if (top - bottom) % 2 else -1
        bend = 0.06 * (top - bottom) + 0.02
        axes.annotate(
            "",
            (0.42 * side, bottom),
            (0.42 * side, top),
            arrowprops={
                "arrowstyle": "-|>", "color": "#0072b2" if side > 0 else "#d55e00", "alpha": 0.55,
                "lw": 0.5 + 0.25 * min(count, 12),
                "connectionstyle": f"arc3,rad={-side * bend * 3 / (top - bottom):.3f}",
                "shrinkA": 2, "shrinkB": 2,
            },
        )  # fmt: skip
    for height, name in enumerate(ROOMS):
        axes.text(
            0, height, f"{name}\n{lines[name]:,} lines", ha="center", va="center", fontsize=9,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#444444"},
        )  # fmt: skip
    axes.set(xlim=(-2.2, 2.2), ylim=(-0.7, len(ROOMS) - 0.3))
    axes.axis("off")
    axes.set_title("feddbe's packages: an arrow goes to what is imported, always downwards", fontsize=10)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "imports.png")
