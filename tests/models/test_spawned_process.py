"""Every model in a spawned process, as on macOS and Windows, with equal bits."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.models.registry import MODELS
from feddbe.runs.experiment import Experiment, resolve
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import sha256
from feddbe.training.task import Context

SHAPES = {
    "cnn": (1, 16, 16), "cnn_small": (1, 8, 8), "mlp": (5,), "har_cnn": (9, 1, 32), "resnet18": (3, 32, 32),
    "fasttext": (12,), "file": (5,),
}  # fmt: skip
FILE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, size, classes):
        super().__init__()
        self.first, self.last = nn.Linear(size, 6), nn.Linear(6, classes)
        self.between = lambda x: x.relu()  # cannot be pickled, nor can what is defined in a function

    def forward(self, x):
        return self.last(self.between(self.first(x)))

def build(shape, classes):
    class Local(Mine):
        pass
    return Local(shape[0], classes)
"""


def experiment(model: str, folder: Path) -> Experiment:
    """Return an experiment of two clients with twelve random samples each."""
    rng, shape = np.random.default_rng(1), SHAPES[model]
    words = 30 if model == "fasttext" else 0
    x = rng.integers(1, 30, (24, *shape)) if words else rng.normal(size=(24, *shape))
    dataset = Dataset(
        model,
        torch.from_numpy(x.astype(np.int32 if words else np.float32)),
        torch.arange(24) % 3,
        3,
        client=np.repeat([0, 1], 12),
        num_words=words,
    )
    (folder / "mine.py").write_text(FILE)
    named = f"{folder / 'mine.py'}:build" if model == "file" else model
    return resolve("fedavg+dbe", Config(model=named, batch_size=4, lr=0.1), dataset=dataset)


def run_one_round(task: Any, method: Any) -> tuple[Any, ...]:
    """Return the results of one client's round, and a hash of another initialization."""
    server = method.server_init(Context(task, 0)) | {"mean": torch.zeros(task.model.feature_shape)}
    result = run_client(
        task, method, ClientTask(1, 1, "train", evaluate=True, evaluate_after=True), server, None
    )
    assert result.private is not None
    reinitialized = sha256(task.model.reinitialized(3))
    return (
        sha256(result.upload),
        sha256(result.private),
        reinitialized,
        result.training_metrics.get("loss"),
        result.metrics,
    )


def child(pipe: Connection) -> None:
    torch.set_num_threads(1)
    for pickled in iter(pipe.recv, None):
        pipe.send(run_one_round(*pickle.loads(pickled)))


def test_every_model_gives_equal_bits_in_a_spawned_process(tmp_path: Path) -> None:
    assert SHAPES.keys() == {*MODELS, "file"}
    experiments = {model: experiment(model, tmp_path) for model in SHAPES}
    pickled = {model: pickle.dumps((e.task, e.method)) for model, e in experiments.items()}
    context = multiprocessing.get_context("spawn")
    parent, child_end = context.Pipe()
    process = context.Process(target=child, args=(child_end,), daemon=True)
    process.start()
    child_end.close()
    try:
        for model, e in experiments.items():
            parent.send(pickled[model])
            assert parent.recv() == run_one_round(e.task, e.method), model
    finally:
        parent.send(None)
        process.join(10)
    twice = pickle.loads(pickle.dumps(pickle.loads(pickled["file"])))  # Ray passes things on
    assert run_one_round(*twice) == run_one_round(experiments["file"].task, experiments["file"].method)
