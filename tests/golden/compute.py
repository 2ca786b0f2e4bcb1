"""Golden values: `python -m tests.golden.compute` rewrites values.json after an intended change of numbers.

Training uses float64 and autograd, so that numbers agree to 1e-9 on any processor. Random choices are exact.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddbe import seeds
from feddbe.config.options import parse_options
from feddbe.data import shift
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.data.split import partition
from feddbe.metrics.representations.discrepancy import discrepancy
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.mdl import Settings, mdl
from feddbe.metrics.representations.points import make_points
from feddbe.metrics.representations.tsne import tsne
from feddbe.state import State
from feddbe.studies.tune import tune
from feddbe.training.fit_plan import Batches
from tests.small_runs import COMBINATIONS, Outcome, experiment, make_dataset, run_outcome

VALUES = Path(__file__).with_name("values.json")
SIZES = (60, 44, 28, 36, 50)
POOLED = ("drift", "probe")
"""Metrics of representations, which are float32."""
METRICS = ("accuracy", "loss", "auc", *POOLED)
MODELS = ("mlp", "cnn_small")
VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "noise on the mean": ("fedavg+dbe(s=0.1,q=0.2)", {}),
    "mean with a guarantee": ("fedavg+dbe(epsilon=8,delta=1e-5,clip=1,init_mean=start)", {}),
    "few clients in the initialization": ("fedavg+dbe(init_clients=2)", {}),
    "projection head": ("moon(projection=8)", {}),
    "two models to each": ("fedfomo(m=2)", {}),
    "new clients": ("fedavg+dbe", {"new_clients": 2, "adapt_epochs": 2}),
    "new clients adapt PRBM": ("fedavg+dbe", {"new_clients": 2, "adapt_epochs": 2, "adaptation": "prbm"}),
    "some evaluate": ("fedavg", {"eval": "sample:2"}),
    "validation": ("fedavg+dbe", {"validation": 0.2}),
    "pooled": ("fedavg+dbe", {"metrics": "accuracy,drift,probe"}),
    "momentum, decay, clipping": (
        "fedavg+dbe", {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0, "lr_decay": "step:1:0.5"},
    ),
    "Adam": ("fedavg+dbe", {"optimizer": "adam", "lr": 0.01}),
    "fixed order of batches": ("fedavg+dbe", {"batch_order": "fixed", "local_epochs": 2}),
    "whole test batches": ("fedavg+dbe", {"last_test_batch": "drop", "batch_size": 4}),
}  # fmt: skip
"""Options and hyperparameters that have their own random streams or arithmetic."""
HYPERPARAMETERS = {"pfedme": "pfedme(lr_p=0.01,eta=0.005)"}
"""Methods whose defaults depend on the model."""


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def golden_data(sizes: Sequence[int] = SIZES) -> Dataset:
    """Return digits in float64, for clients with these numbers of samples."""
    small = make_dataset(sizes)
    return replace(small, x=small.inputs(small.x).double())


def norms(state: State) -> dict[str, float]:
    """Return the norm of each tensor."""
    return {name: float(tensor.double().norm()) for name, tensor in sorted(state.items())}


def summarize(result: Outcome) -> dict[str, Any]:
    """Return the metrics of all rounds, each as the mean over samples, and the norms of the states."""
    rounds = []
    for round_result in result.rounds:
        metrics = {
            f"{'float32 ' if name in POOLED else ''}{moment} {name}": readings["weighted"]
            for moment, values in round_result["metrics"].items()
            for name, readings in values.items()
            if name in METRICS
        }
        rounds.append(metrics | {"accuracy": round_result["accuracy"]})
    clients = {str(client): norms(state) for client, state in sorted(result.clients.items())}
    return {"rounds": rounds, "server": norms(result.server), "clients": clients}


def train(name: str, model: str = "mlp", **options: Any) -> dict[str, Any]:
    """Return the summary of two rounds with three of five clients."""
    participation = 1.0 if name == "apple" else 0.6  # APPLE mixes the models of all clients
    settings = {"model": model, "participation": participation, "trainer": "autograd", **options}
    with float64(), tempfile.TemporaryDirectory() as folder:
        return summarize(run_outcome(experiment(name, golden_data(), **settings), Path(folder)))


def hash_arrays(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).astype("<i8").tobytes() + b"|")
    return digest.hexdigest()


def partitions() -> dict[str, str]:
    """Return hashes of the indices of each client in digits."""
    dataset = digits.load()
    hashes = {}
    for spec in ("iid", "dirichlet:0.1", "dirichlet:1", "pathological:2"):
        for seed in (1, 2):
            split = partition(dataset.y.numpy(), spec, 20, seed)
            hashes[f"{spec} seed {seed}"] = hash_arrays(*split.train, *split.test)
    small = make_dataset(SIZES)
    natural = partition(small.y.numpy(), "natural", None, 1, client=small.client)
    return hashes | {"natural": hash_arrays(*natural.train, *natural.test)}


def choices() -> dict[str, Any]:
    """Return cohorts, batch orders and the shift of each client."""
    batches = Batches(digits.load(), np.arange(57), 10, 2, 3, 4, 5)
    return {
        "cohorts": [seeds.sample_cohort(7, round_, 20, 0.3) for round_ in range(1, 4)],
        "cohort of a million": hash_arrays(seeds.sample_cohort(7, 1, 1_000_000, 0.01)),
        "batch order": hash_arrays(*(y for _, y, _ in batches.iterate())),
        "key": batches.key,
        "shift": shift.draw_client_shifts("rotate:30,blur,noise,invert", 8, 3),
    }


def shifted_images() -> dict[str, str]:
    """Return hashes of images after each kind of shift."""
    dataset = digits.load()
    split = partition(dataset.y.numpy(), "iid", 4, 1)
    hashes = {}
    for kind in ("rotate:30", "blur", "noise", "contrast", "invert"):
        hashes[kind] = hash_arrays(shift.shift_images(dataset, split, kind, 5).x.numpy())
    return hashes


def representations() -> dict[str, Any]:
    """Return the analyses of fixed points.

    The layout of t-SNE depends on the processor, so that only its samples are hashed.
    """
    rng = np.random.RandomState(3)
    y, client = np.arange(240) % 4, np.arange(240) // 60
    points = make_points(rng.normal(size=(240, 6)) + y[:, None] + 0.5 * client[:, None], y, client)
    probes = mdl(points, settings=Settings(seeds=2, sizes=3, steps=60, hidden=16, lr=0.01))
    between = discrepancy(points, seed=4, most=20).mean_over_clients()
    embedding = tsne(points, seed=1, n=60)
    return {
        "probe": linear_probe(points, 2),
        "mdl sizes": list(probes.sizes),
        "float32 mdl": probes.nats,
        "float32 discrepancy": between,
        "tsne": hash_arrays(embedding.y, embedding.client),
    }


def proposals() -> list[Any]:
    """Return the values that `tune` tries."""
    options = {"data": "digits", "partition": "iid", "clients": 3, "rounds": 1, "model": "mlp"}
    with tempfile.TemporaryDirectory() as folder:
        request = parse_options(["fedavg+dbe"], {**options, "out": folder})
        search = tune(request, trials=5, space=["kappa=0.5,2,8", "lr=0.05,0.1,0.2"])
    return [trial.values for trial in search.trials]


def pooled_samples() -> dict[str, Any]:
    """Return a metric of representations where a client has more test samples than are pooled."""
    options = {"rounds": 1, "model": "mlp", "metrics": "accuracy,drift", "trainer": "autograd"}
    with float64(), tempfile.TemporaryDirectory() as folder:
        return summarize(run_outcome(experiment("fedavg", golden_data((600, 60)), **options), Path(folder)))


COMPUTED: dict[str, Callable[[], Any]] = {
    "partitions": partitions,
    "choices": choices,
    "shifted images": shifted_images,
    "representations": representations,
    "proposals": proposals,
    "pooled samples": pooled_samples,
}


def names() -> list[str]:
    """Return the names of all golden values."""
    trained = [f"{name} with {model}" for name in COMBINATIONS for model in MODELS]
    return [*COMPUTED, *trained, *VARIED]


def compute(name: str) -> Any:
    """Return one golden value as JSON represents it."""
    if name in COMPUTED:
        value = COMPUTED[name]()
    elif name in VARIED:
        method, options = VARIED[name]
        value = train(method, **options)
    else:
        method, _, model = name.rpartition(" with ")
        value = train(HYPERPARAMETERS.get(method, method), model)
    return json.loads(json.dumps(value))


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(compute(name), sort_keys=True)}" for name in sorted(names())]
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
