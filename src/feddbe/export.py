"""One client's model as a plain module: predictions with it, and its export as files without feddbe.

    logits = h(f(x) + p_i)                      most methods; p_i if there is PRBM
    logits = h(z) + h_p(z) with z = f(x)        FedRoD

The parameters are those with which the round was evaluated, global and private parts together, recomputed
from the run's file (`runs/reopen.py`). Preprocessing, labels and names of clients are those that the run
stored. The module must reproduce the method's logits on the client's test data and the run's accuracy;
otherwise it is not returned.
"""

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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from feddbe.config.user_code import NO_PERMISSION, Permission, make_permission
from feddbe.data import rows
from feddbe.data.dataset import Dataset, Preprocessing
from feddbe.data.registry import dataset_from_object
from feddbe.errors import FeddbeError, InvalidInputError, one_line, truncate
from feddbe.methods.base import PERSONAL, Method
from feddbe.models.registry import MeanEmbedding, ModelSource
from feddbe.paths import expand_path
from feddbe.runs import folders
from feddbe.runs.reopen import Checkpoint, load_experiment
from feddbe.runs.store import RunStore, corrupt_run_error
from feddbe.state import State, strip_prefix
from feddbe.training.trainer import ClientTrainer

_BATCH = 256
_CLOSE = 1e-4
"""Allowed difference of logits, relative to the largest, because sums may have another order."""

_EDITED = (
    "columns, categories or labels of the training data have changed since the run started; "
    "the stored ones are used"
)


