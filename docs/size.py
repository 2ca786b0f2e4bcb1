"""Size of the sources: `python -m docs.size` prints files, lines, imports and calls to the first step."""

from __future__ import annotations

import ast
import io
import tempfile
import tokenize
import traceback
from pathlib import Path

from docs.imports import PACKAGE, imported_modules, modules, package_of


def count_code_lines(source: str) -> int:
    """Return the number of lines with code: without docstrings, comments and blank lines."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def count_arrows() -> tuple[int, int]:
    """Return the number of imports between modules, and between packages."""
    between_modules = {(module, used) for module in modules() for used in imported_modules(module)}
    between_packages = {(package_of(module), package_of(used)) for module, used in between_modules}
    return len(between_modules), sum(first != second for first, second in between_packages)


def frames_to_first_step() -> list[traceback.FrameSummary]:
    """Return the calls of feddbe from `feddbe compare` to the training of the first client."""
    from feddbe.cli import main
    from feddbe.training import autograd

    frames = list[traceback.FrameSummary]()

    def stop(*_: object) -> None:
        if not frames:
            frames.extend(f for f in traceback.extract_stack()[:-1] if f"{PACKAGE}/" in f.filename)
        raise KeyboardInterrupt

    train, autograd.train = autograd.train, stop  # type: ignore[assignment]
    options = ["--rounds", "1", "--clients", "3", "--partition", "iid", "--quiet"]
    options += ["--engine", "serial", "--trainer", "autograd"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            main(["compare", "fedavg", *options, "--out", f"{folder}/runs"])
    finally:
        autograd.train = train
    return frames


def main() -> None:
    files = list(modules().values())
    sources = [path.read_text(encoding="utf-8") for path in files]
    lines = sum(len(source.splitlines()) for source in sources)
    code_lines = sum(map(count_code_lines, sources))
    between_modules, between_packages = count_arrows()
    packages = {package_of(module) for module in modules()}
    print(f"files {len(files)}, lines {lines}, lines per file {lines / len(files):.0f}")
    print(f"lines of code {code_lines}, docstrings, comments and blank lines {lines - code_lines}")
    print(f"packages {len(packages)}, imports between modules {between_modules}, packages {between_packages}")
    frames = frames_to_first_step()
    in_files = len({frame.filename for frame in frames})
    print(f"frames from the command to the first local training {len(frames)}, in {in_files} files")
    for frame in frames:
        print(f"  {Path(frame.filename).relative_to(PACKAGE)} {frame.name}")


if __name__ == "__main__":
    main()
