"""The folder that a model goes home in: weights, program, preprocessing, and a script that scores."""

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
    "model.safetensors", "model.pt2", "model.onnx", "preprocessing.json", "rows.py", "score.py",
}  # fmt: skip
"""All that an export may have."""

_SCORE = '''"""Scores new rows: python score.py new{suffix}; it needs {needs}, and nothing of feddbe."""

import json
import sys
from pathlib import Path

import torch

import rows

here = Path(__file__).parent
about = json.loads((here / "preprocessing.json").read_text(encoding="utf-8"))
try:
    x = torch.from_numpy(rows.read(about, Path(sys.argv[1])))
except (OSError, ValueError) as error:
    sys.exit(str(error))
with torch.inference_mode():
    p = torch.export.load(here / "model.pt2").module()(x).softmax(dim=1)
for row in p:
    print(about["labels"][int(row.argmax())], *(f"{{value:.4f}}" for value in row))
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
    """Write the model that a client deploys to a folder that needs no feddbe, and return the folder.

    `model.safetensors`; `model.pt2`, a program of `torch.export`; `model.onnx` if asked for;
    `preprocessing.json`, `rows.py` and `score.py`. Each program is tried, and must give the run's logits. The
    folder appears when it is whole, in place of an older export.
    `data` and `model`: the run's, if they were given as objects. Code in files is executed only if `code`
    names the files or `trust` says that the run is your own, and if its content is the same.
    """
    taken = load_client_model(run, client, round, data, model, make_permission(code, trust=trust))
    name = f"{Path(taken.about['run']).name}-client-{taken.about['client_name']}"
    folder = expand_path(out or "".join(c if c.isalnum() or c in "+-._" else "_" for c in name))
    try:
        with replace_folder(folder, FILES, "preprocessing.json") as new:
            _write(taken, new, onnx=onnx)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InvalidInputError(
            f"cannot write to '{folder}': {reason}; what was there is as it was"
        ) from None
    return folder


def _write(client_model: ClientModel, folder: Path, *, onnx: bool) -> None:
    about = client_model.preprocessing.to_json()
    (folder / "preprocessing.json").write_text(
        json.dumps(about | client_model.about, indent=1), encoding="utf-8"
    )
    # each tensor in memory of its own: safetensors refuses what is shared
    weights = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in client_model.module.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights))
    _program(client_model, folder / "model.pt2")
    if onnx:
        _onnx(client_model, folder / "model.onnx")
    (folder / "rows.py").write_bytes(Path(rows.__file__).read_bytes())
    needs = "torch, numpy, Pillow" if about["kind"] == "images" else "torch, numpy"
    suffix = {"images": ".png", "arrays": ".npz"}.get(about["kind"], ".csv")
    (folder / "score.py").write_text(_SCORE.format(needs=needs, suffix=suffix), encoding="utf-8")


def _check(module: nn.Module, client_model: ClientModel, what: str) -> None:
    """All that is written must give the run's logits, also for a batch of another size."""
    with torch.inference_mode():
        whole, one = module(client_model.sample), module(client_model.sample[:1])
    if not (is_close(whole, client_model.logits) and is_close(one, client_model.logits[:1])):
        raise FeddbeError(f"{what} does not give the run's logits: a fault of feddbe's, please report it")


def _batch(client_model: ClientModel) -> tuple[tuple[torch.Tensor], tuple[dict[int, Any]]]:
    """An example of two rows, and the word that there may be any number of them."""
    x = (
        client_model.sample[:2]
        if len(client_model.sample) > 1
        else client_model.sample.repeat(2, *[1] * (client_model.sample.dim() - 1))
    )
    return (x,), ({0: torch.export.Dim("batch", min=1)},)


def _program(client_model: ClientModel, path: Path) -> None:
    """torch.export's: runs without the model's code, which a user's own model needs."""
    example, dynamic = _batch(client_model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what torch says about its own insides
        try:
            program = torch.export.export(client_model.module, example, dynamic_shapes=dynamic)
        except Exception as error:  # it refuses what it cannot trace in many ways
            raise InvalidInputError(f"torch.export cannot take this model: {one_line(error)}") from error
        content = io.BytesIO()  # torch's own writer aborts the process when a disk is full
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())
        _check(torch.export.load(path).module(), client_model, "model.pt2")


def _onnx(client_model: ClientModel, path: Path) -> None:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise InvalidInputError(
            "ONNX needs its libraries; install them with: pip install 'feddbe[onnx]'"
        ) from None
    example, dynamic = _batch(client_model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # that torchvision is not there, for one
        try:
            torch.onnx.export(
                client_model.module, example, path, dynamo=True, dynamic_shapes=dynamic, input_names=["x"],
                output_names=["logits"], external_data=False, verbose=False,
            )  # fmt: skip
        except Exception as error:
            raise InvalidInputError(f"ONNX cannot take this model: {one_line(error)}") from error
        finally:
            logging.disable(logging.NOTSET)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"x": client_model.sample.numpy()})[0])
    if not is_close(found, client_model.logits):
        raise FeddbeError("model.onnx does not give the run's logits: leave --onnx out, and please report it")


_CACHE = "__pycache__"
"""Python adds it when a script in the folder is executed."""


@contextmanager
def replace_folder(folder: Path, names: Collection[str], mark: str) -> Iterator[Path]:
    """Give a new folder to write into, which takes the place of `folder` when the block ends.

    If the block fails or the process is killed, what was there stays as it was. Nothing is written through a
    link, neither `folder` itself nor one in it.

    Args:
        folder: Where the result is to be. It may not exist, be empty, or hold an older result.
        names: Files that a result may have; a folder with others is not replaced.
        mark: The one of them that every result has.

    Raises:
        BadInput: `folder` is a link or holds something else.
        OSError: It cannot be written.
    """
    _check_replaceable(folder, names, mark)
    place = folder.parent.resolve() / folder.name
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    new = place.with_name(f"{_prefix(place)}{os.getpid()}-{secrets.token_hex(4)}.new")
    old = new.with_suffix(".old")
    new.mkdir()
    try:
        yield new
        if place.exists():
            place.rename(old)
        try:
            new.rename(place)
        except OSError:
            if old.exists():
                old.rename(place)
            raise
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_replaceable(folder: Path, names: Collection[str], mark: str) -> None:
    """Refuse a folder that is a link, the working directory, or holds other files than a result's."""
    if folder.is_symlink():
        raise InvalidInputError(
            f"'{folder}' is a link, through which nothing is written; choose another --out"
        )
    if folder.name in ("", "..") or (folder.exists() and Path.cwd().is_relative_to(folder.resolve())):
        raise InvalidInputError(
            f"'{folder}' is the working directory or above it; choose a folder in it for --out"
        )
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = there - {*names, _CACHE}
    if others or (there and mark not in there):
        shown = truncate(min(others or there))
        raise InvalidInputError(f"'{folder}' holds something else ('{shown}'); choose another --out")


def _prefix(place: Path) -> str:
    """Return how names of unfinished folders begin that a process on this machine makes for this place."""
    machine = "".join(letter for letter in platform.node() if letter.isalnum())
    return f".{place.name}.{machine}-"


def _remove_leftovers(place: Path) -> None:
    """Remove what processes of this machine left here that were killed."""
    pattern = re.compile(rf"{re.escape(_prefix(place))}(\d+)-[0-9a-f]+\.(new|old)")
    for path in place.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's process
        return True
    return True