class DeployedModel(nn.Module):
    """Body, p_i, head, and for some methods a personal head whose logits are added."""

    def __init__(
        self, body: nn.Module, head: nn.Module, prbm: Tensor | None, personal_head: nn.Module | None
    ) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.personal_head = personal_head  # the attribute is a prefix of names in exported files
        self.prbm = None if prbm is None else nn.Parameter(prbm.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if self.prbm is not None:
            z = z + self.prbm
        logits: Tensor = self.head(z)
        return logits if self.personal_head is None else logits + self.personal_head(z)


@dataclass(frozen=True)
class ClientModel:
    """A client's model, and the information needed to use it."""

    module: DeployedModel
    preprocessing: Preprocessing
    """Preprocessing of new rows, as the run stored it."""
    description: dict[str, Any]
    """Run, method, client, round and accuracy, as plain values."""
    sample: Tensor
    """Some of the client's inputs."""
    logits: Tensor
    """The run's logits for `sample`."""


def load_client_model(
    run: str | Path,
    client: int | str,
    round: str = "best",
    data: Any = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
) -> ClientModel:
    """Return the model that a client uses after a round.

    Args:
        run: Folder of the run.
        client: Name or number of the client.
        round: `best` or `last`.
        data: The run's data, if it was a Python object.
        model: The run's model, if it was a Python object.
        allowed: Files whose code may be executed.

    Raises:
        InvalidInputError: The client or round does not exist, or the client has no test data or no model.
        FeddbeError: The module does not reproduce the run's logits or accuracy.
    """
    store = RunStore.open(folders.resolve_run(str(run)))
    try:
        experiment = load_experiment(store, dataset=dataset_from_object(data), model=model, allowed=allowed)
        checkpoint = Checkpoint(store, experiment, round)
        task, method = experiment.task, experiment.method
        dataset = task.dataset
        preprocessing, labels, names = _stored_data(store, dataset)
        index = _find_client(client, names, task.members)
        trainer, state = checkpoint.inference_model(index)
        has_changed = (preprocessing, labels) != (dataset.preprocessing_spec, list(dataset.labels))
        description = {
            "run": str(store.folder), "method": experiment.name, "data": experiment.config["data"],
            "model": experiment.config["model"], "client": index,
            "client_name": names[index] if names else str(index), "round": checkpoint.round,
            "labels": labels, "remark": _EDITED if has_changed else "",
        }  # fmt: skip
        client_model = make_client_model(trainer, state, method, preprocessing, description)
        accuracy, test_rows = client_model.description["accuracy"], client_model.description["test_rows"]
        _require_stored_accuracy(accuracy, test_rows, checkpoint, index)
        return client_model
    finally:
        store.close()


def make_client_model(
    trainer: ClientTrainer,
    state: State,
    method: Method,
    preprocessing: Preprocessing,
    description: dict[str, Any],
) -> ClientModel:
    """Return a client's model as a plain module that reproduces the method's logits on its test data.

    Args:
        trainer: Trainer of the client.
        state: Parameters with which the client predicts.
        method: The federated method.
        preprocessing: Preprocessing of new rows.
        description: Facts about the model; the accuracy and the number of test rows are added.

    Raises:
        InvalidInputError: The client has no test data or no model.
        FeddbeError: The module does not reproduce the logits.
    """
    test_indices, dataset = trainer.rows["test"], trainer.task.dataset
    if not len(test_indices):
        raise InvalidInputError(
            f"{dataset.describe_client(description['client'])} has no test data to verify its model; "
            "choose another --client"
        )
    logits, y = trainer.predict(
        state, lambda p, x: method.logits(trainer, p, x), track=method.inference_track
    )
    module = _build_module(trainer, state, method.inference_track, method.base_name)
    sample = dataset.inputs(dataset.x[torch.from_numpy(test_indices)[:64]])
    expected = logits[:64].clone()
    _require_equal_logits(module, sample, expected, method.base_name)
    accuracy = float((logits.argmax(1) == y).double().mean())
    facts = {"test_rows": len(y), "accuracy": accuracy}
    return ClientModel(module, preprocessing, description | facts, sample, expected)


def _find_client(client: int | str, names: Sequence[str], members: int) -> int:
    """Return the index of a client, given by its name in the data or by its number."""
    text = str(client)
    if text in names:
        index = names.index(text)
    elif text.isdecimal() and len(text) < 19:
        index = int(text)
    else:
        known = f": {truncate(', '.join(names))}" if names else f" by number, 0..{members - 1}"
        raise InvalidInputError(f"unknown client '{truncate(text)}'; the run has {members}{known}")
    if index >= members:
        raise InvalidInputError(
            f"client = {text}; the run trained {members} clients, allowed: 0..{members - 1}"
        )
    return index


def _stored_data(store: RunStore, dataset: Dataset) -> tuple[Preprocessing, list[str], list[str]]:
    """Return preprocessing, class names and client names as they were when the run started.

    The training data may have been edited since without a change of its hash.
    """
    stored = {key: store.meta(key) for key in ("preprocessing", "label_names", "client_names", "labels")}
    try:
        preprocessing = dataset.preprocessing_spec.restore(stored["preprocessing"])
    except ValueError:
        raise corrupt_run_error(store.folder, "metadata: preprocessing") from None
    labels, names = stored["label_names"], stored["client_names"]
    if not _are_names(labels) or len(labels) != dataset.classes:
        raise corrupt_run_error(store.folder, "metadata: label_names")
    if not _are_names(names) or (names and len(names) != len(dataset.client_names)):
        raise corrupt_run_error(store.folder, "metadata: client_names")
    is_large = stored["labels"] is None  # then names of clients are not stored
    return preprocessing, labels, list(dataset.client_names) if is_large else names


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _build_module(trainer: ClientTrainer, state: State, track: str, method_name: str) -> DeployedModel:
    model = trainer.task.model
    if not model.parameters.keys() <= state.keys():
        raise InvalidInputError(f"{method_name} has no model to export")
    statistics = trainer.buffers(track)
    body, head = (_replace_mean_embedding(half) for half in model.copy_halves({**state, **statistics}))
    personal, personal_head = strip_prefix(state, PERSONAL), None
    if personal:
        _, personal_head = model.copy_halves({**state, **personal, **statistics})
        personal_head = _replace_mean_embedding(personal_head)
    return DeployedModel(body, head, trainer.prbm, personal_head).eval().requires_grad_(False)


def _replace_mean_embedding(module: nn.Module) -> nn.Module:
    """Replace fastText's mean embedding, which trains with sparse gradients, by `nn.EmbeddingBag`."""
    if isinstance(module, MeanEmbedding):
        return _to_embedding_bag(module)
    for name, child in module.named_children():
        if isinstance(child, MeanEmbedding):
            setattr(module, name, _to_embedding_bag(child))
    return module


def _to_embedding_bag(layer: MeanEmbedding) -> nn.EmbeddingBag:
    words, size = layer.weight.shape
    bag = nn.EmbeddingBag(words, size, mode="mean")
    bag.load_state_dict({"weight": layer.weight.detach()})
    return bag


def _require_equal_logits(module: nn.Module, sample: Tensor, expected: Tensor, method_name: str) -> None:
    with torch.inference_mode():
        logits = module(sample)
    if not is_close(logits, expected):
        raise FeddbeError(
            f"{method_name}'s predictions cannot be reproduced by a plain module (logits differ by "
            f"{float((logits - expected).abs().max()):.2g}): its model cannot be exported"
        )


def _require_stored_accuracy(accuracy: float, test_rows: int, checkpoint: Checkpoint, client: int) -> None:
    """Reject a model whose accuracy on the client's test data differs from the stored one, if there is one.

    Other versions or another machine can change the last bits, and with them one prediction in a hundred.
    """
    name = checkpoint.experiment.task.dataset.describe_client(client)
    moment = "adapted" if checkpoint.experiment.method.adapts else "before"
    where = "AND client = ? AND moment = ? AND name = 'accuracy'"
    for record in checkpoint.store.records(checkpoint.round, where, client, moment):
        stored = record.value
        if stored is not None and abs(accuracy - stored) > max(1.5 / test_rows, 0.01):
            raise FeddbeError(
                f"the model of {name} has an accuracy of {100 * accuracy:.2f} % on its test data "
                f"now, and of {100 * stored:.2f} % in the run: code, packages or data have changed. "
                "The model is not exported"
            )


def is_close(logits: Tensor, expected: Tensor) -> bool:
    """Return True if the logits are equal up to rounding."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return logits.shape == expected.shape and bool(((logits - expected).abs() <= _CLOSE * largest).all())


def predict(
    run: str | Path,
    client: int | str,
    data: str | Path,
    *,
    round: str = "best",
    trained_on: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """Return the predictions of a client's model for the rows of a file.

    Args:
        run: Folder of the run.
        client: Name or number of the client.
        data: File with new rows.
        round: `best` or `last`.
        trained_on: The run's data, if it was a Python object.
        model: The run's model, if it was a Python object.
        code: Files whose code may be executed, if their content is that of the run.
        trust: Allow all code of the run, because it is the user's own.

    Returns:
        The model's description, with `labels`, and `rows` with `label` and `probabilities` of each row.

    Raises:
        InvalidInputError: Run or client does not exist, or the file's columns or shapes are not the model's.
    """
    client_model = load_client_model(
        run, client, round, trained_on, model, make_permission(code, trust=trust)
    )
    path = expand_path(data)
    try:
        x = torch.from_numpy(rows.read_rows(client_model.preprocessing.to_json(), path))
    except OSError as error:
        raise InvalidInputError(f"cannot read '{path}': {error.strerror or one_line(error)}") from None
    except ValueError as error:
        raise InvalidInputError(one_line(error)) from None
    with torch.inference_mode():
        batches = [client_model.module(batch).softmax(dim=1) for batch in torch.split(x, _BATCH)]
    labels = client_model.description["labels"]
    predictions = []
    for probabilities in torch.cat(batches):
        label = labels[int(probabilities.argmax())]
        predictions.append({"label": label, "probabilities": [float(value) for value in probabilities]})
    return {**client_model.description, "rows": predictions}


FILES = {
    "model.safetensors", "model.pt2", "model.onnx", "preprocessing.json", "requirements.txt", "rows.py",
    "score.py",
}  # fmt: skip
"""Files that an export may have."""

_SCORE_SCRIPT = '''"""Predict labels of new rows: python score.py {example}

Needs the packages in requirements.txt, but not feddbe.
"""

import json
import signal
import sys
from pathlib import Path

if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no error if the output is closed, as by `| head`
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
    reason = getattr(error, "strerror", None)  # of an error of the file system
    message = f"cannot read '{{sys.argv[1]}}': {{reason}}" if reason else str(error)
    sys.exit(rows.replace_controls(message))
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
    """Export the model that a client uses to a folder that does not need feddbe.

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

    Returns:
        The new folder.

    Raises:
        InvalidInputError: The model cannot be exported, or the folder cannot be written or replaced.
    """
    client_model = load_client_model(run, client, round, data, model, make_permission(code, trust=trust))
    return write_client_model(client_model, out, onnx=onnx)


def write_client_model(client_model: ClientModel, out: str | Path | None, *, onnx: bool = False) -> Path:
    """Write a client's model to a folder and return the folder; the arguments are those of `export_model`."""
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
