"""The folder of an exported model: weights, program, preprocessing, and a script for predictions."""

from __future__ import annotations

import io
import json
import logging
import os
import platform
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from feddbe.config.user_code import make_permission
from feddbe.data import rows
from feddbe.errors import FeddbeError, InvalidInputError, one_line, truncate
from feddbe.export.client_model import ClientModel, is_close, load_client_model
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path

FILES = {
    "model.safetensors", "model.pt2", "model.onnx", "preprocessing.json", "requirements.txt", "rows.py",
    "score.py",
}  # fmt: skip
"""Files that an export may have."""

_SCORE_SCRIPT = '''"""Predict labels of new rows: python score.py {example}

Needs the packages in requirements.txt, but not feddbe.
"""

import json
import sys
from pathlib import Path

USAGE = "usage: python score.py FILE, as in: python score.py {example}"
if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    is_help = sys.argv[1:] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if is_help else sys.stderr)
    sys.exit(0 if is_help else 2)

import torch

import rows

folder = Path(__file__).parent
preprocessing = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
try:
    x = torch.from_numpy(rows.read_rows(preprocessing, Path(sys.argv[1])))
except (OSError, ValueError, MemoryError) as error:
    sys.exit(rows.replace_controls(str(error)))
with torch.inference_mode():
    probabilities = torch.export.load(folder / "model.pt2").module()(x).softmax(dim=1)
for row in probabilities:
    label = rows.replace_controls(preprocessing["labels"][int(row.argmax())])
    print(label, *(f"{{value:.4f}}" for value in row))
'''


def export_model(
    run: str | Path,
    client: int | str,
    *,
    round: str = "best",
    out: str | Path | None = None,
    onnx: bool = False,
    data: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
) -> Path:
    """Write the model that a client uses to a folder that does not need feddbe, and return the folder.

    The folder has `model.safetensors`, `model.pt2` (a program of `torch.export`), `preprocessing.json`,
    `rows.py`, `score.py` and `requirements.txt`. Each program is executed and must give the run's logits.
    The folder appears when it is complete, and replaces an older export.

    Args:
        run: Folder of the run.
        client: Name or number of the client.
        round: `best` or `last`.
        out: The new folder; by default named after run and client.
        onnx: Also write `model.onnx`.
        data: The run's data, if it was a Python object.
        model: The run's model, if it was a Python object.
        code: Files whose code may be executed, if their content is that of the run.
        trust: Allow all code of the run, because it is the user's own.

    Raises:
        InvalidInputError: The model cannot be exported, or the folder cannot be written or replaced.
    """
    client_model = load_client_model(run, client, round, data, model, make_permission(code, trust=trust))
    description = client_model.description
    name = f"{Path(description['run']).name}-client-{description['client_name']}"
    folder = expand_path(out or "".join(c if c.isalnum() or c in "+-._" else "_" for c in name))
    try:
        with replace_folder(folder, FILES, "preprocessing.json") as new:
            _write_files(client_model, new, onnx=onnx)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InvalidInputError(f"cannot write to '{folder}': {reason}; its content is unchanged") from None
    return folder


def _write_files(client_model: ClientModel, folder: Path, *, onnx: bool) -> None:
    preprocessing = client_model.preprocessing.to_json()
    content = json.dumps(preprocessing | client_model.description, indent=1)
    (folder / "preprocessing.json").write_text(content, encoding="utf-8")
    # copies, because safetensors rejects tensors that share memory
    weights = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in client_model.module.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights))
    _write_program(client_model, folder / "model.pt2")
    if onnx:
        _write_onnx(client_model, folder / "model.onnx")
    (folder / "rows.py").write_bytes(Path(rows.__file__).read_bytes())
    kind = preprocessing["kind"]
    packages = ["torch", "numpy", *(["pillow"] if kind == "images" else [])]
    # without torch's suffix, as in 2.9.0+cpu, which other indexes do not have
    requirements = [f"{name}=={version(name).partition('+')[0]}\n" for name in packages]
    (folder / "requirements.txt").write_text("".join(requirements), encoding="utf-8")
    example = {"images": "new.png", "arrays": "new.npz"}.get(kind, "new.csv")
    (folder / "score.py").write_text(_SCORE_SCRIPT.format(example=example), encoding="utf-8")


