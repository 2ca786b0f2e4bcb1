"""Imports between packages: `python -m docs.imports` draws docs/images/imports.png."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "feddbe"
PACKAGES = [
    "base", "config", "data", "models", "training", "methods", "metrics", "results", "callbacks",
    "simulation", "runs", "reporting", "studies", "api", "export", "federation", "testing", "cli",
]  # fmt: skip
"""Packages from bottom to top: a package may import those before it."""
_BASE = ("errors", "paths", "seeds", "state")
_OUTSIDE = ("", "__main__")
"""Modules that only define the public names and the entry point."""


@cache
def modules() -> dict[str, Path]:
    """Return the files of all modules by their names below feddbe, as in `data.split`."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in _OUTSIDE:
            files[name] = path
    return files


def package_of(module: str) -> str:
    """Return the package of a module; `base` for single modules at the bottom."""
    first = module.split(".")[0]
    return "base" if first in _BASE else first


@cache
def imported_modules(module: str) -> frozenset[str]:
    """Return the modules that a module imports, also inside functions, except for type checking."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    type_checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    imported = set()
    for node in ast.walk(tree):
        if id(node) in type_checking:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "feddbe":
            base = node.module.removeprefix("feddbe").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                imported.add(inner if inner in modules() else base)
        elif isinstance(node, ast.Import):
            names = [alias.name.removeprefix("feddbe.") for alias in node.names if "feddbe." in alias.name]
            imported.update(names)
    return frozenset(imported - {"", module})


def count_imports() -> Counter[tuple[str, str]]:
    """Return the number of imports by (importing package, imported package)."""
    pairs = (
        (package_of(module), package_of(imported))
        for module in modules()
        for imported in imported_modules(module)
    )
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def draw(path: Path) -> None:
    """Draw the packages from bottom to top, with an arrow per pair whose width is the number of imports."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    edges = count_imports()
    lines = Counter[str]()
    for module, file in modules().items():
        lines[package_of(module)] += len(file.read_text(encoding="utf-8").splitlines())
    figure, axes = plt.subplots(figsize=(8, 0.7 * len(PACKAGES)))
    for (upper, lower), count in sorted(edges.items()):
        top, bottom = PACKAGES.index(upper), PACKAGES.index(lower)
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
    for height, name in enumerate(PACKAGES):
        axes.text(
            0, height, f"{name}\n{lines[name]:,} lines", ha="center", va="center", fontsize=9,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#444444"},
        )  # fmt: skip
    axes.set(xlim=(-2.2, 2.2), ylim=(-0.7, len(PACKAGES) - 0.3))
    axes.axis("off")
    axes.set_title("Packages of feddbe: arrows point to imported packages, always downwards", fontsize=10)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "imports.png")