def _require_run_logits(module: nn.Module, client_model: ClientModel, file: str) -> None:
    """Raise unless a written program gives the run's logits, also for a batch of another size."""
    with torch.inference_mode():
        logits, first_logits = module(client_model.sample), module(client_model.sample[:1])
    if not (is_close(logits, client_model.logits) and is_close(first_logits, client_model.logits[:1])):
        raise FeddbeError(f"{file} does not give the run's logits: this is a bug in feddbe, please report it")


def _example_batch(client_model: ClientModel) -> tuple[tuple[torch.Tensor], tuple[dict[int, Any]]]:
    """Return an example of two rows, and the declaration that their number is variable."""
    x = client_model.sample[:2]
    if len(x) < 2:
        x = x.repeat(2, *[1] * (x.dim() - 1))
    return (x,), ({0: torch.export.Dim("batch", min=1)},)


def _write_program(client_model: ClientModel, path: Path) -> None:
    """Write the program of `torch.export`, which runs without the model's code."""
    example, dynamic = _example_batch(client_model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about internals of torch
        try:
            program = torch.export.export(client_model.module, example, dynamic_shapes=dynamic)
        except Exception as error:  # a model that cannot be traced raises many kinds of errors
            raise InvalidInputError(f"torch.export does not support this model: {one_line(error)}") from error
        content = io.BytesIO()  # torch's own writer aborts the process when a disk is full
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())
        _require_run_logits(torch.export.load(path).module(), client_model, "model.pt2")


def _write_onnx(client_model: ClientModel, path: Path) -> None:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise InvalidInputError(
            "ONNX needs its libraries; install them with: pip install 'feddbe[onnx]'"
        ) from None
    example, dynamic = _example_batch(client_model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # for example that torchvision is missing
        try:
            torch.onnx.export(
                client_model.module, example, path, dynamo=True, dynamic_shapes=dynamic, input_names=["x"],
                output_names=["logits"], external_data=False, verbose=False,
            )  # fmt: skip
        except Exception as error:
            raise InvalidInputError(f"ONNX does not support this model: {one_line(error)}") from error
        finally:
            logging.disable(logging.NOTSET)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"x": client_model.sample.numpy()})[0])
    if not is_close(logits, client_model.logits):
        raise FeddbeError("model.onnx does not give the run's logits: omit --onnx, and please report it")


_CACHE = "__pycache__"
"""Folder that Python adds when a script in the export is executed."""


@contextmanager
def replace_folder(folder: Path, names: Collection[str], mark: str) -> Iterator[Path]:
    """Yield a new folder to write into, which replaces `folder` when the block ends.

    If the block fails or the process is killed, `folder` stays unchanged. Nothing is written through a link,
    neither `folder` itself nor one in it.

    Args:
        folder: Path of the result. It may not exist, be empty, or have an older result.
        names: Files that a result may have; a folder with others is not replaced.
        mark: The file that every result has.

    Raises:
        InvalidInputError: `folder` is a link or has other files.
        OSError: It cannot be written.
    """
    _check_replaceable(folder, names, mark)
    target = folder.parent.resolve() / folder.name
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    new = target.with_name(f"{_temporary_prefix(target)}{os.getpid()}-{secrets.token_hex(4)}.new")
    old = new.with_suffix(".old")
    new.mkdir()
    try:
        yield new
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_replaceable(folder: Path, names: Collection[str], mark: str) -> None:
    """Reject a folder that is a link, the working directory, or has other files than a result."""
    if folder.is_symlink():
        raise InvalidInputError(f"'{folder}' is a link, which is never written through; choose another --out")
    if folder.name in ("", "..") or (folder.exists() and Path.cwd().is_relative_to(folder.resolve())):
        raise InvalidInputError(
            f"'{folder}' is the working directory or above it; choose a folder in it for --out"
        )
    existing = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = existing - {*names, _CACHE}
    if others or (existing and mark not in existing):
        name = truncate(min(others or existing))
        raise InvalidInputError(f"'{folder}' has other files ('{name}'); choose another --out")


def _temporary_prefix(target: Path) -> str:
    """Return the prefix of unfinished folders that processes of this machine create for this target."""
    machine = "".join(letter for letter in platform.node() if letter.isalnum())
    return f".{target.name}.{machine}-"


def _remove_leftovers(target: Path) -> None:
    """Remove unfinished folders of processes of this machine that were killed."""
    pattern = re.compile(rf"{re.escape(_temporary_prefix(target))}(\d+)-[0-9a-f]+\.(new|old)")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        return True
    return True
